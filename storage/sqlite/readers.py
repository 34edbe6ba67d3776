"""Read connections: a few, shared by all threads, and out of the way when the engine must reopen.

Keeps: at most `readers_max` connections; a reader sees one snapshot for as long as it is held; no
connection is open between `suspend` and `resume`. A connection that raised is closed, not handed
on.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import apsw

from ..errors import EngineClosedError, StorageUnavailableError
from .views import SqliteReader

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


SUSPEND_TIMEOUT_S = 5.0  # a read takes a second at most; what takes longer is interrupted


class Readers:
    """A bounded pool of read connections."""

    def __init__(self, open_connection: Callable[[], apsw.Connection], readers_max: int) -> None:
        self._open_connection = open_connection
        self._readers_max = readers_max
        self._condition = threading.Condition()
        self._idle: list[apsw.Connection] = []
        self._busy: set[apsw.Connection] = set()
        self._beside = 0  # of these, those that read for long and take nobody's place
        self._suspended = True
        self._closed = False

    @contextmanager
    def reading(self) -> Generator[SqliteReader]:
        """One snapshot, held until the block ends."""
        db = self._take()
        usable = False
        try:
            db.execute("BEGIN")
            yield SqliteReader(db)
            usable = _ended(db)
        except apsw.Error as error:
            raise StorageUnavailableError(f"reading failed: {error}") from error
        finally:
            self._give_back(db, usable=usable)

    def _take(self) -> apsw.Connection:
        with self._condition:
            while True:
                self._check_open()
                if self._idle or len(self._busy) - self._beside < self._readers_max:
                    break
                self._condition.wait()
            db = self._idle.pop() if self._idle else self._open_connection()
            self._busy.add(db)
            return db

    def _give_back(self, db: apsw.Connection, *, usable: bool) -> None:
        with self._condition:
            self._busy.discard(db)
            if usable and not self._suspended and not self._closed:
                self._idle.append(db)
            else:
                db.close(force=True)
            self._condition.notify_all()

    @contextmanager
    def beside(self) -> Generator[tuple[apsw.Connection, Callable[[], None]]]:
        """A connection of its own for something long, and a check to be made between its steps.

        The check raises when the connections are wanted closed: nobody waits for a long reader.
        """
        with self._condition:
            self._check_open()
            db = self._open_connection()
            self._busy.add(db)
            self._beside += 1
        try:
            yield db, self._check_open
        finally:
            with self._condition:
                self._beside -= 1
                self._give_back(db, usable=False)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the database is closed")
        if self._suspended:
            raise StorageUnavailableError("the database is being reopened")

    def suspend(self) -> None:
        """Close every connection; reads under way are waited for, then interrupted."""
        with self._condition:
            self._suspended = True
            for db in self._idle:
                db.close(force=True)
            self._idle.clear()
            if not self._condition.wait_for(lambda: not self._busy, SUSPEND_TIMEOUT_S):
                for db in self._busy:
                    db.interrupt()
                self._condition.wait_for(lambda: not self._busy, SUSPEND_TIMEOUT_S)
            self._condition.notify_all()

    def resume(self) -> None:
        with self._condition:
            self._suspended = False
            self._condition.notify_all()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self.suspend()


def _ended(db: apsw.Connection) -> bool:
    """End the snapshot; false if the connection is better not used again.

    What was read was read: a damaged search index may show only here, and concerns nobody any more.
    """
    try:
        db.execute("COMMIT")
    except apsw.Error:
        return False
    return True
