"""Timers: messages for later, once, and what becomes of those whose time came meanwhile."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from onepen import (
    ConflictError,
    Inbound,
    InvalidContentError,
    MissingError,
    RuntimeClosedError,
    SessionBusyError,
    SessionSettings,
    Settings,
    SourcePolicy,
    TurnPendingError,
    open_runtime,
)

from ..contract.agents import query, snapshot, sound, texts
from .scripted import Held, LoopClock, echo, inline, serving, until

if TYPE_CHECKING:
    from pathlib import Path

    from onepen import Runtime

KEY = "test:dm:1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


def in_s(clock: LoopClock, seconds: float) -> int:
    return clock.now() + int(seconds * 1000)


async def test_a_timer_is_a_message_that_arrives_when_it_is_due(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The submission waits with it; others go on."""
    clock = LoopClock()
    async with inline(path, clock=clock) as runtime:
        start = trio.current_time()
        later = await runtime.submit(KEY, "remember the milk", at=in_s(clock, 3600))
        assert (later.disposition, later.repeated) == ("scheduled", False)
        assert (await runtime.ask(KEY, "hello")).text == "re hello"
        (timer,) = await runtime.timers.list()
        assert (timer.id, timer.key, timer.inbound.text) == (
            later.timer_id,
            KEY,
            "remember the milk",
        )
        reply = await later.reply()
        assert (reply.text, reply.turn_id) == ("re remember the milk", later.turn_id)
        assert 3600 <= trio.current_time() - start < 3601
        assert await runtime.timers.list() == ()
        fired = await runtime.timers.get(timer.id)
        assert fired is not None
        assert fired.state == "fired"
    assert query(path, "SELECT inbound_id FROM inbox ORDER BY n")[1] == (timer.id,)
    assert timer.id.startswith("timer:")
    sound(path)


@pytest.mark.parametrize(
    "at",
    [
        datetime.now(UTC) - timedelta(seconds=5),
        datetime.now(UTC).astimezone() - timedelta(days=400),
        1.5,
        1_700_000_000,
        1_700_000_000_000,
    ],
    ids=["just now", "last year", "1970", "seconds", "milliseconds"],
)
async def test_what_is_due_already_arrives_at_once(path: Path, at: Any) -> None:
    """By an aware datetime, by seconds, and by milliseconds as a clock gives them."""
    async with serving(path) as runtime:
        submission = await runtime.submit(KEY, "now", at=at)
        assert (await submission.reply()).text == "re now"
    sound(path)


@pytest.mark.parametrize(
    "arguments",
    [
        {"at": "tomorrow"},
        {"at": datetime(2030, 1, 1)},
        {"at": -1},
        {"at": float("nan")},
        {"at": True},
        {"at": 10**30},
        {"at": 5, "busy": "reject"},
        {"at": 5, "debounce_s": 1},
        {"at": 5, "busy": "whenever"},
        {"at": 5, "message": Inbound("x", id="i" * 1020)},
    ],
    ids=repr,
)
async def test_a_time_that_is_none_is_refused(path: Path, arguments: dict[str, Any]) -> None:
    """INV-20."""
    async with serving(path) as runtime:
        given: dict[str, Any] = {"message": "hello", **arguments}
        with pytest.raises(InvalidContentError):
            await runtime.submit(KEY, given.pop("message"), **given)
        assert await runtime.timers.list() == ()


async def test_what_could_not_wait_in_the_line_is_refused_at_once(path: Path) -> None:
    """INV-20: and not tried again for ever when its time has come, in front of others."""
    inbound = Inbound("x" * (1024 * 1024 - 10), reply_to={"to": "y" * 200_000})
    async with open_runtime(path, agent=echo) as runtime:
        with pytest.raises(InvalidContentError, match="too many"):
            await runtime.submit(KEY, inbound, at=1.0)
        assert await runtime.timers.list() == ()
        await runtime.submit(KEY, "a small one", at=1.0)


