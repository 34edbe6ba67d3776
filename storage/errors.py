"""Every error that onepen raises, in one tree under `OnepenError`.

An error says what happened (its message), carries the facts as fields, and says what to do next
(`hint`). Fields are plain values, so that an error can be logged, compared and sent over a
wire. Nothing here may put a message's text into an error's message: texts are private, and
error messages end up in logs.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


class OnepenError(Exception):
    """The root: catch this to catch everything that onepen raises on purpose."""

    hint: str = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if hint is not None:
            self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvariantError(OnepenError):
    """Our own bug: a promise that durability rests on does not hold.

    Raised even under `python -O`.
    """

    hint = "this is a defect in onepen; please report it with the log"


# What a caller gave us -----------------------------------------------------------------------


class InvalidContentError(OnepenError):
    """Something given can't be stored exactly, so it is not stored at all."""

    def __init__(self, field: str, problem: str, *, hint: str) -> None:
        super().__init__(f"{field}: {problem}", hint=hint)
        self.field = field
        self.problem = problem


class InvalidUnitError(OnepenError):
    """A unit breaks the rules of units: a transcript write without its guard, or an empty unit."""

    hint = "every command that changes a transcript needs a guard that names its session"


# What the stored state answers ---------------------------------------------------------------


class ConflictError(OnepenError):
    """The same natural key is stored with other content; both sides are carried."""

    hint = "the stored side stands; give new content a new identity"

    def __init__(
        self, key: str, stored: Any = None, given: Any = None, *, message: str | None = None
    ) -> None:
        super().__init__(message or f"{key} is stored already, with other content")
        self.key = key
        self.stored = stored
        self.given = given


class RouteConflictError(ConflictError):
    """A key can't be given this session: the session is another's, or has moved on."""

    hint = "ask for the key's current session and use that"

    def __init__(self, key: str, session_id: str, holder: str | None = None) -> None:
        whose = f" (it is held by {holder})" if holder else ""
        super().__init__(
            key,
            stored=holder,
            given=session_id,
            message=f"{key} can't have session {session_id}{whose}",
        )
        self.session_id = session_id
        self.holder = holder


class SessionHeldError(RouteConflictError):
    """The session is current for another key."""

    hint = "close it there first, or switch with take_over=True"

    def __init__(self, key: str, session_id: str, holder_key: str) -> None:
        super().__init__(key, session_id, holder_key)
        self.holder_key = holder_key


class StaleError(OnepenError):
    """A value was to be replaced that is no longer the stored one; nothing was changed."""

    hint = "read the current value and decide again"

    def __init__(self, what: str, expected: Any = None, stored: Any = None) -> None:
        super().__init__(f"{what}: expected {expected!r}, stored is {stored!r}")
        self.what = what
        self.expected = expected
        self.stored = stored


class StaleIncarnationError(StaleError):
    """A predecessor of the key's actor tried to write; its successor has taken over."""

    hint = "stop at once: another actor owns this key now"


class BrokenChainError(StaleError):
    """A write does not follow the session's last one, because an earlier one was refused."""

    hint = "reload the session and continue from what is stored"


class SessionEndedError(OnepenError):
    """The session is ended or deleted and takes no more writes."""

    hint = "reopen it, or write to the key's current session"

    def __init__(self, session_id: str, reason: str | None = None) -> None:
        super().__init__(f"session {session_id} has ended" + (f": {reason}" if reason else ""))
        self.session_id = session_id
        self.reason = reason


class NoGainError(OnepenError):
    """Compression would not make the transcript smaller."""

    hint = "write a shorter summary, carry fewer messages, or force it"

    def __init__(self, session_id: str, before: Any = None, after: Any = None) -> None:
        super().__init__(f"compressing {session_id} gains nothing: {before} -> {after}")
        self.session_id = session_id
        self.before = before
        self.after = after


class TitleTakenError(OnepenError):
    """Titles are unique, and this one names another session."""

    hint = "choose another title"

    def __init__(self, title: str, holder: str | None = None) -> None:
        super().__init__(f"the title is taken by session {holder}")
        self.title = title
        self.holder = holder


class MissingError(OnepenError):
    """Something referred to is not stored."""

    hint = "store it first, or check the id"

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is not stored")
        self.what = what


class AmbiguousError(OnepenError):
    """What was given stands for more than one: a prefix or a title, a key with open questions."""

    hint = "give more characters"

    def __init__(
        self,
        given: str,
        candidates: tuple[str, ...],
        *,
        of: str = "sessions",
        hint: str | None = None,
    ) -> None:
        super().__init__(f"{given!r} stands for {len(candidates)} {of} or more", hint=hint)
        self.given = given
        self.candidates = candidates


# What storage itself answers -----------------------------------------------------------------


class StorageError(OnepenError):
    """The durable layer can't do what was asked of it."""


class StorageUnavailableError(StorageError):
    """Storage is down. What was posted stays in the ledger and is written when it is back."""

    hint = "nothing posted is lost; look at the disk, then try again"

    def __init__(self, reason: str, since_ms: int | None = None) -> None:
        super().__init__(f"storage is unavailable: {reason}")
        self.reason = reason
        self.since_ms = since_ms


class OutcomeUnknownError(StorageError):
    """The runtime ended before it learned whether this unit is stored."""

    hint = "send the same unit again after the next start: it is stored once"


class BatchUnknownError(StorageError):
    """Whether the batch is durable can't be told. Only re-sending the same units resolves it."""

    hint = "reopen the engine and apply the same units again"

    def __init__(self, step: str, cause: BaseException) -> None:
        super().__init__(f"{step}: {type(cause).__name__}: {cause}")
        self.step = step


