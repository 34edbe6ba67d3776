"""Handlers for deletion: a session is gone from every view at once, and from the file in slices.

    GiveOriginals …  →  DeleteSession  →  PurgeSession …

The first hands what was carried on to those who have it, the second leaves a tombstone, the third
takes the rows away. A short session needs no slices: the tombstone and the last slice are one unit.

Keeps: a tombstone (id, key, edge), so that lineages hold; turns and inbox rows without text, so
that a repeated inbound message is still recognised; carried copies in other sessions, of which the
oldest becomes the original. Between the tombstone and its last slice no view shows what is left,
and no handler builds on it (`gone.py`). Neither step costs more than what it names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..commands import DeleteSession, GiveOriginals, PurgeSession
from .erasing import blank_turn
from .handlers import Handler, Handlers
from .rows import SUMMARY
from .sessions import TOOL_CALLS, holder_of
from .transaction import SessionState, Transaction, refuse

if TYPE_CHECKING:
    from ..identity import SessionId, TurnId

SURROUNDINGS_AT_ONCE = 200  # rows of other tables, which go along with each slice

# Kept by a person: it, or what the conversation was rotated to.
PINNED = (
    "EXISTS (WITH RECURSIVE later (n) AS (SELECT s.n UNION SELECT c.n FROM later JOIN sessions c "
    "ON c.parent = later.n AND c.edge = 'rotation') SELECT 1 FROM later JOIN sessions p "
    "ON p.n = later.n WHERE p.pinned = 1)"
)
# What somebody still works on or has to decide, of a session that is called `s`.
BUSY = (
    "EXISTS (SELECT 1 FROM turns t WHERE t.session = s.n AND (t.state <> 'ended' "
    "OR EXISTS (SELECT 1 FROM dead_letters d WHERE d.turn = t.n AND d.state = 'open') "
    "OR EXISTS (SELECT 1 FROM questions q WHERE q.turn = t.n AND q.state = 'open') "
    "OR EXISTS (SELECT 1 FROM deliveries o WHERE o.turn = t.n "
    "AND o.state IN ('pending', 'sending')))) "
    "OR EXISTS (SELECT 1 FROM deliveries o WHERE o.session = s.n "
    "AND o.state IN ('pending', 'sending'))"
)


# Originals ---------------------------------------------------------------------------------------


def _given(tx: Transaction, session: SessionState) -> int:
    row = tx.one("SELECT given FROM purges WHERE session = ?", (session.n,))
    return 0 if row is None else row[0]


def _originals_given(tx: Transaction, command: GiveOriginals) -> bool:
    session = tx.session(command.session_id)
    return session is not None and (session.deleted or _given(tx, session) > command.last_seq)


def _give_originals(tx: Transaction, command: GiveOriginals) -> None:
    session = tx.stored_session(command.session_id)
    _refuse_current(tx, session)
    given = _given(tx, session)
    if command.first_seq != given or command.last_seq < command.first_seq:
        refuse("stale", f"originals of {session.id}", stored=given, given=command.first_seq)
    tx.flush()
    _give_away(tx, session, command.first_seq, command.last_seq)
    tx.change(
        "INSERT INTO purges VALUES (?, 0, ?, 0) "
        "ON CONFLICT (session) DO UPDATE SET given = excluded.given",
        (session.n, command.last_seq + 1),
    )


def _refuse_current(tx: Transaction, session: SessionState) -> None:
    holder = holder_of(tx, session.id)
    if holder is not None:
        refuse("route_conflict", holder, stored=holder, given=session.id)


def _give_away(tx: Transaction, session: SessionState, first: int, last: int) -> None:
    """Of the session's own messages that were carried on, the oldest copy becomes the original.

    What is being imported may be dropped again, and inherits nothing.
    """
    heirs = tx.all(
        "SELECT min(c.n), o.n FROM messages o JOIN messages c ON c.uid = o.uid AND c.carried = 1 "
        "JOIN sessions k ON k.n = c.session AND k.deleted = 0 AND k.hidden = 0 "
        "WHERE o.session = ? AND o.seq BETWEEN ? AND ? AND o.carried = 0 "
        "AND c.session <> o.session GROUP BY c.uid",
        (session.n, first, last),
    )
    for n, original in heirs:
        # The index allows one original of a uid: the old one becomes a copy first.
        _count(tx, original, -1)
        tx.change("UPDATE messages SET carried = 1 WHERE n = ?", (original,))
        tx.change("UPDATE messages SET carried = 0 WHERE n = ?", (n,))
        _count(tx, n, 1)


def _count(tx: Transaction, n: int, by: int) -> None:
    """A row has become, or is no longer, its session's own."""
    row = tx.one(
        f"SELECT s.id, s.n, m.kind & {SUMMARY} = 0, {TOOL_CALLS} FROM messages m "
        "JOIN sessions s ON s.n = m.session WHERE m.n = ?",
        (n,),
    )
    assert row is not None
    session_id, session, counts, calls = row
    if counts:
        tx.change(
            "UPDATE heads SET message_count = message_count + ?, "
            "tool_call_count = tool_call_count + ? WHERE session = ?",
            (by, by * calls, session),
        )
    tx.forget(session_id)


