"""The real world: the wall clock and random ids. The only module that takes them; all else is
handed them.
"""

from __future__ import annotations

import os
import time
from typing import final


@final
class SystemClock:
    """The machine's clocks."""

    def now(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()


@final
class SystemIds:
    """48 bits of milliseconds, then 80 random bits, as 32 hexadecimal digits."""

    def fresh(self) -> str:
        return f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"
