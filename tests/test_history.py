"""What is kept of earlier texts."""

from __future__ import annotations

import numpy as np

from selfspec.history import History


def text(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int64)


def test_texts_are_kept_apart() -> None:
    history = History()
    history.add(text(1, 2))
    history.add(text())
    history.add(text(3))
    assert history.tokens.tolist() == [1, 2, -1, 3, -1]
    assert len(history) == 5


def test_the_oldest_go_first_and_it_never_grows_beyond_its_size() -> None:
    history = History(40)
    for at in range(200):
        history.add(np.full(at % 17, at))
        assert len(history) <= 40
        if at % 17:
            assert history.tokens[-2] == at
    history.add(np.arange(1000))
    assert history.tokens.tolist() == [*range(961, 1000), -1]
    small = History(0)
    small.add(text(1, 2))
    assert len(small) == 0


def test_what_somebody_reads_does_not_change() -> None:
    history = History(10)
    history.add(text(1, 2, 3))
    read = history.tokens
    for _ in range(5):
        history.add(text(7, 8, 9))
    assert read.tolist() == [1, 2, 3, -1]
