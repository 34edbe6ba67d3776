"""Handlers that make a transcript shorter or copy it: rotate, branch, compact.

Keeps: a rotation is one transaction with everything it moves (the parent's end, the child with
its parent, the carried rows, the title, the route); a parent has one child by rotation at most;
what is compressed gets smaller, or the command is refused, unless a person forces it; no cut goes
through the running turn.
"""

from __future__ import annotations

import json
from typing import Any

from ..commands import Branch, Compact, Rotate
from .handlers import Handler, Handlers
from .rows import SUMMARISED, SUMMARY, details_of, size_of
from .sessions import holder_of, move_route, next_title
from .transaction import SessionState, Transaction, refuse
from .transcript import PLACE, SIZE, add_row, find_first_active, stored_as_given

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
        add_row(tx, child, draft, kind=SUMMARY)
    tx.flush_messages()  # the summary's rows are committed before the carried ones, as they stand
    _carry(tx, parent, child, "seq IN (SELECT value FROM json_each(?))", carried)
    if turn is not None:
        # Only if it runs here: one that waits elsewhere, or has not begun, stays where it is.
        tx.change(
            "UPDATE turns SET session = ? WHERE n = ? AND session = ?", (child.n, turn, parent.n)
        )
        tx.forget_turns()
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
    # Of what was handed on before its deletion there are new copies now.
    tx.change("UPDATE purges SET given = 0 WHERE session = ?", (parent.n,))
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
    if not stored_as_given(tx, session, command.base_seq, (command.summary,)):
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
    add_row(
        tx, session, command.summary, kind=SUMMARY, covers=(command.first_seq, command.last_seq)
    )
    tx.flush_messages()
    find_first_active(tx, session)
    tx.revise(session, command.at_ms)


HANDLERS: Handlers = {
    Rotate: Handler(_child_made, _rotate),
    Branch: Handler(_child_made, _branch),
    Compact: Handler(_compacted, _compact),
}
