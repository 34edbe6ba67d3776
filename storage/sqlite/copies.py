"""Files that become a database only when they are finished.

A copy is written under a name of its own beside its target, `<target>.partial`, and gets the
target's name in one step, when it is whole, looked through and synced. So whoever is killed leaves
either nothing under that name or all of it; what is left under the other name is taken away by the
next one who comes.

Keeps: mode 0600; one process at a time writes to a target (`flock` on the unfinished file, which
the kernel gives back however the process ends); nothing that exists is overwritten unless that was
asked for; a log of another file never lies beside the new one, where SQLite would take it for its
own.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING, Self, final

from ..errors import CopyError

if TYPE_CHECKING:
    from pathlib import Path

SIDE_FILES = ("-journal", "-wal", "-shm")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@final
class Unfinished:
    """A file beside its target, ours until it is published or given up."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(f"{target.name}.partial")
        if not target.parent.is_dir():
            raise CopyError(str(target), "its folder does not exist", hint="make the folder first")
        try:
            self._descriptor = self._take()
        except OSError as error:
            raise CopyError(
                str(target), f"nothing can be written there: {error}", hint="check the folder"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()

    def _take(self) -> int:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            stale = os.open(self.path, flags)
        except FileNotFoundError:
            stale = None
        try:
            if stale is not None:
                self._lock(stale)
                # Not emptied but taken away: it may be another name of a file that is finished.
                self._remove()
            descriptor = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        finally:
            if stale is not None:
                os.close(stale)
        self._lock(descriptor)
        return descriptor

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CopyError(
                str(self.target), "somebody else is writing it", hint="wait until that is done"
            ) from error

    def _remove(self) -> None:
        for suffix in (*SIDE_FILES, ""):
            self.path.with_name(f"{self.path.name}{suffix}").unlink(missing_ok=True)

    def sync(self) -> None:
        """What was written is on the disk. No connection may be open on it."""
        os.fsync(self._descriptor)

    def publish(self, *, replace: bool) -> None:
        """Give it its name, for good. No connection may be open on it, nor on what it replaces."""
        self.sync()
        if replace:
            self.path.replace(self.target)
        else:
            self._link()
        sync_folder(self.target)
        self._close()

    def _link(self) -> None:
        """As a rename, but never over something that is there."""
        try:
            os.link(self.path, self.target)
        except FileExistsError as error:
            raise exists_error(self.target) from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if self.target.exists():
                raise exists_error(self.target) from error
            self.path.rename(self.target)
            return
        self.path.unlink()

    def give_up(self) -> None:
        """Leave nothing of it, unless it was published."""
        if self._descriptor >= 0:
            self._remove()
            self._close()

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


def exists_error(target: Path) -> CopyError:
    return CopyError(
        str(target), "there is a file already", hint="choose another name, or ask to replace it"
    )


def side_files_of(path: Path) -> list[Path]:
    """The logs that lie beside a database, or beside the place of one."""
    files = (path.with_name(f"{path.name}{suffix}") for suffix in SIDE_FILES)
    return [file for file in files if file.exists()]


def sync_folder(path: Path) -> None:
    """A power cut must not take a file's name, nor bring back the one before."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def check_room(path: Path, needed_bytes: int) -> None:
    """Raise unless there is room for so much, before anything is written."""
    numbers = os.statvfs(path.parent)
    free = numbers.f_bavail * numbers.f_frsize
    if free < needed_bytes:
        problem = f"{free:,} bytes are free there, {needed_bytes:,} are needed"
        raise CopyError(str(path), problem, hint="free some space, or take another disk")
