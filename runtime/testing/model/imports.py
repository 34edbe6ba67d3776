"""The model of imports: staged turns, publication, going on in a session, dropping what is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ....storage import commands as c
from ....storage.identity import Seq
from ....storage.records import Session, TurnOutcome
from .sessions import hand_over, next_title
from .state import State, refuse
from .transcripts import add_as_is, revise

if TYPE_CHECKING:
    from ....storage.identity import SessionId
    from ....storage.records import SessionFacts, Turn

_GIVES_WAY = ("imported", "exported")


# Publishing --------------------------------------------------------------------------------------


def publish_session(state: State, command: c.PublishSession) -> bool:
    stored = state.sessions.get(command.session_id)
    if stored is not None and not stored.hidden:
        return False
    session = state.known_session(command.session_id)
    facts = command.facts
    if facts is None:
        state.sessions[session.id] = replace(session, hidden=False)
        return True
    if facts.next_seq != session.next_seq and not (facts.deleted and session.next_seq == 0):
        refuse("broken_chain", session.id)
    holder = state.holder(session.id)
    gone = facts.deleted or facts.end_kind == "rotation"
    if holder is not None and (holder != facts.key or gone):
        refuse("route_conflict", "a key has it")
    if facts.parent_id is not None:
        _check_parent(state, session, facts)
    if facts.parent_id is not None and facts.edge == "rotation":
        _go_on_in(state, command, facts)
    state.sessions[session.id] = _with_facts(state, state.sessions[session.id], facts)
    revise(state, session.id)
    return True


def _check_parent(state: State, session: Session, facts: SessionFacts) -> None:
    above: SessionId | None = facts.parent_id
    if above not in state.sessions:
        refuse("missing", f"parent {above}")
    seen: set[str] = set()
    while above is not None and above not in seen:
        if above == session.id:
            refuse("invalid", "its own ancestor")
        seen.add(above)
        above = state.sessions[above].parent_id
    other = [
        s.id
        for s in state.sessions.values()
        if (s.parent_id, s.edge) == (facts.parent_id, "rotation") and s.id != session.id
    ]
    if facts.edge == "rotation" and other:
        refuse("conflict", "the parent has a child by rotation")


def _go_on_in(state: State, command: c.PublishSession, facts: SessionFacts) -> None:
    assert facts.parent_id is not None
    parent = state.sessions[facts.parent_id]
    if parent.hidden and not parent.deleted:
        return
    if parent.end_kind == "boundary" and not parent.deleted:
        refuse("ended", parent.id)
    if parent.end_kind != "rotation":
        state.sessions[parent.id] = replace(
            parent,
            ended_ms=facts.started_ms,
            end_reason="compression",
            end_kind="rotation",
            end_version=parent.end_version + 1,
        )
    holder = state.holder(parent.id)
    if holder is not None and holder != facts.key:
        refuse("route_conflict", "another key has the parent")
    if holder is not None:
        hand_over(state, holder, command.session_id, command)


def _with_facts(state: State, session: Session, facts: SessionFacts) -> Session:
    ended: tuple[Any, Any, Any] = (facts.ended_ms, facts.end_reason, facts.end_kind)
    child = state.successor(session.id)
    if child is not None and not child.hidden and facts.end_kind != "rotation":
        ended = (child.started_ms, "compression", "rotation")
    title = facts.title
    if any(s.title == title and s.id != session.id for s in state.sessions.values() if s.title):
        assert title is not None
        title = next_title(state, title)
    return replace(
        session,
        hidden=False,
        key=facts.key,
        parent_id=facts.parent_id,
        edge=facts.edge,
        source=facts.source,
        user=facts.user,
        model=facts.model,
        title=title,
        title_origin=facts.title_origin,
        started_ms=facts.started_ms,
        last_ms=facts.last_ms,
        ended_ms=ended[0],
        end_reason=ended[1],
        end_kind=ended[2],
        end_version=session.end_version + (ended[2] == "rotation"),
        archived=facts.archived,
        pinned=facts.pinned,
        meta=facts.meta,
        deleted=facts.deleted,
        compaction_count=facts.compaction_count,
        next_seq=facts.next_seq,
    )


# Going on ----------------------------------------------------------------------------------------


def extend_session(state: State, command: c.ExtendSession) -> bool:
    if state.was_set(command.session_id, "revision", command.replaces, command):
        return False
    session = state.known_session(command.session_id)
    if session.hidden:
        refuse("invalid", "it is being staged")
    if session.end_kind == "rotation":
        refuse("ended", session.id)
    state.set_value(session.id, "revision", session.revision, command.replaces, command)
    if session.next_seq != command.base_seq:
        refuse("broken_chain", session.id)
    for message in command.messages:
        if message.seq != state.sessions[session.id].next_seq:
            refuse("broken_chain", session.id)
        state.known_turn(message.turn_id)
        add_as_is(state, session.id, message)
    for states in command.states:
        rows = state.transcripts[session.id]
        if not 0 <= states.first <= states.last < len(rows):
            refuse("invalid", "no range of stored messages")
        state.transcripts[session.id] = tuple(
            replace(m, state=states.state, summarised_by=states.summarised_by)
            if states.first <= m.seq <= states.last
            else m
            for m in rows
        )
    extended = state.sessions[session.id]
    compactions = sum(message.covers is not None for message in command.messages)
    state.sessions[session.id] = replace(
        extended, compaction_count=extended.compaction_count + compactions
    )
    revise(state, session.id, command.at_ms)
    return True


# Turns -------------------------------------------------------------------------------------------


def _turn_stands(state: State, session_id: SessionId, turn: Turn) -> bool:
    stored = state.turns.get(turn.id)
    if stored is None:
        return False
    outcome = stored.outcome
    gives_way = stored.state == "ended" and outcome is not None and outcome.cause in _GIVES_WAY
    return turn.session_id is None or not gives_way or replace(stored, waits=turn.waits) == turn


def stage_turns(state: State, command: c.StageTurns) -> bool:
    stored = state.sessions.get(command.session_id)
    if stored is not None and all(_turn_stands(state, stored.id, t) for t in command.turns):
        return False
    session = state.known_session(command.session_id)
    for turn in command.turns:
        if turn.state != "ended" or turn.outcome is None or turn.ended_ms is None:
            refuse("invalid", f"turn {turn.id} has not ended")
        if turn.session_id not in (None, session.id):
            refuse("invalid", f"turn {turn.id} is of another session")
        if _turn_stands(state, session.id, turn):
            continue
        state.turns[turn.id] = turn
        state.take("turn", turn.id, turn.attempt, "ended", turn.outcome, turn.ended_ms)
    return True


# Taking back -------------------------------------------------------------------------------------


def drop_staged(state: State, command: c.DropStaged) -> bool:
    stored = state.sessions.get(command.session_id)
    if stored is None or _nothing_left(state, stored, command):
        return False
    session = state.known_session(command.session_id)
    if not session.hidden:
        refuse("invalid", "it is not hidden")
    rows = state.transcripts[session.id]
    first = max(0, command.from_seq)
    if first < len(rows):
        state.transcripts[session.id] = rows[:first]
        state.sessions[session.id] = replace(session, next_seq=Seq(first))
        revise(state, session.id)
    for call in command.calls:
        if call in state.usage and state.usage[call].session_id == session.id:
            del state.usage[call]
    for turn_id in command.turns:
        turn = state.turns.get(turn_id)
        if turn is not None and turn.session_id == session.id:
            outcome = TurnOutcome(kind="interrupted", cause="imported")
            state.turns[turn_id] = replace(turn, session_id=None, outcome=outcome)
    if command.whole:
        _drop_whole(state, session.id)
    return True


def _nothing_left(state: State, session: Session, command: c.DropStaged) -> bool:
    return (
        not command.whole
        and session.hidden
        and session.next_seq <= max(0, command.from_seq)
        and not any(u.session_id == session.id for u in map(state.usage.get, command.calls) if u)
        and not any(t.session_id == session.id for t in map(state.turns.get, command.turns) if t)
    )


def _drop_whole(state: State, session_id: SessionId) -> None:
    referred = (
        any(s.parent_id == session_id for s in state.sessions.values())
        or any(u.session_id == session_id for u in state.usage.values())
        or any(t.session_id == session_id for t in state.turns.values())
        or bool(state.transcripts[session_id])
    )
    if referred:
        refuse("conflict", f"session {session_id}")
    del state.sessions[session_id]
    del state.transcripts[session_id]
    state.undo.pop(session_id, None)
    state.given.pop(session_id, None)
    state.values = {name: v for name, v in state.values.items() if name[0] != session_id}


COMMANDS: dict[type[c.Command], Any] = {
    c.PublishSession: publish_session,
    c.ExtendSession: extend_session,
    c.StageTurns: stage_turns,
    c.DropStaged: drop_staged,
}
