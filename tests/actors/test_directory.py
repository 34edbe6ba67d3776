"""The Directory, in a runtime on a real file: starting, evicting, crashing and taking over.

The Writer runs inline and the clock jumps, so that nothing here waits for real.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from onepen import (
    OnepenError,
    RuntimeClosedError,
    SessionBusyError,
    SessionCrashedError,
    SessionHeldError,
    SessionSettings,
    Settings,
    Turn,
    current_session,
)
from onepen.actors import turning
from onepen.actors.session import Session
from onepen.runtime.testing.invariants import inspecting

from ..runtime.scripted import Held, directory_of, echo, inline, transcript

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trio.testing import MockClock

    from onepen import Reply, Runtime
    from onepen.actors.running import RunningTurn

KEY, OTHER = "test:1", "test:2"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


def limits(**values: Any) -> Settings:
    return Settings(sessions=SessionSettings(**values))


def count(runtime: Runtime, name: str) -> int:
    return runtime.statistics().counters[name]


def live(runtime: Runtime) -> list[str]:
    return [session.key for session in directory_of(runtime).sessions()]


class CrashError(Exception):
    pass


class Crashing:
    """`run_turn` as it is, except that it raises for one key, so often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, key: str, times: int) -> None:
        self.left = times
        original = turning.run_turn

        async def run_turn(session: Session, running: RunningTurn) -> None:
            if session.key == key and self.left:
                assert await session.pass_first_gate(running)
                self.left -= 1
                raise CrashError("a bug of ours")
            await original(session, running)

        monkeypatch.setattr(turning, "run_turn", run_turn)


# Starting ------------------------------------------------------------------------------------


async def test_a_stampede_starts_one_actor_and_every_message_gets_its_turn(
    path: Path, autojump_clock: MockClock
) -> None:
    async with inline(path) as runtime:
        replies: list[Reply] = []

        async def ask(number: int) -> None:
            replies.append(await runtime.ask(KEY, str(number)))

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(ask, number)
        assert count(runtime, "activated") == 1
        assert runtime.statistics().sessions.live == 1
        assert len({reply.turn_id for reply in replies}) == 50
        asked = [text for role, text in await transcript(runtime, KEY) if role == "user"]
        assert sorted(asked, key=lambda text: int(text or "")) == [str(n) for n in range(50)]


