"""Acceptance that is almost right: what proves the rules must notice every known mistake.

First in fractions, where the rules and the drafting around them are spelt out and broken in one
place; then in the library itself, by the frequencies of what it emits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from selfspec_kernels import philox
from selfspec_kernels.tree_accept import reference
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

import selfspec
from selfspec import TokenTree
from selfspec.accept import accept
from selfspec.drafters import draw as drawing
from selfspec.drafters import early_exit, partial
from selfspec.sampling import Sampler
from tests import test_accept
from tests.families import tiny
from tests.generate.test_drawn_drafts import HOT, next_law
from tests.ops import acceptance_oracle
from tests.ops.acceptance_cases import MOST
from tests.ops.acceptance_oracle import Law, Pair, Prefix, continued

RULES = ("traversal", "multiround")
ALL: Prefix = ()

# --------------------------------------------------------------- exactly, in fractions


def normalised(weights: Law) -> Law:
    return [weight / sum(weights) for weight in weights]


class Cold(Pair):
    """Target and draft at half the temperature."""

    def p(self, prefix: Prefix) -> Law:
        return normalised([a * a for a in super().p(prefix)])

    def q(self, prefix: Prefix) -> Law:
        return normalised([a * a for a in super().q(prefix)])

    def p_before(self, prefix: Prefix) -> Law:
        return super().p(prefix)

    def q_before(self, prefix: Prefix) -> Law:
        return super().q(prefix)


class TopTwo(Cold):
    """Of each, the two likeliest tokens."""

    def p(self, prefix: Prefix) -> Law:
        return top_two(self.p_before(prefix))

    def q(self, prefix: Prefix) -> Law:
        return top_two(self.q_before(prefix))


def top_two(weights: Law) -> Law:
    kept = sorted(range(len(weights)), key=lambda x: -weights[x])[:2]
    return normalised([a if x in kept else Fraction(0) for x, a in enumerate(weights)])


class Rounded(Cold):
    """The draft's law as bfloat16 holds it; what was rounded is near, but is not it."""

    def p(self, prefix: Prefix) -> Law:
        return self.p_before(prefix)

    def q(self, prefix: Prefix) -> Law:
        exact = torch.tensor([float(a) for a in self.q_before(prefix)])
        return normalised([Fraction(a) for a in exact.bfloat16().tolist()])


class Likeliest(Cold):
    """A draft that takes its likeliest token and has probabilities at hand."""

    def p(self, prefix: Prefix) -> Law:
        return self.p_before(prefix)

    def q(self, prefix: Prefix) -> Law:
        before = self.q_before(prefix)
        return [Fraction(x == before.index(max(before))) for x in range(len(before))]


@dataclass(frozen=True)
class Trap:
    """One mistake, as a change of the oracle's source, and where it shows."""

    changes: dict[str, str] = field(hash=False)
    shape: tuple[int, ...] = (1, 1)
    rules: tuple[str, ...] = RULES
    pair: type[Pair] = Pair
    vocabulary: int = 3
    sure: Fraction = Fraction(0)
    harmless: tuple[str, ...] = ()  # rules that it leaves exact


def broken(changes: dict[str, str]) -> ModuleType:
    source = inspect.getsource(acceptance_oracle)
    for old, new in changes.items():
        assert source.count(old) == 1, f"the oracle has {source.count(old)} times: {old}"
        source = source.replace(old, new)
    module = ModuleType("broken_oracle")
    exec(compile(source, module.__name__, "exec"), vars(module))
    return module


def exact(oracle: Any, trap: Trap, rule: str) -> bool:
    """Whether the text of every pair has the target's law."""
    for seed in range(8):
        pair = trap.pair(seed, trap.vocabulary)
        length = min(3, len(trap.shape) + 1)
        settings = {"pair": pair, "shape": trap.shape, "rule": rule, "sure": trap.sure}
        outputs = oracle.enumerated(functools.partial(oracle.text, length=length, **settings))
        if outputs != continued({ALL: Fraction(1)}, pair.p, length):
            return False
    return True


@functools.cache
def exact_as_it_is(trap: Trap, rule: str) -> bool:
    return exact(acceptance_oracle, trap, rule)


