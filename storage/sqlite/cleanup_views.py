"""The read views of clean-up: what may go, page by page, and what of a user is where.

They only propose: whoever acts on an answer sends a command that looks again. A page is bounded by
what it shows; only `sessions_of_user` is bounded by what it looks at, because it has no index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..identity import BlobId, Seq, SessionId, SessionKey, TurnId
from ..records import Blob, PartOfUser, PurgeSlice, WorkOfUser
from .blobs import USED_BY
from .deletion import BUSY, PINNED, SURROUNDINGS_AT_ONCE
from .erasing import OLD_DELIVERY, OLD_TIMER, OLD_TURN
from .gone import turn_gone
from .leftovers import EMPTY, ORPHANED, UNROUTED
from .queries import Queries
from .rows import ERASED

if TYPE_CHECKING:
    from ..records import Session, WorkKind

_SIZE = "coalesce(octet_length(m.text), 0) + coalesce(octet_length(m.details), 0)"
_OLD: dict[WorkKind, tuple[str, str]] = {
    "deliveries": ("d.id, d.n", f"deliveries d WHERE {OLD_DELIVERY} AND d.n > :after ORDER BY d.n"),
    "timers": ("id, id", f"timers WHERE {OLD_TIMER} AND id > :after ORDER BY id"),
    "turns": ("t.id, t.n", f"turns t WHERE {OLD_TURN} AND t.n > :after ORDER BY t.n"),
}
# What a user said; where nobody is named, the session's user has said it.
_SAID_BY = (
    "(m.user = :user OR (m.user IS NULL AND m.role = 'user' AND s.user = :user)) "
    f"AND m.kind & {ERASED} = 0"
)
_SAID_BY_OTHERS = (
    "(m.user <> :user OR (m.user IS NULL AND m.role = 'user' AND s.user IS NOT :user)) "
    f"AND m.kind & {ERASED} = 0"
)
_WAITING_BY = "CASE WHEN json_valid({0}) THEN {0} ->> 'user' END = ?"


class CleanupViews(Queries):
    """The part of a reader that tells what may go."""

    def _some(
        self, where: str, parameters: tuple[Any, ...], limit: int
    ) -> tuple[tuple[Session, ...], int | None]:
        rows = self._all(
            "SELECT s.id, s.n FROM sessions s JOIN heads h ON h.session = s.n "
            f"WHERE {where} ORDER BY s.n LIMIT ?",
            (*parameters, limit),
        )
        sessions = tuple(self._session_row(row[0]) for row in rows)
        return sessions, rows[-1][1] if len(rows) == limit else None

    def _session_row(self, session_id: SessionId) -> Session:
        raise NotImplementedError

    def orphaned_rotations(
        self, before_ms: int, *, after: int = 0, limit: int = 200
    ) -> tuple[tuple[Session, ...], int | None]:
        where = f"s.parent IS NOT NULL AND {ORPHANED} AND s.n > ?"
        return self._some(where, (before_ms, after), limit)

    def empty_sessions(
        self, before_ms: int, *, after: int = 0, limit: int = 200
    ) -> tuple[tuple[Session, ...], int | None]:
        return self._some(f"{EMPTY} AND s.n > ?", (before_ms, after), limit)

    def quiet_sessions(
        self,
        before_ms: int,
        *,
        source: str | None = None,
        key: SessionKey | None = None,
        archived_only: bool = False,
        ended_only: bool = False,
        after: tuple[int, int] | None = None,
        limit: int = 200,
    ) -> tuple[tuple[Session, ...], tuple[int, int] | None]:
        where = f"s.deleted = 0 AND s.hidden = 0 AND h.last_ms < ? AND {UNROUTED}"
        parameters: list[Any] = [before_ms]
        for column, value in (("source", source), ("key", key)):
            if value is not None:
                where += f" AND s.{column} = ?"
                parameters.append(value)
        where += " AND s.archived = 1" if archived_only else ""
        where += " AND s.ended_ms IS NOT NULL" if ended_only else ""
        if after is not None:
            where += " AND (h.last_minute, h.session) > (?, ?)"
            parameters += after
        rows = self._all(
            "SELECT s.id, h.last_minute, s.n FROM heads h JOIN sessions s ON s.n = h.session "
            f"WHERE {where} AND NOT {PINNED} AND NOT ({BUSY}) "
            "ORDER BY h.last_minute, h.session LIMIT ?",
            (*parameters, limit),
        )
        sessions = tuple(self._session_row(row[0]) for row in rows)
        return sessions, (rows[-1][1], rows[-1][2]) if len(rows) == limit else None

    def old_work(
        self, kind: WorkKind, before_ms: int, *, after: str | None = None, limit: int = 200
    ) -> tuple[tuple[str, ...], str | None]:
        columns, rest = _OLD[kind]
        place: Any = (after or "") if kind == "timers" else int(after or 0)
        rows = self._all_named(
            f"SELECT {columns} FROM {rest} LIMIT :limit",
            {"before": before_ms, "after": place, "limit": limit},
        )
        return tuple(row[0] for row in rows), str(rows[-1][1]) if len(rows) == limit else None

    # Blobs -----------------------------------------------------------------------------------

    def unused_blobs(
        self, *, after: str = "", limit: int = 200
    ) -> tuple[tuple[tuple[Blob, int], ...], str | None]:
        rows = self._all(
            "SELECT b.id, b.size_bytes, b.chunk_count, b.media_type, b.sealed_ms, "
            "(SELECT count(*) FROM chunks c WHERE c.blob = b.n) FROM blobs b WHERE b.id > ? "
            "AND NOT EXISTS (SELECT 1 FROM blob_uses u WHERE u.blob = b.n) ORDER BY b.id LIMIT ?",
            (after, limit),
        )
        found = tuple(
            (
                Blob(
                    id=row[0],
                    size_bytes=row[1],
                    chunk_count=row[2],
                    media_type=row[3],
                    sealed=row[4] is not None,
                    sealed_ms=row[4],
                ),
                row[5],
            )
            for row in rows
            if not self.blob_in_use(row[0])
        )
        return found, rows[-1][0] if len(rows) == limit else None

    def blob_in_use(self, blob_id: BlobId) -> bool:
        return any(self._one(f"{sql} LIMIT 1", (blob_id,)) for _, sql in USED_BY)

    # Deletion --------------------------------------------------------------------------------

    def originals_given(self, session_id: SessionId) -> int:
        row = self._one(
            "SELECT p.given FROM purges p JOIN sessions s ON s.n = p.session "
            "WHERE s.id = ? AND s.deleted = 0",
            (session_id,),
        )
        return 0 if row is None else row[0]

    def originals_slice(
        self, session_id: SessionId, *, rows_max: int = 2_000, heirs_max: int = 50
    ) -> tuple[Seq, Seq] | None:
        given = self.originals_given(session_id)
        rows = self._all(
            "SELECT m.seq, m.carried = 0 AND EXISTS (SELECT 1 FROM messages c "
            "WHERE c.uid = m.uid AND c.carried = 1 AND c.session <> m.session) "
            "FROM messages m JOIN sessions s ON s.n = m.session WHERE s.id = ? AND s.deleted = 0 "
            "AND m.seq >= ? ORDER BY m.seq LIMIT ?",
            (session_id, given, rows_max),
        )
        heirs, last = 0, given - 1
        for seq, carried_on in rows:
            heirs += carried_on
            if heirs > heirs_max:
                return Seq(given), Seq(last)
            last = seq
        return (Seq(given), Seq(last)) if len(rows) == rows_max else None

    def purges(self, limit: int = 100) -> tuple[SessionId, ...]:
        # The other way round it would look at every session to find that there is nothing to do.
        rows = self._all(
            "SELECT s.id FROM purges p CROSS JOIN sessions s ON s.n = p.session "
            "WHERE s.deleted = 1 ORDER BY p.session LIMIT ?",
            (limit,),
        )
        return tuple(row[0] for row in rows)

    def purge_slice(
        self, session_id: SessionId, *, rows_max: int = 128, bytes_max: int = 256 * 1024
    ) -> PurgeSlice | None:
        purge = self._one(
            "SELECT p.session, p.step, p.turn FROM purges p JOIN sessions s ON s.n = p.session "
            "WHERE s.id = ? AND s.deleted = 1",
            (session_id,),
        )
        if purge is None:
            return None
        n, step, turn = purge
        before_seq, size, last = 0, 0, True
        rows = self._all(
            f"SELECT m.seq, {_SIZE} FROM messages m WHERE m.session = ? ORDER BY m.seq LIMIT ?",
            (n, rows_max + 1),
        )
        for number, (seq, bytes_) in enumerate(rows):
            if number and (number == rows_max or size + bytes_ > bytes_max):
                last = False
                break
            before_seq, size = seq + 1, size + bytes_
        # A turn has several rows around it, in as many tables.
        turns_max = max(1, rows_max // 4)
        turns = self._all(
            "SELECT id FROM turns WHERE session = ? AND n > ? ORDER BY n LIMIT ?",
            (n, turn, turns_max + 1),
        )
        last = last and len(turns) <= turns_max and not self._has_more(n)
        blobs = self._all(
            "SELECT DISTINCT b.id FROM blob_uses u JOIN blobs b ON b.n = u.blob "
            "WHERE u.session = ? AND u.seq < ?",
            (n, before_seq),
        )
        return PurgeSlice(
            session_id=session_id,
            step=step,
            before_seq=Seq(before_seq),
            turn_ids=() if last else tuple(TurnId(row[0]) for row in turns[:turns_max]),
            last=last,
            blob_ids=tuple(BlobId(row[0]) for row in blobs),
        )

    def _has_more(self, n: int) -> bool:
        """Whether more of the rest is left than goes along with one slice."""
        return any(
            len(self._all(f"SELECT 1 FROM {table} WHERE session = ? LIMIT ?", (n, limit + 1)))
            > limit
            for table, limit in (
                ("deliveries", SURROUNDINGS_AT_ONCE),
                ("rewinds", SURROUNDINGS_AT_ONCE),
            )
        )

    # Users -----------------------------------------------------------------------------------

    def sessions_of_user(
        self, user: str, *, after: int = -1, span: int = 20_000
    ) -> tuple[tuple[SessionId, ...], int | None]:
        if after < 0:
            rows = self._all(
                "SELECT id FROM sessions WHERE user = ? AND deleted = 0 AND hidden = 0", (user,)
            )
            return tuple(row[0] for row in rows), 0
        rows = self._all(
            "SELECT DISTINCT s.id FROM messages m JOIN sessions s ON s.n = m.session "
            "WHERE m.n > ? AND m.n <= ? AND m.user = ? AND s.deleted = 0 AND s.hidden = 0",
            (after, after + span, user),
        )
        newest = self._one("SELECT coalesce(max(n), 0) FROM messages")
        assert newest is not None
        return tuple(row[0] for row in rows), after + span if after + span < newest[0] else None

    def part_of_user(
        self, session_id: SessionId, user: str, *, after: int = -1, limit: int = 100
    ) -> PartOfUser:
        names = {"user": user, "session": session_id, "after": after, "limit": limit}
        tables = "messages m JOIN sessions s ON s.n = m.session"
        others = self._all_named(
            f"SELECT 1 FROM {tables} WHERE s.id = :session AND s.deleted = 0 "
            f"AND {_SAID_BY_OTHERS} LIMIT 1",
            names,
        )
        somebody = self._all_named(
            "SELECT 1 FROM sessions s WHERE s.id = :session AND s.deleted = 0 AND s.user <> :user",
            names,
        )
        rows = self._all_named(
            f"SELECT m.seq, t.id, m.details FROM {tables} LEFT JOIN turns t ON t.n = m.turn "
            "WHERE s.id = :session AND s.deleted = 0 AND m.seq > :after "
            f"AND {_SAID_BY} ORDER BY m.seq LIMIT :limit",
            names,
        )
        seqs = [row[0] for row in rows]
        blobs = self._all_named(
            "SELECT DISTINCT b.id FROM blob_uses u JOIN blobs b ON b.n = u.blob "
            "JOIN sessions s ON s.n = u.session WHERE s.id = :session AND s.deleted = 0 "
            "AND u.seq BETWEEN :first AND :last",
            names | {"first": min(seqs, default=0), "last": max(seqs, default=-1)},
        )
        return PartOfUser(
            only=not others and not somebody,
            seqs=tuple(seqs),
            turn_ids=tuple(dict.fromkeys(row[1] for row in rows if row[1] is not None)),
            blob_ids=tuple(row[0] for row in blobs),
        )

    def work_of_user(self, user: str) -> WorkOfUser:
        waiting = self._all(
            "SELECT DISTINCT t.key, t.id FROM turns t INDEXED BY turns_unfinished "
            "JOIN inbox i ON i.turn = t.n WHERE t.state <> 'ended' AND i.body IS NOT NULL "
            f"AND {_WAITING_BY.format('i.body')}",
            (user,),
        )
        timers = self._all(
            f"SELECT key, id FROM timers WHERE {_WAITING_BY.format('inbound')}", (user,)
        )
        answered = self._all(
            "SELECT DISTINCT t.id FROM questions q JOIN turns t ON t.n = q.turn "
            f"WHERE q.answered_by = ? AND NOT {turn_gone('t.n')}",
            (user,),
        )
        return WorkOfUser(
            waiting=tuple((SessionKey(row[0]), TurnId(row[1])) for row in waiting),
            timers=tuple((SessionKey(row[0]), row[1]) for row in timers),
            answered=tuple(TurnId(row[0]) for row in answered),
        )
