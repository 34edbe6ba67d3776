"""The search index against the messages: word by word, in memory that does not grow with them.

An index can be sound in itself and lack what it should hold. So every place of a word that it
holds is read, and every place that the messages ask for is computed; of both sides sums are kept,
one for some hundred messages. Where two sums differ, a second look tells which messages they are.
Of a large index only a part is compared so, spread over all of it, unless everything was asked for;
that each message is in it, and nothing else, is looked at for all of them.

Keeps: one snapshot for both sides; messages whose entry is about to be made again are left out of
both. Must run on a connection that can't write: it makes a table of its own, of the temporary kind.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import apsw

from ..words import EDITION, words_of
from .rows import ERASED, REWOUND
from .search_index import facet_of, readable, searchable_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BUCKET = 256  # messages that share a sum
_LOOKED_AT_MAX = 16  # buckets in which the messages themselves are found out
_PER_TICK = 4_096
_ALL_MAX = 100_000  # messages that are compared word by word in any case, some seconds' worth
_MASK = 2**64 - 1
_PLACES = "temp.onepen_places"
_MISSING = "it is not in the index: a search does not find it"
_SURPLUS = "the index has it, and should not"


def index_findings(
    db: apsw.Connection, at: Callable[[int], None], *, full: bool
) -> Iterator[tuple[str, str]]:
    """Where the index and the messages disagree, and how. `at` is told how far it is."""
    rows: list[Any] = db.execute(
        "SELECT first_n, last_n, edition, phase FROM search_state"
    ).fetchall()
    if not rows:
        yield "search_state", "it is gone: nobody knows what is indexed"
        return
    first, last, edition, phase = rows[0]
    if phase != "ready" or (edition != EDITION and last >= first):
        return  # it is about to be made anew, and searches read the messages meanwhile
    db.pragma("query_only", 0)  # a table of our own, in memory; the file is open for reading only
    try:
        db.execute(
            f"CREATE VIRTUAL TABLE IF NOT EXISTS {_PLACES} "
            "USING fts5vocab('main', 'search_index', 'instance')"
        )
    finally:
        db.pragma("query_only", 1)
    db.execute("SAVEPOINT looking")  # one snapshot, also where none is held yet
    try:
        stride = 1 if full else max(1, (last - first) // _ALL_MAX)
        if stride > 1:
            yield from _presence(db, first, last)
        yield from _differences(db, first, last, stride, at)
    except (apsw.CorruptError, apsw.SQLError) as error:
        yield "search_index", f"it can't be read: {error}"
    finally:
        db.execute("RELEASE looking")


def _presence(db: apsw.Connection, first: int, last: int) -> Iterator[tuple[str, str]]:
    """Which messages are in the index: neither too few nor too many, whatever it says of them."""
    absent = (
        "AND NOT EXISTS (SELECT 1 FROM search_index_docsize d WHERE d.id = m.n) "
        "AND NOT EXISTS (SELECT 1 FROM search_changes c WHERE c.n = m.n)"
    )
    for _, _, _, place in _asked_for(db, first, last, absent):
        yield place, _MISSING
    surplus = db.execute(
        "SELECT d.id FROM search_index_docsize d LEFT JOIN messages m ON m.n = d.id "
        f"WHERE NOT EXISTS (SELECT 1 FROM search_changes c WHERE c.n = d.id) AND (m.n IS NULL OR "
        f"m.carried <> 0 OR m.state = {REWOUND} OR m.kind & {ERASED} OR d.id NOT BETWEEN ? AND ?)",
        (first, last),
    )
    for (n,) in surplus:
        yield f"message {n}", _SURPLUS


def _differences(
    db: apsw.Connection, first: int, last: int, stride: int, at: Callable[[int], None]
) -> Iterator[tuple[str, str]]:
    changed = {n for (n,) in db.execute("SELECT n FROM search_changes")}
    expected: dict[int, int] = defaultdict(int)
    words = 0
    for number, (n, total, count, _) in enumerate(
        _asked_for(db, first, last, f"AND (m.n / {_BUCKET}) % {stride} = 0")
    ):
        words += count
        if n not in changed:
            expected[n // _BUCKET] = (expected[n // _BUCKET] + total) & _MASK
        if number % _PER_TICK == 0:
            at(n // 2)
    found: dict[int, int] = defaultdict(int)
    for number, (n, mark) in enumerate(_held(db, f"(doc / {_BUCKET}) % {stride} = 0")):
        if n not in changed:
            found[n // _BUCKET] = (found[n // _BUCKET] + mark) & _MASK
        if number % (_PER_TICK * 64) == 0:
            at((last + last * min(number, words) // max(words, 1)) // 2)
    differ = sorted(
        bucket for bucket in expected.keys() | found.keys() if expected[bucket] != found[bucket]
    )
    if differ:
        yield from _messages_of(db, differ[:_LOOKED_AT_MAX], (first, last), changed)
    if len(differ) > _LOOKED_AT_MAX:
        more = len(differ) - _LOOKED_AT_MAX
        yield "messages", f"in {more:,} more groups of {_BUCKET} something is not as it should be"


def _messages_of(
    db: apsw.Connection, buckets: list[int], within: tuple[int, int], changed: set[int]
) -> Iterator[tuple[str, str]]:
    """Message by message, in those groups only."""
    expected: dict[int, int] = {}
    places: dict[int, str] = {}
    for bucket in buckets:
        low, high = bucket * _BUCKET, (bucket + 1) * _BUCKET - 1
        low, high = max(low, within[0]), min(high, within[1])
        for n, total, _, place in _asked_for(db, low, high):
            expected[n], places[n] = total, place
    looked_at = set(buckets)
    found: dict[int, int] = defaultdict(int)
    for n, mark in _held(db, f"doc / {_BUCKET} IN ({', '.join(map(str, looked_at))})"):
        found[n] = (found[n] + mark) & _MASK
    for n in sorted(expected.keys() | found.keys()):
        wanted, held = expected.get(n, 0), found.get(n, 0)
        if n in changed or wanted == held:
            continue
        where = places.get(n, f"message {n}")
        if not held:
            yield where, _MISSING
        elif not wanted:
            yield where, _SURPLUS
        else:
            yield where, "the index has other words of it than it has"


def _asked_for(
    db: apsw.Connection, first: int, last: int, more: str = ""
) -> Iterator[tuple[int, int, int, str]]:
    """Each message that is to be found: its number, the sum of its words' places, how many they
    are, and where it is.
    """
    rows = db.execute(
        "SELECT m.n, m.session, m.seq, s.id, CAST(m.text AS BLOB), CAST(m.details AS BLOB) "
        "FROM messages m LEFT JOIN sessions s ON s.n = m.session "
        f"WHERE m.n BETWEEN ? AND ? AND m.carried = 0 AND m.state <> {REWOUND} "
        f"AND m.kind & {ERASED} = 0 {more} ORDER BY m.n",
        (first, last),
    )
    for n, session, seq, session_id, text, details in rows:
        words = words_of(searchable_text(readable(text), readable(details)))
        if not words:
            continue
        total = hash((facet_of(session), "facets", 0))
        for offset, word in enumerate(words):
            total += hash((word, "text", offset))
        yield n, total & _MASK, len(words), f"{session_id}, message {seq}"


def _held(db: apsw.Connection, where: str) -> Iterator[tuple[int, int]]:
    """Each place of a word that the index holds: the message's number, and a mark of it."""
    places = db.execute(f"SELECT term, doc, col, offset FROM {_PLACES} WHERE {where}")
    for term, n, column, offset in places:
        yield n, hash((term, column, offset))
