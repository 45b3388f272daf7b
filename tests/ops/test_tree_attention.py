"""`tree_attention` against float64, by its reference and by its kernel in Triton's interpreter."""

import pytest
import torch
from selfspec_kernels import tree_attention

from .attention_cases import (
    BORDERS,
    CASES,
    FLOOR,
    LSE_TOLERANCE,
    Case,
    as_float64,
    assert_close,
    build,
    hidden_fill,
    oracle,
    run,
    torch_itself,
)
from .trees import BACKENDS


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_oracle(backend, case):
    inputs = build(case, hidden_fill(case, backend))
    expected, _ = oracle(inputs)
    assert_close(run(inputs, backend), expected, torch_itself(inputs))


@pytest.mark.parametrize("case", [*BORDERS[::2], *CASES[len(BORDERS) :: 5]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_denominators_match_oracle(backend, case):
    inputs = build(case, float("nan"))
    expected, log_sum = oracle(inputs)
    out, lse = tree_attention(
        inputs.query,
        *inputs.cache,
        inputs.layout,
        **inputs.options,
        **inputs.launch,
        return_lse=True,
        backend=backend,
    )
    assert_close(out, expected, torch_itself(inputs))
    assert lse.dtype is torch.float32
    tolerance = LSE_TOLERANCE[case.dtype]
    torch.testing.assert_close(lse.double(), log_sum, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", BORDERS[::3], ids=str)
def test_float64_is_exact(case):
    inputs = build(as_float64(case), 0.0)
    expected, log_sum = oracle(inputs)
    tolerance = 100 * FLOOR[torch.float64]
    torch.testing.assert_close(run(inputs, "auto"), expected, rtol=tolerance, atol=tolerance)
    _, lse = tree_attention(
        inputs.query, *inputs.cache, inputs.layout, **inputs.options, return_lse=True
    )
    assert lse.dtype is torch.float64
    torch.testing.assert_close(lse, log_sum, rtol=tolerance, atol=tolerance)


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
    "splits": ({"num_splits": 0}, ValueError, "num_splits=0"),
    "splits-twice": (
        {"num_splits": 2, "deterministic": True},
        ValueError,
        "num_splits=2 with deterministic=True",
    ),
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


def _pages(**changes):
    inputs = build(Case(3, (20, 2), kv_heads=2, groups=3, memory="paged"), 0.0)
    key, value = inputs.cache
    arguments = {"query": inputs.query, "key": key, "value": value, "layout": inputs.layout}
    return arguments | {name: change(arguments[name]) for name, change in changes.items()}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"key": lambda x: x[:, :, :8], "value": lambda x: x[:, :, :8]}, r"2 pages a row of 8"),
        ({"key": lambda x: x[:0], "value": lambda x: x[:0]}, "key .* has no pages"),
        ({"key": lambda x: x[..., :8]}, r"key .* does not fit query .*\[pages, K, page_size, D\]"),
        ({"value": lambda x: x[1:]}, "value .* does not fit key"),
    ],
)
def test_refuses_pages_that_do_not_fit(changes, match):
    with pytest.raises(ValueError, match=f"tree_attention: .*{match}"):
        tree_attention(**_pages(**changes))
