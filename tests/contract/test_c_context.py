"""Contract C: which session the code that is running belongs to. Native agents, tasks, threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from onepen import (
    CurrentSession,
    NoGainError,
    Runtime,
    SessionInfo,
    SessionSettings,
    Settings,
    Turn,
    current_session,
    open_runtime,
)
from onepen.storage.identity import SessionKey

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

LONG = "a long story, " * 50  # something that a summary makes shorter


class Desk:
    """An agent for all keys that does what the test has put down for the key's next turn."""

    def __init__(self) -> None:
        self.runtime: Runtime
        self.does: dict[str, Callable[[Turn], Awaitable[None]]] = {}

    async def run(self, turn: Turn) -> str:
        do = self.does.pop(turn.key, None)
        if do is not None:
            await do(turn)
        return "done"


def here() -> CurrentSession:
    """The current session; there must be one."""
    current = current_session()
    assert current is not None
    return current


def named(turn: Turn) -> CurrentSession:
    return CurrentSession(turn.key, turn.session_id)


# C1 ------------------------------------------------------------------------------------------


async def test_a_turn_knows_its_key_and_its_session(tmp_path: Path) -> None:
    """C1: inside a turn, `current_session()` gives the key and the session id."""
    seen: list[CurrentSession | None] = []

    async def agent(turn: Turn) -> str:
        seen.append(current_session())
        await trio.lowlevel.checkpoint()
        await turn.append({"role": "assistant", "content": "between"})
        seen.append(current_session())
        return "done"

    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        session_id = await runtime.open_session("test:1", "chosen")
        await runtime.ask("test:1", "hello")
        assert seen == [CurrentSession(SessionKey("test:1"), session_id)] * 2


async def test_an_agent_is_built_inside_the_turn_that_needs_it(tmp_path: Path) -> None:
    """C1: the factory, sync or async, and an agent that is no coroutine see the turn as well."""
    seen: list[CurrentSession | None] = []

    async def build(info: SessionInfo) -> Callable[[Turn], str]:
        seen.append(current_session())
        await trio.lowlevel.checkpoint()
        seen.append(current_session())

        def agent(turn: Turn) -> str:
            seen.append(current_session())
            assert seen[-1] == named(turn)
            return "done"

        return agent

    async with open_runtime(tmp_path / "x.db", factory=build) as runtime:
        reply = await runtime.ask("test:1", "hello")
        assert seen == [CurrentSession(SessionKey("test:1"), reply.session_id)] * 3


async def test_tasks_and_threads_of_a_turn_know_it(tmp_path: Path) -> None:
    """C1: also in child tasks, in threads, and back on the loop from a thread."""
    desk = Desk()
    seen: dict[str, CurrentSession | None] = {}

    async def look(name: str) -> None:
        await trio.lowlevel.checkpoint()
        seen[name] = current_session()

    def look_in_thread(name: str) -> None:
        seen[name] = current_session()
        seen[f"{name}, back"] = trio.from_thread.run_sync(current_session)

    async def look_further(name: str) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look, f"{name}, child")
            nursery.start_soon(trio.to_thread.run_sync, look_in_thread, f"{name}, thread")

    async def do(turn: Turn) -> None:
        await trio.to_thread.run_sync(look_in_thread, "thread")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look, "task")
            nursery.start_soon(look_further, "deep")
        assert set(seen.values()) == {named(turn)}

    desk.does["test:1"] = do
    async with open_runtime(tmp_path / "x.db", agent=desk) as runtime:
        assert (await runtime.ask("test:1", "hello")).outcome.kind == "answered"
    assert set(seen) == {
        "thread",
        "thread, back",
        "task",
        "deep, child",
        "deep, thread",
        "deep, thread, back",
    }


async def test_outside_a_turn_there_is_no_session(tmp_path: Path) -> None:
    """C1: `None` outside a turn: before, beside and behind one, and in an operation."""
    desk, began, end = Desk(), trio.Event(), trio.Event()
    seen: list[CurrentSession | None] = [current_session()]

    async def do(_: Turn) -> None:
        began.set()
        await end.wait()

    def summarise(_: object) -> str:
        seen.append(current_session())
        return "short"

    desk.does["test:1"] = do
    async with open_runtime(tmp_path / "x.db", agent=desk) as runtime:
        submission = await runtime.submit("test:1", LONG)
        await began.wait()
        seen.append(current_session())
        seen.append(await trio.to_thread.run_sync(current_session))
        end.set()
        await submission.reply()
        await runtime.rotate("test:1", summarise)
        seen.append(current_session())
    seen.append(current_session())
    assert seen == [None] * 6


