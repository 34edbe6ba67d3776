"""Busy policies: what becomes of a message that meets a session at work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import apsw
import pytest
import trio
import trio.testing

from onepen import (
    ConflictError,
    Inbound,
    InvalidContentError,
    SessionBusyError,
    SessionSettings,
    Settings,
    SourcePolicy,
    open_runtime,
)

from ..contract.agents import Commits, call, query, result, snapshot, sound, texts
from .scripted import LIMIT_S, Disk, Held, directory_of, inline, serving, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from onepen import Runtime, Turn

KEY, OTHER = "test:dm:1", "test:dm:2"


class Desk:
    """An agent whose turns go on when they are told to."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.steered: list[str] = []
        self.began = trio.Event()
        self.let_go = trio.Event()

    async def run(self, turn: Turn) -> str:
        self.order.append(turn.text)
        self.began.set()
        if turn.text.startswith("slow"):
            await self.let_go.wait()
        self.steered += await turn.steering()
        return f"re: {turn.text}"


@pytest.fixture
async def desk() -> Desk:
    return Desk()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


@pytest.fixture
async def runtime(path: Path, desk: Desk) -> AsyncGenerator[Runtime]:
    async with open_runtime(path, agent=desk) as runtime:
        yield runtime
    sound(path)


async def _begin(runtime: Runtime, desk: Desk) -> Any:
    first = await runtime.submit(KEY, "slow")
    await desk.began.wait()
    return first


@pytest.mark.parametrize("busy", ["queue", "collect", "steer", "interrupt", "latest", "reject"])
async def test_an_idle_session_starts_whatever_the_policy(runtime: Runtime, busy: Any) -> None:
    submission = await runtime.submit(KEY, "hello", busy=busy)
    assert submission.disposition == "started"
    assert (await submission.reply()).text == "re: hello"


async def test_collected_messages_are_one_turn_with_a_row_each(
    runtime: Runtime, desk: Desk
) -> None:
    """The first that waits opens the turn, the others are merged into it; one reply for all."""
    await _begin(runtime, desk)
    said = [await runtime.submit(KEY, text, busy="collect") for text in ("one", "two", "three")]
    assert [one.disposition for one in said] == ["queued", "merged", "merged"]
    assert len({one.turn_id for one in said}) == 1
    desk.let_go.set()
    assert {(await one.reply()).text for one in said} == {"re: one\ntwo\nthree"}
    assert desk.order == ["slow", "one\ntwo\nthree"]
    assert await texts(runtime) == ["slow", "re: slow", "one", "two", "three", said_text(desk)]


def said_text(desk: Desk) -> str:
    return f"re: {desk.order[-1]}"


async def test_collected_messages_survive_a_restart_as_one_turn(path: Path, desk: Desk) -> None:
    """A7, B12: in order; a repeat of a merged one follows that turn."""
    async with open_runtime(path, agent=desk) as runtime:
        await _begin(runtime, desk)
        for number in range(3):
            inbound = Inbound(f"part {number}", id=f"u{number}")
            await runtime.submit(KEY, inbound, busy="collect")
    after = Desk()
    async with open_runtime(path, agent=after) as runtime:
        repeat = await runtime.submit(KEY, Inbound("part 1", id="u1"))
        assert (await repeat.reply()).text == "re: part 0\npart 1\npart 2"
        assert repeat.repeated
        assert after.order == ["part 0\npart 1\npart 2"]
    sound(path)


