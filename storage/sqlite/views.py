"""The read views: SQL in, records out.

Every method reads from one snapshot, which the caller holds briefly; listings and transcripts
come in pages. A row that can't be decoded is shown as damaged, it never hides the others.
Nothing here writes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import AmbiguousError, MissingError
from ..identity import BlobId, Incarnation, SessionId, SessionKey
from ..records import (
    Blob,
    Listed,
    Route,
    Session,
    Tokens,
)
from .cleanup_views import CleanupViews
from .search_views import SearchViews
from .transfer_views import TransferViews
from .work_views import WorkViews

if TYPE_CHECKING:
    from apsw import SQLiteValue

PREVIEW_LENGTH_MAX = 200
_PLACE = "coalesce(m.covers_last, m.seq)"

_SESSION = """
SELECT s.id, s.key, p.id, s.edge, s.source, s.user, s.model, s.title, s.title_origin, s.started_ms,
       s.ended_ms, s.end_reason, s.end_kind, s.archived, s.pinned, s.meta, s.deleted, s.hidden,
       h.next_seq, h.revision, h.message_count, h.active_count, h.active_bytes, h.tool_call_count,
       s.compaction_count, h.last_ms, s.tokens, s.cost_nanos, s.auxiliary_tokens,
       s.auxiliary_cost_nanos, s.title_version, s.end_version, s.flags_version, s.details_version
FROM sessions s JOIN heads h ON h.session = s.n LEFT JOIN sessions p ON p.n = s.parent
"""


def _tokens(stored: str | None) -> Tokens:
    return Tokens() if stored is None else msgspec.json.decode(stored, type=Tokens)


def _session_of(row: tuple[Any, ...]) -> Session:
    return Session(
        id=row[0],
        key=row[1],
        parent_id=row[2],
        edge=row[3],
        source=row[4],
        user=row[5],
        model=row[6],
        title=row[7],
        title_origin=row[8],
        started_ms=row[9],
        ended_ms=row[10],
        end_reason=row[11],
        end_kind=row[12],
        archived=bool(row[13]),
        pinned=bool(row[14]),
        meta=None if row[15] is None else msgspec.json.decode(row[15]),
        deleted=bool(row[16]),
        hidden=bool(row[17]),
        next_seq=row[18],
        revision=row[19],
        message_count=row[20],
        active_count=row[21],
        active_bytes=row[22],
        tool_call_count=row[23],
        compaction_count=row[24],
        last_ms=row[25],
        tokens=_tokens(row[26]),
        cost_nanos=row[27],
        auxiliary_tokens=_tokens(row[28]),
        auxiliary_cost_nanos=row[29],
        title_version=row[30],
        end_version=row[31],
        flags_version=row[32],
        details_version=row[33],
    )


_TEXTS = {1: "s.key", 4: "s.source", 5: "s.user", 6: "s.model", 7: "s.title", 11: "s.end_reason"}
_META = 15
# The same columns for rows whose text is not valid UTF-8: text comes as bytes.
_SESSION_RAW = (
    re.sub(
        "|".join(rf"{re.escape(column)}\b" for column in (*_TEXTS.values(), "s.meta")),
        lambda column: f"CAST({column[0]} AS BLOB)",
        _SESSION.partition("FROM")[0],
    )
    + "FROM"
    + _SESSION.partition("FROM")[2]
)


def _mended_session_of(row: tuple[Any, ...]) -> Session:
    """A session whose text can't be read as it is: shown with replacement characters."""
    readable = list(row)
    for column in _TEXTS:
        if readable[column] is not None:
            readable[column] = readable[column].decode(errors="replace")
    try:
        return _session_of(tuple(readable))
    except (UnicodeDecodeError, msgspec.DecodeError):
        readable[_META] = None
        return _session_of(tuple(readable))


