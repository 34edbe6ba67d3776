"""The Writer: the one actor that writes, and what others hold of it.

| a caller does        | what happens                               | durable when                       |
|----------------------|--------------------------------------------|------------------------------------|
| `await ref.room()`   | waits until the ledger has room            |                                    |
| `ref.post(unit)`     | checked, put into the ledger, ticket back  | its ticket resolves to `Durable`   |
| `await ticket.wait()`| the receipt                                | then                               |
| `await ref.read(fn)` | `fn` on a snapshot, in a reader's thread   |                                    |

Keeps:
- Units are written in the order in which they were posted, each exactly once, whatever happens to the thread
  or the engine: the ledger holds them until their receipts are known.
- A receipt leaves after the commit that makes it true, and one wake-up of the loop carries a whole batch.
- The ledger is bounded, by count and bytes. When storage makes no progress, waits end with
  `StorageUnavailableError`, new units are refused, and the Writer alone goes on trying.
- Every ticket is answered before the Writer is gone, at the worst with `Unknown`.

Between `room()` returning and `post` there is no checkpoint, so whoever was given room can't lose it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal, TypeVar, final

import trio
from msgspec import Struct

from ..storage.edge import check_unit
from ..storage.errors import (
    OnepenError,
    StorageUnavailableError,
    WriterClosedError,
    WriterFailedError,
    WriterFullError,
)
from ..storage.pen import Ledger, Pen, Posted
from ..storage.units import Durable, Receipt, Refused, Unknown
from .drivers import Driver, InlineDriver, Progress, ThreadDriver
from .tickets import Ticket

if TYPE_CHECKING:
    from ..storage.engine import Engine, EngineStatistics, Reader
    from ..storage.identity import Clock
    from ..storage.units import Unit

logger = logging.getLogger(__name__)
T = TypeVar("T")

WriterState = Literal["open", "recovering", "down", "draining", "closed", "failed"]
_SAMPLES_MAX = 1024  # commit latencies kept for the percentiles


class WriterSettings(Struct, frozen=True, kw_only=True):
    """Bounds and patience of the Writer."""

    units_waiting_max: int = 4_096
    bytes_waiting_max: int = 64 * 1024 * 1024
    batch_rows_max: int = 1_000
    batch_bytes_max: int = 8 * 1024 * 1024
    down_after_s: float = 5.0
    """Without progress for this long, storage counts as down."""
    drain_s: float = 30.0
    """How long the end waits for what is posted."""
    backoff_first_s: float = 0.05
    backoff_max_s: float = 5.0
    restarts_max: int = 5
    """Crashes of the driver, within the period, before the Writer gives up."""
    restart_period_s: float = 60.0


class WriterStatistics(Struct, frozen=True, kw_only=True):
    """A look at the Writer."""

    state: WriterState
    reason: str | None
    units_waiting: int
    bytes_waiting: int
    oldest_age_s: float
    batches: int
    units: int
    batch_units_mean: float
    batch_units_max: int
    commit_p50_s: float
    commit_p99_s: float
    recoveries: int
    restarts: int
    engine: EngineStatistics


@final
class WriterRef:
    """What callers hold. It outlives the thread and the engine's connections; use it on the trio thread."""

    def __init__(self, engine: Engine, settings: WriterSettings, clock: Clock) -> None:
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._ledger: Ledger[Ticket] = Ledger()
        self._waiting: deque[Ticket] = deque()
        self._bytes_waiting = 0
        self._room = trio.lowlevel.ParkingLot()
        self._arrived = trio.Event()
        self._state: WriterState = "open"
        self._reason: str | None = None
        self._since_ms: int | None = None
        self._progress_s = trio.current_time()
        self._reads = trio.CapacityLimiter(4)
        self._read_inline = False
        self._batches = self._units = self._batch_units_max = 0
        self._recoveries = self._restarts = 0
        self._commit_s: deque[float] = deque(maxlen=_SAMPLES_MAX)

    # For callers --------------------------------------------------------------------------------

    async def room(self) -> None:
        """Wait until something may be posted. Then build the unit and post it, without a checkpoint between."""
        while True:
            self._check_accepting()
            if self._has_room():
                return
            await self._room.park()

    def post(self, unit: Unit) -> Ticket:
        """Put a unit into the ledger. Never blocks; raises `WriterFullError` if there is no room."""
        size_bytes = check_unit(unit)
        self._check_accepting()
        if not self._has_room():
            raise WriterFullError(len(self._waiting), self._bytes_waiting)
        ticket = Ticket(trio.current_time(), self._trouble)
        self._waiting.append(ticket)
        self._bytes_waiting += size_bytes
        self._ledger.post(Posted(unit, size_bytes, ticket))
        if self._read_inline:
            self._arrived.set()
        return ticket

    async def write(self, unit: Unit) -> Durable:
        """Post and wait: returns when the unit is on disk, raises what `Ticket.durable` raises."""
        await self.room()
        return await self.post(unit).durable()

    async def read(self, view: Callable[[Reader], T]) -> T:
        """Call `view` with a reader of one snapshot, off the loop. It sees every unit acknowledged before."""

        def look() -> T:
            with self._engine.reading() as reader:
                return view(reader)

        if self._read_inline:
            await trio.lowlevel.checkpoint()
            return look()
        # A read changes nothing, so a cancelled caller need not wait for it.
        return await trio.to_thread.run_sync(look, abandon_on_cancel=True, limiter=self._reads)

    @property
    def durable(self) -> bool:
        """Whether a file is behind it."""
        return self._engine.durable

    @property
    def epoch(self) -> int:
        return self._engine.epoch

    def statistics(self) -> WriterStatistics:
        samples = sorted(self._commit_s)
        now = trio.current_time()
        return WriterStatistics(
            state=self._state,
            reason=self._reason,
            units_waiting=len(self._waiting),
            bytes_waiting=self._bytes_waiting,
            oldest_age_s=now - self._waiting[0].posted_s if self._waiting else 0.0,
            batches=self._batches,
            units=self._units,
            batch_units_mean=self._units / self._batches if self._batches else 0.0,
            batch_units_max=self._batch_units_max,
            commit_p50_s=samples[len(samples) // 2] if samples else 0.0,
            commit_p99_s=samples[len(samples) * 99 // 100] if samples else 0.0,
            recoveries=self._recoveries,
            restarts=self._restarts,
            engine=self._engine.statistics(),
        )

    def _has_room(self) -> bool:
        return (
            len(self._waiting) < self._settings.units_waiting_max
            and self._bytes_waiting < self._settings.bytes_waiting_max
        )

    def _check_accepting(self) -> None:
        if self._state in ("draining", "closed", "failed"):
            raise WriterClosedError(f"the writer is {self._state}")
        if (error := self._trouble()) is not None:
            raise error

    def _trouble(self) -> OnepenError | None:
        if self._state == "down":
            return StorageUnavailableError(self._reason or "no progress", self._since_ms)
        return None

    # For the driver, on the trio thread -----------------------------------------------------------

    def _on_progress(self, progress: Progress[Ticket]) -> None:
        """A batch is durable: answer its tickets, in order."""
        self._progress_s = trio.current_time()
        self._batches += 1
        self._units += len(progress.resolved)
        self._batch_units_max = max(self._batch_units_max, len(progress.resolved))
        self._commit_s.append(progress.commit_s)
        for posted, receipt in progress.resolved:
            self._answer(posted, receipt)
        if self._state in ("recovering", "down"):
            logger.info("storage is back after %s", self._reason)
            self._state, self._reason, self._since_ms = "open", None, None
        if self._room:
            # All of them look again: one that was woken may have been cancelled since.
            self._room.unpark_all()

    def _answer(self, posted: Posted[Ticket], receipt: Durable | Refused | Unknown) -> None:
        if self._waiting and self._waiting[0] is posted.ticket:
            self._waiting.popleft()
        else:  # only when an end is answered out of turn
            self._waiting.remove(posted.ticket)
        self._bytes_waiting -= posted.size_bytes
        posted.ticket.resolve(receipt)

    def _on_trouble(self, error: BaseException) -> None:
        """The driver is trying to recover."""
        if self._state == "open":
            self._state, self._since_ms = "recovering", self._clock.now()
            self._recoveries += 1
            logger.warning("storage is in trouble: %s", error)
        self._reason = str(error)

    def _look_for_stall(self) -> None:
        """Go down if something waits and nothing has moved for too long, whatever the cause."""
        if not self._waiting:
            return
        idle_since = max(self._progress_s, self._waiting[0].posted_s)
        if trio.current_time() - idle_since < self._settings.down_after_s:
            return
        if self._state in ("open", "recovering"):
            self._state = "down"
            self._reason = self._reason or "the writer makes no progress"
            self._since_ms = self._since_ms or self._clock.now()
            logger.error("storage is down: %s", self._reason)
            error = StorageUnavailableError(self._reason, self._since_ms)
            for ticket in self._waiting:
                ticket.interrupt_waits(error)
            self._room.unpark_all()

    def _end(self, state: Literal["closed", "failed"], reason: str) -> None:
        """Answer everything that is left; after this nothing hangs."""
        self._state, self._reason = state, reason
        for posted in self._ledger.clear():
            if posted.ticket.receipt is None:
                self._answer(posted, Unknown(reason))
        self._room.unpark_all()


@asynccontextmanager
async def open_writer(
    open_engine: Callable[[], Engine],
    clock: Clock,
    settings: WriterSettings | None = None,
    *,
    inline: bool = False,
    at: Callable[[str], object] | None = None,
) -> AsyncIterator[WriterRef]:
    """Run a Writer for as long as the block lasts; the end drains it.

    `inline` runs it as a task on the loop, with named checkpoints (`taken`, `before commit`, `committed`,
    `acked`) at which `at` is called: for simulation. Otherwise it has a thread of its own. Errors of the block
    leave it as they are; if the Writer can't be kept alive, `WriterFailedError` is raised.
    """
    settings = settings or WriterSettings()
    engine = open_engine() if inline else await trio.to_thread.run_sync(open_engine)
    ref = WriterRef(engine, settings, clock)
    # Private names, one module: the reference and its supervisor are two halves of the Writer.
    pen = Pen(
        engine,
        ref._ledger,
        batch_rows_max=settings.batch_rows_max,
        batch_bytes_max=settings.batch_bytes_max,
    )
    supervisor = _Supervisor(ref, pen, settings, clock, inline=inline, at=at)
    body_error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            nursery.start_soon(supervisor.watch)
            try:
                yield ref
            except BaseException as error:  # noqa: BLE001 - raised again below, outside the nursery
                body_error = error
            await supervisor.drain()
            nursery.cancel_scope.cancel()
    finally:
        ref._end(supervisor.end_state, supervisor.end_reason)
        if supervisor.ended.is_set():
            if inline:
                engine.close()
            else:
                with trio.CancelScope(shield=True):  # closing takes a moment and must not be skipped
                    await trio.to_thread.run_sync(engine.close)
    if supervisor.failure is not None:
        raise WriterFailedError(f"the writer failed: {supervisor.failure}") from supervisor.failure
    if body_error is not None:
        raise body_error


class _Supervisor:
    """Keeps a driver running on the pen, and brings it to an end."""

    def __init__(
        self,
        ref: WriterRef,
        pen: Pen[Ticket],
        settings: WriterSettings,
        clock: Clock,
        *,
        inline: bool,
        at: Callable[[str], object] | None,
    ) -> None:
        self._ref = ref
        self._pen = pen
        self._settings = settings
        self._clock = clock
        self._inline = inline
        self._at = at
        self._driver: Driver | None = None
        self._crashes: deque[float] = deque()
        self._draining = False
        self.ended = trio.Event()
        self.failure: BaseException | None = None
        self.end_state: Literal["closed", "failed"] = "closed"
        self.end_reason = "the runtime ended"
        ref._read_inline = inline

    def _new_driver(self) -> Driver:
        backoff = (self._settings.backoff_first_s, self._settings.backoff_max_s)
        if self._inline:
            return InlineDriver(
                self._pen,
                self._clock,
                backoff,
                self._ref._on_progress,
                self._ref._on_trouble,
                self._next_arrival,
                self._at,
            )
        return ThreadDriver(
            self._pen, self._clock, backoff, self._ref._on_progress, self._ref._on_trouble
        )

    async def _next_arrival(self) -> None:
        if self._ref._arrived.is_set():
            self._ref._arrived = trio.Event()
            await trio.lowlevel.checkpoint()
        else:
            await self._ref._arrived.wait()

    async def run(self) -> None:
        """Drivers, one after the other, until one ends as it should or they crash too often."""
        # The driver ends when it is told to, never by a cancellation that would cut a batch in two.
        with trio.CancelScope(shield=True):
            while True:
                self._driver = self._new_driver()
                if self._draining:
                    self._driver.stop()
                error = await self._driver.run()
                if error is None:
                    self.ended.set()
                    return
                logger.error("the writer crashed", exc_info=error)
                self._ref._on_trouble(error)
                if self._gives_up():
                    break
                self._ref._restarts += 1
                self._pen.distrust()
                await trio.sleep(self._settings.backoff_first_s)
        self.failure, self.end_state, self.end_reason = error, "failed", f"the writer failed: {error}"
        self._ref._end("failed", self.end_reason)
        self.ended.set()
        raise WriterFailedError("the writer failed") from error

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
            self._ref._look_for_stall()

    async def drain(self) -> None:
        """Take nothing new, finish what is posted, and end the driver; at the deadline, leave it behind."""
        if self.failure is not None:
            return
        if self._ref._state == "open":
            self._ref._state = "draining"
        self._draining = True
        self._ref._room.unpark_all()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._settings.drain_s):
            if self._driver is not None:
                self._driver.stop()
            await self.ended.wait()
        if not self.ended.is_set():
            # A thread inside a sync can't be stopped. It is fenced off: its epoch ends with the next opening.
            logger.error("the writer did not end within %s s and is left behind", self._settings.drain_s)
            self.end_reason = self._ref._reason or "the drain's deadline passed"
            assert self._driver is not None
            self._driver.abandon()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await self.ended.wait()
