"""Streams: pieces that are gathered, subscribers who come back, and what they missed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from onepen import InvalidContentError, MissingError, SessionSettings, Settings, Subscription

from ..contract.agents import LONG, sound
from ..contract.test_f_outcomes import write_beside
from .scripted import Held, inline, serving, until

if TYPE_CHECKING:
    from pathlib import Path

    from onepen import Event, Message, Runtime, Turn

KEY = "test:dm:1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


async def collect(events: Subscription, last: str = "turn.ended") -> list[Event]:
    """Events until one of this kind, itself included."""
    got: list[Event] = []
    async for event in events:
        got.append(event)
        if event.kind == last:
            break
    return got


def deltas(events: list[Event]) -> list[str | None]:
    return [event.text for event in events if event.kind == "message.delta"]


def numbers(events: list[Event]) -> list[int]:
    return [event.position[1] for event in events]


# Pieces --------------------------------------------------------------------------------------


async def test_pieces_that_come_fast_are_gathered_and_none_is_lost(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The first at once, then what came within the interval; numbers without a gap."""

    async def agent(turn: Turn) -> None:
        async with turn.streaming() as out:
            for number in range(100):
                await out.write(f"{number} ")
                await trio.sleep(0.01)

    async with inline(path, agent) as runtime, runtime.events(KEY) as events:
        await runtime.submit(KEY, "go")
        got = await collect(events)
        pieces = deltas(got)
        assert "".join(map(str, pieces)) == "".join(f"{number} " for number in range(100))
        assert pieces[0] == "0 "
        assert 15 <= len(pieces) <= 25, "one second, at twenty deltas a second"
        assert numbers(got) == list(range(got[0].position[1], got[0].position[1] + len(got)))
        assert all(event.provisional == (event.kind == "message.delta") for event in got)
        committed = next(e for e in got if e.kind == "message.committed" and e.uid == uid_of(got))
        assert got.index(committed) > max(n for n, e in enumerate(got) if e.provisional)
        assert (committed.session_id, committed.seq) == (runtime_session(got), 1)
    sound(path)


def uid_of(events: list[Event]) -> Any:
    return next(event.uid for event in events if event.kind == "message.delta")


def runtime_session(events: list[Event]) -> Any:
    return next(event.session_id for event in events if event.session_id is not None)


