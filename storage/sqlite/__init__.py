"""The SQLite engine, through apsw."""

from .engine import SqliteEngine, open_sqlite
from .onlooker import Onlooker, open_onlooker
from .restore import restore

__all__ = ["Onlooker", "SqliteEngine", "open_onlooker", "open_sqlite", "restore"]
