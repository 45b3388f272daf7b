"""Area F: masks, NaN, low precision, long drafts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import selfspec
from selfspec.cache import TreeCache
from selfspec.target import Target
from tests.families import tiny
from tests.follow import only_watched
from tests.generate.common import NEW, raised
from tests.oracle import OracleDrafter, RandomTreeDrafter

# Eight nodes: two branches that fork again, so that no chain mask and no slot position will do.
TOKENS, PARENTS = [2, 13, 6, 17, 9, 21, 33, 40], [-1, 0, 0, 2, 2, 1, 3, 6]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama")


def build(name: str, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model with another attention implementation."""
    stock = tiny.build(name)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(stock.config), attn_implementation=attention, dtype=dtype
    )
    model.load_state_dict(stock.state_dict())
    return model.eval()


def path(node: int) -> list[int]:
    return [*(path(PARENTS[node]) if node else []), TOKENS[node]]


@torch.no_grad()
def tree_logits(target: Target, prompt: dict[str, Tensor]) -> Tensor:
    """[B, 8, V] after every node of the tree behind left-padded prompts."""
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    cache = target.architecture.new_cache(len(ids), reserve=64, longest=128)
    arguments = {target.architecture.cache_argument: cache}
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    pads = (mask.shape[1] - mask.sum(-1)).tolist()
    with target.ready():
        target.prefill(
            lambda: target.model(ids, attention_mask=mask, position_ids=positions, **arguments),
            cache,
            pads,
            frozenset(),
        )
        tree = selfspec.TokenTree.from_topology(torch.tensor([TOKENS] * len(ids)), PARENTS)
        return target.verify(tree, cache).logits.float()


@torch.no_grad()
def path_logits(model: Any, prompt: dict[str, Tensor]) -> Tensor:
    """The same, every path read as a sequence of its own, without padding."""
    rows = []
    for ids, mask in zip(prompt["input_ids"], prompt["attention_mask"], strict=True):
        start = ids[mask.bool()].tolist()
        rows.append([model(torch.tensor([start + path(n)])).logits[0, -1] for n in range(8)])
    return torch.stack([torch.stack(row) for row in rows]).float()


def padded(lengths: tuple[int, ...], width: int = 14) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(1, 64, (len(lengths), width), generator=generator)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


# ------------------------------------------------------------------------- masks