async def test_a_debounced_turn_waits_until_nothing_more_comes(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Also on an idle session; each message begins the wait anew."""
    desk = Desk()
    async with inline(path, desk) as runtime:
        start = trio.current_time()
        first = await runtime.submit(KEY, "one", busy="collect", debounce_s=5)
        assert first.disposition == "queued"
        await trio.sleep(4)
        second = await runtime.submit(KEY, "two", busy="collect", debounce_s=5)
        assert second.disposition == "merged"
        await trio.sleep(4)
        assert desk.order == []
        assert (await second.reply()).text == "re: one\ntwo"
        assert 9 <= trio.current_time() - start < 10
    sound(path)


async def test_whoever_is_next_waits_for_no_more_than_it_must(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A debounced turn that is taken back, or joined by somebody in a hurry, ends its wait."""
    desk = Desk()
    async with inline(path, desk) as runtime:
        start = trio.current_time()
        first = await runtime.submit(KEY, "one", busy="collect", debounce_s=3600)
        second = await runtime.submit(KEY, "two")
        assert first.interrupt()
        assert (await second.reply()).text == "re: two"
        await runtime.submit(KEY, "three", busy="collect", debounce_s=3600)
        fourth = await runtime.submit(KEY, "four", busy="collect")
        assert (await fourth.reply()).text == "re: three\nfour"
        assert trio.current_time() - start < 10
    sound(path)


async def test_an_interrupting_message_is_next(runtime: Runtime, desk: Desk) -> None:
    """The running turn ends as superseded, with an empty text; what waited stays behind it."""
    first = await _begin(runtime, desk)
    waiting = await runtime.submit(KEY, "waits")
    urgent = await runtime.submit(KEY, "stop that", busy="interrupt")
    reply = await first.reply()
    assert (reply.text, reply.outcome.kind, reply.outcome.cause) == (
        "",
        "interrupted",
        "superseded",
    )
    assert (await urgent.reply()).text == "re: stop that"
    assert (await waiting.reply()).text == "re: waits"
    assert desk.order == ["slow", "stop that", "waits"]


async def test_interrupting_messages_keep_their_order(path: Path) -> None:
    """However many come while the first is still stopping what runs."""
    held = Held("one", "two", "three", "waits")

    async def agent(turn: Turn) -> str | None:
        with trio.CancelScope(shield=turn.text == "slow"):  # it takes its time to stop
            return await held.run(turn)
        return None

    async with serving(path, agent) as runtime:
        first = await runtime.submit(KEY, "slow")
        await held.begun["slow"].wait()
        waiting = await runtime.submit(KEY, "waits")
        urgent = [
            await runtime.submit(KEY, text, busy="interrupt") for text in ("one", "two", "three")
        ]
        held.go_on["slow"].set()
        for submission in (first, waiting, *urgent):
            await submission.reply()
    assert held.order == ["slow", "one", "two", "three", "waits"]
    sound(path)


async def test_the_latest_takes_the_place_of_what_waits(
    runtime: Runtime, desk: Desk, path: Path
) -> None:
    """Those end as superseded, durably; the running turn goes on."""
    first = await _begin(runtime, desk)
    old = [await runtime.submit(KEY, text) for text in ("one", "two")]
    latest = await runtime.submit(KEY, "three", busy="latest")
    assert latest.disposition == "superseded"
    for one in old:
        outcome = (await one.reply()).outcome
        assert (outcome.kind, outcome.cause) == ("interrupted", "superseded")
        assert (await runtime.sessions.turn(one.turn_id)).outcome == outcome
    desk.let_go.set()
    assert (await first.reply()).text == "re: slow"
    assert (await latest.reply()).text == "re: three"
    assert desk.order == ["slow", "three"]
    assert query(path, "SELECT count(*) FROM inbox WHERE body IS NOT NULL") == [(0,)]


async def test_what_was_superseded_ends_in_the_transaction_that_accepts_the_latest(
    path: Path, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A7: no crash can find them side by side, and run what was taken back."""
    queued = "SELECT i.inbound_id FROM inbox i JOIN turns t ON t.n = i.turn WHERE state = 'queued'"
    seen: list[set[str]] = []
    commits = Commits(monkeypatch)
    async with open_runtime(path, agent=desk) as runtime:
        await _begin(runtime, desk)
        for name in ("one", "two"):
            await runtime.submit(KEY, Inbound(name, id=name))
        commits.after = lambda: seen.append({name for (name,) in query(path, queued)})
        latest = await runtime.submit(KEY, Inbound("three", id="three"), busy="latest")
        assert seen == [{"three"}]
        commits.after = None
        desk.let_go.set()
        await latest.reply()
    sound(path)


async def test_a_latest_message_that_is_refused_takes_nobodys_place(path: Path) -> None:
    """What waited goes on waiting, in its order."""
    disk, held = Disk(), Held("one", "two", OTHER)
    async with inline(path, held, at=disk.at) as runtime:
        await runtime.submit(KEY, "slow")
        await held.begun["slow"].wait()
        await runtime.ask(OTHER, OTHER)
        old = [await runtime.submit(KEY, text) for text in ("one", "two")]
        inbound = Inbound(OTHER, id="u1")

        async def submit_here() -> None:
            with pytest.raises(ConflictError):
                await runtime.submit(KEY, inbound, busy="latest")

        with trio.fail_after(LIMIT_S):
            disk.hold()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runtime.submit, OTHER, inbound)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(submit_here)
                await trio.testing.wait_all_tasks_blocked()
                disk.let_go()
            held.go_on["slow"].set()
            assert [(await one.reply()).text for one in old] == ["re one", "re two"]
    sound(path)


async def test_a_rejected_message_leaves_nothing_behind(
    runtime: Runtime, desk: Desk, path: Path
) -> None:
    """Not even its id: sent again later, it starts."""
    await _begin(runtime, desk)
    inbound = Inbound("not now", id="u1")
    submission = await runtime.submit(KEY, inbound, busy="reject")
    assert submission.disposition == "rejected"
    with pytest.raises(SessionBusyError):
        await submission.reply()
    with pytest.raises(SessionBusyError):
        await runtime.ask(KEY, inbound, busy="reject")
    assert query(path, "SELECT count(*) FROM inbox") == [(1,)]
    desk.let_go.set()
    assert (await runtime.ask(KEY, inbound)).text == "re: not now"


async def test_a_steered_message_comes_into_the_running_turn(
    runtime: Runtime, desk: Desk, path: Path
) -> None:
    """As a row of that turn, behind what it has said; both submissions get its reply."""
    first = await _begin(runtime, desk)
    steered = await runtime.submit(KEY, "shorter, please", busy="steer")
    assert steered.disposition == "steered"
    desk.let_go.set()
    replies = [await one.reply() for one in (first, steered)]
    assert [reply.turn_id for reply in replies] == [first.turn_id] * 2
    assert desk.steered == ["shorter, please"]
    assert await texts(runtime) == ["slow", "shorter, please", "re: slow"]
    rows = query(path, "SELECT count(DISTINCT turn) FROM messages")
    assert rows == [(1,)]


async def test_a_message_that_finds_no_gate_is_a_turn_of_its_own(path: Path) -> None:
    """Nothing is lost if the running turn ends first."""
    began, let_go = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> str:
        if turn.text == "slow":
            began.set()
            await let_go.wait()
        return f"re: {turn.text}"

    async with open_runtime(path, agent=agent) as runtime:
        await runtime.submit(KEY, "slow")
        await began.wait()
        steered = await runtime.submit(KEY, "too late", busy="steer")
        let_go.set()
        assert (await steered.reply()).text == "re: too late"
        assert await texts(runtime) == ["slow", "re: slow", "too late", "re: too late"]
    sound(path)


async def test_steering_never_stands_between_a_call_and_its_result(path: Path) -> None:
    """A10: it waits behind the results."""
    began, let_go = trio.Event(), trio.Event()
    heard: list[tuple[str, ...]] = []

    async def agent(turn: Turn) -> str:
        await turn.append(call("c1"))
        began.set()
        await let_go.wait()
        heard.append(await turn.steering())
        await turn.append(result("c1"))
        heard.append(await turn.steering())
        return "done"

    async with open_runtime(path, agent=agent) as runtime:
        first = await runtime.submit(KEY, "go")
        await began.wait()
        await runtime.submit(KEY, "and hurry", busy="steer")
        let_go.set()
        await first.reply()
        assert await texts(runtime) == ["go", None, "found", "and hurry", "done"]
    assert heard == [(), ("and hurry",)]
    sound(path)


async def test_a_repeat_of_a_steered_message_gets_the_reply_of_its_turn(path: Path) -> None:
    """A7: while it runs, when it has ended, and after a restart."""
    desk, inbound = Desk(), Inbound("shorter", id="u1")
    async with open_runtime(path, agent=desk) as runtime:
        first = await _begin(runtime, desk)
        steered = await runtime.submit(KEY, inbound, busy="steer")
        repeat = await runtime.submit(KEY, inbound)
        assert (repeat.turn_id, repeat.disposition) == (steered.turn_id, "steered")
        desk.let_go.set()
        assert (await repeat.reply()).text == "re: slow"
        assert (await runtime.ask(KEY, inbound)).turn_id == first.turn_id
    async with open_runtime(path, agent=desk) as runtime:
        assert (await runtime.ask(KEY, inbound)).text == "re: slow"
        assert desk.order == ["slow"]
    sound(path)


async def test_a_source_has_its_own_policy_and_a_call_beats_it(path: Path) -> None:
    desk = Desk()
    sources = {"test": SourcePolicy(busy="reject")}
    async with open_runtime(path, agent=desk, sources=sources) as runtime:
        await _begin(runtime, desk)
        assert (await runtime.submit(KEY, "one")).disposition == "rejected"
        other = Inbound("two", source="other")
        assert (await runtime.submit(KEY, other)).disposition == "queued"
        assert (await runtime.submit(KEY, "three", busy="queue")).disposition == "queued"
        desk.let_go.set()
    with pytest.raises(InvalidContentError):
        wrong = SourcePolicy(busy="whenever")  # type: ignore[arg-type]
        async with open_runtime(path, agent=desk, sources={"test": wrong}):
            pytest.fail("opened")


async def test_a_policy_that_nobody_knows_is_refused(runtime: Runtime) -> None:
    wrong: list[Any] = ["sometimes", None.__class__, 5]
    for busy in wrong:
        with pytest.raises(InvalidContentError):
            await runtime.submit(KEY, "hello", busy=busy)
    for debounce in (-1, float("inf"), "soon"):
        with pytest.raises(InvalidContentError):
            await runtime.submit(KEY, "hello", busy="collect", debounce_s=debounce)  # type: ignore[arg-type]


@pytest.mark.parametrize("busy", ["queue", "collect", "steer"])
async def test_a_full_line_pushes_back(path: Path, busy: Any) -> None:
    """INV-14: by messages, also where they are collected into one turn."""
    desk = Desk()
    settings = Settings(sessions=SessionSettings(waiting_per_key_max=3))
    async with open_runtime(path, agent=desk, settings=settings) as runtime:
        await _begin(runtime, desk)
        for number in range(3):
            await runtime.submit(KEY, f"{number}", busy=busy)
        with pytest.raises(SessionBusyError):
            await runtime.submit(KEY, "one too many", busy=busy)
        if busy != "steer":  # whoever is steered in waits for nobody's place
            latest = await runtime.submit(KEY, "instead", busy="latest")
            desk.let_go.set()
            assert (await latest.reply()).text == "re: instead"
        desk.let_go.set()
    sound(path)


# The same id under two keys ------------------------------------------------------------------


@pytest.mark.parametrize("busy", ["queue", "collect", "steer"])
async def test_a_message_that_was_refused_and_cancelled_takes_nothing_from_another_key(
    path: Path, tmp_path: Path, busy: Any
) -> None:
    """A1: both were looked up before either was stored; the one that is stored is answered."""
    disk, held = Disk(), Held()
    refused: list[ConflictError] = []
    with trio.fail_after(LIMIT_S):
        async with inline(path, held, at=disk.at) as runtime:
            for key in (KEY, OTHER):
                await runtime.submit(key, key)
                await held.begun[key].wait()
            waits = await runtime.submit(OTHER, "waits", busy="collect")
            inbound = Inbound("once", id="u1")

            async def submit_elsewhere() -> None:
                try:
                    await runtime.submit(OTHER, inbound, busy=busy)
                except ConflictError as error:
                    refused.append(error)

            disk.hold()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runtime.submit, KEY, inbound)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(submit_elsewhere)
                await trio.testing.wait_all_tasks_blocked()
                for session in directory_of(runtime).sessions():
                    if session.key == OTHER:
                        assert session.turn is not None
                        for one in (*session.waiting, *session.turn.steering):
                            assert session.take_back(one.turn_id, "person")
                disk.let_go()
            assert len(refused) == 1
            assert (await waits.reply()).outcome.cause == "person"
            await trio.testing.wait_all_tasks_blocked()
            assert runtime.statistics().counters["crashes"] == 0
            copy = snapshot(path, tmp_path / "crash.db")
    async with serving(copy) as runtime:
        assert (await runtime.ask(KEY, inbound)).text == "re once"
    sound(copy)


async def test_a_message_that_was_refused_costs_the_turn_it_was_to_join_nothing(
    path: Path,
) -> None:
    """Whoever follows that turn gets its reply, and not somebody else's refusal."""
    disk, held = Disk(), Held("waits", "once", KEY, OTHER)
    with trio.fail_after(LIMIT_S):
        async with inline(path, held, at=disk.at) as runtime:
            for key in (KEY, OTHER):
                await runtime.ask(key, key)
            (other,) = [one for one in directory_of(runtime).sessions() if one.key == OTHER]
            waits = await runtime.submit(OTHER, "waits", busy="collect", debounce_s=0.1)
            inbound = Inbound("once", id="u1")

            async def submit_elsewhere() -> None:
                with pytest.raises(ConflictError):
                    await runtime.submit(OTHER, inbound, busy="collect")

            disk.hold()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runtime.submit, KEY, inbound)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(submit_elsewhere)
                await until(lambda: not other.claim.idle)
                await trio.testing.wait_all_tasks_blocked()
                disk.let_go()
            assert (await waits.reply()).text == "re waits"
    sound(path)


async def test_a_queued_turn_without_its_message_is_ended_at_the_next_start(
    path: Path, tmp_path: Path
) -> None:
    """Its id does not wait for ever, and whoever sent it is told."""
    held = Held()
    async with serving(path, held) as runtime:
        await runtime.submit(KEY, "slow")
        await held.begun["slow"].wait()
        lost = await runtime.submit(KEY, Inbound("lost", id="u1", reply_to="chat"))
        copy = snapshot(path, tmp_path / "crash.db")
    db = apsw.Connection(str(copy))
    db.execute("UPDATE inbox SET body = NULL WHERE inbound_id = 'u1'")
    db.close()
    async with serving(copy) as runtime:
        reply = await runtime.ask(KEY, Inbound("lost", id="u1", reply_to="chat"))
        assert (reply.turn_id, reply.outcome.kind) == (lost.turn_id, "failed")
        assert await runtime.turns.list() == ()
        (told,) = await runtime.deliveries.list()
        assert told.text == reply.text
    sound(copy)
