"""Files that are not what they should be: why, in words that say what to do.

    zeroed, encrypted, something else    `ForeignFileError`, with how the file begins
    truncated                            `DamagedFileError`, with how much of it is missing
    the log beside it is another file's  `DamagedFileError`

SQLite takes whatever log lies beside a file for that file's own, and copies it in. A log is checked
for being whole, never for whose it is; so it is asked here, by a look at the database without its
log and one with it, before anything may be copied.

Must never change a file, nor open one by hand: that would drop the locks that SQLite holds on it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import apsw

from ..errors import DamagedFileError

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_PAGE_SIZE_AT, _PAGE_COUNT_AT = 16, 28


def _header(name: str, vfs: str | None = None) -> bytes:
    """The first bytes of a file, read by way of SQLite; nothing where that fails."""
    flags = [apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_MAIN_DB, 0]
    try:
        file = apsw.VFSFile(vfs or "", name, flags)
    except apsw.Error:
        return b""
    try:
        return file.xRead(min(_HEADER_BYTES, file.xFileSize()), 0)
    except apsw.Error:
        return b""
    finally:
        file.xClose()


def why_no_database(name: str, vfs: str | None = None) -> str:
    """What SQLite takes for no database, in more words."""
    header = _header(name, vfs)
    if not header.strip(b"\0"):
        return "its beginning is zeroed: it is not a SQLite database any more"
    if header.startswith(_MAGIC):
        return "its header is damaged: it is not a SQLite database any more"
    return "it is not a SQLite database; it may be encrypted, or something else altogether"


def why_damaged(name: str, error: apsw.Error) -> str:
    """What SQLite calls malformed, in more words."""
    header = _header(name)
    if len(header) < _HEADER_BYTES:
        return f"it is truncated: {len(header)} bytes are left of it"
    size = int.from_bytes(header[_PAGE_SIZE_AT : _PAGE_SIZE_AT + 2], "big")
    pages = int.from_bytes(header[_PAGE_COUNT_AT : _PAGE_COUNT_AT + 4], "big")
    expected, found = pages * (65_536 if size == 1 else size), os.stat(name).st_size
    if found < expected:
        return f"it is truncated: {found:,} of {expected:,} bytes are there"
    return f"it is damaged: {error}"


def has_log(name: str) -> bool:
    """Whether a log lies beside the file that has something in it."""
    try:
        return os.stat(f"{name}-wal").st_size > 0
    except FileNotFoundError:
        return False


def check_log(path: Path, *, vfs: str | None = None) -> None:
    """Raise if the log that lies beside a database belongs to another one.

    Only for whoever holds the place: a log that somebody writes can't be looked at so.
    """
    if not has_log(str(path)) or path.stat().st_size == 0:
        return
    try:
        without = _identity(path, "immutable=1", vfs)
    except apsw.Error:
        return  # the file says nothing by itself: a new one, perhaps, whose rows are in the log yet
    try:
        within = _identity(path, "mode=ro", vfs)
    except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError):
        within = None
    except apsw.Error:
        return  # a disk that can't be read says so to whoever opens it
    if within is None or within[0] != without[0] or within[1:] < without[1:]:
        problem = f"the log beside it, {path.name}-wal, belongs to another file"
        hint = "move the log away, and look at the database with `onepen doctor`"
        raise DamagedFileError(str(path), problem, hint=hint)


def _identity(path: Path, mode: str, vfs: str | None) -> tuple[int, int, int]:
    """When the database was made, and how far it has come."""
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    db = apsw.Connection(f"file:{quote(str(path))}?{mode}", flags=flags, vfs=vfs)
    try:
        rows: list[Any] = db.execute("SELECT created_ms, epoch, commit_seq FROM pen").fetchall()
    finally:
        db.close(force=True)
    if len(rows) != 1:
        raise apsw.SQLError("no pen")
    created_ms, epoch, commit_seq = rows[0]
    return created_ms, epoch, commit_seq
