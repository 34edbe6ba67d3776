"""The real engine, pen and ledger, driven by the labels of the model's steps.

A process of the model is an engine and a pen here. Both may have the file open at once, past the
lock that would keep the second one out: behind it the epoch is all there is, and that is what is to
be shown. The disk is the simulated one. A kill or a power loss is an image of it, on which the next
process starts; a sync that fails is a fault of it.

Keeps: a step is done by the calls that the drivers make, and by nothing that knows the model's
rules. `look` reads what is stored with SQL of its own.

Must never look while no engine has the file open: it would be the one who recovers.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest.mock import patch

from onepen.runtime.testing import Disk, Failure, Fault, Kind, Log, images
from onepen.storage import commands as c
from onepen.storage.engine import EngineSettings
from onepen.storage.errors import OnepenError, StaleEpochError, StorageError
from onepen.storage.identity import Incarnation, Seq, SessionId, SessionKey, TurnId, Uid
from onepen.storage.pen import Ledger, Pen, Posted
from onepen.storage.records import Draft
from onepen.storage.sqlite import place
from onepen.storage.sqlite.connection import open_reader
from onepen.storage.sqlite.engine import SqliteEngine, open_sqlite
from onepen.storage.units import Durable, Guard, Refused, Unit

from . import state as model
from .rules import UNBINDABLE
from .state import Content, message_of

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    import apsw

    from onepen.runtime.testing import Image, Operation

DATABASE = "onepen.db"
SETTINGS = EngineSettings(free_bytes_min=0, busy_timeout_s=0.1)
EPOCH_OF_START = 1  # the one that made the file; the model counts from 0
_SOURCE = "chat"
_START_MS = 1_700_000_000_000
Files: TypeAlias = dict[str, bytes]


class StillClock:
    def now(self) -> int:
        return _START_MS

    def monotonic(self) -> float:
        return 0.0


# From the model's names to real ones, and back ---------------------------------------------------


def incarnation_of(pair: model.Incarnation) -> Incarnation:
    return Incarnation((pair[0] + EPOCH_OF_START << 32) + pair[1])


def pair_of(incarnation: int) -> model.Incarnation:
    return ((incarnation >> 32) - EPOCH_OF_START, incarnation & 0xFFFFFFFF)


def draft_of(uid: str, role: Any = "user") -> Draft:
    text = "\ud800" if message_of(uid) == UNBINDABLE else f"the words of {uid}"
    real = Uid(f"{uid.encode().hex():0<32}")
    return Draft(uid=real, role=role, text=text, created_ms=_START_MS)


def unit_of(unit: model.Unit) -> Unit:
    """The unit that an actor would post."""
    key, incarnation = SessionKey(unit.key), incarnation_of(unit.incarnation)
    if unit.kind == "open":
        return Unit((c.OpenIncarnation(key=key, incarnation=incarnation),))
    if unit.kind == "switch":
        return Unit(_switch(unit), (Guard(key=key, incarnation=incarnation),))
    guard = Guard(
        key=key,
        incarnation=incarnation,
        session_id=SessionId(unit.session),
        base_seq=Seq(unit.base),
        behind=draft_of(unit.behind).uid if unit.behind else None,
    )
    if unit.kind == "append":
        return Unit(_append(unit), (guard,))
    rotate = c.Rotate(
        key=key,
        parent_id=SessionId(unit.session),
        parent_base_seq=Seq(unit.base),
        child_id=SessionId(unit.new),
        summary=(draft_of(unit.carried[0], "system"),),
        carried=tuple(Seq(seq) for seq in range(1, unit.base)),
        replaces=unit.version,
        at_ms=_START_MS,
        force=True,
    )
    return Unit((rotate,), (guard,))


def _append(unit: model.Unit) -> tuple[c.AnyCommand, ...]:
    key, turn_id = SessionKey(unit.key), TurnId(unit.new)
    session_id = SessionId(unit.session)
    commands: list[c.AnyCommand] = [
        c.OpenTurn(turn_id=turn_id, key=key, at_ms=_START_MS),
        c.AcceptInbound(
            source=_SOURCE,
            inbound_id=unit.message,
            key=key,
            turn_id=turn_id,
            disposition="started",
            digest=unit.message,
            at_ms=_START_MS,
        ),
    ]
    if not unit.base:
        commands.append(c.CreateSession(session_id=session_id, key=key, at_ms=_START_MS))
    append = c.AppendMessages(
        session_id=session_id,
        base_seq=Seq(unit.base),
        messages=(draft_of(unit.new),),
        turn_id=turn_id,
    )
    return (*commands, append)


def _switch(unit: model.Unit) -> tuple[c.AnyCommand, ...]:
    loser = SessionKey(unit.loser)
    return (
        c.SetRoute(
            key=loser,
            session_id=SessionId(unit.loser_session),
            replaces=unit.loser_version,
            at_ms=_START_MS,
        ),
        c.OpenIncarnation(key=loser, incarnation=incarnation_of(unit.loser_incarnation)),
        c.SetRoute(
            key=SessionKey(unit.key),
            session_id=SessionId(unit.new),
            replaces=unit.version,
            at_ms=_START_MS,
            take_over=True,
        ),
    )


def receipt_of(receipt: Durable | Refused) -> str:
    if isinstance(receipt, Refused):
        return receipt.reason
    return "again" if receipt.again else "durable"


def comparable(content: Content) -> Content:
    """What can be read of it: the order of sessions is no content."""
    keys = tuple(sorted(content.keys))
    return content._replace(keys=keys, sessions=tuple(sorted(content.sessions)), switched=())


def content_of(db: apsw.Connection) -> Content:
    """What is stored, in the model's words."""

    def rows(sql: str) -> list[Any]:
        return db.execute(sql).fetchall()

    sessions: list[model.Session] = []
    for n, name, key, parent, ended in rows(
        "SELECT s.n, s.id, s.key, p.id, s.end_kind FROM sessions s "
        "LEFT JOIN sessions p ON p.n = s.parent"
    ):
        stored = rows(
            f"SELECT uid, carried, kind & 1 FROM messages WHERE session = {n} ORDER BY seq"
        )
        uids = tuple(uid.rstrip(b"\0").decode() for uid, _, _ in stored)
        carried = sum(bool(copied or summary) for _, copied, summary in stored)
        sessions.append(model.Session(name, key, uids, carried, parent or "", ended == "rotation"))
    keys = [
        model.Key(key, session, pair_of(incarnation), version)
        for key, session, incarnation, version in rows(
            "SELECT key, session_id, incarnation, route_version FROM routes"
        )
    ]
    inbox = rows("SELECT i.inbound_id, t.id FROM inbox i JOIN turns t ON t.n = i.turn ORDER BY 1")
    ((epoch,),) = rows("SELECT epoch FROM pen")
    return comparable(Content(epoch - EPOCH_OF_START, tuple(keys), tuple(sessions), tuple(inbox)))


