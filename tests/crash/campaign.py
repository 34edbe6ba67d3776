"""The crash campaign: workloads run on a disk that fails, and the checks of what is left.

Each check is a function that returns violations instead of asserting, so that the tests of the
tests can call it on an engine with a planted bug and see that it finds something.

A check of a directory (`check_directory`) is always the same: open it with the real engine, which
recovers and fences; what is stored must be the content after some whole number of batches, at least
the acknowledged ones; send the rest again; the end must equal that of an undisturbed run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import apsw
import msgspec

from onepen.runtime.testing import Disk, Image, Log, Synced, images
from onepen.runtime.testing.invariants import (
    Dump,
    Violation,
    check_connection,
    compare,
    dump_connection,
    inspecting,
)
from onepen.runtime.testing.workloads import START_MS, WORKLOADS, Batch, Step, Workload
from onepen.storage.commands import AppendMessages
from onepen.storage.engine import EngineSettings
from onepen.storage.errors import OnepenError, StaleEpochError, StorageError
from onepen.storage.records import Search
from onepen.storage.sqlite import place
from onepen.storage.sqlite.engine import SqliteEngine, open_sqlite
from onepen.storage.units import Durable, Refused, Unit
from onepen.storage.words import words_of

DATABASE = "onepen.db"
SECOND_IMAGES_MAX = 30
_CHORES_MAX = 60
# Every checkpoint that is asked for happens, and every unused page is given back; the free space of
# the test machine does not matter.
SETTINGS = EngineSettings(wal_pages_checkpoint=1, free_pages_max=1, free_bytes_min=0)


class FixedClock:
    """Time stands still, so that two runs leave equal databases."""

    def now(self) -> int:
        return START_MS

    def monotonic(self) -> float:
        return 0.0


@contextmanager
def scratch() -> Generator[Path]:
    """A directory that is gone afterwards; in memory where there is such a place, because it is
    faster.
    """
    shared = Path("/dev/shm")
    parent = shared if os.access(shared, os.W_OK) else None
    directory = tempfile.mkdtemp(prefix="onepen-crash-", dir=parent)
    try:
        yield Path(directory)
    finally:
        shutil.rmtree(directory)


# Running a workload

Receipts = Sequence[Durable | Refused]
Acknowledge = Callable[[int, int], None]
"""Called with the number of a batch and its commit_seq, when the batch is acknowledged."""


def open_engine(directory: Path, vfs: str | None = None) -> SqliteEngine:
    return open_sqlite(directory / DATABASE, FixedClock(), SETTINGS, vfs=vfs)


def commit_batch(
    engine: SqliteEngine, batch: Batch, number: int, acknowledge: Acknowledge
) -> Receipts:
    """Stage, commit, acknowledge: in this order, which one of the planted bugs turns around."""
    receipts = engine.stage(batch.units)
    engine.commit()
    acknowledge(number, commit_seq_of(receipts))
    return receipts


def commit_seq_of(receipts: Receipts) -> int:
    return max((r.commit_seq for r in receipts if isinstance(r, Durable)), default=0)


@dataclass(slots=True)
class Rig:
    """An engine on a directory, driven through the steps of a workload."""

    directory: Path
    vfs: str | None = None
    acknowledge: Acknowledge = lambda number, commit_seq: None
    engine: SqliteEngine = field(init=False)
    violations: list[Violation] = field(default_factory=list[Violation])

    def __post_init__(self) -> None:
        self.engine = open_engine(self.directory, self.vfs)

    def run(self, steps: Sequence[Step], first: int = 0, stored: int = 0) -> None:
        """Do the steps; batches count from `first`, those before `stored` must be found stored."""
        number = first
        for step in steps:
            match step:
                case Batch():
                    receipts = commit_batch(self.engine, step, number, self.acknowledge)
                    self.violations += unexpected(receipts, again=number < stored, number=number)
                    number += 1
                case "checkpoint":
                    self.engine.maintain(idle=True)
                case "chores":
                    do_chores(self.engine)
                case "rest":
                    do_rest(self.engine)
                case "reopen":
                    self.engine.reopen()
                case "restart":
                    self.engine.close()
                    self.engine = open_engine(self.directory, self.vfs)


def do_chores(engine: SqliteEngine) -> None:
    """All of them; a disk that fails in one puts the others off."""
    for _ in range(_CHORES_MAX):
        if not engine.maintain(idle=True):
            return


def do_rest(engine: SqliteEngine) -> None:
    """As the Writer does it after a quiet while; a disk that fails in it is nobody's business."""
    if engine.rest_due() is not None:
        engine.upkeep()
        engine.rest()


