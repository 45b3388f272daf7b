"""The compiled kernels on a GPU: the interpreter's cases, and what the interpreter cannot show.

Without a GPU there is no test here. With one, every test of an op that takes a backend runs once
more, as it is, on CPU tensors; only the call of the op goes to the device and back.
"""

import importlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from selfspec_kernels.tuning.gate import ops
from torch import Tensor

DEVICE = torch.device("cuda")
HAS_GPU = torch.cuda.is_available()
# They start a process, which knows nothing of the detour below.
ELSEWHERE = {"test_rows_beyond_32_bits"}


def placed(value: Any, device: torch.device) -> Any:
    """The same on `device`, tensors in their strides and with the alignment that they have."""
    if isinstance(value, Tensor):
        single = value
        for dim, stride in enumerate(value.stride()):
            if stride == 0 and value.shape[dim] > 1:  # many entries, one place
                single = single.narrow(dim, 0, 1)
        last = sum(
            (size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True)
        )
        offset = value.storage_offset() % 64
        there = torch.empty(offset + last + 1, dtype=value.dtype, device=device)
        there.as_strided(single.shape, single.stride(), offset).copy_(single)
        return there.as_strided(value.shape, value.stride(), offset)
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.init]
        return replace(value, **{name: placed(getattr(value, name), device) for name in names})
    if type(value) in (list, tuple):
        return type(value)(placed(item, device) for item in value)
    return value


def returned(value: Any, original: Any) -> None:
    """Copy into `original` what the op has written to its argument."""
    if isinstance(original, Tensor):
        here = value.cpu()
        if not torch.equal(*(x.contiguous().view(torch.uint8) for x in (here, original))):
            original.copy_(here)
    elif type(original) in (list, tuple):
        for one, other in zip(value, original, strict=True):
            returned(one, other)


def fetched(value: Any) -> Any:
    """The result on the CPU."""
    if isinstance(value, Tensor):
        return value.cpu()
    if is_dataclass(value):
        found = {field.name: fetched(getattr(value, field.name)) for field in fields(value)}
        return replace(value, **found)
    return tuple(map(fetched, value)) if type(value) is tuple else value


def detoured(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """`launcher` for tensors on a CPU, run on the device."""

    @wraps(launcher)
    def call(*args: Any, **kwargs: Any) -> Any:
        there, named = placed(args, DEVICE), placed([*kwargs.values()], DEVICE)
        result = launcher(*there, **dict(zip(kwargs, named, strict=True)))
        returned((*there, *named), (*args, *kwargs.values()))
        return fetched(result)

    return call


@pytest.fixture
def _detour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `backend="triton"` take CPU tensors, by way of the device."""
    for op in ops():
        package = importlib.import_module(f"selfspec_kernels.{op}")
        monkeypatch.setattr(package, "use_triton", lambda op, backend, _: backend == "triton")
        for path in Path(package.__file__ or "").parent.glob("kernel*.py"):
            module = importlib.import_module(f"selfspec_kernels.{op}.{path.stem}")
            for name, value in list(vars(module).items()):
                if name.endswith("_triton"):
                    monkeypatch.setattr(module, name, detoured(value))


def on_device(function: FunctionType) -> FunctionType:
    """The same test, its backend always the kernel, and detoured."""
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    marks = [pytest.mark.gpu.mark, pytest.mark.usefixtures("_detour").mark]
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize" and mark.args[0] == "backend":
            mark = pytest.mark.parametrize("backend", ["triton"]).mark
        if mark.name != "interpret":
            marks.append(mark)
    copy.pytestmark = marks
    return copy


def collected() -> dict[str, FunctionType]:
    """The tests of all ops that take a backend."""
    found = {}
    files = {path for op in ops() for path in Path(__file__).parent.glob(f"test_{op}*.py")}
    for stem in sorted(path.stem for path in files if not path.stem.endswith("_mutants")):
        module = importlib.import_module(f"tests.ops.{stem}")
        for name, value in vars(module).items():
            mine = isinstance(value, FunctionType) and value.__module__ == module.__name__
            if not mine or not name.startswith("test_") or name in ELSEWHERE:
                continue
            if "backend" in value.__code__.co_varnames[: value.__code__.co_argcount]:
                found[f"{stem}_{name.removeprefix('test_')}"] = on_device(value)
    return found


def captured(launch: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = launch()
    return graph, result


def assert_same_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(*(x.contiguous().view(torch.uint8) for x in (one, other)))


def replays_with_new_inputs(work: Any) -> None:
    from tests.benchmarks.gpu_rows import flat

    tensors, new = work.inputs(), work.inputs()
    launch = partial(work.method, backend="triton")
    graph, result = captured(partial(launch, *tensors))
    for tensor, value in zip(tensors, new, strict=True):
        tensor.copy_(value)
    graph.replay()
    assert_same_bits(flat(result, tensors), flat(launch(*new), new))


def waits_for_nothing(work: Any) -> None:
    tensors = work.inputs()
    work.method(*tensors, backend="triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        work.method(*tensors, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def attention_replays_with_new_inputs(case: Any) -> None:
    from selfspec_kernels import tree_attention

    tensors, layout = case.inputs(DEVICE), case.layout(DEVICE)
    launch = partial(tree_attention, *tensors, layout, deterministic=case.deterministic)
    graph, result = captured(launch)
    for tensor in tensors:
        tensor.normal_()
    # The lengths of the next step are in the same tensor; the bound is what was captured.
    layout.prefix_len.sub_(3)
    graph.replay()
    assert_same_bits([result], [launch()])


if HAS_GPU:
    from tests.benchmarks.gpu_attention import TINY
    from tests.benchmarks.gpu_rows import works

    globals().update(collected())
    WORKS = [pytest.param(work, id=f"{work.op}, {work.case}") for work in works(DEVICE, True)]
    test_replays_with_new_inputs = pytest.mark.gpu(
        pytest.mark.parametrize("work", WORKS)(replays_with_new_inputs)
    )
    test_waits_for_nothing = pytest.mark.gpu(
        pytest.mark.parametrize("work", WORKS)(waits_for_nothing)
    )
    test_attention_replays_with_new_inputs = pytest.mark.gpu(
        pytest.mark.parametrize("case", TINY)(attention_replays_with_new_inputs)
    )
