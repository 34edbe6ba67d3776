"""A database that nobody else sees and that is gone when it is closed: memory for large transfers.

Owns what an import or export must remember of all that it has come across, in pages that SQLite
puts into a temporary file when there are many. Never has anything in it that is not in the file or
the database that is transferred.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, final

import apsw

if TYPE_CHECKING:
    from collections.abc import Iterator

Status: TypeAlias = Literal["new", "restart", "extend", "same", "kept"]

_TABLES = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA cache_size = -8192;
CREATE TABLE sessions (place INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, number INTEGER NOT NULL,
  offset INTEGER NOT NULL, line BLOB NOT NULL, status TEXT, start INTEGER NOT NULL DEFAULT 0);
CREATE TABLE parents (id TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE rotations (parent TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE seen (kind TEXT NOT NULL, id TEXT NOT NULL, PRIMARY KEY (kind, id)) WITHOUT ROWID;
CREATE TABLE uids (uid BLOB PRIMARY KEY) WITHOUT ROWID;
BEGIN;
"""
_PAGE = 200


class Planned(NamedTuple):
    """A session of a file: where it stands there, and what is to be done with it."""

    place: int
    number: int
    offset: int
    line: bytes
    status: Status | None
    start: int


@final
class Scratch:
    """Use it on one thread at a time."""

    def __init__(self) -> None:
        self._db = apsw.Connection("")
        self._db.execute(_TABLES).fetchall()  # to its end: the first of them give rows

    def close(self) -> None:
        self._db.close(force=True)

    def _new(self) -> bool:
        return self._db.changes() > 0

    def see(self, kind: str, name: str) -> bool:
        """Remember a name; false if it was there before."""
        self._db.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (kind, name))
        return self._new()

    def has_seen(self, kind: str, name: str) -> bool:
        sql = "SELECT 1 FROM seen WHERE kind = ? AND id = ?"
        return bool(self._db.execute(sql, (kind, name)).fetchall())

    # The uids of one session -----------------------------------------------------------------

    def forget_uids(self) -> None:
        self._db.execute("DELETE FROM uids")

    def see_uid(self, uid: str) -> bool:
        self._db.execute("INSERT OR IGNORE INTO uids VALUES (?)", (bytes.fromhex(uid),))
        return self._new()

    # The sessions of a file, in its order ----------------------------------------------------

    def add_session(self, session_id: str, number: int, offset: int, line: bytes) -> bool:
        self._db.execute(
            "INSERT OR IGNORE INTO sessions (id, number, offset, line) VALUES (?, ?, ?, ?)",
            (session_id, number, offset, line),
        )
        return self._new()

    def has_session(self, session_id: str) -> bool:
        return bool(
            self._db.execute("SELECT 1 FROM sessions WHERE id = ?", (session_id,)).fetchall()
        )

    def line_of(self, session_id: str) -> bytes | None:
        rows: list[Any] = self._db.execute(
            "SELECT line FROM sessions WHERE id = ?", (session_id,)
        ).fetchall()
        return rows[0][0] if rows else None

    def status_of(self, session_id: str) -> Status | None:
        sql = "SELECT status FROM sessions WHERE id = ?"
        rows: list[Any] = self._db.execute(sql, (session_id,)).fetchall()
        return rows[0][0] if rows else None

    def sessions(self) -> Iterator[Planned]:
        place = 0
        while True:
            rows: list[Any] = self._db.execute(
                "SELECT place, number, offset, line, status, start FROM sessions WHERE place > ? "
                "ORDER BY place LIMIT ?",
                (place, _PAGE),
            ).fetchall()
            for row in rows:
                yield Planned(*row)
            if len(rows) < _PAGE:
                return
            place = rows[-1][0]

    def plan(self, place: int, status: Status, start: int = 0) -> None:
        self._db.execute(
            "UPDATE sessions SET status = ?, start = ? WHERE place = ?", (status, start, place)
        )

    def expect_parent(self, session_id: str, number: int) -> None:
        """A parent that has not come yet, and must not come any more."""
        self._db.execute("INSERT OR IGNORE INTO parents VALUES (?, ?)", (session_id, number))

    def expected(self, session_id: str) -> int | None:
        """The line that named it as its parent."""
        sql = "SELECT number FROM parents WHERE id = ?"
        rows: list[Any] = self._db.execute(sql, (session_id,)).fetchall()
        return rows[0][0] if rows else None

    def rotate(self, parent_id: str) -> bool:
        self._db.execute("INSERT OR IGNORE INTO rotations VALUES (?)", (parent_id,))
        return self._new()

    def is_rotated(self, session_id: str) -> bool:
        sql = "SELECT 1 FROM rotations WHERE parent = ?"
        return bool(self._db.execute(sql, (session_id,)).fetchall())
