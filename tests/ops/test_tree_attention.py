"""`tree_attention` against float64, by its reference and by its kernel in Triton's interpreter.

Tolerances are absolute and relative at once. float32 and float64 leave room for some thousand
rounded sums; the 16-bit ones for one rounding of the weights and one of the output, where the
interpreter truncates bfloat16 instead of rounding it.
"""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from selfspec_kernels import TreeLayout, tree_attention
from selfspec_kernels.tree_attention.blocks import AMD, NVIDIA, choose_blocks
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .trees import BACKENDS, Forest, attention_oracle, chain, random_forest

TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 4e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


@dataclass(frozen=True)
class Case:
    nodes: int
    prefix: tuple[int, ...]
    queries: int = 0  # 0: all nodes
    kv_heads: int = 1
    groups: int = 1
    head_size: int = 32
    value_size: int = 0  # 0: as the keys
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    memory: str = "contiguous"
    slack: int = 0

    def __str__(self) -> str:
        changed = [
            f"{name}{str(value).removeprefix('torch.')}"
            for name, value in vars(self).items()
            if name not in ("nodes", "prefix") and value != getattr(Case, name, None)
        ]
        return "-".join([f"n{self.nodes}", f"p{'_'.join(map(str, self.prefix))}", *changed])


CASES = [
    # The smallest there is, and the borders of tiles and ancestor words.
    Case(1, (0,)),
    Case(1, (1,), groups=3),
    Case(2, (0, 5), groups=4, kv_heads=2),
    Case(31, (15, 16, 17), groups=3, kv_heads=2),
    Case(32, (64,), groups=4, head_size=64),
    Case(33, (63, 65), groups=3, head_size=80),
    Case(64, (0, 130), groups=1, kv_heads=3, head_size=64),
    Case(65, (1, 64), groups=3, head_size=64),
    Case(65, (33,), groups=4, kv_heads=2, head_size=128),
    Case(128, (40,), head_size=32),
    # Head sizes that are padded, and values unlike keys.
    Case(7, (20, 3), groups=7, head_size=96),
    Case(9, (70,), groups=2, head_size=256),
    Case(5, (33, 0), groups=3, head_size=24, value_size=16),
    Case(33, (66,), groups=4, head_size=64, value_size=128),
    Case(12, (9, 80), groups=3, head_size=128, value_size=80),
    # A drafter that extends a tree: the last queries only.
    Case(31, (12, 40), queries=1, groups=3),
    Case(64, (5,), queries=31, groups=4, kv_heads=2, head_size=64),
    Case(65, (70, 0), queries=2, groups=3, head_size=80),
    # Sliding windows: one position, inside the tree, inside the prefix, beyond both.
    Case(33, (0, 40), window=1, groups=3),
    Case(33, (7, 70), window=4, groups=3, head_size=64),
    Case(65, (130, 20), window=50, groups=1, kv_heads=2),
    Case(31, (66,), window=500, groups=4),
    Case(64, (100, 3), queries=5, window=9, groups=3, head_size=80, value_size=64),
    # Soft cap, sinks, scale, and everything at once.
    Case(33, (65, 2), softcap=30.0, groups=3, scale=3.0),
    Case(2, (0,), softcap=0.5, groups=4),
    Case(31, (40, 0), sinks=True, groups=4, kv_heads=2),
    Case(65, (64,), sinks=True, window=8, groups=3, head_size=64),
    Case(64, (90, 7), queries=33, window=20, softcap=30.0, sinks=True, groups=3, head_size=80),
    # Views of a cache, and a bound of the prefix that is not tight.
    Case(33, (50, 8), groups=3, kv_heads=2, memory="transposed", head_size=64),
    Case(33, (50, 8), groups=3, kv_heads=2, memory="sliced", slack=9, head_size=80),
    Case(5, (30,), groups=3, kv_heads=2, memory="transposed", softcap=30.0, value_size=64),
    Case(1, (30,), groups=3, kv_heads=2, memory="sliced", slack=1),
]
LOW_PRECISION = [
    replace(case, dtype=dtype)
    for dtype, case in itertools.product(
        (torch.float16, torch.bfloat16),
        (
            Case(33, (65, 2), groups=3, head_size=80, memory="sliced"),
            Case(65, (40,), groups=4, head_size=64, value_size=128, window=30),
            Case(9, (0, 90), groups=2, head_size=128, softcap=30.0, sinks=True),
            Case(64, (128,), groups=3, queries=20, head_size=256, memory="transposed"),
        ),
    )
]


