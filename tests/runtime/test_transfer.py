"""`export_to` and `import_from` of running runtimes, and the two commands."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
import trio

from onepen import (
    ConflictError,
    ExportError,
    ImportFileError,
    Runtime,
    SessionInfo,
    open_runtime,
)
from onepen.runtime.testing.invariants import check_database, logical_dump

from .scripted import echo
from .typed import answered, refused, typed

if TYPE_CHECKING:
    from pathlib import Path

KEY = "telegram:1"


async def whole(runtime: Runtime) -> bytes:
    stream = io.BytesIO()
    await runtime.sessions.export_to(stream, everything=True)
    return stream.getvalue()


async def current(runtime: Runtime) -> str:
    found = await runtime.sessions.current(KEY)
    assert found is not None
    return found


async def until(condition: Any) -> None:
    """Wait until it holds; a test whose condition never does is ended by its time limit."""
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - it happens in a thread, or in an actor
            await trio.sleep(0.001)


async def test_a_conversation_goes_on_where_it_was_moved_to(tmp_path: Path) -> None:
    """B3, K1: history, title, search and route; a second import changes nothing."""
    file = tmp_path / "out.jsonl.gz"
    stages: list[tuple[str, int, int]] = []
    async with open_runtime(tmp_path / "a.db", agent=echo) as here:
        await here.ask(KEY, "the pelican sleeps")
        await here.set_title(KEY, "Birds")
        moved = await current(here)
        report = await here.sessions.export_to(file, key=KEY)
        assert (report.sessions, report.messages) == (1, 2)
        with pytest.raises(ExportError):
            await here.sessions.export_to(file, everything=True)
    async with open_runtime(tmp_path / "b.db", agent=echo) as there:
        done = await there.sessions.import_from(
            file, progress=lambda stage, done, total: stages.append((stage, done, total))
        )
        assert (done.sessions_new, done.messages, done.routes) == (1, 2, 1)
        found = await there.sessions.search("pelican")
        assert {hit.session_id for hit in found.hits} == {moved}
        reply = await there.ask(KEY, "and now?")
        assert reply.session_id == moved
        assert len(await there.sessions.transcript(moved)) == 4
        assert (await there.sessions.find("Birds")).id == moved
        again = await there.sessions.import_from(file)
        assert (again.sessions_new, again.sessions_unchanged) == (0, 1)
    assert check_database(tmp_path / "b.db") == []
    assert {stage for stage, _, _ in stages} == {"check", "compare", "import"}
    assert all(done <= total for _, done, total in stages)


class Rememberer:
    """An agent that tells how much history it was given, and how often it was built."""

    built = 0

    def __init__(self, info: SessionInfo) -> None:
        type(self).built += 1

    async def run(self, turn: Any) -> str:
        return f"{len(turn.history)} before"


async def test_a_warm_agent_is_rebuilt_behind_an_import(tmp_path: Path) -> None:
    """H3: the actor is live and its agent warm; the next turn sees what was imported."""
    Rememberer.built = 0
    file = tmp_path / "out.jsonl"
    async with (
        open_runtime(tmp_path / "a.db", agent=echo) as here,
        open_runtime(tmp_path / "b.db", factory=Rememberer) as there,
    ):
        await here.ask(KEY, "one")
        await here.sessions.export_to(file, everything=True)
        await there.sessions.import_from(file)
        await there.open_session(KEY)  # the actor is there, and knows the session's two rows
        await here.ask(KEY, "two")
        await here.ask(KEY, "three")
        await here.sessions.export_to(file, everything=True, overwrite=True)
        done = await there.sessions.import_from(file)
        assert (done.sessions_extended, done.messages) == (1, 4)
        assert await whole(there) == await whole(here)
        assert (await there.ask(KEY, "how many?")).text == "6 before"
        assert Rememberer.built == 1
        before = Rememberer.built
        # It has an agent now. Another import from a file that went on with the same rows.
        await there.sessions.export_to(file, everything=True, overwrite=True)
    async with open_runtime(tmp_path / "c.db", agent=echo) as other:
        await other.sessions.import_from(file)
        await other.ask(KEY, "more")
        await other.sessions.export_to(file, everything=True, overwrite=True)
    async with open_runtime(tmp_path / "b.db", factory=Rememberer) as there:
        assert (await there.ask("other:key", "hello")).text == "0 before"
        await there.open_session(KEY)
        done = await there.sessions.import_from(file)
        assert done.sessions_extended == 1
        assert (await there.ask(KEY, "how many?")).text == "10 before"
    assert before == 1
    assert check_database(tmp_path / "b.db") == []


async def test_an_agent_that_has_run_is_built_anew_after_an_import(tmp_path: Path) -> None:
    """H3: the session it has run in is gone on with by an import, without a restart between."""
    Rememberer.built = 0
    file = tmp_path / "out.jsonl"
    async with open_runtime(tmp_path / "b.db", factory=Rememberer) as there:
        assert (await there.ask(KEY, "one")).text == "0 before"
        await there.sessions.export_to(file, everything=True)
        async with open_runtime(tmp_path / "a.db", agent=echo) as here:
            await here.sessions.import_from(file)
            await here.ask(KEY, "two")
            await here.sessions.export_to(file, everything=True, overwrite=True)
        await there.sessions.import_from(file)
        assert Rememberer.built == 1
        assert (await there.ask(KEY, "how many?")).text == "4 before"
        assert Rememberer.built == 2
        assert (await there.ask(KEY, "and now?")).text == "6 before"
        assert Rememberer.built == 2


async def test_an_import_waits_for_the_running_turn_of_its_key(tmp_path: Path) -> None:
    """H3: a turn is never cut by an import; what it wrote and what is imported are both there."""
    file = tmp_path / "out.jsonl"
    begun, go = trio.Event(), trio.Event()

    async def slow(turn: Any) -> str:
        if turn.text == "wait":
            begun.set()
            await go.wait()
        return "done"

    async with (
        open_runtime(tmp_path / "a.db", agent=echo) as here,
        open_runtime(tmp_path / "b.db", agent=slow) as there,
    ):
        await here.ask(KEY, "one")
        await here.sessions.export_to(file, everything=True)
        await there.sessions.import_from(file)
        old = await current(there)
        await there.reset(KEY)
        await here.ask(KEY, "two")
        await here.sessions.export_to(file, everything=True, overwrite=True)
        async with trio.open_nursery() as nursery:
            submission = await there.submit(KEY, "wait")
            await begun.wait()
            nursery.start_soon(there.sessions.import_from, file)
            directory = there._directory  # pyright: ignore[reportPrivateUsage]
            await until(
                lambda: any(
                    session._operations  # pyright: ignore[reportPrivateUsage]
                    for session in directory.sessions()
                )
            )
            assert len(await there.sessions.transcript(old)) == 2
            go.set()
            assert (await submission.reply()).text == "done"
        assert len(await there.sessions.transcript(old)) == 4
        assert (await there.ask(KEY, "again")).text == "done"
    assert check_database(tmp_path / "b.db") == []


async def test_a_key_that_was_rotated_elsewhere_goes_on_in_the_child(tmp_path: Path) -> None:
    """B5, H3: its actor is live and follows the route, which moved with the child's publication."""
    file = tmp_path / "out.jsonl"
    async with (
        open_runtime(tmp_path / "a.db", agent=echo) as here,
        open_runtime(tmp_path / "b.db", agent=echo) as there,
    ):
        await here.ask(KEY, "one " * 200)
        await here.sessions.export_to(file, everything=True)
        await there.sessions.import_from(file)
        await there.open_session(KEY)
        child = await here.rotate(KEY, summary="all of it")
        await here.ask(KEY, "two")
        await here.sessions.export_to(file, everything=True, overwrite=True)
        before = there.statistics().route_writes
        await there.sessions.import_from(file)
        assert await current(there) == child
        assert there.statistics().route_writes == before + 1
        assert await whole(there) == await whole(here)
        assert (await there.ask(KEY, "three")).session_id == child
    assert check_database(tmp_path / "b.db") == []


