"""Drafters that keep the contract, and drafters that break one rule of it each."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from selfspec import TokenTree
from selfspec.tree import Resume
from tests.families import tiny


@cache
def small() -> Any:
    """Two layers and 32 ids, for many short requests."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    return tiny.llama(vocab_size=32, num_attention_heads=2, **sizes)


class Sound:
    """Drafts the last two tokens again; what follows are one or two changes of it."""

    hidden_taps: Any = ()

    def __init__(self) -> None:
        self.reset()

    def draft(self, state: Any, budget: int) -> Any:
        paths = [[state.tokens(b)[-2:].tolist()[:budget]] for b in range(state.batch)]
        return TokenTree.from_paths(state.root, paths)

    def observe(self, state: Any, output: Any, acceptance: Any) -> None: ...

    def reset(self) -> None: ...


class Drawn(Sound):
    """Draws two siblings, by the keys of the request, as `EarlyExitDrafter` does."""

    scale = 1.0  # of the logits that it says to have drawn from

    def law(self, state: Any) -> Any:
        """Logits [B, V]: the text's own last tokens are likelier."""
        logits = torch.zeros(state.batch, 32)
        for b in range(state.batch):
            logits[b, state.tokens(b)[-4:]] = 2.0
        return logits

    def tokens(self, state: Any, q: Any) -> Any:
        from selfspec.drafters.draw import draw

        return draw(state, q, torch.empty(state.batch, 0, dtype=torch.int64), 2)

    def draft(self, state: Any, budget: int) -> Any:
        sampler = state.sampler
        if budget < 2 or not sampler.do_sample:
            return TokenTree.root_only(state.root)
        ids, log_q = self.tokens(state, self.law(state))
        log_q = (self.scale * log_q).log_softmax(-1)[:, None].expand(-1, 3, -1)
        tokens = torch.cat([state.root[:, None], ids], 1)
        # By the room of every row alone, not by that of the batch.
        parents = [[-1, 0, 0] if state.room(b) > 2 else [-1] for b in range(state.batch)]
        return TokenTree.from_topology(tokens, parents, log_q=log_q)


# ------------------------------------------------------------------------ broken ones


class NoReset:
    hidden_taps = ()

    def draft(self, state: Any, budget: int) -> None: ...

    def observe(self, state: Any, output: Any, acceptance: Any) -> None: ...


class Taps(Sound):
    hidden_taps = (3,)


class List(Sound):
    def draft(self, state: Any, budget: int) -> Any:
        return [[1, 2]]


class WrongRoot(Sound):
    def draft(self, state: Any, budget: int) -> Any:
        return TokenTree.root_only((state.root + 1) % 32)


class Unknown(Sound):
    def draft(self, state: Any, budget: int) -> Any:
        return TokenTree.chain(state.root, torch.full((state.batch, 1), 32))


class NoSuchLayer(Sound):
    def draft(self, state: Any, budget: int) -> Any:
        tree = super().draft(state, budget)
        return replace(tree, resume=Resume(3, torch.zeros(*tree.tokens.shape, 32)))


class Greedy(Sound):
    """Two tokens, whatever the budget."""

    def draft(self, state: Any, budget: int) -> Any:
        return super().draft(state, 2)


class Deep(Sound):
    """Says of its tree that it is none."""

    def draft(self, state: Any, budget: int) -> Any:
        return replace(super().draft(state, 2), max_depth=0, max_nodes=1)


class Writes(Sound):
    def draft(self, state: Any, budget: int) -> Any:
        state.tokens(0)[-1] = 1
        return super().draft(state, budget)


class Commits(Sound):
    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        state.length[0] -= 1


class Freezes(Sound):
    def draft(self, state: Any, budget: int) -> Any:
        tree = super().draft(state, budget)
        state.frozen[0] = True
        return tree


class Processes(Sound):
    def draft(self, state: Any, budget: int) -> Any:
        state.sampler.processors.append(lambda ids, scores: scores)
        return super().draft(state, budget)


class Differentiates(Sound):
    def draft(self, state: Any, budget: int) -> Any:
        torch.set_grad_enabled(True)
        return super().draft(state, budget)


class Configures(Sound):
    def draft(self, state: Any, budget: int) -> Any:
        state.target.model.generation_config.top_k = 7
        return super().draft(state, budget)


class Overwrites(Sound):
    def draft(self, state: Any, budget: int) -> Any:
        layer = state.cache.layers[0]
        state.cache.row(layer, 0)[1][:, 0] += 1
        return super().draft(state, budget)


class GlobalNoise(Sound):
    def draft(self, state: Any, budget: int) -> Any:
        token = torch.randint(32, (state.batch, 1))
        return TokenTree.chain(state.root, token)


class Scales(Sound):
    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        output.logits.mul_(0.5)


class Tunes(Sound):
    """Leaves weights another than it found them."""

    def draft(self, state: Any, budget: int) -> Any:
        weight = state.target.model.lm_head.weight
        weight.data = weight.data.clone()
        return super().draft(state, budget)


class Single(Sound):
    def draft(self, state: Any, budget: int) -> Any:
        (root,) = state.root.tolist()
        return TokenTree.chain(state.root, torch.tensor([[root]]))


