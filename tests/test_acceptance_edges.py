"""Acceptance where little is left to chance: exact laws of rules that draw no drafts, and edges.

The edges are cold or certain targets, coins of 0, draft probabilities that round to 0, NaN and
infinite logits, the smallest vocabularies and trees, rows that have ended.
"""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import replace
from fractions import Fraction
from math import lcm
from typing import Any

import pytest
import torch
from selfspec_kernels.tree_accept import reference
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

import selfspec
from selfspec import TokenTree
from selfspec.accept import accept, follow
from selfspec.sampling import Sampler
from tests.families import tiny
from tests.ops.acceptance_oracle import Law, Pair, Prefix, accepted, continued, law
from tests.test_accept import state
from tests.test_acceptance_traps import tree_of

LOSSLESS = ("traversal", "multiround")
RULES: tuple[Any, ...] = (*LOSSLESS, "lossy-typical")
ALL: Prefix = ()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# --------------------------------------------------------------- exact laws

# Trees up to 2x2x1 that the tests of the op leave out.
SHAPES = [(2,), (1, 2), (2, 1), (2, 1, 1), (1, 2, 1)]
PAIRS = 60


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rules_are_lossless_and_in_order(shape: tuple[int, ...]) -> None:
    length = len(shape) + 1
    for seed in range(PAIRS):
        pair = Pair(seed)
        target = continued({ALL: Fraction(1)}, pair.p, length)
        outputs = [law(pair.p, pair.q, shape, rule) for rule in LOSSLESS]
        assert all(continued(output, pair.p, length) == target for output in outputs)
        outputs.append(law(pair.p, pair.q, (1,) * len(shape), "multiround"))
        means = [accepted(output) for output in outputs]
        assert means == sorted(means, reverse=True)


