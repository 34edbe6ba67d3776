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
  storage: a lane that has run empty reads what follows, and beyond the limit each key has its first
  one in memory all the same, so that a key with a long backlog silences no other.
- What somebody decides about a delivery counts at once, wherever it waits.

Storage has the truth: a courier that was started again reads it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar, final

import trio
from msgspec import Struct

from ..storage.errors import InvalidContentError, StorageError
from .lane import Channel, Lane, Parcel
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

_LANE_MAX = 100  # deliveries of one key in memory
_ROOM_MIN = 500  # for keys, before it is worth looking for those that wait for it


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
        self.pickup = Pickup(writer, self._sender, settings, self._decided)
        self._channels: dict[str, Channel] = {}
        self._nursery: trio.Nursery | None = None
        self._settled = trio.lowlevel.ParkingLot()
        self._posted = 0
        for name, policy in sources.items():
            channel = self._channel(name)
            channel.deliver, channel.on_unknown = policy.deliver, policy.on_unknown

    def _channel(self, source: str) -> Channel:
        channel = self._channels.get(source)
        if channel is None:
            channel = self._channels[source] = Channel(source, self._settings.running_max)
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
        channel.empty()

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
        return await self.pickup.retry(delivery_id)

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
        lane, waiting_max = channel.lanes.get(delivery.key), self._settings.waiting_max
        if lane is None:
            if channel.loading:
                channel.late.append(delivery)
            elif channel.behind or len(channel.lanes) >= waiting_max:
                channel.behind = True  # it would overtake what is still in storage
            else:
                self._open_lane(channel, delivery, behind=False)
        elif lane.behind or len(lane.parcels) >= _LANE_MAX or len(channel.ids) >= waiting_max:
            lane.behind = lane.missed = True
        else:
            self._enqueue(channel, lane, delivery)

    def _open_lane(self, channel: Channel, delivery: Delivery, *, behind: bool) -> None:
        lane = channel.lanes[delivery.key] = Lane(behind=behind)
        self._enqueue(channel, lane, delivery)
        self._start(self._serve, channel, delivery.key, lane)

    def _enqueue(self, channel: Channel, lane: Lane, delivery: Delivery) -> None:
        lane.last = delivery.id
        if delivery.id not in channel.ids and delivery.id not in channel.sending:
            channel.ids.add(delivery.id)
            lane.parcels.append(self._parcel(delivery))

    def _parcel(self, delivery: Delivery) -> Parcel:
        if delivery.state == "sending":  # whoever has taken it may still acknowledge it
            return Parcel(delivery, self.pickup.lease_s(delivery.id))
        return Parcel(delivery, self._sender.wait_s(delivery))

    def _decided(self, delivery: Delivery) -> None:
        """Somebody has said what becomes of this one, durably."""
        channel = self._channels.get(delivery.source)
        if channel is None or channel.deliver is None or self._nursery is None:
            return
        if delivery.id in channel.sending:
            channel.decided.add(delivery.id)
            return
        lane = channel.lanes.get(delivery.key)
        if lane is None:
            if delivery.state == "pending":
                self._put(delivery)
            return
        place = lane.find(delivery.id)
        if delivery.state == "pending":
            parcel = self._parcel(delivery)
            if place is not None:
                lane.parcels[place] = parcel
            else:  # it was failed or unknown, and has lost its place: storage is read behind it
                channel.ids.add(delivery.id)
                lane.parcels.append(parcel)
        elif place is not None:
            channel.ids.discard(delivery.id)
            del lane.parcels[place]
        lane.change()

    def _start(self, function: Any, *arguments: Any) -> None:
        assert self._nursery is not None
        self._context.run(self._nursery.start_soon, function, *arguments)

    # What is stored ------------------------------------------------------------------------------

    def _load(self, channel: Channel) -> None:
        channel.unread = True
        if channel.deliver is not None and not channel.loading and self._nursery is not None:
            channel.loading = True
            self._start(self._read, channel)

    async def _read(self, channel: Channel) -> None:
        """A lane for each key that has something in storage, as far as there is room."""
        source, lanes_max = channel.source, self._settings.waiting_max
        try:
            while channel.unread:
                channel.unread = False
                # What these have when we look may be settled when the answer comes.
                served = frozenset(channel.lanes)
                found = await self._look(lambda reader: reader.first_deliveries(source, lanes_max))
                if channel.deliver is None:
                    return
                new = [delivery for delivery in found if delivery.key not in served]
                room = lanes_max - len(channel.lanes)
                for delivery in new[:room]:
                    self._open_lane(channel, delivery, behind=True)
                channel.behind = len(new) > room or len(found) == lanes_max
        finally:
            late, channel.late, channel.loading = channel.late, [], False
            for delivery in late:
                self._put(delivery)
            self._settled.unpark_all()

    async def _refill(self, channel: Channel, key: SessionKey, lane: Lane) -> None:
        """What storage has of this key behind what the lane has had."""
        source, last, lane.missed = channel.source, lane.last, False
        limit = max(min(self._settings.waiting_max - len(channel.ids), _LANE_MAX), 1)
        found = await self._look(lambda reader: reader.lane_deliveries(source, key, last, limit))
        if channel.lanes.get(key) is not lane or channel.deliver is None:
            return  # nobody sends for it any more, or another lane does
        for delivery in found:
            self._enqueue(channel, lane, delivery)
        lane.behind = lane.missed or len(found) == limit

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

    async def _serve(self, channel: Channel, key: SessionKey, lane: Lane) -> None:
        """One lane, until nothing waits in it, or behind it in storage."""
        try:
            while lane.parcels or (lane.behind and channel.deliver is not None):
                if not lane.parcels:
                    await self._refill(channel, key, lane)
                    continue
                parcel = lane.parcels[0]
                if not parcel.due:
                    await lane.rest(parcel.not_before_s)
                    continue
                async with channel.limiter:
                    if lane.parcels and lane.parcels[0] is parcel:
                        await self._send(channel, lane, parcel.delivery)
        finally:
            if channel.lanes.get(key) is lane:
                del channel.lanes[key]
            self._settled.unpark_all()
            lanes, lanes_max = len(channel.lanes), self._settings.waiting_max
            if channel.behind and lanes <= max(lanes_max - _ROOM_MIN, lanes_max // 2):
                self._load(channel)

    async def _send(self, channel: Channel, lane: Lane, delivery: Delivery) -> None:
        """The first of a lane: sent, or put back to be tried again."""
        deliver = channel.deliver
        if deliver is None:
            lane.parcels.clear()
            return
        again: Delivery | None = None
        channel.sending.add(delivery.id)
        try:
            if delivery.state == "sending":
                again = await self._left_over(channel, delivery)
            else:
                again = await self._sender.attempt(deliver, channel.on_unknown, delivery)
            while again is None and delivery.id in channel.decided:
                channel.decided.discard(delivery.id)
                again = await self._put_back(delivery)
        finally:
            channel.sending.discard(delivery.id)
            channel.decided.discard(delivery.id)
            if lane.parcels and lane.parcels[0].delivery.id == delivery.id:
                lane.parcels.popleft()
                channel.ids.discard(delivery.id)
            if again is not None and channel.deliver is not None:
                channel.ids.add(again.id)
                lane.parcels.appendleft(self._parcel(again))
            self._settled.unpark_all()

    async def _put_back(self, delivery: Delivery) -> Delivery | None:
        """What somebody wants to be sent again although it was under way."""
        stored = await self._look(lambda reader: reader.delivery(delivery.id))
        return stored if stored is not None and stored.state == "pending" else None

    async def _left_over(self, channel: Channel, delivery: Delivery) -> Delivery | None:
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
