"""NGramDrafter: which match, which continuation, how fast."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from selfspec import NGramDrafter


def continuations(tokens: list[int], budget: int = 10, **options: int) -> list[list[int]]:
    return NGramDrafter(**options).continuations(np.array(tokens, dtype=np.int64), budget)


def test_longest_suffix_wins_over_a_recent_short_one() -> None:
    assert continuations([1, 2, 3, 9, 4, 2, 3, 8, 1, 2, 3], 1) == [[9]]


def test_most_recent_of_equal_matches() -> None:
    assert continuations([2, 3, 9, 2, 3, 8, 2, 3], 1) == [[8]]


def test_a_match_shorter_than_the_minimum_is_none() -> None:
    assert continuations([3, 9, 4, 3]) == []
    assert continuations([3, 9, 4, 3], min_match=1, budget=1) == [[9]]


def test_short_matches_draft_short() -> None:
    text = [1, 2, *range(10, 40), 1, 2]
    assert len(continuations(text, 30)[0]) == 4
    text = [*range(40), *range(8)]
    assert len(continuations(text, 30)[0]) == 30


def test_a_match_may_overlap_the_suffix_and_reach_the_end() -> None:
    assert continuations([7] * 6, 4) == [[7]]
    assert continuations([1, 2, 1, 2, 1, 2], 9) == [[1, 2]]


@pytest.mark.parametrize("tokens", [[], [4], [4, 5]])
def test_too_little_text(tokens: list[int]) -> None:
    assert continuations(tokens, min_match=1) == []


def test_no_budget() -> None:
    assert continuations([1, 2, 1, 2], 0) == []


def test_several_candidates_differ_in_their_first_token() -> None:
    text = [1, 2, 8, 1, 2, 9, 1, 2, 8, 5, 2, 7, 1, 2]
    assert [c[0] for c in continuations(text, 2, max_candidates=3)] == [8, 9]
    assert [c[0] for c in continuations(text, 2, max_candidates=3, min_match=1)] == [8, 9, 7]


def reference(tokens: list[int], min_match: int, max_match: int) -> int | None:
    """First token after the longest suffix match, most recent first, by brute force."""
    end = len(tokens)
    for length in range(max_match, min_match - 1, -1):
        for at in range(end - 1, length - 1, -1):
            if tokens[at - length : at] == tokens[end - length :]:
                return tokens[at]
    return None


def test_against_brute_force() -> None:
    rng = random.Random(1)
    for _ in range(400):
        tokens = [rng.randint(0, 3) for _ in range(rng.randint(1, 30))]
        low = rng.randint(1, 3)
        high = rng.randint(low, 5)
        found = continuations(tokens, 1, min_match=low, max_match=high)
        expected = reference(tokens, low, high)
        assert found == ([] if expected is None else [[expected]])


@pytest.mark.parametrize("alphabet", [1, 3, 40_000])
def test_fifty_thousand_tokens_take_less_than_five_milliseconds(alphabet: int) -> None:
    tokens = np.random.default_rng(0).integers(0, alphabet, 50_000)
    drafter = NGramDrafter(max_candidates=3)
    drafter.continuations(tokens, 16)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        drafter.continuations(tokens, 16)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.005


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"min_match": 0}, ValueError, "min_match=0 must be at least 1"),
        ({"min_match": 4, "max_match": 3}, ValueError, "max_match=3 must be at least 4"),
        ({"max_candidates": 0}, ValueError, "max_candidates=0"),
        ({"max_match": 2.5}, TypeError, "max_match=2.5 must be an int"),
        ({"min_match": None}, TypeError, "min_match=None"),
    ],
)
def test_bad_options(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NGramDrafter(**options)
