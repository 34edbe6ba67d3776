"""The model of clean-up: what goes, and on what conditions.

A deleted session is gone at once; which of its rows an engine has still to take away is no more
than a number of steps here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ....storage import commands as c
from ....storage.records import TurnOutcome
from .state import State, refuse

if TYPE_CHECKING:
    from ....storage.identity import SessionId, TurnId
    from ....storage.records import Delivery, Effect, Question, Session, Timer

ORPHANED_REASON = "orphaned_compression"
_ASPECTS = ("title", "end", "flags", "details", "revision")

# Contract G --------------------------------------------------------------------------------------


def is_orphaned(state: State, session: Session, before_ms: int) -> bool:
    parent = None if session.parent_id is None else state.sessions[session.parent_id]
    rows = state.transcripts[session.id]
    return (
        session.ended_ms is None
        and not session.deleted
        and not session.hidden
        and session.started_ms < before_ms
        and any(not m.carried and not m.summary for m in rows)
        and parent is not None
        and parent.end_reason == "compression"
        and state.holder(session.id) is None
        and all(state.turns[turn_id].state == "ended" for turn_id in state.turns_of(session.id))
    )


def end_orphan(state: State, command: c.EndOrphan) -> bool:
    if state.was_set(command.session_id, "end", command.replaces, command):
        return False
    session = state.known_session(command.session_id)
    if not is_orphaned(state, session, command.before_ms):
        refuse("stale", "it is no orphan")
    version = state.set_value(session.id, "end", session.end_version, command.replaces, command)
    state.sessions[session.id] = replace(
        session,
        end_version=version,
        ended_ms=command.at_ms,
        end_reason=ORPHANED_REASON,
        end_kind="suspension",
    )
    return True


def is_empty(state: State, session: Session, before_ms: int) -> bool:
    return (
        session.ended_ms is not None
        and session.ended_ms < before_ms
        and not (session.deleted or session.hidden or session.pinned)
        and session.title is None
        and not state.transcripts[session.id]
        and state.holder(session.id) is None
        and not any(s.parent_id == session.id for s in state.sessions.values())
        and not state.turns_of(session.id)
        and not any(d.session_id == session.id for d in state.deliveries.values())
        and not any(u.session_id == session.id for u in state.usage.values())
    )


def prune_session(state: State, command: c.PruneSession) -> bool:
    if command.session_id not in state.sessions:
        return False
    session = state.known_session(command.session_id)
    if not is_empty(state, session, command.before_ms):
        refuse("stale", "it is not empty, or referred to")
    del state.sessions[session.id], state.transcripts[session.id]
    state.given.pop(session.id, None)
    state.undo.pop(session.id, None)
    state.former_keys.pop(session.id, None)
    state.values = {
        name: value
        for name, value in state.values.items()
        if name[0] != session.id or name[1] not in _ASPECTS
    }
    return True


# Deletion ----------------------------------------------------------------------------------------


def give_originals(state: State, command: c.GiveOriginals) -> bool:
    stored = state.sessions.get(command.session_id)
    given = state.given.get(command.session_id, 0)
    if stored is not None and (stored.deleted or given > command.last_seq):
        return False
    session = state.known_session(command.session_id)
    if state.holder(session.id) is not None:
        refuse("route_conflict", "a key has it")
    if command.first_seq != given or command.last_seq < command.first_seq:
        refuse("stale", "originals")
    _give_away(state, session.id, range(command.first_seq, command.last_seq + 1))
    state.given[session.id] = command.last_seq + 1
    return True


def _give_away(state: State, session_id: SessionId, seqs: range) -> None:
    """The oldest copy of each of the session's own messages becomes the original."""
    rows = state.transcripts[session_id]
    left = {m.uid for m in rows if m.seq in seqs and not m.carried}
    for heir, copies in state.transcripts.items():
        if heir == session_id or state.sessions[heir].hidden:
            continue
        inherited = {m.uid for m in copies if m.carried and m.uid in left}
        left -= inherited
        state.transcripts[heir] = tuple(
            replace(m, carried=False) if m.uid in inherited else m for m in copies
        )
        rows = tuple(replace(m, carried=True) if m.uid in inherited else m for m in rows)
    state.transcripts[session_id] = rows


