"""Restores: the backup in the database's place, in one step; the one before is kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import apsw
import pytest
import trio
from msgspec.structs import replace

from onepen import EngineSettings, Inbound, open_runtime, open_sqlite
from onepen.runtime.settings import Settings
from onepen.runtime.testing.invariants import check_database, logical_dump
from onepen.runtime.upkeep import hold_deliveries
from onepen.storage import commands as c
from onepen.storage.errors import (
    CopyError,
    DamagedFileError,
    DatabaseHeldError,
    ForeignFileError,
    MissingFileError,
    NewerSchemaError,
    OpenError,
)
from onepen.storage.sqlite import open_onlooker
from onepen.storage.sqlite.restore import restore
from onepen.storage.units import Unit
from onepen.storage.upkeep import Restored, unhurried
from tests.actors.fixtures import StillClock, Talk
from tests.crash.campaign import DATABASE
from tests.storage.migrating import closed_file

if TYPE_CHECKING:
    from pathlib import Path

    from onepen.storage.sqlite import SqliteEngine

SETTINGS = EngineSettings(free_bytes_min=0)


def put(backup: Path, database: Path, *, replace: bool = False) -> Restored:
    return restore(backup, database, StillClock(), unhurried, pages_step=50, replace=replace)


def apply(engine: SqliteEngine, *units: Unit) -> None:
    engine.stage(units)
    engine.commit()


def opened(path: Path) -> SqliteEngine:
    return open_sqlite(path, StillClock(), SETTINGS)


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    """Of a database that had three messages then, and has ten now."""
    engine = opened(tmp_path / "chat.db")
    talk = Talk(1)
    apply(engine, talk.opening(), *(talk.message() for _ in range(3)))
    engine.backup(tmp_path / "backup.db")
    apply(engine, *(talk.message() for _ in range(7)))
    engine.close()
    return tmp_path / "backup.db"


def messages_in(path: Path) -> int:
    return len(logical_dump(path)["messages"])


def names_in(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if not name.endswith(".lock")}


def test_a_backup_is_put_where_nothing_is(backup: Path, tmp_path: Path) -> None:
    restored = put(backup, tmp_path / "new.db")
    assert (restored.copied.messages, restored.kept, restored.held) == (3, None, 0)
    assert logical_dump(tmp_path / "new.db") == logical_dump(backup)
    opened(tmp_path / "new.db").close()
    assert check_database(tmp_path / "new.db") == []
    assert os.stat(tmp_path / "new.db").st_mode & 0o777 == 0o600


def test_a_database_is_replaced_only_when_that_is_asked_for_and_is_kept(
    backup: Path, tmp_path: Path
) -> None:
    database = tmp_path / "chat.db"
    with pytest.raises(CopyError, match="already"):
        put(backup, database)
    assert messages_in(database) == 10
    kept = f"{database}.before-restore-20231114T221320Z"
    assert put(backup, database, replace=True).kept == kept
    assert messages_in(database) == 3
    assert messages_in(tmp_path / os.path.basename(kept)) == 10
    assert put(backup, database, replace=True).kept == f"{kept}-2"
    assert messages_in(backup) == 3, "it is there for another time"


def test_what_stood_in_the_log_only_is_kept_with_the_old_database(
    backup: Path, tmp_path: Path
) -> None:
    """And is not applied to the new one, as SQLite would do with any log that lies there."""
    database, killed = tmp_path / "chat.db", tmp_path / "killed"
    engine = opened(database)
    talk = Talk(1)
    talk.next_seq = 10
    apply(engine, *(talk.message() for _ in range(5)))
    shutil.copytree(tmp_path, killed)  # as a killed process leaves it
    engine.close()
    database = killed / "chat.db"
    assert (killed / "chat.db-wal").exists()
    restored = put(backup, database, replace=True)
    assert messages_in(database) == 3
    assert restored.kept is not None
    assert messages_in(killed / os.path.basename(restored.kept)) == 15
    assert check_database(database) == []


def test_a_log_whose_database_is_gone_is_moved_away(backup: Path, tmp_path: Path) -> None:
    """Somebody removed the file by hand, and left what is applied to whatever comes there."""
    engine = opened(tmp_path / "chat.db")
    other = Talk(2)
    apply(engine, other.opening(), other.message())
    (tmp_path / "left").mkdir()
    shutil.copy(tmp_path / "chat.db-wal", tmp_path / "left" / "new.db-wal")
    engine.close()
    restored = put(backup, tmp_path / "left" / "new.db")
    assert restored.kept is not None
    assert os.path.exists(f"{restored.kept}-wal")
    assert logical_dump(tmp_path / "left" / "new.db") == logical_dump(backup)


def test_a_log_that_is_left_there_would_be_taken_for_the_new_files(
    backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with the protection off: what is read then is not what the backup says."""
    engine = opened(tmp_path / "chat.db")
    talk = Talk(1)
    talk.next_seq = 10
    apply(engine, *(talk.message("late " * 500) for _ in range(20)))
    (tmp_path / "left").mkdir()
    shutil.copy(tmp_path / "chat.db-wal", tmp_path / "left" / "new.db-wal")
    engine.close()

    def nothing(place: Path, clock: object) -> None:
        pass

    monkeypatch.setattr(sys.modules[restore.__module__], "_put_aside", nothing)
    put(backup, tmp_path / "left" / "new.db")
    try:
        same = logical_dump(tmp_path / "left" / "new.db") == logical_dump(backup)
    except apsw.Error:
        same = False
    assert not same