@pytest.mark.parametrize("shape", [(1,), (1, 1, 1), (3,), (2, 2), (2, 2, 1)], ids=str)
def test_following_the_targets_draws_has_its_law(shape: tuple[int, ...]) -> None:
    """Whatever tree was drafted: over every choice that the target can make after its nodes."""
    length = len(shape) + 1
    for seed in range(PAIRS):
        pair = Pair(seed)
        tokens, parents = pair.draft(shape, random.Random(seed))
        laws = [pair.p(prefix) for prefix in pair.prefixes]
        scales = [lcm(*(chance.denominator for chance in chances)) for chances in laws]
        # Probabilities as integers, so that tensors add them up exactly.
        weights, choices = torch.ones(1, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.int64)
        for chances, scale in zip(laws, scales, strict=True):
            here = torch.tensor([int(chance * scale) for chance in chances])
            ways = here.nonzero()[:, 0]
            choices = torch.cat(
                [choices.repeat_interleave(len(ways), 0), ways.repeat(len(weights))[:, None]], 1
            )
            weights = (weights[:, None] * here[ways]).flatten()
        tree = tree_of(tokens, parents, len(weights))
        out = follow(tree, choices)
        code = tree.tokens.gather(1, out.path.clamp(min=0).long()) + 1
        code[out.path < 0] = 0
        code = torch.cat([code[:, 1:], code[:, :1] * 0], 1)
        code.scatter_(1, out.num_accepted[:, None].long(), out.next_token[:, None] + 1)
        code = (code * 4 ** torch.arange(length)).sum(1)
        sums = torch.zeros(4**length, dtype=torch.int64).index_add_(0, code, weights)
        whole = int(weights.sum())
        outputs = {}
        for at in sums.nonzero()[:, 0].tolist():
            digits = [at // 4**i % 4 for i in range(length)]
            outputs[tuple(d - 1 for d in digits if d)] = Fraction(int(sums[at]), whole)
        assert continued(outputs, pair.p, length) == continued({ALL: Fraction(1)}, pair.p, length)


class Sure(Pair):
    """A target that is certain of one token after every prefix."""

    def p(self, prefix: Prefix) -> Law:
        before = super().p(prefix)
        return [Fraction(x == before.index(max(before))) for x in range(len(before))]


@pytest.mark.parametrize("shape", [(1, 1), (3,), (2, 2, 1)], ids=str)
def test_a_certain_target_leaves_one_text(shape: tuple[int, ...]) -> None:
    """Under every rule, in fractions and in the library, it is the greedy one."""
    for seed in range(PAIRS):
        pair = Sure(seed)
        greedy: Prefix = ALL
        while len(greedy) <= len(shape):
            greedy = (*greedy, pair.p(greedy).index(Fraction(1)))
        for rule in LOSSLESS:
            outputs = law(pair.p, pair.q, shape, rule)
            assert continued(outputs, pair.p, len(greedy)) == {greedy: Fraction(1)}
        tokens, parents = pair.draft(shape, random.Random(seed))
        p, q = (
            torch.tensor([[[float(a) for a in side(prefix)] for prefix in pair.prefixes]])
            for side in (pair.p, pair.q)
        )
        drawn = TokenTree.from_topology(torch.tensor([tokens]), parents, log_q=q.log())
        samplers = [Sampler(LogitsProcessorList(), True, rule=rule) for rule in LOSSLESS]
        samplers.append(Sampler(LogitsProcessorList(), False))
        for tree in (drawn, replace(drawn, log_q=None)):
            for how in samplers:
                out = accept(tree, p.log(), how, state())
                path = out.path[0, 1 : int(out.num_accepted) + 1].tolist()
                text = (*(tokens[n] for n in path), int(out.next_token))
                assert text == greedy[: len(text)]
                assert len(text) == len(greedy) or text not in pair.prefixes


# --------------------------------------------------------------- edges of `accept`

INF, NAN = float("inf"), float("nan")
# Two branches, a chain, the root alone, and a row that ends early.
ROWS = [[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 2, 3, 4], [-1], [-1, 0, 0, 1]]
WIDTH, EVERY = 6, list(range(len(ROWS)))
GREEDY = Sampler(LogitsProcessorList(), False)
drafts = pytest.mark.parametrize("drawn", [True, False], ids=["log_q", "no log_q"])
rules = pytest.mark.parametrize("rule", RULES)


def trees(vocab: int, drawn: bool, seed: int = 0) -> TokenTree:
    """Of the shapes in `ROWS`, with any tokens; siblings differ."""
    generator = torch.Generator().manual_seed(seed)
    log_q = torch.randn(len(ROWS), WIDTH, vocab, generator=generator).log_softmax(-1)
    tokens = torch.zeros(len(ROWS), WIDTH, dtype=torch.int64)
    for b, parents in enumerate(ROWS):
        weights = log_q[b].exp()
        for n, parent in enumerate(parents[1:], 1):
            tokens[b, n] = torch.multinomial(weights[parent], 1, generator=generator)
            weights[parent, tokens[b, n]] = 0
    return TokenTree.from_topology(tokens, ROWS, log_q=log_q if drawn else None)


def sampler(rule: Any, *processors: Any) -> Sampler:
    return Sampler(LogitsProcessorList(processors), True, rule=rule)


def decided(
    tree: TokenTree, logits: torch.Tensor, how: Sampler, frozen: tuple[int, ...] = ()
) -> Any:
    """Accept, and check that every path is one of the tree and every id one of the vocabulary."""
    out = accept(tree, logits, how, state(tree.batch, frozen))
    assert ((out.next_token >= 0) & (out.next_token < logits.shape[-1])).all()
    for b in range(tree.batch):
        path = out.path[b, : int(out.num_accepted[b]) + 1].tolist()
        assert path[0] == 0
        assert (out.path[b, len(path) :] == -1).all()
        assert all(0 < n < tree.num_nodes[b] for n in path[1:])
        assert [int(tree.parents[b, n]) for n in path] == [-1, *path[:-1]]
    return out


def same(a: Any, b: Any, rows: list[int]) -> bool:
    fields = ("path", "num_accepted", "next_token")
    return all(torch.equal(getattr(a, name)[rows], getattr(b, name)[rows]) for name in fields)


def apart(vocab: int, seed: int) -> torch.Tensor:
    """Logits [B, N, V] that differ by 1 at least."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(len(ROWS), WIDTH, vocab, generator=generator).argsort(-1)
    return order.float() - vocab / 2


@pytest.mark.parametrize("temperature", [1e-7, 1e-5, 1e-2, None])
@pytest.mark.parametrize("vocab", [2, 7])
@drafts
@rules
def test_cold_or_certain_sampling_is_greedy(
    rule: str, drawn: bool, vocab: int, temperature: float | None
) -> None:
    """None stands for logits of which all but one are -inf, as a grammar or top_k=1 leave them."""
    for seed in range(10):
        tree, logits = trees(vocab, drawn, seed), apart(vocab, seed)
        greedy = decided(tree, logits, GREEDY)
        if temperature is None:
            logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True), -INF)
        cold = [] if temperature is None else [TemperatureLogitsWarper(temperature)]
        assert same(decided(tree, logits, sampler(rule, *cold)), greedy, EVERY)


@drafts
@rules
def test_cold_sampling_of_a_tie_takes_one_of_the_tied(rule: str, drawn: bool) -> None:
    logits = torch.zeros(len(ROWS), WIDTH, 7)
    logits[..., [2, 5]] = 1.0
    seen = set()
    for seed in range(10):
        torch.manual_seed(seed)
        tree = trees(7, drawn, seed)
        out = decided(tree, logits, sampler(rule, TemperatureLogitsWarper(1e-7)))
        kept = tree.tokens.gather(1, out.path.clamp(min=0).long())[out.path > 0]
        seen |= {*out.next_token.tolist(), *kept.tolist()}
    assert seen == {2, 5}


@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_coin_of_almost_1_fails_unless_p_is_q(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reference, "uniform", lambda seed, node, at, stream: (seed * 0 + node * 0) + 1 - 2.0**-24
    )
    tree = trees(7, True)
    q = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 8, 0, 0, 0])
    p = torch.cat([q[:4] / 2, torch.full((3,), 1 / 6)])
    log_q, log_p = (weights.log().expand(len(ROWS), WIDTH, 7) for weights in (q, p))
    tokens = torch.tensor([[0, 1, 2, 3, 0, 1], [0] * 6, [0] * 6, [0, 3, 1, 2, 0, 0]])
    tree = replace(tree, tokens=tokens, log_q=log_q)
    assert decided(tree, log_q, sampler(rule)).num_accepted[[1, 3]].tolist() == [5, 2]
    out = decided(tree, log_p, sampler(rule))
    assert out.num_accepted.tolist() == [0] * len(ROWS)
    assert (out.next_token[[0, 1, 3]] >= 4).all()


@pytest.mark.parametrize("rule", LOSSLESS)
def test_draft_probabilities_too_small_for_float16(rule: str) -> None:
    """A token whose q rounds to 0 counts as not drafted; one with a subnormal q can be kept."""
    q = torch.full((len(ROWS), WIDTH, 7), 1 / 5)
    q[..., 5], q[..., 6] = 1e-9, 4e-8
    halves = q.half()
    assert (halves[..., 5] == 0).all()
    assert (halves[..., 6] > 0).all()
    uniform = torch.zeros(len(ROWS), WIDTH, 7)
    for token, log_q in itertools.product((5, 6), (halves.log(), q.log().half())):
        tree = trees(7, True)
        tree = replace(tree, tokens=torch.full_like(tree.tokens, token), log_q=log_q)
        possible = bool(log_q[0, 0, token] > -INF)
        out = decided(tree, uniform, sampler(rule))
        assert out.num_accepted.tolist() == ([2, 5, 0, 2] if possible else [0] * 4)
        never = uniform.clone()
        never[..., token] = -INF
        out = decided(tree, never, sampler(rule))
        assert out.num_accepted.tolist() == [0] * 4
        assert (out.next_token != token).all()


@pytest.mark.parametrize("kind", ["nan", "some nan", "inf", "two inf", "-inf"])
@drafts
@rules
def test_broken_logits(rule: str, drawn: bool, kind: str) -> None:
    """The error of plain `generate` if tokens are drawn; else ids of the vocabulary, and other
    rows are as they were.
    """
    tree, logits = trees(7, drawn), apart(7, 0) / 4
    broken = {"nan": 7, "some nan": 2, "inf": 1, "two inf": 2, "-inf": 7}[kind]
    logits[0, :, :broken] = {"n": NAN, "s": NAN, "-": -INF}.get(kind[0], INF)
    with pytest.raises(RuntimeError, match="probability tensor contains either `inf`, `nan`"):
        decided(tree, logits, sampler(rule))
    sound = decided(tree, apart(7, 0), GREEDY)
    assert same(decided(tree, logits, GREEDY), sound, [1, 2, 3])


@pytest.mark.parametrize("vocab", [1, 2])
@rules
def test_a_root_alone(rule: str, vocab: int) -> None:
    root = torch.zeros(3, dtype=torch.int64)
    tree = TokenTree.root_only(root)
    log_q = torch.zeros(3, 1, vocab).log_softmax(-1)
    chain = TokenTree.chain(root, root[:, None][:, :0], log_q=log_q)
    for alone in (tree, chain, TokenTree.from_topology(root[:, None], [-1], log_q=log_q)):
        out = decided(alone, torch.zeros(3, 1, vocab), sampler(rule))
        assert out.path.tolist() == [[0]] * 3


@pytest.mark.parametrize(
    "processors",
    [[], [TemperatureLogitsWarper(0.5)], [RepetitionPenaltyLogitsProcessor(1.5)]],
    ids=["none", "temperature", "prefix"],
)
@drafts
@rules
def test_rows_that_have_ended_change_nothing(rule: str, drawn: bool, processors: list[Any]) -> None:
    tree, logits = trees(7, drawn), apart(7, 1) / 4
    outs = []
    for frozen in ((), (1,), (0, 2)):
        torch.manual_seed(0)
        outs.append(decided(tree, logits, sampler(rule, *processors), frozen))
    assert same(outs[1], outs[0], [0, 2, 3])
    assert same(outs[2], outs[0], [1, 3])
    decided(tree, logits, sampler(rule, *processors), (0, 1, 2, 3))


# --------------------------------------------------------------- edges of `generate`

DRAFTERS = {
    "exit": lambda: selfspec.EarlyExitDrafter(3, 3, 0.0, branches=3, do_sample=True),
    "skip": lambda: selfspec.LayerSkipDrafter([1], 3, 0.3, do_sample=True),
    "ngram": lambda: "ngram",
}
NEW = 16


@pytest.mark.parametrize("name", DRAFTERS)
@rules
def test_a_vocabulary_of_two(rule: str, name: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=2, num_hidden_layers=4, **sizes, initializer_range=0.5)
    model = LlamaForCausalLM(config).eval()
    prompt = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]])
    settings: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    settings["attention_mask"] = torch.ones_like(prompt)
    spec = selfspec.wrap(model, DRAFTERS[name](), acceptance=rule)
    plain = model.generate(prompt, **settings)
    assert spec.generate(prompt, **settings, do_sample=True, temperature=1e-5).equal(plain)
    text = spec.generate(prompt, **settings, do_sample=True)
    assert text.shape == plain.shape
    assert set(text.flatten().tolist()) <= {0, 1}
    assert spec.stats.accepted > 0


def test_broken_weights_end_as_in_plain_generate() -> None:
    """NaN logits: an error if tokens are drawn; the same text if not."""
    broken, prompt = copy.deepcopy(tiny.build("llama")), tiny.prompts(1)
    spec = selfspec.wrap(broken, DRAFTERS["exit"]())  # which refuses a model that is broken already
    with torch.no_grad():
        broken.lm_head.weight[3] = NAN
    for generate in (broken.generate, spec.generate):
        with pytest.raises(RuntimeError, match="probability tensor contains either `inf`, `nan`"):
            generate(**prompt, max_new_tokens=NEW, do_sample=True, top_k=0)
    greedy = broken.generate(**prompt, max_new_tokens=NEW)
    assert spec.generate(**prompt, max_new_tokens=NEW).equal(greedy)
