"""Models as people load and wrap them: adapters, hooks, compiled code, copies."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from peft import LoraConfig, PeftMixedModel, PromptTuningConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch._dynamo.testing import CompileCounter

import selfspec
from tests.families import tiny
from tests.follow import DRAFTERS, NEW, everywhere, follows, fresh
from tests.generate.common import snapshot
from tests.oracle import OracleDrafter


def lora(model: Any, head: bool = False, **options: Any) -> Any:
    targets = ["q_proj", "v_proj", "down_proj", *(["lm_head"] if head else [])]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        settings = {"r": 4, "target_modules": targets, "init_lora_weights": False, **options}
        config = LoraConfig(**{"task_type": "CAUSAL_LM", **settings})
        return get_peft_model(model, config).eval()


# ------------------------------------------------------------------------------ J3: copies


def test_j3_copies_follow_their_own_weights(tmp_path: Path) -> None:
    spec = selfspec.wrap(fresh(), drafter="ngram")
    text = follows(spec, spec.model)
    spec.save_pretrained(tmp_path)
    loaded = type(spec.model).from_pretrained(tmp_path).eval()
    others = [copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), selfspec.wrap(loaded)]
    for other in others:
        assert other.model is not spec.model
        assert follows(other, other.model) == text
        with torch.no_grad():
            other.model.lm_head.weight.mul_(-1)
        assert follows(other, other.model) != text
    assert follows(spec, spec.model) == text


def test_j3_a_shallow_copy_shares_the_model_and_nothing_else() -> None:
    spec = selfspec.wrap(fresh(), drafter=selfspec.NGramDrafter(1, min_prob=0.0))
    other = copy.copy(spec)
    other.enabled = False
    assert other.model is spec.model
    assert spec.enabled
    follows(spec, spec.model)
    follows(other, spec.model)
    assert (spec.stats.fallbacks, other.stats.fallbacks) == (0, 1)


def test_j3_attributes_that_do_not_exist() -> None:
    spec = selfspec.wrap(tiny.build("llama"))
    assert not hasattr(spec, "nope")
    assert not hasattr(object.__new__(type(spec)), "nope")  # as while it is being unpickled


def test_j3_a_call_is_the_models_forward() -> None:
    model = tiny.build("llama")
    ids = tiny.prompts(1)["input_ids"]
    assert selfspec.wrap(model)(ids).logits.equal(model(ids).logits)


def test_j3_one_drafter_in_two_wrappers_at_once() -> None:
    """A request that starts while another wrapper's has the drafter gets a copy of it."""
    model, drafter = tiny.build("llama"), selfspec.NGramDrafter(1, min_prob=0.0)
    first, second = (selfspec.wrap(model, drafter=[drafter]) for _ in range(2))
    plain = model.generate(**tiny.prompts(1), **NEW)
    steps = first.stream(**tiny.prompts(1), **NEW)
    new = list(next(steps).tokens[0])
    follows(second, model)
    new += [token for step in steps for token in step.tokens[0]]
    assert new == plain[0, 17:].tolist()


# ------------------------------------------------------------------------------ J6: adapters


@pytest.mark.parametrize("head", [False, True])
def test_j6_d4_adapters(head: bool) -> None:
    model = lora(fresh(), head)
    everywhere(model)
    assert selfspec.wrap(model).model is model


def test_j6_d4_shells_of_other_kinds() -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    for model in (lora(fresh(), task_type=None), PeftMixedModel(fresh(), config).eval()):
        spec = selfspec.wrap(model, drafter=DRAFTERS["early-exit"]())
        follows(spec, model)
        assert spec.stats.accepted > 0


def test_j6_adapters_are_in_the_draft() -> None:
    """All layers as the draft: everything is accepted, or the draft ran without the adapter."""
    model = lora(fresh(), head=True)
    for drafter in (
        selfspec.EarlyExitDrafter(4, 4, 0.0),
        selfspec.LayerSkipDrafter(selfspec.SkipSet(), 4, 0.0),
    ):
        spec = selfspec.wrap(model, drafter=drafter)
        follows(spec, model)
        assert spec.stats.acceptance_rate == 1.0


@pytest.mark.parametrize(
    ("drafter", "graphs"),
    [("ngram", False), ("early-exit", True), ("layer-skip", False)],
)
def test_j6_adapters_switched_after_wrapping(drafter: str, graphs: bool) -> None:
    model = lora(fresh())
    spec = selfspec.wrap(model, drafter=DRAFTERS[drafter](), cuda_graphs=graphs)
    texts = [follows(spec, model)]
    with model.disable_adapter():
        texts.append(follows(spec, model))
    assert follows(spec, model) == texts[0]
    torch.manual_seed(2)
    other = LoraConfig(r=2, target_modules=["k_proj", "lm_head"], init_lora_weights=False)
    model.add_adapter("other", other)
    model.set_adapter("other")
    model.eval()
    texts.append(follows(spec, model))
    model.set_adapter("default")
    assert follows(spec, model) == texts[0]
    model.merge_adapter()
    follows(spec, model)
    model.unmerge_adapter()
    before = snapshot(model)
    follows(spec, model)
    assert snapshot(model) == before
    merged = model.merge_and_unload()
    follows(selfspec.wrap(merged), merged)
    assert len({str(text) for text in texts}) == 3
    assert spec.stats.fallbacks == 0


