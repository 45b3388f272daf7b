"""The controller itself, on drafts and times of a trace: what it decides, and what comes of it.

The very code that decides in `generate` runs: the choice among the drafts of all drafters, sizes by
measured time, the off switch. Only drafts, the target and the clock are the trace's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from selfspec.controller import Controller, FixedBudget, OffSwitch
from selfspec.costs import StepCosts
from selfspec.drafters.combined import CombinedDrafter
from selfspec.simulate.oracle import plain_after_prompt
from selfspec.simulate.times import Times, WhatIf
from selfspec.step import Step
from selfspec.tree import TokenTree
from selfspec.tree_rows import Nodes

if TYPE_CHECKING:
    from selfspec.simulate.traces import Draft, Request, Trace


@dataclass(frozen=True)
class Replayed:
    """What became of one batch of requests.

    Attributes:
        requests: Which, by their number among the trace's requests of every position.
        seconds: What they would have taken, the prompts included.
        plain_seconds: Likewise by plain decoding.
        tokens: That they gave, of all rows.
        steps: Target forwards, the prompts' not counted.
        drafted: Draft tokens that were verified, of all rows.
    """

    requests: list[int]
    seconds: float
    plain_seconds: float
    tokens: int
    steps: int
    drafted: int

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.plain_seconds / self.seconds


def replay(
    trace: Trace,
    drafters: Sequence[str] | None = None,
    what_if: WhatIf | None = None,
    off_switch: bool = True,
) -> list[Replayed]:
    """Decode the requests of a trace anew, in their order, by the controller.

    It starts without any measurement and learns from request to request, as a wrapper does.

    Args:
        trace: Of every position.
        drafters: Which of the trace's; None: all of them.
        what_if: Conditions; None: those of the trace. With a batch, as many requests are decoded
            together, the last ones with less; all get the prompt's time of the longest.
        off_switch: Whether drafting stops while it does not pay.

    Returns:
        Of every batch.

    Raises:
        ValueError: If the trace is not of every position, has timed too little, or has no such
            drafter.
    """
    what_if = what_if or WhatIf()
    names = list(trace.drafters if drafters is None else drafters)
    if unknown := [name for name in names if name not in trace.drafters]:
        raise ValueError(
            f"drafters: the trace has no {', '.join(unknown)}; it has {', '.join(trace.drafters)}."
        )
    times, requests = Times(trace, what_if), trace.every_position
    costs = _Costs(what_if.max_nodes)
    found = []
    for first in range(0, len(requests), what_if.batch):
        picked = list(range(first, min(first + what_if.batch, len(requests))))
        rows = [requests[at] for at in picked]
        parts = [type(name, (_Recorded,), {})(name, rows, times, costs) for name in names]
        drafter = CombinedDrafter(parts)
        most = what_if.max_draft_tokens
        controller: Controller = FixedBudget(most)
        if off_switch:
            controller = OffSwitch(costs, most, sizes_itself=True)
        found.append(_decode(picked, rows, drafter, controller, costs, times))
    return found


def _decode(
    picked: list[int],
    rows: list[Request],
    drafter: CombinedDrafter,
    controller: Controller,
    costs: _Costs,
    times: Times,
) -> Replayed:
    state: Any = _State(rows, costs)
    prefill = max(row.prefill for row in rows)
    seconds, steps, drafted = prefill, 0, 0
    while not all(state.frozen):
        start = costs.seconds
        budget = min(controller.budget(state), max(map(state.room, range(state.batch))) - 1)
        tree = drafter.draft(state, budget) if budget > 0 else TokenTree.root_only(state.root)
        took = costs.seconds - start
        context = state.context
        step = state.step(tree, {"draft": took, "verify": times.verify(tree.width, context)})
        state.advance(step.tokens)
        drafter.observe(state, *_NOTHING)
        costs.record(step, context)
        controller.observe(step)
        seconds += sum(step.seconds.values())
        steps += 1
        drafted += sum(n for n, new in zip(step.num_drafted, step.tokens, strict=True) if new)
    plain = prefill + plain_after_prompt(max(rows, key=lambda row: len(row.tokens)), times)
    return Replayed(picked, seconds, plain, sum(len(r.tokens) for r in rows), steps, drafted)


_NOTHING: Any = (None, None)  # an output and an acceptance that nobody reads


class _Costs(StepCosts):
    """By the clock of the simulation, and with trees of a given size at most."""

    def __init__(self, max_nodes: int | None) -> None:
        super().__init__()
        self.seconds = 0.0
        self.now = lambda: self.seconds
        self._max_nodes = max_nodes

    def choose(self, batch: int, probable: Sequence[float], first: int = 0) -> int:
        return super().choose(batch, probable[: self._max_nodes], first)


class _Recorded:
    """A drafter that drafts what was recorded."""

    hidden_taps: Sequence[int] = ()
    makes_valid_trees = True

    def __init__(self, name: str, rows: list[Request], times: Times, costs: _Costs) -> None:
        self._name, self._rows, self._times, self._costs = name, rows, times, costs

    def draft(self, state: Any, budget: int) -> TokenTree:
        drafts: list[Draft | None] = []
        for b, row in enumerate(self._rows):
            at = state.length[b]
            over = state.frozen[b] or at >= len(row.drafts)
            drafts.append(None if over else row.drafts[at].get(self._name))
        # Rows that were recorded one by one draft together.
        self._costs.seconds += max(
            (self._times.draft(draft, draft.depth) for draft in drafts if draft), default=0.0
        )
        rows = [
            _cut(draft.nodes, budget) if draft else Nodes([token], [-1], [1.0])
            for draft, token in zip(drafts, state.root.tolist(), strict=True)
        ]
        if any(row.expected is None for row in rows):
            rows = [Nodes(row.tokens, row.parents, None) for row in rows]
        return TokenTree.from_rows(state.root, rows)

    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""


def _cut(nodes: Nodes, depth: int) -> Nodes:
    """The nodes that are no deeper."""
    depths, kept, place = [0], [0], {0: 0}
    for node in range(1, len(nodes.tokens)):
        depths.append(depths[nodes.parents[node]] + 1)
        if depths[node] <= depth:
            place[node] = len(kept)
            kept.append(node)
    return Nodes(
        [nodes.tokens[node] for node in kept],
        [-1, *(place[nodes.parents[node]] for node in kept[1:])],
        nodes.expected and [nodes.expected[node] for node in kept],
    )


class _State:
    """What drafters read of a `DecodeState`; positions are those of the texts."""

    def __init__(self, rows: list[Request], costs: StepCosts) -> None:
        self._rows = rows
        self._texts = [row.tokens for row in rows]
        self.costs = costs
        self.batch = len(rows)
        support = rows[0].about["support"]
        self.target = SimpleNamespace(architecture=SimpleNamespace(support=support))
        self.length = [1] * self.batch  # the prompt gave the first token
        self.frozen = [len(text) <= 1 for text in self._texts]

    @property
    def root(self) -> torch.Tensor:
        pairs = zip(self._texts, self.length, strict=True)
        return torch.tensor([text[length - 1] for text, length in pairs])

    @property
    def context(self) -> int:
        """Of the longest text."""
        pairs = zip(self._rows, self.length, strict=True)
        return max(row.context(length) for row, length in pairs)

    def of_a_pool(self) -> _State:
        view = object.__new__(_State)
        view.__dict__.update(self.__dict__, costs=self.costs.of_a_pool())
        return view

    def room(self, b: int) -> int:
        return 0 if self.frozen[b] else len(self._texts[b]) - self.length[b]

    def ending(self, b: int, count: int) -> list[int]:
        return self._texts[b][max(self.length[b] - count, 0) : self.length[b]]

    def step(self, tree: TokenTree, seconds: dict[str, float]) -> Step:
        """What verifying a tree gives."""
        tokens: list[list[int]] = []
        accepted = []
        rows = tree.rows()
        for b, nodes in enumerate(rows):
            children = {(nodes.parents[n], nodes.tokens[n]): n for n in range(1, len(nodes.tokens))}
            at, count = 0, 0
            rest = self._texts[b][self.length[b] : self.length[b] + self.room(b)]
            for token in rest[:-1]:
                child = children.get((at, token))
                if child is None:
                    break
                at, count = child, count + 1
            tokens.append(rest[: count + 1])
            accepted.append(count)
        return Step(
            tokens,
            [len(nodes.tokens) - 1 for nodes in rows],
            accepted,
            [tree.max_depth] * self.batch,
            tree.width,
            moved=False,
            is_prefill=False,
            seconds=seconds,
        )

    def advance(self, tokens: list[list[int]]) -> None:
        """Commit."""
        for b, new in enumerate(tokens):
            self.length[b] += len(new)
            self.frozen[b] = self.length[b] >= len(self._texts[b])