# The disk, and what goes wrong with it -----------------------------------------------------------


class Saboteur:
    """Fails the sync that a commit ends with, and no other sync before it."""

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.disk: Disk
        self.log: Log
        """The recording, up to the sync that failed."""
        self._written = 0

    def arm(self, failure: Failure) -> None:
        self.failure, self._written = failure, 0

    def watch(self, operation: Operation) -> None:
        if self.failure is None or not operation.file.endswith("-wal"):
            return
        self._written += operation.kind is Kind.WRITE
        # The head of the log is one write, and has a sync of its own.
        if operation.kind is Kind.SYNC and self._written > 1:
            self.log = self.disk.log
            self.disk.inject(Fault(operation.number, self.failure))
            self.failure = None


class CommitLostError(Exception):
    """The commit is done, and whoever asked for it is not told so."""


class Rig:
    """Two processes on one file."""

    def __init__(self, root: Path, files: Files, *, batch_max: int) -> None:
        self._root = root
        self._batch_max = batch_max
        self._generation = 0
        self._saboteur = Saboteur()
        self._pens: dict[int, Pen[model.Unit]] = {}
        self._disk: Disk
        directory = root / "0"
        directory.mkdir()
        for name, content in files.items():
            (directory / name).write_bytes(content)
        self._use(directory, None)

    def _use(self, directory: Path, log: Log | None) -> None:
        self._disk = Disk(
            directory, on_operation=self._saboteur.watch, skip={f"{DATABASE}.lock"}, continues=log
        )
        self._saboteur.disk = self._disk

    @property
    def path(self) -> Path:
        return self._disk.directory / DATABASE

    def look(self) -> Content | None:
        """What can be read, if somebody has the file open."""
        if not any(pen.phase != "broken" for pen in self._pens.values()):
            return None
        db = open_reader(str(self.path), SETTINGS, vfs=self._disk.name)
        try:
            return content_of(db)
        finally:
            db.close()

    def phase(self, at: int) -> str:
        return self._pens[at].phase if at in self._pens else "down"

    def waiting(self, at: int) -> int:
        """Units of the batch that is taken."""
        return len(self._pens[at].ledger.taken)

    def post(self, at: int, unit: model.Unit) -> None:
        self._pens[at].ledger.post(Posted(unit_of(unit), 1, unit))

    # Steps -----------------------------------------------------------------------------------

    def open(self, at: int, *, fails: bool = False) -> None:
        if fails:
            self._saboteur.arm(Failure.EIO)
        try:
            engine = open_sqlite(self.path, StillClock(), SETTINGS, vfs=self._disk.name)
        except OnepenError:
            if not fails:
                raise
            if not self._pens:
                self._die(self._saboteur.log)  # before it could tidy up
            return
        assert not fails, "the opening should have failed"
        ledger: Ledger[model.Unit] = Ledger()
        self._pens[at] = Pen(engine, ledger, batch_rows_max=1_000, batch_bytes_max=self._batch_max)

    def apply(self, at: int) -> tuple[str, ...] | None:
        """The receipts as they will be; none if somebody else owns the file."""
        pen = self._pens[at]
        assert pen.take(0)
        try:
            pen.stage()
        except StaleEpochError:
            self._drop(at)
            return None
        receipts: list[Durable | Refused] = pen._receipts  # pyright: ignore[reportPrivateUsage]
        return tuple(map(receipt_of, receipts))

    def commit(self, at: int) -> None:
        self._pens[at].commit()

    def fail_commit(self, at: int, how: Failure | None) -> None:
        """The sync fails; or, without a failure, the commit is done and its answer is lost."""
        pen = self._pens[at]
        if how is None:
            self._lose_answer(pen)
        else:
            self._saboteur.arm(how)
        try:
            pen.commit()
        except StorageError:
            return
        raise AssertionError("the commit should have failed")

    @staticmethod
    def _lose_answer(pen: Pen[model.Unit]) -> None:
        def lose(db: apsw.Connection, name: str, pages: int) -> int:
            raise CommitLostError

        engine = pen.engine
        assert isinstance(engine, SqliteEngine)
        db = engine._db  # pyright: ignore[reportPrivateUsage]
        assert db is not None
        db.set_wal_hook(lose)  # called behind the commit; the engine sets its own when it reopens

    def reopen(self, at: int, *, fails: bool = False) -> None:
        if fails:
            self._saboteur.arm(Failure.EIO)
        try:
            self._pens[at].recover()
        except StorageError:
            if not fails:
                raise
            return
        assert not fails, "the reopening should have failed"

    def acknowledge(self, at: int) -> tuple[tuple[model.Unit, str], ...]:
        resolved = self._pens[at].resolve()
        return tuple((posted.ticket, receipt_of(receipt)) for posted, receipt in resolved)

    # Endings ---------------------------------------------------------------------------------

    def _drop(self, at: int) -> None:
        pen = self._pens.pop(at)
        self._saboteur.failure = None
        pen.engine.close()

    def kill(self, at: int, *, written: bool) -> None:
        """What it has written stays, synced or not."""
        if written:
            self.fail_commit(at, Failure.EIO)
        if len(self._pens) > 1:
            self._drop(at)  # not the last to close, so the log stays as it is
            return
        self._die(self._disk.log)

    def lose_power(self, *, survives: bool, at: int | None = None) -> bool:
        """Everything ends, and what was not synced is there wholly or not at all.

        False if it should survive and there is nothing: SQLite removes a log that it closes.
        """
        if at is not None:
            self.fail_commit(at, Failure.EIO)
        lost, *kept = images(self._disk.log, torn=0, start=len(self._disk.log.entries))
        if survives and not kept:
            return False
        self._go_on_with(kept[0] if survives else lost, None)
        return True

    def _die(self, log: Log) -> None:
        """The last process that has the file open ends where this log does."""
        *_, everything = images(log, torn=0, start=len(log.entries))
        self._go_on_with(everything, log)

    def _go_on_with(self, image: Image, log: Log | None) -> None:
        for at in list(self._pens):
            self._drop(at)
        self._disk.close()
        self._generation += 1
        self._use(image.write_to(self._root / str(self._generation)), log)

    def close(self) -> None:
        """Everything, in order; twice is once."""
        for at in list(self._pens):
            self._drop(at)
        self._disk.close()


