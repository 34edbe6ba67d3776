"""The public runtime: opening and ending it, submitting and asking, turns that go wrong, events."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from onepen import (
    DatabaseHeldError,
    Event,
    Inbound,
    InvalidContentError,
    Outcome,
    RuntimeClosedError,
    SessionBusyError,
    SessionInfo,
    SessionSettings,
    Settings,
    SettingsError,
    Turn,
    open_runtime,
)

from ..actors.fixtures import StillClock
from .scripted import Held, echo, serving, texts, transcript, until

if TYPE_CHECKING:
    from pathlib import Path

    from onepen import Reply, Runtime, Subscription
    from onepen.runtime.submission import Interruption

KEY = "test:1"
BRISK = Settings(sessions=SessionSettings(turn_deadline_s=0.05, interrupt_grace_s=0.02))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


class BodyError(Exception):
    pass


# Opening and ending --------------------------------------------------------------------------


async def test_an_error_of_the_block_leaves_it_as_it_is(path: Path) -> None:
    error = BodyError()
    with pytest.raises(BodyError) as caught:
        async with open_runtime(path, agent=echo) as runtime:
            await runtime.ask(KEY, "hi")
            raise error
    assert caught.value is error
    async with serving(path) as runtime:
        assert await transcript(runtime, KEY) == [("user", "hi"), ("assistant", "re hi")]


async def test_a_group_of_errors_leaves_the_block_as_it_is(path: Path) -> None:
    group = ExceptionGroup("mine", [BodyError(), ValueError()])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_runtime(path, agent=echo):
            raise group
    assert caught.value is group


async def test_a_cancelled_block_stores_and_finalizes_what_was_running(path: Path) -> None:
    held = Held()
    turn_id = ""
    with trio.CancelScope() as scope:
        async with open_runtime(path, agent=held) as runtime:
            turn_id = (await runtime.submit(KEY, "hi")).turn_id
            await held.begun["hi"].wait()
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    async with serving(path) as runtime:
        turn = await runtime.sessions.turn(turn_id)
        assert turn.outcome is not None
        assert (turn.outcome.kind, turn.outcome.cause) == ("interrupted", "shutdown")
        assert runtime.statistics().counters["turns_recovered"] == 0
        session = await runtime.sessions.get(turn.session_id or "")
        assert session is not None
        assert (session.end_reason, session.end_kind) == ("shutdown", "suspension")


async def test_a_second_runtime_on_the_file_is_refused_and_the_first_goes_on(path: Path) -> None:
    """INV-12."""
    async with serving(path) as runtime:
        with pytest.raises(DatabaseHeldError):
            async with open_runtime(path, agent=echo):
                pytest.fail("two runtimes on one file")
        assert (await runtime.ask(KEY, "hi")).text == "re hi"
    async with serving(path) as runtime:
        assert (await runtime.ask(KEY, "hi")).text == "re hi"


async def test_a_held_database_says_since_when(path: Path) -> None:
    """INV-12: as a moment that can be shown; by the clock of whoever holds it."""
    clock = StillClock()
    async with serving(path, clock=clock):
        with pytest.raises(DatabaseHeldError) as caught:
            async with open_runtime(path, agent=echo):
                pytest.fail("two runtimes on one file")
    assert caught.value.since == datetime.fromtimestamp(clock.now_ms / 1000, tz=UTC)
    assert DatabaseHeldError("chat.db", None, None).since is None


async def test_one_small_setting_alone_opens_a_runtime(path: Path) -> None:
    """The defaults that nobody named follow it."""
    settings = Settings(sessions=SessionSettings(turn_deadline_s=0.3))
    async with serving(path, settings=settings) as runtime:
        assert (await runtime.sessions.list()).sessions == ()


async def test_settings_that_do_not_fit_are_refused_before_anything_is_made(path: Path) -> None:
    wrong = Settings(sessions=SessionSettings(turn_deadline_s=0.05, interrupt_grace_s=1.0))
    with pytest.raises(SettingsError):
        async with open_runtime(path, agent=echo, settings=wrong):
            pytest.fail("opened")
    assert not await trio.Path(path).exists()


async def test_a_runtime_without_a_file_works_the_same_and_says_so() -> None:
    """A6."""
    with trio.fail_after(20):
        async with open_runtime(None, agent=echo) as runtime:
            reply = await runtime.ask(KEY, "hi")
            assert (reply.text, reply.persisted, reply.durable) == ("re hi", True, False)
            assert not runtime.durable


async def test_after_shutdown_nothing_is_taken(path: Path) -> None:
    async with serving(path) as runtime:
        await runtime.ask(KEY, "hi")
        assert await runtime.shutdown()
        for key in (KEY, "test:other"):
            with pytest.raises(RuntimeClosedError):
                await runtime.submit(key, "too late")
        with pytest.raises(RuntimeClosedError):
            await runtime.close_session(KEY)
        assert await runtime.shutdown()
        assert len(await transcript(runtime, KEY)) == 2


async def test_shutdown_takes_its_deadline_by_name(path: Path) -> None:
    async with serving(path) as runtime:
        reply = await runtime.ask(KEY, "hi")
        assert await runtime.shutdown(deadline=5)
        session = await runtime.sessions.get(reply.session_id)
        assert session is not None
        assert session.end_kind == "suspension"


async def test_shutdown_interrupts_and_stores_what_runs_and_keeps_what_waits(path: Path) -> None:
    held = Held()
    async with serving(path, held) as runtime:
        running = await runtime.submit(KEY, "one")
        waiting = await runtime.submit(KEY, "two")
        await held.begun["one"].wait()
        assert await runtime.shutdown()
        reply = await running.reply()
        assert (reply.outcome.kind, reply.outcome.cause) == ("interrupted", "shutdown")
        with pytest.raises(RuntimeClosedError):
            await waiting.reply()
        assert await transcript(runtime, KEY) == [("user", "one")]
    async with serving(path) as runtime:
        async with runtime.events(KEY) as events:
            while (await runtime.sessions.turn(waiting.turn_id)).outcome is None:
                await events.receive()
        assert await transcript(runtime, KEY) == [
            ("user", "one"),
            ("user", "two"),
            ("assistant", "re two"),
        ]


async def test_shutdown_waits_for_an_agent_that_is_slow_to_stop(path: Path) -> None:
    begun, stopping, let_go = trio.Event(), trio.Event(), trio.Event()

    async def slow(turn: Turn) -> None:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            stopping.set()
            with trio.CancelScope(shield=True):
                await let_go.wait()

    async with serving(path, slow) as runtime, trio.open_nursery() as nursery:
        submission = await runtime.submit(KEY, "hi")
        await begun.wait()
        ended: list[bool] = []

        async def shut_down() -> None:
            ended.append(await runtime.shutdown())

        nursery.start_soon(shut_down)
        await stopping.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert ended == []
        let_go.set()
        assert (await submission.reply()).outcome.cause == "shutdown"
    assert ended == [True]


async def test_shutdown_gives_up_on_an_agent_that_does_not_stop_in_time(path: Path) -> None:
    """INV-15: and says so; once the agent lets go, the block ends."""
    begun, let_go = trio.Event(), trio.Event()

    async def stuck(turn: Turn) -> None:
        begun.set()
        with trio.CancelScope(shield=True):
            await let_go.wait()

    async with serving(path, stuck) as runtime:
        submission = await runtime.submit(KEY, "hi")
        await begun.wait()
        assert not await runtime.shutdown(0.05)
        let_go.set()
    async with serving(path) as runtime:
        turn = await runtime.sessions.turn(submission.turn_id)
        assert turn.state == "ended"
        assert await transcript(runtime, KEY) == [("user", "hi")]


class Closing:
    """An agent that notes its end."""

    def __init__(self, closed: list[str], name: str) -> None:
        self._closed, self._name = closed, name

    async def run(self, turn: Turn) -> str:
        return "ok"

    def close(self) -> None:
        self._closed.append(self._name)


async def test_a_shared_agent_is_closed_once_at_the_end(path: Path) -> None:
    closed: list[str] = []
    async with serving(path, Closing(closed, "shared")) as runtime:
        for key in ("test:1", "test:2"):
            await runtime.ask(key, "hi")
            await runtime.close_session(key)
        assert closed == []
    assert closed == ["shared"]


async def test_the_agents_of_a_factory_are_closed_with_their_sessions(path: Path) -> None:
    closed: list[str] = []

    def build(session: SessionInfo) -> Closing:
        return Closing(closed, session.key)

    async with serving(path, factory=build) as runtime:
        for key in ("test:1", "test:2"):
            await runtime.ask(key, "hi")
        await runtime.close_session("test:1")
        assert closed == ["test:1"]
    assert sorted(closed) == ["test:1", "test:2"]


# Submitting and asking -----------------------------------------------------------------------


async def test_a_submitted_message_is_durable_when_submit_returns(path: Path) -> None:
    """A1, INV-2: and its turn runs, or it waits, as `disposition` and `position` say."""
    held = Held()
    async with serving(path, held) as runtime:
        first = await runtime.submit(KEY, "one")
        assert (first.disposition, first.position) == ("started", 0)
        assert await transcript(runtime, KEY) == [("user", "one")]
        assert (await runtime.sessions.turn(first.turn_id)).state == "running"
        second, third = await runtime.submit(KEY, "two"), await runtime.submit(KEY, "three")
        assert (second.disposition, second.position) == ("queued", 1)
        assert (third.disposition, third.position) == ("queued", 2)
        assert (await runtime.sessions.turn(third.turn_id)).state == "queued"
        assert await transcript(runtime, KEY) == [("user", "one")]
        for text in ("one", "two", "three"):
            held.go_on[text].set()
        assert (await third.reply()).text == "re three"
        assert held.order == ["one", "two", "three"]
        assert [text for _, text in await transcript(runtime, KEY)] == [
            "one",
            "re one",
            "two",
            "re two",
            "three",
            "re three",
        ]


async def test_the_text_of_an_inbound_message_needs_no_name(path: Path) -> None:
    async with serving(path) as runtime:
        reply = await runtime.ask(KEY, Inbound("hello", source="telegram", id="m1", user="ann"))
        assert reply.text == "re hello"
        session = await runtime.sessions.get(reply.session_id)
        assert session is not None
        assert (session.source, session.user) == ("telegram", "ann")


async def test_parts_may_be_a_list_and_have_text_beside_them(path: Path) -> None:
    """The text is their first part, and what the agent hears."""
    image = {"type": "image", "url": "x"}
    async with serving(path) as runtime:
        reply = await runtime.ask(KEY, Inbound(text="look", parts=[image]))
        assert (reply.text, reply.outcome.kind) == ("re look", "answered")
        assert reply.messages[0].parts == ({"type": "text", "text": "look"}, image)
        reply = await runtime.ask(KEY, Inbound(parts=[image]))
        assert (reply.text, reply.messages[0].parts) == ("re ", (image,))


async def test_where_a_reply_goes_may_be_said_in_one_word(path: Path) -> None:
    held = Held("hi")
    async with serving(path, held) as runtime:
        assert (await runtime.ask(KEY, Inbound(text="hi", reply_to="chat-17"))).text == "re hi"
        assert [inbound.reply_to for inbound in held.turns[0].inbound] == [{"to": "chat-17"}]


async def test_a_listing_is_a_sequence_of_what_people_recognise(path: Path) -> None:
    """With where the next page begins."""
    async with serving(path) as runtime:
        for name in ("a", "b", "c"):
            await runtime.set_title(f"test:{name}", f"Chat {name}")
            await runtime.ask(f"test:{name}", "hi")
        listing = await runtime.sessions.list()
        found = {(item.id, item.key, item.title) for item in listing}
        assert found == {
            (await runtime.sessions.current(f"test:{name}"), f"test:{name}", f"Chat {name}")
            for name in ("a", "b", "c")
        }
        assert (len(listing), listing.next) == (3, None)
        first = await runtime.sessions.list(limit=2)
        rest = await runtime.sessions.list(limit=2, after=first.next)
        assert (len(first), len(rest), rest.next) == (2, 1, None)
        assert [*first, *rest] == list(listing)


async def test_too_many_waiting_messages_are_refused_and_not_stored(path: Path) -> None:
    """INV-14."""
    held = Held("two", "later")
    settings = Settings(sessions=SessionSettings(waiting_per_key_max=1))
    async with serving(path, held, settings=settings) as runtime:
        await runtime.submit(KEY, "one")
        second = await runtime.submit(KEY, "two")
        with pytest.raises(SessionBusyError) as caught:
            await runtime.submit(KEY, "three")
        assert caught.value.key == KEY
        assert caught.value.retry_after_s > 0
        assert (await runtime.submit("test:other", "later")).disposition == "started"
        held.go_on["one"].set()
        await second.reply()
        assert [text for _, text in await transcript(runtime, KEY)] == [
            "one",
            "re one",
            "two",
            "re two",
        ]
        assert (await runtime.ask(KEY, "later")).text == "re later"


async def test_a_reply_may_be_waited_for_by_many_and_again(path: Path) -> None:
    held = Held()
    async with serving(path, held) as runtime:
        submission = await runtime.submit(KEY, "one")
        replies: list[Reply] = []

        async def wait() -> None:
            replies.append(await submission.reply())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            nursery.start_soon(wait)
            await held.begun["one"].wait()
            held.go_on["one"].set()
        assert replies[0] is replies[1]
        assert (await submission.reply()) is replies[0]


async def test_a_cancelled_ask_leaves_the_turn_running(path: Path) -> None:
    """INV-10."""
    held = Held()
    async with serving(path, held) as runtime:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runtime.ask, KEY, "one")
                await held.begun["one"].wait()
                scope.cancel()
        assert held.running == 1
        held.go_on["one"].set()
        held.go_on["two"].set()
        assert (await runtime.ask(KEY, "two")).text == "re two"
        assert ("assistant", "re one") in await transcript(runtime, KEY)


async def _ask_and_cancel(runtime: Runtime, text: str | Inbound, ready: Any) -> None:
    """An `ask(on_cancel="interrupt")` that is cancelled once `ready` returns."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                await runtime.ask(KEY, text, on_cancel="interrupt")

            nursery.start_soon(ask)
            await ready()
            scope.cancel()
    assert scope.cancelled_caught


