"""What happened to a simulated disk: the entries of its one ordered log, and their replay.

Invariants:
- An entry says what became of the file, not what was asked for: a write that failed is not in the
  log, and of a short write only the part that reached the file is.
- Entries are values. A log that was handed out never changes, so images may be made of it while
  the disk is still in use.
- `DiskState` is the only place that knows what a sync, a delete or a dropped page means; the disk
  (for a sync that fails) and the images (for a power loss) both ask it.

Never touches a real file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Created:
    """An empty file came into being; its directory entry is durable at once."""

    file: str


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes reached the file, and stay at risk until its next sync."""

    file: str
    offset: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Truncated:
    """The file was cut or grown to a size; at risk until its next sync, as a write is."""

    file: str
    size: int


@dataclass(frozen=True, slots=True)
class Synced:
    """Everything before this in the same file is durable."""

    file: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A sync failed, and everything since the last good sync of the file is gone."""

    file: str


@dataclass(frozen=True, slots=True)
class Deleted:
    """The file is gone, durably and at once."""

    file: str


@dataclass(frozen=True, slots=True)
class Marked:
    """Something the test wants ordered among the I/O, such as an acknowledgement."""

    label: str
    payload: object = None


Change: TypeAlias = Written | Truncated
Entry: TypeAlias = Created | Written | Truncated | Synced | Dropped | Deleted | Marked


@dataclass(frozen=True, slots=True)
class Log:
    """A recording: the files as they were at its start, then every entry in order."""

    base: Mapping[str, bytes] = field(repr=False)
    entries: tuple[Entry, ...] = field(repr=False)


@dataclass(slots=True)
class FileState:
    """One file: what a power loss cannot take, and the changes that it can."""

    durable: bytes = b""
    pending: list[Change] = field(default_factory=list[Change])


class DiskState:
    """The files of a disk at one point of its log; `apply` moves on by one entry."""

    def __init__(self, base: Mapping[str, bytes]) -> None:
        self.files = {name: FileState(content) for name, content in base.items()}

    def apply(self, entry: Entry) -> None:
        match entry:
            case Created(file):
                self.files.setdefault(file, FileState())
            case Written(file) | Truncated(file):
                self.files[file].pending.append(entry)
            case Synced(file):
                state = self.files[file]
                state.durable = content_after(state.durable, state.pending)
                # A new list, not clear(): whoever holds the old one keeps what it saw.
                state.pending = []
            case Dropped(file):
                self.files[file].pending = []
            case Deleted(file):
                self.files.pop(file, None)
            case Marked():
                pass


def content_after(content: bytes, changes: Sequence[Change]) -> bytes:
    """The content once these changes, in this order, have been made to it."""
    if not changes:
        return content
    buffer = bytearray(content)
    for change in changes:
        match change:
            case Written(_, offset, data):
                # A write past the end leaves a hole, which reads as zeros.
                buffer.extend(bytes(max(0, offset - len(buffer))))
                buffer[offset : offset + len(data)] = data
            case Truncated(_, size):
                del buffer[size:]
                buffer.extend(bytes(size - len(buffer)))
    return bytes(buffer)
