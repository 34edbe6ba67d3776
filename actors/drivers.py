"""What drives the pen: a thread of its own in production, a task on the loop in simulation; the
same steps.

A driver takes batches, makes them durable and hands them over with one wake-up of the loop each;
when storage is in trouble it recovers, with back-off, and goes on with the same batch. It ends when
it is told to stop and the ledger is empty, and returns `None` then; whatever else happens inside it
is returned as the error it crashed with, never swallowed and never raised into the loop.
"""

from __future__ import annotations

import threading
from inspect import isawaitable
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar, final

import trio
from msgspec import Struct

from ..storage.errors import StaleEpochError, StorageError
from ..storage.pen import Posted
from ..storage.units import Durable, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..storage.identity import Clock
    from ..storage.pen import Pen
    from .intake import Intake
    from .tickets import Ticket

TicketT = TypeVar("TicketT")
_QUIET_S = 0.05  # a conversation's next message often comes at once, and should not find us busy


class Progress(Struct, Generic[TicketT], frozen=True, gc=False):
    """A batch that is durable, with how long staging and committing it took."""

    resolved: list[tuple[Posted[TicketT], Durable | Refused]]
    commit_s: float


class Driver(Protocol):
    """Runs the pen until it is stopped."""

    async def run(self) -> BaseException | None: ...

    def stop(self) -> None:
        """Finish the ledger, then end."""
        ...

    def abandon(self) -> None:
        """End at the next step, whatever is left in the ledger."""
        ...

    def leave_behind(self) -> bool:
        """Let `run` return although the pen is in the middle of a step that can't be stopped.

        True if it was: the driver then closes the engine itself when that step ends.
        """
        ...


