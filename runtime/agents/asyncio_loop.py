"""One asyncio loop on trio's own: opened for an agent, ended in bounded time whatever runs on it.

| what happens on the loop                    | what follows                                       |
| ------------------------------------------- | -------------------------------------------------- |
| a call is cancelled                         | its task is; it has the grace to end               |
| a task swallows that                        | it is forced to end, and no new call comes here    |
| a task fails and nobody awaits it           | the loop ends, and its calls with a reason         |
| a task leaves the process (`sys.exit`)      | the same; it does not leave the process            |
| a callback or a transport fails             | it is logged, as asyncio does                      |

Keeps: every call ends, and the loop ends: cancelled, then waited for, then forced, in the order in
which tasks were begun. Tasks are referenced until they are done, so that the moment at which one is
reported does not depend on a garbage collector. Code in threads is left behind, as asyncio does.

Must never raise into the nursery that it runs in, except trio's cancellation and the user's Ctrl-C;
must never import trio-asyncio before a loop is opened: that changes asyncio for the whole process.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from contextvars import copy_context
from importlib import import_module
from inspect import isawaitable
from types import coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import trio

from ...actors.raised import is_theirs, ours_of, said_by
from ...storage.errors import OnepenError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

logger = logging.getLogger(__name__)

AnyTask = asyncio.Task[Any]
_REFUSALS_MAX = 10  # in a row: a trio nursery in a coroutine would wait for its children for ever


class AsyncioLoopError(OnepenError):
    """The asyncio loop that this ran on has ended under it."""

    hint = "await every task that you create, or let it handle its own errors"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TrioInAsyncioError(OnepenError):
    """A trio function was awaited in asyncio code."""

    hint = "await the turn's own methods, or asyncio's functions; or give a native agent"

    def __init__(self) -> None:
        super().__init__("trio can't be awaited in an asyncio task")


class ExitInTaskError(Exception):
    """Code in an asyncio task wanted to leave the process."""


class _ForcedError(Exception):
    """A task was ended by force."""


class _Raised(NamedTuple):
    error: BaseException


async def _captured(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What comes of it, as a value: only a cancellation is asyncio's business."""
    try:
        result = function(*arguments)
        return await result if isawaitable(result) else result
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        return _Raised(error)


