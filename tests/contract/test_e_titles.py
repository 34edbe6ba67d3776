"""Contract E: titles, pending and given, and what becomes of them over rotations."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import trio
import trio.testing

from onepen import (
    InvalidContentError,
    Runtime,
    Settings,
    SystemClock,
    SystemIds,
    TitleTakenError,
    Turn,
    open_runtime,
    open_sqlite,
)
from onepen.actors import writer
from onepen.actors.warm import AgentSource
from onepen.runtime.opening import assemble
from onepen.storage.commands import EndTurn, SetTitle
from onepen.storage.sqlite.views import SqliteReader
from onepen.testing import Disk, Fault, Kind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path

    from onepen import Session, Unit
    from onepen.storage.identity import SessionId
    from onepen.storage.sqlite import SqliteEngine

KEY = "test:1"
LONG = "a long story, " * 50  # something that a summary makes shorter


async def agent(turn: Turn) -> str:
    if turn.text == "fail":
        raise ValueError("as asked")
    return f"re: {turn.text}"


async def row_of(runtime: Runtime, key: str = KEY) -> Session:
    """The row of the key's session, once everything that the last turn brought is done."""
    session_id = await runtime.open_session(key)  # an operation waits for the turn and its title
    row = await runtime.sessions.get(session_id)
    assert row is not None
    return row


async def title_of(runtime: Runtime, key: str = KEY) -> str | None:
    return (await row_of(runtime, key)).title


async def pending(runtime: Runtime, key: str = KEY) -> str | None:
    return await runtime.sessions.pending_title(key)


# E1 ------------------------------------------------------------------------------------------


async def test_a_title_before_the_row_is_applied_after_the_first_turn(tmp_path: Path) -> None:
    """E1: held as pending, not applied during the turn; success clears it."""
    during: list[object] = []

    async def look(turn: Turn) -> str:
        row = await runtime.sessions.get(turn.session_id)
        assert row is not None
        during.append((row.title, await pending(runtime)))
        return "done"

    async with open_runtime(tmp_path / "x.db", agent=look) as runtime:
        assert await runtime.set_title(KEY, "Plans")
        assert await pending(runtime) == "Plans"
        await runtime.ask(KEY, "hello")
        row = await row_of(runtime)
        assert (row.title, row.title_origin) == ("Plans", "person")
        assert await pending(runtime) is None
        assert during == [(None, "Plans")]
        # And it is not applied once more over a later one.
        assert await runtime.set_title(KEY, "Other plans")
        await runtime.ask(KEY, "again")
        assert await title_of(runtime) == "Other plans"


async def test_a_pending_title_is_in_the_row_when_ask_returns(tmp_path: Path) -> None:
    """E1: whoever has the reply need not wait for anything else."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        for number in range(10):
            key = f"test:{number}"
            await runtime.set_title(key, f"Plans {number}")
            reply = await runtime.ask(key, "hello")
            row = await runtime.sessions.get(reply.session_id)
            assert row is not None
            assert (row.title, await pending(runtime, key)) == (f"Plans {number}", None)


async def test_a_pending_title_is_applied_after_a_restart(tmp_path: Path) -> None:
    """E1: it is held durably; the last one that was set stands."""
    path = tmp_path / "x.db"
    async with open_runtime(path, agent=agent) as runtime:
        await runtime.open_session(KEY, title="First thought")
        await runtime.set_title(KEY, "Second thought")
    async with open_runtime(path, agent=agent) as runtime:
        assert await pending(runtime) == "Second thought"
        await runtime.ask(KEY, "hello")
        assert await title_of(runtime) == "Second thought"
        assert await pending(runtime) is None
    async with open_runtime(path, agent=agent) as runtime:
        assert await title_of(runtime) == "Second thought"
        assert await pending(runtime) is None


async def test_a_pending_title_is_applied_although_the_first_turn_failed(tmp_path: Path) -> None:
    """E1: the row is there after a turn, whatever came of it."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        await runtime.set_title(KEY, "Plans")
        assert (await runtime.ask(KEY, "fail")).outcome.kind == "failed"
        assert await title_of(runtime) == "Plans"