# The tombstone -----------------------------------------------------------------------------------


def _session_deleted(tx: Transaction, command: DeleteSession) -> bool:
    session = tx.session(command.session_id)
    return session is not None and session.deleted


def _delete_session(tx: Transaction, command: DeleteSession) -> None:
    session = tx.stored_session(command.session_id)
    _refuse_current(tx, session)
    tx.flush()
    if command.quiet_since_ms is not None:
        _refuse_needed(tx, session.id, command.quiet_since_ms)
    _give_away(tx, session, _given(tx, session), session.next_seq)
    # What is not sent by now is not sent any more, and nobody must come across it.
    tx.change(
        "DELETE FROM deliveries WHERE n IN (SELECT d.n FROM deliveries d "
        "INDEXED BY deliveries_open LEFT JOIN turns t ON t.n = d.turn "
        "WHERE d.state IN ('pending', 'sending') AND (d.session = ? OR t.session = ?))",
        (session.n, session.n),
    )
    tx.change(
        "UPDATE sessions SET deleted = 1, title = NULL, title_origin = NULL, user = NULL, "
        "meta = NULL, ended_ms = coalesce(ended_ms, ?), "
        "end_reason = coalesce(end_reason, 'deleted'), end_kind = coalesce(end_kind, 'boundary') "
        "WHERE n = ?",
        (command.at_ms, session.n),
    )
    tx.change(
        "UPDATE heads SET message_count = 0, active_count = 0, active_bytes = 0, "
        "tool_call_count = 0 WHERE session = ?",
        (session.n,),
    )
    tx.change("INSERT OR IGNORE INTO purges VALUES (?, 0, 0, 0)", (session.n,))
    tx.forget(session.id)


def _refuse_needed(tx: Transaction, session_id: SessionId, since_ms: int) -> None:
    row = tx.one(
        f"SELECT h.last_ms, s.hidden, {PINNED}, {BUSY} FROM sessions s "
        "JOIN heads h ON h.session = s.n WHERE s.id = ?",
        (session_id,),
    )
    assert row is not None
    last_ms, *needed = row
    if last_ms >= since_ms or any(needed):
        refuse("stale", f"the rest of session {session_id}", stored=last_ms, given=since_ms)


# What is left ------------------------------------------------------------------------------------


def _purge(tx: Transaction, session: SessionState) -> tuple[Any, ...] | None:
    return tx.one("SELECT step, turn FROM purges WHERE session = ?", (session.n,))


def _session_purged(tx: Transaction, command: PurgeSession) -> bool:
    session = tx.session(command.session_id)
    if session is None or not session.deleted:
        return False
    row = _purge(tx, session)
    return row is None or row[0] > command.step


def _turn_of(tx: Transaction, session: SessionState, turn_id: TurnId) -> int:
    n = tx.stored_turn(turn_id)
    if tx.one("SELECT 1 FROM turns WHERE n = ? AND session = ?", (n, session.n)) is None:
        refuse("invalid", "turn_ids", given=f"turn {turn_id} is not of session {session.id}")
    return n


def _purge_session(tx: Transaction, command: PurgeSession) -> None:
    session = tx.session(command.session_id)
    if session is None:
        refuse("missing", f"session {command.session_id}")
    row = _purge(tx, session) if session.deleted else None
    if row is None or row[0] != command.step:
        stored = None if row is None else row[0]
        refuse("stale", f"what is left of {session.id}", stored=stored, given=command.step)
    tx.flush()
    before_seq = session.next_seq if command.last else command.before_seq
    for table in ("blob_uses", "messages"):
        tx.change(f"DELETE FROM {table} WHERE session = ? AND seq < ?", (session.n, before_seq))
    turns = [_turn_of(tx, session, turn_id) for turn_id in command.turn_ids]
    if command.last:
        rows = tx.all("SELECT n FROM turns WHERE session = ? AND n > ?", (session.n, row[1]))
        turns = [n for (n,) in rows]
    for n in turns:
        blank_turn(tx, n)
    tx.forget_turns()
    limit = -1 if command.last else SURROUNDINGS_AT_ONCE
    for table, name in (("deliveries", "n"), ("rewinds", "revision")):
        tx.change(
            f"DELETE FROM {table} WHERE session = ? AND {name} IN (SELECT {name} FROM {table} "
            "WHERE session = ? LIMIT ?)",
            (session.n, session.n, limit),
        )
    if command.last:
        tx.change("DELETE FROM purges WHERE session = ?", (session.n,))
    else:
        tx.change(
            "UPDATE purges SET step = step + 1, turn = max(turn, ?) WHERE session = ?",
            (max(turns, default=0), session.n),
        )


HANDLERS: Handlers = {
    GiveOriginals: Handler(_originals_given, _give_originals),
    DeleteSession: Handler(_session_deleted, _delete_session),
    PurgeSession: Handler(_session_purged, _purge_session),
}
