"""The model of work: turns, the inbox, dead letters and usage.

What goes through several attempts leaves a step behind for each state that it was in, so that a
command is recognised however late it is sent again.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from msgspec.structs import replace

from ....storage import commands as c
from ....storage.records import DeadLetter, InboxEntry, Turn, TurnOutcome, Usage
from .state import State, refuse

# Turns -------------------------------------------------------------------------------------------


def open_turn(state: State, command: c.OpenTurn) -> bool:
    turn = state.turns.get(command.turn_id)
    if turn is not None:
        if (turn.key, turn.opened_ms) == (command.key, command.at_ms):
            return False
        refuse("conflict", f"turn {command.turn_id}")
    state.turns[command.turn_id] = Turn(
        id=command.turn_id, key=command.key, opened_ms=command.at_ms
    )
    return True


def _turn(state: State, command: Any) -> Turn:
    state.known_turn(command.turn_id)
    return state.turns[command.turn_id]


def start_turn(state: State, command: c.StartTurn) -> bool:
    stored = state.turns.get(command.turn_id)
    if stored is not None:
        started = (stored.attempt, stored.started_ms) == (command.attempt, command.at_ms)
        if started or stored.attempt > command.attempt:
            return False
    turn = _turn(state, command)
    session = state.known_session(command.session_id)
    if state.text_gone(turn.id):
        refuse("ended", f"the session of turn {turn.id} is deleted")
    if command.attempt != turn.attempt + 1:
        refuse("stale", f"attempt of turn {turn.id}")
    state.turns[turn.id] = replace(
        turn,
        state="running",
        session_id=session.id,
        attempt=command.attempt,
        outcome=None,
        started_ms=command.at_ms,
        ended_ms=None,
        waits=turn.waits + (turn.state == "waiting"),
    )
    return True


def suspend_turn(state: State, command: c.SuspendTurn) -> bool:
    if state.took("turn", command.turn_id, command.attempt, "waiting"):
        return False
    turn = _turn(state, command)
    if (turn.state, turn.attempt) != ("running", command.attempt):
        refuse("stale", f"turn {turn.id}")
    state.turns[turn.id] = replace(turn, state="waiting")
    state.take("turn", turn.id, turn.attempt, "waiting")
    return True


def end_turn(state: State, command: c.EndTurn) -> bool:
    step = ("turn", command.turn_id, command.attempt, "ended", command.outcome, command.at_ms)
    if state.took(*step):
        return False
    turn = _turn(state, command)
    if turn.attempt != command.attempt:
        refuse("stale", f"turn {turn.id}")
    if turn.state == "ended":
        refuse("conflict", f"outcome of turn {turn.id}")
    gone = state.text_gone(turn.id)  # then what it came to goes as well
    state.turns[turn.id] = replace(
        turn,
        state="ended",
        outcome=TurnOutcome(kind=command.outcome.kind) if gone else command.outcome,
        ended_ms=command.at_ms,
        waits=turn.waits + (turn.state == "waiting"),
    )
    state.take(*step)
    return True


# Inbox and dead letters --------------------------------------------------------------------------


def accept_inbound(state: State, command: c.AcceptInbound) -> bool:
    name = (command.source, command.inbound_id)
    given = InboxEntry(
        source=command.source,
        inbound_id=command.inbound_id,
        key=command.key,
        turn_id=command.turn_id,
        disposition=command.disposition,
        digest=command.digest,
        accepted_ms=command.at_ms,
    )
    entry = state.inbox.get(name)
    if entry is not None:
        if replace(entry, body=None, reply_to=None, into=None) == given:
            return False
        refuse("conflict", f"inbound {name}")
    turn = state.turns.get(command.turn_id)
    if turn is not None and turn.state == "ended":
        return False  # the row was pruned
    if _turn(state, command).key != command.key:
        refuse("invalid", "key")
    if not state.text_gone(command.turn_id):
        given = replace(given, body=command.body, reply_to=command.reply_to)
    state.inbox[name] = given
    return True


def take_inbound(state: State, command: c.TakeInbound) -> bool:
    name = (command.source, command.inbound_id)
    entry = state.inbox.get(name)
    if entry is None:
        return False
    if entry.turn_id != command.turn_id:
        turn = state.turns.get(command.turn_id)
        if turn is not None and turn.state == "ended":
            return False  # its own row was pruned
        refuse("conflict", f"inbound {name}")
    if entry.body is None:
        return False
    into = state.known_turn(command.into)
    gone = into is not None and state.text_gone(into)
    reply_to = None if gone else entry.reply_to
    state.inbox[name] = replace(entry, body=None, reply_to=reply_to, into=into)
    return True


def prune_inbox(state: State, command: c.PruneInbox) -> bool:
    if state.was_set("inbox", "pruned", command.replaces, command):
        return False
    pruned = state.set_value("inbox", "pruned", state.prunings, command.replaces, command)
    before = takewhile(lambda item: item[1].accepted_ms < command.before_ms, state.inbox.items())
    old = [name for name, entry in before if state.forgettable(entry)]
    for name in old[: command.limit]:
        del state.inbox[name]
    state.prunings = pruned
    return True


def set_aside(state: State, command: c.SetAside) -> bool:
    letter = state.dead_letters.get(command.turn_id)
    if letter is not None and letter.tries >= command.tries:
        return False
    state.dead_letters[command.turn_id] = DeadLetter(
        turn_id=command.turn_id,
        key=_turn(state, command).key,
        reason="" if state.text_gone(command.turn_id) else command.reason,
        tries=command.tries,
        at_ms=command.at_ms,
    )
    return True


def resolve_dead_letter(state: State, command: c.ResolveDeadLetter) -> bool:
    letter = state.dead_letters.get(command.turn_id)
    if letter is None or letter.tries < command.tries:
        refuse("missing", f"dead letter {command.turn_id}")
    if letter.tries > command.tries or letter.state == command.resolution:
        return False
    if letter.state != "open":
        refuse("conflict", f"dead letter {command.turn_id}")
    state.dead_letters[command.turn_id] = replace(
        letter, state=command.resolution, resolved_ms=command.at_ms
    )
    return True


# Usage -------------------------------------------------------------------------------------------


def add_usage(state: State, command: c.AddUsage) -> bool:
    usage = Usage(
        call_id=command.call_id,
        session_id=command.session_id,
        turn_id=command.turn_id,
        model=command.model,
        auxiliary=command.auxiliary,
        tokens=command.tokens,
        cost_nanos=command.cost_nanos,
        at_ms=command.at_ms,
    )
    stored = state.usage.get(command.call_id)
    if stored is not None and _amount(stored) == _amount(usage):
        return False
    state.known_session(command.session_id)
    if stored is not None:
        refuse("conflict", f"usage of call {command.call_id}")
    state.known_turn(command.turn_id)
    state.usage[command.call_id] = usage
    return True


def _amount(usage: Usage) -> tuple[Any, ...]:
    cost = (usage.tokens, usage.cost_nanos, usage.at_ms)
    return (usage.session_id, usage.model, usage.auxiliary, *cost)


COMMANDS: dict[type[c.Command], Any] = {
    c.OpenTurn: open_turn,
    c.AcceptInbound: accept_inbound,
    c.TakeInbound: take_inbound,
    c.StartTurn: start_turn,
    c.SuspendTurn: suspend_turn,
    c.EndTurn: end_turn,
    c.SetAside: set_aside,
    c.ResolveDeadLetter: resolve_dead_letter,
    c.PruneInbox: prune_inbox,
    c.AddUsage: add_usage,
}
