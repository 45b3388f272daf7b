"""Drafts read off hidden states: how a model's own logits are found, and when they are not."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import selfspec
from tests.families import tiny

# (offset, scale, softcap) of the families that differ from an RMS norm whose weight is a factor;
# offset None is a norm that runs as a module. OPT projects between norm and head.
_MODULE = (None, 1.0, 0.0)
KINDS: dict[str, tuple[float | None, float, float] | None] = {
    **dict.fromkeys((*tiny.TREE, *tiny.CHAIN_ONLY), (0.0, 1.0, 0.0)),
    **dict.fromkeys(("gemma", "gemma3"), (1.0, 1.0, 0.0)),
    **dict.fromkeys(("phi", "gpt2", "gpt_neox", "falcon", "falcon_mqa"), _MODULE),
    **dict.fromkeys(("stablelm", "starcoder2", "bloom", "mpt", "falcon_alibi", "gpt_neo"), _MODULE),
    "gemma2": (1.0, 1.0, 10.0),
    "granite": (0.0, 0.5, 0.0),
    "cohere2": (None, 0.5, 0.0),
    "opt": None,
}

# Of log-probabilities: float32 sums in another order, of logits around 10.
ATOL = 1e-4


def readout(model: Any) -> Any:
    return selfspec.wrap(model, drafter="early-exit")._target.architecture.readout


@torch.no_grad()
def states_and_logits(model: Any, layers: list[nn.Module]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the last layer gives for some tokens, and what the model makes of it."""
    seen = []
    hook = layers[-1].register_forward_hook(lambda m, i, o: seen.append(o))
    try:
        logits = model(**tiny.prompts(2, seed=5, ragged=False), use_cache=False).logits
    finally:
        hook.remove()
    return seen[0][0] if isinstance(seen[0], tuple) else seen[0], logits