async def test_a_pending_title_is_for_the_new_session_behind_a_boundary(tmp_path: Path) -> None:
    """E1: a session that was closed keeps its title; the next one gets what was set since."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        await runtime.set_title(KEY, "Old")
        old_id = (await runtime.ask(KEY, "hello")).session_id
        await runtime.close_session(KEY)
        await runtime.set_title(KEY, "New")
        assert await pending(runtime) == "New"
        reply = await runtime.ask(KEY, "hello again")
        assert reply.session_id != old_id
        assert await title_of(runtime) == "New"
        old = await runtime.sessions.get(old_id)
        assert old is not None
        assert old.title == "Old"


@pytest.mark.parametrize(
    "bad", ["", "   ", "x" * 101, "\u200b\u200d", "\x00\x1f"], ids=["0", "1", "2", "3", "4"]
)
async def test_the_form_of_a_pending_title_is_checked_at_once(tmp_path: Path, bad: str) -> None:
    """E1: a title that can't be one is refused before anything is held."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        with pytest.raises(InvalidContentError):
            await runtime.set_title(KEY, bad)
        assert await pending(runtime) is None
        with pytest.raises(InvalidContentError):
            await runtime.open_session(KEY, title=bad)
        assert await pending(runtime) is None
        await runtime.ask(KEY, "hello")
        with pytest.raises(InvalidContentError):
            await runtime.set_title(KEY, bad)
        assert await title_of(runtime) is None


async def test_a_title_that_is_no_text_is_refused_and_hurts_nobody(tmp_path: Path) -> None:
    """E1: its form is checked at once, and the session's actor survives it."""
    bad: Any = 5
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        with pytest.raises(InvalidContentError):
            await runtime.set_title(KEY, bad)
        assert runtime.statistics().counters["crashes"] == 0


async def test_a_pending_title_reserves_nothing(tmp_path: Path) -> None:
    """E1: two keys may hold the same one, and a third may take it; the first row gets it."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        await runtime.ask("test:stored", "hello")
        assert await runtime.set_title("test:a", "Plans")
        assert await runtime.set_title("test:b", "Plans")
        assert await runtime.set_title("test:stored", "Plans")
        assert await title_of(runtime, "test:stored") == "Plans"
        assert await pending(runtime, "test:a") == await pending(runtime, "test:b") == "Plans"
        await runtime.set_title("test:stored", "Something else")
        await runtime.ask("test:b", "hello")
        await row_of(runtime, "test:b")
        await runtime.ask("test:a", "hello")
        assert await title_of(runtime, "test:b") == "Plans"
        assert await title_of(runtime, "test:a") is None


async def test_a_pending_title_takes_no_other_sessions_title_away(tmp_path: Path) -> None:
    """E1: it was set for the session without a row, not for one that has its name already."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        await runtime.open_session(KEY, "named")
        await runtime.ask(KEY, "hello")
        await runtime.set_title(KEY, "Its own name")
        await runtime.open_session(KEY, "lazy", title="For the new one")
        await runtime.switch(KEY, "named")
        await runtime.ask(KEY, "hello")
        assert (await row_of(runtime)).id == "named"
        assert await title_of(runtime) == "Its own name"


# E2 ------------------------------------------------------------------------------------------


async def test_a_pending_title_that_is_taken_is_dropped(tmp_path: Path) -> None:
    """E2: the turn is unaffected, and an automatic title may take over."""
    path = tmp_path / "x.db"
    async with open_runtime(path, agent=agent) as runtime:
        await runtime.ask("test:other", "hello")
        await runtime.set_title("test:other", "Plans")
        await runtime.set_title(KEY, "Plans")
        reply = await runtime.ask(KEY, "hello")
        assert (reply.text, reply.outcome.kind, reply.persisted) == ("re: hello", "answered", True)
        assert await title_of(runtime) is None
        assert await pending(runtime) is None
        assert await title_of(runtime, "test:other") == "Plans"
        assert await runtime.set_title(KEY, "Found by itself", automatic=True)
        assert await title_of(runtime) == "Found by itself"
        assert runtime.statistics().counters["crashes"] == 0
    async with open_runtime(path, agent=agent) as runtime:
        assert await pending(runtime) is None
        transcript = await runtime.sessions.transcript((await row_of(runtime)).id)
        assert [message.text for message in transcript] == ["hello", "re: hello"]