async def test_a_timer_that_is_set_again_is_the_same_one(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """INV-1: before it fires and after; another time or text under its id is a conflict."""
    clock = LoopClock()
    async with inline(path, clock=clock) as runtime:
        due = in_s(clock, 60)
        inbound = Inbound("wake up", id="alarm")
        first = await runtime.submit(KEY, inbound, at=due)
        again = await runtime.submit(KEY, inbound, at=due)
        assert (again.turn_id, again.timer_id) == (first.turn_id, first.timer_id)
        for other, at in ((inbound, due + 1), (Inbound("get up", id="alarm"), due)):
            with pytest.raises(ConflictError):
                await runtime.submit(KEY, other, at=at)
        with pytest.raises(ConflictError):
            await runtime.submit("test:dm:2", inbound, at=due)
        assert (await first.reply()).text == (await again.reply()).text == "re wake up"
        after = await runtime.submit(KEY, inbound, at=due)
        assert (after.turn_id, after.repeated) == (first.turn_id, True)
        assert (await after.reply()).text == "re wake up"
        assert await texts(runtime, KEY) == ["wake up", "re wake up"]
    sound(path)


async def test_a_cancelled_timer_does_not_fire(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    clock = LoopClock()
    async with inline(path, clock=clock) as runtime:
        later = await runtime.submit(KEY, "no", at=in_s(clock, 60))
        sooner = await runtime.submit(KEY, "yes", at=in_s(clock, 30))
        assert later.timer_id is not None
        assert await runtime.timers.cancel(later.timer_id)
        assert not await runtime.timers.cancel(later.timer_id)
        with pytest.raises(MissingError):
            await later.reply()
        await sooner.reply()
        assert sooner.timer_id is not None
        assert not await runtime.timers.cancel(sooner.timer_id)
        with pytest.raises(MissingError):
            await runtime.timers.cancel("nothing")
        await trio.sleep(120)
        assert await texts(runtime, KEY) == ["yes", "re yes"]
    sound(path)


async def test_a_scheduled_message_is_taken_back_by_interrupting_it(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """INV-15: while it waits for its time, while it waits in line, and not when it has ended."""
    held, clock = Held("later"), LoopClock()
    async with inline(path, held, clock=clock) as runtime:
        later = await runtime.submit(KEY, "no", at=in_s(clock, 60))
        assert await later.interrupt()
        assert not await later.interrupt()
        with pytest.raises(MissingError):
            await later.reply()
        await runtime.submit(KEY, "long")
        queued = await runtime.submit(KEY, "nor this", at=in_s(clock, 1))
        await trio.sleep(2)
        assert await queued.interrupt()
        held.go_on["long"].set()
        assert (await queued.reply()).outcome.cause == "person"
        ended = await runtime.submit(KEY, "later", at=in_s(clock, 1))
        await ended.reply()
        assert not await ended.interrupt()
        assert await texts(runtime, KEY) == ["long", "re long", "later", "re later"]
    sound(path)


async def test_a_timer_survives_a_restart_and_its_waiter_is_told(path: Path) -> None:
    """INV-15: the process that set it ends; the next one fires it."""
    at = datetime.now(UTC) + timedelta(seconds=0.5)
    async with open_runtime(path, agent=echo) as runtime:
        later = await runtime.submit(KEY, Inbound("later", id="l"), at=at)
    with pytest.raises(TurnPendingError):
        await later.reply()
    async with serving(path) as runtime:
        again = await runtime.submit(KEY, Inbound("later", id="l"), at=at)
        assert (await again.reply()).text == "re later"
        assert await texts(runtime, KEY) == ["later", "re later"]
    sound(path)


async def test_a_shutdown_tells_those_who_wait_for_a_timer_and_sets_no_other(path: Path) -> None:
    at = datetime.now(UTC) + timedelta(hours=1)
    async with serving(path) as runtime:
        later = await runtime.submit(KEY, Inbound("later", id="l"), at=at)
        assert await runtime.shutdown()
        with pytest.raises(TurnPendingError):
            await later.reply()
        with pytest.raises(RuntimeClosedError):
            await runtime.submit(KEY, Inbound("another", id="m"), at=at)
        assert [timer.id for timer in await runtime.timers.list()] == [later.timer_id]


@pytest.mark.parametrize(
    ("policy", "late_s", "answered"),
    [
        ({}, 3600, True),
        ({"on_late": "skip"}, 3600, False),
        ({"on_late": "skip"}, 30, True),
        ({"on_late": "skip", "late_after_s": 7200}, 3600, True),
    ],
    ids=["run", "skip", "hardly late", "patient"],
)
async def test_what_came_due_while_nobody_served_is_late_and_its_source_says_what_follows(
    path: Path,
    autojump_clock: trio.testing.MockClock,
    policy: dict[str, Any],
    late_s: int,
    *,
    answered: bool,
) -> None:
    clock = LoopClock()
    async with inline(path, clock=clock) as runtime:
        later = await runtime.submit(KEY, "later", at=in_s(clock, 60))
    clock.ahead_s += 60 + late_s
    sources = {"test": SourcePolicy(**policy)}
    async with inline(path, clock=clock, sources=sources) as runtime:
        assert later.timer_id is not None
        await trio.sleep(1)
        timer = await runtime.timers.get(later.timer_id)
        assert timer is not None
        assert timer.state == ("fired" if answered else "cancelled")
        assert bool(query(path, "SELECT 1 FROM inbox")) == answered
    sound(path)


async def test_a_wall_clock_that_is_set_forward_is_noticed(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The timetable looks at it again at the latest after a while."""
    clock = LoopClock()
    async with inline(path, clock=clock) as runtime:
        later = await runtime.submit(KEY, "later", at=in_s(clock, 10 * 3600))
        clock.ahead_s += 10 * 3600
        with trio.fail_after(31):
            await later.reply()


@pytest.mark.parametrize("busy", [None, "steer", "interrupt", "collect", "latest"])
async def test_a_timer_meets_a_session_at_work_like_any_message(path: Path, busy: Any) -> None:
    """By the policy that it was set with, or its source's; it never is rejected."""
    held = Held("next", "tick")
    sources = {"test": SourcePolicy(busy="reject")}
    async with serving(path, held, sources=sources) as runtime:
        first = await runtime.submit(KEY, "busy")
        await held.begun["busy"].wait()
        tick = await runtime.submit(KEY, "tick", at=1.0, busy=busy)
        await until(lambda: query(path, "SELECT state FROM timers") == [("fired",)])
        disposition = query(path, "SELECT disposition FROM inbox WHERE inbound_id LIKE 'timer%'")
        assert disposition == [("steered" if busy == "steer" else "queued",)]
        held.go_on["busy"].set()
        await first.reply()
        assert (await tick.reply()).outcome.kind == "answered"
    sound(path)


async def test_a_full_line_holds_a_timer_up_and_loses_nothing(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """And no other key."""
    held, clock = Held("other"), LoopClock()
    settings = Settings(sessions=SessionSettings(waiting_per_key_max=1))
    async with inline(path, held, settings=settings, clock=clock) as runtime:
        first = await runtime.submit(KEY, "busy")
        await held.begun["busy"].wait()
        await runtime.submit(KEY, "waits")
        with pytest.raises(SessionBusyError):
            await runtime.submit(KEY, "too many")
        tick = await runtime.submit(KEY, "tick", at=in_s(clock, 1))
        other = await runtime.submit("test:dm:2", "other", at=in_s(clock, 1))
        assert (await other.reply()).text == "re other"
        for text in ("busy", "waits", "tick"):
            held.go_on[text].set()
        await first.reply()
        assert (await tick.reply()).text == "re tick"
    sound(path)


async def test_killed_around_its_firing_a_timer_fires_once(path: Path) -> None:
    """A7: at every state that the file goes through, the next start brings it to one turn."""
    left: list[Path] = []

    async def agent(turn: Any) -> str:
        left.append(snapshot(path, path.with_name("running.db")))
        return f"re {turn.text}"

    async with open_runtime(path, agent=agent) as runtime:
        later = await runtime.submit(
            KEY, Inbound("tick", id="t"), at=datetime.now(UTC) + timedelta(seconds=0.3)
        )
        left.append(snapshot(path, path.with_name("set.db")))
        await later.reply()
    for copy in (*left, path):
        async with serving(copy) as runtime:
            again = await runtime.submit(KEY, Inbound("tick", id="t"), at=_due_of(copy))
            assert (await again.reply()).text == "re tick"
            assert (await texts(runtime, KEY)).count("tick") == 1
        sound(copy)


def _due_of(path: Path) -> int:
    ((due_ms,),) = query(path, "SELECT due_ms FROM timers")
    return int(due_ms)


async def test_many_timers_that_are_due_at_once_all_fire(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """More than one round of the timetable takes."""
    clock = LoopClock()

    async def follow(runtime: Runtime, number: int) -> None:
        key = f"test:dm:{number % 20}"
        submission = await runtime.submit(key, f"{number}", at=in_s(clock, 5))
        assert (await submission.reply()).text == f"re {number}"

    async with inline(path, clock=clock) as runtime, trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(follow, runtime, number)
    assert query(path, "SELECT count(*) FROM turns WHERE state = 'ended'") == [(200,)]
    sound(path)


# What a review found -----------------------------------------------------------------------------


async def test_a_full_key_with_many_timers_holds_up_nobody_else(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """INV-13: more of them than anybody looks at in one round."""
    held, clock = Held("other"), LoopClock()
    settings = Settings(sessions=SessionSettings(waiting_per_key_max=1))
    async with inline(path, held, settings=settings, clock=clock) as runtime:
        await runtime.submit(KEY, "busy")
        await held.begun["busy"].wait()
        await runtime.submit(KEY, "waits")
        for number in range(100):
            await runtime.submit(KEY, f"tick {number}", at=in_s(clock, 1))
        other = await runtime.submit("test:dm:2", "other", at=in_s(clock, 2))
        start = trio.current_time()
        assert (await other.reply()).text == "re other"
        assert trio.current_time() - start < 3
        for event in ("busy", "waits", *(f"tick {number}" for number in range(100))):
            held.go_on[event].set()
        await until(
            lambda: query(path, "SELECT count(*) FROM timers WHERE state = 'set'") == [(0,)]
        )
    sound(path)


async def test_a_key_that_is_held_up_makes_no_other_timer_late(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """INV-13: the next one is looked for, whatever is due already."""
    held, clock = Held("other"), LoopClock()
    settings = Settings(sessions=SessionSettings(waiting_per_key_max=1))
    async with inline(path, held, settings=settings, clock=clock) as runtime:
        await runtime.submit(KEY, "busy")
        await held.begun["busy"].wait()
        await runtime.submit(KEY, "waits")
        await runtime.submit(KEY, "tick", at=in_s(clock, 1))
        await trio.sleep(2)
        start = trio.current_time()
        other = await runtime.submit("test:dm:2", "other", at=in_s(clock, 0.4))
        assert (await other.reply()).text == "re other"
        assert trio.current_time() - start < 0.45
        for text in ("busy", "waits", "tick"):
            held.go_on[text].set()


async def test_what_a_timer_says_may_come_in_any_order_of_members(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A7: it is stored in one, and asked for again in another, before and after it fired."""
    clock = LoopClock()
    async with inline(path, clock=clock) as runtime:
        due = in_s(clock, 5)
        one = Inbound("x", id="a", reply_to={"b": 1, "a": 2}, meta={"z": 1, "y": {"d": 1, "c": 2}})
        two = Inbound("x", id="a", reply_to={"a": 2, "b": 1}, meta={"y": {"c": 2, "d": 1}, "z": 1})
        first = await runtime.submit(KEY, one, at=due)
        for _ in range(2):
            again = await runtime.submit(KEY, two, at=due)
            assert again.turn_id == first.turn_id
            await first.reply()
    sound(path)


async def test_a_timer_that_is_set_by_several_at_once_is_one(path: Path) -> None:
    at = datetime.now(UTC) + timedelta(seconds=0.2)
    turns: list[str] = []

    async with serving(path) as runtime:

        async def submit() -> None:
            submission = await runtime.submit(KEY, Inbound("tick", id="t"), at=at)
            turns.append((await submission.reply()).turn_id)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(submit)
        assert len(turns) == 5
        assert len(set(turns)) == 1
        assert await texts(runtime, KEY) == ["tick", "re tick"]
    sound(path)


async def test_a_timer_that_is_set_again_follows_though_its_message_is_forgotten(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """INV-1: the inbound id is kept for a while, the timer for good; its turn has the answer."""
    clock = LoopClock()
    settings = Settings(sessions=SessionSettings(dedupe_kept_s=60.0))
    async with inline(path, settings=settings, clock=clock) as runtime:
        due, tick = in_s(clock, 1), Inbound("tick", id="t")
        first = await (await runtime.submit(KEY, tick, at=due)).reply()
        await until(lambda: query(path, "SELECT count(*) FROM inbox") == [(0,)])
    async with inline(path, settings=settings, clock=clock) as runtime:
        again = await runtime.submit(KEY, tick, at=due)
        assert (again.repeated, again.turn_id) == (True, first.turn_id)
        assert (await again.reply()).text == "re tick"
        assert await texts(runtime, KEY) == ["tick", "re tick"]
    sound(path)


async def test_a_timer_that_became_part_of_another_turn_is_not_fired_again_when_forgotten(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """INV-1: what it was answered is not known any more, and whoever waits for that is told."""
    held, clock = Held("waits\ntick"), LoopClock()
    settings = Settings(sessions=SessionSettings(dedupe_kept_s=60.0))
    async with inline(path, held, settings=settings, clock=clock) as runtime:
        await runtime.submit(KEY, "busy")
        await held.begun["busy"].wait()
        await runtime.submit(KEY, "waits")
        due, tick = in_s(clock, 1), Inbound("tick", id="t")
        timer = await runtime.submit(KEY, tick, at=due, busy="collect")
        async with timer.events() as events:
            await until(lambda: query(path, "SELECT state FROM timers") == [("fired",)])
            held.go_on["busy"].set()
            assert (await timer.reply()).text == "re waits\ntick"
            assert [event.kind async for event in events][-1:] == ["gap"]
        await until(lambda: query(path, "SELECT count(*) FROM inbox") == [(0,)])
    async with inline(path, held, settings=settings, clock=clock) as runtime:
        again = await runtime.submit(KEY, tick, at=due, busy="collect")
        with pytest.raises(MissingError):
            await again.reply()
        assert len(await texts(runtime, KEY)) == 5
    sound(path)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_the_events_of_a_cancelled_timer_end(path: Path, when: str) -> None:
    """Whether one listened before it was cancelled, or comes later."""
    async with serving(path) as runtime:
        timer = await runtime.submit(KEY, "tick", at=datetime.now(UTC) + timedelta(hours=1))
        assert timer.timer_id is not None
        if when == "after":
            await runtime.timers.cancel(timer.timer_id)
        async with timer.events() as events:
            await runtime.timers.cancel(timer.timer_id)
            assert [event.kind async for event in events] == ["gap"]


@pytest.mark.parametrize("at", [None, 1.0], ids=["now", "later"])
async def test_an_inbound_id_may_not_look_like_a_timers(path: Path, at: Any) -> None:
    """INV-20: it would be taken for the message of that timer, which then could never fire."""
    async with serving(path) as runtime:
        with pytest.raises(InvalidContentError, match="timer:"):
            await runtime.submit(KEY, Inbound("x", id="timer:test:t"), at=at)
        assert (await runtime.ask(KEY, Inbound("x", id="my timer:t"))).text == "re x"


async def test_timers_of_two_sources_are_two_whatever_their_names_have_in_them(
    path: Path,
) -> None:
    at = datetime.now(UTC) + timedelta(hours=1)
    names = [("a:b", "c"), ("a", "b:c"), ("a%3Ab", "c")]
    async with inline(path) as runtime:
        for source, given_id in names:
            await runtime.submit(KEY, Inbound(source, source=source, id=given_id), at=at)
            await runtime.post(KEY, source, source=source, id=given_id)
        assert len(await runtime.timers.list()) == len(await runtime.deliveries.list()) == 3


async def test_a_timer_that_was_cancelled_is_not_set_again_under_its_id(path: Path) -> None:
    async with serving(path) as runtime:
        at = datetime.now(UTC) + timedelta(hours=1)
        timer = await runtime.submit(KEY, Inbound("tick", id="t"), at=at)
        assert timer.timer_id is not None
        await runtime.timers.cancel(timer.timer_id)
        with pytest.raises(ConflictError):
            await runtime.submit(KEY, Inbound("tick", id="t"), at=at)
