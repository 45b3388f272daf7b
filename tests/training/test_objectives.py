"""What is compared with what: every position and depth against the definition, one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.networks.exit import ExitNetwork
from selfspec.networks.feature import FeatureNetwork
from selfspec.networks.heads import HeadsNetwork
from selfspec.target import Target
from selfspec.training import StreamedStates
from selfspec.training.batches import Batch
from selfspec.training.estimate import estimate
from selfspec.training.initial import initial_network
from selfspec.training.objectives import Objective
from selfspec.training.unroll import exit_states, unroll
from tests.training.learnable import TAPS, answers, config, target

KINDS: dict[str, dict[str, Any]] = {
    "feature": {"taps": TAPS},
    "medusa": {"kind": "heads", "conditioned": False},
    "hydra": {"kind": "heads", "own_head": False},
    "exit": {"kind": "exit", "exit_attention": False},
    "exit with attention": {"kind": "exit"},
}
DRAFT_VOCABULARY = 40


def made(kind: str, **changes: Any) -> tuple[Objective, Batch]:
    """An objective in float64 over three answers."""
    chosen = config(**KINDS[kind], draft_vocab_size=DRAFT_VOCABULARY, **changes)
    states = StreamedStates(target(), answers())
    architecture = Target(target()).architecture
    network = initial_network(chosen, target(), architecture, states.token_counts)
    with torch.no_grad():
        for i, parameter in enumerate(network.parameters()):
            g = torch.Generator().manual_seed(i)
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=g))
    objective = Objective(network.double(), architecture, chosen)
    batch = states.read([3, 0, 5], objective.taps)
    return objective, batch.to(torch.device("cpu"), torch.float64)


def predicted(objective: Objective, batch: Batch, row: int, t: int, depth: int) -> Tensor:
    """Logits [V] of one draft token, as drafting would make them; -inf outside the vocabulary."""
    network, model = objective.network, target()
    ids = batch.ids[row]
    embedded = model.get_input_embeddings()(ids).double()
    state = batch.taps[row, t]
    if isinstance(network, FeatureNetwork):
        window = torch.nn.functional.pad(embedded[1:], (0, 0, 0, objective.depths))[: t + 1 + depth]
        taps = batch.taps[row : row + 1, : t + 1]
        *_, feature = unroll(network, window[None], taps, depth + 1, last(t))
        hidden, head = network.readout(feature[0]), network.head
    elif isinstance(network, HeadsNetwork):
        normed = model.model.norm(state.float()).double()
        hidden = network(depth, normed, embedded[t + 1 : t + 2 + depth])
        head = network.head(depth)
    else:
        assert isinstance(network, ExitNetwork)
        taps = batch.taps[row : row + 1, : t + 1]
        hidden, head = exit_states(network, taps, last(t))[0], network.head
    out = torch.full((64,), -torch.inf, dtype=torch.float64)
    out[head.ids] = head(hidden)
    return out


def last(t: int) -> Tensor:
    """Of t + 1 positions, in one row."""
    return torch.arange(t + 1)[None] == t


def by_definition(objective: Objective, batch: Batch, prompt_weight: float) -> list[Tensor]:
    """The KL divergence of every depth: target's token after a true prefix, weighed, averaged."""
    ahead = 1 if isinstance(objective.network, ExitNetwork) else 2
    losses = []
    for depth in range(objective.depths):
        total, weight = torch.zeros((), dtype=torch.float64), 0.0
        for row in range(len(batch.ids)):
            for t in range(int(batch.lengths[row])):
                token = t + ahead + depth  # which is predicted
                if token >= batch.lengths[row]:
                    continue
                share = 1.0 if token >= batch.prompt_lengths[row] else prompt_weight
                q = predicted(objective, batch, row, t, depth).log_softmax(-1)
                given = batch.top[row, token - 1]
                inside = q[given] > -torch.inf
                p = (batch.probs[row, token - 1] * inside).double()
                if share == 0 or p.sum() == 0:
                    continue
                p = p / p.sum()
                total = total + share * (p * (p.log() - q[given]))[p > 0].sum()
                weight += share
        losses.append(total / weight)
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_the_definition(kind: str) -> None:
    objective, batch = made(kind)
    with torch.no_grad():
        found = [part.loss for part in objective(batch)]
        expected = by_definition(objective, batch, 0.0)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_prompts_count_by_their_weight() -> None:
    objective, batch = made("hydra", prompt_weight=0.3)
    with torch.no_grad():
        found = [part.loss for part in objective(batch)]
        expected = by_definition(objective, batch, 0.3)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_estimate_counts_answers_alone() -> None:
    """Hits, position by position, whatever weight prompts have in training."""
    objective, batch = made("hydra", prompt_weight=0.3)
    hits, total = [0] * 3, [0] * 3
    for depth in range(3):
        for row in range(3):
            start = max(0, int(batch.prompt_lengths[row]) - 2 - depth)
            for t in range(start, int(batch.lengths[row]) - 2 - depth):
                with torch.no_grad():
                    best = int(predicted(objective, batch, row, t, depth).argmax())
                hits[depth] += best == int(batch.top[row, t + 1 + depth, 0])
                total[depth] += 1
    halves = [
        replace(batch, **{n: getattr(batch, n)[part] for n in vars(batch)})
        for part in (slice(0, 1), slice(1, 3))
    ]
    found = estimate(objective, halves, ranks=DRAFT_VOCABULARY)
    assert found.positions == total[0]
    rates = [hit / count for hit, count in zip(hits, total, strict=True)]
    assert found.acceptance == pytest.approx(rates)
    a, b, c = rates
    assert found.tau == pytest.approx(1 + a + a * b + a * b * c)
    for ranks in found.ranks:
        assert 0 < sum(ranks) <= 1.00001


def test_an_exit_is_as_good_at_every_depth() -> None:
    objective, batch = made("exit", steps=4)
    found = estimate(objective, [batch], ranks=3)
    assert len(found.acceptance) == len(found.ranks) == 4
    assert len(set(found.acceptance)) == 1
