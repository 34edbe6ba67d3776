"""Handlers for imports: staged turns, publication, going on in a session, dropping what is left.

Keeps: nothing of a hidden session shows before it is published, and then all of it does; a session
that is here is only ever gone on with, behind its last row; a child by rotation has a parent that
ended by it, and the key's route follows. What an import wrote and nobody goes on with can be taken
away again, in slices, without a trace in what others refer to.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..commands import DropStaged, ExtendSession, PublishSession, StageTurns
from .handlers import Handler, Handlers
from .rows import STATES, SUMMARY, canonical, to_json
from .sessions import TOOL_CALLS, holder_of, move_route, next_title
from .transaction import SessionState, Transaction, refuse
from .transcript import SIZE, add_as_is, find_first_active

if TYPE_CHECKING:
    from ..records import SessionFacts, StateRange, Turn

# Of a turn that a file only refers to, and of one that ran when it was exported: either gives way
# to the turn itself.
STAND_IN, CUT_OFF = "imported", "exported"


# Publishing ----------------------------------------------------------------------------------


def _published(tx: Transaction, command: PublishSession) -> bool:
    session = tx.session(command.session_id)
    return session is not None and not session.hidden


def _publish(tx: Transaction, command: PublishSession) -> None:
    session = tx.stored_session(command.session_id)
    facts = command.facts
    if facts is None:
        tx.change("UPDATE sessions SET hidden = 0 WHERE n = ?", (session.n,))
        session.hidden = False
        tx.touch(session)
        return
    if facts.next_seq != session.next_seq and not (facts.deleted and session.next_seq == 0):
        refuse("broken_chain", session.id, stored=session.next_seq, given=facts.next_seq)
    holder = holder_of(tx, session.id)
    gone = facts.deleted or facts.end_kind == "rotation"
    if holder is not None and (holder != facts.key or gone):
        refuse("route_conflict", facts.key, stored=holder, given=session.id)
    parent = _parent_of(tx, session, facts)
    if parent is not None and facts.edge == "rotation":
        _go_on_in(tx, parent, command, facts)
    _set_facts(tx, session, parent, facts)


def _parent_of(tx: Transaction, session: SessionState, facts: SessionFacts) -> SessionState | None:
    if facts.parent_id is None:
        return None
    parent = tx.session(facts.parent_id)
    if parent is None:
        refuse("missing", f"parent session {facts.parent_id}")
    # Only one that is a parent itself, a place kept for it, can be above its own parent.
    if parent.n == session.n or tx.one(
        "WITH RECURSIVE up (n) AS (SELECT ? UNION SELECT s.parent FROM sessions s JOIN up "
        "ON s.n = up.n WHERE s.parent IS NOT NULL) SELECT 1 FROM up WHERE n = ? "
        "AND EXISTS (SELECT 1 FROM sessions WHERE parent = ?)",
        (parent.n, session.n, session.n),
    ):
        refuse("invalid", "parent_id", given=f"{session.id} would be its own ancestor")
    other = tx.one(
        "SELECT id FROM sessions WHERE parent = ? AND edge = 'rotation' AND n <> ?",
        (parent.n, session.n),
    )
    if facts.edge == "rotation" and other is not None:
        refuse("conflict", f"the child of session {parent.id}", stored=other[0], given=session.id)
    return parent


def _go_on_in(
    tx: Transaction, parent: SessionState, command: PublishSession, facts: SessionFacts
) -> None:
    """The parent has ended by compression, and whoever's it was has the child now."""
    if parent.hidden and not parent.deleted:
        return  # a place that is kept; its end comes with it
    if parent.end_kind == "boundary" and not parent.deleted:
        refuse("ended", parent.id, stored=parent.end_reason)
    if parent.end_kind != "rotation":
        parent.versions["end"] += 1
        tx.change(
            "UPDATE sessions SET ended_ms = ?, end_reason = 'compression', end_kind = 'rotation', "
            "end_version = ? WHERE n = ?",
            (facts.started_ms, parent.versions["end"], parent.n),
        )
        parent.end_kind, parent.end_reason = "rotation", "compression"
        tx.touch(parent)
    holder = holder_of(tx, parent.id)
    if holder is None:
        return
    if holder != facts.key:
        refuse("route_conflict", holder, stored=parent.id, given=command.session_id)
    version = tx.route(holder).versions["route"]
    move_route(tx, holder, command.session_id, version, command, facts.started_ms)


