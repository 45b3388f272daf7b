"""A text that is known, run again by a part of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selfspec
from selfspec.patch import LayerPlan
from selfspec.replay import MOST, ready, replay_request, replay_texts
from selfspec.skip_set import SkipSet
from selfspec.target import Target
from selfspec.tree import TokenTree
from tests.families import tiny

PLANS = {
    "whole": LayerPlan,
    "exit": lambda: LayerPlan(last=2),
    "skip": lambda: SkipSet(frozenset({1, 2}), frozenset({2})).plan,
}


def by_hand(target: Target, text: list[int], window: int, plan: LayerPlan) -> torch.Tensor:
    """The window behind a prefix in a cache of its own, token by token."""
    cache = target.architecture.new_cache(1, reserve=len(text), longest=len(text))
    prefix, rest = torch.tensor([text[:-window]]), torch.tensor([text[-window:]])
    target.fill(prefix, cache)
    chain = TokenTree.chain(rest[:, 0], rest[:, 1:])
    return torch.cat([target.run(_cut(chain, n), 1, cache, plan) for n in range(1, window + 1)], 1)


def _cut(chain: TokenTree, nodes: int) -> TokenTree:
    return TokenTree.chain(chain.tokens[:, 0], chain.tokens[:, 1:nodes])


def texts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 64, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_sliding", "gpt2", "bloom"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_window_is_what_a_chain_would_have_been(name: str, plan: str) -> None:
    target = Target(tiny.build(name))
    rows = texts([9, 14, 6])
    found = replay_texts(target, rows, 4)
    with ready([found]):
        ours = found.run(PLANS[plan]())
        for b, row in enumerate(rows):
            alone = by_hand(target, row, 4, PLANS[plan]())
            assert (ours[b] - alone[0]).abs().max() < 1e-4
        whole = [by_hand(target, row, 4, LayerPlan()).argmax(-1)[0].tolist() for row in rows]
    assert found.following.tolist() == whole
    with ready([found]):
        assert found.hits(None).all()


def test_long_prefixes_are_cached_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny.build("llama"))
    rows = texts([30, 11, 24])
    whole = replay_texts(target, rows, 3)
    monkeypatch.setattr("selfspec.replay._COLUMNS", 7)
    pieces = replay_texts(target, rows, 3)
    assert pieces.cache.lengths == whole.cache.lengths == [27, 8, 21]
    with ready([whole]):
        assert torch.allclose(pieces.run(None), whole.run(None), atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_exits_are_what_fewer_layers_say(name: str) -> None:
    """Read by norm and head in one, or, where the head cannot be told (opt), by the model."""
    target = Target(tiny.build(name))
    assert (target.architecture.readout is None) == (name == "opt")
    rows = texts([9, 14])
    found = replay_texts(target, rows, 5)
    with ready([found]):
        together = found.exit_hits([1, 3, 4])
        alone = [found.hits(LayerPlan(last=e)) for e in (1, 3, 4)]
    assert together.shape == (3, 2, 5)
    assert torch.equal(together, torch.stack(alone))
    assert together[2].all()  # all four layers are the model
    assert not together[0].all()


def test_a_short_text_is_refused() -> None:
    with pytest.raises(ValueError, match="text of 4 tokens has none before a window of 4"):
        replay_texts(Target(tiny.build("llama")), [[1, 2, 3, 4, 5], [1, 2, 3, 4]], 4)


class Looking:
    """Replays the request at every step, and keeps what it saw."""

    hidden_taps = ()

    def __init__(self, window: int) -> None:
        self.window, self.seen = window, []

    def draft(self, state: Any, budget: int) -> TokenTree:
        again = state.root[:, None].repeat(1, min(2, budget))
        return TokenTree.chain(state.root, again)

    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        found = replay_request(state, self.window)
        rows = [state.tokens(b).tolist() for b in range(state.batch)]
        if found is None:
            self.seen.append((rows, None, None, None))
            return
        plan = PLANS["skip"]()
        self.seen.append((rows, found.hits(None), found.run(plan), found.following))

    def reset(self) -> None:
        self.seen = []


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen2_sliding"])
def test_a_request_is_replayed_in_its_own_cache(name: str, batch: int, graphs: bool) -> None:
    """What comes out is what a chain would have been, and the text stays what it is."""
    model, prompt = tiny.build(name), tiny.prompts(batch)
    plain = model.generate(**prompt, max_new_tokens=14, do_sample=False)
    looking = Looking(4)
    spec = selfspec.wrap(model, looking, cuda_graphs=graphs)
    assert spec.generate(**prompt, max_new_tokens=14, do_sample=False).tolist() == plain.tolist()
    assert all(hits is None for _, hits, _, _ in looking.seen[:4])
    replayed = [seen for seen in looking.seen if seen[1] is not None]
    assert len(replayed) > 4
    target = spec._target
    with torch.no_grad(), target.ready():
        for rows, hits, logits, following in replayed[::3]:
            assert hits.all()  # the whole model would have said what it said
            for b, row in enumerate(rows):
                assert following[b].tolist() == row[-4:]
                alone = by_hand(target, row[:-1], 4, PLANS["skip"]())
                assert (logits[b] - alone[0]).abs().max() < 1e-4


@pytest.mark.parametrize(("name", "window"), [("bloom", 4), ("llama", MOST + 1), ("llama", 0)])
def test_what_cannot_be_replayed(name: str, window: int) -> None:
    model = tiny.build(name)
    looking = Looking(window)
    selfspec.wrap(model, looking).generate(**tiny.prompts(1), max_new_tokens=50, do_sample=False)
    assert looking.seen
    assert all(hits is None for _, hits, _, _ in looking.seen)


def test_an_error_leaves_the_cache_as_it_was() -> None:
    found = replay_texts(Target(tiny.build("llama")), texts([9]), 4)
    cache = found.cache

    def fail() -> None:
        with cache.rewound(2):
            assert cache.lengths == [3]
            raise RuntimeError("scripted")

    with pytest.raises(RuntimeError, match="scripted"):
        fail()
    assert cache.lengths == [5]
