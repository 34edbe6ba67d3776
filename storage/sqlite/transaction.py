"""One batch under way: what the command handlers read and change.

Owns the write connection's cursor between begin and commit, a write-through cache of routes and
session heads, and the message rows and heads that are written in bulk at the end. Only one
engine writes, and every batch checks the epoch first, so the cache can't be stale; it is
dropped after anything went wrong.

Handlers check before they change, and every change goes through `change`, `add_message` or
`touch`: so `changed` tells whether a refused unit has already left something behind. Handlers
must not commit, roll back or open savepoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ..identity import Incarnation, Seq, SessionId, SessionKey, TurnId
from ..units import Head, Reason, Refused
from .rows import digest

if TYPE_CHECKING:
    import apsw
    from apsw import SQLiteValue

CACHE_SIZE_MAX = 20_000  # routes or heads; about 10 MB each when full

_INSERT_MESSAGE = (
    "INSERT INTO messages (session, seq, uid, turn, role, state, carried, kind, created_ms, user, "
    "text, "
    "details, covers_first, covers_last, summarised_by) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
)
_UPDATE_HEAD = (
    "UPDATE heads SET next_seq = ?, revision = ?, message_count = ?, active_count = ?, "
    "active_bytes = ?, "
    "tool_call_count = ?, first_active = ?, last_ms = ? WHERE session = ?"
)


class Refusal(Exception):
    """A unit can't be applied; `refused` says why."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.reason)
        self.refused = refused


def refuse(reason: Reason, what: str, stored: Any = None, given: Any = None) -> NoReturn:
    """Leave the handlers with a refusal."""
    raise Refusal(Refused(reason=reason, what=what, stored=stored, given=given))


class RouteState:
    """A key as the batch sees it."""

    __slots__ = ("exists", "incarnation", "key", "session_id", "versions")

    def __init__(self, key: SessionKey) -> None:
        self.key = key
        self.exists = False
        self.incarnation = Incarnation(0)
        self.session_id: SessionId | None = None
        self.versions = {"route": 0, "pending_title": 0, "compression": 0}


class SessionState:
    """A session as the batch sees it: its identity, its end, its head."""

    __slots__ = (
        "active_bytes",
        "active_count",
        "deleted",
        "end_kind",
        "end_reason",
        "first_active",
        "hidden",
        "id",
        "key",
        "last",
        "last_minute",
        "last_ms",
        "message_count",
        "n",
        "next_seq",
        "parent",
        "revision",
        "title",
        "title_origin",
        "tool_call_count",
        "versions",
    )

    def __init__(self, row: tuple[Any, ...]) -> None:
        self.n: int = row[0]
        self.id: SessionId = row[1]
        self.key: SessionKey = row[2]
        self.parent: int | None = row[3]
        self.end_kind: str | None = row[4]
        self.end_reason: str | None = row[5]
        self.deleted = bool(row[6])
        self.hidden = bool(row[7])
        self.title: str | None = row[8]
        self.title_origin: str | None = row[9]
        self.versions = {"title": row[10], "end": row[11], "flags": row[12], "details": row[13]}
        self.next_seq: int = row[14]
        self.revision: int = row[15]
        self.message_count: int = row[16]
        self.active_count: int = row[17]
        self.active_bytes: int = row[18]
        self.tool_call_count: int = row[19]
        self.first_active: int = row[20]
        self.last_ms: int = row[21]
        self.last_minute: int = row[22]
        self.last: tuple[int, str] | None = None  # seq and uid of a row that was the last

    def head(self) -> Head:
        return Head(self.id, Seq(self.next_seq), self.revision)


class TurnState:
    """A turn as the batch sees it. `ran_in` is the session it ran in last."""

    __slots__ = (
        "attempt",
        "ended_ms",
        "history",
        "key",
        "n",
        "opened_ms",
        "outcome",
        "ran_in",
        "started_ms",
        "state",
    )

    def __init__(self, row: tuple[Any, ...]) -> None:
        self.n: int = row[0]
        self.key: SessionKey = row[1]
        self.opened_ms: int = row[2]
        self.state: str = row[3]
        self.attempt: int = row[4]
        self.outcome: str | None = row[5]
        self.history: str | None = row[6]
        self.started_ms: int | None = row[7]
        self.ended_ms: int | None = row[8]
        self.ran_in: SessionId | None = row[9]


_SELECT_TURN = (
    "SELECT t.n, t.key, t.opened_ms, t.state, t.attempt, t.outcome, t.history, t.started_ms, "
    "t.ended_ms, s.id FROM turns t LEFT JOIN sessions s ON s.n = t.session WHERE t.id = ?"
)

_SELECT_INBOX = (
    "SELECT i.key, t.id, i.disposition, i.digest, i.accepted_ms FROM inbox i "
    "JOIN turns t ON t.n = i.turn WHERE i.source = ? AND i.inbound_id = ?"
)