def _set_facts(
    tx: Transaction, session: SessionState, parent: SessionState | None, facts: SessionFacts
) -> None:
    ended = (facts.ended_ms, facts.end_reason, facts.end_kind)
    child = tx.one(
        "SELECT started_ms FROM sessions WHERE parent = ? AND edge = 'rotation' AND hidden = 0",
        (session.n,),
    )
    if child is not None and facts.end_kind != "rotation":
        ended = (child[0], "compression", "rotation")
    title = facts.title
    if title is not None and tx.one(
        "SELECT 1 FROM sessions WHERE title = ? AND n <> ?", (title, session.n)
    ):
        title = next_title(tx, title)
    if facts.deleted:
        session.next_seq = facts.next_seq
    session.last_ms = facts.last_ms
    tx.revise(session)
    tx.flush()
    tx.change(
        "UPDATE sessions SET hidden = 0, key = ?, parent = ?, edge = ?, source = ?, user = ?, "
        "model = ?, title = ?, title_origin = ?, started_ms = ?, ended_ms = ?, end_reason = ?, "
        "end_kind = ?, end_version = ?, archived = ?, pinned = ?, meta = ?, deleted = ?, "
        "compaction_count = ? WHERE n = ?",
        (
            facts.key,
            None if parent is None else parent.n,
            facts.edge,
            facts.source,
            facts.user,
            facts.model,
            title,
            facts.title_origin,
            facts.started_ms,
            *ended,
            session.versions["end"] + (ended[2] == "rotation"),
            facts.archived,
            facts.pinned,
            None if facts.meta is None else to_json(facts.meta),
            facts.deleted,
            facts.compaction_count,
            session.n,
        ),
    )
    tx.forget(session.id)


# Going on in a session that is here ----------------------------------------------------------


def _extended(tx: Transaction, command: ExtendSession) -> bool:
    return tx.was_set(command.session_id, "revision", command.replaces + 1, command)


def _extend(tx: Transaction, command: ExtendSession) -> None:
    session = tx.stored_session(command.session_id)
    if session.hidden:
        refuse("invalid", "session", given="it is being staged")
    if session.end_kind == "rotation":
        refuse("ended", session.id, stored=session.end_reason)
    if session.revision != command.replaces:
        refuse("stale", f"revision of {session.id}", session.revision, command.replaces)
    if session.next_seq != command.base_seq:
        refuse("broken_chain", session.id, session.next_seq, command.base_seq)
    for place, message in enumerate(command.messages, start=command.base_seq):
        if message.seq != place:
            refuse("broken_chain", session.id, place, message.seq)
        add_as_is(tx, session, message)
    tx.flush_messages()
    for states in command.states:
        if not 0 <= states.first <= states.last < session.next_seq:
            refuse("invalid", "states", given="they are of no range of stored messages")
        _set_states(tx, session, states)
    lowest = min((s.first for s in command.states), default=session.first_active)
    find_first_active(tx, session, min(lowest, session.first_active))
    compactions = sum(message.covers is not None for message in command.messages)
    if compactions:
        tx.change(
            "UPDATE sessions SET compaction_count = compaction_count + ? WHERE n = ?",
            (compactions, session.n),
        )
    tx.revise(session, command.at_ms)
    tx.record_set(session.id, "revision", session.revision, command, command.at_ms)


def _set_states(tx: Transaction, session: SessionState, states: StateRange) -> None:
    scope = (session.n, states.first, states.last)
    rows = "session = ? AND seq BETWEEN ? AND ?"
    active = f"SELECT count(*), coalesce(sum({SIZE}), 0) FROM messages WHERE {rows} AND state = 0"
    before = tx.one(active, scope)
    tx.change(
        f"UPDATE messages SET state = ?, summarised_by = ? WHERE {rows}",
        (STATES.index(states.state), states.summarised_by, *scope),
    )
    after = tx.one(active, scope)
    assert before is not None
    assert after is not None
    session.active_count += after[0] - before[0]
    session.active_bytes += after[1] - before[1]


# Turns ---------------------------------------------------------------------------------------

_GIVES_WAY = (
    "SELECT t.n, t.key, t.session, t.attempt, t.outcome, t.opened_ms, t.started_ms, t.ended_ms, "
    "t.state = 'ended' AND json_valid(t.outcome) AND "
    f"t.outcome ->> 'cause' IN ('{STAND_IN}', '{CUT_OFF}') FROM turns t WHERE t.id = ?"
)


def _turn_row(session: SessionState, turn: Turn) -> tuple[int | str | None, ...]:
    return (
        turn.key,
        session.n if turn.session_id == session.id else None,
        turn.attempt,
        canonical(turn.outcome).decode(),
        turn.opened_ms,
        turn.started_ms,
        turn.ended_ms,
    )


def _turn_stands(tx: Transaction, session: SessionState, turn: Turn) -> bool:
    """Whether what is stored of the turn is at least what is given."""
    row = tx.one(_GIVES_WAY, (turn.id,))
    if row is None:
        return False
    return turn.session_id is None or not row[8] or row[1:8] == _turn_row(session, turn)


def _turns_staged(tx: Transaction, command: StageTurns) -> bool:
    session = tx.session(command.session_id)
    return session is not None and all(_turn_stands(tx, session, turn) for turn in command.turns)


