"""What drafts say of themselves, made right by what became of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import selfspec
from selfspec.acceptance_model import AcceptanceModel, Reliability, features
from selfspec.drafters.candidates import best_after, best_of
from selfspec.drafters.exit_readout import ExitReadout
from tests.families import tiny
from tests.networks import random_exit
from tests.silent import silent


def outcomes(rng: np.random.Generator, law: Any, count: int, k: int = 1) -> Any:
    """Features of random draft tokens, and whether they were accepted by `law` of the features."""
    top = rng.uniform(0.02, 0.98, count)
    second = np.minimum(1 - top, top) * rng.uniform(0.1, 1, count)
    probable = np.stack([top, second], 1)[:, :k]
    found = features(probable, second, rng.uniform(0, 3, count), 1)
    found[..., 4] = rng.integers(1, 5, count)[:, None]
    return found, rng.random((count, k)) < law(found)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


LAWS = {
    "too sure": lambda f: sigmoid(0.5 * f[..., 1] - 1),
    "not sure enough": lambda f: sigmoid(2 * f[..., 1] + 1),
    "by margin and depth": lambda f: sigmoid(0.8 * f[..., 2] - 0.5 * f[..., 4]),
    "by entropy": lambda f: sigmoid(2 - 1.5 * f[..., 3]),
}


@pytest.mark.parametrize("name", LAWS)
def test_probabilities_become_those_of_the_law(name: str) -> None:
    rng = np.random.default_rng(0)
    model = AcceptanceModel()
    found, accepted = outcomes(rng, LAWS[name], 3000)
    new, _ = outcomes(rng, LAWS[name], 2000)
    before = np.abs(model.predict(new) - LAWS[name](new)).mean()
    for row, outcome in zip(found, accepted, strict=True):
        model.add(row, outcome)
    after = np.abs(model.predict(new) - LAWS[name](new)).mean()
    assert before > 0.09
    assert after < 0.035
    model.forget_reliability()
    for row, outcome in zip(*outcomes(rng, LAWS[name], 2000), strict=True):
        model.add(row, outcome)
    assert model.reliability.expected_calibration_error < 0.04


def test_a_draft_that_knows_itself_is_believed() -> None:
    rng = np.random.default_rng(1)
    model = AcceptanceModel()
    found, accepted = outcomes(rng, lambda f: sigmoid(f[..., 1]), 2000)
    said = [float(model.predict(row)[0]) for row in found]
    assert said == pytest.approx(sigmoid(found[:, 0, 1]).tolist())
    for row, outcome in zip(found, accepted, strict=True):
        model.add(row, outcome)
    assert np.abs(model.predict(found) - sigmoid(found[..., 1])).mean() < 0.03


@pytest.mark.parametrize("all_are", [True, False])
@pytest.mark.parametrize("count", [40, 2000])
def test_outcomes_that_are_all_alike(all_are: bool, count: int) -> None:
    """No weight grows without end, and what is said stays a probability short of certain."""
    rng = np.random.default_rng(2)
    model = AcceptanceModel()
    found, _ = outcomes(rng, lambda f: 0.5 + 0 * f[..., 1], count)
    for row in found:
        model.add(row, np.array([all_are]))
    said = model.predict(found)
    assert np.isfinite(model.weights).all()
    assert np.abs(model.weights).max() < 20
    assert ((said > 0) & (said < 1)).all()
    assert (said.mean() > 0.8) if all_are else (said.mean() < 0.2)


def test_a_text_that_changes_is_followed() -> None:
    rng = np.random.default_rng(3)
    model = AcceptanceModel()
    for law in (LAWS["too sure"], LAWS["not sure enough"]):
        for row, outcome in zip(*outcomes(rng, law, 3000), strict=True):
            model.add(row, outcome)
    new, _ = outcomes(rng, LAWS["too sure"], 1000)
    assert np.abs(model.predict(new) - LAWS["not sure enough"](new)).mean() < 0.04


def test_features_by_hand() -> None:
    found = features(np.array([[0.5, 0.2], [0.9, 0.05]]), np.array([0.2, 0.05]), np.ones(2), 3)
    assert found.shape == (2, 2, 5)
    assert found[0, 0] == pytest.approx([1, 0, np.log(0.5 / 0.2), 1, 3])
    assert found[0, 1] == pytest.approx([1, np.log(0.25), np.log(0.2 / 0.5), 1, 3])
    broken = features(np.array([[np.nan]]), np.array([np.nan]), np.array([np.inf]), 1)
    assert np.isfinite(broken).all()


def test_reliability_by_hand() -> None:
    found = Reliability((0.25, 0.85), (0.5, 0.75), (3, 1))
    assert found.expected_calibration_error == pytest.approx((3 * 0.25 + 0.1) / 4)
    assert "0.85" in str(found)
    assert Reliability((), (), ()).expected_calibration_error == 0.0


# ----------------------------------------------------------------------- candidates


@pytest.mark.parametrize("k", [1, 3])
def test_candidates_of_logits_and_of_states_agree(k: int) -> None:
    model = tiny.build("llama")
    readout = selfspec.wrap(model)._target.architecture.readout
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model.lm_head(model.model.norm(hidden))
        one = best_of(logits, k, measured=True)
        other = best_after(hidden, readout, k, measured=True)
    law = logits.double().softmax(-1)
    assert one.ids.equal(other.ids)
    for found in (one, other):
        assert found.probable is not None
        assert found.second is not None
        best = law.topk(k).values, law.topk(2).values[:, 1]
        torch.testing.assert_close(found.probable.double(), best[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(found.second.double(), best[1], atol=1e-5, rtol=0)
    entropy = torch.special.entr(law).sum(-1)
    assert one.entropy is not None
    assert other.entropy is not None
    torch.testing.assert_close(one.entropy.double(), entropy, atol=1e-4, rtol=0)
    if k == 1:
        torch.testing.assert_close(other.entropy.double(), entropy, atol=1e-4, rtol=0)
    else:  # an even rest has most entropy
        assert (other.entropy >= entropy - 1e-4).all()


def test_a_trained_exit_says_how_sure_it_is() -> None:
    drafter = selfspec.EarlyExitDrafter(network=random_exit(64, 64, 2, attends=False))
    spec = selfspec.wrap(tiny.build("llama"), drafter)
    spec.generate(**tiny.prompts(1), max_new_tokens=4, do_sample=False)
    network = drafter._fits[spec._target.architecture]
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        readout = ExitReadout(network)
        found, law = readout.best(hidden), network.head(network(hidden)).double().softmax(-1)
        ids, _ = readout.top(hidden, 1)
    assert found.token.equal(ids[:, 0])
    torch.testing.assert_close(found.top1.double(), law.amax(-1), atol=1e-5, rtol=0)
    assert readout.size == law.shape[-1]


# ----------------------------------------------------------------------- in a wrapper


def prompts(count: int) -> list[torch.Tensor]:
    return [tiny.prompts(1, seed=seed)["input_ids"][0] for seed in range(count)]


def test_a_wrapper_learns_what_becomes_of_its_drafts() -> None:
    """An exit that is always right, though it is not sure: in the end it is thought sure."""
    late = range(3, 8)
    model = silent(late, late, layers=8)
    with torch.no_grad():
        model.model.norm.weight.mul_(0.1)  # flat distributions: no token is probable
    spec = selfspec.wrap(model, selfspec.EarlyExitDrafter(3, branches=2))
    before = spec.stats
    found = selfspec.calibrate(spec, prompts(8), max_new_tokens=60)
    part = "the exit after 3 layers"
    assert list(found.reliability) == [part]
    reliability = found.reliability[part]
    assert set(reliability.observed) == {1.0}
    assert sum(reliability.counts) > 50
    assert found.expected_calibration_error < 0.25
    assert found.stats.requests == 4
    assert spec.stats.requests == 8
    assert spec.stats is not before
    for text in ("expected calibration error", part, "tau"):
        assert text in str(found)


@pytest.mark.parametrize("batch", [1, 3])
def test_outcomes_are_those_of_the_text(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token whose predecessors were right is one, and counts as what the text says."""
    seen: list[bool] = []
    real = AcceptanceModel.add

    def add(self: Any, found: Any, accepted: Any) -> None:
        seen.append(bool(accepted[0]))
        real(self, found, accepted)

    monkeypatch.setattr(AcceptanceModel, "add", add)
    model = tiny.build("llama")
    spec = selfspec.wrap(model, selfspec.EarlyExitDrafter(3, 4))
    steps = list(spec.stream(**tiny.prompts(batch), max_new_tokens=60, do_sample=False))
    # Of a chain: accepted ones, and the one that was not, unless the text ended before.
    accepted = sum(sum(step.num_accepted) for step in steps)
    assert sum(seen) >= accepted > 0
    assert seen.count(False) > 0
    assert sum(seen) - accepted <= 2 * batch  # a drafted token that the end cut off


