"""What happens to the process: it is killed, asked to end, and started again, until all are calm.

Keeps: between two lives nobody has the file open, and then every promise since the last look must
be kept in it; an intruder tries the file only while a life is certain to hold it.

Must never begin a life while another one lasts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import apsw
import trio

from ...storage.errors import DatabaseHeldError, OnepenError
from ...storage.sqlite import open_sqlite
from ..system import SystemClock
from .link import Life
from .plan import settings_of
from .script import end_of
from .stored import broken
from .wire import Finish

if TYPE_CHECKING:
    from pathlib import Path

    from .ledger import Ledger
    from .link import Link
    from .plan import Plan
    from .script import End

_START_S = 60.0  # a start that recovers much; after that it hangs
_END_GRACE_S = 10.0
_STRAYS_MAX = 3  # lives that end by themselves, or never serve, before nobody tries again
_PROMISE_RULES = {
    "message": "kept messages",
    "turn": "kept replies",
    "delivery": "kept deliveries",
    "session": "kept sessions",
    "event": "kept events",
}


class HopelessError(Exception):
    """The process does not stay alive for reasons of its own."""


@final
class Trouble:
    """Gives lives their ends."""

    def __init__(self, plan: Plan, path: Path, link: Link, ledger: Ledger) -> None:
        self._plan = plan
        self._path = path
        self._link = link
        self._ledger = ledger
        self._calm = trio.Event()
        self._done = trio.Event()
        self.begun = trio.Event()
        """A life was brought to its end by us."""
        self.looks_s = 0.0

    def calm_down(self) -> None:
        """No more ends, but the last one."""
        self._calm.set()

    def finish(self) -> None:
        """Nobody waits for anything any more: the life that serves is the last one."""
        self._calm.set()
        self._done.set()

    async def run(self) -> None:
        """One life after the other. Raises `HopelessError`."""
        number = strays = 0
        while True:
            life, end = Life(number), end_of(self._plan, number)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._link.live, life)
                await self._see_through(life, end)
            self._ledger.looked["process"] += 1
            self._ledger.looked["orderly ends"] += life.asked not in (None, "SIGKILL")
            await self._look()
            if life.asked == "finish":
                return
            if life.asked is None or not (life.serves.is_set() or end.early):
                strays += 1
                if strays > _STRAYS_MAX or self._done.is_set():
                    raise HopelessError
            number += 1

    async def _see_through(self, life: Life, end: End) -> None:
        """Until the process is gone."""
        await life.runs.wait()
        if self._plan.kill_every_s and not self._calm.is_set():
            if end.early or await self._is_ready(life):
                await self._wait(life, end.after_s)
            if not self._calm.is_set():
                await self._end(life, end)
                return
        if await self._is_ready(life):
            await self._last(life)

    async def _is_ready(self, life: Life) -> bool:
        """Whether it serves; one that doesn't in time is killed, and one that is gone is gone."""
        with trio.move_on_after(_START_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_when_gone, life, nursery.cancel_scope)
                await life.serves.wait()
                nursery.cancel_scope.cancel()
        if life.serves.is_set() or life.gone.is_set():
            return life.serves.is_set()
        words = f"life {life.number} did not serve within {_START_S:g} s"
        self._ledger.note("process", words)
        life.send_signal("SIGKILL")
        await life.gone.wait()
        return False

    async def _cancel_when_gone(self, life: Life, scope: trio.CancelScope) -> None:
        await life.gone.wait()
        scope.cancel()

    async def _wait(self, life: Life, seconds: float) -> None:
        """So long, or until all are calm, or until it has ended by itself."""
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_when_gone, life, nursery.cancel_scope)
                await self._calm.wait()
                nursery.cancel_scope.cancel()

    async def _end(self, life: Life, end: End) -> None:
        if life.gone.is_set():
            return
        if end.intruder and life.serves.is_set():
            await trio.to_thread.run_sync(self._intrude, life)
        self.begun.set()
        orderly = end.signal != "SIGKILL" and life.serves.is_set()
        life.send_signal(end.signal if orderly else "SIGKILL")
        if orderly:
            await self._in_time(life, end.signal)
        await life.gone.wait()

    async def _last(self, life: Life) -> None:
        """Serve until nobody waits for anything, then finish."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_gone, life, nursery.cancel_scope)
            await self._done.wait()
            nursery.cancel_scope.cancel()
        if life.gone.is_set():
            return
        life.asked = "finish"
        self._link.tell(Finish())
        await self._in_time(life, "finish", self._plan.drain_s)

    async def _in_time(self, life: Life, asked: str, more_s: float = 0.0) -> None:
        limit_s = settings_of(self._plan).shutdown_s + _END_GRACE_S + more_s
        with trio.move_on_after(limit_s):
            await life.gone.wait()
            return
        words = f"life {life.number} has not ended {limit_s:g} s after {asked}"
        self._ledger.note("orderly ends", words)
        life.send_signal("SIGKILL")
        if asked == "finish":
            life.asked = "finish"
        await life.gone.wait()

    def _intrude(self, life: Life) -> None:
        """Nobody ends this life meanwhile, so the file must be held."""
        self._ledger.looked["one writer"] += 1
        try:
            engine = open_sqlite(self._path, SystemClock())
        except DatabaseHeldError:
            return
        except OnepenError as error:
            if not life.gone.is_set():
                self._ledger.note("one writer", f"refused for another reason: {error.message}")
            return
        engine.close()
        if life.process is not None and life.process.poll() is None:
            self._ledger.note("one writer", f"a second writer was let in beside life {life.number}")

    async def _look(self) -> None:
        """Nobody has the file open: what was promised must be in it, before anybody repairs it."""
        promises = self._ledger.take_promises()
        if not promises:
            return
        started_s = trio.current_time()
        try:
            unkept = await trio.to_thread.run_sync(broken, self._path, promises)
        except (OSError, apsw.Error, OnepenError) as error:
            self._ledger.note("file", f"it can't be read: {error}")
            return
        for promise in unkept:
            words = f"{promise.kind} {promise.id} ({promise.who})"
            self._ledger.note(_PROMISE_RULES[promise.kind], words)
        for promise in promises:
            self._ledger.looked[_PROMISE_RULES[promise.kind]] += 1
        self.looks_s += trio.current_time() - started_s
