"""Broken sampled acceptance: what the other tests compare must tell it from the right one."""

import sys

import pytest
import torch
from selfspec_kernels.tree_accept import reference, tree_accept_sampled

from .acceptance_cases import (
    MOST,
    MOST_OF_ONE,
    RULES,
    assert_a_coin_at_its_level_fails,
    assert_chances,
    assert_decisions,
    chi_square,
    chi_square_of_one,
    noisy,
    run,
    spelt_out,
)
from .mutation import listed, load
from .trees import Forest, random_forest


def reference_is_right() -> bool:
    forest = random_forest(9, [0] * 60, seed=3)
    batch = noisy(forest, [9, 7] * 30, 4, seed=1, repeats=True)
    try:
        for rule in RULES:
            assert_a_coin_at_its_level_fails("reference", rule)
            assert_chances(batch, "reference", rule)
            for bound in (2, 9):
                got = run(batch, "reference", rule, max_depth=bound)
                assert_decisions(batch, got, spelt_out(batch, rule, bound))
            assert max(chi_square(rule, nodes) for nodes in (2, 7)) < MOST
        assert chi_square_of_one() < MOST_OF_ONE
    except AssertionError:
        return False
    return True


REFERENCE_MUTANTS = {
    "padding accepted": {"drafted = (node < num_nodes[:, None]) & ": "drafted = "},
    "deeper than the bound": {"(depth <= max_depth) & ": ""},
    "a repeated token tried again": {"drafted &= ~(siblings &": "drafted |= (siblings &"},
    "level of the parent ignored": {"r[:, None] * p_here.gather": "p_here.gather"},
    "token by token": {
        'if rule == "traversal" else torch.ones_like': "* 0 + 1 if 1 else torch.ones_like"
    },
    "failed child still in q": {"q_here.scatter(1, token, 0)": "q_here.clone()"},
    "q not normalised again": {"q_left /= torch.where(mass > 0, mass, 1)": "pass"},
    "residual without the level": {"residual = (r[:, None] * p_here": "residual = (p_here"},
    "level of a failed node kept": {"mass / (mass + (1 - r))": "r"},
    "break at the first reject": {"passed = ((bits > 0) & passed[:, :, None]).any(1)": "pass"},
    "coin at its level passes": {"coins < level": "coins <= level"},
    "last child first": {'"amin")': '"amax")', "(batch, size + 1), size)": "(batch, size + 1), 0)"},
    "next token from the root": {"weight = p[rows, last[:, 0]]": "weight = p[:, 0]"},
    "one stream for coin and token": {"at, RESIDUAL)": "at, ACCEPT)"},
    "one number for all nodes": {
        "node, position[:, None], ACCEPT": "node * 0, position[:, None], ACCEPT"
    },
}


@pytest.mark.parametrize("changes", listed(REFERENCE_MUTANTS))
def test_reference_mutant_is_caught(changes, tmp_path, monkeypatch):
    name = "tree_accept_sampled_reference"
    mutant = load("tree_accept", "reference.py", changes, tmp_path)
    monkeypatch.setattr(sys.modules[tree_accept_sampled.__module__], name, getattr(mutant, name))
    monkeypatch.setattr(reference, "_chances", mutant._chances)
    assert reference_is_right() is not bool(changes)


# Siblings, nodes below the first and below the second of them, padding that looks like a node.
TREES = Forest([[-1, 0, 0, 0, 1, 1, 2, 2], [-1, 0, 0, 1, 1, 1, 3, 0]], [0, 0])


def levels_are_right() -> bool:
    batch = noisy(TREES, [8, 6], 6, seed=2, distance=2.0)
    batch.tokens[1, 4] = batch.tokens[1, 3]
    try:
        for rule, bound in (("traversal", 9), ("multiround", 9), ("multiround", 1)):
            assert_chances(batch, "triton", rule, bound)
    except AssertionError:
        return False
    return True


def draw_is_right() -> bool:
    """Against the reference, which tosses the same coins."""
    forest = Forest(TREES.parents * 8, [0] * 16)
    batch = noisy(forest, [8, 6] * 8, 6, seed=1, distance=1.5)
    try:
        assert_a_coin_at_its_level_fails("triton", "traversal")
        for rule in RULES:
            got, expected = (run(batch, backend, rule) for backend in ("triton", "reference"))
            assert all(map(torch.equal, got, expected))
    except AssertionError:
        return False
    return True


LEVELS_MUTANTS = {
    "padding accepted": {"(node < num_nodes) & ": ""},
    "deeper than the bound": {" & (depth <= max_depth)": ""},
    "a repeated token tried again": {"drafted &= repeats == 0": "drafted &= repeats >= 0"},
    "children in reverse": {"(m[None, :] < node[:, None])": "(m[None, :] > node[:, None])"},
    "level of the parent ignored": {"over *= tl.gather(r, parents, 0)": "over *= 1"},
    "residual of the parent before": {"tl.gather(t, parents, 0) * q": "0 * q"},
    "q not normalised again": {"under = q / tl.gather(rest, parents, 0)": "under = q"},
    "failed child still in q": {"+ DONE) * size + n) + 1)": "+ DONE) * size + n))"},
    "residual without the level": {"mass / (rest * r)": "mass / rest"},
    "level of a failed node kept": {"tl.where(failed & (level < 1), kept, level)": "level"},
}
SAMPLED_MUTANTS = {
    "coin at its level passes": {"_ACCEPT) < level": "_ACCEPT) <= level"},
    "one number for all nodes": {
        "seed, node, position, _ACCEPT": "seed, node * 0, position, _ACCEPT"
    },
    "break at the first reject": {"passed = drafted & emits": "passed = passed"},
    "one stream for coin and token": {"at_position, _RESIDUAL": "at_position, _ACCEPT"},
    "next token from p": {"p - t * probability(log_q)": "p"},
    "next token from the root": {"at = here.to(tl.int64)": "at = here.to(tl.int64) * 0"},
    "the largest noise wins": {"weight / _exponential(": "weight * _exponential("},
}


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("changes", listed(LEVELS_MUTANTS))
def test_mutant_of_levels_is_caught(changes, tmp_path, monkeypatch):
    from selfspec_kernels.tree_accept import kernel_sampled

    mutant = load("tree_accept", "kernel_levels.py", changes, tmp_path)
    monkeypatch.setattr(kernel_sampled, "levels", mutant)
    assert levels_are_right() is not bool(changes)


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("changes", listed(SAMPLED_MUTANTS))
def test_mutant_of_walk_or_draw_is_caught(changes, tmp_path, monkeypatch):
    from selfspec_kernels.tree_accept import kernel_sampled

    name = "tree_accept_sampled_triton"
    mutant = getattr(load("tree_accept", "kernel_sampled.py", changes, tmp_path), name)
    monkeypatch.setattr(kernel_sampled, name, mutant)
    assert draw_is_right() is not bool(changes)
