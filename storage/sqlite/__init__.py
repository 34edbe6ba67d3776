"""The SQLite engine, through apsw."""

from .engine import SqliteEngine, open_sqlite

__all__ = ["SqliteEngine", "open_sqlite"]
