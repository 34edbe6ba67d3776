"""The write-ahead log: copied into the file beside the writer, emptied when it is quiet.

What is committed stands in the log until it is copied. Copying goes on beside readers and the
writer, on a connection of its own, and a log that is copied to its end begins anew with the next
commit; but its file keeps the size that it once had, and what it once held. Only emptying it gives
both back. That is the writer's to do, for it needs a moment without readers of the log.

Keeps:
- The writer copies only what came in while the bulk was being copied, and waits for no reader:
  where one holds an old snapshot, the log stays as it is and is tried again.
- Nothing here can fail a write. A copy that fails leaves the log, which keeps everything.
- A log that grows beyond its bound is told of once, each time that it does.

Must never copy on a connection that is in the middle of a batch.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import apsw

from ..errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..engine import EngineSettings

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 3.0
_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24
_HURRY = 4  # so many times the size at which an idle writer copies, a busy one does as well


class Log:
    """How long the log is, and what makes it shorter."""

    def __init__(
        self, name: str, settings: EngineSettings, connect: Callable[[], apsw.Connection]
    ) -> None:
        self._name = name
        self._settings = settings
        self._connect = connect
        self._lock = threading.Lock()  # the copying thread against closing
        self._copier: apsw.Connection | None = None
        self._attached = False
        self._frame_bytes = 0
        self._file_pages = 0  # the size of its file, which only emptying makes smaller
        self._held_at = 0  # a copy came to no end here: a reader needs what is behind it
        self.pages = 0
        """In the log, and not known to be copied."""
        self.alarm = False

    def attach(self, db: apsw.Connection) -> None:
        """The writer's connection, whose commits tell how long the log is."""
        self._frame_bytes = int(db.pragma("page_size")) + _FRAME_HEADER_BYTES
        db.set_wal_hook(self._on_commit)
        self._attached = True

    def _on_commit(self, db: apsw.Connection, name: str, pages: int) -> int:
        if pages < self.pages:
            self._held_at = 0  # it has begun anew
        self.pages = pages
        self._file_pages = max(self._file_pages, pages)
        self._judge()
        return apsw.SQLITE_OK

    def _judge(self) -> None:
        limit = self._settings.wal_bytes_alarm
        alarm = self._size_of(self.pages) > limit
        if alarm and not self.alarm:
            logger.warning(
                "the log of %s is longer than %d MB: something reads from it for a long time (a "
                "backup, a SQL shell, a check), or the disk is too slow to copy it; it shrinks by "
                "itself when that is over",
                self._name,
                limit // 2**20,
            )
        self.alarm = alarm

    def _size_of(self, pages: int) -> int:
        return _HEADER_BYTES + pages * self._frame_bytes if pages else 0

    @property
    def size_bytes(self) -> int:
        """Of its file."""
        return self._size_of(self._file_pages)

    # Copying -----------------------------------------------------------------------------------

    def due(self, *, idle: bool) -> bool:
        limit = self._settings.wal_pages_checkpoint * (1 if idle else _HURRY)
        return self.pages - self._held_at >= limit

    def copy(self) -> None:
        """The bulk of it, in a thread of its own. Readers and the writer go on meanwhile."""
        with self._lock:
            if not self._attached:
                return
            try:
                if self._copier is None:
                    self._copier = self._connect()
                self._copier.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            except (apsw.Error, StorageError) as error:
                # The log stays and keeps everything; a sick disk shows itself at the next commit.
                logger.warning("copying the log failed and is tried again: %s", error)

    def copy_rest(self, db: apsw.Connection) -> None:
        """The few pages that came meanwhile: a log that is copied to its end starts over."""
        try:
            pages, copied = db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except apsw.Error as error:
            logger.warning("copying the log failed and is tried again: %s", error)
            self._held_at = self.pages  # once it has grown as much again
            return
        if copied >= pages:
            self.pages = self._held_at = 0  # the next commit tells how long the log is
            self._judge()
        else:
            self._held_at = self.pages

    # Emptying ----------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        return self._file_pages == 0

    def make_empty(self, db: apsw.Connection) -> None:
        """Copy what is left, and give its space back with all that it held.

        At once or not at all: a reader who is in the way is not waited for.
        """
        if not self._lock.acquire(blocking=False):
            return  # it is being copied
        try:
            db.set_busy_timeout(0)
            try:
                db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            finally:
                db.set_busy_timeout(int(self._settings.busy_timeout_s * 1000))
        except apsw.BusyError:
            logger.debug("the log is being read and is emptied later")
        except apsw.Error as error:
            logger.warning("emptying the log failed and is tried again: %s", error)
        else:
            self.emptied()
        finally:
            self._lock.release()

    def emptied(self) -> None:
        """Somebody has emptied it: its file takes no space."""
        self.pages = self._file_pages = self._held_at = 0
        self._judge()

    def detach(self) -> apsw.Connection | None:
        """What is to be closed before the writer's connection.

        A copy that is under way is waited for, but not for ever: a disk that hangs keeps its own
        connection, which holds nothing that anybody needs.
        """
        self._attached = False
        if not self._lock.acquire(timeout=CLOSE_WAIT_S):
            return None
        try:
            copier, self._copier = self._copier, None
            return copier
        finally:
            self._lock.release()
