"""`check`: it finds each damage that is inflicted, and nothing in what is sound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw
import pytest

from onepen.runtime.repairing import repair
from onepen.runtime.testing.workloads import WORKLOADS
from onepen.storage.errors import DatabaseHeldError
from onepen.storage.sqlite import index_check, keep_copy, open_onlooker
from onepen.storage.sqlite.checks import CHILDREN, RECOUNTED, ROUTES, SHOWN_MAX
from onepen.storage.upkeep import Repaired, unhurried
from tests.actors.fixtures import StillClock
from tests.crash.campaign import DATABASE, Rig, do_chores

if TYPE_CHECKING:
    from onepen.storage.upkeep import Finding


def made(directory: Path, name: str, *, indexed: bool = True) -> Path:
    """A closed database, as a workload leaves it."""
    load = WORKLOADS[name]
    rig = Rig(directory)
    for unit in load.preparation:
        rig.engine.stage([unit])
        rig.engine.commit()
    rig.run(load.steps)
    if indexed:
        do_chores(rig.engine)
    rig.engine.close()
    return directory / DATABASE


def findings(path: Path, *, full: bool = False) -> list[Finding]:
    looking = open_onlooker(path)
    try:
        return looking.check(full=full)
    finally:
        looking.close()


def damage(path: Path, sql: str) -> None:
    db = apsw.Connection(str(path))
    try:
        db.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)
        db.execute(sql)
    finally:
        db.close()


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("name", WORKLOADS)
def test_nothing_is_found_in_what_the_engine_leaves(
    tmp_path: Path,
    name: str,
    indexed: bool,  # noqa: FBT001
) -> None:
    path = made(tmp_path, name, indexed=indexed)
    assert findings(path, full=indexed) == []


def kinds(path: Path, *, full: bool = False) -> set[str]:
    return {one.kind for one in findings(path, full=full)}


# For each damage: the workload that makes the database, what is done to it, and what is found.
INDEX = "search index"
MENDED = {
    "an entry of the index is gone": (
        "whole_turn",
        "DELETE FROM search_index WHERE rowid = 2",
        INDEX,
    ),
    "an entry says something else": (
        "whole_turn",
        "DELETE FROM search_index WHERE rowid = 2; "
        "INSERT INTO search_index (rowid, text, facets) VALUES (2, 'pelican', '¤1')",
        INDEX,
    ),
    "an entry is there that should not be": (
        "whole_turn",
        "INSERT INTO search_index (rowid, text, facets) VALUES (99, 'pelican', '¤1')",
        INDEX,
    ),
    "an entry has its words in another order": (
        "whole_turn",
        "DELETE FROM search_index WHERE rowid = 1; INSERT INTO search_index (rowid, text, facets) "
        "SELECT 1, 'question first', '¤1'",
        INDEX,
    ),
    "the index says that it goes further": (
        "whole_turn",
        "INSERT INTO messages SELECT 1000, session, 1000, randomblob(16), turn, role, 2, 1, kind, "
        "created_ms, user, text, details, NULL, NULL, NULL FROM messages LIMIT 1; "
        "DELETE FROM messages WHERE n = 1000; UPDATE search_state SET first_n = 0; "
        "DELETE FROM search_index WHERE rowid = 1",
        INDEX,
    ),
    "the state of the index is gone": ("whole_turn", "DELETE FROM search_state", INDEX),
    "a page of the index is gone": (
        "whole_turn",
        "DELETE FROM search_index_data WHERE id > 10",
        INDEX,
    ),
    "a page of the index is rubbish": (
        "whole_turn",
        "UPDATE search_index_data SET block = x'00ff00ff' WHERE id > 10",
        INDEX,
    ),
    "the structure of the index is gone": (
        "whole_turn",
        "DELETE FROM search_index_data WHERE id = 10",
        INDEX,
    ),
    "a shadow table is gone": ("whole_turn", "DROP TABLE search_index_docsize", INDEX),
    "the index is gone": ("whole_turn", "DROP TABLE search_index", INDEX),
    "an index of a table is gone": ("whole_turn", "DROP INDEX messages_place", "schema"),
    "an index of a table is another": (
        "whole_turn",
        "DROP INDEX sessions_key; CREATE INDEX sessions_key ON sessions (id)",
        "schema",
    ),
    "a trigger is gone": ("whole_turn", "DROP TRIGGER messages_gone", "schema"),
    "an index lacks what the table has": (
        "whole_turn",
        "DROP INDEX turns_session; CREATE INDEX turns_session ON turns (session) WHERE 0; "
        "PRAGMA writable_schema = 1; UPDATE sqlite_schema SET sql = "
        "'CREATE INDEX turns_session ON turns (session) WHERE session IS NOT NULL' "
        "WHERE name = 'turns_session'; PRAGMA writable_schema = RESET",
        "structure",
    ),
    "counts are wrong": (
        "append_messages",
        "UPDATE heads SET message_count = 77, active_count = 1, active_bytes = -3, "
        "tool_call_count = 9",
        "message_count counts the originals",
    ),
    "active rows are passed over": (
        "compact",
        "UPDATE heads SET first_active = 6",
        "no active row stands before first_active",
    ),
    "a transcript was not revised": (
        "rewind",
        "UPDATE heads SET revision = 0",
        "a revision moves with its transcript",
    ),
    "the next seq is one that was given": (
        "append_messages",
        "UPDATE heads SET next_seq = 1",
        "seqs are 0 to next_seq - 1",
    ),
    "a head is gone": ("rotate", "DELETE FROM heads", "every session has its head"),
    "usage does not add up": (
        "add_usage",
        "UPDATE sessions SET cost_nanos = 1, tokens = '{\"input\":3}'",
        "cost adds up the calls",
    ),
    "usage can't be read": (
        "add_usage",
        "UPDATE sessions SET tokens = '{'",
        "tokens add up the calls",
    ),
    "a rotation has no child": (
        "end_session",
        "UPDATE sessions SET end_kind = 'rotation', end_reason = 'compression', "
        "end_version = end_version + 1",
        "a rotation has one child",
    ),
    "a route names a parent that was rotated away": (
        "rotate",
        "UPDATE routes SET session_id = 'ann-1'",
        "a route never names a session that was rotated away",
    ),
}


@pytest.mark.parametrize("name", MENDED)
def test_damage_that_can_be_mended_is_found_and_mended(tmp_path: Path, name: str) -> None:
    """G4, H3, K3: afterwards a second look finds nothing, and the messages are what they were."""
    load, sql, kind = MENDED[name]
    path = made(tmp_path, load)
    assert findings(path, full=True) == []
    before = messages_of(path)
    damage(path, sql)
    found = findings(path, full=kind == "structure")
    assert kind in {one.kind for one in found}, found
    assert all(one.repairable for one in found if one.kind == kind)
    repaired = repair(path, StillClock(), unhurried)
    assert repaired.left == (), repaired
    assert repaired.done
    assert findings(path, full=True) == []
    assert messages_of(path) == before
    assert repaired.kept is not None
    assert kind in kinds(Path(repaired.kept), full=True), "it was kept as it was"
    assert repair(path, StillClock(), unhurried) == Repaired(kept=None, done=(), left=())
    assert Rig(tmp_path).violations == []


LEFT = {
    "text that is not valid UTF-8": (
        "whole_turn",
        "UPDATE messages SET text = CAST(x'ff41' AS TEXT) WHERE n = 2",
        {"rows"},
    ),
    "details that are not JSON": (
        "append_messages",
        "UPDATE messages SET details = '{' WHERE details IS NOT NULL",
        {"rows"},
    ),
    "a name that is not valid UTF-8": (
        "whole_turn",
        "UPDATE turns SET key = CAST(x'ff' AS TEXT)",
        {"rows"},
    ),
    "a message is gone": (
        "append_messages",
        "DELETE FROM messages WHERE seq = 1",
        {"seqs are 0 to next_seq - 1"},
    ),
    "a session is gone": (
        "append_messages",
        "PRAGMA foreign_keys = 0; DELETE FROM sessions",
        {"references"},
    ),
    "a table is gone": ("whole_turn", "DROP TABLE timers", {"schema"}),
    "something of somebody else's": ("whole_turn", "CREATE TABLE mine (x)", {"schema"}),
}


@pytest.mark.parametrize("name", LEFT)
def test_damage_that_can_not_be_mended_is_told_one_by_one_and_left(
    tmp_path: Path, name: str
) -> None:
    """INV-17: one row that can't be read is reported, and stops nothing."""
    load, sql, kind = LEFT[name]
    path = made(tmp_path, load)
    damage(path, sql)
    found = findings(path)
    assert kind <= {one.kind for one in found}
    assert not any(one.repairable for one in found if one.kind in kind)
    left = repair(path, StillClock(), unhurried).left
    assert kind <= {one.kind for one in left}
    assert not any(one.repairable for one in left)