async def test_the_last_pieces_are_told_although_nothing_follows(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """An agent that thinks in the middle of a sentence holds none of it back."""
    go_on = trio.Event()

    async def agent(turn: Turn) -> None:
        async with turn.streaming() as out:
            for piece in ("a", "b", "c"):
                await out.write(piece)
            await go_on.wait()

    async with inline(path, agent) as runtime, runtime.events(KEY) as events:
        await runtime.submit(KEY, "go")
        text = ""
        with trio.fail_after(1):
            async for event in events:
                text += event.text or "" if event.kind == "message.delta" else ""
                if text == "abc":
                    break
        go_on.set()


async def test_whoever_comes_in_the_middle_gets_what_was_written_before(path: Path) -> None:
    """From the window, with what is still being gathered."""
    written, go_on = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> None:
        async with turn.streaming() as out:
            for piece in "abcdef":
                await out.write(piece)
            written.set()
            await go_on.wait()

    async with serving(path, agent) as runtime:
        submission = await runtime.submit(KEY, "go")
        await written.wait()
        async with submission.events() as events:
            go_on.set()
            assert "".join(map(str, deltas(await collect(events)))) == "abcdef"


async def test_pieces_of_a_cut_message_are_followed_by_what_is_stored_of_it(path: Path) -> None:
    written = trio.Event()

    async def agent(turn: Turn) -> None:
        async with turn.streaming() as out:
            await out.write("so far")
            written.set()
            await trio.sleep_forever()

    async with serving(path, agent) as runtime, runtime.events(KEY) as events:
        submission = await runtime.submit(KEY, "go")
        await written.wait()
        submission.interrupt()
        got = await collect(events)
        (row,) = [e.message for e in got if e.uid == uid_of(got) and e.message is not None]
        assert (row.text, row.finish_reason) == ("so far", "partial")
    sound(path)


# Coming back ---------------------------------------------------------------------------------


async def test_a_subscriber_that_comes_back_misses_nothing_and_gets_nothing_twice(
    path: Path,
) -> None:
    """At whatever event it left: `after` goes on behind it."""

    async def agent(turn: Turn) -> str:
        async with turn.streaming() as out:
            for piece in "abc":
                await out.write(piece)
        await turn.append("more")
        return "done"

    settings = Settings(sessions=SessionSettings(delta_interval_s=1e-9))
    async with serving(path, agent, settings=settings) as runtime:
        async with runtime.events(KEY) as events:
            await runtime.ask(KEY, "one")
            await runtime.ask(KEY, "two")
            whole = await collect(events) + await collect(events)
        for place, event in enumerate(whole):
            async with runtime.events(KEY, after=event.position) as events:
                rest = [await events.receive() for _ in whole[place + 1 :]]
            assert rest == whole[place + 1 :]
        async with runtime.events(KEY, after=(1, 5)) as events:
            assert (await events.receive()).kind == "gap", "another incarnation"


async def test_behind_a_gap_the_transcript_goes_on_through_rotations(path: Path) -> None:
    """Each message once, as it was said; copies that were carried along are left out."""

    async def agent(turn: Turn) -> str:
        if turn.text == "rotate":
            await turn.append("before")
            await turn.rotate("summary", force=True)
            await turn.append("behind")
        return f"re {turn.text} {LONG}"

    async with serving(path, agent) as runtime:
        committed: list[Message] = []
        said = ("one", "rotate", "two", "rotate", "three")
        async with runtime.events(KEY) as events:
            for text in said:
                await runtime.ask(KEY, text)
                got = await collect(events)
                committed += [event.message for event in got if event.message is not None]
        current = str(await runtime.sessions.current(KEY))
        for place, message in enumerate(committed):
            after = (message.session_id, message.seq)
            rest = await runtime.sessions.transcript(current, after=after)
            missed = [m.uid for m in rest if not m.summary]
            assert missed == [m.uid for m in committed[place + 1 :]]
            pages = await in_pages(runtime, current, after, 2)
            assert pages == list(rest)
        with pytest.raises(MissingError):
            await runtime.sessions.transcript(current, after=("nothing", 0))
        bad: list[Any] = [("x",), (current, "0"), (current, 0, 0), ("", 0), "x", (1, 2, 3)]
        for after in bad:
            with pytest.raises((InvalidContentError, MissingError)):
                await runtime.sessions.transcript(current, after=after)
    sound(path)


async def in_pages(
    runtime: Runtime, session_id: str, after: tuple[str, int], limit: int
) -> list[Message]:
    rows: list[Message] = []
    while page := await runtime.sessions.transcript(session_id, after=after, limit=limit):
        rows += page
        after = (page[-1].session_id, page[-1].seq)
    return rows


async def test_what_was_summarised_in_place_is_still_told_and_what_was_rewound_is_not(
    path: Path,
) -> None:
    """Whoever was away has not seen it; what was taken back was never said."""

    async def agent(turn: Turn) -> str:
        return f"re {turn.text} {LONG}"

    async with serving(path, agent) as runtime:
        for text in ("one", "two"):
            await runtime.ask(KEY, text)
        first = (await runtime.sessions.transcript(str(await runtime.sessions.current(KEY))))[0]
        await runtime.compact(KEY, "summary")
        for text in ("three", "four"):
            await runtime.ask(KEY, text)
        await runtime.rewind(KEY)
        rest = await runtime.sessions.transcript(
            first.session_id, after=(first.session_id, first.seq)
        )
        said = [(m.text or "").removesuffix(f" {LONG}") for m in rest if not m.summary]
        assert said == ["re one", "two", "re two", "three", "re three"]
    sound(path)


async def test_the_events_of_a_steered_message_end_with_the_turn_that_answers_it(
    path: Path,
) -> None:
    """Its own turn is over then, and says which one that was."""
    held = Held()

    async def agent(turn: Turn) -> str:
        await held.run(turn)
        await turn.steering()
        return "answer"

    async with serving(path, agent) as runtime:
        first = await runtime.submit(KEY, "first")
        await held.begun["first"].wait()
        steered = await runtime.submit(KEY, "hurry", busy="steer")
        async with steered.events() as events:
            held.go_on["first"].set()
            last = (await collect(events))[-1]
        assert last.outcome is not None
        assert (last.turn_id, last.outcome.cause) == (steered.turn_id, "steered")
        assert last.outcome.detail == {"into": first.turn_id}
        assert last.text == (await steered.reply()).text == "answer"
        async with steered.events() as events:  # whoever comes later, too
            assert [event.turn_id async for event in events][-1] == steered.turn_id


async def test_a_session_that_somebody_follows_is_not_evicted(path: Path) -> None:
    async with serving(path) as runtime:
        directory = runtime._directory  # pyright: ignore[reportPrivateUsage]
        async with runtime.events(KEY) as events:
            await runtime.ask(KEY, "one")
            await runtime.ask("other:1", "hello")
            await until(lambda: directory.evict_idle() == 1)
            await until(lambda: directory.live == 1)
            await runtime.ask(KEY, "two")
            got = await collect(events) + await collect(events)
        assert len({event.position[0] for event in got}) == 1
        await until(lambda: directory.evict_idle() == 1)


async def test_whoever_was_dropped_comes_back_behind_what_it_got(path: Path) -> None:
    """The last event says where: what it was too slow for is a gap, or still there."""
    async with serving(path) as runtime:
        async with runtime.events(KEY) as whole, runtime.events(KEY) as slow:
            slow._size_max = 3  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            await runtime.ask(KEY, "one")
            everything = await collect(whole)
            got = [event async for event in slow]
        assert [event.kind for event in got][-1] == "dropped"
        assert got[:-1] == everything[:3]
        async with runtime.events(KEY, after=got[-1].position) as events:
            assert await collect(events) == everything[3:]


async def test_what_was_shown_and_can_not_be_stored_is_withdrawn(path: Path) -> None:
    """And a piece that is no text is never shown."""

    async def agent(turn: Turn) -> str:
        async with turn.streaming() as out:
            await out.write("fine")
            for bad in ("half \ud800", 5):
                with pytest.raises(InvalidContentError):
                    await out.write(bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidContentError):
            async with turn.streaming() as out:
                for _ in range(3):
                    await out.write("x" * 500_000)
        return "ok"

    async with serving(path, agent) as runtime, runtime.events(KEY) as events:
        await runtime.submit(KEY, "go")
        got = await collect(events)
        (withdrawn,) = [event for event in got if event.kind == "withdrawn"]
        large = [e.uid for e in got if e.kind == "message.delta" and "x" in str(e.text)]
        assert {withdrawn.uid} == set(large)
        assert next(e.text for e in got if e.kind == "message.delta") == "fine"
        assert got[-1].text == "ok"
    sound(path)


async def test_rows_that_were_refused_are_withdrawn(path: Path) -> None:
    """INV-4: somebody else wrote to the session; what stands behind it does not hold."""

    async def agent(turn: Turn) -> None:
        await write_beside(runtime, turn.session_id)
        await turn.append("never stored")
        await trio.sleep_forever()

    async with serving(path, agent) as runtime, runtime.events(KEY) as events:
        await runtime.submit(KEY, "go")
        got = await collect(events)
        withdrawn = [e.message.text for e in got if e.kind == "withdrawn" and e.message]
        assert withdrawn == ["never stored"]
        assert got[-1].outcome is not None
        assert got[-1].outcome.cause == "storage"
    sound(path)
