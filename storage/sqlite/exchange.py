"""Handlers for what leaves and what is waited for: deliveries, effects, questions, timers.

Keeps: an attempt of a delivery or effect begins once and only after the one before; a question's
first answer stands; a timer fires or is cancelled, once.
"""

from __future__ import annotations

from typing import Any

from ..commands import (
    AnswerQuestion,
    AskQuestion,
    BeginEffect,
    FinishEffect,
    MarkDelivery,
    PostDelivery,
    ResolveTimer,
    SetTimer,
)
from .gone import DELIVERY_GONE, is_turn_gone, turn_gone
from .handlers import Handler, Handlers
from .rows import canonical, to_json
from .transaction import Transaction, refuse
from .turns import remembers, with_step

# Deliveries ----------------------------------------------------------------------------------


def _as_posted(command: PostDelivery) -> tuple[Any, ...]:
    uid = None if command.message_uid is None else bytes.fromhex(command.message_uid)
    return (
        command.key,
        command.source,
        canonical(command.target).decode(),
        canonical(command.body).decode(),
        uid,
        command.at_ms,
    )


_SELECT_POSTED = (
    "SELECT d.key, d.source, d.target, d.body, d.message_uid, d.posted_ms FROM deliveries d "
    f"WHERE d.id = ? AND NOT {DELIVERY_GONE}"
)


def _delivery_posted(tx: Transaction, command: PostDelivery) -> bool:
    row = tx.one(_SELECT_POSTED, (command.delivery_id,))
    if row is not None:
        return row == _as_posted(command)
    # Deliveries of a deleted session, or of a turn of it, went with it.
    session = None if command.session_id is None else tx.session(command.session_id)
    if session is not None and session.deleted:
        return True
    return command.turn_id is not None and is_turn_gone(tx, command.turn_id)


def _post_delivery(tx: Transaction, command: PostDelivery) -> None:
    if row := tx.one(_SELECT_POSTED, (command.delivery_id,)):
        given = list(_as_posted(command))
        refuse("conflict", f"delivery {command.delivery_id}", stored=list(row), given=given)
    turn = tx.stored_turn(command.turn_id) if command.turn_id is not None else None
    session = None if command.session_id is None else tx.stored_session(command.session_id).n
    key, source, target, body, uid, at_ms = _as_posted(command)
    # What is left of one that is gone must not stand in its way.
    tx.change("DELETE FROM deliveries WHERE id = ?", (command.delivery_id,))
    tx.change(
        "INSERT INTO deliveries (id, key, source, target, body, turn, session, message_uid, "
        "state, attempt, "
        "posted_ms) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'pending', 0, ?)",
        (command.delivery_id, key, source, target, body, turn, session, uid, at_ms),
    )


_SELECT_MARKED = (
    "SELECT d.n, d.state, d.attempt, d.history, d.error, d.platform_id, d.next_ms, d.marked_ms "
    f"FROM deliveries d WHERE d.id = ? AND NOT {DELIVERY_GONE}"
)
# Which state may follow which, within one attempt. `sending` opens the next attempt instead.
_NEXT_DELIVERY = {
    "pending": {"sent", "failed"},  # behind an attempt: whoever made it has heard of it after all
    "sending": {"pending", "sent", "failed", "unknown"},
    "unknown": {"pending", "sent", "failed"},
    "failed": {"pending"},
}


def _delivery_marked(tx: Transaction, command: MarkDelivery) -> bool:
    row = tx.one(_SELECT_MARKED, (command.delivery_id,))
    if row is None:
        return False
    _, state, attempt, history, *content = row
    given = [command.error, command.platform_id, command.next_ms, command.at_ms]
    if (attempt, state) == (command.attempt, command.state) and content == given:
        return True
    return remembers(history, command.attempt, command.state, given)


def _mark_delivery(tx: Transaction, command: MarkDelivery) -> None:
    row = tx.one(_SELECT_MARKED, (command.delivery_id,))
    if row is None:
        refuse("missing", f"delivery {command.delivery_id}")
    n, state, attempt, history, *content = row
    if command.state == "sending":
        fits = command.attempt == attempt + 1 and state in ("pending", "failed", "unknown")
    else:
        follows = command.state in _NEXT_DELIVERY.get(state, ())
        fits = follows and command.attempt == attempt and attempt > 0
    if not fits:
        what = f"delivery {command.delivery_id}"
        refuse("stale", what, stored=[state, attempt], given=[command.state, command.attempt])
    if attempt > 0:
        history = with_step(history, attempt, state, content)
    tx.change(
        "UPDATE deliveries SET state = ?, attempt = ?, error = ?, platform_id = ?, next_ms = ?, "
        "marked_ms = ?, history = ? WHERE n = ?",
        (
            command.state,
            command.attempt,
            command.error,
            command.platform_id,
            command.next_ms,
            command.at_ms,
            history,
            n,
        ),
    )


