"""The SQLite engine, through apsw."""

from .engine import SqliteEngine, open_sqlite
from .onlooker import Onlooker, open_onlooker
from .repair import check_all, keep_copy, mend_structure
from .restore import restore

__all__ = [
    "Onlooker",
    "SqliteEngine",
    "check_all",
    "keep_copy",
    "mend_structure",
    "open_onlooker",
    "open_sqlite",
    "restore",
]
