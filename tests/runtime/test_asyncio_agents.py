"""Asyncio agents on trio's loop: what they can do, and what may go wrong in them."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import trio

from onepen import (
    InvalidAgentError,
    InvalidContentError,
    NoGainError,
    SessionSettings,
    Settings,
    Turn,
    open_runtime,
)
from onepen.agents import AsyncioAgent, AsyncioLoopError, AsyncioTurn, TrioInAsyncioError
from onepen.runtime.agents import asyncio_agent
from onepen.testing import check_database

from .scripted import LoopClock, inline, serving, transcript

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from onepen import Reply, Runtime

KEY = "test:1"
LONG = "a long story, " * 50
FOR_THE_SESSION = {  # what the native turn has for its session, and not for its agent
    "as_attempt",
    "check_open",
    "cut_stream",
    "effects_left",
    "end_stream",
    "is_streamed_answer",
    "last_rows",
    "not_stored",
    "open_stream",
    "sending",
    "sent_to",
    "take_usage",
}


class Desk:
    """An asyncio agent that does what the message names; `begun` when it is at it."""

    def __init__(self, **does: Callable[[AsyncioTurn], Awaitable[Any]]) -> None:
        self.does = does
        self.begun = trio.Event()
        self.told: list[str] = []

    async def run(self, turn: AsyncioTurn) -> Any:
        self.begun.set()
        do = self.does.get(turn.text)
        return f"re {turn.text}" if do is None else await do(turn)


async def swallow(_: AsyncioTurn) -> None:
    """Ends for nobody."""
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass


async def leave_a_failing_task(_: AsyncioTurn) -> None:
    async def fail() -> None:
        raise ValueError("nobody looks")

    asyncio.create_task(fail())  # noqa: RUF006 - that nobody keeps it is the point
    await asyncio.sleep(60)


async def interrupted(runtime: Runtime, desk: Desk, text: str) -> tuple[Reply, float]:
    """The reply to a message whose turn is interrupted, and how long the end took."""
    desk.begun = trio.Event()
    submission = await runtime.submit(KEY, text)
    await desk.begun.wait()
    begun_s = trio.current_time()
    runtime.interrupt(KEY)
    return await submission.reply(), trio.current_time() - begun_s


# What it can do ----------------------------------------------------------------------------------


def test_an_asyncio_turn_has_everything_that_a_turn_has() -> None:
    """A method that is added to the one is added to the other."""
    names = {name for name in dir(Turn) if not name.startswith("_")} - FOR_THE_SESSION
    names |= {"id", "attempt", "resumed", "inbound", "deadline", "said", "model_calls", "over"}
    assert names <= set(dir(AsyncioTurn))


async def test_a_function_answers_and_everything_of_the_turn_is_awaited_from_asyncio(
    tmp_path: Path,
) -> None:
    async def agent(turn: AsyncioTurn) -> str:
        assert turn.attempt == 1
        assert not turn.resumed
        assert turn.history == ()
        assert [one.text for one in turn.inbound] == ["hello"]
        assert asyncio.get_running_loop().time() < turn.deadline
        await turn.append({"role": "assistant", "content": "one"})
        await turn.say("two")
        turn.usage(model="m", input=3)
        assert turn.tokens.input == 3
        assert turn.model_calls == 1
        async with turn.streaming() as out:
            for piece in "three":
                await out.write(piece)
            assert out.text == "three"
            out.finish_reason = "stop"
        assert turn.said == "three"
        assert await turn.steering() == ()
        assert len(turn.messages) == 4
        return "four"

    async with serving(tmp_path / "x.db", AsyncioAgent(agent)) as runtime:
        reply = await runtime.ask(KEY, "hello")
        assert (reply.text, reply.outcome.kind) == ("four", "answered")
        said = [text for _, text in await transcript(runtime, KEY)]
        assert said == ["hello", "one", "two", "three", "four"]
    assert check_database(tmp_path / "x.db") == []


async def test_functions_that_are_given_run_on_the_loop(tmp_path: Path) -> None:
    """Effects and summaries, sync and async; partials and the effect's id as with a native turn."""
    seen: list[Any] = []

    async def charge(card: str, amount: int, effect_id: str) -> dict[str, Any]:
        await asyncio.sleep(0)
        seen.append((card, amount, effect_id))
        return {"paid": amount}

    def look(what: str) -> str:
        seen.append(asyncio.get_running_loop())
        return what

    async def summarise(history: Any) -> str:
        await asyncio.sleep(0)
        return f"{len(history)} before"

    async def agent(turn: AsyncioTurn) -> str:
        from functools import partial

        assert await turn.effect(partial(charge, "card"), 3, key="c") == {"paid": 3}
        assert await turn.effect(look, "there", key="l") == "there"
        if turn.history:
            child = await turn.rotate(summarise)
            assert turn.session_id == child
            await turn.compact("short", force=True)
        return LONG

    async with serving(tmp_path / "x.db", AsyncioAgent(agent)) as runtime:
        first = await runtime.ask(KEY, LONG)
        assert first.outcome.kind == "answered", first.outcome
        second = await runtime.ask(KEY, "again")
        assert second.outcome.kind == "answered", second.outcome
        assert second.session_id != first.session_id
        assert [one[:2] for one in seen if isinstance(one, tuple)] == [("card", 3)] * 2
    assert check_database(tmp_path / "x.db") == []


