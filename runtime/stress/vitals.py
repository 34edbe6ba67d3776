"""How the process under test is: the gaps of its event loop, its queues, and what it leaves behind.

Keeps: a gap is how much later than asked the loop came back, measured by a task like any other.
What is left at the end is compared with what was there before the runtime was opened; workers that
trio keeps for reuse are no leak, and what ends within a moment isn't either.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, final

import trio

from .wire import Pulse

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..runtime import Runtime
    from .wire import Line

_SAMPLE_S = 0.005
_PULSE_S = 0.25
_SETTLE_S = 3.0
_SETTLE_LOOK_S = 0.02
_WORKER = "Trio thread"  # kept by trio for a while, for whoever asks next


@final
class Meter:
    """Gaps of the loop since somebody looked."""

    def __init__(self) -> None:
        self._gaps_s: list[float] = []

    async def run(self) -> None:
        while True:
            before_s = time.perf_counter()
            await trio.sleep(_SAMPLE_S)
            self._gaps_s.append(max(0.0, time.perf_counter() - before_s - _SAMPLE_S))

    def take(self) -> tuple[float, ...]:
        """Those since the last time, in milliseconds."""
        gaps_s, self._gaps_s = self._gaps_s, []
        return tuple(round(gap_s * 1000, 1) for gap_s in gaps_s)


async def keep_telling(runtime: Runtime, tell: Callable[[Line], None]) -> None:
    """A pulse from time to time, until it is cancelled."""
    meter = Meter()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meter.run)
        while True:
            await trio.sleep(_PULSE_S)
            tell(pulse_of(runtime, meter))


def pulse_of(runtime: Runtime, meter: Meter) -> Pulse:
    found = runtime.statistics()
    traffic, engine, sessions = found.writer.traffic, found.writer.engine, found.sessions
    counters = {
        **found.counters,
        "writer_restarts": found.writer.restarts,
        "receipts_failed": traffic.receipts_failed,
        "commits": engine.commits,
        "units": traffic.units,
        "refusals": engine.refusals,
        "route_writes": found.route_writes,
        "reopenings": engine.reopenings,
        "deliveries_sent": found.deliveries.sent,
        "deliveries_failed": found.deliveries.failed,
        "search_damaged": int(engine.search_damage is not None),
    }
    return Pulse(
        gaps_ms=meter.take(),
        units=traffic.units_waiting,
        bytes=traffic.bytes_waiting,
        oldest_s=traffic.oldest_age_s,
        live=sessions.live,
        running=found.slots.running,
        waiting=sessions.waiting,
        sending=found.deliveries.waiting,
        search_tail=engine.search_tail,
        wal_pages=engine.wal_pages,
        tasks=trio.lowlevel.current_statistics().tasks_living,
        commit_p99_s=traffic.commit_p99_s,
        batch_units_mean=traffic.batch_units_mean,
        counters=counters,
    )


# What is left ------------------------------------------------------------------------------------


class Left(NamedTuple):
    """Tasks, threads and descriptors at a moment."""

    tasks: int
    threads: Counter[str]
    descriptors: Counter[str]

    def beyond(self, before: Left) -> Left:
        """What of it was not there before."""
        return Left(
            max(0, self.tasks - before.tasks),
            self.threads - before.threads,
            self.descriptors - before.descriptors,
        )

    @property
    def nothing(self) -> bool:
        return not (self.tasks or self.threads or self.descriptors)


def what_is_there() -> Left:
    threads = Counter(thread.name for thread in threading.enumerate())
    for name in [name for name in threads if name.startswith(_WORKER)]:
        del threads[name]
    descriptors = Counter[str]()
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors[os.readlink(f"/proc/self/fd/{number}")] += 1
        except OSError:
            pass  # the one by which the folder was listed
    return Left(trio.lowlevel.current_statistics().tasks_living, threads, descriptors)


async def what_is_left(before: Left) -> Left:
    """What is still there that was not before, once nothing more goes away by itself."""
    by_s = trio.current_time() + _SETTLE_S
    while True:
        left = what_is_there().beyond(before)
        if left.nothing or trio.current_time() > by_s:
            return left
        await trio.sleep(_SETTLE_LOOK_S)


def collect_warnings() -> list[str]:
    """Warnings from now on, about resources above all; their text, in a list that fills."""
    heard: list[str] = []

    def note(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        heard.append(f"{category.__name__}: {message}")

    warnings.simplefilter("always")
    warnings.showwarning = note
    return heard