@dataclass
class Inputs:
    query: Tensor
    key: Tensor
    value: Tensor
    forest: Forest
    layout: TreeLayout
    options: dict[str, object]


def _cache(shape: tuple[int, ...], memory: str, dtype: torch.dtype, fill: float) -> Tensor:
    """A cache view [B, K, S, D] as libraries hand it out, full of `fill`."""
    batch, kv_heads, slots, head_size = shape
    if memory == "transposed":
        return torch.full((batch, slots, kv_heads, head_size), fill, dtype=dtype).transpose(1, 2)
    if memory == "sliced":
        buffer = torch.full((batch, kv_heads, slots + 13, head_size + 8), fill, dtype=dtype)
        return buffer[:, :, 6 : 6 + slots, :head_size]
    return torch.full(shape, fill, dtype=dtype)


def build(case: Case, hidden: float, seed: int = 0) -> Inputs:
    """Random inputs of a case, with `hidden` in every slot that no query may read."""
    generator = torch.Generator().manual_seed(seed)
    forest = random_forest(case.nodes, list(case.prefix), seed)
    queries = case.queries or case.nodes
    batch, heads = len(case.prefix), case.kv_heads * case.groups
    slots = max(case.prefix) + case.slack + case.nodes
    # Queries as a projection gives them: heads inside nodes.
    query = torch.randn(batch, queries, heads, case.head_size, generator=generator)
    query = query.to(case.dtype).transpose(1, 2)
    key, value = (
        _cache((batch, case.kv_heads, slots, size), case.memory, case.dtype, hidden)
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
    sinks = torch.randn(heads, generator=generator).to(case.dtype) if case.sinks else None
    options = {"window": case.window, "softcap": case.softcap, "scale": case.scale, "sinks": sinks}
    return Inputs(query, key, value, forest, forest.layout(queries, case.slack), options)


def hidden_fill(case: Case, backend: str) -> float:
    """What may be in hidden slots: anything, except where torch's own attention multiplies it."""
    explicit = case.softcap > 0 or case.sinks
    return float("nan") if backend == "triton" or explicit else 0.0


def run(inputs: Inputs, backend: str) -> Tensor:
    out = tree_attention(
        inputs.query, inputs.key, inputs.value, inputs.layout, backend=backend, **inputs.options
    )
    assert out.dtype is inputs.query.dtype
    return out


def assert_matches(out: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES + LOW_PRECISION, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_oracle(backend, case):
    inputs = build(case, hidden_fill(case, backend))
    expected = attention_oracle(
        inputs.query, inputs.key, inputs.value, inputs.forest, **inputs.options
    )
    assert_matches(run(inputs, backend), expected)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_float64_is_exact(case):
    inputs = build(replace(case, dtype=torch.float64), 0.0)
    expected = attention_oracle(
        inputs.query, inputs.key, inputs.value, inputs.forest, **inputs.options
    )
    assert_matches(run(inputs, "auto"), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_chain_is_causal_attention(backend):
    nodes, prefix, groups = 33, 20, 3
    inputs = build(Case(nodes, (prefix,), groups=groups, head_size=64), 0.0)
    key = torch.randn(1, 1, prefix + nodes, 64)
    value = torch.randn(1, 1, prefix + nodes, 64)
    out = tree_attention(inputs.query, key, value, chain(nodes, [prefix]).layout(), backend=backend)
    causal = torch.ones(nodes, prefix + nodes, dtype=torch.bool).tril(prefix)
    expected = scaled_dot_product_attention(
        inputs.query, key.expand(-1, groups, -1, -1), value.expand(-1, groups, -1, -1), causal
    )
    torch.testing.assert_close(out, expected, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (6, 0.0), (6, 30.0)])
def test_every_path_unrolled_is_an_ordinary_sequence(backend, window, softcap):
    nodes, prefix = 17, 9
    inputs = build(Case(nodes, (prefix,), groups=2, window=window, softcap=softcap), 0.0)
    key, value = torch.randn(1, 1, prefix + nodes, 32), torch.randn(1, 1, prefix + nodes, 32)
    options = {"window": window, "softcap": softcap, "backend": backend}
    out = tree_attention(inputs.query, key, value, inputs.layout, **options)
    leaves = set(range(nodes)) - set(inputs.forest.parents[0])
    assert len(leaves) > 2
    for leaf in leaves:
        path = inputs.forest.ancestors(0, leaf)[::-1]
        slots = [*range(prefix), *(prefix + n for n in path)]
        sequence = tree_attention(
            inputs.query[:, :, path],
            key[:, :, slots],
            value[:, :, slots],
            chain(len(path), [prefix]).layout(),
            **options,
        )
        torch.testing.assert_close(out[:, :, path], sequence, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_order_of_siblings_does_not_matter(backend):
    prefix = 6
    forest = Forest([[-1, 0, 0, 0, 1, 2, 2, 3]], [prefix])
    moved = [0, 3, 1, 2, 7, 4, 6, 5]  # node moved[i] becomes node i; parents stay before children
    renamed = {-1: -1} | {old: new for new, old in enumerate(moved)}
    permuted = Forest([[renamed[forest.parents[0][old]] for old in moved]], [prefix])
    inputs = build(Case(8, (prefix,), groups=3), 0.0)
    key, value = torch.randn(1, 1, prefix + 8, 32), torch.randn(1, 1, prefix + 8, 32)
    slots = [*range(prefix), *(prefix + n for n in moved)]
    out = tree_attention(inputs.query, key, value, forest.layout(), window=8, backend=backend)
    again = tree_attention(
        inputs.query[:, :, moved],
        key[:, :, slots],
        value[:, :, slots],
        permuted.layout(),
        window=8,
        backend=backend,
    )
    torch.testing.assert_close(out[:, :, moved], again, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("value_size", [32, 16])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"sinks": torch.zeros(6)}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_query_that_sees_nothing_gives_zero(backend, options, value_size, dtype):
    if backend == "triton" and dtype is torch.float64:
        dtype = torch.float32
    layout = TreeLayout(
        torch.tensor([[[1], [0], [5]], [[0], [0], [0]]]),
        torch.tensor([[0, 1, 1], [0, 1, 1]], dtype=torch.int32),
        torch.tensor([0, 0], dtype=torch.int32),
        4,
    )
    query = torch.randn(2, 6, 3, 32).to(dtype)
    key, value = torch.randn(2, 2, 7, 32).to(dtype), torch.randn(2, 2, 7, value_size).to(dtype)
    out = tree_attention(query, key, value, layout, backend=backend, **options)
    assert torch.isfinite(out).all()
    blind = torch.tensor([[False, True, False], [True, True, True]])
    assert (out.transpose(1, 2)[blind] == 0).all()
    assert (out.transpose(1, 2)[~blind] != 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_of_minus_infinity_is_no_sink(backend):
    inputs = build(Case(5, (7, 0), groups=2), float("nan"))
    inputs.options["sinks"] = torch.full((2,), float("-inf"))
    out = run(inputs, backend)
    inputs.options["sinks"] = None
    expected = attention_oracle(inputs.query, inputs.key, inputs.value, inputs.forest)
    assert_matches(out, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_stay_finite(backend):
    inputs = build(Case(9, (30,), groups=2, scale=100.0), 0.0)
    for softcap in (0.0, 30.0):
        inputs.options["softcap"] = softcap
        expected = attention_oracle(
            inputs.query, inputs.key, inputs.value, inputs.forest, **inputs.options
        )
        # Scores of some thousand carry an absolute error of 1e-4, whatever computes them.
        torch.testing.assert_close(run(inputs, backend).double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", [CASES[5], CASES[20], CASES[27]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_slots_change_no_bit(backend, case):
    case = replace(case, softcap=case.softcap or (0.0 if backend == "triton" else 30.0))
    clean, poisoned = build(case, 0.0), build(case, float("nan"))
    assert torch.equal(run(clean, backend), run(poisoned, backend))


@pytest.mark.parametrize("case", [CASES[27], CASES[29]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_left_alone(backend, case):
    inputs = build(case, 0.0)
    layout = inputs.layout
    tensors = [inputs.query, inputs.key, inputs.value]
    tensors += [layout.ancestors, layout.depth, layout.prefix_len]
    before = [tensor.clone() for tensor in tensors]
    run(inputs, backend)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@pytest.mark.interpret
def test_a_row_does_not_depend_on_the_batch():
    together = build(Case(33, (70, 5, 128), groups=3, softcap=30.0, window=60), float("nan"))
    out = run(together, "triton")
    for b, prefix in enumerate(together.forest.prefix):
        forest = Forest([together.forest.parents[b]], [prefix])
        tensors = (together.query[b][None], together.key[b][None], together.value[b][None])
        alone = Inputs(*tensors, forest, forest.layout(), together.options)
        assert torch.equal(run(alone, "triton"), out[b][None])


@pytest.mark.interpret
def test_rows_of_a_cache_beyond_two_to_the_31_items():
    rows, apart, slots = 3, 2**30 + 64, 40
    storage = torch.UntypedStorage(((rows - 1) * apart + slots * 32) * 2)  # touched in places only
    cache = torch.tensor([], dtype=torch.float16).set_(
        storage, 0, (rows, 1, slots, 32), (apart, slots * 32, 32, 1)
    )
    inputs = build(Case(5, (30, 3, 35), groups=3, dtype=torch.float16), 0.0)
    cache.copy_(inputs.key)
    out = tree_attention(inputs.query, cache, cache, inputs.layout, backend="triton")
    assert_matches(out, attention_oracle(inputs.query, inputs.key, inputs.key, inputs.forest))


def test_auto_takes_the_reference_for_cpu_tensors():
    inputs = build(CASES[3], 0.0)
    assert torch.equal(run(inputs, "auto"), run(inputs, "reference"))


def test_the_kernel_refuses_cpu_tensors_unless_interpreted():
    inputs = build(CASES[0], 0.0)
    with pytest.raises(
        ValueError, match=r'tree_attention: backend="triton".*cpu.*TRITON_INTERPRET'
    ):
        run(inputs, "triton")


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("dtype", "head_size", "error", "match"),
    [
        (torch.float64, 32, TypeError, "query is torch.float64"),
        (torch.float32, 320, ValueError, "heads of 320 and 320"),
    ],
)
def test_the_kernel_refuses_what_it_does_not_have(dtype, head_size, error, match):
    inputs = build(Case(2, (3,), dtype=dtype, head_size=head_size), 0.0)
    with pytest.raises(error, match=match):
        run(inputs, "triton")


def _arguments():
    inputs = build(Case(3, (4, 2), kv_heads=2, groups=3), 0.0)
    return {
        "query": inputs.query,
        "key": inputs.key,
        "value": inputs.value,
        "layout": inputs.layout,
    }


BAD_ARGUMENTS = {
    "query-dims": ({"query": lambda x: x[0]}, ValueError, "query must have 4 dim"),
    "key-dtype": ({"key": lambda x: x.double()}, TypeError, "key is torch.float64"),
    "value-dtype": ({"value": lambda x: x.half()}, TypeError, "value is torch.float16"),
    "all-int": ({k: lambda x: x.int() for k in ("query", "key", "value")}, TypeError, "floating"),
    "value-device": ({"value": lambda x: x.to("meta")}, ValueError, "value is on meta"),
    "key-stride": ({"key": lambda x: x.mT.contiguous().mT}, ValueError, "key has stride 7"),
    "key-batch": ({"key": lambda x: x[:1]}, ValueError, "key .* does not fit query"),
    "key-size": ({"key": lambda x: x[..., :16]}, ValueError, "key .* does not fit query"),
    "value-slots": ({"value": lambda x: x[:, :, :6]}, ValueError, "value .* does not fit key"),
    "heads": ({"query": lambda x: x[:, :5]}, ValueError, "5 heads, no multiple of the 2"),
    "queries": ({"query": lambda x: x[:, :, 1:]}, ValueError, "layout is for 2 sequences of 3"),
    "slots": (
        {"key": lambda x: x[:, :, :6], "value": lambda x: x[:, :, :6]},
        ValueError,
        r"key has 6 slots.*4 \+ 3",
    ),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap=-1.0"),
    "window": ({"window": -1}, ValueError, "window=-1"),
    "sinks": ({"sinks": torch.zeros(5)}, ValueError, r"sinks has shape \(5,\)"),
    "sinks-device": ({"sinks": torch.zeros(6, device="meta")}, ValueError, "sinks is on meta"),
    "backend": ({"backend": "cuda"}, ValueError, "backend='cuda'"),
}


@pytest.mark.parametrize(
    ("changes", "error", "match"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys()
)
def test_refuses_what_does_not_fit(changes, error, match):
    arguments = _arguments()
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    with pytest.raises(error, match=f"tree_attention: .*{match}"):
        tree_attention(**arguments)


def test_tiles_suit_the_rows():
    for table in (NVIDIA, AMD):
        for (item_size, width), rows in table.items():
            assert all(64 % blocks.n == 0 for blocks in rows)
            assert [blocks.m for blocks in rows] == sorted(blocks.m for blocks in rows)
            amd = table is AMD
            assert choose_blocks(1, width, item_size, amd).m == 16
            assert choose_blocks(10_000, width, item_size, amd) == rows[-1]
            for blocks in rows:
                assert choose_blocks(blocks.m, width, item_size, amd) == blocks
    assert choose_blocks(33, 32, 2, amd=False).m == 64
