"""What an idle session actor takes: memory, time to start, and what is left once it is evicted.

Two cases, which differ in what is behind the actors:

- *runtime in memory*: the real Writer on a database in memory. An activation is all of it: the
  actor, the commit of its incarnation on the Writer's thread, and the read of its (empty) key on
  another thread. The rows of the keys are in this process's memory, and so in its RSS.
- *actor alone*: a storage that answers at once and keeps nothing. What is left is the actor: its
  line, mailbox, task, nursery and `Session`, started through the real Directory.

An actor is started the way recovery starts it: an operation that does nothing is asked of its key.
What such an operation takes with a live actor is measured as well and subtracted, so that `start`
is the actor's start and no more. RSS is read behind a garbage collection and `malloc_trim`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import trio

from onepen import (
    DeliverySettings,
    SessionSettings,
    SystemClock,
    SystemIds,
    open_sqlite,
    open_writer,
)
from onepen.actors.binding import clean_context
from onepen.actors.courier import Courier
from onepen.actors.directory import Directory
from onepen.actors.hooks import Hooks
from onepen.actors.line import Counters, Operate, Surroundings
from onepen.actors.slots import Slots
from onepen.actors.timetable import Bell
from onepen.actors.warm import AgentSource
from onepen.storage.identity import SessionKey

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from .cells import Probe

T = TypeVar("T")

AT_ONCE = 256
SOURCE = "bench"
BALLAST = 1_000
"""Actors that stay beside those that are measured: they fill the holes that imports have left in
the heap, which would otherwise be taken for actors without memory."""


class _Took(NamedTuple):
    wall_us: float
    cpu_us: float


class _Nothing:
    """A reader of an empty database."""

    def route(self, _: object) -> None:
        return None

    def unfinished_turns(self, _: object) -> tuple[()]:
        return ()


class FreeStorage:
    """In the place of the Writer: every unit is stored at once, and nothing is ever found."""

    epoch = 1

    async def write(self, _: object) -> None:
        await trio.lowlevel.checkpoint()

    async def read(self, view: Callable[[Any], T]) -> T:
        await trio.lowlevel.checkpoint()
        return view(_Nothing())


@asynccontextmanager
async def _storage(case: str) -> AsyncGenerator[Any]:
    if case == "actor alone":
        yield FreeStorage()
        return
    clock = SystemClock()
    async with open_writer(lambda: open_sqlite(None, clock), clock) as writer:
        yield writer


async def _no_agent(_: object) -> None:
    """Never called: these sessions get no messages."""


async def _do_nothing(_: object) -> None:
    """The operation that an actor is started with."""


def _ignore(_: SessionKey) -> None:
    """The Directory puts its own function in the place of this one."""


async def _wake(directory: Directory, first: int, count: int) -> _Took:
    """Ask all these keys for nothing, some at once; what each of them took."""
    wake = Operate("wake", _do_nothing, interrupts=False)
    keys = iter([SessionKey(f"{SOURCE}:{number}") for number in range(first, first + count)])

    async def some() -> None:
        for key in keys:
            await directory.ask(key, SOURCE, wake)

    cpu_s, begun_s = time.process_time(), time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(min(AT_ONCE, count)):
            nursery.start_soon(some)
    wall_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
    return _Took(wall_s / count * 1e6, cpu_s / count * 1e6)


async def _evict(directory: Directory) -> None:
    while directory.statistics().live:
        directory.tidy()
        await trio.sleep(0.001)


def _rss_bytes() -> int:
    gc.collect()
    # What is free must not count as used, whichever thread has freed it.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def run_idle(probe: Probe) -> dict[str, float]:
    count = probe.size
    # Only `tidy` evicts here, and only when it is called: nobody keeps house.
    limits = SessionSettings(live_actors_max=BALLAST + count + 1, idle_evict_s=1e-6)
    async with _storage(probe.case) as writer, trio.open_nursery() as nursery:
        surroundings = Surroundings(
            writer=writer,
            clock=SystemClock(),
            ids=SystemIds(),
            settings=limits,
            hooks=Hooks(None, limits.hook_deadline_s),
            agents=AgentSource(_no_agent, None),
            slots=Slots(limits.turns_running_max),
            counters=Counters(),
            courier=Courier(writer, SystemClock(), DeliverySettings(), {}, clean_context()),
            bell=Bell(),
            context=clean_context(),
            on_idle=_ignore,
        )
        directory = Directory(surroundings, nursery)
        await _wake(directory, 0, BALLAST)
        await _evict(directory)
        empty, empty_blocks = _rss_bytes(), sys.getallocatedblocks()
        await _wake(directory, 0, BALLAST)
        before = _rss_bytes()
        first = await _wake(directory, BALLAST, count)
        again = await _wake(directory, BALLAST, count)
        live = _rss_bytes()
        await _evict(directory)
        evicted, evicted_blocks = _rss_bytes(), sys.getallocatedblocks()
        # Other keys after them: what the allocator only kept is used again, a leak would add up.
        await _wake(directory, BALLAST + count, count)
        await _evict(directory)
        later = _rss_bytes()
        nursery.cancel_scope.cancel()
    return {
        "start_us": first.wall_us - again.wall_us,
        "start_cpu_us": first.cpu_us - again.cpu_us,
        "wake_us": again.wall_us,
        "wake_cpu_us": again.cpu_us,
        "live_bytes": (live - before) / count,
        "evicted_bytes": (evicted - empty) / count,
        "evicted_blocks": (evicted_blocks - empty_blocks) / count,
        "later_bytes": (later - evicted) / count,
    }
