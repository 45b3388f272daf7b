"""The feature drafter: what it drafts is what its network says, whatever happened before."""

from __future__ import annotations

import copy
import heapq
import math
import pickle
from functools import cache
from typing import Any

import pytest
import torch

import selfspec
from selfspec.drafters.feature import FeatureDrafter
from tests.families import tiny
from tests.generate.test_drawn_drafts import CRITICAL, largest_gaps
from tests.networks import random_feature

DEPTH, WIDTH = 3, 3
GREEDY = {"max_new_tokens": 24, "do_sample": False}


@cache
def model(dtype: torch.dtype = torch.float64) -> Any:
    return tiny.build("llama", dtype=dtype)


def network(layout: str = "eagle3", own_head: bool = True, **kind: Any) -> Any:
    """In float64, as the model."""
    last = model().config.num_hidden_layers
    kind = {"taps": (1, 2, last) if layout == "eagle3" else (last,), **kind}
    made = random_feature(64, 64, layout=layout, own_head=own_head, **kind).double()
    made.head.attach(model().get_output_embeddings().weight)  # for computing without a drafter
    return made


class Recorder(FeatureDrafter):
    """Keeps every draft with the text that it was made for; leaves out every third step."""

    def __init__(self, *args: Any, pauses: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pauses = pauses
        self.calls = 0
        self.drafts: list[tuple[list[list[int]], list[int], int, selfspec.TokenTree]] = []

    def draft(self, state: Any, budget: int) -> selfspec.TokenTree:
        self.calls += 1
        if self.pauses and self.calls % 5 > 1:
            return selfspec.TokenTree.root_only(state.root)
        tree = super().draft(state, budget)
        texts = [state.tokens(b).tolist() for b in range(state.batch)]
        rooms = [state.room(b) - 1 for b in range(state.batch)]
        self.drafts.append((texts, rooms, budget, tree))
        return tree


def after(net: Any, text: list[int], path: list[int]) -> torch.Tensor:
    """Log-probabilities [Vd] after `text` and drafted `path`, from nothing but their definition."""
    target, c = model(), net.config
    with torch.no_grad():
        ids = torch.tensor([text + path])
        out = target.model(ids[:, : len(text) - 1], output_hidden_states=True, use_cache=False)
        # transformers' last entry is behind the final norm; the state before it is caught.
        before: list[torch.Tensor] = []
        hook = target.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
        target.model(ids[:, : len(text) - 1], use_cache=False)
        hook.remove()
        states = [*out.hidden_states[:-1], before[0]]
        taps = torch.cat([states[tap] for tap in c.taps], dim=-1)
        if c.layout == "eagle":
            taps = target.model.norm(taps)
        feature = net.fuse(taps)
        embedded = target.get_input_embeddings()(ids[:, 1:])
        for _ in range(len(path) + 1):
            length = feature.shape[1]
            positions = torch.arange(length)[None]

            def attend(q: Any, k: Any, v: Any) -> Any:
                group = q.shape[1] // k.shape[1]
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
                scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
                causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
                return scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v

            hidden = net(embedded[:, :length], feature, net.rotary(positions, taps.dtype), attend)
            feature = torch.cat([feature, hidden[:, -1:]], dim=1)
        states = net.readout(hidden[:, -1])
        return net.head(states)[0].log_softmax(-1)


def expected_nodes(net: Any, text: list[int], budget: int, depth: int) -> set[tuple[int, ...]]:
    """The nodes that EAGLE-2 keeps, by a search over paths."""
    tokens = torch.arange(net.head.size) if net.head.ids is None else net.head.ids
    found: list[tuple[float, tuple[int, ...]]] = []
    level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(depth):
        candidates = []
        for score, path in level:
            best = after(net, text, list(path)).topk(WIDTH)
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                # What is certain costs a little, so that a child never ties with its parent.
                candidates.append((score + min(value, -1e-4), (*path, int(tokens[index]))))
        found += candidates
        level = heapq.nlargest(WIDTH, candidates)
    return {path for _, path in heapq.nlargest(budget, found)}


def nodes_of(tree: selfspec.TokenTree, b: int) -> set[tuple[int, ...]]:
    return {tuple(path[:n]) for path in tree.paths()[b] for n in range(1, len(path) + 1)}


@pytest.mark.parametrize(
    "net",
    [
        {},
        {"own_head": False, "draft_vocab_size": None},
        {"layout": "eagle", "own_head": False, "draft_vocab_size": None, "fusion_bias": True},
        {"norm_before_residual": True, "bias": True, "taps": (0, 3)},
    ],
    ids=["eagle3", "target-head", "eagle", "variants"],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_drafts_are_what_the_network_says(
    net: dict[str, Any], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every step: entries of the cache come from the target's own states (D10, H6)."""
    if batch > 1:  # a catch-up after a pause is several pieces
        monkeypatch.setattr("selfspec.drafters.feature_steps.AT_ONCE", 2)
    made = network(**net)
    drafter = Recorder(made, DEPTH, WIDTH, min_gain=0.0, min_prob=0.0, pauses=True)
    prompt = tiny.prompts(batch)
    plain = model().generate(**prompt, **GREEDY)
    # A copying drafter beside it, so that several tokens are accepted between two drafts.
    spec = selfspec.wrap(
        model(), drafter=[selfspec.NGramDrafter(1, min_prob=0.0), drafter], max_draft_tokens=8
    )
    assert spec.generate(**prompt, **GREEDY).tolist() == plain.tolist()
    assert len(drafter.drafts) > 3
    for texts, rooms, budget, tree in drafter.drafts[:1] + drafter.drafts[-3:]:
        for b, (text, room) in enumerate(zip(texts, rooms, strict=True)):
            depth = min(DEPTH, room, budget)
            assert nodes_of(tree, b) == expected_nodes(made, text, budget, depth)


@pytest.mark.parametrize("rule", ["traversal", "multiround"])
def test_drawn_drafts_leave_the_law_of_the_text(rule: str) -> None:
    made = network(seed=3).float()
    for parameter in made.parameters():
        parameter.mul_(0.5)  # spreads q, so that drafts differ and are accepted now and then
    drafter = FeatureDrafter(made, 2, 4, min_gain=0.0, do_sample=True, branches=2)
    found, stats = largest_gaps(tiny.build("llama"), drafter, rule, 1500)
    assert stats.accepted > 150
    assert max(found) < CRITICAL


def test_a_row_drafts_the_same_alone() -> None:
    made = network()
    prompt = tiny.prompts(3)
    rows = [[ids[mask.bool()]] for ids, mask in zip(*prompt.values(), strict=True)]
    together = Recorder(made, DEPTH, WIDTH, min_prob=0.0, min_gain=0.0)
    selfspec.wrap(model(), together, max_draft_tokens=6).generate(**prompt, **GREEDY)
    for b, row in enumerate(rows):
        alone = Recorder(made, DEPTH, WIDTH, min_prob=0.0, min_gain=0.0)
        selfspec.wrap(model(), alone, max_draft_tokens=6).generate(input_ids=row[0][None], **GREEDY)
        of_text = {
            tuple(texts[b]): nodes_of(tree, b)
            for texts, rooms, budget, tree in together.drafts
            if rooms[b] >= 6 and budget == 6
        }
        shared = [
            (tuple(texts[0]), tree)
            for texts, rooms, budget, tree in alone.drafts
            if budget == 6 and tuple(texts[0]) in of_text
        ]
        assert len(shared) > 3
        for text, tree in shared:
            assert nodes_of(tree, 0) == of_text[text]


def test_a_cache_that_is_continued_and_embeddings() -> None:
    """States of the earlier text are not known then; drafts are made of what is."""
    made = network()
    ids = tiny.prompts(1)["input_ids"]
    texts = []
    for spec in (selfspec.wrap(model(), FeatureDrafter(made)), model()):
        first = spec.generate(ids, return_dict_in_generate=True, **GREEDY)
        longer = torch.cat([first.sequences, ids], dim=1)
        name = next(k for k in ("cache", "past_key_values") if k in first)
        out = spec.generate(longer, **{name: first[name]}, **GREEDY)
        embeds = model().get_input_embeddings()(ids)
        texts.append([out.tolist(), spec.generate(inputs_embeds=embeds, **GREEDY).tolist()])
    assert texts[0] == texts[1]


def test_one_drafter_serves_two_models_and_two_requests() -> None:
    made = network(own_head=False)
    drafter = FeatureDrafter(made, min_prob=0.0)
    other = tiny.llama(initializer_range=0.2).double()
    specs = [selfspec.wrap(model(), drafter), selfspec.wrap(other, drafter)]
    prompt = tiny.prompts(1)
    texts = [s.model.generate(**prompt, **GREEDY).tolist() for s in specs]
    for _ in range(2):
        steps = [s.stream(**prompt, **GREEDY) for s in specs]
        for _ in zip(*steps, strict=False):
            pass
        assert [s.generate(**prompt, **GREEDY).tolist() for s in specs] == texts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_depth": 0}, "max_depth"),
        ({"width": 65}, "width"),
        ({"min_gain": 1.5}, "min_gain"),
        ({"min_prob": -0.1}, "min_prob"),
        ({"branches": 0}, "branches"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FeatureDrafter(network(), **options)


def test_a_network_for_another_model_is_refused() -> None:
    wide = tiny.llama(hidden_size=96, num_attention_heads=4)
    with pytest.raises(ValueError, match="hidden_size=64, the model has 96"):
        selfspec.wrap(wide, FeatureDrafter(network()))
    small = tiny.llama(vocab_size=32)
    with pytest.raises(ValueError, match=r"the model has tokens 0\.\.31"):
        selfspec.wrap(small, FeatureDrafter(network()))
    shallow = tiny.llama(num_hidden_layers=2)
    with pytest.raises(ValueError, match="reads layer 4, and the model has 2"):
        selfspec.wrap(shallow, FeatureDrafter(network()))


@pytest.mark.parametrize("batch", [1, 3])
def test_in_steps_of_fixed_shape(batch: int) -> None:
    """What the target's buffers hold is overwritten by the next step; what is kept is a copy."""
    prompt = tiny.prompts(batch)
    plain = model().generate(**prompt, **GREEDY)
    trees = []
    for graphs in (False, True):
        drafter = Recorder(network(), DEPTH, WIDTH, min_gain=0.0, min_prob=0.0)
        spec = selfspec.wrap(model(), drafter, cuda_graphs=graphs, max_draft_tokens=6)
        assert spec.generate(**prompt, **GREEDY).tolist() == plain.tolist()
        trees.append([[nodes_of(tree, b) for b in range(batch)] for *_, tree in drafter.drafts])
    assert trees[0] == trees[1]


def test_nothing_is_verified_that_is_not_worth_it() -> None:
    """Neither nodes nor levels; a tree of the root alone is a plain step."""
    prompt = tiny.prompts(2)
    plain = model().generate(**prompt, **GREEDY).tolist()

    def drafted(**options: float) -> tuple[int, int]:
        drafter = Recorder(network(), DEPTH, WIDTH, **options)
        spec = selfspec.wrap(model(), drafter, max_draft_tokens=9)
        assert spec.generate(**prompt, **GREEDY).tolist() == plain
        return spec.stats.drafted, max(tree.max_depth for *_, tree in drafter.drafts)

    everything = drafted(min_gain=0.0, min_prob=0.0)
    assert everything[1] == DEPTH
    assert drafted(min_gain=0.0, min_prob=1.0)[0] == 0
    assert 0 < drafted(min_gain=0.0, min_prob=0.2)[0] < everything[0]
    shallow = drafted(min_gain=1.0, min_prob=0.0)
    assert shallow[1] == 1
    assert shallow[0] < everything[0]


def test_a_draft_that_is_sure_that_it_is_wrong_is_a_tree_all_the_same() -> None:
    """Probabilities so small that a child's is rounded to its parent's."""
    made, prompt = network(), tiny.prompts(3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "head" in name:
                parameter.mul_(1e3)
    plain = model().generate(**prompt, **GREEDY)
    for graphs in (False, True):
        drafter = FeatureDrafter(made, min_gain=0.0, min_prob=0.0)
        spec = selfspec.wrap(model(), drafter, cuda_graphs=graphs, max_draft_tokens=7)
        assert spec.generate(**prompt, **GREEDY).tolist() == plain.tolist()
        assert spec.stats.drafted > 0


def test_copies_draft_for_themselves() -> None:
    """A wrapper's drafter in use is copied; a copy has nothing of the request of the original."""
    drafter = FeatureDrafter(network())
    spec = selfspec.wrap(model(), drafter)
    prompt = tiny.prompts(1)
    stream = spec.stream(**prompt, **GREEDY)
    next(stream)
    assert drafter._steps is not None
    for other in (copy.copy(drafter), copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert other._steps is None
        ours = selfspec.wrap(model(), other).generate(**prompt, **GREEDY)
        assert ours.equal(model().generate(**prompt, **GREEDY))
    assert copy.copy(drafter)._fits is drafter._fits
    stream.close()
