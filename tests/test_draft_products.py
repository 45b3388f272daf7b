"""Products of draft networks: with every weight as it lies, and no more of them than are needed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import selfspec
from tests.families import tiny
from tests.networks import random_exit, random_feature, random_heads


class Products(TorchDispatchMode):
    """Counts products by operator and by the shape of what is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.rows: list[tuple[tuple[int, ...], int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.seen[func.overloadpacket.__name__, tuple(args[1].shape)] += 1
            self.rows.append((tuple(args[1].shape), args[0].shape[0]))
        return func(*args, **(kwargs or {}))


def products(drafter: Any, batch: int) -> list[tuple[Products, selfspec.TokenTree]]:
    """Of every draft of a request in which a copying drafter has several tokens accepted."""
    counted: list[tuple[Products, selfspec.TokenTree]] = []
    draft = drafter.draft

    def watched(state: Any, budget: int) -> Any:
        with Products() as seen:
            tree = draft(state, budget)
        counted.append((seen, tree))
        return tree

    drafter.draft = watched
    spec = selfspec.wrap(tiny.build("llama"), [selfspec.NGramDrafter(1, min_prob=0.0), drafter])
    spec.generate(**tiny.prompts(batch), max_new_tokens=40, do_sample=False)
    assert len(counted) > 9
    return counted


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["feature", "heads", "exit"])
def test_no_product_copies_its_weights(kind: str, batch: int) -> None:
    """As it does, once for every row, if rows of the other factor have room between them."""
    drafter = {
        "feature": lambda: selfspec.FeatureDrafter(random_feature(64, 64)),
        "heads": lambda: selfspec.HeadsDrafter(random_heads(64, 64)),
        "exit": lambda: selfspec.EarlyExitDrafter(network=random_exit(64, 64, 2, attends=True)),
    }[kind]()
    for seen, _ in products(drafter, batch):
        assert not [key for key in seen.seen if key[0] == "bmm"]


def test_an_exit_makes_keys_and_values_of_the_past_and_nothing_else() -> None:
    network = random_exit(64, 64, 2, attends=True)
    inner = network.config.intermediate_size
    drafter = selfspec.EarlyExitDrafter(network=network, max_draft_tokens=3, confidence=0.0)
    for seen, tree in products(drafter, 1):
        assert seen.seen["mm", (inner, 64)] == tree.max_depth  # a token each, none for the past


@pytest.mark.parametrize("batch", [1, 3])
def test_of_a_prompt_a_feature_draft_wants_keys_and_values_and_one_output(batch: int) -> None:
    network = random_feature(64, 64)
    inner = network.config.intermediate_size
    (first, _), *_ = products(selfspec.FeatureDrafter(network, width=4), batch)
    rows = [rows for shape, rows in first.rows if shape == (inner, 64)]
    assert rows[0] == batch
    assert max(rows) <= 4 * batch
