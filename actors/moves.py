"""The operations that give a key another session: open, switch, reset, discard, branch.

Keeps: each is one unit with a committed route write in it (contract B5); memory follows behind the
receipt, never before it. A session of another key is refused, or taken over: then the other key
gets a fresh one in the same transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..storage.commands import (
    Branch,
    CreateSession,
    DeleteSession,
    OpenIncarnation,
    ReopenSession,
    SetPendingTitle,
    SetRoute,
)
from ..storage.edge import check_session_id, check_unit
from ..storage.errors import InvalidContentError, MissingError, SessionHeldError
from ..storage.units import Unit
from . import recovery
from .clearing import SHORT_ROWS
from .exchanges import safe_cut
from .finalize import finalize
from .line import Operate
from .titles import give_title

if TYPE_CHECKING:
    from ..storage.commands import AnyCommand
    from ..storage.engine import Reader
    from ..storage.identity import Incarnation, SessionId, SessionKey, Uid
    from ..storage.records import Route
    from ..storage.records import Session as SessionRow
    from .session import Session


async def _follow(session: Session) -> None:
    """The key has another session, durably: memory follows."""
    await session.scribe.reload()
    session.follow_page()
    page = session.scribe.page
    session.slot.compare(page.session_id, page.revision)
    session.line.stream.publish("rotated", session_id=page.session_id)


def _version(session: Session) -> int:
    return session.scribe.route.route_version


def open_session(
    session_id: SessionId | None, title: str | None, user: str | None, model: str | None
) -> Operate[SessionId]:
    """See to it that the key has a session, this one if an id is given. Writes no session row."""

    async def run(session: Session) -> SessionId:
        scribe = session.scribe
        wanted = session_id or scribe.page.session_id
        existed = False
        row = CreateSession(
            session_id=wanted, key=scribe.key, at_ms=scribe.now(), user=user, model=model
        )
        check_unit(Unit((row,)))  # here, where it can be mended, and not with the first message
        if scribe.route.session_id != wanted:
            if session_id is not None:
                # A row that exists stays as it is, its end included: contract D2.
                existed = await _switch(session, wanted, take_over=None, reopen=False)
            else:
                command = SetRoute(
                    key=scribe.key,
                    session_id=wanted,
                    replaces=_version(session),
                    at_ms=scribe.now(),
                )
                await session.scribe.commit((command,))
                scribe.move_route(wanted)
        page = scribe.page
        if not page.stored:
            page.user, page.model = user or page.user, model or page.model
        existed = existed or (session_id is not None and page.stored)
        if title is not None and not existed:
            await give_title(session.scribe, title, "person")
        return page.session_id

    return Operate("open_session", run, interrupts=False)


class TakeOver:
    """The other side of a switch that takes a session from its key."""

    def __init__(self, holder: SessionKey, incarnation: Incarnation) -> None:
        self.holder = holder
        self.incarnation = incarnation


def switch(session_id: SessionId, take_over: TakeOver | None) -> Operate[SessionId]:
    """The key gets this session; one that has no row is reserved for it."""

    async def run(session: Session) -> SessionId:
        await _switch(session, session_id, take_over)
        return session_id

    return Operate("switch", run, interrupts=True)


async def _switch(
    session: Session, session_id: SessionId, take_over: TakeOver | None, *, reopen: bool = True
) -> bool:
    """Move the key; whether the session has a row."""
    scribe = session.scribe
    check_session_id(session_id)
    if scribe.route.session_id == session_id and not scribe.page.end_kind:
        return scribe.page.stored
    holder_key = take_over.holder if take_over is not None else None

    def look(reader: Reader) -> tuple[SessionRow | None, Route | None, SessionKey | None]:
        holder_route = reader.route(holder_key) if holder_key is not None else None
        return reader.session(session_id), holder_route, reader.holder(session_id)

    row, holder_route, holder = await session.scribe.read(look)
    if row is not None and (row.deleted or row.hidden):
        raise MissingError(f"session {session_id}")
    if holder not in (None, scribe.key) and holder_key != holder:
        assert holder is not None
        raise SessionHeldError(scribe.key, session_id, holder)
    if row is not None and row.key != scribe.key and take_over is None:
        raise SessionHeldError(scribe.key, session_id, row.key)
    now = scribe.now()
    commands: list[AnyCommand] = []
    if take_over is not None and holder_route is not None and holder == take_over.holder:
        # Its incarnation moves with its route, so that nothing of its last actor comes after; and
        # behind it, because that is what the unit is known by once a next actor has overtaken it.
        commands += (
            SetRoute(
                key=take_over.holder,
                session_id=scribe.fresh_session_id(),
                replaces=holder_route.route_version,
                at_ms=now,
            ),
            OpenIncarnation(key=take_over.holder, incarnation=take_over.incarnation),
        )
    if scribe.route.session_id != session_id:
        commands.append(
            SetRoute(
                key=scribe.key,
                session_id=session_id,
                replaces=_version(session),
                at_ms=now,
                take_over=take_over is not None,
            )
        )
    if reopen and row is not None and row.end_kind in ("boundary", "suspension"):
        # A person asked for this session, so it is open again.
        commands.append(ReopenSession(session_id=session_id, replaces=row.end_version, at_ms=now))
    if commands:
        await session.scribe.commit(tuple(commands))
        await _follow(session)
        if take_over is not None:
            await recovery.close_brought(session)
    return row is not None


def reset(reason: str = "reset") -> Operate[SessionId]:
    """The current session ends behind a boundary, and the key has a new one at once."""

    async def run(session: Session) -> SessionId:
        scribe = session.scribe
        fresh = scribe.fresh_session_id()
        parent = scribe.page
        move = SetRoute(
            key=scribe.key, session_id=fresh, replaces=_version(session), at_ms=scribe.now()
        )
        await finalize(session, reason, "boundary", along=(move,))
        await _follow(session)
        page = scribe.page
        # One without messages may be pruned, and can't be referred to by what has no row yet.
        said = parent.stored and parent.next_seq > 0
        if page.session_id == fresh and not page.stored and said:
            page.parent_id, page.edge = parent.session_id, "reset"
        return page.session_id

    return Operate("reset", run, interrupts=True)


def discard(session_id: SessionId) -> Operate[None]:
    """The current session is closed for good, and the key has a new one that knows nothing of it.

    The tombstone of a short one is in the same unit; a long one has slices before it, and is no
    longer anybody's then.
    """

    async def run(session: Session) -> None:
        scribe = session.scribe
        if scribe.route.session_id != session_id:
            return
        page, now = scribe.page, scribe.now()
        along: list[AnyCommand] = [
            SetRoute(
                key=scribe.key,
                session_id=scribe.fresh_session_id(),
                replaces=_version(session),
                at_ms=now,
            )
        ]
        if scribe.route.pending_title is not None:
            version = scribe.route.pending_title_version
            title = SetPendingTitle(
                key=scribe.key, title=None, origin="person", replaces=version, at_ms=now
            )
            along.append(title)
        if page.stored and page.next_seq <= SHORT_ROWS:
            along.append(DeleteSession(session_id=session_id, at_ms=now))
        await finalize(session, "deleted", "boundary", along=tuple(along))
        await _follow(session)
        session.line.stream.forget()
        session.slot.distrust()

    return Operate("delete", run, interrupts=True)


def branch(upto: Uid | None) -> Operate[SessionId]:
    """The key moves to a copy of its transcript, up to and with a message."""

    async def run(session: Session) -> SessionId:
        scribe = session.scribe
        page = scribe.page
        if not page.stored or not page.messages:
            raise MissingError(f"a transcript of {session.key}")
        end = len(page.messages) if upto is None else session.scribe.page.index_of(upto) + 1
        cut = safe_cut(page.messages, end)
        if cut == 0:
            raise InvalidContentError(
                "upto", "nothing stands before it", hint="branch behind a whole exchange"
            )
        last = page.messages[cut - 1]
        child_id = scribe.fresh_session_id()
        command = Branch(
            key=scribe.key,
            parent_id=page.session_id,
            child_id=child_id,
            upto_seq=last.covers[1] if last.covers else last.seq,
            replaces=_version(session),
            at_ms=scribe.now(),
        )
        along: tuple[AnyCommand, ...] = ()
        if page.end_kind is not None:
            along = (
                ReopenSession(
                    session_id=page.session_id, replaces=page.end_version, at_ms=scribe.now()
                ),
            )
        await session.scribe.commit((*along, command), (session.scribe.guard(),))
        await _follow(session)
        session.slot.seen(scribe.page.session_id, scribe.page.revision)
        return child_id

    return Operate("branch", run, interrupts=False)
