"""How long accepted messages are remembered, so that a repeat is known.

Keeps: rows of ended turns that are older than `dedupe_kept_s` go, a few at a time, so that no batch
is held up; a row whose turn has not ended stays, however old. Nothing is written when nothing is
old.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from ..storage.commands import PruneInbox
from ..storage.errors import OnepenError
from ..storage.units import Unit

if TYPE_CHECKING:
    from ..storage.engine import Reader
    from ..storage.identity import Clock
    from .limits import SessionSettings
    from .writer import WriterRef

logger = logging.getLogger(__name__)

PRUNED_AT_ONCE = 200
_LOOKED_FOR_S = 600.0


async def keep_inbox(writer: WriterRef, clock: Clock, settings: SessionSettings) -> None:
    """Look every few minutes; while there is something old, slice by slice."""
    while True:
        await trio.sleep(min(_LOOKED_FOR_S, settings.dedupe_kept_s / 2))
        last_ms: int | None = None
        try:
            # Until nothing is old, or (a clock that went back) what is old can't be reached.
            while (oldest_ms := await prune_inbox(writer, clock, settings)) not in (None, last_ms):
                last_ms = oldest_ms
        except OnepenError as error:
            logger.warning("old inbound ids could not be pruned: %s", error)


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