@coroutine
def _only_asyncio(coro: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run it, and refuse what trio's functions would wait for: here it would wake the loop itself,
    in the middle of something else, and trio takes the process down for that.
    """
    step: Callable[[Any], Any] = coro.send
    value: Any = None
    refused = 0
    while True:
        try:
            waits_for = step(value)
        except StopIteration as end:
            return end.value
        if waits_for is None or asyncio.isfuture(waits_for):
            refused = 0
            try:
                step, value = coro.send, (yield waits_for)
            except GeneratorExit:
                coro.close()
                raise
            except BaseException as error:
                step, value = coro.throw, error
        else:
            abort = getattr(waits_for, "abort_func", None)
            if abort is not None:
                abort(_nothing)  # whatever was to wake it forgets about that
            refused += 1
            if refused > _REFUSALS_MAX:
                raise TrioInAsyncioError
            step, value = coro.throw, TrioInAsyncioError()


def _nothing() -> None:
    """Stands for what trio calls to raise a cancellation."""


@final
class AsyncioLoop:
    """A loop for one agent. `serve` runs it; `lost` is told once when no more calls may come."""

    def __init__(
        self, grace_s: float, threads_max: int, lost: Callable[[AsyncioLoop], object]
    ) -> None:
        self._grace_s = grace_s
        self._threads_max = threads_max
        self._lost = lost
        self._loop: Any = None
        self._current_loop: Any = None  # trio-asyncio's context variable
        self._tasks: dict[AnyTask, Coroutine[Any, Any, Any]] = {}  # in the order of their beginning
        self._waits: dict[AnyTask, trio.Event] = {}
        self._quiet: trio.Event | None = None  # somebody waits until no task is left
        self._ending = trio.Event()
        self._left: BaseException | None = None  # the user's Ctrl-C, on its way out
        self.opened = trio.Event()
        self.ended = trio.Event()
        self.failure: BaseException | None = None
        self._reason = "it failed"
        self.retired = False
        self.calls = 0
        self.given_up = 0
        self.before_end: Callable[[], Any] | None = None
        """Called on the loop before its tasks are cancelled; it may be an asyncio function."""

    # Its life ------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Open it, and run it until it is to end, or until this is cancelled."""
        try:
            trio_asyncio: Any = import_module("trio_asyncio")
            async with trio_asyncio.open_loop() as loop:
                self._prepare(loop, trio_asyncio)
                self.opened.set()
                try:
                    await self._ending.wait()
                finally:
                    with trio.CancelScope(shield=True):
                        await self._wind_up()
        except BaseException as error:
            if is_theirs(error):
                self._fail(error, f"it raised {said_by(error)}")
            if (ours := ours_of(error)) is not None:
                raise ours  # noqa: B904 - it is a part of the same error
            logger.error("an asyncio loop has ended", exc_info=error)
        finally:
            self._leave()
            self.opened.set()
            self.ended.set()
        if self._left is not None:
            raise self._left

    def _prepare(self, loop: Any, trio_asyncio: Any) -> None:
        limiter = trio.CapacityLimiter(self._threads_max)

        class Executor(trio_asyncio.TrioExecutor):  # type: ignore[misc]
            async def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
                # As asyncio has it: who is cancelled goes on, and the thread is left behind.
                return await trio.to_thread.run_sync(
                    function, *arguments, abandon_on_cancel=True, limiter=limiter
                )

        loop.set_default_executor(Executor())
        loop.set_task_factory(self._new_task)
        loop.set_exception_handler(self._unhandled)
        self._loop, self._current_loop = loop, trio_asyncio.current_loop

    def end(self) -> None:
        """No new calls; `ended` is set in bounded time."""
        self._leave()
        self._ending.set()

    def retire(self) -> None:
        """No new calls; it ends when the last one has ended."""
        self._leave()
        if not self.calls:
            self.end()

    def _fail(self, error: BaseException, reason: str) -> None:
        if self.failure is None and not self._ending.is_set():
            self.failure, self._reason = error, reason
            self.end()

    def _leave(self) -> None:
        if not self.retired:
            self.retired = True
            self._lost(self)

    async def _wind_up(self) -> None:
        """No task is left behind this, whatever they do."""
        if not self._loop.is_running():
            error = RuntimeError("a callback has left the process")
            self._fail(error, "a callback wanted to leave the process")
        self.end()
        if self._loop.is_running():
            if self.before_end is not None:
                try:
                    with trio.move_on_after(self._grace_s):
                        await self._run(self.before_end, ())
                except BaseException as error:
                    if ours_of(error) is not None:
                        raise
                    logger.error("closing an agent failed", exc_info=error)
            for task in list(self._tasks):
                task.cancel()
            if self._tasks:
                self._quiet = trio.Event()
                with trio.move_on_after(self._grace_s):
                    await self._quiet.wait()
        for task in list(self._tasks):
            logger.error("%s is forced to end", _shown(task))
            self._force(task)

    # Tasks ---------------------------------------------------------------------------------------

    def _new_task(self, loop: Any, coro: Coroutine[Any, Any, Any], **options: Any) -> AnyTask:
        if not asyncio.iscoroutine(coro):
            raise TypeError(f"a coroutine was expected, got {coro!r}")
        guard = self._guard(coro)
        for name in ("__name__", "__qualname__"):
            setattr(guard, name, getattr(coro, name, type(coro).__name__))
        task = asyncio.Task(guard, loop=loop, **options)
        self._tasks[task] = coro
        task.add_done_callback(self._forget)
        return task

    async def _guard(self, coro: Coroutine[Any, Any, Any]) -> Any:
        """An exit in a task would stop trio-asyncio's loop in the middle, for ever."""
        try:
            return await _only_asyncio(coro)
        except KeyboardInterrupt as error:
            self._left = error
            self._fail(error, "Ctrl-C was pressed")
            raise ExitInTaskError("Ctrl-C") from error
        except SystemExit as error:
            raise ExitInTaskError(said_by(error)) from error

    def _forget(self, task: AnyTask) -> None:
        coro = self._tasks.pop(task, None)
        if coro is not None:
            coro.close()  # a task that is cancelled before its first step has never awaited it
        if (wait := self._waits.pop(task, None)) is not None:
            wait.set()
        if self._quiet is not None and not self._tasks:
            self._quiet.set()

    def _force(self, task: AnyTask) -> None:
        """End a task that does not end by itself. Its finally blocks run, up to an await."""
        try:
            # What it is made of is closed from inside; it may refuse that as well.
            cast("Any", task.get_coro()).close()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            logger.error("%s resists", _shown(task), exc_info=error)
        if not task.done():
            # A task has no such method on purpose; the future that it is has one.
            future: Any = asyncio.Future
            future.set_exception(task, _ForcedError("it was forced to end"))
            task.exception()  # nobody is to be told that nobody has asked
        self._forget(task)

    def _unhandled(self, _: Any, context: dict[str, Any]) -> None:
        error, message = context.get("exception"), context.get("message")
        if isinstance(error, BaseException) and isinstance(context.get("future"), asyncio.Task):
            if not self._ending.is_set():
                logger.error("a task that nobody awaited has failed", exc_info=error)
            self._fail(error, f"a task that nobody awaited raised {said_by(error)}")
        else:
            logger.error("asyncio says: %s", message, exc_info=error)

    # Calls ---------------------------------------------------------------------------------------

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call it on the loop, sync or async; its value, or what it raises.

        Cancelled, it ends within the grace. Raises `AsyncioLoopError` if the loop ends under it.
        """
        if self._ending.is_set():
            raise self.gone()
        self.calls += 1
        try:
            return await self._run(function, arguments)
        finally:
            self.calls -= 1
            if self.retired and not self.calls:
                self.end()

    async def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        context = copy_context()
        context.run(self._current_loop.set, self._loop)
        coro: Any = _captured(function, arguments)
        coro.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)
        task: AnyTask = self._loop.create_task(coro, context=context)
        done = self._waits[task] = trio.Event()
        try:
            await done.wait()
        except trio.Cancelled:
            task.cancel()
            until_s = trio.current_time() + self._grace_s
            with trio.CancelScope(shield=True, deadline=until_s):
                await done.wait()
            if not done.is_set():
                self._give_up(task)
                raise
            if task.cancelled() or task.exception() is not None:
                raise
        return self._outcome(task)

    def _give_up(self, task: AnyTask) -> None:
        self.given_up += 1
        logger.error(
            "%s has not ended %g s after its cancellation; its loop is given up:\n%s",
            _shown(task),
            self._grace_s,
            _stack(self._tasks.get(task)),
        )
        self._force(task)
        self.retire()

    def _outcome(self, task: AnyTask) -> Any:
        cut = task.cancelled() or task.exception() is not None
        found = None if cut else task.result()
        if not cut and not isinstance(found, _Raised):
            return found
        if self._ending.is_set() and (cut or self.failure is not None):
            raise self.gone()
        if isinstance(found, _Raised):
            raise found.error
        raise asyncio.CancelledError("the agent has cancelled itself")

    def gone(self) -> AsyncioLoopError:
        """Why no call can come here."""
        if self.failure is None:
            return AsyncioLoopError("the asyncio loop of this agent was closed")
        error = AsyncioLoopError(f"the asyncio loop of this agent has ended: {self._reason}")
        error.__cause__ = self.failure
        return error

    # From asyncio to trio ------------------------------------------------------------------------

    async def cross(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """For code on the loop: call an async function of trio's. Cancelling it goes through."""
        return await self._loop.trio_as_future(function, *arguments)


def _shown(task: AnyTask) -> str:
    name = getattr(task.get_coro(), "__qualname__", "a task")
    return f"the asyncio task {task.get_name()} ({name})"


def _stack(at: Any) -> str:
    """Where a coroutine waits, through everything that it awaits."""
    frames: list[tuple[Any, int]] = []
    while at is not None:
        frame = getattr(at, "cr_frame", None)
        if frame is not None:
            frames.append((frame, frame.f_lineno))
        at = getattr(at, "cr_await", None)
    return "".join(traceback.StackSummary.extract(iter(frames)).format())