async def test_a_cancelled_ask_interrupts_its_turn_if_it_says_so(path: Path) -> None:
    held = Held("two")
    async with serving(path, held) as runtime:
        await _ask_and_cancel(runtime, "one", held.begun["one"].wait)
        assert (await runtime.ask(KEY, "two")).text == "re two"
        assert await transcript(runtime, KEY) == [
            ("user", "one"),
            ("user", "two"),
            ("assistant", "re two"),
        ]


async def test_a_cancelled_ask_interrupts_the_turn_that_it_follows_if_it_says_so(
    path: Path,
) -> None:
    held, message = Held(), Inbound("one", id="u1")
    async with serving(path, held) as runtime:
        first = await runtime.submit(KEY, message)
        await held.begun["one"].wait()

        async def followed() -> None:
            await until(lambda: runtime.statistics().counters["repeats"] == 1)
            await trio.testing.wait_all_tasks_blocked()

        await _ask_and_cancel(runtime, message, followed)
        assert (await first.reply()).outcome.kind == "interrupted"


async def test_a_cancelled_ask_whose_message_still_waits_takes_it_back_if_it_says_so(
    path: Path,
) -> None:
    held = Held("two", "three")
    async with serving(path, held) as runtime:
        first = await runtime.submit(KEY, "one")

        async def queued() -> None:
            while runtime.statistics().sessions.waiting == 0:
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked(0.01)

        await _ask_and_cancel(runtime, "two", queued)
        held.go_on["one"].set()
        await first.reply()
        await runtime.ask(KEY, "three")
        assert held.order == ["one", "three"]