def test_j6_an_adapter_for_every_row() -> None:
    model = lora(fresh())
    torch.manual_seed(2)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
    names = {"adapter_names": ["default", "__base__", "other"]}
    prompt = tiny.prompts(3)
    plain = model.generate(**prompt, **NEW, **names)
    assert plain.tolist() != model.generate(**prompt, **NEW).tolist()
    spec = selfspec.wrap(model, drafter=selfspec.EarlyExitDrafter(3, 3, 0.0))
    assert spec.generate(**prompt, **NEW, **names).equal(plain)
    assert spec.stats.accepted > 0
    with pytest.raises(ValueError, match="non-existing adapter"):
        spec.generate(**prompt, **NEW, adapter_names=["nope"] * 3)


def test_j6_adapters_loaded_by_transformers(tmp_path: Path) -> None:
    lora(fresh()).save_pretrained(tmp_path)
    model = fresh()
    spec = selfspec.wrap(model, drafter=selfspec.LayerSkipDrafter([1], 3, 0.0))
    base = follows(spec, model)
    model.load_adapter(str(tmp_path))
    assert follows(spec, model) != base
    for enabled in (False, True):
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.enable_adapters(enabled)
        assert (follows(spec, model) != base) == enabled
    assert spec.stats.accepted > 0


@pytest.mark.parametrize("kind", ["prompt", "alora"])
def test_j6_adapters_that_need_every_token_by_itself(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "prompt":
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = get_peft_model(fresh(), config).eval()
        reason = "prepares the model's inputs in a way of its own"
    else:
        model = lora(fresh(), alora_invocation_tokens=[5, 6])
        reason = "adapter 'default' is active from a token on"
    spec = selfspec.wrap(model, drafter="ngram")
    for _ in range(2):
        follows(spec, model)
    assert sum(reason in message for message in caplog.messages) == 1
    assert spec.stats.fallbacks == 2
    if kind == "prompt":
        with model.disable_adapter():
            follows(spec, model)
        assert spec.stats.fallbacks == 2


def test_j6_dropout_of_adapters_that_nobody_switched_off() -> None:
    model = lora(fresh(), lora_dropout=0.5)
    model.base_model.model.model.layers[0].self_attn.q_proj.train()
    spec = selfspec.wrap(model, drafter="ngram")
    follows(spec, model)
    assert spec.stats.fallbacks == 1
    model.eval()
    follows(spec, model)
    assert spec.stats.fallbacks == 1


def test_j6_an_interrupt_leaves_nothing_of_ours_on_the_model() -> None:
    class Interrupting(OracleDrafter):
        def draft(self, state: Any, budget: int) -> Any:
            raise KeyboardInterrupt

    model = lora(fresh())
    plain = model.generate(**tiny.prompts(1), **NEW)
    spec = selfspec.wrap(model, drafter=Interrupting(plain))
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        spec.generate(**tiny.prompts(1), **NEW)
    assert snapshot(model) == before
    assert all(
        getattr(value, "__self__", model) in (model, model.base_model, model.base_model.model)
        for module in (model, model.base_model, model.base_model.model)
        for name, value in module.__dict__.items()
        if name == "prepare_inputs_for_generation"
    )
    assert model.generate(**tiny.prompts(1), **NEW).equal(plain)


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_j13_a_model_half_on_a_gpu(place: str, tmp_path: Path) -> None:
    places: dict[str, Any] = {f"model.layers.{i}": 0 if i < 2 else place for i in range(4)}
    places |= dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm"), 0)
    model = dispatch_model(fresh(), places | {"lm_head": place}, offload_dir=str(tmp_path))
    prompt = {name: ids.cuda() for name, ids in tiny.prompts(3).items()}
    for drafter in DRAFTERS.values():
        spec = selfspec.wrap(model, drafter=drafter())
        follows(spec, model, prompt=prompt)
        follows(spec, model, prompt=prompt, do_sample=True)
        follows(spec, model, prompt={"input_ids": tiny.prompts(1)["input_ids"]})  # on the CPU
        assert spec.stats.fallbacks == 0


# ------------------------------------------------------------------------ J19: compiled models


def _forward(model: Any, counter: Any) -> Any:
    model.forward = torch.compile(model.forward, backend=counter, fullgraph=True)
    return model


def _in_place(model: Any, counter: Any) -> Any:
    model.compile(backend=counter)
    return model


def _layers(model: Any, counter: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend=counter)
    return model


def _replaced_layers(model: Any, counter: Any) -> Any:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend=counter)
    return model


