"""Real early exit: what is kept unseen, what is said of it, and when it ends."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import selfspec
from selfspec import LossyExitDrafter, TokenTree
from selfspec.drafters import lossy_exit
from selfspec.drafters.exit_watch import ExitWatch
from selfspec.drift import DRIFT, DriftMonitor
from tests.families import tiny
from tests.networks import random_exit
from tests.silent import silent

NEW = 40
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@torch.no_grad()
def by_hand(
    model: Any,
    prompt: list[int],
    exits: tuple[int, ...],
    threshold: float,
    most: int,
    weights: dict[int, list[float]] | None = None,
) -> tuple[list[int], list[int], int]:
    """The text, after how many layers tokens were given, and how many of them differ."""
    cuts = {exit_layer: copy.deepcopy(model) for exit_layer in exits}
    for exit_layer, cut in cuts.items():
        cut.model.layers = cut.model.layers[:exit_layer]
    text, given, differing, row = list(prompt), [], 0, 0

    def says(one: Any, its: list[float] | None = None) -> tuple[int, float]:
        law = one(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].softmax(-1)
        (first, second), ids = law.topk(2)
        if its is None:
            return int(ids[0]), float(first)
        entropy = -(law * law.log()).sum()
        odds = its[0] + its[1] * first.logit() + its[2] * (first / second).log()
        return int(ids[0]), float((odds + its[3] * entropy + its[4]).sigmoid())

    text.append(says(model)[0])  # the prefill is the whole model's
    end = len(prompt) + NEW
    while len(text) < end:
        left = end - len(text)
        for exit_layer, cut in cuts.items():
            early, sure = says(cut, weights and weights[exit_layer])
            if sure >= threshold:
                break
        whole = says(model)[0]
        if left > 1 and row < most and sure >= threshold:  # nothing is drafted for the last one
            text.append(early)
            given.append(exit_layer)
            differing, row = differing + (early != whole), row + 1
            continue
        text.append(whole)
        if left > 1 and row < most and early == whole and len(text) < end:
            text.append(says(model)[0])  # a token that was not sure, and right
        row = 0
    return text, given, differing


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("threshold", "most"), [(0.0, 3), (0.2, 8), (0.5, 8), (1.0, 8)])
def test_the_text_is_what_it_says(threshold: float, most: int, graphs: bool) -> None:
    model, prompt = tiny.build("llama"), tiny.prompts(1)
    drafter = LossyExitDrafter(3, threshold, most, delta=None)
    spec = selfspec.wrap(model, drafter, cuda_graphs=graphs)
    ids = prompt["input_ids"][0].tolist()
    text, layers, differing = by_hand(model, ids, (3,), threshold, most)
    given = len(layers)
    assert spec.generate(**prompt, **GREEDY)[0].tolist() == text
    assert (spec.stats.given, spec.stats.differing) == (given, differing)
    assert spec.stats.given_layers == 3 * given
    assert spec.stats.disagreement == differing / NEW
    assert "LOSSY: tokens of the exit are kept unseen" in repr(spec)
    if threshold == 1.0:
        assert given == 0
        assert text == model.generate(**prompt, **GREEDY)[0].tolist()
    else:
        assert given > 0 < differing
        said = f"{100 * given / NEW:.0f} % of tokens kept unseen (after 3.0 layers in the mean)"
        assert said in str(spec.stats)


WEIGHTS = {1: [-1.0, 0.9, 0.3, -0.1, 0.2], 2: [0.5, 1.2, -0.2, 0.0, 0.0], 3: [0, 0.5, 1, 0.1, 0]}


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2", "gpt2"])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_a_token_goes_on_to_the_next_exit(family: str, weights: Any) -> None:
    model, prompt = tiny.build(family), tiny.prompts(1)
    ids = prompt["input_ids"][0].tolist()
    exits = tuple(WEIGHTS)
    threshold = 0.35 if weights is None else 0.45
    spec = selfspec.wrap(model, LossyExitDrafter(exits, threshold, 5, None, weights=weights))
    if family != "llama":  # others have their layers elsewhere
        found = spec.generate(**prompt, **GREEDY)
        assert spec.stats.given > 0
        mean = spec.stats.given_layers / spec.stats.given
        assert 1 < mean < 3
        strict = selfspec.wrap(model, LossyExitDrafter(exits, 1.0, 5, None, weights=weights))
        assert strict.generate(**prompt, **GREEDY).equal(model.generate(**prompt, **GREEDY))
        assert strict.stats.given == 0
        assert found.shape == (1, 17 + NEW)
        return
    text, layers, differing = by_hand(model, ids, exits, threshold, 5, weights)
    assert spec.generate(**prompt, **GREEDY)[0].tolist() == text
    assert len(set(layers)) == 3
    assert len(layers) < NEW - 8
    stats = spec.stats
    assert (stats.given, stats.given_layers, stats.differing) == (
        len(layers),
        sum(layers),
        differing,
    )


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_no_layer_runs_twice(family: str) -> None:
    """Between the prefill and the end, every layer sees every token that is kept once."""
    model, prompt = copy.deepcopy(tiny.build(family)), tiny.prompts(1)
    spec = selfspec.wrap(model, LossyExitDrafter((1, 3), 0.4, 5, None))
    seen: dict[int, int] = {}
    for at, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, at=at: seen.__setitem__(
                at, seen.get(at, 0) + (args[0] if args else kwargs["hidden_states"]).shape[1]
            ),
            with_kwargs=True,
        )
    spec.generate(**prompt, **GREEDY)  # looks at the model, for the hooks again
    seen.clear()
    spec.stats.reset()
    spec.generate(**prompt, **GREEDY)
    nodes = 17 + spec.stats.forwards + spec.stats.drafted
    assert spec.stats.given > 0
    assert set(seen.values()) == {nodes}


@torch.no_grad()
@pytest.mark.parametrize("exits", [(3,), (1, 2, 3)])
def test_rows_of_a_batch(exits: tuple[int, ...]) -> None:
    """A token is the whole model's, or one that an exit was sure of: of the first sure exit."""
    model, prompt = tiny.build("llama"), tiny.prompts(3)
    spec = selfspec.wrap(model, LossyExitDrafter(exits, 0.5, delta=None))
    together = spec.generate(**prompt, **GREEDY)
    unlike = 0
    for ids, mask in zip(together, prompt["attention_mask"], strict=True):
        text = ids[int((1 - mask).sum()) :][None]
        out = model(input_ids=text, output_hidden_states=True, use_cache=False)
        whole = out.logits[0, -NEW - 1 : -1].argmax(-1)
        early = torch.full_like(whole, -1)
        for exit_layer in exits:
            hidden = out.hidden_states[exit_layer][0, -NEW - 1 : -1]
            law = model.lm_head(model.model.norm(hidden)).softmax(-1)
            sure = (early < 0) & (law.max(-1).values >= 0.5)
            early = torch.where(sure, law.argmax(-1), early)
        new = text[0, -NEW:]
        assert ((new == whole) | (new == early)).all()
        unlike += int((new != whole).sum())
    assert spec.stats.differing == unlike > 3
    alone = selfspec.wrap(model, LossyExitDrafter(exits, 0.5, delta=None))
    for row, ids, mask in zip(together, *prompt.values(), strict=True):
        text = alone.generate(ids[mask.bool()][None], **GREEDY)[0]
        assert text[-NEW:].equal(row[-NEW:])
    mine, theirs = spec.stats, alone.stats
    assert (mine.given, mine.given_layers) == (theirs.given, theirs.given_layers)
    assert mine.differing == theirs.differing


