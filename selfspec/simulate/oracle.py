"""What could have been gained by whoever knew beforehand which drafts are right.

Liu et al. 2026 ("Speculative Decoding: Performance or Illusion?", https://arxiv.org/abs/2601.11580)
bound adaptive drafting so. Their best of two drafters is charged the cheaper one's time for both;
here each draft is charged its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from selfspec.simulate.times import Times, WhatIf

if TYPE_CHECKING:
    from selfspec.simulate.traces import Draft, Request, Trace

TOGETHER = "together"


def oracle(
    trace: Trace, what_if: WhatIf | None = None, branches: bool = False
) -> dict[str, list[float]]:
    """Seconds of every request, if at every step the best draft of the best size is made.

    The oracle knows how far every draft is right. It chooses a drafter, or none, and how much of
    the draft to verify: the most probable nodes, by what the drafter said, up to the last one that
    is accepted. It pays for the draft it chose, down to that depth, and for none else.

    Args:
        trace: Of every position.
        what_if: Conditions; None: those of the trace.
        branches: Whether it also knows which branch of a tree is right, and verifies no other. Such
            an oracle knows more than when to trust which drafter: it knows the text.

    Returns:
        Seconds [requests], the prompt's included: of "plain" decoding, of every drafter alone, and
        of all of them "together".

    Raises:
        ValueError: If the trace is not of every position, or has timed too little.
    """
    times = Times(trace, what_if or WhatIf())
    requests = trace.every_position
    found = {"plain": [r.prefill + plain_after_prompt(r, times) for r in requests]}
    names = trace.drafters
    for name, of in [*((name, [name]) for name in names), (TOGETHER, names)]:
        found[name] = [r.prefill + _least(r, of, times, branches) for r in requests]
    return found


def plain_after_prompt(request: Request, times: Times) -> float:
    """Seconds of all tokens but the first, one by one."""
    return times.plain(request.context(1), request.context(len(request.tokens) - 1))


def _least(request: Request, names: Sequence[str], times: Times, branches: bool) -> float:
    """Seconds of the best way through the tokens after the first."""
    end = len(request.tokens)
    least = np.zeros(end + 1)
    for at in range(end - 1, 0, -1):
        context = request.context(at)
        best = times.verify(1, context) + least[at + 1]
        rest = request.tokens[at:]
        for name in names:
            draft = request.drafts[at].get(name)
            if draft is None:
                continue
            for depth, nodes in enumerate(_sizes(draft, rest, times.what_if, branches), 1):
                verifying = times.verify(1 + nodes, context) * (1 - draft.shared)
                seconds = times.draft(draft, depth) + verifying
                best = min(best, seconds + least[min(at + depth + 1, end)])
        least[at] = best
    return float(least[1])


def _sizes(draft: Draft, text: Sequence[int], what_if: WhatIf, branches: bool) -> list[int]:
    """Draft tokens to verify so that 1, 2, ... are accepted."""
    right = draft.right(text)[: what_if.max_draft_tokens]
    if branches:
        sizes = list(range(1, len(right) + 1))
    else:
        expected = draft.nodes.expected
        count = len(draft.nodes.tokens)
        order = range(1, count)
        if expected is not None:
            order = sorted(order, key=lambda node: -expected[node])  # type: ignore[assignment]
        place = {node: at for at, node in enumerate(order, 1)}
        sizes = np.maximum.accumulate([place[node] for node in right]).tolist() if right else []
    most = what_if.max_nodes
    return sizes if most is None else [size for size in sizes if size <= most]