async def test_interrupting_a_running_turn_stores_it_as_interrupted(path: Path) -> None:
    """F3: interrupted by a person, so that the text is empty."""
    held = Held("two")
    async with serving(path, held) as runtime:
        submission = await runtime.submit(KEY, "one")
        await held.begun["one"].wait()
        assert await submission.interrupt()
        reply = await submission.reply()
        assert (reply.text, reply.outcome.kind, reply.outcome.cause) == (
            "",
            "interrupted",
            "person",
        )
        assert (await runtime.sessions.turn(submission.turn_id)).outcome == reply.outcome
        assert not await submission.interrupt()
        assert not runtime.interrupt(KEY)
        assert (await runtime.ask(KEY, "two")).text == "re two"


async def test_the_key_can_be_interrupted_without_knowing_the_turn(path: Path) -> None:
    held = Held()
    async with serving(path, held) as runtime:
        assert not runtime.interrupt(KEY)
        submission = await runtime.submit(KEY, "one")
        await held.begun["one"].wait()
        assert runtime.interrupt(KEY)
        assert (await submission.reply()).outcome.kind == "interrupted"


@pytest.mark.parametrize("whose", ["submission", "key"])
async def test_an_interrupt_works_at_once_and_may_be_awaited(path: Path, whose: str) -> None:
    """Its truth value says whether there was something to stop, awaited or not."""
    held = Held()
    async with serving(path, held) as runtime:
        submission = await runtime.submit(KEY, "one")
        await held.begun["one"].wait()

        def interrupt() -> Interruption:
            return submission.interrupt() if whose == "submission" else runtime.interrupt(KEY)

        stopped = interrupt()
        assert bool(stopped) is True
        assert (await submission.reply()).outcome.kind == "interrupted"
        assert await stopped is True
        too_late = interrupt()
        assert bool(too_late) is False
        assert await too_late is False


