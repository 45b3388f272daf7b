"""Cases of `tree_attention`, their inputs, and how far from float64 a result may be."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from selfspec_kernels import TreeLayout, tree_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .trees import Forest, attention_oracle, random_forest

PAGE = 16
# A result may be twice as far from float64 as torch's own in the same dtype. Torch's can be exact
# by luck in small cases, hence a floor: one unit in the last place of the largest result, two for
# bfloat16, which the interpreter truncates.
FACTOR = 2.0
FLOOR = {
    torch.float64: 4 * torch.finfo(torch.float64).eps,
    torch.float32: 4 * torch.finfo(torch.float32).eps,
    torch.float16: torch.finfo(torch.float16).eps,
    torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps,
}
# Denominators are float32 sums of exponentials of float32 scores, whatever the inputs are.
LSE_TOLERANCE = {torch.float64: 1e-12}
LSE_TOLERANCE |= dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), 2e-5)


@dataclass(frozen=True)
class Case:
    nodes: int
    prefix: tuple[int, ...]
    queries: int = 0  # 0: all nodes
    kv_heads: int = 1
    groups: int = 1
    head_size: int = 32
    value_size: int = 0  # 0: as the keys
    start: bool = False  # whether rows are padded on the left, each by another length
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    memory: str = "contiguous"
    slack: int = 0
    splits: int | str | None = None  # "fixed": deterministic

    def __str__(self) -> str:
        changed = [
            f"{name}{str(value).removeprefix('torch.')}"
            for name, value in vars(self).items()
            if name not in ("nodes", "prefix") and value != getattr(Case, name, None)
        ]
        return "-".join([f"n{self.nodes}", f"p{'_'.join(map(str, self.prefix))}", *changed])


# The smallest there is, the borders of tiles and of ancestor words, windows at every place.
BORDERS = [
    Case(1, (0,)),
    Case(1, (1,), groups=3),
    Case(2, (0, 5), groups=4, kv_heads=2, splits=2),
    Case(32, (64,), groups=4, head_size=64, start=True),
    Case(33, (63, 65), groups=3, head_size=80, dtype=torch.bfloat16, memory="paged"),
    Case(64, (0, 130), groups=1, kv_heads=3, head_size=64),
    Case(65, (1, 64), groups=3, head_size=64, dtype=torch.float16, splits=3),
    Case(128, (40,), head_size=32),
    Case(5, (33, 0), groups=3, head_size=24, value_size=16),
    Case(33, (0, 40), window=1, groups=3),
    Case(33, (7, 70), window=4, groups=2, splits=2),
    Case(65, (130, 20), window=50, start=True),
    Case(31, (66,), window=500, groups=4),
    Case(2, (0,), softcap=0.5, groups=4),
    Case(33, (65, 2), softcap=30.0, groups=3, scale=3.0),
    Case(64, (90, 7), queries=17, window=20, softcap=30.0, sinks=True, groups=3, head_size=80),
    Case(31, (40, 0), sinks=True, groups=2, splits=3),
    Case(5, (30,), groups=3, kv_heads=2, memory="sliced", slack=9),
    Case(1, (30,), groups=3, kv_heads=2, memory="sliced", slack=1),
    # Long enough that the plan splits by itself, and into chunks.
    Case(3, (700, 90), groups=2, head_size=64, dtype=torch.float16),
    Case(3, (1030, 40), groups=2, head_size=64, dtype=torch.bfloat16, splits="fixed", start=True),
]
FACTORS: dict[str, tuple[Any, ...]] = {
    "nodes": (1, 2, 17, 31, 33, 64, 65, 128),
    "groups": tuple(range(1, 9)),
    "sizes": ((64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (64, 128)),
    "prefix": ((0,), (15, 64), (1, 70), (150,)),
    "queries": ("all", "one", "half"),
    "kv_heads": (1, 2),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "window": (0, 0, 1, 9, 60),
    "softcap": (0.0, 30.0),
    "sinks": (False, True),
    "start": (False, True),
    "memory": ("contiguous", "transposed", "sliced", "paged"),
    "splits": (None, 1, 2, 3, 7, "fixed"),
    "slack": (0, 7),
}
# An interpreted program takes tens of milliseconds; those of float32 own 16 or 32 rows.
MAX_ROWS = 128
MAX_PARTIAL_ROWS = 512


def _queries(chosen: dict[str, Any]) -> int:
    nodes = chosen["nodes"]
    return {"all": nodes, "one": 1, "half": (nodes + 1) // 2}[chosen["queries"]]


def _is_small(chosen: dict[str, Any]) -> bool:
    rows = _queries(chosen) * chosen["groups"] * chosen["kv_heads"]
    splits = chosen["splits"] if isinstance(chosen["splits"], int) else 1
    return rows <= MAX_ROWS and rows * splits <= MAX_PARTIAL_ROWS


def _sampled(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Combinations of factors in which every pair of values occurs, found greedily."""
    rng = random.Random(seed)

    def pairs(chosen: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, x, b, y) for (a, x), (b, y) in itertools.combinations(chosen.items(), 2)}

    def values(chosen: dict[str, int]) -> dict[str, Any]:
        return {name: FACTORS[name][index] for name, index in chosen.items()}

    places = {name: range(len(choices)) for name, choices in FACTORS.items()}
    missing: dict[tuple[str, int, str, int], None] = {}  # in a fixed order, unlike a set
    for a, b in itertools.combinations(FACTORS, 2):
        missing |= dict.fromkeys(itertools.product([a], places[a], [b], places[b]))
    while missing:
        # Starting from a pair that is missing makes sure that none is forgotten.
        a, x, b, y = next(iter(missing))
        best, gain = None, 0
        for _ in range(50):
            chosen = {name: rng.choice(place) for name, place in places.items()} | {a: x, b: y}
            new = len(pairs(chosen) & missing.keys())
            if new > gain and _is_small(values(chosen)):
                best, gain = chosen, new
        if best is None:  # too large together
            del missing[a, x, b, y]
            continue
        for pair in pairs(best):
            missing.pop(pair, None)
        yield values(best)