UNSURE = Fraction(2, 5)
KEPT = "for x in drawn:\n"
REPORTED = "[pair.q(prefix) for prefix in prefixes]"
RAW_Q = {REPORTED: "[pair.q_before(prefix) for prefix in prefixes]"}
COIN = 'number("coin", at, node)'
DRAFT = 'number("draft", at, len(tokens) + len(drawn))'
NEXT = 'number("residual", at + len(path), 0)'
ROWS_OF_P = "p, q = [pair.p(prefix) for prefix in prefixes]"
RESIDUAL = "[max(r * a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]"

TRAPS = {
    # Drafting: what may depend on a drawn token, and what is reported.
    "an unsure token is thrown away": Trap(
        {KEPT: "for x in [x for x in drawn if law[x] >= sure]:\n"}, sure=UNSURE
    ),
    "of drawn siblings the likelier one is kept": Trap(
        {KEPT: "for x in sorted(drawn, key=lambda x: -law[x])[:1]:\n"}, (2,)
    ),
    "drawn siblings are tried by their q": Trap(
        {KEPT: "for x in sorted(drawn, key=lambda x: -law[x]):\n"}, (2,)
    ),
    "q from before the temperature": Trap(RAW_Q, (1,), pair=Cold),
    "q from before top-k": Trap(RAW_Q, (1,), pair=TopTwo),
    "q from before it was rounded": Trap(RAW_Q, (1,), pair=Rounded),
    "q of a token that was not drawn": Trap(RAW_Q, pair=Likeliest),
    # Random numbers that serve twice.
    "one number draws a token and is its coin": Trap({COIN: 'number("draft", at, node)'}, (1,)),
    "one number is a coin and draws what follows": Trap({NEXT: 'number("coin", at, 1)'}, (1,)),
    "one coin for all nodes": Trap({COIN: 'number("coin", at, 0)'}),
    "draft noise by node, the same in every step": Trap(
        {DRAFT: 'number("draft", 0, len(tokens) + len(drawn))'}, vocabulary=2
    ),
    "coins by node, the same in every step": Trap({COIN: 'number("coin", 0, node)'}, vocabulary=2),
    # Harmless where no token is looked at behind the first that is rejected.
    "coins by the place of the token in the text": Trap(
        {COIN: 'number("coin", len(prefixes[node]), 0)'}, vocabulary=2, harmless=("multiround",)
    ),
    "draft noise by the place of the token in the text": Trap(
        {DRAFT: 'number("draft", len(prefixes[node]), 0)'}, vocabulary=2, harmless=("multiround",)
    ),
    "what follows is drawn by the same number in every step": Trap(
        {NEXT: 'number("residual", 0, 0)'}
    ),
    # Acceptance.
    "siblings by a q that is not normalised again": Trap(
        {"[b / total for b in left] if total else left": "left"}, (2,)
    ),
    "siblings by the q of the first": Trap({"Fraction(0) if y == x else b": "b"}, (2,)),
    "a rejected sibling can still be drawn": Trap(
        {RESIDUAL: "[max(r * a - b * (y != x), 0) for y, (a, b) in enumerate(zip(p, q))]"}, (2,)
    ),
    "a rejected token is struck out of p": Trap(
        {RESIDUAL: "[a * (y != x) for y, a in enumerate(p)]"}, (1,)
    ),
    "block verification ends at the first reject": Trap(
        {"            if emitted:\n":
         "            level = failed(r, here_p, here_q, tokens[child])[0]\n"
         "            if emitted and (len(path) == 1 or tossed(path[-1], level)):\n"},
        rules=("traversal",),
    ),
    "block verification by the levels of single tokens": Trap(
        {"child], chance(r, here_p": "child], chance(Fraction(1), here_p"}, rules=("traversal",)
    ),
    "block verification with the residual of single tokens": Trap(
        {"max(r * a - b, Fraction(0))": "max(a - b, Fraction(0))"}, rules=("traversal",)
    ),
    "the token after the last draft is drawn a row too early": Trap(
        {ROWS_OF_P: "p, q = [pair.p(prefix[: at + len(shape) - 1]) for prefix in prefixes]"}, (1,)
    ),
    "the token after the last draft is drawn before the temperature": Trap(
        {ROWS_OF_P: "p, q = [(pair.p if len(prefix) < at + len(shape) else pair.p_before)(prefix)"
         " for prefix in prefixes]"}, (1,), pair=Cold
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_exact_enumeration_notices(name: str) -> None:
    trap = TRAPS[name]
    oracle = broken(trap.changes)
    for rule in trap.rules:
        assert exact_as_it_is(replace(trap, changes={}, rules=(), harmless=()), rule)
        assert exact(oracle, trap, rule) is (rule in trap.harmless), rule


@pytest.mark.parametrize("rule", RULES)
def test_stopping_behind_a_token_that_is_kept_is_exact(rule: str) -> None:
    assert exact(acceptance_oracle, Trap({}, (1, 1, 1), sure=UNSURE), rule)


# --------------------------------------------------------------- the library, by frequencies

ROWS = 30_000
LENGTH = 3
SIZE = 5
WARPERS = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(4)])
# Row x: logits after token x, of the target and of the draft.
TARGET, DRAFT = torch.randn(2, SIZE, SIZE, generator=torch.Generator().manual_seed(3))
# Two tokens one after the other, then a sibling of each.
PARENTS, DEPTH = [-1, 0, 1, 0, 1], torch.tensor([0, 1, 2, 1, 2])


