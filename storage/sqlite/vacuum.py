"""Unused pages: given back to the file system, a few at a time.

What is deleted leaves pages that the file keeps for later. Some are welcome; where there are more
than the setting says, the last pages of the file are moved into the holes, and the file gets
shorter with the next copy of the log. Once begun it goes on until half of them are left, so that a
file at its bound is not moved about for every deletion.

Keeps: each slice is a transaction of its own, synced like a batch, and takes a few milliseconds; a
failure before its commit leaves everything as it was. Belongs to the engine's thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import apsw

if TYPE_CHECKING:
    from ..engine import EngineSettings

logger = logging.getLogger(__name__)

_INCREMENTAL = 2
_PAGES = 64  # in one slice: about a millisecond, and two at worst


class Vacuum:
    """How many pages are unused, and one slice at a time of making them fewer."""

    def __init__(self, db: apsw.Connection, epoch: int, settings: EngineSettings) -> None:
        self._db = db
        self._epoch = epoch
        self._max = settings.free_pages_max
        self._possible = db.pragma("auto_vacuum") == _INCREMENTAL
        self._under_way = self._resting = False
        self.free_pages: int = db.pragma("freelist_count")

    def batch_done(self) -> None:
        self._resting = False  # the disk works

    def due(self) -> bool:
        if not self._possible or self._resting:
            return False
        self.free_pages = self._db.pragma("freelist_count")
        limit = self._max // 2 if self._under_way else self._max
        self._under_way = self.free_pages > limit
        return self._under_way

    def slice(self) -> None:
        """Raises only what a commit raises whose outcome nobody knows."""
        db = self._db
        try:
            db.execute("BEGIN IMMEDIATE")
            rows: list[Any] = db.execute("SELECT epoch FROM pen").fetchall()
            if rows != [(self._epoch,)]:
                self._undo()  # the file has another owner, as the next batch will find out
                return
            # It moves a page at each step, so it must be run to its end.
            db.execute(f"PRAGMA incremental_vacuum({_PAGES})").fetchall()
        except (apsw.Error, MemoryError) as error:
            logger.warning("giving unused pages back failed and is tried again: %s", error)
            self._undo()
            return
        db.execute("COMMIT")

    def _undo(self) -> None:
        self._resting = True
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
