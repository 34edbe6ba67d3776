"""The world's end of the pipes: one life of the process after the other, and requests to it.

Keeps: a request belongs to one life. When that ends, whoever waits hears so (`LostError`): what
became of it nobody knows. A process that nobody asked to end and that ends is noted.

Must never answer for the process, and must never send anything twice by itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING, TypeAlias, final

import msgspec
import trio

from ..pipe import Lines
from .wire import Accepted, Begin, Cancelled, Done, Ended, Ready, Refused, Replied, decode_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .plan import Plan
    from .wire import Line, Order

_READ_BYTES = 1 << 16
_STDERR_SHOWN = 2_000

Answered: TypeAlias = Accepted | Replied | Done | Refused | Cancelled

_encode = msgspec.json.Encoder().encode


class LostError(Exception):
    """The process is gone, and nobody knows what became of the request."""


@final
class Call:
    """A request, and the lines that answer it."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._lines: deque[Answered] = deque()
        self._changed = trio.Event()
        self._lost = False

    def give(self, line: Answered) -> None:
        self._lines.append(line)
        self._changed.set()

    def lose(self) -> None:
        self._lost = True
        self._changed.set()

    async def next(self) -> Answered:
        """The next line. Raises `LostError` when none will come."""
        while not self._lines:
            if self._lost:
                raise LostError
            await self._changed.wait()
            if not self._lost:
                self._changed = trio.Event()
        return self._lines.popleft()


@final
class Life:
    """One process, from its start to its end; times are the loop's."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.started_s = trio.current_time()
        self.ready_s: float | None = None
        self.acknowledged_s: float | None = None
        """When it has acknowledged something for the first time."""
        self.ended_s: float | None = None
        self.opened_s = 0.0
        self.epoch = 0
        self.asked: str | None = None
        """The signal or order that ends it; none for one that ends by itself."""
        self.code: int | None = None
        self.ready: Ready | None = None
        self.left: Ended | None = None
        self.runs = trio.Event()
        self.serves = trio.Event()
        self.gone = trio.Event()
        self.process: trio.Process | None = None

    @property
    def pid(self) -> int:
        return 0 if self.process is None else self.process.pid

    def send_signal(self, name: str) -> None:
        """Ask it to end, or end it."""
        self.asked = name
        if self.process is not None:
            self.process.send_signal(getattr(signal, name))


@final
class Link:
    """Starts lives, and carries requests to the one that serves."""

    def __init__(
        self,
        plan: Plan,
        path: Path,
        module: str,
        note: Callable[[str, str], None],
        on_line: Callable[[Line, Life], None],
    ) -> None:
        self._begin = Begin(plan, str(path))
        self._module = module
        self._note = note
        self._on_line = on_line
        self._log = path.with_name(f"{path.name}.stderr")
        self._calls: dict[int, Call] = {}
        self._next_n = 0
        self._out = bytearray()
        self._written = trio.Event()
        self._serving = trio.Event()
        self.life: Life | None = None
        self.lives: list[Life] = []

    # Requests ------------------------------------------------------------------------------------

    async def serving(self) -> None:
        """Until a process serves."""
        await self._serving.wait()

    def ask(self, order_of: Callable[[int], Order]) -> Call:
        """A request to the process that serves. Raises `LostError` if none does."""
        if not self._serving.is_set():
            raise LostError
        self._next_n += 1
        call = self._calls[self._next_n] = Call(self._next_n)
        self.tell(order_of(call.n))
        return call

    def over(self, call: Call) -> None:
        """Nobody waits for this one any more."""
        self._calls.pop(call.n, None)

    def tell(self, order: Order) -> None:
        """An order that nothing answers; to nobody, if nobody serves."""
        if self._serving.is_set():
            self._out += _encode(order) + b"\n"
            self._written.set()

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    # Lives ---------------------------------------------------------------------------------------

    async def live(self, life: Life) -> None:
        """From the start of a process to its end, whoever brings that about."""
        self.life = life
        self.lives.append(life)
        command = [sys.executable, "-m", self._module]
        # A group of its own: a Ctrl-C at the terminal is for the parent, which ends it in order.
        with self._log.open("ab") as log:
            life.process = await trio.lowlevel.open_process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        process = life.process
        life.runs.set()
        self._out = bytearray(_encode(self._begin) + b"\n")
        self._written.set()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, process)
                await self._read(life, process)
                nursery.cancel_scope.cancel()
            life.code = await process.wait()
        finally:
            with trio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                await process.wait()
            self._lose()
            life.ended_s = trio.current_time()
            life.gone.set()
        self._judge_end(life)

    def _lose(self) -> None:
        if self._serving.is_set():  # else those who wait, wait for the next one's
            self._serving = trio.Event()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.lose()

    def _judge_end(self, life: Life) -> None:
        killed = life.asked == "SIGKILL"
        wanted = -signal.SIGKILL if killed else 0
        if life.asked is None or (life.code != wanted and not killed):
            what = f"life {life.number} ended with {life.code} when asked for {life.asked}"
            self._note("process", f"{what}: {self._last_words()}")

    def _last_words(self) -> str:
        """The end of what it wrote to its standard error."""
        with self._log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _STDERR_SHOWN))
            return log.read().decode(errors="replace").strip() or "it said nothing"

    async def _write(self, process: trio.Process) -> None:
        assert process.stdin is not None
        try:
            while True:
                await self._written.wait()
                self._written = trio.Event()
                data, self._out = bytes(self._out), bytearray()
                await process.stdin.send_all(data)
        except trio.BrokenResourceError:
            pass  # it is gone, as the reader will see

    async def _read(self, life: Life, process: trio.Process) -> None:
        assert process.stdout is not None
        lines = Lines()
        while data := await process.stdout.receive_some(_READ_BYTES):
            for line in lines.take(bytes(data)):
                self._take(decode_line(line), life)

    def _take(self, line: Line, life: Life) -> None:
        match line:
            case Ready():
                life.ready, life.ready_s, life.epoch = line, trio.current_time(), line.epoch
                life.opened_s = line.opened_s
                life.serves.set()
                self._serving.set()
            case Ended():
                life.left = line
            case Accepted() | Replied() | Done() | Refused() | Cancelled():
                if isinstance(line, Accepted) and life.acknowledged_s is None:
                    life.acknowledged_s = trio.current_time()
                if line.n in self._calls:
                    self._calls[line.n].give(line)
            case _:
                pass
        self._on_line(line, life)
