"""Drafts by trained heads: wired right, fitted to models, and never seen in the text."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import selfspec
from selfspec import HeadsDrafter
from selfspec.drafters.static_tree import assumed_accuracies, best_paths
from selfspec.networks import HeadsConfig, HeadsNetwork
from tests.drafters import random_heads
from tests.families import tiny
from tests.recalled import Recalling, known, steps

NEW = 20
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.8, "top_k": 9}
SOME = torch.arange(1, 64, 3)  # a draft vocabulary


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama")


def heads(hidden_size: int = 64, vocab_size: int = 64, **kind: Any) -> HeadsNetwork:
    """Random ones."""
    network = random_heads(hidden_size, vocab_size, **kind)
    if network.config.draft_vocab_size:
        network.choose(SOME)
    return network


KINDS: dict[str, dict[str, Any]] = {
    "conditioned": {},
    "medusa": {"conditioned": False},
    "conditioned, own heads": {"own_head": True},
    "medusa, own heads": {"conditioned": False, "own_head": True, "num_layers": 2},
    "draft vocabulary": {"draft_vocab_size": len(SOME)},
    "medusa, own heads, draft vocabulary": {
        "conditioned": False,
        "own_head": True,
        "draft_vocab_size": len(SOME),
    },
    "one head": {"num_heads": 1},
    "no blocks": {"num_layers": 0, "conditioned": False},
}


# ------------------------------------------------------------------ wired right

# Ranks of the right tokens after a state; the first prompt starts with the second row.
MIXED = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (2, 0, 0), (0, 1, 0)]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("conditioned", [True, False], ids=["conditioned", "medusa"])
@pytest.mark.parametrize(
    ("script", "tree", "budget"),
    [
        ("right", None, 16),
        ("mixed", None, 16),
        ("mixed", None, 1),
        ("mixed", [[0], [0, 0], [0, 0, 0]], 16),
        ("mixed", [[0], [1], [1, 0], [1, 1]], 3),
        ("mixed", [[0], [1], [0, 0], [1, 0], [1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 0]], 16),
    ],
)
def test_acceptance_is_what_the_heads_know(
    model: Any, script: str, tree: Any, budget: int, conditioned: bool, batch: int
) -> None:
    """Exactly: no state of another node, layer or row, no position off by one, no branch lost."""

    def rank(at: int, k: int) -> int:
        return 0 if script == "right" else MIXED[at % 5][k % 3]

    text = known("llama", batch, NEW)
    embeddings = model.get_input_embeddings().weight.detach()
    network = Recalling(text, embeddings, 3, rank, conditioned)
    drafter = HeadsDrafter(network, tree)
    spec = selfspec.wrap(model, drafter, max_draft_tokens=budget)
    assert spec.generate(**text[0], **GREEDY).equal(text[1])
    paths = drafter.tree or best_paths(assumed_accuracies(3), budget)
    forwards, accepted = steps(text, paths[:budget], rank, NEW, budget)
    assert (spec.stats.forwards, spec.stats.accepted) == (forwards, accepted)
    assert accepted > 0 or budget == 3


@cache
def trained(name: str) -> HeadsNetwork:
    """Heads of a kind that know the texts of `known("llama", 3, NEW)` by heart."""
    model = tiny.build("llama")
    _, _, tokens, states = known("llama", 3, NEW)
    network = heads(**KINDS[name])
    if network.config.draft_vocab_size:
        network = heads(**{**KINDS[name], "draft_vocab_size": None})
    network.attach(model.lm_head.weight)
    embed = model.get_input_embeddings().weight.detach()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    depth = network.config.num_heads
    for _ in range(120):
        loss = torch.zeros(())
        for k in range(depth):
            inputs, paths, targets = [], [], []
            for row, known_states in zip(tokens, states, strict=True):
                count = len(row) - depth - 1
                inputs.append(known_states[:count])
                text = torch.tensor(row)
                paths.append(embed[text.unfold(0, k + 1, 1)[1 : count + 1]])
                targets.append(text[k + 2 : k + 2 + count])
            state = network(k, torch.cat(inputs), torch.cat(paths))
            loss = loss + F.cross_entropy(network.head(k)(state), torch.cat(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network


@pytest.mark.parametrize("name", ["conditioned", "medusa", "medusa, own heads"])
def test_trained_heads_are_accepted(model: Any, name: str) -> None:
    """Trained as the networks say, apart from the drafter: state, root and path mean the same."""
    prompt, plain, _, _ = known("llama", 3, NEW)
    spec = selfspec.wrap(model, HeadsDrafter(trained(name)), max_draft_tokens=8)
    assert spec.generate(**prompt, **GREEDY).equal(plain)
    assert spec.stats.mean_accepted_length > 3.2
    beside = tiny.prompts(3, seed=5)
    assert spec.generate(**beside, **GREEDY).equal(model.generate(**beside, **GREEDY))


def test_a_depth_is_one_call_and_the_target_runs_once_a_step(model: Any) -> None:
    calls: list[tuple[int, ...]] = []

    class Counting(HeadsNetwork):
        def forward(self, k: int, hidden: torch.Tensor, path: Any = None) -> torch.Tensor:
            calls.append((k, *hidden.shape[:-1]))
            return super().forward(k, hidden, path)

    for conditioned in (True, False):
        calls.clear()
        spec = selfspec.wrap(
            model, HeadsDrafter(Counting(HeadsConfig(64, 64, 3, conditioned=conditioned)))
        )
        with_drafts = [
            step for step in spec.stream(**tiny.prompts(2), **GREEDY) if step.num_nodes > 1
        ]
        deepest = [max(step.draft_depth) for step in with_drafts]
        assert [k for k, *_ in calls] == [k for depth in deepest for k in range(depth)]
        assert deepest[0] == 3
        assert spec.stats.forwards <= NEW
        if conditioned:
            assert calls[:2] == [(0, 2, 1), (1, 2, calls[1][2])]
            assert calls[1][2] > 1
        else:
            assert {tuple(shape) for _, *shape in calls} == {(2,)}


# ------------------------------------------------------------------ never seen in the text


@cache
def plain_text(batch: int, do_sample: bool) -> torch.Tensor:
    torch.manual_seed(0)
    settings = SAMPLED if do_sample else GREEDY
    text: torch.Tensor = tiny.build("llama").generate(**tiny.prompts(batch), **settings)
    return text


@pytest.mark.parametrize("name", KINDS)
def test_text_is_that_of_plain_generate(model: Any, name: str) -> None:
    network = heads(**KINDS[name])
    for budget, batches in ((1, [1]), (12, [1, 3])):
        spec = selfspec.wrap(model, HeadsDrafter(network), max_draft_tokens=budget)
        for batch in batches:
            torch.manual_seed(0)
            text = spec.generate(**tiny.prompts(batch), **GREEDY)
            assert text.equal(plain_text(batch, False))
    torch.manual_seed(0)
    assert spec.generate(**tiny.prompts(3), **SAMPLED).equal(plain_text(3, True))
    assert spec.stats.drafted > 0
    assert spec.stats.fallbacks == 0


@pytest.mark.parametrize("name", ["bloom", "falcon_alibi"])
def test_models_that_verify_chains_get_the_best_tokens(name: str) -> None:
    model = tiny.build(name)
    seen = Watching(heads(), [[0], [1], [2], [0, 0]])
    spec = selfspec.wrap(model, seen)
    for batch in (1, 3):
        prompt = tiny.prompts(batch)
        assert spec.generate(**prompt, **GREEDY).equal(model.generate(**prompt, **GREEDY))
    assert max(tree.width for tree in seen.trees) == 4
    assert all(tree.is_chain for tree in seen.trees)


class Watching(HeadsDrafter):
    """Keeps what it drafts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.trees: list[Any] = []

    def draft(self, state: Any, budget: int) -> Any:
        self.trees.append(super().draft(state, budget))
        return self.trees[-1]


