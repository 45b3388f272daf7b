"""The own format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from selfspec import checkpoints
from selfspec.checkpoints import tensors as files
from tests.checkpoints.drafts import MAKE, attach, edit_config, exit_, feature, heads, logits
from tests.families import tiny


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", MAKE)
def test_a_draft_comes_back_as_it_was(
    tmp_path: Path, model: Any, kind: str, own: bool, dtype: torch.dtype
) -> None:
    network = MAKE[kind](own_head=own).to(dtype)
    checkpoints.save(network, tmp_path / "a" / "b", base=model)
    loaded = checkpoints.load(tmp_path / "a" / "b", model=model)
    assert type(loaded) is type(network)
    assert loaded.config == network.config
    attach(network, model.to(dtype))
    attach(loaded, model)
    model.float()
    assert torch.equal(logits(loaded), logits(network))
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert all(p.requires_grad for p in loaded.parameters())


def test_whole_vocabularies_and_layouts_come_back(tmp_path: Path, model: Any) -> None:
    made = (
        feature(draft_vocab_size=None, layout="eagle", taps=(4,), bias=True, fusion_bias=True),
        heads(draft_vocab_size=None, own_head=True, conditioned=False, accuracies=[[0.5, 0.1]] * 3),
        exit_(draft_vocab_size=None, own_head=True),
    )
    for i, network in enumerate(made):
        checkpoints.save(network, tmp_path / str(i), base=model)
        loaded = checkpoints.load(tmp_path / str(i))
        assert loaded.config == network.config
        assert torch.equal(logits(loaded), logits(network))


def test_what_is_known_of_a_draft_goes_with_it(tmp_path: Path, model: Any) -> None:
    checkpoints.save(
        heads(),
        tmp_path / "one",
        base=model,
        license="apache-2.0",
        training={"tokens": 5, "lr": 1e-3},
        evaluation={"tau": 2.5},
    )
    loaded = checkpoints.load(tmp_path / "one")
    checkpoints.save(loaded, tmp_path / "two", evaluation={"tau": 2.6})
    card = checkpoints.card_of(checkpoints.load(tmp_path / "two", model=model))
    assert card is not None
    assert (card.license, card.training) == ("apache-2.0", {"tokens": 5, "lr": 1e-3})
    assert card.evaluation == {"tau": 2.6}
    assert card.base == checkpoints.BaseModel.of(model)


def test_a_draft_needs_a_base(tmp_path: Path, model: Any) -> None:
    with pytest.raises(ValueError, match="base is missing: pass the model"):
        checkpoints.save(heads(), tmp_path)
    with pytest.raises(ValueError, match=r"hidden_size is 32, the base model's 64"):
        checkpoints.save(heads(hidden_size=32), tmp_path, base=model)
    with pytest.raises(ValueError, match="reads layer 5, and the base model has 4"):
        checkpoints.save(feature(taps=(1, 2, 5)), tmp_path, base=model)
    with pytest.raises(TypeError, match="network is a Linear"):
        checkpoints.save(torch.nn.Linear(2, 2), tmp_path, base=model)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_old_draft(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = heads()
    checkpoints.save(old, tmp_path, base=model)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    new = heads(num_layers=1)
    with pytest.raises(ValueError, match=r"config\.json cannot be written.*JSON serializable"):
        checkpoints.save(new, tmp_path, base=model, training={"model": model})
    with pytest.raises(ValueError, match=r"config\.json cannot be written"):
        checkpoints.save(new, tmp_path, base=model, evaluation={"tau": float("nan")})

    def dies(whole: Any, path: Path, header: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(files, "save_file", dies)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(new, tmp_path, base=model)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_kill_between_the_two_files_is_noticed(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(heads(conditioned=False, num_layers=1), tmp_path / "old", base=model)

    def dies(text: str, path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("selfspec.checkpoints.tensors.write_text", dies)
    for name in ("old", "new"):
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(heads(conditioned=False), tmp_path / name, base=model)
    with pytest.raises(ValueError, match="are not of one save"):
        checkpoints.load(tmp_path / "old")
    with pytest.raises(ValueError, match="holds no drafts"):
        checkpoints.load(tmp_path / "new")


def test_weights_and_config_of_two_saves_are_refused(tmp_path: Path, model: Any) -> None:
    checkpoints.save(heads(conditioned=False, num_heads=2), tmp_path, base=model)
    # Same shapes, another meaning: as a kill between the two files would leave it.
    edit_config(tmp_path, network__accuracies=[[0.5], [0.4]])
    with pytest.raises(ValueError, match="are not of one save"):
        checkpoints.load(tmp_path)


def test_shared_memory_is_written_twice(tmp_path: Path, model: Any) -> None:
    network = heads(own_head=True)
    network.heads[1].weight = network.heads[0].weight
    checkpoints.save(network, tmp_path, base=model)
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["heads.0.weight"], saved["heads.1.weight"])
    assert torch.equal(logits(checkpoints.load(tmp_path)), logits(network))


def test_files_are_read_without_running_anything(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return (exec, ("raise SystemExit",))

    torch.save({"0.0.linear.weight": Harmful()}, tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 1}')
    with pytest.raises(ValueError, match="holds more than tensors and was not loaded"):
        checkpoints.load(tmp_path)
    torch.save([torch.ones(1)], tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="must hold a dict of tensors"):
        checkpoints.load(tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(ValueError, match=r"medusa_lm_head\.safetensors cannot be read"):
        checkpoints.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        checkpoints.load(tmp_path)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every value in a JSON object, at any depth."""
    below = value.items() if isinstance(value, dict) else enumerate(value[:1])
    found = [path] if path else []
    for key, part in below:
        found += _places(part, (*path, key)) if isinstance(part, dict | list) else [(*path, key)]
    return found


@pytest.mark.parametrize("kind", MAKE)
def test_a_value_of_another_type_is_an_error_that_names_the_file(
    tmp_path: Path, model: Any, kind: str
) -> None:
    checkpoints.save(MAKE[kind](), tmp_path, base=model, training={"steps": 3})
    whole = (tmp_path / "config.json").read_text()
    messages = []
    for *path, last in _places(json.loads(whole)):
        for other in (None, 3, -1, "x", [], [99], {}, {"x": 1}, True, 2.5):
            values = json.loads(whole)
            holder = values
            for key in path:
                holder = holder[key]
            holder[last] = other
            (tmp_path / "config.json").write_text(json.dumps(values))
            try:
                checkpoints.load(tmp_path, model=model)
            except ValueError as error:
                messages.append(str(error))
    assert len(messages) > 150
    assert [m for m in messages if str(tmp_path) not in m and "the draft" not in m] == []


def test_a_folder_in_the_place_of_a_file(tmp_path: Path, model: Any) -> None:
    checkpoints.save(feature(), tmp_path, base=model)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match=str(tmp_path)):
        checkpoints.load(tmp_path)
