"""What belongs to a session that was deleted is gone, though its rows may be there for a while.

Owns the conditions by which views and handlers leave such rows out: those of a session, of a turn,
of what surrounds a turn. Whoever reads turns, deliveries, effects, questions or inbox rows uses
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .transaction import Transaction

_TURN_GONE = (
    "EXISTS (SELECT 1 FROM turns gone_t JOIN sessions gone_s ON gone_s.n = gone_t.session "
    "WHERE gone_t.n = {turn} AND gone_s.deleted = 1)"
)


def turn_gone(turn: str) -> str:
    """The condition that a turn ran in a session that was deleted; `turn` is its row number."""
    return _TURN_GONE.format(turn=turn)


def session_gone(session: str) -> str:
    """The condition that a session was deleted; `session` is its row number."""
    return f"EXISTS (SELECT 1 FROM sessions gone_s WHERE gone_s.n = {session} AND gone_s.deleted)"


DELIVERY_GONE = f"({session_gone('d.session')} OR {turn_gone('d.turn')})"
"""Of a delivery that is called `d`."""


def is_turn_gone(tx: Transaction, turn_id: str) -> bool:
    """Whether the turn ran in a session that was deleted since."""
    row = tx.one(
        "SELECT s.deleted FROM turns t JOIN sessions s ON s.n = t.session WHERE t.id = ?",
        (turn_id,),
    )
    return row == (1,)