@pytest.mark.parametrize("name", KINDS)
def test_agrees_with_the_model(name: str) -> None:
    model = tiny.build(name)
    architecture = selfspec.wrap(model)._target.architecture
    found = architecture.readout
    if KINDS[name] is None:
        assert found is None
        return
    assert (found.offset, found.scale, found.softcap) == KINDS[name]
    hidden, logits = states_and_logits(model, architecture.layers)
    log_probs = logits.log_softmax(-1)
    with torch.no_grad():
        ids, values = found.top(hidden, 5)
        best = found.best(hidden)
    torch.testing.assert_close(values, log_probs.topk(5).values, atol=ATOL, rtol=0)
    torch.testing.assert_close(values, log_probs.gather(-1, ids), atol=ATOL, rtol=0)
    assert best.token.equal(logits.argmax(-1))
    two = log_probs.exp().topk(2).values
    torch.testing.assert_close(best.top1, two[..., 0], atol=ATOL, rtol=0)
    torch.testing.assert_close(best.top2, two[..., 1], atol=ATOL, rtol=0)
    entropy = torch.special.entr(log_probs.exp()).sum(-1)
    torch.testing.assert_close(best.entropy, entropy, atol=10 * ATOL, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere2", "granite", "gpt2"])
def test_found_in_every_precision(name: str, dtype: torch.dtype) -> None:
    found = readout(tiny.build(name, dtype=dtype))
    assert (found.offset, found.scale, found.softcap) == KINDS[name]


def test_more_candidates_than_tokens() -> None:
    found = readout(tiny.build("llama"))
    ids, _ = found.top(torch.randn(3, 64), 100)
    assert ids.sort(-1).values.equal(torch.arange(tiny.VOCAB).expand(3, -1))


class Quantised(nn.Linear):
    """Stands for every linear layer whose weight is not what it computes with."""


def _replaced(model: Any) -> None:
    head = model.lm_head
    model.lm_head = Quantised(head.in_features, head.out_features, bias=False)
    model.lm_head.weight = head.weight


def _hooked(model: Any) -> None:  # as accelerate does
    model.lm_head.forward = model.lm_head.forward


def _altered(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda m, i, o: o * 1.5)


def _norm_hooked(model: Any) -> None:
    model.model.norm.forward = model.model.norm.forward


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_replaced, "the LM head is no plain linear layer"),
        (_hooked, "the LM head is no plain linear layer"),
        (_altered, "log-probabilities differ by"),
    ],
)
def test_otherwise_the_models_own_head(
    change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = copy.deepcopy(tiny.build("llama"))
    change(model)
    with caplog.at_level(logging.DEBUG, logger="selfspec"):
        spec = selfspec.wrap(model, drafter=selfspec.EarlyExitDrafter(3, 3, 0.2, branches=2))
    assert spec._target.architecture.readout is None
    assert any(reason in message for message in caplog.messages)
    prompt = tiny.prompts(2)
    plain = model.generate(**prompt, max_new_tokens=12)
    assert spec.generate(**prompt, max_new_tokens=12).equal(plain)
    assert spec.stats.accepted > 0


def test_a_hooked_norm_runs_as_it_is() -> None:
    model = copy.deepcopy(tiny.build("llama"))
    _norm_hooked(model)
    assert readout(model).offset is None


@pytest.mark.parametrize("change", [_replaced, _hooked, _norm_hooked])
def test_changes_after_wrapping(change: Any) -> None:
    model = copy.deepcopy(tiny.build("llama"))
    spec = selfspec.wrap(model, drafter=selfspec.EarlyExitDrafter(3, 3, 0.0))
    change(model)
    assert not spec._target.architecture.readout.usable
    plain = model.generate(**tiny.prompts(2), max_new_tokens=12)
    assert spec.generate(**tiny.prompts(2), max_new_tokens=12).equal(plain)
    assert spec.stats.accepted > 0


def test_weights_are_read_when_called() -> None:
    model = copy.deepcopy(tiny.build("llama"))
    found = readout(model)
    layers = list(model.model.layers)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    for resize in (False, True):
        if resize:
            model.resize_token_embeddings(tiny.VOCAB + 8, mean_resizing=False)
        hidden, logits = states_and_logits(model, layers)
        with torch.no_grad():
            _, values = found.top(hidden, 64)
        expected = logits.log_softmax(-1).sort(-1, descending=True).values
        torch.testing.assert_close(values, expected[..., :64], atol=1e-3, rtol=0)


# ------------------------------------------------------------------------------- drafting


def recording(drafter: Any) -> list[tuple[Any, list[int], int]]:
    """Trees that `drafter` will make, with the room of every row and the budget."""
    made = []
    original = drafter.draft

    def draft(state: Any, budget: int) -> Any:
        rooms = [state.room(b) for b in range(state.batch)]
        made.append((original(state, budget), rooms, budget))
        return made[-1][0]

    drafter.draft = draft
    return made


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere2", "granite", "gpt2", "bloom"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: selfspec.EarlyExitDrafter(2, 3, 0.0),
        lambda: selfspec.EarlyExitDrafter(3, 4, 0.4),
        lambda: selfspec.LayerSkipDrafter([1], 4, 0.3, branches=3),
    ],
    ids=["exit", "confident-exit", "skip-branches"],
)
def test_drafts_are_those_of_the_models_own_head(name: str, make: Any) -> None:
    rows = []
    for own_head in (False, True):
        drafter = make()
        made = recording(drafter)
        spec = selfspec.wrap(tiny.build(name, torch.float64), drafter=drafter)
        if own_head:
            target = spec._target
            target.architecture = replace(target.architecture, readout=None)
        spec.generate(**tiny.prompts(3, ragged=False), max_new_tokens=16)
        rows.append([tree.paths() for tree, _, _ in made])
    assert rows[0] == rows[1]


