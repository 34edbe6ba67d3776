"""The Writer's entrance: what is posted, what waits, and whether storage can be relied on just
now.

Keeps:
- The ledger is bounded, by count and bytes; all who wait for room look again after each batch.
- Tickets are answered in the order of their posting, and each exactly once.
- If something waits and nothing has moved for `down_after_s`, storage counts as down, whatever
  the cause: waits end with `StorageUnavailableError`, new units are refused, the tickets stay.
  The next batch ends that state.

Belongs to the trio thread; only the ledger is shared with the driver.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, final

import trio
from msgspec import Struct

from ..storage.edge import check_unit
from ..storage.errors import StorageUnavailableError, WriterClosedError, WriterFullError
from ..storage.pen import Ledger, Posted
from ..storage.units import Unknown
from .tickets import Ticket

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..storage.errors import OnepenError
    from ..storage.identity import Clock
    from ..storage.units import Receipt, Unit
    from .drivers import Progress

logger = logging.getLogger(__name__)

T = TypeVar("T")

WriterState: TypeAlias = Literal["open", "recovering", "down", "draining", "closed", "failed"]
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


class Traffic(Struct, frozen=True, kw_only=True):
    """What has gone through the entrance, and what stands in it."""

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
    receipts_failed: int
    """Receipts whose takers raised: each is a bug."""


@final
class Intake:
    """Tickets out, units into the ledger, receipts back."""

    def __init__(self, settings: WriterSettings, clock: Clock) -> None:
        self.ledger: Ledger[Ticket] = Ledger()
        self._settings = settings
        self._clock = clock
        self._waiting: deque[Ticket] = deque()
        self._bytes_waiting = 0
        self._room = trio.lowlevel.ParkingLot()
        self._up = trio.lowlevel.ParkingLot()
        self._patient: set[trio.CancelScope] = set()  # waits that storage's trouble ends
        self._arrived = trio.Event()
        self._state: WriterState = "open"
        self._reason: str | None = None
        self._since_ms: int | None = None
        self._progress_s = trio.current_time()
        self._batches = self._units = self._batch_units_max = self._recoveries = 0
        self._receipts_failed = 0
        self._commit_s: deque[float] = deque(maxlen=_SAMPLES_MAX)

    # In --------------------------------------------------------------------------------------

    async def room(self) -> None:
        while True:
            self._check_accepting()
            if self.has_room():
                return
            await self._room.park()

    def post(
        self,
        unit: Unit,
        on_receipt: Callable[[Receipt], None] | None = None,
        *,
        past_bounds: bool = False,
    ) -> Ticket:
        size_bytes = check_unit(unit)
        self._check_accepting()
        if not past_bounds and not self.has_room():
            raise WriterFullError(len(self._waiting), self._bytes_waiting)
        ticket = Ticket(trio.current_time(), self._trouble, on_receipt)
        self._waiting.append(ticket)
        self._bytes_waiting += size_bytes
        self.ledger.post(Posted(unit, size_bytes, ticket))
        self._arrived.set()
        return ticket

    async def wait_arrival(self) -> None:
        """For a driver on this loop: something was posted since the last time, or it is to stop."""
        await self._arrived.wait()
        self._arrived = trio.Event()

    def wake(self) -> None:
        """Let a driver that waits for an arrival look around."""
        self._arrived.set()

    async def wait_up(self) -> None:
        """Until storage is no longer down. Returns at once if it is not."""
        while self._state == "down":
            await self._up.park()

    async def while_up(self, run: Callable[[], Awaitable[T]]) -> T:
        """What it returns, unless storage is down before that."""
        if (error := self._trouble()) is not None:
            raise error
        with trio.CancelScope() as scope:
            self._patient.add(scope)
            try:
                return await run()
            finally:
                self._patient.discard(scope)
        raise StorageUnavailableError(self._reason or "no progress", self._since_ms)

    async def wait_recovered(self) -> None:
        """Until a recovery that is under way has come to something: storage is back, or down."""
        while self._state == "recovering":
            await self._up.park()

    def has_room(self) -> bool:
        """Whether a unit may be posted at once, as far as the bounds are concerned."""
        return (
            len(self._waiting) < self._settings.units_waiting_max
            and self._bytes_waiting < self._settings.bytes_waiting_max
        )

    @property
    def down(self) -> bool:
        """Whether there is no use in trying again just now."""
        return self._state not in ("open", "recovering", "draining")

    def _check_accepting(self) -> None:
        if self._state in ("draining", "closed", "failed"):
            raise WriterClosedError(f"the writer is {self._state}")
        if (error := self._trouble()) is not None:
            raise error

    def _trouble(self) -> OnepenError | None:
        if self._state == "down":
            return StorageUnavailableError(self._reason or "no progress", self._since_ms)
        return None

    # Back ------------------------------------------------------------------------------------

    def on_progress(self, progress: Progress[Ticket]) -> None:
        """A batch is durable: answer its tickets, in order."""
        self._progress_s = trio.current_time()
        self._batches += 1
        self._units += len(progress.resolved)
        self._batch_units_max = max(self._batch_units_max, len(progress.resolved))
        self._commit_s.append(progress.commit_s)
        if self._state in ("recovering", "down"):
            # Before the answers: whoever hears of a receipt may post again at once.
            logger.info("storage is back after: %s", self._reason)
            self._state, self._reason, self._since_ms = "open", None, None
            self._up.unpark_all()
        for posted, receipt in progress.resolved:
            self._answer(posted, receipt)
        if self._room:
            # All of them look again: one that was woken alone might have been cancelled since.
            self._room.unpark_all()

    def _answer(self, posted: Posted[Ticket], receipt: Receipt) -> None:
        if posted.ticket.receipt is not None:
            return  # a driver that was left behind has finished after all; `Unknown` was said
        self._waiting.popleft()
        self._bytes_waiting -= posted.size_bytes
        try:
            posted.ticket.resolve(receipt)
        except Exception:
            # A bug of whoever posted it. On the loop's own stack it would end the whole process,
            # and every other conversation with it.
            self._receipts_failed += 1
            logger.exception("a receipt could not be taken")

    def on_trouble(self, error: BaseException) -> None:
        """The driver is trying to recover."""
        if self._state == "open":
            self._state, self._since_ms = "recovering", self._clock.now()
            self._recoveries += 1
            logger.warning("storage is in trouble: %s", error)
        self._reason = str(error)

    def look_for_stall(self) -> None:
        """Go down if something waits and nothing has moved for too long."""
        if not self._waiting or self._state not in ("open", "recovering"):
            return
        idle_since_s = max(self._progress_s, self._waiting[0].posted_s)
        if trio.current_time() - idle_since_s < self._settings.down_after_s:
            return
        self._state = "down"
        self._reason = self._reason or "the writer makes no progress"
        self._since_ms = self._since_ms or self._clock.now()
        logger.error("storage is down: %s", self._reason)
        for ticket in self._waiting:
            ticket.interrupt_waits(StorageUnavailableError(self._reason, self._since_ms))
        for scope in self._patient:
            scope.cancel()
        self._room.unpark_all()
        self._up.unpark_all()

    def close(self) -> None:
        """Take nothing new; what is posted goes on."""
        self._state = "draining"
        self._up.unpark_all()
        self._room.unpark_all()

    def end(self, state: Literal["closed", "failed"], reason: str) -> None:
        """Answer everything that is left; after this nothing hangs."""
        self._state = state
        for posted in self.ledger.clear():
            self._answer(posted, Unknown(reason))
        self._room.unpark_all()
        self._up.unpark_all()

    def traffic(self) -> Traffic:
        samples = sorted(self._commit_s)
        oldest_s = self._waiting[0].posted_s if self._waiting else trio.current_time()
        return Traffic(
            state=self._state,
            reason=self._reason,
            units_waiting=len(self._waiting),
            bytes_waiting=self._bytes_waiting,
            oldest_age_s=trio.current_time() - oldest_s,
            batches=self._batches,
            units=self._units,
            batch_units_mean=self._units / self._batches if self._batches else 0.0,
            batch_units_max=self._batch_units_max,
            commit_p50_s=samples[len(samples) // 2] if samples else 0.0,
            commit_p99_s=samples[len(samples) * 99 // 100] if samples else 0.0,
            recoveries=self._recoveries,
            receipts_failed=self._receipts_failed,
        )