class SqliteReader(TransferViews, SearchViews, WorkViews, CleanupViews):
    """One snapshot of the database."""

    # Sessions --------------------------------------------------------------------------------

    def route(self, key: SessionKey) -> Route | None:
        row = self._one(
            "SELECT session_id, incarnation, pending_title, pending_title_origin, "
            "useless_compressions, "
            "route_version, pending_title_version, compression_version FROM routes WHERE key = ?",
            (key,),
        )
        if row is None:
            return None
        return Route(
            key=key,
            session_id=row[0],
            incarnation=Incarnation(row[1]),
            pending_title=row[2],
            pending_title_origin=row[3],
            useless_compressions=row[4],
            route_version=row[5],
            pending_title_version=row[6],
            compression_version=row[7],
        )

    def session(self, session_id: SessionId) -> Session | None:
        return next(iter(self._sessions("{session} WHERE s.id = ?", (session_id,))), None)

    def _session_row(self, session_id: SessionId) -> Session:
        session = self.session(session_id)
        assert session is not None
        return session

    def session_of_key(self, key: SessionKey) -> Session | None:
        sql = "{session} JOIN routes r ON r.session_id = s.id WHERE r.key = ?"
        return next(iter(self._sessions(sql, (key,))), None)

    def holder(self, session_id: SessionId) -> SessionKey | None:
        row = self._one("SELECT key FROM routes WHERE session_id = ?", (session_id,))
        return None if row is None else row[0]

    def _sessions(self, sql: str, parameters: tuple[SQLiteValue, ...]) -> list[Session]:
        """Sessions by a query that selects `{session}`."""
        try:
            rows = self._all(sql.format(session=_SESSION), parameters)
            return [_session_of(row) for row in rows]
        except (UnicodeDecodeError, msgspec.DecodeError):
            rows = self._all(sql.format(session=_SESSION_RAW), parameters)
            return [_mended_session_of(row) for row in rows]

    def find_session(self, given: str) -> Session:
        try:
            given.encode()
        except UnicodeEncodeError:  # half of a surrogate pair: nothing stored holds one
            raise MissingError(f"a session with id, prefix or title {given!r}") from None
        # A title that is exact beats a prefix that stands for several.
        candidates = self._with_prefix(given)
        unique = self.session(candidates[0]) if len(candidates) == 1 else None
        for found in (self.session(SessionId(given)), unique, self._by_title(given)):
            if found is not None and not found.hidden:
                return found
        if candidates:
            raise AmbiguousError(given, candidates)
        raise MissingError(f"a session with id, prefix or title {given!r}")

    def _with_prefix(self, prefix: str) -> tuple[SessionId, ...]:
        """A few ids that begin so: enough to tell whether there is more than one."""
        if not prefix:
            return ()
        # A range on the index; ids are ASCII, so nothing sorts behind the last character.
        rows = self._all(
            "SELECT id FROM sessions WHERE id >= ? AND id < ? AND deleted = 0 AND hidden = 0 "
            "ORDER BY id LIMIT 6",
            (prefix, prefix + "\x7f"),
        )
        return tuple(row[0] for row in rows)

    def _by_title(self, title: str) -> Session | None:
        row = self._one("SELECT id FROM sessions WHERE title = ?", (title,))
        if row is None:
            # The session that had the base title is gone: the highest number stands for the
            # lineage.
            rows = self._all(
                "SELECT id, title FROM sessions WHERE title > ? AND title < ?",
                (f"{title} #", f"{title} #:"),
            )
            numbered = [
                (int(number), i)
                for i, number in ((i, t[len(title) + 2 :]) for i, t in rows)
                if number.isascii() and number.isdigit()  # other scripts have digits, too
            ]
            return self.tip(max(numbered)[1]) if numbered else None
        return self.tip(row[0])

    def lineage(self, session_id: SessionId) -> tuple[Session, ...]:
        sessions = self._sessions(
            """WITH RECURSIVE
              up (n, parent, depth) AS (
                SELECT n, parent, 0 FROM sessions WHERE id = ?
                UNION SELECT s.n, s.parent, up.depth + 1 FROM sessions s JOIN up ON s.n = up.parent
                WHERE up.depth < 100000),
              down (n, depth) AS (
                SELECT n, 0 FROM sessions WHERE id = ?
                UNION SELECT s.n, down.depth + 1 FROM sessions s JOIN down ON s.parent = down.n
                WHERE s.edge = 'rotation' AND s.hidden = 0 AND down.depth < 100000),
              line (n, place) AS (
                SELECT n, -depth FROM up UNION SELECT n, depth FROM down)
            {session} JOIN line ON line.n = s.n WHERE s.hidden = 0 ORDER BY line.place""",
            (session_id, session_id),
        )
        return tuple(sessions)

    def tip(self, session_id: SessionId) -> Session | None:
        seen: set[str] = set()
        current: str | None = session_id
        while current is not None and current not in seen:
            seen.add(current)
            row = self._one(
                "SELECT c.id FROM sessions p JOIN sessions c ON c.parent = p.n AND c.edge = "
                "'rotation' "
                "WHERE p.id = ? AND c.hidden = 0",
                (current,),
            )
            if row is None:
                break
            current = row[0]
        return None if current is None else self.session(SessionId(current))

    def listing(
        self,
        *,
        source: str | None = None,
        key: SessionKey | None = None,
        archived: bool | None = False,
        since_ms: int | None = None,
        until_ms: int | None = None,
        limit: int = 50,
        after: tuple[int, int] | None = None,
    ) -> tuple[tuple[Listed, ...], tuple[int, int] | None]:
        conditions = [
            "s.deleted = 0",
            "s.hidden = 0",
            "NOT EXISTS (SELECT 1 FROM sessions c WHERE c.parent = s.n AND c.edge = 'rotation' "
            "AND c.hidden = 0)",
        ]
        parameters: list[SQLiteValue] = []
        for condition, value in (
            ("s.source = ?", source),
            ("s.key = ?", key),
            ("s.archived = ?", archived),
            ("h.last_ms >= ?", since_ms),
            ("h.last_ms < ?", until_ms),
        ):
            if value is not None:
                conditions.append(condition)
                parameters.append(value)
        if after is not None:
            conditions.append("(h.last_minute, h.session) < (?, ?)")
            parameters.extend(after)
        rows = self._all(
            "SELECT s.id, h.last_minute, s.n FROM heads h JOIN sessions s ON s.n = h.session "
            f"WHERE {' AND '.join(conditions)} ORDER BY h.last_minute DESC, h.session DESC LIMIT ?",
            (*parameters, limit),
        )
        listed = tuple(self._listed(row[0], row[2]) for row in rows)
        following = (rows[-1][1], rows[-1][2]) if rows and len(rows) == limit else None
        return listed, following

    def _listed(self, session_id: SessionId, n: int) -> Listed:
        session = self.session(session_id)
        assert session is not None
        # As bytes, because SQL's text functions stop at a NUL; no character has more than four.
        row = self._one(
            "SELECT substr(CAST(text AS BLOB), 1, ?) FROM messages WHERE session = ? "
            "AND state = 0 AND role = 'user' AND text IS NOT NULL ORDER BY seq LIMIT 1",
            (PREVIEW_LENGTH_MAX * 4, n),
        )
        length = self._one(
            "WITH RECURSIVE up (n, edge, parent, depth) AS (SELECT n, edge, parent, 1 FROM "
            "sessions "
            "WHERE n = ? UNION SELECT s.n, s.edge, s.parent, up.depth + 1 FROM sessions s JOIN up "
            "ON "
            "s.n = up.parent WHERE up.edge = 'rotation' AND up.depth < 100000) SELECT max(depth) "
            "FROM up",
            (n,),
        )
        assert length is not None
        preview = None
        if row is not None:  # a piece of an empty blob is NULL
            preview = (row[0] or b"").decode(errors="replace")[:PREVIEW_LENGTH_MAX]
        return Listed(session=session, preview=preview, lineage_length=length[0])

    # Blobs and marks -------------------------------------------------------------------------

    def blob(self, blob_id: BlobId) -> Blob | None:
        row = self._one(
            "SELECT size_bytes, chunk_count, media_type, sealed_ms FROM blobs WHERE id = ?",
            (blob_id,),
        )
        if row is None:
            return None
        return Blob(
            id=blob_id,
            size_bytes=row[0],
            chunk_count=row[1],
            media_type=row[2],
            sealed=row[3] is not None,
            sealed_ms=row[3],
        )

    def blob_chunk(self, blob_id: BlobId, index: int) -> bytes | None:
        row = self._one(
            "SELECT c.data FROM chunks c JOIN blobs b ON b.n = c.blob WHERE b.id = ? AND c.idx = ?",
            (blob_id, index),
        )
        return None if row is None else row[0]

    def mark(self, name: str) -> str | None:
        row = self._one("SELECT value FROM marks WHERE name = ?", (name,))
        return None if row is None else row[0]