_SELECT_SESSION = """
SELECT s.n, s.id, s.key, s.parent, s.end_kind, s.end_reason, s.deleted, s.hidden, s.title,
       s.title_origin, s.title_version, s.end_version, s.flags_version, s.details_version,
       h.next_seq, h.revision, h.message_count, h.active_count, h.active_bytes, h.tool_call_count,
       h.first_active, h.last_ms, h.last_minute
FROM sessions s JOIN heads h ON h.session = s.n WHERE s.id = ?"""


class Transaction:
    """The state of one batch, and the cache that outlives it."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self._cursor = db.cursor()
        self._routes: dict[SessionKey, RouteState] = {}
        self._sessions: dict[SessionId, SessionState] = {}
        self._turns: dict[TurnId, TurnState] = {}
        self._absent: set[str | tuple[str, str]] = set()
        self._rows: list[tuple[SQLiteValue, ...]] = []
        self._dirty: dict[int, SessionState] = {}
        self._heads: dict[SessionId, SessionState] = {}
        self._revised: set[SessionId] = set()
        self.found = False
        """All of this unit until now is stored already; so is the rest, for a unit is whole."""
        self.changes = 0
        self.rows = 0
        self.search_renewed = False
        self.commit_seq = 0
        self.route_writes = 0

    # Reading ---------------------------------------------------------------------------------

    def one(self, sql: str, parameters: tuple[SQLiteValue, ...] = ()) -> tuple[Any, ...] | None:
        """The first row, or none. Message rows still in memory are not seen: `flush` first."""
        return next(iter(self._cursor.execute(sql, parameters)), None)

    def all(self, sql: str, parameters: tuple[SQLiteValue, ...] = ()) -> list[tuple[Any, ...]]:
        return self._cursor.execute(sql, parameters).fetchall()

    def route(self, key: SessionKey) -> RouteState:
        """The key's state; one that does not exist yet has incarnation 0."""
        state = self._routes.get(key)
        if state is None:
            state = RouteState(key)
            row = self.one(
                "SELECT session_id, incarnation, route_version, pending_title_version, "
                "compression_version FROM routes WHERE key = ?",
                (key,),
            )
            if row is not None:
                state.exists = True
                state.session_id, state.incarnation = row[0], row[1]
                state.versions = {"route": row[2], "pending_title": row[3], "compression": row[4]}
            self._routes[key] = state
        return state

    def session(self, session_id: SessionId) -> SessionState | None:
        state = self._sessions.get(session_id)
        if state is None:
            row = self.one(_SELECT_SESSION, (session_id,))
            if row is None:
                return None
            state = self._sessions[session_id] = SessionState(row)
        return state

    def stored_session(self, session_id: SessionId) -> SessionState:
        """The session, which must be there and hold its text."""
        state = self.session(session_id)
        if state is None:
            refuse("missing", f"session {session_id}")
        if state.deleted:
            refuse("ended", session_id, stored="deleted")
        return state

    def turn(self, turn_id: TurnId) -> TurnState | None:
        """The turn; what a handler changes of it, it changes in both places."""
        state = self._turns.get(turn_id)
        if state is None and turn_id not in self._absent:
            row = self.one(_SELECT_TURN, (turn_id,))
            if row is None:
                self._absent.add(turn_id)
                return None
            state = self._turns[turn_id] = TurnState(row)
        return state

    def stored_turn(self, turn_id: TurnId) -> int:
        """The row number of a turn, which must be there."""
        state = self.turn(turn_id)
        if state is None:
            refuse("missing", f"turn {turn_id}")
        return state.n

    def inbound(self, source: str, inbound_id: str) -> tuple[Any, ...] | None:
        """An inbox row as it was accepted: key, turn id, disposition, digest, time."""
        if (source, inbound_id) in self._absent:
            return None
        row = self.one(_SELECT_INBOX, (source, inbound_id))
        if row is None:
            self._absent.add((source, inbound_id))
        return row

    def inbound_is_here(self, source: str, inbound_id: str) -> None:
        """A handler has stored it: the same unit may ask again."""
        self._absent.discard((source, inbound_id))

    # Changing --------------------------------------------------------------------------------

    def change(self, sql: str, parameters: tuple[SQLiteValue, ...] = ()) -> None:
        self.changes += 1
        self._cursor.execute(sql, parameters)

    def add_message(self, row: tuple[SQLiteValue, ...]) -> None:
        """A message row, written at the latest when the batch ends."""
        self.changes += 1
        self.rows += 1
        self._rows.append(row)

    def touch(self, session: SessionState, at_ms: int | None = None) -> None:
        """The session's head has changed; call it before or after setting the fields."""
        self.changes += 1
        self._dirty[session.n] = session
        self._heads[session.id] = session
        if at_ms is not None and at_ms > session.last_ms:
            session.last_ms = at_ms

    def revise(self, session: SessionState, at_ms: int | None = None) -> None:
        """The transcript has changed: its revision moves by one, once in a unit."""
        if session.id not in self._revised:
            self._revised.add(session.id)
            session.revision += 1
        self.touch(session, at_ms)

    def insert_session(
        self, columns: dict[str, SQLiteValue], at_ms: int, next_seq: int = 0
    ) -> SessionState:
        """A session's row and its head."""
        names = ", ".join(columns)
        marks = ", ".join("?" * len(columns))
        self.change(f"INSERT INTO sessions ({names}) VALUES ({marks})", tuple(columns.values()))
        self.change(
            "INSERT INTO heads VALUES (last_insert_rowid(), ?, 0, 0, 0, 0, 0, 0, ?, ?)",
            (next_seq, at_ms, at_ms // 60_000),
        )
        session = self.session(SessionId(str(columns["id"])))
        assert session is not None
        return session

    def insert_turn(self, turn_id: TurnId, key: SessionKey, at_ms: int) -> None:
        """A turn's row, queued."""
        self.change(
            "INSERT INTO turns (id, key, state, attempt, opened_ms) VALUES (?, ?, 'queued', 0, ?)",
            (turn_id, key, at_ms),
        )
        n = self._db.last_insert_rowid()
        self._absent.discard(turn_id)
        row = (n, key, at_ms, "queued", 0, None, None, None, None, None)
        self._turns[turn_id] = TurnState(row)

    def forget_turn(self, turn_id: TurnId) -> None:
        """It is over, and too large to keep."""
        self._turns.pop(turn_id, None)

    def forget_turns(self) -> None:
        """SQL has changed turns behind the cache."""
        self._turns.clear()

    # Values that are set: one row of `changes` each, so that a re-sent command is recognised -

    def was_set(self, scope: str, aspect: str, version: int, command: Any) -> bool:
        """Whether this very command made this version."""
        row = self.one(
            "SELECT digest FROM changes WHERE scope = ? AND aspect = ? AND version = ?",
            (scope, aspect, version),
        )
        return row is not None and row[0] == digest(command)

    def record_set(self, scope: str, aspect: str, version: int, command: Any, at_ms: int) -> None:
        self.change(
            "INSERT INTO changes VALUES (?, ?, ?, ?, ?)",
            (scope, aspect, version, digest(command), at_ms),
        )

    # The batch -------------------------------------------------------------------------------

    def begin_unit(self) -> None:
        self._heads = {}
        self.found = False
        if self._absent:  # known for one unit: the next may have stored it
            self._absent = set()
        if self._revised:
            self._revised = set()

    def heads(self) -> tuple[Head, ...]:
        """Where the sessions stand that the current unit has touched."""
        return tuple([session.head() for session in self._heads.values()])

    def flush_messages(self) -> None:
        """Write the gathered message rows, so that SQL sees them."""
        if self._rows:
            rows, self._rows = self._rows, []
            self._cursor.executemany(_INSERT_MESSAGE, rows)

    def flush(self) -> None:
        """Write everything that is gathered."""
        self.flush_messages()
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty.values(), {}
        self._cursor.executemany(
            _UPDATE_HEAD,
            [
                (
                    s.next_seq,
                    s.revision,
                    s.message_count,
                    s.active_count,
                    s.active_bytes,
                    s.tool_call_count,
                    s.first_active,
                    s.last_ms,
                    s.n,
                )
                for s in dirty
            ],
        )
        for session in dirty:
            minute = session.last_ms // 60_000
            if minute != session.last_minute:
                session.last_minute = minute
                self._cursor.execute(
                    "UPDATE heads SET last_minute = ? WHERE session = ?", (minute, session.n)
                )

    def forget(self, session_id: SessionId | None = None) -> None:
        """Drop the cached state of one session, or of everything, after it was changed or
        undone by SQL.
        """
        if session_id is not None:
            self._sessions.pop(session_id, None)
            return
        self._routes.clear()
        self._sessions.clear()
        self._turns.clear()
        self._absent.clear()
        self.search_renewed = False
        self._rows.clear()
        self._dirty.clear()
        self._heads.clear()

    def trim(self) -> None:
        """Between batches: keep the cache bounded, and no query open.

        One of which only the first row was read would hold this connection's snapshot, and with it
        the log.
        """
        self._cursor.close(force=True)
        self._cursor = self._db.cursor()
        self.rows = 0
        self.search_renewed = False
        for cache in (self._routes, self._sessions, self._turns):
            if len(cache) > CACHE_SIZE_MAX:
                cache.clear()
