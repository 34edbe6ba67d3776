"""What an attack on the runtime found around storage: receipts, rotations, reads and bounds.

Each test is the smallest one that showed its defect. The Writer runs inline and the clock jumps,
except where a thread of its own is the point.
"""

from __future__ import annotations

import gc
import threading
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from onepen import (
    Draft,
    Event,
    Message,
    Runtime,
    SessionSettings,
    Settings,
    StorageUnavailableError,
    SystemClock,
    Turn,
    WriterSettings,
    open_sqlite,
    open_writer,
)
from onepen.actors import scribe
from onepen.actors.page import load
from onepen.actors.results import Attempt, align
from onepen.storage.identity import Seq, SessionId, TurnId, Uid
from onepen.storage.sqlite.transcript_views import TranscriptViews

from ..actors.fixtures import Talk
from ..contract.agents import Commits, Trouble, sound
from .scripted import Disk, inline, serving, transcript

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from trio.testing import MockClock

    from onepen import Receipt
    from onepen.storage.records import Role

KEY, OTHER = "test:1", "test:2"
LONG = "something long " * 200
ENDS_SOON = Settings(
    shutdown_s=1,
    sessions=SessionSettings(finalize_deadline_s=1, hook_deadline_s=1, interrupt_grace_s=1),
    writer=WriterSettings(drain_s=1),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


def state_of(runtime: Runtime) -> str:
    return runtime.statistics().writer.traffic.state


def no_receipt_failed(caplog: pytest.LogCaptureFixture) -> bool:
    """No receipt crashed the Writer, and the last resort of its entrance was not needed."""
    return not {"a receipt could not be taken", "the writer crashed"} & set(caplog.messages)


# Receipts and rotations ------------------------------------------------------------------------


async def test_rows_that_a_rotation_held_are_stored_though_storage_was_down_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """INV-1, INV-13: the receipt that ends the trouble also posts what was held."""
    commits = Commits(monkeypatch)

    async def agent(turn: Turn) -> str:
        if turn.text != "go":
            return LONG
        async with trio.open_nursery() as nursery:
            with commits.holding():
                nursery.start_soon(turn.rotate, "short")
                await commits.wait_reached()
                await turn.append("held row")
                while state_of(runtime) != "down":
                    await trio.to_thread.run_sync(lambda: None)  # lets the loop go on
        return "done"

    settings = Settings(writer=WriterSettings(down_after_s=0.05))
    async with serving(path, agent, settings=settings) as runtime:
        await runtime.ask(KEY, "hello")
        assert (await runtime.ask(KEY, "go")).text == "done"
        assert await transcript(runtime, KEY) == [
            ("system", "short"),
            ("user", "go"),
            ("assistant", "held row"),
            ("assistant", "done"),
        ]
        assert runtime.statistics().writer.traffic.receipts_failed == 0
    assert no_receipt_failed(caplog)
    sound(path)


async def test_an_answer_and_a_post_wait_for_a_storage_that_is_down_no_longer_than_a_message(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G: when it goes down while they wait, and at once when it is down."""
    commits = Commits(monkeypatch)
    asked, told = trio.Event(), list[str]()

    async def agent(turn: Turn) -> str:
        if turn.text == "ask":
            asked.set()
            return await turn.ask_user("may I?", ["yes", "no"])
        return "done"

    async def refused(what: str, call: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(StorageUnavailableError):
            await call()
        told.append(what)

    settings = Settings(writer=WriterSettings(down_after_s=0.05))
    async with serving(path, agent, settings=settings) as runtime:
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "submit": lambda: runtime.submit("test:3", "hello"),
            "post": lambda: runtime.post(OTHER, "hello", id="p"),
            "answer": lambda: runtime.approvals.answer(KEY, "yes"),
        }
        submission = await runtime.submit(KEY, "ask")
        await asked.wait()
        while not await runtime.approvals.list(KEY):
            await trio.to_thread.run_sync(lambda: None)
        with commits.holding():
            for _ in range(2):
                async with trio.open_nursery() as nursery:
                    for what, call in calls.items():
                        nursery.start_soon(refused, what, call)
                assert state_of(runtime) == "down"
        assert sorted(told) == ["answer", "answer", "post", "post", "submit", "submit"]
        assert (await submission.reply()).text == "yes"
        assert (await runtime.post(OTHER, "hello", id="p")).text == "hello"
        assert await transcript(runtime, OTHER) == [("assistant", "hello")]
    sound(path)


@pytest.mark.parametrize("with_what", ["a hook", "held rows"])
async def test_a_rotation_that_is_durable_behind_the_shutdown_deadline_hurts_nobody(
    path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, with_what: str
) -> None:
    """INV-15: its receipt comes when its session is gone, and there is nobody to tell."""
    disk = Disk()

    class Hooks:
        def on_rotation(self, **_: object) -> None:
            pass

    async def agent(turn: Turn) -> str:
        if turn.text != "go":
            return LONG
        disk.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(turn.rotate, "short")
            await disk.reached.wait()
            if with_what == "held rows":
                await turn.append("held row")
            await trio.sleep_forever()

    async def let_go_in_the_drain() -> None:
        await trio.sleep(1.5)
        disk.let_go()

    hooks = Hooks() if with_what == "a hook" else None
    async with (
        trio.open_nursery() as nursery,
        inline(path, agent, ENDS_SOON, at=disk.at, hooks=hooks) as runtime,
    ):
        await runtime.ask(KEY, "hello")
        await runtime.submit(KEY, "go")
        await disk.reached.wait()
        nursery.start_soon(let_go_in_the_drain)
    assert no_receipt_failed(caplog)
    sound(path)
    async with inline(path) as runtime:
        assert (await transcript(runtime, KEY))[:2] == [("system", "short"), ("user", "go")]


async def test_a_receipt_callback_that_raises_is_counted_and_the_writer_goes_on(
    tmp_path: Path,
) -> None:
    """INV-13: on the loop's own stack it would end the process."""
    clock, talk = SystemClock(), Talk(1)

    def bug(_: Receipt) -> None:
        raise TypeError("a bug of whoever posted it")

    async with open_writer(lambda: open_sqlite(tmp_path / "chat.db", clock), clock) as writer:
        await writer.post(talk.opening(), bug).durable()
        await writer.write(talk.message())
        assert writer.statistics().traffic.receipts_failed == 1
        assert writer.statistics().restarts == 0


# Memory and storage ----------------------------------------------------------------------------


async def test_a_close_whose_end_came_too_late_leaves_the_key_usable(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-10: the end was reported as failed and is stored after all; memory follows."""
    disk = Disk()
    async with inline(path, settings=ENDS_SOON, at=disk.at) as runtime:
        first = await runtime.ask(KEY, "one")
        disk.hold()
        closed = await runtime.close_session(KEY)
        assert set(closed.failures) == {"end"}
        disk.let_go()
        second = await runtime.ask(KEY, "two")
        assert second.text == "re two"
        assert second.session_id != first.session_id
        assert (await runtime.ask(KEY, "three")).session_id == second.session_id
        assert runtime.statistics().counters["crashes"] == 0
    sound(path)


MOVES: dict[str, Callable[[Runtime], Awaitable[object]]] = {
    "reset": lambda runtime: runtime.reset(KEY),
    "branch": lambda runtime: runtime.branch(KEY),
    "rewind": lambda runtime: runtime.rewind(KEY),
    "switch": lambda runtime: runtime.switch(KEY, "another-session"),
}


@pytest.mark.parametrize("move", MOVES)
async def test_after_a_move_that_failed_behind_its_commit_memory_follows_storage(
    path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, move: str
) -> None:
    """INV-10: what is committed is so, though the read behind it failed."""
    failing = False

    def trouble(*arguments: Any) -> Any:
        if failing:
            raise StorageUnavailableError("the database is being reopened")
        return load(*arguments)

    monkeypatch.setattr(scribe, "load", trouble)
    async with inline(path) as runtime:
        await runtime.ask(KEY, "one")
        await runtime.ask(KEY, "two")
        failing = True
        with pytest.raises(StorageUnavailableError):
            await MOVES[move](runtime)
        failing = False
        stored = await runtime.sessions.current(KEY)
        for text in ("three", "four"):
            reply = await runtime.ask(KEY, text)
            assert (reply.session_id, reply.text) == (stored, f"re {text}")
    sound(path)


async def test_a_read_that_meets_a_reopening_is_tried_again(
    path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-17: the readers are closed for a moment; whoever asked does not hear of it."""
    trouble = Trouble(monkeypatch, "reading")
    async with inline(path) as runtime:
        session_id = (await runtime.ask(KEY, "hello")).session_id
        trouble.error = StorageUnavailableError("the database is being reopened")
        assert await runtime.sessions.current(KEY) == session_id
        assert trouble.failed == 1


async def test_a_transcript_of_many_pages_is_one_snapshot(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-17: a compaction between two of its pages is not seen."""
    paused, go_on = trio.Event(), threading.Event()
    original = TranscriptViews.transcript

    def pausing(views: TranscriptViews, *arguments: Any, **options: Any) -> Any:
        page = original(views, *arguments, **options)
        if armed and not paused.is_set():
            trio.from_thread.run_sync(paused.set)
            assert go_on.wait(10)
        return page

    async def agent(turn: Turn) -> str:
        await turn.append(*(f"line {number}" for number in range(600)))
        return "ok"

    armed = False
    monkeypatch.setattr(TranscriptViews, "transcript", pausing)
    async with serving(path, agent) as runtime:
        session_id = (await runtime.ask(KEY, "hello")).session_id
        whole = await runtime.sessions.transcript(session_id)
        seen: list[tuple[Message, ...]] = []

        async def read() -> None:
            seen.append(await runtime.sessions.transcript(session_id))

        armed = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await paused.wait()
            await runtime.compact(KEY, "in short")
            go_on.set()
        assert len(whole) == 602
        assert seen == [whole]
        assert len(await runtime.sessions.transcript(session_id)) == 1


# Bounds ----------------------------------------------------------------------------------------


async def test_the_window_of_past_events_is_bounded_by_bytes(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-14: a few huge answers weigh as much as a thousand small ones."""

    async def agent(_: Turn) -> str:
        return "y" * 300_000

    async with inline(path, agent) as runtime:
        for _ in range(8):
            await runtime.ask(KEY, "hello")
        await trio.testing.wait_all_tasks_blocked()
        kept: list[Event] = []
        async with runtime.events(KEY, after=(0, 0)) as events:
            with trio.move_on_after(1):
                while True:
                    kept.append(await events.receive())
        assert kept[0].kind == "gap"
        sizes = [len(event.text or "") for event in kept]
        sizes += [len(event.message.text or "") for event in kept if event.message is not None]
        assert sum(sizes) <= 300_000


async def test_answers_that_are_stored_do_not_stay_in_memory(
    path: Path, autojump_clock: MockClock
) -> None:
    """INV-14: what the transcript no longer shows is in the file alone."""

    async def agent(_: Turn) -> str:
        return "y" * 500_000

    async with inline(path, agent) as runtime:
        tracemalloc.start()
        try:
            for _ in range(10):
                await runtime.ask(KEY, "hello")
                await runtime.compact(KEY, "in short", force=True)
            gc.collect()
            kept_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert kept_bytes < 2_500_000


class Compared(str):
    """Text that counts how often it is compared."""

    __slots__ = ()
    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return str.__eq__(self, other) if isinstance(other, str) else NotImplemented

    __hash__ = str.__hash__


def test_aligning_a_history_that_repeats_itself_is_linear_in_its_length() -> None:
    """INV-14: an agent that has rewritten one line of many equal ones must not stall the loop."""
    size = 400

    def told(text: str, role: Role = "assistant") -> Draft:
        return Draft(uid=Uid(""), role=role, text=Compared(text))

    def stored(number: int, text: str, role: Role = "assistant") -> Message:
        return Message(
            uid=Uid(f"{number:032x}"),
            role=role,
            text=Compared(text),
            session_id=SessionId("session"),
            seq=Seq(number),
        )

    given = [stored(number, "pong") for number in range(size)]
    own = stored(size, "report", "user")
    report = [told("pong") for _ in range(size)]
    report[size // 2] = told("PONG")
    report.append(told("report", "user"))
    Compared.times = 0
    align(tuple(report), Attempt(TurnId("turn"), 1, given, (own,), 1))
    assert Compared.times < 40 * size
