"""What an attack on the runtime found around turns: take-overs, eviction, late turns, and what
others raise.

Each test is the smallest one that showed its defect. The Writer runs inline and the clock jumps.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from onepen import (
    Draft,
    Inbound,
    InvalidContentError,
    MissingError,
    OnepenError,
    Reply,
    Runtime,
    Settings,
    Submission,
    Turn,
    WriterSettings,
)
from onepen.actors.writer import Writer
from onepen.storage.identity import Uid

from ..contract.agents import call, problems, result, sound
from .scripted import Held, inline, transcript

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from trio.testing import MockClock

KEY, OTHER = "test:1", "test:2"
LONG = "something long " * 200


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


def evict_idle(runtime: Runtime) -> int:
    return runtime._directory.evict_idle()  # pyright: ignore[reportPrivateUsage]


class Stubborn(Held):
    """Ends when it is told to, and not when it is cancelled."""

    async def run(self, turn: Turn) -> str:
        with trio.CancelScope(shield=True):
            await super().run(turn)
        return f"re {turn.text}"


def at_rest(runtime: Runtime) -> bool:
    """No slot has leaked, nothing waits, and nobody crashed."""
    statistics = runtime.statistics()
    waiting = statistics.sessions.waiting + statistics.slots.waiting
    return not (statistics.slots.running or waiting or statistics.counters["crashes"])


# Taking over -----------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Runtime], Awaitable[object]]] = {
    "branch": lambda runtime: runtime.branch(KEY),
    "rewind": lambda runtime: runtime.rewind(KEY),
    "reset": lambda runtime: runtime.reset(KEY),
}


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_an_operation_behind_a_take_over_is_done_once_and_to_the_fresh_session(
    path: Path, autojump_clock: MockClock, operation: str
) -> None:
    """INV-1: the session that was taken is as it was."""
    held = Stubborn("one", "two", "theirs")
    async with inline(path, held) as runtime:
        for text in ("one", "two"):
            await runtime.ask(KEY, text)
        await runtime.ask(OTHER, "theirs")
        taken = await runtime.sessions.current(KEY)
        assert taken is not None
        await runtime.submit(KEY, "slow")
        await held.begun["slow"].wait()
        before = runtime.statistics().route_writes
        done: list[object] = []

        async def operate() -> None:
            try:
                done.append(await OPERATIONS[operation](runtime))
            except MissingError as error:
                done.append(error)

        async def take() -> None:
            assert await runtime.switch(OTHER, taken, take_over=True) == taken

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(operate)
            await trio.testing.wait_all_tasks_blocked()
            held.go_on["slow"].set()
        messages = await runtime.sessions.transcript(taken, include_inactive=True)
        assert {message.state for message in messages} == {"active"}
        assert [m.text for m in messages if m.role == "user"] == ["one", "two", "slow"]
        written = runtime.statistics().route_writes - before
        if operation == "reset":
            assert (done, written) == ([await runtime.sessions.current(KEY)], 3)
        else:  # the fresh session has nothing to branch or to rewind
            assert written == 2
            assert isinstance(done[0], MissingError)
        assert await runtime.sessions.current(OTHER) == taken
        assert at_rest(runtime)
    sound(path)


async def test_a_take_over_whose_caller_gave_up_strands_no_message(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-15: what waits at the taker is answered, whether it got the session or not."""
    held = Stubborn("one", "theirs", "a", "b", "c")
    async with inline(path, held) as runtime:
        await runtime.ask(KEY, "one")
        await runtime.ask(OTHER, "theirs")
        wanted = await runtime.sessions.current(KEY)
        assert wanted is not None
        await runtime.submit(KEY, "slow")
        await held.begun["slow"].wait()
        waiting: list[Submission] = []
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:

                async def meanwhile() -> None:
                    await trio.testing.wait_all_tasks_blocked()
                    await runtime.submit(OTHER, "slow as well")
                    await held.begun["slow as well"].wait()
                    waiting.extend([await runtime.submit(OTHER, text) for text in "abc"])
                    held.go_on["slow"].set()
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()

                nursery.start_soon(meanwhile)
                await runtime.switch(OTHER, wanted, take_over=True)
        assert scope.cancelled_caught
        held.go_on["slow as well"].set()
        with trio.fail_after(60):
            replies = [(await submission.reply()).text for submission in waiting]
        assert replies == ["re a", "re b", "re c"]
        await trio.testing.wait_all_tasks_blocked()
        assert at_rest(runtime)
    sound(path)


