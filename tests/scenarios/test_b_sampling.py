"""Area B, sampling: the law of the text, on models whose law is a table.

Every rule and drafter through `generate`, by frequencies; in exact fractions the rules are held to
it by `tests/ops/test_tree_accept_sampled.py` and `tests/test_acceptance_edges.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from selfspec_kernels.tree_accept import reference
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    set_seed,
)

import selfspec
from selfspec import TokenTree
from selfspec.accept import accept
from selfspec.sampling import Sampler
from tests.scenarios.tables import (
    FIRST,
    TableDrafter,
    V,
    counted,
    misfit,
    speaking,
    spoken,
    tables,
    worst,
)
from tests.test_accept import state

TARGET, DRAFT = tables()
P, Q = TARGET.softmax(-1), DRAFT.softmax(-1)
RULES = ("traversal", "multiround")
rules = pytest.mark.parametrize("rule", RULES)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def exit_drafter(**options: Any) -> selfspec.EarlyExitDrafter:
    """Draws from `DRAFT`, where a model has it as its first layer."""
    return selfspec.EarlyExitDrafter(1, 3, 0.0, do_sample=True, **options)


def deviation(stats: selfspec.SpecStats, rate: float) -> float:
    """Of the acceptance rate from what it should be, in standard deviations."""
    spread = (rate * (1 - rate) / stats.drafted) ** 0.5
    return abs(stats.acceptance_rate - rate) / spread


# ------------------------------------------------------------------- B1: what is emitted follows p


def test_b1_b21_text_has_the_targets_law() -> None:
    """By default, which on a chain is block verification: every three tokens of a text together.

    With the kinds and siblings below these are more than 200,000 draws.
    """
    spec = speaking(TARGET, TableDrafter(DRAFT))
    text = spoken(spec, 5000, 10)
    assert spec.stats.accepted > 15_000
    assert max(worst(text, P, length) for length in (1, 2, 3)) < 1


@pytest.mark.parametrize(
    "drafter",
    [
        exit_drafter(),
        exit_drafter(branches=3),
        selfspec.LayerSkipDrafter([1], 3, 0.3, do_sample=True),
        TableDrafter(DRAFT, (2, 2)),
        TableDrafter(DRAFT, (2, 2), says=None),
    ],
    ids=["exit", "exit with branches", "skip", "tree", "chosen tree"],
)
@rules
def test_b1_b21_every_rule_and_kind_of_draft(rule: str, drafter: Any) -> None:
    spec = speaking(TARGET, drafter, DRAFT, acceptance=rule)
    text = spoken(spec, 1200, 8)
    assert spec.stats.accepted > 1200
    assert max(worst(text, P, length) for length in (1, 2, 3)) < 1


@rules
def test_b1_the_law_holds_up_to_the_end_of_a_row(rule: str) -> None:
    """A row that has emitted its end takes nothing but padding, and none grows too long."""
    end = 2
    spec = speaking(TARGET, exit_drafter(), DRAFT, acceptance=rule)
    text = spoken(spec, 2000, 6, eos_token_id=end, pad_token_id=end)
    assert text.shape[1] == 6
    ended = (text == end).cumsum(1) > 0
    assert (text[ended] == end).all()
    absorbing = P.clone()
    absorbing[end] = torch.eye(V)[end]
    assert max(worst(text, absorbing, length) for length in (1, 2, 3)) < 1


@rules
def test_b1_a_drafter_that_misreports_q_is_noticed(rule: str) -> None:
    liar = TableDrafter(DRAFT, says=torch.full((V, V), 1 / V).log())
    text = spoken(speaking(TARGET, liar, acceptance=rule), 2000, 6)
    assert worst(text, P, 2) > 3


# ------------------------------------------------------------------- B3: low precision


@rules
def test_b3_bfloat16_text_has_the_law_of_bfloat16_logits(rule: str) -> None:
    spec = speaking(TARGET.bfloat16(), exit_drafter(), DRAFT.bfloat16(), acceptance=rule)
    with torch.no_grad():
        logits = spec.model(torch.arange(V)[:, None]).logits[:, 0]
    assert logits.dtype == torch.bfloat16
    text = spoken(spec, 2000, 8)
    assert spec.stats.accepted > 2000
    assert max(worst(text, logits.float().softmax(-1), length) for length in (1, 2, 3)) < 1


class Forced(TableDrafter):
    """Always drafts token 5."""

    def draft(self, state: Any, budget: int) -> TokenTree:
        tree = super().draft(state, budget)
        tokens = torch.cat([tree.tokens[:, :1], torch.full_like(tree.tokens[:, 1:], 5)], 1)
        return dataclasses.replace(tree, tokens=tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@rules
def test_b3_probabilities_too_small_for_float16_keep_their_ratio(
    rule: str, dtype: torch.dtype
) -> None:
    """p = 1e-10 and q = 1e-9: a draft passes one time in ten."""
    logits = torch.zeros(V, V)
    logits[:, 5] = torch.tensor(1e-10 * (V - 1)).log()
    log_q = torch.zeros(V, V).log_softmax(-1)
    log_q[:, 5] = torch.tensor(1e-9).log()
    drafter = Forced(torch.zeros(V, V), (1,), says=log_q)
    spec = speaking(logits.to(dtype), drafter, acceptance=rule)
    spoken(spec, 3000, 6)
    assert spec.stats.drafted >= 1e4
    with torch.no_grad():
        held = spec.model(torch.tensor([[FIRST]])).logits[0, 0].double()
    ratio = float((held.log_softmax(-1)[5] - log_q[0, 5]).exp())
    assert abs(ratio - 0.1) < 0.011  # rounding of a logit near -21
    assert deviation(spec.stats, ratio) < 4


# ------------------------------------------------------------------- B6, B7, B9: edges of the rules


@rules
def test_b6_b7_where_p_is_q_all_is_kept_and_the_bonus_follows_p(rule: str) -> None:
    for drafter in (TableDrafter(TARGET), exit_drafter(), TableDrafter(TARGET, (1, 1, 1))):
        spec = speaking(TARGET, drafter, acceptance=rule)
        text = spoken(spec, 1500, 9)
        assert spec.stats.acceptance_rate == 1
        assert worst(text, P, 2) < 1


@rules
def test_b6_a_rejection_that_leaves_nothing_falls_back_to_p(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With coins of 1, which the random numbers never are, everything fails, though p is q.

    To the last bit, as uniform laws are.
    """
    monkeypatch.setattr(
        reference, "uniform", lambda seed, node, at, stream: (seed * 0 + node * 0).float() + 1
    )
    for shape in ((1,), (1, 1)):
        uniform = torch.zeros(V, V)
        drafter = TableDrafter(uniform, shape, says=uniform.log_softmax(-1))
        spec = speaking(uniform, drafter, acceptance=rule)
        text = spoken(spec, 1500, 5)
        assert spec.stats.drafted > 0
        assert spec.stats.accepted == 0
        assert worst(text, uniform.softmax(-1), 2) < 1


