"""Area A, trees: positions, masks and caches of branching drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selfspec
from selfspec import TokenTree
from tests.families import tiny
from tests.follow import only_watched
from tests.oracle import OracleDrafter

# As choices of branches: [0], [1], [1, 0], [1, 1], both of depth 2 under the second sibling.
PARENTS = [-1, 0, 0, 2, 2]
NEW = 24


class Looking:
    """Drafts trees of one topology, with tokens that nobody would, and keeps what came of them."""

    hidden_taps = ()

    def __init__(self, parents: list[int]) -> None:
        self.parents = parents

    def draft(self, state: Any, budget: int) -> TokenTree:
        self.tree = TokenTree.root_only(state.root)
        if budget >= len(self.parents):
            more = (state.root[:, None] * 7 + torch.arange(1, len(self.parents)) * 5 + 3) % 64
            tokens = torch.cat([state.root[:, None], more], 1)
            self.tree = TokenTree.from_topology(tokens, self.parents)
            self.texts = [state.tokens(b).tolist() for b in range(state.batch)]
        return self.tree

    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        if self.tree is not None and self.tree.width > 1:
            self.seen.append((self.texts, self.tree, output.logits.clone()))

    def reset(self) -> None:
        self.tree: TokenTree | None = None
        self.seen: list[Any] = []


def path(tree: TokenTree, b: int, node: int) -> list[int]:
    """Tokens from below the root down to a node."""
    tokens: list[int] = []
    while node:
        tokens.insert(0, int(tree.tokens[b, node]))
        node = int(tree.parents[b, node])
    return tokens


def assert_logits_of_paths(model: Any, seen: list[Any], nodes: int) -> None:
    """Of every node those after its own path; and siblings' children are told apart."""
    for texts, tree, logits in seen:
        for b, text in enumerate(texts):
            for node in range(nodes):
                with torch.no_grad():
                    alone = model(torch.tensor([[*text, *path(tree, b, node)]])).logits[0, -1]
                scale = float(alone.abs().max())
                gap = float((logits[b, node] - alone).abs().max())
                assert gap < 1e-5 * max(scale, 1), (b, node)


# Grouped heads, windows of both kinds, position tables, sinks, latent attention, parallel layers.
LAYOUTS = (
    "llama_gqa3",
    "qwen2_sliding",
    "gemma3",
    "gpt2",
    "opt",
    "falcon",
    "gpt_oss",
    "cohere2",
    "deepseek_v3",
)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a3_depth_2_under_the_second_sibling(name: str) -> None:
    model, prompt = tiny.build(name, dtype=torch.float64), tiny.prompts(2, ragged=False)
    drafter = Looking(PARENTS)
    positions: list[torch.Tensor] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        positions.append(kwargs["position_ids"])

    spec = selfspec.wrap(model, drafter)
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    only_watched(spec)
    try:
        spec.generate(**prompt, max_new_tokens=7)
    finally:
        hook.remove()
    assert drafter.seen
    of_trees = [p for p in positions[1:] if p.shape[1] == len(PARENTS)]
    for (texts, _, _), found in zip(drafter.seen, of_trees, strict=True):
        expected = [[len(t) - 1 + d for d in (0, 1, 1, 2, 2)] for t in texts]
        assert found.expand(2, -1).tolist() == expected
    assert_logits_of_paths(model, drafter.seen[:1], len(PARENTS))


@pytest.mark.parametrize("graphs", [False, True])
def test_a3_in_float32_with_padding_and_steps_of_fixed_shape(graphs: bool) -> None:
    model, drafter = tiny.build("llama"), Looking(PARENTS)
    spec = selfspec.wrap(model, drafter, cuda_graphs=graphs)
    spec.generate(**tiny.prompts(3), max_new_tokens=9)
    assert len(drafter.seen) > 1
    assert_logits_of_paths(model, drafter.seen, len(PARENTS))


@pytest.mark.parametrize("name", tiny.CHAIN_ONLY)
def test_a4_a_bias_by_slot_gets_the_first_branch_alone(name: str) -> None:
    """Trees would be silently wrong there: siblings do not stand one after the other."""
    model, drafter = tiny.build(name), Looking([-1, 0, 1, 0, 3])
    spec = selfspec.wrap(model, drafter)
    assert "chains only" in repr(spec)
    prompt = tiny.prompts(3)
    out = spec.generate(**prompt, max_new_tokens=9)
    assert out.equal(model.generate(**prompt, max_new_tokens=9))
    assert all(logits.shape[1] == 3 for _, _, logits in drafter.seen)  # of five nodes
    assert_logits_of_paths(model, drafter.seen, 3)


