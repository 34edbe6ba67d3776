"""The VFS under a simulated disk: carries out, records and fails what SQLite asks for.

Invariants:
- Each operation on a database, a journal or a write-ahead log is counted before it is carried out,
  and its entry is logged after, under the lock of the recorder.
- Temporary files are passed through unseen: they do not outlive a crash. Shared memory (-shm)
  never comes here, and apsw's files offer SQLite no memory map, so nothing is written past us.
- A fault leaves as an exception whose class and code apsw gives to SQLite unchanged.

Must never open a file by any other way than the base VFS: closing another descriptor of it would
drop SQLite's locks. So a dropped sync is undone through the very file that failed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import apsw

from .faults import Failure, Kind, error_for
from .log import Dropped, Synced, Truncated, Written

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Buffer

    from .recorder import Recorder

_OPEN_RECORDED = (
    apsw.SQLITE_OPEN_MAIN_DB
    | apsw.SQLITE_OPEN_MAIN_JOURNAL
    | apsw.SQLITE_OPEN_SUPER_JOURNAL
    | apsw.SQLITE_OPEN_WAL
)


class DiskVFS(apsw.VFS):
    """Registered under `name` as long as it lives, on top of the default VFS."""

    def __init__(
        self,
        name: str,
        directory: Path,
        recorder: Recorder,
        *,
        count_reads: bool,
        sync_delay_s: float,
        sync_real: bool,
    ) -> None:
        self.recorder = recorder
        self.count_reads = count_reads
        self.sync_delay_s = sync_delay_s
        self.sync_real = sync_real
        self._prefix = f"{directory}/"
        super().__init__(name, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        if name is None or not flags[0] & _OPEN_RECORDED:
            return apsw.VFSFile("", name, flags)
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        file = self._relative(path)
        operation, failure = self.recorder.begin(Kind.OPEN, file)
        if failure is not None:
            raise error_for(failure, operation)
        with self.recorder.lock:
            opened = DiskFile(self, file, name, flags)
            self.recorder.appear(file)
        return opened

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: FBT001 (SQLite's signature)
        file = self._relative(filename)
        operation, failure = self.recorder.begin(Kind.DELETE, file)
        if failure is not None:
            raise error_for(failure, operation)
        with self.recorder.lock:
            super().xDelete(filename, syncdir)
            self.recorder.vanish(file)

    def _relative(self, path: str) -> str:
        """The name of a file in the log."""
        if not path.startswith(self._prefix):
            # Passing it through would make a test that sees no I/O, and proves nothing.
            raise apsw.CantOpenError(f"{path} is outside the simulated disk {self._prefix}")
        return path.removeprefix(self._prefix)


class DiskFile(apsw.VFSFile):
    """One open file; several may be open under the same name."""

    def __init__(
        self, vfs: DiskVFS, file: str, name: str | apsw.URIFilename, flags: list[int]
    ) -> None:
        self._vfs = vfs
        self._recorder = vfs.recorder
        self._file = file
        super().__init__("", name, flags)

    def xRead(self, amount: int, offset: int) -> bytes:
        if self._vfs.count_reads:
            operation, failure = self._recorder.begin(Kind.READ, self._file)
            if failure is not None:
                raise error_for(failure, operation)
        return super().xRead(amount, offset)

    def xWrite(self, data: Buffer, offset: int) -> None:
        operation, failure = self._recorder.begin(Kind.WRITE, self._file)
        # A copy: the buffer is SQLite's, and valid only during this call.
        content = bytes(data)
        if failure is Failure.SHORT:
            content = content[: len(content) // 2]
        if failure in (None, Failure.SHORT):
            with self._recorder.lock:
                self._write_through(content, offset)
                self._recorder.append(Written(self._file, offset, content))
        if failure is not None:
            raise error_for(failure, operation)

    def xTruncate(self, newsize: int) -> None:
        operation, failure = self._recorder.begin(Kind.TRUNCATE, self._file)
        if failure is not None:
            raise error_for(failure, operation)
        with self._recorder.lock:
            super().xTruncate(newsize)
            self._recorder.append(Truncated(self._file, newsize))

    def xSync(self, flags: int) -> None:
        operation, failure = self._recorder.begin(Kind.SYNC, self._file)
        if self._vfs.sync_delay_s:
            time.sleep(self._vfs.sync_delay_s)
        # The lock spans the sync and its entry: a write of another thread in between would count
        # as synced, though nothing promises that it is.
        with self._recorder.lock:
            if failure is None:
                if self._vfs.sync_real:
                    super().xSync(flags)
                self._recorder.append(Synced(self._file))
                return
            if failure is Failure.DROP:
                content = self._recorder.durable_content(self._file)
                super().xTruncate(len(content))
                self._write_through(content, 0)
                self._recorder.append(Dropped(self._file))
        raise error_for(failure, operation)

    def _write_through(self, content: bytes, offset: int) -> None:
        # apsw's stubs name a Buffer type that Python 3.11 does not have.
        super().xWrite(content, offset)  # pyright: ignore[reportUnknownMemberType]
