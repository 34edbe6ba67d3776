"""What asking an actor costs beside the least that trio takes to hand something to another task.

- *hop*: one task sends through a memory channel with a buffer of 64, another receives. One way.
- *there and back*: the same through two channels, with the first task waiting for each answer.
- *ask*: `Mailbox.ask`, answered at once by an actor in the kit's own loop. There and back.

The three take turns in small blocks inside one process, and ratios are formed inside each turn.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import trio

from onepen.actors.mailbox import Mailbox, run_actor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from onepen.actors.mailbox import Answer

    from .cells import Probe

BUFFER = 64
BLOCK = 1_000


class Echo:
    """An actor that answers at once."""

    async def on_start(self) -> None:
        """It has nothing to prepare."""

    async def on_message(self, message: int, answer: Answer[object] | None) -> None:
        assert answer is not None
        answer.give(message)

    async def on_stop(self) -> None:
        """It has nothing to end."""


async def _hops(count: int) -> None:
    send, receive = trio.open_memory_channel[int](BUFFER)

    async def produce() -> None:
        async with send:
            for number in range(count):
                await send.send(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(produce)
        async for _ in receive:
            pass


async def _round_trips(count: int) -> None:
    send, receive = trio.open_memory_channel[int](BUFFER)
    send_back, receive_back = trio.open_memory_channel[int](BUFFER)

    async def answer() -> None:
        async for number in receive:
            await send_back.send(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        async with send:
            for number in range(count):
                await send.send(number)
                await receive_back.receive()


async def _asks(count: int) -> None:
    box: Mailbox[int] = Mailbox(BUFFER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, Echo(), box, lambda: RuntimeError("the actor ended"))
        for number in range(count):
            await box.ask(number)
        box.close()


async def _timed_us(work: Callable[[int], Awaitable[None]]) -> float:
    begun_s = time.perf_counter()
    await work(BLOCK)
    return (time.perf_counter() - begun_s) / BLOCK * 1e6


async def run_ask(probe: Probe) -> dict[str, float]:
    turns: list[tuple[float, float, float]] = []
    for turn in range(-2, max(1, probe.size // BLOCK)):
        took = await _timed_us(_hops), await _timed_us(_round_trips), await _timed_us(_asks)
        if turn >= 0:  # the first ones warm up the interpreter
            turns.append(took)
    return {
        "hop_us": median(hop for hop, _, _ in turns),
        "round_trip_us": median(both for _, both, _ in turns),
        "ask_us": median(ask for _, _, ask in turns),
        "round_trip_per_hop": median(both / hop for hop, both, _ in turns),
        "ask_per_hop": median(ask / hop for hop, _, ask in turns),
        "ask_per_round_trip": median(ask / both for _, both, ask in turns),
    }
