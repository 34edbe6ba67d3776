"""What every contender is measured with: producers that wait for each acknowledgement, inside a
window of time.

With many producers that queue for one resource, acknowledgements come in waves: all of them first
store the user's message, then all of them the answer. A short window may then hold several whole
waves of a fast contender and none of a slow one, and flatter or ruin either. So the window opens
only when there were as many messages as there are producers, and it stays open, beyond its time if
need be, until `least_messages` are counted, and a whole number for each producer: it begins and
ends with an acknowledgement, at the same place of a wave.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import apsw

from .cells import TEXT_BYTES, Cell, Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# Some variety, so that no layer can gain from one string being the same object all the time.
TEXTS = tuple(
    " ".join(f"{word * 7919 + text * 104729:x}" for word in range(TEXT_BYTES))[:TEXT_BYTES]
    for text in range(64)
)
MESSAGE_TABLES = (
    "messages",
    "messages_place",
    "messages_original",
    "messages_carried",
    "messages_covering",
)


class Meter:
    """Latencies inside the window, the number of all messages, and the CPU time that all of them
    took.
    """

    def __init__(self, cell: Cell) -> None:
        self._window_s = cell.window_s
        self._open_s = time.perf_counter() + cell.warm_up_s
        self._close_s = self._open_s + cell.window_s
        self._producers = cell.condition.producers
        self._least = cell.least_messages
        self._opened_s = time.perf_counter()
        self._closed = False
        self._latencies_s: list[float] = []
        self._counted = 0
        self._cpu_s = time.process_time()
        self.messages = 0

    async def produce(self, append: Callable[[], Awaitable[object]]) -> None:
        """Append, wait for the acknowledgement, append again, until the window closes."""
        latencies_s = self._latencies_s
        begun_s = time.perf_counter()
        while True:
            await append()
            ended_s = time.perf_counter()
            self.messages += 1
            if self._closed:
                break
            if ended_s < self._open_s or self.messages <= self._producers:
                self._opened_s, self._close_s = ended_s, ended_s + self._window_s
            else:
                latencies_s.append(ended_s - begun_s)
                count = len(latencies_s)
                whole = count >= self._least and count % self._producers == 0
                if whole and ended_s >= self._close_s:
                    self._closed = True
                    self._window_s = ended_s - self._opened_s
            begun_s = ended_s

    def batch(self, append: Callable[[], int]) -> None:
        """The same for a contender without acknowledgements: whole batches, no latencies."""
        while (begun_s := time.perf_counter()) < self._close_s:
            count = append()
            self.messages += count
            if begun_s >= self._open_s:
                self._counted += count
        # The last batch ends a little behind the window; that much longer was it open.
        self._window_s += time.perf_counter() - self._close_s

    def outcome(self, bytes_per_message: float | None, note: str = "") -> Outcome:
        cpu_s = time.process_time() - self._cpu_s
        found = sorted(self._latencies_s)
        return Outcome(
            messages=self.messages,
            rate=(len(found) or self._counted) / self._window_s,
            p50_ms=found[len(found) // 2] * 1000 if found else None,
            p99_ms=found[len(found) * 99 // 100] * 1000 if found else None,
            cpu_us=cpu_s / max(1, self.messages) * 1e6,
            bytes_per_message=bytes_per_message,
            sqlite=apsw.sqlite_lib_version(),
            note=note,
        )


def message_bytes(path: str) -> float:
    """Bytes in the file for each message: its table and its indices, whole pages, nothing else."""
    db = apsw.Connection(path)
    try:
        db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        marks = ", ".join("?" * len(MESSAGE_TABLES))
        size = db.execute(
            f"SELECT sum(pgsize) FROM dbstat WHERE aggregate = TRUE AND name IN ({marks})",
            MESSAGE_TABLES,
        ).get
        count = db.execute("SELECT count(*) FROM messages").get
    finally:
        db.close()
    return float(size) / max(1, int(count))