async def test_interrupting_a_waiting_message_takes_it_back_and_leaves_the_others(
    path: Path,
) -> None:
    held = Held("three")
    async with serving(path, held) as runtime, trio.open_nursery() as nursery:
        first = await runtime.submit(KEY, "one")
        second = await runtime.submit(KEY, "two")
        third = await runtime.submit(KEY, "three")
        done: list[bool] = []

        async def take_back() -> None:
            done.append(await second.interrupt())

        nursery.start_soon(take_back)
        await trio.testing.wait_all_tasks_blocked()
        held.go_on["one"].set()
        assert (await first.reply()).outcome.kind == "answered"
        assert (await third.reply()).text == "re three"
        assert (await second.reply()).outcome.kind == "interrupted"
        assert done == [True]
        assert held.order == ["one", "three"]
        assert ("user", "two") not in await transcript(runtime, KEY)


async def test_a_waiting_message_is_taken_back_while_the_turn_before_it_runs(path: Path) -> None:
    """Taking back must not wait for the very turn that the message waits for."""
    held = Held()
    async with serving(path, held) as runtime:
        await runtime.submit(KEY, "one")
        second = await runtime.submit(KEY, "two")
        await held.begun["one"].wait()
        with trio.move_on_after(0.5) as scope:
            assert await second.interrupt()
            assert (await second.reply()).outcome.kind == "interrupted"
        assert not scope.cancelled_caught, "it waits for the running turn"
        assert held.running == 1


