"""What must hold of `tree_attention` whatever it computes: equivalences, and bits that stay."""

from dataclasses import replace

import pytest
import torch
from selfspec_kernels import TreeLayout, tree_attention
from torch.nn.functional import scaled_dot_product_attention

from .attention_cases import PAGE, Case, assert_close, build, hidden_fill, oracle, run, torch_itself
from .trees import BACKENDS, Forest, chain

# float32 sums of some hundred terms of size 1, in two orders.
CLOSE = {"rtol": 4e-6, "atol": 4e-6}


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
    torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("window", "softcap", "splits"), [(0, 0.0, None), (6, 0.0, None), (6, 30.0, None), (0, 0.0, 2)]
)
def test_every_path_unrolled_is_an_ordinary_sequence(backend, window, softcap, splits):
    nodes, prefix = 17, 9
    inputs = build(Case(nodes, (prefix,), groups=2, window=window, softcap=softcap), 0.0)
    key, value = torch.randn(1, 1, prefix + nodes, 32), torch.randn(1, 1, prefix + nodes, 32)
    options = {
        "window": window,
        "softcap": softcap,
        "num_splits": splits,
        "backend": backend,
    }
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
        torch.testing.assert_close(out[:, :, path], sequence, **CLOSE)


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
    torch.testing.assert_close(out[:, :, moved], again, **CLOSE)


@pytest.mark.interpret
@pytest.mark.parametrize("memory", ["contiguous", "paged"])
def test_splits_change_rounding_only(memory):
    case = Case(9, (100, 3, 0), groups=3, head_size=64, sinks=True, start=True, memory=memory)
    inputs = build(case, float("nan"))
    whole, log_sum = _with_lse(inputs, num_splits=1)
    for changes in ({"num_splits": 2}, {"num_splits": 7}, {"deterministic": True}):
        out, lse = _with_lse(inputs, **changes)
        torch.testing.assert_close(out, whole, **CLOSE)
        torch.testing.assert_close(lse, log_sum, **CLOSE)


