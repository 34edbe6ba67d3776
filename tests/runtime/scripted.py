"""Agents that stop where a test wants them, and runtimes that can't hang one for ever."""

from __future__ import annotations

from collections import defaultdict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from onepen import Settings, SystemClock, SystemIds, open_runtime, open_sqlite
from onepen.actors.warm import AgentSource
from onepen.runtime.opening import assemble

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable
    from pathlib import Path

    from onepen import Message, Runtime, SessionInfo, Turn
    from onepen.actors.directory import Directory
    from onepen.storage.identity import Clock

LIMIT_S = 20.0
"""Far more than any test needs: who gets here has found a hang."""


class LoopClock:
    """A wall clock that goes with the loop's, so that a mock clock moves both."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> int:
        return 1_700_000_000_000 + int((trio.current_time() + self.ahead_s) * 1000)

    def monotonic(self) -> float:
        return trio.current_time()


class Held:
    """Waits in every turn until it is told to go on; texts in `free` are answered at once."""

    def __init__(self, *free: str) -> None:
        self.begun: defaultdict[str, trio.Event] = defaultdict(trio.Event)
        self.go_on: defaultdict[str, trio.Event] = defaultdict(trio.Event)
        self.turns: list[Turn] = []
        self.running = self.running_most = 0
        for text in free:
            self.go_on[text].set()

    @property
    def order(self) -> list[str]:
        return [turn.text for turn in self.turns]

    async def run(self, turn: Turn) -> str:
        self.turns.append(turn)
        self.running += 1
        self.running_most = max(self.running_most, self.running)
        try:
            self.begun[turn.text].set()
            await self.go_on[turn.text].wait()
        finally:
            self.running -= 1
        return f"re {turn.text}"


class Disk:
    """The inline Writer's commits: from `hold` on they wait, until `let_go`."""

    def __init__(self) -> None:
        self.reached = trio.Event()
        self._go_on = trio.Event()
        self._go_on.set()

    def hold(self) -> None:
        self._go_on = trio.Event()

    def let_go(self) -> None:
        self._go_on.set()

    async def at(self, point: str) -> None:
        if point == "taken" and not self._go_on.is_set():
            self.reached.set()
            await self._go_on.wait()


async def echo(turn: Turn) -> str:
    return f"re {turn.text}"


@asynccontextmanager
async def serving(
    path: Path,
    agent: Any = None,
    *,
    factory: Callable[[SessionInfo], Any] | None = None,
    **options: Any,
) -> AsyncGenerator[Runtime]:
    """`open_runtime`, within a limit that turns a hang into a failure."""
    if agent is None and factory is None:
        agent = echo
    with trio.fail_after(LIMIT_S):
        async with open_runtime(path, agent=agent, factory=factory, **options) as runtime:
            yield runtime


@asynccontextmanager
async def inline(
    path: Path,
    agent: Any = None,
    settings: Settings | None = None,
    *,
    factory: Callable[[SessionInfo], Any] | None = None,
    clock: Clock | None = None,
    **options: Any,
) -> AsyncGenerator[Runtime]:
    """The same without threads, for a mock clock that jumps."""
    agents = AgentSource(None if factory else agent or echo, factory)
    clock = clock or SystemClock()
    async with assemble(
        lambda: open_sqlite(path, clock),
        clock,
        SystemIds(),
        settings or Settings(),
        agents,
        inline=True,
        **options,
    ) as runtime:
        yield runtime


async def until(condition: Callable[[], bool]) -> None:
    """Until it holds. What is counted has no event to wait for, and a mock clock jumps."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.01)


def directory_of(runtime: Runtime) -> Directory:
    """For looking at the actors themselves."""
    return runtime._directory  # pyright: ignore[reportPrivateUsage]


def texts(messages: Iterable[Message]) -> list[tuple[str, str | None]]:
    return [(message.role, message.text) for message in messages]


async def transcript(runtime: Runtime, key: str) -> list[tuple[str, str | None]]:
    """What is stored of the key's current session."""
    session_id = await runtime.sessions.current(key)
    if session_id is None:
        return []
    return texts(await runtime.sessions.transcript(session_id))