class LowSpaceError(StorageError):
    """Less free space than the watermark.

    Writing stops while reading and checkpoints still work.
    """

    hint = "free some space; writing goes on by itself"

    def __init__(self, path: str, free_bytes: int, free_bytes_min: int) -> None:
        super().__init__(f"{path}: {free_bytes} bytes are free, {free_bytes_min} must stay free")
        self.path = path
        self.free_bytes = free_bytes
        self.free_bytes_min = free_bytes_min


class StaleEpochError(StorageError):
    """Another process has opened the database for writing since.

    This engine can't commit any more.
    """

    hint = "stop this process: the file has a new owner"

    def __init__(self, epoch: int) -> None:
        super().__init__(f"epoch {epoch} is no longer the stored one")
        self.epoch = epoch


class EngineClosedError(StorageError):
    """The engine, or its readers, are closed."""

    hint = "open it again"


class WriterFullError(StorageError):
    """The Writer's queue is full by count or bytes."""

    hint = "wait for room before you build the unit"

    def __init__(self, units: int, size_bytes: int) -> None:
        super().__init__(f"{units} units and {size_bytes} bytes are waiting to be written")
        self.units = units
        self.size_bytes = size_bytes


class WriterClosedError(StorageError):
    """The Writer is draining or closed and takes nothing new."""

    hint = "the runtime is shutting down; send it again after the next start"


class WriterFailedError(StorageError):
    """The Writer could not be kept alive; its owner must decide."""

    hint = "look at the cause; every ticket was answered before this was raised"


# What opening a file answers -----------------------------------------------------------------


class OpenError(StorageError):
    """A database file can't be opened; it was not changed."""

    def __init__(self, path: str, problem: str, *, hint: str) -> None:
        super().__init__(f"{path}: {problem}", hint=hint)
        self.path = path
        self.problem = problem


class DatabaseHeldError(OpenError):
    """Another process owns the database for writing."""

    def __init__(self, path: str, pid: int | None, since_ms: int | None) -> None:
        who = f"process {pid}" if pid is not None else "another process"
        super().__init__(
            path,
            f"{who} owns it",
            hint="talk to that process, or stop it; reading is possible meanwhile",
        )
        self.pid = pid
        self.since_ms = since_ms

    @property
    def since(self) -> datetime | None:
        """Since when, if the lock file says so."""
        if self.since_ms is None:
            return None
        return datetime.fromtimestamp(self.since_ms / 1000, tz=UTC)


class ForeignFileError(OpenError):
    """The file is not an onepen database."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem, hint="check the path; the file was left as it is")


class NewerSchemaError(OpenError):
    """The file was written by a newer onepen."""

    def __init__(self, path: str, stored: int, known: int) -> None:
        super().__init__(
            path,
            f"its schema is version {stored}, this onepen knows up to {known}",
            hint="upgrade onepen, or open a backup from before the upgrade",
        )
        self.stored = stored
        self.known = known


class OlderSchemaError(OpenError):
    """The file was written by an older onepen, and nobody has brought it up to date yet."""

    def __init__(self, path: str, stored: int, known: int) -> None:
        super().__init__(
            path,
            f"its schema is version {stored}, this onepen reads version {known}",
            hint="open it once for writing, for example with `onepen doctor --repair`",
        )
        self.stored = stored
        self.known = known


class MissingFileError(OpenError):
    """There is no such file, and whoever only reads makes none."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "there is no such file", hint="check the path")


class DamagedFileError(OpenError):
    """The file is a database of ours, or was one, and can't be trusted any more."""

    def __init__(self, path: str, problem: str, *, hint: str | None = None) -> None:
        hint = hint or "leave the file as it is; `onepen doctor` tells more, or restore a backup"
        super().__init__(path, problem, hint=hint)


class CopyError(StorageError):
    """A copy of a database was not made, or not put in its place; what was there is as it was."""

    def __init__(self, path: str, problem: str, *, hint: str) -> None:
        super().__init__(f"{path}: {problem}", hint=hint)
        self.path = path
        self.problem = problem


class NetworkFileSystemError(OpenError):
    """SQLite's locks and syncs can't be trusted on a network file system."""

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(
            path, f"it is on a network file system ({kind})", hint="move it to a local disk"
        )
        self.kind = kind


class UnsupportedError(OnepenError):
    """This machine can't keep the promises: an operating system or a library that is too old."""


# Export and import ---------------------------------------------------------------------------


class ExportError(OnepenError):
    """An export can't be written where it was to go; nothing is there under its name."""

    def __init__(self, path: str, problem: str, *, hint: str) -> None:
        super().__init__(f"{path}: {problem}", hint=hint)
        self.path = path
        self.problem = problem


class ImportFileError(OnepenError):
    """A file can't be imported, and why; nothing of it was stored. `line` is 0 for the whole."""

    def __init__(self, path: str, line: int, problem: str, *, hint: str) -> None:
        where = f"{path}, line {line}" if line else path
        super().__init__(f"{where}: {problem}", hint=hint)
        self.path = path
        self.line = line
        self.problem = problem


class NewerExportError(ImportFileError):
    """The export was made by a newer onepen."""

    def __init__(self, path: str, version: int, known: int) -> None:
        problem = f"it is of version {version}, and this onepen knows {known}"
        super().__init__(path, 1, problem, hint="upgrade onepen, then import it")
        self.version = version
        self.known = known
