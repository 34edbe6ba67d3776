"""A plain model of an engine: what units mean, in dicts and tuples. It is the executable
specification.

Owns no file, no SQL, no cache. It says of each unit what an engine must say (durable, durable
again, or refused and why) and answers every read view. Written for reading, not for speed: a unit
is applied to a copy of everything. Where an engine and the model disagree, one of the two is wrong;
see the command's docstring.

Must never import an engine.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ....storage.commands import Command, EndSession, ReopenSession, Rotate, SetRoute
from ....storage.records import Route
from ....storage.units import Durable, Head, Refused, Unit
from . import cleanup, exchange, imports, search, sessions, transcripts, work
from .state import RefusedByModelError, State, refuse
from .views import ModelReader

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from ....storage.identity import SessionId
    from ....storage.units import Guard

COMMANDS: dict[type[Command], Any] = {
    **sessions.COMMANDS,
    **transcripts.COMMANDS,
    **work.COMMANDS,
    **exchange.COMMANDS,
    **search.COMMANDS,
    **imports.COMMANDS,
    **cleanup.COMMANDS,
}


class Model:
    """An engine without a database."""

    def __init__(self) -> None:
        self.state = State(marks={"finalize_orphaned_rotations": "new"})
        self.commit_seq = 0

    def apply(self, units: Iterable[Unit]) -> list[Durable | Refused]:
        """One batch: staged and committed."""
        self.commit_seq += 1
        return [self._apply(unit) for unit in units]

    def _apply(self, unit: Unit) -> Durable | Refused:
        after = self.state.snapshot()
        after.revised = frozenset()
        after.found = new = False
        refusal: RefusedByModelError | None = None
        for command in unit.commands:
            try:
                new |= COMMANDS[type(command)](after, command)
                after.found = not new
            except RefusedByModelError as error:
                refusal = error
                break
        if refusal is None and not new:
            return Durable(self.commit_seq, again=True, heads=self._heads(unit))
        try:
            # What is stored already asks for no permission; what is new does, first of all.
            for guard in unit.guards:
                _check(self.state, guard, unit)
            if refusal is not None:
                raise refusal
        except RefusedByModelError as error:
            return Refused(reason=error.reason, what=error.what)
        self.state = after
        return Durable(self.commit_seq, heads=self._heads(unit))

    def _heads(self, unit: Unit) -> tuple[Head, ...]:
        """Where the guarded sessions stand."""
        sessions = [self.state.sessions.get(g.session_id) for g in unit.guards if g.session_id]
        return tuple(Head(s.id, s.next_seq, s.revision) for s in sessions if s is not None)

    @contextmanager
    def reading(self) -> Generator[ModelReader]:
        yield ModelReader(self.state)


def _check(state: State, guard: Guard, unit: Unit) -> None:
    route = state.keys.get(guard.key, Route(key=guard.key))
    if route.incarnation != guard.incarnation:
        refuse("stale_incarnation", guard.key)
    if guard.session_id is None:
        return
    session = state.sessions.get(guard.session_id)
    if (
        session is not None
        and session.end_kind is not None
        and not _reopens(state, unit, guard)
        and not (session.end_kind == "suspension" and _replaces_suspension(unit, session.id))
    ):
        refuse("ended", session.id)
    if route.session_id != guard.session_id and not _routes(state, unit, guard):
        refuse("route_conflict", guard.key)
    next_seq, revision = (0, 0) if session is None else (session.next_seq, session.revision)
    if guard.base_seq not in (None, next_seq):
        refuse("broken_chain", guard.session_id)
    rows = state.transcripts.get(guard.session_id, ())
    if guard.behind not in (None, rows[-1].uid if rows else None):
        refuse("broken_chain", guard.session_id)
    if guard.revision not in (None, revision):
        refuse("stale_revision", guard.session_id)


def _reopens(state: State, unit: Unit, guard: Guard) -> bool:
    return any(
        isinstance(c, ReopenSession)
        and c.session_id == guard.session_id
        and not state.was_set(c.session_id, "end", c.replaces, c)
        for c in unit.commands
    )


def _replaces_suspension(unit: Unit, session_id: SessionId) -> bool:
    return any(
        (isinstance(c, Rotate) and c.parent_id == session_id)
        or (isinstance(c, EndSession) and (c.session_id, c.kind) == (session_id, "boundary"))
        for c in unit.commands
    )


def _routes(state: State, unit: Unit, guard: Guard) -> bool:
    return any(
        isinstance(c, SetRoute)
        and (c.key, c.session_id) == (guard.key, guard.session_id)
        and not state.was_set(c.key, "route", c.replaces, c)
        for c in unit.commands
    )
