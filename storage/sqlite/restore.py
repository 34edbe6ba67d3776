"""Restores: a backup in the place of a database, in one step, and the one before kept.

    1  lock the place, copy the backup beside it, look the copy through, sync it
    2  fold the old log into the old file, give that file a second name that says when
    3  take away what logs are left, and let the copy have the place

A process that dies anywhere in this leaves the old database or the new one under its name, each
whole, and no log beside the one that belongs to the other. The old one is never under no name. Only
where its log can't be folded, because the old file is damaged, is there a moment in step 3 in which
it stands without its log; both are kept under the second name by then.

Must never run beside a process that owns the place; whoever only reads there goes on reading the
old file.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import apsw

from ..errors import CopyError, DamagedFileError, ForeignFileError, MissingFileError, OpenError
from ..upkeep import Restored
from . import schema
from .backup import copy_into, open_source
from .copies import Unfinished, exists_error, side_files_of, sync_folder
from .place import lock_database
from .wholeness import why_damaged, why_no_database

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..identity import Clock
    from ..upkeep import Copied, Tick

_SAME_MOMENT_MAX = 100


def restore(
    backup: str | os.PathLike[str],
    database: str | os.PathLike[str],
    clock: Clock,
    tick: Tick,
    *,
    pages_step: int,
    replace: bool = False,
    hold: Callable[[Path], int] | None = None,
    vfs: str | None = None,
) -> Restored:
    """Put a backup in the place of a database. Blocks.

    `hold` may change the copy before it counts, and says how many deliveries it has held. Raises
    `CopyError`, `DatabaseHeldError`, `DamagedFileError` and `OpenError`; the place is as it was
    then.
    """
    source, place = Path(os.path.realpath(backup)), Path(os.path.realpath(database))
    if not source.exists():
        raise MissingFileError(str(source))
    if not source.is_file():
        raise OpenError(str(source), "it is not a regular file", hint="give the path of a backup")
    if place.exists() and not place.is_file():
        raise CopyError(str(place), "it is not a regular file", hint="give the path of a file")
    if place.exists() and place.samefile(source):
        raise CopyError(str(place), "it is the backup itself", hint="give another path")
    if not place.parent.is_dir():
        raise CopyError(str(place), "its folder does not exist", hint="make the folder first")
    if is_there(place) and not replace:
        raise exists_error(place)
    lock = lock_database(place, clock)
    try:
        with Unfinished(place) as unfinished:
            copied = _copy(source, unfinished, tick, pages_step=pages_step, vfs=vfs)
            held = hold(unfinished.path) if hold is not None else 0
            try:
                kept = _put_aside(place, clock)
            except OSError as error:
                problem = f"the database before can't be kept: {error}"
                hint = "move it away yourself, then restore again"
                raise CopyError(str(place), problem, hint=hint) from error
            unfinished.publish(replace=True)
    finally:
        os.close(lock)
    return Restored(copied=copied, kept=None if kept is None else str(kept), held=held)


def is_there(place: Path) -> bool:
    """Whether there is something to lose: an empty file is what an interrupted start leaves."""
    return place.exists() and place.stat().st_size > 0


def _copy(
    source: Path, unfinished: Unfinished, tick: Tick, *, pages_step: int, vfs: str | None
) -> Copied:
    db = open_source(source, vfs=vfs)
    try:
        if schema.check_ours(db, str(source)) == 0:
            raise ForeignFileError(str(source), "it is empty")
        return copy_into(unfinished, db, tick, pages_step=pages_step, vfs=vfs)
    except apsw.NotADBError as error:
        raise ForeignFileError(str(source), why_no_database(str(source))) from error
    except apsw.CorruptError as error:
        hint = "take another backup; the database was left as it is"
        why = why_damaged(str(source), error)
        raise DamagedFileError(str(source), why, hint=hint) from error
    except apsw.Error as error:
        raise OpenError(str(source), str(error), hint="take another backup") from error
    finally:
        db.close()


def second_name(place: Path, why: str, clock: Clock) -> Path:
    """A name beside the database that says when, and that nothing has yet."""
    moment = datetime.fromtimestamp(clock.now() / 1000, UTC).strftime("%Y%m%dT%H%M%SZ")
    for number in range(1, _SAME_MOMENT_MAX):
        more = "" if number == 1 else f"-{number}"
        name = place.with_name(f"{place.name}.before-{why}-{moment}{more}")
        if not name.exists() and not side_files_of(name):
            return name
    raise CopyError(str(place), "too many copies were kept at this moment", hint="wait a second")


def _put_aside(place: Path, clock: Clock) -> Path | None:
    """The old database, and what logs of it are left, under a second name."""
    there = is_there(place)
    if there:
        _fold_log(place)
    beside = side_files_of(place)
    if not there and not any(file.stat().st_size for file in beside):
        return None
    kept = second_name(place, "restore", clock)
    if there:
        os.link(place, kept)
    for file in beside:
        suffix = file.name.removeprefix(place.name)
        # The last is made again from the log, and a log that is empty keeps nothing.
        if suffix != "-shm" and file.stat().st_size > 0:
            os.link(file, kept.with_name(kept.name + suffix))
    sync_folder(place)  # all of it is kept before anything goes
    for file in beside:
        file.unlink()
    sync_folder(place)
    return kept


def _fold_log(place: Path) -> None:
    """Copy the old log into the old file, so that the file alone is the database.

    A file that is too damaged for it stays as it is.
    """
    if not side_files_of(place):
        return
    try:
        db = apsw.Connection(str(place), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            # Where it can't be folded, closing must not take it away either.
            db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            db.execute("SELECT count(*) FROM sqlite_schema").fetchall()  # recovers it
            db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        finally:
            db.close()
    except apsw.BusyError as error:
        hint = "wait until whoever reads it is done"
        raise CopyError(str(place), "somebody is reading it", hint=hint) from error
    except apsw.Error:
        return
