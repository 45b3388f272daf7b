"""SuffixDrafter: what matches, how probable it is, what is kept of earlier requests and where."""

from __future__ import annotations

import copy
import itertools
import math
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import selfspec
from selfspec import SuffixDrafter, TokenTree
from selfspec.acceptance_model import AcceptanceModel
from selfspec.costs import ASSUMED, HISTORY, StepCosts
from selfspec.drafters.judge import Judge
from selfspec.drafters.suffix import longest_match
from selfspec.testing import check_drafter
from tests.families import tiny

NEW = 24


class Free(StepCosts):
    """Everything is worth verifying."""

    def verify_prices(self, batch: int, most: int) -> np.ndarray:
        return np.zeros(most + 1)

    def _tried(self, batch: int) -> None:
        return None


def state_of(*rows: list[int], costs: Any = None, room: int = 100, ended: Any = None) -> Any:
    ids = [np.array(row, np.int64) for row in rows]
    return SimpleNamespace(
        costs=Free() if costs is None else costs,
        batch=len(rows),
        frozen=ended or [False] * len(rows),
        root=torch.tensor([row[-1] for row in rows]),
        length=[len(row) for row in rows],
        tokens=lambda b: ids[b],
        ending=lambda b, count: rows[b][-count:],
        room=lambda b: room,
    )


def draft(text: list[int], earlier: Any = (), budget: int = 31, **options: Any) -> TokenTree:
    drafter = SuffixDrafter(**options)
    costs = Free()
    for other in earlier:
        drafter.observe(state_of(other, costs=costs, ended=[True]), None, None)  # type: ignore
        drafter.reset()
    return drafter.draft(state_of(text, costs=costs), budget)


# ---------------------------------------------------------------------------- matches


def slowly(tokens: list[int], text: list[int], most: int, own: bool) -> tuple[int, list[int]]:
    for length in range(min(most, len(tokens)), 0, -1):
        suffix = tokens[-length:]
        ends = [
            end
            for end in range(length, len(text) + 1)
            if text[end - length : end] == suffix and (own or end < len(text))
        ]
        if ends:
            return length, ends
    return 0, []


@pytest.mark.parametrize("own", [True, False])
def test_matches_are_those_of_a_slow_search(own: bool) -> None:
    rng = random.Random(0)
    for _ in range(300):
        tokens = rng.choices(range(4), k=rng.randint(1, 30))
        text = tokens[:-1] if own else rng.choices(range(-1, 4), k=rng.randint(0, 40))
        most = rng.randint(1, 8)
        length, ends = longest_match(np.array(tokens), np.array(text, np.int64), most, own)
        assert (length, ends.tolist() if length else []) == slowly(tokens, text, most, own)


def test_copies_become_a_tree_by_frequency() -> None:
    #      1 2 -> 5 three times, once of them 5 6; 1 2 -> 9 once, the latest
    text = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 5, 6, 1, 2, 9, 8, 1, 2]
    tree = draft(text, budget=5)
    nodes = tree.rows()[0]
    children = {}
    assert nodes.expected is not None
    for token, parent, expected in zip(*nodes, strict=True):
        if parent == 0:
            children[token] = expected
    assert set(children) == {5, 9}
    assert children[5] > children[9]
    logits = {5: math.log(3.5 / 1.5), 9: math.log(1.5 / 3.5)}
    for token, latest in ((5, 0), (9, 1)):
        odds = -2.4 + logits[token] + 1.1 * math.log2(2) + 0.3 * latest
        assert children[token] == pytest.approx(1 / (1 + math.exp(-odds)), rel=1e-5)


def test_short_matches_draft_short_and_long_ones_long() -> None:
    assert draft([1, 2, *range(10, 40), 3, 1]).width == 1 + 2
    assert draft([*range(50), 60, *range(8)]).width == 1 + 31
    assert draft([3, 9, 4, 3], min_match=2).width == 1
    assert draft([3, 9, 4, 5]).width == 1


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_the_best_are_within_the_budget(budget: int) -> None:
    text = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 5, 6, 1, 2, 9, 8, 1, 2]
    whole = draft(text, budget=20).rows()[0]
    few = draft(text, budget=budget).rows()[0]
    assert whole.expected is not None
    assert few.expected is not None
    assert len(few.tokens) == 1 + budget
    best = sorted(whole.expected, reverse=True)[: 1 + budget]
    assert sorted(few.expected, reverse=True) == pytest.approx(best)


