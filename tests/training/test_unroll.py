"""Drafting from many positions at once against drafting from one after another, as a draft runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.networks.exit import ExitConfig, ExitNetwork
from selfspec.networks.feature import FeatureConfig, FeatureNetwork
from selfspec.training.unroll import exit_states, unroll

STEPS, LENGTH, SIZE = 4, 7, 8


def network(**changes: Any) -> FeatureNetwork:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "target_hidden_size": SIZE,
        "vocab_size": 20,
        "taps": (1, 2),
        "hidden_size": SIZE,
        "intermediate_size": 12,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
    }
    made = FeatureNetwork(FeatureConfig(**{**sizes, **changes})).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made


def inputs(net: FeatureNetwork, batch: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    taps = torch.randn(batch, length, len(net.config.taps) * SIZE, generator=g).double()
    return torch.randn(batch, length + STEPS - 1, SIZE, generator=g).double(), taps


def one_by_one(net: FeatureNetwork, embedded: Tensor, taps: Tensor, position: int) -> list[Tensor]:
    """Outputs [C] of the steps from one position: true states first, then the chain's own."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    group = net.config.num_heads // net.config.num_key_value_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.append(k)
        values.append(v)
        k = torch.cat(keys, 2).repeat_interleave(group, 1)
        v = torch.cat(values, 2).repeat_interleave(group, 1)
        return ((q @ k.transpose(2, 3)) * net.config.head_dim**-0.5).softmax(-1) @ v

    def run(t: int, feature: Tensor) -> Tensor:
        angles = net.rotary(torch.tensor([[t]]), torch.float64)
        return net(embedded[None, None, t], feature, angles, attend)

    outputs = []
    for t in range(position + 1):
        out = run(t, net.fuse(taps[None, None, t]))
    outputs.append(out[0, 0])
    for step in range(1, STEPS):
        out = run(position + step, out)
        outputs.append(out[0, 0])
    return outputs


LAYOUTS = [
    {},
    {"norm_before_residual": True, "bias": True, "fusion_bias": True},
    {"layout": "eagle", "taps": (2,)},
]


# Rows of different lengths, with gaps, whole, empty, and at the ends.
KEEP = torch.tensor([[0, 0, 1, 1, 0, 1, 0], [1] * 7, [0] * 7, [1, 0, 0, 0, 0, 0, 1]]).bool()


@pytest.mark.parametrize("changes", LAYOUTS)
def test_steps_are_those_of_a_chain(changes: dict[str, Any]) -> None:
    net = network(**changes)
    embedded, taps = inputs(net, len(KEEP))
    with torch.no_grad():
        found = list(unroll(net, embedded, taps, STEPS, KEEP))
        for n, (row, t) in enumerate(KEEP.nonzero().tolist()):
            expected = one_by_one(net, embedded[row], taps[row], t)
            for step in range(STEPS):
                torch.testing.assert_close(found[step][n], expected[step])
    assert [len(states) for states in found] == [int(KEEP.sum())] * STEPS


def test_rows_and_padding_do_not_matter() -> None:
    net = network()
    embedded, taps = inputs(net, 2)
    longer_embedded, longer_taps = inputs(net, 3, LENGTH + 5)
    longer_embedded[:2, : LENGTH + STEPS - 1] = embedded
    longer_taps[:2, :LENGTH] = taps
    keep = torch.ones(3, LENGTH + 5, dtype=torch.bool)
    keep[:2, LENGTH:] = False
    pairs = zip(
        unroll(net, embedded, taps, STEPS, keep[:2, :LENGTH]),
        unroll(net, longer_embedded, longer_taps, STEPS, keep),
        strict=True,
    )
    for short, long in pairs:
        torch.testing.assert_close(long[: 2 * LENGTH], short)


@pytest.mark.parametrize("changes", LAYOUTS)
def test_gradients_are_those_of_a_chain(changes: dict[str, Any]) -> None:
    net = network(**changes)
    embedded, taps = inputs(net, len(KEEP))
    g = torch.Generator().manual_seed(2)
    weights = torch.randn(STEPS, int(KEEP.sum()), SIZE, generator=g).double()
    found = torch.stack(list(unroll(net, embedded, taps, STEPS, KEEP)))
    chains = [
        torch.stack(one_by_one(net, embedded[row], taps[row], t))
        for row, t in KEEP.nonzero().tolist()
    ]
    gradients = [
        torch.autograd.grad((out * weights).sum(), list(net.parameters()), allow_unused=True)
        for out in (found, torch.stack(chains, 1))
    ]
    assert sum(gradient is not None for gradient in gradients[0]) > 8
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected)


def test_gradients_flow_through_all_steps() -> None:
    net = network()
    embedded, taps = inputs(net, 1)
    embedded.requires_grad_()
    *_, last = unroll(net, embedded, taps, STEPS, torch.ones(1, LENGTH, dtype=torch.bool))
    last[2].sum().backward()
    reached = embedded.grad[0].abs().sum(-1) > 0
    # Tokens up to the last one drafted from, and none after it.
    assert reached.tolist() == [True] * (2 + STEPS) + [False] * (LENGTH - 3)


def test_nothing_is_drafted_from() -> None:
    net = network()
    embedded, taps = inputs(net, 2)
    nothing = torch.zeros(2, LENGTH, dtype=torch.bool)
    found = [states.shape for states in unroll(net, embedded, taps, STEPS, nothing)]
    assert found == [(0, SIZE)] * STEPS


@pytest.mark.parametrize("heads", [0, 4])
def test_an_exit_reads_what_it_would_of_one_text(heads: int) -> None:
    torch.manual_seed(0)
    attention = {"num_heads": heads, "num_key_value_heads": heads // 2, "head_dim": 6}
    net = ExitNetwork(ExitConfig(SIZE, 20, 2, 12, **(attention if heads else {}))).double()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    taps = torch.randn(len(KEEP), LENGTH, SIZE).double()
    found = exit_states(net, taps, KEEP)
    assert len(found) == int(KEEP.sum())
    for state, (row, t) in zip(found, KEEP.nonzero().tolist(), strict=True):
        states, angles = taps[row : row + 1, : t + 1], None
        if heads:
            angles = net.rotary(torch.arange(t + 1)[None], torch.float64)
        whole = net(states, angles, plain_attention if heads else None)
        torch.testing.assert_close(state, whole[0, t])
    assert exit_states(net, taps, torch.zeros_like(KEEP)).shape == (0, SIZE)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3)) * q.shape[3] ** -0.5
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def test_positions_are_exact_in_two_bytes() -> None:
    positions = torch.tensor([[0, 1, 500, 1900]])
    exact = network().float().rotary(positions, torch.float32)
    for rounded, wanted in zip(
        network().bfloat16().rotary(positions, torch.float32), exact, strict=True
    ):
        torch.testing.assert_close(rounded, wanted, rtol=0, atol=0)
