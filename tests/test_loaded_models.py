"""Models in the state that loading, training and converting leave them in."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM, TorchAoConfig

import selfspec
from tests.families import tiny
from tests.follow import DRAFTERS, NEW, everywhere, follows, fresh
from tests.oracle import RandomTreeDrafter

# ------------------------------------------------------------------------- J13: where weights are


def _one_device(model: Any, folder: Path) -> Any:
    return dispatch_model(model, {"": "cpu"}, force_hooks=True)


def _offloaded(model: Any, folder: Path) -> Any:
    return cpu_offload(model, torch.device("cpu"))


def _on_disk(model: Any, folder: Path) -> Any:
    return disk_offload(model, str(folder), torch.device("cpu"))


def _in_parts(model: Any, folder: Path) -> Any:
    places = {f"model.layers.{i}": "cpu" if i < 2 else "disk" for i in range(4)}
    places |= {"model.embed_tokens": "disk", "model.rotary_emb": "cpu"}
    places |= {"model.norm": "cpu", "lm_head": "disk"}
    return dispatch_model(model, places, main_device="cpu", offload_dir=str(folder))


@pytest.mark.parametrize("how", [_one_device, _offloaded, _on_disk, _in_parts])
def test_j13_hooks_of_accelerate(how: Any, tmp_path: Path) -> None:
    model = how(fresh(), tmp_path)
    slow = how is _on_disk or how is _in_parts
    everywhere(model, names=["ngram", "layer-skip"] if slow else DRAFTERS)
    if how is not _one_device:
        with pytest.raises(ValueError, match=r"cannot be captured: its weights are offloaded"):
            selfspec.wrap(model, cuda_graphs=True)


def test_j13_layers_that_a_draft_leaves_out_are_not_loaded(tmp_path: Path) -> None:
    model = _on_disk(fresh(), tmp_path)
    loaded: list[int] = []
    for i, layer in enumerate(model.model.layers):
        hook = layer.self_attn.q_proj._hf_hook
        hook.pre_forward = lambda *args, own=hook.pre_forward, i=i, **kwargs: (
            loaded.append(i),
            own(*args, **kwargs),
        )[1]
    spec = selfspec.wrap(model, drafter=selfspec.EarlyExitDrafter(1, 3, 0.0))
    loaded.clear()
    follows(spec, model, 1)
    loads = [loaded.count(i) for i in range(4)]
    assert loads[0] > loads[1] == loads[2] == loads[3]


def test_j13_inputs_on_the_device_of_the_embeddings() -> None:
    model = _offloaded(fresh(), Path())
    assert model.device.type == "meta"
    assert selfspec.wrap(model)._target.device.type == "cpu"


# --------------------------------------------------------------------------------- quantised


def test_int8_weights() -> None:
    model = fresh()
    quantize_(model, Int8WeightOnlyConfig())
    everywhere(model, names=["ngram", "early-exit"])


def test_int8_weights_with_the_head_from_a_file(tmp_path: Path) -> None:
    fresh().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()), device_map="cpu"
    )
    everywhere(model, names=["early-exit"])
    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: name == "lm_head")
    everywhere(model, names=["early-exit"], cuda_graphs=True)


def test_activations_quantised_by_the_tensor_are_refused() -> None:
    """Their range is that of all tokens of a call: a block of tokens is another computation."""
    dynamic = torch.ao.quantization.quantize_dynamic(fresh(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match="tokens behind a token change the logits after it"):
        selfspec.wrap(dynamic)


# --------------------------------------------------------------------------- H10: for training


def test_h10_inference_mode_then_training() -> None:
    model = fresh()
    for graphs in (False, True):
        with torch.inference_mode():
            spec = selfspec.wrap(model, drafter=DRAFTERS["early-exit"](), cuda_graphs=graphs)
            text = follows(spec, model)
        assert follows(spec, model) == text
        model.train()
        ids = tiny.prompts(1)["input_ids"]
        model(ids, labels=ids).loss.backward()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        optimiser.step()
        optimiser.zero_grad()
        model.eval()
        assert follows(spec, model) != text
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert spec.stats.fallbacks == 0
        assert spec.stats.accepted > 0


def test_training_mode_of_any_part_is_left_to_transformers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = fresh("gpt2")
    model.gradient_checkpointing_enable()
    spec = selfspec.wrap(model, drafter="ngram")
    follows(spec, model)
    assert spec.stats.fallbacks == 0
    for part in (
        model,
        model.transformer.h[2],
        model.transformer.h[1].attn,
        model.transformer.drop,
    ):
        part.train()
        flags = [module.training for module in model.modules()]
        before = spec.stats.fallbacks
        follows(spec, model)
        assert spec.stats.fallbacks == before + 1
        assert [module.training for module in model.modules()] == flags
        model.eval()
    follows(spec, model)
    assert spec.stats.fallbacks == 4
    assert sum("training mode" in message for message in caplog.messages) == 1


def test_wrapping_in_training_mode_leaves_the_mode() -> None:
    model = fresh("gpt2").train()
    model.transformer.h[1].eval()
    flags = [module.training for module in model.modules()]
    selfspec.wrap(model)
    assert [module.training for module in model.modules()] == flags


# --------------------------------------------------------------- H15: changed after wrapping


@pytest.mark.parametrize(
    ("name", "drafter", "graphs"),
    [
        ("llama", "ngram", False),
        ("llama", "early-exit", False),
        ("llama", "early-exit", True),
        ("gpt2", "layer-skip", False),
        ("gpt2", "early-exit", False),
    ],
)
def test_h15_embeddings_resized_after_wrapping(name: str, drafter: str, graphs: bool) -> None:
    model = fresh(name)  # gpt2 ties head and embeddings
    spec = selfspec.wrap(model, drafter=DRAFTERS[drafter](), cuda_graphs=graphs)
    new = torch.tensor([[70, 71, 3, 70, 71, 3, 70]])
    for size in (72, 50):
        model.resize_token_embeddings(size, mean_resizing=False)
        with torch.no_grad():
            model.lm_head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(size))
        ids = new % size
        follows(spec, model, prompt={"input_ids": ids})
        follows(spec, model, prompt={"input_ids": ids}, do_sample=True)
    assert spec.stats.fallbacks == 0


def test_h15_head_norm_and_dtype_replaced_after_wrapping() -> None:
    model = fresh()
    spec = selfspec.wrap(model, drafter=selfspec.EarlyExitDrafter(4, 4, 0.0))
    follows(spec, model)

    def head() -> None:
        model.lm_head = nn.Linear(64, 64, bias=True)

    def norm() -> None:
        model.model.norm = copy.deepcopy(model.model.norm)
        with torch.no_grad():
            model.model.norm.weight.normal_(1, 0.5)

    for change in (head, norm, model.double, lambda: spec.to(torch.float32)):
        change()
        spec.stats.reset()
        follows(spec, model)
        # The whole model as its own draft: a head or norm of before would be found out.
        assert spec.stats.acceptance_rate == 1.0
    assert spec._target.architecture.readout is not None


def _head(rows: int) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rows)
        head = nn.Linear(64, rows, bias=False)
        return head.requires_grad_(False)


@pytest.mark.parametrize("drafter", [*DRAFTERS, "drawn"])
@pytest.mark.parametrize("rows", [48, 80])
def test_a_head_of_another_size_than_the_embeddings(drafter: str, rows: int) -> None:
    """Padded alone: tokens that cannot be chosen, or cannot be embedded once they are drafted."""
    model = fresh()
    head = _head(rows)
    model.lm_head = head
    # Ids that cannot be embedded lose where the whole model is read, and win in a draft.
    calls = model.model.layers[3].register_forward_hook
    whole: list[bool] = [True]
    calls(lambda module, args, out: whole.__setitem__(0, not bool(out.equal(args[0]))))
    wide = torch.arange(rows) >= tiny.VOCAB
    head.register_forward_hook(lambda m, a, out: out + wide * (-1e4 if whole[0] else 1e4))
    drawn = selfspec.EarlyExitDrafter(3, 3, 0.0, branches=3, do_sample=True)
    spec = selfspec.wrap(model, drafter=drawn if drafter == "drawn" else DRAFTERS[drafter]())
    follows(spec, model)
    if drafter == "drawn":
        spec.generate(**tiny.prompts(3), **NEW, do_sample=True)
    else:
        follows(spec, model, do_sample=True)
    assert spec.stats.fallbacks == 0
    assert drafter == "none" or spec.stats.drafted > 0


# ---------------------------------------------------------------------------- odd numbers


def _masked(value: float) -> Any:
    """A model that masks a padded part of its vocabulary by itself."""
    model = fresh()
    model.lm_head.register_forward_hook(
        lambda module, args, out: out.masked_fill(torch.arange(64) >= 60, value)
    )
    return model


@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min])
def test_vocabularies_with_a_masked_part(value: float) -> None:
    everywhere(_masked(value), names=["none", "early-exit"])


def test_nan_everywhere_is_refused_and_nan_somewhere_is_plains() -> None:
    model = fresh(dtype=torch.float16)
    spec = selfspec.wrap(model, drafter=RandomTreeDrafter())
    with torch.no_grad():
        model.model.embed_tokens.weight[33] = 6e4  # too large for the first norm's squares
        model.model.layers[1].mlp.down_proj.weight[3, 3] = torch.inf
    follows(spec, model)
    assert spec.stats.fallbacks == 0
    with pytest.raises(ValueError, match="cannot be wrapped: its logits are NaN"):
        selfspec.wrap(model)


def test_a_head_in_another_precision() -> None:
    model = fresh(dtype=torch.bfloat16)
    model.lm_head.float()
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    spec = selfspec.wrap(model, drafter=DRAFTERS["early-exit"]())
    follows(spec, model)
    assert spec.stats.accepted > 0


# ------------------------------------------------------------------------ global settings


@pytest.fixture
def _settings() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize("graphs", [False, True])
def test_default_dtype_and_deterministic_algorithms(graphs: bool) -> None:
    model = fresh()
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.bfloat16 if graphs else torch.float64)
    everywhere(model, names=["ngram", "early-exit"], cuda_graphs=graphs)


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize("graphs", [False, True])
def test_another_default_device(graphs: bool) -> None:
    """Tensors made without a device would be on it; on "meta" they hold nothing."""
    model, prompts = fresh(), [tiny.prompts(1), tiny.prompts(3)]
    plain = [model.generate(**prompt, **NEW, use_cache=True) for prompt in prompts]
    for drafter in DRAFTERS.values():
        torch.set_default_device("meta")
        spec = selfspec.wrap(model, drafter=drafter(), cuda_graphs=graphs)
        texts = [spec.generate(**prompt, **NEW) for prompt in prompts]
        torch.set_default_device(None)
        assert all(one.equal(other) for one, other in zip(texts, plain, strict=True))


# ---------------------------------------------------------------------------- refusals


class FullyShardedDataParallel(nn.Module):
    """Stands for torch's, which wants a group of processes."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class FSDPModule:
    """Stands for the class that `fully_shard` adds to a module's."""


@pytest.mark.parametrize(
    ("shell", "message"),
    [
        (nn.DataParallel, "model is a DataParallel, which has no `generate`; wrap its .module"),
        (FullyShardedDataParallel, "sharded over processes; wrap one that is whole"),
        (lambda model: model.state_dict(), "or one with adapters of PEFT"),
    ],
)
def test_shells_that_are_refused(shell: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        selfspec.wrap(shell(fresh()))


def test_sharded_in_place_is_refused() -> None:
    model = fresh()
    layer = model.model.layers[0]
    layer.__class__ = type("FSDPLlamaDecoderLayer", (FSDPModule, type(layer)), {})
    with pytest.raises(TypeError, match=r"model is sharded over processes \(FSDPLlama"):
        selfspec.wrap(model)