class NeedsRoom(Sound):
    def draft(self, state: Any, budget: int) -> Any:
        assert budget >= min(2, state.room(0)) or state.room(0) > 3 or budget == 1
        if state.limit - state.prompt_length == 3:
            raise IndexError("no room")
        return super().draft(state, budget)


class NeedsLife(Sound):
    def draft(self, state: Any, budget: int) -> Any:
        for length, ended in zip(state.length, state.frozen, strict=True):
            assert not ended or length == state.limit, "a row has ended early"
        return super().draft(state, budget)


class Remembers(Sound):
    """Drafts from the request before."""

    last = 1

    def draft(self, state: Any, budget: int) -> Any:
        again = torch.full((state.batch, 1), self.last)
        self.last = (self.last + 1) % 32
        return TokenTree.chain(state.root, again)


class Neighbours(Sound):
    """Every row drafts what row 0 would."""

    def draft(self, state: Any, budget: int) -> Any:
        again = torch.full((state.batch, 1), int(state.tokens(0)[-2]))
        return TokenTree.chain(state.root, again)


class Shared(Sound):
    """Counts steps in a list that copies share."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def draft(self, state: Any, budget: int) -> Any:
        self.steps.append(1)
        return TokenTree.chain(state.root, torch.full((state.batch, 1), len(self.steps)))

    def reset(self) -> None:
        self.steps.clear()


class NoCopies(Sound):
    def __copy__(self) -> Any:
        raise TypeError("holds a handle")


class Buffers(Sound):
    """Keeps one tensor from its first request on and writes to it in place."""

    kept: Any = None

    def draft(self, state: Any, budget: int) -> Any:
        if self.kept is None or (self.kept.is_inference() != torch.is_inference_mode_enabled()):
            self.kept = self.kept if self.kept is not None else torch.zeros(1)
            if torch.is_inference_mode_enabled():
                self.kept = torch.zeros(1)
        self.kept.add_(1)
        return super().draft(state, budget)


class Hoards(Sound):
    def __init__(self) -> None:
        self.texts: list[Any] = []

    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        self.texts.append(state.tokens(0).tolist())


HOARD: list[Any] = []


class HoardsElsewhere(Sound):
    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        HOARD.append(output.logits.clone())


class WrongStates(Sound):
    """Says that layer 0 has run, and hands over something else."""

    def draft(self, state: Any, budget: int) -> Any:
        tree = super().draft(state, budget)
        return replace(tree, resume=Resume(2, torch.ones(*tree.tokens.shape, 32)))


class NotNormalised(Drawn):
    def draft(self, state: Any, budget: int) -> Any:
        tree = super().draft(state, budget)
        return tree if tree.log_q is None else replace(tree, log_q=tree.log_q + 0.1)


class OtherTemperature(Drawn):
    scale = 1.5


class Argmax(Drawn):
    """Takes the likeliest tokens and says that it drew them."""

    def tokens(self, state: Any, q: Any) -> Any:
        return q.topk(2).indices, q.log_softmax(-1)


class SameForAll(Drawn):
    """One noise for all rows, from a generator that reset seeds."""

    def reset(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def tokens(self, state: Any, q: Any) -> Any:
        noise = torch.empty(1, 32).exponential_(generator=self.generator)
        log_q = q.log_softmax(-1)
        return (log_q - noise.log()).topk(2).indices, log_q


class Unseeded(Drawn):
    generator = torch.Generator().manual_seed(0)

    def tokens(self, state: Any, q: Any) -> Any:
        noise = torch.empty(q.shape).exponential_(generator=self.generator)
        log_q = q.log_softmax(-1)
        return (log_q - noise.log()).topk(2).indices, log_q


class Peeks(Drawn):
    """Drops the draft after seeing what was drawn."""

    def draft(self, state: Any, budget: int) -> Any:
        tree = super().draft(state, budget)
        if tree.log_q is None:
            return tree
        unsure = tree.log_q[:, 0].gather(1, tree.tokens[:, 1:2])[:, 0] < -3
        return replace(tree, num_nodes=torch.where(unsure, 1, tree.num_nodes), max_nodes=-1)


BROKEN: list[tuple[type, str]] = [
    (NoReset, "members"),
    (Taps, "hidden_taps"),
    (List, "tree"),
    (WrongRoot, "tree"),
    (Unknown, "tree"),
    (NoSuchLayer, "tree"),
    (Greedy, "budget"),
    (Deep, "tree"),
    (Writes, "state"),
    (Commits, "state"),
    (Freezes, "state"),
    (Processes, "state"),
    (Differentiates, "settings"),
    (Configures, "model"),
    (Overwrites, "cache"),
    (GlobalNoise, "generator"),
    (Scales, "observe"),
    (Tunes, "model"),
    (Single, "batch"),
    (NeedsRoom, "limit"),
    (NeedsLife, "ended"),
    (Remembers, "reset"),
    (Neighbours, "rows"),
    (Shared, "copy"),
    (NoCopies, "copy"),
    (Buffers, "inference_mode"),
    (Hoards, "memory"),
    (HoardsElsewhere, "memory"),
    (WrongStates, "text"),
    (NotNormalised, "log_q"),
    (OtherTemperature, "log_q"),
    (Argmax, "log_q"),
    (SameForAll, "log_q"),
    (Unseeded, "seed"),
    (Peeks, "log_q"),
]
