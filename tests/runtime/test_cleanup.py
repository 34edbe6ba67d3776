"""Deletion, pruning, archiving: what goes, what stays, and what is never touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from onepen import (
    Inbound,
    InvalidContentError,
    MissingError,
    Runtime,
    Turn,
    open_runtime,
    open_sqlite,
)
from onepen.actors import clearing
from onepen.actors.retention import BlobWatch
from onepen.actors.writer import open_writer
from onepen.runtime.testing.invariants import check_database
from onepen.storage import commands as c
from onepen.storage.identity import BlobId
from onepen.storage.units import Unit

from ..contract.agents import KEY, current, echo, query, row, sound, texts_of
from ..contract.test_g_cleanup import Clock, lose_a_child

if TYPE_CHECKING:
    from pathlib import Path

LONG = "a long message that is worth a summary " * 4


async def left_of(runtime: Runtime, session_id: str) -> int:
    """Rows that any view still shows of a session."""
    found = await runtime.sessions.transcript(session_id, include_inactive=True)
    return len(found)


# Deleting ----------------------------------------------------------------------------------------


async def test_the_current_session_is_closed_and_its_key_gets_a_new_one(tmp_path: Path) -> None:
    """Its hooks run, its tombstone stays, nothing of it is found, and the key goes on."""
    path, told = tmp_path / "chat.db", list[str]()

    class Hooks:
        def on_session_end(self, **facts: Any) -> None:
            told.append(facts["session_id"])

    async with open_runtime(path, agent=echo, hooks=Hooks()) as runtime:
        await runtime.ask(KEY, "the pelican")
        gone = await current(runtime)
        assert await runtime.delete(gone)
        assert told == [gone]
        assert await current(runtime) != gone
        tombstone = await row(runtime, gone)
        assert tombstone.deleted
        assert (tombstone.end_reason, tombstone.message_count) == ("deleted", 0)
        assert await left_of(runtime, gone) == 0
        assert (await runtime.sessions.search("pelican")).hits == ()
        assert not await runtime.delete(gone)
        assert (await runtime.ask(KEY, "and now?")).text == "re: and now?"
        assert await texts_of(runtime, await current(runtime)) == ["and now?", "re: and now?"]
    sound(path)


async def test_the_running_turn_is_interrupted_and_writes_nothing_behind(tmp_path: Path) -> None:
    """INV-7: it is stored first, then it goes with its session; who waits is told."""
    path, started = tmp_path / "chat.db", trio.Event()

    async def stuck(turn: Turn) -> str:
        started.set()
        await trio.sleep(1_000)
        return "never"

    async with open_runtime(path, agent=stuck) as runtime:
        submission = await runtime.submit(KEY, "the pelican")
        await started.wait()
        gone = await current(runtime)
        assert await runtime.delete(gone)
        reply = await submission.reply()
        assert reply.outcome.kind == "interrupted"
        assert await left_of(runtime, gone) == 0
    sound(path)


async def test_a_session_that_nobody_has_goes_without_an_actor(tmp_path: Path) -> None:
    """And the session of its key that is current is not disturbed."""
    path = tmp_path / "chat.db"
    async with open_runtime(path, agent=echo) as runtime:
        await runtime.ask(KEY, "first")
        gone = await current(runtime)
        now = await runtime.reset(KEY)
        await runtime.ask(KEY, "second")
        built = runtime.statistics().sessions.live
        assert await runtime.delete(gone)
        assert runtime.statistics().sessions.live == built
        assert await texts_of(runtime, now) == ["second", "re: second"]
        with pytest.raises(MissingError):
            await runtime.delete("nobody")
        lazy = await runtime.open_session("a:lazy")
        assert not await runtime.delete(lazy)
    sound(path)


async def test_a_switch_to_it_that_comes_first_is_served_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes first: the tombstone is refused while a key has it, and taken from the key."""
    path, delete = tmp_path / "chat.db", clearing.hand_originals_on
    async with open_runtime(path, agent=echo) as runtime:
        await runtime.ask(KEY, "first")
        gone = await current(runtime)
        await runtime.reset(KEY)

        async def late(*arguments: Any) -> None:
            monkeypatch.undo()
            await runtime.switch(KEY, gone)
            await delete(*arguments)

        monkeypatch.setattr(clearing, "hand_originals_on", late)
        assert await runtime.delete(gone)
        assert await current(runtime) != gone
        assert (await row(runtime, gone)).deleted
        with pytest.raises(MissingError):
            await runtime.switch(KEY, gone)
    sound(path)


