"""What an n-gram drafter learns of its matches, and what it drafts by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import selfspec
from selfspec import NGramDrafter
from selfspec.costs import ASSUMED
from selfspec.match_survival import MatchSurvival
from tests.families import tiny


def after(survival: MatchSurvival, match: int, right: int, of: int, times: int) -> None:
    """Copies of `of` tokens after a match, of which the first `right` are what comes."""
    copied = list(range(of))
    new = [*copied[:right], -1, -1]
    for _ in range(times):
        survival.observe(match, copied, new)


def test_longer_matches_and_shallower_tokens_are_likelier() -> None:
    survival = MatchSurvival()
    firsts = [float(survival.path(match, 1)[0]) for match in range(1, 30)]
    assert firsts == sorted(firsts)
    path = survival.path(2, 8)
    assert (np.diff(path) < 0).all()
    assert path[1] == pytest.approx(path[0] * survival.path(3, 1)[0])
    assert survival.path(2, 1, is_first=False)[0] < path[0]
    assert survival.path(2, 0).shape == (0,)


@pytest.mark.parametrize(("right", "expected"), [(0, [0.0, None]), (1, [1.0, 0.0]), (3, [1, 1])])
def test_rates_become_what_is_seen(right: int, expected: list[float | None]) -> None:
    """The first wrong token counts, those behind it are not seen; nor those beyond the new ones."""
    survival = MatchSurvival()
    before = survival.path(3, 2)
    after(survival, 3, right, 3, 300)
    each = survival.path(3, 2) / np.append(1, survival.path(3, 1))
    for depth, rate in enumerate(expected):
        if rate is None:
            assert each[depth] == pytest.approx(before[depth] / before[depth - 1])
        else:
            assert each[depth] == pytest.approx(rate, abs=0.03)


def test_a_request_counts_for_more_than_those_before() -> None:
    everything = MatchSurvival()
    after(everything.for_request(), 3, 1, 1, 500)
    survival = everything.for_request()
    assert survival.path(3, 1)[0] > 0.95
    after(survival, 3, 0, 1, 6)
    assert survival.path(3, 1)[0] < 0.6
    assert everything.for_request().path(3, 1)[0] > 0.95


def test_a_request_beside_another_has_its_own_and_shares_the_rest() -> None:
    everything = MatchSurvival()
    one, other = everything.for_request(), everything.for_request()
    after(other, 3, 0, 1, 500)
    assert one.path(3, 1)[0] < 0.05
    after(one, 3, 1, 1, 3)
    assert other.path(3, 1)[0] < one.path(3, 1)[0]


def test_as_much_is_verified_as_pays() -> None:
    """Of what followed the matches of every row, the tokens that are worth their price."""
    found = [[(2, [7, 8, 9, 5])], [], [(1, [3, 4]), (1, [6])]]
    for right, expected in ((0, 0), (1, 1), (4, 4)):
        survival = MatchSurvival()
        after(survival, 2, right, 4, 400)
        for min_prob in (0.2, None):
            rows = drafted([*found[:2], []], survival, min_prob, frozen=[False, True, True])
            assert rows[0].tokens == [0, 7, 8, 9, 5][: 1 + expected]
            path = survival.path(2, 4)[:expected].tolist()
            assert rows[0].expected == pytest.approx([1.0, *path], rel=1e-5)
            assert rows[1].tokens == [0]
    every = drafted(found, MatchSurvival(), 0.0, frozen=[False] * 3)
    assert [row.tokens for row in every] == [[0, 7, 8, 9, 5], [0], [0, 3, 4, 6]]
    assert every[2].parents == [-1, 0, 1, 0]


def drafted(found: Any, survival: MatchSurvival, min_prob: float | None, frozen: Any) -> list[Any]:
    """Rows of the tree, where these are the matches."""
    drafter = NGramDrafter(1, min_prob=min_prob, max_candidates=2)
    rows = iter(found)
    drafter.matches = lambda tokens, budget: next(rows)  # type: ignore[method-assign]
    drafter._survival = survival
    state: Any = SimpleNamespace(
        batch=3,
        frozen=frozen,
        costs=ASSUMED,
        root=torch.zeros(3, dtype=torch.int64),
        length=[9] * 3,
        tokens=lambda b: None,
        room=lambda b: 50,
    )
    return drafter.draft(state, 20).rows()


@pytest.mark.parametrize("adaptive", [True, False])
def test_what_was_not_verified_is_learned_from(adaptive: bool) -> None:
    """A copy below its price is compared with the text all the same, unless nothing is learned."""
    spec = selfspec.wrap(tiny.build("llama"), NGramDrafter(1, min_prob=1.0), adaptive=adaptive)
    before = spec.costs.matches._all.copy()
    spec.generate(**tiny.prompts(1), max_new_tokens=64, do_sample=False)
    assert spec.stats.drafted == 0
    assert np.array_equal(spec.costs.matches._all, before) != adaptive


@pytest.mark.parametrize(("value", "error"), [(1.5, ValueError), ("x", TypeError)])
def test_bad_probabilities(value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="min_prob"):
        NGramDrafter(min_prob=value)  # type: ignore[arg-type]
