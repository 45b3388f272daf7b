"""Every row of the registry has a test, and every test that is named after a row has one."""

from __future__ import annotations

from tests.scenarios.rows import places, rows


def test_every_row_has_a_test() -> None:
    table = rows()
    assert len(table) > 90
    assert len({row.id for row in table}) == len(table)
    found = places()
    without = [row.id for row in table if row.id not in found]
    assert not without, "no test is named after these rows"
    assert not set(found) - {row.id for row in table}, "tests are named after rows that are not"


def test_the_column_where_is_right() -> None:
    found = places()
    stale = {row.id: (row.where, found.get(row.id, "")) for row in rows()}
    stale = {name: pair for name, pair in stale.items() if pair[0] != pair[1]}
    assert not stale, "run `python -m tests.scenarios.rows`"
