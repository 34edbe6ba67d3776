"""Everything that is wrong with a database, as findings: what, where, and what to do about it.

    structure   SQLite's own check of its pages and indices
    schema      the tables, indices and triggers that a new database has
    references  rows that refer to what is not there
    rules       what must hold between the rows (`rules.py`)
    rows        text and JSON that can't be read
    index       the search index, word by word against the messages (`index_check.py`)

Keeps: nothing is written, and a check beside a running process holds nobody up; memory is bounded,
however much is wrong: of each kind some are shown and the others counted. Damaged pages end the
check, for what comes after would report consequences only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import apsw
import msgspec

from ..upkeep import Finding
from . import schema
from .backup import problems_of
from .index_check import index_findings
from .rows import Details
from .rules import RULES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..upkeep import Severity, Tick

SHOWN_MAX = 20
_LOOK_EVERY = 100_000  # instructions of SQLite's machine: some milliseconds
_ROWS_PER_TICK = 5_000

RECOUNTED = frozenset(
    [
        "every session has its head",
        "seqs are 0 to next_seq - 1",
        "message_count counts the originals",
        "tool_call_count counts the calls",
        "active_count counts the active rows",
        "active_bytes adds up the active rows",
        "no active row stands before first_active",
        "a revision moves with its transcript",
        "cost adds up the calls",
        "tokens add up the calls",
    ]
)
"""Rules about numbers that are made anew from the rows they count."""
ROUTES = "a route never names a session that was rotated away"
CHILDREN = "a rotation has one child"

REPAIR = "`onepen doctor --repair` mends it"
BACKUP = "restore a backup, or take what can be read out of it with `onepen export`"

# Columns that hold JSON; all others are text, numbers or bytes.
_JSON = frozenset(
    [
        ("sessions", "meta"),
        ("sessions", "tokens"),
        ("sessions", "auxiliary_tokens"),
        ("turns", "outcome"),
        ("turns", "history"),
        ("messages", "details"),
        ("rewinds", "changed"),
        ("inbox", "body"),
        ("inbox", "reply_to"),
        ("deliveries", "target"),
        ("deliveries", "body"),
        ("deliveries", "history"),
        ("effects", "history"),
        ("questions", "choices"),
        ("timers", "inbound"),
    ]
)
_decode_json = msgspec.json.Decoder().decode
_decode_details = msgspec.json.Decoder(Details).decode


@final
class Check:
    """One look at a database, over a connection that can't write."""

    def __init__(
        self,
        db: apsw.Connection,
        tick: Tick,
        *,
        full: bool = False,
        shown_max: int = SHOWN_MAX,
    ) -> None:
        self._db = db
        self._tick = tick
        self._full = full
        self._shown_max = shown_max
        self._stage, self._done, self._total = "structure", 0, 1
        self._counts: dict[str, int] = {}
        self._found: list[Finding] = []

    def run(self) -> list[Finding]:
        self._db.set_progress_handler(self._look, _LOOK_EVERY)
        try:
            if self._structure():
                self._schema()
                self._references()
                self._rules()
                self._rows()
                self._index()
        except apsw.CorruptError as error:
            self._note("structure", "the file", str(error), BACKUP)
        finally:
            self._db.set_progress_handler(None, _LOOK_EVERY)
        return [*self._found, *self._others()]

    # Telling -----------------------------------------------------------------------------------

    def _begin(self, stage: str, total: int = 1) -> None:
        self._stage, self._done, self._total = stage, 0, total
        self._tick(stage, 0, total)

    def _at(self, done: int) -> None:
        self._done = done
        self._tick(self._stage, done, self._total)

    def _look(self) -> bool:
        self._tick(self._stage, self._done, self._total)
        return False

    def _note(
        self,
        kind: str,
        where: str,
        what: str,
        advice: str,
        *,
        repairable: bool = False,
        severity: Severity = "error",
    ) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._counts[kind] <= self._shown_max:
            self._found.append(
                Finding(
                    kind=kind,
                    severity=severity,
                    where=where,
                    what=what,
                    advice=advice,
                    repairable=repairable,
                )
            )

    def _others(self) -> Iterator[Finding]:
        for kind, count in self._counts.items():
            if count > self._shown_max:
                like = next(one for one in self._found if one.kind == kind)
                what = f"and {count - self._shown_max:,} more of this kind"
                yield msgspec.structs.replace(like, where="", what=what)

    # The parts ---------------------------------------------------------------------------------

    def _structure(self) -> bool:
        """Whether the tables can be read."""
        self._begin("structure")
        problems, index = problems_of(self._db, full=self._full)
        for problem in problems:
            # An index that disagrees with its table is made again out of it.
            mends = " index " in problem and "non-unique" not in problem
            self._note(
                "structure", "the file", problem, REPAIR if mends else BACKUP, repairable=mends
            )
        for problem in index:
            self._note("search index", "search_index", problem, REPAIR, repairable=True)
        self._at(1)
        return all(one.repairable for one in self._found)

    def _schema(self) -> None:
        self._begin("schema")
        expected, found = schema_of_new(), _objects_of(self._db)
        for name, (kind, table, sql) in expected.items():
            if name in found and found[name][2] == sql:
                continue
            mends = kind in ("index", "trigger") and not (sql is None or table not in found)
            search = name.startswith("search_index")
            what = "it is another than it should be" if name in found else "it is gone"
            self._note(
                "search index" if search else "schema",
                f"{kind} {name}",
                what,
                REPAIR if mends or search else BACKUP,
                repairable=mends or search,
            )
        for name in found.keys() - expected.keys():
            kind = found[name][0]
            advice = "it does no harm unless it is a trigger; remove it if it is not yours"
            self._note("schema", f"{kind} {name}", "it is not ours", advice, severity="warning")
        self._at(1)

    def _references(self) -> None:
        self._begin("references")
        for table, n, parent, _ in self._ask("PRAGMA foreign_key_check"):
            what = f"it refers to a row of {parent} that is not there"
            self._note("references", f"{table}, row {n}", what, BACKUP)
        self._at(1)

    def _rules(self) -> None:
        self._begin("rules", len(RULES))
        for number, (rule, query) in enumerate(RULES.items()):
            try:
                for row in self._ask(query):
                    mends = _is_mended(rule, row)
                    advice = REPAIR if mends else BACKUP
                    self._note(rule, str(row[0]), f"found {row[1:]!r}", advice, repairable=mends)
            except (apsw.SQLError, UnicodeDecodeError) as error:
                what = f"it can't be told: {error}"
                self._note(rule, "", what, "mend what can't be read first")
            self._at(number + 1)

    def _rows(self) -> None:
        tables: list[Any] = self._ask(
            "SELECT m.name, (SELECT max(rowid) FROM sqlite_schema) FROM sqlite_schema m "
            "WHERE m.type = 'table' AND m.name NOT LIKE 'search%' AND m.name NOT LIKE 'sqlite%'"
        )
        self._begin("rows", len(tables))
        for number, (table, _) in enumerate(tables):
            self._readable(table)
            self._at(number + 1)

    def _readable(self, table: str) -> None:
        columns: list[Any] = self._ask(f"SELECT name, type, pk FROM pragma_table_info('{table}')")
        texts = [name for name, kind, _ in columns if kind == "TEXT"]
        if not texts:
            return
        keys = [name for name, _, key in columns if key] or ["rowid"]
        # As bytes: what can't be read must not stop the reading of all the others.
        chosen = ", ".join([f'CAST("{name}" AS BLOB)' for name in (*texts, *keys)])
        for number, row in enumerate(self._db.execute(f'SELECT {chosen} FROM "{table}"')):
            for name, stored in zip(texts, row, strict=False):
                problem = _problem_of(table, name, stored)
                if problem is not None:
                    place = ", ".join(_shown(one) for one in row[len(texts) :])
                    advice = "it is shown as far as it can be read; erase it if it disturbs"
                    self._note("rows", f"{table} ({place}), {name}", problem, advice)
            if number % _ROWS_PER_TICK == 0:
                self._look()

    def _index(self) -> None:
        (total,) = self._ask("SELECT coalesce(max(n), 0) FROM messages")[0]
        self._begin("index", max(total, 1))
        for where, what in index_findings(self._db, self._at, full=self._full):
            self._note("search index", where, what, REPAIR, repairable=True)
        self._at(self._total)

    def _ask(self, sql: str) -> list[Any]:
        return self._db.execute(sql).fetchall()


