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


def test_split() -> None:
    rows, held = split(100, 0.1, 1000, seed=0)
    assert len(held) == 10
    assert sorted(rows + held) == list(range(100))
    assert split(100, 0.1, 1000, seed=0) == (rows, held)
    assert split(100, 0.1, 1000, seed=1)[1] != held
    assert len(split(100, 0.1, 4, seed=0)[1]) == 4
    assert [len(part) for part in split(2, 0.9, 9, seed=0)] == [1, 1]
    with pytest.raises(ValueError, match="1 sequences are too few"):
        split(1, 0.1, 4, seed=0)


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
