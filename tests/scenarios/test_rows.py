"""Every row of the registry has a test, and every test that is named after a row has one."""

from __future__ import annotations

import selfspec
from tests.scenarios.rows import LATER, places, rows, where

# Drafters that draft with what a model has anyway.
UNTRAINED = {"CombinedDrafter", "EarlyExitDrafter", "LayerSkipDrafter", "NGramDrafter"}


def test_every_row_has_a_test() -> None:
    table = rows()
    assert len(table) > 90
    assert len({row.id for row in table}) == len(table)
    found = places()
    without = [row.id for row in table if row.id not in found and row.where != LATER]
    assert not without, "no test is named after these rows"
    assert not set(found) - {row.id for row in table}, "tests are named after rows that are not"


def test_the_column_where_is_right() -> None:
    found = places()
    stale = {row.id: (row.where, where(row, found)) for row in rows()}
    stale = {name: pair for name, pair in stale.items() if pair[0] != pair[1]}
    assert not stale, "run `python -m tests.scenarios.rows`"


def test_rows_about_trained_drafts_wait_for_them_alone() -> None:
    members = {name: getattr(selfspec, name) for name in selfspec.__all__}
    drafters = {
        name
        for name, member in members.items()
        if isinstance(member, type) and all(hasattr(member, m) for m in ("draft", "observe"))
    }
    assert drafters >= UNTRAINED
    if drafters - UNTRAINED - {"Drafter"}:
        waiting = [row.id for row in rows() if LATER in row.where]
        assert not waiting, f"there are trained drafts now: test these rows, drop {LATER!r}"
