"""The world outside: it starts a gateway, kills it in the middle, starts another, and looks.

It knows only what it was told through the pipe, and what the file holds when nobody has it open.
Exits 1 if anything was lost, stored twice, out of order or torn.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import trio
from rich.console import Console

from ..display import display_on
from ..pipe import Teller
from .account import account, at_the_kill, table_of, wrong_in
from .gateway import Script, serve
from .stored import look
from .told import Told

if TYPE_CHECKING:
    from ..display import Display
    from .stored import Stored
    from .told import Line

_PROGRAM = "onepen.runtime.demo"
_KILL_AT = 0.45  # of all messages acknowledged: every conversation is in the middle of something


class _Stage:
    """The file, the gateways that serve it one after the other, and what is shown of them."""

    def __init__(self, path: Path, script: Script, told: Told, display: Display) -> None:
        self._path = path
        self._script = script
        self._told = told
        self._display = display
        self._total = script.conversations * script.turns

    def look(self, name: str) -> Stored:
        self._display.begin(name, 1)
        stored = look(self._path, self._script)
        news = f"{stored.messages.total():,} messages in {stored.sessions:,} sessions"
        if stored.running or stored.waiting:
            news += f"; {len(stored.running):,} turns cut off, {len(stored.waiting):,} waiting"
        self._display.end(news)
        return stored

    def run_child(self, name: str, *, kill_at: float = math.inf) -> int:
        """Run a gateway to its end, or kill it once so much is acknowledged; its exit code."""
        told = self._told
        self._display.begin(name, self._total)
        started_s, replies_before, news = 0.0, len(told.replies), "nothing was heard of it"
        with self._start(to_be_killed=kill_at < math.inf) as child:
            assert child.stdout is not None
            while data := os.read(child.stdout.fileno(), 1 << 16):
                started_s = started_s or time.perf_counter()  # when it serves, not when it starts
                told.take(data)
                seconds = time.perf_counter() - started_s
                news = self._news(len(told.replies) - replies_before, seconds)
                self._display.update(told.total, news)
                if told.total >= kill_at:
                    # At any moment, not just behind a line: this is no part of the script.
                    time.sleep(random.uniform(0.0, 0.05))
                    child.send_signal(signal.SIGKILL)
                    kill_at = math.inf
            told.hang_up()
            code = child.wait()
        if started_s:
            told.seconds += time.perf_counter() - started_s
        self._display.end(news)
        return code

    def _news(self, replies: int, seconds: float) -> str:
        told = self._told
        return (
            f"{told.total:,} of {self._total:,} messages, "
            f"{replies / max(seconds, 0.1):,.0f} turns/s, {len(told.rotations):,} rotations, "
            f"{told.switches:,} switches, {told.outcomes['interrupted']:,} interrupts"
        )

    def _start(self, *, to_be_killed: bool) -> subprocess.Popen[bytes]:
        script = self._script
        command = [sys.executable, "-m", _PROGRAM, "--child", str(self._path)]
        options = ["--sessions", script.conversations, "--turns", script.turns]
        options += ["--seed", script.seed, *(["--to-be-killed"] if to_be_killed else [])]
        child = subprocess.Popen(
            [*command, *map(str, options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(self._told.acknowledged))
        child.stdin.close()
        return child


def _demo(script: Script, path: Path, console: Console) -> bool:
    told = Told(script.conversations)
    console.print(
        f"{script.conversations:,} people talk to an agent, {script.turns:,} messages each, through"
        " one process and one file.\nIt is killed in the middle and started again; then every"
        " message is accounted for.\n",
        highlight=False,
        soft_wrap=True,
    )
    with display_on(console) as display:
        stage = _Stage(path, script, told, display)
        kill_at = script.conversations * script.turns * _KILL_AT
        killed = stage.run_child("a gateway serves", kill_at=kill_at) == -signal.SIGKILL
        # Whoever was not killed has shown nothing; perhaps it left no file to look at.
        before = at_the_kill(told, stage.look("SIGKILL, it left")) if killed else None
        finished = killed and stage.run_child("the next one serves") == 0
        stored = stage.look("and in the end") if killed else None
    if before is None or stored is None:
        console.print("[red]FAILED: the first gateway ended by itself[/]")
        return False
    facts = account(script, told, before, stored)
    console.print(table_of(facts))
    for violation in stored.violations:
        console.print(violation, style="red", markup=False)
    if not finished:
        console.print("[red]the second gateway did not come to its end[/]")
    wrong = wrong_in(facts)
    if finished and not wrong:
        console.print("[green]every message once, in order; every conversation in one place[/]")
        return True
    console.print(f"[red]FAILED: {', '.join(wrong) or 'it did not end'}[/]", soft_wrap=True)
    return False


async def _run_child(
    path: str, script: Script, acknowledged: list[int], *, to_be_killed: bool
) -> None:
    teller = Teller()

    def show(line: Line) -> None:
        teller.tell(line)
        teller.flush()  # what a platform has shown does not go with the process that sent it

    async with trio.open_nursery() as nursery:
        nursery.start_soon(teller.keep_telling)
        await serve(path, script, acknowledged, teller.tell, show, to_be_killed=to_be_killed)
        nursery.cancel_scope.cancel()
    teller.flush()


@click.command()
@click.option("--sessions", default=250, show_default=True, type=click.IntRange(1, 10_000))
@click.option("--turns", default=8, show_default=True, type=click.IntRange(2, 10_000))
@click.option(
    "--seed", default=1, show_default=True, help="Of the script; the kill hits where it hits."
)
@click.option("--keep", is_flag=True, help="Keep the database and say where it is.")
@click.option("--child", type=click.Path(dir_okay=False), hidden=True)
@click.option("--to-be-killed", is_flag=True, hidden=True)
def main(
    sessions: int, turns: int, seed: int, child: str | None, *, keep: bool, to_be_killed: bool
) -> None:
    """Show that no conversation loses anything, or its place, when the process is killed."""
    script = Script(conversations=sessions, turns=turns, seed=seed)
    if child is not None:
        acknowledged = msgspec.json.decode(sys.stdin.buffer.read(), type=list[int])
        trio.run(partial(_run_child, child, script, acknowledged, to_be_killed=to_be_killed))
        return
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="onepen-demo-"))
    try:
        ok = _demo(script, folder / "demo.db", console)
    finally:
        if keep:
            console.print(f"the database is {folder / 'demo.db'}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
