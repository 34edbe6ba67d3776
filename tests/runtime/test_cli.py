"""The command line itself: results, errors, exit codes; and the commands that list and show."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import apsw
import msgspec
import pytest
import trio

from onepen import Inbound, open_runtime

from .scripted import echo
from .typed import answered, refused, typed

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Two conversations, one with a title."""
    path = tmp_path / "chat.db"

    async def talk() -> None:
        async with open_runtime(path, agent=echo) as runtime:
            await runtime.ask("telegram:1", "good morning")
            await runtime.ask("telegram:1", "again")
            await runtime.set_title("telegram:1", "Greetings")
            await runtime.ask("web:1", Inbound("\x1b[31mred [bold]alert[/bold]\x07", user="ada"))

    trio.run(talk)
    return path


def test_sessions_are_listed_the_last_one_first(database: Path) -> None:
    listed = answered("sessions", "list", "-d", database)
    assert [one["session"]["key"] for one in listed] == ["web:1", "telegram:1"]
    assert listed[1]["session"]["title"] == "Greetings"
    assert listed[1]["session"]["archived"] is False  # defaults are there, too
    only = answered("sessions", "list", "-d", database, "--source", "telegram")
    assert [one["session"]["key"] for one in only] == ["telegram:1"]
    said = typed("sessions", "list", "-d", database).stdout
    assert "Greetings" in said
    assert "alert" in said


def test_a_list_that_is_cut_says_so(database: Path) -> None:
    result = typed("sessions", "list", "-d", database, "--limit", 1)
    assert "there are more" in result.stderr


def test_a_session_is_shown_by_its_title(database: Path) -> None:
    said = typed("sessions", "show", "-d", database, "Greetings").stdout
    assert said.index("good morning") < said.index("again")
    shown = answered("sessions", "show", "-d", database, "Greetings", "--last", 1)
    assert [message["role"] for message in shown["messages"]] == ["assistant"]


def test_text_of_a_conversation_is_shown_as_text(database: Path) -> None:
    """No markup in it is obeyed, and no escape sequence reaches the terminal."""
    (listed, _) = answered("sessions", "list", "-d", database)
    said = typed("sessions", "show", "-d", database, listed["session"]["id"]).stdout
    assert "\x1b" not in said
    assert "\x07" not in said
    assert "[bold]alert[/bold]" in said


def test_what_is_not_there_has_an_exit_code_of_its_own(database: Path, tmp_path: Path) -> None:
    assert "is not stored" in refused("sessions", "show", "-d", database, "nobody", exit_code=4)
    said = refused("sessions", "list", "-d", tmp_path / "nothing.db", exit_code=4)
    assert "no such file" in said
    assert not (tmp_path / "nothing.db").exists()


def test_errors_are_json_for_programs(tmp_path: Path) -> None:
    said = refused("sessions", "list", "-d", tmp_path / "no.db", "--json", exit_code=4)
    assert msgspec.json.decode(said)["error"]["kind"] == "MissingFileError"


def test_a_file_that_is_not_ours_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    for content in (b"", b"shopping list: eggs, flour, and more than sixteen bytes"):
        path.write_bytes(content)
        refused("sessions", "list", "-d", path, exit_code=1)
        assert path.read_bytes() == content


def test_a_file_of_an_older_version_is_not_changed_by_looking(database: Path) -> None:
    db = apsw.Connection(str(database))
    version = db.pragma("user_version")
    db.pragma("user_version", 1)
    db.close()
    said = refused("sessions", "list", "-d", database, exit_code=1)
    assert "schema is version 1" in said
    db = apsw.Connection(str(database))
    assert (db.pragma("user_version"), version > 1) == (1, True)
    db.close()


async def test_looking_works_while_a_process_owns_the_file(database: Path) -> None:
    async with open_runtime(database, agent=echo) as runtime:
        await runtime.ask("web:2", "just now")
        # Another process, as an operator's would be.
        done = await trio.run_process(
            [sys.executable, "-m", "onepen", "sessions", "list", "-d", str(database), "--json"],
            capture_stdout=True,
        )
        await runtime.ask("web:2", "and on it goes")
    keys = [one["session"]["key"] for one in msgspec.json.decode(done.stdout)]
    assert keys[0] == "web:2"


def test_the_database_may_come_from_the_environment(database: Path) -> None:
    """And the script that is installed is the same program."""
    script = os.path.join(os.path.dirname(sys.executable), "onepen")
    done = subprocess.run(
        [script, "sessions", "list", "--json"],
        env={**os.environ, "ONEPEN_DATABASE": str(database)},
        check=True,
        capture_output=True,
    )
    assert len(msgspec.json.decode(done.stdout)) == 2


def test_the_database_must_be_named() -> None:
    result = typed("sessions", "list", exit_code=2)
    assert "ONEPEN_DATABASE" in result.stderr


def test_words_are_found_in_all_conversations(database: Path) -> None:
    """K2: marked for people, as records for programs; an odd query is no error."""
    found = answered("search", "-d", database, "alert", "--role", "user")
    (hit,) = found["hits"]
    assert (hit["key"], hit["message"]["user"]) == ("web:1", "ada")
    assert "«" in hit["snippet"]
    said = typed("search", "-d", database, "good morning", "--newest").stdout
    assert "good morning" in said
    assert "Greetings" in said
    assert "nothing was found" in typed("search", "-d", database, 'NEAR("').stdout
    assert "nothing was found" in typed("search", "-d", database, "--", "-x").stdout


def test_a_search_is_narrowed_down(database: Path) -> None:
    for filters, count in (
        (("--source", "telegram"), 4),
        (("--key", "web:1"), 2),
        (("--session", "Greetings"), 4),
        (("--user", "ada"), 2),
        (("--since", "2100-01-01"), 0),
        (("--until", "2100-01-01", "--limit", 3), 3),
    ):
        found = answered("search", "-d", database, "good OR again OR alert", *filters)
        assert len(found["hits"]) == count, filters
    for day in ("0001-01-01", "9999-12-31T23:59:59"):  # the ends of the calendar
        typed("search", "-d", database, "good", "--since", day)
    said = typed("search", "-d", database, "good OR again", "--limit", 1).stderr
    assert "there may be more" in said
    refused("search", "-d", database, "x", "--session", "nobody", exit_code=4)


def test_a_search_says_when_the_index_was_no_help(database: Path) -> None:
    """K3: damaged, it still finds everything."""
    db = apsw.Connection(str(database))
    db.execute("DELETE FROM search_state")
    db.close()
    result = typed("search", "-d", database, "alert")
    assert "alert" in result.stdout
    assert "onepen doctor" in result.stderr
