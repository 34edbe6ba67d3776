"""Runs of a workload on a disk that fails, and the check of how each of them ends.

A run is driven as the Writer drives an engine: an error means that the batch is unknown, the engine
is reopened, and the same units are sent again. What is not as promised is returned as a violation,
as everywhere in `campaign.py`.
"""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from onepen.runtime.testing import Disk, Failure, Fault, Kind, Operation, images
from onepen.runtime.testing.invariants import Violation, compare
from onepen.runtime.testing.workloads import Batch, Step
from onepen.storage.errors import BatchUnknownError, StorageError
from onepen.storage.sqlite import connection
from onepen.storage.units import Durable

from .campaign import (
    Prepared,
    Rig,
    check_directory,
    commit_seq_of,
    do_chores,
    do_rest,
    inspect,
    open_engine,
    scratch,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path

    import apsw

    from onepen.storage.sqlite.engine import SqliteEngine


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes wrong in one run: a fault, and perhaps a second one while the engine reopens."""

    fault: Fault
    in_reopen: Fault | None = None
    """Its `at` counts from the first operation of the reopening."""
    count_reads: bool = False
    """Whether reads are operations as well."""


class FaultyRun:
    """A workload on a disk with faults, driven as the Writer would: reopen, then the same again.

    `deaths` are the points of the recording where an error had just shown: a process that dies
    there instead of reopening leaves what the images of that point show.
    """

    ATTEMPTS_MAX = 6

    def __init__(self, start: Prepared, directory: Path, plan: Plan) -> None:
        self.start = start
        self.directory = directory
        self.plan = plan
        self.violations: list[Violation] = []
        self.deaths: list[tuple[int, int, int]] = []
        self.acked = 0
        self.commit_seq = 0
        self.reopen_operations = 0
        self.engine: SqliteEngine | None = None
        with Disk(directory, faults=[plan.fault], count_reads=plan.count_reads) as disk:
            self.disk = disk
            self._drive()
            self.fired = disk.fired
            self.log = disk.log

    def _drive(self) -> None:
        try:
            self._open()
            for step in self.start.workload.steps:
                self._do(step)
        except Exception as error:  # an error of another kind than promised is the finding
            self._report("an error is of the promised kind", repr(error))
        finally:
            if self.engine is not None:
                try:
                    self.engine.close()
                except Exception as error:
                    self._report("closing does not raise", repr(error))
            self.disk.heal()

    def _report(self, rule: str, found: str) -> None:
        self.violations.append(Violation(rule, found))

    def _open(self) -> None:
        """Opening under a fault fails with an error of ours, and succeeds once the disk is well."""
        self.engine = None
        try:
            self.engine = open_engine(self.directory, self.disk.name)
        except StorageError:
            self._died()
            self.disk.heal()
            self.engine = open_engine(self.directory, self.disk.name)

    def _do(self, step: Step) -> None:
        assert self.engine is not None
        match step:
            case Batch():
                self._commit(step)
            case "checkpoint":
                self.engine.maintain(idle=True)  # an error in it is not the caller's business
            case "chores":
                do_chores(self.engine)
            case "rest":
                do_rest(self.engine)
            case "reopen":
                self._reopen()
            case "restart":
                self.engine.close()
                self._open()

    def _commit(self, batch: Batch) -> None:
        for _ in range(self.ATTEMPTS_MAX):
            assert self.engine is not None
            try:
                receipts = self.engine.stage(batch.units)
                self.engine.commit()
            except BatchUnknownError:
                self._died()
                self._expect_nothing_before_reopening(batch)
                self._reopen()
                continue
            refused = [receipt for receipt in receipts if not isinstance(receipt, Durable)]
            self.violations += [Violation("refused", repr(receipt)) for receipt in refused]
            self.acked += 1
            self.commit_seq = commit_seq_of(receipts)
            self.disk.mark("ack", (self.acked - 1, self.commit_seq))
            return
        self._report("a batch is stored at last", "every attempt failed")

    def _expect_nothing_before_reopening(self, batch: Batch) -> None:
        """Another commit could bury the unknown one for good."""
        assert self.engine is not None
        try:
            self.engine.stage(batch.units)
            self.engine.commit()
        except BatchUnknownError:
            return
        self._report("nothing is applied until reopen", "a batch was")

    def _reopen(self) -> None:
        assert self.engine is not None
        if self.plan.in_reopen is not None and self.reopen_operations == 0:
            fault = self.plan.in_reopen
            self.disk.inject(replace(fault, at=self.disk.operations + fault.at))
        before = self.disk.operations
        for _ in range(self.ATTEMPTS_MAX):
            try:
                self.engine.reopen()
            except BatchUnknownError:
                self._died()
                self.disk.heal()
                continue
            self.reopen_operations = self.reopen_operations or self.disk.operations - before
            return
        self._report("an engine reopens at last", "every attempt failed")

    def _died(self) -> None:
        self.deaths.append((len(self.disk.log.entries), self.acked, self.commit_seq))


def io_error(start: Prepared, plan: Plan) -> tuple[list[Violation], FaultyRun]:
    """One run with a fault; then the end of it, and what a death at the error would have left."""
    with scratch() as root:
        directory = start.write_to(root / "disk")
        run = FaultyRun(start, directory, plan)
        found = list(run.violations)
        dump, _, damage = inspect(directory)
        found += [*damage, *compare(start.dumps[-1], dump)]
        for point, acked, commit_seq in run.deaths[:1]:
            # Nothing survives: a power loss. All of it survives: a process that died.
            for image in images(run.log, torn=0, start=point, stop=point + 1):
                left = image.write_to(root / "left")
                violations = check_directory(start, left, acked, commit_seq)
                found += [Violation(f"died at {image.name}: {v.rule}", v.found) for v in violations]
                shutil.rmtree(left)
        return found, run


def operations_of(start: Prepared, *, count_reads: bool = False) -> tuple[Operation, ...]:
    """Every I/O operation of an undisturbed run."""
    with scratch() as root:
        directory = start.write_to(root / "disk")
        with Disk(directory, count_reads=count_reads) as disk:
            rig = Rig(directory, disk.name)
            rig.run(start.workload.steps)
            rig.engine.close()
            return disk.history


_FAILURES = {
    Failure.EIO: frozenset(Kind),
    Failure.FULL: frozenset({Kind.WRITE}),
    Failure.SHORT: frozenset({Kind.WRITE}),
    Failure.DROP: frozenset({Kind.SYNC}),
}


def plans_for(operations: Sequence[Operation]) -> Iterator[Plan]:
    """Every operation, in every way that it can fail, once and until healed."""
    for operation in operations:
        for failure, kinds in _FAILURES.items():
            if operation.kind in kinds:
                yield Plan(Fault(operation.number, failure))
                yield Plan(Fault(operation.number, failure, sticky=True))


@contextmanager
def spilling() -> Generator[None]:
    """Engines opened in this block have room for a few pages only, and write while they stage."""
    opened = connection.open_writer

    def open_writer(*args: Any, **kwargs: Any) -> apsw.Connection:
        db = opened(*args, **kwargs)
        db.pragma("cache_size", 3)
        db.pragma("cache_spill", 3)
        return db

    with patch.object(connection, "open_writer", open_writer):
        yield
