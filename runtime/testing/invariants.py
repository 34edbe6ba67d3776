"""What must hold in every onepen database, checked from outside of the engine.

`check_database` looks at a file and lists everything that is wrong with it; `logical_dump` gives
its content for comparison. Both read what is stored, with SQL of their own: they share no code with
the handlers, so a mistake there does not hide itself here. The rules are those that `onepen doctor`
knows, too.

Invariants:
- What was lost on purpose (a deleted session, an erased message) is no violation.

Must never write: the file is opened read-only, through apsw, because another SQLite library in the
same process would drop this one's locks. The file may be open in this process through apsw, or in
another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

import apsw

from ...storage.errors import ForeignFileError
from ...storage.sqlite.rules import RULES, SINCE
from ...storage.sqlite.schema import check_ours

if TYPE_CHECKING:
    from collections.abc import Generator


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong: the rule that found it, and what it found."""

    rule: str
    found: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.found}"


Dump: TypeAlias = Mapping[str, tuple[tuple[Any, ...], ...]]
"""Every row of every table, in the order of its key; without what each opening and batch moves."""


def check_database(path: str | os.PathLike[str]) -> list[Violation]:
    """Everything that is wrong with this database; empty for a sound one.

    Raises `OpenError` and its kin for a file that is not a database of onepen's.
    """
    try:
        with inspecting(path) as db:
            return check_connection(db)
    except apsw.NotADBError as error:
        raise ForeignFileError(os.fspath(path), "it is no database") from error


def check_connection(db: apsw.Connection) -> list[Violation]:
    """The same, of an open connection's snapshot. What is derived, search, is left out."""
    version = check_ours(db, db.filename)
    if version == 0:
        return []  # whoever made it was killed before there was anything in it
    found = [
        Violation("integrity_check", str(row[0]))
        for row in db.execute("PRAGMA integrity_check").fetchall()
        if row != ("ok",)
    ]
    found += [
        Violation("foreign_key_check", repr(row))
        for row in db.execute("PRAGMA foreign_key_check").fetchall()
    ]
    if found:
        return found  # on damaged tables the rules below would only report consequences
    for rule, query in RULES.items():
        if version < SINCE.get(rule, 1):
            continue
        try:
            found += [Violation(rule, repr(row)) for row in db.execute(query).fetchall()]
        except apsw.SQLError as error:  # a table or a column is missing
            found.append(Violation(rule, f"it can't be looked at: {error}"))
    return found


def logical_dump(path: str | os.PathLike[str]) -> Dump:
    """The content, for comparison: in equal dumps nothing is lost, doubled or out of order."""
    with inspecting(path) as db:
        return dump_connection(db)


def dump_connection(db: apsw.Connection) -> Dump:
    """The same, of an open connection's snapshot."""
    version = (db.pragma("user_version"), db.pragma("application_id"), db.pragma("auto_vacuum"))
    tables: list[Any] = db.execute(
        "SELECT name, (SELECT count(*) FROM pragma_table_info(name)) FROM sqlite_schema "
        "WHERE type = 'table' AND name NOT LIKE 'sqlite_stat%' AND name NOT LIKE 'search_%' "
        "ORDER BY name"
    ).fetchall()
    dump: dict[str, tuple[tuple[Any, ...], ...]] = {"": (version,)}
    for name, width in tables:
        # The epoch moves with every opening and commit_seq with every batch, also one sent again.
        columns = "one, created_ms" if name == "pen" else "*"
        # No table has a longer key than three columns.
        order = "1, 2, 3" if width > 2 and name != "pen" else "1, 2"
        rows = db.execute(f'SELECT {columns} FROM "{name}" ORDER BY {order}').fetchall()
        dump[name] = tuple(rows)
    return dump


def compare(expected: Dump, found: Dump) -> list[Violation]:
    """Where two dumps differ, table by table."""
    differences: list[Violation] = []
    for table in sorted(expected.keys() | found.keys()):
        left, right = expected.get(table, ()), found.get(table, ())
        if left == right:
            continue
        missing = [row for row in left if row not in right]
        surplus = [row for row in right if row not in left]
        what = (
            f"missing {missing[:3]!r}, surplus {surplus[:3]!r}, rows {len(left)} and {len(right)}"
        )
        differences.append(Violation(f"content of {table}", what[:600]))
    return differences


@contextmanager
def inspecting(path: str | os.PathLike[str]) -> Generator[apsw.Connection]:
    """A read-only connection, with one snapshot for as long as the block lasts."""
    file = Path(path).resolve(strict=True)
    log = file.with_name(f"{file.name}-wal")
    # Without a log nobody is writing, and an immutable file is opened without making -wal and -shm
    # files.
    mode = "mode=ro" if log.exists() else "immutable=1"
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    db = apsw.Connection(f"file:{quote(str(file))}?{mode}", flags=flags)
    try:
        db.execute("BEGIN")
        yield db
    finally:
        db.close()
