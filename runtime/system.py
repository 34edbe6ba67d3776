"""The real world: the wall clock and random ids. The only module that takes them; all else is
handed them.
"""

from __future__ import annotations

import os
import threading
import time
from typing import final

_RANDOM_BYTES = 10
_POOL_BYTES = _RANDOM_BYTES * 512


@final
class SystemClock:
    """The machine's clocks."""

    def now(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()


@final
class SystemIds:
    """48 bits of milliseconds, then 80 random bits, as 32 hexadecimal digits. Any thread may ask.

    Randomness is drawn from the system in pieces. Each drawing releases the interpreter lock: one
    for every id would hand the processor to the writer's thread after every single message, and no
    batch could gather.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool = b""
        self._used = 0
        self._owner = os.getpid()

    def fresh(self) -> str:
        with self._lock:
            # A forked child must not give out its parent's ids.
            if self._used == len(self._pool) or self._owner != os.getpid():
                self._pool, self._used, self._owner = os.urandom(_POOL_BYTES), 0, os.getpid()
            start, self._used = self._used, self._used + _RANDOM_BYTES
            random = self._pool[start : self._used].hex()
        return f"{time.time_ns() // 1_000_000:012x}{random}"