# Effects -------------------------------------------------------------------------------------

_SELECT_EFFECT = (
    "SELECT effect_id, tool, digest, state, attempt, result, history, finished_ms FROM effects "
    "WHERE turn = ? AND effect_key = ?"
)


def _effect(tx: Transaction, command: BeginEffect | FinishEffect) -> tuple[Any, ...] | None:
    turn = tx.turn(command.turn_id)
    if turn is None or is_turn_gone(tx, command.turn_id):
        return None
    return tx.one(_SELECT_EFFECT, (turn.n, command.effect_key))


def _effect_begun(tx: Transaction, command: BeginEffect) -> bool:
    row = _effect(tx, command)
    if row is None:
        return is_turn_gone(tx, command.turn_id)
    effect_id, tool, digest, _, attempt, *_ = row
    given = (bytes.fromhex(command.effect_id), command.tool, command.digest)
    return (effect_id, tool, digest) == given and attempt >= command.attempt


def _begin_effect(tx: Transaction, command: BeginEffect) -> None:
    turn = tx.stored_turn(command.turn_id)
    row = _effect(tx, command)
    effect_id = bytes.fromhex(command.effect_id)
    what = f"effect {command.effect_key} of turn {command.turn_id}"
    if row is None:
        if command.attempt != 1:
            refuse("stale", what, stored=0, given=command.attempt)
        tx.change(
            "INSERT INTO effects VALUES (?, ?, ?, ?, ?, 'begun', 1, NULL, NULL, ?, NULL)",
            (
                turn,
                command.effect_key,
                effect_id,
                command.tool,
                command.digest,
                command.at_ms,
            ),
        )
        return
    if (row[0], row[1], row[2]) != (effect_id, command.tool, command.digest):
        refuse("conflict", what, stored=row[2], given=command.digest)
    state, attempt, result, history, finished_ms = row[3:]
    if command.attempt != attempt + 1 or state == "done":
        refuse("stale", what, stored=[state, attempt], given=command.attempt)
    if state != "begun":
        history = with_step(history, attempt, state, [result, finished_ms])
    tx.change(
        "UPDATE effects SET state = 'begun', attempt = ?, result = NULL, history = ?, begun_ms = "
        "?, "
        "finished_ms = NULL WHERE turn = ? AND effect_key = ?",
        (command.attempt, history, command.at_ms, turn, command.effect_key),
    )


def _result_json(command: FinishEffect) -> str | None:
    return None if command.result is None else canonical(command.result).decode()


def _effect_finished(tx: Transaction, command: FinishEffect) -> bool:
    row = _effect(tx, command)
    if row is None:
        return is_turn_gone(tx, command.turn_id)
    state, attempt, result, history, finished_ms = row[3:]
    given = [_result_json(command), command.at_ms]
    if (attempt, state) == (command.attempt, command.state) and [result, finished_ms] == given:
        return True
    return remembers(history, command.attempt, command.state, given)


def _finish_effect(tx: Transaction, command: FinishEffect) -> None:
    row = _effect(tx, command)
    what = f"effect {command.effect_key} of turn {command.turn_id}"
    if row is None:
        refuse("missing", what)
    state, attempt, result, history, finished_ms = row[3:]
    # An effect whose fate was unknown may still become known.
    open_again = state == "begun" or (state == "unknown" and command.state != "unknown")
    if attempt != command.attempt or not open_again:
        given = [command.state, command.attempt]
        refuse("stale", what, stored=[state, attempt], given=given)
    if state == "unknown":
        history = with_step(history, attempt, state, [result, finished_ms])
    tx.change(
        "UPDATE effects SET state = ?, result = ?, history = ?, finished_ms = ? "
        "WHERE turn = ? AND effect_key = ?",
        (
            command.state,
            _result_json(command),
            history,
            command.at_ms,
            tx.stored_turn(command.turn_id),
            command.effect_key,
        ),
    )


# Questions -----------------------------------------------------------------------------------


def _as_asked(command: AskQuestion) -> tuple[Any, ...]:
    choices = to_json(command.choices)
    return (command.turn_id, command.question, choices, command.expires_ms, command.at_ms)


_QUESTION_GONE = turn_gone("q.turn")
_SELECT_ASKED = (
    "SELECT t.id, q.question, q.choices, q.expires_ms, q.asked_ms FROM questions q "
    f"JOIN turns t ON t.n = q.turn WHERE q.key = ? AND q.question_key = ? AND NOT {_QUESTION_GONE}"
)