# C2 ------------------------------------------------------------------------------------------


async def test_a_rotation_is_seen_by_everything_that_the_turn_has_started(tmp_path: Path) -> None:
    """C2: tasks and threads from before it, the actor and the route name the same session."""
    desk, key = Desk(), "test:1"
    before: list[CurrentSession] = []
    after: list[CurrentSession] = []
    thread_looked, rotated = threading.Event(), threading.Event()

    def thread() -> None:
        before.append(here())
        thread_looked.set()
        assert rotated.wait(10)
        after.append(here())

    async def task(task_status: trio.TaskStatus[trio.Event]) -> None:
        before.append(here())
        moved = trio.Event()
        task_status.started(moved)
        await moved.wait()
        after.append(here())
        await trio.to_thread.run_sync(lambda: after.append(here()))

    async def do(turn: Turn) -> None:
        parent_id = turn.session_id
        async with trio.open_nursery() as nursery:
            moved: trio.Event = await nursery.start(task)
            nursery.start_soon(trio.to_thread.run_sync, thread)
            await trio.to_thread.run_sync(thread_looked.wait)
            child_id = await turn.rotate("short")
            # At once, with no checkpoint in between.
            assert (turn.session_id, here().session_id) == (child_id, child_id)
            assert child_id != parent_id
            assert await desk.runtime.sessions.current(key) == child_id
            moved.set()
            rotated.set()
        assert {one.session_id for one in before} == {parent_id}
        assert {one.session_id for one in after} == {child_id}
        assert (len(before), len(after)) == (2, 3)
        assert {one.key for one in (*before, *after)} == {key}

    async with open_runtime(tmp_path / "x.db", agent=desk) as desk.runtime:
        await desk.runtime.ask(key, LONG)
        desk.does[key] = do
        reply = await desk.runtime.ask(key, "go on")
        assert reply.outcome.kind == "answered", reply.outcome
        assert reply.session_id == await desk.runtime.sessions.current(key)
        assert reply.session_id == after[0].session_id
        # The next turn is in the child as well.
        assert (await desk.runtime.ask(key, "again")).session_id == reply.session_id


async def test_the_context_moves_when_the_rotation_is_durable_and_not_before(
    tmp_path: Path,
) -> None:
    """C2: while the summary is being written everything names the parent; then all the child."""
    desk, key = Desk(), "test:1"

    async def do(turn: Turn) -> None:
        parent_id = turn.session_id

        async def summarise(_: object) -> str:
            assert here().session_id == turn.session_id == parent_id
            assert await desk.runtime.sessions.current(key) == parent_id
            return "short"

        first = await turn.rotate(summarise)
        await turn.append({"role": "assistant", "content": LONG})
        assert here().session_id == first

    async with open_runtime(tmp_path / "x.db", agent=desk) as desk.runtime:
        await desk.runtime.ask(key, LONG)
        desk.does[key] = do
        reply = await desk.runtime.ask(key, "go on")
        assert reply.outcome.kind == "answered", reply.outcome


async def test_a_refused_rotation_leaves_the_context_where_it_was(tmp_path: Path) -> None:
    """C2: after a rotation that would gain nothing, all three still name the old session."""
    desk, key = Desk(), "test:1"

    async def do(turn: Turn) -> None:
        parent_id = turn.session_id
        with pytest.raises(NoGainError):
            await turn.rotate("no shorter than what it stands for " * 100)
        assert here().session_id == turn.session_id == parent_id
        assert await desk.runtime.sessions.current(key) == parent_id

    async with open_runtime(tmp_path / "x.db", agent=desk) as desk.runtime:
        await desk.runtime.ask(key, "short")
        desk.does[key] = do
        assert (await desk.runtime.ask(key, "go on")).outcome.kind == "answered"


