"""Whole turns through the runtime: a user's message is stored durably, a trivial agent answers, the
answer is stored durably, the reply comes back.

Sessions are open, that is, their actors are in memory, before the clock starts; a session's row
comes with its first message, as it does for everybody who is compared. The agent does nothing, so
what is measured is what the runtime adds to a model call.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trio
from msgspec.structs import replace

from onepen import EngineSettings, SessionSettings, Settings, open_runtime

from .meter import TEXTS, Meter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from onepen import Runtime, Turn

    from .cells import Cell, Outcome

OPENING_AT_ONCE = 256


class Answering:
    """An agent that answers at once, with a text of the same size."""

    def __init__(self) -> None:
        self._count = 0

    async def run(self, turn: Turn) -> str:
        self._count += 1
        return TEXTS[self._count % len(TEXTS)]


def _settings(cell: Cell) -> Settings:
    sessions = SessionSettings()
    if cell.contender != "onepen":
        sessions = replace(sessions, turns_running_max=cell.condition.producers)
    return Settings(
        sessions=sessions, engine=EngineSettings(synchronous=cell.condition.synchronous)
    )


def _asker(runtime: Runtime, number: int) -> Callable[[], Awaitable[object]]:
    key = f"bench:{number}"
    count = 0

    async def ask() -> None:
        nonlocal count
        reply = await runtime.ask(key, TEXTS[count % len(TEXTS)])
        if reply.outcome.kind != "answered":
            raise RuntimeError(f"a turn of {key} ended as {reply.outcome.kind}")
        count += 1

    return ask


async def run_turns(cell: Cell) -> Outcome:
    path = os.path.join(cell.folder, "turns.db")
    sessions = cell.condition.producers
    async with open_runtime(path, agent=Answering(), settings=_settings(cell)) as runtime:
        limiter = trio.CapacityLimiter(OPENING_AT_ONCE)

        async def open_one(number: int) -> None:
            async with limiter:
                await runtime.open_session(f"bench:{number}")

        async with trio.open_nursery() as nursery:
            for number in range(sessions):
                nursery.start_soon(open_one, number)
        before = runtime.statistics().writer.traffic
        meter = Meter(cell)
        async with trio.open_nursery() as nursery:
            for number in range(sessions):
                nursery.start_soon(meter.produce, _asker(runtime, number))
        result = meter.outcome(None)
        after = runtime.statistics().writer.traffic
    batches, units = after.batches - before.batches, after.units - before.units
    return replace(
        result,
        note=f"{units / max(1, batches):.1f} units a batch, "
        f"{units / max(1, result.messages):.1f} units a turn",
    )