def test_a_database_that_somebody_owns_or_reads_stays(backup: Path, tmp_path: Path) -> None:
    engine = opened(tmp_path / "chat.db")
    with pytest.raises(DatabaseHeldError):
        put(backup, tmp_path / "chat.db", replace=True)
    engine.close()
    talk = Talk(1)
    talk.next_seq = 10
    engine = opened(tmp_path / "chat.db")
    looking = open_onlooker(tmp_path / "chat.db")
    with looking.reading() as reader:
        assert reader.revision(talk.session_id) == 10
        apply(engine, talk.message())
        engine.close()  # what was written stays in the log, for the reader does not see it yet
        with pytest.raises(CopyError, match="reading"):
            put(backup, tmp_path / "chat.db", replace=True)
    looking.close()
    assert messages_in(tmp_path / "chat.db") == 11


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, MissingFileError),
        (b"", ForeignFileError),
        (bytes(8192), ForeignFileError),
        (b"no database, but something of the length of one" * 200, ForeignFileError),
    ],
    ids=["missing", "empty", "zeroed", "other"],
)
def test_what_is_no_backup_replaces_nothing(
    backup: Path, tmp_path: Path, content: bytes | None, error: type[Exception]
) -> None:
    bad = tmp_path / "bad.db"
    if content is not None:
        bad.write_bytes(content)
    with pytest.raises(error):
        put(bad, tmp_path / "chat.db", replace=True)
    assert messages_in(tmp_path / "chat.db") == 10
    assert not any("partial" in one or "before" in one for one in names_in(tmp_path))


def test_a_folder_or_somebody_elses_database_is_no_backup(backup: Path, tmp_path: Path) -> None:
    execute(tmp_path / "other.db", "CREATE TABLE t (x)")
    for bad, error in ((tmp_path, OpenError), (tmp_path / "other.db", ForeignFileError)):
        with pytest.raises(error):
            put(bad, tmp_path / "chat.db", replace=True)
    assert messages_in(tmp_path / "chat.db") == 10


def execute(path: Path, sql: str) -> None:
    db = apsw.Connection(str(path))
    db.execute(sql)
    db.close()


