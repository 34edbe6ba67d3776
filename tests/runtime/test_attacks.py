"""What an attack on the runtime found at its edges: its end, its callers and its input.

Each test is the smallest one that showed its defect; `test_attacks_storage` and
`test_attacks_turns` have those further inside. Where the clock jumps, the Writer runs inline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from onepen import (
    Event,
    Inbound,
    InvalidContentError,
    OnepenError,
    Outcome,
    Reply,
    Runtime,
    RuntimeFailedError,
    SessionSettings,
    Settings,
    Subscription,
    Turn,
    TurnPendingError,
    WriterSettings,
    open_runtime,
)
from onepen.storage.sqlite.engine import SqliteEngine

from .scripted import Held, echo, inline

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from trio.testing import MockClock

KEY = "test:1"
ENDS_SOON = Settings(
    shutdown_s=1,
    sessions=SessionSettings(finalize_deadline_s=1, hook_deadline_s=1, interrupt_grace_s=1),
    writer=WriterSettings(drain_s=1),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


# The end ---------------------------------------------------------------------------------------


async def _end_early(runtime: Runtime, how: str) -> None:
    if how == "cancelled":
        with trio.move_on_after(0.1):
            await runtime.shutdown()
    elif how == "too slow":
        assert not await runtime.shutdown(0.1)
    else:
        await runtime.submit("test:agent", "down")
        await trio.sleep(1)


def _ending(ended: list[str]) -> tuple[Any, Any]:
    """An agent that is slow to stop, or ends the runtime itself; and hooks that note the end."""

    class Agent:
        runtime: Runtime

        async def run(self, turn: Turn) -> str:
            if turn.text == "down":
                await self.runtime.shutdown()
            if turn.text == "long":
                try:
                    await trio.sleep_forever()
                finally:
                    with trio.CancelScope(shield=True):
                        await trio.sleep(0.5)
            return "ok"

    class Hooks:
        def on_session_finalize(self, *, key: str, **_: object) -> None:
            ended.append(key)

    return Agent(), Hooks()


HOWS = ("cancelled", "too slow", "by an agent")


@pytest.mark.parametrize("how", HOWS)
async def test_a_shutdown_that_was_cut_short_is_finished_by_the_end_of_the_block(
    path: Path, autojump_clock: MockClock, how: str
) -> None:
    """INV-9: every session is finalized, once."""
    ended: list[str] = []
    agent, hooks = _ending(ended)
    keys = ["test:1", "test:2", "test:agent"]
    async with inline(path, agent, hooks=hooks) as agent.runtime:
        await agent.runtime.ask("test:agent", "hello")
        for key in keys[:2]:
            await agent.runtime.submit(key, "long")
        await trio.testing.wait_all_tasks_blocked()
        await _end_early(agent.runtime, how)
    assert sorted(ended) == keys
    async with inline(path) as runtime:
        assert runtime.statistics().counters["turns_recovered"] == 0
        listed = await runtime.sessions.list()
        assert {one.session.end_kind for one in listed} == {"suspension"}


@pytest.mark.parametrize("how", HOWS)
async def test_sessions_that_an_earlier_shutdown_finalized_do_not_delay_the_end(
    path: Path, autojump_clock: MockClock, how: str
) -> None:
    """INV-15: the end takes as long as the agents do, and not its whole deadline."""
    agent, hooks = _ending([])
    async with inline(path, agent, hooks=hooks) as agent.runtime:
        await agent.runtime.ask("test:agent", "hello")
        await agent.runtime.submit(KEY, "long")
        await trio.testing.wait_all_tasks_blocked()
        await _end_early(agent.runtime, how)
        began_s = trio.current_time()
    assert trio.current_time() - began_s < 5


async def test_a_runtime_that_fails_under_a_nursery_raises_one_clear_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-15: the groups of the block's own cancelled tasks are no answer."""

    def bug(_: SqliteEngine) -> None:
        raise TypeError("a bug of ours")

    settings = Settings(writer=WriterSettings(restarts_max=1, backoff_first_s=0.001))

    async def ask(runtime: Runtime) -> None:
        with pytest.raises(OnepenError):
            await runtime.ask(KEY, "hello")

    raised: BaseException | None = None
    try:
        async with open_runtime(path, agent=echo, settings=settings) as runtime:
            monkeypatch.setattr(SqliteEngine, "commit", bug)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                nursery.start_soon(trio.sleep_forever)
                nursery.start_soon(ask, runtime)
    except BaseException as error:  # a cancellation that escapes would end the test as passed
        raised = error
    assert isinstance(raised, RuntimeFailedError)