def _with_lse(inputs, **launch):
    return tree_attention(
        inputs.query,
        *inputs.cache,
        inputs.layout,
        **{**inputs.options, **inputs.launch, **launch},
        return_lse=True,
        backend="triton",
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 30.0}, {"sinks": torch.zeros(6)}, {"num_splits": 3}, {"deterministic": True}],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_query_that_sees_nothing_gives_zero(backend, options, dtype):
    if backend == "triton" and dtype is torch.float64:
        dtype = torch.float32
    layout = TreeLayout(
        torch.tensor([[[1], [0], [5]], [[0], [0], [0]]]),
        torch.tensor([[0, 1, 1], [0, 1, 1]], dtype=torch.int32),
        torch.tensor([0, 0], dtype=torch.int32),
        4,
    )
    query = torch.randn(2, 6, 3, 32).to(dtype)
    key, value = torch.randn(2, 2, 7, 32).to(dtype), torch.randn(2, 2, 7, 16).to(dtype)
    out = tree_attention(query, key, value, layout, backend=backend, **options)
    again, lse = tree_attention(
        query, key, value, layout, backend=backend, **options, return_lse=True
    )
    assert torch.isfinite(out).all()
    blind = torch.tensor([[False, True, False], [True, True, True]])
    assert (out.transpose(1, 2)[blind] == 0).all()
    assert (out.transpose(1, 2)[~blind] != 0).all()
    assert (again.transpose(1, 2)[blind] == 0).all()
    alone = 0.0 if "sinks" in options else float("-inf")
    assert (lse.transpose(1, 2)[blind] == alone).all()
    assert torch.isfinite(lse.transpose(1, 2)[~blind]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_of_minus_infinity_is_no_sink(backend):
    inputs = build(Case(5, (7, 0), groups=2), float("nan"))
    inputs.options["sinks"] = torch.full((2,), float("-inf"))
    out = run(inputs, backend)
    inputs.options["sinks"] = None
    assert_close(out, oracle(inputs)[0], torch_itself(inputs))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_stay_finite(backend):
    inputs = build(Case(9, (30,), groups=2, scale=100.0), 0.0)
    for softcap in (0.0, 30.0):
        inputs.options["softcap"] = softcap
        # Scores of some thousand carry an absolute error of 1e-4, whatever computes them.
        out, expected = run(inputs, backend).double(), oracle(inputs)[0]
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


HIDING = [
    Case(33, (63, 65), groups=3, head_size=80),
    Case(33, (7, 70), window=4, groups=3, head_size=64, start=True, splits=2),
    Case(9, (60, 7), queries=5, window=20, softcap=30.0, sinks=True, groups=3, splits="fixed"),
    Case(17, (40, 3), groups=2, start=True, slack=20, memory="paged"),
]


@pytest.mark.parametrize("case", HIDING, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_slots_change_no_bit(backend, case):
    # Pages that no row uses hold NaN in both.
    if hidden_fill(case, backend) == 0.0:
        case = replace(case, softcap=30.0)
    clean, poisoned = build(case, 0.0), build(case, float("nan"))
    assert torch.equal(run(clean, backend), run(poisoned, backend))


@pytest.mark.parametrize("case", HIDING[1:], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_left_alone(backend, case):
    inputs = build(case, 0.0)
    layout = inputs.layout
    tensors = [inputs.query, *inputs.cache, layout.ancestors, layout.depth, layout.prefix_len]
    tensors += [x for x in (layout.start, layout.block_table) if x is not None]
    before = [tensor.clone() for tensor in tensors]
    run(inputs, backend)
    for old, new in zip(before, tensors, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "case",
    [
        Case(3, (1100, 5, 2060), groups=2, head_size=64, dtype=torch.float16, sinks=True),
        Case(9, (70, 1500), groups=3, window=1200, softcap=30.0, start=True, head_size=64),
    ],
    ids=str,
)
def test_deterministic_rows_do_not_depend_on_batch_and_bound(case):
    together = build(replace(case, splits="fixed"), float("nan"))
    out, lse = _with_lse(together)
    for b in range(len(case.prefix)):
        forest, slack = together.forest.row(b), 2500 * (b % 2)
        slots = case.prefix[b] + case.nodes + slack
        cache = [torch.full((1, 1, slots, 64), float("nan"), dtype=case.dtype) for _ in range(2)]
        for mine, shared in zip(cache, together.cache, strict=True):
            kept = min(slots, shared.shape[2])
            mine[:, :, :kept] = shared[b, :, :kept]
        alone = replace(
            together, query=together.query[b][None], cache=cache, layout=forest.layout(slack=slack)
        )
        once, log_sum = _with_lse(alone)
        assert torch.equal(once, out[b][None])
        assert torch.equal(log_sum, lse[b][None])


@pytest.mark.interpret
def test_rows_of_a_cache_beyond_two_to_the_31_items():
    inputs = build(Case(5, (30, 3, 35), groups=3, dtype=torch.float16), 0.0)
    cache = _far_apart(3, 40)
    cache.copy_(inputs.key)
    far = replace(inputs, key=cache, value=cache, cache=(cache, cache))
    assert_close(run(far, "triton"), oracle(far)[0], torch_itself(far))


@pytest.mark.interpret
def test_pages_beyond_two_to_the_31_items():
    inputs = build(Case(5, (11,), groups=3, dtype=torch.float16), 0.0)
    pages = _far_apart(3, PAGE)
    pages[2].copy_(inputs.key[0])
    table = torch.tensor([[2]], dtype=torch.int32)
    layout = inputs.forest.layout(block_table=table)
    far = replace(inputs, value=inputs.key, cache=(pages, pages), layout=layout)
    assert_close(run(far, "triton"), oracle(far)[0], torch_itself(far))


def _far_apart(rows, slots):
    """Zeros [rows, 1, slots, 32], 2**30 items from row to row; touched in places only."""
    apart = 2**30 + 64
    storage = torch.UntypedStorage(((rows - 1) * apart + slots * 32) * 2)
    shape, strides = (rows, 1, slots, 32), (apart, slots * 32, 32, 1)
    return torch.tensor([], dtype=torch.float16).set_(storage, 0, shape, strides)
