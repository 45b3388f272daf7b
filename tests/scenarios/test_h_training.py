"""Rows H6, H7, H9 and H10 of the registry, where a draft is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

import selfspec
from selfspec.target import Target
from selfspec.training import Answer, ShardedStates, StreamedStates, train, write_states
from selfspec.training.batches import Batch
from selfspec.training.estimate import estimate
from selfspec.training.initial import Network, initial_network
from selfspec.training.objectives import Objective
from tests.parts import by_name
from tests.training.learnable import LAYERS, TAPS, answers, config, target

KINDS: dict[str, dict[str, Any]] = {
    "feature": {"taps": TAPS},
    "medusa": {"kind": "heads", "conditioned": False},
    "hydra": {"kind": "heads"},
    "exit": {"kind": "exit"},
}
EVERY = pytest.mark.parametrize("kind", KINDS)
ROWS = [3, 0, 5]


def made(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[Objective, Batch]:
    chosen = config(**KINDS[kind], **changes)
    states = StreamedStates(target(), answers())
    architecture = Target(target()).architecture
    network = initial_network(chosen, target(), architecture, states.token_counts).to(dtype)
    objective = Objective(network, architecture, chosen)
    return objective, states.read(ROWS, objective.taps).to(torch.device("cpu"), dtype)


def losses_and_gradients(objective: Objective, batch: Batch) -> list[torch.Tensor]:
    network: Network = objective.network
    network.zero_grad()
    losses = [found.loss for found in objective(batch)]
    torch.stack(losses).sum().backward()
    return [*(loss.detach() for loss in losses), *(p.grad.clone() for p in network.parameters())]


def padded(batch: Batch, positions: int, rows: int) -> Batch:
    """More padding, and rows of nothing else; states there are as large as states are."""
    size = len(batch.ids), batch.ids.shape[1]
    longer = {"ids": batch.ids, "taps": batch.taps, "top": batch.top, "probs": batch.probs}
    for name, value in longer.items():
        behind = (0, 0) * (value.ndim - 2)
        longer[name] = pad(value, (*behind, 0, positions, 0, rows))
    longer["taps"][:, size[1] :] = 3.0
    longer["taps"][size[0] :] = -2.0
    longer["ids"][:, size[1] :] = 5
    longer["probs"][size[0] :] = 1.0
    more = {n: pad(getattr(batch, n), (0, rows)) for n in ("lengths", "prompt_lengths")}
    return Batch(**longer, **more)


@EVERY
def test_h7_padding_changes_neither_loss_nor_gradient(kind: str) -> None:
    objective, batch = made(kind)
    before = losses_and_gradients(objective, batch)
    after = losses_and_gradients(objective, padded(batch, positions=7, rows=2))
    assert all(gradient.any() for gradient in before[-2:])
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other)


@EVERY
def test_h7_masked_targets_have_no_gradient(kind: str) -> None:
    """What the target would say inside the prompt, and after the end, is never looked at."""
    objective, batch = made(kind)
    before = losses_and_gradients(objective, batch)
    masked = batch.weights() == 0
    assert masked.any()
    top, probs = batch.top.clone(), batch.probs.clone()
    top[masked] = 9
    probs[masked] = float("nan")
    after = losses_and_gradients(objective, replace(batch, top=top, probs=probs))
    assert all(map(torch.equal, before, after))


@EVERY
def test_h7_states_that_predict_prompts_have_no_gradient(kind: str) -> None:
    objective, batch = made(kind)
    objective.normed = False  # the target's norm passes no gradient on
    taps = batch.taps.clone().requires_grad_()
    objective(replace(batch, taps=taps))[0].loss.backward()
    reached = taps.grad.abs().sum(-1) > 0
    if kind == "feature":  # attention looks back, but never beyond the answer's last guess
        counted = batch.weights().cumsum(-1) > 0
        assert not reached[batch.weights().flip(-1).cumsum(-1).flip(-1) == 0].any()
        assert reached[counted & (batch.weights() > 0)].any()
        return
    ahead = 0 if kind == "exit" else 1
    weights = pad(batch.weights(), (0, ahead))[:, ahead:]
    assert torch.equal(reached, weights > 0)


@EVERY
def test_h7_text_of_the_prompt_only_matters_as_input(kind: str) -> None:
    """With the same states, tokens of the prompt that are no head's input change nothing."""
    objective, batch = made(kind)
    ids = batch.ids.clone()
    for row, prompt in enumerate(batch.prompt_lengths.tolist()):
        # The last head that predicts the first answered token starts from one of the prompt.
        ids[row, : max(0, prompt - objective.depths)] = 11
    assert not torch.equal(ids, batch.ids)
    before = losses_and_gradients(objective, batch)
    after = losses_and_gradients(objective, replace(batch, ids=ids))
    if kind == "feature":  # its attention reads the prompt's embeddings
        assert not torch.equal(before[0], after[0])
    else:
        assert all(map(torch.equal, before, after))


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_h9_a_batch_without_answers_is_finite(kind: str, dtype: torch.dtype) -> None:
    objective, batch = made(kind, dtype)
    masked = replace(batch, prompt_lengths=batch.lengths)
    found = losses_and_gradients(objective, masked)
    assert not any(value.any() for value in found)
    normal = losses_and_gradients(objective, batch)
    assert all(value.isfinite().all() for value in normal)
    assert normal[0] > 0


