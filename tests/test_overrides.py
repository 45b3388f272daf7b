"""What users put over a model: methods of a subclass, hooks, and settings in mid-request."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import selfspec
from selfspec.target import Target
from tests.families import tiny
from tests.follow import NEW, follows, fresh, text
from tests.oracle import OracleDrafter
from tests.parts import by_name


def as_class(kind: type) -> Any:
    """The tiny llama, as an object of a subclass."""
    model = fresh()
    model.__class__ = kind
    return model


# ------------------------------------------------------------------------- methods of a subclass


class _EvenTokens(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return {**inputs, "input_ids": inputs["input_ids"] // 2 * 2}


class _LatePositions(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        if not kwargs.get("is_first_iteration"):
            inputs["position_ids"] = inputs["position_ids"] + 5
        return inputs


class _ShortMask(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        if not kwargs.get("is_first_iteration"):
            inputs["attention_mask"] = inputs["attention_mask"].clone()
            inputs["attention_mask"][:, 0] = 0
        return inputs


class _Embeds(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs["inputs_embeds"] = -self.get_input_embeddings()(inputs.pop("input_ids"))
        return inputs


class _Faithful(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return dict(super().prepare_inputs_for_generation(*args, **kwargs))


class _Negates(LlamaForCausalLM):
    def _update_model_kwargs_for_generation(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs.logits.mul_(-1)
        return super()._update_model_kwargs_for_generation(outputs, *args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (_EvenTokens, "other tokens"),
        (_LatePositions, "other positions"),
        (_ShortMask, "another mask"),
        (_Embeds, "other tokens"),
    ],
)
def test_steps_that_get_other_inputs_are_refused(kind: type, what: str) -> None:
    model = as_class(kind)
    with pytest.raises(ValueError, match=f"gives a step {what}"):
        selfspec.wrap(model)


def test_inputs_prepared_in_another_way_with_the_same_result() -> None:
    spec = selfspec.wrap(
        as_class(_Faithful), drafter=selfspec.NGramDrafter(min_match=1, min_prob=0.0)
    )
    follows(spec, spec.model)
    assert spec.stats.fallbacks == 0


@pytest.mark.parametrize("on_the_object", [False, True])
def test_inputs_updated_by_code_of_ones_own(
    on_the_object: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = fresh() if on_the_object else as_class(_Negates)
    if on_the_object:
        stock = model._update_model_kwargs_for_generation

        def update(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            outputs.logits.mul_(-1)
            return stock(outputs, *args, **kwargs)

        model._update_model_kwargs_for_generation = update
    spec = selfspec.wrap(model)
    with caplog.at_level(logging.WARNING, "selfspec"):
        assert follows(spec, model) != text(fresh(), tiny.prompts(3))
    assert "updates its inputs between steps in a way of its own" in caplog.text
    assert spec.stats.fallbacks == 1


# --------------------------------------------------------------------------- put on after wrap


def _last_logits_hook(model: Any) -> Any:
    steps = torch.arange(model.lm_head.out_features) % 3

    def bend(module: Any, args: Any, logits: Any) -> Any:
        return torch.cat([logits[:, :-1], logits[:, -1:] + steps], 1)

    return model.lm_head.register_forward_hook(bend)


def _last_logits_only(model: Any) -> Any:
    def forward(
        input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        out = type(model).forward(model, input_ids, attention_mask, position_ids, **kwargs)
        out["logits"] = out["logits"][:, -1:]
        return out

    model.forward = forward


def _last_state_hook(model: Any) -> Any:
    def bend(module: Any, args: Any, states: Any) -> Any:
        return torch.cat([states[:, :-1], states[:, -1:].flip(-1)], 1)

    return model.model.norm.register_forward_hook(bend)


def _last_input_hook(model: Any) -> Any:
    def bend(module: Any, args: Any) -> Any:
        return (torch.cat([args[0][:, :-1], args[0][:, -1:].flip(-1)], 1), *args[1:])

    return model.model.layers[2].register_forward_pre_hook(bend)


@pytest.mark.parametrize(
    "put", [_last_logits_hook, _last_logits_only, _last_state_hook, _last_input_hook]
)
def test_what_is_put_on_after_wrap_is_noticed(put: Callable[[Any], Any]) -> None:
    model, bent, prompt = fresh(), fresh(), tiny.prompts(1)
    before = text(model, prompt)
    put(bent)
    after = bent.generate(**prompt, **NEW, do_sample=False)
    spec = selfspec.wrap(model, drafter=OracleDrafter(after, 4))
    handle = put(model)
    assert text(spec, prompt) == after.tolist()
    assert (after.tolist() != before) == (put is not _last_logits_only)
    if handle is not None:
        handle.remove()
        assert text(spec, prompt) == before
        assert spec.stats.requests == 1


def test_a_model_that_stays_as_it_is_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh()
    model.lm_head.register_forward_hook(lambda *_: None)
    spec, prompt = selfspec.wrap(model, drafter=by_name("early-exit")), tiny.prompts(1)
    looks: list[Any] = []
    monkeypatch.setattr(Target, "__init__", lambda self, *args: looks.append(args))

    def nested(ids: Any, scores: Any) -> Any:  # while the patch is on
        assert spec._target.is_current
        return scores

    for _ in range(2):
        spec.generate(**prompt, **NEW, do_sample=False, logits_processor=[nested])
    assert not looks


# ------------------------------------------------------------------------- set in mid-request


def _at(length: int, act: Callable[[], None]) -> Any:
    def criterion(ids: Any, scores: Any) -> Any:
        if ids.shape[1] == length:
            act()
        return torch.tensor([False])

    return [criterion]


@pytest.mark.parametrize("drafter", ["ngram", "early-exit"])
def test_attention_set_in_mid_request_stays_set(drafter: str) -> None:
    model, prompt = fresh(), tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    middle = prompt["input_ids"].shape[1] + 4
    spec = selfspec.wrap(model, drafter=by_name(drafter))
    change = _at(middle, lambda: model.set_attn_implementation("eager"))
    found = spec.generate(**prompt, max_new_tokens=20, do_sample=False, stopping_criteria=change)
    assert found.equal(plain)
    assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation_internal == "eager"
    follows(spec, model, 1)


@pytest.mark.parametrize("drafter", ["early-exit", "layer-skip"])
@pytest.mark.parametrize("over", [True, False])
def test_a_forward_set_in_mid_request_stays_set(drafter: str, over: bool) -> None:
    model, prompt = fresh(), tiny.prompts(1)
    layer = model.model.layers[1]
    calls: list[int] = []

    def change() -> None:
        below = layer.forward if over else type(layer).forward.__get__(layer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return below(*args, **kwargs)

        layer.forward = forward

    plain = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    middle = prompt["input_ids"].shape[1] + 4
    spec = selfspec.wrap(model, drafter=by_name(drafter))
    found = spec.generate(
        **prompt, max_new_tokens=20, do_sample=False, stopping_criteria=_at(middle, change)
    )
    assert found.equal(plain)
    assert calls
    assert [one for one in model.modules() if "forward" in one.__dict__] == [layer]
    assert layer.forward.__name__ == "forward"
    follows(spec, model, 1)
    layer.__dict__.pop("forward")
    follows(spec, model, 1)
    assert not any("forward" in one.__dict__ for one in model.modules())


# ------------------------------------------------------------------------------ who calls whom


def test_stream_runs_in_the_context_of_its_caller() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    seen: list[int] = []

    def processor(ids: Any, scores: Any) -> Any:
        seen.append(variable.get())
        return scores

    token = variable.set(7)
    list(selfspec.wrap(fresh()).stream(**tiny.prompts(1), **NEW, logits_processor=[processor]))
    variable.reset(token)
    assert set(seen) == {7}


def test_custom_generate_is_given_the_model() -> None:
    model = fresh()
    spec = selfspec.wrap(model)

    def loop(model: Any, input_ids: Any, **kwargs: Any) -> Any:
        return model

    assert spec.generate(**tiny.prompts(1), **NEW, custom_generate=loop) is model
    assert spec.stats.fallbacks == 1
    with pytest.raises(ValueError, match=r"stream: .*custom_generate is set"):
        list(spec.stream(**tiny.prompts(1), **NEW, custom_generate=loop))


def test_a_wrapper_assists_as_its_model() -> None:
    model, prompt = fresh(), tiny.prompts(1)
    spec = selfspec.wrap(model)
    plain = model.generate(**prompt, **NEW, do_sample=False)
    assert spec.generate(**prompt, **NEW, do_sample=False, assistant_model=spec).equal(plain)
    with pytest.raises(AttributeError, match="the model itself is its `model`"):
        model.generate(**prompt, **NEW, do_sample=False, assistant_model=spec)
