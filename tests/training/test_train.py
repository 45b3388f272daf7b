"""The loop: it learns, it goes on after a kill, and it says what belongs together."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec.checkpoints import card_of, load
from selfspec.networks.heads import HeadsNetwork
from selfspec.target import Target
from selfspec.training import ShardedStates, StreamedStates, TrainConfig, train, write_states
from selfspec.training.initial import initial_network
from tests.families import tiny
from tests.training.learnable import LAYERS, TAPS, answers, config, target

KINDS: dict[str, dict[str, Any]] = {
    "feature": {"taps": TAPS, "loss": "lk"},
    "medusa": {"kind": "heads", "conditioned": False, "learning_rate": 1e-2},
    "hydra": {"kind": "heads", "own_head": False},
    "exit": {"kind": "exit", "learning_rate": 5e-3},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ShardedStates:
    folder = tmp_path_factory.mktemp("states")
    return write_states(target(), answers(), folder, TAPS, dtype=torch.float32)


def log(out: Path) -> list[dict[str, Any]]:
    """Without times."""
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def held_out(out: Path) -> list[dict[str, Any]]:
    return [row["held_out"] for row in log(out) if "held_out" in row]


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


@pytest.mark.parametrize("kind", KINDS)
def test_learns_what_the_target_says_to_other_prompts(
    kind: str, data: ShardedStates, tmp_path: Path
) -> None:
    chosen = config(**KINDS[kind], evaluate_every=30)
    network = train(chosen, target(), data, tmp_path)
    estimates = held_out(tmp_path)
    assert len(estimates) > 1
    final = estimates[-1]
    assert min(final["acceptance"]) > 0.25, "chance is 1 of 64"
    share, tau = 1.0, 1.0
    for rate, ranks in zip(final["acceptance"], final["ranks"], strict=True):
        share *= rate
        tau += share
        assert ranks[0] == pytest.approx(rate, abs=1e-5)
        assert sum(ranks) <= 1 + 1e-5
    assert final["tau"] == pytest.approx(tau)
    assert not network.training
    best = load(tmp_path / "best", model=target())
    assert same_weights(network, best)
    card = card_of(best)
    assert card is not None
    saved = {k: v for k, v in card.training.items() if k not in ("step", "tokens")}
    assert TrainConfig.from_dict(saved) == chosen
    assert card.evaluation["held_out"]["tau"] == max(e["tau"] for e in estimates)
    assert json.loads((tmp_path / "train_config.json").read_text())["kind"] == chosen.kind


def stop_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the run, and let a checkpoint be due at every fourth look at the clock."""
    from selfspec.training import train as function

    module = __import__(function.__module__, fromlist=["_Run"])
    true_step, taken = module._Run._step, count(1)

    def step(run: Any, batch: Any) -> None:
        if next(taken) > steps:
            raise KeyboardInterrupt
        true_step(run, batch)

    monkeypatch.setattr(module._Run, "_step", step)
    clock = count()
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"kind": "exit"}, 4),
        ({"kind": "exit"}, 13),
        ({"taps": TAPS, "dtype": "bfloat16", "steps": 2}, 10),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(
    changes: dict[str, Any],
    steps: int,
    data: ShardedStates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A pass has about four steps: kills are in the middle of the first and of later ones.
    chosen = config(**changes, total_tokens=3200, evaluate_every=8, checkpoint_seconds=6)
    whole = train(chosen, target(), data, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(steps, patch)
        with pytest.raises(KeyboardInterrupt):
            train(chosen, target(), data, tmp_path / "killed")
    killed = [row["step"] for row in log(tmp_path / "killed")]
    assert killed[-1] == steps
    said: list[str] = []
    resumed = train(chosen, target(), data, tmp_path / "killed", say=said.append)
    went_on_at = int(said[0].rsplit(" ", 1)[1])
    assert 0 < went_on_at < steps, "the kill is not at a checkpoint"
    assert log(tmp_path / "killed") == log(tmp_path / "whole")
    assert same_weights(resumed, whole)
    for name in ("best", "last"):
        assert same_weights(load(tmp_path / "killed" / name), load(tmp_path / "whole" / name))


def test_a_run_that_is_over_is_left_alone(data: ShardedStates, tmp_path: Path) -> None:
    chosen = config(kind="exit", total_tokens=600)
    first = train(chosen, target(), data, tmp_path)
    before = log(tmp_path)
    assert same_weights(train(chosen, target(), data, tmp_path), first)
    assert log(tmp_path) == before


def test_half_a_line_of_the_log_is_dropped(data: ShardedStates, tmp_path: Path) -> None:
    chosen = config(kind="exit", total_tokens=600)
    train(chosen, target(), data, tmp_path)
    before = log(tmp_path)
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 1')
    train(chosen, target(), data, tmp_path)
    assert log(tmp_path) == before


def test_another_config_or_other_states_do_not_go_on(data: ShardedStates, tmp_path: Path) -> None:
    train(config(kind="exit", total_tokens=600), target(), data, tmp_path)
    with pytest.raises(ValueError, match=r"seed=1 \(before: 0\).*initial="):
        train(config(kind="exit", total_tokens=600, seed=1), target(), data, tmp_path)
    fewer = StreamedStates(target(), answers()[:20])
    with pytest.raises(ValueError, match="other states"):
        train(config(kind="exit", total_tokens=600), target(), fewer, tmp_path)
    train(config(kind="exit", total_tokens=600, checkpoint_seconds=1), target(), data, tmp_path)


def test_initial_network_is_gone_on_from_and_not_changed(
    data: ShardedStates, tmp_path: Path
) -> None:
    chosen = config(**KINDS["medusa"], total_tokens=6000)
    first = train(chosen, target(), data, tmp_path / "first")
    before = {name: value.clone() for name, value in first.state_dict().items()}
    small = config(**KINDS["medusa"], total_tokens=100, warmup_steps=1000)
    second = train(small, target(), data, tmp_path / "second", initial=first)
    assert all(torch.equal(first.state_dict()[name], before[name]) for name in before)
    assert not same_weights(first, second)
    taus = [held_out(tmp_path / name)[-1]["tau"] for name in ("first", "second")]
    assert taus[1] == pytest.approx(taus[0], rel=0.1)
    with pytest.raises(ValueError, match=r"initial is a HeadsNetwork.*makes a ExitNetwork"):
        train(config(kind="exit"), target(), data, tmp_path / "third", initial=first)


def test_streamed_states_train_the_same(data: ShardedStates, tmp_path: Path) -> None:
    chosen = config(kind="exit", total_tokens=1500)
    train(chosen, target(), StreamedStates(target(), answers()), tmp_path)
    assert held_out(tmp_path)[-1]["tau"] > 1.3
    assert log(tmp_path)[0]["loss"][0] < 10


def test_taps_that_are_not_there_are_named(data: ShardedStates, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"reads layers \[3\].*states are of \[1, 2, 4\]"):
        train(config(kind="exit", exit_layer=3), target(), data, tmp_path)


def test_model_that_takes_no_drafts_is_refused(data: ShardedStates, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no draft can be used with this model: .*encoder-decoder"
    ):
        train(config(), tiny.build("t5"), data, tmp_path)


def test_states_of_another_model_are_refused(data: ShardedStates, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="embeddings"):
        train(config(), tiny.llama(initializer_range=0.2), data.folder, tmp_path)


def test_starts_from_the_target(data: ShardedStates) -> None:
    model = target()
    architecture = Target(model).architecture
    network = initial_network(
        config(taps=TAPS, draft_vocab_size=8, start="layer"),
        model,
        architecture,
        data.token_counts,
    )
    ids = network.head.ids
    counts = data.token_counts.clone()
    counts[1] = counts.max() + 1  # it ends texts
    assert set(ids.tolist()) == set(counts.topk(8).indices.tolist())
    assert torch.equal(network.head.weight, model.lm_head.weight[ids])
    layer = model.model.layers[LAYERS - 1]
    assert torch.equal(network.k_proj.weight[:, 64:], layer.self_attn.k_proj.weight)
    assert torch.equal(network.mlp.up_proj.weight, layer.mlp.up_proj.weight)
    assert torch.equal(network.norm.weight, model.model.norm.weight)
    # What it is fed is nearly the last tap.
    last = network.fuse(torch.eye(3 * 64))[-64:]
    assert (last - torch.eye(64)).abs().max() < 0.02
    plain = initial_network(config(taps=TAPS, start="head"), model, architecture, data.token_counts)
    assert torch.equal(plain.head.weight, model.lm_head.weight[plain.head.ids])
    assert torch.equal(plain.norm.weight, model.model.norm.weight)
    assert not torch.equal(plain.k_proj.weight[:, 64:], layer.self_attn.k_proj.weight)


def test_tokens_that_end_texts_can_be_drafted(data: ShardedStates) -> None:
    model = target()
    architecture = Target(model).architecture
    rare = int(data.token_counts.argmin())
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [rare]
    try:
        chosen = config(kind="heads", draft_vocab_size=5)
        network = initial_network(chosen, model, architecture, data.token_counts)
    finally:
        model.generation_config.eos_token_id = before
    assert isinstance(network, HeadsNetwork)
    for k in range(3):
        assert rare in network.head(k).ids
    # Heads say at first what the target says next.
    states = torch.randn(4, 64)
    out = network(1, states, torch.zeros(4, 2, 64))
    assert (out - states).abs().max() < 0.05


def test_a_broken_checkpoint_is_named(data: ShardedStates, tmp_path: Path) -> None:
    chosen = config(kind="exit", total_tokens=600)
    train(chosen, target(), data, tmp_path)
    with (tmp_path / "checkpoint.safetensors").open("r+b") as file:
        file.truncate(3000)
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors is broken .* delete it"):
        train(chosen, target(), data, tmp_path)


def test_a_draft_that_guesses_nothing_is_said_to(data: ShardedStates, tmp_path: Path) -> None:
    said: list[str] = []
    chosen = config(taps=TAPS, start="random", total_tokens=100, learning_rate=1e-6)
    train(chosen, target(), data, tmp_path / "none", say=said.append)
    tau = held_out(tmp_path / "none")[-1]["tau"]
    assert ("this draft gains nothing" in said[-1]) == (tau == 1.0)
    train(config(taps=TAPS), target(), data, tmp_path / "some", say=said.append)
    assert "gains nothing" not in said[-1]
    assert "positions)" in said[-1]
