"""Tools for testing programs built on onepen; nothing in the runtime itself imports them.

`Disk` records and fails the I/O of SQLite, `images` gives what a power loss may leave of it.
"""

from .disk import Disk
from .disk_faults import Failure, Fault, Kind, Operation
from .disk_log import (
    Created,
    Deleted,
    Dropped,
    Entry,
    Log,
    Marked,
    Synced,
    Truncated,
    Written,
)
from .images import Image, Loss, images

__all__ = [
    "Created",
    "Deleted",
    "Disk",
    "Dropped",
    "Entry",
    "Failure",
    "Fault",
    "Image",
    "Kind",
    "Log",
    "Loss",
    "Marked",
    "Operation",
    "Synced",
    "Truncated",
    "Written",
    "images",
]
