"""The Courier: it sends what is in the outbox, or hands it to whoever takes it.

| who                  | does                                            | durable           |
| -------------------- | ----------------------------------------------- | ----------------- |
| a session's receipt  | `posted(…)`: its lane sends it                  | before it is told |
| a gateway, called    | `register(source, deliver)`                     |                   |
| a gateway that pulls | `take(source)`, then `acknowledge(id)`, `fail`  | on return         |
| a person             | `retry(id)`; decides about an unknown one       | on return         |

    pending ──▶ sending ──▶ sent
       ▲           ├──────▶ failed    given up, or refused by the platform for good
       └───────────┴──────▶ unknown   perhaps it has arrived: sent again or held, as its source says

Keeps:
- `sending` is durable before anything is sent, and what became of it before the next one of its
  lane begins: after a crash it is known what may have arrived.
- A lane is a key and a source, and sends in the order of posting. A delivery that waits to be tried
  again holds its lane; one that is failed or unknown holds nobody.
- Lanes of a source share its limit of deliveries under way, and each has a deadline: neither a
  stuck target nor a dead platform holds up the others.
- What is in memory is bounded. What is beyond that stays in storage and is read when there is room.

Storage has the truth: a courier that was started again reads it. Must never call a delivery sent
that nobody has acknowledged.
"""

from __future__ import annotations

import logging
from collections import deque
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, final

import trio
from msgspec import Struct
from msgspec.structs import replace

from ..storage.commands import MarkDelivery
from ..storage.errors import InvalidContentError, MissingError, OnepenError, StorageError
from ..storage.identity import SessionKey
from ..storage.units import Durable, Unit
from .outbox import delivery_of
from .policy import Backoff
from .raised import ours_of, said_by
from .replies import storable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextvars import Context

    from ..storage.commands import PostDelivery
    from ..storage.identity import Clock
    from ..storage.records import Delivery, DeliveryState
    from .limits import DeliverySettings
    from .sources import Deliver, OnUnknown, SourcePolicy
    from .writer import WriterRef

logger = logging.getLogger(__name__)

_LOADED_AT_ONCE = 500
_WAIT_S_MAX = 86_400.0
_CUT_OFF = "it is not known whether it has arrived: the process ended while it was being sent"
_TOO_SLOW = "it is not known whether it has arrived: the platform did not answer in time"


class UndeliverableError(OnepenError):
    """For `deliver`: the platform will never take this, and there is no use in trying again."""

    hint = "the delivery is listed as failed, and can be tried again by hand"


class DeliverLaterError(OnepenError):
    """For `deliver`: the platform has sent us away for a while."""

    hint = "it is tried again after that"

    def __init__(self, retry_after_s: float, message: str = "the platform says: later") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CourierStatistics(Struct, frozen=True, kw_only=True):
    """A look at what leaves; the counts are since the opening."""

    posted: int
    sent: int
    failed: int
    unknown: int
    retried: int
    waiting: int
    """In memory, to be sent."""
    under_way: int


@final
class _Parcel:
    """A delivery in its lane. When it may be sent is monotonic: a wall clock may jump."""

    __slots__ = ("delivery", "not_before_s")

    def __init__(self, delivery: Delivery, wait_s: float) -> None:
        self.delivery = delivery
        self.not_before_s = trio.current_time() + wait_s

    @property
    def due(self) -> bool:
        return self.not_before_s <= trio.current_time()


@final
class _Channel:
    """One source: who sends for it, and what waits."""

    __slots__ = (
        *("behind", "deliver", "ids", "lanes", "late", "limiter", "loading", "on_unknown"),
        *("sending", "taking"),
    )

    def __init__(self, on_unknown: OnUnknown, running_max: int) -> None:
        self.deliver: Deliver | None = None
        self.on_unknown: OnUnknown = on_unknown
        self.limiter = trio.CapacityLimiter(running_max)
        self.lanes: dict[SessionKey, deque[_Parcel]] = {}
        self.ids: set[str] = set()  # of everything in the lanes
        self.sending: set[str] = set()  # of what is under way just now
        self.taking = trio.Lock()  # two takers must not get the same
        self.late: list[Delivery] = []  # posted while storage is read
        self.loading = False
        self.behind = False  # storage has more than the lanes


