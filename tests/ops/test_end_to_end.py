"""The library on its Triton kernels, interpreted: the path that CUDA tensors take."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

import selfspec
from tests.families import tiny
from tests.oracle import OracleDrafter, RandomTreeDrafter

pytestmark = pytest.mark.interpret


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Sends every op to its kernel, and counts."""
    calls: Counter[str] = Counter()

    def always(op: str, backend: str, tensor: Any) -> bool:
        calls[op] += 1
        return True

    for op in ("tree_attention", "tree_accept", "kv_commit"):
        monkeypatch.setattr(sys.modules[f"selfspec_kernels.{op}"], "use_triton", always)
    return calls


@pytest.mark.parametrize("name", ["llama_gqa3", "gemma2", "gpt_oss", "deepseek_v3"])
def test_generate(kernels: Counter[str], name: str) -> None:
    model = tiny.build(name)
    prompt = tiny.prompts(2)
    plain = model.generate(**prompt, max_new_tokens=10, do_sample=False)
    oracle = OracleDrafter(plain, 4, wrong_at=(0, 3), branches=1)
    for drafter in (oracle, RandomTreeDrafter()):
        spec = selfspec.wrap(model, drafter=drafter, max_draft_tokens=16)
        assert spec.generate(**prompt, max_new_tokens=10, do_sample=False).equal(plain)
    assert set(kernels) == {"tree_attention", "tree_accept", "kv_commit"}
