"""Drafts by trained heads: wired right, fitted to models, and never seen in the text."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import selfspec
from selfspec import HeadsDrafter
from selfspec.drafters.static_tree import assumed_accuracies, best_paths
from selfspec.networks import HeadsConfig, HeadsNetwork
from tests.families import tiny
from tests.networks import random_heads
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
    drafter = HeadsDrafter(network, tree, min_prob=0.0)
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
    seen = Watching(network, min_prob=0.0)
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
        model,
        [
            selfspec.NGramDrafter(1, max_candidates=2, min_prob=0.0),
            HeadsDrafter(trained("conditioned"), min_prob=0.0),
        ],
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