async def test_messages_that_meet_a_take_over_of_an_evicted_session_are_all_answered(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-12, INV-15: whenever they come, they are no predecessor's."""
    async with inline(path) as runtime:
        for steps in range(25):
            holder, taker = f"test:holder{steps}", f"test:taker{steps}"
            wanted = (await runtime.ask(holder, "one")).session_id
            await runtime.ask(taker, "theirs")
            await trio.testing.wait_all_tasks_blocked()
            assert evict_idle(runtime) >= 2

            async def ask(key: str, steps: int = steps) -> None:
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                reply = await runtime.ask(key, "two")
                assert reply.outcome.kind in ("answered", "interrupted")  # by the switch

            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for key in (holder, taker, taker):
                        nursery.start_soon(ask, key)
                    assert await runtime.switch(taker, wanted, take_over=True) == wanted
        await trio.testing.wait_all_tasks_blocked()
        assert at_rest(runtime)
    sound(path)


# Eviction --------------------------------------------------------------------------------------


async def test_a_session_that_is_handling_a_message_is_not_evicted(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-15: the message was read and waits for room; nobody else would answer it."""
    go_on = trio.Event()
    go_on.set()

    async def at(point: str) -> None:
        if point == "taken":
            await go_on.wait()

    settings = Settings(writer=WriterSettings(units_waiting_max=1, down_after_s=3_600))
    async with inline(path, settings=settings, at=at) as runtime:
        await runtime.ask(KEY, "one")
        await trio.testing.wait_all_tasks_blocked()
        go_on = trio.Event()
        replies: list[Reply] = []

        async def ask(key: str) -> None:
            replies.append(await runtime.ask(key, "two"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, OTHER)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, KEY)
            await trio.testing.wait_all_tasks_blocked()
            assert evict_idle(runtime) == 0
            go_on.set()
        assert [reply.text for reply in replies] == ["re two", "re two"]
        assert len(await transcript(runtime, KEY)) == 4


async def test_a_session_without_a_row_is_known_again_after_its_eviction(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-16: user, model and parent are in memory alone until the first message."""

    async def evict() -> None:
        await trio.testing.wait_all_tasks_blocked()
        assert evict_idle(runtime) == 1
        await trio.testing.wait_all_tasks_blocked()

    async with inline(path) as runtime:
        await runtime.open_session(KEY, user="ann", model="small")
        await evict()
        first = await runtime.sessions.get((await runtime.ask(KEY, "one")).session_id)
        assert first is not None
        assert (first.user, first.model) == ("ann", "small")
        await runtime.reset(KEY)
        await evict()
        second = await runtime.sessions.get((await runtime.ask(KEY, "two")).session_id)
        assert second is not None
        assert (second.parent_id, second.edge) == (first.id, "reset")


# Turns that are over ---------------------------------------------------------------------------


class Late:
    """An agent that leaves a task behind, which uses its turn when the next one is at work."""

    def __init__(self, nursery: trio.Nursery, how: str) -> None:
        self._nursery = nursery
        self._how = how
        self._begun, self._over = trio.Event(), trio.Event()
        self.ended = trio.Event()
        self.error: OnepenError | None = None

    async def run(self, turn: Turn) -> str:
        if turn.text == "leave":
            self._nursery.start_soon(self._use, turn)
            await self._begun.wait()
        if turn.text == "next":
            await turn.append(call("open"))
            self._over.set()
            await self.ended.wait()
            await turn.append(result("open"))
        return f"re {turn.text}"

    async def hold(self) -> None:
        """Let the turn end in between."""
        self._begun.set()
        await self._over.wait()

    async def _use(self, turn: Turn) -> None:
        try:
            if self._how == "streaming":
                async with turn.streaming() as out:
                    await out.write("late")
                    await self.hold()
            elif self._how == "append":
                await turn.append(Draft(uid=Uid(f"{7:032x}"), role="assistant", text="late"))
            else:
                await turn.rotate(self._summary, force=True)
        except OnepenError as error:
            self.error = error
        self.ended.set()

    async def _summary(self, _: object) -> str:
        await self.hold()
        return "late"


@pytest.mark.parametrize("how", ["streaming", "append", "rotate"])
async def test_a_turn_that_is_over_writes_nothing_into_the_next_one(
    path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """INV-4, INV-10: neither what it began to write nor what it was about to look up."""
    read = Writer.read
    holding = False

    async def held_read(writer: Writer, view: Any) -> Any:
        nonlocal holding
        if holding:
            holding = False
            await late.hold()
        return await read(writer, view)

    monkeypatch.setattr(Writer, "read", held_read)
    async with trio.open_nursery() as nursery:
        late = Late(nursery, how)
        async with inline(path, late) as runtime:
            session_id = (await runtime.ask(KEY, "one")).session_id
            await runtime.ask(KEY, "two")
            holding = how == "append"
            await runtime.ask(KEY, "leave")
            assert (await runtime.ask(KEY, "next")).text == "re next"
            assert isinstance(late.error, InvalidContentError)
            messages = await runtime.sessions.transcript(session_id)
            assert problems(messages) == []
            assert "late" not in {message.text for message in messages}
            assert await runtime.sessions.current(KEY) == session_id
    sound(path)


# What others raise -----------------------------------------------------------------------------

HOOKS = (
    "on_session_start",
    "on_turn_start",
    "on_turn_end",
    "on_rotation",
    "on_session_end",
    "on_session_finalize",
)
PLACES = (*HOOKS, "unsaved", "commit_memory", "close", "interrupt", "summary", "own summary")


class Raising:
    """An agent, and hooks, of which one part raises."""

    def __init__(self, where: str, error: type[BaseException]) -> None:
        self._error = error
        self._where = where
        self.begun = trio.Event()
        if where not in ("summary", "own summary"):
            setattr(self, where, self.boom)

    def boom(self, *_: object, **__: object) -> str:
        raise self._error

    async def run(self, turn: Turn) -> str:
        if turn.text == "hang":
            self.begun.set()
            await trio.sleep_forever()
        if turn.text == "rotate":
            await turn.rotate(self.boom if self._where == "own summary" else "short", force=True)
        return LONG


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("where", PLACES)
async def test_whatever_others_raise_ends_what_it_was_called_for_and_nothing_else(
    path: Path, autojump_clock: MockClock, where: str, error: type[BaseException]
) -> None:
    """INV-13: also what is no `Exception`."""
    raising = Raising(where, error)
    async with inline(path, factory=lambda _: raising, hooks=raising) as runtime:
        with trio.fail_after(600):
            await runtime.ask(KEY, "hello")
            rotated = await runtime.ask(KEY, "rotate")
            assert rotated.outcome.kind == ("failed" if where == "own summary" else "answered")
            hanging = await runtime.submit(KEY, "hang")
            await raising.begun.wait()
            assert runtime.interrupt(KEY)
            assert (await hanging.reply()).outcome.kind == "interrupted"
            if where == "summary":
                with pytest.raises(error):  # whoever gave the function gets what it raised
                    await runtime.rotate(KEY, raising.boom, force=True)
            closed = await runtime.close_session(KEY)
            assert closed.ended
            assert (await runtime.ask(OTHER, "hello")).text == LONG
        assert at_rest(runtime)
    sound(path)


async def test_a_close_that_hangs_is_reported_and_the_session_ends_all_the_same(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-9, INV-15: it has its time, and then it is a failure."""

    class Agent:
        async def run(self, _: Turn) -> str:
            return "ok"

        async def close(self) -> None:
            await trio.sleep_forever()

    async with inline(path, factory=lambda _: Agent()) as runtime:
        await runtime.ask(KEY, "hello")
        with trio.fail_after(60):
            closed = await runtime.close_session(KEY)
        assert closed.ended
        assert set(closed.failures) == {"close"}


async def test_an_agent_that_writes_without_end_holds_up_nobody_who_asks_its_key(
    path: Path,
) -> None:
    """INV-14: there is always a unit under way; a read waits for what was posted before it."""
    due, said, writing = trio.Event(), trio.Event(), False

    async def at(point: str) -> None:
        nonlocal due, said
        if writing and point == "committed":
            said = trio.Event()
            due.set()
            await said.wait()  # the next row is posted before the last one has its receipt

    async def agent(turn: Turn) -> str:
        nonlocal due, writing
        if turn.text == "write":
            writing = True
            while writing:
                await turn.append({"role": "assistant", "content": "more"})
                said.set()
                await due.wait()
                due = trio.Event()
            said.set()
        return f"re {turn.text}"

    inbound = Inbound("one", id="u1")
    async with inline(path, agent, at=at) as runtime:
        first = await runtime.ask(KEY, inbound)
        writer = await runtime.submit(KEY, "write")
        with trio.move_on_after(5) as limit:  # of real time: this loop is never idle
            assert (await runtime.ask(KEY, inbound)).turn_id == first.turn_id
        writing = False
        due.set()
        await writer.reply()
        assert not limit.cancelled_caught
    sound(path)
