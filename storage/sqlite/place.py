"""The place a database lives in: its file, its lock, its file system.

Keeps: the file is created with mode 0600 and its directory entry is synced; one lock file, held for
life by `flock`, lets one process write; a network file system is refused. The database file itself
is never opened here once it exists: closing such a descriptor would drop the locks that SQLite
holds on it.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..errors import DatabaseHeldError, NetworkFileSystemError, OpenError, UnsupportedError

if TYPE_CHECKING:
    from ..identity import Clock

# Names as the kernel's mount table has them. Locks or syncs on these can't be trusted.
NETWORK_FILE_SYSTEMS = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "fuse.glusterfs",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
        "gfs",
        "gfs2",
        "glusterfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "smb3",
        "smbfs",
    ]
)

_OCTAL = re.compile(r"\\([0-7]{3})")  # how the mount table writes blanks and backslashes


class Holder(msgspec.Struct, frozen=True):
    """Who holds a lock, as the lock file says."""

    pid: int
    since_ms: int


class Place:
    """A database path whose lock is held by this process until `release`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._folder = str(path.parent)  # asked for with every batch
        self._lock: int | None = lock

    def free_bytes(self) -> int:
        """Space that an ordinary process may still use."""
        numbers = os.statvfs(self._folder)
        return numbers.f_bavail * numbers.f_frsize

    def release(self) -> None:
        """Give the lock back.

        The lock file stays: removing it would let two processes lock two files.
        """
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def take_place(path: str | os.PathLike[str], clock: Clock) -> Place:
    """Lock the database for writing, and make an empty file if there is none."""
    if sys.platform == "win32":
        raise UnsupportedError(
            "onepen does not run on Windows", hint="run it under Linux, for example in WSL 2"
        )
    # Two names of one file must give one lock, so links are followed first.
    real = Path(os.path.realpath(path))
    if not real.parent.is_dir():
        raise OpenError(str(real), "its folder does not exist", hint="make the folder first")
    if real.exists() and not real.is_file():
        raise OpenError(str(real), "it is not a regular file", hint="give the path of a file")
    _refuse_network(real)
    lock = _take_lock(real, clock)
    try:
        _create(real)
    except BaseException:
        os.close(lock)
        raise
    return Place(real, lock)


def lock_database(path: Path, clock: Clock) -> int:
    """The lock of a database, without making one; `os.close` gives it back.

    Raises `DatabaseHeldError` while a process owns it.
    """
    return _take_lock(path, clock)


def _take_lock(path: Path, clock: Clock) -> int:
    lock_path = f"{path}.lock"
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OpenError(
            str(path),
            f"its lock file can't be opened: {error}",
            hint="check the folder's permissions",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _read_holder(lock)
        os.close(lock)
        raise DatabaseHeldError(
            str(path), holder.pid if holder else None, holder.since_ms if holder else None
        ) from error
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, msgspec.json.encode(Holder(os.getpid(), clock.now())), 0)
    except OSError as error:
        os.close(lock)
        raise OpenError(
            str(path), f"its lock file can't be written: {error}", hint="look at the disk"
        ) from error
    return lock


def _read_holder(lock: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(lock, 4096, 0), type=Holder)
    except (
        OSError,
        msgspec.DecodeError,
    ):  # the holder is just writing it, or it is not ours to read
        return None


def _create(path: Path) -> None:
    """An empty file with mode 0600; SQLite gives its -wal and -shm the same mode."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise OpenError(
            str(path), f"it can't be created: {error}", hint="check the folder's permissions"
        ) from error
    os.close(descriptor)  # no connection exists yet, so no lock can be lost by this
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # a power cut must not take the file's name
    finally:
        os.close(folder)


def _refuse_network(path: Path) -> None:
    try:
        table = Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:  # not Linux: nothing to ask
        return
    kind = file_system_of(path.parent, table)
    if kind in NETWORK_FILE_SYSTEMS:
        raise NetworkFileSystemError(str(path), kind)


def file_system_of(folder: Path, table: str) -> str:
    """The file system's name, by the longest mount point above the folder; the last mount wins."""
    best, kind = "", ""
    for line in table.splitlines():
        mount, separator, source = line.partition(" - ")
        fields = mount.split()
        if not separator or len(fields) < 5:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        if len(point) >= len(best) and folder.is_relative_to(point):
            best, kind = point, source.split()[0]
    return kind
