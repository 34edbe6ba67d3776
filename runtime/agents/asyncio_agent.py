"""An asyncio agent as an agent of the runtime, on trio's own loop.

    turn (trio) ── call ──▶ a task on the agent's asyncio loop ── await turn.append(…) ──▶ trio

Keeps:
- One asyncio loop for one `AsyncioAgent`: whatever goes wrong on it ends the turns on it, with a
  reason, and nobody else's. A loop that has failed is replaced when the next turn comes, after a
  pause that doubles while loops go on failing; one that was given up, at once.
- An agent that was given by `build` belongs to its loop: it is built on it, closed on it, and built
  again with the next one. One that was given as it is stays, whatever loop it runs on.
- Its optional methods are there if the agent has them, and run on the loop.

Must never hold up the end of a runtime: what does not end in its grace is forced to.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, final

import trio
from msgspec import Struct

from ...actors.warm import InvalidAgentError, check_agent, runner_of
from .asyncio_loop import AsyncioLoop
from .asyncio_turn import AsyncioTurn

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...actors.turn import Turn

_ATTRIBUTES = ("check_revision", "model", "platform", "signature")
_METHODS = ("commit_memory", "interrupt", "unsaved")
_PAUSE_S, _PAUSE_MAX_S = 0.1, 30.0


class AsyncioStatistics(Struct, frozen=True, kw_only=True):
    """What an asyncio agent has lived through."""

    running: int
    """Calls on its loops just now."""
    loops_opened: int
    loops_failed: int
    """Ended by a task that nobody awaited, or by an exit."""
    given_up: int
    """Calls that did not end when they were cancelled."""


@final
class AsyncioAgent:
    """Runs an asyncio agent: `agent=AsyncioAgent(function_or_object)`.

    The function, or the object's `run`, gets an `AsyncioTurn`. `build` makes the agent on the loop,
    sync or async, for agents whose clients belong to a loop. A call that is cancelled has `grace_s`
    to end; at most `threads_max` threads run for `asyncio.to_thread` and its like.
    """

    def __init__(
        self,
        agent: Any = None,
        *,
        build: Callable[[], Any] | None = None,
        grace_s: float = 2.0,
        threads_max: int = 32,
    ) -> None:
        if (agent is None) == (build is None):
            raise InvalidAgentError("give either an agent or build=, and not both")
        if agent is not None:
            check_agent(agent)
        elif not callable(build):
            raise InvalidAgentError(f"{type(build).__name__} can't be called to build an agent")
        if not grace_s > 0 or threads_max < 1:
            raise InvalidAgentError("grace_s and threads_max must be positive")
        self._given = agent
        self._build = build
        self._grace_s = grace_s
        self._threads_max = threads_max
        self._spawn: Callable[..., None] | None = None
        self._inner: Any = agent
        self._loop: AsyncioLoop | None = None  # where new calls go
        self._loops: list[AsyncioLoop] = []  # all that have not ended
        self._opening = trio.Lock()
        self._pause_s = 0.0
        self._not_before_s = -float("inf")
        self._opened = self._failed = self._given_up = 0

    def statistics(self) -> AsyncioStatistics:
        return AsyncioStatistics(
            running=sum(loop.calls for loop in self._loops),
            loops_opened=self._opened,
            loops_failed=self._failed + sum(loop.failure is not None for loop in self._loops),
            given_up=self._given_up + sum(loop.given_up for loop in self._loops),
        )

    # For the runtime -----------------------------------------------------------------------------

    async def attach(self, spawn: Callable[..., None]) -> None:
        """The agent begins its life in a runtime: its loop is opened."""
        if self._spawn is not None:
            raise InvalidAgentError("an AsyncioAgent serves one runtime at a time")
        self._spawn = spawn
        try:
            await self._ready()
        except BaseException:
            self._detach()
            raise

    async def run(self, turn: Turn) -> Any:
        """One turn, on the loop."""
        loop = await self._ready()
        answer = await loop.call(runner_of(self._inner), AsyncioTurn(turn, loop))
        self._pause_s = 0.0
        return answer

    async def close(self) -> None:
        """Close the agent, then its loop. Raises what the agent's own `close()` raises."""
        try:
            await self._close_inner()
        finally:
            loops = list(self._loops)
            self._detach()
            for loop in loops:
                await loop.ended.wait()

    async def _close_inner(self) -> None:
        closing = _closing(self._inner)
        if closing is None:
            return
        if self._loop is not None:
            self._loop.before_end = None
            await self._loop.call(closing)
        elif self._build is None:  # its loop was lost, or never there; it is closed on another one
            async with trio.open_nursery() as nursery:
                loop = AsyncioLoop(self._grace_s, self._threads_max, lambda _: None)
                nursery.start_soon(loop.serve)
                try:
                    await loop.opened.wait()
                    await loop.call(closing)
                finally:
                    loop.end()

    def _detach(self) -> None:
        for loop in list(self._loops):
            loop.end()
        self._spawn = None

    def __getattr__(self, name: str) -> Any:
        # What an agent may have, it has if the agent inside has it.
        if name in _ATTRIBUTES or name in _METHODS:
            found = getattr(self._inner, name)
            return partial(self._call, found) if name in _METHODS and callable(found) else found
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        loop = await self._ready()
        return await loop.call(method, *arguments)

    # The loop ------------------------------------------------------------------------------------

    async def _ready(self) -> AsyncioLoop:
        """The loop, opened if there is none, and the agent on it."""
        while self._loop is None:
            async with self._opening:
                if self._loop is None:
                    await self._open()
        return self._loop

    async def _open(self) -> None:
        if self._spawn is None:
            raise InvalidAgentError(
                "an AsyncioAgent needs the runtime that it was given to; if it is wrapped, "
                "forward attach(spawn) and close()"
            )
        await trio.sleep_until(self._not_before_s)
        loop = AsyncioLoop(self._grace_s, self._threads_max, self._lose)
        self._loops.append(loop)
        self._opened += 1
        self._spawn(self._serve, loop)
        try:
            await loop.opened.wait()
            if loop.retired:
                raise loop.gone()
            if self._build is not None:
                built = await loop.call(self._build)
                check_agent(built)
                self._inner = built
                loop.before_end = _closing(built)
        except BaseException:
            loop.end()
            raise
        if not loop.retired:
            self._loop = loop

    async def _serve(self, loop: AsyncioLoop) -> None:
        try:
            await loop.serve()
        finally:
            self._loops.remove(loop)
            self._failed += loop.failure is not None
            self._given_up += loop.given_up

    def _lose(self, loop: AsyncioLoop) -> None:
        """No new calls go there."""
        if loop.failure is not None:
            self._pause_s = min(max(self._pause_s * 2, _PAUSE_S), _PAUSE_MAX_S)
            self._not_before_s = trio.current_time() + self._pause_s
        if self._loop is loop:
            self._loop = None
            if self._build is not None:
                self._inner = None


def _closing(agent: Any) -> Callable[[], Any] | None:
    closing = getattr(agent, "close", None) or getattr(agent, "aclose", None)
    return closing if callable(closing) else None