def test_trees_are_sound(monkeypatch: Any) -> None:
    rng = random.Random(1)
    for _ in range(200):
        rows = [rng.choices(range(3), k=rng.randint(1, 60)) for _ in range(3)]
        room = rng.randint(1, 9)
        state = state_of(*rows, room=room)
        drafter = SuffixDrafter(max_match=rng.randint(1, 9))
        budget = rng.randint(1, 31)
        tree = drafter.draft(state, budget)
        tree.validate(state.root, 3, budget)
        assert tree.max_depth <= max(room - 1, 0)
        for nodes in tree.rows():
            assert nodes.expected is not None
            siblings = list(zip(nodes.parents, nodes.tokens, strict=True))
            assert len(set(siblings)) == len(siblings)
            for parent, value in zip(nodes.parents[1:], nodes.expected[1:], strict=True):
                assert 0 < value <= nodes.expected[parent] + 1e-6


# ---------------------------------------------------------------------------- earlier texts


def test_earlier_texts_are_copied_and_never_across_two_of_them() -> None:
    tree = draft([20, 7, 8, 9], earlier=[[1, 7, 8, 9, 4, 5], [6, 6]])
    assert tree.paths() == [[[4, 5]]]
    assert draft([20, 4, 5], earlier=[[1, 4, 5], [6, 6]]).width == 1
    assert draft([20, 7, 8, 9], earlier=[[1, 7, 8, 9, 4, 5]], history_tokens=0).width == 1


def test_the_longer_match_decides_wherever_it_is() -> None:
    assert draft([8, 9, 3, 7, 8, 9], earlier=[[7, 8, 9, 4]]).paths() == [[[4]]]
    here = draft([7, 8, 9, 3, 7, 8, 9], earlier=[[8, 9, 4]], budget=1)
    assert here.tokens[0].tolist() == [9, 3]


def test_this_text_is_believed_more_than_earlier_ones() -> None:
    nodes = draft([8, 9, 3, 1, 8, 9], earlier=[[8, 9, 4]]).rows()[0]
    assert nodes.expected is not None
    expected = dict(zip(nodes.tokens, nodes.expected, strict=True))
    assert expected[3] > 1.5 * expected[4] > 0


def test_each_wrapper_has_its_own() -> None:
    model, prompt = tiny.build("llama"), tiny.prompts(1)
    one, other = (selfspec.wrap(model, "suffix") for _ in range(2))
    plain = one.generate(**prompt, max_new_tokens=NEW, do_sample=False)
    assert one.costs.kept[HISTORY].tokens.tolist() == [*plain[0].tolist(), -1]
    assert HISTORY not in other.costs.kept or not len(other.costs.kept[HISTORY])
    twice = copy.deepcopy(one)
    assert HISTORY not in twice.costs.kept
    before = one.stats.accepted
    assert one.generate(**prompt, max_new_tokens=NEW, do_sample=False).equal(plain)
    assert one.stats.accepted - before > before + NEW // 4  # it has read all of it
    one.costs.forget_texts()
    assert HISTORY not in one.costs.kept
    one.costs.forget_texts()


def test_rows_of_a_batch_are_kept_once_each_without_padding() -> None:
    model, prompt = tiny.build("llama"), tiny.prompts(3)
    spec = selfspec.wrap(model, "suffix")
    out = spec.generate(**prompt, max_new_tokens=NEW, do_sample=False)
    lengths = prompt["attention_mask"].sum(1).tolist()
    texts = sorted(row[-(n + NEW) :].tolist() for row, n in zip(out, lengths, strict=True))
    kept: list[list[int]] = [[]]
    for token in spec.costs.kept[HISTORY].tokens.tolist():
        if token < 0:
            kept.append([])
        else:
            kept[-1].append(token)
    assert sorted(kept[:-1]) == texts


def test_what_does_not_adapt_remembers_nothing() -> None:
    model, prompt = tiny.build("llama"), tiny.prompts(2)
    spec = selfspec.wrap(model, "suffix", adaptive=False)
    counts = []
    for _ in range(3):
        spec.stats.reset()
        spec.generate(**prompt, max_new_tokens=NEW, do_sample=False)
        counts.append((spec.stats.drafted, spec.stats.accepted, spec.stats.forwards))
    assert len(set(counts)) == 1
    assert HISTORY not in spec.costs.kept


