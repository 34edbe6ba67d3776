"""The memory of a simulated disk: its count of operations, its plan of faults and its log.

Invariants:
- The log has the order in which the files really changed, also with several threads: whoever
  changes a file holds `lock` from before the change until its entry is in.
- A mark is behind everything that had returned when it was made. So a mark made after a commit
  returned is behind that commit's sync: "acknowledged before the crash" is exact.
- The count goes up by one for each operation, whether it then fails or not.

Never touches a real file, and never calls the test's callback with the lock held.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from .faults import Failure, Fault, Kind, Operation
from .log import Created, Deleted, DiskState, Entry, Log, Marked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Recorder:
    """What the files of one VFS tell, and ask, at each operation."""

    def __init__(
        self,
        base: Mapping[str, bytes],
        entries: Sequence[Entry] = (),
        *,
        keep: bool,
        on_operation: Callable[[Operation], None] | None,
    ) -> None:
        self.lock = threading.Lock()
        self.keep = keep
        self.on_operation = on_operation
        self.operations = 0
        self._base = base
        self._entries: list[Entry] = list(entries)
        self._present = set(self._state().files)
        self._history: list[Operation] = []
        self._faults: list[Fault] = []
        self._fired: list[Operation] = []

    def begin(self, kind: Kind, file: str) -> tuple[Operation, Failure | None]:
        """Count an operation, and say how it has to fail, if at all."""
        with self.lock:
            operation = Operation(self.operations, kind, file)
            self.operations += 1
            if self.keep:
                self._history.append(operation)
        # Outside the lock: a test may hold this thread here while other threads use the disk.
        if self.on_operation is not None:
            self.on_operation(operation)
        # Only now, so that the callback may still inject a fault into this very operation.
        with self.lock:
            fault = next((fault for fault in self._faults if fault.hits(operation)), None)
            if fault is None:
                return operation, None
            self._fired.append(operation)
            if not fault.sticky:
                self._faults.remove(fault)
            return operation, fault.failure

    def append(self, entry: Entry) -> None:
        """Under the lock: log what has just happened to a file."""
        if self.keep:
            self._entries.append(entry)

    def appear(self, file: str) -> None:
        """Under the lock: a file was opened, and so exists from here on."""
        if file not in self._present:
            self._present.add(file)
            self.append(Created(file))

    def vanish(self, file: str) -> None:
        """Under the lock: a file was deleted."""
        self._present.discard(file)
        self.append(Deleted(file))

    def durable_content(self, file: str) -> bytes:
        """Under the lock: the file as of its last good sync."""
        # From the start each time: it takes a fault to get here, and those are few.
        return self._state().files[file].durable

    def _state(self) -> DiskState:
        state = DiskState(self._base)
        for entry in self._entries:
            state.apply(entry)
        return state

    def mark(self, mark: Marked) -> None:
        with self.lock:
            self.append(mark)

    def inject(self, *faults: Fault) -> None:
        if not self.keep and any(fault.failure is Failure.DROP for fault in faults):
            raise ValueError("a dropped sync is undone from the recording: record=True is needed")
        with self.lock:
            self._faults.extend(faults)

    def heal(self) -> None:
        with self.lock:
            self._faults.clear()

    def log(self) -> Log:
        with self.lock:
            return Log(self._base, tuple(self._entries))

    def history(self) -> tuple[Operation, ...]:
        with self.lock:
            return tuple(self._history)

    def fired(self) -> tuple[Operation, ...]:
        with self.lock:
            return tuple(self._fired)