def delete_session(state: State, command: c.DeleteSession) -> bool:
    stored = state.sessions.get(command.session_id)
    if stored is not None and stored.deleted:
        return False
    session = state.known_session(command.session_id)
    if state.holder(session.id) is not None:
        refuse("route_conflict", "a key has it")
    since_ms = command.quiet_since_ms
    if since_ms is not None and (
        session.last_ms >= since_ms or session.hidden or state.is_needed(session.id)
    ):
        refuse("stale", "somebody needs it")
    _give_away(state, session.id, range(session.next_seq))
    _forget_work(state, session.id)
    state.transcripts[session.id] = ()
    state.undo.pop(session.id, None)
    state.given.pop(session.id, None)
    state.purges[session.id] = 0
    ended = session.end_kind is not None
    state.sessions[session.id] = replace(
        session,
        deleted=True,
        title=None,
        title_origin=None,
        user=None,
        meta=None,
        ended_ms=session.ended_ms if ended else command.at_ms,
        end_reason=session.end_reason if ended else "deleted",
        end_kind=session.end_kind if ended else "boundary",
    )
    return True


def _forget_work(state: State, session_id: SessionId) -> None:
    """What surrounds the session's turns loses its text; what dedupe needs stays."""
    for turn_id in state.turns_of(session_id):
        _blank_turn(state, turn_id)
    state.deliveries = {
        name: d for name, d in state.deliveries.items() if d.session_id != session_id
    }


def _blank_turn(state: State, turn_id: TurnId) -> None:
    turn = state.turns[turn_id]
    if turn.outcome is not None:
        state.take("turn", turn_id, turn.attempt, "ended", turn.outcome, turn.ended_ms)
        state.turns[turn_id] = replace(turn, outcome=TurnOutcome(kind=turn.outcome.kind))
    if turn_id in state.dead_letters:
        state.dead_letters[turn_id] = replace(state.dead_letters[turn_id], reason="")
    for name, entry in state.inbox.items():
        if turn_id in (entry.turn_id, entry.into):
            state.inbox[name] = replace(entry, body=None, reply_to=None)
    for delivery in state.deliveries.values():
        if delivery.turn_id == turn_id:
            state.forget("delivery", delivery.id)
    state.forget("effect", turn_id)
    state.deliveries = {n: d for n, d in state.deliveries.items() if d.turn_id != turn_id}
    state.effects = {n: e for n, e in state.effects.items() if e.turn_id != turn_id}
    state.questions = {n: q for n, q in state.questions.items() if q.turn_id != turn_id}


def purge_session(state: State, command: c.PurgeSession) -> bool:
    session = state.sessions.get(command.session_id)
    step = state.purges.get(command.session_id)
    if session is not None and session.deleted and (step is None or step > command.step):
        return False
    if session is None:
        refuse("missing", f"session {command.session_id}")
    if step != command.step:
        refuse("stale", f"what is left of {session.id}")
    for turn_id in command.turn_ids:
        state.known_turn(turn_id)
        if state.turns[turn_id].session_id != session.id:
            refuse("invalid", "turn_ids")
    if command.last:
        del state.purges[session.id]
    else:
        state.purges[session.id] = command.step + 1
    return True


# What surrounds turns ----------------------------------------------------------------------------


