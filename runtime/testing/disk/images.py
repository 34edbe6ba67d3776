"""What a power loss may leave behind: the images of a recorded disk, at every point of its log.

Invariants:
- A crash point lies after every entry of the log, marks included, and one before the first. What
  was synced before the point is in every image of it; what was not is there wholly, partly or not.
- The walk is incremental: one pass over the log, whatever the number of images.
- The same log and seed give the same images, in every process. A draw depends on nothing but the
  seed, its point and its number, so one image can be had again without all those before it.
- No image is given twice in a row: with nothing at risk all modes are the same file contents, and
  a write changes nothing about what is left if all at risk is lost.

Limits of the model: a sync does not lie, bits do not rot, directory entries are never lost
(creating and deleting a file is durable at once), a torn write keeps a prefix and leaves the bytes
outside its range alone. Shared memory (-shm) is in no image.

Must never look at the real files: they show what the operating system still has, which is what
a power loss takes away.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from .log import Change, DiskState, Log, Marked, Truncated, Written, content_after

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SECTOR_SIZE = 512

# Few, half or most of the unsynced changes survive: with one half only, the near misses (all but
# one write, one write alone) would hardly ever come up in a long list.
_SURVIVAL_RATES = (0.1, 0.5, 0.9)

_TORN_RATE = 0.3


class Loss(Enum):
    """What becomes of the changes that were not synced."""

    NONE_SURVIVE = "none"
    ALL_SURVIVE = "all"
    TORN = "torn"


@dataclass(frozen=True, slots=True)
class Image:
    """The files that one power loss leaves, and the marks that had been logged before it."""

    point: int
    """How many entries of the log came before the loss."""
    loss: Loss
    draw: int
    """Which of the torn images of this point it is; 0 for the other modes."""
    marks: tuple[Marked, ...] = field(repr=False)
    files: Mapping[str, bytes] = field(repr=False)

    @property
    def name(self) -> str:
        """Identifies the image among those of its log and seed, such as "41-torn-2"."""
        return f"{self.point}-{self.loss.value}-{self.draw}"

    def payloads(self, label: str) -> list[object]:
        """The payloads of the marks with this label, in order."""
        return [mark.payload for mark in self.marks if mark.label == label]

    def write_to(self, directory: str | os.PathLike[str]) -> Path:
        """Make it real, in a directory that is new or empty; it may then be a `Disk` again."""
        root = Path(directory)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A -wal left by another image would be replayed into this one.
        if next(root.iterdir(), None) is not None:
            raise FileExistsError(f"{root} is not empty")
        for name, content in self.files.items():
            path = root / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(path, "xb", opener=_open_private) as file:
                file.write(content)
        return root


def images(
    log: Log, *, torn: int = 3, seed: int = 0, start: int = 0, stop: int | None = None
) -> Iterator[Image]:
    """Every image of the crash points `start` to `stop` (not included; the default is all).

    At each point: nothing unsynced survives, all of it does, and `torn` seeded draws in between.
    """
    state = DiskState(log.base)
    marks: tuple[Marked, ...] = ()
    durable_before: tuple[Mapping[str, bytes], tuple[Marked, ...]] | None = None
    last = len(log.entries) if stop is None else min(stop - 1, len(log.entries))
    for point in range(last + 1):
        if point > 0:
            entry = log.entries[point - 1]
            state.apply(entry)
            if isinstance(entry, Marked):
                marks = (*marks, entry)
        if point < start:
            continue
        durable = {name: file.durable for name, file in state.files.items()}
        # Cheap though it compares contents: unchanged files are the same bytes objects.
        if durable_before != (durable, marks):
            durable_before = (durable, marks)
            yield Image(point, Loss.NONE_SURVIVE, 0, marks, durable)
        if any(file.pending for file in state.files.values()):
            yield Image(point, Loss.ALL_SURVIVE, 0, marks, _all_survive(state))
            for draw in range(torn):
                # Text seeds are hashed the same way in every process, unlike tuples.
                chance = random.Random(f"{seed}/{point}/{draw}")
                yield Image(point, Loss.TORN, draw, marks, _torn(state, chance))


def _all_survive(state: DiskState) -> Mapping[str, bytes]:
    return {name: content_after(file.durable, file.pending) for name, file in state.files.items()}


def _torn(state: DiskState, chance: random.Random) -> Mapping[str, bytes]:
    rate = chance.choice(_SURVIVAL_RATES)
    return {
        name: content_after(
            file.durable,
            [_cut(change, chance) for change in file.pending if chance.random() < rate],
        )
        for name, file in state.files.items()
    }


def _cut(change: Change, chance: random.Random) -> Change:
    """The change itself, or as much of a write as there was power for."""
    if isinstance(change, Truncated) or len(change.data) < 2 or chance.random() >= _TORN_RATE:
        return change
    end = change.offset + len(change.data)
    # Sectors lie at fixed places of the file, wherever the write begins.
    sector_first = change.offset // _SECTOR_SIZE + 1
    sector_last = (end - 1) // _SECTOR_SIZE
    if sector_first <= sector_last and chance.random() < 0.5:
        size = chance.randint(sector_first, sector_last) * _SECTOR_SIZE - change.offset
    else:
        size = chance.randrange(1, len(change.data))
    return Written(change.file, change.offset, change.data[:size])


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
