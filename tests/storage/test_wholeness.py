"""Files that are not what they should be: a clear error each, and the file stays as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import apsw
import pytest

from onepen import EngineSettings, open_sqlite
from onepen.runtime.repairing import repair
from onepen.runtime.testing.invariants import logical_dump
from onepen.storage.errors import (
    DamagedFileError,
    ForeignFileError,
    MissingFileError,
    NewerSchemaError,
    OpenError,
)
from onepen.storage.sqlite import open_onlooker
from onepen.storage.upkeep import unhurried
from tests.actors.fixtures import StillClock, Talk
from tests.crash.campaign import scratch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SETTINGS = EngineSettings(free_bytes_min=0)


class LaterClock(StillClock):
    """Of a database that was made at another time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms += 1


def make(path: Path, messages: int = 20, *, clock: StillClock | None = None) -> Path:
    engine = open_sqlite(path, clock or StillClock(), SETTINGS)
    talk = Talk(1)
    engine.stage([talk.opening(), *(talk.message("word " * 500) for _ in range(messages))])
    engine.commit()
    engine.close()
    return path


def ways(path: Path) -> dict[str, Callable[[], Any]]:
    """Everything that opens a file."""
    return {
        "reading": lambda: open_onlooker(path).close(),
        "writing": lambda: open_sqlite(path, StillClock(), SETTINGS).close(),
        "repairing": lambda: repair(path, StillClock(), unhurried),
    }


def files_in(folder: Path) -> dict[str, bytes]:
    """But for locks, what is made again from the log, and a log that has nothing in it."""
    return {
        name: content
        for name in sorted(os.listdir(folder))
        if (folder / name).is_file() and not name.endswith((".lock", "-shm"))
        if (content := (folder / name).read_bytes()) or not name.endswith("-wal")
    }


def check_refused(path: Path, error: type[Exception], words: str) -> None:
    before = files_in(path.parent)
    for way, run in ways(path).items():
        with pytest.raises(error, match=words):
            run()
        assert files_in(path.parent) == before, way


def changed(path: Path, how: str) -> None:
    content = path.read_bytes()  # opens by hand: nobody has it open
    into = {
        "zeroed": bytes(len(content)),
        "first page zeroed": bytes(4096) + content[4096:],
        "noise": content[::-1],
        "text": b"shopping list: " * 900,
        "half": content[: len(content) // 2],
        "a page short": content[:-4096],
        "50 bytes": content[:50],
    }
    path.write_bytes(into[how])  # opens by hand: nobody has it open


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("zeroed", ForeignFileError, "zeroed"),
        ("first page zeroed", ForeignFileError, "zeroed"),
        ("noise", ForeignFileError, "may be encrypted"),
        ("text", ForeignFileError, "something else"),
        ("half", DamagedFileError, "truncated: "),
        ("a page short", DamagedFileError, "truncated: "),
        ("50 bytes", DamagedFileError, "truncated: 50 bytes"),
    ],
)
def test_a_file_that_was_damaged_is_refused_and_left_as_it_is(
    tmp_path: Path, how: str, error: type[Exception], words: str
) -> None:
    path = make(tmp_path / "chat.db")
    changed(path, how)
    check_refused(path, error, words)


def test_a_folder_and_nothing_at_all_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    check_refused(folder, OpenError, "not a regular file")
    for way, run in ways(tmp_path / "nothing.db").items():
        if way != "writing":
            with pytest.raises(MissingFileError):
                run()
    assert files_in(folder) == {}


