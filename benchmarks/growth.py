"""Whether an append costs more when there is more already: in its session, or in the database.

Three databases are built with plain SQL, then the Writer appends to each in turn, round after
round, so that all three meet the same moments of the machine. The cost that matters is CPU time;
wall time is shown beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import apsw
from msgspec import Struct

from onepen.runtime.system import SystemClock
from onepen.storage.sqlite import open_sqlite, schema

from .cells import TEXT_BYTES, Outcome
from .meter import TEXTS
from .writer import key_of, session_id_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PRODUCERS = 16
BYSTANDERS = 1_000  # sessions that hold the rest of a large database


class History(Struct, frozen=True):
    """How much is there before the first append."""

    name: str
    in_session: int
    in_database: int


HISTORIES = (
    History("10 in the session", 10, 10 * PRODUCERS),
    History("10,000 in the session", 10_000, 10_000 * PRODUCERS),
    History("1,000,000 in the database", 10, 1_000_000),
)


class GrowthSample(Struct, frozen=True):
    """One round of one history."""

    history: str
    round: int
    outcome: Outcome


def _rows(history: History) -> Iterator[tuple[int, int, bytes, str]]:
    """Session, seq, uid, text: producers' sessions first, then the bystanders', a little of each in
    turn.
    """
    uid = 0
    for seq in range(history.in_session):
        for n in range(PRODUCERS):
            uid += 1
            yield n + 1, seq, uid.to_bytes(16, "big"), TEXTS[seq % len(TEXTS)]
    rest = history.in_database - history.in_session * PRODUCERS
    for seq in range(-(-rest // BYSTANDERS)):
        for n in range(min(BYSTANDERS, rest - seq * BYSTANDERS)):
            uid += 1
            yield PRODUCERS + n + 1, seq, uid.to_bytes(16, "big"), TEXTS[seq % len(TEXTS)]


def build(history: History, path: Path) -> None:
    """A database with this history, as if it had been written message by message."""
    db = apsw.Connection(str(path))
    try:
        db.pragma("auto_vacuum", "INCREMENTAL")
        db.pragma("journal_mode", "WAL")
        db.pragma("synchronous", "OFF")
        db.pragma("cache_size", -256 * 1024)
        schema.migrate(db, str(path), 0)
        with db:
            db.executemany(
                "INSERT INTO sessions (id, key, source, started_ms) VALUES (?, ?, '', 0)",
                ((session_id_of(n), key_of(n)) for n in range(PRODUCERS + BYSTANDERS)),
            )
            db.executemany(
                "INSERT INTO routes (key, session_id, incarnation, route_version) "
                "VALUES (?, ?, 1, 1)",
                ((key_of(n), session_id_of(n)) for n in range(PRODUCERS + BYSTANDERS)),
            )
            db.executemany(
                "INSERT INTO messages (session, seq, uid, role, state, carried, kind, created_ms, "
                "text) VALUES (?, ?, ?, 'user', 0, 0, 0, 0, ?)",
                _rows(history),
            )
            db.execute(
                "INSERT INTO heads SELECT s.n, count(m.n), count(m.n), count(m.n), count(m.n), "
                "count(m.n) * ?, 0, 0, 0, 0 FROM sessions s "
                "LEFT JOIN messages m ON m.session = s.n GROUP BY s.n",
                (TEXT_BYTES,),
            )
        db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    finally:
        db.close()
    # The search index of what is there is made before the clock starts, as it was when it was said.
    engine = open_sqlite(path, SystemClock())
    try:
        while engine.maintain(idle=True):
            pass
    finally:
        engine.close()
