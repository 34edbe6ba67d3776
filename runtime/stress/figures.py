"""Numbers over time: how much, how fast, how large.

Keeps: a slot of a second holds what was measured in it; percentiles are of the measurements, never
of other percentiles. Memory is looked at from outside, by what the kernel says of the process.

Must never judge: `verdict` knows the limits.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, final

import trio
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .link import Life
    from .wire import Pulse

_SLOTS_SHOWN_MAX = 120
# In a shorter life everything is warming up: SQLite alone may cache 48 MiB, and does so by and by.
_GROWTH_AFTER_S = 120.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Spread(Struct, frozen=True, kw_only=True):
    """How measurements lie; all zero if there are none."""

    count: int = 0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


def spread_of(measured: Iterable[float]) -> Spread:
    ordered = sorted(measured)
    if not ordered:
        return Spread()

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 4)

    return Spread(count=len(ordered), p50=at(0.5), p95=at(0.95), p99=at(0.99), max=at(1.0))


class Slot(Struct, kw_only=True):
    """Some seconds of the run."""

    at_s: float
    seconds: float
    acknowledged: int
    replied: int
    shown: int
    accept_ms: Spread
    reply_ms: Spread
    memory_mb: float
    units: int
    running: int
    gap_max_ms: float


class _Second:
    """What was measured in one second."""

    def __init__(self) -> None:
        self.accept_s = array("f")
        self.reply_s = array("f")
        self.shown = 0
        self.memory = 0
        self.units = 0
        self.running = 0
        self.gap_max_ms = 0.0


class Size(NamedTuple):
    """What the kernel says of a process."""

    memory: int
    threads: int
    descriptors: int


def size_of(pid: int) -> Size | None:
    """None if it is gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            memory = int(file.read().split()[1]) * _PAGE_BYTES
        threads = len(os.listdir(f"/proc/{pid}/task"))
        return Size(memory, threads, len(os.listdir(f"/proc/{pid}/fd")))
    except (OSError, IndexError, ValueError):
        return None


@final
class Figures:
    """Everything that is measured while the test runs."""

    def __init__(self) -> None:
        self.started_s = trio.current_time()
        self._seconds: dict[int, _Second] = {}
        self.gaps_ms = array("f")
        self.peaks: Counter[str] = Counter()
        """The largest of each size that has a bound, or is worth knowing."""
        self.counters: Counter[str] = Counter()
        """What the process counts, all lives together."""
        self._last: dict[str, int] = {}
        self._life = -1
        self._memory: dict[int, list[tuple[float, int]]] = {}
        self.commit_p99_s = 0.0

    @property
    def now_s(self) -> float:
        """Since the beginning."""
        return trio.current_time() - self.started_s

    def _second(self) -> _Second:
        return self._seconds.setdefault(int(self.now_s), _Second())

    def accepted(self, seconds: float) -> None:
        self._second().accept_s.append(seconds)

    def replied(self, seconds: float) -> None:
        self._second().reply_s.append(seconds)

    def shown(self) -> None:
        self._second().shown += 1

    def pulse(self, pulse: Pulse, life: Life) -> None:
        """How the process says that it is, and how it looks from here."""
        second = self._second()
        self.gaps_ms.extend(pulse.gaps_ms)
        second.gap_max_ms = max(second.gap_max_ms, *pulse.gaps_ms, 0.0)
        second.units = max(second.units, pulse.units)
        second.running = max(second.running, pulse.running)
        self.commit_p99_s = max(self.commit_p99_s, pulse.commit_p99_s)
        names = ("units", "bytes", "live", "running", "waiting", "sending", "search_tail")
        for name in (*names, "wal_pages", "tasks"):
            self._peak(name, getattr(pulse, name))
        if life.number != self._life:
            self._life, self._last = life.number, {}
        for name, count in pulse.counters.items():
            self.counters[name] += count - self._last.get(name, 0)
        self._last = pulse.counters
        size = size_of(life.pid)
        if size is not None:
            second.memory = max(second.memory, size.memory)
            for name in size._fields:
                self._peak(name, getattr(size, name))
            age_s = trio.current_time() - life.started_s
            self.remember(life.number, [(age_s, size.memory)])

    def _peak(self, name: str, value: int) -> None:
        self.peaks[name] = max(self.peaks[name], value)

    def remember(self, life: int, samples: Iterable[tuple[float, int]]) -> None:
        """The memory of a life, at so many seconds of its age."""
        self._memory.setdefault(life, []).extend(samples)

    def growth(self) -> list[tuple[int, float]]:
        """Of each long life: how much memory has grown in its second half."""
        grown: list[tuple[int, float]] = []
        for number, samples in self._memory.items():
            age_s = samples[-1][0]
            if age_s < _GROWTH_AFTER_S:
                continue
            warm = _middle([m for at_s, m in samples if 0.5 * age_s <= at_s <= 0.6 * age_s])
            last = _middle([m for at_s, m in samples if at_s >= 0.9 * age_s])
            if warm and last:
                grown.append((number, last / warm - 1.0))
        return grown

    # In the end ----------------------------------------------------------------------------------

    def accept_ms(self) -> Spread:
        return spread_of(s * 1000 for second in self._seconds.values() for s in second.accept_s)

    def reply_ms(self) -> Spread:
        return spread_of(s * 1000 for second in self._seconds.values() for s in second.reply_s)

    def slots(self) -> list[Slot]:
        """The run in as many pieces as a table or a plot can hold."""
        last = max(self._seconds, default=0)
        width = last // _SLOTS_SHOWN_MAX + 1
        return [
            self._slot(start, min(width, last + 1 - start)) for start in range(0, last + 1, width)
        ]

    def _slot(self, start: int, width: int) -> Slot:
        empty = _Second()
        seconds = [self._seconds.get(at, empty) for at in range(start, start + width)]
        accept = [s * 1000 for second in seconds for s in second.accept_s]
        reply = [s * 1000 for second in seconds for s in second.reply_s]
        return Slot(
            at_s=float(start),
            seconds=float(width),
            acknowledged=len(accept),
            replied=len(reply),
            shown=sum(second.shown for second in seconds),
            accept_ms=spread_of(accept),
            reply_ms=spread_of(reply),
            memory_mb=round(max(second.memory for second in seconds) / 2**20, 1),
            units=max(second.units for second in seconds),
            running=max(second.running for second in seconds),
            gap_max_ms=round(max(second.gap_max_ms for second in seconds), 1),
        )


def _middle(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2] if values else 0


def facts_of_life(life: Life, started_s: float) -> dict[str, Any]:
    """One life, as the report tells it."""

    def since(at_s: float | None, from_s: float) -> float | None:
        return None if at_s is None else round(at_s - from_s, 4)

    return {
        "number": life.number,
        "started_s": since(life.started_s, started_s),
        "ended_s": since(life.ended_s, started_s),
        "end": life.asked,
        "code": life.code,
        "epoch": life.epoch,
        "open_s": round(life.opened_s, 4),
        "ready_after_s": since(life.ready_s, life.started_s),
        "acknowledged_after_s": since(life.acknowledged_s, life.started_s),
    }
