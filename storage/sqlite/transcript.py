"""Handlers for transcripts: append, erase, stage; and what all changes of a transcript share.

Keeps: seqs of a session are 0, 1, 2, … without gap or repeat and never change; each applied
command moves the revision by one; counters move with the rows they count. Where a row stands when
the transcript is read is its *place*: its own seq, or the end of the range that it covers if it
is a summary written in place.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..commands import AppendMessages, EraseMessages, StageMessages
from .handlers import Handler, Handlers
from .rows import (
    ACTIVE,
    ERASED,
    MESSAGE,
    STATES,
    SUMMARY,
    details_of,
    same_content,
    size_of,
)
from .sessions import TOOL_CALLS
from .transaction import SessionState, Transaction, refuse

if TYPE_CHECKING:
    from ..records import Draft, Message

PLACE = "coalesce(covers_last, seq)"
SIZE = "(coalesce(octet_length(text), 0) + coalesce(octet_length(details), 0))"


# Append --------------------------------------------------------------------------------------


def stored_as_given(
    tx: Transaction, session: SessionState, base_seq: int, drafts: tuple[Draft, ...]
) -> bool:
    if base_seq + len(drafts) > session.next_seq:
        return False
    if (
        session.deleted
    ):  # the rows are gone on purpose; the tombstone's next seq says they were there
        return True
    tx.flush_messages()
    rows = tx.all(
        "SELECT uid, role, created_ms, user, text, details, kind FROM messages "
        "WHERE session = ? AND seq >= ? AND seq < ? ORDER BY seq",
        (session.n, base_seq, base_seq + len(drafts)),
    )
    return len(rows) == len(drafts) and all(map(same_content, rows, drafts))


def _appended(tx: Transaction, command: AppendMessages) -> bool:
    session = tx.session(command.session_id)
    if session is None or command.base_seq >= session.next_seq:
        return False  # the usual case: nothing is read from the table
    return stored_as_given(tx, session, command.base_seq, command.messages)


def _append(tx: Transaction, command: AppendMessages) -> None:
    session = tx.stored_session(command.session_id)
    if command.base_seq != session.next_seq:
        _refuse_append(tx, session, command)
    turn = tx.stored_turn(command.turn_id) if command.turn_id is not None else None
    for draft in command.messages:
        add_row(tx, session, draft, turn=turn)
    tx.revise(session)


def _refuse_append(tx: Transaction, session: SessionState, command: AppendMessages) -> None:
    """The same uid with other content is a conflict; anything else does not follow the chain."""
    tx.flush_messages()
    row = tx.one(
        "SELECT uid FROM messages WHERE session = ? AND seq = ?", (session.n, command.base_seq)
    )
    if row is not None and row[0].hex() == command.messages[0].uid:
        what = f"message {command.base_seq} of session {session.id}"
        refuse("conflict", what, stored=row[0].hex(), given=command.messages[0].uid)
    refuse("broken_chain", session.id, stored=session.next_seq, given=command.base_seq)


def add_row(
    tx: Transaction,
    session: SessionState,
    draft: Draft,
    *,
    turn: int | None = None,
    kind: int = MESSAGE,
    covers: tuple[int, int] | None = None,
) -> int:
    """One new row at the end, counted; returns its seq."""
    details = details_of(draft)
    seq = session.next_seq
    first, last = covers if covers else (None, None)
    tx.add_message(
        (
            session.n,
            seq,
            bytes.fromhex(draft.uid),
            turn,
            draft.role,
            ACTIVE,
            0,
            kind,
            draft.created_ms,
            draft.user,
            draft.text,
            details,
            first,
            last,
            None,
        )
    )
    session.next_seq = seq + 1
    session.last = (seq, draft.uid)
    session.active_count += 1
    session.active_bytes += size_of(draft.text, details)
    if kind != SUMMARY:
        session.message_count += 1
        session.tool_call_count += len(draft.tool_calls)
    if draft.blobs:
        _use_blobs(tx, session, seq, draft)
    if draft.created_ms > session.last_ms:
        session.last_ms = draft.created_ms
    return seq


def _use_blobs(tx: Transaction, session: SessionState, seq: int, draft: Draft) -> None:
    for blob_id in dict.fromkeys(draft.blobs):
        row = tx.one("SELECT n FROM blobs WHERE id = ? AND sealed_ms IS NOT NULL", (blob_id,))
        if row is None:
            refuse("missing", f"blob {blob_id}")
        tx.change("INSERT INTO blob_uses VALUES (?, ?, ?)", (row[0], session.n, seq))


# Counting ------------------------------------------------------------------------------------


def recount_active(tx: Transaction, session: SessionState) -> None:
    row = tx.one(
        f"SELECT count(*), coalesce(sum({SIZE}), 0) FROM messages WHERE session = ? AND state = 0",
        (session.n,),
    )
    assert row is not None
    session.active_count, session.active_bytes = row
    find_first_active(tx, session)


def find_first_active(tx: Transaction, session: SessionState, start: int = 0) -> None:
    """Look for it from a seq on before which there is none."""
    row = tx.one(
        "SELECT min(seq) FROM messages WHERE session = ? AND seq >= ? AND state = 0",
        (session.n, start),
    )
    session.first_active = row[0] if row is not None and row[0] is not None else session.next_seq


# Erasing and staging -------------------------------------------------------------------------


def _erased(tx: Transaction, command: EraseMessages) -> bool:
    session = tx.session(command.session_id)
    if session is None:
        return False
    if session.deleted:
        return True
    tx.flush_messages()
    row = tx.one(
        f"SELECT count(*) FROM messages WHERE session = ? AND kind & {ERASED} "
        "AND seq IN (SELECT value FROM json_each(?))",
        (session.n, json.dumps(command.seqs)),
    )
    return row == (len(set(command.seqs)),)


def _erase(tx: Transaction, command: EraseMessages) -> None:
    session = tx.stored_session(command.session_id)
    if any(not 0 <= seq < session.next_seq for seq in command.seqs):
        refuse("missing", f"a message of session {session.id}")
    tx.flush()
    scope = (session.n, json.dumps(command.seqs))
    rows = "session = ? AND seq IN (SELECT value FROM json_each(?))"
    calls = tx.one(
        f"SELECT coalesce(sum({TOOL_CALLS}), 0) FROM messages "
        f"WHERE {rows} AND carried = 0 AND kind & {SUMMARY} = 0",
        scope,
    )
    assert calls is not None
    session.tool_call_count -= calls[0]
    active = f"SELECT coalesce(sum({SIZE}), 0) FROM messages WHERE {rows} AND state = 0"
    before = tx.one(active, scope)
    tx.change(f"DELETE FROM blob_uses WHERE {rows}", scope)
    tx.change(
        f"UPDATE messages SET kind = kind | {ERASED}, text = '', details = NULL, user = NULL "
        f"WHERE {rows}",
        scope,
    )
    # Only the difference: a slice must not cost what the whole session is long.
    after = tx.one(active, scope)
    assert before is not None
    assert after is not None
    session.active_bytes += after[0] - before[0]
    tx.revise(session)


def _staged(tx: Transaction, command: StageMessages) -> bool:
    session = tx.session(command.session_id)
    if session is None or not command.messages:
        return False
    return stored_as_given(tx, session, command.messages[0].seq, command.messages)


def _stage(tx: Transaction, command: StageMessages) -> None:
    session = tx.stored_session(command.session_id)
    if not session.hidden:
        refuse(
            "invalid", "session", given="only a hidden session is staged; others are appended to"
        )
    for message in command.messages:
        if message.seq != session.next_seq:
            refuse("broken_chain", session.id, session.next_seq, message.seq)
        add_as_is(tx, session, message)
    tx.flush_messages()
    find_first_active(tx, session, session.first_active)
    tx.revise(session)


def add_as_is(tx: Transaction, session: SessionState, message: Message) -> None:
    details = details_of(message)
    first, last = message.covers if message.covers else (None, None)
    kind = (SUMMARY if message.summary else MESSAGE) | (ERASED if message.erased else 0)
    tx.add_message(
        (
            session.n,
            message.seq,
            bytes.fromhex(message.uid),
            None if message.turn_id is None else tx.stored_turn(message.turn_id),
            message.role,
            STATES.index(message.state),
            message.carried,
            kind,
            message.created_ms,
            message.user,
            message.text,
            details,
            first,
            last,
            message.summarised_by,
        )
    )
    if message.blobs:
        _use_blobs(tx, session, message.seq, message)
    session.last = (message.seq, message.uid)
    session.next_seq += 1
    if message.state == "active":
        session.active_count += 1
        session.active_bytes += size_of(message.text, details)
    if not message.summary and not message.carried:
        session.message_count += 1
        session.tool_call_count += len(message.tool_calls)
    session.last_ms = max(session.last_ms, message.created_ms)


HANDLERS: Handlers = {
    AppendMessages: Handler(_appended, _append),
    EraseMessages: Handler(_erased, _erase),
    StageMessages: Handler(_staged, _stage),
}
