"""Times of launches: medians of graph replays over inputs that are not in the level-2 cache."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

# More than the level-2 cache of any card that the tables have rows for.
COLD_BYTES = 120_000_000
_MOST_COPIES = 64
_SAMPLES = 50

Launch = Callable[[], object]


def copies(bytes_read: int) -> int:
    """How many sets of inputs to rotate, so that a set is gone from the cache at its next turn."""
    return min(_MOST_COPIES, 1 + COLD_BYTES // max(bytes_read, 1))


class Clock:
    """Measures on one device.

    Args:
        device: A CPU runs everything a few times, for the sake of running it.
        seconds: What may be spent in all; what comes later is left out and says so.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self.deadline = time.monotonic() + seconds

    @property
    def is_late(self) -> bool:
        """Whether the time is spent."""
        return time.monotonic() > self.deadline

    def measure(
        self, make: Callable[[], Sequence[Launch]], *, graph: bool = True
    ) -> dict[str, Any]:
        """Time a launch, or say why that was not possible.

        Args:
            make: Gives calls that do the same with different inputs; may compile.
            graph: Whether to capture them in one CUDA graph, which leaves the host out.

        Returns:
            {"us": median time of one call, "low", "high": 20th and 80th percentile, "graph": ...}
            or {"error": ...}.
        """
        if self.is_late:
            return {"error": "left out: no time"}
        try:
            with torch.inference_mode():
                launches = make()
                if self.device.type != "cuda":
                    return self._on_cpu(launches)
                return self._on_gpu(launches, graph)
        except Exception as error:  # a peer may be missing, or fail in ways of its own
            reason = str(error).strip().split("\n")[0]
            return {"error": f"{type(error).__name__}: {reason}"[:200]}
        finally:
            if self.device.type == "cuda":
                gc.collect()
                torch.cuda.synchronize()
                torch.cuda.empty_cache()

    def _on_cpu(self, launches: Sequence[Launch]) -> dict[str, Any]:
        def sample() -> float:
            start = time.perf_counter()
            for launch in launches[:2]:
                launch()
            return 1e6 * (time.perf_counter() - start) / len(launches[:2])

        return _summary([sample() for _ in range(2)], graph=False)

    def _on_gpu(self, launches: Sequence[Launch], graph: bool) -> dict[str, Any]:
        for _ in range(3):
            for launch in launches[:2]:
                launch()
        torch.cuda.synchronize()
        why = "not asked for"
        if graph:
            try:
                _check_waits_for_nothing(launches[0])
                return {**_events([_captured(launches)], len(launches)), "graph": True}
            except Exception as error:
                torch.cuda.synchronize()
                why = str(error).strip().split("\n")[0][:200]
                # A capture that broke off leaves the generator of random numbers believing that it
                # goes on; one that ends well tells it otherwise.
                _captured([lambda: torch.zeros(1, device=self.device)])
        return {**_events(launches, 1), "graph": False, "why": why}


def _check_waits_for_nothing(launch: Launch) -> None:
    """Refuse what reads back to the host before a capture is begun that it would break."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _captured(launches: Sequence[Launch]) -> Launch:
    """One graph of all launches; every input has been used before, as some ops require."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [launch() for launch in launches]

    def replay(graph: Any = graph, kept: Any = kept) -> None:
        graph.replay()

    return replay


def _events(launches: Sequence[Launch], calls: int) -> dict[str, Any]:
    """Microseconds a call, when every launch stands for `calls` of them."""
    pairs = []
    launches[0]()
    for i in range(_SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launches[i % len(launches)]()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return _summary([1e3 * start.elapsed_time(end) / calls for start, end in pairs])


def _summary(samples: list[float], **more: Any) -> dict[str, Any]:
    ordered = sorted(samples)
    return {
        "us": median(ordered),
        "low": ordered[len(ordered) // 5],
        "high": ordered[-1 - len(ordered) // 5],
        **more,
    }


def copy_bandwidth(clock: Clock, size: int = 2**30) -> float | None:
    """Bytes a second that a plain device copy reads and writes, both counted."""
    if clock.device.type != "cuda":
        size = 2**20
    source = torch.empty(size, dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    result = clock.measure(lambda: [lambda: target.copy_(source)])
    return 2 * size / (1e-6 * result["us"]) if "us" in result else None
