"""For whoever fetches deliveries instead of being called, and for people who decide about one.

Keeps: what is handed over is marked as being sent before that, the first of each key and to one
taker only; what nobody acknowledges in time is unknown, and treated as its source says. Whatever a
call returns is durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import trio

from ..storage.errors import MissingError, StaleError
from ..storage.units import Unit
from .sending import CUT_OFF, TOO_SLOW, check_wait, marked

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..storage.records import Delivery, DeliveryState
    from .limits import DeliverySettings
    from .sending import Sender
    from .sources import OnUnknown
    from .writer import WriterRef


@final
class Pickup:
    """The counter beside the Courier's lanes."""

    def __init__(
        self,
        writer: WriterRef,
        sender: Sender,
        settings: DeliverySettings,
        on_decided: Callable[[Delivery], None],
    ) -> None:
        self._writer = writer
        self._sender = sender
        self._settings = settings
        self._on_decided = on_decided
        self._leases: dict[str, float] = {}  # of what was taken: until when it may be acknowledged

    def lease_s(self, delivery_id: str) -> float:
        """For how long a taker has this one yet."""
        return max(self._leases.get(delivery_id, 0.0) - trio.current_time(), 0.0)

    async def take(
        self, source: str, on_unknown: OnUnknown, limit: int, under_way: frozenset[str]
    ) -> tuple[Delivery, ...]:
        """What is to be sent next, now marked as being sent; without what is under way elsewhere.

        One taker of a source at a time.
        """
        sender, held = self._sender, len(self._leases) + len(under_way)
        now_ms = sender.now()  # those that rest leave room for the others
        first = await self._writer.read(
            lambda reader: reader.first_deliveries(source, limit + held, now_ms=now_ms)
        )
        taken: list[Delivery] = []
        for found in first:
            if len(taken) == limit:
                break
            if found.id in under_way or self.lease_s(found.id):
                continue
            delivery: Delivery | None = found
            if found.state == "sending":
                why = TOO_SLOW if self._leases.pop(found.id, None) is not None else CUT_OFF
                delivery = await sender.settle_unknown(on_unknown, found, why)
            if delivery is None or sender.wait_s(delivery) > 0:
                continue
            sending = await sender.begin(delivery)
            if sending is not None:
                self._leases[sending.id] = trio.current_time() + self._settings.deadline_s
                taken.append(sending)
        return tuple(taken)

    async def acknowledge(self, delivery_id: str, platform_id: str | None) -> Delivery:
        """It has arrived. Twice is harmless."""
        delivery = await self._stored(delivery_id)
        if delivery.state == "sent":
            return delivery
        return await self._decide(delivery, "sent", platform_id=platform_id)

    async def fail(
        self, delivery_id: str, error: str, *, retry: bool, retry_after_s: float | None
    ) -> Delivery:
        """It has not arrived: to be tried again as often as the settings say, or given up.

        Twice, or late, is harmless: what waits for its next attempt is left as it is.
        """
        later_s = None if retry_after_s is None else check_wait(retry_after_s)
        delivery = await self._stored(delivery_id)
        if delivery.state == "failed" or (retry and delivery.state == "pending"):
            return delivery
        open_yet = delivery.state in ("sending", "unknown")
        if retry and open_yet and not self._sender.exhausted(delivery):
            next_ms = self._sender.next_ms(delivery, later_s)
            return await self._decide(delivery, "pending", error=error, next_ms=next_ms)
        return await self._decide(delivery, "failed", error=error)

    async def retry(self, delivery_id: str) -> Delivery:
        """Send a failed or unknown one after all."""
        delivery = await self._stored(delivery_id)
        if delivery.state not in ("failed", "unknown"):
            raise StaleError(f"delivery {delivery_id}", "failed or unknown", delivery.state)
        return await self._decide(delivery, "pending")

    async def _stored(self, delivery_id: str) -> Delivery:
        delivery = await self._writer.read(lambda reader: reader.delivery(delivery_id))
        if delivery is None:
            raise MissingError(f"delivery {delivery_id}")
        return delivery

    async def _decide(
        self,
        delivery: Delivery,
        state: DeliveryState,
        *,
        error: str | None = None,
        platform_id: str | None = None,
        next_ms: int | None = None,
    ) -> Delivery:
        command = self._sender.marking(
            delivery, state, error=error, platform_id=platform_id, next_ms=next_ms
        )
        await self._writer.write(Unit((command,)))
        self._sender.count(command)
        self._leases.pop(delivery.id, None)
        decided = marked(delivery, command)
        self._on_decided(decided)
        return decided
