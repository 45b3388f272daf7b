"""NGramDrafter: lengths of drafts and options. What matches is in scenarios/test_j_ngram.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from selfspec import NGramDrafter


def continuations(tokens: list[int], budget: int = 10, **options: int) -> list[list[int]]:
    return NGramDrafter(**options).continuations(np.array(tokens, dtype=np.int64), budget)


def test_a_match_shorter_than_the_minimum_is_none() -> None:
    assert continuations([3, 9, 4, 3]) == []
    assert continuations([3, 9, 4, 3], min_match=1, budget=1) == [[9]]


def test_short_matches_draft_short() -> None:
    text = [1, 2, *range(10, 40), 1, 2]
    assert len(continuations(text, 30)[0]) == 4
    text = [*range(40), *range(8)]
    assert len(continuations(text, 30)[0]) == 30


def test_no_budget() -> None:
    assert continuations([1, 2, 1, 2], 0) == []


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
