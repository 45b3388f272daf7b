"""Which forwards run, how wide, which layers see which tokens: exact, so they find slowdowns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import selfspec
from tests.families import tiny
from tests.follow import only_watched
from tests.oracle import OracleDrafter


@contextmanager
def layer_rows(spec: Any) -> Iterator[list[list[int]]]:
    """Width of every call that each layer's MLP really computes: a skipped one gives zeros."""
    layers = spec.model.model.layers
    seen: list[list[int]] = [[] for _ in layers]

    def count(widths: list[int], output: torch.Tensor) -> None:
        if output.any():
            widths.append(output.shape[1])

    hooks = [
        layer.mlp.register_forward_hook(lambda m, i, o, s=s: count(s, o))
        for layer, s in zip(layers, seen, strict=True)
    ]
    only_watched(spec)
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama")


def test_widths_of_an_oracle(model: Any) -> None:
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=20)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 5, wrong_at=(0, 3)))
    with layer_rows(spec) as seen:
        spec.generate(**prompt, max_new_tokens=20)
    # 17 prompt tokens; blocks of 6 that give 6 and 3 in turn, capped by the room at the end.
    assert seen == [[17, 6, 6, 6, 4, 1]] * 4


def test_no_drafts_means_one_token_a_forward(model: Any) -> None:
    spec = selfspec.wrap(model, drafter="none")
    with layer_rows(spec) as seen:
        spec.generate(**tiny.prompts(1), max_new_tokens=9)
    assert seen == [[17] + [1] * 8] * 4


@pytest.mark.parametrize(
    ("drafter", "shared"),
    [
        (selfspec.EarlyExitDrafter(2, 3, 0.0), 2),
        (selfspec.EarlyExitDrafter(4, 3, 0.0), 4),
        (selfspec.LayerSkipDrafter([2], 3, 0.0), 2),
    ],
)
def test_no_layer_runs_twice_for_a_token(model: Any, drafter: Any, shared: int) -> None:
    spec = selfspec.wrap(model, drafter=drafter)
    with layer_rows(spec) as seen:
        spec.generate(**tiny.prompts(1), max_new_tokens=25)
    forwards = spec.stats.forwards
    nodes = forwards + spec.stats.drafted  # every verify has a root, every draft token a node
    for layer in range(shared):
        assert sum(seen[layer]) == 17 + nodes
        assert set(seen[layer][1:]) <= {1}  # in the draft, one at a time
    for layer in range(shared, 4):
        verified = [width for width in seen[layer][1:] if width > 1]
        assert sum(verified) + (forwards - len(verified)) >= nodes
    if shared == 4:
        assert spec.stats.acceptance_rate == 1


@pytest.mark.parametrize(
    ("drafter", "shared"),
    [
        (selfspec.EarlyExitDrafter(2, 3, 0.0, branches=3), 2),
        (selfspec.EarlyExitDrafter(4, 3, 0.0, branches=3), 4),
        (selfspec.LayerSkipDrafter([2], 3, 0.0, branches=3), 2),
    ],
)
def test_leaves_run_with_the_last_token_of_the_chain(model: Any, drafter: Any, shared: int) -> None:
    spec = selfspec.wrap(model, drafter=drafter)
    with layer_rows(spec) as seen:
        spec.generate(**tiny.prompts(1), max_new_tokens=25)
    nodes = spec.stats.forwards + spec.stats.drafted
    for layer in range(shared):
        assert sum(seen[layer]) == 17 + nodes
        assert seen[layer][1:5] == [1, 1, 1, 7]  # a chain of 3, its last token with 6 leaves
    if shared < 4:
        assert 10 in seen[3]


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("confidence", [0.0, 0.3])
def test_the_head_runs_in_verification_only(model: Any, branches: int, confidence: float) -> None:
    drafter = selfspec.EarlyExitDrafter(2, 3, confidence, branches)
    spec = selfspec.wrap(model, drafter=drafter)
    widths = []
    hook = model.lm_head.register_forward_hook(lambda m, i, o: widths.append(o.shape[1]))
    only_watched(spec)
    try:
        spec.generate(**tiny.prompts(1), max_new_tokens=25)
    finally:
        hook.remove()
    stats = spec.stats
    assert stats.drafted > 0
    assert sum(widths) == 1 + stats.forwards + stats.drafted  # the prefill's one, and all nodes


def test_skipping_nothing_before_the_first_layer_shares_nothing(model: Any) -> None:
    spec = selfspec.wrap(model, drafter=selfspec.LayerSkipDrafter([0], 3, 0.0))
    with layer_rows(spec) as seen:
        spec.generate(**tiny.prompts(1), max_new_tokens=12)
    assert sum(seen[0]) == 17 + spec.stats.forwards + spec.stats.drafted


@pytest.mark.parametrize(
    "skip", [selfspec.SkipSet(attention=frozenset({1, 2})), selfspec.SkipSet(mlp=frozenset({1}))]
)
def test_half_layers(model: Any, skip: selfspec.SkipSet) -> None:
    prompt = tiny.prompts(3)
    plain = model.generate(**prompt, max_new_tokens=25)
    spec = selfspec.wrap(model, drafter=selfspec.LayerSkipDrafter(skip, 3, 0.0))
    with layer_rows(spec) as seen:
        assert spec.generate(**prompt, max_new_tokens=25).equal(plain)
    rows = [sum(widths) for widths in seen]
    assert (rows[1] < rows[3]) == (1 in skip.mlp)


def test_prefill_asks_for_one_row_of_logits(model: Any) -> None:
    widths = []
    hook = model.lm_head.register_forward_hook(lambda m, i, o: widths.append(o.shape[1]))
    try:
        selfspec.wrap(model, drafter="none").generate(**tiny.prompts(2), max_new_tokens=4)
    finally:
        hook.remove()
    assert widths[-4:] == [1, 1, 1, 1]


def test_hidden_taps_are_what_the_layers_see(model: Any) -> None:
    class Tapping(OracleDrafter):
        hidden_taps = (0, 2, 4)

        def observe(self, state: Any, output: Any, acceptance: Any) -> None:
            outputs.append((state.tokens(0).copy(), output, acceptance))

    outputs: list[Any] = []
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=12)
    spec = selfspec.wrap(model, drafter=Tapping(plain, 3))
    assert spec.generate(**prompt, max_new_tokens=12).equal(plain)
    with torch.no_grad():
        truth = model(input_ids=plain, output_hidden_states=True).hidden_states
    at = 0
    for tokens, output, acceptance in outputs:
        assert set(output.hidden) == {0, 2, 4}
        width = output.hidden[0].shape[1]
        count = width if at == 0 else int(acceptance.num_accepted) + 1
        for layer in (0, 2):
            torch.testing.assert_close(
                output.hidden[layer][:, :count],
                truth[layer][:, at : at + count],
                atol=1e-3,  # float32 states of size 10 in blocks of other widths
                rtol=1e-3,
            )
        at += count if at else 17
        assert len(tokens) == at + 1 or len(tokens) == 29