async def test_what_was_carried_on_stays_with_those_who_have_it(tmp_path: Path) -> None:
    """B1: rotation, branch, delegate: the tombstone keeps lineages, the copies become originals."""
    path = tmp_path / "chat.db"

    async def agent(turn: Turn) -> str:
        if turn.text == "rotate":
            await turn.rotate(summary="in short")
        return f"re: {turn.text}"

    async with open_runtime(path, agent=agent) as runtime:
        await runtime.ask(KEY, f"the pelican {LONG}")
        parent = await current(runtime)
        await runtime.branch(KEY)
        branch = await current(runtime)
        await runtime.switch(KEY, parent)
        await runtime.ask(KEY, "rotate")
        child = await current(runtime)
        assert child != parent
        assert await runtime.delete(parent)
        found = (await runtime.sessions.search("pelican")).hits
        assert {hit.session_id for hit in found} == {branch}
        assert {hit.session_id for hit in (await runtime.sessions.search("rotate")).hits} == {child}
        lineage = await runtime.sessions.lineage(child)
        assert [one.id for one in lineage] == [parent, child]
        assert [one.deleted for one in lineage] == [True, False]
        assert (await row(runtime, branch)).message_count == 2
        assert (await runtime.ask(KEY, "go on")).text == "re: go on"
    sound(path)