class Spoilt:
    """States of which some batches are no good."""

    def __init__(self, states: Any, spoil: Any, every: int) -> None:
        self.states, self.spoil, self.every, self.reads = states, spoil, every, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.states, name)

    def read(self, rows: Any, taps: Any) -> Batch:
        self.reads += 1
        batch = self.states.read(rows, taps)
        return self.spoil(batch) if self.reads % self.every == 0 else batch


def nothing_counts(batch: Batch) -> Batch:
    return replace(batch, prompt_lengths=batch.lengths)


def overflowed(batch: Batch) -> Batch:
    return replace(batch, taps=batch.taps.masked_fill(batch.taps > 0, float("inf")))


@pytest.mark.parametrize("spoil", [nothing_counts, overflowed])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_h9_batches_that_are_no_good_are_skipped_and_counted(
    spoil: Any, dtype: str, tmp_path: Path
) -> None:
    states = Spoilt(StreamedStates(target(), answers()), spoil, every=3)
    chosen = config(kind="exit", dtype=dtype, total_tokens=2500, start="random")
    network = train(chosen, target(), states, tmp_path)
    assert all(p.isfinite().all() for p in network.parameters())
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["skipped"] for row in steps] == [row["step"] // 3 for row in steps]
    assert steps[-1]["loss"][0] < steps[0]["loss"][0]


def test_h9_held_out_batches_that_are_no_good_do_not_count() -> None:
    """Nor do they end a run when its estimate is written down."""
    objective, _ = made("exit", torch.float32)
    states = StreamedStates(target(), answers())
    whole = [states.read([row], objective.taps) for row in range(6)]
    spoilt = [*whole[:3], *map(overflowed, whole[3:])]
    assert estimate(objective, spoilt) == estimate(objective, whole[:3])
    assert estimate(objective, spoilt).positions > 0


def first_feature(model: Any, ids: torch.Tensor, taps: tuple[int, ...]) -> list[torch.Tensor]:
    """The hidden states that a drafter is shown after the prompt."""
    seen: list[dict[int, torch.Tensor]] = []

    class Watcher:
        hidden_taps = taps

        def draft(self, state: Any, budget: int) -> Any:
            return selfspec.TokenTree.root_only(state.root)

        def observe(self, state: Any, output: Any, acceptance: Any) -> None:
            seen.append(output.hidden)

        def reset(self) -> None: ...

    mask = torch.ones_like(ids)
    selfspec.wrap(model, drafter=Watcher()).generate(ids, attention_mask=mask, max_new_tokens=2)
    return [seen[0][tap][0] for tap in taps]


def test_h6_states_in_training_are_those_that_drafters_see(tmp_path: Path) -> None:
    """Bit for bit: the same layers, on the same side of the norm."""
    model, taps = target(), tuple(range(LAYERS + 1))
    prompt = answers()[4].prompt_ids
    given = [Answer("a", prompt[:-1], prompt[-1:])]
    states = write_states(model, given, tmp_path, taps, dtype=torch.float32)
    batch = ShardedStates(tmp_path, model).read([0], taps)
    assert torch.equal(batch.ids, torch.tensor([prompt]))
    shown = first_feature(model, torch.tensor([prompt]), taps)
    for tap, trained in zip(shown, batch.taps[0].chunk(len(taps), -1), strict=True):
        assert torch.equal(tap, trained)
    assert states.taps == taps


@pytest.mark.parametrize("inside", [False, True])
def test_h10_training_after_and_inside_inference_mode(inside: bool, tmp_path: Path) -> None:
    """Tensors that inference mode leaves behind cannot be trained through."""
    model = target()
    ids = torch.tensor([answers()[0].prompt_ids])
    mask = torch.ones_like(ids)
    spec = selfspec.wrap(model, drafter=by_name("early-exit"))
    with torch.inference_mode():
        spec.generate(ids, attention_mask=mask, max_new_tokens=8)
    states = StreamedStates(model, answers())
    for kind, changes in KINDS.items():
        chosen = config(**changes, total_tokens=400, own_head=kind == "hydra")
        with torch.inference_mode(inside):
            network = train(chosen, model, states, tmp_path / kind)
        assert not any(p.is_inference() for p in network.parameters())
        rows = [json.loads(line) for line in (tmp_path / kind / "log.jsonl").open()]
        assert rows[0]["skipped"] == 0
    assert all(p.grad is None for p in model.parameters())
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=8)
    assert torch.equal(spec.generate(ids, attention_mask=mask, max_new_tokens=8), plain)
