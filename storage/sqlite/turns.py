"""Handlers for turns, the inbox, dead letters and usage.

Keeps: an attempt of a turn starts once, and only after the one before; a turn that has ended stays
as it ended unless a further attempt starts; an inbound message is known by (source, inbound id) for
as long as its row is kept. What an attempt came to before the next one began is kept in `history`,
so that a re-sent command is recognised however late it comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..commands import (
    AcceptInbound,
    AddUsage,
    EndTurn,
    OpenTurn,
    PruneInbox,
    ResolveDeadLetter,
    SetAside,
    StartTurn,
    SuspendTurn,
    TakeInbound,
)
from ..records import Tokens, TurnOutcome
from .gone import is_turn_gone, turn_gone
from .handlers import Handler, Handlers
from .rows import canonical, digest, to_json
from .transaction import Transaction, TurnState, refuse

if TYPE_CHECKING:
    from ..identity import TurnId


_OUTCOME_CACHED_MAX = 1024  # characters; the cache is bounded by count, so its entries are small


# What came before, for state machines with attempts ----------------------------------------------


def remembers(history: str | None, attempt: int, state: str, content: Any) -> bool:
    """Whether this step was taken before the current one."""
    return history is not None and _step(attempt, state, content) in msgspec.json.decode(history)


def with_step(history: str | None, attempt: int, state: str, content: Any) -> str:
    """The history with one more step behind us."""
    steps: list[str] = msgspec.json.decode(history) if history is not None else []
    return to_json([*steps, _step(attempt, state, content)])


def _step(attempt: int, state: str, content: Any) -> str:
    return f"{attempt} {state} {digest(content).hex()[:16]}"


def waits_in(history: str) -> int:
    """How often a turn has waited for a person."""
    steps: list[str] = msgspec.json.decode(history)
    return sum(step.split(" ")[1] == "waiting" for step in steps)


# Turns -------------------------------------------------------------------------------------------


def _turn(tx: Transaction, turn_id: TurnId) -> TurnState:
    turn = tx.turn(turn_id)
    if turn is None:
        refuse("missing", f"turn {turn_id}")
    return turn


def _turn_opened(tx: Transaction, command: OpenTurn) -> bool:
    turn = tx.turn(command.turn_id)
    return turn is not None and (turn.key, turn.opened_ms) == (command.key, command.at_ms)


def _open_turn(tx: Transaction, command: OpenTurn) -> None:
    turn = tx.turn(command.turn_id)
    if turn is not None:
        stored, given = [turn.key, turn.opened_ms], [command.key, command.at_ms]
        refuse("conflict", f"turn {command.turn_id}", stored=stored, given=given)
    tx.insert_turn(command.turn_id, command.key, command.at_ms)


def _turn_started(tx: Transaction, command: StartTurn) -> bool:
    turn = tx.turn(command.turn_id)
    # Attempts follow each other, so a later one proves this one. The session is not compared:
    # rotation moves a running turn to the child.
    return turn is not None and (
        turn.attempt > command.attempt
        or (turn.attempt, turn.started_ms) == (command.attempt, command.at_ms)
    )


def _start_turn(tx: Transaction, command: StartTurn) -> None:
    turn = _turn(tx, command.turn_id)
    session = tx.stored_session(command.session_id)
    if turn.ran_in is not None:
        tx.stored_session(turn.ran_in)  # what it said and did went with its session: no way on
    if command.attempt != turn.attempt + 1:
        what = f"attempt of turn {command.turn_id}"
        refuse("stale", what, stored=turn.attempt, given=command.attempt)
    history = turn.history
    if turn.state == "waiting":
        history = with_step(history, turn.attempt, "waiting", None)
    elif turn.state == "ended":
        history = with_step(history, turn.attempt, "ended", [turn.outcome, turn.ended_ms])
    tx.change(
        "UPDATE turns SET state = 'running', attempt = ?, session = ?, outcome = NULL, "
        "history = ?, started_ms = ?, ended_ms = NULL WHERE n = ?",
        (command.attempt, session.n, history, command.at_ms, turn.n),
    )
    turn.state, turn.attempt, turn.ran_in = "running", command.attempt, session.id
    turn.outcome, turn.history, turn.started_ms = None, history, command.at_ms
    turn.ended_ms = None


def _turn_suspended(tx: Transaction, command: SuspendTurn) -> bool:
    turn = tx.turn(command.turn_id)
    if turn is None:
        return False
    if (turn.state, turn.attempt) == ("waiting", command.attempt):
        return True
    return remembers(turn.history, command.attempt, "waiting", None)


def _suspend_turn(tx: Transaction, command: SuspendTurn) -> None:
    turn = _turn(tx, command.turn_id)
    if (turn.state, turn.attempt) != ("running", command.attempt):
        stored = [turn.state, turn.attempt]
        refuse("stale", f"turn {command.turn_id}", stored=stored, given=command.attempt)
    tx.change("UPDATE turns SET state = 'waiting' WHERE n = ?", (turn.n,))
    turn.state = "waiting"


def _turn_ended(tx: Transaction, command: EndTurn) -> bool:
    turn = tx.turn(command.turn_id)
    if turn is None or (turn.state != "ended" and turn.history is None):
        return False
    given = _outcome_json(command)
    now = (turn.state, turn.attempt, turn.outcome, turn.ended_ms)
    if now == ("ended", command.attempt, given, command.at_ms):
        return True
    return remembers(turn.history, command.attempt, "ended", [given, command.at_ms])


def _outcome_json(command: EndTurn) -> str:
    return canonical(command.outcome).decode()


def _end_turn(tx: Transaction, command: EndTurn) -> None:
    turn = _turn(tx, command.turn_id)
    given = _outcome_json(command)
    if turn.attempt != command.attempt:
        stored = [turn.state, turn.attempt]
        refuse("stale", f"turn {command.turn_id}", stored=stored, given=command.attempt)
    if turn.state == "ended":
        what = f"outcome of turn {command.turn_id}"
        refuse("conflict", what, stored=turn.outcome, given=given)
    history = turn.history
    if turn.state == "waiting":
        history = with_step(history, turn.attempt, "waiting", None)
    if is_turn_gone(tx, command.turn_id):  # what it came to goes the way of its session
        history = with_step(history, turn.attempt, "ended", [given, command.at_ms])
        given = canonical(TurnOutcome(kind=command.outcome.kind)).decode()
    tx.change(
        "UPDATE turns SET state = 'ended', outcome = ?, history = ?, ended_ms = ? WHERE n = ?",
        (given, history, command.at_ms, turn.n),
    )
    turn.state, turn.outcome, turn.history = "ended", given, history
    turn.ended_ms = command.at_ms
    if len(given) > _OUTCOME_CACHED_MAX:
        tx.forget_turn(command.turn_id)


# The inbox ---------------------------------------------------------------------------------------


def _as_accepted(command: AcceptInbound) -> tuple[Any, ...]:
    return (command.key, command.turn_id, command.disposition, command.digest, command.at_ms)


def _inbound_accepted(tx: Transaction, command: AcceptInbound) -> bool:
    row = tx.inbound(command.source, command.inbound_id)
    if row is not None:
        return row == _as_accepted(command)
    # No row, and its turn is over: the row was pruned. Accepting it again would never be taken.
    turn = tx.turn(command.turn_id)
    return turn is not None and turn.state == "ended"


def _accept_inbound(tx: Transaction, command: AcceptInbound) -> None:
    row = tx.inbound(command.source, command.inbound_id)
    if row is not None:
        what = f"inbound {command.source}/{command.inbound_id}"
        refuse("conflict", what, stored=list(row), given=list(_as_accepted(command)))
    turn = _turn(tx, command.turn_id)
    if turn.key != command.key:
        refuse("invalid", "key", given=f"turn {command.turn_id} is of another key")
    gone = turn.ran_in is not None and is_turn_gone(tx, command.turn_id)
    body = None if command.body is None or gone else to_json(command.body)
    reply_to = None if command.reply_to is None or gone else to_json(command.reply_to)
    tx.change(
        "INSERT INTO inbox (source, inbound_id, key, turn, disposition, digest, accepted_ms, body, "
        "reply_to) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            command.source,
            command.inbound_id,
            command.key,
            turn.n,
            command.disposition,
            command.digest,
            command.at_ms,
            body,
            reply_to,
        ),
    )
    tx.inbound_is_here(command.source, command.inbound_id)


def _inbound_taken(tx: Transaction, command: TakeInbound) -> bool:
    row = tx.one(
        f"SELECT t.id, iif({turn_gone('i.turn')} OR {turn_gone('i.into_turn')}, NULL, i.body) "
        "FROM inbox i JOIN turns t ON t.n = i.turn WHERE i.source = ? AND i.inbound_id = ?",
        (command.source, command.inbound_id),
    )
    if row is None:
        return True  # it was taken before it was pruned
    if row[0] == command.turn_id:
        return row[1] is None
    # The row of another turn: ours was pruned, and the id was used again; or we never had one.
    turn = tx.turn(command.turn_id)
    return turn is not None and turn.state == "ended"


def _take_inbound(tx: Transaction, command: TakeInbound) -> None:
    row = tx.inbound(command.source, command.inbound_id)
    assert row is not None
    if row[1] != command.turn_id:
        what = f"inbound {command.source}/{command.inbound_id}"
        refuse("conflict", what, stored=row[1], given=command.turn_id)
    if command.into is not None:
        into = tx.stored_turn(command.into)
        kept = "NULL" if is_turn_gone(tx, command.into) else "reply_to"
        tx.change(
            f"UPDATE inbox SET body = NULL, reply_to = {kept}, into_turn = ? "
            "WHERE source = ? AND inbound_id = ?",
            (into, command.source, command.inbound_id),
        )
        return
    tx.change(
        "UPDATE inbox SET body = NULL WHERE source = ? AND inbound_id = ?",
        (command.source, command.inbound_id),
    )


# Its turn has ended, and the one that it was steered into. A dead letter about which nobody has
# decided still needs to know whom it answers.
FORGETTABLE = (
    "NOT EXISTS (SELECT 1 FROM turns t WHERE t.n IN (i.turn, i.into_turn) AND (t.state <> 'ended' "
    "OR EXISTS (SELECT 1 FROM dead_letters d WHERE d.turn = t.n AND d.state = 'open')))"
)


def _pruned_version(tx: Transaction) -> int:
    row = tx.one("SELECT max(version) FROM changes WHERE scope = 'inbox' AND aspect = 'pruned'")
    return row[0] if row is not None and row[0] is not None else 0


def _inbox_pruned(tx: Transaction, command: PruneInbox) -> bool:
    return tx.was_set("inbox", "pruned", command.replaces + 1, command)


def _prune_inbox(tx: Transaction, command: PruneInbox) -> None:
    version = _pruned_version(tx)
    if version != command.replaces:
        refuse("stale", "pruning of the inbox", stored=version, given=command.replaces)
    tx.change(
        # Up to the first younger row, so that nothing is scanned when nothing is old.
        f"DELETE FROM inbox WHERE n IN (SELECT i.n FROM inbox i WHERE {FORGETTABLE} "
        "AND i.n < coalesce((SELECT n FROM inbox WHERE accepted_ms >= ? ORDER BY n LIMIT 1), "
        "9223372036854775807) ORDER BY i.n LIMIT ?)",
        (command.before_ms, command.limit),
    )
    tx.record_set("inbox", "pruned", version + 1, command, command.at_ms)


# Dead letters ------------------------------------------------------------------------------------


def _dead_letter(tx: Transaction, turn_id: TurnId) -> tuple[Any, ...] | None:
    turn = tx.turn(turn_id)
    if turn is None:
        return None
    return tx.one("SELECT tries, state FROM dead_letters WHERE turn = ?", (turn.n,))


def _set_aside_applied(tx: Transaction, command: SetAside) -> bool:
    row = _dead_letter(tx, command.turn_id)
    return row is not None and row[0] >= command.tries


def _set_aside(tx: Transaction, command: SetAside) -> None:
    turn = tx.stored_turn(command.turn_id)
    reason = "" if is_turn_gone(tx, command.turn_id) else command.reason
    tx.change(
        "INSERT INTO dead_letters VALUES (?, ?, ?, 'open', ?, NULL) ON CONFLICT (turn) DO UPDATE "
        "SET "
        "reason = excluded.reason, tries = excluded.tries, state = 'open', at_ms = excluded.at_ms, "
        "resolved_ms = NULL",
        (turn, reason, command.tries, command.at_ms),
    )


def _dead_letter_resolved(tx: Transaction, command: ResolveDeadLetter) -> bool:
    row = _dead_letter(tx, command.turn_id)
    if row is None:
        return False
    tries, state = row
    return tries > command.tries or (tries, state) == (command.tries, command.resolution)


def _resolve_dead_letter(tx: Transaction, command: ResolveDeadLetter) -> None:
    row = _dead_letter(tx, command.turn_id)
    if row is None or row[0] < command.tries:
        refuse("missing", f"dead letter {command.turn_id}")
    if row[1] != "open":
        what = f"dead letter {command.turn_id}"
        refuse("conflict", what, stored=row[1], given=command.resolution)
    tx.change(
        "UPDATE dead_letters SET state = ?, resolved_ms = ? WHERE turn = ?",
        (command.resolution, command.at_ms, tx.stored_turn(command.turn_id)),
    )


# Usage -------------------------------------------------------------------------------------------


def _usage_row(command: AddUsage) -> tuple[int | str, ...]:
    tokens = command.tokens
    return (
        command.session_id,
        command.model,
        int(command.auxiliary),
        tokens.input,
        tokens.output,
        tokens.cache_read,
        tokens.cache_write,
        tokens.reasoning,
        command.cost_nanos,
        command.at_ms,
    )


_SELECT_USAGE = (
    "SELECT s.id, u.model, u.auxiliary, u.input, u.output, u.cache_read, u.cache_write, "
    "u.reasoning, u.cost_nanos, u.at_ms FROM usage u JOIN sessions s ON s.n = u.session "
    "WHERE u.call = ?"
)


def _usage_added(tx: Transaction, command: AddUsage) -> bool:
    return tx.one(_SELECT_USAGE, (bytes.fromhex(command.call_id),)) == _usage_row(command)


def _add_usage(tx: Transaction, command: AddUsage) -> None:
    session = tx.stored_session(command.session_id)
    call = bytes.fromhex(command.call_id)
    row = tx.one(_SELECT_USAGE, (call,))
    if row is not None:
        given = list(_usage_row(command))
        refuse("conflict", f"usage of call {command.call_id}", stored=list(row), given=given)
    turn = tx.stored_turn(command.turn_id) if command.turn_id is not None else None
    tx.change(
        "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (call, session.n, turn, *_usage_row(command)[1:]),
    )
    prefix = "auxiliary_" if command.auxiliary else ""
    row = tx.one(f"SELECT {prefix}tokens FROM sessions WHERE n = ?", (session.n,))
    assert row is not None
    total = Tokens() if row[0] is None else msgspec.json.decode(row[0], type=Tokens)
    tx.change(
        f"UPDATE sessions SET {prefix}tokens = ?, {prefix}cost_nanos = {prefix}cost_nanos + ? "
        "WHERE n = ?",
        (to_json(added(total, command.tokens)), command.cost_nanos, session.n),
    )


def added(a: Tokens, b: Tokens) -> Tokens:
    """Two counts as one."""
    return Tokens(
        input=a.input + b.input,
        output=a.output + b.output,
        cache_read=a.cache_read + b.cache_read,
        cache_write=a.cache_write + b.cache_write,
        reasoning=a.reasoning + b.reasoning,
    )


HANDLERS: Handlers = {
    OpenTurn: Handler(_turn_opened, _open_turn),
    AcceptInbound: Handler(_inbound_accepted, _accept_inbound),
    TakeInbound: Handler(_inbound_taken, _take_inbound),
    StartTurn: Handler(_turn_started, _start_turn),
    SuspendTurn: Handler(_turn_suspended, _suspend_turn),
    EndTurn: Handler(_turn_ended, _end_turn),
    SetAside: Handler(_set_aside_applied, _set_aside),
    ResolveDeadLetter: Handler(_dead_letter_resolved, _resolve_dead_letter),
    PruneInbox: Handler(_inbox_pruned, _prune_inbox),
    AddUsage: Handler(_usage_added, _add_usage),
}