INVALID: list[tuple[Any, Any]] = [
    ("", "hi"),
    ("  ", "hi"),
    (None, "hi"),
    (5, "hi"),
    ("half \ud800", "hi"),
    ("k" * 2000, "hi"),
    (KEY, None),
    (KEY, 5),
    (KEY, b"bytes"),
    (KEY, "half \ud800"),
    (KEY, "x" * (1024 * 1024 + 1)),
    (KEY, Inbound()),
    (KEY, Inbound(text="hi", user="\ud800")),
    (KEY, Inbound(text="hi", id="\ud800")),
    (KEY, Inbound(text="hi", id="i" * 5000)),
    (KEY, Inbound(text="hi", source="\ud800")),
    (KEY, Inbound(text="hi", source="s" * 5000)),
    (KEY, Inbound(text="hi", meta={"x": object()})),
    (KEY, Inbound(text="hi", reply_to={"x": object()})),
    (KEY, Inbound(text="hi", reply_to={"x": "\ud800"})),
    (KEY, Inbound(text="hi", parts=({"x": "\ud800"},))),
]


@pytest.mark.parametrize("case", range(len(INVALID)))
async def test_an_invalid_submission_is_refused_and_nothing_is_stored(
    path: Path, case: int
) -> None:
    """INV-20: on a fresh key, on a busy one, and the key works as before."""
    key, message = INVALID[case]
    held = Held("fine", "again")
    async with serving(path, held) as runtime:
        with pytest.raises(InvalidContentError):
            await runtime.submit(key, message)
        assert (await runtime.sessions.list()).sessions == ()
        assert (await runtime.ask(KEY, "fine")).text == "re fine"
        busy = await runtime.submit(KEY, "busy")
        with pytest.raises(InvalidContentError):
            await runtime.submit(key, message)
        held.go_on["busy"].set()
        await busy.reply()
        assert (await runtime.ask(KEY, "again")).text == "re again"
        assert len(await transcript(runtime, KEY)) == 6
        statistics = runtime.statistics()
        assert statistics.counters["crashes"] == 0
        assert statistics.slots.running == 0


# Turns that go wrong -------------------------------------------------------------------------


