"""What a file held before the test began, so that a test can go on with the file of another one.

Keeps: the words of an older test can't be drawn again, because its plan is not known here. So they
are not compared with a plan, but with themselves: what was said then must still be said so.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from ..testing.invariants import inspecting
from .plan import PlanError
from .script import SOURCE, place_of

if TYPE_CHECKING:
    from pathlib import Path

    import apsw

    from .script import Place


class Before(NamedTuple):
    """Where a file stood."""

    first: dict[int, int]
    """The number of each conversation's next message."""
    deliveries: int
    messages: int
    """The last row of each."""
    digest: str
    """Over all that had been said."""

    def is_older(self, place: Place) -> bool:
        """Whether it was sent by an older test."""
        return place[1] < self.first.get(place[0], 0)


NOTHING = Before({}, 0, 0, "")


def before_of(path: Path) -> Before:
    """Of a file that goes on. Raises `PlanError` for one in which others have written."""
    first: Counter[int] = Counter()
    with inspecting(path) as db:
        named = "SELECT key FROM routes UNION SELECT key FROM sessions"
        keys = [str(key) for (key,) in db.execute(named)]
        foreign = [key for key in keys if not key.startswith(f"{SOURCE}:")]
        if foreign:
            what = f"{path} holds conversations that are not of a stress test, like {foreign[0]}"
            raise PlanError(what, hint="name another file: this command writes whatever it likes")
        for (name,) in db.execute("SELECT inbound_id FROM inbox"):
            place = place_of(str(name))
            if place is not None:
                first[place[0]] = max(first[place[0]], place[1] + 1)
        deliveries, messages = _last(db, "deliveries"), _last(db, "messages")
        return Before(dict(first), deliveries, messages, digest_of(db, messages))


def _last(db: apsw.Connection, table: str) -> int:
    for (n,) in db.execute(f"SELECT coalesce(max(n), 0) FROM {table}"):
        return int(str(n))
    return 0


def digest_of(db: apsw.Connection, messages: int) -> str:
    """Over everything that was said up to this row."""
    words = blake2b(digest_size=16)
    query = "SELECT n, session, seq, role, text FROM messages WHERE n <= ? ORDER BY n"
    for row in db.execute(query, (messages,)):
        words.update(repr(row).encode())
    return words.hexdigest() if messages else ""
