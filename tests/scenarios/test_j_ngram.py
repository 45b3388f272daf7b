"""n-gram drafts: which match, which of several, at the edges of a text, and how fast."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch

import selfspec
from selfspec import NGramDrafter
from tests.families import tiny


def continuations(tokens: list[int], budget: int = 10, **options: int) -> list[list[int]]:
    return NGramDrafter(**options).continuations(np.array(tokens, dtype=np.int64), budget)


@pytest.mark.parametrize("tokens", [[], [4], [4, 5], [4, 4]])
def test_j15_a_text_shorter_than_the_match(tokens: list[int]) -> None:
    assert continuations(tokens, min_match=2) == []
    assert continuations(tokens, min_match=1) == ([[4]] if tokens == [4, 4] else [])


def test_j15_the_text_itself_is_no_match_of_its_end() -> None:
    """The last tokens occur at the end, too; only what follows an earlier occurrence counts."""
    assert continuations([1, 2, 3, 9, 1, 2, 3], 2) == [[9, 1]]
    assert continuations([5, 1, 2], 2) == []


def test_j15_a_match_may_overlap_the_end_of_the_text() -> None:
    assert continuations([7] * 6, 4) == [[7]]
    assert continuations([1, 2, 1, 2, 1, 2], 9) == [[1, 2]]


def test_j15_the_rule_for_ties_is_the_documented_one() -> None:
    """Longest suffix first; among its occurrences the most recent; several by first token."""
    documented = " ".join((NGramDrafter.__doc__ or "").split())
    assert "The longest suffix of the row that occurred before decides" in documented
    assert "among its occurrences the most recent one is tried first" in documented
    assert continuations([1, 2, 3, 9, 4, 2, 3, 8, 1, 2, 3], 1) == [[9]]
    assert continuations([2, 3, 9, 2, 3, 8, 2, 3], 1) == [[8]]
    text = [1, 2, 8, 1, 2, 9, 1, 2, 8, 5, 2, 7, 1, 2]
    assert [c[0] for c in continuations(text, 2, max_candidates=3)] == [8, 9]
    assert [c[0] for c in continuations(text, 2, max_candidates=3, min_match=1)] == [8, 9, 7]


def first_by_brute_force(tokens: list[int], min_match: int, max_match: int) -> int | None:
    end = len(tokens)
    for length in range(max_match, min_match - 1, -1):
        for at in range(end - 1, length - 1, -1):
            if tokens[at - length : at] == tokens[end - length :]:
                return tokens[at]
    return None


def test_j15_the_rule_for_ties_against_brute_force() -> None:
    rng = random.Random(1)
    for _ in range(400):
        tokens = [rng.randint(0, 3) for _ in range(rng.randint(1, 30))]
        low = rng.randint(1, 3)
        high = rng.randint(low, 5)
        expected = first_by_brute_force(tokens, low, high)
        found = continuations(tokens, 1, min_match=low, max_match=high)
        assert found == ([] if expected is None else [[expected]])


@pytest.mark.parametrize("alphabet", [1, 3, 40_000])
def test_j15_fifty_thousand_tokens_take_less_than_twenty_milliseconds(alphabet: int) -> None:
    tokens = np.random.default_rng(0).integers(0, alphabet, 50_000)
    drafter = NGramDrafter(max_candidates=3, min_prob=0.0)
    times = []
    for _ in range(8):
        start = time.thread_time()  # of this thread alone: other load does not count
        drafter.continuations(tokens, 16)
        times.append(time.thread_time() - start)
    assert min(times) < 0.020


def test_j15_a_lookup_reads_the_text_once_and_its_matches_a_few_times() -> None:
    """Work is counted in elements compared, which no clock and no load changes."""

    class Counted(np.ndarray):
        compared = 0

        def __eq__(self, other: object) -> Any:
            Counted.compared += self.size
            return np.asarray(self) == np.asarray(other)

    for alphabet in (1, 3, 40_000):
        Counted.compared = 0
        tokens = np.random.default_rng(0).integers(0, alphabet, 50_000).view(Counted)
        NGramDrafter(max_match=8).continuations(tokens, 16)
        assert Counted.compared <= 8 * 50_000
        if alphabet > 1:  # ever fewer places match
            assert Counted.compared < 1.6 * 50_000


class Recording(NGramDrafter):
    """Keeps what it drafted."""

    def __init__(self) -> None:
        super().__init__(min_match=1, max_candidates=2, min_prob=0.0)
        self.drafts: list[Any] = []

    def draft(self, state: Any, budget: int) -> selfspec.TokenTree:
        tree = super().draft(state, budget)
        self.drafts.append(tree.paths())
        return tree


@pytest.mark.parametrize("graphs", [False, True])
def test_d9_nothing_of_one_request_is_drafted_in_the_next(model: Any, graphs: bool) -> None:
    """A long text, then a shorter one, and a batch of another size, in what the first has left."""
    long = torch.arange(1, 60)[None].repeat(1, 2)
    requests = [long, tiny.prompts(1)["input_ids"][:, -6:], torch.tensor([[59]]), long[:, :7]]
    drafter = Recording()
    used = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs)
    for ids in requests:
        alone = Recording()
        fresh = selfspec.wrap(model, drafter=alone, cuda_graphs=graphs)
        plain = model.generate(ids, max_new_tokens=16)
        drafter.drafts = []
        assert used.generate(ids, max_new_tokens=16).tolist() == plain.tolist()
        assert fresh.generate(ids, max_new_tokens=16).tolist() == plain.tolist()
        assert drafter.drafts == alone.drafts
        text = set(plain[0].tolist())
        assert all(set(path) <= text for rows in drafter.drafts for row in rows for path in row)
    assert used.stats.drafted > 20


@pytest.mark.parametrize("name", ["early-exit", "layer-skip"])
def test_d9_nor_with_drafts_by_the_models_layers(model: Any, name: str) -> None:
    requests = [torch.arange(1, 60)[None], tiny.prompts(3)["input_ids"], torch.tensor([[59]])]
    counts: list[list[Any]] = []
    for graphs in (False, True):
        used = selfspec.wrap(model, drafter=name, cuda_graphs=graphs, adaptive=False)
        for ids in requests:
            plain = model.generate(ids, max_new_tokens=12)
            fresh = selfspec.wrap(model, drafter=name, cuda_graphs=graphs, adaptive=False)
            used.stats.reset()
            for spec in (used, fresh):
                assert spec.generate(ids, max_new_tokens=12).tolist() == plain.tolist()
            counts.append([(s.stats.drafted, s.stats.accepted) for s in (used, fresh)])
    assert all(one == other for one, other in counts)