async def test_a_dropped_title_is_not_tried_again(tmp_path: Path) -> None:
    """E2: dropped is dropped, even when the title is free later."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        await runtime.ask("test:other", "hello")
        await runtime.set_title("test:other", "Plans")
        await runtime.set_title(KEY, "Plans")
        await runtime.ask(KEY, "hello")
        await row_of(runtime)
        await runtime.set_title("test:other", "Something else")
        await runtime.ask(KEY, "again")
        assert await title_of(runtime) is None


# E3 ------------------------------------------------------------------------------------------


_look = SqliteReader.session


class Trouble:
    """A runtime's engine on a disk that fails, just where the title is about to be applied."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.behind_the_turn: Fault | None = None
        self.at_the_title: Fault | None = None
        self.title_batches = 0
        self._armed: Fault | None = None

    def watch(self, engine: SqliteEngine) -> SqliteEngine:
        stage, commit = engine.stage, engine.commit
        ends = False

        def staged(units: Sequence[Unit]) -> Any:
            nonlocal ends
            commands = [command for unit in units for command in unit.commands]
            ends = any(isinstance(command, EndTurn) for command in commands)
            if any(isinstance(command, SetTitle) for command in commands):
                self.title_batches += 1
                self._inject(self.at_the_title)
                self.at_the_title = None
            return stage(units)

        def committed() -> None:
            commit()
            if ends:
                # On the writer's own thread: nobody has heard of the turn's end yet.
                self._armed, self.behind_the_turn = self.behind_the_turn, None

        engine.stage, engine.commit = staged, committed  # type: ignore[method-assign]
        return engine

    def look(self, reader: SqliteReader, session_id: SessionId) -> Session | None:
        """The title looks its session up; others read at this moment, too, and are not meant."""
        fault, self._armed = self._armed, None
        if fault is None:
            return _look(reader, session_id)
        # For as long as it looks: somebody else's read may be the first to come.
        self._inject(replace(fault, sticky=True))
        try:
            return _look(reader, session_id)
        finally:
            self.disk.heal()

    def _inject(self, fault: Fault | None) -> None:
        if fault is not None:
            self.disk.inject(fault)


@asynccontextmanager
async def open_on(path: Path, agent: Any, trouble: Trouble, vfs: str) -> AsyncGenerator[Runtime]:
    """`open_runtime` on another VFS."""
    clock, settings = SystemClock(), Settings()

    def open_engine() -> SqliteEngine:
        return trouble.watch(open_sqlite(path, clock, settings.engine, vfs=vfs))

    def looked(reader: SqliteReader, session_id: SessionId) -> Session | None:
        return trouble.look(reader, session_id)

    # A read that fails is tried again for a while; here it counts as failed at once.
    with (
        patch.object(writer, "_READS_TRIED_MAX", 1),
        patch.object(SqliteReader, "session", looked),
    ):
        source = AgentSource(agent)
        async with assemble(open_engine, clock, SystemIds(), settings, source) as runtime:
            yield runtime


async def test_a_title_that_storage_could_not_look_up_stays_pending(tmp_path: Path) -> None:
    """E3: a read that fails once; the turn is unaffected, and the next one applies the title."""
    with Disk(tmp_path, count_reads=True, skip=("x.db.lock",)) as disk:
        trouble = Trouble(disk)
        async with open_on(tmp_path / "x.db", agent, trouble, disk.name) as runtime:
            await runtime.set_title(KEY, "Plans")
            trouble.behind_the_turn = Fault(0, kinds=frozenset({Kind.READ}), suffix="-wal")
            reply = await runtime.ask(KEY, "hello")
            assert (reply.text, reply.persisted) == ("re: hello", True)
            row = await row_of(runtime)
            assert len(disk.fired) == 1
            assert trouble.title_batches == 0
            assert row.title is None
            assert await pending(runtime) == "Plans"
            await runtime.ask(KEY, "again")
            assert await title_of(runtime) == "Plans"
            assert await pending(runtime) is None
            assert runtime.statistics().counters["crashes"] == 0


