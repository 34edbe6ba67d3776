"""The demo's verdict: green for what a gateway leaves, red for each way in which it may be wrong.

The script is run to its end in this process, without a kill; each damage is done to the closed
file. Then the real thing, with processes and a kill: whole, and with a message taken away.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import apsw
import msgspec
import pytest
import trio
from click.testing import CliRunner

from onepen.actors.replies import reply_text
from onepen.runtime.demo.__main__ import main
from onepen.runtime.demo.account import account, at_the_kill, wrong_in
from onepen.runtime.demo.gateway import Script, serve
from onepen.runtime.demo.stored import Stored, look
from onepen.runtime.demo.told import Accepted, Told
from onepen.storage.records import TurnOutcome

if TYPE_CHECKING:
    from pathlib import Path

    from onepen.runtime.demo.told import Line

SCRIPT = Script(conversations=4, turns=12, seed=3)

# A part of the name of the line that must turn red, and what is done to the file.
DAMAGE = {
    "lost": "DELETE FROM messages WHERE role = 'user' AND text LIKE '2/11 %'",
    "stored exactly once": (
        "UPDATE messages SET text = text || '!' WHERE role = 'user' AND text LIKE '2/11 %'"
    ),
    "stored twice": (
        "UPDATE messages SET role = 'user', text = (SELECT text FROM messages WHERE role = 'user' "
        "AND text LIKE '2/11 %') WHERE text = 're 2/11'"
    ),
    "out of order": (
        "UPDATE messages SET text = replace(text, '2/11 ', '2/0 ') "
        "WHERE role = 'user' AND text LIKE '2/11 %'"
    ),
    "of another key": (
        "UPDATE messages SET text = replace(text, '2/11 ', '1/11 ') "
        "WHERE role = 'user' AND text LIKE '2/11 %'"
    ),
    "of nobody": ("UPDATE messages SET text = 'a word that nobody said' WHERE text = 're 2/11'"),
    "lineages": (
        "UPDATE sessions SET key = 'demo:1' WHERE key = 'demo:2' AND end_kind = 'rotation'"
    ),
    "turns ended": "UPDATE turns SET state = 'running', ended_ms = NULL WHERE n = 1",
    "each key where told": "UPDATE routes SET session_id = 'elsewhere' WHERE key = 'demo:2'",
    "replies told": "UPDATE messages SET text = 'something else' WHERE text = 're 2/11'",
    "current session": "UPDATE routes SET session_id = NULL WHERE key = 'demo:2'",
    "none torn": "UPDATE sessions SET end_kind = 'boundary' WHERE end_kind = 'rotation'",
    "valid for a model": "DELETE FROM messages WHERE role = 'tool'",
    "outbox, each shown": "UPDATE deliveries SET state = 'pending' WHERE n = 1",
    "not in the outbox": (
        "DELETE FROM deliveries WHERE n = (SELECT max(n) FROM deliveries WHERE turn IS NOT NULL)"
    ),
    "shown out of order": (
        "UPDATE deliveries SET n = -1 WHERE n = (SELECT max(n) FROM deliveries)"
    ),
    "invariant": "UPDATE heads SET next_seq = next_seq + 1",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Line]]:
    path, lines = tmp_path_factory.mktemp("demo") / "demo.db", list["Line"]()
    told = lines.append
    trio.run(serve, path, SCRIPT, [0] * SCRIPT.conversations, told, told)
    return path, lines


@pytest.fixture
def finished(served: tuple[Path, list[Line]]) -> tuple[Path, Told]:
    """The file, and a memory of its own for each test."""
    path, lines = served
    told = Told(SCRIPT.conversations)
    for line in lines:
        told.note(line)
    return path, told


def wrong(told: Told, stored: Stored, at_kill: Stored | None = None) -> set[str]:
    """The lines that are red."""
    before = at_the_kill(told, at_kill or stored)
    facts = account(SCRIPT, told, before, stored)
    return set(wrong_in(facts))


def test_what_a_gateway_leaves_is_in_order(finished: tuple[Path, Told]) -> None:
    """Green, with something behind every line that counts."""
    path, told = finished
    stored = look(path, SCRIPT)
    assert wrong(told, stored) == set()
    assert told.total == len(stored.messages) == SCRIPT.conversations * SCRIPT.turns
    assert stored.rotations
    assert told.switches > SCRIPT.conversations


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_turns_its_line_red(finished: tuple[Path, Told], tmp_path: Path, name: str) -> None:
    path, told = finished
    copy = tmp_path / "copy.db"
    shutil.copyfile(path, copy)
    db = apsw.Connection(str(copy))
    db.execute(DAMAGE[name])
    assert db.changes() > 0
    db.close()
    assert any(name in line for line in wrong(told, look(copy, SCRIPT)))


def test_a_turn_that_was_cut_off_must_be_marked(finished: tuple[Path, Told]) -> None:
    """It counts as interrupted by the crash, or as a further attempt; nothing else is an excuse."""
    path, told = finished
    stored, at_kill = look(path, SCRIPT), look(path, SCRIPT)
    place = next(p for p, turn in stored.turns.items() if turn.outcome is not None)
    turn = stored.turns[place]
    del told.replies[place]  # nobody was told the end of a turn that was running
    at_kill.turns[place] = type(turn)(id=turn.id, key=turn.key, state="running")
    assert wrong(told, stored, at_kill) == {"turns running at the kill, marked or resumed"}
    crash = TurnOutcome(kind="interrupted", cause="crash")
    stored.turns[place] = type(turn)(id=turn.id, key=turn.key, state="ended", outcome=crash)
    # The user is told so; nothing else would be the turn's last word.
    assert wrong(told, stored, at_kill) == {"answers that are not in the outbox"}
    stored.deliveries = [
        msgspec.structs.replace(d, body={"text": reply_text(crash)}) if d.turn_id == turn.id else d
        for d in stored.deliveries
    ]
    assert wrong(told, stored, at_kill) == set()


def test_a_message_that_was_only_promised_is_lost(finished: tuple[Path, Told]) -> None:
    """The account is as good a place for a lie as the file."""
    path, told = finished
    stored = look(path, SCRIPT)
    told.note(Accepted(2, SCRIPT.turns, again=False))
    assert {"lost", "stored exactly once", "lost by the kill"} <= wrong(told, stored)


def test_a_reply_that_says_something_else_than_the_row_is_wrong(
    finished: tuple[Path, Told],
) -> None:
    path, told = finished
    stored = look(path, SCRIPT)
    place, reply = next((p, r) for p, r in told.replies.items() if r.outcome == "answered")
    told.replies[place] = msgspec.structs.replace(reply, text="re 0/99")
    assert "replies told, each stored" in wrong(told, stored)


def test_what_was_sent_and_never_shown_is_wrong_and_a_repeat_is_counted(
    finished: tuple[Path, Told],
) -> None:
    """The platform's word against the file's."""
    path, told = finished
    stored = look(path, SCRIPT)
    first = next(iter(told.shown.values()))
    told.note(first)
    assert told.shown_again == 1
    assert wrong(told, stored) == set()
    del told.shown[first.delivery]
    assert wrong(told, stored) == {"messages in the outbox, each shown"}


def test_a_message_that_is_stored_in_another_conversation_too(
    finished: tuple[Path, Told], tmp_path: Path
) -> None:
    """A row more, with everything else of it in order: only its text says whose it is."""
    path, told = finished
    copy = tmp_path / "copy.db"
    shutil.copyfile(path, copy)
    db = apsw.Connection(str(copy))
    db.execute(
        "INSERT INTO messages (session, seq, uid, role, state, carried, kind, created_ms, text) "
        "SELECT h.session, h.next_seq, randomblob(16), 'user', 0, 0, 0, 0, "
        "(SELECT text FROM messages WHERE role = 'user' AND text LIKE '2/11 %') "
        "FROM routes r JOIN sessions s ON s.id = r.session_id JOIN heads h ON h.session = s.n "
        "WHERE r.key = 'demo:1'"
    )
    assert db.changes() == 1
    db.close()
    assert "of another key, or of nobody" in wrong(told, look(copy, SCRIPT))


SMALL = ["--sessions", "24", "--turns", "6"]


@pytest.mark.slow
def test_the_demo_kills_a_gateway_and_accounts_for_everything() -> None:
    command = [sys.executable, "-m", "onepen.runtime.demo", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every message once, in order" in done.stdout
    assert "144 of 144 messages" in done.stdout  # plain lines, as nobody looks at a terminal


@pytest.mark.slow
def test_the_demo_fails_if_a_message_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken from the file behind the second gateway's back, before anybody looks."""
    looks = list[Stored]()

    def look_late(path: Path, script: Script) -> Stored:
        if looks:
            db = apsw.Connection(str(path))
            db.execute("DELETE FROM messages WHERE role = 'user' AND text LIKE '2/5 %'")
            db.close()
        looks.append(look(path, script))
        return looks[-1]

    monkeypatch.setattr("onepen.runtime.demo.__main__.look", look_late)
    done = CliRunner().invoke(main, SMALL)
    assert done.exit_code == 1, done.output
    assert "FAILED: stored exactly once, lost" in done.output
    assert "every message once" not in done.output
