"""An import whose process is killed: what shows is whole, and the next one brings the rest."""

import signal
import subprocess
import sys
from pathlib import Path

from onepen.runtime.testing.conversation import Conversation
from onepen.runtime.testing.invariants import check_database
from onepen.storage.engine import EngineSettings
from onepen.storage.sqlite.engine import open_sqlite

from ..properties.histories import StillClock
from ..storage.transferring import exported

SESSIONS = 150
TURNS = 6


def importing(database: Path, file: Path, units: int = -1) -> int:
    """Import in a process of its own, which is killed before a unit; its return code."""
    program = [sys.executable, "-m", "tests.crash.killed_importing", str(database), str(file)]
    return subprocess.run([*program, str(units)], check=False, capture_output=True).returncode


def test_an_import_that_is_killed_goes_on_and_shows_whole_lineages_only(tmp_path: Path) -> None:
    """H3: killed at several places, one after the other in the same file, then to its end."""
    engine = open_sqlite(None, StillClock(), EngineSettings(synchronous="NORMAL"))
    try:
        for number in range(SESSIONS):
            chat = Conversation(f"n{number}")
            story = [*chat.opening()]
            for turn in range(TURNS):
                story += chat.exchange(f"turn{turn}")
            guard = chat.guard()
            story += [chat.guarded(guard, chat.rotate(2, 3)), *chat.exchange("last")]
            engine.stage(story)
            engine.commit()
        first = exported(engine)
    finally:
        engine.close()
    file, database = tmp_path / "big.jsonl", tmp_path / "copy.db"
    file.write_bytes(first)
    seen: list[int] = []
    for units in (0, 3, 9, 9, 12):
        assert importing(database, file, units) == -signal.SIGKILL
        assert check_database(database) == []
        copy = open_sqlite(database, StillClock())
        try:
            with copy.reading() as reader:
                listed, after = reader.listing(limit=SESSIONS + 1)
                assert after is None
                for one in listed:  # the tip is there, so all that it came from is, too
                    assert [s.next_seq for s in reader.lineage(one.id)] == [4 * TURNS, 7]
            seen.append(len(listed))
        finally:
            copy.close()
    assert seen == sorted(seen)
    assert 0 < seen[-1] < SESSIONS
    assert importing(database, file) == 0
    copy = open_sqlite(database, StillClock())
    try:
        assert exported(copy) == first
    finally:
        copy.close()
    assert check_database(database) == []
