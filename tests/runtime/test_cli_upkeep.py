"""`onepen doctor`, `backup` and `restore`, as a person or a script types them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import apsw
import msgspec
import pytest
import trio

from onepen import open_runtime

from .scripted import echo
from .typed import answered, refused, typed

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "chat.db"

    async def talk() -> None:
        async with open_runtime(path, agent=echo) as runtime:
            await runtime.ask("telegram:1", "good morning")
            await runtime.ask("telegram:1", "again")

    trio.run(talk)
    return path


def damage(path: Path, sql: str) -> None:
    db = apsw.Connection(str(path))
    db.execute(sql)
    db.close()


def test_nothing_is_wrong_with_a_sound_database(database: Path) -> None:
    assert "nothing is wrong" in typed("doctor", "-d", database).stdout
    assert answered("doctor", "-d", database, "--full") == []


def test_what_is_wrong_is_shown_and_ends_with_1(database: Path) -> None:
    damage(database, "UPDATE heads SET message_count = 9")
    result = typed("doctor", "-d", database, exit_code=1)
    assert "message_count counts the originals" in result.stdout
    assert "--repair" in result.stderr
    (found,) = msgspec.json.decode(typed("doctor", "-d", database, "--json", exit_code=1).stdout)
    assert (found["repairable"], found["severity"]) == (True, "error")


def test_a_repair_says_what_it_did_and_where_the_copy_is(database: Path, tmp_path: Path) -> None:
    damage(database, "UPDATE heads SET message_count = 9; DELETE FROM search_state")
    said = typed("doctor", "-d", database, "--repair").stdout
    assert "was counted again" in said
    assert "the search index was made again" in said
    assert "nothing is wrong" in said
    (kept,) = tmp_path.glob("chat.db.before-repair-*")
    assert kept.name in said
    again = answered("doctor", "-d", database, "--repair")
    assert again == {"kept": None, "done": [], "left": []}
    assert "nothing is wrong" in typed("doctor", "-d", database, "--full").stdout


def test_what_can_not_be_mended_ends_with_1(database: Path) -> None:
    damage(database, "UPDATE messages SET text = CAST(x'ff' AS TEXT) WHERE n = 1")
    result = typed("doctor", "-d", database, "--repair", exit_code=1)
    assert "not valid UTF-8" in result.stdout


def test_what_somebody_added_is_a_warning(database: Path) -> None:
    damage(database, "CREATE TABLE mine (x)")
    assert "not ours" in typed("doctor", "-d", database).stdout


def test_a_file_that_can_not_be_opened_is_an_error(database: Path, tmp_path: Path) -> None:
    refused("doctor", "-d", tmp_path / "nothing.db", exit_code=4)
    zeroed = tmp_path / "zeroed.db"
    zeroed.write_bytes(bytes(8192))
    for words in (("doctor",), ("doctor", "--repair"), ("backup", tmp_path / "x.db")):
        assert "zeroed" in refused(*words, "-d", zeroed, exit_code=1)
    assert zeroed.read_bytes() == bytes(8192)


async def test_a_database_in_use_is_looked_at_and_copied_and_not_mended(
    database: Path, tmp_path: Path
) -> None:
    async with open_runtime(database, agent=echo) as runtime:
        await runtime.ask("telegram:1", "and again")
        assert answered("doctor", "-d", database) == []
        copied = answered("backup", tmp_path / "backup.db", "-d", database)
        assert copied["messages"] == 6
        for words in (("doctor", "--repair"), ("restore", tmp_path / "backup.db", "--replace")):
            damaged = "UPDATE heads SET message_count = 9"
            await trio.to_thread.run_sync(damage, database, damaged)
            assert "owns it" in typed(*words, "-d", database, exit_code=3).stderr
        assert [one.kind for one in await runtime.check()] == ["message_count counts the originals"]


def test_a_backup_is_made_and_put_back(database: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup.db"
    said = typed("backup", backup, "-d", database, "--pages-per-step", 2, "--pause", 0)
    assert "4 messages in 1 sessions" in said.stdout
    assert "copying: begins" in said.stderr
    assert "already" in typed("backup", backup, "-d", database, exit_code=1).stderr
    typed("backup", backup, "-d", database, "--replace")
    assert "already" in typed("restore", backup, "-d", database, exit_code=1).stderr
    said = typed("restore", backup, "-d", database, "--replace", "--hold-deliveries")
    assert "the database before is kept" in said.stdout
    assert "nothing is wrong" in typed("doctor", "-d", database).stdout
    restored = answered("restore", backup, "-d", tmp_path / "new.db")
    assert restored["kept"] is None
    refused("restore", tmp_path / "no.db", "-d", database, exit_code=4)
