"""The Courier: it sends what is in the outbox, each lane in its order.

| who                  | does                                           | durable           |
| -------------------- | ---------------------------------------------- | ----------------- |
| a session's receipt  | `posted(…)`: its lane sends it                 | before it is told |
| a gateway, called    | `register(source, deliver)`                    |                   |
| a gateway that pulls | `take(source)`, then `pickup.acknowledge(id)`  | on return         |
| a person             | `retry(id)`                                    | on return         |

Keeps:
- A lane is a key and a source, and sends in the order of posting. A delivery that waits to be tried
  again holds its lane; one that is failed or unknown holds nobody.
- Each source has its own limit of what is under way, and of what is in memory: neither a stuck
  target nor a platform that is down holds up anybody else. What is beyond the limit stays in
  storage and is read when there is room.

Storage has the truth: a courier that was started again reads it.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar, final

import trio
from msgspec import Struct

from ..storage.errors import InvalidContentError, StorageError
from .outbox import delivery_of
from .pickup import Pickup
from .sending import CUT_OFF, Sender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextvars import Context

    from ..storage.commands import PostDelivery
    from ..storage.engine import Reader
    from ..storage.identity import Clock, SessionKey
    from ..storage.records import Delivery
    from .limits import DeliverySettings
    from .sources import Deliver, OnUnknown, SourcePolicy
    from .writer import WriterRef

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOADED_AT_ONCE = 500


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
        *("sending", "source", "taking"),
    )

    def __init__(self, source: str, running_max: int) -> None:
        self.source = source
        self.deliver: Deliver | None = None
        self.on_unknown: OnUnknown = "resend"
        self.limiter = trio.CapacityLimiter(running_max)
        self.taking = trio.Lock()  # two takers must not get the same
        self.forget()

    def forget(self) -> None:
        """Begin with what is stored."""
        self.lanes: dict[SessionKey, deque[_Parcel]] = {}
        self.ids: set[str] = set()  # of everything in the lanes
        self.sending: set[str] = set()  # of what is under way just now
        self.late: list[Delivery] = []  # posted while storage is read
        self.loading = self.behind = False  # behind: storage has more than the lanes

    @property
    def at_work(self) -> bool:
        """Whether something of it is under way, or could be at once."""
        due = (lane[0].due for lane in self.lanes.values() if lane)
        return bool(self.sending) or self.loading or any(due)


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
        self._settings = settings
        self._context = context
        self._sender = Sender(writer, clock, settings)
        self.pickup = Pickup(writer, self._sender, settings)
        self._channels: dict[str, _Channel] = {}
        self._nursery: trio.Nursery | None = None
        self._settled = trio.lowlevel.ParkingLot()
        self._posted = 0
        for name, policy in sources.items():
            channel = self._channel(name)
            channel.deliver, channel.on_unknown = policy.deliver, policy.on_unknown

    def _channel(self, source: str) -> _Channel:
        channel = self._channels.get(source)
        if channel is None:
            channel = self._channels[source] = _Channel(source, self._settings.running_max)
        return channel

    # Running -------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Send for as long as nobody stops it. Started again, it begins with what is stored."""
        for channel in self._channels.values():
            channel.forget()
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for channel in self._channels.values():
                    self._load(channel)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    async def drain(self) -> None:
        """Until everything is sent that can be sent now; what waits to be tried again stays."""
        while self._nursery is not None and any(c.at_work for c in self._channels.values()):
            await self._settled.park()

    def register(self, source: str, deliver: Deliver, on_unknown: OnUnknown | None = None) -> None:
        """Send for this source with `deliver` from now on, beginning with what waits for it."""
        channel = self._channel(source)
        channel.deliver = deliver
        channel.on_unknown = on_unknown or channel.on_unknown
        self._load(channel)

    def unregister(self, source: str) -> None:
        """Send for this source no more; what waits stays, for `take` or whoever comes next."""
        channel = self._channel(source)
        channel.deliver = None
        channel.behind = False
        channel.ids.clear()
        for lane in channel.lanes.values():
            lane.clear()

    async def take(self, source: str, limit: int) -> tuple[Delivery, ...]:
        """For a gateway that pulls: what is to be sent next, the first of each key."""
        channel = self._channel(source)
        if channel.deliver is not None:
            problem = f"{source} has a function that sends"
            raise InvalidContentError("source", problem, hint="let it send, or unregister it")
        async with channel.taking:
            under_way = frozenset(channel.sending)
            return await self.pickup.take(source, channel.on_unknown, limit, under_way)

    async def retry(self, delivery_id: str) -> Delivery:
        """Send a failed or unknown one after all."""
        delivery = await self.pickup.retry(delivery_id)
        self._put(delivery)
        return delivery

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
        elif channel.behind or len(channel.ids) >= self._settings.waiting_max:
            channel.behind = True  # it would overtake what is still in storage
        else:
            self._enqueue(channel, delivery)

    def _enqueue(self, channel: _Channel, delivery: Delivery) -> None:
        if delivery.id in channel.ids or delivery.id in channel.sending:
            return
        channel.ids.add(delivery.id)
        wait_s = self._sender.wait_s(delivery)
        if delivery.state == "sending":  # whoever has taken it may still acknowledge it
            wait_s = self.pickup.lease_s(delivery.id)
        parcel = _Parcel(delivery, wait_s)
        lane = channel.lanes.get(delivery.key)
        if lane is None:
            channel.lanes[delivery.key] = deque((parcel,))
            self._start(self._serve, channel, delivery.key)
        else:
            lane.append(parcel)

    def _start(self, function: Any, *arguments: Any) -> None:
        assert self._nursery is not None
        self._context.run(self._nursery.start_soon, function, *arguments)

    # What is stored ------------------------------------------------------------------------------

    def _load(self, channel: _Channel) -> None:
        if channel.deliver is None or channel.loading or self._nursery is None:
            return
        channel.loading = True
        self._start(self._read, channel)

    async def _read(self, channel: _Channel) -> None:
        """What is open in storage, behind what the lanes have."""
        # What the lanes had when we looked may be settled when the answer comes.
        known = channel.ids | channel.sending
        limit = len(known) + _LOADED_AT_ONCE
        try:
            source = channel.source
            found = await self._look(lambda reader: reader.open_deliveries(source, limit))
            if channel.deliver is None:
                return
            for delivery in found:
                if delivery.id not in known:
                    self._enqueue(channel, delivery)
            channel.behind = len(found) == limit
        finally:
            late, channel.late, channel.loading = channel.late, [], False
            for delivery in late:
                self._put(delivery)
            self._settled.unpark_all()

    async def _look(self, view: Callable[[Reader], T]) -> T:
        """Read, however long storage is down."""
        while True:
            try:
                return await self._writer.read(view)
            except StorageError as error:
                logger.warning("the outbox can't be read: %s", error)
                await trio.sleep(self._settings.backoff_s)
                await self._writer.wait_up()

    # Lanes ---------------------------------------------------------------------------------------

    async def _serve(self, channel: _Channel, key: SessionKey) -> None:
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
                        await self._send(channel, lane, parcel.delivery)
        finally:
            if channel.lanes.get(key) is lane:
                del channel.lanes[key]
            self._settled.unpark_all()
            if channel.behind and len(channel.ids) <= self._settings.waiting_max // 2:
                self._load(channel)

    async def _send(self, channel: _Channel, lane: deque[_Parcel], delivery: Delivery) -> None:
        """The first of a lane: sent, or put back to be tried again."""
        deliver = channel.deliver
        if deliver is None:
            lane.clear()
            return
        again: Delivery | None = None
        channel.sending.add(delivery.id)
        try:
            if delivery.state == "sending":
                again = await self._left_over(channel, delivery)
            else:
                again = await self._sender.attempt(deliver, channel.on_unknown, delivery)
        finally:
            channel.sending.discard(delivery.id)
            if lane and lane[0].delivery.id == delivery.id:
                lane.popleft()
                channel.ids.discard(delivery.id)
            if again is not None and channel.deliver is not None:
                channel.ids.add(again.id)
                lane.appendleft(_Parcel(again, self._sender.wait_s(again)))
            self._settled.unpark_all()

    async def _left_over(self, channel: _Channel, delivery: Delivery) -> Delivery | None:
        """The last courier, the whole process, or a taker died over it."""
        stored = await self._look(lambda reader: reader.delivery(delivery.id))
        if stored is None or stored.state != "sending":
            return stored if stored is not None and stored.state == "pending" else None
        return await self._sender.settle_unknown(channel.on_unknown, stored, CUT_OFF)

    def statistics(self) -> CourierStatistics:
        channels, sender = self._channels.values(), self._sender
        return CourierStatistics(
            posted=self._posted,
            sent=sender.sent,
            failed=sender.failed,
            unknown=sender.unknown,
            retried=sender.retried,
            waiting=sum(len(channel.ids) for channel in channels),
            under_way=sum(len(channel.sending) for channel in channels),
        )
