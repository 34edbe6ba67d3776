"""`runtime.sessions`: what is stored, for people and programs that look. Nothing here writes.

Every call reads one snapshot, which holds all that was acknowledged before the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from ..storage.errors import MissingError
from ..storage.identity import SessionId, SessionKey, TurnId

if TYPE_CHECKING:
    from ..actors.writer import WriterRef
    from ..storage.records import Listed, Message, Session, Turn, UsageTotal


class Listing(NamedTuple):
    """One page of sessions, and where the next one begins (`None` at the end)."""

    sessions: tuple[Listed, ...]
    next: tuple[int, int] | None


@final
class Sessions:
    """The sessions of a runtime's database."""

    def __init__(self, writer: WriterRef) -> None:
        self._writer = writer

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
        return await self._writer.read(lambda reader: reader.session(SessionId(session_id)))

    async def find(self, given: str) -> Session:
        """By id, unique prefix or title. Raises `MissingError` and `AmbiguousError`."""
        return await self._writer.read(lambda reader: reader.find_session(given))

    async def lineage(self, session_id: str) -> tuple[Session, ...]:
        """From the oldest ancestor to the tip of its rotations."""
        return await self._writer.read(lambda reader: reader.lineage(SessionId(session_id)))

    async def current(self, key: str) -> SessionId | None:
        """The session that the key's route names; it may have no row yet."""
        route = await self._writer.read(lambda reader: reader.route(SessionKey(key)))
        return None if route is None else route.session_id

    async def pending_title(self, key: str) -> str | None:
        """The title that waits for the key's session to have a row."""
        route = await self._writer.read(lambda reader: reader.route(SessionKey(key)))
        return None if route is None else route.pending_title

    async def transcript(
        self,
        session_id: str,
        *,
        include_inactive: bool = False,
        after: tuple[int, int] | None = None,
        limit: int | None = None,
    ) -> tuple[Message, ...]:
        """The messages in reading order: all of them, or a page behind `after`."""
        wanted = SessionId(session_id)
        messages: list[Message] = []
        position = after
        while True:
            size = 500 if limit is None else min(500, limit - len(messages))
            start = position
            found = await self._writer.read(
                lambda reader, start=start, size=size: reader.transcript(  # type: ignore[misc]
                    wanted, include_inactive=include_inactive, after=start, limit=size
                )
            )
            messages.extend(found.messages)
            position = found.next
            if position is None or (limit is not None and len(messages) >= limit):
                return tuple(messages)

    async def turn(self, turn_id: str) -> Turn:
        """What is stored of a turn. Raises `MissingError`."""
        turn = await self._writer.read(lambda reader: reader.turn(TurnId(turn_id)))
        if turn is None:
            raise MissingError(f"turn {turn_id}")
        return turn

    async def usage(self, session_id: str | None = None) -> tuple[UsageTotal, ...]:
        """Tokens and cost by model and source; of one session, or of all."""
        wanted = None if session_id is None else SessionId(session_id)
        return await self._writer.read(lambda reader: reader.usage(wanted))