@pytest.mark.parametrize("name", KINDS)
def test_only_the_draft_vocabulary_is_drafted(model: Any, name: str) -> None:
    network = heads(**KINDS[name])
    ids = network.head(0).ids
    allowed = set(range(64)) if ids is None else set(ids.tolist())
    for settings in (GREEDY, SAMPLED):
        seen = Watching(network, do_sample=True)
        selfspec.wrap(model, seen).generate(**tiny.prompts(2), **settings)
        drafted = {t for tree in seen.trees for t in tree.tokens[:, 1:].flatten().tolist()}
        assert drafted <= allowed
        drawn = [tree.log_q[:, 0].clone() for tree in seen.trees if tree.log_q is not None]
        assert bool(drawn) == (settings is SAMPLED)
        for law in drawn:
            law[:, sorted(allowed)] = -torch.inf
            assert float(law.max()) == -torch.inf


def test_measured_accuracies_shape_the_tree(model: Any) -> None:
    network = heads(num_heads=2)
    seen = Watching(network)
    spec = selfspec.wrap(model, seen, max_draft_tokens=4)
    spec.generate(**tiny.prompts(1), **GREEDY)
    assumed = [tuple(p) for p in best_paths(assumed_accuracies(2), 4)]
    assert seen.trees[0].depth[0].tolist() == [0, *map(len, assumed)]
    network.accuracies = torch.tensor([[0.3, 0.3, 0.3], [0.01, 0.01, 0.01]])
    spec.generate(**tiny.prompts(1), **GREEDY)
    assert seen.trees[-1].width < 5  # cut at the end of the text
    assert any(tree.depth[0].tolist() == [0, 1, 1, 1, 2] for tree in seen.trees)
    network.accuracies = torch.zeros(2, 3)
    seen.trees.clear()
    spec.generate(**tiny.prompts(1), **GREEDY)
    assert {tree.width for tree in seen.trees} == {2}