async def test_a_title_whose_commit_fails_is_not_lost(tmp_path: Path) -> None:
    """E3: the sync of its unit fails once; it is written again; the turn is unaffected."""
    with Disk(tmp_path, skip=("x.db.lock",)) as disk:
        trouble = Trouble(disk)
        async with open_on(tmp_path / "x.db", agent, trouble, disk.name) as runtime:
            await runtime.set_title(KEY, "Plans")
            trouble.at_the_title = Fault(0, kinds=frozenset({Kind.SYNC}), suffix="-wal")
            reply = await runtime.ask(KEY, "hello")
            assert (reply.text, reply.persisted) == ("re: hello", True)
            row = await row_of(runtime)
            assert len(disk.fired) == 1
            assert trouble.title_batches == 2
            assert (row.title, row.title_version) == ("Plans", 1)
            assert await pending(runtime) is None
            assert runtime.statistics().counters["crashes"] == 0


async def test_a_title_that_stayed_pending_survives_a_restart(tmp_path: Path) -> None:
    """E3: it is tried again after the next turn, also of the next process."""
    with Disk(tmp_path, count_reads=True, skip=("x.db.lock",)) as disk:
        trouble = Trouble(disk)
        async with open_on(tmp_path / "x.db", agent, trouble, disk.name) as runtime:
            await runtime.set_title(KEY, "Plans")
            trouble.behind_the_turn = Fault(0, kinds=frozenset({Kind.READ}), suffix="-wal")
            await runtime.ask(KEY, "hello")
            assert (await row_of(runtime)).title is None
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        assert await pending(runtime) == "Plans"
        await runtime.ask(KEY, "again")
        assert await title_of(runtime) == "Plans"
        assert await pending(runtime) is None


async def test_a_title_that_stayed_pending_follows_a_rotation(tmp_path: Path) -> None:
    """E3: the key is rotated before the next turn; the child gets the title."""
    with Disk(tmp_path, count_reads=True, skip=("x.db.lock",)) as disk:
        trouble = Trouble(disk)
        async with open_on(tmp_path / "x.db", agent, trouble, disk.name) as runtime:
            await runtime.set_title(KEY, "Plans")
            trouble.behind_the_turn = Fault(0, kinds=frozenset({Kind.READ}), suffix="-wal")
            await runtime.ask(KEY, LONG)
            assert (await row_of(runtime)).title is None
            child_id = await runtime.rotate(KEY, "short")
            assert await pending(runtime) == "Plans"
            await runtime.ask(KEY, "again")
            row = await row_of(runtime)
            assert (row.id, row.title) == (child_id, "Plans")


async def test_a_newer_title_is_not_replaced_by_one_that_stayed_pending(tmp_path: Path) -> None:
    """E3: what a person says last stands; an older title must not come back from the waiting."""
    with Disk(tmp_path, count_reads=True, skip=("x.db.lock",)) as disk:
        trouble = Trouble(disk)
        async with open_on(tmp_path / "x.db", agent, trouble, disk.name) as runtime:
            await runtime.set_title(KEY, "Older")
            trouble.behind_the_turn = Fault(0, kinds=frozenset({Kind.READ}), suffix="-wal")
            await runtime.ask(KEY, "hello")
            assert (await row_of(runtime)).title is None
            assert await runtime.set_title(KEY, "Newer")
            assert await title_of(runtime) == "Newer"
            await runtime.ask(KEY, "again")
            assert await title_of(runtime) == "Newer"
            assert await pending(runtime) is None


