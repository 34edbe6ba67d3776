"""PROOF-8: tests of the tests. Each planted bug is caught by the check that claims to catch it.

A bug is planted from here, by replacing a function of the engine or of the one who drives it; the
shipped code is not changed. Every check is also run without the bug and must find nothing, so that
a check which always complains proves nothing either.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import apsw
import msgspec
import pytest

from onepen.runtime.testing import Failure, Fault, Kind
from onepen.runtime.testing.invariants import Violation
from onepen.runtime.testing.workloads import WORKLOADS, Batch
from onepen.storage.commands import AppendMessages
from onepen.storage.errors import BatchUnknownError
from onepen.storage.sqlite import engine as engine_module
from onepen.storage.sqlite import schema
from onepen.storage.sqlite.engine import HANDLERS, SqliteEngine
from onepen.storage.sqlite.handlers import Handler
from onepen.storage.sqlite.transaction import SessionState, Transaction
from onepen.storage.units import Durable, Refused, Unit

from . import campaign, faults
from .faults import Plan

if TYPE_CHECKING:
    from .campaign import Prepared

Check = Callable[[], list[Violation]]


# The checks


def power_loss(name: str) -> Check:
    """Prepared now, without the bug; run later, with it."""
    start = campaign.prepared(name)
    return lambda: campaign.power_loss(start, torn=0).violations


def restart_then_power_loss(name: str) -> Check:
    start = campaign.prepared(name)

    def check() -> list[Violation]:
        logs = campaign.killed_at_syncs(start)
        return [v for log in logs for v in campaign.restart_then_power_loss(start, log).violations]

    return check


def io_errors(name: str, plans: Callable[[Prepared], Iterable[Plan]]) -> Check:
    start = campaign.prepared(name)

    def check() -> list[Violation]:
        with faults.spilling():
            return [v for plan in plans(start) for v in faults.io_error(start, plan)[0]]

    return check


def failing(kind: Kind, failure: Failure) -> Callable[[Prepared], Iterable[Plan]]:
    def plans(start: Prepared) -> Iterator[Plan]:
        for operation in faults.operations_of(start):
            if operation.kind is kind and operation.file.endswith("-wal"):
                yield Plan(Fault(operation.number, failure))

    return plans


def undisturbed(name: str) -> Check:
    return lambda: list(campaign.prepare(WORKLOADS[name]).violations)


# The bugs


def early_ack() -> AbstractContextManager[object]:
    """The acknowledgement leaves when the batch is staged, before it is committed."""

    def commit_batch(
        engine: SqliteEngine, batch: Batch, number: int, acknowledge: campaign.Acknowledge
    ) -> campaign.Receipts:
        receipts = engine.stage(batch.units)
        acknowledge(number, campaign.commit_seq_of(receipts))
        engine.commit()
        return receipts

    return patch.object(campaign, "commit_batch", commit_batch)


def synchronous_normal() -> AbstractContextManager[object]:
    settings = msgspec.structs.replace(campaign.SETTINGS, synchronous="NORMAL")
    return patch.object(campaign, "SETTINGS", settings)


def _never(tx: Transaction, command: object) -> bool:
    return False


def no_dedupe() -> AbstractContextManager[object]:
    """Nothing is recognised as stored already: what is sent again is judged as if it were new."""
    blind = {kind: Handler(_never, handler.apply) for kind, handler in HANDLERS.items()}
    return patch.dict(HANDLERS, blind)


@contextmanager
def doubled_appends() -> Generator[None]:
    """The same, with nothing behind it: no guard, no unique index, the next free seq whatever was
    given.
    """

    handler = HANDLERS[AppendMessages]

    def append(tx: Transaction, command: AppendMessages) -> None:
        session = tx.session(command.session_id)
        assert session is not None
        base_seq: Any = session.next_seq
        handler.apply(tx, msgspec.structs.replace(command, base_seq=base_seq))

    def accept(tx: Transaction, unit: Unit) -> None:
        pass

    blind = Handler(_never, append)
    opened = SqliteEngine._open  # pyright: ignore[reportPrivateUsage]

    def drop_index(engine: SqliteEngine, *, truncate_log: bool) -> None:
        opened(engine, truncate_log=truncate_log)
        db = engine._db  # pyright: ignore[reportPrivateUsage]
        assert db is not None
        db.execute("DROP INDEX IF EXISTS messages_original")

    with (
        patch.dict(HANDLERS, {AppendMessages: blind}),
        patch.object(engine_module, "check_guards", accept),
        patch.object(SqliteEngine, "_open", drop_index),
    ):
        yield


def _read_epoch(engine: SqliteEngine) -> None:
    """Instead of moving the epoch."""
    db = engine._db  # pyright: ignore[reportPrivateUsage]
    assert db is not None
    if not db.execute("SELECT epoch FROM pen WHERE epoch > 0").fetchall():
        db.execute("UPDATE pen SET epoch = 1")
    rows: list[Any] = db.execute("SELECT epoch, commit_seq FROM pen").fetchall()
    engine._epoch, engine._commit_seq = rows[0]  # pyright: ignore[reportPrivateUsage]


def no_fence() -> AbstractContextManager[object]:
    """Opening commits nothing: what recovery found may be in the page cache only."""
    return patch.object(SqliteEngine, "_move_epoch", _read_epoch)


@contextmanager
def no_fence_and_empty_batches() -> Generator[None]:
    """And a batch that finds everything stored already changes and syncs nothing."""

    def begin(engine: SqliteEngine, tx: Transaction) -> None:
        db = engine._db  # pyright: ignore[reportPrivateUsage]
        assert db is not None
        db.execute("BEGIN IMMEDIATE")
        tx.commit_seq = 0

    with no_fence(), patch.object(SqliteEngine, "_begin", begin):
        yield


@contextmanager
def no_in_transaction_check() -> Generator[None]:
    """A savepoint for each unit, and the belief that the transaction around them is still there."""

    def apply(engine: SqliteEngine, tx: Transaction, units: Iterable[Unit]) -> list[Any]:
        db = engine._db  # pyright: ignore[reportPrivateUsage]
        assert db is not None
        receipts: list[Durable | Refused] = []
        for unit in units:
            try:
                db.execute("SAVEPOINT unit")
                receipts.append(engine._apply_unit(tx, unit))  # pyright: ignore[reportPrivateUsage]
                tx.flush()
            except Exception as error:
                receipts.append(Refused(reason="invalid", what=repr(error)))
                tx.forget()
                _try(db, "ROLLBACK TO unit")
            _try(db, "RELEASE unit")
        return receipts

    def commit(engine: SqliteEngine) -> None:
        db = engine._db  # pyright: ignore[reportPrivateUsage]
        if db is not None and db.in_transaction:
            committed(engine)

    committed = SqliteEngine.commit
    with (
        patch.object(SqliteEngine, "_apply_together", apply),
        patch.object(SqliteEngine, "commit", commit),
    ):
        yield


def _try(db: apsw.Connection, sql: str) -> None:
    try:
        db.execute(sql)
    except apsw.Error:
        pass  # part of the planted bug


def except_apsw_error() -> AbstractContextManager[object]:
    """Only what is an `apsw.Error` is taken for a unit's own error."""
    checked = SqliteEngine._raise_unless_unit_error  # pyright: ignore[reportPrivateUsage]

    def check(engine: SqliteEngine, error: Exception) -> None:
        if not isinstance(error, apsw.Error):
            raise error
        checked(engine, error)

    return patch.object(SqliteEngine, "_raise_unless_unit_error", check)