def test_a_damaged_or_newer_backup_replaces_nothing(backup: Path, tmp_path: Path) -> None:
    truncated = tmp_path / "truncated.db"
    content = backup.read_bytes()
    for size in (len(content) // 2, len(content) - 4096, 100):
        truncated.write_bytes(content[:size])
        with pytest.raises((DamagedFileError, ForeignFileError)):
            put(truncated, tmp_path / "chat.db", replace=True)
    torn = tmp_path / "torn.db"
    torn.write_bytes(content[: 4096 * 5] + b"\x55" * 4096 + content[4096 * 6 :])
    with pytest.raises(DamagedFileError):
        put(torn, tmp_path / "chat.db", replace=True)
    execute(backup, "PRAGMA user_version = 1000")
    with pytest.raises(NewerSchemaError):
        put(backup, tmp_path / "chat.db", replace=True)
    assert messages_in(tmp_path / "chat.db") == 10


def test_a_damaged_database_can_be_replaced_and_is_kept_as_it_is(
    backup: Path, tmp_path: Path
) -> None:
    """That is what a backup is for."""
    database = tmp_path / "chat.db"
    for number, content in enumerate((bytes(8192), database.read_bytes()[:9000], b"x" * 5000)):
        database.write_bytes(content)
        (tmp_path / "chat.db-wal").write_bytes(b"no log")  # opens by hand: nobody has it open
        restored = put(backup, database, replace=True)
        assert restored.kept is not None
        kept = tmp_path / os.path.basename(restored.kept)
        assert kept.read_bytes() == content, number
        assert check_database(database) == []
        assert messages_in(database) == 3


KILLED = """
import os, sys
from onepen.runtime.system import SystemClock
from onepen.storage.sqlite.restore import restore
from onepen.storage.upkeep import unhurried

left, watching = int(sys.argv[3]), False

def watch(event, arguments):
    global left
    if watching and event in ("os.link", "os.rename", "os.remove", "open", "fcntl.flock"):
        left -= 1
        if left < 0:
            os._exit(9)

def tick(stage, done, total):
    global watching
    watching = True

sys.addaudithook(watch)
restore(sys.argv[1], sys.argv[2], SystemClock(), tick, pages_step=1000, replace=True)
"""


def test_killed_at_any_step_it_leaves_the_old_database_or_the_new_one(
    backup: Path, tmp_path: Path
) -> None:
    """With the log of a killed process beside the old one: each is whole, with its own log."""
    engine = opened(tmp_path / "chat.db")
    talk = Talk(1)
    talk.next_seq = 10
    apply(engine, *(talk.message() for _ in range(5)))
    start = tmp_path / "start"
    start.mkdir()
    for name in ("chat.db", "chat.db-wal"):
        shutil.copy(tmp_path / name, start / name)
    engine.close()
    seen: list[int] = []
    for number in range(40):
        place = tmp_path / f"killed-{number}"
        shutil.copytree(start, place)
        command = [sys.executable, "-c", KILLED, str(backup), str(place / "chat.db"), str(number)]
        done = subprocess.run(command, check=False)
        reopened = opened(place / "chat.db")
        reopened.close()
        assert check_database(place / "chat.db") == []
        seen.append(messages_in(place / "chat.db"))
        if done.returncode == 0:
            break
        assert done.returncode == 9
        put(backup, place / "chat.db", replace=True)  # and again, over what it had left
        assert messages_in(place / "chat.db") == 3
        assert not any(one.endswith((".partial", "-wal")) for one in names_in(place))
    assert seen[0] == 15
    assert seen[-1] == 3
    assert set(seen) == {3, 15}
    assert len(seen) >= 6, "the second name, its folder twice, the place, its folder, the end"


def test_killed_at_any_step_over_a_damaged_database_it_keeps_all_of_it(
    backup: Path, tmp_path: Path
) -> None:
    """Its log can't be folded into it: both have a second name before either loses its first."""
    damaged, log = b"x" * 5_000, b"the log"
    endings: list[int] = []
    for number in range(40):
        place = tmp_path / f"killed-{number}"
        place.mkdir()
        (place / "chat.db").write_bytes(damaged)  # opens by hand: no database
        (place / "chat.db-wal").write_bytes(log)  # opens by hand: no log
        command = [sys.executable, "-c", KILLED, str(backup), str(place / "chat.db"), str(number)]
        done = subprocess.run(command, check=False)
        endings.append(done.returncode)
        kept = sorted(place.glob("chat.db.before-restore-*"))
        if (place / "chat.db-wal").exists():  # opens by hand: it is only looked for
            assert (place / "chat.db").read_bytes() == damaged  # opens by hand: no database
        else:
            assert [file.read_bytes() for file in kept] == [damaged, log]
        if (place / "chat.db").read_bytes() != damaged:  # opens by hand: nobody has it open
            assert check_database(place / "chat.db") == []
        if done.returncode == 0:
            break
        put(backup, place / "chat.db", replace=True)
        assert messages_in(place / "chat.db") == 3
    assert endings == [9] * (len(endings) - 1) + [0]
    assert len(endings) >= 8


def test_a_backup_from_before_an_upgrade_can_be_restored(backup: Path, tmp_path: Path) -> None:
    """The next opening brings it forward."""
    old = closed_file(tmp_path / "old") / DATABASE
    restored = put(old, tmp_path / "chat.db", replace=True)
    assert restored.copied.messages > 3
    opened(tmp_path / "chat.db").close()
    assert check_database(tmp_path / "chat.db") == []


async def test_a_restored_database_is_served_like_any_other(tmp_path: Path) -> None:
    """Epoch and incarnations went back with everything else; ids never repeat."""

    async def agent(turn: object) -> str:
        return "yes"

    path, copy = tmp_path / "live.db", tmp_path / "backup.db"
    async with open_runtime(path, agent=agent) as runtime:
        await runtime.ask("chat:1", Inbound("one", id="in-1"))
        told: list[str] = []
        await runtime.backup(copy, progress=lambda stage, done, total: told.append(stage))
        assert {"copying", "checking"} == set(told)
        await runtime.ask("chat:1", Inbound("two", id="in-2"))
        lost = await runtime.ask("chat:2", "never to be seen again")
    await trio.to_thread.run_sync(lambda: put(copy, path, replace=True))
    async with open_runtime(path, agent=agent) as runtime:
        again = await runtime.ask("chat:1", Inbound("one", id="in-1"))
        assert again.text == "yes"
        for number in range(3):
            await runtime.ask("chat:1", Inbound(f"after {number}", id=f"in-{number + 2}"))
        fresh = await runtime.ask("chat:2", "hello")
        assert fresh.session_id != lost.session_id
    assert check_database(path) == []


async def test_a_cancelled_backup_leaves_nothing_and_the_runtime_goes_on(tmp_path: Path) -> None:
    async def agent(turn: object) -> str:
        return "yes"

    settings = replace(SETTINGS, backup_pages_step=1, backup_pause_s=0.01)
    async with open_runtime(
        tmp_path / "chat.db", agent=agent, settings=Settings(engine=settings)
    ) as runtime:
        await runtime.ask("chat:1", "one")
        with trio.CancelScope() as scope:
            await runtime.backup(
                tmp_path / "backup.db", progress=lambda stage, done, total: scope.cancel()
            )
        assert scope.cancelled_caught
        assert not [name for name in os.listdir(tmp_path) if name.startswith("backup")]
        await runtime.ask("chat:1", "two")
        await runtime.backup(tmp_path / "backup.db")
    assert check_database(tmp_path / "backup.db") == []


def test_deliveries_can_be_held(backup: Path, tmp_path: Path) -> None:
    """What may have been sent since the backup is for a person to decide."""
    engine = opened(tmp_path / "chat.db")
    talk = Talk(2)
    posts = [
        c.PostDelivery(delivery_id=f"d{n}", key=talk.key, source="s", target={}, body={}, at_ms=1)
        for n in range(3)
    ]
    begun = c.MarkDelivery(delivery_id="d1", attempt=1, state="sending", at_ms=2)
    apply(engine, talk.opening(), *(Unit((post,)) for post in posts), Unit((begun,)))
    engine.backup(tmp_path / "open.db")
    engine.close()
    restored = restore(
        tmp_path / "open.db",
        tmp_path / "new.db",
        StillClock(),
        unhurried,
        pages_step=100,
        hold=lambda path: hold_deliveries(path, StillClock()),
    )
    assert restored.held == 3
    engine = opened(tmp_path / "new.db")
    with engine.reading() as reader:
        assert reader.open_deliveries() == ()
        found, _ = reader.deliveries(state="unknown")
    engine.close()
    assert [one.id for one in found] == ["d2", "d1", "d0"]
    assert {one.error for one in found} == {
        "held by a restore: whether it was sent after the backup is not known"
    }
    assert check_database(tmp_path / "new.db") == []
    assert not [name for name in os.listdir(tmp_path) if "partial" in name]