async def test_a_rotation_by_result_moves_what_the_turn_has_left_running(tmp_path: Path) -> None:
    """C2: an agent that returns another session id; its task from before follows it."""
    key, ended = "test:1", trio.Event()
    seen: list[CurrentSession] = []

    async def task(task_status: trio.TaskStatus[None]) -> None:
        seen.append(here())
        task_status.started()
        await ended.wait()
        seen.append(here())

    async with trio.open_nursery() as beside:

        async def agent(turn: Turn) -> Any:
            if turn.text == LONG:
                return "noted"
            await beside.start(task)
            return {
                "session_id": "the-child",
                "final_response": "moved",
                "messages": [
                    {"role": "assistant", "content": "what was before, in short"},
                    {"role": "user", "content": turn.text},
                    {"role": "assistant", "content": "moved"},
                ],
            }

        async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
            parent_id = (await runtime.ask(key, LONG)).session_id
            reply = await runtime.ask(key, "go on")
            assert reply.session_id == "the-child", reply.outcome
            assert await runtime.sessions.current(key) == "the-child"
            ended.set()
            await trio.testing.wait_all_tasks_blocked()
            assert [one.session_id for one in seen] == [parent_id, "the-child"]


# C3 ------------------------------------------------------------------------------------------


async def test_turns_beside_each_other_see_their_own_session_only(tmp_path: Path) -> None:
    """C3: ten turns of ten keys at once, in their tasks and threads."""
    keys = [f"test:{n}" for n in range(10)]
    all_here, count = trio.Event(), 0
    wrong: list[object] = []

    async def agent(turn: Turn) -> str:
        nonlocal count
        count += 1
        if count == len(keys):
            all_here.set()
        await all_here.wait()
        for _ in range(3):
            await trio.lowlevel.checkpoint()
            found = {current_session(), await trio.to_thread.run_sync(current_session)}
            if found != {named(turn)}:
                wrong.append((found, turn.key))
        return "done"

    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(runtime.ask, key, "hello")
        assert count == len(keys)
        assert wrong == []


@pytest.mark.parametrize("actor", ["started by the turn", "served already"])
async def test_a_turn_that_another_turn_has_caused_sees_its_own_session(
    tmp_path: Path, actor: str
) -> None:
    """C3: a turn that asks another key, whether that key's actor was there or not."""
    desk, seen = Desk(), list[CurrentSession]()

    async def inner(turn: Turn) -> None:
        seen.append(here())
        await desk.runtime.ask("test:third", "further")
        assert here() == named(turn)

    async def innermost(_: Turn) -> None:
        seen.append(here())
        seen.append(await trio.to_thread.run_sync(here))

    async def outer(turn: Turn) -> None:
        reply = await desk.runtime.ask("test:inner", "from inside")
        assert reply.outcome.kind == "answered", reply.outcome
        assert here() == named(turn)
        assert seen[0].session_id == reply.session_id

    async with open_runtime(tmp_path / "x.db", agent=desk) as desk.runtime:
        if actor == "served already":
            for key in ("test:inner", "test:third"):
                await desk.runtime.ask(key, "hello")
        desk.does = {"test:outer": outer, "test:inner": inner, "test:third": innermost}
        reply = await desk.runtime.ask("test:outer", "hello")
        assert reply.outcome.kind == "answered", reply.outcome
        assert [one.key for one in seen] == ["test:inner", "test:third", "test:third"]


async def test_a_turn_that_waited_for_another_ones_slot_sees_its_own_session(
    tmp_path: Path,
) -> None:
    """C3: the end of one turn starts the next one of another key; nothing is inherited."""
    desk, began, end = Desk(), trio.Event(), trio.Event()
    seen: list[CurrentSession] = []

    async def first(_: Turn) -> None:
        began.set()
        await end.wait()

    async def second(turn: Turn) -> None:
        seen.append(here())
        assert seen == [named(turn)]

    desk.does = {"test:1": first, "test:2": second}
    settings = Settings(sessions=SessionSettings(turns_running_max=1))
    async with open_runtime(tmp_path / "x.db", agent=desk, settings=settings) as runtime:
        one = await runtime.submit("test:1", "hello")
        await began.wait()
        two = await runtime.submit("test:2", "hello")
        assert two.disposition == "queued"
        end.set()
        assert (await one.reply()).outcome.kind == "answered"
        reply = await two.reply()
        assert reply.outcome.kind == "answered", reply.outcome
        assert [(s.key, s.session_id) for s in seen] == [("test:2", reply.session_id)]