class Bonuses(TableDrafter):
    """Notes the last draft token and the bonus of every row that kept its whole draft."""

    def reset(self) -> None:
        self.pairs: list[torch.Tensor] = []
        self.last: TokenTree | None = None

    def draft(self, state: Any, budget: int) -> TokenTree:
        self.last = super().draft(state, budget)
        return self.last

    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        if self.last is not None and self.last.width == 3:
            whole = acceptance.num_accepted == 2
            last = self.last.tokens[whole, 2]
            self.pairs.append(torch.stack([last, acceptance.next_token[whole]], 1))


@rules
def test_b7_the_bonus_after_a_whole_draft_follows_p(rule: str) -> None:
    drafter = Bonuses(DRAFT)
    spoken(speaking(TARGET, drafter, acceptance=rule), 2000, 9)
    observed = counted(torch.cat(drafter.pairs), V).view(V, V)
    assert observed.sum() > 1500
    law = observed.sum(1, keepdim=True) * P.double()
    assert misfit(observed.flatten(), law.flatten(), given=V) < 1


@pytest.mark.parametrize("rule", [*RULES, "lossy-typical"])
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
def test_b7_what_goes_in_is_left_alone(rule: Any, drawn: bool) -> None:
    kinds = (
        [],
        [TemperatureLogitsWarper(0.5), TopKLogitsWarper(2)],
        [RepetitionPenaltyLogitsProcessor(1.5), TopKLogitsWarper(2)],
    )
    logits = torch.randn(1, 4, V)
    log_q = torch.randn(1, 4, V).log_softmax(-1) if drawn else None
    tree = TokenTree.from_topology(torch.tensor([[5, 1, 2, 3]]), [-1, 0, 0, 2], log_q=log_q)
    names = ("tokens", "parents", "depth", "ancestors", "num_nodes", "log_q")
    tensors = [logits, *(t for n in names if (t := getattr(tree, n)) is not None)]
    before = [t.clone() for t in tensors]
    for processors, do_sample, kept in itertools.product(kinds, (True, False), (True, False)):
        how = Sampler(LogitsProcessorList(processors), do_sample, keep_scores=kept, rule=rule)
        accept(tree, logits, how, state())
        assert all(map(torch.equal, tensors, before))


