"""`runtime.timers`: messages that wait for their time. `submit(at=…)` sets them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, final

from ..storage.edge import check_count, check_name, shown
from ..storage.errors import InvalidContentError
from ..storage.identity import SessionKey

if TYPE_CHECKING:
    from ..actors.timetable import Timetable
    from ..actors.writer import WriterRef
    from ..storage.records import Timer

_FIRST_MS = 10**11  # as milliseconds this was in 1973, as seconds it is the year 5138
_LAST_MS = 253_402_300_799_000  # the last second of the year 9999


def due_ms(at: object) -> int:
    """When that is, in milliseconds since 1970.

    An aware `datetime`, or a number: seconds as `time.time()` gives them, or milliseconds as a
    `Clock` does. The two are told apart by their size.
    """
    if isinstance(at, datetime):
        if at.tzinfo is None:
            problem = "the time has no time zone"
            raise InvalidContentError("at", problem, hint="use datetime.now(UTC) and the like")
        return int(at.timestamp() * 1000)
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at <= _LAST_MS:
        problem = f"{shown(at)} is no time"
        raise InvalidContentError("at", problem, hint="give an aware datetime, or a timestamp")
    return int(at) if at >= _FIRST_MS else int(at * 1000)


@final
class Timers:
    """The timers of a runtime."""

    def __init__(self, timetable: Timetable, writer: WriterRef) -> None:
        self._timetable = timetable
        self._writer = writer

    async def list(self, key: str | None = None, *, limit: int = 100) -> tuple[Timer, ...]:
        """Those that are set, the next one first."""
        if key is not None:
            check_name("key", key)
        check_count("limit", limit)
        wanted = None if key is None else SessionKey(key)
        return await self._writer.read(lambda reader: reader.timers(key=wanted, limit=limit))

    async def get(self, timer_id: str) -> Timer | None:
        """What is stored of it."""
        check_name("timer_id", timer_id)
        return await self._writer.read(lambda reader: reader.timer(timer_id))

    async def cancel(self, timer_id: str) -> bool:
        """It will not fire; false if it has fired, or was cancelled. Raises `MissingError`."""
        check_name("timer_id", timer_id)
        return await self._timetable.cancel(timer_id)