@pytest.mark.parametrize(
    ("name", "batch", "graphs"),
    [
        *(("llama", batch, graphs) for batch in (1, 3) for graphs in (False, True)),
        *((name, 3, False) for name in ("gpt2", "gemma3", "deepseek_v3")),
        ("gemma3", 3, True),
    ],
)
def test_a6_keys_and_values_of_a_branch_are_moved_where_they_belong(
    name: str, batch: int, graphs: bool
) -> None:
    """The right token comes last of three siblings: it accepts no less than a chain would."""
    model, prompt = tiny.build(name), tiny.prompts(batch)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    accepted = {}
    for branches in (0, 2):
        drafter = OracleDrafter(plain, 4, (0, 3), branches=branches)
        spec = selfspec.wrap(model, drafter, cuda_graphs=graphs)
        out = spec.generate(**prompt, max_new_tokens=NEW, return_dict_in_generate=True)
        assert out.sequences.equal(plain)
        accepted[branches] = spec.stats.accepted / spec.stats.verifies
    assert accepted[2] >= accepted[0] > 1
    with torch.no_grad():
        for b in range(batch):
            pads = int((prompt["attention_mask"][b] == 0).sum())
            fresh = model(plain[b : b + 1, pads:-1], use_cache=True)
            fresh, cache = (getattr(o, "cache", None) or o.past_key_values for o in (fresh, out))
            for mine, theirs in zip(cache.layers, fresh.layers, strict=True):
                for own, right in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                    length = min(own.shape[2], right.shape[2], plain.shape[1] - 1 - pads)
                    torch.testing.assert_close(
                        own[b, :, -length:], right[0, :, -length:], atol=1e-4, rtol=1e-4
                    )


class Heads:
    """Drafts as heads of 3, 1 and 2 candidates do: every choice of one candidate a head.

    The right tokens are the third, the only and the second one.
    """

    hidden_taps = ()
    right = (2, 0, 1)

    def __init__(self, answers: torch.Tensor) -> None:
        self.answers = answers[0].tolist()

    def draft(self, state: Any, budget: int) -> TokenTree:
        ahead = self.answers[state.length[0] :][:3]
        if len(ahead) < 3 or budget < 12:
            return TokenTree.root_only(state.root)
        heads = [
            [(token + rank - right) % 64 for rank in range(width)]
            for token, width, right in zip(ahead, (3, 1, 2), self.right, strict=True)
        ]
        choices = [(i, j, k) for i in range(3) for j in range(1) for k in range(2)]
        paths = [[head[rank] for head, rank in zip(heads, c, strict=True)] for c in choices]
        tree = TokenTree.from_paths(state.root, [paths], budget)
        assert tree.depth[0].bincount().tolist() == [1, 3, 3, 6]
        ranks = [0] * tree.width
        for node in range(1, tree.width):  # the order among siblings is the rank
            parent = int(tree.parents[0, node])
            ranks[node] = tree.parents[0, :node].tolist().count(parent)
            assert int(tree.tokens[0, node]) == heads[int(tree.depth[0, node]) - 1][ranks[node]]
        self.ranks = ranks
        return tree

    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        if self.ranks:
            walked = acceptance.path[0, 1 : int(acceptance.num_accepted) + 1].tolist()
            self.walks.append(tuple(self.ranks[n] for n in walked))
        self.ranks = []

    def reset(self) -> None:
        self.ranks: list[int] = []
        self.walks: list[tuple[int, ...]] = []


@pytest.mark.parametrize("graphs", [False, True])
def test_a13_heads_of_different_widths(graphs: bool) -> None:
    model, prompt = tiny.build("llama"), tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=32)
    drafter = Heads(plain)
    spec = selfspec.wrap(model, drafter, cuda_graphs=graphs)
    assert spec.generate(**prompt, max_new_tokens=32).equal(plain)
    assert len(drafter.walks) > 3
    assert set(drafter.walks) == {Heads.right}
