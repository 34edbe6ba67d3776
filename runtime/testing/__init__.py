"""Tools for testing programs built on onepen; nothing in the runtime itself imports them.

`Disk` records and fails the I/O of SQLite, `images` gives what a power loss may leave of it,
`check_database` looks at any database file, `EngineConformance` is the suite that every engine
passes, and `Model` says what the commands mean.
"""

from .conformance import EngineConformance
from .disk import (
    Created,
    Deleted,
    Disk,
    Dropped,
    Entry,
    Failure,
    Fault,
    Image,
    Kind,
    Log,
    Loss,
    Marked,
    Operation,
    Synced,
    Truncated,
    Written,
    images,
)
from .invariants import Violation, check_database
from .model import Model

__all__ = [
    "Created",
    "Deleted",
    "Disk",
    "Dropped",
    "EngineConformance",
    "Entry",
    "Failure",
    "Fault",
    "Image",
    "Kind",
    "Log",
    "Loss",
    "Marked",
    "Model",
    "Operation",
    "Synced",
    "Truncated",
    "Violation",
    "Written",
    "check_database",
    "images",
]