async def test_where_both_went_on_there_is_a_conflict(tmp_path: Path) -> None:
    """H3: nothing is written, and both conversations stay usable."""
    file = tmp_path / "out.jsonl"
    async with (
        open_runtime(tmp_path / "a.db", agent=echo) as here,
        open_runtime(tmp_path / "b.db", agent=echo) as there,
    ):
        await here.ask(KEY, "one")
        await here.sessions.export_to(file, everything=True)
        await there.sessions.import_from(file)
        await here.ask(KEY, "here")
        await there.ask(KEY, "there")
        before = await whole(there)
        await here.sessions.export_to(file, everything=True, overwrite=True)
        with pytest.raises(ConflictError, match="message 2 of session"):
            await there.sessions.import_from(file)
        assert await whole(there) == before
        assert (await there.ask(KEY, "still there")).text


async def test_exports_are_whole_while_sessions_change(tmp_path: Path) -> None:
    """Appended to, rotated, rewound, reset and deleted meanwhile: what is written can be read."""
    file = tmp_path / "out.jsonl"
    async with (
        open_runtime(tmp_path / "a.db", agent=echo) as here,
        open_runtime(None, agent=echo) as there,
    ):
        keys = [f"web:{number}" for number in range(12)]
        for key in keys:
            await here.ask(key, "begin " * 60)

        async def live(key: str, number: int) -> None:
            for round_ in range(6):
                await here.ask(key, f"more {round_} " * 30)
                if number % 4 == 0:
                    await here.rotate(key, summary="short", force=True)
                elif number % 4 == 1:
                    await here.rewind(key)
                elif number % 4 == 2:
                    old = await here.sessions.current(key)
                    await here.reset(key)
                    assert old is not None
                    await here.ask(key, "anew")

        exports = 0
        async with trio.open_nursery() as nursery:
            for number, key in enumerate(keys):
                nursery.start_soon(live, key, number)
            for _ in range(8):
                await here.sessions.export_to(file, everything=True, overwrite=True)
                report = await there.sessions.import_from(file, dry_run=exports > 0)
                exports += 1
                assert report.sessions_new >= 12 or exports > 1
        last = await whole(here)
    async with open_runtime(tmp_path / "b.db", agent=echo) as copy:
        file.write_bytes(last)
        await copy.sessions.import_from(file)
        assert await whole(copy) == last
    assert check_database(tmp_path / "b.db") == []


