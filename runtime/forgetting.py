"""Erasing a user: everything that one person has said, wherever it is.

    messages that wait and timers  →  sessions that are only theirs are deleted
    →  in sessions that others share their rows are blanked  →  their answers to others' questions

What others said stays, and so do the agent's answers, summaries and titles in shared sessions; keys
and ids stay too, because what is sent again must be recognised. What the user says after the call
has begun is not covered. Cut off anywhere, the same call finishes it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from ..actors.clearing import finish_purges
from ..actors.erasing import Blanked, blank_user, withdraw
from ..storage.commands import EraseWork
from ..storage.edge import check_name
from ..storage.units import Unit
from .cleanup import Keys, NoActors, Reads, delete

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..actors.writer import WriterRef
    from ..storage.engine import Reader
    from ..storage.identity import Clock, SessionId, SessionKey, TurnId
    from ..storage.records import PartOfUser, Session, WorkOfUser

_SPAN = 20_000  # messages that are looked at in one snapshot
_AT_ONCE = 50


class Erased(Struct, frozen=True, kw_only=True):
    """What erasing a user came to."""

    user: str
    sessions_deleted: int
    sessions_blanked: int
    rows_blanked: int
    turns_blanked: int
    messages_withdrawn: int
    timers_removed: int


class Visitor(Keys, Protocol):
    """How sessions of a key are blanked, and what waits under it is withdrawn."""

    async def blank(
        self, key: SessionKey, session_ids: tuple[SessionId, ...], user: str
    ) -> Blanked: ...
    async def withdraw(self, key: SessionKey, turn_id: TurnId) -> bool: ...
    async def remove_timer(self, timer_id: str) -> None: ...


class AloneVisitor(NoActors):
    """For a file that only we have open: nothing of it is in anybody's memory."""

    async def blank(
        self, key: SessionKey, session_ids: tuple[SessionId, ...], user: str
    ) -> Blanked:
        blanked = Blanked(0, 0)
        for session_id in session_ids:
            blanked += await blank_user(self._writer, self._clock.now(), session_id, user)
        return blanked

    async def withdraw(self, key: SessionKey, turn_id: TurnId) -> bool:
        return await withdraw(self._writer, self._clock.now(), turn_id)

    async def remove_timer(self, timer_id: str) -> None:
        """Nobody waits for it here."""


async def erase(
    writer: WriterRef,
    clock: Clock,
    visitor: Visitor,
    user: str,
    told: Callable[[str, int], object] | None = None,
) -> Erased:
    """Erase everything of a user; durable on return."""
    check_name("user", user)
    tell = told or _nobody
    withdrawn, timers = await _erase_work(writer, visitor, user)
    sessions = await _sessions_of(writer, user, tell)
    deleted = blanked_sessions = 0
    shared: dict[SessionKey, list[SessionId]] = {}
    for number, session_id in enumerate(sessions):
        part, session = await writer.read(partial(_look, session_id, user))
        if session is None or session.deleted:
            continue
        if part.only:
            deleted += await delete(writer, clock, visitor, session_id)
        else:
            shared.setdefault(session.key, []).append(session_id)
        tell("sessions", number + 1)
    blanked = Blanked(0, 0)
    for key, session_ids in shared.items():
        # One visit of each key: its actor stops what it does for it.
        blanked += await visitor.blank(key, tuple(session_ids), user)
        blanked_sessions += len(session_ids)
        tell("rows", blanked.rows)
    await finish_purges(writer)
    return Erased(
        user=user,
        sessions_deleted=deleted,
        sessions_blanked=blanked_sessions,
        rows_blanked=blanked.rows,
        turns_blanked=blanked.turns,
        messages_withdrawn=withdrawn,
        timers_removed=timers,
    )


async def affected(reads: Reads, user: str) -> tuple[int, int]:
    """How many sessions would be deleted, and how many blanked in part."""
    check_name("user", user)
    only = shared = 0
    for session_id in await _sessions_of(reads, user, _nobody):
        part, _ = await reads.read(partial(_look, session_id, user))
        only, shared = only + part.only, shared + (not part.only)
    return only, shared


def _nobody(_what: str, _count: int) -> None:
    """Nobody wants to know how far it is."""


def _look(session_id: SessionId, user: str, reader: Reader) -> tuple[PartOfUser, Session | None]:
    return reader.part_of_user(session_id, user, limit=1), reader.session(session_id)


async def _erase_work(writer: WriterRef, visitor: Visitor, user: str) -> tuple[int, int]:
    """What is not in a transcript, or not yet; how many messages and timers there were."""

    def look(reader: Reader) -> WorkOfUser:
        return reader.work_of_user(user)

    work = await writer.read(look)
    withdrawn = 0
    for key, turn_id in work.waiting:
        withdrawn += await visitor.withdraw(key, turn_id)
        # What the turn came to names nobody, but it is told to whoever sent its messages.
        turn = await writer.read(partial(_ended, turn_id))
        if turn:
            await writer.write(Unit((EraseWork(turn_ids=(turn_id,)),)))
    for _, timer_id in work.timers:
        await visitor.remove_timer(timer_id)
    names = [timer_id for _, timer_id in work.timers]
    for start in range(0, len(names), _AT_ONCE):
        await writer.write(Unit((EraseWork(timer_ids=tuple(names[start : start + _AT_ONCE])),)))
    for start in range(0, len(work.answered), _AT_ONCE):
        answered = work.answered[start : start + _AT_ONCE]
        await writer.write(Unit((EraseWork(answered=answered, user=user),)))
    return withdrawn, len(names)


def _ended(turn_id: TurnId, reader: Reader) -> bool:
    turn = reader.turn(turn_id)
    return turn is not None and turn.state == "ended"


async def _sessions_of(
    reads: Reads, user: str, tell: Callable[[str, int], object]
) -> list[SessionId]:
    """All messages are looked at, in pieces: who said what has no index, and is asked so seldom."""
    sessions: dict[SessionId, None] = {}
    place: int | None = -1
    while place is not None:
        found, place = await reads.read(partial(_some, user, place))
        sessions |= dict.fromkeys(found)
        tell("messages", place or 0)
    return list(sessions)


def _some(user: str, place: int, reader: Reader) -> tuple[tuple[SessionId, ...], int | None]:
    return reader.sessions_of_user(user, after=place, span=_SPAN)
