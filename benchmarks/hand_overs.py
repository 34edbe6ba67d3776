"""What each hand-over costs, as ratios to a plain turn, inside one interleaved run.

A turn is a message that is stored, a trivial agent, an answer that is stored, and its reply. Each
variant adds one thing to it: a reply target whose delivery is sent, an inbound id to be looked up,
an interim message, a side effect, a question that is answered at once. Streaming is measured by the
piece, with somebody who reads along.

Run it with `make bench`, or alone: `python -m benchmarks.hand_overs --rounds 5`.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import trio
from rich.console import Console
from rich.table import Table

from onepen import Inbound, SourcePolicy, open_runtime

from .meter import TEXTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from onepen import Delivery, Runtime, Turn

_TURNS = {1: 300, 16: 100, 256: 12}  # of each conversation; about the same time for all
_PIECES = 400


class Variant:
    """One thing that is added to a turn."""

    def __init__(self, name: str, **inbound: Any) -> None:
        self.name = name
        self.inbound = inbound


VARIANTS = (
    Variant("plain"),
    Variant("inbound id", id=True),
    Variant("reply target, sent", reply_to="chat"),
    Variant("interim message, sent", reply_to="chat"),
    Variant("effect"),
    Variant("question, answered at once"),
)


async def _agent(turn: Turn) -> str:
    match turn.text:
        case "interim message, sent":
            await turn.say("one moment")
        case "effect":
            await turn.effect(_nothing, 5, key="pay")
        case "question, answered at once":
            await turn.ask_user("may I?", ("yes", "no"))
        case _:
            pass
    return TEXTS[0]


def _nothing(amount: int) -> int:
    return amount


async def _deliver(_: Delivery) -> str:
    return "sent"


async def _answer(runtime: Runtime, key: str) -> None:
    """Whoever is asked says yes, as soon as there is something to say it to."""
    async with runtime.events(key) as events:
        async for event in events:
            if event.kind == "question.asked" and event.question is not None:
                await runtime.approvals.answer(key, "yes", question_key=event.question.question_key)


async def _measure(path: Path, variant: Variant, sessions: int) -> tuple[float, float]:
    """Turns a second, and CPU in microseconds for each."""
    turns = _TURNS[sessions]
    asks = variant.name.startswith("question")
    sources = {"bench": SourcePolicy(deliver=_deliver)}

    async def talk(runtime: Runtime, number: int, first: int, count: int) -> None:
        key = f"bench:{number}"
        for index in range(first, first + count):
            given = dict(variant.inbound)
            if given.pop("id", None):
                given["id"] = f"{number}/{index}"
            await runtime.ask(key, Inbound(variant.name, **given))

    async with (
        open_runtime(path, agent=_agent, sources=sources) as runtime,
        trio.open_nursery() as answering,
    ):
        if asks:
            for number in range(sessions):
                answering.start_soon(_answer, runtime, f"bench:{number}")
        await _all(partial(talk, runtime, first=0, count=2), sessions)
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        await _all(partial(talk, runtime, first=2, count=turns), sessions)
        while runtime.statistics().deliveries.waiting:  # noqa: ASYNC110 - what is sent counts too
            await trio.sleep(0.0002)
        took_s = time.perf_counter() - begun_s
        cpu_s = time.process_time() - cpu_s
        answering.cancel_scope.cancel()
    return sessions * turns / took_s, cpu_s / (sessions * turns) * 1e6


async def _all(talk: Callable[..., Any], sessions: int) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(sessions):
            nursery.start_soon(partial(talk, number=number))


async def _stream(path: Path) -> tuple[float, float]:
    """Microseconds for each piece with one reader, and deltas for each hundred pieces."""
    took_s = 0.0

    async def agent(turn: Turn) -> None:
        nonlocal took_s
        async with turn.streaming() as out:
            begun_s = time.perf_counter()
            for _ in range(_PIECES):
                await out.write("token ")
            took_s = time.perf_counter() - begun_s

    deltas = 0
    async with open_runtime(path, agent=agent) as runtime, runtime.events("bench:1") as events:
        await runtime.submit("bench:1", "go")
        async for event in events:
            deltas += event.kind == "message.delta"
            if event.kind == "turn.ended":
                break
    return took_s / _PIECES * 1e6, deltas / _PIECES * 100


def _run(rounds: int) -> tuple[dict[tuple[str, int], list[tuple[float, float]]], list[Any]]:
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    streams: list[Any] = []
    folder = Path(tempfile.mkdtemp(prefix="onepen-bench-"))
    try:
        for number in range(rounds):
            for sessions in _TURNS:
                for variant in VARIANTS:
                    path = folder / f"{number}-{sessions}-{len(found)}-{variant.name[:5]}.db"
                    sample = trio.run(_measure, path, variant, sessions)
                    found.setdefault((variant.name, sessions), []).append(sample)
            streams.append(trio.run(_stream, folder / f"stream-{number}.db"))
    finally:
        shutil.rmtree(folder)
    return found, streams


@click.command()
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1, 100))
def main(rounds: int) -> None:
    """Turns with one hand-over more, against plain turns."""
    found, streams = _run(rounds)
    table = Table(title=f"turns with one hand-over more ÷ plain turns, medians of {rounds} rounds")
    table.add_column("a turn with")
    for sessions in _TURNS:
        table.add_column(f"{sessions}: turns/s", justify="right")
        table.add_column("÷ plain", justify="right")
        table.add_column("CPU µs", justify="right")
    for variant in VARIANTS:
        cells: list[str] = [variant.name]
        for sessions in _TURNS:
            ours, plain = found[variant.name, sessions], found["plain", sessions]
            ratio = statistics.median(a[0] / b[0] for a, b in zip(ours, plain, strict=True))
            rate = statistics.median(sample[0] for sample in ours)
            cpu_us = statistics.median(sample[1] for sample in ours)
            cells += [f"{rate:,.0f}", f"{ratio:.2f}", f"{cpu_us:,.0f}"]
        table.add_row(*cells)
    console = Console(width=130)
    console.print(table)
    piece_us = statistics.median(sample[0] for sample in streams)
    deltas = statistics.median(sample[1] for sample in streams)
    console.print(f"a streamed piece: {piece_us:.1f} µs, {deltas:.1f} deltas for 100 pieces")


if __name__ == "__main__":
    main()