async def test_a_cancelled_export_leaves_no_file_and_a_cancelled_import_nothing_half(
    tmp_path: Path,
) -> None:
    file, folder = tmp_path / "out.jsonl", tmp_path / "exports"
    folder.mkdir()
    async with open_runtime(tmp_path / "a.db", agent=echo) as here:
        for number in range(30):
            await here.ask(f"web:{number}", "hello " * 50)
        await here.sessions.export_to(file, everything=True)
        with trio.CancelScope() as scope:

            def cancel(stage: str, done: int, total: int) -> None:
                scope.cancel()

            await here.sessions.export_to(folder / "x.jsonl", everything=True, progress=cancel)
        assert list(folder.iterdir()) == []
    async with open_runtime(tmp_path / "b.db", agent=echo) as there:
        with trio.CancelScope() as scope:
            await there.sessions.import_from(
                file,
                progress=lambda stage, done, _: (
                    scope.cancel() if done and stage == "import" else None
                ),
            )
        for listed in await there.sessions.list(limit=100):
            assert len(await there.sessions.transcript(listed.id)) == 2
        await there.sessions.import_from(file)
        assert len(await there.sessions.list(limit=100)) == 30
    assert check_database(tmp_path / "b.db") == []


# The commands ------------------------------------------------------------------------------------


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "chat.db"

    async def talk() -> None:
        async with open_runtime(path, agent=echo) as runtime:
            await runtime.ask(KEY, "good morning")
            await runtime.set_title(KEY, "Greetings")
            await runtime.ask("web:1", "hello")

    trio.run(talk)
    return path