def _stage_turns(tx: Transaction, command: StageTurns) -> None:
    session = tx.stored_session(command.session_id)
    for turn in command.turns:
        if turn.state != "ended" or turn.outcome is None or turn.ended_ms is None:
            refuse("invalid", "turns", given=f"turn {turn.id} has not ended")
        if turn.session_id not in (None, session.id):
            refuse("invalid", "turns", given=f"turn {turn.id} is of another session")
        if _turn_stands(tx, session, turn):
            continue
        if tx.turn(turn.id) is None:
            tx.insert_turn(turn.id, turn.key, turn.opened_ms)
        tx.change(
            "UPDATE turns SET state = 'ended', key = ?, session = ?, attempt = ?, outcome = ?, "
            "opened_ms = ?, started_ms = ?, ended_ms = ? WHERE id = ?",
            (*_turn_row(session, turn), turn.id),
        )
        tx.forget_turn(turn.id)


# Taking back ---------------------------------------------------------------------------------


def _dropped(tx: Transaction, command: DropStaged) -> bool:
    session = tx.session(command.session_id)
    if session is None:
        return True
    if command.whole or not session.hidden or session.next_seq > max(0, command.from_seq):
        return False
    calls = [bytes.fromhex(call) for call in command.calls]
    return not (
        any(
            tx.one("SELECT 1 FROM usage WHERE call = ? AND session = ?", (call, session.n))
            for call in calls
        )
        or any(
            tx.one("SELECT 1 FROM turns WHERE id = ? AND session = ?", (turn, session.n))
            for turn in command.turns
        )
    )


def _drop(tx: Transaction, command: DropStaged) -> None:
    session = tx.stored_session(command.session_id)
    if not session.hidden:
        refuse("invalid", "session", given="only what is staged is dropped; delete others")
    tx.flush()
    if command.from_seq < session.next_seq:
        _drop_rows(tx, session, command.from_seq)
    for call in command.calls:
        _drop_usage(tx, session, call)
    for turn_id in command.turns:
        tx.change(
            "UPDATE turns SET session = NULL, outcome = ? WHERE id = ? AND session = ?",
            (f'{{"kind":"interrupted","cause":"{STAND_IN}"}}', turn_id, session.n),
        )
        tx.forget_turn(turn_id)
    if not command.whole:
        tx.touch(session)
        return
    for table, column in (("sessions", "parent"), ("usage", "session"), ("turns", "session")):
        if tx.one(f"SELECT 1 FROM {table} WHERE {column} = ?", (session.n,)) is not None:
            refuse("conflict", f"session {session.id}", stored=f"{table} refer to it")
    if session.next_seq:
        refuse("conflict", f"session {session.id}", stored="it has rows")
    for table in ("purges", "heads"):
        tx.change(f"DELETE FROM {table} WHERE session = ?", (session.n,))
    tx.change("DELETE FROM sessions WHERE n = ?", (session.n,))
    tx.change("DELETE FROM changes WHERE scope = ?", (session.id,))
    tx.forget(session.id)


def _drop_rows(tx: Transaction, session: SessionState, from_seq: int) -> None:
    scope = (session.n, from_seq)
    row = tx.one(
        "SELECT count(*) FILTER (WHERE state = 0), "
        f"coalesce(sum({SIZE}) FILTER (WHERE state = 0), 0), "
        f"count(*) FILTER (WHERE carried = 0 AND kind & {SUMMARY} = 0), "
        f"coalesce(sum({TOOL_CALLS}) FILTER (WHERE carried = 0 AND kind & {SUMMARY} = 0), 0) "
        "FROM messages WHERE session = ? AND seq >= ?",
        scope,
    )
    assert row is not None
    tx.change("DELETE FROM blob_uses WHERE session = ? AND seq >= ?", scope)
    tx.change("DELETE FROM messages WHERE session = ? AND seq >= ?", scope)
    session.active_count -= row[0]
    session.active_bytes -= row[1]
    session.message_count -= row[2]
    session.tool_call_count -= row[3]
    session.next_seq = max(0, from_seq)
    session.first_active = min(session.first_active, session.next_seq)
    session.last = None
    tx.revise(session)


def _drop_usage(tx: Transaction, session: SessionState, call: str) -> None:
    key = (bytes.fromhex(call), session.n)
    row = tx.one(
        "SELECT auxiliary, input, output, cache_read, cache_write, reasoning, cost_nanos "
        "FROM usage WHERE call = ? AND session = ?",
        key,
    )
    if row is None:
        return
    prefix = "auxiliary_" if row[0] else ""
    names = ("input", "output", "cache_read", "cache_write", "reasoning")
    stored = tx.one(f"SELECT {prefix}tokens FROM sessions WHERE n = ?", (session.n,))
    assert stored is not None
    before = json.loads(stored[0])
    left = {n: before.get(n, 0) - used for n, used in zip(names, row[1:6], strict=True)}
    tx.change("DELETE FROM usage WHERE call = ? AND session = ?", key)
    tx.change(
        f"UPDATE sessions SET {prefix}tokens = ?, {prefix}cost_nanos = {prefix}cost_nanos - ? "
        "WHERE n = ?",
        (json.dumps({n: v for n, v in left.items() if v}, separators=(",", ":")), row[6], key[1]),
    )


HANDLERS: Handlers = {
    PublishSession: Handler(_published, _publish),
    ExtendSession: Handler(_extended, _extend),
    StageTurns: Handler(_turns_staged, _stage_turns),
    DropStaged: Handler(_dropped, _drop),
}