def state(positions: list[int], sampler: Any = None) -> Any:
    """As much of a DecodeState as drawing and acceptance read."""
    return SimpleNamespace(
        sampler=sampler,
        batch=len(positions),
        frozen=[False] * len(positions),
        positions=lambda: positions,
    )


def tree_of(tokens: list[int], parents: list[int], rows: int) -> TokenTree:
    """The same in every row."""
    tree = TokenTree.from_topology(torch.tensor([tokens]), parents)
    wide = {
        name: getattr(tree, name).expand(rows, *getattr(tree, name).shape[1:])
        for name in ("tokens", "parents", "depth", "ancestors", "num_nodes")
    }
    return replace(tree, **wide)


def texts(rule: Any, branches: int) -> torch.Tensor:
    """int64 [ROWS, LENGTH], emitted step by step behind a token 0."""
    torch.manual_seed(0)
    sampler = Sampler(WARPERS, True, rule=rule)
    shape = tree_of([0] * 5, PARENTS, ROWS) if branches == 2 else None
    rows = torch.arange(ROWS)
    text = torch.zeros(ROWS, 1 + 4 * LENGTH, dtype=torch.int64)
    count = torch.zeros(ROWS, dtype=torch.int64)
    while int(count.min()) < LENGTH:
        now = state(count.tolist(), sampler)
        chain = text[rows, count][:, None]
        siblings, log_q = [], []
        for _ in range(2):
            ids, q = drawing.draw(now, DRAFT[chain[:, -1]], chain[:, 1:], branches)
            chain = torch.cat([chain, ids[:, :1]], 1)
            siblings.append(ids[:, 1:])
            log_q.append(q)
        tokens = torch.cat([chain, *siblings], 1)
        log_q += [torch.full_like(q, float("nan"))] * (tokens.shape[1] - 2)
        q = torch.stack(log_q, 1)
        if shape is None:
            tree = TokenTree.chain(chain[:, 0], chain[:, 1:], log_q=q)
        else:
            tree = replace(shape, tokens=tokens, log_q=q, max_children=2)
        out = accept(tree, TARGET[tokens], sampler, now)
        for place in range(1, out.path.shape[1]):
            there = out.path[:, place] >= 0
            text[rows[there], count[there] + place] = tokens[rows, out.path[:, place].long()][there]
        count = count + out.num_accepted + 1
        text[rows, count] = out.next_token
    return text[:, 1 : 1 + LENGTH]