# ------------------------------------------------------------------ fitted to models


def test_the_network_is_left_as_it_is(model: Any) -> None:
    """A model of another dtype has a copy of it; one of the same shares its weights."""
    network = heads()
    before = copy.deepcopy(network.state_dict())
    drafter = HeadsDrafter(network)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        spec = selfspec.wrap(tiny.build("llama", dtype=dtype), drafter)
        spec.generate(**tiny.prompts(2), **GREEDY)
        assert spec.stats.drafted > 0
        fitted = drafter._fits[spec._target.architecture]
        assert {p.dtype for p in fitted.parameters()} == {dtype}
        shares = fitted.fuse[0].weight.data_ptr() == network.fuse[0].weight.data_ptr()
        assert shares == (dtype == torch.float32)
        rows, theirs = fitted.head(0).matrix, spec.model.lm_head.weight
        assert rows.data_ptr() == theirs.data_ptr()
    assert network.head(0).rows is None
    assert all(p.requires_grad for p in network.parameters())
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


def test_one_drafter_serves_several_models_in_turn(model: Any) -> None:
    prompt, plain, _, _ = known("llama", 3, NEW)
    drafter = HeadsDrafter(trained("conditioned"))
    others = [tiny.build("llama", dtype=torch.float64), tiny.build("qwen2")]
    specs = [selfspec.wrap(one, drafter, max_draft_tokens=8) for one in (model, *others)]
    for spec in (*specs, *specs):
        text = spec.generate(**prompt, **GREEDY)
        assert text.equal(plain) or spec.model is others[1]
    good = [spec.stats.mean_accepted_length > 3 for spec in specs]
    assert good == [True, True, False]
    assert len(drafter._fits) == 3


def test_a_model_that_is_gone_is_forgotten() -> None:
    drafter = HeadsDrafter(heads(conditioned=False))
    model = tiny.llama()
    spec = selfspec.wrap(model, drafter, max_draft_tokens=4)
    spec.generate(**tiny.prompts(1), **GREEDY)
    weight = weakref.ref(model.lm_head.weight)
    assert len(drafter._fits) == 1
    del model, spec
    gc.collect()
    assert len(drafter._fits) == 0
    assert weight() is None


def test_a_model_of_another_depth_since(model: Any) -> None:
    drafter = HeadsDrafter(heads())
    spec = selfspec.wrap(model, drafter)
    selfspec.wrap(tiny.llama(num_hidden_layers=2), drafter)
    with pytest.raises(ValueError, match=r"output of layer 4, and taps \[2\] were asked for"):
        spec.generate(**tiny.prompts(1), **GREEDY)


