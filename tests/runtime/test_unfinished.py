"""What is unfinished: queued turns that are listed and cancelled, dead letters, reset policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from onepen import (
    ConflictError,
    Inbound,
    InvalidContentError,
    MissingError,
    ResetPolicy,
    SessionSettings,
    Settings,
    SourcePolicy,
    open_runtime,
)
from onepen.actors.retention import prune_inbox

from ..contract.agents import call, problems, query, snapshot, sound, stored, texts
from .scripted import Held, LoopClock, echo, inline, serving, until

if TYPE_CHECKING:
    from pathlib import Path

    from onepen import Turn

KEY = "test:dm:1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


# Queued turns --------------------------------------------------------------------------------


async def test_queued_turns_are_listed_with_their_messages_and_can_be_cancelled(
    path: Path,
) -> None:
    held = Held()
    async with serving(path, held) as runtime:
        first = await runtime.submit(KEY, Inbound("one", id="u1"))
        await held.begun["one"].wait()
        second = await runtime.submit(KEY, Inbound("two", id="u2"))
        third = await runtime.submit(KEY, Inbound("three", id="u3"))
        other = await runtime.submit("test:dm:2", "elsewhere")
        listed = await runtime.turns.list(KEY)
        assert [(t.id, t.state) for t in listed] == [
            (first.turn_id, "running"),
            (second.turn_id, "queued"),
            (third.turn_id, "queued"),
        ]
        assert [[m.inbound_id for m in t.messages] for t in listed] == [["u1"], ["u2"], ["u3"]]
        assert len(await runtime.turns.list()) == 4
        status = await runtime.status(KEY)
        assert (status.state, status.turn_id, status.queued) == ("running", first.turn_id, 2)
        assert await runtime.turns.cancel(second.turn_id)
        reply = await second.reply()
        assert (reply.outcome.kind, reply.outcome.cause) == ("interrupted", "person")
        assert await runtime.turns.cancel(first.turn_id)
        held.go_on["three"].set()
        held.go_on["elsewhere"].set()
        assert (await third.reply()).text == "re three"
        await other.reply()
        assert not await runtime.turns.cancel(third.turn_id)
        with pytest.raises(MissingError):
            await runtime.turns.cancel("nothing")
        assert await runtime.turns.list() == ()
        status = await runtime.status(KEY)
        assert (status.state, status.turn_id, status.queued) == ("idle", None, 0)
        assert status.session_id == await runtime.sessions.current(KEY)
    sound(path)


async def test_the_status_of_a_key_that_nobody_knows_is_idle(path: Path) -> None:
    async with serving(path) as runtime:
        status = await runtime.status("nobody")
        assert (status.state, status.session_id, status.questions) == ("idle", None, ())
        with pytest.raises(InvalidContentError):
            await runtime.status("")


# Dead letters --------------------------------------------------------------------------------


async def kill(path: Path, number: int, recovery: Any, inbound: Inbound) -> Path:
    """A process that dies while its agent works on this message, whoever began it."""
    began = trio.Event()

    async def agent(turn: Turn) -> str:
        if turn.text == "poison":
            began.set()
            await trio.sleep_forever()
        return f"re {turn.text}"

    settings = Settings(sessions=SessionSettings(recovery=recovery))
    async with open_runtime(path, agent=agent, settings=settings) as runtime:
        if recovery == "mark" or number == 0:
            await runtime.submit(KEY, inbound)
        await began.wait()
        await runtime.status(KEY)
        return snapshot(path, path.with_name(f"left-{number}.db"))


@pytest.mark.parametrize("recovery", ["mark", "resume"])
async def test_a_message_that_keeps_killing_its_turn_is_set_aside(
    path: Path, recovery: Any
) -> None:
    """Whoever begins it again, its repeat or the start; the user hears of it, once."""
    inbound = Inbound("poison", id="u1", reply_to="chat-1", user="ann")
    for number in range(3):
        path = await kill(path, number, recovery, inbound)
    settings = Settings(sessions=SessionSettings(recovery=recovery))
    async with serving(path, settings=settings) as runtime:
        (letter,) = await runtime.dead_letters.list()
        assert (letter.key, letter.tries, letter.state) == (KEY, 3, "open")
        turn = await runtime.turns.get(letter.turn_id)
        assert turn.outcome is not None
        assert (turn.outcome.kind, turn.outcome.cause) == ("failed", "dead_letter")
        repeat = await runtime.submit(KEY, inbound)
        assert repeat.repeated
        assert "set aside" in (await repeat.reply()).text
        assert (await runtime.ask(KEY, "still here")).text == "re still here"
        told = [d.text for d in reversed(await runtime.deliveries.list())]
        assert len(told) == (3 if recovery == "mark" else 1)
        assert "set aside" in told[-1]
        assert runtime.statistics().counters["dead_letters"] == 1
    sound(path)


async def dead(path: Path) -> Path:
    for number in range(3):
        inbound = Inbound("poison", id="u1", reply_to="chat-1", user="ann")
        path = await kill(path, number, "mark", inbound)
    return path


async def test_a_dead_letter_is_retried_as_a_new_turn_once(path: Path) -> None:
    """The same words, the same user and reply target; decided in one transaction."""
    path = await dead(path)
    async with serving(path) as runtime:
        await runtime.reset(KEY)  # wherever the conversation is by now
        (letter,) = await runtime.dead_letters.list()
        retried = await runtime.dead_letters.retry(letter.turn_id)
        assert (await retried.reply()).text == "re poison"
        assert retried.turn_id != letter.turn_id
        rows = await stored(runtime, KEY)
        assert (rows[0].role, rows[0].text, rows[0].user) == ("user", "poison", "ann")
        for decide in (runtime.dead_letters.retry, runtime.dead_letters.drop):
            with pytest.raises(ConflictError):
                await decide(letter.turn_id)
            with pytest.raises(MissingError):
                await decide("nothing")
        assert await runtime.dead_letters.list() == ()
        (decided,) = await runtime.dead_letters.list("retried")
        assert decided.turn_id == letter.turn_id
        assert (await runtime.deliveries.list())[0].text == "re poison"
    sound(path)


async def test_a_dead_letter_is_dropped(path: Path) -> None:
    path = await dead(path)
    async with serving(path) as runtime:
        (letter,) = await runtime.dead_letters.list()
        await runtime.dead_letters.drop(letter.turn_id)
        assert [one.state for one in await runtime.dead_letters.list(None)] == ["dropped"]
        with pytest.raises(ConflictError):
            await runtime.dead_letters.retry(letter.turn_id)
    sound(path)


async def test_how_often_a_turn_may_be_cut_is_a_setting(path: Path) -> None:
    inbound = Inbound("poison", id="u1")
    path = await kill(path, 0, "mark", inbound)
    settings = Settings(sessions=SessionSettings(turn_tries_max=1))
    async with serving(path, settings=settings) as runtime:
        (letter,) = await runtime.dead_letters.list()
        assert letter.tries == 1


# Reset policies ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "last", "now", "due"),
    [
        ({}, "2026-01-01T00:00", "2027-01-01T00:00", False),
        ({"idle_minutes": 30}, "2026-01-01T12:00", "2026-01-01T12:29", False),
        ({"idle_minutes": 30}, "2026-01-01T12:00", "2026-01-01T12:30", True),
        ({"daily_hour": 4}, "2026-01-01T03:59", "2026-01-01T04:00", True),
        ({"daily_hour": 4}, "2026-01-01T04:00", "2026-01-02T03:59", False),
        ({"daily_hour": 4}, "2026-01-01T04:00", "2026-01-02T04:00", True),
        ({"daily_hour": 0}, "2026-01-01T23:59", "2026-01-02T00:00", True),
        # 04:00 in Berlin is 03:00 in winter and 02:00 in summer, by UTC.
        ({"daily_hour": 4, "zone": "Europe/Berlin"}, "2026-01-01T02:59", "2026-01-01T03:00", True),
        ({"daily_hour": 4, "zone": "Europe/Berlin"}, "2026-07-01T01:59", "2026-07-01T02:00", True),
        ({"daily_hour": 4, "zone": "Europe/Berlin"}, "2026-07-01T02:00", "2026-07-01T03:00", False),
        ({"idle_minutes": 9999, "daily_hour": 4}, "2026-01-01T03:00", "2026-01-01T05:00", True),
        # Where clocks go back over the hour it strikes once: 02:00 in Berlin, 00:00 by UTC.
        ({"daily_hour": 2, "zone": "Europe/Berlin"}, "2026-10-24T23:59", "2026-10-25T00:00", True),
        ({"daily_hour": 2, "zone": "Europe/Berlin"}, "2026-10-25T00:15", "2026-10-25T01:30", False),
        ({"daily_hour": 2, "zone": "Europe/Berlin"}, "2026-10-25T00:15", "2026-10-25T02:30", False),
        # And where they go forward over it, when they do: 03:00 in Berlin, 01:00 by UTC.
        ({"daily_hour": 2, "zone": "Europe/Berlin"}, "2026-03-29T00:59", "2026-03-29T01:00", True),
        ({"daily_hour": 2, "zone": "Europe/Berlin"}, "2026-03-29T01:00", "2026-03-29T01:01", False),
    ],
)
def test_a_conversation_is_over_by_idle_minutes_or_by_the_hour(
    policy: dict[str, Any], last: str, now: str, *, due: bool
) -> None:
    """Whichever comes first; neither is set by default."""
    from datetime import UTC, datetime

    def ms(text: str) -> int:
        return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)

    assert ResetPolicy(**policy).due(ms(last), ms(now)) == due


async def test_the_message_that_comes_too_late_begins_a_new_session(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Evaluated when it arrives and at no other time; also behind a restart; the old one stays."""
    clock = LoopClock()
    sources = {"test": SourcePolicy(reset=ResetPolicy(idle_minutes=30))}
    ended: list[dict[str, Any]] = []

    class Hooks:
        def on_session_finalize(self, **told: Any) -> None:
            ended.append(told)

    async with inline(path, clock=clock, sources=sources, hooks=Hooks()) as runtime:
        await runtime.ask(KEY, "one")
        first = await runtime.sessions.current(KEY)
        await trio.sleep(29 * 60)
        await runtime.ask(KEY, "two")
        assert await runtime.sessions.current(KEY) == first
        await trio.sleep(31 * 60)
        assert await runtime.sessions.current(KEY) == first
        async with trio.open_nursery() as nursery:
            for text in ("three", "four"):
                nursery.start_soon(runtime.ask, KEY, text)
        second = await runtime.sessions.current(KEY)
        assert second is not None
        assert second != first
        assert sorted(map(str, (await texts(runtime, KEY))[::2])) == ["four", "three"]
        old = await runtime.sessions.get(str(first))
        assert old is not None
        assert (old.end_reason, old.end_kind) == ("expired", "boundary")
        assert [told["reason"] for told in ended] == ["expired"]
    clock.ahead_s += 3600
    async with inline(path, clock=clock, sources=sources) as runtime:
        await runtime.ask(KEY, "five")
        assert await texts(runtime, KEY) == ["five", "re five"]
        new = await runtime.sessions.get(str(await runtime.sessions.current(KEY)))
        assert new is not None
        assert (new.parent_id, new.edge) == (second, "reset")
    sound(path)


