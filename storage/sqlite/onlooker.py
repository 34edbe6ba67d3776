"""Reading a database without owning it: beside the process that does, or when nobody has it open.

Owns a few read connections and nothing else. Takes no lock that could hold a writer up, changes
nothing in the file, brings no older file up to date: whoever owns the file does that.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, final

import apsw

from ..engine import EngineSettings
from ..errors import (
    DamagedFileError,
    ForeignFileError,
    MissingFileError,
    OlderSchemaError,
    OpenError,
)
from ..upkeep import unhurried
from . import connection, schema
from .backup import back_up
from .checks import Check
from .readers import Readers
from .wholeness import why_damaged, why_no_database

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ..identity import Clock
    from ..upkeep import Copied, Finding, Tick
    from .views import SqliteReader


@final
class Onlooker:
    """Read views of a file that somebody else may be writing. Any thread."""

    def __init__(self, path: str, settings: EngineSettings) -> None:
        self.path = path
        self._settings = settings
        self._readers = Readers(self._open, settings.readers_max)
        self._readers.resume()

    def _open(self) -> apsw.Connection:
        return open_checked(self.path, self._settings)

    def reading(self) -> AbstractContextManager[SqliteReader]:
        """One snapshot; hold it briefly, a long one keeps the log from being copied."""
        return self._readers.reading()

    def backup(
        self,
        target: str | os.PathLike[str],
        clock: Clock,
        tick: Tick = unhurried,
        *,
        replace: bool = False,
    ) -> Copied:
        """As an engine makes it; the file may belong to another process."""
        with self._readers.beside() as (db, _):
            return back_up(
                db,
                target,
                clock,
                tick,
                pages_step=self._settings.backup_pages_step,
                free_bytes_min=self._settings.free_bytes_min,
                replace=replace,
            )

    def check(self, tick: Tick = unhurried, *, full: bool = False) -> list[Finding]:
        """Everything that is wrong with what is stored."""
        with self._readers.beside() as (db, _):
            return Check(db, tick, full=full).run()

    def close(self) -> None:
        self._readers.close()


def open_onlooker(path: str | os.PathLike[str], settings: EngineSettings | None = None) -> Onlooker:
    """Look at a database that another process may own.

    Blocks; raises `MissingFileError`, `ForeignFileError`, `OlderSchemaError` and their kin.
    """
    connection.check_sqlite_version()
    real = os.path.realpath(path)
    settings = settings or EngineSettings()
    open_checked(real, settings).close()
    return Onlooker(real, settings)


def open_checked(real: str, settings: EngineSettings, *, older: bool = False) -> apsw.Connection:
    """A read connection to a file that is ours and of our version, or of an `older` one."""
    if not os.path.exists(real):
        raise MissingFileError(real)
    if not os.path.isfile(real):
        raise OpenError(real, "it is not a regular file", hint="give the path of a database file")
    db: apsw.Connection | None = None
    try:
        db = connection.open_reader(real, settings, vfs=None)
        version = schema.check_ours(db, real)
        if version == 0:
            raise ForeignFileError(real, "it is empty")
        if version < schema.VERSION and not older:
            raise OlderSchemaError(real, version, schema.VERSION)
    except apsw.NotADBError as error:
        _close(db)
        raise ForeignFileError(real, why_no_database(real)) from error
    except apsw.CorruptError as error:
        _close(db)
        raise DamagedFileError(real, why_damaged(real, error)) from error
    except apsw.Error as error:
        _close(db)
        hint = "check its permissions and those of its folder; `onepen doctor` tells more"
        raise OpenError(real, str(error), hint=hint) from error
    except BaseException:
        _close(db)
        raise
    return db


def _close(db: apsw.Connection | None) -> None:
    if db is not None:
        db.close(force=True)