def test_an_end_of_text_is_an_end() -> None:
    model, prompt = tiny.build("llama"), tiny.prompts(1)
    spec = selfspec.wrap(model, LossyExitDrafter(3, 0.0, delta=None))
    text = spec.generate(**prompt, **GREEDY)[0, 17:].tolist()
    end = text[9]
    cut = spec.generate(**prompt, **GREEDY, eos_token_id=end, pad_token_id=0)[0, 17:].tolist()
    assert cut == text[: text.index(end) + 1]


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.3}, {"do_sample": True, "top_k": 0}])
def test_what_is_not_plainly_greedy_is_exact(options: dict[str, Any]) -> None:
    model, prompt = tiny.build("llama"), tiny.prompts(2)
    settings = {**GREEDY, **options}
    torch.manual_seed(0)
    plain = model.generate(**prompt, **settings)
    spec = selfspec.wrap(model, LossyExitDrafter(3, 0.0, delta=None))
    torch.manual_seed(0)
    assert spec.generate(**prompt, **settings).equal(plain)
    assert spec.stats.given == 0
    assert "LOSSY" not in str(spec.stats)


@pytest.mark.parametrize("attends", [False, True])
def test_a_trained_exit_gives_its_own_tokens(attends: bool) -> None:
    model, prompt = tiny.build("llama"), tiny.prompts(1)
    network = random_exit(64, 64, 2, attends=attends)
    spec = selfspec.wrap(model, LossyExitDrafter(threshold=0.0, network=network, delta=None))
    spec.generate(**prompt, **GREEDY)
    assert spec.stats.given > NEW / 2
    assert spec.stats.differing > 0


