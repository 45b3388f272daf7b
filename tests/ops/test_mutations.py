"""Broken kernels and references: what the other tests compare must tell them from the right ones.

Each mutant is the source with one place changed. A mutant that passes means that the cases below,
all of the kind that the tests of the ops use, are blind to that place.
"""

import importlib.util
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
import selfspec_kernels
import torch

from .test_kv_commit import buffers_like, expected_after, random_paths
from .test_tree_accept import walk
from .test_tree_attention import TOLERANCE, Case, build, hidden_fill
from .trees import attention_oracle, random_forest

SOURCES = Path(selfspec_kernels.__file__).parent
_serial = count()


def load(op: str, file: str, changes: dict[str, str], folder: Path) -> ModuleType:
    """The module `op/file` with every key of `changes` replaced by its value."""
    source = (SOURCES / op / file).read_text()
    for old, new in changes.items():
        assert source.count(old) == 1, f"{op}/{file} has {source.count(old)} times: {old}"
        source = source.replace(old, new)
    path = folder / file
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"selfspec_kernels.{op}.m{next(_serial)}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ATTENTION_CASES = [
    Case(66, (0, 70), queries=33, groups=3),
    Case(33, (0, 70), queries=20, groups=2, window=6),
    Case(12, (3, 20), queries=5, groups=2, softcap=3.0, scale=2.0, sinks=True),
]


def attention_is_right(function: Callable[..., torch.Tensor], backend: str) -> bool:
    for case in ATTENTION_CASES:
        inputs = build(case, hidden_fill(case, backend))
        tensors = (inputs.query, inputs.key, inputs.value)
        options = dict(inputs.options, scale=case.scale or case.head_size**-0.5)
        expected = attention_oracle(*tensors, inputs.forest, **options)
        out = function(*tensors, inputs.layout, **options).double()
        tolerance = TOLERANCE[case.dtype]
        if not torch.allclose(out, expected, rtol=tolerance, atol=tolerance):
            return False
    return True


def accept_is_right(function: Callable[..., tuple[torch.Tensor, ...]]) -> bool:
    rng = random.Random(0)
    nodes, max_depth = 33, 6
    forest = random_forest(nodes, [0] * 30)
    tokens, targets = ([[rng.randrange(2) for _ in range(nodes)] for _ in range(30)] for _ in "ab")
    counts = [rng.randint(1, nodes) for _ in range(30)]
    path, num_accepted, next_token = function(
        torch.tensor(tokens),
        torch.tensor(forest.parents, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor(targets),
        max_depth,
    )
    got = zip(path.tolist(), num_accepted.tolist(), next_token.tolist(), strict=True)
    rows = zip(tokens, forest.parents, targets, counts, strict=True)
    return list(got) == [walk(a, b, c, max_depth, count) for a, b, c, count in rows]


def commit_is_right(function: Callable[..., None]) -> bool:
    rng = random.Random(0)
    for _ in range(4):
        paths, counts = random_paths(rng, 3, 7, 12)
        prefix = [0, 11, 5]
        keys, values = (buffers_like([(3, 2, 30, 16)], torch.float32) for _ in range(2))
        buffers = [*keys, *values]
        expected = [expected_after(buffer, paths, counts, prefix) for buffer in buffers]
        function(buffers, *(torch.tensor(x).int() for x in (paths, counts, prefix)))
        if not all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True)):
            return False
    return True


