"""Broken sampled acceptance: what the other tests compare must tell it from the right one."""

import sys

import pytest
import torch
from selfspec_kernels.tree_accept import tree_accept_sampled

from .acceptance_cases import (
    MOST,
    RULES,
    assert_a_coin_at_its_level_fails,
    assert_decisions,
    chi_square,
    noisy,
    run,
    spelt_out,
)
from .mutation import listed, load
from .trees import random_forest


def reference_is_right() -> bool:
    forest = random_forest(9, [0] * 60, seed=3)
    batch = noisy(forest, [9, 7] * 30, 4, seed=1, repeats=True)
    try:
        for rule in RULES:
            assert_a_coin_at_its_level_fails("reference", rule)
            for bound in (2, 9):
                got = run(batch, "reference", rule, max_depth=bound)
                assert_decisions(batch, got, spelt_out(batch, rule, bound))
            assert max(chi_square(rule, nodes) for nodes in (2, 7)) < MOST
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
    "one number for two depths": {"position[:, None] + depth, ACCEPT": "position[:, None], ACCEPT"},
}


@pytest.mark.parametrize("changes", listed(REFERENCE_MUTANTS))
def test_reference_mutant_is_caught(changes, tmp_path, monkeypatch):
    name = "tree_accept_sampled_reference"
    mutant = getattr(load("tree_accept", "reference.py", changes, tmp_path), name)
    monkeypatch.setattr(sys.modules[tree_accept_sampled.__module__], name, mutant)
    assert reference_is_right() is not bool(changes)


def kernel_is_right() -> bool:
    """Against the reference, which tosses the same coins."""
    forest = random_forest(7, [0] * 4, seed=6)
    batch = noisy(forest, [7, 7, 5, 7], 4, seed=2, repeats=True)
    try:
        assert_a_coin_at_its_level_fails("triton", "traversal")
        for rule, bound in (("traversal", 9), ("multiround", 9), ("traversal", 2)):
            got, expected = (
                run(batch, backend, rule, max_depth=bound) for backend in ("triton", "reference")
            )
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
    "one number for two depths": {"position + depth, _ACCEPT": "position, _ACCEPT"},
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
    assert kernel_is_right() is not bool(changes)


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("changes", listed(SAMPLED_MUTANTS))
def test_mutant_of_walk_or_draw_is_caught(changes, tmp_path, monkeypatch):
    from selfspec_kernels.tree_accept import kernel_sampled

    name = "tree_accept_sampled_triton"
    mutant = getattr(load("tree_accept", "kernel_sampled.py", changes, tmp_path), name)
    monkeypatch.setattr(kernel_sampled, name, mutant)
    assert kernel_is_right() is not bool(changes)