class _Backoff:
    """Waits that double up to a limit."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s

    def next(self) -> float:
        wait_s, self._next_s = self._next_s, min(self._next_s * 2, self._max_s)
        return wait_s

    def reset(self) -> None:
        self._next_s = self._first_s


@final
class ThreadDriver:
    """The pen in a dedicated thread. One crossing into the loop for each batch."""

    def __init__(
        self,
        pen: Pen[Ticket],
        clock: Clock,
        backoff: tuple[float, float],
        intake: Intake,
    ) -> None:
        self._pen = pen
        self._clock = clock
        self._backoff = _Backoff(*backoff)
        self._intake = intake
        self._stopping = self._quiet = False
        self._abandoned = threading.Event()
        self._ending = threading.Lock()  # the thread's last step against being left behind
        self._finished = self._left_behind = False
        self._upkeep: Literal["none", "running", "done"] = "none"
        self._emptying = False  # the upkeep under way is for a rest
        self._busy_s = clock.monotonic()
        self._ended = trio.Event()
        self._error: BaseException | None = None
        self._token = trio.lowlevel.current_trio_token()

    async def run(self) -> BaseException | None:
        # A daemon: a thread that hangs in a sync must not keep the process alive.
        thread = threading.Thread(target=self._main, name="onepen writer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads to be had, for now
            return error
        await self._ended.wait()
        return self._error

    def stop(self) -> None:
        self._stopping = True
        self._pen.ledger.wake()

    def abandon(self) -> None:
        self._abandoned.set()
        self.stop()

    def leave_behind(self) -> bool:
        with self._ending:
            self._left_behind = not self._finished
        self._ended.set()
        return self._left_behind

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        """Run something on the loop, if there still is one."""
        try:
            self._token.run_sync_soon(function, *arguments)
        except trio.RunFinishedError:
            # Nobody is left to hear it. What is committed stays committed; the next start finds it.
            self._abandoned.set()

    def _main(self) -> None:
        try:
            self._write_until_stopped()
        except BaseException as error:
            self._error = error
        with self._ending:
            self._finished = True
        if self._left_behind:
            self._pen.engine.close()
        self._tell(self._ended.set)

    def _write_until_stopped(self) -> None:
        pen = self._pen
        if pen.phase == "broken":
            self._recover()
        while not self._abandoned.is_set():
            if not pen.take(wait_s=0):
                if self._stopping:
                    return
                self._look_after_upkeep(idle=True)
                if not self._rest():
                    continue
            self._quiet = False
            started_s = self._clock.monotonic()
            try:
                pen.stage()
                pen.commit()
            except StaleEpochError:
                raise  # somebody else owns the file: recovering would take it back from them
            except StorageError as error:
                self._tell(self._intake.on_trouble, error)
                self._recover()
                continue
            if self._left_behind:
                return  # its tickets were answered as unknown; the rows stay
            progress = Progress(pen.resolve(), self._clock.monotonic() - started_s)
            # Behind the commit: a receipt promises durability.
            self._tell(self._intake.on_progress, progress)
            self._backoff.reset()
            self._busy_s = self._clock.monotonic()
            self._look_after_upkeep(idle=False)
            if pen.engine.chore_due(idle=False):
                pen.engine.chore(idle=False)

    def _rest(self) -> bool:
        """Wait for work; true if there is some. Once it is quiet, chores shorten the time."""
        engine = self._pen.engine
        chores = engine.chore_due(idle=True)
        rest_s = None if chores else self._rest_in_s()
        wait_s = rest_s if not chores else 0 if self._quiet else _QUIET_S
        if self._pen.take(wait_s=wait_s):
            return True
        if self._stopping:
            return False
        if chores:
            self._quiet = True
            engine.chore(idle=True)
        elif rest_s is not None and self._rest_in_s() == 0 and self._upkeep == "none":
            self._begin_upkeep(emptying=True)
        return False

    def _rest_in_s(self) -> float | None:
        """How long it must stay quiet before the log is emptied, if there is anything in it."""
        quiet_s = None if self._upkeep == "running" else self._pen.engine.rest_due()
        if quiet_s is None:
            return None
        return max(0.0, self._busy_s + quiet_s - self._clock.monotonic())

    def _look_after_upkeep(self, *, idle: bool) -> None:
        """Start upkeep beside us when it is due, and finish it once that thread is done."""
        engine = self._pen.engine
        if self._upkeep == "done":
            self._upkeep = "none"
            if self._emptying and idle:
                engine.rest()
                self._busy_s = self._clock.monotonic()  # not again at once, should it be in vain
            else:
                engine.finish_upkeep()
        elif self._upkeep == "none" and engine.upkeep_due(idle=idle):
            self._begin_upkeep(emptying=False)

    def _begin_upkeep(self, *, emptying: bool) -> None:
        self._upkeep, self._emptying = "running", emptying
        threading.Thread(target=self._keep_up, name="onepen upkeep", daemon=True).start()

    def _keep_up(self) -> None:
        try:
            self._pen.engine.upkeep()
        finally:
            self._upkeep = "done"
            self._pen.ledger.wake()  # an idle writer finishes it at once

    def _recover(self) -> None:
        while not self._abandoned.is_set():
            try:
                self._pen.recover()
            except StorageError as error:
                self._tell(self._intake.on_trouble, error)
                self._abandoned.wait(self._backoff.next())
            else:
                if self._pen.phase == "taken":
                    # A disk that opens but can't commit must not be tried without a pause.
                    self._abandoned.wait(self._backoff.next())
                return


@final
class InlineDriver:
    """The pen as a task, with named checkpoints between its steps. For simulation."""

    def __init__(
        self,
        pen: Pen[Ticket],
        clock: Clock,
        backoff: tuple[float, float],
        intake: Intake,
        at: Callable[[str], object] | None,
        on_unstaged: Callable[[], object],
    ) -> None:
        self._pen = pen
        self._clock = clock
        self._backoff = _Backoff(*backoff)
        self._intake = intake
        self._at = at
        self._on_unstaged = on_unstaged
        self._stopping = False
        self._abandoned = trio.CancelScope()

    def stop(self) -> None:
        self._stopping = True
        self._intake.wake()

    def abandon(self) -> None:
        self.stop()
        self._abandoned.cancel()

    def leave_behind(self) -> bool:
        return False  # a task on this loop has no step that we can't wait for

    async def run(self) -> BaseException | None:
        try:
            with self._abandoned:
                await self._write_until_stopped()
        except Exception as error:
            return error
        return None

    async def _point(self, name: str) -> None:
        if self._at is not None:
            result = self._at(name)
            if isawaitable(result):
                await result
        await trio.lowlevel.checkpoint()

    async def _write_until_stopped(self) -> None:
        pen = self._pen
        if pen.phase == "broken":
            await self._recover()
        while True:
            if not pen.take(wait_s=0):
                if self._stopping:
                    return
                if not pen.engine.maintain(idle=True):
                    await self._intake.wait_arrival()
                continue
            await self._point("taken")
            started_s = self._clock.monotonic()
            try:
                pen.stage()
                await self._point("before commit")
                pen.commit()
            except StaleEpochError:
                raise
            except StorageError as error:
                self._intake.on_trouble(error)
                await self._recover()
                continue
            finally:
                self._on_unstaged()
            await self._point("committed")
            self._intake.on_progress(Progress(pen.resolve(), self._clock.monotonic() - started_s))
            self._backoff.reset()
            await self._point("acked")
            if pen.engine.chore_due(idle=False):
                pen.engine.chore(idle=False)

    async def _recover(self) -> None:
        while True:
            try:
                self._pen.recover()
            except StorageError as error:
                self._intake.on_trouble(error)
                await trio.sleep(self._backoff.next())
            else:
                if self._pen.phase == "taken":
                    await trio.sleep(self._backoff.next())
                return
