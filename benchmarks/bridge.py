"""What the asyncio bridge costs, as ratios to a native agent, inside one interleaved run.

A turn is a message that is stored, an agent, an answer that is stored, and its reply. On a file
with `synchronous=FULL` it is measured as it passes; in memory by the processor time of the process,
which other programs don't disturb. Variants add one thing to it: two messages that are appended, an
effect, a streamed answer of fifty pieces. The agent is the same one in both.

Run it alone: `python -m benchmarks.bridge --rounds 5`.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import trio
from rich.console import Console
from rich.table import Table

from onepen import SessionSettings, Settings, open_runtime
from onepen.agents import AsyncioAgent

from .meter import TEXTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from onepen import Runtime

VARIANTS = ("plain", "two appends", "effect", "fifty pieces")
_TURNS = {1: 100, 16: 20}  # of each conversation
_PIECES = 50


def nothing(number: int) -> int:
    return number


async def agent(turn: Any) -> str:
    """Native or behind the bridge: it awaits its turn and nothing else."""
    match turn.text.partition(":")[0]:
        case "two appends":
            await turn.append("one moment")
            await turn.append("nearly")
        case "effect":
            await turn.effect(nothing, 3, key="it")
        case "fifty pieces":
            async with turn.streaming() as out:
                for _ in range(_PIECES):
                    await out.write("piece ")
            return str(out.text)
        case _:
            pass
    return TEXTS[0]


async def _turn_s(
    runtime: Runtime, variant: str, lanes: int, turns: int, clock: Callable[[], float]
) -> float:
    async def talk(lane: int) -> None:
        for number in range(turns):
            reply = await runtime.ask(f"bench:{variant}:{lane}", f"{variant}:{number}")
            if reply.outcome.kind != "answered":
                raise RuntimeError(f"a turn ended as {reply.outcome}")

    begun_s = clock()
    async with trio.open_nursery() as nursery:
        for lane in range(lanes):
            nursery.start_soon(talk, lane)
    return (clock() - begun_s) / (lanes * turns)


async def measure(
    folder: Path, lanes: int, rounds: int, *, durable: bool
) -> dict[str, list[tuple[float, float]]]:
    """Seconds for each turn, native and behind the bridge, of every round."""
    found: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
    clock = time.perf_counter if durable else time.process_time
    settings = Settings(sessions=SessionSettings(turns_running_max=max(lanes, 1)))
    paths = [folder / f"{kind}-{lanes}.db" if durable else None for kind in ("native", "asyncio")]
    async with (
        open_runtime(paths[0], agent=agent, settings=settings) as native,
        open_runtime(paths[1], agent=AsyncioAgent(agent), settings=settings) as bridged,
    ):
        for number in range(-1, rounds):  # the first one warms up
            for variant in VARIANTS:
                turns = _TURNS[lanes]
                took_s = (
                    await _turn_s(native, variant, lanes, turns, clock),
                    await _turn_s(bridged, variant, lanes, turns, clock),
                )
                if number >= 0:
                    found[variant].append(took_s)
    return found


def show(console: Console, rows: list[tuple[str, ...]]) -> None:
    table = Table(title="A turn behind the asyncio bridge against a native one", title_style="bold")
    columns = ("where", "at once", "variant", "native µs", "asyncio µs", "added µs", "ratio")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in (0, 2) else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--quick", is_flag=True, help="One round, few conversations: that it works.")
def main(*, rounds: int, quick: bool) -> None:
    """Measure the bridge, and print a table."""
    console = Console(width=100)
    rows: list[tuple[str, ...]] = []
    for durable in (False, True):
        for lanes in (1,) if quick else _TURNS:
            folder = Path(tempfile.mkdtemp(prefix="onepen-bridge-"))
            try:
                found = trio.run(_measured, folder, lanes, 1 if quick else rounds, durable)
            finally:
                shutil.rmtree(folder)
            where = "file" if durable else "memory"
            for variant, pairs in found.items():
                native, bridged = (statistics.median(p[n] for p in pairs) * 1e6 for n in (0, 1))
                ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
                figures = (f"{native:,.0f}", f"{bridged:,.0f}", f"{bridged - native:,.0f}")
                rows.append((where, str(lanes), variant, *figures, f"{ratio:.2f}"))
    show(console, rows)


async def _measured(
    folder: Path,
    lanes: int,
    rounds: int,
    durable: bool,  # noqa: FBT001 - trio.run hands arguments over by place
) -> dict[str, list[tuple[float, float]]]:
    return await measure(folder, lanes, rounds, durable=durable)


if __name__ == "__main__":
    main()
