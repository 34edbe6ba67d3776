"""`runtime.deliveries`: the outbox, for gateways and for people.

A gateway gives `deliver` to its source's policy, registers it here when it is ready, or takes what
is to be sent and acknowledges it. Whatever a call returns is durable when it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final, get_args, overload

from ..actors.sources import check_deliver
from ..storage.edge import check_count, check_integer, check_name, shown
from ..storage.errors import InvalidContentError
from ..storage.identity import SessionKey
from ..storage.records import Delivery, DeliveryState

if TYPE_CHECKING:
    from ..actors.courier import Courier
    from ..actors.sources import Deliver, OnUnknown
    from ..actors.writer import WriterRef

_TAKEN_MAX = 1_000


@final
class DeliveryListing(Sequence[Delivery]):
    """One page of deliveries, and where the next one begins (`None` at the end)."""

    def __init__(self, deliveries: tuple[Delivery, ...], following: int | None) -> None:
        self.deliveries = deliveries
        self.next = following

    def __len__(self) -> int:
        return len(self.deliveries)

    @overload
    def __getitem__(self, index: int) -> Delivery: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Delivery, ...]: ...
    def __getitem__(self, index: int | slice) -> Delivery | tuple[Delivery, ...]:
        return self.deliveries[index]


@final
class Deliveries:
    """What leaves a runtime."""

    def __init__(self, courier: Courier, writer: WriterRef) -> None:
        self._courier = courier
        self._writer = writer

    def register(
        self, source: str, deliver: Deliver, *, on_unknown: OnUnknown | None = None
    ) -> None:
        """Send what this source has to say with `deliver(delivery)`, beginning with what waits.

        It may return the platform's id of what it sent. It raises when that was not sent, and it is
        tried again; `UndeliverableError` if there is no use in that, `DeliverLaterError` if the
        platform wants a pause. A `TimeoutError`, or taking too long, means that nobody knows.
        """
        check_name("source", source)
        check_deliver(deliver, on_unknown or "resend")
        self._courier.register(source, deliver, on_unknown)

    def unregister(self, source: str) -> None:
        """Send for this source no more; what waits stays."""
        check_name("source", source)
        self._courier.unregister(source)

    async def take(self, source: str, limit: int = 10) -> tuple[Delivery, ...]:
        """What is to be sent next, the first of each key, marked as being sent.

        Acknowledge each, or say that it failed; what is neither in time counts as unknown.
        """
        check_name("source", source)
        check_count("limit", limit)
        return await self._courier.take(source, min(limit, _TAKEN_MAX))

    async def acknowledge(self, delivery_id: str, platform_id: str | None = None) -> Delivery:
        """It has arrived. Twice is harmless. Raises `MissingError` and `StaleError`."""
        check_name("delivery_id", delivery_id)
        if platform_id is not None:
            check_name("platform_id", platform_id)
        return await self._courier.pickup.acknowledge(delivery_id, platform_id)

    async def fail(
        self,
        delivery_id: str,
        error: str,
        *,
        retry: bool = True,
        retry_after_s: float | None = None,
    ) -> Delivery:
        """It has not arrived: to be tried again, or, with `retry=False`, given up."""
        check_name("delivery_id", delivery_id)
        check_name("error", error)
        return await self._courier.pickup.fail(
            delivery_id, error, retry=retry, retry_after_s=retry_after_s
        )

    async def retry(self, delivery_id: str) -> Delivery:
        """Send one that is failed or unknown after all. Raises `MissingError`, `StaleError`."""
        check_name("delivery_id", delivery_id)
        return await self._courier.retry(delivery_id)

    async def get(self, delivery_id: str) -> Delivery | None:
        """What is stored of it."""
        check_name("delivery_id", delivery_id)
        return await self._writer.read(lambda reader: reader.delivery(delivery_id))

    async def list(
        self,
        *,
        state: DeliveryState | None = None,
        source: str | None = None,
        key: str | None = None,
        limit: int = 100,
        after: int | None = None,
    ) -> DeliveryListing:
        """The last that was posted first."""
        if state is not None and state not in get_args(DeliveryState):
            hint = f"use one of {', '.join(get_args(DeliveryState))}"
            raise InvalidContentError("state", f"{shown(state)} is none", hint=hint)
        for field, value in (("source", source), ("key", key)):
            if value is not None:
                check_name(field, value)
        check_count("limit", limit)
        if after is not None:
            check_integer("after", after)
        found, following = await self._writer.read(
            lambda reader: reader.deliveries(
                state=state,
                source=source,
                key=None if key is None else SessionKey(key),
                limit=limit,
                after=after,
            )
        )
        return DeliveryListing(found, following)