def test_each_rule_that_can_be_mended_has_been(tmp_path: Path) -> None:
    covered = {kind for _, _, kind in MENDED.values()}
    also = {"tool_call_count counts the calls", "active_count counts the active rows"}
    assert {*RECOUNTED, CHILDREN, ROUTES} - covered - also == {
        "active_bytes adds up the active rows"
    }
    path = made(tmp_path, MENDED["counts are wrong"][0])
    damage(path, MENDED["counts are wrong"][1])
    assert {*also, "active_bytes adds up the active rows"} <= kinds(path)


def test_much_of_a_kind_is_counted_and_not_listed(tmp_path: Path) -> None:
    path = made(tmp_path, "whole_turn")
    damage(
        path,
        "WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c WHERE i < 500) "
        "INSERT INTO marks SELECT 'm' || i, CAST(x'ff' AS TEXT) FROM c",
    )
    found = [one for one in findings(path) if one.kind == "rows"]
    assert len(found) == SHOWN_MAX + 1
    assert found[-1].what == f"and {500 - SHOWN_MAX:,} more of this kind"


def test_a_damaged_page_of_a_table_ends_the_check(tmp_path: Path) -> None:
    path = made(tmp_path, "whole_turn")
    db = apsw.Connection(str(path))
    root: Any = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'messages'").get
    db.close()
    with open(path, "r+b") as file:  # opens by hand: nobody has it open
        file.seek((root - 1) * 4096)
        file.write(b"\x55" * 4096)
    found = findings(path)
    assert {(one.kind, one.repairable) for one in found} == {("structure", False)}
    before = path.read_bytes()  # opens by hand: nobody has it open
    repaired = repair(path, StillClock(), unhurried)
    assert (repaired.kept, repaired.done) == (None, ())
    assert {one.kind for one in repaired.left} == {"structure"}
    assert path.read_bytes() == before  # opens by hand: nobody has it open