async def test_an_actor_that_a_turn_has_started_starts_clean(tmp_path: Path) -> None:
    """C3: an actor started inside a turn belongs to no turn, then and later."""
    desk, seen = Desk(), list[CurrentSession | None]()

    def summarise(_: object) -> str:
        seen.append(current_session())
        return "short"

    async def outer(turn: Turn) -> None:
        await desk.runtime.ask("test:inner", LONG)
        await desk.runtime.rotate("test:inner", summarise)
        await desk.runtime.open_session("test:lazy", "lazy")
        assert here() == named(turn)

    async with open_runtime(tmp_path / "x.db", agent=desk) as desk.runtime:
        desk.does["test:outer"] = outer
        reply = await desk.runtime.ask("test:outer", "hello")
        assert reply.outcome.kind == "answered", reply.outcome
        await desk.runtime.ask("test:inner", LONG)
        await desk.runtime.rotate("test:inner", summarise)
        await desk.runtime.ask("test:lazy", LONG)
        await desk.runtime.rotate("test:lazy", summarise)
    assert seen == [None] * 3


async def test_a_rotation_of_one_key_moves_no_other_keys_context(tmp_path: Path) -> None:
    """C3: the inner turn rotates; the turn that caused it stays where it is."""
    desk = Desk()

    async def inner(turn: Turn) -> None:
        await turn.rotate("short")
        assert here() == named(turn)

    async def outer(turn: Turn) -> None:
        session_id = turn.session_id
        reply = await desk.runtime.ask("test:inner", "go on")
        assert reply.outcome.kind == "answered", reply.outcome
        assert (here().session_id, turn.session_id) == (session_id, session_id)

    async with open_runtime(tmp_path / "x.db", agent=desk) as desk.runtime:
        await desk.runtime.ask("test:inner", LONG)
        desk.does = {"test:outer": outer, "test:inner": inner}
        reply = await desk.runtime.ask("test:outer", "hello")
        assert reply.outcome.kind == "answered", reply.outcome


async def test_a_runtime_that_a_turn_has_opened_starts_clean(tmp_path: Path) -> None:
    """C3: the turns of a runtime that was opened inside another runtime's turn."""
    seen: list[CurrentSession | None] = []

    async def inner(_: Turn) -> str:
        seen.append(current_session())
        return "done"

    def summarise(_: object) -> str:
        seen.append(current_session())
        return "short"

    async def outer(turn: Turn) -> str:
        async with open_runtime(tmp_path / "inner.db", agent=inner) as runtime:
            reply = await runtime.ask("test:inner", LONG)
            await runtime.rotate("test:inner", summarise)
            assert seen == [CurrentSession(SessionKey("test:inner"), reply.session_id), None]
        assert here() == named(turn)
        return "done"

    async with open_runtime(tmp_path / "outer.db", agent=outer) as runtime:
        reply = await runtime.ask("test:outer", "hello")
        assert reply.outcome.kind == "answered", reply.outcome


async def test_what_a_turn_has_left_running_never_sees_another_session_of_its_key(
    tmp_path: Path,
) -> None:
    """C3: a task that outlives its turn; its key is switched to another session meanwhile."""
    key = "test:1"
    look, looked = trio.Event(), trio.Event()
    seen: list[CurrentSession | None] = []

    async def task(task_status: trio.TaskStatus[None]) -> None:
        seen.append(current_session())
        task_status.started()
        await look.wait()
        seen.append(current_session())
        looked.set()

    async with trio.open_nursery() as beside:

        async def agent(turn: Turn) -> str:
            if turn.text == "leave something":
                await beside.start(task)
            elif turn.text == "look":
                look.set()
                await looked.wait()
                assert here() == named(turn)
            return "done"

        async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
            first = (await runtime.ask(key, "leave something")).session_id
            await runtime.switch(key, "another")
            reply = await runtime.ask(key, "look")
            assert reply.outcome.kind == "answered", reply.outcome
            assert reply.session_id == "another"
            assert seen[0] == CurrentSession(SessionKey(key), first)
            assert seen[1] in (seen[0], None)
