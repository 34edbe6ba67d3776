"""`make demo`: thousands of producers, one pen, and a SIGKILL in the middle.

The parent starts a child that runs the producers through a Writer on a real file, follows its
acknowledgements through a pipe, and kills it with SIGKILL half-way. Then it looks at the file:
all that was acknowledged must be there. A second child sends again what was not acknowledged,
and the table says what came of it. Exits 1 if a message was lost, stored twice or out of order.

The parent plays the part of the world outside: it knows only what it was told through the pipe.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio
from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from ..actors.writer import WriterRef, open_writer
from ..storage.commands import AppendMessages, CreateSession, OpenIncarnation, SetRoute
from ..storage.identity import Incarnation, Seq, SessionId, SessionKey, Uid
from ..storage.records import Draft
from ..storage.sqlite import open_sqlite
from ..storage.units import Guard, Unit
from .system import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import TaskID

_ACK = struct.Struct("<If?")  # producer, latency in seconds, found stored already
_ACKS_PER_WRITE = 256
_TEXT = "A message of a few hundred characters, as people send them. " * 6
_BORN_MS = 1_750_000_000_000  # the same in both runs, so that a re-sent message equals the first


# The child: producers on one Writer ----------------------------------------------------------


class _Acks:
    """Acknowledgements on their way to the parent. What is not flushed was never told."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, producer: int, latency_s: float, *, again: bool) -> None:
        self._buffer += _ACK.pack(producer, latency_s, again)
        if len(self._buffer) >= _ACK.size * _ACKS_PER_WRITE:
            self.flush()

    def flush(self) -> None:
        while self._buffer:
            del self._buffer[: os.write(1, self._buffer)]


def _draft(producer: int, number: int) -> Draft:
    return Draft(
        uid=Uid(f"{_BORN_MS:012x}{producer:010x}{number:010x}"),
        role="user",
        text=f"{producer}/{number} {_TEXT}",
        created_ms=_BORN_MS + number,
    )


async def _produce(
    writer: WriterRef, producer: int, acknowledged: int, messages: int, acks: _Acks
) -> None:
    """One session.

    Opens its key, then sends one message after the other, each after the last ack.
    """
    key, session_id = SessionKey(f"demo:{producer}"), SessionId(f"demo-{producer}")
    incarnation = Incarnation(writer.epoch << 32)
    guard = Guard(key=key, incarnation=incarnation, session_id=session_id)
    await writer.write(Unit((OpenIncarnation(key=key, incarnation=incarnation),)))
    for number in range(acknowledged, messages):
        append = AppendMessages(
            session_id=session_id, base_seq=Seq(number), messages=(_draft(producer, number),)
        )
        unit = Unit((append,), (guard,))
        if number == 0:
            # The first message brings the route and the session's row with it, in the same
            # unit.
            route = SetRoute(key=key, session_id=session_id, replaces=0, at_ms=_BORN_MS)
            create = CreateSession(session_id=session_id, key=key, at_ms=_BORN_MS, source="demo")
            unit = Unit((route, create, append), (guard,))
        started_s = time.perf_counter()
        receipt = await writer.write(unit)
        acks.add(producer, time.perf_counter() - started_s, again=receipt.again)


async def _run_child(path: str, messages: int, acknowledged: list[int]) -> None:
    clock, acks = SystemClock(), _Acks()
    async with (
        open_writer(lambda: open_sqlite(path, clock), clock) as writer,
        trio.open_nursery() as nursery,
    ):
        for producer, count in enumerate(acknowledged):
            nursery.start_soon(_produce, writer, producer, count, messages, acks)
    acks.flush()


# The parent: what was told, what is stored ---------------------------------------------------


class _Run(Struct):
    """What the parent has been told."""

    acknowledged: list[int]
    latencies_s: list[float]
    recognised: int = 0
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.acknowledged)


def _start(path: Path, messages: int, run: _Run) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "onepen.runtime.demo",
            "--child",
            str(path),
            "--messages",
            str(messages),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    child.stdin.write(struct.pack(f"<{len(run.acknowledged)}I", *run.acknowledged))
    child.stdin.close()
    return child


def _follow(child: subprocess.Popen[bytes], run: _Run) -> Iterator[None]:
    """Take acknowledgements in; one step for each that arrived together."""
    assert child.stdout is not None
    rest = b""
    while data := os.read(child.stdout.fileno(), 1 << 16):
        rest += data
        whole = len(rest) - len(rest) % _ACK.size
        for producer, latency_s, again in _ACK.iter_unpack(rest[:whole]):
            run.acknowledged[producer] += 1
            run.latencies_s.append(latency_s)
            run.recognised += again
        rest = rest[whole:]
        yield


