"""A7: a message that comes again starts no second turn."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from onepen import ConflictError, Inbound, NoGainError, SessionSettings, Settings, open_runtime
from onepen.actors.retention import PRUNED_AT_ONCE, prune_inbox

from ..runtime.scripted import inline
from .agents import Switchboard, call, echo, query, snapshot, sound, texts

if TYPE_CHECKING:
    from pathlib import Path

    from onepen import Runtime, Turn

KEY = "test:dm:1"


def hook(text: str = "pay 5 EUR", inbound_id: str = "update-17") -> Inbound:
    """A webhook's message, as often as it likes."""
    return Inbound(text, id=inbound_id)


async def test_a_repeat_of_an_ended_turn_gets_its_outcome(tmp_path: Path) -> None:
    """A7: the same turn, the same text, and nothing more is stored; also after a restart."""
    path = tmp_path / "chat.db"
    async with open_runtime(path, agent=echo) as runtime:
        first = await runtime.submit(KEY, hook())
        reply = await first.reply()
        second = await runtime.submit(KEY, hook())
        assert (second.turn_id, second.repeated, first.repeated) == (first.turn_id, True, False)
        again = await second.reply()
        assert (again.text, again.outcome) == (reply.text, reply.outcome)
        assert [m.uid for m in again.messages] == [m.uid for m in reply.messages]
        assert (await runtime.ask(KEY, hook())).turn_id == first.turn_id
    async with open_runtime(path, agent=echo) as runtime:
        third = await runtime.submit(KEY, hook())
        assert (third.turn_id, (await third.reply()).text) == (first.turn_id, reply.text)
        assert await texts(runtime) == ["pay 5 EUR", "re: pay 5 EUR"]
        assert runtime.statistics().counters["turns_started"] == 0
        assert runtime.statistics().counters["repeats"] == 1
    sound(path)


async def test_a_repeat_of_a_running_turn_gets_that_turn(tmp_path: Path) -> None:
    """A7: as often as it comes, and also while it waits behind another one."""
    path = tmp_path / "chat.db"
    agent, let_go, began = Switchboard(), trio.Event(), trio.Event()

    async def slow(turn: Turn) -> str:
        began.set()
        await let_go.wait()
        return "done"

    async with open_runtime(path, agent=agent) as runtime:
        agent.next = slow
        first = await runtime.submit(KEY, hook())
        await began.wait()
        waits = await runtime.submit(KEY, hook("and 6 EUR", "update-18"))
        repeats = [await runtime.submit(KEY, hook()) for _ in range(3)]
        waiting = await runtime.submit(KEY, hook("and 6 EUR", "update-18"))
        assert {one.turn_id for one in repeats} == {first.turn_id}
        assert (waiting.turn_id, waiting.disposition) == (waits.turn_id, "queued")
        assert waiting.position == 1
        let_go.set()
        assert {(await one.reply()).text for one in (first, *repeats)} == {"done"}
        assert (await waiting.reply()).text == "re: and 6 EUR"
        assert len(await texts(runtime)) == 4
    sound(path)


async def test_a_stampede_of_one_message_is_one_turn(tmp_path: Path) -> None:
    """A7: before the first of them is durable."""
    path = tmp_path / "chat.db"
    turns: list[str] = []
    async with open_runtime(path, agent=echo) as runtime:

        async def retry() -> None:
            turns.append((await runtime.ask(KEY, hook())).turn_id)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(retry)
        assert len(set(turns)) == 1
        assert await texts(runtime) == ["pay 5 EUR", "re: pay 5 EUR"]
    sound(path)


@pytest.mark.parametrize("restart", [False, True])
async def test_other_content_or_another_key_under_the_same_id_is_a_conflict(
    tmp_path: Path, *, restart: bool
) -> None:
    """A7: and nothing of it is stored; another source may use the same id."""
    path = tmp_path / "chat.db"
    async with open_runtime(path, agent=echo) as runtime:
        await runtime.ask(KEY, hook())
        if not restart:
            await _conflicts(runtime)
    if restart:
        async with open_runtime(path, agent=echo) as runtime:
            await _conflicts(runtime)
    assert query(path, "SELECT count(*) FROM inbox") == [(2,)]
    sound(path)