def prepared_files(root: Path, start: Content) -> Files:
    """A file with the content that the model starts from."""
    directory = root / "prepared"
    directory.mkdir()
    engine = open_sqlite(directory / DATABASE, StillClock(), SETTINGS)
    for key in start.keys:
        session = start.session(key.session)
        assert session is not None
        name, session_id = SessionKey(key.name), SessionId(session.id)
        incarnation = incarnation_of(key.incarnation)
        units = (
            Unit((c.OpenIncarnation(key=name, incarnation=incarnation),)),
            Unit(
                (
                    c.SetRoute(key=name, session_id=session_id, replaces=0, at_ms=_START_MS),
                    c.CreateSession(session_id=session_id, key=name, at_ms=_START_MS),
                    c.AppendMessages(
                        session_id=session_id,
                        base_seq=Seq(0),
                        messages=tuple(map(draft_of, session.rows)),
                    ),
                ),
                (Guard(key=name, incarnation=incarnation, session_id=session_id),),
            ),
        )
        receipts = engine.stage(units)
        assert all(isinstance(receipt, Durable) for receipt in receipts), receipts
        engine.commit()
    engine.close()
    return {DATABASE: (directory / DATABASE).read_bytes()}


@contextmanager
def past_the_lock() -> Generator[None]:
    """Whoever asks for the lock gets one: the fence behind it is to be seen."""

    def unlocked(path: Path, clock: object) -> int:
        return os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)

    with patch.object(place, "_take_lock", unlocked):
        yield