def chi_square(rule: str = "traversal", branches: int = 1) -> float:
    """Of the text against the target's law, with at most 63 degrees of freedom."""
    weights = torch.tensor([SIZE**2, SIZE, 1])
    counts = torch.bincount((texts(rule, branches) * weights).sum(1), minlength=SIZE**LENGTH)
    p = Sampler(WARPERS, True).scores(TARGET).double().softmax(-1)
    expected = ROWS * (p[0][:, None, None] * p[:, :, None] * p[None]).flatten()
    assert not counts[expected == 0].any()
    common = expected > 5  # rarer ones add more than they tell
    counts, expected = counts[common], expected[common]
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_text_of_several_steps_has_the_targets_law(rule: str, branches: int) -> None:
    assert chi_square(rule, branches) < MOST


uniform, exponential, draw = philox.uniform, philox.exponential, drawing.draw


def raw_q(state: Any, logits: Any, drafted: Any, count: int) -> Any:
    return draw(state, logits, drafted, count)[0], logits.log_softmax(-1)


def by_rank(state: Any, logits: Any, drafted: Any, count: int) -> Any:
    ids, log_q = draw(state, logits, drafted, count)
    return ids.gather(1, log_q.gather(1, ids).argsort(1, descending=True)), log_q


MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "draft noise by depth alone": (
        drawing,
        "exponential",
        lambda seed, vocab, at, stream, node: exponential(seed, vocab, at * 0, stream, node),
    ),
    "draft noise by the place of the token": (
        drawing,
        "exponential",
        lambda seed, vocab, at, stream, node: exponential(seed, vocab, at + node, stream, 1),
    ),
    "one number draws a token and is its coin": (
        drawing,
        "exponential",
        lambda seed, vocab, at, stream, node: exponential(seed, vocab, at, philox.ACCEPT, 0),
    ),
    "coins by node alone": (
        reference,
        "uniform",
        lambda seed, node, at, stream: uniform(seed, node, at * 0, stream),
    ),
    "coins by the place of the token": (
        reference,
        "uniform",
        lambda seed, node, at, stream: uniform(seed, node * 0, at + DEPTH[node], stream),
    ),
    "what follows by the same number in every step": (
        reference,
        "exponential",
        lambda seed, vocab, at, stream: exponential(seed, vocab, at * 0, stream),
    ),
    "q from before the processors": (drawing, "draw", raw_q),
    "drawn siblings are tried by their q": (drawing, "draw", by_rank),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_frequencies_notice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    assert chi_square(branches=1 + ("siblings" in name)) > MOST


def excess(confidence: float, rows: int = 1000) -> float:
    """How much too often the second token of a text is a likely one, in standard deviations."""
    model, prompt = tiny.build("llama"), tiny.prompts(1)["input_ids"].expand(rows, -1)
    spec = selfspec.wrap(model, selfspec.EarlyExitDrafter(4, 3, confidence, do_sample=True))
    torch.manual_seed(0)
    settings = {"do_sample": True, "temperature": HOT, "top_k": 0, "pad_token_id": 0}
    out = spec.generate(prompt, max_new_tokens=4, eos_token_id=None, **settings)
    prefixes, where = out[:, : prompt.shape[1] + 1].unique(dim=0, return_inverse=True)
    laws = next_law(model, prefixes)[where]
    likely = laws >= confidence
    chances = (laws * likely).sum(1)
    hits = likely.gather(1, out[:, prompt.shape[1] + 1, None])[:, 0]
    return float((hits.double() - chances).sum() / (chances * (1 - chances)).sum().sqrt())


def test_frequencies_notice_a_drafter_that_throws_unsure_tokens_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule of `draft_chain`, applied before a token is kept instead of after."""
    source = inspect.getsource(partial)
    grow = "        num_nodes = num_nodes + growing\n"
    unsure = "growth.after(best, growing)\n"
    assert source.count(grow) == source.count(unsure) == 1
    changed = ModuleType("changed")
    exec(source.replace(grow, "").replace(unsure, f"{unsure}    {grow}"), vars(changed))
    assert abs(excess(0.05)) < 4
    monkeypatch.setattr(early_exit, "draft_chain", changed.draft_chain)
    assert excess(0.05) > 8


def test_swapped_thresholds_of_typical_acceptance_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.accept.EPSILON", 0.3)
    monkeypatch.setattr("selfspec.accept.DELTA", 0.09)
    with pytest.raises(AssertionError):
        test_accept.test_b18_typical_acceptance_keeps_what_is_likely_enough(seed=5)
