"""Where a database lives: locks, modes, file systems, and files that are not ours."""

import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

from onepen.runtime.system import SystemClock
from onepen.runtime.testing.conversation import Conversation
from onepen.storage.engine import EngineSettings
from onepen.storage.errors import (
    DatabaseHeldError,
    EngineClosedError,
    ForeignFileError,
    LowSpaceError,
    NetworkFileSystemError,
    NewerSchemaError,
    OpenError,
    UnsupportedError,
)
from onepen.storage.sqlite import place
from onepen.storage.sqlite.connection import SQLITE_VERSION_MIN, check_sqlite_version
from onepen.storage.sqlite.engine import SqliteEngine, open_sqlite
from onepen.storage.sqlite.place import file_system_of
from onepen.storage.sqlite.schema import APPLICATION_ID, VERSION

CLOCK = SystemClock()


def opened(path: Path) -> SqliteEngine:
    return open_sqlite(path, CLOCK)


def in_a_process(path: Path) -> str:
    """What another process says when it opens the database."""
    program = (
        "import sys\n"
        "from onepen.runtime.system import SystemClock\n"
        "from onepen.storage.errors import DatabaseHeldError\n"
        "from onepen.storage.sqlite.engine import open_sqlite\n"
        "try:\n"
        "    open_sqlite(sys.argv[1], SystemClock()).close()\n"
        "except DatabaseHeldError as error:\n"
        "    print('held by', error.pid, error.since_ms is not None)\n"
        "else:\n"
        "    print('free')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


# Locks -------------------------------------------------------------------------------------------


def test_a_second_opener_gets_an_error_that_names_the_holder(tmp_path: Path) -> None:
    """INV-12: in the same process and in another one, for as long as the first is open."""
    path = tmp_path / "chat.db"
    before = CLOCK.now()
    engine = opened(path)
    try:
        with pytest.raises(DatabaseHeldError) as caught:
            opened(path)
        assert caught.value.pid == os.getpid()
        assert caught.value.since_ms is not None
        assert before <= caught.value.since_ms <= CLOCK.now()
        assert str(os.getpid()) in str(caught.value)
        assert in_a_process(path) == f"held by {os.getpid()} True"
    finally:
        engine.close()
    assert in_a_process(path) == "free"
    opened(path).close()


def test_a_refused_opener_leaves_the_holder_alone(tmp_path: Path) -> None:
    """INV-12: the holder's lock, its name in the lock file and its database go on."""
    path = tmp_path / "chat.db"
    engine = opened(path)
    try:
        for _ in range(3):
            with pytest.raises(DatabaseHeldError):
                opened(path)
        assert in_a_process(path) == f"held by {os.getpid()} True"
        engine.stage(Conversation("ann").opening())
        engine.commit()
    finally:
        engine.close()


def test_two_names_of_one_file_share_one_lock(tmp_path: Path) -> None:
    """INV-12: links are followed, to the file and to its folder."""
    path = tmp_path / "real" / "chat.db"
    path.parent.mkdir()
    (tmp_path / "folder").symlink_to(path.parent)
    (tmp_path / "file.db").symlink_to(path)
    engine = opened(tmp_path / "file.db")
    try:
        assert path.is_file()
        for name in (path, tmp_path / "folder" / "chat.db", tmp_path / "file.db"):
            with pytest.raises(DatabaseHeldError):
                opened(name)
        assert in_a_process(tmp_path / "folder" / "chat.db").startswith("held by")
    finally:
        engine.close()


def test_a_lock_file_that_nobody_wrote_names_nobody(tmp_path: Path) -> None:
    """INV-12: a holder that is just writing its name is still a holder."""
    path = tmp_path / "chat.db"
    engine = opened(path)
    try:
        (tmp_path / "chat.db.lock").write_text("half a na")
        with pytest.raises(DatabaseHeldError) as caught:
            opened(path)
        assert (caught.value.pid, caught.value.since_ms) == (None, None)
    finally:
        engine.close()


def test_a_failed_opening_gives_the_lock_back(tmp_path: Path) -> None:
    """INV-12: whoever could not open holds nothing."""
    path = tmp_path / "chat.db"
    path.write_bytes(b"not a database, and long enough to be read as one" * 100)
    for _ in range(2):
        with pytest.raises(ForeignFileError):
            opened(path)
    path.unlink()
    opened(path).close()


def test_a_closed_engine_reads_nothing(tmp_path: Path) -> None:
    """INV-15: a reader after the end gets an error, it does not wait."""
    engine = opened(tmp_path / "chat.db")
    engine.close()
    with pytest.raises(EngineClosedError), engine.reading():
        pass


# Modes and places --------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_every_file_is_private(tmp_path: Path, umask: int) -> None:
    """INV-21: the database, its log, its shared memory and its lock have mode 0600."""
    before = os.umask(umask)
    try:
        engine = opened(tmp_path / "chat.db")
    finally:
        os.umask(before)
    try:
        engine.stage(Conversation("ann").opening())
        engine.commit()
        modes = {
            path.name.removeprefix("chat.db"): stat.S_IMODE(path.stat().st_mode)
            for path in tmp_path.iterdir()
        }
    finally:
        engine.close()
    assert modes == dict.fromkeys(("", "-wal", "-shm", ".lock"), 0o600)


def test_a_folder_must_exist(tmp_path: Path) -> None:
    """INV-15: a wrong path is an error that says what to do."""
    with pytest.raises(OpenError, match="folder"):
        opened(tmp_path / "nowhere" / "chat.db")
    with pytest.raises(OpenError, match="regular file"):
        opened(tmp_path)
    assert list(tmp_path.iterdir()) == []


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:35 / /far rw,relatime shared:2 - nfs4 server:/export rw
41 40 8:2 / /far/local rw - xfs /dev/sdb1 rw
42 22 0:36 / /net/my\\040share rw - cifs //server/share rw
43 22 0:37 / /net/Gr\u00f6\u00dfe rw - nfs server:/big rw
44 22 0:38 / /people rw master:3 - ext4 /dev/sdc1 rw
45 44 0:39 / /people rw - fuse.sshfs server: rw
46 22 0:40 / /net/back\\134slash rw - 9p tag rw
this line is no mount
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/", "ext4"),
        ("/var/lib", "ext4"),
        ("/far", "nfs4"),
        ("/far/data/deep", "nfs4"),
        ("/fardata", "ext4"),
        ("/far/local/data", "xfs"),
        ("/far/localdata", "nfs4"),
        ("/net/my share/x", "cifs"),
        ("/net/Größe", "nfs"),
        ("/people/x", "fuse.sshfs"),
        ("/net/back\\slash", "9p"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount(folder: str, kind: str) -> None:
    """INV-12: longest mount point, last mount, blanks and other letters in names."""
    assert file_system_of(Path(folder), MOUNTS) == kind


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """INV-12: locks and syncs can't be trusted there; nothing is created."""

    def kind(folder: Path, table: str) -> str:
        return "nfs4"

    monkeypatch.setattr(place, "file_system_of", kind)
    with pytest.raises(NetworkFileSystemError) as caught:
        opened(tmp_path / "chat.db")
    assert caught.value.kind == "nfs4"
    assert list(tmp_path.iterdir()) == []


# Files that are not ours -------------------------------------------------------------------------


def left_as_it_was(path: Path, error: type[OpenError]) -> None:
    """The opening is refused, and neither the file nor its neighbours have changed."""

    def content() -> dict[str, str]:
        return {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest()
            for file in path.parent.iterdir()
            if not file.name.endswith(".lock")
        }

    before = content()
    with pytest.raises(error) as caught:
        opened(path)
    assert caught.value.path == str(path)
    assert content() == before


@pytest.mark.parametrize("content", [b"hello", b"hello " * 1000, bytes(4096) + b"x" * 4096])
def test_a_garbage_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """INV-20: it is left byte by byte as it was."""
    path = tmp_path / "chat.db"
    path.write_bytes(content)
    left_as_it_was(path, ForeignFileError)


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_a_database_of_another_program_is_refused(tmp_path: Path, mode: str) -> None:
    """INV-20: even its journal mode stays what it was."""
    path = tmp_path / "chat.db"
    db = apsw.Connection(str(path))
    db.pragma("journal_mode", mode)
    db.execute("CREATE TABLE theirs (x); INSERT INTO theirs VALUES (1)")
    db.close()
    left_as_it_was(path, ForeignFileError)


def test_a_database_that_only_has_a_version_is_refused(tmp_path: Path) -> None:
    """INV-20: no table, but somebody has claimed the file."""
    path = tmp_path / "chat.db"
    db = apsw.Connection(str(path))
    db.pragma("user_version", 7)
    db.close()
    left_as_it_was(path, ForeignFileError)


def test_a_newer_database_is_refused(tmp_path: Path) -> None:
    """INV-20: the error says which version it has and which one is known."""
    path = tmp_path / "chat.db"
    opened(path).close()
    db = apsw.Connection(str(path))
    db.pragma("user_version", VERSION + 3)
    db.close()
    left_as_it_was(path, NewerSchemaError)
    with pytest.raises(NewerSchemaError) as caught:
        opened(path)
    assert (caught.value.stored, caught.value.known) == (VERSION + 3, VERSION)
    assert APPLICATION_ID


# Space and versions ------------------------------------------------------------------------------


def test_writing_stops_below_the_watermark(tmp_path: Path) -> None:
    """INV-14: nothing is begun, reading goes on, and so does writing once there is room."""
    settings = EngineSettings(free_bytes_min=1_000)
    engine = open_sqlite(tmp_path / "chat.db", CLOCK, settings)
    try:
        units = Conversation("ann").opening()
        assert engine.free_bytes is not None
        assert engine.free_bytes() > 0
        engine.free_bytes = lambda: 999
        with pytest.raises(LowSpaceError) as caught:
            engine.stage(units)
        assert (caught.value.free_bytes, caught.value.free_bytes_min) == (999, 1_000)
        with engine.reading() as reader:
            assert reader.unfinished_turns() == ()
        engine.free_bytes = lambda: 1_000
        engine.stage(units)
        engine.commit()
    finally:
        engine.close()


def test_memory_has_no_watermark() -> None:
    """A6: without a file there is no disk to fill."""
    engine = open_sqlite(None, CLOCK, EngineSettings(free_bytes_min=2**62))
    try:
        assert not engine.durable
        engine.stage(Conversation("ann").opening())
        engine.commit()
    finally:
        engine.close()


@pytest.mark.parametrize("version", ["3.51.2", "3.50.9", "3.7.0", "2.8.17"])
def test_a_sqlite_with_a_known_bug_is_refused(version: str) -> None:
    """INV-2: before 3.51.3 a log that was being reset could be lost."""
    with pytest.raises(UnsupportedError, match=version):
        check_sqlite_version(version)


def test_a_sound_sqlite_is_accepted() -> None:
    """INV-2: numbers are compared as numbers."""
    for version in ("3.51.3", "3.51.10", "3.100.0", "4.0.0", None):
        check_sqlite_version(version)
    assert SQLITE_VERSION_MIN == (3, 51, 3)
