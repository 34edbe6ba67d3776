"""Which I/O operation of a simulated disk fails, and how: the plan, not its execution.

Invariants:
- Operations are numbered from 0 in the order in which SQLite asks for them, so that a clean run
  with `disk.operations == n` is followed by runs with a fault at each of `range(n)`.
- A fault fires at the first operation, from its number on, that it can happen to; a disk that is
  full fails writes, but never a delete. So a loop over all numbers never tests nothing by accident
  until the last operation of that kind is behind it (`disk.fired` tells).
- Each failure reaches SQLite with the result code that the unix VFS gives for the same errno.

Must never decide by chance or by the clock: the same plan fails the same operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import apsw


class Kind(Enum):
    """What SQLite asked the disk to do."""

    OPEN = "open"
    READ = "read"
    WRITE = "write"
    SYNC = "sync"
    TRUNCATE = "truncate"
    DELETE = "delete"


class Failure(Enum):
    """How an operation fails."""

    EIO = "I/O error"
    """Nothing happens to the file; any operation can fail like this."""
    FULL = "disk full"
    """A write that changes nothing."""
    SHORT = "short write"
    """The first half of a write happens, then the disk is full."""
    DROP = "sync that drops dirty pages"
    """A sync fails, and what it should have saved is gone from the file, as Linux may do it."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One request of SQLite, counted whether it succeeds or fails."""

    number: int
    kind: Kind
    file: str


@dataclass(frozen=True, slots=True)
class Fault:
    """Fail at operation `at`, once, or if sticky from there on until `disk.heal()`.

    `kinds` and `suffix` narrow it to some operations and some files ("-wal"); the default is all.
    """

    at: int
    failure: Failure = Failure.EIO
    sticky: bool = False
    kinds: frozenset[Kind] = frozenset(Kind)
    suffix: str = ""

    def hits(self, operation: Operation) -> bool:
        return (
            operation.number >= self.at
            and operation.kind in _KINDS_BY_FAILURE[self.failure] & self.kinds
            and operation.file.endswith(self.suffix)
        )


_KINDS_BY_FAILURE = {
    Failure.EIO: frozenset(Kind),
    Failure.FULL: frozenset({Kind.WRITE}),
    Failure.SHORT: frozenset({Kind.WRITE}),
    Failure.DROP: frozenset({Kind.SYNC}),
}

_CODE_BY_KIND = {
    Kind.OPEN: apsw.SQLITE_CANTOPEN,
    Kind.READ: apsw.SQLITE_IOERR_READ,
    Kind.WRITE: apsw.SQLITE_IOERR_WRITE,
    Kind.SYNC: apsw.SQLITE_IOERR_FSYNC,
    Kind.TRUNCATE: apsw.SQLITE_IOERR_TRUNCATE,
    Kind.DELETE: apsw.SQLITE_IOERR_DELETE,
}


def error_for(failure: Failure, operation: Operation) -> Exception:
    """The exception that apsw turns into the right result code, and later hands to the caller."""
    full = failure in (Failure.FULL, Failure.SHORT)
    error = apsw.exception_for(apsw.SQLITE_FULL if full else _CODE_BY_KIND[operation.kind])
    # exception_for leaves the text empty, and it is all that the one who reads a traceback sees.
    error.args = (
        f"simulated {failure.value} at operation {operation.number}, "
        f"{operation.kind.value} of {operation.file}",
    )
    return error
