"""Steps as the loop reports them, scripted."""

from __future__ import annotations

from selfspec.step import Step


def step(
    nodes: int,
    accepted: int,
    seconds: float,
    batch: int = 1,
    draft_seconds: float = 0.0,
    is_prefill: bool = False,
) -> Step:
    """One of a chain of `nodes` nodes a row, verified in `seconds`."""
    return Step(
        tokens=[[1] * (accepted + 1) for _ in range(batch)],
        num_drafted=[nodes - 1] * batch,
        num_accepted=[accepted] * batch,
        draft_depth=[nodes - 1] * batch,
        num_nodes=nodes,
        moved=False,
        is_prefill=is_prefill,
        seconds={"draft": draft_seconds, "verify": seconds},
    )
