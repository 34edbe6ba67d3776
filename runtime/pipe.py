"""Lines between a process that may be killed at any moment and whoever watches it from outside.

Keeps: a line is written only behind the call that it reports, so whatever is told was promised.
What still waits in the buffer when the process dies was never told; half a line never counts.
"""

from __future__ import annotations

import os
from typing import final

import msgspec
import trio

_TELL_EACH_S = 0.02  # long enough that a kill finds promises that were made but never told

_encode = msgspec.json.Encoder().encode


@final
class Teller:
    """Lines on their way out."""

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor = descriptor
        self._buffer = bytearray()

    def tell(self, line: msgspec.Struct) -> None:
        self._buffer += _encode(line) + b"\n"

    async def keep_telling(self) -> None:
        """Until it is cancelled; what is left then is for `flush`."""
        while True:
            await trio.sleep(_TELL_EACH_S)
            self.flush()

    def flush(self) -> None:
        # It may block the loop for a moment; the world outside always reads.
        while self._buffer:
            del self._buffer[: os.write(self._descriptor, self._buffer)]


@final
class Lines:
    """Bytes as they come through a pipe, cut into whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[bytes]:
        """The lines that are whole now; half a line waits for its other half."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def hang_up(self) -> None:
        """The pipe has ended: half a line will never be a whole one."""
        self._rest = b""
