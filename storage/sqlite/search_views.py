"""The reading half of search: the index, and what is not in it, on a read connection.

    older ……………… first_n ═══════ indexed ═══════ last_n ……… tail ……… now

A search sees every message that was acknowledged before it. The tail and the rows that changed are
read one by one, with the same words; so is everything else while the index is being built or is
damaged. Each page looks at a bounded piece of the file, so that a snapshot is never held for long;
a page may come back short, with the place to go on from.

Keeps: each message is found once, as an original, in a session that can be seen; never a rewound or
an erased one. What the index says is always checked against the row itself, so an entry that is out
of date shows nothing.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import apsw

from ..records import Hit, Hits, Message, Search
from ..snippets import snippet_of
from ..wanted import Wanted, wanted_of
from ..words import EDITION
from .queries import Queries
from .rows import ACTIVE, ERASED, REWOUND
from .search_index import facet_of, readable, searchable_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from apsw import SQLiteValue

    from ..identity import SessionId, Uid
    from ..records import Found

logger = logging.getLogger(__name__)

_READ_MAX = 5_000  # message numbers that are read one by one for one page
_WINDOW = 200_000  # message numbers that a page looks at in the index, from the newest on
_FACETS_MAX = 200
_PIECES_AT = 8  # in the record of the index's structure, behind a counter and a version
_CHANGED, _TAIL, _INDEXED, _OLDER = range(4)

Cursor: TypeAlias = "tuple[int, int, int]"

_TABLES = "messages m JOIN sessions s ON s.n = m.session"
_FINDABLE = (
    f"m.carried = 0 AND m.state <> {REWOUND} AND m.kind & {ERASED} = 0 "
    "AND s.hidden = 0 AND s.deleted = 0"
)


class _State:
    """How far the index goes, as this snapshot has it."""

    def __init__(self, row: tuple[Any, ...] | None, newest: int) -> None:
        first_n: int
        last_n: int
        first_n, last_n, edition, phase = row or (1, 0, "", "clearing")
        usable = phase == "ready" and (edition == EDITION or first_n > last_n)
        self.damaged = row is None
        self.newest = newest
        self.first_n, self.last_n = (first_n, last_n) if usable else (newest + 1, newest)

    @property
    def name(self) -> Literal["ready", "building", "damaged"]:
        return "damaged" if self.damaged else "building" if self.first_n > 1 else "ready"

    def distrust(self) -> None:
        """Read everything one by one."""
        self.damaged = True
        self.first_n, self.last_n = self.newest + 1, self.newest


class SearchViews(Queries):
    """The part of a reader that finds messages."""

    if TYPE_CHECKING:  # the reader that this is a part of has them

        def _messages(self, where: str, parameters: tuple[SQLiteValue, ...]) -> list[Message]: ...
        def around(
            self, session_id: SessionId, uid: Uid, *, before: int = 5, after: int = 5
        ) -> Found: ...

    def search(self, search: Search) -> Hits:
        wanted = wanted_of(search.text)
        row = self._one("SELECT coalesce(max(n), 0) FROM messages")
        assert row is not None
        state = _State(
            self._one("SELECT first_n, last_n, edition, phase FROM search_state"), row[0]
        )
        if not wanted.alternatives:
            return Hits(hits=())
        finder = Finder(self._db, search, wanted, state)
        find = finder.newest_first if search.order == "newest" else finder.by_rank
        try:
            if state.first_n <= state.last_n:
                self._check_structure()
            numbers, following = find()
        except (apsw.CorruptError, apsw.SQLError, apsw.NoMemError, apsw.IOError) as error:
            logger.error("the search index is damaged, the messages are read instead: %s", error)
            state.distrust()
            numbers, following = find()
        return Hits(hits=self._hits(numbers, search, wanted), next=following, index=state.name)

    def _check_structure(self) -> None:
        """Raise for an index that holds entries and forgot where: it would find nothing, and call
        that a result. Any other contradiction raises by itself.
        """
        row = self._one(
            "SELECT (SELECT block FROM search_index_data WHERE id = 10), "
            "EXISTS (SELECT 1 FROM search_index_docsize)"
        )
        assert row is not None
        structure, filled = row
        if filled and (structure is None or not any(structure[_PIECES_AT:])):
            raise apsw.CorruptError("it has entries and no pieces")

    def search_rebuilds(self) -> int:
        row = self._one(
            "SELECT coalesce(max(version), 0) FROM changes "
            "WHERE scope = 'search' AND aspect = 'rebuild'"
        )
        return 0 if row is None else row[0]

    def _hits(self, numbers: list[int], search: Search, wanted: Wanted) -> tuple[Hit, ...]:
        """What is shown of these rows, in their order."""
        where = "m.n IN (SELECT value FROM json_each(?)) ORDER BY m.n"
        these = (json.dumps(numbers),)
        messages = self._messages(f"WHERE {where}", these)
        rows = self._all(
            "SELECT s.key, s.source, s.title, CAST(m.text AS BLOB), CAST(m.details AS BLOB) "
            f"FROM {_TABLES} WHERE {where}",
            these,
        )
        hits = {
            n: self._hit(message, row, search, wanted)
            for n, message, row in zip(sorted(numbers), messages, rows, strict=True)
        }
        return tuple(hits[n] for n in numbers)

    def _hit(self, message: Message, row: tuple[Any, ...], search: Search, wanted: Wanted) -> Hit:
        before: tuple[Message, ...] = ()
        after: tuple[Message, ...] = ()
        if search.around:
            near = self.around(
                message.session_id, message.uid, before=search.around, after=search.around
            ).messages
            place = [one.uid for one in near].index(message.uid)
            before, after = near[:place], near[place + 1 :]
        return Hit(
            message=message,
            key=row[0],
            source=row[1],
            title=row[2],
            snippet=snippet_of(
                searchable_text(readable(row[3]), readable(row[4])), wanted, marks=search.marks
            ),
            before=before,
            after=after,
        )


class Finder:
    """The numbers of the messages that are found, page by page."""

    def __init__(self, db: apsw.Connection, search: Search, wanted: Wanted, state: _State) -> None:
        self._db = db
        self._search = search
        self._wanted = wanted
        self._state = state
        self._conditions, self._values = _filters(search)

    def newest_first(self) -> tuple[list[int], Cursor | None]:
        """By number, downwards; a cursor holds the lowest number that was looked at."""
        state, limit = self._state, self._search.limit
        high = self._search.after[1] if self._search.after else state.newest + 1
        found, high = self._read_down(state.last_n + 1, high, limit)
        if high > state.last_n + 1:
            return found, (_TAIL, high, 0)
        if high > state.first_n and len(found) < limit:
            low = max(state.first_n, high - _WINDOW)
            more = self._indexed(low, high, limit - len(found))
            found += more
            high = more[-1] if len(found) == limit else low
        if high > state.first_n or len(found) == limit:
            return found, (_TAIL, high, 0)
        more, high = self._read_down(1, high, limit - len(found))
        return found + more, (_TAIL, high, 0) if high > 1 else None

    def by_rank(self) -> tuple[list[int], Cursor | None]:
        """First what is not indexed yet, the newest first; then by rank; then what is older.

        A cursor holds where the index ended when the search began, so that a message that is
        indexed between two pages is not shown by both.
        """
        state, limit = self._state, self._search.limit
        phase, place, pin = self._search.after or (_CHANGED, 0, state.last_n)
        found: list[int] = []
        if phase == _CHANGED:
            found = self._changed(state.first_n, pin + 1)[place : place + limit]
            if len(found) == limit:
                return found, (_CHANGED, place + limit, pin)
            phase, place = _TAIL, state.newest + 1
        if phase == _TAIL:
            more, place = self._read_down(pin + 1, place, limit - len(found))
            found += more
            if place > pin + 1:
                return found, (_TAIL, place, pin)
            phase, place = _INDEXED, 0
        if phase == _INDEXED:
            more = self._ranked(pin, place, limit - len(found))
            found += more
            if len(found) == limit:
                return found, (_INDEXED, place + len(more), pin)
            phase, place = _OLDER, min(state.first_n, pin + 1)
        more, place = self._read_down(1, place, limit - len(found))
        return found + more, (_OLDER, place, pin) if place > 1 else None

    # Where they are found --------------------------------------------------------------------

    def _read_down(self, floor: int, high: int, limit: int) -> tuple[list[int], int]:
        """Rows below `high`, one by one, as many as a page may read; and how far that went."""
        if high <= floor or limit == 0:
            return [], high
        low = max(floor, high - _READ_MAX)
        found: list[int] = []
        for n, text, details in self._rows("m.n >= ? AND m.n < ?", (low, high)):
            if self._wanted.matches(searchable_text(readable(text), readable(details))):
                found.append(n)
                if len(found) == limit:
                    return found, n
        return found, low

    def _changed(self, low: int, high: int) -> list[int]:
        """Indexed rows whose entry can't be relied on just now, read one by one, from the top."""
        return [
            n
            for n, text, details in self._rows(
                "m.n IN (SELECT n FROM search_changes) AND m.n >= ? AND m.n < ?", (low, high)
            )
            if self._wanted.matches(searchable_text(readable(text), readable(details)))
        ]

    def _rows(self, where: str, parameters: tuple[int, int]) -> Iterator[tuple[Any, ...]]:
        # As bytes: a row that somebody damaged must not stop the search for all the others.
        yield from self._db.execute(
            "SELECT m.n, CAST(m.text AS BLOB), CAST(m.details AS BLOB) "
            f"FROM {_TABLES} WHERE {where} AND {_FINDABLE} {self._conditions} ORDER BY m.n DESC",
            (*parameters, *self._values),
        )

    def _indexed(self, low: int, high: int, limit: int) -> list[int]:
        """Rows `low <= n < high` by the index, from the top."""
        rows = self._db.execute(
            self._matching("f.rowid DESC"),
            (self._match(), low, high - 1, *self._values, limit, 0),
        )
        found = [n for (n,) in rows]
        changed = self._changed(low, high)
        return sorted((*found, *changed), reverse=True)[:limit] if changed else found

    def _ranked(self, pin: int, offset: int, limit: int) -> list[int]:
        """Rows of the index, the best ones first."""
        if self._state.first_n > self._state.last_n or limit == 0:
            return []
        rows = self._db.execute(
            self._matching("f.rank"),
            (self._match(), self._state.first_n, pin, *self._values, limit, offset),
        )
        return [n for (n,) in rows]

    def _matching(self, order: str) -> str:
        # Every row that the index names is looked at: what it says may be out of date.
        return (
            "SELECT m.n FROM search_index f CROSS JOIN messages m ON m.n = f.rowid "
            "CROSS JOIN sessions s ON s.n = m.session "
            f"WHERE search_index MATCH ? AND f.rowid >= ? AND f.rowid <= ? AND {_FINDABLE} "
            "AND NOT EXISTS (SELECT 1 FROM search_changes c WHERE c.n = m.n) "
            f"{self._conditions} ORDER BY {order} LIMIT ? OFFSET ?"
        )

    def _match(self) -> str:
        """The query, and the sessions that are looked at where they are few."""
        expression = self._wanted.expression
        sessions = self._sessions()
        if sessions is None:
            return expression
        # No column is named: looking into one only would cost more than the index itself.
        facets = " OR ".join(f'"{facet_of(session)}"' for session in sessions or (0,))
        return f"({expression}) AND ({facets})"

    def _sessions(self) -> list[int] | None:
        """The sessions that the filters name, if they name a few."""
        search = self._search
        for column, value in (("id", search.session_id), ("key", search.key)):
            if value is not None:
                rows: list[Any] = self._db.execute(
                    f"SELECT n FROM sessions WHERE {column} = ? LIMIT ?", (value, _FACETS_MAX + 1)
                ).fetchall()
                return [n for (n,) in rows] if len(rows) <= _FACETS_MAX else None
        return None


def _filters(search: Search) -> tuple[str, list[SQLiteValue]]:
    conditions: list[str] = []
    values: list[SQLiteValue] = []
    for condition, value in (
        ("s.id = ?", search.session_id),
        ("s.key = ?", search.key),
        ("s.source = ?", search.source),
        ("coalesce(m.user, s.user) = ?", search.user),
        ("m.role = ?", search.role),
        ("m.created_ms >= ?", search.since_ms),
        ("m.created_ms < ?", search.until_ms),
    ):
        if value is not None:
            conditions.append(f"AND {condition}")
            values.append(value)
    if search.active:
        conditions.append(f"AND m.state = {ACTIVE}")
    return " ".join(conditions), values
