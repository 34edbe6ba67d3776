"""`open_runtime`: a database, its Writer, the Directory and the people who look after them.

    storage (the Writer)  ⊃  the Courier  ⊃  sessions (the Directory)  ⊃  housekeeping  ⊃  the block

The nesting is the order of the end: the caller's block, then housekeeping, then every live session
is finalized and its last words are sent, and only then does the Writer drain. Errors of the block
leave it as they are; a failure of the runtime is one `RuntimeFailedError`; a cancelled block
drains shortly, shielded.

Recovery reads only unfinished work. Turns that were running are marked (or resumed) before the
block begins; messages that wait go on beside it. It is idempotent: each key's own actor does it,
whoever starts that actor, and killed half-way it is done again by the next start.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import trio

from ..actors.binding import clean_context
from ..actors.clearing import ORPHANS_MARK, finalize_orphans_once
from ..actors.courier import Courier
from ..actors.directory import Directory
from ..actors.hooks import Hooks
from ..actors.line import (
    Counters,
    Operate,
    RuntimeClosedError,
    SessionBusyError,
    Surroundings,
)
from ..actors.policy import ChildSpec, Policy
from ..actors.raised import sole_cause
from ..actors.retention import keep_house_clean
from ..actors.slots import Slots
from ..actors.sources import check_source, source_of
from ..actors.supervisor import RestartIntensityError, open_supervisor
from ..actors.timetable import Bell, Timetable
from ..actors.warm import AgentSource
from ..actors.writer import open_writer
from ..storage.errors import OnepenError, WriterFailedError
from ..storage.sqlite import open_sqlite
from .runtime import Ending, Runtime
from .settings import Settings, check_settings
from .system import SystemClock, SystemIds

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator, Callable, Mapping

    from ..actors.sources import SourcePolicy
    from ..actors.warm import SessionInfo
    from ..storage.engine import Engine, Reader
    from ..storage.identity import Clock, Ids, SessionKey
    from ..storage.records import Turn

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_CANCELLED_DRAIN_S = 5.0  # whoever cancels wants an end; what is stored is stored


class RuntimeFailedError(OnepenError):
    """The runtime could not be kept alive; its owner must decide."""

    hint = "look at the cause; what was acknowledged is stored, and the next start goes on from it"


@asynccontextmanager
async def open_runtime(
    path: str | os.PathLike[str] | None,
    *,
    agent: Any = None,
    factory: Callable[[SessionInfo], Any] | None = None,
    settings: Settings | None = None,
    sources: Mapping[str, SourcePolicy] | None = None,
    hooks: object | None = None,
    clock: Clock | None = None,
    ids: Ids | None = None,
) -> AsyncGenerator[Runtime]:
    """Open a database file and serve conversations for as long as the block lasts.

    `None` is a runtime in memory. `agent` is shared by all keys; `factory(session)` builds one for
    each. `sources` says, by name, how messages of a source are taken and answered. Raises
    `DatabaseHeldError`, `OpenError` and `SettingsError` before anything is started.
    """
    settings, clock = settings or Settings(), clock or SystemClock()

    def open_engine() -> Engine:
        return open_sqlite(path, clock, settings.engine)

    async with assemble(
        open_engine,
        clock,
        ids or SystemIds(),
        settings,
        AgentSource(agent, factory),
        hooks,
        sources,
    ) as runtime:
        yield runtime


@asynccontextmanager
async def assemble(
    open_engine: Callable[[], Engine],
    clock: Clock,
    ids: Ids,
    settings: Settings,
    agents: AgentSource,
    hooks: object | None = None,
    sources: Mapping[str, SourcePolicy] | None = None,
    *,
    inline: bool = False,
    at: Callable[[str], object] | None = None,
) -> AsyncGenerator[Runtime]:
    """The same from parts; `inline` and `at` are for simulation, as in `open_writer`."""
    settings, sources = check_settings(settings), dict(sources or {})
    for name, policy in sources.items():
        check_source(name, policy)
    body_error: BaseException | None = None
    serving = _Serving(settings, sources)
    try:
        async with trio.open_nursery() as nursery:
            parts = (open_engine, clock, ids, agents, hooks)
            runtime = await nursery.start(partial(serving.run, *parts, inline=inline, at=at))
            try:
                yield runtime
            except BaseException as error:
                body_error = error
            cancelled = body_error is not None and _is_cancelled(body_error)
            with trio.CancelScope(shield=True):
                await serving.stop(cancelled=cancelled)
    except BaseException as error:
        if body_error is None or _is_cancelled(body_error):
            _raise_failure(error)
        logger.error("the runtime failed while it ended", exc_info=error)
    if body_error is not None:
        raise body_error


def _is_cancelled(error: BaseException) -> bool:
    """Whether it is trio's cancellation and nothing else; also as the group of a nursery."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return all(map(_is_cancelled, group.exceptions))
    return isinstance(error, trio.Cancelled)