async def _conflicts(runtime: Runtime) -> None:
    with pytest.raises(ConflictError):
        await runtime.submit(KEY, hook("pay 500 EUR"))
    with pytest.raises(ConflictError):
        await runtime.submit("test:dm:2", hook())
    assert await runtime.sessions.current("test:dm:2") is None
    other = Inbound("from elsewhere", id="update-17", source="other")
    assert (await runtime.ask(KEY, other)).text == "re: from elsewhere"
    assert await texts(runtime) == [
        "pay 5 EUR",
        "re: pay 5 EUR",
        "from elsewhere",
        "re: from elsewhere",
    ]


async def test_a_repeat_of_a_turn_whose_reply_has_left_is_answered_as_well(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A7, INV-15: its actor is not done with the turn yet, because a hook is slow."""
    let_go = trio.Event()

    class Slow:
        async def on_turn_end(self, **_: object) -> None:
            await let_go.wait()

    async with inline(tmp_path / "chat.db", echo, hooks=Slow()) as runtime:
        first = await runtime.ask(KEY, hook())
        with trio.fail_after(3):
            again = await runtime.ask(KEY, hook())
        assert (again.turn_id, again.text) == (first.turn_id, first.text)
        let_go.set()


async def test_messages_without_an_id_are_never_repeats(tmp_path: Path) -> None:
    """A7: equal text is no identity."""
    async with open_runtime(tmp_path / "chat.db", agent=echo) as runtime:
        turns = {(await runtime.ask(KEY, "hello")).turn_id for _ in range(3)}
        assert len(turns) == 3


async def test_a_repeat_of_a_message_that_was_taken_back_gets_that_outcome(
    tmp_path: Path,
) -> None:
    """A7: it does not start after all."""
    path = tmp_path / "chat.db"
    agent, let_go = Switchboard(), trio.Event()

    async def slow(turn: Turn) -> str:
        await let_go.wait()
        return "done"

    async with open_runtime(path, agent=agent) as runtime:
        agent.next = slow
        first = await runtime.submit(KEY, "slow")
        second = await runtime.submit(KEY, hook())
        assert second.interrupt()
        repeat = await runtime.submit(KEY, hook())
        assert (await repeat.reply()).outcome.kind == "interrupted"
        let_go.set()
        await first.reply()
        assert (await runtime.ask(KEY, hook())).outcome.kind == "interrupted"
        assert await texts(runtime) == ["slow", "done"]
    sound(path)


KILLED = """
import os, signal, sys
import trio
from onepen import Inbound, open_runtime

async def agent(turn):
    await turn.append({"role": "assistant", "tool_calls": [{"id": "c1", "name": "pay"}]})
    await turn.say("waiting for the bank")
    await turn._scribe.wait_settled()
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with open_runtime(sys.argv[1], agent=agent) as runtime:
        await runtime.ask("test:dm:1", Inbound("pay 5 EUR", id="update-17"))

trio.run(main)
"""


async def test_a_repeat_of_a_turn_that_a_crash_cut_resumes_it(tmp_path: Path) -> None:
    """A7, F7, A10: one attempt further, on the stored transcript; its user row is there once."""
    path = tmp_path / "chat.db"
    done = await trio.run_process(
        [sys.executable, "-c", KILLED, str(path)], check=False, stderr=subprocess.DEVNULL
    )
    assert done.returncode == -signal.SIGKILL
    seen: list[tuple[int, bool, str, list[str]]] = []

    async def agent(turn: Turn) -> str:
        roles = [str(message.role) for message in turn.messages]
        seen.append((turn.attempt, turn.resumed, turn.text, roles))
        return "paid"

    async with open_runtime(path, agent=agent) as runtime:
        submission = await runtime.submit(KEY, hook())
        reply = await submission.reply()
        assert (reply.text, reply.turn_id) == ("paid", submission.turn_id)
        assert seen == [(2, True, "pay 5 EUR", ["user", "assistant", "tool"])]
        assert query(path, "SELECT count(*) FROM messages WHERE role = 'user'") == [(1,)]
        assert (await runtime.ask(KEY, hook())).text == "paid"
        assert len(seen) == 1
    sound(path)


async def test_a_resumed_turn_is_given_its_messages_as_they_came_in(tmp_path: Path) -> None:
    """A7: those that joined it as well; what earlier attempts have used counts as its own."""
    path, began = tmp_path / "chat.db", trio.Event()
    first = Inbound("one", id="u1", user="ann", reply_to="chat-1", platform_id="p1")
    second = Inbound(
        id="u2", source="other", parts=[{"type": "text", "text": "two"}], meta={"n": 2}
    )

    async def cut(turn: Turn) -> str:
        if turn.text == "slow":
            await began.wait()
            return "done"
        turn.usage(model="m", input=10, output=1)
        turn.usage(model="m", input=5, auxiliary=True)
        await turn.append(call("c1"))
        await turn._scribe.wait_settled()  # pyright: ignore[reportPrivateUsage]
        came.extend(turn.inbound)
        lefts.append(snapshot(path, tmp_path / "left.db"))
        return "lost"

    came: list[Any] = []
    lefts: list[Path] = []
    async with open_runtime(path, agent=cut) as runtime:
        await runtime.submit(KEY, "slow")
        await runtime.submit(KEY, first, busy="collect")
        joined = await runtime.submit(KEY, second, busy="collect")
        began.set()
        await joined.reply()

    async def agent(turn: Turn) -> str:
        assert turn.inbound == tuple(came)
        turn.usage(model="m", input=100)
        return "paid"

    async with open_runtime(lefts[0], agent=agent) as runtime:
        reply = await runtime.ask(KEY, first)
        assert reply.text == "paid"
        assert (reply.usage.input, reply.usage.output) == (115, 1)
        assert (await runtime.ask(KEY, second)).usage == reply.usage
    async with open_runtime(lefts[0], agent=agent) as runtime:
        assert (await runtime.ask(KEY, first)).usage == reply.usage


@pytest.mark.parametrize("how", ["rotate", "compact"])
async def test_a_resumed_turn_may_compress_though_others_spoke_since(
    tmp_path: Path, how: str
) -> None:
    """A7, A10: its rows are apart in the transcript, and all of them are kept."""
    path = tmp_path / "chat.db"
    await trio.run_process(
        [sys.executable, "-c", KILLED, str(path)], check=False, stderr=subprocess.DEVNULL
    )
    agent = Switchboard()

    async def compressing(turn: Turn) -> str:
        assert [message.text for message in turn.messages][:1] == ["pay 5 EUR"]
        assert [message.text for message in turn.history] == ["meanwhile", "re: meanwhile"]
        with pytest.raises(NoGainError):  # what stands before its first row is nothing
            await getattr(turn, how)("summary", force=True)
        return "paid"

    async with open_runtime(path, agent=agent) as runtime:
        await runtime.ask(KEY, "meanwhile")
        agent.next = compressing
        reply = await runtime.ask(KEY, hook())
        assert (reply.text, reply.outcome.kind) == ("paid", "answered")
        assert (await texts(runtime))[-3:] == ["meanwhile", "re: meanwhile", "paid"]
    sound(path)


async def test_ids_are_forgotten_after_their_time_and_not_before(tmp_path: Path) -> None:
    """A7: bounded; only those of ended turns, slice by slice, and none while nothing is old."""
    path = tmp_path / "chat.db"

    class Clock:
        at_ms = 1_000_000

        def now(self) -> int:
            return self.at_ms

        def monotonic(self) -> float:
            return time.monotonic()

    clock, settings = Clock(), SessionSettings(dedupe_kept_s=60.0)
    count = PRUNED_AT_ONCE + 50
    agent, let_go = Switchboard(), trio.Event()

    async def slow(turn: Turn) -> str:
        await let_go.wait()
        return "done"

    async with open_runtime(
        path, agent=agent, settings=Settings(sessions=settings), clock=clock
    ) as runtime:
        writer = runtime.sessions._writer  # pyright: ignore[reportPrivateUsage]
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(runtime.ask, f"test:{number}", hook(inbound_id=f"u{number}"))
        agent.next = slow
        running = await runtime.submit("test:slow", hook(inbound_id="running"))
        clock.at_ms += 59_999
        assert await prune_inbox(writer, clock, settings) is None
        clock.at_ms += 2
        assert await prune_inbox(writer, clock, settings) == 1_000_000
        left = query(path, "SELECT count(*) FROM inbox")
        assert left == [(count + 1 - PRUNED_AT_ONCE,)]
        assert await prune_inbox(writer, clock, settings) == 1_000_000
        assert await prune_inbox(writer, clock, settings) is None
        assert query(path, "SELECT inbound_id FROM inbox") == [("running",)]
        assert (await runtime.submit("test:slow", hook(inbound_id="running"))).repeated
        let_go.set()
        await running.reply()
    sound(path)
