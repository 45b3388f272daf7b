"""The library on its Triton kernels, interpreted: the path that CUDA tensors take."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch

import selfspec
from selfspec import TokenTree
from tests.families import tiny
from tests.oracle import OracleDrafter, RandomTreeDrafter

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, for inf - inf under a mask
]


def send_to_kernels(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let every op take its kernel, and count."""
    calls: Counter[str] = Counter()

    def always(op: str, backend: str, tensor: Any) -> bool:
        if backend == "reference":  # what is probed while wrapping
            return False
        calls[op] += 1
        return True

    for name, module in list(sys.modules.items()):
        if name.startswith("selfspec_kernels.") and hasattr(module, "use_triton"):
            monkeypatch.setattr(module, "use_triton", always)
    monkeypatch.setattr("selfspec.sampling.on_kernels", lambda logits: True)
    return calls


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return send_to_kernels(monkeypatch)


@pytest.mark.parametrize("name", ["llama_gqa3", "gemma2", "gpt_oss", "deepseek_v3"])
def test_generate(kernels: Counter[str], name: str) -> None:
    model = tiny.build(name)
    prompt = tiny.prompts(2)
    plain = model.generate(**prompt, max_new_tokens=10, do_sample=False)
    oracle = OracleDrafter(plain, 4, wrong_at=(0, 3), branches=1)
    for drafter in (oracle, RandomTreeDrafter()):
        spec = selfspec.wrap(model, drafter=drafter, max_draft_tokens=16)
        assert spec.generate(**prompt, max_new_tokens=10, do_sample=False).equal(plain)
    assert set(kernels) == {"tree_attention", "row_stats", "tree_accept", "kv_commit"}


@pytest.mark.parametrize(
    ("drafter", "op"),
    [
        (selfspec.EarlyExitDrafter(3, 3, 0.05), "exit_confidence"),
        (selfspec.LayerSkipDrafter([1], 2, 0.0, branches=2), "draft_topk"),
    ],
)
def test_drafts_by_the_models_own_layers(kernels: Counter[str], drafter: Any, op: str) -> None:
    model, prompt = tiny.build("llama_gqa3"), tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    spec = selfspec.wrap(model, drafter=drafter)
    assert spec.generate(**prompt, max_new_tokens=8, do_sample=False).equal(plain)
    assert kernels[op] > 0


def test_steps_of_fixed_shape(kernels: Counter[str]) -> None:
    model, prompt = tiny.build("llama_gqa3"), tiny.prompts(2)
    plain = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    drafter = OracleDrafter(plain, 3, wrong_at=(0, 2), branches=1)
    for deterministic in (False, True):
        spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=True, deterministic=deterministic)
        assert spec.generate(**prompt, max_new_tokens=8, do_sample=False).equal(plain)


def test_sampling_draws_what_the_references_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """One seed, one text: filters, drawn drafts and residuals agree, kernel or reference."""

    class Drawn:
        hidden_taps = ()

        def draft(self, state: Any, budget: int) -> TokenTree:
            if budget < 3:
                return TokenTree.root_only(state.root)
            q = torch.ones(state.batch, 64).softmax(-1)
            drawn = [torch.multinomial(q, 2, generator=self.generator) for _ in range(2)]
            tokens = torch.cat([state.root[:, None], drawn[0], drawn[1][:, :1]], 1)
            log_q = q.log()[:, None].repeat(1, 4, 1)
            return TokenTree.from_topology(tokens, [-1, 0, 0, 1], log_q=log_q)

        def observe(self, state: Any, output: Any, acceptance: Any) -> None: ...

        def reset(self) -> None:
            self.generator = torch.Generator().manual_seed(0)

    model, prompt = tiny.build("llama_gqa3"), tiny.prompts(2)

    def text() -> torch.Tensor:
        torch.manual_seed(0)
        spec = selfspec.wrap(model, drafter=Drawn())
        settings = {"do_sample": True, "temperature": 1.5, "top_k": 40, "top_p": 0.95}
        return spec.generate(**prompt, max_new_tokens=9, **settings)

    expected = text()
    calls = send_to_kernels(monkeypatch)
    assert text().equal(expected)
    assert calls["tree_accept_sampled"] > 0