# E4 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["pending", "stored"])
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("  Plans \t", "Plans"),
        ("\u3000Plans\u00a0", "Plans"),
        ("Pl\u200bans", "Plans"),
        ("\ufeffPlans\u2060\u200d\u200c", "Plans"),
        ("Pl\x00a\x07n\x7fs\x85", "Plans"),
        ("Pl\u202eans\u2066", "Plans"),
        ("Plans \u200b ", "Plans"),
        ("旅行の計画", "旅行の計画"),
        ("x" * 100, "x" * 100),
        (" " + "x" * 100 + " ", "x" * 100),
        ("💡" * 100, "💡" * 100),
    ],
    ids=str,
)
async def test_titles_are_trimmed_and_visible(
    tmp_path: Path, given: str, kept: str, when: str
) -> None:
    """E4: trimmed, free of control and zero-width characters, at most 100 characters."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        if when == "stored":
            await runtime.ask(KEY, "hello")
        await runtime.set_title(KEY, given)
        if when == "pending":
            assert await pending(runtime) == kept
            await runtime.ask(KEY, "hello")
        assert await title_of(runtime) == kept


async def test_titles_are_unique(tmp_path: Path) -> None:
    """E4: also if they differ only in what nobody sees; the own title may be set again."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        await runtime.ask("test:a", "hello")
        await runtime.ask("test:b", "hello")
        await runtime.set_title("test:a", "Plans")
        for same in ("Plans", " Plans\u200b"):
            with pytest.raises(TitleTakenError) as caught:
                await runtime.set_title("test:b", same)
            assert caught.value.holder == (await row_of(runtime, "test:a")).id
        assert await runtime.set_title("test:a", "Plans")
        assert await title_of(runtime, "test:b") is None
        assert await runtime.set_title("test:b", "plans")


async def test_a_child_takes_its_parents_title_with_the_next_number(tmp_path: Path) -> None:
    """E4: `Chat`, `Chat #2`, `Chat #3`; the parents keep theirs."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        await runtime.set_title(KEY, "Chat")
        await runtime.ask(KEY, LONG)
        await row_of(runtime)
        for number in (2, 3, 4):
            await runtime.rotate(KEY, f"short {number}")
            assert await title_of(runtime) == f"Chat #{number}"
            await runtime.ask(KEY, LONG)
        lineage = await runtime.sessions.lineage((await row_of(runtime)).id)
        assert [row.title for row in lineage] == ["Chat", "Chat #2", "Chat #3", "Chat #4"]
        assert {row.title_origin for row in lineage} == {"person"}


async def test_a_rotation_inside_a_turn_numbers_the_title_as_well(tmp_path: Path) -> None:
    """E4: the child of a rotation that an agent asked for."""

    async def rotating(turn: Turn) -> str:
        if turn.text == "rotate":
            await turn.rotate("short")
        return "done"

    async with open_runtime(tmp_path / "x.db", agent=rotating) as runtime:
        await runtime.set_title(KEY, "Chat")
        await runtime.ask(KEY, LONG)
        await runtime.ask(KEY, "rotate")
        assert await title_of(runtime) == "Chat #2"


async def test_a_session_without_a_title_has_a_child_without_one(tmp_path: Path) -> None:
    """E4: nothing is made up."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        await runtime.ask(KEY, LONG)
        await runtime.rotate(KEY, "short")
        assert await title_of(runtime) is None


async def test_a_clash_of_titles_refuses_no_rotation(tmp_path: Path) -> None:
    """E4: numbers that are taken are left out, however many there are."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        for number in (2, 3, 5):
            await runtime.ask(f"test:other{number}", "hello")
            await runtime.set_title(f"test:other{number}", f"Chat #{number}")
        await runtime.ask(KEY, LONG)
        await runtime.set_title(KEY, "Chat")
        await runtime.rotate(KEY, "short")
        assert await title_of(runtime) == "Chat #4"
        await runtime.ask(KEY, LONG)
        await runtime.rotate(KEY, "short again")
        assert await title_of(runtime) == "Chat #6"


async def test_two_rotations_at_once_get_two_titles(tmp_path: Path) -> None:
    """E4: titles that lead to the same next number; both keys rotate, none is refused."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        for key, title in (("test:a", "Chat"), ("test:b", "Chat #1")):
            await runtime.ask(key, LONG)
            await runtime.set_title(key, title)
        async with trio.open_nursery() as nursery:
            for key in ("test:a", "test:b"):
                nursery.start_soon(runtime.rotate, key, "short")
        titles = {await title_of(runtime, key) for key in ("test:a", "test:b")}
        assert titles == {"Chat #2", "Chat #3"}


