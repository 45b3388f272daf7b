"""Trained exits: what is drafted is what the network says of the states after its layer."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from typing import Any

import pytest
import torch

import selfspec
from selfspec.networks.exit import ExitConfig
from tests.families import tiny
from tests.generate.test_drawn_drafts import CRITICAL, largest_gaps
from tests.networks import random_exit

LAYER, LENGTH = 2, 3
GREEDY = {"max_new_tokens": 24, "do_sample": False}


@cache
def model() -> Any:
    return tiny.build("llama", dtype=torch.float64)


def network(attends: bool) -> Any:
    made = random_exit(64, 64, LAYER, attends=attends).double()
    made.head.attach(model().get_output_embeddings().weight)  # for computing without a drafter
    return made


class Recorder(selfspec.EarlyExitDrafter):
    """Keeps every draft with the text that it was made for; leaves steps out now and then."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = 0
        self.drafts: list[tuple[list[list[int]], selfspec.TokenTree]] = []

    def draft(self, state: Any, budget: int) -> selfspec.TokenTree:
        self.calls += 1
        if self.calls % 5 > 2:
            return selfspec.TokenTree.root_only(state.root)
        tree = super().draft(state, budget)
        self.drafts.append(([state.tokens(b).tolist() for b in range(state.batch)], tree))
        return tree


def best_after(made: Any, text: list[int]) -> tuple[int, float]:
    """The exit's token after `text` and its probability, from nothing but their definition."""
    with torch.no_grad():
        ids = torch.tensor([text])
        states = model()(ids, output_hidden_states=True, use_cache=False).hidden_states[LAYER]
        angles = attend = None
        if made.config.num_heads:
            angles = made.rotary(torch.arange(len(text))[None], states.dtype)

            def attend(q: Any, k: Any, v: Any) -> Any:
                k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
                scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
                causal = torch.ones(len(text), len(text), dtype=torch.bool).tril()
                return scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v

        top = made.head(made(states, angles, attend)[0, -1]).softmax(-1).max(-1)
        return int(made.head.ids[top.indices]), float(top.values)


@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_drafts_are_what_the_network_says(attends: bool, batch: int) -> None:
    """Also after pauses, and after copies by another drafter were accepted."""
    made = network(attends)
    drafter = Recorder(network=made, max_draft_tokens=LENGTH, confidence=0.0, branches=1)
    prompt = tiny.prompts(batch)
    plain = model().generate(**prompt, **GREEDY)
    spec = selfspec.wrap(model(), [selfspec.NGramDrafter(1, min_prob=0.0), drafter])
    assert spec.generate(**prompt, **GREEDY).tolist() == plain.tolist()
    assert spec.stats.accepted > 0
    checked = 0
    for texts, tree in drafter.drafts[:1] + drafter.drafts[-3:]:
        for b, text in enumerate(texts):
            tokens = tree.tokens[b, 1 : int(tree.num_nodes[b])].tolist()
            for at, token in enumerate(tokens):
                assert token == best_after(made, text + tokens[:at])[0]
                checked += 1
    assert checked > 5


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_chain_goes_on_while_it_is_probable(do_sample: bool) -> None:
    """As a whole: a sure token behind an unsure one is as unlikely to be reached."""
    made, confidence = network(True), 0.3
    drafter = Recorder(
        network=made, max_draft_tokens=4, confidence=confidence, branches=1, do_sample=do_sample
    )
    spec = selfspec.wrap(model(), drafter)
    torch.manual_seed(0)
    settings = {"max_new_tokens": 40, "do_sample": do_sample, "top_k": 0}
    spec.generate(tiny.prompts(1)["input_ids"], **settings)
    lengths = []
    for (text,), tree in drafter.drafts:
        tokens, path = tree.tokens[0, 1:].tolist(), []
        for at, token in enumerate(tokens):
            if do_sample:
                assert tree.log_q is not None
                found = float(tree.log_q[0, at, token].exp())
            else:
                found = best_after(made, text + tokens[:at])[1]
            path.append(found * (path[-1] if path else 1.0))
        assert all(p >= confidence for p in path[:-1])
        if len(tokens) < 4 and tree is not drafter.drafts[-1][1]:
            assert path[-1] < confidence
        lengths.append(len(tokens))
    assert len(set(lengths)) > 1


@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_identity_with_branches_and_in_steps_of_fixed_shape(attends: bool, graphs: bool) -> None:
    for batch in (1, 3):
        prompt = tiny.prompts(batch)
        drafter = selfspec.EarlyExitDrafter(network=network(attends), confidence=0.0)
        assert drafter.branches > 1
        spec = selfspec.wrap(model(), drafter, cuda_graphs=graphs)
        plain = model().generate(**prompt, **GREEDY)
        assert spec.generate(**prompt, **GREEDY).tolist() == plain.tolist()
        assert spec.stats.drafted > 20


def test_drawn_drafts_leave_the_law_of_the_text() -> None:
    made = network(True).float()
    drafter = selfspec.EarlyExitDrafter(
        None, 2, confidence=0.0, branches=2, do_sample=True, network=made
    )
    found, stats = largest_gaps(tiny.build("llama"), drafter, "traversal", 1000)
    assert stats.accepted > 100
    assert max(found) < CRITICAL


def test_copies_draft_for_themselves() -> None:
    drafter = selfspec.EarlyExitDrafter(network=network(True), confidence=0.0)
    prompt = tiny.prompts(1)
    stream = selfspec.wrap(model(), drafter).stream(**prompt, **GREEDY)
    next(stream)
    assert drafter._context is not None
    for other in (copy.copy(drafter), copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert other._context is None
        ours = selfspec.wrap(model(), other).generate(**prompt, **GREEDY)
        assert ours.equal(model().generate(**prompt, **GREEDY))
    stream.close()


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="num_heads=3"):
        ExitConfig(8, 8, 1, 8, num_heads=3, num_key_value_heads=2, head_dim=4)
    with pytest.raises(ValueError, match="exit_layer=0"):
        ExitConfig(8, 8, 0, 8)
    with pytest.raises(ValueError, match="trained for exit_layer=2"):
        selfspec.EarlyExitDrafter(3, network=network(False))
