"""The guards of a unit, checked against what is stored before anything of it is applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ..commands import EndSession, ReopenSession, Rotate, SetRoute
from .sessions import tip_of
from .transaction import refuse

if TYPE_CHECKING:
    from ..units import Guard, Unit
    from .transaction import SessionState, Transaction


def check_guards(tx: Transaction, unit: Unit) -> None:
    """Leave by `refuse` at the first guard that does not hold."""
    for guard in unit.guards:
        route = tx.route(guard.key)
        if route.incarnation != guard.incarnation:
            refuse("stale_incarnation", guard.key, route.incarnation, guard.incarnation)
        if guard.session_id is None:
            continue
        session = tx.session(guard.session_id)
        if (
            session is not None
            and session.end_kind is not None
            and not _reopens(tx, unit, guard)
            and not _replaces_suspension(unit, session)
        ):
            _refuse_ended(tx, session)
        if route.session_id != guard.session_id and not _routes(tx, unit, guard):
            refuse("route_conflict", guard.key, stored=route.session_id, given=guard.session_id)
        next_seq, revision = (0, 0) if session is None else (session.next_seq, session.revision)
        if guard.base_seq is not None and guard.base_seq != next_seq:
            refuse("broken_chain", guard.session_id, next_seq, guard.base_seq)
        if guard.behind is not None and _last_uid(tx, session) != guard.behind:
            refuse("broken_chain", guard.session_id, _last_uid(tx, session), guard.behind)
        if guard.revision is not None and guard.revision != revision:
            refuse("stale_revision", guard.session_id, revision, guard.revision)


def _last_uid(tx: Transaction, session: SessionState | None) -> str | None:
    """The uid of the session's last row: remembered, as long as nothing came in by other ways."""
    if session is None or session.next_seq == 0:
        return None
    seq = session.next_seq - 1
    if session.last is None or session.last[0] != seq:
        tx.flush_messages()
        row = tx.one("SELECT uid FROM messages WHERE session = ? AND seq = ?", (session.n, seq))
        session.last = (seq, "" if row is None else row[0].hex())
    return session.last[1]


def _refuse_ended(tx: Transaction, session: SessionState) -> NoReturn:
    # A parent that was rotated away names its tip: a late write can follow the conversation.
    if session.end_kind == "rotation":
        refuse("ended", session.id, stored=f"compression; continued as {tip_of(tx, session)}")
    refuse("ended", session.id, stored=session.end_reason)


def _routes(tx: Transaction, unit: Unit, guard: Guard) -> bool:
    """Whether the unit itself moves the key to the guarded session."""
    return any(
        isinstance(c, SetRoute)
        and (c.key, c.session_id) == (guard.key, guard.session_id)
        and not tx.was_set(c.key, "route", c.replaces + 1, c)  # not one from before
        for c in unit.commands
    )


def _reopens(tx: Transaction, unit: Unit, guard: Guard) -> bool:
    return any(
        isinstance(c, ReopenSession)
        and c.session_id == guard.session_id
        and not tx.was_set(c.session_id, "end", c.replaces + 1, c)
        for c in unit.commands
    )


def _replaces_suspension(unit: Unit, session: SessionState) -> bool:
    """A boundary or a rotation replaces a suspension: contract I2."""
    return session.end_kind == "suspension" and any(
        (isinstance(c, Rotate) and c.parent_id == session.id)
        or (isinstance(c, EndSession) and c.session_id == session.id and c.kind == "boundary")
        for c in unit.commands
    )
