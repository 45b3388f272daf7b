"""Steps in float32 for networks in two bytes, and learning rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from selfspec.training import TrainConfig
from selfspec.training.optimizer import Optimizer


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.to(dtype)

    def loss(self) -> torch.Tensor:
        return self.head(self.body(torch.ones(3, 6, dtype=self.head.weight.dtype))).square().sum()


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"warmup_steps": 0, "weight_decay": 0.0, "clip": 1e9, **changes})


def test_steps_below_the_rounding_add_up() -> None:
    net = Net(torch.bfloat16)
    optimizer = Optimizer(net, config(learning_rate=1e-5))
    weight = net.body.weight
    with torch.no_grad():
        weight.fill_(0.5)
        optimizer.masters[0].fill_(0.5)
    before = weight.detach().clone()
    for step in range(1000):
        weight.grad = torch.ones_like(weight)
        assert optimizer.step(step, 0.0)
        if step == 0:
            assert torch.equal(weight, before), "one step is below the rounding of the weights"
    moved = before.float() - weight.float()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=0, atol=2e-3)
    assert torch.equal(weight, optimizer.masters[0].bfloat16())


def test_float32_is_plain_adamw() -> None:
    net, other = Net(torch.float32), Net(torch.float32)
    optimizer = Optimizer(net, config(clip=0.5, weight_decay=0.1, final_learning_rate=0.0))
    plain = torch.optim.AdamW(other.parameters(), 2e-3, (0.9, 0.95), weight_decay=0.1)
    for step in range(5):
        net.loss().backward()
        assert optimizer.step(step, step / 10)
        other.loss().backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        plain.param_groups[0]["lr"] = 2e-3 * (1 - step / 10)
        plain.step()
        plain.zero_grad()
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert mine.grad is None
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_are_not_finite_change_nothing(bad: float, dtype: torch.dtype) -> None:
    net = Net(dtype)
    optimizer = Optimizer(net, config())
    net.loss().backward()
    assert optimizer.step(0, 0.0)
    before = [p.detach().clone() for p in net.parameters()]
    state = {name: value.clone() for name, value in optimizer.tensors().items()}
    net.loss().backward()
    net.body.weight.grad[0, 0] = bad
    assert not optimizer.step(1, 0.0)
    assert all(map(torch.equal, net.parameters(), before))
    assert all(torch.equal(value, state[name]) for name, value in optimizer.tensors().items())
    net.loss().backward()
    assert optimizer.step(2, 0.0)
    assert not any(map(torch.equal, net.parameters(), before))


def test_schedule() -> None:
    chosen = config(warmup_steps=10, final_learning_rate=0.2)
    optimizer = Optimizer(Net(torch.float32), chosen)
    assert optimizer.factor(0, 0.0) == pytest.approx(0.1)
    assert optimizer.factor(9, 0.0) == pytest.approx(1)
    # A run of a few steps warms up within a tenth of them.
    assert optimizer.factor(2, 0.05) == pytest.approx(0.5 * (1 - 0.8 * 0.05))
    assert optimizer.factor(2, 0.1) == pytest.approx(1 - 0.8 * 0.1)
    assert optimizer.factor(99, 0.5) == pytest.approx(0.6)
    assert optimizer.factor(99, 1.0) == pytest.approx(0.2)
    assert optimizer.factor(99, 1.5) == pytest.approx(0.2)


class Recorded(torch.optim.SGD):
    """Stands in for Muon, so that what it is given is seen with every torch."""

    given: list[Any] = []  # noqa: RUF012

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        params = list(params)
        Recorded.given.append((params, lr, options))
        super().__init__(params, lr=lr, momentum=options["momentum"])


def test_muon_has_matrices_other_than_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "Muon", Recorded, raising=False)
    net = Net(torch.bfloat16)
    optimizer = Optimizer(net, config(optimizer="muon", muon_learning_rate=0.5))
    ((parameters, rate, _),) = Recorded.given
    assert [p.shape for p in parameters] == [net.body.weight.shape]
    assert rate == 0.5
    net.loss().backward()
    before = [p.detach().clone() for p in net.parameters()]
    assert optimizer.step(0, 0.0)
    assert not any(map(torch.equal, net.parameters(), before))


def test_torch_without_muon_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ValueError, match=r'optimizer="muon" needs torch >= 2\.9.*"adamw"'):
        Optimizer(Net(torch.float32), config(optimizer="muon"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_goes_on(dtype: torch.dtype) -> None:
    net, other = Net(dtype), Net(dtype)
    optimizer = Optimizer(net, config())
    for step in range(6):
        if step == 3:
            saved = {name: value.clone() for name, value in optimizer.tensors().items()}
        net.loss().backward()
        optimizer.step(step, 0.0)
    resumed = Optimizer(other, config())
    resumed.load(saved)
    for step in range(3, 6):
        other.loss().backward()
        resumed.step(step, 0.0)
    assert all(map(torch.equal, net.parameters(), other.parameters()))
