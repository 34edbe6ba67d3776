"""How many turns run at once, and whose is next.

Keeps: never more than `running_max` turns hold a slot; sources take turns, and within a source the
first to ask is the first to get one. So one busy platform can't starve another, and five thousand
users are not five thousand model calls at once.

Whoever gets a slot is told through the function that it left here, on the stack of whoever gave
the slot back: that function must only take notice. A session has one `Claim`, which is given back
whatever has become of it. Belongs to the trio thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, final

import trio
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable


class SlotStatistics(Struct, frozen=True, kw_only=True):
    """A look at the slots."""

    running: int
    running_max: int
    waiting: int
    waiting_by_source: dict[str, int]


@final
class Slots:
    """Running turns, bounded, shared fairly between sources."""

    def __init__(self, running_max: int) -> None:
        self._running_max = running_max
        self._running = 0
        # In the order in which sources are served; a source that was served goes to the end.
        self._waiting: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()

    def take(self) -> bool:
        """Take a slot if one is free and nobody waits for it."""
        if self._waiting or self._running >= self._running_max:
            return False
        self._running += 1
        return True

    def ask(self, source: str, granted: Callable[[], None]) -> None:
        """Be called once with a slot in hand, perhaps at once."""
        if self.take():
            granted()
            return
        self._waiting.setdefault(source, deque()).append(granted)

    def withdraw(self, source: str, granted: Callable[[], None]) -> None:
        """Wait no longer. Harmless if it was granted already: then the slot must be given back."""
        queue = self._waiting.get(source)
        if queue is None or granted not in queue:
            return
        queue.remove(granted)
        if not queue:
            del self._waiting[source]

    def give_back(self) -> None:
        """A turn no longer runs: the next source gets its slot."""
        if not self._waiting:
            self._running -= 1
            return
        source, queue = self._waiting.popitem(last=False)
        granted = queue.popleft()
        if queue:
            self._waiting[source] = queue
        granted()

    def statistics(self) -> SlotStatistics:
        waiting = {source: len(queue) for source, queue in self._waiting.items()}
        return SlotStatistics(
            running=self._running,
            running_max=self._running_max,
            waiting=sum(waiting.values()),
            waiting_by_source=waiting,
        )


@final
class Claim:
    """One session's claim to a slot: none, asked for, or held."""

    __slots__ = ("_granted", "_slots", "_source", "_waiter", "held")

    def __init__(self, slots: Slots, granted: Callable[[], None]) -> None:
        self._slots = slots
        self._granted = granted
        self._source: str | None = None  # under which it was asked for
        self._waiter: trio.Event | None = None
        self.held = False

    @property
    def idle(self) -> bool:
        """Whether it is neither held nor asked for."""
        return not self.held and self._source is None

    def take(self) -> bool:
        """Hold a slot at once, if one is free and nobody waits for it."""
        self.held = self.held or (self._source is None and self._slots.take())
        return self.held

    def ask(self, source: str) -> None:
        """Hold one as soon as it is this source's turn, perhaps at once."""
        if self.idle:
            self._source = source
            self._slots.ask(source, self._on_slot)

    def _on_slot(self) -> None:
        self._source, self.held = None, True
        if self._waiter is not None:
            self._waiter.set()
        self._granted()

    async def wait(self, source: str) -> bool:
        """Ask, and wait until it is held; false if it was given back meanwhile."""
        self.ask(source)
        while not self.held and self._source is not None:
            self._waiter = trio.Event()
            await self._waiter.wait()
        return self.held

    def give_back(self) -> None:
        """Hold nothing and ask for nothing."""
        if self._waiter is not None:
            self._waiter.set()
        if self.held:
            self.held = False
            self._slots.give_back()
        elif self._source is not None:
            self._slots.withdraw(self._source, self._on_slot)
            self._source = None