def _module(model: Any, counter: Any) -> Any:
    return torch.compile(model, backend=counter)


@pytest.mark.parametrize("how", [_forward, _in_place, _layers, _replaced_layers, _module])
def test_j19_compiled_models(how: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Requests run the uncompiled code: no graph is made for them, none of the user's is lost."""
    counter = CompileCounter()
    model = how(fresh(), counter)
    base = tiny.build("llama")
    before = [dict(module.__dict__) for module in model.modules()]
    drafters = [selfspec.NGramDrafter(1, min_prob=0.0), selfspec.EarlyExitDrafter(3, 3, 0.0)]
    for drafter, batch in zip(drafters, (1, 3), strict=True):
        spec = selfspec.wrap(model, drafter=drafter)
        assert spec.model is model
        prompt = tiny.prompts(batch)
        assert spec.generate(**prompt, **NEW).equal(base.generate(**prompt, **NEW))
        assert spec.stats.accepted > 0
    assert counter.frame_count == 0
    assert [dict(module.__dict__) for module in model.modules()] == before
    said = "selfspec: LlamaForCausalLM is compiled; requests run it uncompiled."
    assert caplog.messages.count(said) == 2


def test_j19_other_calls_run_what_was_compiled() -> None:
    counter = CompileCounter()
    model = _layers(fresh(), counter)
    ids = tiny.prompts(1)["input_ids"]
    spec = selfspec.wrap(model, drafter="ngram")
    steps = spec.stream(ids, **NEW)
    next(steps)
    assert counter.frame_count == 0
    model(ids, use_cache=False)  # while the request is under way
    assert counter.frame_count > 0
    list(steps)
    torch._dynamo.reset()


def test_j19_compiled_after_wrapping_and_around_adapters() -> None:
    counter = CompileCounter()
    model = fresh()
    spec = selfspec.wrap(model, drafter=selfspec.EarlyExitDrafter(3, 3, 0.0))
    text = follows(spec, model)
    model.compile(backend=counter)
    assert spec.generate(**tiny.prompts(3), **NEW).tolist() == text
    adapted = lora(fresh())
    spec = selfspec.wrap(torch.compile(adapted, backend=counter), drafter=DRAFTERS["early-exit"]())
    follows(spec, adapted)
    assert counter.frame_count == 0


def test_j19_a_compiled_wrapper_is_the_compiled_forward() -> None:
    model = tiny.build("llama")
    compiled: Any = torch.compile(selfspec.wrap(model), backend="eager")
    ids = tiny.prompts(1)["input_ids"]
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
    assert not hasattr(compiled, "generate") or compiled.generate(ids, **NEW).equal(
        model.generate(ids, **NEW)
    )
    torch._dynamo.reset()


# -------------------------------------------------------------------- deletion, without the gc


@pytest.mark.parametrize(
    ("drafter", "graphs"),
    [*((name, False) for name in (*DRAFTERS, "raises", "peft")), ("early-exit", True)],
)
def test_i1_j3_deletion_frees_everything_at_once(drafter: str, graphs: bool) -> None:
    class Raising(OracleDrafter):
        def draft(self, state: Any, budget: int) -> Any:
            raise RuntimeError("a drafter fails")

    prompt: Any = tiny.prompts(3)
    model: Any = fresh()
    plain = model.generate(**prompt, **NEW)
    gc.collect()
    gc.disable()
    try:
        drafts: Any = Raising(plain) if drafter == "raises" else None
        chosen = drafts or DRAFTERS["early-exit" if drafter == "peft" else drafter]()
        spec: Any = selfspec.wrap(
            lora(model) if drafter == "peft" else model, drafter=chosen, cuda_graphs=graphs
        )
        if drafter == "raises":
            with pytest.raises(RuntimeError, match="a drafter fails"):
                spec.generate(**prompt, **NEW)
        else:
            spec.generate(**prompt, **NEW)
        wrapper, weight = weakref.ref(spec), weakref.ref(model.model.layers[0].mlp.down_proj.weight)
        target = weakref.ref(spec._target)
        del spec, chosen, drafts
        assert wrapper() is None
        assert target() is None
        if drafter != "peft":  # PEFT's own model is a cycle
            del model
            assert weight() is None
    finally:
        gc.enable()


def test_j3_unwrap_is_the_model() -> None:
    for model in (fresh(), lora(fresh()), torch.compile(fresh(), backend="eager")):
        spec = selfspec.wrap(model)
        assert spec.unwrap() is model