async def test_an_effect_is_the_same_one_as_a_native_agents(tmp_path: Path) -> None:
    """Name and arguments are its content, through the bridge as well."""

    async def charge(amount: int) -> int:
        return amount

    async def native(turn: Turn) -> str:
        assert await turn.effect(charge, 3, key="c") == 3
        return "done"

    async def agent(turn: AsyncioTurn) -> str:
        assert await turn.effect(charge, 3, key="c") == 3
        return "done"

    found: list[Any] = []
    for number, one in enumerate((native, AsyncioAgent(agent))):
        async with serving(tmp_path / f"{number}.db", one) as runtime:
            turn_id = (await runtime.ask(KEY, "hello")).turn_id
            writer = runtime.sessions._writer  # pyright: ignore[reportPrivateUsage]
            (effect,) = await writer.read(lambda reader, t=turn_id: reader.effects(t))  # type: ignore[misc]
            found.append((effect.tool, effect.digest, effect.state))
    assert found[0] == found[1]


async def test_errors_of_the_turn_are_raised_in_asyncio(tmp_path: Path) -> None:
    """With their types; what an agent raises is told as its own."""

    async def agent(turn: AsyncioTurn) -> str:
        with pytest.raises(InvalidContentError):
            await turn.append({"role": "nobody"})
        with pytest.raises(InvalidContentError):
            await turn.effect("no function", key="x")  # type: ignore[arg-type]
        async with turn.streaming() as out:
            with pytest.raises(InvalidContentError):
                await out.write("\ud800")
        with pytest.raises(NoGainError):
            await turn.rotate("a summary that is longer than what it covers")
        async with asyncio.TaskGroup() as group:

            async def fail() -> None:
                raise ValueError("inside")

            group.create_task(fail())
        return "never"

    async with serving(tmp_path / "x.db", AsyncioAgent(agent)) as runtime:
        reply = await runtime.ask(KEY, "hello")
        assert (reply.outcome.kind, reply.outcome.error) == ("failed", "ValueError: inside")


async def test_a_question_is_asked_and_answered(tmp_path: Path) -> None:
    async def agent(turn: AsyncioTurn) -> str:
        return "it was " + await turn.ask_user("yes or no?", ["yes", "no"])

    async with serving(tmp_path / "x.db", AsyncioAgent(agent)) as runtime:
        submission = await runtime.submit(KEY, "hello")
        while not await runtime.approvals.list():  # noqa: ASYNC110 - what is stored
            await trio.sleep(0.01)
        await runtime.approvals.answer(KEY, "no")
        assert (await submission.reply()).text == "it was no"


async def test_an_object_has_the_optional_methods_that_it_has(tmp_path: Path) -> None:
    """Called on the loop, whether they are async or not; those that it lacks it lacks."""
    told: list[Any] = []

    class Assistant:
        model, platform = "m", "p"

        async def run(self, turn: AsyncioTurn) -> str:
            return turn.text

        async def commit_memory(self, history: Any) -> None:
            await asyncio.sleep(0)
            told.append(("memory", len(history)))

        def close(self) -> None:
            told.append(("close", asyncio.get_running_loop().is_running()))

    class Hooks:
        def on_session_end(self, *, model: str, platform: str, **_: Any) -> None:
            told.append((model, platform))

    agent = AsyncioAgent(Assistant())
    assert not hasattr(agent, "unsaved")
    assert not hasattr(agent, "signature")
    async with open_runtime(tmp_path / "x.db", agent=agent, hooks=Hooks()) as runtime:
        await runtime.ask(KEY, "hello")
    assert told == [("m", "p"), ("memory", 2), ("close", True)]
    with pytest.raises(AttributeError):
        agent.nothing  # noqa: B018


