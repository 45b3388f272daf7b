import itertools

import pytest
import torch
from selfspec_kernels import TreeLayout

from .trees import chain, random_forest


@pytest.mark.parametrize("window", [0, 1, 3, 20, 1000])
@pytest.mark.parametrize(
    ("nodes", "queries", "prefix"),
    [(1, 1, [0]), (2, 1, [5, 0]), (33, 33, [7, 64, 1]), (64, 9, [0]), (65, 65, [3, 30])],
)
def test_mask_and_bias_follow_the_parents(nodes, queries, prefix, window):
    forest = random_forest(nodes, prefix)
    layout = forest.layout(queries)
    key_len = max(prefix) + nodes + 2
    expected = torch.zeros(len(prefix), queries, key_len, dtype=torch.bool)
    for b in range(len(prefix)):
        for m in range(queries):
            expected[b, m, forest.visible(b, nodes - queries + m, window)] = True

    assert torch.equal(layout.mask(key_len, window), expected)
    bias = layout.bias(key_len, window, torch.bfloat16, 3)
    assert bias.dtype is torch.bfloat16
    assert bias.shape == (len(prefix), 1, 3 * queries, key_len)
    for g in range(3):
        rows = bias[:, 0, g * queries : (g + 1) * queries]
        assert torch.equal(rows == 0, expected)
        assert torch.equal(rows == float("-inf"), ~expected)


@pytest.mark.parametrize("window", [0, 5])
def test_padding_is_hidden_and_nodes_are_not(window):
    forest = random_forest(5, [9, 4, 0], start=[3, 4, 0])
    expected = torch.zeros(3, 5, 14, dtype=torch.bool)
    for b, m in itertools.product(range(3), range(5)):
        expected[b, m, forest.visible(b, m, window)] = True
    assert torch.equal(forest.layout().mask(14, window), expected)


def test_masks_are_made_once():
    layout = random_forest(4, [6, 2]).layout()
    assert layout.mask(12) is layout.mask(12)
    assert layout.mask(12) is not layout.mask(12, 3)
    assert layout.bias(12, 0, torch.float32, 2) is layout.bias(12, 0, torch.float32, 2)
    assert layout.bias(12, 0, torch.float32, 2) is not layout.bias(12, 0, torch.float32, 1)


def test_sees_all_only_where_nothing_is_hidden():
    assert chain(1, [9]).layout().sees_all(10)
    assert chain(4, [9]).layout(1).sees_all(13)
    assert chain(1, [9, 9]).layout().sees_all(10)
    assert not chain(1, [9]).layout().sees_all(11)
    assert not chain(1, [9]).layout().sees_all(10, window=9)
    assert chain(1, [9]).layout().sees_all(10, window=10)
    assert not chain(1, [9]).layout(slack=1).sees_all(11)
    assert not chain(1, [9, 8]).layout().sees_all(10)
    assert not chain(2, [9]).layout().sees_all(11)
    assert chain(1, [9], [0]).layout().sees_all(10)
    assert not chain(1, [9], [1]).layout().sees_all(10)


def _arguments(**changes):
    arguments = {
        "ancestors": torch.ones(2, 3, 1, dtype=torch.int64),
        "depth": torch.zeros(2, 5, dtype=torch.int32),
        "prefix_len": torch.zeros(2, dtype=torch.int32),
        "max_prefix_len": 4,
    }
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"ancestors": torch.ones(2, 3, 1, dtype=torch.int32)}, TypeError, "ancestors.*int64"),
        ({"depth": torch.zeros(2, 5, dtype=torch.int64)}, TypeError, "depth.*int32"),
        ({"prefix_len": torch.zeros(2, dtype=torch.int64)}, TypeError, "prefix_len.*int32"),
        ({"ancestors": torch.ones(2, 3, dtype=torch.int64)}, ValueError, "ancestors.*3 dim"),
        ({"ancestors": torch.ones(2, 6, 1, dtype=torch.int64)}, ValueError, "6 queries for 5"),
        ({"ancestors": torch.ones(2, 0, 1, dtype=torch.int64)}, ValueError, "0 queries"),
        ({"ancestors": torch.ones(2, 3, 2, dtype=torch.int64)}, ValueError, "2 words.*need 1"),
        ({"depth": torch.zeros(2, 65, dtype=torch.int32)}, ValueError, "1 words.*need 2"),
        ({"depth": torch.zeros(3, 5, dtype=torch.int32)}, ValueError, "depth 3"),
        ({"prefix_len": torch.zeros(1, dtype=torch.int32)}, ValueError, "prefix_len 1"),
        ({"depth": torch.zeros(2, 5, dtype=torch.int32, device="meta")}, ValueError, "meta"),
        ({"max_prefix_len": -1}, ValueError, "max_prefix_len=-1"),
        ({"start": torch.zeros(2, dtype=torch.int64)}, TypeError, "start.*int32"),
        ({"start": torch.zeros(2, 1, dtype=torch.int32)}, ValueError, "start.*1 dim"),
        ({"start": torch.zeros(3, dtype=torch.int32)}, ValueError, "start 3"),
        ({"start": torch.zeros(2, dtype=torch.int32, device="meta")}, ValueError, "start.*meta"),
        ({"block_table": torch.zeros(2, 4)}, TypeError, "block_table.*int32"),
        ({"block_table": torch.zeros(2, dtype=torch.int32)}, ValueError, "block_table.*2 dim"),
        ({"block_table": torch.zeros(1, 4, dtype=torch.int32)}, ValueError, "block_table 1"),
    ],
)
def test_refuses_what_does_not_fit(changes, error, match):
    with pytest.raises(error, match=match):
        TreeLayout(**_arguments(**changes))


def test_refuses_a_key_view_that_is_too_short():
    with pytest.raises(ValueError, match="key_len=8 is too small"):
        TreeLayout(**_arguments()).mask(8)