def _watch(
    path: Path,
    messages: int,
    run: _Run,
    progress: Progress,
    bar: TaskID,
    kill_at: float = math.inf,
) -> int:
    """Run a child to its end, or kill it once so many messages are acknowledged; its exit code."""
    started_s = time.perf_counter()
    with _start(path, messages, run) as child:
        for _ in _follow(child, run):
            progress.update(bar, completed=run.total)
            if run.total >= kill_at:
                child.send_signal(signal.SIGKILL)
                kill_at = math.inf
        code = child.wait()
    run.seconds += time.perf_counter() - started_s
    return code


def _stored(path: Path, producers: int) -> tuple[list[int], int, int]:
    """Messages in each session; how many uids are stored twice; how many rows are out of place."""
    engine = open_sqlite(path, SystemClock())
    counts: list[int] = []
    uids: Counter[str] = Counter()
    misplaced = 0
    try:
        for producer in range(producers):
            with engine.reading() as reader:
                found = reader.transcript(SessionId(f"demo-{producer}"), limit=100_000).messages
            counts.append(len(found))
            uids.update(message.uid for message in found)
            misplaced += sum(
                message.seq != n or message.text != _draft(producer, n).text
                for n, message in enumerate(found)
            )
    finally:
        engine.close()
    return counts, sum(count - 1 for count in uids.values()), misplaced


def _percentile(samples: list[float], share: float) -> float:
    return sorted(samples)[int(len(samples) * share)] if samples else 0.0


def _demo(producers: int, messages: int, path: Path, console: Console) -> bool:
    run = _Run([0] * producers, [])
    total = producers * messages
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(f"{producers} producers, one pen", total=total)
        code = _watch(path, messages, run, progress, bar, kill_at=total * 0.4)
        killed = code == -signal.SIGKILL
        told_before, unknown_before = run.total, run.recognised
        progress.update(bar, description="killed; looking at the file")
        after_kill, _, _ = _stored(path, producers)
        lost_by_kill = sum(
            max(0, told - stored) for told, stored in zip(run.acknowledged, after_kill, strict=True)
        )
        progress.update(bar, description="started again; sending the rest")
        finished = _watch(path, messages, run, progress, bar) == 0
    counts, duplicated, misplaced = _stored(path, producers)
    lost = lost_by_kill + sum(max(0, messages - count) for count in counts)

    table = Table(title="many sessions, one pen", show_header=False)
    for name, value in (
        ("accepted", f"{total:,}"),
        ("acknowledged before the SIGKILL", f"{told_before:,}"),
        ("stored but not acknowledged then", f"{sum(after_kill) - told_before:,}"),
        ("recognised when sent again", f"{run.recognised - unknown_before:,}"),
        ("stored at the end", f"{sum(counts):,}"),
        ("duplicated", f"{duplicated:,}"),
        ("lost", f"{lost:,}"),
        ("out of order", f"{misplaced:,}"),
        ("messages/s, both runs", f"{run.total / run.seconds:,.0f}"),
        ("p50 / p99 until durable", _latencies(run)),
    ):
        table.add_row(name, value)
    console.print(table)
    if not killed:
        console.print("[red]the first child was not killed: nothing was shown[/]")
    ok = killed and finished and not (lost or duplicated or misplaced) and sum(counts) == total
    console.print("[green]every message once, in order[/]" if ok else "[red]VIOLATION[/]")
    return ok


def _latencies(run: _Run) -> str:
    p50, p99 = _percentile(run.latencies_s, 0.5), _percentile(run.latencies_s, 0.99)
    return f"{p50 * 1000:.1f} ms / {p99 * 1000:.1f} ms"


@click.command()
@click.option("--producers", default=3_000, show_default=True, type=click.IntRange(1, 100_000))
@click.option("--messages", default=20, show_default=True, type=click.IntRange(1, 100_000))
@click.option("--keep", is_flag=True, help="Keep the database and say where it is.")
@click.option("--child", type=click.Path(dir_okay=False), hidden=True)
def main(producers: int, messages: int, child: str | None, *, keep: bool) -> None:
    """Show that nothing is lost and nothing is stored twice when the process is killed."""
    if child is not None:
        told = sys.stdin.buffer.read()
        acknowledged = [count for (count,) in struct.iter_unpack("<I", told)]
        trio.run(_run_child, child, messages, acknowledged)
        return
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="onepen-demo-"))
    try:
        ok = _demo(producers, messages, folder / "demo.db", console)
    finally:
        if keep:
            console.print(f"the database is {folder / 'demo.db'}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
