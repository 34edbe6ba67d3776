"""Handlers for what surrounds turns: erased on request, or pruned because it is only history.

Keeps: a turn and its inbox rows stay, without text, so that what is sent again is still recognised
and nothing runs twice; nothing goes that somebody works on, has to decide, or may still ask for.
Guards are looked at here, inside the transaction, whatever was read before.
"""

from __future__ import annotations

from typing import Any

from ..commands import EraseWork, PruneWork
from .gone import DELIVERY_GONE, session_gone, turn_gone
from .handlers import Handler, Handlers
from .transaction import Transaction, refuse
from .turns import with_step

KIND_OF_OUTCOME = (
    "json_object('kind', CASE WHEN json_valid({0}) THEN {0} ->> 'kind' ELSE 'failed' END)"
)
_BLANK = KIND_OF_OUTCOME.format("outcome")


def blank_turn(tx: Transaction, n: int) -> None:
    """Everything that surrounds a turn goes; how it ended stays. The cache must be forgotten."""
    for table in ("deliveries", "effects", "questions"):
        tx.change(f"DELETE FROM {table} WHERE turn = ?", (n,))
    row = tx.one(
        "SELECT attempt, outcome, history, ended_ms FROM turns "
        f"WHERE n = ? AND outcome IS NOT NULL AND outcome <> {_BLANK}",
        (n,),
    )
    if row is not None:
        attempt, outcome, history, ended_ms = row
        history = with_step(history, attempt, "ended", [outcome, ended_ms])
        tx.change(f"UPDATE turns SET history = ?, outcome = {_BLANK} WHERE n = ?", (history, n))
    for column in ("turn", "into_turn"):
        tx.change(
            f"UPDATE inbox SET body = NULL, reply_to = NULL WHERE {column} = ? "
            "AND (body IS NOT NULL OR reply_to IS NOT NULL)",
            (n,),
        )
    tx.change("UPDATE dead_letters SET reason = '' WHERE turn = ?", (n,))


# Erasing -----------------------------------------------------------------------------------------

_LEFT_OF_TURN = (
    f"SELECT NOT {turn_gone('t.n')} AND ((outcome IS NOT NULL AND outcome <> {_BLANK}) "
    "OR EXISTS (SELECT 1 FROM deliveries WHERE turn = t.n) "
    "OR EXISTS (SELECT 1 FROM effects WHERE turn = t.n) "
    "OR EXISTS (SELECT 1 FROM questions WHERE turn = t.n) "
    "OR EXISTS (SELECT 1 FROM dead_letters WHERE turn = t.n AND reason <> '') "
    "OR EXISTS (SELECT 1 FROM inbox WHERE turn = t.n "
    "AND (body IS NOT NULL OR reply_to IS NOT NULL)) "
    "OR EXISTS (SELECT 1 FROM inbox WHERE into_turn = t.n "
    "AND (body IS NOT NULL OR reply_to IS NOT NULL))) FROM turns t WHERE t.id = ?"
)
_ANSWERS = "turn = ? AND answered_by = ?"


def _work_erased(tx: Transaction, command: EraseWork) -> bool:
    if any(tx.one(_LEFT_OF_TURN, (turn_id,)) != (0,) for turn_id in command.turn_ids):
        return False
    if any(_timer_is_there(tx, timer_id) for timer_id in command.timer_ids):
        return False
    return not any(
        tx.one(
            "SELECT 1 FROM questions q JOIN turns t ON t.n = q.turn WHERE t.id = ? "
            f"AND q.answered_by = ? AND NOT {turn_gone('t.n')}",
            (turn_id, command.user),
        )
        for turn_id in command.answered
    )


def _timer_is_there(tx: Transaction, timer_id: str) -> bool:
    return tx.one("SELECT 1 FROM timers WHERE id = ?", (timer_id,)) is not None


