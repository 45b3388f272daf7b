"""Ahead-of-time compilation for parts that need not be there.

Nothing is launched. The compiler's own numbers are held to what makes a kernel slow or impossible:
registers spilled to memory, more shared memory than the part has, products that miss the tensor
cores. Every configuration that ships is compiled for every part, with its costliest options on.
"""

import importlib
import importlib.util
import json

import pytest
from selfspec_kernels.tuning import PARTS, TABLE, gate, rows, using

pytestmark = pytest.mark.aot

HAS_TRITON = importlib.util.find_spec("triton") is not None
TABLED = json.loads(TABLE.read_text())
SPECIMENS = [
    pytest.param(op, part, specimen, id=f"{op}-{part}-{specimen.label}")
    for op in gate.ops()
    for part in PARTS
    for specimen in (gate.specimens(op, part) if HAS_TRITON else [])
]


@pytest.mark.parametrize(("op", "part", "specimen"), SPECIMENS)
def test_configuration(op, part, specimen):
    assert gate.misnamed(specimen, gate.specimens(op, part)) == []
    assert gate.report(specimen, part, op).faults == []


@pytest.mark.parametrize("op", gate.ops())
def test_every_kernel_has_specimens_with_names_of_their_own(op):
    from triton.runtime import KernelInterface

    modules = [
        importlib.import_module(f"selfspec_kernels.{op}.{path.stem}")
        for path in (gate.PACKAGE / op).glob("kernel*.py")
    ]
    kernels = {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, KernelInterface) and name.endswith("_kernel")
    }
    for part in PARTS:
        specimens = gate.specimens(op, part)
        assert {specimen.kernel.__name__ for specimen in specimens} >= kernels
        labels = [specimen.label for specimen in specimens]
        assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("op", TABLED)
def test_every_row_has_specimens(op, part):
    # Another number of warps has to make a difference.
    shipped, before = rows(op, part), identities(op, part)
    for i, row in enumerate(shipped):
        changed = [*shipped[:i], {**row, "warps": 2 * row["warps"]}, *shipped[i + 1 :]]
        with using(op, part, changed):
            assert identities(op, part) != before, row


def identities(op, part):
    """What tells the specimens apart, labels aside."""
    return {
        (s.kernel.__name__, str(s.types), str(s.constants), s.warps, s.stages)
        for s in gate.specimens(op, part)
    }


@pytest.fixture
def _one_row(request):
    """Specimens of attention for sm_90 whose table has one row only."""
    with using("tree_attention", "sm_90", [request.param]):
        yield


# The two halves that TF32 products make of 16 queries of 256 do not fit beside the rest.
SPILLING = {"item_size": 4, "width": 256, "m": 16, "n": 16, "warps": 4, "stages": 2}
SPILLING["precision"] = "tf32x3"
BIG = {"item_size": 2, "width": 256, "m": 64, "n": 64, "warps": 8, "stages": 4}
BIG["precision"] = "ieee"


@pytest.mark.parametrize(
    ("_one_row", "part", "fault"),
    [(SPILLING, "sm_90", "spills"), (BIG, "sm_86", "of shared memory")],
    indirect=["_one_row"],
    ids=["spill", "shared memory"],
)
@pytest.mark.usefixtures("_one_row")
def test_the_gate_sees(part, fault):
    specimen = gate.specimens("tree_attention", "sm_90")[0]
    assert any(fault in found for found in gate.report(specimen, part).faults)


def test_the_gate_sees_products_without_matrix_instructions():
    from dataclasses import replace

    specimen = replace(gate.specimens("kv_commit", "sm_90")[0], tensor_cores=True)
    assert gate.report(specimen, "sm_90").faults == ["has no matrix instruction"]


def test_the_gate_sees_wrong_names():
    from dataclasses import replace

    specimen = gate.specimens("kv_commit", "sm_90")[0]
    types = {"path_ptr": "i32", "nothing": "i32", "ITEM": "i32"}
    constants = {name: value for name, value in specimen.constants.items() if name != "BLOCK"}
    assert gate.misnamed(replace(specimen, types=types, constants=constants)) == [
        "ITEM is a type and a constant",
        "nothing is no argument",
        "addresses_ptr is i32",
        "path_ptr is i32",
        "num_accepted_ptr is i32",
        "prefix_len_ptr is i32",
        "block_table_ptr is i32",
        "BLOCK has no value",
    ]


def test_command_line(capsys, tmp_path):
    from selfspec_kernels.tuning.__main__ import main

    file = tmp_path / "gate.json"
    command = ["gate", "--op", "kv_commit", "--part", "sm_90", "--json", str(file)]
    assert main(command) == 0
    count = len(gate.specimens("kv_commit", "sm_90"))
    assert f"{count} configurations, 0 of them faulty" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["configurations"]) == count
    assert main([*command, "--markdown"]) == 0
    assert f"| `kv_commit` | sm_90 | {count} |" in capsys.readouterr().out


def test_search_lists_what_passes(capsys, monkeypatch):
    from selfspec_kernels.tuning import search
    from selfspec_kernels.tuning.__main__ import main

    monkeypatch.setitem(search.SPACES, "tree_attention", {"warps": (4, 8), "stages": (2,)})
    command = ["search", "--op", "tree_attention", "--part", "sm_90", "--row", json.dumps(SPILLING)]
    assert main(command) == 0
    assert json.dumps(SPILLING) not in capsys.readouterr().out
    fits = {**SPILLING, "precision": "ieee"}
    assert main([*command[:-1], json.dumps(fits)]) == 0
    assert json.dumps(fits) in capsys.readouterr().out
