"""Names of things: the id types, and where time and ids come from.

Wall clock, ids and randomness are handed in, never taken, so that a simulated run is a function of
its inputs. Everything below `runtime/` sees time and ids only through the two protocols here.

A generated id is 32 lower-case hexadecimal digits: 48 bits of milliseconds, then 80 random bits. So
ids sort by time, which keeps the tail of every index that holds them in one place.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NewType, Protocol

SessionKey = NewType("SessionKey", str)
SessionId = NewType("SessionId", str)
TurnId = NewType("TurnId", str)
Uid = NewType("Uid", str)
Seq = NewType("Seq", int)
Incarnation = NewType("Incarnation", int)
BlobId = NewType("BlobId", str)

UID_DIGITS = 32
_TIME_DIGITS = 12


class Clock(Protocol):
    """Time, handed in."""

    def now(self) -> int:
        """Milliseconds since 1970, by the wall clock."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean something."""
        ...


class Ids(Protocol):
    """Fresh ids, handed in."""

    def fresh(self) -> str:
        """An id that was never given before; sorts by time."""
        ...


def derived_uid(turn_id: TurnId, attempt: int, index: int) -> Uid:
    """The uid of the `index`-th message that an agent reports for one attempt of a turn.

    The same report gives the same uids, so reporting twice is harmless. The turn's own time stays
    in front: derived uids sort beside those that were given at the time.
    """
    digest = blake2b(f"{turn_id}/{attempt}/{index}".encode(), digest_size=10).hexdigest()
    return Uid(turn_id[:_TIME_DIGITS] + digest)