class _Serving:
    """The task beside the caller's block in which everything lives.

    Shielded once it serves, so that a block that is cancelled still finds everybody alive who is
    needed for an orderly end.
    """

    def __init__(self, settings: Settings, sources: Mapping[str, SourcePolicy]) -> None:
        self._settings = settings
        self._sources = sources
        self._asked = trio.Event()
        self._ended = trio.Event()
        self._cancelled = False

    async def stop(self, *, cancelled: bool) -> None:
        """End in order, shortly if the block was cancelled; waits until it is done."""
        self._cancelled = cancelled
        self._asked.set()
        await self._ended.wait()

    async def run(
        self,
        open_engine: Callable[[], Engine],
        clock: Clock,
        ids: Ids,
        agents: AgentSource,
        hooks: object | None,
        *,
        inline: bool,
        at: Callable[[str], object] | None,
        task_status: trio.TaskStatus[Runtime],
    ) -> None:
        settings = self._settings
        try:
            with trio.CancelScope() as scope:
                async with open_writer(
                    open_engine, clock, settings.writer, inline=inline, at=at
                ) as writer:
                    context = clean_context()
                    courier = Courier(writer, clock, settings.deliveries, self._sources, context)
                    surroundings = Surroundings(
                        writer=writer,
                        clock=clock,
                        ids=ids,
                        settings=settings.sessions,
                        hooks=Hooks(hooks, settings.sessions.hook_deadline_s),
                        agents=agents,
                        slots=Slots(settings.sessions.turns_running_max),
                        counters=Counters(),
                        courier=courier,
                        bell=Bell(),
                        context=context,
                        on_idle=_ignore,
                    )
                    sending = (ChildSpec("courier", courier.run),)
                    async with open_supervisor(Policy(), sending, name="outbox"):
                        await self._serve(surroundings, scope, task_status)
        finally:
            self._ended.set()

    async def _serve(
        self,
        surroundings: Surroundings,
        scope: trio.CancelScope,
        task_status: trio.TaskStatus[Runtime],
    ) -> None:
        settings = self._settings
        async with trio.open_nursery() as nursery:
            directory = Directory(surroundings, nursery)
            surroundings.agents.serve_in(nursery, surroundings.context)
            timetable = Timetable(
                directory,
                surroundings.writer,
                surroundings.clock,
                self._sources,
                surroundings.bell,
            )
            ending = Ending(directory, timetable, surroundings.courier)
            parts = (directory, timetable, surroundings, settings, self._sources)
            runtime = Runtime(*parts, ending)
            try:
                half_way = await _recover(directory, surroundings, settings)
                keep = partial(
                    keep_house_clean,
                    surroundings.writer,
                    surroundings.clock,
                    settings.sessions,
                    half_way=half_way,
                )
                children = (
                    ChildSpec("housekeeping", _as_child(directory.keep_house)),
                    ChildSpec("retention", _as_child(keep)),
                    ChildSpec("timetable", _as_child(timetable.run)),
                )
                async with open_supervisor(Policy(), children, name="runtime"):
                    scope.shield = True
                    task_status.started(runtime)
                    await self._asked.wait()
            finally:
                await _end(ending, settings, cancelled=self._cancelled)
                await _close_agents(surroundings.agents)
                nursery.cancel_scope.cancel()


