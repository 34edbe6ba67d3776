"""A disk that remembers and fails on request, for tests of power loss and I/O errors.

`Disk` owns one VFS, registered with apsw under a name of its own. SQLite works on real files in a
real directory; every change to them enters one ordered log, together with the test's own marks.
Run a workload clean and count its operations; then fail each one of them (`Fault`), kill the
process at each one (`on_operation`), or take the power away after each (`images`).

Invariants:
- Counted are opens, writes, syncs, truncates and deletes of databases, journals and write-ahead
  logs, and reads if asked for.
- The files there at the start are the durable content of the disk, so that it may continue on the
  directory of an image: a crash during recovery.

Must never read the directory once a connection may exist: closing a descriptor that is not
SQLite's drops SQLite's locks. So a `Disk` is made *before* the first connection of the process.

Two ways in which apsw differs from a real disk. SQLite ignores some errors, such as that of an
automatic checkpoint behind a successful COMMIT; apsw raises the exception nevertheless, so that
COMMIT reports an error although it is done. And a connection left to the garbage collector while
faults are on reports through sys.unraisablehook: close connections; the close itself may raise.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

from .log import Log, Marked
from .recorder import Recorder
from .vfs import DiskVFS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from .faults import Fault, Operation

_numbers = itertools.count()


class Disk:
    """The simulated disk of one directory; open with `apsw.Connection(path, vfs=disk.name)`.

    `on_operation` is called, with no lock held, before each operation is carried out; it may kill
    the process. A sync takes `sync_delay_s`, and reaches the real disk only with `sync_real`: the
    power loss is simulated, and real syncs are slow. With `record=False` nothing is kept but the
    count, for benchmarks. `skip` names files of the directory that are no part of the disk. A file
    outside of the directory cannot be opened.

    `continues` is the recording of a process that was killed on this directory: what it had not
    synced is there for everybody to read, and still at risk.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        faults: Iterable[Fault] = (),
        count_reads: bool = False,
        on_operation: Callable[[Operation], None] | None = None,
        sync_delay_s: float = 0.0,
        sync_real: bool = False,
        record: bool = True,
        skip: Collection[str] = (),
        continues: Log | None = None,
    ) -> None:
        # SQLite resolves links before it opens a file; resolved names can be compared.
        self.directory = Path(directory).resolve(strict=True)
        self.name = f"onepen-disk-{os.getpid()}-{next(_numbers)}"
        before = continues
        if before is None:
            before = Log(_files_in(self.directory, skip) if record else {}, ())
        self._recorder = Recorder(
            before.base, before.entries, keep=record, on_operation=on_operation
        )
        self._recorder.inject(*faults)
        self._vfs = DiskVFS(
            self.name,
            self.directory,
            self._recorder,
            count_reads=count_reads,
            sync_delay_s=sync_delay_s,
            sync_real=sync_real,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Heal, and unregister the VFS; connections that are still open go on working."""
        self.heal()
        self._vfs.unregister()

    @property
    def operations(self) -> int:
        """How many operations there were so far; the next one gets this number."""
        return self._recorder.operations

    @property
    def history(self) -> tuple[Operation, ...]:
        """Every operation so far, for a test that picks its points by kind or by file."""
        return self._recorder.history()

    @property
    def fired(self) -> tuple[Operation, ...]:
        """The operations that a fault has hit so far."""
        return self._recorder.fired()

    @property
    def log(self) -> Log:
        """The recording up to now."""
        return self._recorder.log()

    def mark(self, label: str, payload: object = None) -> None:
        """Put a mark of the test's own into the log, at this very point."""
        self._recorder.mark(Marked(label, payload))

    def inject(self, *faults: Fault) -> None:
        """Add to the plan; `Fault(disk.operations)` hits the very next operation."""
        self._recorder.inject(*faults)

    def heal(self) -> None:
        """Forget all faults, fired or not; what they did to the files stays."""
        self._recorder.heal()


def _files_in(directory: Path, skip: Collection[str]) -> dict[str, bytes]:
    """The regular files below a directory, but for -shm: it is rebuilt, and never durable."""
    names = {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.endswith("-shm")
    }
    return {name: path.read_bytes() for name, path in names.items() if name not in skip}
