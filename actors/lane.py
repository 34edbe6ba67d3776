"""What waits in memory to be sent: a channel for each source, and in it a lane for each key.

Keeps: a lane has the first deliveries of its key, in the order of posting, and knows whether
storage has more of them. Whatever changes what is first in a lane wakes whoever serves it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, final

import trio

if TYPE_CHECKING:
    from ..storage.identity import SessionKey
    from ..storage.records import Delivery
    from .sources import Deliver, OnUnknown


@final
class Parcel:
    """A delivery in its lane. When it may be sent is monotonic: a wall clock may jump."""

    __slots__ = ("delivery", "not_before_s")

    def __init__(self, delivery: Delivery, wait_s: float) -> None:
        self.delivery = delivery
        self.not_before_s = trio.current_time() + wait_s

    @property
    def due(self) -> bool:
        return self.not_before_s <= trio.current_time()


@final
class Lane:
    """What of one key is to be sent, the first of it."""

    __slots__ = ("_changed", "behind", "last", "missed", "parcels")

    def __init__(self, *, behind: bool = False) -> None:
        self.parcels: deque[Parcel] = deque()
        self.behind = behind  # storage has more of this key
        self.last: str | None = None  # and that is behind this one
        self.missed = False  # something was posted while that was read
        self._changed = trio.Event()

    @property
    def at_work(self) -> bool:
        """Whether something of it could be sent at once, or is looked for."""
        return self.parcels[0].due if self.parcels else self.behind

    async def rest(self, until_s: float) -> None:
        """Until then, or until somebody has decided about what is in it."""
        changed = self._changed
        with trio.move_on_at(until_s):
            await changed.wait()

    def change(self) -> None:
        """Wake whoever serves it."""
        self._changed.set()
        self._changed = trio.Event()

    def find(self, delivery_id: str) -> int | None:
        """Where this one stands."""
        places = range(len(self.parcels))
        return next((n for n in places if self.parcels[n].delivery.id == delivery_id), None)


@final
class Channel:
    """One source: who sends for it, and what waits."""

    __slots__ = (
        *("behind", "decided", "deliver", "ids", "lanes", "late", "limiter", "loading"),
        *("on_unknown", "sending", "source", "taking", "unread"),
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
        self.lanes: dict[SessionKey, Lane] = {}
        self.ids: set[str] = set()  # of everything in the lanes
        self.sending: set[str] = set()  # of what is under way just now
        self.decided: set[str] = set()  # of that, what somebody has decided about meanwhile
        self.late: list[Delivery] = []  # posted while storage is read, for keys without a lane
        self.loading = self.unread = False
        self.behind = False  # storage has keys for which there was no room

    @property
    def at_work(self) -> bool:
        """Whether something of it is under way, or could be at once."""
        lanes = self.lanes.values()
        return bool(self.sending) or self.loading or any(lane.at_work for lane in lanes)

    def empty(self) -> None:
        """Nobody sends for it: whatever waits is in storage."""
        self.ids.clear()
        self.behind = False
        for key, lane in list(self.lanes.items()):
            # What is under way keeps its place: behind it the lane begins with what is stored.
            lane.behind = any(parcel.delivery.id in self.sending for parcel in lane.parcels)
            lane.last = None
            lane.parcels.clear()
            if not lane.behind:
                del self.lanes[key]
            lane.change()
