"""Heads on models: fitted to them, following their changes, refused where they do not fit."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch

import selfspec
from selfspec import HeadsDrafter
from tests.families import tiny
from tests.recalled import known
from tests.test_heads import GREEDY, NEW, SAMPLED, SOME, heads, trained


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama")


def test_the_network_is_left_as_it_is(model: Any) -> None:
    """A model of another dtype has a copy of it; one of the same shares its weights."""
    network = heads()
    before = copy.deepcopy(network.state_dict())
    drafter = HeadsDrafter(network)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        spec = selfspec.wrap(tiny.build("llama", dtype=dtype), drafter)
        spec.generate(**tiny.prompts(2), **GREEDY)
        assert spec.stats.drafted > 0
        fitted = drafter._fits[spec._target.architecture]
        assert {p.dtype for p in fitted.parameters()} == {dtype}
        shares = fitted.fuse[0].weight.data_ptr() == network.fuse[0].weight.data_ptr()
        assert shares == (dtype == torch.float32)
        rows, theirs = fitted.head(0).matrix, spec.model.lm_head.weight
        assert rows.data_ptr() == theirs.data_ptr()
    assert network.head(0).rows is None
    assert all(p.requires_grad for p in network.parameters())
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


def test_one_drafter_serves_several_models_in_turn(model: Any) -> None:
    prompt, plain, _, _ = known("llama", 3, NEW)
    drafter = HeadsDrafter(trained("conditioned"))
    others = [tiny.build("llama", dtype=torch.float64), tiny.build("qwen2")]
    specs = [selfspec.wrap(one, drafter, max_draft_tokens=8) for one in (model, *others)]
    for spec in (*specs, *specs):
        text = spec.generate(**prompt, **GREEDY)
        assert text.equal(plain) or spec.model is others[1]
    good = [spec.stats.mean_accepted_length > 3 for spec in specs]
    assert good == [True, True, False]
    assert len(drafter._fits) == 3


def test_a_model_that_is_gone_is_forgotten() -> None:
    drafter = HeadsDrafter(heads(conditioned=False))
    model = tiny.llama()
    spec = selfspec.wrap(model, drafter, max_draft_tokens=4)
    spec.generate(**tiny.prompts(1), **GREEDY)
    weight = weakref.ref(model.lm_head.weight)
    assert len(drafter._fits) == 1
    del model, spec
    gc.collect()
    assert len(drafter._fits) == 0
    assert weight() is None


def test_a_model_of_another_depth_since(model: Any) -> None:
    drafter = HeadsDrafter(heads())
    spec = selfspec.wrap(model, drafter)
    selfspec.wrap(tiny.llama(num_hidden_layers=2), drafter)
    with pytest.raises(ValueError, match=r"output of layer 4, and taps \[2\] were asked for"):
        spec.generate(**tiny.prompts(1), **GREEDY)


def test_weights_that_change_are_followed() -> None:
    """Those of the model's head and those of the heads, between requests, without wrapping anew."""
    model = copy.deepcopy(tiny.build("llama"))
    prompt, _, _, _ = known("llama", 3, NEW)
    network = copy.deepcopy(trained("conditioned"))
    spec = selfspec.wrap(model, HeadsDrafter(network))

    def tau() -> float:
        before = spec.stats + selfspec.SpecStats()
        assert spec.generate(**prompt, **GREEDY).equal(model.generate(**prompt, **GREEDY))
        drafted = spec.stats.emitted - before.emitted
        return drafted / 3 / (spec.stats.forwards - before.forwards)

    first = tau()
    assert first > 2.5
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    weight = model.lm_head.weight
    with torch.no_grad():
        weight.copy_(weight[order])  # in place
    fitted = spec._drafter._fits[spec._target.architecture]
    tau()
    fitted = spec._drafter._fits[spec._target.architecture]
    assert fitted.head(0).matrix.equal(model.lm_head.weight)
    model.double()
    tau()
    fitted = spec._drafter._fits[spec._target.architecture]
    assert fitted.head(0).matrix.dtype == fitted.fuse[0].weight.dtype == torch.float64
    with torch.no_grad():
        network.fuse[0].weight.zero_()
    tau()
    fitted = spec._drafter._fits[spec._target.architecture]
    assert not fitted.fuse[0].weight.any()


