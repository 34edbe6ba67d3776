"""The Writer: the one actor that writes, and what others hold of it.

| a caller does         | what happens                             | durable when        |
| --------------------- | ---------------------------------------- | ------------------- |
| `await ref.room()`    | waits until the ledger has room          |                     |
| `ref.post(unit)`      | checked and put into the ledger          | its ticket resolves |
| `await ticket.wait()` | the receipt                              | then                |
| `await ref.read(fn)`  | `fn` on a snapshot, in a reader's thread |                     |

Keeps:
- Units are written in the order in which they were posted, each exactly once, whatever happens
  to the thread or the engine: the ledger holds them until their receipts are known, and a new
  driver begins with them.
- A receipt leaves after the commit that makes it true, and one wake-up of the loop carries a
  whole batch.
- Every ticket is answered before the Writer is gone, at the worst with `Unknown`.

Between `room()` returning and `post` there is no checkpoint, so whoever was given room can't
lose it.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

import trio
from msgspec import Struct

from ..storage.engine import EngineStatistics
from ..storage.errors import (
    OutcomeUnknownError,
    StaleEpochError,
    StorageUnavailableError,
    WriterFailedError,
)
from ..storage.pen import Pen
from ..storage.units import Unknown
from .drivers import Driver, InlineDriver, ThreadDriver
from .intake import Intake, Traffic, WriterSettings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from ..storage.engine import Engine, Reader
    from ..storage.identity import Clock
    from ..storage.units import Durable, Receipt, Refused, Unit
    from .mailbox import Answer
    from .tickets import Ticket

logger = logging.getLogger(__name__)
T = TypeVar("T")

_READS_MAX = 4  # threads for reads, apart from those of everybody else
_READS_TRIED_MAX = 5
_ABANDON_S = 1.0
_CLOSE_S = 5.0


class WriterStatistics(Struct, frozen=True, kw_only=True):
    """A look at the Writer."""

    traffic: Traffic
    restarts: int
    engine: EngineStatistics


@final
class WriterRef:
    """What callers hold; it outlives the thread and the engine's connections.

    Use it on the trio thread.
    """

    __slots__ = ("_intake", "_writer")

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._intake = writer.intake

    async def room(self) -> None:
        """Wait until something may be posted.

        Then build the unit and post it, with no checkpoint between.

        Raises `WriterClosedError` and `StorageUnavailableError`. Does not yield if there is room.
        """
        await self._intake.room()

    def has_room(self) -> bool:
        """Whether `room` would return at once, as far as the bounds are concerned."""
        return self._intake.has_room()

    async def wait_up(self) -> None:
        """Until storage is no longer down; at once if it is not."""
        await self._intake.wait_up()

    async def while_up(self, run: Callable[[], Awaitable[T]]) -> T:
        """What it returns; if storage is down meanwhile, it is cancelled and not waited for.

        Raises `StorageUnavailableError` then. For waits whose cancelling takes nothing back.
        """
        return await self._intake.while_up(run)

    def post(
        self,
        unit: Unit,
        on_receipt: Callable[[Receipt], None] | None = None,
        *,
        past_bounds: bool = False,
    ) -> Ticket:
        """Put a unit into the ledger and return its ticket. Never blocks.

        `on_receipt` is called with the receipt, before anybody who waits for it goes on; it must
        not raise. `past_bounds` is for what was accepted under a bound of its own.

        Raises before anything is posted: `InvalidContentError`, `InvalidUnitError`,
        `WriterFullError`, `WriterClosedError`, `StorageUnavailableError`.
        """
        return self._intake.post(unit, on_receipt, past_bounds=past_bounds)

    async def write(self, unit: Unit) -> Durable:
        """Post and wait.

        On disk on return; raises what `Ticket.durable` raises. Cancelling revokes nothing.
        """
        if not self._intake.has_room():
            await self._intake.room()
        return await self._intake.post(unit).durable()

    async def commit(self, unit: Unit) -> Durable | Refused:
        """Post and wait, however long storage is down; a refusal is for the caller to judge."""
        while True:
            try:
                await self._intake.room()
                break
            except StorageUnavailableError:
                await self._intake.wait_up()
        return await self.receipt_of(self._intake.post(unit))

    async def receipt_of(self, ticket: Ticket, *told: Answer[Any]) -> Durable | Refused:
        """The receipt, waiting out a storage that is down.

        Those who wait for the answers are told that it is; the answers themselves stay open.
        """
        while True:
            try:
                receipt = await ticket.wait()
            except StorageUnavailableError as error:
                for answer in told:
                    answer.wake(error)
                await self._intake.wait_up()
                continue
            if isinstance(receipt, Unknown):
                raise OutcomeUnknownError(f"not known whether it is stored: {receipt.reason}")
            return receipt

    async def read(self, view: Callable[[Reader], T]) -> T:
        """Call `view` with a reader of one snapshot, off the loop.

        It sees all that was acknowledged before.
        """
        return await self._writer.read(view)

    async def beside(self, work: Callable[[Engine], T]) -> T:
        """Something long that the engine does for any thread, in one of its own; one at a time.

        Cancelled it is waited for: it ends when it looks whether it should.
        """
        return await self._writer.beside(work)

    @property
    def durable(self) -> bool:
        """Whether a file is behind it."""
        return self._writer.engine.durable

    @property
    def epoch(self) -> int:
        """The number of this opening of the database."""
        return self._writer.engine.epoch

    def statistics(self) -> WriterStatistics:
        return self._writer.statistics()


@asynccontextmanager
async def open_writer(
    open_engine: Callable[[], Engine],
    clock: Clock,
    settings: WriterSettings | None = None,
    *,
    inline: bool = False,
    at: Callable[[str], object] | None = None,
) -> AsyncGenerator[WriterRef]:
    """Run a Writer for as long as the block lasts; the end drains it.

    `inline` runs it as a task on the loop, with named points (`taken`, `before commit`,
    `committed`, `acked`) at which `at` is called: for simulation. Otherwise it has a thread of
    its own. Errors of the block leave it as they are; if the Writer can't be kept alive,
    `WriterFailedError` is raised instead.
    """
    engine = open_engine() if inline else await trio.to_thread.run_sync(open_engine)
    writer = Writer(engine, clock, settings or WriterSettings(), inline=inline, at=at)
    body_error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run, nursery.cancel_scope)
            nursery.start_soon(writer.watch)
            try:
                yield WriterRef(writer)
            except BaseException as error:
                body_error = error
            await writer.drain()
            nursery.cancel_scope.cancel()
    finally:
        await writer.close()
    if writer.failure is not None:
        raise WriterFailedError(f"the writer failed: {writer.failure}") from writer.failure
    if body_error is not None:
        raise body_error


@final
class Writer:
    """Keeps a driver running on the pen, and brings it to an end."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        settings: WriterSettings,
        *,
        inline: bool,
        at: Callable[[str], object] | None,
    ) -> None:
        self.engine = engine
        self.intake = Intake(settings, clock)
        self.failure: BaseException | None = None
        self._pen = Pen(
            engine,
            self.intake.ledger,
            batch_rows_max=settings.batch_rows_max,
            batch_bytes_max=settings.batch_bytes_max,
        )
        self._settings = settings
        self._clock = clock
        self._inline = inline
        self._at = at
        self._driver: Driver | None = None
        self._stopping = self._left_behind = False
        self._ended = trio.Event()
        self._crashes: deque[float] = deque()
        self._restarts = 0
        self._unstaged = trio.lowlevel.ParkingLot()
        self._reads = trio.CapacityLimiter(_READS_MAX)
        self._long = trio.CapacityLimiter(1)

    def _new_driver(self) -> Driver:
        backoff = (self._settings.backoff_first_s, self._settings.backoff_max_s)
        driver: Driver
        if self._inline:
            driver = InlineDriver(
                self._pen, self._clock, backoff, self.intake, self._at, self._unstaged.unpark_all
            )
        else:
            driver = ThreadDriver(self._pen, self._clock, backoff, self.intake)
        if self._stopping:
            driver.stop()
        return driver

    async def run(self, cancel_scope: trio.CancelScope) -> None:
        """Drivers, one after the other, until one ends as it should or they crash too often."""
        # A driver ends when it is told to, never by a cancellation that would cut a batch in two.
        with trio.CancelScope(shield=True):
            try:
                await self._drive(cancel_scope)
            finally:
                self._ended.set()

    async def _drive(self, cancel_scope: trio.CancelScope) -> None:
        while True:
            self._driver = self._new_driver()
            error = await self._driver.run()
            if error is None:
                return
            logger.error("the writer crashed", exc_info=error)
            self.intake.on_trouble(error)
            # With a stale epoch somebody else owns the file: to reopen it would take it back.
            if isinstance(error, StaleEpochError) or self._gives_up():
                self.failure = error
                self._unstaged.unpark_all()
                self.intake.end("failed", f"the writer failed: {error}")
                cancel_scope.cancel()
                return
            self._restarts += 1
            self._pen.distrust()
            self._unstaged.unpark_all()
            await trio.sleep(self._settings.backoff_first_s)

    def _gives_up(self) -> bool:
        now = trio.current_time()
        self._crashes.append(now)
        while self._crashes[0] < now - self._settings.restart_period_s:
            self._crashes.popleft()
        return len(self._crashes) > self._settings.restarts_max

    async def watch(self) -> None:
        """Look for a writer that makes no progress, often enough to tell in time."""
        while True:
            await trio.sleep(min(1.0, self._settings.down_after_s / 4))
            self.intake.look_for_stall()

    async def drain(self) -> None:
        """Take nothing new, finish what is posted, end the driver.

        At the deadline, leave it behind.
        """
        self._stopping = True
        self.intake.close()
        if self._driver is not None:
            self._driver.stop()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._settings.drain_s):
            await self._ended.wait()
        if self._ended.is_set():
            return
        assert self._driver is not None
        self._driver.abandon()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _ABANDON_S):
            await self._ended.wait()
        if not self._ended.is_set():
            # A thread inside a sync can't be stopped. Should it commit after all, nobody was told
            # otherwise: its tickets are answered as unknown.
            self._left_behind = self._driver.leave_behind()
            logger.error("the writer hangs and is left behind after %s s", self._settings.drain_s)

    async def close(self) -> None:
        """Answer what is left, and close the engine unless a driver is still inside it."""
        state: Literal["closed", "failed"] = "closed" if self.failure is None else "failed"
        self.intake.end(state, "the runtime ended before the outcome was known")
        if self._left_behind:
            return
        if self._inline:
            self.engine.close()
        else:
            # Closing must not be skipped, wait for other people's threads, or hang with the disk.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_S) as scope:
                await trio.to_thread.run_sync(
                    self.engine.close, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
                )
            if scope.cancelled_caught:
                logger.error("closing the database hangs and is left behind after %s s", _CLOSE_S)

    async def read(self, view: Callable[[Reader], T]) -> T:
        for _ in range(_READS_TRIED_MAX - 1):
            try:
                return await self._read(view)
            except StorageUnavailableError as error:
                if self.intake.down:
                    raise
                # A reopening closes the readers for a moment; that is no reason to give up.
                logger.info("a read is tried again: %s", error)
                await self.intake.wait_recovered()
                await trio.sleep(self._settings.backoff_first_s)
        return await self._read(view)

    async def beside(self, work: Callable[[Engine], T]) -> T:
        # Also where everything else is inline: nothing simulated depends on it, and it takes long.
        return await trio.to_thread.run_sync(work, self.engine, limiter=self._long)

    async def _read(self, view: Callable[[Reader], T]) -> T:
        def look() -> T:
            with self.engine.reading() as reader:
                return view(reader)

        if self._inline:
            await trio.lowlevel.checkpoint()
            while self._pen.phase == "staged" and self.failure is None:
                # A database in memory can't be read beside an open transaction, and on one thread
                # nobody would end it while we wait for its lock.
                await self._unstaged.park()
            return look()
        # A read changes nothing, so a cancelled caller need not wait for it.
        return await trio.to_thread.run_sync(look, abandon_on_cancel=True, limiter=self._reads)

    def statistics(self) -> WriterStatistics:
        return WriterStatistics(
            traffic=self.intake.traffic(),
            restarts=self._restarts,
            engine=self.engine.statistics(),
        )
