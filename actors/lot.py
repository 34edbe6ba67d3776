"""A place to wait for something to change, which costs next to nothing while nobody waits.

There are several for each session, and thousands of sessions: trio's own parking lots and events
bring their containers along before anybody comes.

Keeps: `unpark_all` wakes whoever waits at that moment, and nobody who comes later. Belongs to the
trio thread. What was waited for is the caller's to look at again.
"""

from __future__ import annotations

from typing import final

import trio


@final
class Lot:
    """Tasks that wait until somebody says that there is something to look at."""

    __slots__ = ("_parked",)

    def __init__(self) -> None:
        self._parked: list[trio.lowlevel.Task] | None = None

    async def park(self) -> None:
        """Until the next `unpark_all`."""
        task = trio.lowlevel.current_task()
        if self._parked is None:
            self._parked = []
        self._parked.append(task)

        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            if self._parked is not None:
                self._parked.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def unpark_all(self) -> None:
        """Let all who wait look again."""
        parked, self._parked = self._parked, None
        for task in parked or ():
            trio.lowlevel.reschedule(task)
