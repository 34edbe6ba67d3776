"""Handlers for transcripts: append, rotate, compact, rewind, restore, branch, erase, stage.

Keeps: seqs of a session are 0, 1, 2, … without gap or repeat and never change; each applied
command moves the revision by one; counters move with the rows they count; a rotation is one
transaction with everything it moves. Where a row stands when the transcript is read is its
*place*: its own seq, or the end of the range that it covers if it is a summary written in
place.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..commands import (
    AppendMessages,
    Branch,
    Compact,
    EraseMessages,
    Restore,
    Rewind,
    Rotate,
    StageMessages,
)
from .handlers import Handler, Handlers
from .rows import (
    ACTIVE,
    ERASED,
    MESSAGE,
    REWOUND,
    STATES,
    SUMMARISED,
    SUMMARY,
    details_of,
    same_content,
    size_of,
)
from .sessions import TOOL_CALLS, holder_of, move_route, next_title
from .transaction import SessionState, Transaction, refuse

if TYPE_CHECKING:
    from ..records import Draft, Message

PLACE = "coalesce(covers_last, seq)"
SIZE = "(coalesce(octet_length(text), 0) + coalesce(octet_length(details), 0))"


# Append --------------------------------------------------------------------------------------


def _stored_as_given(
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
    return _stored_as_given(tx, session, command.base_seq, command.messages)


def _append(tx: Transaction, command: AppendMessages) -> None:
    session = tx.stored_session(command.session_id)
    if command.base_seq != session.next_seq:
        _refuse_append(tx, session, command)
    turn = tx.stored_turn(command.turn_id) if command.turn_id is not None else None
    for draft in command.messages:
        _add(tx, session, draft, turn=turn)
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


def _add(
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


# Rotation and branching ----------------------------------------------------------------------


def _child_made(tx: Transaction, command: Rotate | Branch) -> bool:
    child = tx.session(command.child_id)
    parent = tx.session(command.parent_id)
    if child is None or parent is None or child.parent != parent.n:
        return False
    return tx.was_set(command.key, "route", command.replaces + 1, command)


def _rotate(tx: Transaction, command: Rotate) -> None:
    parent = tx.stored_session(command.parent_id)
    if parent.next_seq != command.parent_base_seq:
        refuse("broken_chain", parent.id, parent.next_seq, command.parent_base_seq)
    route = tx.route(command.key)
    if route.session_id != parent.id:  # or another key's route would name a session that has ended
        refuse("route_conflict", command.key, stored=route.session_id, given=parent.id)
    _refuse_taken_child(tx, command)
    tx.flush()
    turn = tx.stored_turn(command.turn_id) if command.turn_id is not None else None
    carried = json.dumps(sorted(set(command.carried)))
    _check_carried(tx, parent, carried, turn)
    if not command.force:
        _check_gain(tx, parent, command, carried, turn)

    version = parent.versions["end"] + 1
    tx.change(
        "UPDATE sessions SET ended_ms = ?, end_reason = 'compression', end_kind = 'rotation', "
        "end_version = ? WHERE n = ?",
        (command.at_ms, version, parent.n),
    )
    parent.versions["end"] = version
    parent.end_kind, parent.end_reason = "rotation", "compression"
    tx.touch(parent)

    child = _make_child(tx, parent, command, "rotation")
    for draft in command.summary:
        _add(tx, child, draft, kind=SUMMARY)
    tx.flush_messages()  # the summary's rows are committed before the carried ones, as they stand
    _carry(tx, parent, child, "seq IN (SELECT value FROM json_each(?))", carried)
    if turn is not None:
        tx.change("UPDATE turns SET session = ? WHERE n = ?", (child.n, turn))
    tx.revise(child, command.at_ms)
    move_route(tx, command.key, command.child_id, command.replaces, command)


def _refuse_taken_child(tx: Transaction, command: Rotate | Branch) -> None:
    taken = tx.session(command.child_id)
    holder = taken.key if taken is not None else holder_of(tx, command.child_id)
    if holder is not None:
        refuse("route_conflict", command.key, stored=holder, given=command.child_id)


def _check_carried(tx: Transaction, parent: SessionState, carried: str, turn: int | None) -> None:
    """What is carried is active, and holds the whole of the running turn."""
    stray = tx.one(
        "SELECT value FROM json_each(?) EXCEPT "
        "SELECT seq FROM messages WHERE session = ? AND state = 0",
        (carried, parent.n),
    )
    if stray is not None:
        refuse("invalid", "carried", given=f"seq {stray[0]} is not an active message")
    if turn is None:
        return
    left = tx.one(
        "SELECT seq FROM messages WHERE session = ? AND turn = ? AND state = 0 AND seq >= ? EXCEPT "
        "SELECT value FROM json_each(?)",
        (parent.n, turn, parent.first_active, carried),
    )
    if left is not None:
        refuse("invalid", "carried", given=f"seq {left[0]} of the running turn is left behind")


def _check_gain(
    tx: Transaction, parent: SessionState, command: Rotate, carried: str, turn: int | None
) -> None:
    """The child must be smaller, the running turn left out on both sides: contract B11."""
    measure = (
        f"SELECT count(*), coalesce(sum({SIZE}), 0) FROM messages "
        "WHERE session = ? AND state = 0 AND seq >= ? AND coalesce(turn, 0) <> ?"
    )
    scope = (parent.n, parent.first_active, turn or -1)
    before = tx.one(measure, scope)
    kept = tx.one(f"{measure} AND seq IN (SELECT value FROM json_each(?))", (*scope, carried))
    assert before is not None
    assert kept is not None
    count = kept[0] + len(command.summary)
    size = kept[1] + sum(size_of(draft.text, details_of(draft)) for draft in command.summary)
    if size >= before[1] or count > before[0]:
        refuse("no_gain", parent.id, stored=list(before), given=[count, size])


def _make_child(
    tx: Transaction, parent: SessionState, command: Rotate | Branch, edge: str
) -> SessionState:
    """The child's row.

    What describes the conversation follows it, the title with its next number.
    """
    row = tx.one("SELECT source, user, model, meta FROM sessions WHERE n = ?", (parent.n,))
    assert row is not None
    title = next_title(tx, parent.title) if parent.title is not None else None
    return tx.insert_session(
        {
            "id": command.child_id,
            "key": command.key,
            "parent": parent.n,
            "edge": edge,
            "source": row[0],
            "user": row[1],
            "model": row[2],
            "meta": row[3],
            "title": title,
            "title_origin": parent.title_origin if title is not None else None,
            "started_ms": command.at_ms,
        },
        command.at_ms,
    )


def _carry(
    tx: Transaction, parent: SessionState, child: SessionState, which: str, value: Any
) -> None:
    """Copy active rows of the parent, in the order of its transcript, behind what the child has."""
    tx.change(
        "INSERT INTO messages (session, seq, uid, turn, role, state, carried, kind, created_ms, "
        "user, text, "
        "details) SELECT ?, ? + row_number() OVER (ORDER BY place, seq) - 1, uid, turn, role, 0, "
        "1, kind, "
        f"created_ms, user, text, details FROM (SELECT *, {PLACE} AS place FROM messages "
        f"WHERE session = ? AND state = 0 AND {which}) ORDER BY place, seq",
        (child.n, child.next_seq, parent.n, value),
    )
    tx.change(
        "INSERT INTO blob_uses SELECT u.blob, c.session, c.seq FROM messages c "
        "JOIN messages o ON o.session = ? AND o.uid = c.uid "
        "JOIN blob_uses u ON u.session = o.session AND u.seq = o.seq "
        "WHERE c.session = ? AND c.seq >= ?",
        (parent.n, child.n, child.next_seq),
    )
    row = tx.one(
        f"SELECT count(*), coalesce(sum({SIZE}), 0) FROM messages WHERE session = ? AND seq >= ?",
        (child.n, child.next_seq),
    )
    assert row is not None
    child.next_seq += row[0]
    child.active_count += row[0]
    child.active_bytes += row[1]


def _branch(tx: Transaction, command: Branch) -> None:
    parent = tx.stored_session(command.parent_id)
    _refuse_taken_child(tx, command)
    tx.flush()
    child = _make_child(tx, parent, command, "branch")
    _carry(tx, parent, child, f"{PLACE} <= ?", command.upto_seq)
    tx.touch(parent)
    tx.revise(child, command.at_ms)
    move_route(tx, command.key, command.child_id, command.replaces, command)


# Compaction in place -------------------------------------------------------------------------


def _compacted(tx: Transaction, command: Compact) -> bool:
    session = tx.session(command.session_id)
    if session is None or command.base_seq >= session.next_seq:
        return False
    if not _stored_as_given(tx, session, command.base_seq, (command.summary,)):
        return False
    if session.deleted:
        return True
    row = tx.one(
        "SELECT covers_first, covers_last FROM messages WHERE session = ? AND seq = ?",
        (session.n, command.base_seq),
    )
    return row == (command.first_seq, command.last_seq)


def _compact(tx: Transaction, command: Compact) -> None:
    session = tx.stored_session(command.session_id)
    if command.base_seq != session.next_seq:
        refuse("broken_chain", session.id, session.next_seq, command.base_seq)
    tx.flush()
    turn = tx.stored_turn(command.turn_id) if command.turn_id is not None else None
    if not 0 <= command.first_seq <= command.last_seq < command.base_seq:
        refuse("invalid", "range", given="it is no range of stored messages")
    covered = f"session = ? AND state = 0 AND {PLACE} BETWEEN ? AND ?"
    scope = (session.n, command.first_seq, command.last_seq)
    row = tx.one(
        f"SELECT count(*), coalesce(sum({SIZE}), 0), count(*) FILTER (WHERE turn = ?) "
        f"FROM messages WHERE {covered}",
        (turn, *scope),
    )
    assert row is not None
    count, size, of_turn = row
    if count == 0:
        refuse("invalid", "range", given="no active message stands in it")
    if of_turn:
        refuse("invalid", "range", given="it cuts into the running turn")
    summary_size = size_of(command.summary.text, details_of(command.summary))
    if not command.force and summary_size >= size:
        refuse("no_gain", session.id, stored=[count, size], given=[1, summary_size])
    tx.change(
        f"UPDATE messages SET state = {SUMMARISED}, summarised_by = ? WHERE {covered}",
        (command.base_seq, *scope),
    )
    tx.change(
        "UPDATE sessions SET compaction_count = compaction_count + 1 WHERE n = ?", (session.n,)
    )
    session.active_count -= count
    session.active_bytes -= size
    _add(tx, session, command.summary, kind=SUMMARY, covers=(command.first_seq, command.last_seq))
    tx.flush_messages()
    _find_first_active(tx, session)
    tx.revise(session, command.at_ms)


def _find_first_active(tx: Transaction, session: SessionState) -> None:
    row = tx.one("SELECT min(seq) FROM messages WHERE session = ? AND state = 0", (session.n,))
    session.first_active = row[0] if row is not None and row[0] is not None else session.next_seq


# Rewind and restore --------------------------------------------------------------------------


def _rewound(tx: Transaction, command: Rewind | Restore) -> bool:
    return tx.was_set(command.session_id, "revision", command.replaces + 1, command)


def _expect_revision(session: SessionState, replaces: int) -> None:
    if session.revision != replaces:
        refuse("stale", f"revision of {session.id}", stored=session.revision, given=replaces)


def _rewind(tx: Transaction, command: Rewind) -> None:
    """Rows at or after the point go.

    Rows before it come back if the summary that covered them goes.
    """
    session = tx.stored_session(command.session_id)
    _expect_revision(session, command.replaces)
    tx.flush()
    gone = tx.all(
        f"SELECT seq, state, summarised_by FROM messages WHERE session = ? AND state <> {REWOUND} "
        f"AND {PLACE} >= ?",
        (session.n, command.to_seq),
    )
    gone_seqs = json.dumps([seq for seq, _, _ in gone])
    back = tx.all(
        "SELECT seq, state, summarised_by FROM messages WHERE session = ? AND state = "
        f"{SUMMARISED} "
        f"AND {PLACE} < ? AND summarised_by IN (SELECT value FROM json_each(?))",
        (session.n, command.to_seq, gone_seqs),
    )
    _set_states(tx, session, gone_seqs, REWOUND)
    back_seqs = json.dumps([seq for seq, _, _ in back])
    _set_states(tx, session, back_seqs, ACTIVE)
    next_seq = session.next_seq
    for draft in command.closing:
        _add(tx, session, draft)
    tx.flush_messages()
    _recount_active(tx, session)
    tx.revise(session, command.at_ms)
    tx.change(
        "INSERT INTO rewinds VALUES (?, ?, 'rewind', ?, ?, ?, ?)",
        (
            session.n,
            session.revision,
            command.to_seq,
            next_seq,
            json.dumps(_ranges([*gone, *back]), separators=(",", ":")),
            command.at_ms,
        ),
    )
    tx.record_set(session.id, "revision", session.revision, command, command.at_ms)


def _set_states(tx: Transaction, session: SessionState, seqs: str, state: int) -> None:
    tx.change(
        "UPDATE messages SET state = ?, summarised_by = NULL "
        "WHERE session = ? AND seq IN (SELECT value FROM json_each(?))",
        (state, session.n, seqs),
    )


def _ranges(rows: list[tuple[Any, ...]]) -> list[list[Any]]:
    """(seq, state, summarised_by) rows as runs: [first seq, last seq, state, summarised_by]."""
    ranges: list[list[Any]] = []
    for seq, state, summarised_by in sorted(rows, key=lambda row: int(row[0])):
        if ranges and ranges[-1][1:] == [seq - 1, state, summarised_by]:
            ranges[-1][1] = seq
        else:
            ranges.append([seq, seq, state, summarised_by])
    return ranges


def _recount_active(tx: Transaction, session: SessionState) -> None:
    row = tx.one(
        f"SELECT count(*), coalesce(sum({SIZE}), 0) FROM messages WHERE session = ? AND state = 0",
        (session.n,),
    )
    assert row is not None
    session.active_count, session.active_bytes = row
    _find_first_active(tx, session)


def _restore(tx: Transaction, command: Restore) -> None:
    session = tx.stored_session(command.session_id)
    _expect_revision(session, command.replaces)
    tx.flush()
    row = tx.one(
        "SELECT kind, to_seq, next_seq, changed FROM rewinds WHERE session = ? AND revision = ?",
        (session.n, session.revision),
    )
    # The rewind must be the last thing that happened: what came after it would be torn from its
    # context.
    if row is None or row[0] != "rewind":
        refuse("stale", f"rewind of {session.id}", given=command.replaces)
    _, to_seq, next_seq, changed = row
    # What the rewind itself has added, results for open tool calls, has no use any more.
    tx.change(
        f"UPDATE messages SET state = {REWOUND} WHERE session = ? AND seq >= ?",
        (session.n, next_seq),
    )
    for first, last, state, summarised_by in json.loads(changed):
        tx.change(
            "UPDATE messages SET state = ?, summarised_by = ? WHERE session = ? AND seq BETWEEN ? "
            "AND ?",
            (state, summarised_by, session.n, first, last),
        )
    _recount_active(tx, session)
    tx.revise(session, command.at_ms)
    tx.change(
        "INSERT INTO rewinds VALUES (?, ?, 'restore', ?, ?, '[]', ?)",
        (session.n, session.revision, to_seq, next_seq, command.at_ms),
    )
    tx.record_set(session.id, "revision", session.revision, command, command.at_ms)


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
    tx.change(f"DELETE FROM blob_uses WHERE {rows}", scope)
    tx.change(
        f"UPDATE messages SET kind = kind | {ERASED}, text = '', details = NULL, user = NULL "
        f"WHERE {rows}",
        scope,
    )
    _recount_active(tx, session)
    tx.revise(session)


def _staged(tx: Transaction, command: StageMessages) -> bool:
    session = tx.session(command.session_id)
    if session is None or not command.messages:
        return False
    return _stored_as_given(tx, session, command.messages[0].seq, command.messages)


def _stage(tx: Transaction, command: StageMessages) -> None:
    session = tx.stored_session(command.session_id)
    if not session.hidden:
        refuse(
            "invalid", "session", given="only a hidden session is staged; others are appended to"
        )
    for message in command.messages:
        if message.seq != session.next_seq:
            refuse("broken_chain", session.id, session.next_seq, message.seq)
        _add_as_is(tx, session, message)
    tx.flush_messages()
    _find_first_active(tx, session)
    tx.revise(session)


def _add_as_is(tx: Transaction, session: SessionState, message: Message) -> None:
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
    Rotate: Handler(_child_made, _rotate),
    Branch: Handler(_child_made, _branch),
    Compact: Handler(_compacted, _compact),
    Rewind: Handler(_rewound, _rewind),
    Restore: Handler(_rewound, _restore),
    EraseMessages: Handler(_erased, _erase),
    StageMessages: Handler(_staged, _stage),
}
