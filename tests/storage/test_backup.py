"""Backups: whole or not there, of one moment, beside whoever writes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import apsw
import pytest
from msgspec.structs import replace

from onepen import EngineSettings, open_sqlite
from onepen.runtime.testing import Disk, Failure, Fault
from onepen.runtime.testing.invariants import check_database, logical_dump
from onepen.storage.errors import CopyError, DamagedFileError, DatabaseHeldError, StorageError
from onepen.storage.sqlite import open_onlooker
from onepen.storage.sqlite.backup import back_up
from onepen.storage.upkeep import unhurried
from tests.actors.fixtures import StillClock, Talk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from onepen.storage.sqlite import SqliteEngine
    from onepen.storage.units import Unit

SETTINGS = EngineSettings(free_bytes_min=0, backup_pages_step=5)


class Stopped(BaseException):
    """Somebody does not want it any more."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SqliteEngine]:
    opened = open_sqlite(tmp_path / "chat.db", StillClock(), SETTINGS)
    yield opened
    opened.close()


def apply(engine: SqliteEngine, *units: Unit) -> None:
    engine.stage(units)
    engine.commit()


def talk_in(engine: SqliteEngine, messages: int = 30) -> Talk:
    talk = Talk(1)
    apply(engine, talk.opening(), *(talk.message("word " * 800) for _ in range(messages)))
    return talk


def names_in(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("chat.db"))


def test_a_backup_is_of_one_moment_and_delays_no_commit(
    engine: SqliteEngine, tmp_path: Path
) -> None:
    """Written to between any two steps, it is still the database as it was when it began."""
    talk = talk_in(engine)
    before = logical_dump(tmp_path / "chat.db")
    stages: list[tuple[str, int, int]] = []

    def write(stage: str, done: int, total: int) -> None:
        stages.append((stage, done, total))
        if stage == "copying":
            apply(engine, talk.message("and on it goes " * 100))

    target = tmp_path / "backup.db"
    copied = engine.backup(target, write)
    assert (copied.path, copied.sessions, copied.messages) == (str(target), 1, 30)
    assert copied.verified
    assert copied.commit_seq < engine.statistics().commit_seq
    assert logical_dump(target) == before
    assert check_database(target) == []
    assert len({step for step in stages if step[0] == "copying"}) > 5, "it was throttled"
    assert [stage for stage, done, total in stages if done == total] == ["copying", "checking"]


def test_a_backup_is_one_private_file(engine: SqliteEngine, tmp_path: Path) -> None:
    """INV-21: nothing beside it, readable for its owner only, also where nothing can be written."""
    talk_in(engine)
    engine.backup(tmp_path / "backup.db")
    assert names_in(tmp_path) == ["backup.db"]
    assert stat.S_IMODE(os.stat(tmp_path / "backup.db").st_mode) == 0o600
    looking = open_onlooker(tmp_path / "backup.db")
    with looking.reading() as reader:
        assert reader.revision(Talk(1).session_id) == 30
    looking.close()
    assert names_in(tmp_path) == ["backup.db"], "not even for reading it needs another file"


def test_a_backup_opens_as_an_ordinary_database(engine: SqliteEngine, tmp_path: Path) -> None:
    talk = talk_in(engine)
    engine.backup(tmp_path / "backup.db")
    copy = open_sqlite(tmp_path / "backup.db", StillClock(), SETTINGS)
    apply(copy, talk.message("here it goes on"))
    copy.close()
    assert check_database(tmp_path / "backup.db") == []
    assert names_in(tmp_path) == ["backup.db", "backup.db.lock"]


def test_a_database_in_memory_can_be_backed_up(tmp_path: Path) -> None:
    engine = open_sqlite(None, StillClock(), SETTINGS)
    talk_in(engine)
    engine.backup(tmp_path / "backup.db")
    engine.close()
    assert len(logical_dump(tmp_path / "backup.db")["messages"]) == 30


def test_a_file_that_another_process_owns_can_be_backed_up(
    engine: SqliteEngine, tmp_path: Path
) -> None:
    """Read-only: the command line's way, here in a process of its own."""
    talk_in(engine)
    command = [sys.executable, "-m", "onepen", "backup", str(tmp_path / "backup.db"), "--json"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "chat.db")], check=True, capture_output=True
    )
    assert b'"messages":30' in done.stdout
    assert logical_dump(tmp_path / "backup.db") == logical_dump(tmp_path / "chat.db")