def test_a_check_changes_nothing_and_works_beside_a_process_that_writes(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for unit in WORKLOADS["whole_turn"].preparation:
        rig.engine.stage([unit])
        rig.engine.commit()
    seq = rig.engine.statistics().commit_seq
    stages: list[str] = []
    looking = open_onlooker(tmp_path / DATABASE)
    assert looking.check(lambda stage, done, total: stages.append(stage)) == []
    looking.close()
    assert rig.engine.check(full=True) == []
    assert {"structure", "schema", "references", "rules", "rows", "index"} == set(stages)
    with pytest.raises(DatabaseHeldError):
        keep_copy(tmp_path / DATABASE, StillClock(), unhurried)
    rig.run(WORKLOADS["whole_turn"].steps)
    assert rig.engine.statistics().commit_seq > seq
    rig.engine.close()


def test_a_check_can_be_stopped(tmp_path: Path) -> None:
    path = made(tmp_path, "whole_turn")
    looking = open_onlooker(path)

    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        looking.check(stop)
    looking.close()


def messages_of(path: Path) -> list[Any]:
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        return db.execute(
            "SELECT session, seq, uid, role, state, carried, kind, text, details FROM messages"
        ).fetchall()
    finally:
        db.close()


@pytest.mark.parametrize("name", [name for name, (_, _, kind) in MENDED.items() if kind == INDEX])
def test_of_a_large_index_it_is_looked_at_which_messages_are_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its words are compared in a part of it, unless everything is asked for."""
    monkeypatch.setattr(index_check, "_ALL_MAX", 1)
    monkeypatch.setattr(index_check, "_BUCKET", 1)
    load, sql, kind = MENDED[name]
    path = made(tmp_path, load)
    assert findings(path) == []
    damage(path, sql)
    assert kind in kinds(path, full=True)
    if name not in ("an entry says something else", "an entry has its words in another order"):
        assert kind in kinds(path)