# ---------------------------------------------------------------------------- learning


def test_what_never_holds_is_no_longer_drafted() -> None:
    costs = StepCosts()
    costs._tried = lambda batch: None  # type: ignore[method-assign]
    sizes = []
    for _ in range(200):
        drafter = SuffixDrafter(history_tokens=0)
        text = [1, 2, 3, 4, 5, 1, 2, 3]
        tree = drafter.draft(state_of(text, costs=costs), 9)
        sizes.append(tree.width - 1)
        drafter.observe(state_of([*text, 9], costs=costs), None, None)  # type: ignore[arg-type]
    assert sizes[0] >= 1
    assert sizes[-1] == 0


def test_of_drafts_that_were_not_verified_is_learned_too() -> None:
    costs = StepCosts()
    costs.choose = lambda *_, **__: 0  # type: ignore[method-assign]
    for _ in range(60):
        drafter = SuffixDrafter(history_tokens=0)
        text = [1, 2, 3, 4, 5, 1, 2, 3]
        assert drafter.draft(state_of(text, costs=costs), 9).width == 1
        drafter.observe(state_of([*text, 4, 5], costs=costs), None, None)  # type: ignore[arg-type]
    model = costs.kept["acceptance of copies"]
    assert model.reliability.observed[-1] == 1.0
    assert model.reliability.predicted[-1] > 0.9


# ---------------------------------------------------------------------------- on models


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3", tiny.CHAIN_ONLY[0]])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_text_is_plain(family: str, rows: int) -> None:
    model, prompt = tiny.build(family), tiny.prompts(rows)
    plain = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)
    spec = selfspec.wrap(model, SuffixDrafter(min_prob=0.0))
    for _ in range(3):
        assert spec.generate(**prompt, max_new_tokens=NEW, do_sample=False).equal(plain)
    assert spec.stats.accepted > NEW


def test_the_contract() -> None:
    check_drafter(SuffixDrafter(), tiny.build("llama"))


def test_threads_share_a_history() -> None:
    model = tiny.build("llama")
    spec = selfspec.wrap(model, "suffix")
    prompts = [tiny.prompts(1, seed=seed) for seed in range(6)]
    plain = [model.generate(**p, max_new_tokens=NEW, do_sample=False) for p in prompts]

    def run(at: int) -> bool:
        out = spec.generate(**prompts[at], max_new_tokens=NEW, do_sample=False)
        return bool(out.equal(plain[at]))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, itertools.chain(*[range(6)] * 3)))
    assert (spec.costs.kept[HISTORY].tokens < 0).sum() > 6


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"min_match": 0}, ValueError, "min_match=0 must be at least 1"),
        ({"min_match": 4, "max_match": 3}, ValueError, "max_match=3 must be at least 4"),
        ({"history_tokens": -1}, ValueError, "history_tokens=-1 must be at least 0"),
        ({"history_tokens": None}, TypeError, "history_tokens=None"),
        ({"min_prob": 2}, ValueError, "min_prob=2"),
    ],
)
def test_bad_options(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SuffixDrafter(**options)


def test_assumed_costs_keep_nothing() -> None:
    drafter = SuffixDrafter()
    drafter.draft(state_of([1, 2, 1], costs=ASSUMED), 4)
    drafter.observe(state_of([1, 2, 1, 2], costs=ASSUMED, ended=[True]), None, None)  # type: ignore
    assert not ASSUMED.kept


def test_one_by_one_is_what_all_at_once_is() -> None:
    draw = np.random.default_rng(0)
    model = AcceptanceModel(np.array([0.3, 1.0, -0.4]))
    judge = Judge(model)
    for _ in range(40):
        rows = draw.normal(size=(4, 3))
        judge.learn(rows, (rows.sum(1) > 0).astype(float))
    rows = np.concatenate([draw.normal(size=(20, 3)), 1e6 * draw.normal(size=(4, 3))])
    one, found = judge.of_one(), judge.probabilities(rows)
    assert judge.tilt != 0
    assert [one(row) for row in rows.tolist()] == pytest.approx(found.tolist(), abs=1e-12)