async def test_more_messages_than_a_mailbox_holds_are_refused(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-14: what was taken is answered, the rest knows when to come again."""
    async with inline(path, settings=limits(mailbox_size_max=5)) as runtime:
        replies: list[Reply] = []
        refused: list[SessionBusyError] = []

        async def ask(number: int) -> None:
            try:
                replies.append(await runtime.ask(KEY, str(number)))
            except SessionBusyError as error:
                refused.append(error)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(ask, number)
        assert len(replies) == 5
        assert len(refused) == 15
        assert {error.key for error in refused} == {KEY}
        assert len(await transcript(runtime, KEY)) == 10


async def test_an_actor_starts_from_a_clean_context(path: Path, autojump_clock: MockClock) -> None:
    """C3: a turn that starts another key's actor hands nothing of itself on."""
    seen: dict[str, str | None] = {}

    async def agent(turn: Turn) -> str:
        here = current_session()
        seen[turn.key] = here.key if here is not None else None
        if turn.key == KEY:
            await runtime.ask(OTHER, "from within")
        return "ok"

    async with inline(path, agent) as runtime:
        await runtime.ask(KEY, "hello")
        assert seen == {KEY: KEY, OTHER: OTHER}


# Evicting ------------------------------------------------------------------------------------


async def test_an_idle_session_leaves_memory_and_comes_back_with_its_transcript(
    path: Path,
    autojump_clock: MockClock,
) -> None:
    """B13: eviction is no close: no end, and the agent is closed."""
    closed: list[str] = []

    class Agent:
        def __init__(self) -> None:
            self.seen: list[int] = []

        async def run(self, turn: Turn) -> str:
            return f"{len(turn.history)} before"

        def close(self) -> None:
            closed.append("agent")

    async with inline(path, factory=lambda _: Agent(), settings=limits(idle_evict_s=60)) as runtime:
        first = await runtime.ask(KEY, "one")
        assert live(runtime) == [KEY]
        await trio.sleep(59)
        assert live(runtime) == [KEY]
        await trio.sleep(5)
        assert live(runtime) == []
        assert runtime.statistics().sessions.live == 0
        assert (count(runtime, "evicted"), closed) == (1, ["agent"])
        session = await runtime.sessions.get(first.session_id)
        assert session is not None
        assert session.end_kind is None
        second = await runtime.ask(KEY, "two")
        assert (second.text, second.session_id) == ("2 before", first.session_id)


async def test_use_keeps_a_session_in_memory(path: Path, autojump_clock: MockClock) -> None:
    async with inline(path, settings=limits(idle_evict_s=60)) as runtime:
        for _ in range(5):
            await runtime.ask(KEY, "hello")
            await trio.sleep(40)
        assert count(runtime, "evicted") == 0


async def test_a_session_that_works_or_is_followed_is_not_evicted(
    path: Path, autojump_clock: MockClock
) -> None:
    held = Held()
    async with inline(path, held, limits(idle_evict_s=1)) as runtime:
        await runtime.submit(KEY, "one")
        async with runtime.events(OTHER):
            await held.begun["one"].wait()
            await trio.sleep(100)
            assert sorted(live(runtime)) == [KEY, OTHER]
        await trio.sleep(100)
        assert live(runtime) == [KEY]
        held.go_on["one"].set()
        await trio.sleep(100)
        assert live(runtime) == []


async def test_at_the_limit_the_session_that_was_idle_longest_makes_room(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-14."""
    settings = limits(live_actors_max=3, turns_running_max=3)
    async with inline(path, settings=settings) as runtime:
        for name in ("a", "b", "c"):
            await runtime.ask(f"test:{name}", "hello")
        await runtime.ask("test:a", "again")
        await runtime.ask("test:d", "hello")
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(live(runtime)) == ["test:a", "test:c", "test:d"]
        assert runtime.statistics().sessions.live <= 3


async def test_if_none_is_idle_at_the_limit_a_new_key_is_refused(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-14."""
    held = Held("c")
    settings = limits(live_actors_max=2, turns_running_max=2)
    async with inline(path, held, settings) as runtime:
        submissions = [await runtime.submit(f"test:{n}", n) for n in ("a", "b")]
        with pytest.raises(SessionBusyError) as caught:
            await runtime.ask("test:c", "c")
        assert caught.value.key == "test:c"
        held.go_on["a"].set()
        await submissions[0].reply()
        await trio.testing.wait_all_tasks_blocked()
        assert (await runtime.ask("test:c", "c")).text == "re c"


async def test_too_many_bytes_in_memory_evict_what_was_used_longest_ago(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-14."""
    large = "x" * 100_000
    settings = limits(live_bytes_max=800_000, hold_bytes_max=100_000)
    async with inline(path, settings=settings) as runtime:
        for name in ("a", "b", "c"):
            await runtime.ask(f"test:{name}", large)
        assert runtime.statistics().sessions.bytes_live > 900_000
        await trio.sleep(2)
        assert live(runtime) == ["test:b", "test:c"]
        assert runtime.statistics().sessions.bytes_live <= 800_000


async def test_a_message_that_meets_a_leaving_actor_reaches_its_successor(
    path: Path, autojump_clock: MockClock
) -> None:
    """It is sent again, not refused: with the actor's agent slow to close, it leaves slowly."""
    closing, let_go = trio.Event(), trio.Event()

    class Agent:
        async def run(self, turn: Turn) -> str:
            return "ok"

        async def close(self) -> None:
            closing.set()
            await let_go.wait()

    settings = limits(idle_evict_s=10)
    async with inline(path, factory=lambda _: Agent(), settings=settings) as runtime:
        await runtime.ask(KEY, "one")
        await closing.wait()
        replies: list[Reply] = []

        async def ask() -> None:
            replies.append(await runtime.ask(KEY, "two"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.lowlevel.checkpoint()
            assert replies == []
            let_go.set()
        assert replies[0].text == "ok"
        assert count(runtime, "activated") == 2
        assert len(await transcript(runtime, KEY)) == 4


# Agents that do not stop ---------------------------------------------------------------------


async def test_an_agent_has_its_grace_before_it_is_reported_as_stuck(
    path: Path, autojump_clock: MockClock
) -> None:
    """`interrupt_grace_s`: how long it may take to end after an interrupt."""
    begun, let_go = trio.Event(), trio.Event()

    async def tidy(turn: Turn) -> None:
        begun.set()
        with trio.CancelScope(shield=True):
            await let_go.wait()

    async with inline(path, tidy, limits(interrupt_grace_s=20)) as runtime:
        submission = await runtime.submit(KEY, "hello")
        await begun.wait()
        assert await submission.interrupt()
        await trio.sleep(15)
        early = count(runtime, "agents_stuck")
        await trio.sleep(10)
        late = count(runtime, "agents_stuck")
        let_go.set()
        await submission.reply()
        assert (early, late) == (0, 1)


# Crashes -------------------------------------------------------------------------------------


async def test_a_crash_fails_its_turn_with_a_reason_and_nobody_else_notices(
    path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-13: the session is rebuilt from storage, and what waited goes on."""
    Crashing(monkeypatch, KEY, 1)
    held = Held("two", "three")
    async with inline(path, held) as runtime:
        other = await runtime.submit(OTHER, "other")
        await held.begun["other"].wait()
        bad = await runtime.submit(KEY, "bad")
        waiting = await runtime.submit(KEY, "two")
        reply = await bad.reply()
        assert (reply.outcome.kind, reply.outcome.cause) == ("failed", "crash")
        assert "a bug of ours" in (reply.outcome.error or "")
        assert (await runtime.sessions.turn(bad.turn_id)).outcome == reply.outcome
        assert (await waiting.reply()).text == "re two"
        assert (await runtime.ask(KEY, "three")).text == "re three"
        held.go_on["other"].set()
        assert (await other.reply()).text == "re other"
        assert count(runtime, "crashes") == 1
        assert runtime.statistics().slots.running == 0
        assert [text for _, text in await transcript(runtime, KEY)] == [
            "bad",
            "two",
            "re two",
            "three",
            "re three",
        ]


async def test_a_subscriber_outlives_a_crash(
    path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    Crashing(monkeypatch, KEY, 1)
    async with inline(path) as runtime, runtime.events(KEY) as events:
        bad = await runtime.submit(KEY, "bad")
        await bad.reply()
        await runtime.ask(KEY, "good")
        ended: list[str | None] = []
        while len(ended) < 2:
            event = await events.receive()
            if event.kind == "turn.ended" and event.outcome is not None:
                ended.append(event.outcome.kind)
        assert ended == ["failed", "answered"]


async def test_a_crash_before_the_turn_begins_gives_its_slot_back(
    path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-14: a slot that is lost is lost for everybody, for ever."""
    held = Held("two", "three")
    original: Callable[[Session], Any] = Session._start_next  # pyright: ignore[reportPrivateUsage]
    left = 1

    async def start_next(session: Session) -> bool:
        nonlocal left
        if left:
            left -= 1
            raise CrashError("between the slot and the turn")
        started: bool = await original(session)
        return started

    monkeypatch.setattr(Session, "_start_next", start_next)
    async with inline(path, held, limits(turns_running_max=1)) as runtime:
        first = await runtime.submit(KEY, "one")
        second = await runtime.submit(KEY, "two")
        held.go_on["one"].set()
        await first.reply()
        with trio.move_on_after(100):
            assert (await second.reply()).text == "re two"
            assert (await runtime.ask(OTHER, "three")).text == "re three"
        assert runtime.statistics().slots.running == 0
        assert held.order == ["one", "two", "three"]


async def test_a_key_that_keeps_crashing_is_left_alone_for_a_while_and_takes_nobody_along(
    path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-13."""
    crashing = Crashing(monkeypatch, KEY, 1000)
    settings = limits(crashes_max=3, crash_period_s=60)
    async with inline(path, settings=settings) as runtime:
        for number in range(4):
            try:
                await runtime.ask(KEY, str(number))
            except SessionCrashedError:
                pass  # the last one: nobody is left to say how its turn ended
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(SessionBusyError) as caught:
            await runtime.ask(KEY, "now")
        assert caught.value.key == KEY
        assert 0 < caught.value.retry_after_s <= 60
        assert (await runtime.ask(OTHER, "hello")).text == "re hello"
        crashing.left = 0
        await trio.sleep(caught.value.retry_after_s + 0.1)
        assert (await runtime.ask(KEY, "later")).text == "re later"
        assert count(runtime, "crashes") == 4
        # Nothing of what was acknowledged is lost, and each turn has an end.
        asked = [text for role, text in await transcript(runtime, KEY) if role == "user"]
        assert asked == ["0", "1", "2", "3", "later"]


# Taking over ---------------------------------------------------------------------------------


async def _session_of(runtime: Runtime, key: str) -> str:
    session_id = await runtime.sessions.current(key)
    assert session_id is not None
    return session_id


async def test_a_session_of_another_key_is_not_given_away_unasked(
    path: Path, autojump_clock: MockClock
) -> None:
    """B5: the error names the holder, and nothing changes."""
    async with inline(path) as runtime:
        await runtime.ask(KEY, "mine")
        await runtime.ask(OTHER, "theirs")
        theirs, mine = await _session_of(runtime, OTHER), await _session_of(runtime, KEY)
        with pytest.raises(SessionHeldError) as caught:
            await runtime.switch(KEY, theirs)
        assert caught.value.holder_key == OTHER
        assert await _session_of(runtime, KEY) == mine
        assert await _session_of(runtime, OTHER) == theirs


async def test_taking_over_moves_both_keys_in_one_transaction(
    path: Path, autojump_clock: MockClock
) -> None:
    """B5, INV-5: the holder's turn is interrupted and stored first; it gets a fresh session."""
    held = Held("mine", "next", "new")
    states: list[dict[str, str | None]] = []

    def look(point: str) -> None:
        if point == "committed":
            with inspecting(path) as db:
                rows: list[Any] = db.execute("SELECT key, session_id FROM routes").fetchall()
            states.append(dict(rows))

    async with inline(path, held, at=look) as runtime:
        await runtime.ask(KEY, "mine")
        running = await runtime.submit(OTHER, "theirs")
        await held.begun["theirs"].wait()
        mine, theirs = await _session_of(runtime, KEY), await _session_of(runtime, OTHER)
        states.clear()
        assert await runtime.switch(KEY, theirs, take_over=True) == theirs
        fresh = await _session_of(runtime, OTHER)
        assert fresh != theirs
        assert [state for n, state in enumerate(states) if state not in states[:n]] == [
            {KEY: mine, OTHER: theirs},
            {KEY: theirs, OTHER: fresh},
        ]
        assert (await running.reply()).outcome.kind == "interrupted"
        assert await runtime.sessions.get(fresh) is None
        assert (await runtime.ask(KEY, "next")).session_id == theirs
        assert [text for _, text in await transcript(runtime, KEY)] == ["theirs", "next", "re next"]
        assert (await runtime.ask(OTHER, "new")).session_id == fresh


async def test_what_waits_at_the_holder_survives_and_runs_in_its_fresh_session(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-1, INV-15: and whoever waits for its reply gets it."""
    held = Held("two")
    async with inline(path, held) as runtime:
        await runtime.submit(OTHER, "one")
        waiting = await runtime.submit(OTHER, "two")
        await held.begun["one"].wait()
        theirs = await _session_of(runtime, OTHER)
        await runtime.switch(KEY, theirs, take_over=True)
        while (await runtime.sessions.turn(waiting.turn_id)).state != "ended":
            await trio.lowlevel.checkpoint()
        fresh = await _session_of(runtime, OTHER)
        assert fresh != theirs
        assert await transcript(runtime, OTHER) == [("user", "two"), ("assistant", "re two")]
        assert await transcript(runtime, KEY) == [("user", "one")]
        reply = await waiting.reply()
        assert (reply.text, reply.session_id) == ("re two", fresh)


async def test_whoever_follows_the_holder_goes_on_hearing_of_it(
    path: Path, autojump_clock: MockClock
) -> None:
    """A subscriber of a key is not cut off because another key took its session."""
    async with inline(path) as runtime, runtime.events(OTHER) as events:
        await runtime.ask(OTHER, "one")
        await runtime.switch(KEY, await _session_of(runtime, OTHER), take_over=True)
        await runtime.ask(OTHER, "two")
        heard: list[str] = []
        with trio.move_on_after(10):
            while len(heard) < 2:
                event = await events.receive()
                if event.kind == "turn.ended":
                    heard.append(event.text or "")
        assert heard == ["re one", "re two"]


async def test_a_message_sent_during_a_take_over_reaches_the_holders_fresh_session(
    path: Path,
    autojump_clock: MockClock,
) -> None:
    stopping, let_go = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> str:
        if turn.text == "slow":
            try:
                await trio.sleep_forever()
            finally:
                stopping.set()
                with trio.CancelScope(shield=True):
                    await let_go.wait()
        return await echo(turn)

    async with inline(path, agent) as runtime, trio.open_nursery() as nursery:
        await runtime.submit(OTHER, "slow")
        theirs = await _session_of(runtime, OTHER)

        async def take() -> None:
            await runtime.switch(KEY, theirs, take_over=True)

        replies: list[Reply] = []

        async def ask() -> None:
            replies.append(await runtime.ask(OTHER, "meanwhile"))

        nursery.start_soon(take)
        await stopping.wait()
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        let_go.set()
        await trio.sleep(1)
        assert [reply.text for reply in replies] == ["re meanwhile"]
        assert replies[0].session_id == await _session_of(runtime, OTHER) != theirs


async def test_a_take_over_that_is_cancelled_leaves_the_holder_usable(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-10, INV-13: cancelled while the holder's turn is being stopped."""
    stopping, let_go = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> str:
        if turn.text == "slow":
            try:
                await trio.sleep_forever()
            finally:
                stopping.set()
                with trio.CancelScope(shield=True):
                    await let_go.wait()
        return await echo(turn)

    async with inline(path, agent) as runtime:
        slow = await runtime.submit(OTHER, "slow")
        theirs = await _session_of(runtime, OTHER)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def take() -> None:
                    await runtime.switch(KEY, theirs, take_over=True)

                nursery.start_soon(take)
                await stopping.wait()
                scope.cancel()
        let_go.set()
        assert (await slow.reply()).outcome.kind == "interrupted"
        # A holder that is never idle again keeps the clock from jumping, hence a count of steps.
        with trio.CancelScope() as patience:
            async with trio.open_nursery() as nursery:

                async def ask() -> None:
                    assert (await runtime.ask(OTHER, "next")).text == "re next"
                    nursery.cancel_scope.cancel()

                nursery.start_soon(ask)
                for _ in range(5000):
                    await trio.lowlevel.checkpoint()
                patience.cancel()
        assert not patience.cancelled_caught, "the holder answers nobody any more"
        # Cancelling takes nothing back: it was begun, so it is done.
        assert await _session_of(runtime, KEY) == theirs
        assert await _session_of(runtime, OTHER) != theirs


async def test_two_keys_that_take_from_each_other_do_not_wait_for_each_other(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-15: and each session has at most one key in the end."""
    held = Held("one", "two")
    async with inline(path, held) as runtime:
        await runtime.submit(KEY, "hang a")
        await runtime.submit(OTHER, "hang b")
        a, b = await _session_of(runtime, KEY), await _session_of(runtime, OTHER)
        got: dict[str, str] = {}

        async def take(key: str, session_id: str) -> None:
            try:
                got[key] = await runtime.switch(key, session_id, take_over=True)
            except OnepenError as error:
                got[key] = type(error).__name__

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(take, KEY, b)
                nursery.start_soon(take, OTHER, a)
        assert got == {KEY: b, OTHER: a}
        assert await _session_of(runtime, KEY) == b
        assert await _session_of(runtime, OTHER) == a
        with trio.fail_after(60):
            assert (await runtime.ask(KEY, "one")).session_id == b
            assert (await runtime.ask(OTHER, "two")).session_id == a
        assert count(runtime, "crashes") == 0


async def test_many_keys_that_take_one_session_get_it_one_after_the_other(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-12: whoever was last has it, and everybody else works on."""
    async with inline(path) as runtime:
        await runtime.ask(KEY, "hello")
        wanted = await _session_of(runtime, KEY)
        keys = [f"test:taker{n}" for n in range(5)]
        failed: list[OnepenError] = []

        async def take(key: str) -> None:
            try:
                await runtime.switch(key, wanted, take_over=True)
            except SessionHeldError as error:
                failed.append(error)  # it went on to another key meanwhile

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for key in keys:
                    nursery.start_soon(take, key)
        holders = [key for key in (KEY, *keys) if await runtime.sessions.current(key) == wanted]
        assert len(holders) == 1
        for key in (KEY, *keys):
            with trio.fail_after(60):
                assert (await runtime.ask(key, "still there?")).text == "re still there?"
        assert count(runtime, "crashes") == 0


# The end -------------------------------------------------------------------------------------


async def test_a_message_sent_while_a_session_is_finalized_does_not_spin(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-15: it waits, or is refused; it is not sent to and fro until the end."""
    ending, let_go = trio.Event(), trio.Event()

    class Hooks:
        async def on_session_end(self, **_: object) -> None:
            ending.set()
            await let_go.wait()

    async with inline(path, hooks=Hooks()) as runtime, trio.open_nursery() as nursery:
        await runtime.ask(KEY, "hello")
        nursery.start_soon(runtime.shutdown)
        await ending.wait()
        refused: list[RuntimeClosedError] = []

        async def submit() -> None:
            try:
                await runtime.submit(KEY, "late")
            except RuntimeClosedError as error:
                refused.append(error)

        steps = Steps()
        trio.lowlevel.add_instrument(steps)
        nursery.start_soon(submit)
        for _ in range(300):
            await trio.lowlevel.checkpoint()
        trio.lowlevel.remove_instrument(steps)
        let_go.set()
        assert steps.taken < 400, "somebody is busy for nothing"
    assert len(refused) == 1


class Steps(trio.abc.Instrument):
    """How many steps tasks have taken."""

    def __init__(self) -> None:
        self.taken = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.taken += 1


# Limits --------------------------------------------------------------------------------------


async def test_more_operations_than_may_wait_behind_a_turn_are_refused(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-14: and those whose callers have left make room, undone."""
    held = Held()
    async with inline(path, held, limits(mailbox_size_max=3)) as runtime:
        await runtime.submit(KEY, "slow")
        await held.begun["slow"].wait()
        posted: list[str] = []

        async def post(text: str) -> None:
            posted.append((await runtime.post(KEY, text)).text)

        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as leaving:
                leaving.start_soon(post, "one")
                await trio.testing.wait_all_tasks_blocked()
                leaving.cancel_scope.cancel()
            for text in ("two", "three", "four"):
                nursery.start_soon(post, text)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(SessionBusyError):
                await runtime.post(KEY, "five")
            held.go_on["slow"].set()
        said = [text for role, text in await transcript(runtime, KEY) if role == "assistant"]
        assert said == ["re slow", *posted]
        assert sorted(posted) == ["four", "three", "two"]


async def test_keys_that_find_no_room_at_the_start_are_served_when_there_is_some(
    path: Path, autojump_clock: MockClock
) -> None:
    """I7: nobody has to write to them first."""
    keys = [f"test:{number}" for number in range(5)]
    async with inline(path) as runtime:
        for key in keys:
            waits = await runtime.submit(key, "waits", busy="collect", debounce_s=3600)
            assert waits.disposition == "queued"
    held = Held()
    async with inline(path, held, limits(live_actors_max=1)) as runtime:
        await held.begun["waits"].wait()
        await trio.sleep(60)
        assert len(held.order) == 1
        held.go_on["waits"].set()
        await trio.sleep(60)
        assert sorted(turn.key for turn in held.turns) == keys
        assert await runtime.turns.list() == ()