def test_a_reduced_head_is_copied_anew_when_the_model_changes() -> None:
    model = copy.deepcopy(tiny.build("llama"))
    drafter = HeadsDrafter(heads(draft_vocab_size=len(SOME)))
    spec = selfspec.wrap(model, drafter)
    for _ in range(2):
        spec.generate(**tiny.prompts(1), **GREEDY)
        fitted = drafter._fits[spec._target.architecture]
        assert fitted.head(0).matrix.equal(model.lm_head.weight[SOME])
        with torch.no_grad():
            model.lm_head.weight.neg_()


def test_h15_a_vocabulary_that_is_resized() -> None:
    """Larger: followed; smaller than what can be drafted: refused, though it was wrapped before."""
    model = copy.deepcopy(tiny.build("llama"))
    spec = selfspec.wrap(model, HeadsDrafter(heads()))
    prompt = tiny.prompts(2, vocab=30)
    for size in (64, 72):
        model.resize_token_embeddings(size, mean_resizing=False)
        assert spec.generate(**prompt, **GREEDY).equal(model.generate(**prompt, **GREEDY))
        assert spec.stats.drafted > 0
        fitted = spec._drafter._fits[spec._target.architecture]
        assert fitted.head(0).matrix.data_ptr() == model.lm_head.weight.data_ptr()
    torch.manual_seed(0)
    drawn = selfspec.wrap(model, HeadsDrafter(heads(), do_sample=True))
    drawn.generate(**prompt, **SAMPLED)
    assert drawn.stats.drafted > 0
    model.resize_token_embeddings(40)
    with pytest.raises(ValueError, match=r"can draft token 63 \(of vocab_size=64\).* 0\.\.39"):
        spec.generate(**prompt, **GREEDY)
    few = heads(draft_vocab_size=len(SOME))
    few.choose(torch.arange(len(SOME)))
    assert selfspec.wrap(model, HeadsDrafter(few)).generate(**prompt, **GREEDY).shape[1] == 17 + NEW


@pytest.mark.parametrize(
    ("network", "name", "message"),
    [
        (lambda: heads(), "llama_gqa3", "made for hidden_size=64, the model has 96"),
        (lambda: heads(vocab_size=65), "llama", r"token 64 \(of vocab_size=65\).* 0\.\.63"),
        (lambda: heads(), "opt", "the state after the model's final norm, and it was not found"),
    ],
)
def test_models_that_heads_do_not_fit(network: Any, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selfspec.wrap(tiny.build(name), HeadsDrafter(network()))


def test_parts_that_are_missing_are_named(model: Any) -> None:
    found = selfspec.wrap(model)._target.architecture
    narrow = dataclasses.replace(found, embeddings=lambda: torch.nn.Embedding(64, 32))
    with pytest.raises(ValueError, match="embeddings of hidden_size=64, those"):
        HeadsDrafter(heads()).bind(narrow)
    HeadsDrafter(heads(conditioned=False)).bind(narrow)
    other = copy.deepcopy(model)
    spec = selfspec.wrap(other)
    other.lm_head.weight.requires_grad_(False)
    other.lm_head.forward = other.lm_head.forward
    with pytest.raises(ValueError, match=r"own_head=False: .* no plain linear layer"):
        HeadsDrafter(heads()).bind(spec._target.architecture)
    HeadsDrafter(heads(own_head=True)).bind(spec._target.architecture)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: HeadsDrafter("heads"), TypeError, "network is a str; it must be a HeadsNetwork"),
        (lambda: HeadsDrafter(heads(), do_sample=1), TypeError, "do_sample=1 must be True or Fal"),
        (lambda: HeadsDrafter(heads(), [[0] * 4]), ValueError, r"a path has 1\.\.3 ranks"),
        (lambda: HeadsDrafter(heads(), [[64]]), ValueError, r"each in 0\.\.63"),
        (lambda: heads(num_heads=0), ValueError, "num_heads=0 must be an int of at least 1"),
        (lambda: heads(num_layers=-1), ValueError, "num_layers=-1 must be an int of at least 0"),
        (lambda: heads(hidden_size=0), ValueError, "hidden_size=0 must be an int of at least 1"),
        (lambda: heads(accuracies=[[0.5]]), ValueError, "accuracies has 1 rows; .* num_heads=3"),
        (lambda: heads(num_heads=1, accuracies=[[0.7, 0.4]]), ValueError, "sum up to 1"),
        (lambda: heads(num_heads=1, accuracies=[[1.5]]), ValueError, r"\[1\.5\]; .* in 0\.\.1"),
        (lambda: heads()(0, torch.zeros(1, 64)), ValueError, "path=None: conditioned heads need"),
    ],
)
def test_refusals(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