@final
class Courier:
    """One for a runtime. It outlives the sessions, so that their last words are sent."""

    def __init__(
        self,
        writer: WriterRef,
        clock: Clock,
        settings: DeliverySettings,
        sources: Mapping[str, SourcePolicy],
        context: Context,
    ) -> None:
        self._writer = writer
        self._clock = clock
        self._settings = settings
        self._context = context
        self._channels: dict[str, _Channel] = {}
        self._leases: dict[str, float] = {}  # of what was taken: until when it may be acknowledged
        self._nursery: trio.Nursery | None = None
        self._settled = trio.lowlevel.ParkingLot()
        self._posted = self._sent = self._failed = self._unknown = self._retried = 0
        for name, policy in sources.items():
            channel = self._channel(name)
            channel.deliver, channel.on_unknown = policy.deliver, policy.on_unknown

    def _channel(self, source: str) -> _Channel:
        channel = self._channels.get(source)
        if channel is None:
            channel = _Channel("resend", self._settings.running_max)
            self._channels[source] = channel
        return channel

    # Running -------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Send for as long as nobody stops it. Started again, it begins with what is stored."""
        for channel in self._channels.values():
            channel.lanes, channel.late = {}, []
            channel.ids, channel.sending = set(), set()
            channel.loading = channel.behind = False
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for source in self._channels:
                    self._load(source)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    async def drain(self) -> None:
        """Until everything is sent that can be sent now; what waits to be tried again stays."""
        while self._nursery is not None and any(map(_has_work, self._channels.values())):
            await self._settled.park()

    def register(self, source: str, deliver: Deliver, on_unknown: OnUnknown | None = None) -> None:
        """Send for this source with `deliver` from now on, beginning with what waits for it."""
        channel = self._channel(source)
        channel.deliver = deliver
        channel.on_unknown = on_unknown or channel.on_unknown
        self._load(source)

    def unregister(self, source: str) -> None:
        """Send for this source no more; what waits stays, for `take` or whoever comes next."""
        channel = self._channel(source)
        channel.deliver = None
        channel.behind = False
        channel.ids.clear()
        for lane in channel.lanes.values():
            lane.clear()

    # What is posted ------------------------------------------------------------------------------

    def posted(self, commands: Iterable[PostDelivery]) -> None:
        """These are durable. Called on the loop's own stack: must not wait or raise."""
        for command in commands:
            self._posted += 1
            self._put(delivery_of(command))

    def _put(self, delivery: Delivery) -> None:
        channel = self._channels.get(delivery.source)
        if channel is None or channel.deliver is None or self._nursery is None:
            return  # it waits in storage
        if channel.loading:
            channel.late.append(delivery)
        elif channel.behind or self._waiting >= self._settings.waiting_max:
            channel.behind = True  # it would overtake what is still in storage
        else:
            self._enqueue(channel, delivery)

    @property
    def _waiting(self) -> int:
        return sum(len(channel.ids) for channel in self._channels.values())

    def _enqueue(self, channel: _Channel, delivery: Delivery) -> None:
        if delivery.id in channel.ids:
            return
        channel.ids.add(delivery.id)
        parcel = _Parcel(delivery, self._wait_s(delivery))
        lane = channel.lanes.get(delivery.key)
        if lane is None:
            channel.lanes[delivery.key] = deque((parcel,))
            self._start(self._serve, channel, delivery.source, delivery.key)
        else:
            lane.append(parcel)

    def _start(self, function: Any, *arguments: Any) -> None:
        assert self._nursery is not None
        self._context.run(self._nursery.start_soon, function, *arguments)

    def _wait_s(self, delivery: Delivery) -> float:
        """How long until it may be sent; never longer than we make anybody wait."""
        if delivery.next_ms is None:
            return 0.0
        return min(max((delivery.next_ms - self._clock.now()) / 1000, 0.0), _WAIT_S_MAX)

    def _load(self, source: str) -> None:
        channel = self._channel(source)
        if channel.deliver is None or channel.loading or self._nursery is None:
            return
        channel.loading = True
        self._start(self._read, channel, source)

    async def _read(self, channel: _Channel, source: str) -> None:
        """What is open in storage, behind what the lanes have."""
        limit = len(channel.ids) + _LOADED_AT_ONCE
        try:
            found = await self._open_deliveries(source, limit)
            for delivery in found:
                going_on: Delivery | None = delivery
                if delivery.state == "sending" and delivery.id not in channel.sending:
                    # The last courier, or the whole process, died over it.
                    going_on = await self._settle_unknown(channel, delivery, _CUT_OFF)
                if channel.deliver is None:
                    return
                if going_on is not None and going_on.id not in channel.sending:
                    self._enqueue(channel, going_on)
            channel.behind = len(found) == limit
        finally:
            late, channel.late, channel.loading = channel.late, [], False
            for delivery in late:
                self._put(delivery)
            self._settled.unpark_all()

    async def _open_deliveries(self, source: str, limit: int) -> tuple[Delivery, ...]:
        while True:
            try:
                return await self._writer.read(lambda reader: reader.open_deliveries(source, limit))
            except StorageError as error:
                logger.warning("the outbox of %s can't be read: %s", source, error)
                await trio.sleep(self._settings.backoff_s)
                await self._writer.wait_up()

    # Lanes ---------------------------------------------------------------------------------------

    async def _serve(self, channel: _Channel, source: str, key: SessionKey) -> None:
        """One lane, until nothing waits in it."""
        lane = channel.lanes[key]
        try:
            while lane:
                parcel = lane[0]
                if not parcel.due:
                    await trio.sleep_until(parcel.not_before_s)
                    continue
                async with channel.limiter:
                    if lane and lane[0] is parcel:
                        again = await self._send(channel, parcel.delivery)
                        self._settle(channel, lane, parcel, again)
        finally:
            if channel.lanes.get(key) is lane:
                del channel.lanes[key]
            self._settled.unpark_all()
            if channel.behind and self._waiting <= self._settings.waiting_max // 2:
                self._load(source)

    def _settle(
        self, channel: _Channel, lane: deque[_Parcel], parcel: _Parcel, again: Delivery | None
    ) -> None:
        self._settled.unpark_all()
        if not lane or lane[0] is not parcel:
            return  # nobody sends for this source any more
        lane.popleft()
        channel.ids.discard(parcel.delivery.id)
        if again is not None:
            channel.ids.add(again.id)
            lane.appendleft(_Parcel(again, self._wait_s(again)))

    async def _send(self, channel: _Channel, delivery: Delivery) -> Delivery | None:
        """One attempt; the delivery as it is to be tried again, or `None` if that is settled."""
        channel.sending.add(delivery.id)
        try:
            sending = await self._mark(delivery, "sending", attempt=delivery.attempt + 1)
            return None if sending is None else await self._attempt(channel, sending)
        finally:
            channel.sending.discard(delivery.id)

    async def _attempt(self, channel: _Channel, sending: Delivery) -> Delivery | None:
        deliver = channel.deliver
        if deliver is None:
            return await self._mark(sending, "pending")
        platform_id: Any = None
        try:
            with trio.move_on_after(self._settings.deadline_s) as scope:
                returned: Any = deliver(sending)
                platform_id = await returned if isawaitable(returned) else returned
        except BaseException as error:
            if (ours := ours_of(error)) is not None:
                # Whoever ends us wants an end: what became of it is posted and not waited for.
                self._post(self._unknown_mark(channel, sending, _CUT_OFF))
                raise ours  # noqa: B904 - it is a part of the same error
            return await self._failed_attempt(channel, sending, error)
        if scope.cancelled_caught:
            return await self._settle_unknown(channel, sending, _TOO_SLOW)
        platform_id = None if platform_id is None else storable(str(platform_id))[:1000]
        await self._mark(sending, "sent", platform_id=platform_id)
        return None

    async def _failed_attempt(
        self, channel: _Channel, sending: Delivery, error: BaseException
    ) -> Delivery | None:
        why = storable(said_by(error))
        if isinstance(error, TimeoutError | trio.TooSlowError):
            return await self._settle_unknown(channel, sending, why)
        later_s = error.retry_after_s if isinstance(error, DeliverLaterError) else None
        if isinstance(error, UndeliverableError) or self._exhausted(sending):
            logger.error("a delivery to %s is given up: %s", sending.source, why)
            await self._mark(sending, "failed", error=why)
            return None
        return await self._mark(
            sending, "pending", error=why, next_ms=self._next_ms(sending, later_s)
        )

    def _exhausted(self, sending: Delivery) -> bool:
        return sending.attempt >= self._settings.tries_max

    def _next_ms(self, sending: Delivery, later_s: float | None = None) -> int:
        settings = self._settings
        backoff = Backoff(first_s=settings.backoff_s, max_s=settings.backoff_max_s)
        wait_s = backoff.wait_s(sending.attempt) if later_s is None else max(later_s, 0.0)
        return self._clock.now() + int(min(wait_s, _WAIT_S_MAX) * 1000)

    def _unknown_mark(self, channel: _Channel, delivery: Delivery, why: str) -> MarkDelivery:
        """Nobody knows whether it has arrived: its source says what follows from that."""
        state: DeliveryState = "unknown" if channel.on_unknown == "hold" else "pending"
        if state == "pending" and self._exhausted(delivery):
            state = "unknown"
        next_ms = self._next_ms(delivery) if state == "pending" and why != _CUT_OFF else None
        return MarkDelivery(
            delivery_id=delivery.id,
            attempt=delivery.attempt,
            state=state,
            at_ms=self._clock.now(),
            error=why,
            next_ms=next_ms,
        )

    async def _settle_unknown(
        self, channel: _Channel, delivery: Delivery, why: str
    ) -> Delivery | None:
        return await self._commit(delivery, self._unknown_mark(channel, delivery, why))

    # Marks ---------------------------------------------------------------------------------------

    async def _mark(
        self,
        delivery: Delivery,
        state: DeliveryState,
        *,
        attempt: int | None = None,
        error: str | None = None,
        platform_id: str | None = None,
        next_ms: int | None = None,
    ) -> Delivery | None:
        """Store a step, however long storage is down; the delivery if it goes on after it."""
        command = MarkDelivery(
            delivery_id=delivery.id,
            attempt=delivery.attempt if attempt is None else attempt,
            state=state,
            at_ms=self._clock.now(),
            error=error,
            platform_id=platform_id,
            next_ms=next_ms,
        )
        return await self._commit(delivery, command)

    async def _commit(self, delivery: Delivery, command: MarkDelivery) -> Delivery | None:
        receipt = await self._writer.commit(Unit((command,)))
        if not isinstance(receipt, Durable):
            # A person has decided about it meanwhile, or its session was deleted.
            logger.info("delivery %s goes no further: %s", delivery.id, receipt.reason)
            return None
        self._count(command)
        if command.state not in ("pending", "sending"):
            return None
        return _marked(delivery, command)

    def _count(self, command: MarkDelivery) -> None:
        match command.state:
            case "sent":
                self._sent += 1
            case "failed":
                self._failed += 1
            case "unknown":
                self._unknown += 1
                logger.error("delivery %s: %s", command.delivery_id, command.error)
            case "sending":
                self._retried += command.attempt > 1
            case "pending":
                pass

    def _post(self, command: MarkDelivery) -> None:
        """Store a step without waiting for it; lost, it is found out at the next start."""
        try:
            self._writer.post(Unit((command,)), past_bounds=True)
        except StorageError as error:
            logger.warning("delivery %s is left as being sent: %s", command.delivery_id, error)

    # For whoever takes deliveries ----------------------------------------------------------------

    async def take(self, source: str, limit: int) -> tuple[Delivery, ...]:
        """What is to be sent next, now marked as being sent: the first of each key.

        What was taken before and not acknowledged in time is unknown, and treated as its source
        says.
        """
        channel = self._channel(source)
        if channel.deliver is not None:
            problem = f"{source} has a function that sends"
            raise InvalidContentError("source", problem, hint="let it send, or unregister it")
        async with channel.taking:
            return await self._take(channel, source, limit)

    async def _take(self, channel: _Channel, source: str, limit: int) -> tuple[Delivery, ...]:
        opened = await self._writer.read(
            lambda reader: reader.open_deliveries(source, limit + _LOADED_AT_ONCE)
        )
        taken: list[Delivery] = []
        held = set[SessionKey]()  # keys whose turn it is not
        for found in opened:
            if len(taken) == limit:
                break
            delivery: Delivery | None = found
            if found.key in held:
                continue
            if found.state == "sending" and self._leases.get(found.id, 0.0) <= trio.current_time():
                why = _TOO_SLOW if found.id in self._leases else _CUT_OFF
                delivery = await self._settle_unknown(channel, found, why)
            if delivery is None:
                continue  # it is unknown, and holds nobody
            held.add(found.key)
            if delivery.state == "sending" or self._wait_s(delivery) > 0:
                continue
            sending = await self._mark(delivery, "sending", attempt=delivery.attempt + 1)
            if sending is not None:
                self._leases[sending.id] = trio.current_time() + self._settings.deadline_s
                taken.append(sending)
        return tuple(taken)

    async def acknowledge(self, delivery_id: str, platform_id: str | None) -> Delivery:
        """It has arrived. Twice is harmless."""
        return await self._decide(delivery_id, "sent", platform_id=platform_id)

    async def fail(
        self, delivery_id: str, error: str, *, retry: bool, retry_after_s: float | None
    ) -> Delivery:
        """It has not arrived: to be tried again as often as the settings say, or given up."""
        delivery = await self._stored(delivery_id)
        if retry and delivery.state == "sending" and not self._exhausted(delivery):
            next_ms = self._next_ms(delivery, retry_after_s)
            return await self._decide(delivery_id, "pending", error=error, next_ms=next_ms)
        return await self._decide(delivery_id, "failed", error=error)

    async def retry(self, delivery_id: str) -> Delivery:
        """Send a failed or unknown one after all."""
        delivery = await self._decide(delivery_id, "pending")
        self._put(delivery)
        return delivery

    async def _stored(self, delivery_id: str) -> Delivery:
        delivery = await self._writer.read(lambda reader: reader.delivery(delivery_id))
        if delivery is None:
            raise MissingError(f"delivery {delivery_id}")
        return delivery

    async def _decide(
        self,
        delivery_id: str,
        state: DeliveryState,
        *,
        error: str | None = None,
        platform_id: str | None = None,
        next_ms: int | None = None,
    ) -> Delivery:
        delivery = await self._stored(delivery_id)
        if delivery.state == state:
            return delivery
        command = MarkDelivery(
            delivery_id=delivery_id,
            attempt=delivery.attempt,
            state=state,
            at_ms=self._clock.now(),
            error=error,
            platform_id=platform_id,
            next_ms=next_ms,
        )
        await self._writer.write(Unit((command,)))
        self._count(command)
        self._leases.pop(delivery_id, None)
        return _marked(delivery, command)

    def statistics(self) -> CourierStatistics:
        return CourierStatistics(
            posted=self._posted,
            sent=self._sent,
            failed=self._failed,
            unknown=self._unknown,
            retried=self._retried,
            waiting=self._waiting,
            under_way=sum(len(channel.sending) for channel in self._channels.values()),
        )


def _has_work(channel: _Channel) -> bool:
    """Whether something of it is under way, or could be at once."""
    if channel.sending or channel.loading:
        return True
    return any(lane and lane[0].due for lane in channel.lanes.values())


def _marked(delivery: Delivery, command: MarkDelivery) -> Delivery:
    return replace(
        delivery,
        state=command.state,
        attempt=command.attempt,
        error=command.error,
        platform_id=command.platform_id,
        next_ms=command.next_ms,
        marked_ms=command.at_ms,
    )
