"""Search at a million messages: what it costs against the bare index, and what it costs a commit.

A script builds the file: a thousand sessions, messages of about 400 bytes from a vocabulary in
which some words are everywhere and some are rare. Then, inside one run:

- catching up: the writer's own slices index all of it; how fast, and for how long each one holds
  the writer;
- queries: each one by our reader and by bare SQL on the same index, in turn;
- commits: batches of one message and of 256, with the index behind the commits as it is, with
  nothing indexed at all, and with the index inside each transaction, in turn.

Run it alone: `python -m benchmarks.search --messages 1000000 --rounds 7`. The file is kept below
build/ and indexed anew each time.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw
import click
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from onepen.storage import commands as c
from onepen.storage.engine import EngineSettings
from onepen.storage.identity import Seq, SessionId, Uid
from onepen.storage.records import Draft, Search
from onepen.storage.sqlite import open_sqlite, schema
from onepen.storage.units import Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from onepen.storage.sqlite import SqliteEngine

_SESSIONS = 1_000
_TEXTS = 20_000
_WORDS = 40_000
_LENGTH = 400
_PAGE = 20
_BUILD = Path("build")

QUERIES = (
    ("rare term", "w39990"),
    ("rare OR rare", "w39990 OR w39000"),
    ("common AND rare", "w0 w39990"),
    ("phrase", '"w1 w0"'),
    ("common AND common", "w1 w2"),
    ("one common word", "w0"),
)


class _Clock:
    def now(self) -> int:
        return 1_700_000_000_000

    def monotonic(self) -> float:
        return time.monotonic()


def texts(seed: int = 1) -> list[str]:
    """Distinct texts; the word `wN` is the rarer the greater its number."""
    dice = random.Random(seed)
    weights = [1 / (rank + 3) for rank in range(_WORDS)]
    pool = dice.choices([f"w{rank}" for rank in range(_WORDS)], weights, k=_TEXTS * 90)
    made: list[str] = []
    place = 0
    for _ in range(_TEXTS):
        words: list[str] = []
        size = 0
        while size < _LENGTH:
            words.append(pool[place % len(pool)])
            size += len(words[-1]) + 1
            place += 1
        made.append(" ".join(words))
    return made


def _rows(count: int, said: list[str]) -> Iterator[tuple[int, int, bytes, int, int, str]]:
    for number in range(count):
        uid = (number + 1).to_bytes(16, "big")
        seq, session = divmod(number, _SESSIONS)
        yield session + 1, seq, uid, number % 2, number, said[number * 7919 % len(said)]


def build(path: Path, count: int) -> None:
    """The file, with nothing indexed yet."""
    db = apsw.Connection(str(path))
    try:
        db.pragma("auto_vacuum", "INCREMENTAL")
        db.pragma("journal_mode", "WAL")
        db.pragma("synchronous", "OFF")
        db.pragma("cache_size", -256 * 1024)
        schema.migrate(db, str(path), 0)
        with db:
            db.executemany(
                "INSERT INTO sessions (id, key, source, started_ms) VALUES (?, ?, ?, 0)",
                ((f"s{n}", f"bench:{n}", f"source{n % 3}") for n in range(_SESSIONS)),
            )
            db.executemany(
                "INSERT INTO messages (session, seq, uid, role, state, carried, kind, created_ms, "
                "text) SELECT ?1, ?2, ?3, iif(?4, 'assistant', 'user'), 0, 0, 0, ?5, ?6",
                _rows(count, texts()),
            )
            db.execute(
                "INSERT INTO heads SELECT s.n, count(m.n), count(m.n), count(m.n), count(m.n), "
                "count(m.n) * ?, 0, 0, 0, 0 FROM sessions s "
                "LEFT JOIN messages m ON m.session = s.n GROUP BY s.n",
                (_LENGTH,),
            )
        db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    finally:
        db.close()


def catch_up(engine: SqliteEngine) -> tuple[list[float], list[float]]:
    """How long each slice held the writer, in ms, and how much of it was work; until none is left.

    The rest is the disk's: each slice is synced.
    """
    held: list[float] = []
    worked: list[float] = []
    while engine.chore_due(idle=True):
        begun_s, work_s = time.perf_counter(), time.thread_time()
        engine.chore(idle=True)
        held.append((time.perf_counter() - begun_s) * 1e3)
        worked.append((time.thread_time() - work_s) * 1e3)
        if engine.upkeep_due(idle=False):  # beside the writer, when it is a thread of its own
            engine.upkeep()
            engine.finish_upkeep()
    return held, worked


def _stored_bytes(path: Path) -> tuple[int, int]:
    """Of the messages table with its indices, and of the search index; whole pages."""
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        sql = "SELECT coalesce(sum(pgsize), 0) FROM dbstat WHERE aggregate = TRUE AND name LIKE ?"
        rows: list[Any] = [db.execute(sql, (name,)).fetchall() for name in ("messages%", "search%")]
    finally:
        db.close()
    return rows[0][0][0], rows[1][0][0]


# Queries -----------------------------------------------------------------------------------------


def _ours(engine: SqliteEngine, search: Search) -> float:
    begun_s = time.perf_counter()
    with engine.reading() as reader:
        reader.search(search)
    return (time.perf_counter() - begun_s) * 1e3


def _bare(db: apsw.Connection, expression: str, order: str) -> float:
    begun_s = time.perf_counter()
    sql = "SELECT rowid FROM search_index WHERE search_index MATCH ? ORDER BY "
    db.execute(sql + order + f" LIMIT {_PAGE}", (expression,)).fetchall()
    return (time.perf_counter() - begun_s) * 1e3


def _hits(db: apsw.Connection, expression: str) -> int:
    sql = "SELECT count(*) FROM search_index WHERE search_index MATCH ?"
    rows: list[Any] = db.execute(sql, (expression,)).fetchall()
    return int(rows[0][0])


def _expression(query: str) -> str:
    if '"' in query or " OR " in query:
        return query
    return " AND ".join(query.split())


def measure_queries(engine: SqliteEngine, path: Path, rounds: int) -> Table:
    table = Table(title=f"one page of {_PAGE}, p50 ms; ours holds snippets and rows, bare only ids")
    for name in ("query", "hits", "bare by rank", "ours", "÷", "bare newest", "ours", "filtered"):
        table.add_column(name, justify="left" if name == "query" else "right")
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    db.pragma("cache_size", -64 * 1024)
    try:
        for name, query in QUERIES:
            search, expression = Search(text=query, limit=_PAGE), _expression(query)
            samples = [
                (
                    _bare(db, expression, "rank"),
                    _ours(engine, search),
                    _bare(db, expression, "rowid DESC"),
                    _ours(engine, replace(search, order="newest")),
                    _ours(engine, replace(search, source="source1", role="user")),
                )
                for _ in range(rounds + 1)
            ][1:]
            rank, ours, newest, ours_newest, filtered = map(
                statistics.median, zip(*samples, strict=True)
            )
            table.add_row(
                name,
                f"{_hits(db, expression):,}",
                f"{rank:,.2f}",
                f"{ours:,.2f}",
                f"{ours / rank:.2f}",
                f"{newest:,.2f}",
                f"{ours_newest:,.2f}",
                f"{filtered:,.2f}",
            )
    finally:
        db.close()
    return table


# Commits -----------------------------------------------------------------------------------------


class _Writing:
    """Batches of messages into a database that is there already."""

    def __init__(self, path: Path, said: list[str], tail_max: int) -> None:
        settings = EngineSettings(search_tail_rows_max=tail_max)
        self.engine = open_sqlite(path, _Clock(), settings)
        self._said = said
        self._number = 10**9
        with self.engine.reading() as reader:
            session = reader.session(SessionId("s0"))
            assert session is not None
            self._seq: int = session.next_seq

    def batch(self, size: int) -> None:
        units: list[Unit] = []
        for _ in range(size):
            self._number += 1
            text = self._said[self._number * 7919 % len(self._said)]
            draft = Draft(uid=Uid(f"{self._number:032x}"), role="user", text=text, created_ms=1)
            append = c.AppendMessages(
                session_id=SessionId("s0"), base_seq=Seq(self._seq), messages=(draft,)
            )
            units.append(Unit((append,)))
            self._seq += 1
        self.engine.stage(units)
        self.commit()

    def commit(self) -> None:
        self.engine.commit()
        if self.engine.chore_due(idle=False):
            self.engine.chore(idle=False)

    def keep_up(self) -> None:
        """Copy the log, as a thread beside the writer does."""
        if self.engine.upkeep_due(idle=False):
            self.engine.upkeep()
            self.engine.finish_upkeep()


class _Inside(_Writing):
    """The same with the index in each transaction, as a trigger would have it."""

    def __init__(self, path: Path, said: list[str], tail_max: int) -> None:
        super().__init__(path, said, tail_max)
        db = apsw.Connection(str(path))
        db.execute(
            "CREATE TRIGGER indexed AFTER INSERT ON messages BEGIN INSERT INTO search_index "
            "(rowid, text, facets) VALUES (new.n, new.text, '¤' || new.session); END"
        )
        db.execute("INSERT INTO search_index (search_index, rank) VALUES ('automerge', 4)")
        db.close()


def measure_commits(path: Path, rounds: int) -> Table:
    table = Table(title="µs for each message, and the longest wait for a batch in ms")
    table.add_column("batches of")
    ways: tuple[tuple[str, Callable[..., _Writing], int], ...] = (
        ("not indexed", _Writing, 2**40),
        ("behind the commits", _Writing, EngineSettings().search_tail_rows_max),
        ("in the transaction", _Inside, 2**40),
    )
    said = texts(2)
    writings: list[tuple[str, _Writing]] = []
    for name, kind, tail_max in ways:
        copy = path.with_name(f"{path.stem}-{name.replace(' ', '-')}.db")
        shutil.copy(path, copy)
        writings.append((name, kind(copy, said, tail_max)))
        for column in (name, "÷", "p99 ms", "longest ms"):
            table.add_column(column, justify="right")
    try:
        for size, batches in ((1, 3_000), (256, 120)):
            costs: dict[str, list[float]] = {name: [] for name, _ in writings}
            waits: dict[str, list[float]] = {name: [] for name, _ in writings}
            for _ in range(rounds):
                for name, writing in writings:
                    for _ in range(batches):
                        one_s = time.perf_counter()
                        writing.batch(size)
                        waits[name].append((time.perf_counter() - one_s) * 1e3)
                        writing.keep_up()
                    costs[name].append(sum(waits[name][-batches:]) / batches / size * 1e3)
            base = statistics.median(costs[ways[0][0]])
            row = [f"{size}"]
            for name, _ in writings:
                median, longest = statistics.median(costs[name]), sorted(waits[name])
                p99 = longest[len(longest) * 99 // 100]
                row += [f"{median:.1f}", f"{median / base:.2f}", f"{p99:.2f}", f"{longest[-1]:.1f}"]
            table.add_row(*row)
    finally:
        for _, writing in writings:
            writing.engine.close()
    return table


@click.command()
@click.option("--messages", default=1_000_000, show_default=True, type=click.IntRange(_SESSIONS))
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1, 100))
def main(messages: int, rounds: int) -> None:
    """Search against the bare index, and commits with and without it."""
    console = Console(width=150)
    _BUILD.mkdir(exist_ok=True)
    stored = _BUILD / f"search-{messages}.db"
    if not stored.exists():
        console.print(f"building {stored} …")
        build(stored.with_suffix(".new"), messages)
        stored.with_suffix(".new").rename(stored)
    path = _BUILD / "search.db"
    for old in _BUILD.glob("search.db*"):
        old.unlink()
    shutil.copy(stored, path)
    engine = open_sqlite(path, _Clock())
    try:
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        held, worked = map(sorted, catch_up(engine))
        took_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
        console.print(
            f"catching up: {messages / took_s:,.0f} messages/s, {cpu_s / messages * 1e6:.1f} µs "
            f"CPU each; {len(held):,} slices, p50 {statistics.median(held):.1f} ms, p99 "
            f"{held[len(held) * 99 // 100]:.1f} ms, the longest {held[-1]:.1f} ms; of CPU p99 "
            f"{worked[len(worked) * 99 // 100]:.1f} ms, the longest {worked[-1]:.1f} ms"
        )
        console.print(measure_queries(engine, path, rounds))
    finally:
        engine.close()
    content = messages * _LENGTH
    rows_bytes, index_bytes = _stored_bytes(path)
    console.print(
        f"bytes ÷ content: messages and their indices {rows_bytes / content:.2f}, with the search "
        f"index {(rows_bytes + index_bytes) / content:.2f}"
    )
    console.print(measure_commits(path, rounds))
    for copy in _BUILD.glob("search*-*ed*.db*"):
        copy.unlink()


if __name__ == "__main__":
    main()