def search_violations(engine: SqliteEngine, path: Path) -> list[Violation]:
    """Each word of what is stored finds the messages that have it, as a look at the rows says."""
    with inspecting(path) as db:
        texts: list[Any] = db.execute(
            "SELECT coalesce(m.text, '') FROM messages m JOIN sessions s ON s.n = m.session "
            "WHERE m.carried = 0 AND m.state <> 2 AND s.deleted = 0 AND s.hidden = 0"
        ).fetchall()
    found: list[Violation] = []
    for word in sorted({word for (text,) in texts for word in words_of(text)} | {"pelican"}):
        with engine.reading() as reader:
            page = reader.search(Search(text=word, limit=1_000))
        hits = sorted(hit.text for hit in page.hits if word in words_of(hit.text))
        expected = sorted(text for (text,) in texts if word in words_of(text))
        if hits != expected or page.index == "damaged":
            what = f"{word}, {page.index}: {len(hits)} of {len(expected)}"
            found.append(Violation("search finds what is stored", what))
    return found


def unexpected(receipts: Receipts, *, again: bool, number: int) -> list[Violation]:
    """Receipts that an undisturbed or re-sent batch does not give."""
    return [
        Violation("receipt", f"batch {number}, expected again={again}: {receipt!r}"[:400])
        for receipt in receipts
        if not isinstance(receipt, Durable) or receipt.again is not again
    ]


# What is expected


@dataclass(frozen=True, slots=True)
class Prepared:
    """A workload, the files it starts from, and the content after each number of its batches."""

    workload: Workload
    files: Mapping[str, bytes] = field(repr=False)
    dumps: tuple[Dump, ...] = field(repr=False)
    violations: tuple[Violation, ...]

    def write_to(self, directory: Path) -> Path:
        directory.mkdir()
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        return directory


def prepare(workload: Workload) -> Prepared:
    """Run it undisturbed, and look at every state on the way with every rule there is."""
    with scratch() as root:
        files: dict[str, bytes] = {}
        found: list[Violation] = []
        if workload.created:
            rig = Rig(root)
            rig.run([Batch((unit,)) for unit in workload.preparation])
            rig.engine.close()
            found += rig.violations
            files[DATABASE] = (root / DATABASE).read_bytes()
        rig = Rig(root)
        dumps: list[Dump] = []
        for number, step in enumerate((None, *workload.steps)):
            if step is not None:
                rig.run([step], first=number)
            if step is None or isinstance(step, Batch):
                with inspecting(root / DATABASE) as db:
                    dumps.append(dump_connection(db))
                    found += check_connection(db)
        rig.engine.close()
        found += rig.violations
        if (root / f"{DATABASE}-wal").exists():
            found.append(Violation("closing leaves no log", "a connection is still open"))
    return Prepared(workload, files, tuple(dumps), tuple(found))


@cache
def prepared(name: str) -> Prepared:
    """The workload of this name, prepared once for each process."""
    return prepare(WORKLOADS[name])


def record(start: Prepared) -> Log:
    """The steps on a recording disk, with a mark for every acknowledgement."""
    with scratch() as root:
        directory = start.write_to(root / "disk")
        with Disk(directory) as disk:
            rig = Rig(directory, disk.name, lambda n, seq: disk.mark("ack", (n, seq)))
            rig.run(start.workload.steps)
            rig.engine.close()
            return disk.log


# What is left


def inspect(directory: Path) -> tuple[Dump, int, list[Violation]]:
    """Content, stored commit_seq, and what SQLite itself finds wrong.

    The rules of `check_database` are left to the states that the content is compared with: they
    depend on nothing else than the content, once the indexes are known to agree with it.
    """
    with inspecting(directory / DATABASE) as db:
        damage = [
            Violation("integrity_check", str(row[0]))
            for row in db.execute("PRAGMA integrity_check").fetchall()
            if row != ("ok",)
        ]
        rows: list[Any] = db.execute("SELECT commit_seq FROM pen").fetchall()
        return dump_connection(db), rows[0][0], damage


