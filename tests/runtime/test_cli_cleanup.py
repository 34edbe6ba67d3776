"""`onepen prune`, `erase`, `sessions delete|archive|pin`: shown first, asked, then done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from onepen import Inbound, open_runtime

from ..contract.agents import query, sound
from ..contract.test_g_cleanup import Clock, ended, lose_a_child, write
from .scripted import echo
from .typed import answered, refused, typed

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Long ago: a session that is over, one that is current, an orphan, a row without anything."""
    path, clock = tmp_path / "chat.db", Clock()
    clock.pass_days(-2_000)  # whatever this machine's clock says, that is long ago

    async def talk() -> None:
        async with open_runtime(path, agent=echo, clock=clock) as runtime:
            await runtime.ask("telegram:1", Inbound("old news", user="ada"))
            await runtime.set_title("telegram:1", "Old")
            await runtime.reset("telegram:1")
            await runtime.ask("web:1", Inbound("hello", user="bob"))
            await runtime.ask("web:1", Inbound("my secret", user="ada"))
            await lose_a_child(runtime, "irc:1")

    trio.run(talk)
    write(path, *ended(clock.now()))
    return path


def test_pruning_is_shown_first_and_asked_for(database: Path) -> None:
    """Nothing goes by a dry run, by a no, or without somebody who could be asked."""
    arguments: tuple[Any, ...] = ("prune", "-d", database, "--older-than", "90d", "--source")
    dry = answered(*arguments, "telegram", "--dry-run")
    assert (dry["pruned"]["count"], dry["pruned"]["sessions"][0]["title"]) == (1, "Old")
    assert "would be deleted" in typed(*arguments, "telegram", "--dry-run").stdout
    refused(*arguments, "telegram", "--json", exit_code=2)
    said = typed(*arguments, "telegram", says="n\n")
    assert "nothing was changed" in said.stdout
    assert query(database, "SELECT count(*) FROM sessions WHERE deleted") == [(0,)]
    said = typed(*arguments, "telegram", says="y\n")
    assert "1 sessions with 2 messages were deleted" in said.stdout
    assert query(database, "SELECT count(*) FROM sessions WHERE deleted") == [(1,)]
    assert answered(*arguments, "telegram", "--yes")["pruned"] is None
    sound(database)


def test_empty_and_orphaned_sessions_are_pruned_on_request(database: Path) -> None:
    """G1, G3."""
    dry = answered("prune", "-d", database, "--empty", "--orphaned", "--dry-run")
    assert (dry["empty"], dry["orphaned"]) == (1, 1)
    done = answered("prune", "-d", database, "--empty", "--orphaned", "--yes")
    assert (done["empty"], done["orphaned"]) == (1, 1)
    assert "nothing to do" in typed("prune", "-d", database, "--empty", "--dry-run").stdout
    sound(database)


def test_what_is_to_be_pruned_must_be_said(database: Path, tmp_path: Path) -> None:
    refused("prune", "-d", database, exit_code=2)
    refused("prune", "-d", database, "--older-than", "soon", exit_code=2)
    refused("prune", "-d", tmp_path / "no.db", "--empty", "--yes", exit_code=4)


def test_a_user_is_erased(database: Path) -> None:
    """In a session of their own, and in one that another shares; which keeps its rows."""
    dry = answered("erase", "-d", database, "ada", "--dry-run")
    assert (dry["only"], dry["shared"]) == (1, 1)
    assert "nothing was changed" in typed("erase", "-d", database, "ada", says="n\n").stdout
    done = answered("erase", "-d", database, "ada", "--yes")
    assert (done["sessions_deleted"], done["rows_blanked"]) == (1, 1)
    assert answered("search", "-d", database, "secret OR news", "--role", "user")["hits"] == []
    rows = query(database, "SELECT text, user FROM messages WHERE role = 'user' ORDER BY n")
    assert ("hello", "bob") in rows
    assert ("", None) in rows
    sound(database)


def test_a_session_is_deleted_archived_and_pinned(database: Path) -> None:
    """By its title, its id or the beginning of one; the current one too, as nobody is at work."""
    (listed,) = answered("sessions", "list", "-d", database, "--key", "web:1")
    session_id = listed["session"]["id"]
    assert answered("sessions", "archive", "-d", database, session_id)["changed"]
    assert not answered("sessions", "archive", "-d", database, session_id)["changed"]
    assert answered("sessions", "list", "-d", database, "--key", "web:1") == []
    assert answered("sessions", "archive", "-d", database, session_id, "--undo")["changed"]
    assert answered("sessions", "pin", "-d", database, "Old")["pinned"]
    assert "would be" in typed("sessions", "delete", "-d", database, "Old", "--dry-run").stdout
    assert "nothing" in typed("sessions", "delete", "-d", database, "Old", says="n\n").stdout
    assert answered("sessions", "delete", "-d", database, session_id, "--yes")["deleted"]
    assert not answered("sessions", "delete", "-d", database, session_id, "--yes")["deleted"]
    refused("sessions", "delete", "-d", database, "nobody", "--yes", exit_code=4)
    routes = query(database, "SELECT session_id FROM routes WHERE key = 'web:1'")
    assert routes != [(session_id,)]
    sound(database)


async def test_a_file_that_is_served_is_left_alone(database: Path) -> None:
    """And the message says who has it; looking works all the same."""
    async with open_runtime(database, agent=echo):

        def run() -> None:
            answered("prune", "-d", database, "--older-than", "90d", "--dry-run")
            said = refused("prune", "-d", database, "--older-than", "90d", "--yes", exit_code=3)
            assert "process" in said
            refused("erase", "-d", database, "ada", "--yes", exit_code=3)

        await trio.to_thread.run_sync(run)