ROWS = [[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 2, 3, 4], [-1], [-1, 0, 0, 1]]


@rules
def test_b9_a_coin_of_0_passes_whatever_is_possible_and_nothing_else(
    rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        reference, "uniform", lambda seed, node, at, stream: (seed * 0 + node * 0).float()
    )
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5]] * 4)
    log_q = torch.zeros(4, 6, V).log_softmax(-1)
    tree = TokenTree.from_topology(tokens, ROWS, log_q=log_q)
    how = Sampler(LogitsProcessorList(), True, rule=rule)
    out = accept(tree, torch.zeros(4, 6, V), how, state(4))
    assert out.num_accepted.tolist() == [2, 5, 0, 2]
    impossible = torch.zeros(4, 6, V)
    impossible[..., 1:6] = -torch.inf
    out = accept(tree, impossible, how, state(4))
    assert out.num_accepted.tolist() == [0] * 4
    assert set(out.next_token.tolist()) <= {0, 6, 7}


@rules
def test_b9_as_much_is_accepted_as_p_and_q_share(rule: str) -> None:
    target, draft = (table[:1].expand(V, V) for table in (TARGET, DRAFT))
    spec = speaking(target, TableDrafter(draft, (1,)), acceptance=rule)
    spoken(spec, 2000, 8)
    shared = float(torch.minimum(P[0], Q[0]).sum())
    assert 0.2 < shared < 0.8
    assert deviation(spec.stats, shared) < 4


# ------------------------------------------------------------------- B10: random numbers


@pytest.mark.parametrize("drafter", [exit_drafter(branches=2), "ngram"], ids=["drawn", "ngram"])
def test_b10_seeds_and_generators_decide_and_rows_draw_apart(drafter: Any) -> None:
    spec = speaking(TARGET, drafter, DRAFT)
    texts, states = [], []
    for seed in (7, 7, 8):
        set_seed(seed)
        texts.append(spoken(spec, 32, 8))
        states.append(torch.get_rng_state())
    assert texts[0].equal(texts[1])
    assert not texts[0].equal(texts[2])
    assert states[0].equal(states[1])
    set_seed(7)
    assert not states[0].equal(torch.get_rng_state())  # it did draw
    assert not spoken(spec, 32, 8, generator=torch.Generator().manual_seed(8)).equal(texts[0])
    untouched = torch.get_rng_state()
    for seed in (7, 7):
        texts.append(spoken(spec, 32, 8, generator=torch.Generator().manual_seed(seed)))
    assert untouched.equal(torch.get_rng_state())
    assert texts[-1].equal(texts[-2])
    assert spec.stats.accepted > 0
    # Two rows of one request, token by token: their joint law is the product.
    text = spoken(spec, 2000, 4)
    assert len(text.unique(dim=0)) > 300
    for column in (1, 3):
        law = torch.eye(V, dtype=torch.float64)[FIRST] @ P.double().matrix_power(column + 1)
        pairs = counted(text[:, column].view(-1, 2), V)
        assert misfit(pairs, (law[:, None] * law).flatten()) < 1