@pytest.mark.parametrize("interface", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_f1_f9_trees_behind_padding(name: str, attention: str, interface: bool) -> None:
    """11 columns of padding; our attention, and explicit masks: bool for sdpa, added for eager."""
    model, prompt = build(name, attention), padded((14, 3))
    target = Target(model)
    if not interface:
        target.architecture = replace(target.architecture, attention_names=[])
    truth = path_logits(model, prompt)
    found = tree_logits(target, prompt)
    assert found.isfinite().all()
    torch.testing.assert_close(found, truth, atol=1e-4, rtol=1e-4)
    if not interface:
        # The other convention is wrong, and this test would see it.
        dtype = torch.float32 if attention == "sdpa" else torch.bool
        assert (target.architecture.mask_dtype == torch.bool) == (attention == "sdpa")
        target.architecture = replace(target.architecture, mask_dtype=dtype)
        if attention == "eager":
            assert (tree_logits(target, prompt) - truth).abs().max() > 0.1


@contextmanager
def poisoned_padding(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Put NaN into the keys and values of padding as soon as the prompt has been read."""
    settle, poisoned = TreeCache.settle, []

    def poison_and_settle(cache: TreeCache, pads: list[int]) -> None:
        for layer in cache.filled_layers:
            for b, pad in enumerate(pads):
                layer.keys[b, :, :pad] = float("nan")
                layer.values[b, :, :pad] = float("nan")
                poisoned.append(pad)
        settle(cache, pads)

    with monkeypatch.context() as patch:
        patch.setattr(TreeCache, "settle", poison_and_settle)
        yield poisoned


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "falcon"])
def test_f1_nan_in_padding_reaches_nobody(
    name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny.build(name), tiny.prompts(3)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    for drafter in (
        OracleDrafter(plain, 4, wrong_at=(0, 2), branches=1),
        selfspec.EarlyExitDrafter(4, 3, 0.0),
    ):
        spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs)
        with poisoned_padding(monkeypatch) as poisoned:
            assert spec.generate(**prompt, max_new_tokens=NEW).equal(plain)
        assert sum(poisoned) == 4 * (8 + 13)
        assert spec.stats.accepted > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "attention", "interface"),
    [
        ("llama", "sdpa", True),
        ("llama", "eager", True),
        ("llama", "eager", False),
        ("gemma3", "eager", False),
        ("gemma2", "eager", True),
    ],
)
def test_f3_masks_add_up_to_no_infinity(
    name: str, attention: str, interface: bool, dtype: torch.dtype
) -> None:
    """Causal, padding, tree and window masks at once, in 16 bits."""
    model, prompt = build(name, attention, dtype), padded((14, 3))
    target = Target(model)
    if not interface:
        target.architecture = replace(target.architecture, attention_names=[])
    truth, found = path_logits(model, prompt), tree_logits(target, prompt)
    assert found.isfinite().all()
    noise = (found - truth).abs().max()
    assert noise < 0.1 * truth.abs().max()
    top = truth.topk(2, dim=-1).values
    clear = top[..., 0] - top[..., 1] > 2 * noise
    assert clear.sum() > 4
    assert (found.argmax(-1) == truth.argmax(-1))[clear].all()


@pytest.mark.parametrize("past", [1, 7, 33])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_f6_several_tokens_behind_a_past(attention: str, past: int) -> None:
    """Blocks of 1 to 8 behind a cache: as drafts, and as a prompt that continues a cache."""
    model, generator = build("llama", attention), torch.Generator().manual_seed(past)
    ids = torch.randint(1, 64, (1, past + 8), generator=generator)
    target = Target(model)
    with torch.no_grad():
        truth = model(ids).logits[0].float()
        for width in range(1, 9):
            cache = target.architecture.new_cache(1, reserve=16, longest=128)
            with target.ready():
                target.fill(ids[:, :past], cache)
                chain = selfspec.TokenTree.chain(
                    ids[:, past], ids[:, past + 1 : past + width], num_nodes=None
                )
                logits = target.verify(chain, cache).logits[0]
            torch.testing.assert_close(logits, truth[past : past + width], atol=1e-4, rtol=1e-4)
        for width in (1, 3, 8):
            prompt = ids[:, : past + width]
            plain = model.generate(prompt, max_new_tokens=6)
            cache = DynamicCache()
            model(ids[:, :past], past_key_values=cache)
            spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 3))
            assert spec.generate(prompt, past_key_values=cache, max_new_tokens=6).equal(plain)
            assert spec.stats.fallbacks == 0


# ------------------------------------------------------------------------- NaN and infinity


@contextmanager
def logits_at(model: Any, position: int, value: float, tokens: slice) -> Iterator[None]:
    """Let the logits after the token at `position` (of every row) be `value`."""

    def spoil(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        positions = kwargs["position_ids"]
        logits = output.logits.clone()
        if not logits.numel():  # nobody asked for any
            return output
        positions = positions[:, -logits.shape[1] :].expand(logits.shape[:2])
        logits[..., tokens] = torch.where(
            (positions == position)[..., None], torch.tensor(value), logits[..., tokens]
        )
        output.logits = logits
        return output

    hook = model.register_forward_hook(spoil, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("value", "tokens", "batch", "graphs"),
    [
        (float("nan"), slice(None), 1, False),
        (float("nan"), slice(20, 24), 3, True),
        (float("inf"), slice(30, 32), 3, False),
        (float("-inf"), slice(None), 1, True),
    ],
)
def test_f4_a_row_of_nan_inside_a_block(
    value: float, tokens: slice, batch: int, graphs: bool
) -> None:
    model, prompt = copy.deepcopy(tiny.build("llama")), tiny.prompts(batch, ragged=False)
    with logits_at(model, 19, value, tokens):
        plain = model.generate(**prompt, max_new_tokens=12)
        # Blocks of the root, which stands at 17, and five drafts: index 2 is position 19.
        for drafter in (
            OracleDrafter(plain, 5),
            selfspec.NGramDrafter(1, min_prob=0.0),
            selfspec.EarlyExitDrafter(4, 4, 0.4, branches=2),
            "none",
        ):
            spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs)
            out = spec.generate(**prompt, max_new_tokens=12)
            assert out.equal(plain)
            assert int(out.min()) >= 0
            assert int(out.max()) < 64
        sampled = {**prompt, "max_new_tokens": 12, "do_sample": True}
        message = raised(lambda: model.generate(**sampled))
        for drafter in (
            OracleDrafter(plain, 5),
            selfspec.EarlyExitDrafter(4, 4, 0.0, do_sample=True),
        ):
            for options in ({}, {"acceptance": "lossy-typical"}):
                spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs, **options)
                assert raised(lambda s=spec: s.generate(**sampled)) == message
    assert not model._forward_hooks
    clean = model.generate(**prompt, max_new_tokens=12)
    assert selfspec.wrap(model, drafter="ngram").generate(**prompt, max_new_tokens=12).equal(clean)


@pytest.mark.parametrize("penalty", [None, 1.2])
def test_f4_nan_where_plain_never_looks(penalty: float | None) -> None:
    """After a wrong draft, and after a right one that was not drawn: sampling goes on."""
    model, prompt = copy.deepcopy(tiny.build("llama")), tiny.prompts(1)
    kwargs = {**prompt, "max_new_tokens": 12, "do_sample": True, "repetition_penalty": penalty}
    torch.manual_seed(0)
    plain = model.generate(**kwargs)
    drafter = OracleDrafter(plain, 5, wrong_at=(2, 3))
    spec = selfspec.wrap(model, drafter=drafter)

    def spoil(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """NaN after every token that is not plain's."""
        ids, at = kwargs["input_ids"][0], kwargs["position_ids"][0]
        if len(ids) == output.logits.shape[1]:
            output.logits[0, ids != plain[0, at]] = float("nan")
        return output

    hook = model.register_forward_hook(spoil, with_kwargs=True)
    only_watched(spec)
    torch.manual_seed(0)
    try:
        assert spec.generate(**kwargs).equal(plain)
    finally:
        hook.remove()
    assert spec.stats.drafted > spec.stats.accepted > 0


# ------------------------------------------------------------------------- long drafts, tiny nuclei


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_f7_long_drafts_of_one_layer(dtype: torch.dtype) -> None:
    """Thirty-two drafts deep, far from anything the model would say: finite, and no effect."""
    model, prompt = tiny.build("llama", dtype=dtype), tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=8)[0, 17:].tolist()
    seen = []

    class Watching(selfspec.EarlyExitDrafter):
        def draft(self, state: Any, budget: int) -> selfspec.TokenTree:
            tree = super().draft(state, budget)
            assert tree.resume is not None
            seen.append((tree.width, bool(tree.resume.hidden.isfinite().all())))
            return tree

    for drafter in (Watching(1, 32, 0.0), selfspec.LayerSkipDrafter([1, 2], 32, 0.0)):
        spec = selfspec.wrap(model, drafter=drafter, max_draft_tokens=32)
        steps = spec.stream(**prompt, max_new_tokens=40)
        made = [t for _, step in zip(range(4), steps, strict=False) for t in step.tokens[0]]
        steps.close()  # type: ignore[attr-defined]
        if dtype == torch.float32:
            assert made == plain[: len(made)]
    assert (33, True) in seen
    assert all(finite for _, finite in seen)


@pytest.mark.parametrize(("top_p", "batch"), [(0.01, 1), (1e-6, 3)])
def test_f10_a_nucleus_of_one_token(model: Any, top_p: float, batch: int) -> None:
    prompt = tiny.prompts(batch)
    greedy = model.generate(**prompt, max_new_tokens=10, do_sample=False)
    kwargs = {"max_new_tokens": 10, "do_sample": True, "top_p": top_p, "top_k": 0}
    for drafter in (
        OracleDrafter(greedy, 5, wrong_at=(0, 3)),
        RandomTreeDrafter(),
        selfspec.EarlyExitDrafter(3, 3, 0.0, branches=3, do_sample=True),
    ):
        spec = selfspec.wrap(model, drafter=drafter)
        out = spec.generate(**prompt, **kwargs, return_dict_in_generate=True, output_scores=True)
        assert out.sequences.equal(greedy)
        for scores in out.scores:
            assert scores.isfinite().sum(-1).tolist() == [1] * batch
        if not isinstance(drafter, RandomTreeDrafter):
            assert spec.stats.drafted > 0
