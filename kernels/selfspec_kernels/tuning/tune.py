"""Choose rows of the table by measuring, on the GPU at hand, what the gate lets through.

A row is chosen by the geometric mean of its times over representative launches, each the median of
many, with the level-2 cache overwritten in between. A row of the table stays unless another beats
it by more than noise.
"""

from collections.abc import Callable, Iterator
from statistics import geometric_mean, median

import torch

from . import rows, using
from .problems import launches
from .search import Row, passing

# Less than this is noise, and not worth another row.
_GAIN = 0.02
_REPEATS = 50

Timer = Callable[[str, Row], float]
Sieve = Callable[[str, str, Row], Iterator[tuple[Row, object]]]


def tuned(
    op: str, part: str, timer: Timer, sieve: Sieve = passing
) -> Iterator[tuple[Row, Row, float]]:
    """For every row of the table: the row, the better one or itself, and the ratio of their times.

    Args:
        op: Which op.
        part: The part at hand.
        timer: Gives a time for an op and a row, in any unit; it runs with that row in use.
        sieve: Gives the candidates for what a row is for, as `search.passing` does.
    """
    for row in rows(op, part):
        now, best, chosen = float("inf"), float("inf"), row
        for candidate, _ in sieve(op, part, row):
            with using(op, part, [candidate]):
                time = timer(op, candidate)
            if candidate == row:
                now = time
            if time < best:
                best, chosen = time, candidate
        # A row that the gate no longer lets through has no time and gives way to any that has.
        yield (row, chosen, best / now) if best < now * (1 - _GAIN) else (row, row, 1.0)


def device_timer(device: torch.device) -> Timer:
    """A timer that runs the op on `device` and returns milliseconds."""
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device=device)

    def milliseconds(launch: Callable[[], object]) -> float:
        for _ in range(3):
            launch()
        pairs = []
        for _ in range(_REPEATS):
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return median(start.elapsed_time(end) for start, end in pairs)

    def timer(op: str, row: Row) -> float:
        return geometric_mean(milliseconds(launch) for launch in launches(op, row, device))

    return timer
