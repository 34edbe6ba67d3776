"""How a file gets its tables, and how an older one becomes current."""

from pathlib import Path

import apsw
import pytest

from onepen.runtime.system import SystemClock
from onepen.runtime.testing.conformance.agreement import names_in, views_of
from onepen.runtime.testing.invariants import check_database
from onepen.runtime.testing.workloads import WORKLOADS
from onepen.storage.errors import NewerSchemaError, OpenError
from onepen.storage.sqlite import schema
from onepen.storage.sqlite.engine import open_sqlite

CLOCK = SystemClock()


def one(path: Path, sql: str) -> object:
    db = apsw.Connection(str(path))
    try:
        return db.execute(sql).get
    finally:
        db.close()


def test_a_new_database_is_marked(tmp_path: Path) -> None:
    """G1: as ours, with its version, small pages given back, and without orphans from before."""
    path = tmp_path / "chat.db"
    open_sqlite(path, CLOCK).close()
    assert one(path, "PRAGMA application_id") == schema.APPLICATION_ID
    assert one(path, "PRAGMA user_version") == schema.VERSION == len(schema.MIGRATIONS)
    assert one(path, "PRAGMA auto_vacuum") == 2
    assert one(path, "PRAGMA journal_mode") == "wal"
    assert one(path, "SELECT group_concat(name) FROM marks") == "finalize_orphaned_rotations"
    assert one(path, "SELECT created_ms > 0 FROM pen") == 1
    assert check_database(path) == []


def test_tables_are_strict(tmp_path: Path) -> None:
    """INV-20: a value of the wrong type is refused by SQLite itself."""
    path = tmp_path / "chat.db"
    open_sqlite(path, CLOCK).close()
    loose = "SELECT group_concat(name) FROM pragma_table_list WHERE schema = 'main' AND type = "
    loose += "'table' AND NOT strict AND name NOT LIKE 'sqlite_%'"
    assert one(path, loose) is None


@pytest.mark.parametrize("prepare", ["", "PRAGMA journal_mode=WAL", "PRAGMA auto_vacuum=2; VACUUM"])
def test_an_interrupted_creation_is_completed(tmp_path: Path, prepare: str) -> None:
    """INV-19: an empty file, however far it had come, becomes a whole database."""
    path = tmp_path / "chat.db"
    path.touch()
    if prepare:
        db = apsw.Connection(str(path))
        db.execute(prepare)
        db.close()
    open_sqlite(path, CLOCK).close()
    assert one(path, "PRAGMA user_version") == schema.VERSION
    assert check_database(path) == []


def test_a_creation_that_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-19: tables and version move in one transaction, and the next opening completes it."""
    path = tmp_path / "chat.db"
    with monkeypatch.context() as broken:
        broken.setattr(schema, "MIGRATIONS", (f"{schema.MIGRATIONS[0]}; SELECT * FROM nothing",))
        with pytest.raises(OpenError):
            open_sqlite(path, CLOCK)
    assert one(path, "SELECT count(*) FROM sqlite_schema") == 0
    assert one(path, "PRAGMA application_id") == 0
    open_sqlite(path, CLOCK).close()
    assert check_database(path) == []


NEXT = "CREATE TABLE later (x INTEGER NOT NULL) STRICT; INSERT INTO later VALUES (7)"


def test_an_older_file_is_brought_forward_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-2: every view says after the migration what it said before it."""
    path = tmp_path / "chat.db"
    load = WORKLOADS["rotate"]
    units = [*load.preparation, *(unit for batch in load.batches for unit in batch.units)]
    names = names_in(units)
    engine = open_sqlite(path, CLOCK)
    engine.stage(units)
    engine.commit()
    with engine.reading() as reader:
        before = views_of(reader, names)
    epoch = engine.epoch
    engine.close()
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, NEXT))
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    for opening in (1, 2):  # the second time there is nothing to do
        engine = open_sqlite(path, CLOCK)
        with engine.reading() as reader:
            assert views_of(reader, names) == before
        assert engine.epoch == epoch + opening
        engine.close()
    assert one(path, "SELECT group_concat(x) FROM later") == "7"
    assert one(path, "PRAGMA user_version") == schema.VERSION
    assert check_database(path) == []


def test_a_migration_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-19: one transaction a step; the code from before still opens the file."""
    path = tmp_path / "chat.db"
    open_sqlite(path, CLOCK).close()
    with monkeypatch.context() as broken:
        broken.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, f"{NEXT}; SELECT nothing"))
        broken.setattr(schema, "VERSION", schema.VERSION + 1)
        with pytest.raises(OpenError):
            open_sqlite(path, CLOCK)
    assert one(path, "SELECT count(*) FROM sqlite_schema WHERE name = 'later'") == 0
    open_sqlite(path, CLOCK).close()


def test_the_file_of_a_newer_version_is_told_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-20: after an upgrade and back, the old code refuses."""
    path = tmp_path / "chat.db"
    with monkeypatch.context() as newer:
        newer.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, NEXT))
        newer.setattr(schema, "VERSION", schema.VERSION + 1)
        open_sqlite(path, CLOCK).close()
    with pytest.raises(NewerSchemaError):
        open_sqlite(path, CLOCK)
