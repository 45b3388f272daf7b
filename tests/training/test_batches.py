"""Which sequences are trained on together, and when."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from selfspec.training.batches import ahead, plan, split

LENGTHS = torch.randint(3, 90, (200,), generator=torch.Generator().manual_seed(0)).tolist()
ROWS = [row for row in range(200) if row % 7]


def test_every_row_once_and_no_batch_too_large() -> None:
    batches = plan(ROWS, LENGTHS, 400, seed=3, epoch=0)
    assert sorted(row for batch in batches for row in batch) == ROWS
    sizes = [len(batch) * max(LENGTHS[row] for row in batch) for batch in batches]
    assert max(sizes) <= 400
    padding = 1 - sum(LENGTHS[row] for row in ROWS) / sum(sizes)
    assert padding < 0.15


def test_a_long_sequence_is_alone() -> None:
    batches = plan([0, 1, 2], [5, 50, 6], 20, seed=0, epoch=0)
    assert sorted(map(sorted, batches)) == [[0, 2], [1]]


def test_order_follows_from_seed_and_pass() -> None:
    first = plan(ROWS, LENGTHS, 400, seed=3, epoch=0)
    assert plan(ROWS, LENGTHS, 400, seed=3, epoch=0) == first
    for other in (
        plan(ROWS, LENGTHS, 400, seed=3, epoch=1),
        plan(ROWS, LENGTHS, 400, seed=4, epoch=0),
    ):
        assert sorted(map(sorted, other)) != sorted(map(sorted, first))
    longest = [max(LENGTHS[row] for row in batch) for batch in first]
    assert longest != sorted(longest)


KEYS = [f"prompt {i}" for i in range(400)]


def test_split() -> None:
    rows, held = split(KEYS, 0.1, 1000, seed=0)
    assert 25 < len(held) < 60
    assert sorted(rows + held) == list(range(len(KEYS)))
    assert split(KEYS, 0.1, 1000, seed=0) == (rows, held)
    assert split(KEYS, 0.1, 1000, seed=1)[1] != held
    assert len(split(KEYS, 0.1, 4, seed=0)[1]) == 4
    for share in (0.001, 0.9):
        assert [len(part) for part in split(KEYS[:2], share, 9, seed=0)] == [1, 1]
    with pytest.raises(ValueError, match="1 different prompts are too few"):
        split(["one", "one"], 0.1, 4, seed=0)


def test_answers_to_one_prompt_stay_together() -> None:
    keys = [key for key in KEYS for _ in range(3)]
    rows, held = split(keys, 0.1, 1000, seed=0)
    assert len(held) == 3 * len(split(KEYS, 0.1, 1000, seed=0)[1])
    assert not {keys[row] for row in rows} & {keys[row] for row in held}
    # Most answers are to one prompt: something is trained on, something is held out.
    rows, held = split(["a"] * 9 + ["b"], 0.5, 9, seed=0)
    assert {len(rows), len(held)} == {1, 9}


@pytest.mark.parametrize("most", [6, 1000])
def test_what_was_trained_on_is_not_held_out_when_there_is_more(most: int) -> None:
    few = KEYS[:100]
    trained = {few[row] for row in split(few, 0.1, most, seed=0)[0]}
    held = {KEYS[row] for row in split(KEYS, 0.1, most, seed=0)[1]}
    assert held - set(few)
    assert not trained & held


def test_the_next_batch_is_read_in_another_thread() -> None:
    threads: dict[int, Any] = {}

    def read(item: int) -> Any:
        threads[item] = threading.current_thread()
        return 10 * item

    items = ahead(read, range(4))
    assert next(items) == 0
    items.close()
    assert threading.current_thread() not in threads.values()
    assert set(threads) <= {0, 1}
    assert list(ahead(read, range(4))) == [0, 10, 20, 30]
    assert list(ahead(read, [])) == []
