"""`python -m benchmarks.cleanup`: how long clean-up holds the writer, and whether others notice.

A session of many messages, half of them carried on into a branch, each turn with its delivery, is
deleted; a group's user is erased; while others append. Every stay of a unit of clean-up in the
engine is timed, from taking it to its commit, and so are the slices of the index behind them.

    python -m benchmarks.cleanup [--messages 100000] [--folder /tmp]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import trio
from rich.console import Console
from rich.table import Table

from onepen import SystemClock, SystemIds, open_sqlite, open_writer
from onepen.runtime.cleanup import NoActors, delete
from onepen.runtime.forgetting import AloneVisitor, erase
from onepen.runtime.testing.conversation import Conversation, uid_of
from onepen.storage import commands as c
from onepen.storage.identity import SessionId, SessionKey, TurnId
from onepen.storage.records import TurnOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onepen.storage.sqlite.engine import SqliteEngine
    from onepen.storage.units import Unit

_TURN = 4  # messages
_TEXT = "the pelican sleeps at noon and wakes at dusk, as pelicans do; number {0} " * 4


class Meter:
    """Times what the engine does, by the kind of command."""

    def __init__(self, engine: SqliteEngine) -> None:
        self.held_ms: dict[str, list[float]] = defaultdict(list)
        self.busy_ms: dict[str, list[float]] = defaultdict(list)  # the thread's own processor time
        stage, commit, chore = engine.stage, engine.commit, engine.chore
        self._began = self._busy = 0.0
        self._kind = ""

        def timed_stage(units: Sequence[Unit]) -> Any:
            self._began, self._busy = time.perf_counter(), time.thread_time()
            kinds = {type(command).__name__ for unit in units for command in unit.commands}
            cleaning = kinds - {"AppendMessages"}
            self._kind = "+".join(sorted(cleaning)) or "AppendMessages"
            return stage(units)

        def timed_commit() -> None:
            commit()
            self.held_ms[self._kind].append((time.perf_counter() - self._began) * 1000)
            self.busy_ms[self._kind].append((time.thread_time() - self._busy) * 1000)

        def timed_chore(*, idle: bool) -> None:
            began, busy = time.perf_counter(), time.thread_time()
            chore(idle=idle)
            self.busy_ms["index slice"].append((time.thread_time() - busy) * 1000)
            self.held_ms["index slice"].append((time.perf_counter() - began) * 1000)

        engine.stage = timed_stage  # type: ignore[method-assign]
        engine.commit = timed_commit  # type: ignore[method-assign]
        engine.chore = timed_chore  # type: ignore[method-assign]


def fill(engine: SqliteEngine, messages: int) -> tuple[SessionId, Conversation]:
    """One long session with a branch, a group of the same length, and somebody else."""

    def do(*units: Unit) -> None:
        engine.stage(units)
        engine.commit()

    long, group, other = Conversation("ann"), Conversation("group"), Conversation("other")
    for chat in (long, group, other):
        do(*chat.opening())
    for chat in (long, group):
        for start in range(0, messages // _TURN, 50):
            do(*(unit for n in range(start, start + 50) for unit in _turn_of(chat, n)))
        while engine.maintain(idle=True):
            pass
    branch = c.Branch(
        key=long.key,
        parent_id=long.session_id,
        child_id=SessionId("branch"),
        upto_seq=long.next_seq // 2,  # type: ignore[arg-type]
        replaces=long.route_version,
        at_ms=long.at(),
    )
    do(long.guarded(long.guard(), branch))
    while engine.maintain(idle=True):
        pass
    return long.session_id, other


def _turn_of(chat: Conversation, number: int) -> tuple[Unit, ...]:
    turn_id = TurnId(uid_of(f"{chat.key}/turn/{number}"))
    guard = chat.guard()
    user = "eve" if number % 2 else "bob"
    drafts = [
        chat.draft("user" if n == 0 else "assistant", _TEXT.format(number), user=user)
        for n in range(_TURN)
    ]
    posted = c.PostDelivery(
        delivery_id=turn_id,
        key=SessionKey(chat.key),
        source="chat",
        target={"to": user},
        body={"text": _TEXT.format(number)},
        at_ms=chat.at(),
        turn_id=turn_id,
        session_id=chat.session_id,
    )
    sending = c.MarkDelivery(delivery_id=turn_id, attempt=1, state="sending", at_ms=chat.at())
    sent = c.MarkDelivery(delivery_id=turn_id, attempt=1, state="sent", at_ms=chat.at())
    outcome = TurnOutcome(kind="answered", text=_TEXT.format(number))
    unit = chat.guarded(
        guard,
        c.OpenTurn(turn_id=turn_id, key=chat.key, at_ms=chat.at()),
        c.StartTurn(turn_id=turn_id, session_id=chat.session_id, attempt=1, at_ms=chat.at()),
        chat.append(*drafts, turn_id=turn_id),
        c.EndTurn(turn_id=turn_id, attempt=1, outcome=outcome, at_ms=chat.at()),
        posted,
        sending,
        sent,
    )
    return (unit,)


async def measure(path: Path, messages: int, console: Console) -> None:
    clock = SystemClock()
    engine = open_sqlite(path, clock)
    began = time.perf_counter()
    session_id, other = fill(engine, messages)
    console.print(f"filled in {time.perf_counter() - began:.0f} s")
    meter = Meter(engine)
    waits: dict[str, list[float]] = defaultdict(list)
    took: dict[str, float] = {}
    phase = "nothing else"

    async def append() -> None:
        while True:
            unit = other.guarded(other.guard(), other.append(other.draft("user", "hello")))
            began = time.perf_counter()
            await writer.write(unit)
            waits[phase].append((time.perf_counter() - began) * 1000)
            await trio.sleep(0.002)

    async with open_writer(lambda: engine, clock) as writer, trio.open_nursery() as nursery:
        nursery.start_soon(append)
        await trio.sleep(2)
        for phase, run in (
            ("delete", _delete(writer, clock, session_id)),
            ("erase", _erase(writer, clock)),
        ):
            began = time.perf_counter()
            await run
            took[phase] = time.perf_counter() - began
        phase = "index after it"
        while engine.chore_due(idle=True):  # noqa: ASYNC110 - nobody tells when it is done
            await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    _show(console, meter, waits, took)


async def _delete(writer: Any, clock: Any, session_id: SessionId) -> None:
    await delete(writer, clock, NoActors(writer, clock, SystemIds()), session_id)


async def _erase(writer: Any, clock: Any) -> None:
    await erase(writer, clock, AloneVisitor(writer, clock, SystemIds()), "eve")


def _show(
    console: Console, meter: Meter, waits: dict[str, list[float]], took: dict[str, float]
) -> None:
    table = Table(title="ms in the engine, taken to committed", title_justify="left")
    for column in ("unit", "count", "median", "p99", "longest", "cpu median", "cpu longest"):
        table.add_column(column, justify="left" if column == "unit" else "right")
    for kind, held in sorted(meter.held_ms.items()):
        busy, _, longest = _figures(meter.busy_ms[kind])
        table.add_row(kind, f"{len(held):,}", *_figures(held), busy, longest)
    console.print(table)
    table = Table(title="ms of a durable append of somebody else", title_justify="left")
    for column in ("meanwhile", "took s", "count", "median", "p99", "longest"):
        table.add_column(column, justify="left" if column == "meanwhile" else "right")
    for phase, times in waits.items():
        seconds = f"{took[phase]:.1f}" if phase in took else ""
        table.add_row(phase, seconds, f"{len(times):,}", *_figures(times))
    console.print(table)


def _figures(times: list[float]) -> tuple[str, str, str]:
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"{statistics.median(ordered):.2f}", f"{p99:.2f}", f"{ordered[-1]:.2f}"


@click.command()
@click.option("--messages", default=100_000, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path, exists=True), default=None)
def main(messages: int, folder: Path | None) -> None:
    """Measure, and print two tables."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        trio.run(measure, Path(place) / "chat.db", messages, Console())


if __name__ == "__main__":
    main()