def _erase_work(tx: Transaction, command: EraseWork) -> None:
    numbers: list[int] = []
    for turn_id in command.turn_ids:
        numbers.append(tx.stored_turn(turn_id))
        turn = tx.turn(turn_id)
        assert turn is not None
        if turn.state != "ended":
            refuse("stale", f"turn {turn_id}", stored=turn.state, given="ended")
    answered = [tx.stored_turn(turn_id) for turn_id in command.answered]
    for n in numbers:
        blank_turn(tx, n)
    tx.forget_turns()
    for timer_id in command.timer_ids:
        tx.change("DELETE FROM timers WHERE id = ?", (timer_id,))
    for n in answered:
        tx.change(
            f"UPDATE questions SET answer = NULL, answered_by = NULL WHERE {_ANSWERS}",
            (n, command.user),
        )


# Pruning -----------------------------------------------------------------------------------------

# What nobody will ask for any more. `:before` is the time before which it came to its end.
OLD_DELIVERY = (
    "d.state = 'sent' AND coalesce(d.marked_ms, d.posted_ms) < :before "
    f"AND NOT {DELIVERY_GONE} "
    # Where a key was answered last is where it is told something next.
    "AND EXISTS (SELECT 1 FROM deliveries later WHERE later.key = d.key "
    "AND later.n > d.n AND later.source = d.source "
    f"AND NOT {session_gone('later.session')} AND NOT {turn_gone('later.turn')})"
)
OLD_TIMER = "state <> 'set' AND resolved_ms < :before"
# Its messages are forgotten, so nobody resumes it; nobody has anything to decide about it.
OLD_TURN = (
    "t.state = 'ended' AND t.ended_ms < :before "
    "AND NOT EXISTS (SELECT 1 FROM inbox WHERE turn = t.n) "
    "AND NOT EXISTS (SELECT 1 FROM inbox WHERE into_turn = t.n) "
    "AND NOT EXISTS (SELECT 1 FROM dead_letters WHERE turn = t.n AND state = 'open') "
    "AND (EXISTS (SELECT 1 FROM dead_letters WHERE turn = t.n) "
    f"OR (NOT {turn_gone('t.n')} AND (EXISTS (SELECT 1 FROM effects WHERE turn = t.n) "
    "OR EXISTS (SELECT 1 FROM questions WHERE turn = t.n AND state <> 'open'))))"
)


def _old(tx: Transaction, command: PruneWork) -> tuple[list[int], list[str], list[int]]:
    """Those of what the command names that nobody needs."""

    def numbers(sql: str, names: tuple[str, ...]) -> list[Any]:
        found = (tx.one(sql.replace(":before", "?"), (name, command.before_ms)) for name in names)
        return [row[0] for row in found if row is not None]

    deliveries = numbers(
        f"SELECT d.n FROM deliveries d WHERE d.id = ? AND {OLD_DELIVERY}", command.delivery_ids
    )
    timers = numbers(f"SELECT id FROM timers WHERE id = ? AND {OLD_TIMER}", command.timer_ids)
    turns = numbers(f"SELECT t.n FROM turns t WHERE t.id = ? AND {OLD_TURN}", command.turn_ids)
    return deliveries, timers, turns


def _work_pruned(tx: Transaction, command: PruneWork) -> bool:
    return not any(_old(tx, command))


def _prune_work(tx: Transaction, command: PruneWork) -> None:
    deliveries, timers, turns = _old(tx, command)
    for n in deliveries:
        tx.change("DELETE FROM deliveries WHERE n = ?", (n,))
    for timer_id in timers:
        tx.change("DELETE FROM timers WHERE id = ?", (timer_id,))
    for n in turns:
        tx.change("DELETE FROM effects WHERE turn = ?", (n,))
        tx.change("DELETE FROM questions WHERE turn = ? AND state <> 'open'", (n,))
        tx.change("DELETE FROM dead_letters WHERE turn = ?", (n,))


HANDLERS: Handlers = {
    EraseWork: Handler(_work_erased, _erase_work),
    PruneWork: Handler(_work_pruned, _prune_work),
}
