"""docs/schema.md is a read contract: what it says is what the file has."""

from __future__ import annotations

import re
from pathlib import Path

import apsw

from onepen.storage.sqlite import schema

PAGE = (Path(__file__).parents[2] / "docs" / "schema.md").read_text()


def _current() -> apsw.Connection:
    db = apsw.Connection(":memory:")
    schema.migrate(db, ":memory:", 0)
    return db


def test_every_table_and_column_is_documented_and_no_other() -> None:
    """The page lists exactly the tables and columns of a new database, with their types.

    The inside of the search index is the index's own business.
    """
    db = _current()
    tables = [
        str(name)
        for (name,) in db.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' "
            "AND name NOT LIKE 'search_index%'"
        )
    ]
    stored = {
        (table, str(row[1]), str(row[2]))
        for table in tables
        for row in db.execute(f"PRAGMA table_info({table})")
    }
    documented: set[tuple[str, str, str]] = set()
    for section in PAGE.split("\n## ")[1:]:
        table = section.split("`")[1]
        for column, kind in re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE):
            documented.add((table, column, kind))
    assert documented == stored


def test_the_documented_version_and_query_are_right() -> None:
    """The number in the title is the schema's, and the query in the page runs."""
    assert f"version {schema.VERSION}\n" in PAGE.splitlines(keepends=True)[0]
    assert f"0x{schema.APPLICATION_ID:X}" in PAGE
    query = re.search(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    assert query is not None
    assert _current().execute(query[1]).fetchall() == []