def erase_work(state: State, command: c.EraseWork) -> bool:
    known = [turn_id for turn_id in command.turn_ids if turn_id in state.turns]
    answers = {
        name
        for name, q in state.questions.items()
        if q.turn_id in command.answered
        and command.user is not None
        and q.answered_by == command.user
    }
    left = len(known) < len(command.turn_ids) or any(_is_left(state, one) for one in known)
    if not left and not answers and not any(one in state.timers for one in command.timer_ids):
        return False
    for turn_id in command.turn_ids:
        state.known_turn(turn_id)
        if state.turns[turn_id].state != "ended":
            refuse("stale", f"turn {turn_id}")
    for turn_id in command.answered:
        state.known_turn(turn_id)
    for name in answers:
        state.questions[name] = replace(state.questions[name], answer=None, answered_by=None)
    for turn_id in command.turn_ids:
        _blank_turn(state, turn_id)
    for timer_id in command.timer_ids:
        state.timers.pop(timer_id, None)
    return True


def _is_left(state: State, turn_id: TurnId) -> bool:
    """Whether anything surrounds the turn that could be blanked."""
    outcome, letter = state.turns[turn_id].outcome, state.dead_letters.get(turn_id)
    work: list[Delivery | Effect | Question] = [*state.deliveries.values()]
    work += [*state.effects.values(), *state.questions.values()]
    return (
        (outcome is not None and outcome != TurnOutcome(kind=outcome.kind))
        or (letter is not None and letter.reason != "")
        or any(one.turn_id == turn_id for one in work)
        or any(
            turn_id in (e.turn_id, e.into) and (e.body is not None or e.reply_to is not None)
            for e in state.inbox.values()
        )
    )


def is_old_delivery(state: State, delivery: Delivery, before_ms: int) -> bool:
    posted = list(state.deliveries.values())
    later = posted[posted.index(delivery) + 1 :]
    ended_ms = delivery.posted_ms if delivery.marked_ms is None else delivery.marked_ms
    return (
        delivery.state == "sent"
        and ended_ms < before_ms
        and any((d.key, d.source) == (delivery.key, delivery.source) for d in later)
    )


def is_old_timer(timer: Timer, before_ms: int) -> bool:
    return timer.state != "set" and timer.resolved_ms is not None and timer.resolved_ms < before_ms


def is_old_turn(state: State, turn_id: TurnId, before_ms: int) -> bool:
    turn, letter = state.turns[turn_id], state.dead_letters.get(turn_id)
    return (
        turn.state == "ended"
        and turn.ended_ms is not None
        and turn.ended_ms < before_ms
        and not any(turn_id in (e.turn_id, e.into) for e in state.inbox.values())
        and (letter is None or letter.state != "open")
        and (
            letter is not None
            or any(e.turn_id == turn_id for e in state.effects.values())
            or any(q.turn_id == turn_id and q.state != "open" for q in state.questions.values())
        )
    )


def prune_work(state: State, command: c.PruneWork) -> bool:
    deliveries = {
        name
        for name in command.delivery_ids
        if name in state.deliveries
        and is_old_delivery(state, state.deliveries[name], command.before_ms)
    }
    timers = {
        name
        for name in command.timer_ids
        if name in state.timers and is_old_timer(state.timers[name], command.before_ms)
    }
    turns = {
        turn_id
        for turn_id in command.turn_ids
        if turn_id in state.turns and is_old_turn(state, turn_id, command.before_ms)
    }
    if not deliveries and not timers and not turns:
        return False
    for name in deliveries:
        state.forget("delivery", name)
    for turn_id in turns:
        state.forget("effect", turn_id)
    state.deliveries = {n: d for n, d in state.deliveries.items() if n not in deliveries}
    state.timers = {n: t for n, t in state.timers.items() if n not in timers}
    state.effects = {n: e for n, e in state.effects.items() if e.turn_id not in turns}
    state.dead_letters = {n: d for n, d in state.dead_letters.items() if n not in turns}
    state.questions = {
        n: q for n, q in state.questions.items() if q.turn_id not in turns or q.state == "open"
    }
    return True


COMMANDS: dict[type[c.Command], Any] = {
    c.EndOrphan: end_orphan,
    c.PruneSession: prune_session,
    c.GiveOriginals: give_originals,
    c.DeleteSession: delete_session,
    c.PurgeSession: purge_session,
    c.EraseWork: erase_work,
    c.PruneWork: prune_work,
}