async def test_an_agent_that_raises_fails_its_turn_with_the_reason(path: Path) -> None:
    """F5."""

    async def agent(turn: Turn) -> str:
        if turn.text == "bad":
            await turn.say("half")
            raise ValueError("no such luck")
        return "ok"

    async with serving(path, agent) as runtime:
        reply = await runtime.ask(KEY, "bad")
        assert (reply.outcome.kind, reply.outcome.cause) == ("failed", "agent")
        assert "no such luck" in (reply.outcome.error or "")
        assert "no such luck" in reply.text
        assert (await runtime.ask(KEY, "good")).text == "ok"
        assert [text for _, text in await transcript(runtime, KEY)] == ["bad", "half", "good", "ok"]
        assert runtime.statistics().counters["crashes"] == 0


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this works")


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(1),
        ExceptionGroup("many", [ValueError(), KeyError()]),
        ValueError("half \ud800"),
        ValueError("x" * 100_000),
        trio.TooSlowError(),
        asyncio.CancelledError(),
        Mute(),
    ],
    ids=["exit", "group", "surrogate", "long", "too slow", "asyncio cancelled", "mute"],
)
async def test_whatever_an_agent_raises_ends_its_own_turn_and_nothing_else(
    path: Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """INV-13."""
    # The traceback in the log may hold half a character, which xdist can't send to its master.
    caplog.set_level(logging.CRITICAL, logger="onepen")
    held = Held("good")

    async def agent(turn: Turn) -> str:
        if turn.text == "bad":
            raise error
        return await held.run(turn)

    async with serving(path, agent) as runtime:
        other = await runtime.submit("test:other", "other")
        await held.begun["other"].wait()
        assert (await runtime.ask(KEY, "bad")).outcome.kind == "failed"
        assert (await runtime.ask(KEY, "good")).text == "re good"
        held.go_on["other"].set()
        assert (await other.reply()).text == "re other"
        assert runtime.statistics().counters["crashes"] == 0


RUBBISH: list[Any] = [
    5,
    object(),
    b"bytes",
    ["text"],
    "half \ud800",
    "x" * (1024 * 1024 + 1),
    {"final_response": "half \ud800"},
    {"messages": "text"},
    {"messages": [5]},
    {"messages": [{"role": "assistant", "content": "half \ud800"}]},
    {"messages": [{"role": "nobody", "content": "x"}]},
    {"messages": [{"role": "assistant", "content": "x", "tool_calls": 5}]},
    {"messages": [{"role": "assistant", "content": "x", "uid": "not a uid"}]},
    Outcome(kind="answered", text=5),  # type: ignore[arg-type]
    Outcome(kind="mended", text="x"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(
    "beside",
    [
        {"final_response": "ok", "error": "half \ud800"},
        {"final_response": "ok", "partial": True, "error": "y" * (1024 * 1024 + 1)},
        Outcome(kind="answered", text="ok", error="half \ud800"),
        Outcome(kind="answered", text="ok", detail={"x": object()}),
        Outcome(kind="answered", text="ok", detail={"a": "y" * 700_000, "b": "y" * 700_000}),
    ],
    ids=["surrogate", "long", "outcome", "object", "large"],
)
async def test_what_can_not_be_stored_beside_an_answer_never_costs_the_answer(
    path: Path, beside: Any
) -> None:
    """F1, INV-20: the answer is stored; what was left out of the outcome says so."""

    async def agent(_: Turn) -> Any:
        return beside

    async with serving(path, agent) as runtime:
        reply = await runtime.ask(KEY, "go")
        assert reply.text == "ok"
        assert await transcript(runtime, KEY) == [("user", "go"), ("assistant", "ok")]
        outcome = (await runtime.turns.get(reply.turn_id)).outcome
        assert outcome == reply.outcome
        assert outcome is not None
        left_out = "left_out" in (outcome.detail or {})
        assert left_out or 0 < len(outcome.error or "") <= 4000


@pytest.mark.parametrize("case", range(len(RUBBISH)))
async def test_an_agent_that_returns_what_can_not_be_stored_fails_its_turn(
    path: Path, case: int
) -> None:
    """INV-20: the session stays usable, and the user's message is stored once."""

    async def agent(turn: Turn) -> Any:
        return RUBBISH[case] if turn.text == "bad" else "ok"

    async with serving(path, agent) as runtime:
        reply = await runtime.ask(KEY, "bad")
        assert reply.outcome.kind == "failed"
        assert reply.outcome.error
        assert (await runtime.ask(KEY, "good")).text == "ok"
        assert await transcript(runtime, KEY) == [
            ("user", "bad"),
            ("user", "good"),
            ("assistant", "ok"),
        ]
        assert runtime.statistics().counters["crashes"] == 0


@pytest.mark.parametrize("how", ["appended", "reported"])
async def test_an_answer_that_the_agent_does_not_call_one_is_the_reply(
    path: Path, how: str
) -> None:
    """F6: it came back, though as a message alone."""
    answer = {"role": "assistant", "content": "the answer"}

    async def agent(turn: Turn) -> Any:
        if how == "reported":
            return {"messages": [*turn.messages, answer]}
        await turn.append(answer)
        return None

    async with serving(path, agent) as runtime:
        reply = await runtime.ask(KEY, "hi")
        assert (reply.text, reply.outcome.kind) == ("the answer", "answered")
        assert await transcript(runtime, KEY) == [("user", "hi"), ("assistant", "the answer")]


async def test_a_stuck_agent_is_stopped_at_its_deadline_and_the_next_turn_works(path: Path) -> None:
    """INV-15."""

    async def agent(turn: Turn) -> str:
        if turn.text == "bad":
            await turn.say("so far")
            await trio.sleep_forever()
        return "ok"

    async with serving(path, agent, settings=BRISK) as runtime:
        reply = await runtime.ask(KEY, "bad")
        assert (reply.outcome.kind, reply.outcome.cause) == ("failed", "deadline")
        assert "0.05 s" in (reply.outcome.error or "")
        assert (await runtime.ask(KEY, "good")).text == "ok"
        assert [text for _, text in await transcript(runtime, KEY)] == [
            "bad",
            "so far",
            "good",
            "ok",
        ]


async def test_an_agent_that_ignores_cancellation_is_reported_and_hurts_nobody_else(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """INV-13: the log shows where it is."""
    begun, let_go = trio.Event(), trio.Event()

    async def a_tool_that_never_listens() -> None:
        with trio.CancelScope(shield=True):
            await let_go.wait()

    async def agent(turn: Turn) -> str:
        if turn.text == "bad":
            begun.set()
            await a_tool_that_never_listens()
        return "ok"

    caplog.set_level(logging.ERROR, logger="onepen")
    short = SessionSettings(turn_deadline_s=0.05, interrupt_grace_s=0.02, idle_evict_s=0.02)
    async with serving(path, agent, settings=Settings(sessions=short)) as runtime:
        bad = await runtime.submit(KEY, "bad")
        await begun.wait()
        number = 0
        while runtime.statistics().counters["agents_stuck"] == 0:
            number += 1
            assert (await runtime.ask(f"test:other{number}", "good")).text == "ok"
        reports = [r.getMessage() for r in caplog.records if "does not end" in r.getMessage()]
        assert len(reports) == 1
        assert "a_tool_that_never_listens" in reports[0]
        assert KEY in reports[0]
        let_go.set()
        await bad.reply()
        assert (await runtime.ask(KEY, "good")).text == "ok"
        assert runtime.statistics().counters["agents_stuck"] == 1


async def test_a_stream_that_an_interrupt_cuts_is_stored_as_partial(path: Path) -> None:
    written = trio.Event()

    async def agent(turn: Turn) -> None:
        async with turn.streaming() as out:
            await out.write("so ")
            await out.write("far")
            written.set()
            await trio.sleep_forever()

    async with serving(path, agent) as runtime:
        submission = await runtime.submit(KEY, "hi")
        await written.wait()
        assert runtime.interrupt(KEY)
        reply = await submission.reply()
        assert reply.outcome.kind == "interrupted"
        stored = await runtime.sessions.transcript(reply.session_id)
        assert texts(stored) == [("user", "hi"), ("assistant", "so far")]
        assert stored[1].finish_reason == "partial"


async def test_a_streamed_answer_that_is_returned_as_well_is_stored_once(path: Path) -> None:
    async def agent(turn: Turn) -> str:
        async with turn.streaming() as out:
            await out.write("all ")
            await out.write("done")
        return out.text

    async with serving(path, agent) as runtime:
        assert (await runtime.ask(KEY, "hi")).text == "all done"
        assert await transcript(runtime, KEY) == [("user", "hi"), ("assistant", "all done")]


# How many run at once ------------------------------------------------------------------------


async def test_running_turns_are_limited_and_sources_take_turns(path: Path) -> None:
    """INV-14, INV-13."""
    held = Held()
    settings = Settings(sessions=SessionSettings(turns_running_max=1))
    async with serving(path, held, settings=settings) as runtime:
        names = ("a1", "a2", "a3", "b1")
        submissions = {name: await runtime.submit(f"{name[0]}:{name}", name) for name in names}
        assert submissions["a1"].disposition == "started"
        assert {submissions[name].disposition for name in names[1:]} == {"queued"}
        assert runtime.statistics().slots.waiting_by_source == {"a": 2, "b": 1}
        for name in names:
            held.go_on[name].set()
        for submission in submissions.values():
            await submission.reply()
        assert held.order == ["a1", "a2", "b1", "a3"]
        assert held.running_most == 1
        assert runtime.statistics().slots.running == 0


async def test_live_actors_are_never_more_than_their_limit(path: Path) -> None:
    """INV-14: many keys wait for the room that few idle ones make."""
    live: list[int] = []

    async def agent(turn: Turn) -> str:
        live.append(runtime.statistics().sessions.live)
        return await echo(turn)

    async def ask(key: str) -> None:
        try:
            await runtime.ask(key, "hi")
        except SessionBusyError:
            pass  # an explicit refusal is how the limit is kept
        live.append(runtime.statistics().sessions.live)

    settings = Settings(sessions=SessionSettings(live_actors_max=4, turns_running_max=4))
    async with serving(path, agent, settings=settings) as runtime:
        for batch in range(5):
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(ask, f"test:{batch}:{number}")
            await trio.testing.wait_all_tasks_blocked()
        assert max(live) == 4
        assert runtime.statistics().counters["evicted"] > 0


# Events --------------------------------------------------------------------------------------


async def _until_ended(events: Subscription) -> list[Event]:
    got: list[Event] = []
    async for event in events:
        got.append(event)
        if event.kind == "turn.ended":
            break
    return got


async def test_events_come_in_order_numbered_and_only_behind_their_commit(path: Path) -> None:
    """INV-3: what is announced as committed is stored, under the same seq."""

    async def agent(turn: Turn) -> str:
        async with turn.streaming() as out:
            await out.write("all ")
            await out.write("done")
        return out.text

    async with serving(path, agent) as runtime, runtime.events(KEY) as events:
        submission = await runtime.submit(KEY, "hi")
        got: list[Event] = []
        async for event in events:
            got.append(event)
            if event.kind == "message.committed":
                assert event.session_id is not None
                stored = await runtime.sessions.transcript(event.session_id)
                assert [m.uid for m in stored if m.seq == event.seq] == [event.uid]
            if event.kind == "turn.ended":
                turn = await runtime.sessions.turn(submission.turn_id)
                assert turn.outcome == event.outcome
                break
        assert [event.kind for event in got] == [
            "message.committed",
            "turn.started",
            "message.delta",
            "message.delta",
            "message.committed",
            "turn.ended",
        ]
        assert [event.position[1] for event in got] == [1, 2, 3, 4, 5, 6]
        assert len({event.position[0] for event in got}) == 1
        assert [event.text for event in got if event.provisional] == ["all ", "done"]
        assert [event.seq for event in got if event.kind == "message.committed"] == [0, 1]
        assert {event.turn_id for event in got} == {submission.turn_id}
        assert got[2].uid == got[4].uid
        assert got[-1].text == "all done"


async def test_a_queued_message_is_announced(path: Path) -> None:
    """As the table of `actors/events.py` says: the message is durable and waits."""
    held = Held("two")
    async with serving(path, held) as runtime, runtime.events(KEY) as events:
        await runtime.submit(KEY, "one")
        second = await runtime.submit(KEY, "two")
        held.go_on["one"].set()
        await second.reply()
        got = [*await _until_ended(events), *await _until_ended(events)]
        assert ("turn.queued", second.turn_id) in [(event.kind, event.turn_id) for event in got]


async def test_a_subscriber_resumes_behind_what_it_has_heard(path: Path) -> None:
    async with serving(path) as runtime:
        async with runtime.events(KEY) as events:
            await runtime.ask(KEY, "one")
            heard = await _until_ended(events)
        await runtime.ask(KEY, "two")
        async with runtime.events(KEY, after=heard[1].position) as events:
            rest = [*await _until_ended(events), *await _until_ended(events)]
        assert [event.position for event in rest[: len(heard) - 2]] == [
            event.position for event in heard[2:]
        ]
        numbers = [event.position[1] for event in rest]
        assert numbers == list(range(heard[1].position[1] + 1, numbers[-1] + 1))


async def test_a_submissions_events_are_its_own_turn_from_beginning_to_end(path: Path) -> None:
    held = Held("two")
    async with serving(path, held) as runtime:
        first, second = await runtime.submit(KEY, "one"), await runtime.submit(KEY, "two")
        held.go_on["one"].set()
        for submission in (first, second):
            async with submission.events() as events:
                got = [event async for event in events]
            assert got[-1].kind == "turn.ended"
            assert {event.turn_id for event in got} == {submission.turn_id}
            assert "turn.started" in [event.kind for event in got]


async def test_the_events_of_a_turn_that_is_long_over_come_to_an_end(path: Path) -> None:
    """INV-15: whoever follows a turn whose events are gone must not wait for ever."""
    settings = Settings(sessions=SessionSettings(stream_window_events_max=3))
    async with serving(path, settings=settings) as runtime:
        submission = await runtime.submit(KEY, "one")
        await submission.reply()
        await runtime.ask(KEY, "two")
        with trio.move_on_after(0.5) as scope:
            async with submission.events() as events:
                async for _ in events:
                    pass
        assert not scope.cancelled_caught


async def test_a_slow_subscriber_is_dropped_with_a_last_event_and_the_turn_goes_on(
    path: Path,
) -> None:
    """INV-14."""

    async def agent(turn: Turn) -> str:
        async with turn.streaming() as out:
            for number in range(50):
                await out.write(str(number))
        return "ok"

    limits = SessionSettings(stream_window_events_max=10, delta_interval_s=1e-9)
    settings = Settings(sessions=limits)
    async with serving(path, agent, settings=settings) as runtime, runtime.events(KEY) as events:
        assert (await runtime.ask(KEY, "hi")).text == "ok"
        got = [event async for event in events]
        assert len(got) == 11
        assert got[-1].kind == "dropped"
        # The last one says where to go on: behind the last event that was got.
        assert [event.position[1] for event in got] == [*range(1, 11), 10]


async def test_the_end_of_the_runtime_ends_subscriptions(path: Path) -> None:
    """INV-15."""
    async with serving(path) as runtime, trio.open_nursery() as nursery:
        got: list[str] = []

        async def follow() -> None:
            async with runtime.events(KEY) as events:
                got.extend([event.kind async for event in events])

        nursery.start_soon(follow)
        await runtime.ask(KEY, "hi")
        await runtime.shutdown()
    assert got[-1] == "turn.ended"
