"""Clean-up as its callers see it: what may go, what is asked to go, and what a person keeps.

The functions need a Writer and a clock, so that the command line uses them too. What concerns a
key's current session goes through its actor where there are actors, and `Keys` is how: the runtime
hands in its Directory, the command line owns the file and has nobody to ask.

Keeps: a call returns when what it says is durable; cancelled or killed half-way, the same call
finishes it, and a deletion is finished by the next start as well.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from ..actors.clearing import delete_session, purge
from ..actors.erasing import withdraw
from ..storage.commands import SetFlags, SetPendingTitle, SetRoute
from ..storage.edge import check_integer, check_name, check_session_id, shown
from ..storage.errors import (
    InvalidContentError,
    MissingError,
    RouteConflictError,
    SessionEndedError,
    StaleError,
)
from ..storage.identity import SessionId, SessionKey
from ..storage.units import Unit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..actors.writer import WriterRef
    from ..storage.commands import AnyCommand
    from ..storage.engine import Reader
    from ..storage.identity import Clock, Ids
    from ..storage.records import Session, Turn

T = TypeVar("T")

_TRIES_MAX = 5
_NAMED_MAX = 1_000
_PAGE = 100
_AGE_MAX_S = 1e11  # three thousand years


class PrunedSession(Struct, frozen=True, kw_only=True):
    """A session that went, or would go."""

    id: SessionId
    key: SessionKey
    title: str | None
    messages: int
    bytes: int
    last_ms: int


class Pruned(Struct, frozen=True, kw_only=True):
    """What a pruning came to, or would come to. Of the sessions the oldest thousand are named."""

    count: int
    messages: int
    bytes: int
    sessions: tuple[PrunedSession, ...]
    dry_run: bool


class Keys(Protocol):
    """How the current session of a key is taken from it, and a turn is stopped."""

    async def discard(self, key: SessionKey, session_id: SessionId) -> None: ...
    async def stop(self, turn: Turn) -> None: ...


class NoActors:
    """Keys of a file that only we have open."""

    def __init__(self, writer: WriterRef, clock: Clock, ids: Ids) -> None:
        self._writer = writer
        self._clock = clock
        self._ids = ids

    async def discard(self, key: SessionKey, session_id: SessionId) -> None:
        """The key gets a fresh session, as far as it still has this one."""
        route = await self._writer.read(lambda reader: reader.route(key))
        if route is None or route.session_id != session_id:
            return
        now = self._clock.now()
        commands: list[AnyCommand] = [
            SetRoute(
                key=key,
                session_id=SessionId(self._ids.fresh()),
                replaces=route.route_version,
                at_ms=now,
            )
        ]
        if route.pending_title is not None:
            version = route.pending_title_version
            title = SetPendingTitle(
                key=key, title=None, origin="person", replaces=version, at_ms=now
            )
            commands.append(title)
        await self._writer.write(Unit(tuple(commands)))

    async def stop(self, turn: Turn) -> None:
        """It was cut off when its process died, and nobody has taken it up."""
        await withdraw(self._writer, self._clock.now(), turn.id)


# Deletion ----------------------------------------------------------------------------------------


class _Stored(NamedTuple):
    session: Session | None
    holder: SessionKey | None
    turns: tuple[Turn, ...]


def _look(session_id: SessionId, reader: Reader) -> _Stored:
    session = reader.session(session_id)
    turns = () if session is None else reader.unfinished_turns(session.key)
    own = tuple(turn for turn in turns if turn.session_id == session_id)
    return _Stored(session, reader.holder(session_id), own)


async def delete(writer: WriterRef, clock: Clock, keys: Keys, session_id: SessionId) -> bool:
    """Delete a session, current or not; false if there was nothing to delete any more.

    Raises `MissingError`, and `RouteConflictError` if keys switch to it again and again.
    """
    check_session_id(session_id)
    holder: SessionKey | None = None
    for tries in range(1, _TRIES_MAX + 1):
        stored = await writer.read(partial(_look, session_id))
        session, holder = stored.session, stored.holder
        if session is None and holder is not None:
            return False  # nothing was said in it yet
        if session is None or session.hidden:
            raise MissingError(f"session {session_id}")
        if session.deleted:
            await purge(writer, session_id)
            return tries > 1
        if holder is not None:
            await keys.discard(holder, session_id)
            continue
        for turn in stored.turns:
            await keys.stop(turn)
        try:
            return await delete_session(writer, clock, session_id)
        except RouteConflictError:
            if tries == _TRIES_MAX:
                raise
    raise RouteConflictError(str(holder), session_id, holder)


# By age ------------------------------------------------------------------------------------------


def before_of(clock: Clock, older_than_s: float | None, before_ms: int | None) -> int:
    """The time before which something is old, from either way to say it."""
    if (older_than_s is None) == (before_ms is None):
        hint = "give one of older_than_s and before_ms"
        raise InvalidContentError("older_than_s", "it is not clear what is old", hint=hint)
    if before_ms is not None:
        check_integer("before_ms", before_ms)
        return before_ms
    age: Any = older_than_s
    if isinstance(age, bool) or not isinstance(age, int | float) or not 0 <= age < _AGE_MAX_S:
        raise InvalidContentError("older_than_s", f"{shown(age)} is no age", hint="give seconds")
    return clock.now() - int(age * 1000)


class Reads(Protocol):
    """Whoever looks at a file: a Writer, or somebody who looks on."""

    async def read(self, view: Callable[[Reader], T]) -> T: ...


async def prune(
    reads: Reads,
    before_ms: int,
    *,
    source: str | None = None,
    key: str | None = None,
    archived_only: bool = False,
    ended_only: bool = False,
    delete: Callable[[SessionId], Awaitable[bool]] | None = None,
    told: Callable[[int], object] | None = None,
) -> Pruned:
    """Delete sessions in which nothing has happened since, the oldest first; or say which.

    `delete` is `deleting(…)`; without it nothing is deleted.
    """
    for field, value in (("source", source), ("key", key)):
        if value is not None:
            check_name(field, value)
    wanted = None if key is None else SessionKey(key)
    count = messages = size = 0
    named: list[PrunedSession] = []
    place: tuple[int, int] | None = None

    def look(reader: Reader) -> tuple[tuple[Session, ...], tuple[int, int] | None]:
        return reader.quiet_sessions(
            before_ms,
            source=source,
            key=wanted,
            archived_only=archived_only,
            ended_only=ended_only,
            after=place,
            limit=_PAGE,
        )

    while True:
        sessions, following = await reads.read(look)
        for session in sessions:
            if delete is not None and not await delete(session.id):
                continue
            count, messages = count + 1, messages + session.message_count
            size += session.active_bytes
            if len(named) < _NAMED_MAX:
                named.append(_named(session))
            if told is not None:
                told(count)
        if following is None:
            break
        place = following
    return Pruned(
        count=count, messages=messages, bytes=size, sessions=tuple(named), dry_run=delete is None
    )


def deleting(
    writer: WriterRef, clock: Clock, before_ms: int
) -> Callable[[SessionId], Awaitable[bool]]:
    """How a session is pruned; false if somebody has come back to it since it was looked at."""

    async def run(session_id: SessionId) -> bool:
        try:
            return await delete_session(writer, clock, session_id, quiet_since_ms=before_ms)
        except (StaleError, RouteConflictError, SessionEndedError, MissingError):
            return False

    return run


def _named(session: Session) -> PrunedSession:
    return PrunedSession(
        id=session.id,
        key=session.key,
        title=session.title,
        messages=session.message_count,
        bytes=session.active_bytes,
        last_ms=session.last_ms,
    )


# What a person keeps -----------------------------------------------------------------------------


async def set_flags(
    writer: WriterRef,
    clock: Clock,
    session_id: SessionId,
    *,
    archived: bool | None = None,
    pinned: bool | None = None,
) -> bool:
    """Set what is given and leave the rest; false if it is so already. Raises `MissingError`."""
    check_session_id(session_id)
    for tries in range(1, _TRIES_MAX + 1):
        session = await writer.read(lambda reader: reader.session(session_id))
        if session is None or session.hidden or session.deleted:
            raise MissingError(f"session {session_id}")
        now = (session.archived, session.pinned)
        then = (
            session.archived if archived is None else archived,
            session.pinned if pinned is None else pinned,
        )
        if now == then:
            return False
        command = SetFlags(
            session_id=session_id,
            archived=then[0],
            pinned=then[1],
            replaces=session.flags_version,
            at_ms=clock.now(),
        )
        try:
            await writer.write(Unit((command,)))
        except StaleError:
            if tries == _TRIES_MAX:
                raise
        else:
            return True
    raise AssertionError("unreachable")
