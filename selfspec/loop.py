"""The speculative decoding loop: draft -> verify -> accept -> commit -> observe.

A drafter proposes a tree of tokens, the target runs all of it in one forward, acceptance keeps a
path, and the path with one token of the target's own is committed. The prefill is the first verify:
a tree of the root alone. Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; trees as in
Miao et al. 2024 (SpecInfer), https://arxiv.org/abs/2305.09781.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from selfspec.accept import accept
from selfspec.clock import Clock
from selfspec.propose import propose
from selfspec.step import Step, emit
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from selfspec.controller import Controller
    from selfspec.drafters.protocol import Drafter
    from selfspec.sampling import Sampler
    from selfspec.state import DecodeState, TargetOutput
    from selfspec.stopping import StopRules


def speculate(
    state: DecodeState,
    prompt: TargetOutput,
    verify: Callable[[TokenTree], TargetOutput],
    drafter: Drafter,
    controller: Controller,
    sampler: Sampler,
    stops: StopRules,
    clock: Clock,
) -> Iterator[Step]:
    """Decode until every row has ended.

    Args:
        state: The prompt, its cache and the target.
        prompt: Target output after the prompt.
        verify: Runs a tree through the target; may accept and commit keys and values as well.
        drafter: Proposes trees; a tree of the root alone makes a plain step.
        controller: Sets how many draft tokens a row may have.
        sampler: Processors, and whether to draw.
        stops: When rows end.
        clock: Holds the time of the prefill already.

    Yields:
        One `Step` per target forward, the prefill first.
    """
    tree, output, is_prefill = TokenTree.root_only(state.root), prompt, True
    del prompt  # its hidden states may be large
    while True:
        with clock("accept"):
            acceptance = output.acceptance or accept(tree, output.logits, sampler, state)
        with clock("commit"):
            step = emit(tree, output, acceptance, state, stops, sampler, is_prefill)
            state.commit(step.tokens, None if is_prefill else acceptance, moved=step.moved)
            stops.freeze(state)
            sampler.release(state)
        with clock("draft"):
            drafter.observe(state, output, acceptance)
        step = replace(step, drafter=type(drafter).__name__, seconds=clock.lap())
        state.costs.record(step, max(state.length))
        controller.observe(step)
        yield step
        if state.done:
            return

        with clock("draft"):
            budget = min(controller.budget(state), state.max_draft_tokens)
            tree = propose(drafter, state, budget)
        with clock("verify"):
            output, is_prefill = verify(tree), False