KERNEL_MUTANTS = {
    "tree_attention": {
        "window one too wide in the prefix": {"distance < window": "distance <= window"},
        "window one too wide in the tree": {"depth[None, :] < window": "depth[None, :] <= window"},
        "window by slot": {"depth_ptr + (num_nodes - num_queries) + m": "depth_ptr + 0 * m"},
        "depth of the first nodes": {"depth_ptr + (num_nodes - num_queries) + m": "depth_ptr + m"},
        "prefix starts late": {"- window + 1, 0)": "- window + 2, 0)"},
        "prefix one slot too long": {"start + offs_n < prefix_len": "start + offs_n <= prefix_len"},
        "ancestors of the first word": {"word_ptrs + start // 64": "word_ptrs"},
        "ancestors of another query": {"num_queries + m) * (": "num_queries + m // 2) * ("},
        "ancestors ignored": {"visible = visible & in_n[None, :]": "visible = in_n[None, :]"},
        "last tile of nodes dropped": {
            "tl.range(0, num_nodes, BLOCK_N)": "tl.range(0, num_nodes - 2, BLOCK_N)"
        },
        "third head of a group missed": {"+ row % GROUPS": "+ row % 2"},
        "sum not rescaled": {"row_sum * decay": "row_sum"},
        "values not rescaled": {"acc * decay[:, None]": "acc"},
        "no guard for a row without slots": {
            'tl.where(new_max == float("-inf"), 0.0, new_max)': "new_max"
        },
        "hidden nodes read": {"mask=seen[:, None] &": "mask=in_n[:, None] &"},
        "sink not counted": {"row_sum += 1.0": "row_sum += 0.0"},
        "wrong soft cap": {"(1.0 - 2.0 / (": "(1.0 - 1.0 / ("},
    },
    "tree_accept": {
        "any node with the token": {"(parents == current) & ": ""},
        "any child": {" & (tokens == wanted)": ""},
        "padding accepted": {"tl.minimum(tl.load(num_nodes_ptr + b), size)": "size"},
        "target of the level": {"target_tokens_ptr + current": "target_tokens_ptr + level + 1"},
        "walk goes on after its end": {"tl.where(found, child, current)": "tl.minimum(child, 1)"},
    },
    "kv_commit": {
        "last node forgotten": {"range(1, num_accepted + 1)": "range(1, num_accepted)"},
        "first node forgotten": {"range(1, num_accepted + 1)": "range(2, num_accepted + 1)"},
        "backwards": {
            "range(1, num_accepted + 1):": (
                "range(1, num_accepted + 1):\n        i = num_accepted + 1 - i"
            )
        },
        "source and target swapped": {
            "lane + (prefix_len + node)": "lane + (prefix_len + i )",
            "lane + (prefix_len + i)": "lane + (prefix_len + node)",
        },
        "rows alike": {"path_ptr + b * path_len": "path_ptr"},
    },
}
REFERENCE_MUTANTS = {
    "tree_attention": {
        "packed in the other order": {
            "query.reshape(batch, kv_heads, groups * num_queries, -1)": (
                "query.transpose(1, 2).reshape(batch, kv_heads, groups * num_queries, -1)"
            )
        },
        "no window": {"layout.bias(key_len, window,": "layout.bias(key_len, 0,"},
        "no soft cap": {"torch.tanh(scores / softcap) * softcap": "scores"},
        "sink kept as a slot": {".softmax(dim=-1)[..., :-1]": ".softmax(dim=-1)[..., 1:]"},
    },
    "tree_accept": {
        "padding accepted": {" & (node < num_nodes[:, None])": ""},
        "any child": {"(tokens == wanted) & ": ""},
        "target of the child": {"target_tokens.gather(1, parent)": "target_tokens"},
    },
    "kv_commit": {
        "last node forgotten": {"step <= num_accepted": "step < num_accepted"},
        "one slot off": {"base + column + 1": "base + column"},
        "rows alike": {"path[row, column + 1]": "path[0, column + 1].clamp(min=0)"},
    },
}


def _listed(mutants: dict[str, dict[str, dict[str, str]]]) -> list[object]:
    return [
        pytest.param(op, changes, id=f"{op}: {name}")
        for op, group in mutants.items()
        for name, changes in {"none": {}, **group}.items()
    ]


def _verdict(op: str, module: ModuleType, backend: str) -> bool:
    function = getattr(module, f"{op}_{backend}")
    if op == "tree_attention":
        return attention_is_right(function, backend)
    return (accept_is_right if op == "tree_accept" else commit_is_right)(function)


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("op", "changes"), _listed(KERNEL_MUTANTS))
def test_kernel_mutant_is_caught(op, changes, tmp_path):
    assert _verdict(op, load(op, "kernel.py", changes, tmp_path), "triton") is not bool(changes)


@pytest.mark.parametrize(("op", "changes"), _listed(REFERENCE_MUTANTS))
def test_reference_mutant_is_caught(op, changes, tmp_path):
    verdict = _verdict(op, load(op, "reference.py", changes, tmp_path), "reference")
    assert verdict is not bool(changes)
