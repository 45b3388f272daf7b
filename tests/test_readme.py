"""The README does what it says: its code runs, its table is that of the committed result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import benchmark_drafts
import benchmark_spine
import demo_model

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_code_blocks_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """In order, in one namespace; the model by its hub name is the demo model."""
    loaded = demo_model.load(dtype=torch.float32)
    for name, result in zip(("AutoModelForCausalLM", "AutoTokenizer"), loaded, strict=True):
        monkeypatch.setattr(
            getattr(transformers, name), "from_pretrained", lambda *a, r=result, **kw: r
        )
    namespace: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    ids = namespace["spec"].generate(**namespace["inputs"], max_new_tokens=8, do_sample=False)
    assert ids.equal(loaded[0].generate(**namespace["inputs"], max_new_tokens=8, do_sample=False))
    assert "tau" in capsys.readouterr().out


def test_the_table_is_that_of_the_committed_result() -> None:
    (result,) = (ROOT / "tests/benchmarks/results").glob("*/spine.json")
    assert benchmark_spine.table(json.loads(result.read_text())) in README
    (result,) = (ROOT / "tests/benchmarks/results").glob("*/drafts.json")
    assert benchmark_drafts.table(json.loads(result.read_text())) in README


def test_files_that_are_named_exist() -> None:
    names = re.findall(r"[\w/]+\.(?:py|md)\b", README + (ROOT / "CONTRIBUTING.md").read_text())
    everywhere = {p.name for p in ROOT.rglob("*.*") if ".venv" not in p.parts}
    general = {"utils.py", "helpers.py", "kernel.py", "__init__.py"}
    for name in set(names) - general:
        assert Path(name).name in everywhere, name
