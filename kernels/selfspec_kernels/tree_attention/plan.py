"""How a tree attention is launched: tile, row blocks and splits, from what the host knows."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from .blocks import Blocks, choose_blocks, padded

WORD_BYTES = 8
PARTIAL_BYTES = 4
# Programs a multiprocessor that keep its memory busy, and the work below which a split is not worth
# its share of the second launch.
PROGRAMS_A_PROCESSOR = 2
SLOTS_A_SPLIT = 128
MAX_SPLITS = 64
# The most bytes of a split launch, in those of an unsplit one. Short contexts wait for latency and
# not for memory, and their partial results never leave the cache of the device.
LONG_CONTEXT = 4096
LONG_BUDGET = 1.24
SHORT_BUDGET = 2.0


class Shape(NamedTuple):
    """The sizes of one call; `queries` is M, `nodes` N, `value_size` Dv."""

    batch: int
    kv_heads: int
    groups: int
    queries: int
    nodes: int
    head_size: int
    value_size: int
    item_size: int
    max_prefix_len: int
    window: int = 0

    @property
    def rows(self) -> int:
        """Rows of one key/value head."""
        return self.groups * self.queries

    @property
    def span(self) -> int:
        """The most prefix slots that a tile of rows can see."""
        if self.window > 0:
            return min(self.max_prefix_len, self.window - 1)
        return self.max_prefix_len

    @property
    def ancestor_bytes(self) -> int:
        """Ancestor words of one sequence."""
        return self.queries * ((self.nodes + 63) // 64) * WORD_BYTES

    def minimum_bytes(self) -> int:
        """What any implementation reads and writes: every visible thing once."""
        items = (self.span + self.nodes + self.rows) * (self.head_size + self.value_size)
        return self.batch * (self.kv_heads * items * self.item_size + self.ancestor_bytes)


@dataclass(frozen=True)
class LaunchPlan:
    """One call's launch or launches.

    Attributes:
        shape: What it is for.
        blocks: The tile.
        row_blocks: Programs that share the rows of a key/value head; each reads the prefix.
        splits: Programs that share the prefix.
        chunk: Slots a split, counted from the first slot that the tile of rows sees; 0 divides
            what each tile sees evenly.
        combines: Whether splits leave partial results to a second launch.
    """

    shape: Shape
    blocks: Blocks
    row_blocks: int
    splits: int
    chunk: int
    combines: bool

    def bytes_moved(self) -> int:
        """What the programs read and write, each counting all that it touches.

        Of rows shorter than `max_prefix_len` it is an upper bound. Left out: depths, lengths and
        block tables, 4 bytes a node, sequence and page.
        """
        shape = self.shape
        cache = (shape.span + shape.nodes) * (shape.head_size + shape.value_size)
        queries = self.splits * shape.rows * shape.head_size
        output = shape.rows * shape.value_size
        moved = (self.row_blocks * cache + queries + output) * shape.item_size
        moved += shape.ancestor_bytes
        if self.combines:
            moved += 2 * self.splits * shape.rows * (shape.value_size + 1) * PARTIAL_BYTES
        return shape.batch * shape.kv_heads * moved


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; the interpreter, on a CPU, plays one of sm_90."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=1024)
def plan(
    shape: Shape,
    part: str,
    processors: int,
    num_splits: int | None = None,
    deterministic: bool = False,
) -> LaunchPlan:
    """Choose tile and splits.

    Args:
        shape: Sizes of the call.
        part: Key of the launch table.
        processors: Multiprocessors of the device.
        num_splits: Insist on that many.
        deterministic: Chunks of a fixed size, and always a second launch: then neither the batch
            nor `max_prefix_len` decides how a row is summed.
    """
    width = max(padded(shape.head_size), padded(shape.value_size))
    blocks = choose_blocks(part, shape.rows, width, shape.item_size)
    row_blocks = -(-shape.rows // blocks.m)
    if deterministic:
        # A chunk's partial results cost up to a sixth of the 16-bit keys and values it reads.
        chunk = 16 * max(blocks.m, 64)
        splits = max(1, -(-shape.span // chunk))
        return LaunchPlan(shape, blocks, row_blocks, splits, chunk, combines=True)
    if num_splits is not None:
        return LaunchPlan(shape, blocks, row_blocks, num_splits, 0, combines=num_splits > 1)

    unsplit = LaunchPlan(shape, blocks, row_blocks, 1, 0, combines=False)
    programs = row_blocks * shape.batch * shape.kv_heads
    useful = min(
        PROGRAMS_A_PROCESSOR * processors // programs,
        shape.span // max(SLOTS_A_SPLIT, 2 * blocks.n),
        MAX_SPLITS,
    )
    budget = LONG_BUDGET if shape.span >= LONG_CONTEXT else SHORT_BUDGET
    best = unsplit
    while 2 * best.splits <= useful:
        more = LaunchPlan(shape, blocks, row_blocks, 2 * best.splits, 0, combines=True)
        if more.bytes_moved() > budget * unsplit.bytes_moved():
            break
        best = more
    return best
