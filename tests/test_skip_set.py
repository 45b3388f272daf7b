"""Skip sets as values."""

from __future__ import annotations

import pytest

from selfspec import SkipSet


def test_in_words() -> None:
    assert str(SkipSet()) == "nothing"
    assert str(SkipSet.layers([3, 5, 6, 7])) == "layers 3, 5-7"
    some = SkipSet(frozenset({1, 2, 9}), frozenset({2, 4, 5}))
    assert str(some) == "layers 2, attention of 1, 9, MLP of 4-5"
    assert len(some) == 6
    assert some.first == 1
    assert SkipSet().first is None


def test_as_json() -> None:
    some = SkipSet(frozenset({9, 1}), frozenset({4}))
    assert some.to_dict() == {"attention": [1, 9], "mlp": [4]}
    assert SkipSet.from_dict(some.to_dict()) == some


@pytest.mark.parametrize("wrong", [[1.5], ["1"], [True]])
def test_what_is_no_layer(wrong: list[object]) -> None:
    with pytest.raises(TypeError, match=r"skip_set.attention layer=.* must be an int"):
        SkipSet(attention=wrong)  # type: ignore[arg-type]


def test_a_negative_layer() -> None:
    with pytest.raises(ValueError, match=r"skip_set.mlp layer=-1 must be at least 0"):
        SkipSet(mlp=frozenset({-1}))
