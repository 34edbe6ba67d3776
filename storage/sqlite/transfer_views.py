"""The read views that exports and imports need: sessions by lineage, and all that is in one.

Every page is found by an index, so that the last one costs what the first one does.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..identity import BlobId, SessionId, Uid
from ..records import Staged, Tokens, Usage
from .transcript_views import TranscriptViews
from .work_views import TURN, turn_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..identity import SessionKey
    from ..records import Message, Turn


class TransferViews(TranscriptViews):
    """The part of a reader that shows everything there is, in an order of its own."""

    def root_sessions(
        self, after: str = "", limit: int = 200, *, key: SessionKey | None = None
    ) -> tuple[SessionId, ...]:
        inside = "p.hidden = 1" if key is None else "(p.hidden = 1 OR p.key <> s.key)"
        rows = self._all(
            "SELECT s.id FROM sessions s LEFT JOIN sessions p ON p.n = s.parent "
            f"WHERE s.id > ? AND s.hidden = 0 AND (s.parent IS NULL OR {inside}) "
            f"{'' if key is None else 'AND s.key = ? '}ORDER BY s.id LIMIT ?",
            (after, limit) if key is None else (after, key, limit),
        )
        return tuple(SessionId(row[0]) for row in rows)

    def child_sessions(
        self, session_id: SessionId, *, key: SessionKey | None = None
    ) -> tuple[SessionId, ...]:
        rows = self._all(
            "SELECT c.id FROM sessions c WHERE c.parent = (SELECT n FROM sessions WHERE id = ?) "
            f"AND c.hidden = 0 {'' if key is None else 'AND c.key = ? '}"
            "ORDER BY c.edge IS NOT 'rotation', c.id",
            (session_id,) if key is None else (session_id, key),
        )
        return tuple(SessionId(row[0]) for row in rows)

    def successor(self, session_id: SessionId) -> SessionId | None:
        row = self._one(
            "SELECT c.id FROM sessions c JOIN sessions p ON p.n = c.parent WHERE p.id = ? "
            "AND c.edge = 'rotation' AND c.hidden = 0",
            (session_id,),
        )
        return None if row is None else SessionId(row[0])

    def stored_rows(self) -> int:
        row = self._one(
            "SELECT coalesce(sum(h.next_seq), 0) FROM heads h JOIN sessions s ON s.n = h.session "
            "WHERE s.hidden = 0 AND s.deleted = 0"
        )
        return 0 if row is None else int(row[0])

    def rows_of(self, session_id: SessionId, first: int, limit: int) -> tuple[Message, ...]:
        return tuple(
            self._messages(
                "WHERE m.session = (SELECT n FROM sessions WHERE id = ? AND deleted = 0) "
                "AND m.seq >= ? ORDER BY m.seq LIMIT ?",
                (session_id, first, limit),
            )
        )

    def turns_of(
        self, session_id: SessionId, after: tuple[int, str] | None = None, limit: int = 200
    ) -> tuple[Turn, ...]:
        rows = self._all(
            f"{TURN} WHERE t.session = (SELECT n FROM sessions WHERE id = ?) "
            "AND (t.opened_ms, t.id) > (?, ?) ORDER BY t.opened_ms, t.id LIMIT ?",
            (session_id, *((-(2**63), "") if after is None else after), limit),
        )
        return tuple(replace(turn_of(row), waits=0) for row in rows)

    def usage_of(
        self, session_id: SessionId, after: Uid | None = None, limit: int = 200
    ) -> tuple[Usage, ...]:
        rows = self._all(
            "SELECT u.call, t.id, u.model, u.auxiliary, u.input, u.output, u.cache_read, "
            "u.cache_write, u.reasoning, u.cost_nanos, u.at_ms FROM usage u "
            "LEFT JOIN turns t ON t.n = u.turn "
            "WHERE u.session = (SELECT n FROM sessions WHERE id = ?) AND u.call > ? "
            "ORDER BY u.call LIMIT ?",
            (session_id, b"" if after is None else bytes.fromhex(after), limit),
        )
        names = ("input", "output", "cache_read", "cache_write", "reasoning")
        return tuple(
            Usage(
                call_id=Uid(row[0].hex()),
                session_id=session_id,
                turn_id=row[1],
                model=row[2],
                auxiliary=bool(row[3]),
                tokens=Tokens(**dict(zip(names, row[4:9], strict=True))),
                cost_nanos=row[9],
                at_ms=row[10],
            )
            for row in rows
        )

    def blobs_of(
        self, session_id: SessionId, after: str = "", limit: int = 200
    ) -> tuple[BlobId, ...]:
        rows = self._all(
            "SELECT DISTINCT b.id FROM blob_uses u JOIN blobs b ON b.n = u.blob "
            "WHERE u.session = (SELECT n FROM sessions WHERE id = ? AND deleted = 0) AND b.id > ? "
            "ORDER BY b.id LIMIT ?",
            (session_id, after, limit),
        )
        return tuple(BlobId(row[0]) for row in rows)

    def staged_sessions(self, after: str = "", limit: int = 200) -> tuple[Staged, ...]:
        rows = self._all(
            "SELECT s.id, h.next_seq, EXISTS (SELECT 1 FROM sessions c WHERE c.parent = s.n) "
            "FROM sessions s JOIN heads h ON h.session = s.n "
            "WHERE s.hidden = 1 AND s.deleted = 0 AND s.id > ? ORDER BY s.id LIMIT ?",
            (after, limit),
        )
        return tuple(Staged(id=row[0], next_seq=row[1], is_parent=bool(row[2])) for row in rows)

    def originals(self, uids: Sequence[Uid]) -> tuple[Message, ...]:
        return tuple(
            self._messages(
                "WHERE m.carried = 0 AND s.deleted = 0 "
                "AND m.uid IN (SELECT unhex(value) FROM json_each(?))",
                (json.dumps(uids),),
            )
        )