def check_directory(
    start: Prepared,
    directory: Path,
    acked: int,
    commit_seq: int = 0,
    *,
    vfs: str | None = None,
    acknowledge: Acknowledge = lambda number, commit_seq: None,
) -> list[Violation]:
    """Start again on what a crash has left: nothing acknowledged is lost, nothing is torn or
    doubled.
    """
    try:
        rig = Rig(directory, vfs, acknowledge)
    except Exception as error:  # whatever it is, a database that can't be opened is the finding
        return [Violation("opening", repr(error))]
    try:
        found = _check_start(start, rig, acked, commit_seq)
        if "chores" in start.workload.steps:
            found += search_violations(rig.engine, directory / DATABASE)
            do_chores(rig.engine)
            found += search_violations(rig.engine, directory / DATABASE)
            found += _index_violations(directory / DATABASE)
    except OnepenError as error:
        found = [Violation("sending again", repr(error))]
    finally:
        rig.engine.close()
    if (directory / f"{DATABASE}-wal").exists():
        found.append(Violation("closing leaves no log", "a connection is still open"))
    dump, _, damage = inspect(directory)
    return [*found, *damage, *compare(start.dumps[-1], dump)]


def _index_violations(path: Path) -> list[Violation]:
    """What SQLite finds wrong with an index that has caught up."""
    db = apsw.Connection(str(path))
    try:
        db.execute("INSERT INTO search_index (search_index) VALUES ('integrity-check')")
    except apsw.Error as error:
        return [Violation("the search index is sound", str(error))]
    finally:
        db.close()
    return []


def _check_start(start: Prepared, rig: Rig, acked: int, commit_seq: int) -> list[Violation]:
    dump, commit_seq_stored, found = inspect(rig.directory)
    stored = stored_batches(start, dump)
    if stored is None:
        found.append(Violation("a batch is whole or absent", f"{acked} were acknowledged"))
        found += compare(start.dumps[acked], dump)
    elif stored < acked:
        found.append(Violation("acknowledged is stored", f"{stored} of {acked} batches"))
    elif stored > acked + 1:
        found.append(Violation("batches follow each other", f"{stored}, {acked} acknowledged"))
    if commit_seq_stored < commit_seq:
        found.append(Violation("commit_seq never goes back", f"{commit_seq_stored} < {commit_seq}"))
    rig.run(start.workload.batches[acked:], first=acked, stored=acked if stored is None else stored)
    return [*found, *rig.violations]


def stored_batches(start: Prepared, dump: Dump) -> int | None:
    """After how many batches the content is this one."""
    matches = [number for number, expected in enumerate(start.dumps) if expected == dump]
    return matches[-1] if matches else None


def acknowledged(image: Image) -> tuple[int, int]:
    """How many batches had been acknowledged when the power went, and the last commit_seq."""
    acks: list[Any] = image.payloads("ack")
    if not acks:
        return 0, 0
    number, commit_seq = acks[-1]
    return number + 1, commit_seq


# Power loss


@dataclass(slots=True)
class Tally:
    """How much a campaign has done, and what it found."""

    runs: int = 0
    doubles: int = 0
    violations: list[Violation] = field(default_factory=list[Violation])

    def add(self, where: str, found: Sequence[Violation]) -> None:
        self.runs += 1
        self.violations += [Violation(f"{where}: {v.rule}", v.found) for v in found]


def power_loss(
    start: Prepared, *, torn: int, double_every: int = 0, part: int = 0, parts: int = 1
) -> Tally:
    """A power loss after every I/O operation, and a second one in some of the recoveries.

    With several `parts`, each takes its share of the images.
    """
    tally = Tally(violations=list(start.violations))
    with scratch() as root:
        for number, image in enumerate(images(record(start), torn=torn)):
            if number % parts != part:
                continue
            directory = image.write_to(root / "image")
            tally.add(image.name, check_directory(start, directory, *acknowledged(image)))
            shutil.rmtree(directory)
            # From the middle: the first images of a workload have little to recover.
            if double_every and number % double_every == double_every // 2:
                _second_loss(start, image, root, tally)
    return tally


