"""How long things are kept that nobody has asked to be removed, and what was left half-way.

| what                                             | goes when older than | is looked for       |
| ------------------------------------------------ | -------------------- | ------------------- |
| what an inbound message is recognised by         | `dedupe_kept_s`      | every few minutes   |
| what was sent, fired, done, answered and decided | `history_kept_s`     | every hour          |
| blobs that nothing refers to                     | a day                | every hour          |
| what is left of a deleted session                | at once              | at the start, hourly |

Keeps: a few at a time, so that no batch is held up; what has not ended stays, however old. Nothing
is written when nothing is old.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, final

import trio

from ..storage.commands import PruneInbox
from ..storage.errors import OnepenError
from ..storage.units import Unit
from .clearing import drop_blob, finish_purges, prune_work

if TYPE_CHECKING:
    from ..storage.engine import Reader
    from ..storage.identity import BlobId, Clock
    from ..storage.records import Blob
    from .limits import SessionSettings
    from .writer import WriterRef

logger = logging.getLogger(__name__)

PRUNED_AT_ONCE = 200
BLOB_KEPT_S = 24 * 3600.0  # before its message comes, or its next piece
_LOOKED_FOR_S = 600.0
_HOUSE_CLEANED_S = 3600.0


async def keep_house_clean(
    writer: WriterRef, clock: Clock, settings: SessionSettings, *, half_way: bool = False
) -> None:
    """Look every few minutes; while there is something old, slice by slice.

    `half_way` says that there is something which a process that died has left to be done.
    """
    blobs, cleaned_s = BlobWatch(writer, clock), trio.current_time()
    while True:
        try:
            if half_way:
                await finish_purges(writer)
                half_way = False
        except OnepenError as error:
            logger.warning("deletions that were cut off could not be finished: %s", error)
        await trio.sleep(min(_LOOKED_FOR_S, settings.dedupe_kept_s / 2))
        try:
            await _keep_inbox(writer, clock, settings)
            if trio.current_time() - cleaned_s >= _HOUSE_CLEANED_S:
                cleaned_s = trio.current_time()
                await finish_purges(writer)
                await prune_work(writer, clock.now() - int(settings.history_kept_s * 1000))
                await blobs.collect()
        except OnepenError as error:
            logger.warning("what is old could not be pruned: %s", error)


async def _keep_inbox(writer: WriterRef, clock: Clock, settings: SessionSettings) -> None:
    last_ms: int | None = None
    # Until nothing is old, or (a clock that went back) what is old can't be reached.
    while (oldest_ms := await prune_inbox(writer, clock, settings)) not in (None, last_ms):
        last_ms = oldest_ms


async def prune_inbox(writer: WriterRef, clock: Clock, settings: SessionSettings) -> int | None:
    """One slice; how old the oldest of it was, or `None` if nothing is old enough."""
    before_ms = clock.now() - int(settings.dedupe_kept_s * 1000)

    def look(reader: Reader) -> tuple[int | None, int]:
        return reader.oldest_ended_inbound_ms(), reader.inbox_pruned_version()

    oldest_ms, version = await writer.read(look)
    if oldest_ms is None or oldest_ms >= before_ms:
        return None
    command = PruneInbox(
        before_ms=before_ms, limit=PRUNED_AT_ONCE, replaces=version, at_ms=clock.now()
    )
    await writer.write(Unit((command,)))
    return oldest_ms


@final
class BlobWatch:
    """Blobs that nothing refers to: a day is enough for a message to come, or for the next piece.

    A blob that is not sealed has no time of its own, so it is watched, and goes when it has stayed
    as it is for a day; that begins anew with every start.
    """

    def __init__(self, writer: WriterRef, clock: Clock) -> None:
        self._writer = writer
        self._clock = clock
        self._unsealed: dict[BlobId, tuple[int, int]] = {}  # pieces, and since when

    async def collect(self) -> int:
        """Drop what is old enough; how many."""
        now, count, place = self._clock.now(), 0, ""
        watched: dict[BlobId, tuple[int, int]] = {}
        while True:
            page, following = await self._writer.read(partial(_unused, place))
            for blob, pieces in page:
                since_ms = blob.sealed_ms
                if since_ms is None:
                    before = self._unsealed.get(blob.id)
                    since_ms = before[1] if before and before[0] == pieces else now
                    watched[blob.id] = (pieces, since_ms)
                if since_ms <= now - BLOB_KEPT_S * 1000:
                    count += await drop_blob(self._writer, blob, pieces)
            if following is None:
                break
            place = following
        self._unsealed = watched
        return count


def _unused(place: str, reader: Reader) -> tuple[tuple[tuple[Blob, int], ...], str | None]:
    return reader.unused_blobs(after=place)
