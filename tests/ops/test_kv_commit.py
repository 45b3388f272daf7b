import random
import sys

import pytest
import torch
from selfspec_kernels import kv_commit
from selfspec_kernels.kv_commit.reference import kv_commit_reference
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from .trees import BACKENDS


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals NaN and -0 differs from 0."""
    return tensor.contiguous().view(torch.uint8)


def expected_after(buffer: Tensor, path, num_accepted, prefix, pages=None) -> Tensor:
    def place(b, slot):
        if pages is None:
            return b, slot
        return pages[b][slot // buffer.shape[2]], slot % buffer.shape[2]

    after = buffer.clone()
    for b in range(len(path)):
        for i in range(1, num_accepted[b] + 1):
            row, slot = place(b, prefix[b] + i)
            from_row, from_slot = place(b, prefix[b] + path[b][i])
            after[row, :, slot] = buffer[from_row, :, from_slot]
    return after


def commit(keys, values, path, num_accepted, prefix, backend, pages=None):
    """Commit, and compare every buffer with moving a clone slot by slot."""
    index = [torch.tensor(x, dtype=torch.int32) for x in (path, num_accepted, prefix)]
    table = None if pages is None else torch.tensor(pages, dtype=torch.int32)
    before = [x.clone() for x in index]
    buffers = [*keys, *values]
    expected = [expected_after(buffer, path, num_accepted, prefix, pages) for buffer in buffers]
    assert kv_commit(keys, values, *index, block_table=table, backend=backend) is None
    for got, wanted in zip(buffers, expected, strict=True):
        assert torch.equal(bits(got), bits(wanted))
    assert all(torch.equal(a, b) for a, b in zip(before, index, strict=True))


def buffers_like(shapes, dtype, memory="contiguous"):
    result = []
    for batch, heads, slots, size in shapes:
        if memory == "transposed":
            buffer = torch.randn(batch, slots, heads, size).to(dtype).transpose(1, 2)
        elif memory == "sliced":
            buffer = torch.randn(batch, heads + 1, slots + 3, 2 * size).to(dtype)
            buffer = buffer[:, 1:, 2:-1, ::2]
        else:
            buffer = torch.randn(batch, heads, slots, size).to(dtype)
        result.append(buffer)
    return result


def random_paths(rng, batch, max_depth, num_nodes):
    """Strictly increasing node ids behind the root, -1 padded, any length per row."""
    paths, counts = [], []
    for _ in range(batch):
        count = rng.randint(0, max_depth)
        nodes = sorted(rng.sample(range(1, num_nodes), count))
        paths.append([0, *nodes, *[-1] * (max_depth - count)])
        counts.append(count)
    return paths, counts


@pytest.mark.parametrize("memory", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_paths(backend, dtype, memory):
    rng = random.Random(3)
    torch.manual_seed(3)
    for _ in range(2):
        paths, counts = random_paths(rng, 3, 7, 20)
        prefix = [0, 11, 5]
        shape = [(3, 2, 40, 24)] * 3
        keys, values = (buffers_like(shape, dtype, memory) for _ in range(2))
        commit(keys, values, paths, counts, prefix, backend)


def random_pages(rng, batch, count):
    """Block tables that give every row `count` pages of its own, in any order, and spare one."""
    pages = rng.sample(range(batch * count + 1), batch * count)
    return [pages[b * count : (b + 1) * count] for b in range(batch)]


@pytest.mark.parametrize("memory", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages(backend, page_size, memory):
    rng = random.Random(4)
    torch.manual_seed(4)
    paths, counts = random_paths(rng, 3, 6, 20)
    pages = random_pages(rng, 3, -(-40 // page_size))
    shape = [(3 * len(pages[0]) + 1, 2, page_size, 24)] * 2
    keys, values = (buffers_like(shape, torch.bfloat16, memory) for _ in range(2))
    commit(keys, values, paths, counts, [0, 15, 20], backend, pages)


@pytest.mark.parametrize("pages", [None, [[2, 0, 4], [3, 1, 5]]], ids=["rows", "pages"])
def test_the_definition_reads_no_value_on_other_devices(pages):
    # What a device does in place of `nonzero`, run on values: a subclass has none to be read.
    class Elsewhere(Tensor):
        pass

    rng = random.Random(5)
    paths, counts = random_paths(rng, 2, 5, 9)
    counts[0], prefix = 0, [2, 4]
    buffer = torch.randn(*((2, 2, 15, 8) if pages is None else (6, 2, 5, 8)))
    expected = expected_after(buffer, paths, counts, prefix, pages)
    index = [torch.tensor(x, dtype=torch.int32) for x in (paths, counts, prefix)]
    table = None if pages is None else torch.tensor(pages, dtype=torch.int32)
    kv_commit_reference([buffer], index[0].as_subclass(Elsewhere), *index[1:], table)
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize("pages", [None, (2, 3)], ids=["rows", "pages"])
def test_fake_tensors_pass(pages):
    with FakeTensorMode():
        arguments = _good()
        if pages is not None:
            arguments["block_table"] = torch.zeros(pages, dtype=torch.int32)
        kv_commit(**arguments)


@pytest.mark.parametrize(
    ("path", "num_accepted"),
    [
        ([0, -1, -1, -1], 0),
        ([0, 1, 2, 3], 3),
        ([0, 1, 2, 3], 1),
        ([0, 17, 18, 19], 3),
        ([0, 2, 3, 4], 3),
        ([0, 1, 5, -1], 2),
        ([0], 0),
    ],
    ids=["nothing", "chain", "less than the path", "tail", "overlap", "one move", "root"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_path(backend, path, num_accepted):
    keys, values = (buffers_like([(1, 2, 25, 16)] * 2, torch.float16) for _ in range(2))
    commit(keys, values, [path], [num_accepted], [5], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_different_shapes_and_dtypes(backend):
    keys = buffers_like([(2, 2, 20, 80), (2, 1, 24, 96)], torch.bfloat16)
    values = buffers_like([(2, 2, 20, 64)], torch.bfloat16) + buffers_like(
        [(2, 3, 22, 12)], torch.float32
    )
    commit(keys, values, [[0, 2, 5], [0, 4, -1]], [2, 1], [3, 8], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_moves_and_stays_bit_for_bit(backend):
    key, value = (torch.randint(-(2**31), 2**31, (1, 1, 12, 32)).int() for _ in range(2))
    key[0, 0, 7] = 0x7FC12345  # a NaN with a payload
    commit([key.view(torch.float32)], [value.view(torch.float32)], [[0, 3, 5]], [2], [2], backend)


@pytest.mark.interpret
def test_rows_beyond_two_to_the_31_items():
    apart, slots = 2**30 + 64, 12
    storage = torch.UntypedStorage((2 * apart + slots * 16) * 2)  # touched in places only
    cache = torch.tensor([], dtype=torch.float16).set_(
        storage, 0, (3, 1, slots, 16), (apart, slots * 16, 16, 1)
    )
    cache.copy_(torch.randn(3, 1, slots, 16))
    path, count, prefix = [[0, 3, 6]] * 3, [2] * 3, [1, 4, 5]
    expected = expected_after(cache, path, count, prefix)
    index = [torch.tensor(x, dtype=torch.int32) for x in (path, count, prefix)]
    kv_commit([cache], [torch.zeros(3, 1, slots, 16)], *index, backend="triton")
    assert torch.equal(cache, expected)


def test_layers_on_several_devices_go_apart(monkeypatch):
    calls = []

    def record(buffers, path, num_accepted, prefix_len):
        devices = {tensor.device.type for tensor in (*buffers, path, num_accepted, prefix_len)}
        calls.append((devices, len(buffers)))

    # The package's attribute of that name is the function, which hides its module.
    module = sys.modules["selfspec_kernels.kv_commit"]
    monkeypatch.setattr(module, "kv_commit_reference", record)
    here, there = torch.zeros(2, 1, 9, 4), torch.zeros(2, 1, 9, 4, device="meta")
    kv_commit(**(_good() | {"keys": [here, there, here], "values": [here, there, here]}))
    assert calls == [({"cpu"}, 4), ({"meta"}, 2)]


_TABLE = torch.zeros(2, 2, dtype=torch.int32)


def _good():
    return {
        "keys": [torch.zeros(2, 1, 9, 4)],
        "values": [torch.zeros(2, 1, 9, 4)],
        "path": torch.tensor([[0, 2], [0, 3]], dtype=torch.int32),
        "num_accepted": torch.ones(2, dtype=torch.int32),
        "prefix_len": torch.zeros(2, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"path": lambda x: x.long()}, TypeError, "path must be torch.int32"),
        ({"num_accepted": lambda x: x.long()}, TypeError, "num_accepted must be torch.int32"),
        ({"prefix_len": lambda x: x.long()}, TypeError, "prefix_len must be torch.int32"),
        ({"path": lambda x: x[0]}, ValueError, r"path has shape \(2,\), expected 2"),
        ({"path": lambda x: x[:, :0]}, ValueError, "path has no column"),
        ({"num_accepted": lambda x: x[:1]}, ValueError, r"num_accepted has shape \(1,\)"),
        ({"prefix_len": lambda x: x.to("meta")}, ValueError, "prefix_len is on meta"),
        ({"block_table": _TABLE.long()}, TypeError, "block_table must be torch.int32"),
        ({"block_table": _TABLE[:1]}, ValueError, r"block_table has shape \(1, 2\)"),
        ({"block_table": _TABLE[0]}, ValueError, r"block_table has shape \(2,\), expected 2"),
        ({"block_table": _TABLE.to("meta")}, ValueError, "block_table is on meta"),
        (
            {"block_table": _TABLE, "keys": lambda x: [x[0][0]]},
            ValueError,
            r"keys\[0\] has shape \(1, 9, 4\), expected \[pages, K, S, D\]",
        ),
        ({"values": lambda x: []}, ValueError, "1 keys but 0 values"),
        ({"keys": lambda x: [x[0][0]]}, ValueError, r"keys\[0\] has shape \(1, 9, 4\)"),
        ({"values": lambda x: [x[0][:1]]}, ValueError, r"values\[0\] has shape \(1, 1, 9, 4\)"),
        ({"backend": "gpu"}, ValueError, "backend='gpu'"),
        ({"backend": "triton"}, ValueError, 'backend="triton" needs CUDA'),
    ],
)
def test_refuses_what_does_not_fit(changes, error, match):
    arguments = _good()
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    with pytest.raises(error, match=f"kv_commit: {match}"):
        kv_commit(**arguments)