def _second_loss(start: Prepared, first: Image, root: Path, tally: Tally) -> None:
    """The power goes again while the first loss is recovered from and the rest is sent again."""
    acked, commit_seq = acknowledged(first)
    directory = first.write_to(root / "first")
    with Disk(directory, skip={f"{DATABASE}.lock"}) as disk:
        found = check_directory(
            start,
            directory,
            acked,
            commit_seq,
            vfs=disk.name,
            acknowledge=lambda n, seq: disk.mark("ack", (n, seq)),
        )
        log = disk.log
    shutil.rmtree(directory)
    tally.violations += found
    # A share of them, spread over the whole recovery: every one would be the square of the work.
    every = list(images(log, torn=1))
    for image in every[:: max(1, len(every) // SECOND_IMAGES_MAX)]:
        again = acknowledged(image)
        directory = image.write_to(root / "second")
        where = f"{first.name} then {image.name}"
        tally.add(where, check_directory(start, directory, max(acked, again[0]), again[1]))
        tally.doubles += 1
        shutil.rmtree(directory)


# A kill, a restart, a power loss


def final_image(log: Log) -> Image:
    """All that was written, synced or not: what a killed process leaves to the next one."""
    *_, image = images(log, torn=0, start=len(log.entries))
    return image


def restart_then_power_loss(start: Prepared, log: Log) -> Tally:
    """The process dies where the log ends, the next one goes on with it; then the power goes.

    What the new process has acknowledged must be there, however much of it was found stored
    already; and so must everything that its readers could see, acknowledged or not.
    """
    tally = Tally()
    killed = len(log.entries)
    with scratch() as root:
        image = final_image(log)
        directory = image.write_to(root / "killed")
        acked, _ = acknowledged(image)
        with Disk(directory, continues=log) as disk:
            rig = Rig(directory, disk.name, lambda n, seq: disk.mark("ack", (n, seq)))
            dump, _, _ = inspect(directory)
            seen = stored_batches(start, dump)
            disk.mark("seen", seen)
            rig.run(start.workload.batches[acked:], first=acked, stored=seen or 0)
            rig.engine.close()
            log = disk.log
        tally.violations += rig.violations
        if seen is None:
            tally.violations.append(Violation("a batch is whole or absent", "after the kill"))
            return tally
        for image in images(log, torn=1, start=killed):
            promised, commit_seq = acknowledged(image)
            if image.payloads("seen"):
                promised = max(promised, seen)
            left = image.write_to(root / "left")
            found = check_directory(start, left, promised, commit_seq)
            tally.add(image.name, found)
            shutil.rmtree(left)
    return tally


def killed_at_syncs(start: Prepared) -> Iterator[Log]:
    """The recording, ended right before each of its syncs of the write-ahead log."""
    log = record(start)
    for point, entry in enumerate(log.entries):
        if isinstance(entry, Synced) and entry.file.endswith("-wal"):
            yield Log(log.base, log.entries[:point])


# One unit among others, one writer among others


def poison() -> list[Violation]:
    """A unit whose values can't be bound fails alone, between two that are stored."""
    load = WORKLOADS["group_commit"]
    first, second, third = load.batches[0].units
    append = second.commands[0]
    assert isinstance(append, AppendMessages)
    # The edge refuses this text; here it has come through all the same.
    draft = msgspec.structs.replace(append.messages[0], text="\ud800")
    bad = Unit((msgspec.structs.replace(append, messages=(draft,)),), second.guards)
    with scratch() as root:
        rig = Rig(root)
        rig.run([Batch((unit,)) for unit in load.preparation])
        try:
            receipts = rig.engine.stage([first, bad, third])
            rig.engine.commit()
        except StorageError as error:
            return [Violation("a bad unit fails alone", repr(error))]
        finally:
            rig.engine.close()
        kinds = [type(receipt) for receipt in receipts]
        if kinds != [Durable, Refused, Durable]:
            return [Violation("a bad unit fails alone", repr(receipts))]
        with inspecting(root / DATABASE) as db:
            return check_connection(db)


def two_writers() -> list[Violation]:
    """A second engine takes the file over, past the lock; the first can't commit any more."""
    load = WORKLOADS["append_messages"]
    first, second = load.batches

    def unlocked(path: Path, clock: object) -> int:
        return os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)

    with scratch() as root, patch.object(place, "_take_lock", unlocked):
        old = Rig(root)
        old.run([Batch((unit,)) for unit in load.preparation])
        new = Rig(root)
        new.run([first])
        try:
            # To the old one, whose memory is stale, this follows on what it has written itself.
            old.run([first])
        except StaleEpochError:
            pass
        else:
            old.violations.append(Violation("a stale epoch can't commit", "it did"))
        finally:
            old.engine.close()
        new.run([second], first=1)
        new.engine.close()
        return [*old.violations, *new.violations]
