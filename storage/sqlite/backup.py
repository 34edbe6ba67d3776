"""Backups: a copy of one snapshot, made beside whoever writes, looked through before it counts.

The copy is taken page by page from a snapshot that is held for as long as it takes. So it ends
under constant writes, no matter how many, and delays no commit; what it costs is that the log can't
begin anew meanwhile, and grows by what is written.

Keeps: under the target's name there is a whole copy or what was there before; the copy was found
sound, and says the same as the snapshot; it is one file, without a log beside it, that opens
anywhere, on a read-only disk as well, as an ordinary database.

Must never write to the source.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import apsw

from ..errors import CopyError, DamagedFileError, OpenError
from ..upkeep import Copied
from . import schema
from .copies import Unfinished, check_room, exists_error, side_files_of
from .place import lock_database

if TYPE_CHECKING:
    from ..identity import Clock
    from ..upkeep import Tick

_PROBLEMS_MAX = 20
_LOOK_EVERY = 100_000  # instructions of SQLite's machine: some milliseconds


def back_up(
    source: apsw.Connection,
    target: str | os.PathLike[str],
    clock: Clock,
    tick: Tick,
    *,
    pages_step: int,
    free_bytes_min: int = 0,
    replace: bool = False,
    vfs: str | None = None,
) -> Copied:
    """Copy what a connection sees, and give the copy its name.

    Blocks. Raises `CopyError`, `DamagedFileError` and `DatabaseHeldError`; then, and whenever it is
    stopped, what was there before is there still.
    """
    path = Path(os.path.abspath(target))
    _check_target(source, path, replace=replace)
    lock = None
    if replace and path.with_name(f"{path.name}.lock").exists():
        lock = lock_database(path, clock)  # nobody's database is taken from under them
    try:
        with Unfinished(path) as unfinished:
            copied = copy_into(
                unfinished, source, tick, pages_step=pages_step, spare=free_bytes_min, vfs=vfs
            )
            if replace:
                for file in side_files_of(path):
                    file.unlink()
            unfinished.publish(replace=replace)
    finally:
        if lock is not None:
            os.close(lock)
    return copied


def _check_target(source: apsw.Connection, path: Path, *, replace: bool) -> None:
    if path.is_dir():
        raise CopyError(str(path), "it is a folder", hint="give the name of a file in it")
    if not path.exists():
        beside = side_files_of(path)
        if beside:
            raise CopyError(
                str(path),
                f"a log without its database lies there: {beside[0].name}",
                hint="move it away, or choose another name",
            )
        return
    if source.filename and os.path.exists(source.filename) and path.samefile(source.filename):
        raise CopyError(str(path), "it is the database itself", hint="choose another name")
    if not replace:
        raise exists_error(path)
    if not path.is_file():
        raise CopyError(str(path), "it is not a regular file", hint="choose another name")


def copy_into(
    unfinished: Unfinished,
    source: apsw.Connection,
    tick: Tick,
    *,
    pages_step: int,
    spare: int = 0,
    verify: bool = True,
    vfs: str | None = None,
) -> Copied:
    """A synced copy of one snapshot under the unfinished name, looked through."""
    try:
        source.execute("BEGIN")
        try:
            version, facts = schema.check_ours(source, source.filename), facts_of(source)
            pages = int(source.pragma("page_count"))
            check_room(unfinished.path, pages * int(source.pragma("page_size")) + spare)
            copy_pages(source, unfinished.path, tick, pages_step=pages_step, vfs=vfs)
        finally:
            if source.in_transaction:
                source.execute("ROLLBACK")
        unfinished.sync()
        warnings: tuple[str, ...] = ()
        if verify:
            with_facts = (version, facts)
            warnings = look_through(unfinished.path, with_facts, tick, pages, vfs=vfs)
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise DamagedFileError(source.filename, str(error)) from error
    except (apsw.Error, OSError) as error:
        hint = "look at both disks, then try again"
        raise CopyError(str(unfinished.target), f"copying failed: {error}", hint=hint) from error
    return Copied(
        path=str(unfinished.target),
        size_bytes=unfinished.path.stat().st_size,
        commit_seq=facts.get("commit_seq", 0),
        sessions=facts.get("sessions", 0),
        messages=facts.get("messages", 0),
        verified=verify,
        warnings=warnings,
    )


def copy_pages(
    source: apsw.Connection, path: Path, tick: Tick, *, pages_step: int, vfs: str | None
) -> None:
    """The pages as they are, free ones included; in a file that needs no log to be opened."""
    flags = apsw.SQLITE_OPEN_READWRITE
    db = apsw.Connection(str(path), flags=flags, vfs=vfs)
    try:
        with db.backup("main", source, "main") as backup:
            while not backup.done:
                backup.step(pages_step)
                tick("copying", backup.page_count - backup.remaining, backup.page_count)
        # The pages say that there is a log beside them: a file with that mark can't be read where
        # none may be made.
        db.pragma("journal_mode", "DELETE")
    finally:
        db.close()


def facts_of(db: apsw.Connection) -> dict[str, int]:
    """What a copy must agree in with its original: the last commit, and how many rows there are."""
    facts: dict[str, int] = {}
    rows: list[Any] = db.execute("SELECT epoch, commit_seq FROM pen").fetchall()
    if rows:
        facts["epoch"], facts["commit_seq"] = rows[0]
    names: list[Any] = db.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table' "
        "AND name NOT LIKE 'search%' AND name NOT LIKE 'sqlite%'"
    ).fetchall()
    for (name,) in names:
        counted: list[Any] = db.execute(f'SELECT count(*) FROM "{name}"').fetchall()
        facts[name] = counted[0][0]
    return facts


def open_still(path: Path, *, vfs: str | None = None) -> apsw.Connection:
    """A file that nobody changes, read without locks and without a log."""
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    return apsw.Connection(f"file:{quote(str(path))}?immutable=1", flags=flags, vfs=vfs)


def look_through(
    path: Path,
    expected: tuple[int, dict[str, int]],
    tick: Tick,
    pages: int,
    *,
    vfs: str | None = None,
) -> tuple[str, ...]:
    """Raise unless the file is sound and says what is expected; warnings of what is derived."""

    def look() -> bool:
        tick("checking", 0, pages)
        return False

    db = open_still(path, vfs=vfs)
    try:
        db.set_progress_handler(look, _LOOK_EVERY)
        problems, warnings = problems_of(db)
        if problems:
            raise DamagedFileError(str(path), f"the copy is damaged: {problems[0]}")
        found = (schema.check_ours(db, str(path)), facts_of(db))
    finally:
        db.close()
    if found != expected:
        raise DamagedFileError(str(path), "the copy says something else than the original")
    tick("checking", pages, pages)
    return warnings


def problems_of(db: apsw.Connection, *, full: bool = True) -> tuple[list[str], tuple[str, ...]]:
    """What SQLite finds wrong with a file, and what of it concerns the search index only."""
    check = "integrity_check" if full else "quick_check"
    rows: list[Any] = db.execute(f"PRAGMA {check}({_PROBLEMS_MAX})").fetchall()
    said = [str(row[0]) for row in rows if row != ("ok",)]
    index = [words for words in said if "search_index" in words]
    return [words for words in said if words not in index], tuple(index)


def open_source(path: Path, *, vfs: str | None = None) -> apsw.Connection:
    """A backup to be restored, or another file of ours, of any version that can be brought forward.

    Read as it is: a log beside it belongs to it. Raises `OpenError` and its kin.
    """
    flags = apsw.SQLITE_OPEN_READONLY
    if not side_files_of(path):
        return open_still(path, vfs=vfs)
    try:
        return apsw.Connection(str(path), flags=flags, vfs=vfs)
    except apsw.Error as error:
        raise OpenError(str(path), str(error), hint="check its permissions") from error