async def test_one_agent_for_each_key_is_built_and_closed_on_its_loop(tmp_path: Path) -> None:
    loops: dict[str, Any] = {}
    closed: list[str] = []

    class Assistant:
        def __init__(self, key: str) -> None:
            self.key = key
            loops[key] = asyncio.get_running_loop()

        async def run(self, turn: AsyncioTurn) -> str:
            assert asyncio.get_running_loop() is loops[self.key]
            return self.key

        async def close(self) -> None:
            await asyncio.sleep(0)
            closed.append(self.key)

    def factory(session: Any) -> AsyncioAgent:
        return AsyncioAgent(build=lambda: Assistant(session.key))

    async with serving(tmp_path / "x.db", factory=factory) as runtime:
        for key in ("test:1", "test:2", "test:1"):
            assert (await runtime.ask(key, "hello")).text == key
        assert runtime.statistics().agents_built == 2
        assert runtime.statistics().agents_rebuilt == 0
    assert len(set(map(id, loops.values()))) == 2
    assert sorted(closed) == ["test:1", "test:2"]


async def test_a_build_that_fails_fails_its_turn_and_the_next_one_tries_again(
    tmp_path: Path,
) -> None:
    """H6."""
    tries = 0

    async def build() -> Any:
        nonlocal tries
        tries += 1
        await asyncio.sleep(0)
        if tries == 1:
            raise ConnectionError("no model")
        return Desk()

    agent = AsyncioAgent(build=build)
    async with serving(tmp_path / "x.db", agent) as runtime:
        assert "no model" in str((await runtime.ask(KEY, "hello")).outcome.error)
        assert (await runtime.ask(KEY, "hello")).text == "re hello"
    assert tries == 2


async def test_two_runtimes_in_a_process_have_their_own_loops(tmp_path: Path) -> None:
    desks = Desk(hello=leave_a_failing_task), Desk()
    agents = AsyncioAgent(desks[0]), AsyncioAgent(desks[1])
    async with (
        serving(tmp_path / "1.db", agents[0]) as one,
        serving(tmp_path / "2.db", agents[1]) as two,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.ask, KEY, "hello")
            nursery.start_soon(two.ask, KEY, "hello")
        assert (await two.ask(KEY, "again")).text == "re again"
    assert [agent.statistics().loops_failed for agent in agents] == [1, 0]


async def test_an_agent_serves_one_runtime_at_a_time_and_another_one_later(tmp_path: Path) -> None:
    agent = AsyncioAgent(Desk())
    async with serving(tmp_path / "1.db", agent) as one:
        assert (await one.ask(KEY, "hello")).text == "re hello"
        async with serving(tmp_path / "2.db", agent) as two:
            reply = await two.ask(KEY, "hello")
            assert "one runtime at a time" in str(reply.outcome.error)
    async with serving(tmp_path / "3.db", agent) as three:
        assert (await three.ask(KEY, "hello")).text == "re hello"


def test_what_can_be_no_agent_is_refused() -> None:
    wrong: list[Any] = [{}, {"agent": 3}, {"agent": Desk(), "build": Desk}, {"build": 3}]
    for arguments in wrong:
        with pytest.raises(InvalidAgentError):
            AsyncioAgent(**arguments)
    with pytest.raises(InvalidAgentError):
        AsyncioAgent(Desk(), grace_s=0)


async def test_one_that_is_wrapped_says_what_it_needs(tmp_path: Path) -> None:
    inside = AsyncioAgent(Desk())

    async def agent(turn: Turn) -> Any:
        return await inside.run(turn)

    async with serving(tmp_path / "x.db", agent) as runtime:
        assert "attach(spawn)" in str((await runtime.ask(KEY, "hello")).outcome.error)


# Cancelling, in both directions ------------------------------------------------------------------