async def test_an_agent_that_fails_as_it_ends_at_the_shutdown_deadline_leaves_nobody_waiting(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-15: its error and trio's cancellation come as one group."""

    async def clean_up() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("cleaning up failed")

    async def agent(_: Turn) -> str:
        with trio.CancelScope(shield=True):
            await trio.sleep(1.5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(clean_up)
            nursery.start_soon(trio.sleep_forever)
        return ""

    refused: list[TurnPendingError] = []
    async with trio.open_nursery() as nursery, inline(path, agent, ENDS_SOON) as runtime:
        submission = await runtime.submit(KEY, "hello")

        async def wait() -> None:
            with trio.fail_after(60):
                try:
                    await submission.reply()
                except TurnPendingError as error:
                    refused.append(error)

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
    assert len(refused) == 1


async def test_a_message_that_waits_at_the_shutdown_is_not_to_be_sent_again(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-1: it is stored, and the next start answers it, once."""
    held = Held("pay")
    async with inline(path, held) as runtime:
        await runtime.submit(KEY, "long")
        waiting = await runtime.submit(KEY, "pay")
        await runtime.shutdown()
        with pytest.raises(TurnPendingError) as caught:
            await waiting.reply()
        assert "do not send it again" in caught.value.hint
    async with inline(path, held) as runtime:
        await trio.testing.wait_all_tasks_blocked()
        turn = await runtime.sessions.turn(waiting.turn_id)
        assert turn.outcome is not None
        assert turn.outcome.text == "re pay"
    assert held.order == ["long", "pay"]


# Callers ---------------------------------------------------------------------------------------


async def test_an_ask_that_is_cancelled_early_interrupts_its_turn_all_the_same(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-10: wherever its message was just then."""
    ran: list[str] = []

    async def agent(turn: Turn) -> str:
        await trio.sleep(1_000)
        ran.append(turn.text)
        return "ok"

    settings = Settings(sessions=SessionSettings(turn_deadline_s=3_600))
    async with inline(path, agent, settings) as runtime:
        for steps in range(30):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    key = f"test:{steps}"
                    ask = runtime.ask
                    nursery.start_soon(lambda: ask(key, "hello", on_cancel="interrupt"))  # noqa: B023
                    for _ in range(steps):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
        await trio.sleep(2_000)
        assert ran == []
        assert runtime.statistics().counters["turns_started"] > 0
        assert runtime.statistics().slots.running == 0


async def test_two_may_receive_from_one_subscription(path: Path, autojump_clock: MockClock) -> None:
    """INV-15: each event goes to one of them, and the other waits on."""
    async with inline(path) as runtime:
        heard: list[Event] = []

        async def receive(events: Subscription) -> None:
            while True:
                heard.append(await events.receive())

        async with runtime.events(KEY) as events, trio.open_nursery() as nursery:
            nursery.start_soon(receive, events)
            nursery.start_soon(receive, events)
            await trio.testing.wait_all_tasks_blocked()
            for text in ("one", "two", "three"):
                await runtime.ask(KEY, text)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        numbers = sorted(event.position[1] for event in heard)
        assert numbers == list(range(1, len(numbers) + 1))
        assert sum(event.kind == "turn.ended" for event in heard) == 3


WAITING: dict[str, Callable[[Runtime], Awaitable[object]]] = {
    "ask": lambda runtime: runtime.ask(KEY, "and this?"),
    "set_title": lambda runtime: runtime.set_title(KEY, "A title"),
    "rotate": lambda runtime: runtime.rotate(KEY, "short"),
    "compact": lambda runtime: runtime.compact(KEY, "short"),
    "branch": lambda runtime: runtime.branch(KEY),
    "open_session": lambda runtime: runtime.open_session(KEY),
}


@pytest.mark.parametrize("name", WAITING)
async def test_a_turn_that_would_wait_for_its_own_end_is_told_so(
    path: Path, autojump_clock: MockClock, name: str
) -> None:
    """INV-15: and it goes on."""

    async def agent(_: Turn) -> str:
        with pytest.raises(InvalidContentError):
            await WAITING[name](runtime)
        return "ok"

    async with inline(path, agent) as runtime:
        with trio.fail_after(60):
            assert (await runtime.ask(KEY, "hello")).text == "ok"


async def test_a_turn_may_ask_the_same_key_of_another_runtime(
    path: Path, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The same name in another database is another conversation."""

    async def agent(turn: Turn) -> str:
        return (await other.ask(turn.key, turn.text)).text

    async with inline(tmp_path / "other.db") as other, inline(path, agent) as runtime:
        with trio.fail_after(60):
            assert (await runtime.ask(KEY, "hello")).text == "re hello"


async def test_a_hook_that_waits_for_its_own_turn_is_cut_off_and_the_key_goes_on(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-15: the title is set when the hook no longer stands in its way."""

    class Hooks:
        async def on_turn_end(self, key: str, **_: object) -> None:
            await runtime.set_title(key, "A title")

    async with inline(path, hooks=Hooks()) as runtime:
        with trio.fail_after(600):
            for text in ("one", "two"):
                assert (await runtime.ask(KEY, text)).text == f"re {text}"


async def test_a_task_that_a_turn_has_left_behind_may_ask_when_that_turn_is_over(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-15: it waits for no end of its own."""
    over, replies = trio.Event(), list[Reply]()

    async def job() -> None:
        await over.wait()
        replies.append(await runtime.ask(KEY, "done"))

    async with trio.open_nursery() as nursery:

        async def agent(turn: Turn) -> str:
            if turn.text == "start":
                nursery.start_soon(job)
            return f"re {turn.text}"

        async with inline(path, agent) as runtime:
            await runtime.ask(KEY, "start")
            over.set()
            await trio.testing.wait_all_tasks_blocked()
        assert [reply.text for reply in replies] == ["re done"]


# Input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"kind": "failed", "error": 5}, {"kind": "answered", "detail": 5}]
)
async def test_an_outcome_of_wrong_types_fails_its_turn_and_can_be_read(
    path: Path, autojump_clock: MockClock, wrong: dict[str, Any]
) -> None:
    """INV-20: nothing is stored that nobody could read back."""

    async def agent(_: Turn) -> Outcome:
        return Outcome(**wrong)

    async with inline(path, agent) as runtime:
        reply = await runtime.ask(KEY, "hello")
        assert (reply.outcome.kind, reply.outcome.cause) == ("failed", "agent")
    async with inline(path) as runtime:
        assert (await runtime.sessions.turn(reply.turn_id)).outcome == reply.outcome
        assert (await runtime.ask(KEY, "again")).text == "re again"


async def test_a_report_with_a_uid_that_is_no_text_fails_its_turn(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-20: also one that can't be hashed."""

    async def agent(_: Turn) -> dict[str, Any]:
        return {"messages": [{"role": "assistant", "content": "x", "uid": [1]}]}

    async with inline(path, agent) as runtime:
        reply = await runtime.ask(KEY, "hello")
        assert (reply.outcome.kind, reply.outcome.cause) == ("failed", "agent")
        assert runtime.statistics().counters["crashes"] == 0


@pytest.mark.parametrize("call", ["close_session", "reset"])
async def test_a_reason_that_can_not_be_stored_is_refused_and_nothing_ends(
    path: Path, autojump_clock: MockClock, call: str
) -> None:
    """INV-20."""
    async with inline(path) as runtime:
        session_id = (await runtime.ask(KEY, "hello")).session_id
        with pytest.raises(InvalidContentError):
            await getattr(runtime, call)(KEY, reason="\ud800")
        session = await runtime.sessions.get(session_id)
        assert session is not None
        assert session.end_kind is None


async def _subscribe(runtime: Runtime, after: Any) -> None:
    async with runtime.events(KEY, after=after):
        pass


WRONG: dict[str, Callable[[Runtime, Any], Awaitable[object]]] = {
    "compact": lambda runtime, wrong: runtime.compact(KEY, wrong),
    "rotate": lambda runtime, wrong: runtime.rotate(KEY, wrong, force=True),
    "rewind": lambda runtime, wrong: runtime.rewind(KEY, turns=wrong),
    "inbound id": lambda runtime, wrong: runtime.submit(KEY, Inbound("hello", id=wrong)),
    "current": lambda runtime, wrong: runtime.sessions.current(wrong),
    "find": lambda runtime, wrong: runtime.sessions.find(wrong),
    "get": lambda runtime, wrong: runtime.sessions.get(wrong),
    "transcript": lambda runtime, wrong: runtime.sessions.transcript(wrong),
    "turn": lambda runtime, wrong: runtime.sessions.turn(wrong),
    "limit": lambda runtime, wrong: runtime.sessions.list(limit=wrong),
    "list key": lambda runtime, wrong: runtime.sessions.list(key=wrong),
}


@pytest.mark.parametrize("call", WRONG)
async def test_a_value_of_a_wrong_type_is_refused_with_a_type(
    path: Path, autojump_clock: MockClock, call: str
) -> None:
    """INV-20: an error that says what is wrong, and no crash."""
    async with inline(path) as runtime:
        await runtime.ask(KEY, "hello")
        with pytest.raises(OnepenError):
            await WRONG[call](runtime, [1])
        assert runtime.statistics().counters["crashes"] == 0


STILL_WRONG: dict[str, Callable[[Runtime], Awaitable[object]]] = {
    "a limit over 64 bits": lambda runtime: runtime.sessions.list(limit=2**63),
    "a page behind nothing": lambda runtime: runtime.sessions.list(after=5),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    "a time that is none": lambda runtime: runtime.sessions.list(since_ms=[]),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    "a limit that is text": lambda runtime: runtime.sessions.transcript("a", limit="x"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    "a position that is none": lambda runtime: _subscribe(runtime, 5),
}


@pytest.mark.parametrize("call", STILL_WRONG)
async def test_a_place_or_time_of_a_wrong_type_is_refused_with_a_type(
    path: Path, autojump_clock: MockClock, call: str
) -> None:
    """INV-20."""
    async with inline(path) as runtime:
        await runtime.ask(KEY, "hello")
        with pytest.raises(OnepenError):
            await STILL_WRONG[call](runtime)
