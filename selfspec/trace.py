"""What decoding did, step by step, as lines of JSON: written here, read by `selfspec.simulate`.

A line is an object with a "type":

- "request": who decodes what, with which drafters, in which batch;
- "step": one target forward: the tokens [rows][new] it gave, the nodes it ran, draft tokens and how
  many were accepted of every row, seconds by station; in a trace of every position also what each
  drafter drafted there: "drafter", "seconds", "shared" (the part of a verification that its layers
  have done) and "rows" of "tokens", "parents" and "expected" (root first, as in `TokenTree`);
- "end": what verification takes by number of nodes, as the wrapper has measured it so far.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from selfspec.controller import FixedBudget
from selfspec.drafters.combined import CombinedDrafter, names_of
from selfspec.drafters.every_position import EveryPosition

if TYPE_CHECKING:
    from selfspec.decode import Run
    from selfspec.request import Request
    from selfspec.step import Step
    from selfspec.target import Target

FORMAT = 1  # of the lines


class Tracer:
    """Writes the trace of all requests of a wrapper, whichever thread they come from.

    Args:
        file: Open for writing.
        every_position: Whether requests decode one token a step while all drafters draft.
        most: Longest draft, then.
    """

    def __init__(self, file: TextIO, every_position: bool, most: int) -> None:
        self._file = file
        self._most = most
        self._every_position = every_position
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    @contextmanager
    def follow(
        self,
        request: Request,
        target: Target,
        run: Run,
    ) -> Iterator[Run]:
        """Trace a request.

        Args:
            request: What is decoded.
            target: By which model.
            run: How it would be decoded.

        Yields:
            How it is to be decoded.
        """
        drafter, controller, costs, on_step = run
        model, support = target.model, target.architecture.support
        parts = drafter.drafters if isinstance(drafter, CombinedDrafter) else [drafter]
        every = EveryPosition(parts) if self._every_position else None
        number = next(self._numbers)
        self._write(
            type="request",
            request=number,
            format=FORMAT,
            model=type(model).__name__,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            threads=torch.get_num_threads(),
            batch=request.batch,
            prompt=request.input_ids.shape[1],
            do_sample=request.generation_config.do_sample,
            drafters=names_of(parts),
            support=support,
            every_position=self._every_position,
        )

        def write_step(step: Step) -> None:
            line = {
                "tokens": step.tokens,
                "nodes": step.num_nodes,
                "drafted": step.num_drafted,
                "accepted": step.num_accepted,
                "is_prefill": step.is_prefill,
                "drafter": step.drafter,
                "seconds": {station: round(s, 7) for station, s in step.seconds.items()},
            }
            if every is not None:
                line["drafts"] = every.take()
            self._write(type="step", request=number, **line)
            if on_step is not None:
                on_step(step)

        try:
            if every is None:
                yield drafter, controller, costs, write_step
            else:
                if not isinstance(controller, FixedBudget):
                    controller = FixedBudget(self._most)
                yield every, controller, costs.of_an_onlooker(), write_step
        finally:
            self._write(type="end", request=number, verify=costs.verify_points(request.batch))

    def _write(self, **line: Any) -> None:
        text = json.dumps(line)
        with self._lock:
            self._file.write(text + "\n")


@contextmanager
def tracing(spec: Any, path: str | PathLike[str], every_position: bool) -> Iterator[None]:
    """See `SpeculativeModel.trace`."""
    if getattr(spec, "_tracer", None) is not None:
        raise ValueError("trace: this wrapper is being traced already; end that trace first.")
    with Path(path).open("w", encoding="utf-8") as file:
        spec._tracer = Tracer(file, every_position, spec.options.max_draft_tokens)
        try:
            yield
        finally:
            spec._tracer = None