async def test_an_interrupt_cancels_the_task_and_what_it_awaits(
    tmp_path: Path, autojump_clock: object
) -> None:
    """Also a call into trio, from a child task; what was streamed is stored as partial."""
    seen: list[str] = []

    async def ask(turn: AsyncioTurn) -> None:
        try:
            await turn.ask_user("yes?")
        except asyncio.CancelledError:
            seen.append("the call")
            raise

    async def work(turn: AsyncioTurn) -> str:
        async with turn.streaming() as out:
            await out.write("half of ")
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(ask(turn))
                    group.create_task(asyncio.sleep(3600))
            finally:
                seen.append("the turn")
        return "never"

    desk = Desk(work=work)
    async with inline(tmp_path / "x.db", AsyncioAgent(desk)) as runtime:
        reply, took_s = await interrupted(runtime, desk, "work")
        assert (reply.outcome.kind, reply.outcome.cause) == ("interrupted", "person")
        assert took_s == 0
        assert seen == ["the call", "the turn"]
        rows = await transcript(runtime, KEY)
        assert ("assistant", "half of ") in rows
        assert (await runtime.ask(KEY, "next")).text == "re next"


async def test_a_deadline_cancels_and_what_ends_in_time_is_heard(
    tmp_path: Path, autojump_clock: object
) -> None:
    async def clean_up(turn: AsyncioTurn) -> str:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(1)  # within the grace
        return "never"

    desk = Desk(**{"clean up": clean_up})
    settings = Settings(sessions=SessionSettings(turn_deadline_s=10))
    async with inline(tmp_path / "x.db", AsyncioAgent(desk), settings) as runtime:
        reply = await runtime.ask(KEY, "clean up")
        assert (reply.outcome.kind, reply.outcome.cause) == ("failed", "deadline")
    assert trio.current_time() > 10


