"""Telling one base model from another."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec.checkpoints import BaseModel, check_base
from selfspec.checkpoints.base_model import head_rows, sample
from tests.families import tiny


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama()


def test_a_base_survives_json(model: Any) -> None:
    base = BaseModel.of(model)
    assert base.shape == {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    assert BaseModel.from_dict(json.loads(json.dumps(asdict(base))), "x") == base
    with pytest.raises(ValueError, match=r"unknown fields \['hash'\]"):
        BaseModel.from_dict({"hash": 1}, "x")


def test_paths_of_this_machine_are_not_written_down(tmp_path: Path) -> None:
    model = tiny.llama()
    names = {}
    for path in (str(tmp_path / "some-model"), str(tmp_path), "owner/some-model", ""):
        model.config._name_or_path = model.name_or_path = path
        names[path] = BaseModel.of(model).name
    assert list(names.values()) == ["some-model", tmp_path.name, "owner/some-model", ""]


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-5])  # float16 is coarse below 6e-5
def test_loads_in_any_dtype_are_the_same_model(model: Any, scale: float) -> None:
    other = copy.deepcopy(model)
    other.model.embed_tokens.weight.data *= scale
    bases = [
        BaseModel.of(copy.deepcopy(other).to(dtype))
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    ]
    for one in bases:
        assert all(not one.differences(two) for two in bases)
    other.model.embed_tokens.weight.data *= 1.1
    assert all(one.differences(BaseModel.of(other)) for one in bases)


def test_the_sample_is_spread_over_rows_and_columns() -> None:
    weight = torch.zeros(300, 7)
    seen = [row for row in range(300) if _changed(weight, slice(row, row + 1), slice(None))]
    assert len(seen) == 256
    assert all(_changed(weight, slice(None), slice(c, c + 1)) for c in range(7))
    assert not _changed(weight, slice(200, None), slice(None), vocab_size=200)


def _changed(weight: torch.Tensor, rows: slice, columns: slice, **options: int) -> bool:
    other = weight.clone()
    other[rows, columns] = 1
    return sample(other, **options) != sample(weight, **options)


def test_a_fine_tune_is_refused_unless_asked_for(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    base = replace(BaseModel.of(model), name="the/base")
    tuned = copy.deepcopy(model)
    tuned.model.embed_tokens.weight.data[8:16] += 0.05
    with pytest.raises(ValueError, match=r"made for the/base: \d+ of 256 sampled.*strict_base=F"):
        check_base(base, tuned)
    with caplog.at_level(logging.WARNING, logger="selfspec"):
        for _ in range(3):  # when it is loaded, and by every wrapper
            check_base(base, tuned, strict_base=False)
    assert caplog.text.count("used anyway") == 1


def test_other_sizes_are_named_and_cannot_be_let_through(model: Any) -> None:
    base = BaseModel.of(tiny.llama(num_hidden_layers=2))
    with pytest.raises(ValueError, match="num_hidden_layers is 2 for the draft and 4 in the model"):
        check_base(base, model, strict_base=False)
    gpt2 = BaseModel.of(tiny.build("gpt2"))
    with pytest.raises(ValueError, match="model_type is gpt2 for the draft and llama in the model"):
        check_base(gpt2, model)


def test_weights_that_are_no_plain_floats_are_not_read(model: Any) -> None:
    weight = model.model.embed_tokens.weight
    assert sample(weight.to("meta")) is None
    assert sample((weight * 10).to(torch.int8)) is None
    assert sample(weight.to(torch.float8_e4m3fn)) is None
    assert sample(None) is None

    class Packed(torch.Tensor):
        pass

    assert sample(torch.nn.Parameter(weight.detach().as_subclass(Packed))) is None
    # Unknown on one side: the config decides.
    check_base(replace(BaseModel.of(model), embedding=None), model)


def test_torchao_weights_are_not_read(model: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantised = copy.deepcopy(model)
    quantize_(quantised, Int8WeightOnlyConfig())
    assert sample(quantised.lm_head.weight) is None
    check_base(BaseModel.of(model), quantised)
    with pytest.raises(ValueError, match="load the model unquantised"):
        head_rows(quantised, None, 64)


def test_rows_of_a_head_that_a_layout_cannot_have(model: Any) -> None:
    ids = torch.tensor([2, 5])
    rows = head_rows(model, ids, 64)
    assert torch.equal(rows, model.lm_head.weight[ids])
    assert rows.data_ptr() != model.lm_head.weight.data_ptr()
    with pytest.raises(ValueError, match="LM head has 64 rows, and the draft 65 tokens"):
        head_rows(model, None, 65)
    biased = copy.deepcopy(model)
    biased.lm_head.bias = torch.nn.Parameter(torch.zeros(64))
    with pytest.raises(ValueError, match="has a bias"):
        head_rows(biased, ids, 64)