def rotation_in_two_transactions() -> AbstractContextManager[object]:
    """The child is committed first, and the key is moved to it afterwards."""
    changed = Transaction.change

    def change(tx: Transaction, sql: str, *args: Any) -> None:
        if sql.startswith("UPDATE routes SET session_id"):
            tx.flush()
            changed(tx, "COMMIT")
            changed(tx, "BEGIN IMMEDIATE")
        changed(tx, sql, *args)

    return patch.object(Transaction, "change", change)


def revision_not_moved() -> AbstractContextManager[object]:
    def revise(tx: Transaction, session: SessionState, at_ms: int | None = None) -> None:
        tx.touch(session, at_ms)

    return patch.object(Transaction, "revise", revise)


def no_epoch_check() -> AbstractContextManager[object]:
    def begin(engine: SqliteEngine, tx: Transaction) -> None:
        db = engine._db  # pyright: ignore[reportPrivateUsage]
        assert db is not None
        db.execute("BEGIN IMMEDIATE")
        rows: list[Any] = db.execute(
            "UPDATE pen SET commit_seq = commit_seq + 1 RETURNING commit_seq"
        ).fetchall()
        tx.commit_seq = rows[0][0]

    return patch.object(SqliteEngine, "_begin", begin)


def commit_error_ignored() -> AbstractContextManager[object]:
    """A sync that fails is taken for one that succeeded."""
    committed = SqliteEngine.commit

    def commit(engine: SqliteEngine) -> None:
        try:
            committed(engine)
        except BatchUnknownError:
            engine._broken = False  # pyright: ignore[reportPrivateUsage]

    return patch.object(SqliteEngine, "commit", commit)