def test_what_is_there_is_not_overwritten(engine: SqliteEngine, tmp_path: Path) -> None:
    """Neither a file nor the database itself, nor one that somebody owns."""
    talk_in(engine)
    target = tmp_path / "backup.db"
    target.write_bytes(b"mine")
    with pytest.raises(CopyError, match="already"):
        engine.backup(target)
    assert target.read_bytes() == b"mine"
    for name in ("chat.db", "."):
        with pytest.raises(CopyError):
            engine.backup(tmp_path / name, replace=True)
    with pytest.raises(CopyError, match="folder does not exist"):
        engine.backup(tmp_path / "nowhere" / "backup.db")
    other = open_sqlite(tmp_path / "other.db", StillClock(), SETTINGS)
    with pytest.raises(DatabaseHeldError):
        engine.backup(tmp_path / "other.db", replace=True)
    other.close()
    engine.backup(target, replace=True)
    assert len(logical_dump(target)["messages"]) == 30


def test_a_file_that_comes_meanwhile_is_not_overwritten(
    engine: SqliteEngine, tmp_path: Path
) -> None:
    talk_in(engine)
    target = tmp_path / "backup.db"

    def come(stage: str, done: int, total: int) -> None:
        if not target.exists():
            target.write_bytes(b"mine")

    with pytest.raises(CopyError, match="already"):
        engine.backup(target, come)
    assert target.read_bytes() == b"mine"
    assert names_in(tmp_path) == ["backup.db"]


def test_a_log_that_lies_there_is_not_taken_for_the_backups(
    engine: SqliteEngine, tmp_path: Path
) -> None:
    """SQLite would apply it to the new file: it checks the log only, not whose it is."""
    talk_in(engine)
    stray = tmp_path / "backup.db-wal"  # opens by hand: made up, and no database
    stray.write_bytes((tmp_path / "nothing").name.encode())
    with pytest.raises(CopyError, match="log without its database"):
        engine.backup(tmp_path / "backup.db")
    (tmp_path / "backup.db").write_bytes(b"old")  # opens by hand: no database
    engine.backup(tmp_path / "backup.db", replace=True)
    assert names_in(tmp_path) == ["backup.db"]


def test_stopped_at_any_step_it_leaves_nothing(engine: SqliteEngine, tmp_path: Path) -> None:
    talk_in(engine)
    steps: list[str] = []
    engine.backup(tmp_path / "whole.db", lambda stage, done, total: steps.append(stage))
    assert {"copying", "checking"} == set(steps)
    for number in range(len(steps)):
        left = number

        def stop(stage: str, done: int, total: int) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Stopped

        with pytest.raises(Stopped):
            engine.backup(tmp_path / "backup.db", stop)
        assert names_in(tmp_path) == ["whole.db"], number


def test_a_killed_backup_leaves_nothing_under_the_name_and_is_cleared_away_by_the_next(
    engine: SqliteEngine, tmp_path: Path
) -> None:
    talk_in(engine)
    script = (
        "import os, signal, sys\n"
        "from onepen.storage.sqlite import open_onlooker\n"
        "from onepen.runtime.system import SystemClock\n"
        "def tick(stage, done, total):\n"
        "    if stage == sys.argv[3]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "open_onlooker(sys.argv[1]).backup(sys.argv[2], SystemClock(), tick)\n"
    )
    for stage in ("copying", "checking"):
        command = [sys.executable, "-c", script, str(tmp_path / "chat.db")]
        done = subprocess.run([*command, str(tmp_path / "backup.db"), stage], check=False)
        assert done.returncode == -9
        left = names_in(tmp_path)
        assert "backup.db" not in left
        assert "backup.db.partial" in left
    engine.backup(tmp_path / "backup.db")
    assert names_in(tmp_path) == ["backup.db"]


def test_two_backups_to_one_name_do_not_mix(engine: SqliteEngine, tmp_path: Path) -> None:
    talk_in(engine)
    refused = 0

    def again(stage: str, done: int, total: int) -> None:
        nonlocal refused
        with pytest.raises(CopyError, match="somebody else"):
            engine.backup(tmp_path / "backup.db")
        refused += 1

    engine.backup(tmp_path / "backup.db", again)
    assert refused > 3
    assert check_database(tmp_path / "backup.db") == []


