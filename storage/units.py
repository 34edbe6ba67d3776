"""Units, their guards, and the receipts they resolve to.

A unit is applied whole or not at all. What is already stored exactly as given counts as applied,
first of all; for the rest the guards must hold:

- the incarnation is the key's: a predecessor's late write is refused (`stale_incarnation`);
- the route names the guarded session (or this unit moves it there), and the session is open (or has
  no row yet, or is reopened by this unit);
- `base_seq`, if given, is the session's next seq, and `behind`, if given, the uid of its last row,
  so that one refusal refuses all later units of that session by itself (`broken_chain`): no gaps,
  no torn order, and no row of somebody else in the place of the one that was refused;
- `revision`, if given, is the session's: what the writer of the unit has seen is what is stored.

A receipt tells only what is certain: `Durable` is on disk, `Refused` has changed nothing, `Unknown`
is said only when the runtime ends before the outcome could be learned.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from . import errors
from .commands import AnyCommand, AppendMessages, Branch, Compact, Restore, Rewind, Rotate
from .identity import Incarnation, Seq, SessionId, SessionKey, Uid

Reason: TypeAlias = Literal[
    "stale_revision",
    "route_conflict",
    "no_gain",
    "title_taken",
    "stale",
    "stale_incarnation",
    "broken_chain",
    "ended",
    "conflict",
    "missing",
    "invalid",
]


class Guard(Struct, frozen=True, kw_only=True, gc=False):
    """What must hold for a unit to be applied."""

    key: SessionKey
    incarnation: Incarnation
    session_id: SessionId | None = None
    base_seq: Seq | None = None
    revision: int | None = None
    behind: Uid | None = None


class Unit(Struct, frozen=True, gc=False):
    """Commands that are applied together, under their guards.

    A unit that is sent again must be equal.
    """

    commands: tuple[AnyCommand, ...]
    guards: tuple[Guard, ...] = ()


class Head(Struct, frozen=True, gc=False):
    """Where a session stands after a unit."""

    session_id: SessionId
    next_seq: Seq
    revision: int


class Durable(Struct, frozen=True, gc=False):
    """The unit is on disk. `again` says that it was there before it was sent this time."""

    commit_seq: int
    again: bool = False
    heads: tuple[Head, ...] = ()


class Refused(Struct, frozen=True, kw_only=True):
    """The unit has changed nothing, and why."""

    reason: Reason
    what: str
    stored: Any = None
    given: Any = None

    def error(self) -> errors.OnepenError:
        """The same as a typed error, for callers that raise."""
        match self.reason:
            case "conflict":
                return errors.ConflictError(self.what, self.stored, self.given)
            case "route_conflict":
                return errors.RouteConflictError(self.what, str(self.given), self.stored)
            case "title_taken":
                return errors.TitleTakenError(str(self.given), self.stored)
            case "no_gain":
                return errors.NoGainError(self.what, self.stored, self.given)
            case "ended":
                return errors.SessionEndedError(self.what, self.stored)
            case "missing":
                return errors.MissingError(self.what)
            case "stale_incarnation":
                return errors.StaleIncarnationError(self.what, self.given, self.stored)
            case "broken_chain":
                return errors.BrokenChainError(self.what, self.given, self.stored)
            case "stale" | "stale_revision":
                return errors.StaleError(self.what, self.given, self.stored)
            case "invalid":
                return errors.InvalidContentError(
                    self.what, str(self.given), hint="nothing of the unit was stored"
                )


class Unknown(Struct, frozen=True):
    """The runtime ended before it learned what became of the unit."""

    reason: str


Receipt: TypeAlias = Durable | Refused | Unknown


# The commands that change a transcript, and which of their fields names it.
_CHANGES_TRANSCRIPT: dict[type, str] = {
    AppendMessages: "session_id",
    Compact: "session_id",
    Rewind: "session_id",
    Restore: "session_id",
    Rotate: "parent_id",
    Branch: "parent_id",
}


def check_guarded(unit: Unit) -> None:
    """Raise unless every command that changes a transcript is covered by a guard of its session.

    This is what keeps every transcript behind its session actor: there is no way to write around
    the chain.
    """
    if not unit.commands:
        raise errors.InvalidUnitError("a unit without commands")
    guarded = [guard.session_id for guard in unit.guards]
    for command in unit.commands:
        field = _CHANGES_TRANSCRIPT.get(type(command))
        if field is None:
            continue
        session_id: SessionId = getattr(command, field)
        if session_id not in guarded:
            raise errors.InvalidUnitError(
                f"{type(command).__name__} of session {session_id} is not guarded"
            )
        if isinstance(command, Rotate | Branch):
            guarded.append(command.child_id)  # the unit may go on in the child that it makes
        elif isinstance(command, Rewind | Restore) and _changes(unit, session_id) > 1:
            # It names the revision it replaces, and a unit moves a revision once.
            raise errors.InvalidUnitError(
                f"{type(command).__name__} of session {session_id} is not alone in its unit"
            )


def _changes(unit: Unit, session_id: SessionId) -> int:
    """How many commands of the unit change this session's transcript."""
    fields = ((c, _CHANGES_TRANSCRIPT.get(type(c))) for c in unit.commands)
    return sum(field is not None and getattr(c, field) == session_id for c, field in fields)