def _case(chosen: dict[str, Any]) -> Case:
    head_size, value_size = chosen["sizes"]
    others = {name: value for name, value in chosen.items() if name != "sizes"}
    others["queries"] = _queries(chosen)
    return Case(**others, head_size=head_size, value_size=value_size)


CASES = BORDERS + [_case(chosen) for chosen in _sampled()]


@dataclass
class Inputs:
    """What a case calls the op with; `key` and `value` are not paged, `cache` is as in memory."""

    query: Tensor
    key: Tensor
    value: Tensor
    cache: tuple[Tensor, Tensor]
    forest: Forest
    layout: TreeLayout
    options: dict[str, Any]
    launch: dict[str, Any]


def _memory(shape: tuple[int, ...], memory: str, dtype: torch.dtype, fill: float) -> Tensor:
    """A cache view [B, K, S, D] as libraries hand it out, full of `fill`."""
    batch, kv_heads, slots, head_size = shape
    if memory == "transposed":
        return torch.full((batch, slots, kv_heads, head_size), fill, dtype=dtype).transpose(1, 2)
    if memory == "sliced":
        buffer = torch.full((batch, kv_heads, slots + 13, head_size + 8), fill, dtype=dtype)
        return buffer[:, :, 6 : 6 + slots, :head_size]
    return torch.full(shape, fill, dtype=dtype)


