"""TreeCache: what is committed is what a fresh forward would have cached."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

import selfspec
from selfspec.cache import AlignedCache, TreeCache
from selfspec.user_cache import continuable
from tests.families import tiny
from tests.oracle import OracleDrafter, RandomTreeDrafter


class Checking(RandomTreeDrafter):
    """Compares the whole cache with a fresh forward after every step."""

    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        self.checks = getattr(self, "checks", 0) + 1
        model = state.target.model
        alibi = isinstance(state.cache, AlignedCache)
        for b in range(state.batch):
            tokens = torch.from_numpy(state.tokens(b)[:-1].copy())[None]
            assert state.cache.lengths[b] == tokens.shape[1]
            with torch.no_grad():
                fresh = model(input_ids=tokens, use_cache=True)
            truth = getattr(fresh, "cache", None) or fresh.past_key_values
            for mine, theirs in zip(state.cache.layers, truth.layers, strict=True):
                for kept, full in zip(
                    state.cache.row(mine, b), (theirs.keys, theirs.values), strict=True
                ):
                    # The ALiBi families take their softmax in float32, whatever the dtype.
                    assert torch.allclose(kept, full[0], atol=1e-4 if alibi else 1e-8)


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v3", "falcon", "bloom", "mpt"])
def test_committed_keys_and_values(name: str) -> None:
    model = tiny.build(name, dtype=torch.float64)
    ragged = name not in tiny.UNPADDED_FLOAT64
    prompt = tiny.prompts(3, ragged=ragged)
    plain = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    if name in tiny.CHAIN_ONLY:

        class Chains(OracleDrafter):
            observe = Checking.observe

        drafter: Any = Chains(plain, 4, wrong_at=(0, 3, 1))
    else:
        drafter = Checking()
    spec = selfspec.wrap(model, drafter=drafter)
    assert spec.generate(**prompt, max_new_tokens=20, do_sample=False).equal(plain)
    assert drafter.checks > 5


def test_growth_is_geometric_and_bounded() -> None:
    cache = TreeCache(1, 1, reserve=10, longest=90, extra=10)
    capacities = []
    for slots in range(1, 101):
        cache.reserve(slots)
        capacities.append(cache.capacity)
    assert sorted(set(capacities)) == [10, 20, 40, 80, 100]
    # A long one is never much larger than what it holds, and does not grow often either.
    cache = TreeCache(1, 1, reserve=4000, longest=90_000, extra=33)
    grown = {}
    for slots in range(4000, 90_034):
        cache.reserve(slots)
        grown.setdefault(cache.capacity, slots)
    assert all(capacity <= max(1.13 * slots, slots + 256) for capacity, slots in grown.items())
    assert len(grown) < 30
    assert max(grown) == 90_033


def test_growing_keeps_what_was_written() -> None:
    cache = TreeCache(1, 2, reserve=4, longest=64)
    keys = torch.randn(2, 3, 4, 8)
    cache.update(keys, keys + 1, 0)
    more = torch.randn(2, 3, 5, 8)
    got, values = cache.update(more, more + 1, 0)
    assert torch.equal(got, torch.cat([keys, more], 2))
    assert torch.equal(values, got + 1)


def test_padding_is_squeezed_out_and_put_back() -> None:
    cache = TreeCache(1, 2, reserve=8, longest=64)
    keys = torch.randn(2, 3, 5, 8)
    cache.update(keys, keys, 0)
    cache.settle([0, 2])
    assert cache.lengths == [5, 3]
    assert torch.equal(cache.row(cache.layers[0], 1)[0], keys[1, :, 2:])
    pair = cache.padded(cache.layers[0], 5)
    keys[1, :, :2] = 0
    assert torch.equal(pair[0], keys)


def test_aligned_rows_end_where_the_longest_one_does() -> None:
    cache = AlignedCache(1, 2, reserve=8, longest=64)
    keys = torch.randn(2, 1, 3, 1)
    cache.update(keys, keys, 0)
    cache.settle([0, 1])
    kept = [keys[0, 0, :, 0].tolist(), keys[1, 0, 1:, 0].tolist()]
    for counts in ([4, 1], [1, 4], [2, 2], [0, 3], [1, 0]):
        cache.open(0, 4)
        new = torch.randn(2, 1, 4, 1)
        cache.update(new, new, 0)
        cache.commit(torch.zeros(2, 4, dtype=torch.int32), counts, moved=False)
        for b, count in enumerate(counts):
            kept[b] += new[b, 0, :count, 0].tolist()
            assert cache.row(cache.layers[0], b)[0][0, :, 0].tolist() == kept[b]
        assert cache.width == max(map(len, kept))
        assert cache.mask(0, torch.device("cpu")).sum(1).tolist() == [len(row) for row in kept]


def test_continuable() -> None:
    from transformers import DynamicCache, StaticCache

    config = tiny.build("llama").config
    assert continuable(DynamicCache())
    assert continuable(DynamicCache(config=config))
    assert not continuable(DynamicCache(config=tiny.build("mistral").config))
    assert not continuable(StaticCache(config, max_cache_len=8))


def test_a_users_cache_is_lent_not_held_twice() -> None:
    """Its layers are views of ours, also after growth; with padding, which moves, they are not."""
    from transformers import DynamicCache

    states = torch.randn(1, 3, 6, 8)
    for pads, kind in (([0], TreeCache), ([2], TreeCache), ([0], AlignedCache)):
        theirs = DynamicCache()
        theirs.update(states.clone(), states + 1, 0)
        mine = kind(1, 1, reserve=8, longest=64)
        mine.load(theirs, pads)
        layer, lent = theirs.layers[0], mine.keeps_slots and not any(pads)
        assert (layer.keys.data_ptr() == mine.layers[0].keys.data_ptr()) == lent
        mine.settle(pads)
        old = weakref.ref(mine.layers[0].keys.untyped_storage())
        for _ in range(4):
            mine.open(0, 5)
            mine.update(torch.randn(1, 3, 5, 8), torch.randn(1, 3, 5, 8), 0)
            mine.commit(torch.arange(5, dtype=torch.int32)[None], [5], moved=False)
            assert layer.keys.equal(states)
            assert layer.values.equal(states + 1)
        assert mine.capacity > 8
        assert old() is None
        assert (layer.keys.data_ptr() == mine.layers[0].keys.data_ptr()) == lent