def _is_mended(rule: str, row: tuple[Any, ...]) -> bool:
    """Whether a repair knows what the right value is."""
    if rule == "seqs are 0 to next_seq - 1":
        _, _, count, first, last, distinct = row
        # Nothing is missing between them: only their number was wrong.
        return bool(count == distinct and (count == 0 or (first == 0 and last == count - 1)))
    if rule == CHILDREN:
        return bool(row[1] == 0)
    return rule in RECOUNTED or rule == ROUTES


def _problem_of(table: str, column: str, stored: bytes | None) -> str | None:
    if stored is None:
        return None
    try:
        text = stored.decode()
    except UnicodeDecodeError:
        return "it is not valid UTF-8"
    if (table, column) not in _JSON:
        return None
    try:
        if (table, column) == ("messages", "details"):
            _decode_details(text)
        else:
            _decode_json(text)
    except msgspec.DecodeError:
        return "it is not the JSON that was written"
    return None


def _shown(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def schema_of_new() -> dict[str, tuple[str, str, str | None]]:
    """The tables, indices and triggers of a new database."""
    db = apsw.Connection(":memory:")
    try:
        schema.migrate(db, ":memory:", 0)
        return _objects_of(db)
    finally:
        db.close()


def _objects_of(db: apsw.Connection) -> dict[str, tuple[str, str, str | None]]:
    rows: list[Any] = db.execute(
        "SELECT name, type, tbl_name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite%'"
    ).fetchall()
    return {name: (kind, table, _plain(sql)) for name, kind, table, sql in rows}


def _plain(sql: str | None) -> str | None:
    """A declaration without comments and line breaks, in which versions of SQLite may differ."""
    if sql is None:
        return None
    lines = (line.partition("--")[0] for line in sql.splitlines())
    return " ".join(" ".join(lines).split())