def paged(key: Tensor, value: Tensor, used: list[int], seed: int) -> tuple[list[Tensor], Tensor]:
    """Both caches in pages dealt out at random, some unused and full of NaN, and the table.

    Entries of the table beyond the pages that hold the first `used[b]` slots are out of range.
    """
    batch, _, slots, _ = key.shape
    a_row = -(-slots // PAGE)
    count = batch * a_row + 3
    order = random.Random(seed).sample(range(count), batch * a_row)
    table = torch.tensor(order, dtype=torch.int32).view(batch, a_row)
    pools = []
    for cache in (key, value):
        pool = cache.new_full((count, cache.shape[1], PAGE, cache.shape[3]), float("nan"))
        for b, s in itertools.product(range(batch), range(slots)):
            pool[table[b, s // PAGE], :, s % PAGE] = cache[b, :, s]
        pools.append(pool)
    for b in range(batch):
        table[b, -(-used[b] // PAGE) :] = 10**9
    return pools, table


def build(case: Case, hidden: float, seed: int = 0) -> Inputs:
    """Random inputs of a case, with `hidden` in every slot that no query may read."""
    generator = torch.Generator().manual_seed(seed)
    start = [min(p, 3 + 40 * b) for b, p in enumerate(case.prefix)] if case.start else None
    forest = random_forest(case.nodes, list(case.prefix), seed, start)
    queries = case.queries or case.nodes
    batch, heads = len(case.prefix), case.kv_heads * case.groups
    slots = max(case.prefix) + case.slack + case.nodes
    # Queries as a projection gives them: heads inside nodes.
    query = torch.randn(batch, queries, heads, case.head_size, generator=generator)
    query = query.to(case.dtype).transpose(1, 2)
    key, value = (
        _memory((batch, case.kv_heads, slots, size), case.memory, case.dtype, hidden)
        for size in (case.head_size, case.value_size or case.head_size)
    )
    for b, prefix in enumerate(case.prefix):
        read = set()
        for q in range(case.nodes - queries, case.nodes):
            read |= set(forest.visible(b, q, case.window))
            # A window never hides whole nodes from the kernel, which has them in the cache anyway.
            read |= {prefix + n for n in forest.ancestors(b, q)}
        index = torch.tensor(sorted(read))
        for cache in (key, value):
            content = torch.randn(
                case.kv_heads, len(index), cache.shape[3], generator=generator
            ).to(case.dtype)
            cache[b, :, index] = content
    cache, table = (key, value), None
    if case.memory == "paged":
        cache, table = paged(key, value, [p + case.nodes for p in case.prefix], seed)
    sinks = torch.randn(heads, generator=generator).to(case.dtype) if case.sinks else None
    options = {"window": case.window, "softcap": case.softcap, "scale": case.scale, "sinks": sinks}
    fixed = case.splits == "fixed"
    launch = {"deterministic": fixed, "num_splits": None if fixed else case.splits}
    layout = forest.layout(queries, case.slack, table)
    return Inputs(query, key, value, tuple(cache), forest, layout, options, launch)


def hidden_fill(case: Case, backend: str) -> float:
    """What may be in hidden slots: anything, except where torch's own attention multiplies it."""
    sees_through = case.softcap > 0 or case.sinks or case.memory == "paged"
    return float("nan") if backend == "triton" or sees_through else 0.0


def run(inputs: Inputs, backend: str, **changes: Any) -> Tensor:
    """The op's result alone."""
    arguments = {**inputs.options, **inputs.launch, "backend": backend, **changes}
    out = tree_attention(inputs.query, *inputs.cache, inputs.layout, **arguments)
    assert out.dtype is inputs.query.dtype
    return out


def oracle(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return attention_oracle(inputs.query, inputs.key, inputs.value, inputs.forest, **inputs.options)


def torch_itself(inputs: Inputs) -> Tensor:
    """Attention as transformers calls it in the dtype of the inputs: repeated heads, dense mask."""
    query, options = inputs.query, inputs.options
    groups = query.shape[1] // inputs.key.shape[1]
    # Hidden slots may hold NaN here, which torch's own attention does not get past.
    key, value = (
        x.nan_to_num(0.0).repeat_interleave(groups, 1) for x in (inputs.key, inputs.value)
    )
    forest, queries = inputs.forest, query.shape[2]
    mask = torch.zeros(query.shape[0], 1, queries, key.shape[2], dtype=torch.bool)
    for b, m in itertools.product(range(query.shape[0]), range(queries)):
        node = forest.num_nodes - queries + m
        mask[b, 0, m, forest.visible(b, node, options["window"])] = True
    scale = options["scale"] or query.shape[-1] ** -0.5
    if not options["softcap"] and options["sinks"] is None:
        return scaled_dot_product_attention(query, key, value, mask, scale=scale)
    scores = query @ key.transpose(2, 3) * scale
    if options["softcap"]:
        scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    scores = scores.masked_fill(~mask, float("-inf"))
    if options["sinks"] is not None:
        sink = options["sinks"].view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    return weights @ value


def is_close(out: Tensor, expected: Tensor, own: Tensor) -> bool:
    """Whether `out` is as near to float64 as it has to be, given what torch itself makes of it."""
    error, torchs = ((x.double() - expected).abs().max() for x in (out, own))
    return bool(error <= FACTOR * torchs + FLOOR[out.dtype] * expected.abs().max())


def assert_close(out: Tensor, expected: Tensor, own: Tensor) -> None:
    error, torchs = ((x.double() - expected).abs().max().item() for x in (out, own))
    assert is_close(out, expected, own), f"{error:.2e} from float64, torch itself {torchs:.2e}"


def as_float64(case: Case) -> Case:
    return replace(case, dtype=torch.float64)
