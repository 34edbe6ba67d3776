"""The part of a repair that is below the rows: copies kept first, indices and triggers made anew.

What is derived from tables that can be read is made again out of them. What stands in the tables
themselves is mended by commands, through the Writer, and by nobody else; a page of a table that
can't be read is not mended at all.

Keeps: nothing is changed before a copy of the file is kept beside it, under a name that says when;
nobody owns the file meanwhile.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import apsw

from ..engine import EngineSettings
from . import connection
from .backup import copy_into
from .checks import Check, schema_of_new
from .copies import Unfinished
from .onlooker import open_checked
from .place import lock_database
from .restore import second_name

if TYPE_CHECKING:
    from ..identity import Clock
    from ..upkeep import Finding, Tick

_FOUND_MAX = 100_000


def keep_copy(path: str | os.PathLike[str], clock: Clock, tick: Tick) -> str:
    """The database as it is, damage and all, under a second name. Raises `DatabaseHeldError`."""
    place = Path(os.path.realpath(path))
    settings = EngineSettings()
    lock = lock_database(place, clock)
    try:
        db = open_checked(str(place), settings, older=True)
        try:
            kept = second_name(place, "repair", clock)
            with Unfinished(kept) as unfinished:
                copy_into(unfinished, db, tick, pages_step=settings.backup_pages_step, verify=False)
                unfinished.publish(replace=False)
        finally:
            db.close()
    finally:
        os.close(lock)
    return str(kept)


def check_all(path: str | os.PathLike[str], tick: Tick) -> list[Finding]:
    """A full check that shows every finding, for whoever mends them one by one."""
    db = open_checked(os.path.realpath(path), EngineSettings())
    try:
        return Check(db, tick, full=True, shown_max=_FOUND_MAX).run()
    finally:
        db.close(force=True)


def mend_structure(path: str | os.PathLike[str], clock: Clock, found: list[Finding]) -> list[str]:
    """Indices and triggers as they should be; what was done."""
    done: list[str] = []
    place = Path(os.path.realpath(path))
    lock = lock_database(place, clock)
    try:
        db = connection.open_writer(str(place), EngineSettings(), vfs=None, durable=True)
        try:
            done += _declare_again(db, found)
            if any(one.kind == "structure" and one.repairable for one in found):
                db.execute("REINDEX")
                done.append("the indices of the tables were made again")
        finally:
            db.close()
    finally:
        os.close(lock)
    return done


def _declare_again(db: apsw.Connection, found: list[Finding]) -> list[str]:
    expected, done = schema_of_new(), list[str]()
    for one in found:
        if one.kind != "schema" or not one.repairable:
            continue
        kind, _, name = one.where.partition(" ")
        sql = expected[name][2]
        assert sql is not None
        try:
            with db:  # gone and there again in one transaction
                db.execute(f'DROP {kind} IF EXISTS "{name}"')
                db.execute(sql)
        except apsw.ConstraintError:
            continue  # rows that it forbids are there; the next check finds it missing still
        done.append(f"{one.where} was made again")
    return done
