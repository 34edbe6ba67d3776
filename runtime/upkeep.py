"""Upkeep as its callers see it: backups, restores, checks; at a pace that leaves room for others.

What is long is done in a thread, in steps. Between them it pauses, tells how far it is, and ends if
whoever asked for it does not want it any more.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, final

import trio

from ..actors.intake import WriterSettings
from ..actors.writer import open_writer
from ..storage.commands import MarkDelivery
from ..storage.sqlite import open_sqlite
from ..storage.units import Unit

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

    from ..actors.writer import WriterRef
    from ..storage.engine import Engine
    from ..storage.identity import Clock
    from ..storage.upkeep import Copied, Finding, Tick

    Told = Callable[[str, int, int], None]

_TELL_EVERY_S = 0.1
_HELD = "held by a restore: whether it was sent after the backup is not known"


@final
class Pace:
    """A tick: pauses between steps of copying, and tells of them now and then."""

    def __init__(self, pause_s: float, tell: Told | None = None) -> None:
        self._pause_s = pause_s
        self._tell = tell
        self._next_s = 0.0
        self._stage: str = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if self._tell and (now_s >= self._next_s or done >= total or stage != self._stage):
            self._next_s = now_s + _TELL_EVERY_S
            self._stage = stage
            self._tell(stage, done, total)
        if stage == "copying" and done < total:
            time.sleep(self._pause_s)


def _from_a_thread(pause_s: float, progress: Told | None) -> Tick:
    """The same where a task waits for the thread: it may have been cancelled meanwhile."""

    def tell(stage: str, done: int, total: int) -> None:
        if progress is not None:
            trio.from_thread.run_sync(progress, stage, done, total)

    pace = Pace(pause_s, None if progress is None else tell)

    def tick(stage: str, done: int, total: int) -> None:
        trio.from_thread.check_cancelled()
        pace(stage, done, total)

    return tick


async def make_backup(
    writer: WriterRef,
    target: str | os.PathLike[str],
    pause_s: float,
    *,
    replace: bool,
    progress: Told | None,
) -> Copied:
    """A copy of what the Writer's engine has, made beside it."""
    tick = _from_a_thread(pause_s, progress)
    return await writer.beside(lambda engine: engine.backup(target, tick, replace=replace))


async def make_check(writer: WriterRef, *, full: bool, progress: Told | None) -> list[Finding]:
    """Everything that is wrong with what the Writer's engine has."""
    tick = _from_a_thread(0, progress)
    return await writer.beside(lambda engine: engine.check(tick, full=full))


def hold_deliveries(path: Path, clock: Clock) -> int:
    """Whatever a database would send is unknown from now on: somebody decides. How many they are.

    Owns the file meanwhile, and leaves no lock file.
    """

    def open_engine() -> Engine:
        return open_sqlite(path, clock)

    async def hold() -> int:
        held = 0
        async with open_writer(open_engine, clock, WriterSettings()) as writer:
            while waiting := await writer.read(lambda reader: reader.open_deliveries()):
                now_ms = clock.now()
                for one in waiting:
                    again = one.state == "pending"
                    attempt = one.attempt + again
                    begun = MarkDelivery(
                        delivery_id=one.id, attempt=attempt, state="sending", at_ms=now_ms
                    )
                    told = MarkDelivery(
                        delivery_id=one.id,
                        attempt=attempt,
                        state="unknown",
                        at_ms=now_ms,
                        error=_HELD,
                    )
                    await writer.write(Unit((begun, told) if again else (told,)))
                held += len(waiting)
        return held

    try:
        return trio.run(hold)
    finally:
        path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
