"""Heads that know the text: a network that looks states up instead of computing tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from selfspec.drafters.static_tree import Path
from selfspec.networks import HeadsConfig, HeadsNetwork
from tests.families import tiny

SPARE = 12  # tokens that are known beyond those that are asked for
Rank = Callable[[int, int], int]


@cache
def known(name: str, batch: int, new: int) -> tuple[Any, Tensor, list[list[int]], list[Tensor]]:
    """(prompt, plain text, tokens of every row, its final states [T, C]) of a tiny llama.

    The states are transformers' own: `last_hidden_state` of the row alone.
    """
    model = tiny.build(name)
    prompt = tiny.prompts(batch)
    settings = {"do_sample": False}
    plain = model.generate(**prompt, max_new_tokens=new, **settings)
    more = model.generate(**prompt, max_new_tokens=new + SPARE, **settings)
    pads = (1 - prompt["attention_mask"]).sum(1).tolist()
    tokens = [row[pad:] for row, pad in zip(more.tolist(), pads, strict=True)]
    with torch.no_grad():
        states = [model.model(torch.tensor([row])).last_hidden_state[0] for row in tokens]
    return prompt, plain, tokens, states


class Recalling(HeadsNetwork):
    """Its heads put the right token at the rank that a script says.

    A state that is not one of the text's final states (another layer's, without the final norm, or
    of a node that was not accepted) raises, and so does a path that does not hold embeddings of
    tokens. Before a wrong path the right token comes last.

    Args:
        text: What `known` gives.
        embeddings: [V, C] of the model.
        num_heads: D.
        rank: Of the right token, by position of the state (from a row's first token) and head.
        conditioned: See `HeadsConfig`.
    """

    def __init__(
        self, text: Any, embeddings: Tensor, num_heads: int, rank: Rank, conditioned: bool
    ) -> None:
        vocab_size, size = embeddings.shape
        assert vocab_size == size, "the states that are returned are scores"
        super().__init__(
            HeadsConfig(size, vocab_size, num_heads, 0, conditioned=conditioned, own_head=True)
        )
        for k in range(num_heads):
            torch.nn.init.eye_(self.head(k).weight)
        self.text, self.embeddings, self.rank = text, embeddings, rank

    def forward(self, k: int, hidden: Tensor, path: Tensor | None = None) -> Tensor:
        """Scores in the place of states."""
        paths: list[Any] = [None] * hidden[..., 0].numel()
        if self.config.conditioned:
            assert path is not None
            assert path.shape[:-1] == (*hidden.shape[:-1], k + 1)
            same = (path.flatten(0, -2)[:, None] == self.embeddings).all(-1)
            assert bool(same.any(-1).all()), "a path is no embedded text"
            ids = same.int().argmax(-1)
            paths = ids.view(-1, k + 1).tolist()
        rows = [
            self.scores(k, state, drafted)
            for state, drafted in zip(hidden.flatten(0, -2), paths, strict=True)
        ]
        return torch.stack(rows).view(hidden.shape)

    def scores(self, k: int, state: Tensor, drafted: list[int] | None) -> Tensor:
        """[V] after one state."""
        _, _, tokens, states = self.text
        distances = [float((known - state).norm(dim=-1).min()) for known in states]
        row = min(range(len(states)), key=distances.__getitem__)
        assert distances[row] < 1e-2, "it is no final state of the text"
        at = int((states[row] - state).norm(dim=-1).argmin())
        text = tokens[row]
        count = state.shape[0]
        if at + k + 2 >= len(text):  # of a row that has ended
            return torch.zeros(count)
        right, rank = text[at + k + 2], self.rank(at, k)
        if drafted is not None and drafted != text[at + 1 : at + k + 2]:
            rank = count - 1
        others = [(right + 1 + i) % count for i in range(count - 1)]
        others.insert(rank, right)
        scores = torch.empty(count)
        scores[others] = -0.05 * torch.arange(count)
        return scores


def steps(text: Any, paths: tuple[Path, ...], rank: Rank, new: int, budget: int) -> Any:
    """(forwards, accepted tokens) of a drafter with such heads, by the script alone."""
    prompt, forwards, accepted = text[0], 0, 0
    for row in prompt["attention_mask"].tolist():
        at, left, count = sum(row) - 1, new - 1, 0  # the prefill gives a token
        while left:
            tree = set(paths[: min(budget, left - 1)])
            found = 0
            while tuple(rank(at, k) for k in range(found + 1)) in tree:
                found += 1
            accepted += found
            at, left, count = at + found + 1, left - found - 1, count + 1
        forwards = max(forwards, count)
    return forwards, accepted
