"""A file of version 1, what must become of it, and the checks of what a crash has left of it.

`fixtures/version_1.sql` is such a file, written by the code of version 1. Each check is a function
that returns violations instead of asserting, so that the tests of the tests can call it on a
migration with a planted bug and see that it finds something.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias

import apsw

from onepen.runtime.testing import Disk, Log, images
from onepen.runtime.testing.invariants import (
    Dump,
    Violation,
    check_connection,
    compare,
    inspecting,
)
from onepen.storage.sqlite import schema

from ..crash.campaign import DATABASE, final_image, open_engine, scratch

_SQL = (Path(__file__).parent / "fixtures" / "version_1.sql").read_text(encoding="utf-8")
_SECOND_IMAGES_MAX = 12

Columns: TypeAlias = Mapping[str, tuple[str, ...]]
"""The columns of every table."""

Start: TypeAlias = Callable[[Path], Path]
"""Puts a database of version 1 into a directory."""


# A file of version 1


def make_old(path: Path, vfs: str | None = None) -> apsw.Connection:
    """The fixture as a file. All of its rows stay in the log until the connection is closed."""
    db = apsw.Connection(str(path), vfs=vfs)
    db.wal_autocheckpoint(0)
    db.execute(_SQL).fetchall()
    return db


@cache
def _closed() -> bytes:
    with scratch() as root:
        make_old(root / DATABASE).close()
        return (root / DATABASE).read_bytes()


def closed_file(directory: Path) -> Path:
    """A database that a process of version 1 has closed."""
    directory.mkdir(exist_ok=True)
    (directory / DATABASE).write_bytes(_closed())
    return directory


def killed_file(directory: Path) -> Path:
    """A database whose process of version 1 was killed: its rows are in the log only."""
    with scratch() as root, Disk(root) as disk:
        db = make_old(root / DATABASE, disk.name)
        image = final_image(disk.log)
        db.close()
    return image.write_to(directory)


def migrated_file(directory: Path) -> Path:
    """The path of a file that was brought forward, and closed."""
    open_engine(closed_file(directory)).close()
    return directory / DATABASE


# What it is compared with


def columns_of(db: apsw.Connection) -> Columns:
    """Those of every table, but for the epoch: that one moves with every opening."""
    tables = db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
    columns = {
        str(table): tuple(str(row[1]) for row in db.execute(f"PRAGMA table_info({table})"))
        for (table,) in tables
    }
    return {**columns, "pen": tuple(name for name in columns["pen"] if name != "epoch")}


def rows_of(db: apsw.Connection, columns: Columns) -> Dump:
    """Every row, as far as these columns go."""
    return {
        table: tuple(sorted(db.execute(f"SELECT {', '.join(names)} FROM {table}"), key=repr))
        for table, names in columns.items()
    }


def schema_of(db: apsw.Connection) -> Dump:
    """Tables and indexes, both as they are written down and as SQLite understands them."""
    of_tables = "SELECT s.name, x.* FROM sqlite_schema s, {}(s.name) x WHERE s.type = 'table'"
    queries = {
        "version": "SELECT (SELECT * FROM pragma_user_version), "
        "(SELECT * FROM pragma_application_id), (SELECT * FROM pragma_auto_vacuum)",
        "objects": "SELECT type, name, tbl_name, sql FROM sqlite_schema",
        "columns": of_tables.format("pragma_table_xinfo"),
        "indexes": of_tables.format("pragma_index_list"),
        "keys": of_tables.format("pragma_foreign_key_list"),
        "indexed": "SELECT s.name, x.* FROM sqlite_schema s, pragma_index_xinfo(s.name) x",
    }
    return {name: tuple(sorted(db.execute(sql), key=repr)) for name, sql in queries.items()}


@dataclass(frozen=True, slots=True)
class Old:
    """What version 1 has stored, and in which tables."""

    columns: Columns
    rows: Dump
    schema: Dump


@cache
def old() -> Old:
    """The content of the fixture."""
    with scratch() as root, inspecting(closed_file(root) / DATABASE) as db:
        columns = columns_of(db)
        return Old(columns, rows_of(db, columns), schema_of(db))


def fresh_schema() -> Dump:
    """That of a file that the current code has just created."""
    with scratch() as root:
        open_engine(root).close()
        with inspecting(root / DATABASE) as db:
            return schema_of(db)


def made_schema(version: int) -> Dump:
    """What the migrations up to this version make out of nothing."""
    db = apsw.Connection(":memory:")
    db.pragma("auto_vacuum", "INCREMENTAL")
    for statements in schema.MIGRATIONS[:version]:
        db.execute(statements)
    db.pragma("application_id", schema.APPLICATION_ID)
    db.pragma("user_version", version)
    made = schema_of(db)
    db.close()
    return made


Stages: TypeAlias = Sequence[Dump]
"""The schema of each version, from the first one on."""


def stages() -> Stages:
    """Where a file may stand: as version 1 was released, …, as a fresh file is."""
    between = [made_schema(version) for version in range(2, schema.VERSION)]
    return [old().schema, *between, fresh_schema()]


# Checks


def check_migrated(path: Path, expected: Stages) -> list[Violation]:
    """A sound file with the schema of a fresh one, and every row of version 1 as it was."""
    with inspecting(path) as db:
        return [
            *check_connection(db),
            *compare(expected[-1], schema_of(db)),
            *compare(old().rows, rows_of(db, old().columns)),
        ]


@dataclass(slots=True)
class Tally:
    """How much was tried, in which versions the file was found, and what was wrong."""

    images: int = 0
    versions: set[int] = field(default_factory=set[int])
    violations: list[Violation] = field(default_factory=list[Violation])


def check_left(directory: Path, expected: Stages, tally: Tally) -> list[Violation]:
    """What a crash has left is wholly of one version, and of the current one once it is opened."""
    path, found = directory / DATABASE, list[Violation]()
    with inspecting(path) as db:
        version = int(db.pragma("user_version"))
        tally.versions.add(version)
        found += compare(expected[version - 1], schema_of(db))
        found += compare(old().rows, rows_of(db, old().columns))
    try:
        open_engine(directory).close()
    except Exception as error:  # whatever it is, a database that can't be opened is the finding
        return [*found, Violation("opening", repr(error))]
    return [*found, *check_migrated(path, expected)]


def record(directory: Path) -> Log:
    """An opening, from its first operation to the close, on a recording disk."""
    with Disk(directory, skip={f"{DATABASE}.lock"}) as disk:
        open_engine(directory, disk.name).close()
        return disk.log


def power_loss(start: Start, expected: Stages, *, torn: int, double_every: int = 0) -> Tally:
    """A power loss after every operation of the migration, and a second one in some recoveries."""
    tally = Tally()
    with scratch() as root:
        every = list(images(record(start(root / "disk")), torn=torn))
        for number, image in enumerate(every):
            left = image.write_to(root / "left")
            found = check_left(left, expected, tally)
            tally.images += 1
            tally.violations += [Violation(f"{image.name}: {v.rule}", v.found) for v in found]
            shutil.rmtree(left)
            if double_every == 0 or number % double_every != double_every // 2:
                continue
            again = list(images(record(image.write_to(root / "first")), torn=1))
            # A share of them, spread over the recovery: every one would be the square of the work.
            for second in again[:: max(1, len(again) // _SECOND_IMAGES_MAX)]:
                left = second.write_to(root / "left")
                found = check_left(left, expected, tally)
                tally.images += 1
                where = f"{image.name} then {second.name}"
                tally.violations += [Violation(f"{where}: {v.rule}", v.found) for v in found]
                shutil.rmtree(left)
            shutil.rmtree(root / "first")
    return tally