def goes_on_after_unknown() -> AbstractContextManager[object]:
    """After a failed commit the next batch is simply tried on the same connection."""
    staged = SqliteEngine.stage

    def stage(engine: SqliteEngine, units: Any) -> Any:
        engine._broken = False  # pyright: ignore[reportPrivateUsage]
        return staged(engine, units)

    return patch.object(SqliteEngine, "stage", stage)


def migration_in_pieces() -> AbstractContextManager[object]:
    """The tables are committed one by one, before the version says so."""
    whole = schema.migrate

    def migrate(db: apsw.Connection, path: str, now_ms: int) -> int:
        stored = schema.check_ours(db, path)
        if stored == 0:
            for statement in schema.MIGRATIONS[0].split(";\n"):
                db.execute(statement)
            db.execute("INSERT INTO pen VALUES (1, 0, 0, ?)", (now_ms,))
            db.execute("INSERT INTO marks VALUES ('finalize_orphaned_rotations', 'new')")
            db.pragma("application_id", schema.APPLICATION_ID)
            db.pragma("user_version", 1)
        whole(db, path, now_ms)
        return stored

    return patch.object(schema, "migrate", migrate)


# Bug, the check that catches it, and a rule that must be among its findings

BUGS: dict[str, tuple[Callable[[], AbstractContextManager[object]], Callable[[], Check], str]] = {
    "early ack": (early_ack, lambda: power_loss("whole_turn"), "acknowledged is stored"),
    "synchronous NORMAL": (
        synchronous_normal,
        lambda: power_loss("whole_turn"),
        "acknowledged is stored",
    ),
    "no dedupe": (no_dedupe, lambda: power_loss("take_over"), "receipt"),
    "appends stored twice": (
        doubled_appends,
        lambda: power_loss("finalize"),
        "content of messages",
    ),
    "no fence at open": (
        no_fence,
        lambda: restart_then_power_loss("finalize"),
        "acknowledged is stored",
    ),
    "no fence, and a re-sent batch syncs nothing": (
        no_fence_and_empty_batches,
        lambda: restart_then_power_loss("finalize"),
        "acknowledged is stored",
    ),
    "no in_transaction check": (
        no_in_transaction_check,
        lambda: io_errors("group_commit", failing(Kind.WRITE, Failure.FULL)),
        "refused",
    ),
    "except apsw.Error": (except_apsw_error, lambda: campaign.poison, "a bad unit fails alone"),
    "rotation in two transactions": (
        rotation_in_two_transactions,
        lambda: power_loss("rotate"),
        "a batch is whole or absent",
    ),
    "revision not moved": (revision_not_moved, lambda: undisturbed("whole_turn"), "receipt"),
    "no epoch check": (no_epoch_check, lambda: campaign.two_writers, "a stale epoch can't commit"),
    "a failed commit is acknowledged": (
        commit_error_ignored,
        lambda: io_errors("set_mark", failing(Kind.SYNC, Failure.EIO)),
        "content of marks",
    ),
    "goes on after an unknown commit": (
        goes_on_after_unknown,
        lambda: io_errors("set_mark", failing(Kind.SYNC, Failure.EIO)),
        "nothing is applied until reopen",
    ),
    "migration in pieces": (
        migration_in_pieces,
        lambda: power_loss("create_database"),
        "opening",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_planted_bug_is_caught(
    bug: str, record_property: Callable[[str, object], None]
) -> None:
    """PROOF-8: the check finds nothing without the bug, and the right thing with it."""
    plant, make_check, rule = BUGS[bug]
    check = make_check()
    assert check() == []
    with plant():
        found = check()
    assert any(violation.rule.endswith(rule) for violation in found), found[:5]
    assert check() == [], "the bug is gone again"
    record_property("planted bug", f"{bug}: the rule '{rule}', {len(found)} findings")