class Claiming:
    """Says that some of its tokens are given, and not that it is lossy."""

    hidden_taps = ()
    drafter: Any = None

    def draft(self, state: Any, budget: int) -> TokenTree:
        chain = TokenTree.chain(state.root, state.root[:, None])
        given = torch.ones((state.batch, 2), dtype=torch.int32)
        return TokenTree(**{**vars(chain), "given": given})

    def observe(self, state: Any, output: Any, acceptance: Any) -> None: ...
    def reset(self) -> None: ...


def test_exactness_is_not_given_up_unasked() -> None:
    model = tiny.build("llama")
    with pytest.raises(ValueError, match="does not say `is_lossy = True`"):
        selfspec.wrap(model, Claiming()).generate(**tiny.prompts(1), **GREEDY)
    with pytest.raises(ValueError, match="LossyExitDrafter is lossy, and no part of a list"):
        selfspec.wrap(model, ["ngram", LossyExitDrafter(2)])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "exit_layers is missing"),
        ({"exit_layers": 2, "threshold": 1.5}, ValueError, "threshold=1.5"),
        ({"exit_layers": 2, "max_exits": 0}, ValueError, "max_exits=0"),
        ({"exit_layers": 2, "delta": 0.0}, ValueError, "delta=0.0"),
        ({"exit_layers": 2, "delta": "1"}, TypeError, "delta='1'"),
        ({"exit_layers": 9}, ValueError, "exit_layer=9 is out of range"),
        ({"exit_layers": (2, 9)}, ValueError, r"exit_layers=\[2, 9\] is out of range"),
        ({"exit_layers": (2, 1)}, ValueError, "must be one layer or several, rising"),
        ({"exit_layers": ()}, ValueError, "must be one layer or several, rising"),
        ({"exit_layers": (0, 1)}, ValueError, "exit_layers=0 must be at least 1"),
        ({"exit_layers": "2"}, TypeError, "exit_layers='2' must be an int"),
        ({"exit_layers": (1, 2), "weights": {1: [0.0] * 5}}, ValueError, r"weights has \[1\]"),
        ({"exit_layers": 1, "weights": {1: [0.0] * 4}}, ValueError, "must have 5 numbers"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        selfspec.wrap(tiny.build("llama"), LossyExitDrafter(**options))


def test_several_exits_need_layers_that_can_be_resumed() -> None:
    model = tiny.build("gemma3n_text")
    with pytest.raises(
        ValueError, match=r"exit_layers=\[1, 2\]: this model's layers cannot be res"
    ):
        selfspec.wrap(model, LossyExitDrafter((1, 2)))
    spec = selfspec.wrap(model, LossyExitDrafter(2, 0.3, delta=None))
    spec.generate(**tiny.prompts(1), **GREEDY)
    assert spec.stats.given > 0


# ---------------------------------------------------------------------------- drift


def tokens_to_alarm(share: float, seed: int, most: int = 20_000, size: int = 4) -> int:
    rng = np.random.default_rng(seed)
    monitor = DriftMonitor(0.05)
    for at in range(0, most, size):
        if monitor.add((rng.random(size) < share).tolist()):
            return at + size
    return most


def test_what_is_too_much_is_noticed_soon_and_what_is_allowed_is_not() -> None:
    assert np.median([tokens_to_alarm(0.15, seed) for seed in range(20)]) < 250
    assert np.median([tokens_to_alarm(0.1, seed) for seed in range(20)]) < 1000
    for size in (4, 288):  # tokens of a step: of a row, of a large batch
        assert sum(tokens_to_alarm(0.05, seed, 5000, size) < 5000 for seed in range(40)) <= 20
        assert all(tokens_to_alarm(0.03, seed, 5000, size) == 5000 for seed in range(20))


def test_capital_by_hand() -> None:
    monitor = DriftMonitor(0.2, alarm=5.0)
    assert not monitor.add([False, True, True])  # less than 1, so 1; then twice doubled
    assert monitor.capital == pytest.approx(4.0)
    assert not monitor.add([True, False, False][1:2])
    assert monitor.capital == pytest.approx(4.0 * 0.75)
    assert monitor.add([True])
    assert (monitor.capital, monitor.alarms) == (1.0, 1)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("new", [3, 8, 9, 12])
def test_every_token_that_came_is_watched(monkeypatch: Any, rows: int, new: int) -> None:
    """Also those of the step that ended a text: short answers have no other."""
    seen: list[bool] = []
    monkeypatch.setattr(DriftMonitor, "add", lambda self, differs: seen.extend(differs))
    model = tiny.build("llama")
    spec = selfspec.wrap(model, LossyExitDrafter(2, 0.0, max_exits=8))
    spec.generate(**tiny.prompts(rows), **{**GREEDY, "max_new_tokens": new})
    assert len(seen) == rows * (new - 1) - rows * (new % 9 == 1)  # of a step without a draft: none
    assert sum(seen) == spec.stats.differing > 0


def test_short_answers_that_differ_raise_an_alarm() -> None:
    spec = selfspec.wrap(tiny.build("llama"), LossyExitDrafter(2, 0.0))
    for seed in range(40):
        spec.generate(**tiny.prompts(1, seed=seed), **{**GREEDY, "max_new_tokens": 9})
    assert spec.costs.kept[DRIFT].alarms == 1  # at 0.5 it keeps next to nothing
    assert "the threshold is 0.5000 from here on" in repr(spec)


def test_a_threshold_of_one_keeps_nothing() -> None:
    """Not even what rounding makes certain."""
    model = copy.deepcopy(tiny.build("llama"))
    with torch.no_grad():
        model.lm_head.weight *= 200
    spec = selfspec.wrap(model, LossyExitDrafter(1, 1.0, delta=None))
    prompt = tiny.prompts(2)
    assert spec.generate(**prompt, **GREEDY).equal(model.generate(**prompt, **GREEDY))
    assert spec.stats.given == 0


def test_text_that_drifts_becomes_exact(caplog: Any, monkeypatch: Any) -> None:
    """A random model's exit is wrong most of the time: two alarms, then the model's own text."""
    monkeypatch.setattr(lossy_exit, "_EXACT", 2)
    model, prompt = tiny.build("llama"), tiny.prompts(1)
    spec = selfspec.wrap(model, LossyExitDrafter(2, 0.0))
    with caplog.at_level("WARNING", "selfspec"):
        for _ in range(6):
            spec.generate(**prompt, **GREEDY)
    assert caplog.text.count("more than 5 % of the tokens that an early exit gives differ") == 2
    assert "the threshold is 0.5000 from here on" in caplog.text
    assert "decoding is plain" in repr(spec)
    given = spec.stats.given
    assert spec.generate(**prompt, **GREEDY).equal(model.generate(**prompt, **GREEDY))
    assert spec.stats.given == given
    monitor = spec.costs.kept[DRIFT]
    assert monitor.alarms == 2


# ---------------------------------------------------------------------------- calibration


def prompts(count: int) -> list[list[int]]:
    return [tiny.prompts(1, seed=seed)["input_ids"][0].tolist() for seed in range(count)]


def test_an_exit_that_is_right_is_certified() -> None:
    late = range(2, 5)
    model = silent(late, late, layers=5)
    levels = (0.9, 0.5, 0.0)
    found = selfspec.calibrate_exit(
        model, prompts(50), 2, thresholds=levels, max_new_tokens=8, learn=0
    )
    assert found.guarantee is not None
    assert found.guarantee.threshold == 0.0
    assert found.losses.shape == found.given.shape == (50, 3)
    assert not found.losses.any()
    assert found.advice == ""
    # 6 of 8: the first is the prefill's, the last is not drafted for.
    assert found.given[:, 2].max() == 6 / 8
    share = found.given.mean(0)
    assert found.layers_per_token == pytest.approx(share * 2 + (1 - share) * 5)
    drafter = found.drafter()
    assert (drafter.exit_layers, drafter.threshold, drafter.delta) == ((2,), 0.0, 0.05)
    assert drafter.weights is None
    assert "0.0: the expected loss of a prompt is at most 0.05, with probability 0.9" in str(found)


def test_one_that_is_wrong_is_not_and_it_ends_there() -> None:
    model = tiny.build("llama")
    found = selfspec.calibrate_exit(
        model,
        prompts(50),
        1,
        thresholds=(1.0, 0.0),
        max_new_tokens=8,
        learn=0,
    )
    assert found.guarantee is not None
    assert found.guarantee.threshold == 1.0  # nothing is kept, nothing is wrong
    failed = selfspec.calibrate_exit(model, prompts(6), 1, thresholds=(0.0,), max_new_tokens=8)
    assert failed.guarantee is None
    assert "allow a larger delta" in failed.advice
    with pytest.raises(ValueError, match=r"no threshold is certified: at 0\.0 the mean loss"):
        failed.drafter()
    few = selfspec.calibrate_exit(model, prompts(6), 1, thresholds=(1.0, 0.0), max_new_tokens=8)
    assert few.guarantee is None
    assert "about 45 would certify that" in str(few)
    assert few.thresholds == (1.0,)
    whole = selfspec.calibrate_exit(
        model, prompts(6), 1, thresholds=(1.0, 0.0), max_new_tokens=8, run_all=True
    )
    assert whole.thresholds == (1.0, 0.0)
    assert whole.losses[:, 1].mean() > 0.2


def test_a_score_of_ones_own() -> None:
    seen: list[int] = []

    def score(prompt: Any, answer: Any) -> float:
        seen.append(len(answer))
        return 0.25

    found = selfspec.calibrate_exit(
        tiny.build("llama"), prompts(3), 2, thresholds=(0.5,), score=score, max_new_tokens=5
    )
    assert seen == [5, 5, 5]
    assert (found.losses == 0.75).all()
    assert (found.disagreement <= 1).all()
    liked = selfspec.calibrate_exit(
        tiny.build("llama"),
        prompts(50),
        2,
        thresholds=(0.5,),
        score=lambda *_: 1.0,
        max_new_tokens=3,
        learn=5,
    )
    assert liked.drafter().delta is None  # a score says nothing of tokens that differ
    with pytest.raises(ValueError, match="prompts is empty"):
        selfspec.calibrate_exit(tiny.build("llama"), [], 2)
    with pytest.raises(ValueError, match="learn=3: there are 3 prompts; leave some to test on"):
        selfspec.calibrate_exit(tiny.build("llama"), prompts(3), 2, learn=3)


def test_how_sure_is_learned_from_prompts_that_are_not_tested() -> None:
    """An exit that is always right is believed, whatever it says of itself; no other one is."""
    model = silent(range(3, 6), range(3, 6), layers=6)
    found = selfspec.calibrate_exit(
        model, prompts(64), (1, 3), thresholds=(0.95, 0.9), max_new_tokens=16
    )
    assert found.losses.shape == found.layers.shape == (48, 2)
    assert found.weights is not None
    assert list(found.weights) == [1, 3]
    raw = selfspec.calibrate_exit(
        model, prompts(8), (1, 3), thresholds=(0.95,), max_new_tokens=16, learn=0, run_all=True
    )
    assert found.given[:, 0].mean() > raw.given[:, 0].mean() + 0.3
    assert not found.losses[:, 0].any()
    drafter = found.drafter()
    assert drafter.threshold == 0.9
    assert drafter.exit_layers == (1, 3)
    spec = selfspec.wrap(model, drafter)
    spec.generate(**tiny.prompts(1), **GREEDY)
    assert spec.stats.given > NEW / 2
    ids = [torch.tensor(prompts(1))]
    before = model.generate(ids[0], **GREEDY)
    watch = ExitWatch((1, 3))
    assert selfspec.wrap(model, watch).generate(ids[0], **GREEDY).equal(before)
    right = watch.models[3].reliability
    assert right.observed == pytest.approx([1.0] * len(right.observed))
    assert sum(right.counts) == sum(watch.models[1].reliability.counts) >= NEW // 2 - 3
    assert min(watch.models[1].reliability.observed) < 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.train(),
        lambda model: model.generation_config.update(repetition_penalty=1.1),
        lambda model: model.generation_config.update(num_beams=2),
    ],
)
def test_what_never_happens_is_not_certified(change: Any) -> None:
    model = copy.deepcopy(tiny.build("llama"))
    change(model)
    with pytest.raises(ValueError, match=r"nothing would be kept|go to transformers' own loop"):
        selfspec.calibrate_exit(model, prompts(48), 1, max_new_tokens=12)
    with pytest.raises(ValueError, match=r"answers are shorter than three tokens"):
        selfspec.calibrate_exit(tiny.build("llama"), prompts(48), 1, max_new_tokens=2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"thresholds": ()}, ValueError, "thresholds is empty"),
        ({"thresholds": None}, TypeError, "thresholds=None must be probabilities"),
        ({"thresholds": 0.9}, TypeError, "thresholds=0.9 must be probabilities"),
        ({"thresholds": (0.5, 0.9)}, ValueError, "must fall"),
        ({"thresholds": (0.9, 0.9)}, ValueError, "must fall"),
        ({"thresholds": (0.9, -1)}, ValueError, "thresholds=-1 must be a probability"),
        ({"thresholds": ("a",)}, TypeError, "thresholds='a' must be a number"),
        ({"delta": 0}, ValueError, "delta=0 must be between 0 and 1"),
        ({"delta": float("nan")}, ValueError, "delta=nan"),
        ({"epsilon": 2}, ValueError, "epsilon=2 must be between"),
        ({"test": "foo"}, ValueError, "test='foo' must be"),
        ({"learn": 1.5}, TypeError, "learn=1.5 must be an int"),
        ({"learn": -1}, ValueError, "learn=-1 must be at least 0"),
        ({"score": 3}, TypeError, "score=3 must be a function"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens=0 must be at least 1"),
        ({"exit_layers": 1.5}, TypeError, "exit_layers=1.5 must be an int"),
        ({"exit_layers": "2"}, TypeError, "exit_layers='2' must be an int"),
        ({"prompts": "hello"}, TypeError, "prompts='hello' must be a list of prompts"),
        ({"prompts": ["hello"]}, TypeError, r"prompts\[0\] is text"),
        ({"prompts": [1, 2, 3]}, TypeError, r"prompts\[0\] is one number"),
        ({"prompts": [[1], []]}, ValueError, r"prompts\[1\] is empty"),
        ({"prompts": [[1.9, 2.2]]}, TypeError, r"prompts\[0\] is of torch.float32"),
        ({"prompts": [[3, 99999]]}, ValueError, r"prompts\[0\] has the id 99999; the model embeds"),
        ({"prompts": [[3, -1]]}, ValueError, r"prompts\[0\] has the id -1"),
        (
            {"prompts": [torch.ones(3, 5).long()]},
            ValueError,
            r"shape \[3, 5\]: pass prompts one by",
        ),
        ({"prompts": [{"a": 1}]}, TypeError, r"prompts\[0\] must be a list of token ids"),
        ({"prompts": None}, TypeError, "prompts=None must be a list of prompts"),
    ],
)
def test_wrong_arguments_are_found_before_anything_runs(
    monkeypatch: Any, options: dict[str, Any], error: Any, message: str
) -> None:
    def generate(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing should run")

    monkeypatch.setattr(selfspec.SpeculativeModel, "generate", generate)
    arguments = {"prompts": prompts(4), "exit_layers": 2, **options}
    with pytest.raises(error, match=message):
        selfspec.calibrate_exit(tiny.build("llama"), **arguments)


@pytest.mark.parametrize("value", [None, 2.0, float("nan"), "a"])
def test_scores_that_are_none(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"score\(prompt, answer\)="):
        selfspec.calibrate_exit(
            tiny.build("llama"), prompts(4), 2, score=lambda *_: value, max_new_tokens=5
        )


def test_numbers_of_numpy_are_numbers() -> None:
    drafter = LossyExitDrafter(np.array([1, 3]), np.float32(0.5), weights=None)
    assert drafter.exit_layers == (1, 3)
    assert LossyExitDrafter(np.int64(2)).exit_layers == (2,)
    found = selfspec.calibrate_exit(
        tiny.build("llama"),
        [torch.tensor([row]) for row in prompts(4)],
        np.int64(2),
        thresholds=np.array([0.9, 0.5], dtype=np.float32),
        max_new_tokens=6,
        run_all=True,
    )
    assert found.thresholds == pytest.approx((0.9, 0.5))
    with pytest.raises(TypeError, match=r"weights=\[1\] must have 5 numbers by exit layer"):
        LossyExitDrafter(2, weights=[1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none of them infinite or NaN"):
        LossyExitDrafter(2, weights={2: [float("nan")] * 5})


def test_a_copy_of_a_wrapper_knows_what_was_not_to_be_trusted() -> None:
    model, prompt = tiny.llama(), tiny.prompts(1)
    spec = selfspec.wrap(model, LossyExitDrafter(2, 0.0))
    monitor = DriftMonitor(0.05)
    monitor.alarms = 3
    spec.costs.kept[DRIFT] = monitor
    plain = model.generate(**prompt, **GREEDY)
    for other in (spec, copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert other.generate(**prompt, **GREEDY).equal(plain)
        assert (other.stats.given, other.stats.drafted) == (0, 0)
    twice = copy.deepcopy(spec)
    twice.costs.kept[DRIFT].alarms = 0
    assert monitor.alarms == 3


def test_too_few_prompts_are_said_at_once(caplog: Any) -> None:
    selfspec.calibrate_exit(tiny.build("llama"), prompts(10), 2, max_new_tokens=5)
    assert "8 prompts to test on are too few, even if nothing differs: 45 would do" in caplog.text
    assert "array(" not in repr(selfspec.calibrate_exit(tiny.build("llama"), prompts(4), 2))


# ---------------------------------------------------------------------------- files


def test_what_was_calibrated_is_saved_and_read(tmp_path: Path) -> None:
    model = silent(range(3, 6), range(3, 6), layers=6)
    levels = (0.95, 0.9)
    found = selfspec.calibrate_exit(model, prompts(64), (1, 3), thresholds=levels)
    assert found.drafter().save_pretrained(tmp_path / "exit") == tmp_path / "exit"
    again = LossyExitDrafter.from_pretrained(tmp_path / "exit", model=model)
    assert (again.exit_layers, again.threshold, again.delta) == ((1, 3), 0.9, 0.05)
    prompt = tiny.prompts(1)
    one, other = (selfspec.wrap(model, d) for d in (found.drafter(), again))
    assert one.generate(**prompt, **GREEDY).equal(other.generate(**prompt, **GREEDY))
    assert one.stats.given == other.stats.given > 0
    stricter = LossyExitDrafter.from_pretrained(tmp_path / "exit", threshold=0.99, max_exits=2)
    assert (stricter.threshold, stricter.max_draft_tokens) == (0.99, 2)
    for refused in (
        lambda: LossyExitDrafter.from_pretrained(tmp_path / "exit", model=tiny.build("llama")),
        lambda: selfspec.wrap(tiny.build("llama"), again),
    ):
        with pytest.raises(ValueError, match="was made for"):
            refused()
    with pytest.raises(ValueError, match="base is missing"):
        LossyExitDrafter(2).save_pretrained(tmp_path / "other")
    LossyExitDrafter(2, 0.7, 3, None).save_pretrained(tmp_path / "other", base=model)
    plain = LossyExitDrafter.from_pretrained(tmp_path / "other")
    assert (plain.exit_layers, plain.threshold) == ((2,), 0.7)
    assert (plain.max_draft_tokens, plain.delta, plain.weights) == (3, None, None)


def test_options_are_saved_beside_a_trained_exit(tmp_path: Path) -> None:
    model = tiny.build("llama")
    drafter = LossyExitDrafter(threshold=0.7, max_exits=3, network=random_exit(64, tiny.VOCAB, 2))
    drafter.save_pretrained(tmp_path, base=model)
    again = LossyExitDrafter.from_pretrained(tmp_path, model=model)
    assert (again.exit_layers, again.threshold, again.max_draft_tokens) == ((2,), 0.7, 3)
    assert again.network is not None
    (tmp_path / "lossy_exit.json").unlink()
    assert LossyExitDrafter.from_pretrained(tmp_path).threshold == 0.95


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "is no selfspec-lossy-exit of version 1"),
        ({"more": 1}, "it must have"),
        ({"weights": [1]}, "weights are not by exit layer"),
        ({"weights": {"2": [1]}}, "weights has"),
        ({"threshold": "a"}, "threshold='a' must be a number"),
        ({"threshold": 7}, "threshold=7 must be a probability"),
        ({"base": 3}, "base must be an object"),
    ],
)
def test_broken_files(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    LossyExitDrafter(2).save_pretrained(tmp_path, base=tiny.build("llama"))
    path = tmp_path / "lossy_exit.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises((TypeError, ValueError), match=message):
        LossyExitDrafter.from_pretrained(tmp_path)
