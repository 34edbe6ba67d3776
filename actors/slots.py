"""How many turns run at once, and whose is next.

Keeps: never more than `running_max` turns hold a slot; sources take turns, and within a source the
first to ask is the first to get one. So one busy platform can't starve another, and five thousand
users are not five thousand model calls at once.

Belongs to the trio thread; nothing here waits. Whoever gets a slot is told through the function
that it left here, on the stack of whoever gave the slot back: that function must only take notice.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, final

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
