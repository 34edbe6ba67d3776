"""PROOF-6, INV-19: killed in the middle of a deletion or of an erasing, and finished after."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from onepen import open_runtime
from onepen.runtime.testing.invariants import check_database

from ..contract.agents import query
from ..proving import PROOF
from .clearing import agent

ROOT = Path(__file__).resolve().parents[2]
DELETING = range(1, 8) if PROOF else (1, 2, 4, 6)
ERASING = range(1, 9) if PROOF else (1, 3, 6, 8)


def killed(path: Path, what: str, nth: int) -> str:
    """Run it until it dies; the long session's id."""
    command = [sys.executable, "-m", "tests.crash.clearing", str(path), what, str(nth)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL, done
    return done.stdout.decode().strip()


@pytest.mark.parametrize("nth", DELETING)
async def test_a_deletion_that_was_killed_is_finished_by_the_next_start(
    tmp_path: Path, nth: int
) -> None:
    """Begun, it goes on by itself; not begun, the session is whole."""
    path = tmp_path / "chat.db"
    session_id = killed(path, "delete", nth)
    assert check_database(path) == []
    async with open_runtime(path, agent=agent) as runtime:
        (row,) = query(path, f"SELECT deleted FROM sessions WHERE id = '{session_id}'")
        left = await runtime.sessions.transcript(session_id)
        assert bool(left) != bool(row[0])
        if not row[0]:
            await runtime.delete(session_id)
        with trio.fail_after(10):
            while query(path, "SELECT count(*) FROM purges") != [(0,)]:
                await trio.testing.wait_all_tasks_blocked(0.001)
    assert query(path, "SELECT count(*) FROM messages WHERE text LIKE 'pelican%'") == [(0,)]
    assert check_database(path) == []


@pytest.mark.parametrize("nth", ERASING)
async def test_an_erasing_that_was_killed_is_finished_by_another(tmp_path: Path, nth: int) -> None:
    """What is blank stays blank, and the rest is still found; nobody else loses anything."""
    path = tmp_path / "chat.db"
    killed(path, "erase", nth)
    assert check_database(path) == []
    async with open_runtime(path, agent=agent) as runtime:
        await runtime.erase("ann")
        again = await runtime.erase("ann")
        assert (again.sessions_deleted, again.rows_blanked, again.turns_blanked) == (0, 0, 0)
    assert query(path, "SELECT count(*) FROM messages WHERE user = 'ann'") == [(0,)]
    assert query(path, "SELECT count(*) FROM messages WHERE text LIKE 'ann says%'") == [(0,)]
    assert query(path, "SELECT count(*) FROM messages WHERE text LIKE 'bob says%'") == [(30,)]
    assert check_database(path) == []
