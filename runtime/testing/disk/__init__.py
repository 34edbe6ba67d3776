"""A disk that records and fails the I/O of SQLite, and what a power loss may leave of it."""

from .disk import Disk
from .faults import Failure, Fault, Kind, Operation
from .images import Image, Loss, images
from .log import Created, Deleted, Dropped, Entry, Log, Marked, Synced, Truncated, Written

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
