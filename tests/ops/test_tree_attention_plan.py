"""How calls are cut into programs, and the bytes that costs; on the host alone."""

import itertools

import pytest
from selfspec_kernels.tree_attention.blocks import choose_blocks, padded, tiles
from selfspec_kernels.tree_attention.plan import Shape, plan
from selfspec_kernels.tuning import PARTS

PROCESSORS = 132
MOST_BYTES = 1.25  # times the minimum


def shapes(head_size: int, item_size: int = 2):
    """Calls that memory bounds: at most 128 rows, contexts from 4096 on."""
    sizes = itertools.product((1, 8), range(1, 9), range(1, 9), (4096, 8192, 32768))
    for batch, kv_heads, groups, context in sizes:
        for nodes in (1, 3, 8, 16, 17, 24, 32, 42, 64, 128):
            if nodes * groups <= 128:
                yield Shape(
                    batch, kv_heads, groups, nodes, nodes, head_size, head_size, item_size, context
                )


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("part", PARTS)
def test_splits_cost_little_memory_traffic(part, head_size):
    widest = tiles(part)[2, head_size][-1].m
    for shape, deterministic in itertools.product(shapes(head_size), (False, True)):
        launch = plan(shape, part, PROCESSORS, deterministic=deterministic)
        if shape.rows <= widest:
            assert launch.row_blocks == 1
            assert launch.bytes_moved() <= MOST_BYTES * shape.minimum_bytes(), shape
        else:  # more rows than any tile of the part holds: the prefix is read again
            assert launch.bytes_moved() <= MOST_BYTES * launch.row_blocks * shape.minimum_bytes()


@pytest.mark.parametrize("part", ["sm_80", "sm_90", "sm_100"])
def test_a_tile_holds_128_rows(part):
    assert all(tiles(part)[2, width][-1].m >= 128 for width in (64, 128))


def test_few_programs_split_and_many_do_not():
    alone = Shape(1, 8, 4, 1, 1, 128, 128, 2, 8192)
    launch = plan(alone, "sm_90", PROCESSORS)
    assert launch.splits == 32
    assert launch.combines
    assert launch.chunk == 0
    batch = plan(alone._replace(batch=64), "sm_90", PROCESSORS)
    assert (batch.splits, batch.combines) == (1, False)
    assert plan(alone._replace(max_prefix_len=100), "sm_90", PROCESSORS).splits == 1
    assert plan(alone._replace(max_prefix_len=0), "sm_90", PROCESSORS).splits == 1


def test_a_window_is_split_and_not_the_prefix():
    shape = Shape(1, 8, 4, 1, 1, 128, 128, 2, 32_768, window=512)
    assert plan(shape, "sm_90", PROCESSORS).splits == 2
    assert plan(shape, "sm_90", PROCESSORS, deterministic=True).splits == 1
    assert plan(shape._replace(window=1), "sm_90", PROCESSORS).splits == 1
    assert shape.minimum_bytes() < shape._replace(window=0).minimum_bytes() / 60


def test_the_number_of_splits_can_be_said():
    shape = Shape(1, 1, 4, 8, 8, 64, 64, 2, 100)
    for splits in (1, 3, 7):
        launch = plan(shape, "sm_90", PROCESSORS, num_splits=splits)
        assert (launch.splits, launch.combines) == (splits, splits > 1)


def test_deterministic_chunks_depend_on_the_tile_alone():
    chunks = set()
    for batch, kv_heads, context in itertools.product((1, 8), (1, 8), (0, 5, 4096, 100_000)):
        shape = Shape(batch, kv_heads, 4, 8, 8, 64, 64, 2, context)
        launch = plan(shape, "sm_90", PROCESSORS, deterministic=True)
        assert launch.combines
        assert launch.splits == max(1, -(-context // launch.chunk))
        assert launch.chunk % launch.blocks.n == 0
        chunks.add(launch.chunk)
    assert len(chunks) == 1


@pytest.mark.parametrize("part", PARTS)
def test_tiles_suit_the_rows(part):
    for (item_size, width), fitting in tiles(part).items():
        assert all(64 % blocks.n == 0 for blocks in fitting)
        assert [blocks.m for blocks in fitting] == sorted({blocks.m for blocks in fitting})
        assert choose_blocks(part, 1, width, item_size).m == fitting[0].m
        assert choose_blocks(part, 10_000, width, item_size) == fitting[-1]
        for blocks in fitting:
            assert choose_blocks(part, blocks.m, width, item_size) == blocks
    assert tiles(part).keys() == {(i, w) for i in (2, 4) for w in (64, 128, 256)}


def test_heads_are_padded_to_powers_of_two():
    assert [padded(size) for size in (1, 16, 24, 64, 80, 96, 128, 256)] == [
        *(16, 16, 32, 64, 128, 128, 128, 256)
    ]