def _question_asked(tx: Transaction, command: AskQuestion) -> bool:
    row = tx.one(_SELECT_ASKED, (command.key, command.question_key))
    if row is None:
        return is_turn_gone(tx, command.turn_id)
    return row == _as_asked(command)


def _ask_question(tx: Transaction, command: AskQuestion) -> None:
    row = tx.one(_SELECT_ASKED, (command.key, command.question_key))
    if row is not None:
        what = f"question {command.question_key} of {command.key}"
        refuse("conflict", what, stored=list(row), given=list(_as_asked(command)))
    turn = tx.stored_turn(command.turn_id)
    _, question, choices, expires_ms, at_ms = _as_asked(command)
    # What is left of one that is gone must not stand in its way.
    gone = (command.key, command.question_key)
    tx.change("DELETE FROM questions WHERE key = ? AND question_key = ?", gone)
    tx.change(
        "INSERT INTO questions (key, question_key, turn, question, choices, state, asked_ms, "
        "expires_ms) "
        "VALUES (?, ?, ?, ?, ?, 'open', ?, ?)",
        (command.key, command.question_key, turn, question, choices, at_ms, expires_ms),
    )


_SELECT_ANSWER = (
    "SELECT q.state, q.answer, q.answered_by, q.answered_ms FROM questions q "
    f"WHERE q.key = ? AND q.question_key = ? AND NOT {_QUESTION_GONE}"
)


def _question_answered(tx: Transaction, command: AnswerQuestion) -> bool:
    row = tx.one(_SELECT_ANSWER, (command.key, command.question_key))
    return row == (command.state, command.answer, command.by, command.at_ms)


def _answer_question(tx: Transaction, command: AnswerQuestion) -> None:
    row = tx.one(_SELECT_ANSWER, (command.key, command.question_key))
    what = f"question {command.question_key} of {command.key}"
    if row is None:
        refuse("missing", what)
    if row[0] != "open":
        refuse("conflict", what, stored=list(row[:3]), given=[command.state, command.answer])
    tx.change(
        "UPDATE questions SET state = ?, answer = ?, answered_by = ?, answered_ms = ? "
        "WHERE key = ? AND question_key = ?",
        (
            command.state,
            command.answer,
            command.by,
            command.at_ms,
            command.key,
            command.question_key,
        ),
    )


# Timers --------------------------------------------------------------------------------------


def _as_set(command: SetTimer) -> tuple[Any, ...]:
    inbound = canonical(command.inbound).decode()
    return (command.key, command.source, command.due_ms, inbound, command.at_ms, command.busy)


_SELECT_TIMER = "SELECT key, source, due_ms, inbound, set_ms, busy FROM timers WHERE id = ?"


def _timer_set(tx: Transaction, command: SetTimer) -> bool:
    return tx.one(_SELECT_TIMER, (command.timer_id,)) == _as_set(command)


def _set_timer(tx: Transaction, command: SetTimer) -> None:
    if row := tx.one(_SELECT_TIMER, (command.timer_id,)):
        given = list(_as_set(command))
        refuse("conflict", f"timer {command.timer_id}", stored=list(row), given=given)
    key, source, due_ms, inbound, at_ms, busy = _as_set(command)
    tx.change(
        "INSERT INTO timers VALUES (?, ?, ?, ?, ?, 'set', ?, NULL, ?)",
        (command.timer_id, key, source, due_ms, inbound, at_ms, busy),
    )


def _timer_resolved(tx: Transaction, command: ResolveTimer) -> bool:
    row = tx.one("SELECT state, resolved_ms FROM timers WHERE id = ?", (command.timer_id,))
    return row == (command.resolution, command.at_ms)


def _resolve_timer(tx: Transaction, command: ResolveTimer) -> None:
    row = tx.one("SELECT state FROM timers WHERE id = ?", (command.timer_id,))
    if row is None:
        refuse("missing", f"timer {command.timer_id}")
    if row[0] != "set":
        what = f"timer {command.timer_id}"
        refuse("conflict", what, stored=row[0], given=command.resolution)
    tx.change(
        "UPDATE timers SET state = ?, resolved_ms = ? WHERE id = ?",
        (command.resolution, command.at_ms, command.timer_id),
    )


HANDLERS: Handlers = {
    PostDelivery: Handler(_delivery_posted, _post_delivery),
    MarkDelivery: Handler(_delivery_marked, _mark_delivery),
    BeginEffect: Handler(_effect_begun, _begin_effect),
    FinishEffect: Handler(_effect_finished, _finish_effect),
    AskQuestion: Handler(_question_asked, _ask_question),
    AnswerQuestion: Handler(_question_answered, _answer_question),
    SetTimer: Handler(_timer_set, _set_timer),
    ResolveTimer: Handler(_timer_resolved, _resolve_timer),
}
