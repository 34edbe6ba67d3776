"""The hold: appends that wait for the receipt of a rotation or compaction.

Owns the rows that were appended while it was not known to which session they belong. Bounded by
count and bytes: a hold that is full makes `append` wait instead. Nothing here posts; whoever took
the hold releases it, with the receipt, and then posts what it holds in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from ..storage.edge import check_draft
from .lot import Lot

if TYPE_CHECKING:
    from ..storage.commands import AnyCommand
    from ..storage.identity import TurnId
    from ..storage.records import Draft
    from .limits import SessionSettings


class Held(NamedTuple):
    """Rows of one append, and the commands that belong to them."""

    drafts: tuple[Draft, ...]
    turn_id: TurnId | None
    after: tuple[AnyCommand, ...]


@final
class Hold:
    """On or off; while it is on, it keeps rows."""

    __slots__ = ("_held", "_released", "_rows", "_settings", "_size_bytes", "on")

    def __init__(self, settings: SessionSettings) -> None:
        self._settings = settings
        self._released = Lot()
        self._held: list[Held] = []
        self._rows = self._size_bytes = 0
        self.on = False

    def has_room(self) -> bool:
        return (
            self._rows < self._settings.hold_rows_max
            and self._size_bytes < self._settings.hold_bytes_max
        )

    def keep(self, held: Held) -> None:
        # What is held is posted from a receipt, where nobody could be told that it is invalid.
        self._size_bytes += sum(map(check_draft, held.drafts))
        self._rows += len(held.drafts)
        self._held.append(held)

    def release(self) -> list[Held]:
        """Off; what was held, in order. Those who wait look again."""
        self.on = False
        held, self._held = self._held, []
        self._rows = self._size_bytes = 0
        self._released.unpark_all()
        return held

    async def wait_released(self) -> None:
        """Until it is released the next time."""
        await self._released.park()
