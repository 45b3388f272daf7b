"""Models whose law is a table, so that frequencies can be held to it."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import selfspec
from selfspec import TokenTree

V = 8
FIRST = 3  # the prompt: one token
_WIDTH = 16


def tables(seed: int = 0, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    """Logits [V, V] of target and draft; row x holds after token x."""
    target, other = torch.randn(2, V, V, generator=torch.Generator().manual_seed(seed))
    return spread * target, spread * (0.8 * target + 0.6 * other)


def speaking(
    target: Tensor, drafter: Any, draft: Tensor | None = None, **options: Any
) -> selfspec.SpeculativeModel:
    """A wrapped model of two layers whose next-token logits are the last token's row of a table.

    It is wrapped as an ordinary model first: positions, of which a table has no use, could not be
    probed later.

    Args:
        target: [V, V] logits, V up to 8; the model has this dtype.
        drafter: As for `wrap`.
        draft: [V, V] logits without the second layer; by default those of the target.
        **options: As for `wrap`.
    """
    vocab, dtype = target.shape[1], target.dtype
    model = _ordinary(vocab, dtype)
    spec = selfspec.wrap(model, drafter, **options)
    own, rest = model.model.layers
    with torch.no_grad():
        for layer in (own, rest):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        rest.post_attention_layernorm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, _WIDTH))
        head = torch.zeros(vocab, _WIDTH)
        # The norm makes 4 of a 1 among fifteen zeros, and the root of 8 of two ones.
        if draft is None:
            head[:, :vocab] = target.float().T / 4
        else:
            head[:, :vocab] = draft.float().T / 4
            head[:, 8 : 8 + vocab] = target.float().T / math.sqrt(8) - head[:, :vocab]
            unit = torch.eye(_WIDTH)
            rest.mlp.gate_proj.weight.copy_(unit)
            rest.mlp.up_proj.weight.copy_(unit / 16 / torch.tensor(4.0).sigmoid())
            rest.mlp.down_proj.weight.copy_(unit.roll(8, 0))  # a second 1, eight places on
        model.lm_head.weight.copy_(head)
    return spec


def _ordinary(vocab: int, dtype: torch.dtype) -> Any:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=4096,
        rms_norm_eps=0.0,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(dtype).eval()


class TableDrafter:
    """Draws trees from a table.

    Args:
        logits: [V, V], of the law after every token.
        shape: Siblings, without replacement, at every depth; all of them have children.
        says: [V, V], the law it claims to draw from, if that is another; None is silent about it,
            as drafters are that choose their tokens.
    """

    hidden_taps: Sequence[int] = ()

    def __init__(
        self, logits: Tensor, shape: tuple[int, ...] = (1, 1), says: Tensor | str | None = "truth"
    ) -> None:
        self.law = logits.float().softmax(-1)
        self.says = self.law.log() if isinstance(says, str) else says
        self.shape = shape
        # Not the seed of a test: both would draw the same numbers.
        self.generator = torch.Generator().manual_seed(4321)

    def draft(self, state: Any, budget: int) -> TokenTree:
        tokens, parents, level = state.root[:, None].cpu(), [-1], [0]
        for count in self.shape:
            if len(parents) - 1 + len(level) * count > budget:
                break
            start = len(parents)
            for node in level:
                law = self.law[tokens[:, node]]
                drawn = torch.multinomial(law, count, generator=self.generator)
                tokens = torch.cat([tokens, drawn], 1)
                parents += [node] * count
            level = list(range(start, len(parents)))
        log_q = None if self.says is None else self.says[tokens]
        return replace(like(tuple(parents), state.batch), tokens=tokens, log_q=log_q)

    def observe(self, state: Any, output: Any, acceptance: Any) -> None: ...

    def reset(self) -> None: ...


@cache
def like(parents: tuple[int, ...], batch: int) -> TokenTree:
    """A tree of these parents in every row; its tokens mean nothing."""
    tokens = torch.zeros(1, len(parents), dtype=torch.int64)
    one = TokenTree.from_topology(tokens, list(parents), log_q=tokens[..., None].float())
    wide = {
        name: getattr(one, name).expand(batch, *getattr(one, name).shape[1:])
        for name in ("tokens", "parents", "depth", "ancestors", "num_nodes", "log_q")
    }
    return replace(one, **wide)


def spoken(spec: Any, rows: int, new: int, **settings: Any) -> Tensor:
    """int64 [rows, new], sampled after token `FIRST`."""
    settings = {"do_sample": True, "top_k": 0, "pad_token_id": 0, **settings}
    gc.disable()  # it would take half of the time, looking through a list a row
    try:
        prompt = torch.full((rows, 1), FIRST)
        out = spec.generate(prompt, max_new_tokens=new, **settings)
    finally:
        gc.enable()
    return out[:, 1:]


def joint(p: Tensor, before: int, length: int) -> Tensor:
    """Law of the `length` tokens that come `before` tokens after `FIRST`, float64 [V ** length]."""
    law = torch.eye(p.shape[0], dtype=torch.float64)[FIRST] @ p.double().matrix_power(before + 1)
    for _ in range(length - 1):
        law = (law.view(-1, p.shape[0])[:, :, None] * p.double()).flatten()
    return law


def counted(text: Tensor, vocab: int) -> Tensor:
    """How often every text occurs among the rows [B, T], float64 [V ** T]."""
    weights = vocab ** torch.arange(text.shape[1] - 1, -1, -1)
    return torch.bincount((text * weights).sum(1), minlength=vocab ** text.shape[1]).double()


def misfit(observed: Tensor, law: Tensor, given: int = 1) -> float:
    """Chi-square of counts over its quantile of 0.99999: above 1 is a bad fit.

    A quantile of 0.999 would be missed by chance by one or two of a thousand windows of text.

    Cells that expect less than 5 are thrown together; what the law rules out must not occur.

    Args:
        observed: Counts.
        law: What they follow, up to a factor.
        given: How many sums of counts the law was fitted to.
    """
    expected = observed.sum() * law / law.sum()
    if bool(observed[law == 0].any()):
        return math.inf
    common = expected >= 5
    got = torch.cat([observed[common], observed[~common].sum()[None]])
    due = torch.cat([expected[common], expected[~common].sum()[None]])
    got, due = got[due > 0], due[due > 0]
    freedom = len(due) - given
    if freedom < 1:
        return 0.0
    spread = 2 / (9 * freedom)  # Wilson and Hilferty 1931
    quantile = freedom * (1 - spread + 4.265 * spread**0.5) ** 3
    return float(((got - due) ** 2 / due).sum()) / quantile


def worst(text: Tensor, p: Tensor, length: int = 3) -> float:
    """The worst `misfit` among all windows of `length` tokens of `text` [B, T]."""
    starts = range(text.shape[1] - length + 1)
    vocab = p.shape[0]
    return max(misfit(counted(text[:, s : s + length], vocab), joint(p, s, length)) for s in starts)