# ------------------------------------------------------------------- B12: siblings


@pytest.mark.parametrize("siblings", [1, 2, 4, V])
@pytest.mark.parametrize(
    ("rule", "says"), [("traversal", "truth"), ("multiround", "truth"), ("traversal", None)]
)
def test_b12_any_number_of_siblings_leaves_the_law(
    rule: str, says: str | None, siblings: int
) -> None:
    """Also all of the vocabulary, of which one is sure to be right."""
    drafter = TableDrafter(DRAFT, (siblings,) if siblings == V else (siblings, 1), says)
    spec = speaking(TARGET, drafter, acceptance=rule)
    text = spoken(spec, 1200, 6)
    assert worst(text, P, 2) < 1
    if siblings == V:
        assert spec.stats.accepted == spec.stats.verifies


# ------------------------------------------------------------------- B18: lossy, on request


def test_b18_typical_acceptance_is_opt_in() -> None:
    """Its thresholds: `tests/test_accept.py`; cold, it is greedy: `test_b_filters.py`."""
    texts = {}
    for rule in (None, "traversal", "lossy-typical"):
        options = {} if rule is None else {"acceptance": rule}
        spec = speaking(TARGET, exit_drafter(), DRAFT, **options)
        assert ("LOSSY" in repr(spec)) is (rule == "lossy-typical")
        torch.manual_seed(0)
        texts[rule] = spoken(spec, 1000, 6)
    assert texts[None].equal(texts["traversal"])
    assert not texts[None].equal(texts["lossy-typical"])
    assert worst(texts["lossy-typical"], P, 1) > 1  # as its name says


def test_b18_typical_acceptance_gives_a_token_a_round_and_leaves_greedy_text_alone() -> None:
    spec = speaking(TARGET, Forced(DRAFT), acceptance="lossy-typical")
    ids = torch.full((2, 1), FIRST)
    settings = {"max_new_tokens": 20, "pad_token_id": 0}
    steps = list(spec.stream(ids, do_sample=True, top_k=2, **settings))
    assert all(len(tokens) >= 1 for step in steps[:-1] for tokens in step.tokens)
    assert spec.stats.drafted > spec.stats.accepted
    plain = spec.model.generate(ids, do_sample=False, **settings)
    assert spec.generate(ids, do_sample=False, **settings).equal(plain)


# ------------------------------------------------------------------- B19: rows of a batch


def test_b19_each_row_of_a_batch_has_the_law() -> None:
    spec = speaking(TARGET, exit_drafter(branches=2), DRAFT)
    prompt = torch.tensor([[0], [2], [5], [7]])
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 0, "pad_token_id": 0}
    p = (TARGET.double() / 0.8).softmax(-1)
    for repeats, new in ((1, 120), (300, 5)):
        ids = prompt.repeat(repeats, 1)
        text = spec.generate(ids, attention_mask=ids**0, max_new_tokens=new, **settings)
        assert ((text >= 0) & (text < V)).all()
        for row in text.view(repeats, 4, -1).unbind(1):
            observed = counted(row.unfold(1, 2, 1).reshape(-1, 2), V).view(V, V)
            law = observed.sum(1, keepdim=True) * p
            assert misfit(observed.flatten(), law.flatten(), given=V) < 1
    assert spec.stats.fallbacks == 0
    assert 0 < spec.stats.acceptance_rate < 1
