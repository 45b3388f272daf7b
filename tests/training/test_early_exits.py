"""Training a model so that its early layers can speak."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec.training import EarlyExitConfig, exit_agreement, train_early_exits
from selfspec.training import early_exits as module
from tests.families import tiny
from tests.training.learnable import answers, target

SMALL: dict[str, Any] = {
    "exits": (1, 2),
    "learning_rate": 3e-3,
    "warmup_steps": 2,
    "tokens_per_batch": 256,
    "total_tokens": 12_000,
    "held_out": 0.2,
    "dropout": 0.1,
}


def model_of() -> Any:
    """Weights small enough to learn something in a few steps."""
    return tiny.llama(initializer_range=0.1)


def log(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


@pytest.mark.parametrize("targets", ["model", "text"])
def test_exits_come_to_say_what_the_model_says(targets: str, tmp_path: Path) -> None:
    model = model_of()
    config = EarlyExitConfig(**SMALL, targets=targets)
    before_head = model.lm_head.weight.clone()
    first = train_early_exits(model, answers(), tmp_path / "none", _few(config, 1))
    before = exit_agreement(model_of(), first, [1, 2, 3, 4])
    held = train_early_exits(model, answers(), tmp_path / "run", config)
    assert [a.id for a in held] == [a.id for a in first]
    after = exit_agreement(model, held, [1, 2, 3, 4])
    assert before[4] == after[4] == 1.0
    assert after[1] > before[1] + 0.3
    assert after[2] > before[2] + 0.3
    rows = log(tmp_path / "run")
    assert rows[-1]["tokens"] >= config.total_tokens
    assert rows[-1]["last"] < rows[0]["last"] - 1  # the text is learned by the whole model, too
    # Embeddings and head are those that there were; nothing of the training is left on the model.
    assert torch.equal(model.lm_head.weight, before_head)
    assert not model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def _few(config: EarlyExitConfig, tokens: int) -> EarlyExitConfig:
    values = {k: v for k, v in config.to_dict().items() if k != "total_tokens"}
    return EarlyExitConfig.from_dict({**values, "total_tokens": tokens})


def test_exits_take_turns(tmp_path: Path) -> None:
    config = EarlyExitConfig(
        **{**SMALL, "exits": (1, 2, 3), "total_tokens": 1200}, exits_per_step=2
    )
    train_early_exits(model_of(), answers(), tmp_path, config)
    seen = [sorted(set(row) - {"step", "tokens", "last"}) for row in log(tmp_path)]
    assert seen[:3] == [["1", "2"], ["1", "3"], ["2", "3"]]


def test_embeddings_are_trained_if_that_is_wanted(tmp_path: Path) -> None:
    model = model_of()
    before = model.lm_head.weight.clone()
    config = EarlyExitConfig(**{**SMALL, "total_tokens": 500}, train_embeddings=True)
    train_early_exits(model, answers(), tmp_path, config)
    assert not torch.equal(model.lm_head.weight, before)


def test_a_run_that_was_killed_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    config = EarlyExitConfig(**{**SMALL, "total_tokens": 3000}, checkpoint_seconds=0.0)
    whole = model_of()
    train_early_exits(whole, answers(), tmp_path / "whole", config)
    model, steps = model_of(), [0]
    real = module._Run._step

    def step(self: Any, rows: Any) -> Any:
        steps[0] += 1
        if steps[0] == 6:
            raise KeyboardInterrupt
        return real(self, rows)

    monkeypatch.setattr(module._Run, "_step", step)
    with pytest.raises(KeyboardInterrupt):
        train_early_exits(model, answers(), tmp_path / "cut", config)
    assert not model.training
    fresh = model_of()
    train_early_exits(fresh, answers(), tmp_path / "cut", config)
    assert steps[0] > 7
    assert log(tmp_path / "cut") == log(tmp_path / "whole")
    mine, theirs = fresh.state_dict(), whole.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    with pytest.raises(ValueError, match="another config"):
        train_early_exits(fresh, answers(), tmp_path / "cut", _few(config, 9))
    with pytest.raises(ValueError, match="other texts"):
        train_early_exits(fresh, answers(30), tmp_path / "cut", config)
    for other in (tiny.llama(initializer_range=0.2), tiny.llama(num_hidden_layers=5)):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match="a run of another model"):
            train_early_exits(other, answers(), tmp_path / "cut", config)
        assert all(torch.equal(before[name], now) for name, now in other.state_dict().items())
    (tmp_path / "cut" / "log.jsonl").unlink()
    with pytest.raises(ValueError, match=r"lacks log\.jsonl"):
        train_early_exits(fresh, answers(), tmp_path / "cut", config)


def test_what_is_frozen_stays(tmp_path: Path) -> None:
    model = model_of()
    layer, other = model.model.layers[0], model.model.layers[1]
    layer.requires_grad_(False)
    before, moved = copy.deepcopy(layer.state_dict()), other.mlp.up_proj.weight.clone()
    train_early_exits(model, answers(), tmp_path, EarlyExitConfig(**{**SMALL, "total_tokens": 500}))
    assert all(torch.equal(before[name], now) for name, now in layer.state_dict().items())
    assert not torch.equal(moved, other.mlp.up_proj.weight)
    required = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert required == {n for n, _ in model.named_parameters() if n.startswith("model.layers.0.")}
    with pytest.raises(ValueError, match="every parameter of the model is frozen"):
        train_early_exits(
            model_of().requires_grad_(False), answers(), tmp_path / "b", EarlyExitConfig(**SMALL)
        )


def test_the_loss_does_not_depend_on_padding_or_pieces(monkeypatch: Any) -> None:
    """Gradients of two texts together are those of each alone, weighted by their tokens."""
    model, texts = model_of(), answers()[:2]
    config = EarlyExitConfig(**{**SMALL, "dropout": 0.0})
    lengths = [len(a.response_ids) for a in texts]
    assert len(texts[0].prompt_ids) + lengths[0] != len(texts[1].prompt_ids) + lengths[1]

    def gradients(some: list[Any]) -> list[torch.Tensor]:
        from selfspec.patch import LayerPlan
        from selfspec.target import Target

        run = object.__new__(module._Run)
        run.config, run.target, run.num_layers = config, Target(model), 4
        ids, labels = module.padded(some, torch.device("cpu"))
        model.zero_grad()
        plan = LayerPlan(taps=frozenset({1, 4}))
        hidden = run.target.read(ids, plan, with_logits=False).hidden
        states = {tap: state[labels >= 0] for tap, state in hidden.items()}
        leaves = {tap: state.detach().requires_grad_() for tap, state in states.items()}
        run._losses(leaves, labels[labels >= 0], [1])
        torch.autograd.backward(list(states.values()), [leaf.grad for leaf in leaves.values()])
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    together = gradients(texts)
    alone = [gradients([text]) for text in texts]
    shares = [n / sum(lengths) for n in lengths]
    for whole, one, other in zip(together, *alone, strict=True):
        assert torch.allclose(whole, shares[0] * one + shares[1] * other, atol=1e-5)
    monkeypatch.setattr(module, "_POSITIONS", 5)
    for whole, pieces in zip(together, gradients(texts), strict=True):
        assert torch.allclose(whole, pieces, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exits": ()}, "exits=.* must be counts of layers"),
        ({"exits": (1.5,)}, "exits=.* must be counts of layers"),
        ({"exits": (4,)}, r"exits has \[4\]: the model has 4 layers, choose exits in 1\.\.3"),
        ({"exits_per_step": 3}, r"exits_per_step=3 must be None, or in 1\.\.2"),
        ({"targets": "both"}, "targets='both'"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"exit_weight": -1}, "exit_weight=-1"),
        ({"learning_rate": 0}, "learning_rate=0"),
        ({"learning_rate": float("inf")}, "learning_rate=inf must be a finite number"),
        ({"exit_weight": "a"}, "exit_weight='a' must be a number"),
        ({"exits": (2, 2)}, r"exits=\(2, 2\) has a layer twice"),
        ({"dropout": None}, "dropout=None must be a number"),
        ({"max_length": "a"}, "max_length='a' must be an int"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"train_embeddings": "no"}, "train_embeddings='no' must be True or False"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        train_early_exits(model_of(), answers(), tmp_path, EarlyExitConfig(**{**SMALL, **change}))


def test_agreement_is_that_of_the_layers_alone() -> None:
    """Against the model cut off after so many layers."""
    model, some = target(), answers()[:5]
    found = exit_agreement(model, some, [2])
    right = total = 0
    cut = copy.deepcopy(model)
    cut.model.layers = cut.model.layers[:2]
    for answer in some:
        ids = torch.tensor([[*answer.prompt_ids, *answer.response_ids]])
        first = len(answer.prompt_ids) - 1
        whole, early = (m(ids).logits[0, first:-1].argmax(-1) for m in (model, cut))
        right, total = right + int((whole == early).sum()), total + len(whole)
    assert found == {2: pytest.approx(right / total)}
    with pytest.raises(ValueError, match=r"exits has \[5\]"):
        exit_agreement(model, some, [5])