def test_an_empty_file_is_not_repaired_into_a_database(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    path.write_bytes(b"")
    for way in ("reading", "repairing"):
        with pytest.raises(ForeignFileError, match="empty"):
            ways(path)[way]()
    assert path.read_bytes() == b""  # opens by hand: nobody has it open


def test_a_file_of_a_newer_version_is_left_as_it_is(tmp_path: Path) -> None:
    path = make(tmp_path / "chat.db")
    db = apsw.Connection(str(path))
    db.pragma("user_version", 1_000)
    db.close()
    check_refused(path, NewerSchemaError, "version 1000")


def test_a_log_of_another_database_is_not_copied_in(tmp_path: Path) -> None:
    """It is whole and of the same shape; SQLite would take it for this file's own."""
    path = make(tmp_path / "chat.db")
    original = logical_dump(path)
    other = tmp_path / "other"
    other.mkdir()
    engine = open_sqlite(make(other / "chat.db", 3, clock=LaterClock()), StillClock(), SETTINGS)
    talk = Talk(1)
    talk.next_seq = 3
    engine.stage([talk.message("another conversation " * 100) for _ in range(5)])
    engine.commit()
    shutil.copy(other / "chat.db-wal", tmp_path / "chat.db-wal")
    engine.close()
    before = files_in(tmp_path)
    with pytest.raises(DamagedFileError, match="belongs to another file"):
        open_sqlite(path, StillClock(), SETTINGS)
    assert files_in(tmp_path) == before
    (tmp_path / "chat.db-wal").unlink()  # as the hint says
    open_sqlite(path, StillClock(), SETTINGS).close()
    assert logical_dump(path) == original


def test_a_log_from_before_is_not_copied_in(tmp_path: Path) -> None:
    """The same database, but an older log: of a copy that somebody put back in part."""
    path = make(tmp_path / "chat.db")
    engine = open_sqlite(path, StillClock(), SETTINGS)
    talk = Talk(1)
    talk.next_seq = 20
    engine.stage([talk.message("early")])
    engine.commit()
    shutil.copy(tmp_path / "chat.db-wal", tmp_path / "old-wal")
    engine.stage([talk.message("late")])
    engine.commit()
    engine.close()
    shutil.copy(tmp_path / "old-wal", tmp_path / "chat.db-wal")
    with pytest.raises(DamagedFileError, match="belongs to another file"):
        open_sqlite(path, StillClock(), SETTINGS)
    (tmp_path / "chat.db-wal").unlink()
    assert len(logical_dump(path)["messages"]) == 22


def test_a_log_without_its_shared_memory_is_its_own(tmp_path: Path) -> None:
    """As a copy of a killed process's files has it: all of it is there."""
    path = make(tmp_path / "chat.db")
    engine = open_sqlite(path, StillClock(), SETTINGS)
    talk = Talk(1)
    talk.next_seq = 20
    engine.stage([talk.message("in the log only")])
    engine.commit()
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in ("chat.db", "chat.db-wal"):
        shutil.copy(tmp_path / name, killed / name)
    engine.close()
    looking = open_onlooker(killed / "chat.db")
    assert looking.check() == []
    looking.close()
    open_sqlite(killed / "chat.db", StillClock(), SETTINGS).close()
    assert len(logical_dump(killed / "chat.db")["messages"]) == 21


UNPRIVILEGED = """
import os, sys
from onepen.storage.errors import OpenError
from onepen.storage.sqlite import open_onlooker, open_sqlite
from onepen.runtime.system import SystemClock
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for way in (lambda: open_onlooker(sys.argv[1]), lambda: open_sqlite(sys.argv[1], SystemClock())):
    try:
        way()
    except OpenError as error:
        print(type(error).__name__, error)
    else:
        print("opened")
"""


def as_nobody(path: Path) -> list[str]:
    """What somebody is told who may do less than root."""
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, str(path)], check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()


def test_a_file_that_may_not_be_read_or_a_folder_that_may_not_be_written() -> None:
    """As on a read-only file system. Said in words, with a hint; nothing changes."""
    with scratch() as root:  # not below pytest's folders, which other runs of it close to others
        path = make(root / "chat.db")
        os.chmod(root, 0o555)
        before = files_in(root)
        for mode in (0o000, 0o444):
            os.chmod(path, mode)
            (root / "chat.db.lock").unlink(missing_ok=True)
            said = as_nobody(path)
            assert all(line.startswith("OpenError ") and "check" in line for line in said), said
            assert len(said) == 2
            os.chmod(path, 0o600)
            assert files_in(root) == before
        os.chmod(root, 0o755)