def test_a_finished_backup_whose_second_name_was_left_is_not_emptied(
    engine: SqliteEngine, tmp_path: Path
) -> None:
    """Killed between giving it its name and taking the old one away."""
    talk_in(engine)
    engine.backup(tmp_path / "backup.db")
    os.link(tmp_path / "backup.db", tmp_path / "backup.db.partial")
    with pytest.raises(CopyError, match="already"):
        engine.backup(tmp_path / "backup.db")
    engine.backup(tmp_path / "backup.db", replace=True)
    assert check_database(tmp_path / "backup.db") == []
    os.link(tmp_path / "backup.db", tmp_path / "second.db.partial")
    engine.backup(tmp_path / "second.db")
    assert check_database(tmp_path / "backup.db") == []


def test_without_room_nothing_is_begun(tmp_path: Path) -> None:
    """With the room that the running database needs for itself left free."""
    settings = replace(SETTINGS, free_bytes_min=2**60)
    open_sqlite(tmp_path / "chat.db", StillClock(), SETTINGS).close()
    looking = open_onlooker(tmp_path / "chat.db", settings)
    steps: list[str] = []
    with pytest.raises(CopyError, match="are needed"):
        looking.backup(
            tmp_path / "backup.db", StillClock(), lambda stage, done, total: steps.append(stage)
        )
    looking.close()
    assert steps == []
    assert names_in(tmp_path) == []


def test_a_damaged_database_makes_no_backup(tmp_path: Path) -> None:
    """A backup that can't be trusted is worse than none: the last good one may be thrown away."""
    engine = open_sqlite(tmp_path / "chat.db", StillClock(), SETTINGS)
    talk_in(engine)
    engine.close()
    db = apsw.Connection(str(tmp_path / "chat.db"))
    root: Any = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'messages_place'").get
    db.close()
    with open(tmp_path / "chat.db", "r+b") as file:  # opens by hand: nobody has it open
        file.seek((root - 1) * 4096)
        file.write(b"\x55" * 4096)
    looking = open_onlooker(tmp_path / "chat.db", SETTINGS)
    with pytest.raises(DamagedFileError):
        looking.backup(tmp_path / "backup.db", StillClock())
    looking.close()
    assert names_in(tmp_path) == []


def test_a_damaged_search_index_is_backed_up_with_a_warning(
    engine: SqliteEngine, tmp_path: Path
) -> None:
    """It is derived data: the messages are what must be kept."""
    talk_in(engine)
    while engine.maintain(idle=True):
        pass
    db = apsw.Connection(str(tmp_path / "chat.db"))
    db.execute("UPDATE search_index_data SET block = x'00' WHERE id > 10")
    db.close()
    copied = engine.backup(tmp_path / "backup.db")
    assert copied.warnings
    assert len(logical_dump(tmp_path / "backup.db")["messages"]) == 30


def test_reopening_after_an_error_waits_for_no_backup(engine: SqliteEngine, tmp_path: Path) -> None:
    """A held snapshot would be in the way of the checkpoint that recovery needs."""
    import threading

    talk = talk_in(engine)
    began, go_on = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def tick(stage: str, done: int, total: int) -> None:
        began.set()
        assert go_on.wait(10)

    def run() -> None:
        try:
            engine.backup(tmp_path / "backup.db", tick)
        except StorageError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(10)
    threading.Timer(0.05, go_on.set).start()
    engine.reopen()
    thread.join(10)
    assert "reopened" in str(errors[0])
    apply(engine, talk.message())
    assert names_in(tmp_path) == []


def test_an_error_of_the_disk_at_any_operation_leaves_nothing(tmp_path: Path) -> None:
    """PROOF-5 for backups: EIO, a full disk, a short write, a sync that drops what it had."""
    original = open_sqlite(tmp_path / "chat.db", StillClock(), SETTINGS)
    talk_in(original, 3)
    original.close()
    target = tmp_path / "backup.db"

    def run(fault: Fault) -> tuple[int, int, bool]:
        """How many operations there were, how many of them failed, and whether it was made."""
        source = apsw.Connection(str(tmp_path / "chat.db"), flags=apsw.SQLITE_OPEN_READONLY)
        with Disk(tmp_path, faults=[fault]) as disk:
            try:
                back_up(source, target, StillClock(), unhurried, pages_step=5, vfs=disk.name)
            except StorageError:
                assert names_in(tmp_path) == []
            operations, fired = disk.operations, len(disk.fired)
        source.close()
        made = target.exists()
        if made:
            assert check_database(target) == []
            target.unlink()
        return operations, fired, made

    operations, fired, made = run(Fault(1_000_000))
    assert (operations > 20, fired, made) == (True, 0, True)
    failed = 0
    for failure in Failure:
        for number in range(0, operations, 1 if failure is Failure.EIO else 5):
            _, fired, made = run(Fault(number, failure))
            failed += bool(fired) and not made
    assert failed > operations