def test_what_is_kept_for_another_part_is_its_own() -> None:
    model = tiny.build("llama")
    spec = selfspec.wrap(model, selfspec.LayerSkipDrafter([1]))
    spec.generate(**tiny.prompts(1), max_new_tokens=30, do_sample=False)
    assert list(spec.costs.kept) == ["acceptance of layers but layers 1"]
    fixed = selfspec.wrap(model, selfspec.LayerSkipDrafter([1]), adaptive=False)
    fixed.generate(**tiny.prompts(1), max_new_tokens=30, do_sample=False)
    assert not fixed.costs.kept
    with pytest.raises(ValueError, match="adaptive=False"):
        selfspec.calibrate(fixed, prompts(4))
    with pytest.raises(ValueError, match="1 prompts are too few"):
        selfspec.calibrate(spec, prompts(1))
    assert selfspec.calibrate(selfspec.wrap(model, "ngram"), prompts(2)).reliability == {}


def test_numbers_of_a_failed_calibration_are_not_lost() -> None:
    spec = selfspec.wrap(tiny.build("llama"), selfspec.EarlyExitDrafter(1))
    rows = prompts(4)

    def fails(input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        if input_ids[0, : len(rows[3])].equal(rows[3]):
            raise RuntimeError("out of memory")
        return False

    with pytest.raises(RuntimeError, match="out of memory"):
        selfspec.calibrate(spec, rows, max_new_tokens=5, stopping_criteria=[fails])
    assert spec.stats.requests == 4


def test_what_is_no_wrapper_or_no_prompt() -> None:
    model = tiny.build("llama")
    with pytest.raises(TypeError, match="spec is a LlamaForCausalLM; pass what wrap returned"):
        selfspec.calibrate(model, prompts(2))
    spec = selfspec.wrap(model, selfspec.EarlyExitDrafter(1))
    with pytest.raises(ValueError, match=r"prompts\[1\] is of shape \[2, 3\]: pass prompts one by"):
        selfspec.calibrate(spec, [[1], torch.ones(2, 3).long()])
    with pytest.raises(ValueError, match=r"prompts\[0\] has the id 1000000"):
        selfspec.calibrate(spec, [[10**6], [1]])