def test_weights_that_change_are_followed() -> None:
    """Those of the model's head and those of the heads, between requests, without wrapping anew."""
    model = copy.deepcopy(tiny.build("llama"))
    prompt, _, _, _ = known("llama", 3, NEW)
    network = copy.deepcopy(trained("conditioned"))
    spec = selfspec.wrap(model, HeadsDrafter(network))

    def tau() -> float:
        before = spec.stats + selfspec.SpecStats()
        assert spec.generate(**prompt, **GREEDY).equal(model.generate(**prompt, **GREEDY))
        drafted = spec.stats.emitted - before.emitted
        return drafted / 3 / (spec.stats.forwards - before.forwards)

    first = tau()
    assert first > 2.5
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    weight = model.lm_head.weight
    with torch.no_grad():
        weight.copy_(weight[order])  # in place
    fitted = spec._drafter._fits[spec._target.architecture]
    tau()
    fitted = spec._drafter._fits[spec._target.architecture]
    assert fitted.head(0).matrix.equal(model.lm_head.weight)
    model.double()
    tau()
    fitted = spec._drafter._fits[spec._target.architecture]
    assert fitted.head(0).matrix.dtype == fitted.fuse[0].weight.dtype == torch.float64
    with torch.no_grad():
        network.fuse[0].weight.zero_()
    tau()
    fitted = spec._drafter._fits[spec._target.architecture]
    assert not fitted.fuse[0].weight.any()


def test_a_reduced_head_is_copied_anew_when_the_model_changes() -> None:
    model = copy.deepcopy(tiny.build("llama"))
    drafter = HeadsDrafter(heads(draft_vocab_size=len(SOME)))
    spec = selfspec.wrap(model, drafter)
    for _ in range(2):
        spec.generate(**tiny.prompts(1), **GREEDY)
        fitted = drafter._fits[spec._target.architecture]
        assert fitted.head(0).matrix.equal(model.lm_head.weight[SOME])
        with torch.no_grad():
            model.lm_head.weight.neg_()


def test_h15_a_vocabulary_that_is_resized() -> None:
    """Larger: followed; smaller than what can be drafted: refused, though it was wrapped before."""
    model = copy.deepcopy(tiny.build("llama"))
    spec = selfspec.wrap(model, HeadsDrafter(heads()))
    prompt = tiny.prompts(2, vocab=30)
    for size in (64, 72):
        model.resize_token_embeddings(size, mean_resizing=False)
        assert spec.generate(**prompt, **GREEDY).equal(model.generate(**prompt, **GREEDY))
        assert spec.stats.drafted > 0
        fitted = spec._drafter._fits[spec._target.architecture]
        assert fitted.head(0).matrix.data_ptr() == model.lm_head.weight.data_ptr()
    torch.manual_seed(0)
    drawn = selfspec.wrap(model, HeadsDrafter(heads(), do_sample=True))
    drawn.generate(**prompt, **SAMPLED)
    assert drawn.stats.drafted > 0
    model.resize_token_embeddings(40)
    with pytest.raises(ValueError, match=r"can draft token 63 \(of vocab_size=64\).* 0\.\.39"):
        spec.generate(**prompt, **GREEDY)
    few = heads(draft_vocab_size=len(SOME))
    few.choose(torch.arange(len(SOME)))
    assert selfspec.wrap(model, HeadsDrafter(few)).generate(**prompt, **GREEDY).shape[1] == 17 + NEW


