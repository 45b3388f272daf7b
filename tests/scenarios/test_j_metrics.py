"""What the counters say, and that one request says nothing about the next."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import selfspec
from selfspec import SpecStats
from tests.families import tiny
from tests.oracle import OracleDrafter, RandomTreeDrafter
from tests.parts import by_name

NEW = 24


def consistent(stats: SpecStats, prefills: int) -> None:
    """Every new token is counted once: by a prefill, a plain step or a verify."""
    assert stats.emitted == stats.emitted_by_verifies + stats.plain_tokens + prefills
    assert stats.accepted <= stats.drafted
    assert stats.accepted == sum(stats.accepted_by.values())
    assert stats.accepted == sum(stats.accepted_by_depth.values())
    assert stats.drafted == sum(stats.drafted_by.values())
    for depth, accepted in stats.accepted_by_depth.items():
        assert accepted <= stats.drafted_by_depth[depth]
    assert stats.verifies <= stats.emitted_by_verifies <= stats.verifies + stats.accepted


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("eos", [None, 9])
def test_j10_emitted_tokens_are_the_new_ones(model: Any, eos: int | None, graphs: bool) -> None:
    prompt = tiny.prompts(3)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    new = plain[:, 17:].tolist()
    settings = {} if eos is None else {"eos_token_id": new[0][eos], "pad_token_id": 0}
    drafter = OracleDrafter(plain, 5, wrong_at=(0, 3, 1))
    spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs)
    chunks = list(spec.stream(**prompt, max_new_tokens=NEW, **settings))
    ends = [row.index(new[0][eos]) + 1 if eos and new[0][eos] in row else NEW for row in new]
    assert spec.stats.emitted == sum(ends)
    assert spec.stats.emitted == sum(len(row) for step in chunks for row in step.tokens)
    assert len(chunks) == spec.stats.forwards + 1 < NEW  # tokens are counted, not chunks
    consistent(spec.stats, 3)


@pytest.mark.parametrize("graphs", [False, True])
def test_j10_what_follows_the_first_rejection_is_not_accepted(model: Any, graphs: bool) -> None:
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    drafter = OracleDrafter(plain, 3, wrong_at=(2,))  # right, wrong, right
    spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=graphs)
    _, *steps = spec.stream(**prompt, max_new_tokens=NEW)
    whole = [step for step in steps if step.num_drafted == [3]]
    assert len(whole) > 8
    for step in whole:
        assert step.num_accepted == [1]
        assert len(step.tokens[0]) == 2
    assert spec.stats.acceptance_by_depth == {1: 1.0, 2: 0.0}
    consistent(spec.stats, 1)


@pytest.mark.parametrize("graphs", [False, True])
def test_j10_an_end_inside_a_block_emits_what_precedes_it(model: Any, graphs: bool) -> None:
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    new = plain[0, 17:].tolist()
    # The block after the prefill's token is new[1:7]; its index 2 is new[3].
    assert new[3] not in new[:3]
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 6), cuda_graphs=graphs)
    steps = list(spec.stream(**prompt, max_new_tokens=NEW, eos_token_id=new[3], pad_token_id=0))
    assert [step.tokens for step in steps] == [[new[:1]], [new[1:4]]]
    assert (spec.stats.emitted, spec.stats.emitted_by_verifies) == (4, 3)
    assert (spec.stats.drafted, spec.stats.accepted) == (6, 3)


def test_j10_random_drafts_are_not_all_accepted(model: Any) -> None:
    prompt = tiny.prompts(3)
    spec = selfspec.wrap(model, drafter=RandomTreeDrafter())
    spec.generate(**prompt, max_new_tokens=NEW)
    assert 0 <= spec.stats.acceptance_rate < 0.5
    assert spec.stats.mean_accepted_length < 2
    consistent(spec.stats, 3)


def test_j10_counters_while_requests_end(model: Any) -> None:
    """Whoever reads counters sees whole requests; sums lose nothing."""
    one = SpecStats(requests=1, emitted=7, verifies=3, emitted_by_verifies=6, plain_tokens=1)
    one.accepted_by_depth.update({1: 2, 2: 1})
    total, torn, stop = SpecStats(), [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            values = total.to_dict()
            torn.append(values["emitted"] != 7 * values["requests"])
            torn.append(values["accepted_by_depth"].get(1, 0) != 2 * values["requests"])
            assert str(total)

    def add() -> None:
        for _ in range(400):
            total.add(one)

    pause = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        reader = threading.Thread(target=read)
        writers = [threading.Thread(target=add) for _ in range(4)]
        for thread in (reader, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        reader.join()
    finally:
        sys.setswitchinterval(pause)
    assert torn
    assert not any(torn)
    assert total.to_dict()["emitted"] == 7 * total.requests == 7 * 1600
    assert total.accepted_by_depth == {1: 3200, 2: 1600}


def test_j10_counters_can_be_kept_for_later(model: Any) -> None:
    spec = selfspec.wrap(model, drafter=selfspec.NGramDrafter(1, min_prob=0.0))
    spec.generate(**tiny.prompts(2), max_new_tokens=NEW)
    expected = spec.stats.to_dict()
    copies = [
        copy.copy(spec.stats),
        copy.deepcopy(spec.stats),
        pickle.loads(pickle.dumps(spec.stats)),
    ]
    spec.generate(**tiny.prompts(2), max_new_tokens=NEW)
    assert spec.stats.requests == 2
    for kept in copies:
        assert kept.to_dict() == expected
        kept.add(kept)
        assert kept.requests == 2
        assert kept.accepted_by_depth[99] == 0  # still a Counter


# ------------------------------------------------------------------------ from call to call

DRAFTERS: dict[str, Callable[[], Any]] = {
    "ngram": lambda: selfspec.NGramDrafter(1, max_candidates=2, min_prob=0.0),
    "early-exit": lambda: selfspec.EarlyExitDrafter(2, 4, 0.3),
    "layer-skip": lambda: selfspec.LayerSkipDrafter([1, 2], 4, 0.3, branches=2),
    "drawn": lambda: selfspec.EarlyExitDrafter(3, 3, 0.0, do_sample=True),
    "merged": lambda: [selfspec.NGramDrafter(1, min_prob=0.0), selfspec.EarlyExitDrafter(2)],
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_j4_the_same_call_twice_counts_the_same(model: Any, name: str) -> None:
    spec = selfspec.wrap(model, drafter=DRAFTERS[name](), adaptive=False)
    counts = []
    for ids in (0, 1, 0):  # another one in between
        spec.stats.reset()
        torch.manual_seed(0)
        spec.generate(
            **tiny.prompts(2, seed=ids), max_new_tokens=NEW, do_sample=name == "drawn", top_k=0
        )
        values = spec.stats.to_dict()
        counts.append({k: v for k, v in values.items() if "seconds" not in k})
    assert counts[0] == counts[2]
    assert counts[0]["drafted"] > 0
    assert counts[0] != counts[1]


@pytest.mark.parametrize("name", ["auto", "early-exit"])
def test_j4_configs_stay_as_they_were(model: Any, name: str) -> None:
    own = GenerationConfig(max_new_tokens=9, repetition_penalty=1.2, pad_token_id=0)
    kept = own.to_dict(), model.generation_config.to_dict(), model.config.to_dict()
    prompt = tiny.prompts(2)
    spec = selfspec.wrap(model, drafter=name)
    plain = model.generate(**prompt, generation_config=own)
    for _ in range(2):
        text = spec.generate(**prompt, generation_config=own)
        assert text.tolist() == plain.tolist()
        # Arguments beside it are heard, and forgotten.
        assert spec.generate(**prompt, generation_config=own, max_new_tokens=3).shape[1] == 20
    assert kept == (own.to_dict(), model.generation_config.to_dict(), model.config.to_dict())


# ------------------------------------------------------------------------ acceptance per method


@pytest.mark.parametrize("batch", [1, 3])
def test_j12_the_exit_changes_acceptance_and_no_text(model: Any, batch: int) -> None:
    prompt = tiny.prompts(batch)
    plain = model.generate(**prompt, max_new_tokens=NEW).tolist()
    rates = []
    for layers in (1, 2, 3, 4):
        drafter = selfspec.EarlyExitDrafter(layers, 3, 0.0)
        spec = selfspec.wrap(model, drafter=drafter)
        assert spec.generate(**prompt, max_new_tokens=NEW).tolist() == plain
        rates.append(spec.stats.acceptance_rate)
        assert f"acceptance {rates[-1]:.2f}" in str(spec.stats)
        assert f"tau {spec.stats.mean_accepted_length:.2f}" in str(spec.stats)
    assert rates[0] < 0.5 < rates[3] == 1.0
    # What users were puzzled by is said where the option is.
    assert "trained for it" in (selfspec.EarlyExitDrafter.__doc__ or "")


@cache
def cycling() -> Any:
    """A model whose weights are as small as an untrained one's: it soon repeats itself."""
    sizes = {"intermediate_size": 64, "num_key_value_heads": 4}
    return tiny.llama(**sizes, initializer_range=0.02)


SMOKE: dict[str, Any] = {
    **{name: by_name(name) for name in ("auto", "ngram", "early-exit", "layer-skip")},
    **{f"{name}, tuned": make() for name, make in DRAFTERS.items()},
}


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", SMOKE)
def test_j18_every_drafter_is_accepted_somewhere(model: Any, name: str, graphs: bool) -> None:
    if name.startswith(("auto", "ngram")):  # there has to be something to copy
        model = cycling()
    ids = torch.randint(1, 64, (1, 8), generator=torch.Generator().manual_seed(3))
    plain = model.generate(ids, max_new_tokens=40)
    switch = {"off_switch": False} if name == "auto" else {}
    spec = selfspec.wrap(model, drafter=SMOKE[name], cuda_graphs=graphs, **switch)
    assert spec.generate(ids, max_new_tokens=40).tolist() == plain.tolist()
    assert spec.stats.fallbacks == 0
    assert spec.stats.accepted > 0
    assert spec.stats.forwards < 39  # more than one token a step