def test_the_commands_move_everything(database: Path, tmp_path: Path) -> None:
    file, copy = tmp_path / "out.jsonl", tmp_path / "copy.db"
    told = answered("export", "-d", database, "--all", file)
    assert (told["sessions"], told["messages"]) == (2, 4)
    would = answered("import", "-d", database, file, "--dry-run")
    assert (would["dry_run"], would["sessions_unchanged"]) == (True, 2)
    done = answered("import", "-d", copy, file)
    assert (done["sessions_new"], done["messages"], done["routes"]) == (2, 4, 2)
    assert "sessions unchanged" in typed("import", "-d", copy, file).stdout
    assert answered("import", "-d", copy, file)["sessions_unchanged"] == 2
    again = tmp_path / "again.jsonl"
    result = typed("export", "-d", copy, "--all", again)
    assert "export" in result.stderr
    assert again.read_bytes() == file.read_bytes()


def test_an_export_to_standard_output_is_nothing_but_the_export(database: Path) -> None:
    result = typed("export", "-d", database, "--session", "Greetings", "-")
    lines = [json.loads(line) for line in result.stdout_bytes.splitlines()]
    assert lines[0] == {"type": "onepen-export", "version": 1}
    assert [line["id"] for line in lines if line["type"] == "session"] == [lines[1]["id"]]
    one = typed("export", "-d", database, "--key", KEY, "-").stdout_bytes
    assert one == result.stdout_bytes
    assert typed("export", "-d", database, "--lineage", "Greetings", "-").stdout_bytes == one


def test_the_commands_refuse_with_words_and_exit_codes(database: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    assert "exactly one" in refused("export", "-d", database, file, exit_code=1)
    refused("export", "-d", database, "--session", "nobody", file, exit_code=4)
    refused("export", "-d", tmp_path / "none.db", "--all", file, exit_code=4)
    typed("export", "-d", database, "--all", file)
    assert "--overwrite" not in refused("export", "-d", database, "--all", file, exit_code=1)
    typed("export", "-d", database, "--all", "--overwrite", file)
    refused("import", "-d", database, tmp_path / "missing.jsonl", exit_code=1)
    file.write_bytes(file.read_bytes()[:-10])
    assert "line" in refused("import", "-d", tmp_path / "new.db", file, exit_code=1)
    assert not (tmp_path / "new.db").exists()
    refused("export", "-d", database, "--all", "--overwrite", database, exit_code=1)
    before = logical_dump(database)
    refused("import", "-d", database, file, exit_code=1)
    assert logical_dump(database) == before


async def test_an_import_says_who_owns_the_file_and_an_export_does_not_mind(
    database: Path, tmp_path: Path
) -> None:
    file = tmp_path / "out.jsonl"
    program = [sys.executable, "-m", "onepen"]
    async with open_runtime(database, agent=echo):
        done = await trio.run_process(
            [*program, "export", "-d", str(database), "--all", str(file)], capture_stderr=True
        )
        assert done.returncode == 0
        held = await trio.run_process(
            [*program, "import", "-d", str(database), str(file)],
            capture_stderr=True,
            check=False,
        )
        assert held.returncode == 3
        assert str(os.getpid()) in held.stderr.decode()


async def test_a_file_that_is_none_is_refused_by_a_runtime(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"nothing of ours\n")
    async with open_runtime(tmp_path / "a.db", agent=echo) as runtime:
        with pytest.raises(ImportFileError, match="line 1"):
            await runtime.sessions.import_from(tmp_path / "x")
