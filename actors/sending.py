"""One attempt to send one delivery, and what is stored of it.

    pending ──▶ sending ──▶ sent
       ▲           ├──────▶ failed    given up, or refused by the platform for good
       └───────────┴──────▶ unknown   perhaps it has arrived: sent again or held, as its source says

Keeps:
- `sending` is durable before anything is sent, so that after a crash it is known what may have
  arrived; whatever `deliver` does, what is stored of it is one of the states above.
- The unit of failure is one delivery: nothing that `deliver` raises or returns gets any further.
- What was cut off is unknown, whatever error `deliver` has made of its cancellation.

Must never call a delivery sent that nobody has acknowledged.
"""

from __future__ import annotations

import logging
import math
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, final

import trio
from msgspec.structs import replace

from ..storage.commands import MarkDelivery
from ..storage.edge import NAME_BYTES_MAX, shown
from ..storage.errors import InvalidContentError, OnepenError, StorageError
from ..storage.units import Durable, Unit
from .owned import own_delivery
from .policy import Backoff
from .raised import being_cancelled, ours_of, said_by, sole_cause
from .replies import storable

if TYPE_CHECKING:
    from ..storage.identity import Clock
    from ..storage.records import Delivery, DeliveryState
    from .limits import DeliverySettings
    from .sources import Deliver, OnUnknown
    from .writer import WriterRef

logger = logging.getLogger(__name__)

WAIT_S_MAX = 86_400.0
CUT_OFF = "it is not known whether it has arrived: the process ended while it was being sent"
TOO_SLOW = "it is not known whether it has arrived: the platform did not answer in time"


class UndeliverableError(OnepenError):
    """For `deliver`: the platform will never take this, and there is no use in trying again."""

    hint = "the delivery is listed as failed, and can be tried again by hand"


class DeliverLaterError(OnepenError):
    """For `deliver`: the platform has sent us away for a while. It counts as an attempt."""

    hint = "it is tried again after that"

    def __init__(self, retry_after_s: float, message: str = "the platform says: later") -> None:
        super().__init__(message)
        self.retry_after_s = check_wait(retry_after_s)


def check_wait(retry_after_s: object) -> float:
    """Raise unless it is a time that one can wait; as platforms write it in a header, too."""
    try:
        seconds = float(retry_after_s)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        problem = f"{shown(retry_after_s)} is no time to wait"
        raise InvalidContentError("retry_after_s", problem, hint="give seconds, 0 or more")
    return min(seconds, WAIT_S_MAX)


