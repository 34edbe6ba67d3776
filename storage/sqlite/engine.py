"""The SQLite engine: one write connection, batches in one transaction each, and the way back
from errors.

Keeps:
- A batch begins by moving `commit_seq` under the engine's own epoch. So every batch is a real,
  synced commit, even one that only finds its units stored already, and an engine whose epoch is
  no longer the stored one can't commit anything.
- A unit that is refused or can't be bound fails alone. The batch is first applied without
  savepoints; only if a unit fails after it has changed something is the batch undone and
  applied again, unit by unit.
- After any error the engine looks whether SQLite has ended the transaction. If it has, or if
  the error is one of the disk or of memory, the whole batch is unknown, and nothing is applied
  until `reopen`.

Must never commit by itself: between `stage` and `commit` the transaction is open or the engine
is broken.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any, cast

import apsw

from ..engine import EngineSettings, EngineStatistics
from ..errors import (
    BatchUnknownError,
    LowSpaceError,
    OpenError,
    StaleEpochError,
    StorageError,
    StorageUnavailableError,
)
from ..units import Durable, Guard, Head, Refused, Unit
from ..upkeep import unhurried
from . import (
    blobs,
    compression,
    connection,
    deletion,
    erasing,
    exchange,
    importing,
    leftovers,
    mending,
    rewinding,
    schema,
    search_index,
    sessions,
    transcript,
    turns,
)
from .backup import back_up
from .checks import Check
from .guards import check_guards
from .log import Log
from .place import Place, take_place
from .readers import Readers
from .search_index import SearchIndex
from .transaction import Refusal, Transaction
from .vacuum import Vacuum
from .wholeness import check_log

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from ..identity import Clock
    from ..upkeep import Copied, Finding, Tick
    from .handlers import Handlers
    from .views import SqliteReader

logger = logging.getLogger(__name__)

HANDLERS: Handlers = {
    **sessions.HANDLERS,
    **transcript.HANDLERS,
    **compression.HANDLERS,
    **rewinding.HANDLERS,
    **deletion.HANDLERS,
    **erasing.HANDLERS,
    **leftovers.HANDLERS,
    **turns.HANDLERS,
    **exchange.HANDLERS,
    **blobs.HANDLERS,
    **search_index.HANDLERS,
    **importing.HANDLERS,
    **mending.HANDLERS,
}

# Errors that concern one unit, not the disk. Everything else of apsw's makes the batch unknown.
_UNIT_ERRORS = (apsw.ConstraintError, apsw.TooBigError, apsw.MismatchError, apsw.RangeError)
_TAKEN = (apsw.SQLITE_CONSTRAINT_UNIQUE, apsw.SQLITE_CONSTRAINT_PRIMARYKEY)
_memory_names = itertools.count(1)


def open_sqlite(
    path: str | os.PathLike[str] | None,
    clock: Clock,
    settings: EngineSettings | None = None,
    *,
    vfs: str | None = None,
) -> SqliteEngine:
    """Open a database for writing; `None` is one in memory.

    Blocks; raises `OpenError` and its kin.
    """
    connection.check_sqlite_version()
    place = None if path is None else take_place(path, clock)
    if place is not None:
        try:
            check_log(place.path, vfs=vfs)
        except BaseException:
            place.release()
            raise
    return SqliteEngine(place, clock, settings or EngineSettings(), vfs=vfs)


def _extended_code(error: apsw.Error) -> int:
    return cast("int", getattr(error, "extendedresult", 0))  # the stubs don't know it


def _refused_for(error: Exception) -> Refused:
    """The receipt of a unit that SQLite, or the binding of its values, has refused."""
    taken = isinstance(error, apsw.ConstraintError) and _extended_code(error) in _TAKEN
    return Refused(
        reason="conflict" if taken else "invalid", what=type(error).__name__, given=str(error)
    )


class SqliteEngine:
    """An open database.

    All methods but `reading` and `statistics` belong to one thread at a time.
    """

    def __init__(
        self, place: Place | None, clock: Clock, settings: EngineSettings, *, vfs: str | None
    ) -> None:
        self._place = place
        self._clock = clock
        self._settings = settings
        self._durable = place is not None
        if place is None:
            # A named database in memory, shared by the connections of this process and gone
            # with them.
            self._name = f"file:/onepen-{next(_memory_names)}?vfs=memdb"
            self._vfs = None
        else:
            self._name = str(place.path)
            self._vfs = vfs
        self.free_bytes: Callable[[], int] | None = place.free_bytes if place else None
        self._db: apsw.Connection | None = None
        self._log = Log(self._name, settings, self._open_copier)
        self._readers = Readers(self._open_reader, settings.readers_max)
        self._epoch = 0
        self._commits = 0
        self._refusals = 0
        self._careful_batches = 0
        self._reopenings = 0
        self._route_writes = 0
        self._commit_seq = 0
        self._broken = False
        try:
            self._open(truncate_log=False)
        except apsw.Error as error:
            self.close()
            raise OpenError(
                self._name, str(error), hint="look at the disk, then open it again"
            ) from error
        except BaseException:
            self.close()
            raise

    # Opening and reopening -------------------------------------------------------------------

    def _open(self, *, truncate_log: bool) -> None:
        if self._db is None:
            self._db = connection.open_writer(
                self._name,
                self._settings,
                vfs=self._vfs,
                durable=self._durable,
                uri=not self._durable,
            )
        schema.migrate(self._db, self._name, self._clock.now())
        if self._durable:
            self._log.attach(self._db)
            if truncate_log:
                # Every page that recovery found is written to the file and synced before
                # anything is built on it; a log whose sync has failed once is not trusted
                # again.
                self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
                self._log.emptied()
        self._move_epoch()
        self._transaction = Transaction(self._db)
        self._search = SearchIndex(self._db, self._epoch, self._settings)
        self._vacuum = Vacuum(self._db, self._epoch, self._settings)
        self._data_version: Any = self._db.pragma("data_version")
        self._broken = False
        self._readers.resume()

    def _move_epoch(self) -> None:
        """The fence: what recovery found may be in the page cache only.

        This commit syncs it with itself.
        """
        db = self._connection
        db.execute("BEGIN IMMEDIATE")
        rows: list[Any] = db.execute(
            "UPDATE pen SET epoch = epoch + 1 RETURNING epoch, commit_seq"
        ).fetchall()
        db.execute("COMMIT")
        self._epoch, self._commit_seq = rows[0]

    def reopen(self) -> None:
        self._reopenings += 1
        self._readers.suspend()
        try:
            if self._durable:
                self._close_connection()
            elif self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._open(truncate_log=self._durable)
        except (apsw.Error, OpenError) as error:
            if self._durable:  # in memory, the data would go with its last connection
                self._close_connection()
            raise BatchUnknownError("reopen", error) from error

    @property
    def _connection(self) -> apsw.Connection:
        if self._db is None:
            raise BatchUnknownError("use", StorageError("the connection is closed"))
        return self._db

    def _open_copier(self) -> apsw.Connection:
        return connection.open_writer(self._name, self._settings, vfs=self._vfs, durable=True)

    def _open_reader(self) -> apsw.Connection:
        return connection.open_reader(
            self._name, self._settings, vfs=self._vfs, uri=not self._durable
        )

    # Batches ---------------------------------------------------------------------------------

    def stage(self, units: Sequence[Unit]) -> list[Durable | Refused]:
        self._check_space()
        if self._broken:
            # A commit on top of an unknown one could bury it: the log's next frames go over its
            # own.
            raise BatchUnknownError("stage", StorageError("the batch before is unknown"))
        self._connection  # noqa: B018 - raises while the connection is closed
        tx = self._transaction
        try:
            self._begin(tx)
            try:
                receipts = self._apply_together(tx, units)
            except Exception as error:
                self._raise_unless_unit_error(error)
                receipts = self._apply_one_by_one(tx, units)
        except StaleEpochError:
            self._roll_back()
            raise
        except Exception as error:
            self._broken = True
            self._roll_back()
            raise BatchUnknownError("stage", error) from error
        self._refusals += sum(isinstance(receipt, Refused) for receipt in receipts)
        return receipts

    def _begin(self, tx: Transaction) -> None:
        db = self._connection
        db.execute("BEGIN IMMEDIATE")
        rows: list[Any] = db.execute(
            "UPDATE pen SET commit_seq = commit_seq + 1 WHERE epoch = ? RETURNING commit_seq",
            (self._epoch,),
        ).fetchall()
        if not rows:
            raise StaleEpochError(self._epoch)
        tx.commit_seq = rows[0][0]
        foreign: Any = db.pragma("data_version")
        if foreign != self._data_version:
            # Somebody else has committed into this file: what we remember may be wrong, and the
            # guards must look at what is stored.
            self._data_version = foreign
            tx.forget()

    def commit(self) -> None:
        try:
            self._connection.execute("COMMIT")
        except Exception as error:
            self._broken = True
            self._roll_back()
            raise BatchUnknownError("commit", error) from error
        self._commits += 1
        self._commit_seq = self._transaction.commit_seq
        self._route_writes += self._transaction.route_writes
        self._transaction.route_writes = 0
        if self._transaction.search_renewed:
            self._search.reload()
        self._search.batch_done(self._transaction.rows)
        self._vacuum.batch_done()
        self._transaction.trim()

    def _apply_together(self, tx: Transaction, units: Sequence[Unit]) -> list[Durable | Refused]:
        """The fast way: no savepoints, rows in bulk.

        Leaves by an error if a unit failed half-way.
        """
        receipts: list[Durable | Refused] = []
        for unit in units:
            before = tx.changes
            try:
                receipts.append(self._apply_unit(tx, unit))
            except Refusal as refusal:
                if tx.changes != before:
                    raise
                receipts.append(refusal.refused)
        tx.flush()
        return receipts

    def _apply_one_by_one(self, tx: Transaction, units: Sequence[Unit]) -> list[Durable | Refused]:
        """The careful way.

        A savepoint for each unit, so that one that fails takes nothing along.
        """
        self._careful_batches += 1
        db = self._connection
        db.execute("ROLLBACK")
        tx.forget()
        tx.route_writes = 0
        self._begin(tx)
        receipts: list[Durable | Refused] = []
        tx.route_writes = 0
        for unit in units:
            route_writes = tx.route_writes
            db.execute("SAVEPOINT unit")
            try:
                receipt = self._apply_unit(tx, unit)
                tx.flush()
                receipts.append(receipt)
            except Refusal as refusal:
                receipts.append(refusal.refused)
            except Exception as error:
                self._raise_unless_unit_error(error)
                logger.warning("a unit was refused: %s", type(error).__name__)
                receipts.append(_refused_for(error))
            if isinstance(receipts[-1], Refused):
                db.execute("ROLLBACK TO unit")
                tx.forget()
                tx.route_writes = route_writes
            db.execute("RELEASE unit")
        return receipts

    def _apply_unit(self, tx: Transaction, unit: Unit) -> Durable:
        tx.begin_unit()
        again = True
        for command in unit.commands:
            # Asked only when it is its turn: a command may rest on one before it in the unit.
            handler = HANDLERS[type(command)]
            if handler.applied(tx, command):
                tx.found = again
                continue
            if again:
                check_guards(tx, unit)
                again = tx.found = False
            handler.apply(tx, command)
        heads = self._heads_now(tx, unit.guards) if again else tx.heads()
        return Durable(tx.commit_seq, again, heads)

    @staticmethod
    def _heads_now(tx: Transaction, guards: tuple[Guard, ...]) -> tuple[Head, ...]:
        """For a unit that was there before: where its sessions stand today."""
        found = (tx.session(g.session_id) for g in guards if g.session_id is not None)
        return tuple(session.head() for session in found if session is not None)

    def _raise_unless_unit_error(self, error: Exception) -> None:
        """Pass on what concerns one unit; raise what concerns the whole batch."""
        if not self._connection.in_transaction:
            raise error  # SQLite has rolled everything back by itself
        if isinstance(error, apsw.Error) and not isinstance(error, _UNIT_ERRORS):
            raise error
        if isinstance(error, MemoryError):
            raise error

    def _roll_back(self) -> None:
        """Leave no transaction open.

        What this can't do, `reopen` does by closing the connection.
        """
        self._transaction.forget()
        self._transaction.route_writes = 0
        if self._db is not None and self._db.in_transaction:
            try:
                self._db.execute("ROLLBACK")
            except apsw.Error as error:
                logger.warning("rolling back failed, the connection is closed: %s", error)
                self._close_connection()

    def _check_space(self) -> None:
        if self.free_bytes is None:
            return
        try:
            free = self.free_bytes()
        except OSError as error:
            raise StorageUnavailableError(f"free space can't be told: {error}") from error
        if free < self._settings.free_bytes_min:
            raise LowSpaceError(self._name, free, self._settings.free_bytes_min)

    # Reading, upkeep, closing ----------------------------------------------------------------

    def reading(self) -> AbstractContextManager[SqliteReader]:
        return self._readers.reading()

    def backup(
        self, target: str | os.PathLike[str], tick: Tick = unhurried, *, replace: bool = False
    ) -> Copied:
        with self._readers.beside() as (db, check):

            def checked(stage: str, done: int, total: int) -> None:
                check()
                tick(stage, done, total)

            return back_up(
                db,
                target,
                self._clock,
                checked,
                # In memory a reader holds up the next commit, and there is little to copy.
                pages_step=self._settings.backup_pages_step if self._durable else -1,
                free_bytes_min=self._settings.free_bytes_min,
                replace=replace,
            )

    def check(self, tick: Tick = unhurried, *, full: bool = False) -> list[Finding]:
        with self._readers.beside() as (db, check):

            def checked(stage: str, done: int, total: int) -> None:
                check()
                tick(stage, done, total)

            return Check(db, checked, full=full).run()

    def upkeep_due(self, *, idle: bool) -> bool:
        return self._durable and self._log.due(idle=idle)

    def upkeep(self) -> None:
        """Copy the log into the file. Readers and the writer go on meanwhile."""
        if self._db is not None:
            self._log.copy()

    def finish_upkeep(self) -> None:
        if self._db is not None:
            self._log.copy_rest(self._db)

    def rest_due(self) -> float | None:
        if not self._durable or self._db is None or self._broken or self._log.empty:
            return None
        return self._settings.wal_empty_after_s

    def rest(self) -> None:
        if self._db is not None and not self._broken:
            self._log.make_empty(self._db)

    def maintain(self, *, idle: bool) -> bool:
        upkeep, chore = self.upkeep_due(idle=idle), self.chore_due(idle=idle)
        if upkeep:
            self.upkeep()
            self.finish_upkeep()
        if chore:
            self.chore(idle=idle)
        return upkeep or chore

    def chore_due(self, *, idle: bool) -> bool:
        if self._db is None or self._broken:
            return False
        try:
            due = self._search.due(idle=idle) or (idle and self._durable and self._vacuum.due())
            return due and self._has_space()
        except apsw.Error as error:  # a disk that can't be read says so to the next batch
            logger.warning("looking for something to do failed: %s", error)
            return False

    def _has_space(self) -> bool:
        try:
            self._check_space()
        except StorageError:
            return False
        return True

    def chore(self, *, idle: bool) -> None:
        try:
            if self._search.due(idle=idle):
                self._search.slice(idle=idle)
            else:
                self._vacuum.slice()
        except Exception as error:
            # Nothing may be committed on top of a commit that may or may not be there: the next
            # batch finds the engine broken, and whoever drives it recovers.
            logger.warning("whether a slice of upkeep is stored can't be told: %s", error)
            self._broken = True
            self._roll_back()

    @property
    def durable(self) -> bool:
        return self._durable

    @property
    def epoch(self) -> int:
        return self._epoch

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            durable=self._durable,
            epoch=self._epoch,
            commit_seq=self._commit_seq,
            commits=self._commits,
            route_writes=self._route_writes,
            refusals=self._refusals,
            careful_batches=self._careful_batches,
            reopenings=self._reopenings,
            wal_pages=self._log.pages,
            log_bytes=self._log.size_bytes,
            log_alarm=self._log.alarm,
            free_pages=self._vacuum.free_pages,
            search_tail=self._search.tail,
            search_older=max(0, self._search.first_n - 1),
            search_damage=self._search.damage,
        )

    def _close_connection(self) -> None:
        upkeep_db = self._log.detach()
        db, self._db = self._db, None
        # The writer last: the last connection to close copies the log and removes it.
        for opened in (upkeep_db, db):
            if opened is None:
                continue
            try:
                opened.close()
            except apsw.Error as error:
                # It is closed all the same. Only its last checkpoint failed: the log stays, and
                # the next opening recovers from it.
                logger.warning("closing could not copy the log into the file: %s", error)

    def close(self) -> None:
        self._readers.close()
        try:
            self._close_connection()
        finally:
            # Last: while the connection is open nobody else may write.
            if self._place is not None:
                self._place.release()
