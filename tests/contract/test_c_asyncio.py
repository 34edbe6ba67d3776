"""Contract C with asyncio agents: the context reaches tasks, threads, callbacks, and crosses."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import trio

from onepen import CurrentSession, current_session, open_runtime
from onepen.agents import AsyncioAgent

if TYPE_CHECKING:
    from pathlib import Path

    from onepen import SessionInfo
    from onepen.agents import AsyncioTurn

KEY = "test:1"
LONG = "a long story, " * 50


def named(turn: AsyncioTurn) -> CurrentSession:
    return CurrentSession(turn.key, turn.session_id)


async def test_everything_that_an_asyncio_turn_starts_knows_its_session(tmp_path: Path) -> None:
    """C1: tasks, groups, callbacks, threads, functions that were given, and the building."""
    seen: dict[str, CurrentSession | None] = {}

    def look(where: str) -> str:
        seen[where] = current_session()
        return where

    async def look_later(where: str) -> str:
        await asyncio.sleep(0)
        return look(where)

    async def agent(turn: AsyncioTurn) -> str:
        look("turn")
        await asyncio.gather(look_later("gather"), asyncio.create_task(look_later("task")))
        async with asyncio.TaskGroup() as group:
            group.create_task(look_later("group"))
        called = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda: called.set_result(look("callback")))
        await called
        await asyncio.to_thread(look, "thread")
        await turn.effect(look, "effect", key="1")
        await turn.effect(look_later, "effect, async", key="2")
        await turn.append("between")
        look("behind a crossing")
        assert set(seen.values()) == {named(turn)}, seen
        return "done"

    async with open_runtime(tmp_path / "x.db", agent=AsyncioAgent(agent)) as runtime:
        reply = await runtime.ask(KEY, "hello")
        assert reply.outcome.kind == "answered", reply.outcome
        assert len(seen) == 9
        assert current_session() is None

    async def build() -> Any:
        look("building")
        return agent

    def factory(_: SessionInfo) -> AsyncioAgent:
        return AsyncioAgent(build=build)

    seen.clear()
    async with open_runtime(tmp_path / "y.db", factory=factory) as runtime:
        reply = await runtime.ask(KEY, "hello")
        assert reply.outcome.kind == "answered", reply.outcome
        assert len(seen) == 10


async def test_a_rotation_is_seen_by_tasks_and_threads_from_before_it(tmp_path: Path) -> None:
    """C2: they, the turn and the route name the child as soon as `rotate` returns."""
    rotated, thread_looked = threading.Event(), threading.Event()
    before: list[CurrentSession | None] = []
    after: list[CurrentSession | None] = []

    def thread() -> None:
        before.append(current_session())
        thread_looked.set()
        assert rotated.wait(10)
        after.append(current_session())

    async def agent(turn: AsyncioTurn) -> str:
        if not turn.history:
            return LONG
        parent_id, moved = turn.session_id, asyncio.Event()

        async def task() -> None:
            before.append(current_session())
            await moved.wait()
            after.append(current_session())

        async def summarise(_: object) -> str:
            before.append(current_session())
            await asyncio.sleep(0)
            return "short"

        tasks = asyncio.create_task(task()), asyncio.create_task(asyncio.to_thread(thread))
        await asyncio.to_thread(thread_looked.wait)
        child_id = await turn.rotate(summarise)
        after.append(current_session())
        moved.set()
        rotated.set()
        await asyncio.gather(*tasks)
        assert before == [CurrentSession(turn.key, parent_id)] * 3
        assert after == [CurrentSession(turn.key, child_id)] * 3
        assert turn.session_id == child_id
        return "moved"

    async with open_runtime(tmp_path / "x.db", agent=AsyncioAgent(agent)) as runtime:
        await runtime.ask(KEY, LONG)
        reply = await runtime.ask(KEY, "go on")
        assert reply.text == "moved", reply.outcome
        assert await runtime.sessions.current(KEY) == reply.session_id


async def test_turns_beside_each_other_on_one_loop_see_their_own_session_only(
    tmp_path: Path,
) -> None:
    """C3: ten turns of ten keys on one loop, in their tasks and threads."""
    keys = [f"test:{n}" for n in range(10)]
    here: list[str] = []
    wrong: list[object] = []

    async def agent(turn: AsyncioTurn) -> str:
        here.append(turn.key)
        while len(here) < len(keys):  # noqa: ASYNC110 - until all ten are at it
            await asyncio.sleep(0.001)
        for _ in range(3):
            await turn.append("between")
            found = {current_session(), await asyncio.to_thread(current_session)}
            if found != {named(turn)}:
                wrong.append((found, turn.key))
        return "done"

    async with (
        open_runtime(tmp_path / "x.db", agent=AsyncioAgent(agent)) as runtime,
        trio.open_nursery() as nursery,
    ):
        for key in keys:
            nursery.start_soon(runtime.ask, key, "hello")
    assert sorted(here) == keys
    assert wrong == []


async def test_what_a_turn_has_left_running_never_sees_another_session_of_its_key(
    tmp_path: Path,
) -> None:
    """C3: a task that outlives its turn; its key is switched to another session meanwhile."""
    seen: list[CurrentSession | None] = []
    look: list[asyncio.Event] = []
    left: list[asyncio.Task[None]] = []

    async def task() -> None:
        seen.append(current_session())
        await look[0].wait()
        seen.append(current_session())

    async def agent(turn: AsyncioTurn) -> str:
        if turn.text == "leave":
            look.append(asyncio.Event())
            left.append(asyncio.create_task(task()))
            await asyncio.sleep(0)
        else:
            look[0].set()
            await left[0]
            assert current_session() == named(turn)
        return "done"

    async with open_runtime(tmp_path / "x.db", agent=AsyncioAgent(agent)) as runtime:
        first = (await runtime.ask(KEY, "leave")).session_id
        await runtime.switch(KEY, "another")
        reply = await runtime.ask(KEY, "look")
        assert reply.outcome.kind == "answered", reply.outcome
        assert seen[0] is not None
        assert seen[0].session_id == first
        assert seen[1] in (seen[0], None)
