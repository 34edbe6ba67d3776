"""How clean-up comes to a key that is served: through its actor, like everybody else.

Keeps: what concerns a key's current session, its running turn or what waits under it is done by its
actor, which forgets in memory what is gone from storage; nothing is deleted behind its back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ..actors import moves, operations
from ..actors.line import Interrupt
from ..actors.sources import source_of
from ..storage.errors import MissingError

if TYPE_CHECKING:
    from ..actors.directory import Directory
    from ..actors.erasing import Blanked
    from ..actors.timetable import Timetable
    from ..actors.writer import WriterRef
    from ..storage.identity import SessionId, SessionKey, TurnId
    from ..storage.records import Turn


class DirectoryVisitor:
    """Keys that are served by actors, which are started where there are none."""

    def __init__(self, directory: Directory, timetable: Timetable, writer: WriterRef) -> None:
        self._directory = directory
        self._timetable = timetable
        self._writer = writer

    async def discard(self, key: SessionKey, session_id: SessionId) -> None:
        await self._directory.ask(key, source_of(key), moves.discard(session_id))

    async def stop(self, turn: Turn) -> None:
        await self._end(turn.key, turn.id, "deleted")

    async def blank(
        self, key: SessionKey, session_ids: tuple[SessionId, ...], user: str
    ) -> Blanked:
        return await self._directory.ask(key, source_of(key), operations.blank(session_ids, user))

    async def withdraw(self, key: SessionKey, turn_id: TurnId) -> bool:
        return await self._end(key, turn_id, "erased")

    async def _end(self, key: SessionKey, turn_id: TurnId, cause: str) -> bool:
        """Interrupt a turn, or take back its messages, and wait until that is stored."""
        source = source_of(key)
        done = False
        following = await self._directory.subscribe(key, source, turn_id, None)
        try:
            # Followed first, then looked at: its end is seen in one of the two places.
            done = await self._directory.ask(key, source, Interrupt(turn_id, cause))
            turn = await self._writer.read(lambda reader: reader.turn(turn_id))
            while done and turn is not None and turn.state != "ended" and not following.ended:
                await following.receive()
        except trio.EndOfChannel:
            pass
        finally:
            with trio.CancelScope(shield=True):
                await following.aclose()
        return done

    async def remove_timer(self, timer_id: str) -> None:
        try:
            await self._timetable.cancel(timer_id)
        except MissingError:
            pass  # somebody else has removed it