def _raise_failure(error: BaseException) -> None:
    """One clear error for whatever went wrong inside; what is not ours goes on as it is."""
    error = sole_cause(error)
    if isinstance(error, OnepenError) and not isinstance(error, RuntimeFailedError):
        if isinstance(error, RestartIntensityError | WriterFailedError):
            raise RuntimeFailedError(f"the runtime failed: {error.message}") from error
        raise error
    if isinstance(error, Exception):
        raise RuntimeFailedError(f"the runtime failed: {error!r}") from error
    raise error


async def _end(ending: Ending, settings: Settings, *, cancelled: bool) -> None:
    limit_s = min(settings.shutdown_s, _CANCELLED_DRAIN_S) if cancelled else settings.shutdown_s
    with trio.CancelScope(shield=True):
        if not await ending.within(limit_s):
            logger.error("not everything could be finalized and sent within %s s", limit_s)


async def _close_agents(agents: AgentSource) -> None:
    with trio.CancelScope(shield=True, deadline=trio.current_time() + _CANCELLED_DRAIN_S):
        await agents.close()


def _ignore(_: SessionKey) -> None:
    """The Directory puts its own in this place."""


def _as_child(run: Callable[[], Any]) -> Any:
    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        await run()

    return start


# Recovery ------------------------------------------------------------------------------------


def _unfinished(reader: Reader) -> tuple[tuple[Turn, ...], bool, bool]:
    return reader.unfinished_turns(), reader.mark(ORPHANS_MARK) is None, bool(reader.purges(1))


async def _recover(directory: Directory, surroundings: Surroundings, settings: Settings) -> bool:
    """Let every key with unfinished work be served; those with cut-off turns before we begin.

    Whether a deletion was cut off, which is gone on with beside everything else.
    """
    writer = surroundings.writer
    turns, unmarked, half_way = await writer.read(_unfinished)
    if turns:
        await _wake(directory, settings, turns)
    if unmarked:
        await finalize_orphans_once(writer, surroundings.clock)
    return half_way


async def _wake(directory: Directory, settings: Settings, turns: tuple[Turn, ...]) -> None:
    cut_off = dict.fromkeys(turn.key for turn in turns if turn.state == "running")
    waiting = [key for key in dict.fromkeys(turn.key for turn in turns) if key not in cut_off]
    logger.info("recovering %d cut-off turns and %d keys that wait", len(cut_off), len(waiting))
    limiter = trio.CapacityLimiter(settings.sessions.recovery_concurrency_max)

    async def wake(key: SessionKey) -> float | None:
        """In how many seconds to try again, if it can't be served just now."""
        try:
            await directory.ask(
                key, source_of(key), Operate("wake", _nothing, interrupts=False, beside=True)
            )
        except SessionBusyError as busy:
            return max(busy.retry_after_s, _RETRY_S)
        except RuntimeClosedError:
            pass  # the next start finds it
        except OnepenError:
            logger.exception("%s could not be recovered; its next message tries again", key)
        return None

    async def wake_once(key: SessionKey) -> None:
        async with limiter:
            if await wake(key) is not None:
                waiting.append(key)  # every actor is at work: the start does not wait for that

    async def wake_in_time(key: SessionKey) -> None:
        async with limiter:  # held meanwhile, so that it is never many who try
            while True:
                retry_s = await wake(key)
                if retry_s is None:
                    return
                await trio.sleep(retry_s)

    async with trio.open_nursery() as nursery:
        for key in cut_off:
            nursery.start_soon(wake_once, key)
    for key in waiting:
        directory.spawn(wake_in_time, key)


async def _nothing(_: Any) -> None:
    """Starting the actor is all there is to do: it recovers its key by itself."""
