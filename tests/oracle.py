"""Scripted drafters: acceptance that does not depend on a model's quality."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from selfspec import Acceptance, DecodeState, TargetOutput, TokenTree


class OracleDrafter:
    """Drafts the known continuation, wrong at scripted places.

    Args:
        answers: int64 [B, T], the sequences that plain `generate` gives (padding included).
        width: Draft tokens a step.
        wrong_at: Depth of the wrong token in each step, cycled; 0 is none.
        vocab: Wrong tokens are the right one plus 1, modulo this.
        branches: Siblings of every right node that are wrong, drafted *before* it.
    """

    hidden_taps: Sequence[int] = ()

    def __init__(
        self,
        answers: Tensor,
        width: int = 5,
        wrong_at: Sequence[int] = (0,),
        vocab: int = 64,
        branches: int = 0,
    ) -> None:
        self.answers = answers.tolist()
        self.width = width
        self.wrong_at = wrong_at
        self.vocab = vocab
        self.branches = branches
        self.reset()

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """The scripted tree of every row."""
        paths = []
        for b in range(state.batch):
            # Rows drift apart: each has a script of its own.
            wrong = self.wrong_at[(self.steps + b) % len(self.wrong_at)]
            room = max(state.room(b) - 1, 0)
            right = self.answers[b][state.length[b] :][: min(self.width, budget, room)]
            if 0 < wrong <= len(right):
                right[wrong - 1] = (right[wrong - 1] + 1) % self.vocab
            row = []
            for depth in range(len(right)):
                for k in range(self.branches):
                    row.append([*right[:depth], (right[depth] + 2 + k) % self.vocab, 1, 2][:budget])
            paths.append([*row, right])
        self.steps += 1
        if self.branches:
            return _capped(state.root, paths, budget)
        return TokenTree.from_paths(state.root, paths, budget)

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Start the script over."""
        self.steps = 0


def _capped(root: Tensor, paths: list[list[list[int]]], budget: int) -> TokenTree:
    # The right path must survive the cut, so side branches go first when there are too many.
    while True:
        tree = TokenTree.from_paths(root, paths)
        if tree.max_nodes - 1 <= budget:
            return tree
        paths = [row[1:] if len(row) > 1 else row for row in paths]


class RandomTreeDrafter:
    """Drafts random trees, a different one for every row and step."""

    hidden_taps: Sequence[int] = ()

    def __init__(self, seed: int = 0, vocab: int = 64, max_nodes: int = 9) -> None:
        self.seed, self.vocab, self.max_nodes = seed, vocab, max_nodes
        self.reset()

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """Random topology; tokens from the row's own text, so that some are right."""
        rows = []
        for b in range(state.batch):
            count = self.random.randint(1, min(self.max_nodes, budget))
            text = state.tokens(b).tolist()
            paths: list[list[int]] = []
            for _ in range(count):
                base = self.random.choice([[], *paths])
                paths.append([*base, self.random.choice(text)])
            rows.append(paths)
        return TokenTree.from_paths(state.root, rows, budget)

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Start the sequence of trees over."""
        self.random = random.Random(self.seed)