@pytest.mark.parametrize("title", ["x" * 100, "💡" * 100, "x" * 96 + " " + "y" * 3])
async def test_the_number_fits_into_the_longest_title(tmp_path: Path, title: str) -> None:
    """E4: at most 100 characters, number included; the lineage is still found by its base."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        await runtime.ask(KEY, LONG)
        await runtime.set_title(KEY, title)
        for number in range(2, 12):
            await runtime.rotate(KEY, f"short {number}")
            child = await title_of(runtime)
            assert child is not None
            assert len(child) <= 100
            assert child.endswith(f" #{number}")
            await runtime.ask(KEY, LONG)
        assert (await runtime.sessions.find(title)).id == (await row_of(runtime)).id


async def test_the_latest_of_a_lineage_is_found_by_its_base_title(tmp_path: Path) -> None:
    """E4: `find` and `resume` lead to the tip, from another session and after a restart."""
    path = tmp_path / "x.db"
    async with open_runtime(path, agent=agent) as runtime:
        await runtime.set_title(KEY, "Chat")
        await runtime.ask(KEY, LONG)
        await row_of(runtime)
        second = await runtime.rotate(KEY, "short")
        await runtime.ask(KEY, LONG)
        tip = await runtime.rotate(KEY, "shorter")
        for given in ("Chat", "Chat #2", "Chat #3", second):
            found = await runtime.sessions.find(given)
            assert found.id == (second if given == second else tip)
        await runtime.switch(KEY, "elsewhere")
        assert await runtime.resume(KEY, "Chat") == tip
        assert await runtime.sessions.current(KEY) == tip
        await runtime.switch(KEY, "elsewhere")
    async with open_runtime(path, agent=agent) as runtime:
        assert await runtime.resume(KEY, "Chat") == tip
        reply = await runtime.ask(KEY, "hello")
        assert reply.session_id == tip
        transcript = await runtime.sessions.transcript(tip)
        assert [m.text for m in transcript] == ["shorter", "hello", "re: hello"]


async def test_a_persons_title_beats_an_automatic_one(tmp_path: Path) -> None:
    """E4: in the row, whichever comes first, and in the child of a rotation."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        await runtime.ask(KEY, LONG)
        assert await runtime.set_title(KEY, "Automatic", automatic=True)
        assert await runtime.set_title(KEY, "Automatic, better", automatic=True)
        assert await runtime.set_title(KEY, "By hand")
        assert not await runtime.set_title(KEY, "Automatic again", automatic=True)
        row = await row_of(runtime)
        assert (row.title, row.title_origin) == ("By hand", "person")
        await runtime.rotate(KEY, "short")
        assert not await runtime.set_title(KEY, "Automatic again", automatic=True)
        assert await title_of(runtime) == "By hand #2"


async def test_a_persons_pending_title_beats_an_automatic_one(tmp_path: Path) -> None:
    """E4: while it waits, and when an automatic title is in the row first."""
    async with open_runtime(tmp_path / "x.db", agent=agent) as runtime:
        assert await runtime.set_title(KEY, "Automatic", automatic=True)
        assert await runtime.set_title(KEY, "By hand")
        assert not await runtime.set_title(KEY, "Automatic again", automatic=True)
        assert await pending(runtime) == "By hand"
        await runtime.ask(KEY, "hello")
        row = await row_of(runtime)
        assert (row.title, row.title_origin) == ("By hand", "person")


async def test_an_automatic_title_in_the_first_turn_gives_way_to_the_pending_one(
    tmp_path: Path,
) -> None:
    """E4: an automatic title that was asked for during the first turn comes behind the person's."""
    began, end = trio.Event(), trio.Event()

    async def slow(_: Turn) -> str:
        began.set()
        await end.wait()
        return "done"

    async with open_runtime(tmp_path / "x.db", agent=slow) as runtime:
        await runtime.set_title(KEY, "By hand")
        submission = await runtime.submit(KEY, "hello")
        await began.wait()
        async with trio.open_nursery() as nursery:
            answers: list[bool] = []

            async def title() -> None:
                answers.append(await runtime.set_title(KEY, "Automatic", automatic=True))

            nursery.start_soon(title)
            await trio.testing.wait_all_tasks_blocked()
            end.set()
        await submission.reply()
        assert answers == [False]
        assert await title_of(runtime) == "By hand"