def put_blob(path: Path, data: bytes, pieces: int = 1) -> BlobId:
    """A sealed blob, as an uploader leaves it."""
    blob_id = BlobId(f"{hash(data) & 0xFFFFFFFF:064x}")
    size = len(data)
    step = -(-size // pieces)
    units = [
        Unit((c.PutChunk(blob_id=blob_id, index=n, data=data[n * step : (n + 1) * step]),))
        for n in range(pieces)
    ]
    seal = c.SealBlob(
        blob_id=blob_id, size_bytes=size, chunk_count=pieces, media_type="a/b", at_ms=1
    )
    engine = open_sqlite(path, Clock())
    engine.stage([*units, Unit((seal,))])
    engine.commit()
    engine.close()
    return blob_id


async def test_blobs_go_with_the_last_message_that_refers_to_them(tmp_path: Path) -> None:
    """One that another message needs, or a message that waits, or a timer, stays."""
    path = tmp_path / "chat.db"
    own, shared = put_blob(path, b"own" * 100, 9), put_blob(path, b"shared" * 100)
    async with open_runtime(path, agent=echo) as runtime:
        await runtime.ask(KEY, Inbound("look", blobs=(own, shared)))
        gone = await current(runtime)
        await runtime.submit("a:later", Inbound("look", blobs=(shared,)), at=4_000_000_000)
        await runtime.delete(gone)
    assert query(path, "SELECT id FROM blobs") == [(shared,)]
    assert query(path, "SELECT count(*) FROM chunks") == [(1,)]
    sound(path)


async def test_a_long_session_goes_in_slices_and_is_gone_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-18: between the tombstone and the last slice no view shows anything of it."""
    path = tmp_path / "chat.db"
    async with open_runtime(path, agent=talker(1_200)) as runtime:
        await runtime.ask(KEY, "the pelican")
        gone = await current(runtime)
        branch = await runtime.branch(KEY)
        slices: list[int] = []
        purging = clearing.purging_of

        def look(part: Any) -> Any:
            slices.append(part.before_seq)
            return purging(part)

        monkeypatch.setattr(clearing, "purging_of", look)
        deleting = clearing.purge

        async def watched(*arguments: Any) -> None:
            assert await left_of(runtime, gone) == 0
            found = (await runtime.sessions.search("pelican")).hits
            assert {hit.session_id for hit in found} == {branch}
            await deleting(*arguments)

        monkeypatch.setattr(clearing, "purge", watched)
        assert await runtime.delete(gone)
        assert len(slices) > 5
        assert (await row(runtime, branch)).message_count == 1_202
    assert query(path, "SELECT count(*) FROM purges") == [(0,)]
    assert query(path, "SELECT count(*) FROM messages m WHERE m.carried") == [(0,)]
    sound(path)


def talker(count: int) -> Any:
    """An agent that says much."""

    async def agent(turn: Turn) -> str:
        for number in range(count):
            await turn.append(f"pelican number {number}")
        return "done"

    return agent


async def test_a_deletion_that_was_cut_off_is_finished_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-19: from any slice on; until then nothing of it is shown."""
    path = tmp_path / "chat.db"
    async with open_runtime(path, agent=talker(900)) as runtime:
        await runtime.ask(KEY, "hello")
        gone = await current(runtime)
        await runtime.reset(KEY)
        purging, seen = clearing.purging_of, list[Any]()
        with trio.CancelScope() as scope:

            def cut(part: Any) -> Any:
                seen.append(part)
                if len(seen) == 3:
                    scope.cancel()
                return purging(part)

            monkeypatch.setattr(clearing, "purging_of", cut)
            await runtime.delete(gone)
        assert scope.cancelled_caught
        monkeypatch.undo()
    assert query(path, "SELECT count(*) FROM purges") == [(1,)]
    assert check_database(path) == []
    async with open_runtime(path, agent=echo) as runtime:
        assert await left_of(runtime, gone) == 0
        with trio.fail_after(5):
            while query(path, "SELECT count(*) FROM purges") != [(0,)]:
                await trio.testing.wait_all_tasks_blocked(0.001)
    assert query(path, "SELECT count(*) FROM purges") == [(0,)]
    assert query(path, "SELECT count(*) FROM messages") == [(0,)]
    sound(path)


# Pruning -----------------------------------------------------------------------------------------


async def test_pruning_spares_what_somebody_needs(tmp_path: Path) -> None:
    """Never current, pinned, at work, or young; a dry run says the same and does nothing."""
    path, clock = tmp_path / "chat.db", Clock()
    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        sessions: dict[str, str] = {}
        for name in ("old", "pinned", "current", "tip", "other"):
            key = f"{'web' if name == 'other' else 'tg'}:{name}"
            await runtime.ask(key, f"hello from {name}")
            sessions[name] = await current(runtime, key)
            if name != "current":
                await runtime.reset(key)
        await runtime.pin(sessions["pinned"])
        lost = await lose_a_child(runtime, "tg:lost")
        parent = (await row(runtime, lost)).parent_id
        await runtime.pin(lost)
        clock.pass_days(40)
        await runtime.ask("tg:young", "hello")
        sessions["young"] = await current(runtime, "tg:young")
        await runtime.reset("tg:young")
        dry = await runtime.prune(30 * 86_400, source="tg", dry_run=True)
        assert [one.id for one in dry.sessions] == [sessions["old"], sessions["tip"]]
        assert not (await row(runtime, sessions["old"])).deleted
        told: list[int] = []
        done = await runtime.prune(30 * 86_400, source="tg", progress=told.append)
        assert (done.count, done.sessions) == (2, dry.sessions)
        assert told == [1, 2]
        for name in ("pinned", "current", "young", "other"):
            assert not (await row(runtime, sessions[name])).deleted, name
        # What was rotated to a session that a person keeps belongs to it.
        assert parent is not None
        assert not (await row(runtime, parent)).deleted
        assert (await runtime.prune(0, key="web:other", ended_only=True)).count == 1
        assert (await runtime.prune(0, archived_only=True)).count == 0
        with pytest.raises(InvalidContentError):
            await runtime.prune()
        with pytest.raises(InvalidContentError):
            await runtime.prune(-1)
    sound(path)


async def test_archived_sessions_are_in_no_listing_and_can_be_pruned_alone(
    tmp_path: Path,
) -> None:
    """Setting a flag again changes nothing; the two flags do not touch each other."""
    path, clock = tmp_path / "chat.db", Clock()
    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        await runtime.ask(KEY, "hello")
        session_id = await current(runtime)
        assert await runtime.archive(session_id)
        assert not await runtime.archive(session_id)
        assert await runtime.pin(session_id)
        assert len(await runtime.sessions.list()) == 0
        assert len(await runtime.sessions.list(archived=None)) == 1
        assert await runtime.pin(session_id, pinned=False)
        assert (await row(runtime, session_id)).archived
        await runtime.reset(KEY)
        clock.pass_days(1)
        assert (await runtime.prune(60, archived_only=True)).count == 1
        with pytest.raises(MissingError):
            await runtime.archive(session_id)
    sound(path)


async def test_a_session_that_is_taken_up_meanwhile_is_not_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guards are looked at in the transaction: a route, and what was said since."""
    path, clock, hand_on = tmp_path / "chat.db", Clock(), clearing.hand_originals_on
    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        await runtime.ask(KEY, "hello")
        old = await current(runtime)
        fresh = await runtime.reset(KEY)
        clock.pass_days(1)

        async def late(*arguments: Any) -> None:
            await runtime.switch(KEY, old)
            await runtime.ask(KEY, "I am back")
            await runtime.switch(KEY, fresh)
            await hand_on(*arguments)

        monkeypatch.setattr(clearing, "hand_originals_on", late)
        assert (await runtime.prune(60)).count == 0
        assert (await texts_of(runtime, old))[-1] == "re: I am back"
    sound(path)


# Upkeep by itself ---------------------------------------------------------------------------------


async def test_history_goes_in_time_and_the_last_place_is_kept(tmp_path: Path) -> None:
    """What was sent, fired and done; where a key was answered last stays known."""
    path, clock = tmp_path / "chat.db", Clock()
    sent: list[str] = []

    async def deliver(delivery: Any) -> None:
        sent.append(delivery.text)

    async def agent(turn: Turn) -> str:
        await turn.effect(_effect, key="mail")
        return f"re: {turn.text}"

    async with open_runtime(path, agent=agent, clock=clock) as runtime:
        runtime.deliveries.register("tg", deliver)
        for text in ("one", "two", "three"):
            await runtime.ask("tg:1", Inbound(text, id=text, reply_to={"to": "ann"}))
        with trio.fail_after(5):
            while {one.state for one in await runtime.deliveries.list()} != {"sent"}:
                await trio.testing.wait_all_tasks_blocked(0.001)
        clock.pass_days(91)
        assert await runtime.prune_history() == 2  # its messages are known, so turns keep theirs
        rows = await runtime.deliveries.list()
        assert [one.text for one in rows] == ["re: three"]
        assert (await runtime.post("tg:1", "news")).target == {"to": "ann"}
    assert query(path, "SELECT count(*) FROM effects") == [(3,)]
    sound(path)


async def _effect() -> str:
    return "done"


async def test_unused_blobs_are_collected_after_a_day(tmp_path: Path) -> None:
    """Those that nothing refers to, in slices, and those whose pieces never came all."""
    path, clock = tmp_path / "chat.db", Clock()
    put_blob(path, b"lonely" * 1000, 9)
    engine = open_sqlite(path, clock)
    engine.stage([Unit((c.PutChunk(blob_id=BlobId("half"), index=0, data=b"x"),))])
    engine.commit()
    engine.close()
    async with open_writer(lambda: open_sqlite(path, clock), clock) as writer:
        watch = BlobWatch(writer, clock)
        assert await watch.collect() == 1
        clock.pass_days(0.9)
        assert await watch.collect() == 0
        clock.pass_days(0.2)
        assert await watch.collect() == 1
    assert query(path, "SELECT count(*) FROM blobs") == [(0,)]
    sound(path)