async def test_a_crash_never_leaves_a_message_that_came_too_late_to_the_old_session(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """It is accepted and started in one unit, as by any idle session, behind the reset."""
    clock = LoopClock()
    sources = {"test": SourcePolicy(reset=ResetPolicy(idle_minutes=30))}
    lefts: list[Path] = []

    class Hooks:
        def on_session_finalize(self, **_: Any) -> None:
            lefts.append(snapshot(path, path.with_name("left.db")))

    async with inline(path, clock=clock, sources=sources, hooks=Hooks()) as runtime:
        await runtime.ask(KEY, "one")
        await trio.sleep(31 * 60)
        late = await runtime.submit(KEY, "too late")
        assert late.disposition == "started"
        await late.reply()
        assert await texts(runtime, KEY) == ["too late", "re too late"]
    # Killed in the middle of the reset, nothing of the message is stored: it is sent again.
    async with inline(lefts[0], clock=clock, sources=sources) as runtime:
        assert await runtime.turns.list() == ()
        await runtime.ask(KEY, "too late")
        assert await texts(runtime, KEY) == ["too late", "re too late"]
    sound(path)


async def test_a_session_at_work_is_never_reset_under_its_turn(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    held, clock = Held(), LoopClock()
    sources = {"test": SourcePolicy(reset=ResetPolicy(idle_minutes=1))}
    async with inline(path, held, clock=clock, sources=sources) as runtime:
        first = await runtime.submit(KEY, "long")
        await held.begun["long"].wait()
        await trio.sleep(600)
        second = await runtime.submit(KEY, "more")
        held.go_on["long"].set()
        held.go_on["more"].set()
        assert (await first.reply()).session_id == (await second.reply()).session_id


async def test_an_agent_that_dates_its_rows_oddly_ends_no_conversation(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    clock = LoopClock()
    sources = {"test": SourcePolicy(reset=ResetPolicy(idle_minutes=30))}

    async def agent(turn: Turn) -> None:
        when = {"seconds": clock.now() // 1000, "nanoseconds": clock.now() * 10**6}[turn.text]
        await turn.append({"role": "assistant", "content": "said", "created_ms": when})

    async with inline(path, agent, clock=clock, sources=sources) as runtime:
        first = await runtime.ask(KEY, "seconds")
        second = await runtime.ask(KEY, "nanoseconds")
        third = await runtime.ask(KEY, "seconds")
        assert first.session_id == second.session_id == third.session_id
        await runtime.ask(KEY, "nanoseconds")
        await trio.sleep(31 * 60)
        assert (await runtime.ask(KEY, "seconds")).session_id != first.session_id


async def test_a_repeat_never_resets(path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """A7: it is no new message."""
    clock = LoopClock()
    sources = {"test": SourcePolicy(reset=ResetPolicy(idle_minutes=1))}
    async with inline(path, clock=clock, sources=sources) as runtime:
        first = await runtime.ask(KEY, Inbound("one", id="u1"))
        await trio.sleep(600)
        again = await runtime.ask(KEY, Inbound("one", id="u1"))
        assert again.session_id == first.session_id
        assert await runtime.sessions.current(KEY) == first.session_id


@pytest.mark.parametrize(
    "policy",
    [
        {"reset": "daily"},
        {"reset": ResetPolicy(idle_minutes=0)},
        {"reset": ResetPolicy(idle_minutes=float("inf"))},
        {"reset": ResetPolicy(daily_hour=24)},
        {"reset": ResetPolicy(daily_hour=4.5)},  # type: ignore[arg-type]
        {"reset": ResetPolicy(daily_hour=4, zone="Europe/Nowhere")},
        {"reset": ResetPolicy(daily_hour=4, zone="../../etc/passwd")},
        {"on_late": "sometimes"},
        {"late_after_s": -1},
        {"on_unknown": "shrug"},
        {"deliver": "to the door"},
        {"debounce_s": True},
    ],
    ids=repr,
)
async def test_a_policy_that_can_not_be_kept_is_refused_before_anything_is_started(
    path: Path, policy: dict[str, Any]
) -> None:
    """INV-20."""
    with pytest.raises(InvalidContentError):
        async with open_runtime(path, agent=echo, sources={"test": SourcePolicy(**policy)}):
            pytest.fail("opened")
    assert query_if_there(path) == []


def query_if_there(path: Path) -> list[Any]:
    return query(path, "SELECT 1 FROM routes") if path.exists() else []


# What a review found -----------------------------------------------------------------------------


async def test_a_cut_turn_that_waits_to_be_resumed_is_cancelled_as_a_whole(path: Path) -> None:
    """A10: its open call gets a result, its effect is unknown; whether it runs again or waits."""

    async def first(turn: Turn) -> None:
        await turn.append(call("c1"))
        await turn.effect(trio.sleep_forever, key="pay")

    keys = (KEY, "test:dm:2")
    async with open_runtime(path, agent=first) as runtime:
        for key in keys:
            await runtime.submit(key, Inbound("cut", id=key, reply_to="chat-1"))
        await until(lambda: query(path, "SELECT count(*) FROM effects") == [(2,)])
        left = snapshot(path, path.with_name("left.db"))
    held = Held()
    settings = Settings(sessions=SessionSettings(recovery="resume", turns_running_max=1))
    async with serving(left, held, settings=settings) as runtime:
        await held.begun["cut"].wait()  # one of them has the only slot, the other waits for it
        for turn in reversed(await runtime.turns.list()):
            assert await runtime.turns.cancel(turn.id)
        await until(lambda: query(left, "SELECT 1 FROM turns WHERE state <> 'ended'") == [])
        for key in keys:
            assert problems(await stored(runtime, key)) == []
        assert len(held.order) == 1
        states = query(left, "SELECT DISTINCT state FROM effects")
        assert states == [("unknown",)]
        assert runtime.statistics().slots.running == 0
    sound(left)


@pytest.mark.parametrize("move", ["reset", "switch"])
async def test_a_cut_turn_that_waits_to_be_resumed_ends_with_its_session(
    path: Path, move: str
) -> None:
    """It never goes on where its messages are not; its open call gets a result first (A10)."""

    async def first(turn: Turn) -> None:
        await turn.append(call("c1"))
        await trio.sleep_forever()

    keys = (KEY, "test:dm:2")
    async with open_runtime(path, agent=first) as runtime:
        for key in keys:
            await runtime.submit(key, Inbound("cut", id=key))
        await until(lambda: query(path, "SELECT count(*) FROM messages") == [(4,)])
        left = snapshot(path, path.with_name("left.db"))
    held = Held()
    settings = Settings(sessions=SessionSettings(recovery="resume", turns_running_max=1))
    async with serving(left, held, settings=settings) as runtime:
        await held.begun["cut"].wait()  # one of them has the only slot, the other waits for it
        (turn,) = [one for one in await runtime.turns.list() if one.turn.attempt == 1]
        old = await runtime.sessions.current(turn.key)
        assert old is not None
        if move == "reset":
            await runtime.reset(turn.key)
        else:
            await runtime.switch(turn.key, "another-session")
        outcome = (await runtime.turns.get(turn.id)).outcome
        assert outcome is not None
        assert (outcome.kind, outcome.cause) == ("interrupted", move)
        assert problems(await runtime.sessions.transcript(old)) == []
        held.go_on["cut"].set()
        held.go_on["new"].set()
        assert (await runtime.ask(turn.key, "new")).text == "re new"
        assert held.order == ["cut", "new"]
    sound(left)


async def test_a_cut_turn_is_not_resumed_behind_a_boundary(path: Path) -> None:
    """Its messages are of the session that has ended: a repeat gets what the turn came to."""
    inbound = Inbound("poison", id="u1")
    left = await kill(path, 0, "mark", inbound)
    held = Held("poison")
    async with serving(left, held) as runtime:
        await runtime.close_session(KEY)
        reply = await runtime.ask(KEY, inbound)
        assert (reply.outcome.kind, reply.outcome.cause) == ("interrupted", "crash")
        assert held.order == []
    sound(left)


async def test_a_dead_letter_knows_whom_it_answers_for_as_long_as_it_is_open(path: Path) -> None:
    """A7: whatever else is forgotten by then; and each of its messages is said again."""
    inbound = Inbound("poison", id="u1", reply_to="chat-1", user="ann")
    for number in range(3):
        path = await kill(path, number, "mark", inbound)
    async with serving(path) as runtime:
        (letter,) = await runtime.dead_letters.list()
        surroundings = runtime._surroundings  # pyright: ignore[reportPrivateUsage]
        clock = LoopClock()
        clock.ahead_s = 10**9
        assert await prune_inbox(surroundings.writer, clock, SessionSettings()) is None
        retried = await runtime.dead_letters.retry(letter.turn_id)
        await retried.reply()
        last = (await runtime.deliveries.list())[0]
        assert (last.text, last.target) == ("re poison", {"to": "chat-1"})
    sound(path)


async def test_a_dead_letter_of_several_messages_answers_every_place(path: Path) -> None:
    """They come in apart, as they were said, in one turn."""
    began, poison = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> str:
        if turn.text == "slow":
            began.set()
            await poison.wait()
        elif "a" in turn.text and not calm:
            poison.set()
            await trio.sleep_forever()
        return f"re {turn.text}"

    calm = False
    settings = Settings(sessions=SessionSettings(turn_tries_max=1))
    async with open_runtime(path, agent=agent, settings=settings) as runtime:
        await runtime.submit(KEY, "slow")
        await began.wait()
        for text, place in (("a", "chat-1"), ("b", "chat-2")):
            inbound = Inbound(text, id=text, reply_to=place, user=place)
            await runtime.submit(KEY, inbound, busy="collect")
        poison.set()
        await until(lambda: query(path, "SELECT count(*) FROM turns WHERE attempt = 1") == [(2,)])
        left = snapshot(path, path.with_name("left.db"))
    calm = True
    async with serving(left, agent, settings=settings) as runtime:
        (letter,) = await runtime.dead_letters.list()
        retried = await runtime.dead_letters.retry(letter.turn_id)
        assert (await retried.reply()).text == "re a\nb"
        said = [row.user for row in await stored(runtime, KEY) if row.turn_id == retried.turn_id]
        assert said[:2] == ["chat-1", "chat-2"]
        replies = [d.target["to"] for d in await runtime.deliveries.list() if d.text == "re a\nb"]
        assert sorted(replies) == ["chat-1", "chat-2"]
    sound(left)