@pytest.mark.parametrize(
    ("network", "name", "message"),
    [
        (lambda: heads(), "llama_gqa3", "made for hidden_size=64, the model has 96"),
        (lambda: heads(vocab_size=65), "llama", r"token 64 \(of vocab_size=65\).* 0\.\.63"),
        (lambda: heads(), "opt", "the state after the model's final norm, and it was not found"),
    ],
)
def test_models_that_heads_do_not_fit(network: Any, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selfspec.wrap(tiny.build(name), HeadsDrafter(network()))


def test_parts_that_are_missing_are_named(model: Any) -> None:
    found = selfspec.wrap(model)._target.architecture
    narrow = dataclasses.replace(found, embeddings=lambda: torch.nn.Embedding(64, 32))
    with pytest.raises(ValueError, match="embeddings of hidden_size=64, those"):
        HeadsDrafter(heads()).bind(narrow)
    HeadsDrafter(heads(conditioned=False)).bind(narrow)
    other = copy.deepcopy(model)
    spec = selfspec.wrap(other)
    other.lm_head.weight.requires_grad_(False)
    other.lm_head.forward = other.lm_head.forward
    with pytest.raises(ValueError, match=r"own_head=False: .* no plain linear layer"):
        HeadsDrafter(heads()).bind(spec._target.architecture)
    HeadsDrafter(heads(own_head=True)).bind(spec._target.architecture)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: HeadsDrafter("heads"), TypeError, "network is a str; it must be a HeadsNetwork"),
        (lambda: HeadsDrafter(heads(), do_sample=1), TypeError, "do_sample=1 must be True or Fal"),
        (lambda: HeadsDrafter(heads(), [[0] * 4]), ValueError, r"a path has 1\.\.3 ranks"),
        (lambda: HeadsDrafter(heads(), [[64]]), ValueError, r"each in 0\.\.63"),
        (lambda: heads(num_heads=0), ValueError, "num_heads=0 must be at least 1"),
        (lambda: heads(num_layers=-1), ValueError, "num_layers=-1 must be at least 0"),
        (lambda: heads(hidden_size=0), ValueError, "hidden_size=0 must be at least 1"),
        (lambda: heads(accuracies=[[0.5]]), ValueError, "accuracies has 1 rows; .* num_heads=3"),
        (lambda: heads(num_heads=1, accuracies=[[0.7, 0.4]]), ValueError, "sum up to 1"),
        (lambda: heads(num_heads=1, accuracies=[[1.5]]), ValueError, r"\[1\.5\]; .* in 0\.\.1"),
        (lambda: heads()(0, torch.zeros(1, 64)), ValueError, "path=None: conditioned heads need"),
    ],
)
def test_refusals(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_new_heads_say_what_the_targets_head_says(model: Any) -> None:
    for conditioned in (True, False):
        network = HeadsNetwork(HeadsConfig(64, 64, 2, 2, conditioned=conditioned))
        network.attach(model.lm_head.weight)
        states, path = torch.randn(5, 64), torch.randn(5, 2, 64)
        for k in range(2):
            torch.testing.assert_close(
                network.head(k)(network(k, states, path)), model.lm_head(states)
            )


def test_copies_and_pickles(model: Any) -> None:
    prompt, plain, _, _ = known("llama", 3, NEW)
    drafter = HeadsDrafter(trained("medusa"), tree=[[0], [1], [0, 0]])
    spec = selfspec.wrap(model, drafter)
    inside: list[Any] = []

    def also(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not inside:
            inside.append(None)
            inside.append(spec.generate(**tiny.prompts(1), **GREEDY))
        return scores

    also.stateless = True  # type: ignore[attr-defined]
    assert spec.generate(**prompt, **GREEDY, logits_processor=[also]).equal(plain)
    assert inside[1].equal(model.generate(**tiny.prompts(1), **GREEDY))
    for again in (pickle.loads(pickle.dumps(drafter)), copy.deepcopy(drafter)):
        assert again.tree == drafter.tree
        assert again.network is not drafter.network
        one = selfspec.wrap(model, again)
        assert one.generate(**prompt, **GREEDY).equal(plain)
        assert one.stats.mean_accepted_length > 2
    beside = copy.copy(drafter)
    beside.reset()
    assert drafter._seen is not None
    assert beside._fits is drafter._fits


def test_beside_n_grams(model: Any) -> None:
    """The tree that is verified is not the one it drafted; the state is that tree's."""
    prompt, plain, _, _ = known("llama", 3, NEW)
    spec = selfspec.wrap(
        model, [selfspec.NGramDrafter(1, max_candidates=2), HeadsDrafter(trained("conditioned"))]
    )
    assert spec.generate(**prompt, **GREEDY).equal(plain)
    assert spec.stats.mean_accepted_length > 3


def test_inference_mode_and_then_not(model: Any) -> None:
    prompt, plain, _, _ = known("llama", 3, NEW)
    network = copy.deepcopy(trained("conditioned"))
    spec = selfspec.wrap(model, HeadsDrafter(network))
    with torch.inference_mode():
        assert spec.generate(**prompt, **GREEDY).equal(plain)
    assert spec.generate(**prompt, **GREEDY).equal(plain)
    network(0, torch.randn(1, 64), torch.randn(1, 1, 64)).sum().backward()
    assert network.fuse[0].weight.grad is not None
