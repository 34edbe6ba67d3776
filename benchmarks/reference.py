"""The two bounds: how fast apsw inserts at all, and group commit with nothing around it.

Both write into the real schema, with all its columns and indices. `raw` has no acknowledgements.
`reference` is what the Writer is measured against: producers on the loop, one thread, one
transaction and one wake-up for all that waits. It has no guards, no counters, no recognition of
what was sent twice, no recovery, no bounds.
"""

from __future__ import annotations

import os
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

import apsw
import outcome
import trio
from msgspec.structs import replace

from onepen.runtime.system import SystemIds
from onepen.storage.sqlite import schema

from .meter import TEXTS, Meter, message_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .cells import Cell, Outcome

BATCH_ROWS = 1_000
INSERT = (
    "INSERT INTO messages (session, seq, uid, turn, role, state, carried, kind, created_ms, user, "
    "text, details, covers_first, covers_last, summarised_by) "
    "VALUES (?, ?, ?, NULL, 'user', 0, 0, 0, ?, NULL, ?, NULL, NULL, NULL, NULL)"
)
Row: TypeAlias = tuple[int, int, bytes, int, str]
Posted: TypeAlias = tuple[Row, trio.lowlevel.Task]


def open_database(path: str, synchronous: str) -> apsw.Connection:
    """An empty database with the real schema, and SQLite's own default for copying the log back.

    A log that is let grow is no faster: syncing a file that gets longer costs more than syncing one
    that is written over.
    """
    db = apsw.Connection(path)
    db.pragma("journal_mode", "WAL")
    db.pragma("synchronous", synchronous)
    db.wal_autocheckpoint(1_000)
    schema.migrate(db, path, 0)
    return db


def add_sessions(db: apsw.Connection, count: int) -> None:
    """Sessions 1 to `count`, as rows only."""
    with db:
        db.executemany(
            "INSERT INTO sessions (id, key, source, started_ms) VALUES (?, ?, '', 0)",
            ((f"s{n}", f"k{n}") for n in range(count)),
        )


def run_raw(cell: Cell) -> Outcome:
    path = os.path.join(cell.folder, "raw.db")
    db = open_database(path, cell.condition.synchronous)
    producers = cell.condition.producers
    add_sessions(db, producers)
    fresh = SystemIds().fresh
    written = 0

    def append() -> int:
        nonlocal written
        rows: list[Row] = [
            (n % producers + 1, n // producers, bytes.fromhex(fresh()), n, TEXTS[n % len(TEXTS)])
            for n in range(written, written + BATCH_ROWS)
        ]
        db.execute("BEGIN IMMEDIATE")
        db.executemany(INSERT, rows)
        db.execute("COMMIT")
        written += BATCH_ROWS
        return BATCH_ROWS

    meter = Meter(cell)
    meter.batch(append)
    result = meter.outcome(None)
    db.close()
    return result


class GroupCommit:
    """One thread that commits everything that waits, and wakes all who wait with one call into the
    loop.
    """

    def __init__(self, path: str, synchronous: str) -> None:
        self._path = path
        self._synchronous = synchronous
        self._posted: SimpleQueue[Posted | None] = SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.Thread(target=self._write)

    def start(self) -> None:
        self._thread.start()

    async def append(self, row: Row) -> None:
        self._posted.put((row, trio.lowlevel.current_task()))
        await trio.lowlevel.wait_task_rescheduled(_never_abort)

    async def stop(self) -> None:
        self._posted.put(None)
        await trio.to_thread.run_sync(self._thread.join)

    def _write(self) -> None:
        db = open_database(self._path, self._synchronous)
        while (first := self._posted.get()) is not None:
            batch = [first]
            stopping = False
            while len(batch) < BATCH_ROWS:
                try:
                    posted = self._posted.get_nowait()
                except Empty:
                    break
                if posted is None:
                    stopping = True
                    break
                batch.append(posted)
            db.execute("BEGIN IMMEDIATE")
            db.executemany(INSERT, [row for row, _ in batch])
            db.execute("COMMIT")
            self._token.run_sync_soon(_wake, [task for _, task in batch])
            if stopping:
                break
        db.close()


def _never_abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


def _wake(tasks: list[trio.lowlevel.Task]) -> None:
    for task in tasks:
        trio.lowlevel.reschedule(task, outcome.Value(None))


async def run_reference(cell: Cell) -> Outcome:
    path = os.path.join(cell.folder, "reference.db")
    db = open_database(path, cell.condition.synchronous)
    add_sessions(db, cell.condition.producers)
    db.close()
    commit = GroupCommit(path, cell.condition.synchronous)
    commit.start()
    meter = Meter(cell)
    async with trio.open_nursery() as nursery:
        for number in range(cell.condition.producers):
            nursery.start_soon(meter.produce, _appender(commit, number))
    result = meter.outcome(None)
    await commit.stop()
    return replace(result, bytes_per_message=message_bytes(path))


def _appender(commit: GroupCommit, number: int) -> Callable[[], Awaitable[None]]:
    """Appends the next message of one session, as the Writer's producers do."""
    fresh = SystemIds().fresh
    seq = 0

    async def append() -> None:
        nonlocal seq
        text = TEXTS[seq % len(TEXTS)]
        await commit.append((number + 1, seq, bytes.fromhex(fresh()), seq, text))
        seq += 1

    return append
