"""`runtime.sessions`: what is stored, for people and programs that look, and for moving it.

Every call that looks reads one snapshot, which holds all that was acknowledged before the call.
Nothing here writes but `import_from`, and that through the Writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, Literal, cast, final, overload

import trio

from ..storage.edge import check_count, check_integer, check_name, check_place
from ..storage.errors import MissingError
from ..storage.identity import SessionId, SessionKey, TurnId
from ..storage.records import Search
from .searching import check_search, find_page
from .transfer import export, import_file, selection

if TYPE_CHECKING:
    import os

    from ..actors.writer import WriterRef
    from ..storage.engine import Reader
    from ..storage.records import Hits, Listed, Message, Role, Session, Turn, UsageTotal
    from ..storage.transfer import ExportReport, ImportLimits, ImportReport
    from .transfer import Keys, Progress


_PAGE = 500


@final
class Listing(Sequence["Listed"]):
    """One page of sessions, and where the next one begins (`None` at the end)."""

    def __init__(self, sessions: tuple[Listed, ...], following: tuple[int, int] | None) -> None:
        self.sessions = sessions
        self.next = following

    def __len__(self) -> int:
        return len(self.sessions)

    @overload
    def __getitem__(self, index: int) -> Listed: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Listed, ...]: ...
    def __getitem__(self, index: int | slice) -> Listed | tuple[Listed, ...]:
        return self.sessions[index]


def _text(field: str, value: object) -> str:
    """Text that can be looked up; anything else is refused with a type."""
    check_name(field, value)
    return str(value)


def _message_place(after: Any) -> tuple[SessionId, int] | None:
    """Where a message stands, if that is what was given, and not a cursor."""
    if not isinstance(after, tuple | list) or not after or not isinstance(after[0], str):
        return None
    given: Any = (0, *cast("Any", after[1:]))
    check_place("after", given)
    return SessionId(_text("after", after[0])), int(given[1])


def _said_since(
    reader: Reader, session_id: SessionId, seq: int, limit: int | None
) -> tuple[Message, ...]:
    """What came behind a message, in its session and in those that it was rotated to."""
    messages: list[Message] = []
    sessions = [session.id for session in reader.lineage(session_id)]
    if session_id not in sessions:
        raise MissingError(f"session {session_id}")
    for one in sessions[sessions.index(session_id) :]:
        last = seq if one == session_id else -1
        while limit is None or len(messages) < limit:
            size = _PAGE if limit is None else min(_PAGE, limit - len(messages))
            page = reader.said_since(one, last, size)
            messages.extend(page)
            if len(page) < size:
                break
            last = page[-1].seq
    return tuple(messages)


@final
class Sessions:
    """The sessions of a runtime's database."""

    def __init__(self, writer: WriterRef, keys: Keys) -> None:
        self._writer = writer
        self._keys = keys
        self._importing = trio.Lock()

    async def list(
        self,
        *,
        source: str | None = None,
        key: str | None = None,
        archived: bool | None = False,
        since_ms: int | None = None,
        until_ms: int | None = None,
        limit: int = 50,
        after: tuple[int, int] | None = None,
    ) -> Listing:
        """Most recent first; a lineage is shown as its tip."""
        for field, value in (("source", source), ("key", key)):
            if value is not None:
                _text(field, value)
        check_count("limit", limit)
        check_place("after", after)
        for field, time in (("since_ms", since_ms), ("until_ms", until_ms)):
            if time is not None:
                check_integer(field, time)
        sessions, following = await self._writer.read(
            lambda reader: reader.listing(
                source=source,
                key=None if key is None else SessionKey(key),
                archived=archived,
                since_ms=since_ms,
                until_ms=until_ms,
                limit=limit,
                after=after,
            )
        )
        return Listing(sessions, following)

    async def get(self, session_id: str) -> Session | None:
        """A session's row, or `None`: a lazy session has none yet."""
        wanted = SessionId(_text("session_id", session_id))
        found = await self._writer.read(lambda reader: reader.session(wanted))
        return None if found is None or found.hidden else found

    async def find(self, given: str) -> Session:
        """By id, unique prefix or title. Raises `MissingError` and `AmbiguousError`."""
        wanted = _text("session", given)
        return await self._writer.read(lambda reader: reader.find_session(wanted))

    async def lineage(self, session_id: str) -> tuple[Session, ...]:
        """From the oldest ancestor to the tip of its rotations."""
        wanted = SessionId(_text("session_id", session_id))
        return await self._writer.read(lambda reader: reader.lineage(wanted))

    async def current(self, key: str) -> SessionId | None:
        """The session that the key's route names; it may have no row yet."""
        wanted = SessionKey(_text("key", key))
        route = await self._writer.read(lambda reader: reader.route(wanted))
        return None if route is None else route.session_id

    async def pending_title(self, key: str) -> str | None:
        """The title that waits for the key's session to have a row."""
        wanted = SessionKey(_text("key", key))
        route = await self._writer.read(lambda reader: reader.route(wanted))
        return None if route is None else route.pending_title

    async def transcript(
        self,
        session_id: str,
        *,
        include_inactive: bool = False,
        after: tuple[int, int] | tuple[str, int] | None = None,
        limit: int | None = None,
    ) -> tuple[Message, ...]:
        """The messages in reading order: all of them, or a page behind `after`.

        With `after=(session id, seq)` of a message that you have, what was said since, as it was
        said: to the end of that session and on through its rotations, each message once. That is
        how to go on where events were missed.
        """
        wanted = SessionId(_text("session_id", session_id))
        if limit is not None:
            check_count("limit", limit)
        since = _message_place(after)
        if since is not None:
            return await self._writer.read(lambda reader: _said_since(reader, *since, limit))
        check_place("after", after)
        start: Any = after

        def look(reader: Reader) -> tuple[Message, ...]:
            messages: list[Message] = []
            session = reader.session(wanted)
            if session is None or session.hidden:  # what is being imported is not here yet
                return ()
            position = start
            while limit is None or len(messages) < limit:
                size = _PAGE if limit is None else min(_PAGE, limit - len(messages))
                found = reader.transcript(
                    wanted, include_inactive=include_inactive, after=position, limit=size
                )
                messages.extend(found.messages)
                position = found.next
                if position is None:
                    break
            return tuple(messages)

        return await self._writer.read(look)

    async def search(
        self,
        text: str,
        *,
        order: Literal["rank", "newest"] = "rank",
        session_id: str | None = None,
        key: str | None = None,
        source: str | None = None,
        user: str | None = None,
        role: Role | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
        active: bool = False,
        limit: int = 20,
        after: tuple[int, int, int] | None = None,
        around: int = 0,
        marks: tuple[str, str] = ("«", "»"),
    ) -> Hits:
        """Messages that hold the words of a text; all that are acknowledged are looked at.

        Any text is a query: plain words must all be there, `"a phrase"` in a row, `begin*` begins
        a word, `-word` must not be there, `OR` is either. By rank what is not indexed yet comes
        first; `newest` is the last that was stored first. `around` brings so many messages on
        either side of each hit. `after` is the `next` of the page before; there may be a next page
        behind one that is short.
        """
        search = Search(
            text=text,
            order=order,
            session_id=None if session_id is None else SessionId(session_id),
            key=None if key is None else SessionKey(key),
            source=source,
            user=user,
            role=role,
            since_ms=since_ms,
            until_ms=until_ms,
            active=active,
            limit=limit,
            after=after,
            around=around,
            marks=marks,
        )
        check_search(search)
        return await find_page(self._writer.read, search)

    async def export_to(
        self,
        target: str | os.PathLike[str] | IO[bytes],
        *,
        session_id: str | None = None,
        lineage: str | None = None,
        key: str | None = None,
        everything: bool = False,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> ExportReport:
        """Write one session, a session's lineage, a key's sessions or everything to a file.

        Each session is written as it stood at one moment. The file is there, on disk, when this
        returns, and not before; packed if its name ends in `.gz`. A binary stream is written to as
        well. Raises `ExportError` and `MissingError`; cancelled, it leaves no file.
        """
        what = selection(session_id, lineage, key, everything=everything)
        return await export(self._writer.read, target, what, overwrite=overwrite, progress=progress)

    async def import_from(
        self,
        path: str | os.PathLike[str],
        *,
        dry_run: bool = False,
        limits: ImportLimits | None = None,
        progress: Progress | None = None,
    ) -> ImportReport:
        """Import what `export_to` has written. A second time it changes nothing.

        The whole file is checked, and compared with what is here, before anything is written. Each
        lineage shows at once or not at all. A session that is here is gone on with if what is
        stored is a beginning of what is given; behind its running turn, and its agent is built
        anew. Raises `ImportFileError`, which names the line, and `ConflictError`.
        """
        async with self._importing:
            return await import_file(
                self._writer,
                path,
                keys=self._keys,
                dry_run=dry_run,
                limits=limits,
                progress=progress,
            )

    async def turn(self, turn_id: str) -> Turn:
        """What is stored of a turn. Raises `MissingError`."""
        wanted = TurnId(_text("turn_id", turn_id))
        turn = await self._writer.read(lambda reader: reader.turn(wanted))
        if turn is None:
            raise MissingError(f"turn {turn_id}")
        return turn

    async def usage(self, session_id: str | None = None) -> tuple[UsageTotal, ...]:
        """Tokens and cost by model and source; of one session, or of all."""
        wanted = None if session_id is None else SessionId(_text("session_id", session_id))
        return await self._writer.read(lambda reader: reader.usage(wanted))
