"""The SQLite engine passes the conformance suite, on disk and in memory."""

from pathlib import Path

from onepen.runtime.system import SystemClock
from onepen.storage.engine import Engine
from onepen.storage.sqlite.engine import open_sqlite
from onepen.testing import EngineConformance


class TestSqliteOnDisk(EngineConformance):
    """A database file."""

    def open_engine(self, folder: Path) -> Engine:
        return open_sqlite(folder / "chat.db", SystemClock())


class TestSqliteInMemory(EngineConformance):
    """A database that is gone when it is closed."""

    reopens = False
    reads_while_staged = False  # SQLite's shared memory database has no log to read beside

    def open_engine(self, folder: Path) -> Engine:
        return open_sqlite(None, SystemClock())
