"""Area D: caches of every origin, rolling back, and the last position a model has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, StaticCache

import selfspec
from selfspec.cache import TreeCache
from selfspec.target import Target
from tests.families import tiny
from tests.generate.common import NEW, raised, snapshot
from tests.oracle import OracleDrafter, RandomTreeDrafter


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama")


def cache_of(output: Any) -> Any:
    """The cache in what `generate` or a model returned, under either of its names."""
    return getattr(output, "cache", None) or output.past_key_values


def prefilled(model: Any, prompt: dict[str, torch.Tensor], length: int) -> DynamicCache:
    """A user's cache of the first `length` columns of a prompt, by a forward of the user's."""
    cache, mask = DynamicCache(), prompt["attention_mask"][:, :length]
    with torch.no_grad():
        model(
            input_ids=prompt["input_ids"][:, :length],
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
        )
    return cache


def keys(cache: Any) -> list[torch.Tensor]:
    return [layer.keys for layer in cache.layers]


# ------------------------------------------------------------------------- kinds of caches


@pytest.mark.parametrize(("name", "batch"), [("llama", 3), ("mistral", 1)])
def test_d1_static_caches_go_to_the_stock_loop(
    name: str, batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = tiny.build(name), tiny.prompts(batch)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    # Transformers itself leaves a mark on a model that has had a static cache.
    model.generate(**prompt, max_new_tokens=2, cache_implementation="static")
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain))
    before = snapshot(model)
    for kwargs in (
        {"cache_implementation": "static"},
        {"past_key_values": StaticCache(model.config, max_cache_len=64)},
    ):
        assert spec.generate(**prompt, max_new_tokens=NEW, **kwargs).equal(plain)
    assert spec.stats.fallbacks == 2
    assert caplog.text.count("a StaticCache cannot be continued with trees") == 1
    assert snapshot(model) == before
    # ... and the next call drafts again
    assert spec.generate(**prompt, max_new_tokens=NEW).equal(plain)
    assert spec.stats.fallbacks == 2
    assert spec.stats.accepted > 0


def test_d4_without_a_cache(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    mine: Any = copy.deepcopy(model)
    for place in ("argument", "generation config", "model config"):
        kwargs = {}
        if place == "argument":
            kwargs = {"use_cache": False}
        elif place == "generation config":
            mine.generation_config.use_cache = False
        else:
            mine.generation_config.use_cache = True
            mine.config.use_cache = False
        spec = selfspec.wrap(mine, drafter=OracleDrafter(plain))
        before, config = snapshot(mine), copy.deepcopy(mine.config.to_dict())
        assert spec.generate(**prompt, max_new_tokens=NEW, **kwargs).equal(plain)
        assert snapshot(mine) == before
        assert mine.config.to_dict() == config
        if place == "model config":  # `generate` asks its own config alone
            assert spec.stats.fallbacks == 0
            assert spec.stats.accepted > 0
        else:
            assert spec.stats.fallbacks == 1
            assert "use_cache is False" in caplog.text
        caplog.clear()


def test_d13_two_settings_for_one_cache(model: Any) -> None:
    prompt = tiny.prompts(1)
    spec = selfspec.wrap(model)
    mine: Any = copy.deepcopy(model)
    mine.generation_config.cache_implementation = "static"
    kwargs = {"max_new_tokens": 4, "cache_implementation": "static"}
    messages = [
        raised(lambda g=g: g(**prompt, past_key_values=DynamicCache(), **kwargs))
        for g in (model.generate, spec.generate)
    ]
    kwargs = {"max_new_tokens": 4}
    messages += [
        raised(lambda g=g: g(**prompt, past_key_values=DynamicCache(), **kwargs))
        for g in (mine.generate, selfspec.wrap(mine).generate)
    ]
    assert len(set(messages)) == 1
    assert "cache_implementation" in messages[0]


# ------------------------------------------------------------------------- a user's cache


@pytest.mark.parametrize(("batch", "graphs"), [(1, False), (3, False), (3, True)])
def test_d3_a_prefix_cached_by_the_user(model: Any, batch: int, graphs: bool) -> None:
    prompt = tiny.prompts(batch)
    theirs = prefilled(model, prompt, 12)
    plain = model.generate(**prompt, past_key_values=theirs, max_new_tokens=NEW)
    assert plain.equal(model.generate(**prompt, max_new_tokens=NEW))
    for drafter in (
        OracleDrafter(plain, 5, (0, 3), branches=1),
        selfspec.EarlyExitDrafter(4, 5, 0.0),
    ):
        spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs)
        mine = prefilled(model, prompt, 12)
        assert spec.generate(**prompt, past_key_values=mine, max_new_tokens=NEW).equal(plain)
        assert spec.stats.fallbacks == 0
        assert spec.stats.accepted > 0
        # The cache is where transformers leaves it: all but the last token.
        assert mine.get_seq_length() == theirs.get_seq_length() == plain.shape[1] - 1
        width = tuple(theirs.layers[0].keys.shape)
        real = prompt["attention_mask"].bool()[:, None, :, None]
        real = torch.nn.functional.pad(real, (0, 0, 0, NEW - 1), value=True)
        for ours, stock in zip(keys(mine), keys(theirs), strict=True):
            assert tuple(ours.shape) == width
            assert torch.allclose(ours * real, stock * real, atol=1e-4)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_d3_a_users_cache_survives_an_exception(model: Any, batch: int, graphs: bool) -> None:
    prompt = tiny.prompts(batch)
    plain = model.generate(**prompt, max_new_tokens=NEW)

    class Failing(OracleDrafter):
        fails = True

        def draft(self, state: Any, budget: int) -> selfspec.TokenTree:
            if self.fails and self.steps == 2:
                raise RuntimeError("the drafter fails")
            return super().draft(state, budget)

    cache = prefilled(model, prompt, 12)
    before = [k.clone() for k in keys(cache)]
    drafter = Failing(plain, 5)
    spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs)
    with pytest.raises(RuntimeError, match="the drafter fails"):
        spec.generate(**prompt, past_key_values=cache, max_new_tokens=NEW)
    drafter.fails = False
    spec.generate(**tiny.prompts(batch, seed=3), max_new_tokens=NEW)  # uses what it used before
    for kept, old in zip(keys(cache), before, strict=True):
        assert kept.equal(old)
    assert spec.generate(**prompt, past_key_values=cache, max_new_tokens=NEW).equal(plain)


@pytest.mark.parametrize("batch", [1, 3])
def test_d3_only_the_tokens_that_the_cache_lacks(model: Any, batch: int) -> None:
    prompt = tiny.prompts(batch)
    outs = []
    for generate in (
        model.generate,
        selfspec.wrap(model, drafter=selfspec.NGramDrafter(1, min_prob=0.0)).generate,
        selfspec.wrap(model, drafter=RandomTreeDrafter(), cuda_graphs=True).generate,
    ):
        outs.append(
            generate(
                input_ids=prompt["input_ids"][:, -5:],
                attention_mask=prompt["attention_mask"],
                past_key_values=prefilled(model, prompt, 12),
                max_new_tokens=NEW,
            )
        )
    assert outs[0].shape[1] == 5 + NEW
    assert outs[1].equal(outs[0])
    assert outs[2].equal(outs[0])


@pytest.mark.parametrize(
    ("name", "batch"), [("llama", 3), ("gpt2", 1), ("gemma3", 3), ("mistral", 1), ("bloom", 3)]
)
def test_d12_returned_caches_serve_plain_and_speculative_calls(name: str, batch: int) -> None:
    model, prompt = tiny.build(name), tiny.prompts(batch)
    whole = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=OracleDrafter(whole, 5, (0, 2)))
    mask = torch.nn.functional.pad(prompt["attention_mask"], (0, 9), value=1)
    for first, second in (
        (model.generate, spec.generate),
        (spec.generate, model.generate),
        (spec.generate, spec.generate),
    ):
        half = first(**prompt, max_new_tokens=9, return_dict_in_generate=True)
        cache = cache_of(half)
        assert cache.get_seq_length() == half.sequences.shape[1] - 1
        rest = second(
            input_ids=half.sequences,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=NEW - 9,
        )
        assert rest.equal(whole)
        assert cache.get_seq_length() == whole.shape[1] - 1
    assert spec.stats.accepted > 0


# ------------------------------------------------------------------------- rolling back


@pytest.mark.parametrize("prompt", [[5], [5, 9, 33]])
@pytest.mark.parametrize("keep", [1, 2, 4])
def test_d15_rolling_back_all_some_or_nothing(keep: int, prompt: list[int]) -> None:
    """`keep` nodes of a block of four stay; a prompt of one token with all drafts refused, too."""
    model = tiny.build("llama", dtype=torch.float64)
    target = Target(model)
    cache = TreeCache(4, 1, reserve=8, longest=64)
    tree = selfspec.TokenTree.chain(7, [11, 2, 8])
    with torch.no_grad(), target.ready():
        target.fill(torch.tensor([prompt]), cache)
        target.verify(tree, cache)
        cache.commit(torch.arange(4, dtype=torch.int32)[None], [keep], moved=False)
        assert cache.lengths == [len(prompt) + keep]
        root = selfspec.TokenTree.root_only(torch.tensor([13]))
        logits = target.verify(root, cache).logits[0, -1]
        truth = model(torch.tensor([[*prompt, *[7, 11, 2, 8][:keep], 13]])).logits[0, -1]
    torch.testing.assert_close(logits, truth)


@pytest.mark.parametrize("ids", [[[5]], [[3, 9]], [[7] * 48]])
def test_d15_a_prompt_of_one_token_and_every_draft_refused(
    model: Any, ids: list[list[int]]
) -> None:
    prompt = {"input_ids": torch.tensor(ids)}
    plain = model.generate(**prompt, max_new_tokens=NEW)
    for wrong in ((1,), (0,), (1, 0, 2)):
        spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 4, wrong_at=wrong))
        assert spec.generate(**prompt, max_new_tokens=NEW).equal(plain)
        assert spec.stats.drafted > 0
        assert (spec.stats.accepted == 0) == (wrong == (1,))
    for drafter in (selfspec.NGramDrafter(1, min_prob=0.0), selfspec.EarlyExitDrafter(1)):
        spec = selfspec.wrap(model, drafter=drafter)
        assert spec.generate(**prompt, max_new_tokens=NEW).equal(plain)


def test_d15_a_returned_cache_can_be_cropped_by_its_owner(model: Any) -> None:
    prompt = tiny.prompts(1)
    whole = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=OracleDrafter(whole, 5))
    out = spec.generate(**prompt, max_new_tokens=NEW, return_dict_in_generate=True)
    cache = cache_of(out)
    cache.crop(-9)
    assert cache.get_seq_length() == whole.shape[1] - 1 - 9
    for generate in (spec.generate, model.generate):
        again = generate(
            input_ids=whole[:, :-9], past_key_values=copy.deepcopy(cache), max_new_tokens=9
        )
        assert again.equal(whole)


class Lengths(selfspec.EarlyExitDrafter):
    """Drafts with the whole model, and looks whether the cache is exactly one token behind."""

    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        for b in range(state.batch):
            assert state.cache.lengths[b] == len(state.tokens(b)) - 1
        self.looks = getattr(self, "looks", 0) + 1


@pytest.mark.parametrize(
    ("drafter", "batch", "graphs"),
    [
        (Lengths(4, 15, 0.0), 1, False),
        (Lengths(4, 15, 0.0), 3, True),
        (selfspec.LayerSkipDrafter([], 15, 0.0), 3, False),
    ],
)
def test_d6_acceptance_does_not_decay(model: Any, drafter: Any, batch: int, graphs: bool) -> None:
    """A draft that is the model itself is accepted whole, at the end as at the beginning."""
    prompt, new = tiny.prompts(batch), 241
    spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs)
    steps = list(spec.stream(**prompt, max_new_tokens=new))
    # The prompt's token, then fifteen drafts and one more a step.
    assert [[len(tokens) for tokens in step.tokens] for step in steps] == [
        [1] * batch,
        *[[16] * batch] * 15,
    ]
    assert spec.stats.acceptance_rate == 1
    assert getattr(drafter, "looks", 16) == 16


# ------------------------------------------------------------------------- the last position


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [32, 33])
def test_d7_up_to_the_last_learned_position(length: int, batch: int, graphs: bool) -> None:
    """And one token more: the last one is never read.

    Rows do not come there together, and those that are there wait for the others.
    """
    config = GPT2Config(
        n_positions=32,
        n_embd=64,
        n_layer=4,
        n_head=4,
        vocab_size=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    prompt = tiny.prompts(batch)
    plain = model.generate(**prompt, max_length=length)
    assert plain.shape[1] == length
    for drafter in (
        OracleDrafter(plain, 8, wrong_at=(0, 2, 7)),
        selfspec.EarlyExitDrafter(4, 8, 0.0),
        selfspec.LayerSkipDrafter([2], 6, 0.0),
    ):
        spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs)
        assert spec.generate(**prompt, max_length=length).equal(plain)
        assert spec.stats.accepted > 0 or isinstance(drafter, selfspec.LayerSkipDrafter)
    with pytest.raises(IndexError):
        model.generate(**prompt, max_length=34)
    with pytest.raises(IndexError):
        spec.generate(**prompt, max_length=34)