@pytest.mark.parametrize("confidence", [0.0, 0.05])
def test_chain_first_then_leaves_by_depth(confidence: float) -> None:
    """Rows of different room: each has the chain and the leaves, or what fits of the chain."""
    drafter = selfspec.EarlyExitDrafter(3, 4, confidence, branches=3)
    made = recording(drafter)
    spec = selfspec.wrap(tiny.build("llama"), drafter=drafter, max_draft_tokens=9)
    spec.generate(**tiny.prompts(3), max_new_tokens=18)
    cut = 0
    for tree, rooms, budget in made:
        length = tree.max_depth + 1
        assert tree.width == min(3 * length - 2, budget + 1)
        leaves = [d for d in range(length - 1) for _ in range(2)][: budget + 1 - length]
        for b, room in enumerate(rooms):
            assert tree.parents[b].tolist() == [-1, *range(length - 1), *leaves]
            whole = room >= length
            assert tree.num_nodes[b] == (tree.width if whole else max(1, room))
            cut += not whole
            children: dict[int, list[int]] = {}
            for node in range(1, tree.width):
                siblings = children.setdefault(int(tree.parents[b, node]), [])
                siblings.append(int(tree.tokens[b, node]))
            assert all(len(set(siblings)) == len(siblings) for siblings in children.values())
        assert tree.max_nodes == int(tree.num_nodes.max())
        tree.validate(tree.tokens[:, 0], tiny.VOCAB, budget)
    assert cut > 0  # otherwise no row was short of room
    depths = {tree.max_depth for tree, _, _ in made}
    assert 4 in depths
    assert min(depths) < 4  # room or confidence ended some drafts early


def test_no_leaves_where_chains_are_verified() -> None:
    drafter = selfspec.EarlyExitDrafter(3, 4, 0.0, branches=3)
    made = recording(drafter)
    selfspec.wrap(tiny.build("bloom"), drafter=drafter).generate(
        **tiny.prompts(1), max_new_tokens=9
    )
    assert made
    assert all(tree.is_chain for tree, _, _ in made)


def test_more_branches_accept_more() -> None:
    model, prompt = tiny.build("llama"), tiny.prompts(3)
    forwards = []
    for branches in (1, 2, 4):
        drafter = selfspec.EarlyExitDrafter(3, 3, 0.0, branches=branches)
        spec = selfspec.wrap(model, drafter=drafter)
        spec.generate(**prompt, max_new_tokens=40)
        forwards.append(spec.stats.forwards)
    assert forwards == sorted(forwards, reverse=True)
    assert forwards[-1] < 0.9 * forwards[0]


class CountReads(TorchDispatchMode):
    """Counts tensors that are read back to the host."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("confidence", [0.0, 0.1])
def test_host_reads(branches: int, confidence: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """None while drafting; one a token where confidence may end the draft."""
    drafter = selfspec.EarlyExitDrafter(3, 4, confidence, branches)
    spec = selfspec.wrap(tiny.build("llama"), drafter=drafter)
    counter, seen = CountReads(), []
    original, run = drafter.draft, spec._target.run

    def draft(state: Any, budget: int) -> Any:
        counter.reads = 0
        with counter:
            tree = original(state, budget)
        seen.append((counter.reads, tree.max_depth))
        return tree

    def uncounted(*args: Any, **kwargs: Any) -> Any:
        reads = counter.reads
        logits = run(*args, **kwargs)
        counter.reads = reads  # attention on a CPU reads for itself
        return logits

    monkeypatch.setattr(drafter, "draft", draft)
    monkeypatch.setattr(spec._target, "run", uncounted)
    spec.generate(**tiny.prompts(3), max_new_tokens=16)
    assert seen
    for reads, depth in seen:
        assert reads == (depth if confidence else 0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: selfspec.EarlyExitDrafter(branches=0), ValueError, "branches=0 must be at least"),
        (lambda: selfspec.LayerSkipDrafter(branches=2.0), TypeError, r"branches=2\.0 must be an"),
        (lambda: selfspec.EarlyExitDrafter(branches=True), TypeError, "branches=True must be an"),
    ],
)
def test_bad_branches(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()
