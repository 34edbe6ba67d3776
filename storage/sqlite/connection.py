"""Opening connections: each pragma with its reason.

Keeps: every connection to a database has the same settings; a reader can't write; a file that is
not ours is refused before anything is changed in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import apsw

from ..errors import DamagedFileError, ForeignFileError, OpenError, UnsupportedError
from .schema import check_ours
from .wholeness import has_log, why_damaged, why_no_database

if TYPE_CHECKING:
    from ..engine import EngineSettings

SQLITE_VERSION_MIN = (3, 51, 3)  # before it, two connections could lose a log that was being reset
VALUE_BYTES_MAX = (
    8 * 1024 * 1024
)  # no message or piece of a blob comes near; a row beyond it is a mistake


def check_sqlite_version(version: str | None = None) -> None:
    """Refuse a SQLite library with a known corruption bug."""
    found = version or apsw.sqlite_lib_version()
    if tuple(int(part) for part in found.split(".")) < SQLITE_VERSION_MIN:
        needed = ".".join(map(str, SQLITE_VERSION_MIN))
        raise UnsupportedError(
            f"SQLite {found} is too old, {needed} is needed", hint="upgrade the apsw package"
        )


def _open(name: str, flags: int, vfs: str | None, settings: EngineSettings) -> apsw.Connection:
    db = apsw.Connection(name, flags=flags, vfs=vfs, statementcachesize=256)
    db.set_busy_timeout(int(settings.busy_timeout_s * 1000))
    db.limit(apsw.SQLITE_LIMIT_LENGTH, VALUE_BYTES_MAX)
    db.config(apsw.SQLITE_DBCONFIG_DQS_DML, 0)  # a misspelt column is an error, not a string
    db.config(apsw.SQLITE_DBCONFIG_DQS_DDL, 0)
    db.pragma("mmap_size", 0)  # a mapped page that can't be read kills the process
    return db


def open_writer(
    name: str, settings: EngineSettings, *, vfs: str | None, durable: bool, uri: bool = False
) -> apsw.Connection:
    """The one connection that writes."""
    flags = apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_URI if uri else 0)
    if not durable:
        flags |= apsw.SQLITE_OPEN_CREATE
    had_log = durable and has_log(name)
    try:
        db = _open(name, flags, vfs, settings)
    except apsw.CantOpenError as error:
        raise OpenError(name, str(error), hint="check the path and its permissions") from error
    try:
        # Whatever is refused keeps its log: closing would copy it into the file, and remove it.
        db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, int(had_log))
        # The first look at the file: the journal mode is written into it, so this comes before.
        empty = check_ours(db, name) == 0
        _set_up_writer(db, name, settings, durable=durable, empty=empty)
        db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
    except apsw.NotADBError as error:
        db.close()
        raise ForeignFileError(name, why_no_database(name, vfs)) from error
    except apsw.CorruptError as error:
        db.close()
        raise DamagedFileError(name, why_damaged(name, error)) from error
    except (apsw.CantOpenError, apsw.ReadOnlyError) as error:
        db.close()
        raise OpenError(name, str(error), hint="check the path and its permissions") from error
    except BaseException:
        db.close()
        raise
    return db


def _set_up_writer(
    db: apsw.Connection, name: str, settings: EngineSettings, *, durable: bool, empty: bool
) -> None:
    db.pragma("foreign_keys", 1)
    if empty:
        # In a file with tables it changes nothing, and costs a synced commit all the same.
        db.pragma("auto_vacuum", "INCREMENTAL")
    db.pragma("cache_size", -16 * 1024)
    # What is deleted is overwritten, in pages that become free too: FAST would leave those as they
    # are. It costs an append nothing, and a deletion the writing of what it frees.
    db.pragma("secure_delete", 1)
    if durable:
        mode = db.pragma("journal_mode", "WAL")
        if mode != "wal":
            raise OpenError(name, f"its journal mode stays {mode}", hint="use a local file system")
        db.pragma("synchronous", settings.synchronous)
        db.pragma("fullfsync", 1)  # macOS: a sync that reaches the disk; no effect elsewhere
        db.pragma("checkpoint_fullfsync", 1)
        db.wal_autocheckpoint(0)  # a checkpoint inside a commit would make that commit slow
    else:
        db.pragma("cache_spill", 0)  # a spilled page would lock readers out before the commit


def open_reader(
    name: str, settings: EngineSettings, *, vfs: str | None, uri: bool = False
) -> apsw.Connection:
    """A connection that can't write."""
    flags = apsw.SQLITE_OPEN_READONLY | (apsw.SQLITE_OPEN_URI if uri else 0)
    db = _open(name, flags, vfs, settings)
    db.pragma("query_only", 1)
    db.pragma("cache_size", -8 * 1024)
    return db
