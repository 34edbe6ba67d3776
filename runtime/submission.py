"""What `submit` returns: what was done with a message, and how to follow its turn."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, final

import trio

from ..actors.sources import source_of
from ..storage.edge import check_place

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from ..actors.directory import Directory
    from ..actors.events import Position, Subscription
    from ..actors.line import Accepted
    from ..actors.mailbox import Answer
    from ..actors.replies import Reply
    from ..actors.timetable import Timetable
    from ..storage.identity import SessionKey, TurnId
    from ..storage.records import Disposition


@final
class Interruption:
    """Whether there was something to stop. What runs is stopped already; awaiting it tells as well
    of a turn that waits for a person since before its key was served.
    """

    __slots__ = ("_done", "_later")

    def __init__(self, *, done: bool, later: Answer[bool] | None = None) -> None:
        self._done = done
        self._later = later

    def __bool__(self) -> bool:
        return self._done

    def __eq__(self, other: object) -> bool:
        return bool(other) is self._done

    def __hash__(self) -> int:
        return hash(self._done)

    def __await__(self) -> Generator[Any, Any, bool]:
        return self._awaited().__await__()

    async def _awaited(self) -> bool:
        await trio.lowlevel.checkpoint()
        if self._later is not None:
            self._done = await self._later.wait()
        return self._done


@final
class Submission:
    """A message that is durable, and its turn."""

    def __init__(
        self,
        directory: Directory,
        key: SessionKey,
        accepted: Accepted,
        *,
        timer_id: str | None = None,
        timetable: Timetable | None = None,
    ) -> None:
        self._timetable = timetable
        self.timer_id = timer_id
        """What `runtime.timers` calls it, if it waits for its time."""
        self._directory = directory
        self._source = source_of(key)
        self._accepted = accepted
        self.key = key

    @property
    def turn_id(self) -> TurnId:
        return self._accepted.turn_id

    @property
    def disposition(self) -> Disposition | Literal["rejected", "scheduled"]:
        """What was done with the message: `started`; `queued` behind others, perhaps in their
        place (`superseded`); `merged` into a turn that waits, or to be `steered` into the one that
        runs; `scheduled` for later; or `rejected`, and then nothing of it is stored.
        """
        return self._accepted.disposition

    @property
    def repeated(self) -> bool:
        """Whether the message was here before, and this follows its turn."""
        return self._accepted.repeated

    @property
    def position(self) -> int:
        """How many messages of the key waited when this one was queued, itself included."""
        return self._accepted.position

    async def reply(self) -> Reply:
        """The end of the turn, once it is durable. Cancelling this leaves the turn running.

        Raises `StorageUnavailableError` while storage is down: the turn goes on, and waiting again
        is allowed.
        """
        return await self._accepted.reply.wait()

    @asynccontextmanager
    async def events(self, after: Position | None = None) -> AsyncGenerator[Subscription]:
        """The turn's events, as a channel that ends behind `turn.ended`."""
        check_place("after", after)
        subscription = await self._directory.subscribe(
            self.key, self._source, self.turn_id, after, over=self._accepted.reply.given
        )
        try:
            yield subscription
        finally:
            await subscription.aclose()

    def interrupt(self) -> Interruption:
        """Stop the turn, or take the message back if it still waits; true if that did anything.

        It works at once; only where the key is not served just now, and for a message that waits
        for its time, awaiting the result tells. What became of the turn is stored when `reply`
        returns.
        """
        if self._accepted.reply.given:
            return Interruption(done=False)
        directory = self._directory
        if directory.interrupt(self.key, "person", self.turn_id):
            return Interruption(done=True)
        if self._timetable is not None and self.timer_id is not None:
            return Interruption(done=False, later=self._timetable.cancel_soon(self.timer_id))
        later = directory.interrupt_stored(self.key, self._source, "person", self.turn_id)
        return Interruption(done=False, later=later)