@final
class Sender:
    """Makes attempts and stores what they come to. One for a runtime."""

    def __init__(self, writer: WriterRef, clock: Clock, settings: DeliverySettings) -> None:
        self._writer = writer
        self._clock = clock
        self._settings = settings
        self.sent = self.failed = self.unknown = self.retried = 0

    # An attempt ----------------------------------------------------------------------------------

    async def attempt(
        self, deliver: Deliver, on_unknown: OnUnknown, delivery: Delivery
    ) -> Delivery | None:
        """Send it; the delivery as it is to be tried again, or `None` if that is settled."""
        sending = await self.begin(delivery)
        if sending is None:
            return None
        platform_id: str | None = None
        scope = trio.move_on_after(self._settings.deadline_s)
        try:
            with scope:
                # It may take the target apart: this one is its own.
                returned: Any = deliver(own_delivery(sending))
                returned = await returned if isawaitable(returned) else returned
                if returned is not None:
                    platform_id = storable(str(returned), NAME_BYTES_MAX)
        except BaseException as error:
            if (ours := ours_of(error)) is not None:
                # Whoever ends us wants an end: what became of it is posted and not waited for.
                self._post(self._unknown(on_unknown, sending, CUT_OFF))
                raise ours  # noqa: B904 - it is a part of the same error
            if being_cancelled():  # it has made an error of that
                self._post(self._unknown(on_unknown, sending, CUT_OFF))
                await trio.lowlevel.checkpoint_if_cancelled()
                return None
            if not scope.cancel_called:
                return await self._failed(on_unknown, sending, sole_cause(error))
            # An error of somebody who was told to stop says nothing of what has arrived.
            return await self.settle_unknown(on_unknown, sending, TOO_SLOW)
        if scope.cancelled_caught:
            return await self.settle_unknown(on_unknown, sending, TOO_SLOW)
        return await self._mark(sending, "sent", platform_id=platform_id)

    async def begin(self, delivery: Delivery) -> Delivery | None:
        """Mark it as being sent; `None` if somebody has decided about it meanwhile."""
        return await self._mark(delivery, "sending", attempt=delivery.attempt + 1)

    async def _failed(
        self, on_unknown: OnUnknown, sending: Delivery, error: BaseException
    ) -> Delivery | None:
        why = storable(said_by(error))
        if isinstance(error, TimeoutError | trio.TooSlowError):
            return await self.settle_unknown(on_unknown, sending, why)
        if isinstance(error, UndeliverableError) or self.exhausted(sending):
            logger.error("a delivery to %s is given up: %s", sending.source, why)
            return await self._mark(sending, "failed", error=why)
        later_s = error.retry_after_s if isinstance(error, DeliverLaterError) else None
        return await self._mark(
            sending, "pending", error=why, next_ms=self.next_ms(sending, later_s)
        )

    def exhausted(self, sending: Delivery) -> bool:
        """Whether this was the last attempt."""
        return sending.attempt >= self._settings.tries_max

    def next_ms(self, sending: Delivery, later_s: float | None = None) -> int:
        """When it may be tried again."""
        settings = self._settings
        backoff = Backoff(first_s=settings.backoff_s, max_s=settings.backoff_max_s)
        wait_s = backoff.wait_s(sending.attempt) if later_s is None else later_s
        return self._clock.now() + int(min(wait_s, WAIT_S_MAX) * 1000)

    def now(self) -> int:
        return self._clock.now()

    def wait_s(self, delivery: Delivery) -> float:
        """How long until then. A clock that was set back does not make it longer: it is over."""
        now = self._clock.now()
        if delivery.next_ms is None or (delivery.marked_ms or 0) > now:
            return 0.0
        return min(max((delivery.next_ms - now) / 1000, 0.0), WAIT_S_MAX)

    # Not knowing ---------------------------------------------------------------------------------

    async def settle_unknown(
        self, on_unknown: OnUnknown, delivery: Delivery, why: str
    ) -> Delivery | None:
        """Nobody knows whether it has arrived: its source says what follows from that."""
        return await self.store(delivery, self._unknown(on_unknown, delivery, why))

    def _unknown(self, on_unknown: OnUnknown, delivery: Delivery, why: str) -> MarkDelivery:
        again = on_unknown == "resend" and not self.exhausted(delivery)
        # Cut off, it was no fault of the platform's: there is no need for a pause.
        next_ms = self.next_ms(delivery) if again and why != CUT_OFF else None
        state: DeliveryState = "pending" if again else "unknown"
        return self.marking(delivery, state, error=why, next_ms=next_ms)

    # Storing -------------------------------------------------------------------------------------

    def marking(
        self,
        delivery: Delivery,
        state: DeliveryState,
        *,
        attempt: int | None = None,
        error: str | None = None,
        platform_id: str | None = None,
        next_ms: int | None = None,
    ) -> MarkDelivery:
        return MarkDelivery(
            delivery_id=delivery.id,
            attempt=delivery.attempt if attempt is None else attempt,
            state=state,
            at_ms=self._clock.now(),
            error=error,
            platform_id=platform_id,
            next_ms=next_ms,
        )

    async def _mark(
        self, delivery: Delivery, state: DeliveryState, **facts: Any
    ) -> Delivery | None:
        return await self.store(delivery, self.marking(delivery, state, **facts))

    async def store(self, delivery: Delivery, command: MarkDelivery) -> Delivery | None:
        """Store a step, however long storage is down; the delivery if it goes on after it."""
        try:
            receipt = await self._writer.commit(Unit((command,)))
        except InvalidContentError as error:
            # What it came to counts for more than what was said about it, and must be known.
            logger.error("delivery %s is stored without its details: %s", delivery.id, error)
            command = replace(command, error=None, platform_id=None)
            receipt = await self._writer.commit(Unit((command,)))
        if not isinstance(receipt, Durable):
            # A person has decided about it meanwhile, or its session was deleted.
            logger.info("delivery %s goes no further: %s", delivery.id, receipt.reason)
            return None
        self.count(command)
        return marked(delivery, command) if command.state in ("pending", "sending") else None

    def count(self, command: MarkDelivery) -> None:
        """For the statistics: this step is durable."""
        match command.state:
            case "sent":
                self.sent += 1
            case "failed":
                self.failed += 1
            case "unknown":
                self.unknown += 1
                logger.error("delivery %s: %s", command.delivery_id, command.error)
            case "sending":
                self.retried += command.attempt > 1
            case "pending":
                pass

    def _post(self, command: MarkDelivery) -> None:
        """Store a step without waiting for it; lost, it is found out at the next start."""
        try:
            self._writer.post(Unit((command,)), past_bounds=True)
        except StorageError as error:
            logger.warning("delivery %s is left as being sent: %s", command.delivery_id, error)


def marked(delivery: Delivery, command: MarkDelivery) -> Delivery:
    """The delivery behind this step."""
    return replace(
        delivery,
        state=command.state,
        attempt=command.attempt,
        error=command.error,
        platform_id=command.platform_id,
        next_ms=command.next_ms,
        marked_ms=command.at_ms,
    )
