"""The read views of transcripts: pages in reading order, what stands around a message, look-ups.

A row that can't be decoded is shown as damaged; it never hides the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..errors import MissingError
from ..records import Found, Message
from .queries import Queries
from .rows import (
    ACTIVE,
    MESSAGE_COLUMNS,
    MESSAGE_COLUMNS_RAW,
    MESSAGE_TABLES,
    REWOUND,
    mended_message_of,
    message_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from apsw import SQLiteValue

    from ..identity import Seq, SessionId, TurnId, Uid

_PLACE = "coalesce(m.covers_last, m.seq)"


class TranscriptViews(Queries):
    """The part of a reader that shows messages."""

    def transcript(
        self,
        session_id: SessionId,
        *,
        include_inactive: bool = False,
        after: tuple[int, int] | None = None,
        limit: int = 200,
    ) -> Found:
        row = self._one(
            "SELECT s.n, h.first_active FROM sessions s JOIN heads h ON h.session = s.n WHERE "
            "s.id = ? AND s.deleted = 0",
            (session_id,),
        )
        if row is None:
            return Found(messages=())
        n, first_active = row
        place, seq = after if after is not None else (-1, -1)
        start = max(place, 0 if include_inactive else first_active)
        active = "" if include_inactive else f"AND m.state = {ACTIVE} "
        # Rows stand at their own seq, except summaries written in place, of which there are
        # few: the two are read from their own indices and merged, so that a page costs the same
        # anywhere.
        rows = self._messages(
            f"WHERE m.session = ? AND m.covers_last IS NULL AND m.seq >= ? {active}"
            "AND (m.seq, m.seq) > (?, ?) ORDER BY m.seq LIMIT ?",
            (n, start, place, seq, limit),
        )
        summaries = self._messages(
            f"WHERE m.session = ? AND m.covers_last IS NOT NULL {active}"
            "AND (m.covers_last, m.seq) > (?, ?) ORDER BY m.covers_last, m.seq LIMIT ?",
            (n, place, seq, limit),
        )
        page = sorted([*rows, *summaries], key=_standing)[:limit]
        following = _standing(page[-1]) if page and len(page) == limit else None
        return Found(messages=tuple(page), next=following)

    def around(self, session_id: SessionId, uid: Uid, *, before: int = 5, after: int = 5) -> Found:
        found = self.seqs(session_id, (uid,))
        if uid not in found:
            raise MissingError(f"message {uid} in session {session_id}")
        row = self._one(
            "SELECT s.n, coalesce(m.covers_last, m.seq) FROM sessions s JOIN messages m ON "
            "m.session = s.n WHERE s.id = ? AND m.seq = ?",
            (session_id, found[uid]),
        )
        assert row is not None
        n, place = row
        here = (place, found[uid])
        earlier = self._messages(
            f"WHERE m.session = ? AND ({_PLACE}, m.seq) <= (?, ?) "
            f"AND (m.state = {ACTIVE} OR m.seq = ?) ORDER BY {_PLACE} DESC, m.seq DESC LIMIT ?",
            (n, *here, found[uid], before + 1),
        )
        later = self._messages(
            f"WHERE m.session = ? AND ({_PLACE}, m.seq) > (?, ?) "
            f"AND m.state = {ACTIVE} ORDER BY {_PLACE}, m.seq LIMIT ?",
            (n, *here, after),
        )
        return Found(messages=(*reversed(earlier), *later))

    def _messages(self, where: str, parameters: tuple[SQLiteValue, ...]) -> list[Message]:
        try:
            rows = self._all(f"SELECT {MESSAGE_COLUMNS} FROM {MESSAGE_TABLES} {where}", parameters)
            return [message_of(row) for row in rows]
        except (UnicodeDecodeError, msgspec.DecodeError):
            rows = self._all(
                f"SELECT {MESSAGE_COLUMNS_RAW} FROM {MESSAGE_TABLES} {where}", parameters
            )
            return [mended_message_of(row) for row in rows]

    def message(self, uid: Uid) -> Message | None:
        rows = self._messages(
            "WHERE m.uid = ? AND m.carried = 0 AND s.hidden = 0 AND s.deleted = 0",
            (bytes.fromhex(uid),),
        )
        return rows[0] if rows else None

    def revision(self, session_id: SessionId) -> int:
        row = self._one(
            "SELECT h.revision FROM heads h JOIN sessions s ON s.n = h.session WHERE s.id = ?",
            (session_id,),
        )
        return 0 if row is None else row[0]

    def seqs(self, session_id: SessionId, uids: Sequence[Uid]) -> dict[Uid, Seq]:
        found: dict[Uid, Seq] = {}
        for uid in uids:
            for carried in (0, 1):  # one index each
                row = self._one(
                    "SELECT m.seq FROM messages m JOIN sessions s ON s.n = m.session "
                    f"WHERE m.uid = ? AND m.carried = {carried} AND s.id = ? AND s.deleted = 0",
                    (bytes.fromhex(uid), session_id),
                )
                if row is not None:
                    found[uid] = row[0]
        return found

    def said_since(self, session_id: SessionId, seq: int, limit: int = 200) -> tuple[Message, ...]:
        return tuple(
            self._messages(
                "WHERE m.session = (SELECT n FROM sessions WHERE id = ? AND deleted = 0) "
                "AND m.seq > ? "
                f"AND m.carried = 0 AND m.state <> {REWOUND} ORDER BY m.seq LIMIT ?",
                (session_id, seq, limit),
            )
        )

    def turn_messages(self, turn_id: TurnId) -> tuple[Message, ...]:
        """The rows of one turn in its session, in order, active or not."""
        return tuple(
            self._messages(
                "WHERE m.session = t.session AND t.id = ? AND s.deleted = 0 ORDER BY m.seq",
                (turn_id,),
            )
        )


def _standing(message: Message) -> tuple[int, int]:
    """Where a message stands when the transcript is read."""
    return (message.covers[1] if message.covers else message.seq, message.seq)