async def test_an_agent_that_swallows_its_cancellation_is_given_up(
    tmp_path: Path, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends with the grace, is counted and shown with its stack; the next turn has a new loop."""
    desk = Desk(swallow=swallow)
    agent = AsyncioAgent(desk, grace_s=3)
    async with inline(tmp_path / "x.db", agent) as runtime:
        reply, took_s = await interrupted(runtime, desk, "swallow")
        assert reply.outcome.kind == "interrupted"
        assert took_s == 3
        assert (await runtime.ask(KEY, "next")).text == "re next"
        assert agent.statistics().given_up == 1
        assert agent.statistics().loops_opened == 2
    assert any("await asyncio.sleep(3600)" in record.getMessage() for record in caplog.records)
    assert agent.statistics().running == 0


async def test_a_loop_that_is_given_up_serves_its_other_turns_to_their_end(
    tmp_path: Path, autojump_clock: object
) -> None:
    async def slow(_: AsyncioTurn) -> str:
        await asyncio.sleep(60)
        return "slow"

    desk = Desk(swallow=swallow, slow=slow)
    agent = AsyncioAgent(desk)
    async with inline(tmp_path / "x.db", agent) as runtime:
        other = await runtime.submit("test:other", "slow")
        await interrupted(runtime, desk, "swallow")
        assert (await runtime.ask(KEY, "next")).text == "re next"
        assert (await other.reply()).text == "slow"
        assert agent.statistics().loops_opened == 2
        assert agent.statistics().loops_failed == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_code_that_refuses_every_end_holds_up_nobody(
    tmp_path: Path, autojump_clock: object
) -> None:
    """Not the turn, and not the end of the runtime."""

    async def refuse(_: AsyncioTurn) -> None:
        for _attempt in range(3):
            try:
                await asyncio.sleep(3600)
            except BaseException:  # noqa: S110, RUF100 - this is who must be stopped
                pass

    desk = Desk(refuse=refuse)
    async with inline(tmp_path / "x.db", AsyncioAgent(desk)) as runtime:
        _, took_s = await interrupted(runtime, desk, "refuse")
        assert took_s == 2
        desk.begun = trio.Event()
        await runtime.submit(KEY, "refuse")
        await desk.begun.wait()
        begun_s = trio.current_time()
    assert trio.current_time() - begun_s < 10
    gc.collect()


async def test_a_thread_that_does_not_end_is_left_behind(tmp_path: Path) -> None:
    """As asyncio does; neither the turn nor the runtime waits for it."""
    import threading

    held, began = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        held.wait(60)

    async def wait(_: AsyncioTurn) -> None:
        await asyncio.to_thread(hold)

    desk = Desk(wait=wait)
    try:
        async with serving(tmp_path / "x.db", AsyncioAgent(desk)) as runtime:
            submission = await runtime.submit(KEY, "wait")
            await trio.to_thread.run_sync(began.wait)
            runtime.interrupt(KEY)
            assert (await submission.reply()).outcome.kind == "interrupted"
    finally:
        held.set()


async def test_closing_the_runtime_ends_what_still_runs(
    tmp_path: Path, autojump_clock: object
) -> None:
    """Tasks that outlived their turn included; a cancelled block as well."""
    ended: list[str] = []

    async def leave(_: AsyncioTurn) -> str:
        async def background() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append("background")

        asyncio.get_running_loop().left = asyncio.create_task(background())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        return "left"

    for cancelled in (False, True):
        desk = Desk(leave=leave, swallow=swallow)
        with trio.CancelScope() as scope:
            async with inline(tmp_path / f"{cancelled}.db", AsyncioAgent(desk)) as runtime:
                assert (await runtime.ask(KEY, "leave")).text == "left"
                desk.begun = trio.Event()
                await runtime.submit(KEY, "swallow")
                await desk.begun.wait()
                if cancelled:
                    scope.cancel()
                    await trio.lowlevel.checkpoint()
    assert ended == ["background"] * 2


# What goes wrong on a loop -----------------------------------------------------------------------


async def test_a_task_that_nobody_awaits_ends_the_turns_of_its_loop_with_a_reason(
    tmp_path: Path, autojump_clock: object
) -> None:
    """Never the runtime, and no other agent's; the next turn gets a new loop after a pause."""

    async def slow(_: AsyncioTurn) -> str:
        await asyncio.sleep(60)
        return "slow"

    desk, bystander = Desk(bad=leave_a_failing_task, slow=slow), AsyncioAgent(Desk(slow=slow))
    agent = AsyncioAgent(desk)
    async with (
        inline(tmp_path / "x.db", agent) as runtime,
        inline(tmp_path / "y.db", bystander) as beside,
    ):
        other = await runtime.submit("test:other", "slow")
        untouched = await beside.submit(KEY, "slow")
        reply = await runtime.ask(KEY, "bad")
        for one in (reply, await other.reply()):
            assert one.outcome.kind == "failed"
            assert "nobody awaited raised ValueError: nobody looks" in str(one.outcome.error)
        begun_s = trio.current_time()
        assert (await runtime.ask(KEY, "next")).text == "re next"
        assert 0 < trio.current_time() - begun_s < 1
        assert (await untouched.reply()).text == "slow"
        assert (agent.statistics().loops_failed, agent.statistics().loops_opened) == (1, 2)
    assert bystander.statistics().loops_failed == 0


async def test_the_pause_before_a_new_loop_doubles_until_one_serves(
    tmp_path: Path, autojump_clock: object
) -> None:
    desk = Desk(bad=leave_a_failing_task)
    agent = AsyncioAgent(desk)
    async with inline(tmp_path / "x.db", agent, clock=LoopClock()) as runtime:
        waits: list[float] = []
        for text in ("bad", "bad", "bad", "bad", "good", "bad", "good"):
            begun_s = trio.current_time()
            await runtime.ask(KEY, text)
            waits.append(round(trio.current_time() - begun_s, 3))
        assert waits == [0, 0.1, 0.2, 0.4, 0.8, 0, 0.1]
    assert asyncio_agent._PAUSE_MAX_S >= 1  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("where", ["a task", "a callback", "the turn"])
async def test_an_exit_ends_a_turn_and_never_the_process(
    tmp_path: Path, autojump_clock: object, where: str
) -> None:
    """Trio-asyncio alone would hang for ever at the first two."""

    async def leave(_: AsyncioTurn) -> None:
        async def go() -> None:
            sys.exit(3)

        if where == "a task":
            asyncio.create_task(go())  # noqa: RUF006
        elif where == "a callback":
            asyncio.get_running_loop().call_soon(sys.exit)
        else:
            await go()
        await asyncio.sleep(60)

    desk = Desk(leave=leave)
    async with inline(tmp_path / "x.db", AsyncioAgent(desk)) as runtime:
        reply = await runtime.ask(KEY, "leave")
        assert reply.outcome.kind == "failed"
        assert "leave the process" in str(reply.outcome.error) or "SystemExit" in str(
            reply.outcome.error
        )
        assert (await runtime.ask(KEY, "next")).text == "re next"


async def test_trio_in_asyncio_code_is_refused_and_breaks_nothing(
    tmp_path: Path, autojump_clock: object
) -> None:
    """Without that, what was to wake the coroutine wakes the loop's own task, and trio gives up."""
    event, lock = trio.Event(), trio.Lock()

    async def confuse(_: AsyncioTurn) -> str:
        for wait in (event.wait, trio.sleep_forever, trio.lowlevel.checkpoint, lock.acquire):
            with pytest.raises(TrioInAsyncioError):
                await wait()
        event.set()
        return "refused"

    desk = Desk(confuse=confuse)
    async with inline(tmp_path / "x.db", AsyncioAgent(desk)) as runtime:
        assert (await runtime.ask(KEY, "confuse")).text == "refused"
        assert (await runtime.ask(KEY, "next")).text == "re next"


async def test_what_asyncio_only_logs_is_only_logged(
    tmp_path: Path, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """A failing callback, or a transport's fatal error, ends no turn: asyncio itself goes on."""

    async def stumble(_: AsyncioTurn) -> str:
        loop = asyncio.get_running_loop()
        loop.call_soon(int, "no number")
        loop.call_exception_handler({"message": "Fatal write error", "exception": OSError("pipe")})
        loop.call_exception_handler({"message": "Unclosed client session"})
        await asyncio.sleep(1)
        return "went on"

    desk = Desk(stumble=stumble)
    agent = AsyncioAgent(desk)
    with caplog.at_level(logging.ERROR):
        async with inline(tmp_path / "x.db", agent) as runtime:
            assert (await runtime.ask(KEY, "stumble")).text == "went on"
    assert agent.statistics().loops_failed == 0
    assert "Unclosed client session" in caplog.text


async def test_an_agent_that_was_built_is_closed_and_built_again_with_its_loop(
    tmp_path: Path, autojump_clock: object
) -> None:
    """Its clients belonged to the loop that is gone."""
    told: list[str] = []

    class Assistant(Desk):
        def __init__(self) -> None:
            super().__init__(bad=leave_a_failing_task)
            told.append("built")

        async def close(self) -> None:
            await asyncio.sleep(0)
            told.append("closed")

    agent = AsyncioAgent(build=Assistant)
    async with inline(tmp_path / "x.db", agent) as runtime:
        assert "nobody awaited" in str((await runtime.ask(KEY, "bad")).outcome.error)
        assert (await runtime.ask(KEY, "next")).text == "re next"
    assert told == ["built", "closed", "built", "closed"]


async def test_an_agent_that_can_not_be_closed_is_reported(
    tmp_path: Path, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    class Assistant(Desk):
        async def close(self) -> None:
            raise ValueError("it is stuck")

    for agent in (AsyncioAgent(Assistant()), AsyncioAgent(build=Assistant)):
        async with inline(tmp_path / "x.db", agent) as runtime:
            await runtime.ask(KEY, "hello")
    assert caplog.text.count("ValueError: it is stuck") == 2


async def test_an_agent_that_never_ran_is_closed_all_the_same(tmp_path: Path) -> None:
    closed: list[bool] = []

    class Assistant(Desk):
        async def aclose(self) -> None:
            await asyncio.sleep(0)
            closed.append(True)

    async with serving(tmp_path / "x.db", AsyncioAgent(Assistant())):
        pass
    assert closed == [True]


def test_a_loop_that_is_gone_is_a_typed_error() -> None:
    error = AsyncioLoopError("why")
    assert error.reason == "why"
    assert error.hint


PLAIN = """
import asyncio, sys
import onepen, onepen.agents
assert "trio_asyncio" not in sys.modules
agent = onepen.agents.AsyncioAgent(lambda turn: "hello")
assert "trio_asyncio" not in sys.modules
import trio
async def main():
    async with onepen.open_runtime(None, agent=agent) as runtime:
        assert "trio_asyncio" not in sys.modules
        assert (await runtime.ask("a:1", "hi")).text == "hello"
        assert "trio_asyncio" in sys.modules
trio.run(main)
"""


def test_trio_asyncio_is_imported_by_the_first_turn() -> None:
    """It changes asyncio for the whole process, so nobody gets it who does not use it."""
    subprocess.run([sys.executable, "-W", "error", "-c", PLAIN], check=True)
