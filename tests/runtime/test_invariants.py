"""Every rule of `check_database` finds its damage, and a sound database has none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import apsw
import pytest

from onepen.runtime.testing.invariants import (
    Violation,
    check_database,
    compare,
    inspecting,
    logical_dump,
)
from onepen.runtime.testing.workloads import WORKLOADS
from onepen.storage.errors import ForeignFileError
from onepen.storage.sqlite.rules import RULES

from ..crash.campaign import DATABASE, Rig

if TYPE_CHECKING:
    from pathlib import Path

# For each rule: the workload that makes the database, and the damage.
DAMAGE = {
    "one pen": ("set_mark", "UPDATE pen SET epoch = 0"),
    "every session has its head": ("set_mark", "DELETE FROM heads"),
    "seqs are 0 to next_seq - 1": ("append_messages", "DELETE FROM messages WHERE seq = 1"),
    "a tombstone has no text": ("delete_session", "UPDATE sessions SET user = 'ann'"),
    "what is left of a tombstone is to be purged": ("delete_session", "DELETE FROM purges"),
    "no original is left in a tombstone that was carried on": (
        "delete_session",
        "DROP INDEX messages_original; UPDATE messages SET carried = 1 - carried",
    ),
    "message_count counts the originals": (
        "append_messages",
        "UPDATE heads SET message_count = message_count + 1",
    ),
    "tool_call_count counts the calls": ("append_messages", "UPDATE heads SET tool_call_count = 7"),
    "active_count counts the active rows": (
        "rewind",
        "UPDATE heads SET active_count = active_count - 1",
    ),
    "active_bytes adds up the active rows": (
        "append_messages",
        "UPDATE messages SET text = text || 'é' WHERE seq = 0",
    ),
    "no active row stands before first_active": ("compact", "UPDATE heads SET first_active = 6"),
    "a revision moves with its transcript": ("append_messages", "UPDATE heads SET revision = 0"),
    "an original is there once": (
        "rotate_in_a_turn",
        "DROP INDEX messages_original; UPDATE messages SET carried = 0",
    ),
    "a session has a message once": (
        "append_messages",
        "DROP INDEX messages_original; UPDATE messages SET uid = (SELECT min(uid) FROM messages)",
    ),
    "what is summarised has its summary": (
        "compact",
        "UPDATE messages SET summarised_by = 99 WHERE summarised_by IS NOT NULL",
    ),
    "a session is in one route at most": (
        "set_mark",
        "CREATE TABLE r AS SELECT * FROM routes; DROP TABLE routes; ALTER TABLE r RENAME TO routes;"
        "INSERT INTO routes SELECT 'other', session_id, 1, NULL, NULL, 0, 0, 0, 0 FROM routes",
    ),
    "a route never names a session that was rotated away": (
        "rotate",
        "UPDATE routes SET session_id = 'ann-1'",
    ),
    "a route names a session of its own key": ("take_over", "UPDATE sessions SET key = 'chat:ann'"),
    "a rotation has one child": (
        "end_session",
        "UPDATE sessions SET end_kind = 'rotation', end_reason = 'compression'",
    ),
    "a rotation's parent has ended by compression": (
        "rotate",
        "UPDATE sessions SET ended_ms = NULL, end_reason = NULL, end_kind = NULL",
    ),
    "an end has its time, reason and kind": (
        "end_session",
        "UPDATE sessions SET end_reason = NULL",
    ),
    "a route's version is its number of changes": (
        "set_route",
        "DELETE FROM changes WHERE aspect = 'route' AND version = 1",
    ),
    "a pending title's version is its number of changes": (
        "set_pending_title",
        "UPDATE routes SET pending_title_version = 0",
    ),
    "a brake's version is its number of changes": (
        "count_useless_compressions",
        "UPDATE routes SET compression_version = 2",
    ),
    "a title's version is its number of changes": (
        "set_title",
        "UPDATE sessions SET title_version = 1",
    ),
    "the flags' version is its number of changes": (
        "set_flags",
        "DELETE FROM changes WHERE aspect = 'flags'",
    ),
    "the details' version is its number of changes": (
        "set_details",
        "UPDATE changes SET version = 2 WHERE aspect = 'details'",
    ),
    "an end's version is its number of changes": (
        "reopen_session",
        "UPDATE sessions SET end_version = 1",
    ),
    "a turn's state agrees with its fields": ("end_turn", "UPDATE turns SET outcome = NULL"),
    "a message's turn is stored": (
        "append_messages",
        "UPDATE messages SET turn = 99 WHERE seq = 0",
    ),
    "cost adds up the calls": ("add_usage", "UPDATE sessions SET cost_nanos = 1"),
    "tokens add up the calls": ("add_usage", "UPDATE usage SET input = input + 1"),
    "a sealed blob has all its pieces": ("append_messages", "UPDATE chunks SET data = x'00'"),
    "a blob's use is a message's": ("append_messages", "UPDATE blob_uses SET seq = 99"),
    "a message's blob is stored": ("append_messages", "DELETE FROM blob_uses"),
}


def database(directory: Path, name: str) -> Path:
    """A closed database, as a workload leaves it."""
    load = WORKLOADS[name]
    rig = Rig(directory)
    for unit in load.preparation:
        rig.engine.stage([unit])
        rig.engine.commit()
    rig.run(load.steps)
    rig.engine.close()
    assert rig.violations == []
    return directory / DATABASE


def damage(path: Path, sql: str) -> None:
    db = apsw.Connection(str(path))
    try:
        db.execute(sql)
    finally:
        db.close()


def test_there_is_damage_for_every_rule() -> None:
    """PROOF-8: no rule is without a test of its own."""
    assert DAMAGE.keys() == RULES.keys()


@pytest.mark.parametrize("rule", DAMAGE)
def test_the_rule_finds_its_damage(tmp_path: Path, rule: str) -> None:
    """PROOF-8 for INV-1, INV-4, INV-5 and INV-6: a checker must be able to fail."""
    name, sql = DAMAGE[rule]
    path = database(tmp_path, name)
    assert check_database(path) == []
    damage(path, sql)
    assert rule in {violation.rule for violation in check_database(path)}


def test_a_second_child_of_a_rotation_is_found(tmp_path: Path) -> None:
    """INV-6: the conversation has one tip."""
    path = database(tmp_path, "rotate")
    damage(
        path,
        "DROP INDEX sessions_rotation;"
        "INSERT INTO sessions (id, key, parent, edge, source, started_ms) "
        "SELECT 'twin', key, parent, edge, source, started_ms FROM sessions "
        "WHERE parent IS NOT NULL;"
        "INSERT INTO heads VALUES (last_insert_rowid(), 0, 0, 0, 0, 0, 0, 0, 0, 0)",
    )
    assert {v.rule for v in check_database(path)} == {"a rotation has one child"}


def test_a_broken_reference_is_found(tmp_path: Path) -> None:
    """Foreign keys are checked first: the rules rely on them."""
    path = database(tmp_path, "append_messages")
    damage(path, "DELETE FROM sessions")
    assert {v.rule for v in check_database(path)} == {"foreign_key_check"}


def test_a_page_that_belongs_to_nothing_is_found(tmp_path: Path) -> None:
    """What SQLite itself calls damage is a violation too."""
    path = database(tmp_path, "append_messages")
    db = apsw.Connection(str(path))
    db.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)
    db.pragma("writable_schema", 1)
    db.execute("UPDATE sqlite_schema SET rootpage = 0 WHERE name = 'sessions_key'")
    db.execute("DELETE FROM sqlite_schema WHERE name = 'sessions_key'")
    db.close()
    assert {v.rule for v in check_database(path)} == {"integrity_check"}


def test_looking_leaves_no_trace(tmp_path: Path) -> None:
    """The check may run beside a backup or a demo: it makes no files and changes no byte."""
    path = database(tmp_path, "rotate")
    before = path.read_bytes()
    assert check_database(path) == []
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == [DATABASE, f"{DATABASE}.lock"]


def test_a_database_in_use_is_seen_as_of_its_last_commit(tmp_path: Path) -> None:
    """INV-17: what is in the log belongs to the database."""
    rig = Rig(tmp_path)
    for unit in WORKLOADS["set_mark"].preparation:
        rig.engine.stage([unit])
        rig.engine.commit()
    assert check_database(tmp_path / DATABASE) == []
    assert len(logical_dump(tmp_path / DATABASE)["messages"]) == 4
    rig.engine.close()


def test_a_snapshot_lasts_as_long_as_its_block(tmp_path: Path) -> None:
    """Rules and dump of one inspection are about the same state."""
    load = WORKLOADS["append_messages"]
    rig = Rig(tmp_path)
    for unit in load.preparation:
        rig.engine.stage([unit])
        rig.engine.commit()
    with inspecting(tmp_path / DATABASE) as db:
        assert db.execute("SELECT count(*) FROM messages").fetchall() == [(4,)]
        rig.run(load.steps)
        assert db.execute("SELECT count(*) FROM messages").fetchall() == [(4,)]
    rig.engine.close()


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    """An empty list for a file of somebody else's would be a lie."""
    damage(tmp_path / "other.db", "CREATE TABLE t (x)")
    with pytest.raises(ForeignFileError):
        check_database(tmp_path / "other.db")


def test_a_comparison_names_the_tables_that_differ(tmp_path: Path) -> None:
    """A failing campaign must say where to look."""
    path = database(tmp_path, "append_messages")
    before = logical_dump(path)
    assert compare(before, before) == []
    damage(path, "DELETE FROM messages WHERE seq = 2")
    (difference,) = compare(before, logical_dump(path))
    assert isinstance(difference, Violation)
    assert difference.rule == "content of messages"
    assert "surplus []" in str(difference)
