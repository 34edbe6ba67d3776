"""The writing half of search: the index, made in small slices behind the commits.

The index is derived from `messages`. It covers a range of their numbers, `first_n` to `last_n`:
behind it is the tail, which every search reads as well; before it is what a new or a renewed index
has not come to yet. Rows inside the range that changed stand in `search_changes`, left there by
triggers, until their entry is made again.

Keeps:
- Nothing here can fail a write: a slice is a transaction of its own, and a damaged index is left
  alone until somebody asks for a new one.
- Each slice is bounded, in rows and in bytes, and so is the time for which a batch waits behind it.
- A slice's commit is synced like any other. What stands in the log unsynced, a sync that fails may
  take away for good, and copying the log would then write what is left of it into the file.
- What was deleted or erased leaves the index's pages too, once `scrub` is 0 again.

Belongs to the engine's thread. Must never touch anything but the index and its three tables.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import apsw
import msgspec

from ..commands import RebuildSearch
from ..words import EDITION, indexed_form
from .handlers import Handler, Handlers
from .rows import ERASED, REWOUND, Details
from .schema import SEARCH_CONFIG, SEARCH_INDEX
from .transaction import Transaction, refuse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..engine import EngineSettings

logger = logging.getLogger(__name__)

_SLICE_BYTES = 256 * 1024
_CHANGES = 128
_PAGES = 16  # of the index, merged or cleared in one slice
_ROWS_PER_PAGE = 8  # what is merged along with so many new rows lasts as merging goes on
_PIECES = 16  # that many slices leave so many pieces, and then they are merged at once: a piece of
# the index costs a merge more than linearly
_PATIENCE = 32  # batches without a pause, before what could wait gets a slice all the same
_ROWS_MIN, _ROWS_IDLE, _ROWS_MAX = 256, 512, 1_000

_decode_details = msgspec.json.Decoder(Details).decode

_ROWS = (
    # As bytes: a row that somebody damaged must not stop the indexing of all the others.
    "SELECT n, session, CAST(text AS BLOB), CAST(details AS BLOB), "
    f"carried = 0 AND state <> {REWOUND} AND kind & {ERASED} = 0 FROM messages WHERE "
)
_SIZE = "coalesce(octet_length(text), 0) + coalesce(octet_length(details), 0)"

# What the module of the index needs in order to open it at all, should one of them be gone.
_SHADOWS = """
CREATE TABLE IF NOT EXISTS search_index_data (id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE IF NOT EXISTS search_index_idx (segid, term, pgno, PRIMARY KEY (segid, term))
  WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS search_index_docsize (id INTEGER PRIMARY KEY, sz BLOB, origin INTEGER);
CREATE TABLE IF NOT EXISTS search_index_config (k PRIMARY KEY, v) WITHOUT ROWID;
INSERT OR IGNORE INTO search_index_config VALUES ('version', 4);
"""
# As the two records are with which a new index begins: no totals, no pieces.
_EMPTY = """
INSERT OR REPLACE INTO search_index_data VALUES (1, x''), (10, x'00000000ff000001000000');
"""


def searchable_text(text: str | None, details: str | None) -> str:
    """What of a message can be found: its text, that of its parts, and its tool calls."""
    if details is None:
        return text or ""
    try:
        more = _decode_details(details)
    except (msgspec.DecodeError, UnicodeDecodeError):  # damaged by somebody else's hand
        return text or ""
    said = [text or ""]
    for part in more.parts or ():
        told = part.get("text")
        if isinstance(told, str):
            said.append(told)
    for call in more.tool_calls:
        said += (call.name, call.arguments)
    return "\n".join(said)


def readable(stored: bytes | None) -> str | None:
    """A stored text, as far as it can be read."""
    return None if stored is None else stored.decode(errors="replace")


def facet_of(session: int) -> str:
    """The word under which all messages of a session stand, and that no text can have in it."""
    return f"¤{session}"


# The command -----------------------------------------------------------------------------------


def _rebuilds(tx: Transaction) -> int:
    row = tx.one("SELECT max(version) FROM changes WHERE scope = 'search' AND aspect = 'rebuild'")
    return row[0] if row is not None and row[0] is not None else 0


def _rebuild_begun(tx: Transaction, command: RebuildSearch) -> bool:
    return tx.was_set("search", "rebuild", command.replaces + 1, command)


def _begin_rebuild(tx: Transaction, command: RebuildSearch) -> None:
    version = _rebuilds(tx)
    if version != command.replaces:
        refuse("stale", "the search index", stored=version, given=command.replaces)
    tx.change("DELETE FROM search_state")
    tx.change("INSERT INTO search_state VALUES (1, 1, 0, '', 'clearing', 0)")
    tx.record_set("search", "rebuild", version + 1, command, command.at_ms)
    tx.search_renewed = True


HANDLERS: Handlers = {RebuildSearch: Handler(_rebuild_begun, _begin_rebuild)}


# The slices --------------------------------------------------------------------------------------


class SearchIndex:
    """What is left to be indexed, and one slice of it at a time."""

    def __init__(self, db: apsw.Connection, epoch: int, settings: EngineSettings) -> None:
        self._db = db
        self._epoch = epoch
        self._tail_max = settings.search_tail_rows_max
        self._pieces = 0
        self._merging = False
        self._resting = False
        self._rows_last = 0
        self._passed_by = 0
        self.tail = 0
        self.damage: str | None = None
        self._load()

    def _load(self) -> None:
        columns = "first_n, last_n, edition, phase, scrub"
        row = next(iter(self._db.execute(f"SELECT {columns} FROM search_state")), None)
        if row is None:
            self.damage = "its state is gone"
            self.first_n, self.last_n, self.edition, self.phase, self.scrub = 1, 0, "", "ready", 0
            return
        self.first_n, self.last_n, self.edition, self.phase, self.scrub = row

    # What is to be done ----------------------------------------------------------------------

    def batch_done(self, rows: int) -> None:
        """A batch is committed: so many rows came, perhaps, and the disk works."""
        self._rows_last = rows
        self._resting = False
        self._passed_by += 1

    def reload(self) -> None:
        """A command has asked for a new index."""
        self._load()
        self.damage, self._resting = None, False

    def due(self, *, idle: bool) -> bool:
        """Whether a slice is to be made; what can wait does so for others, but not for ever."""
        if self.damage is not None or self._resting:
            return False
        passed_by = self._passed_by >= _PATIENCE
        idle = idle or passed_by
        if self.phase == "clearing" or self._outdated:
            return idle
        (newest,) = self._one("SELECT coalesce(max(n), 0) FROM messages")
        self.tail = max(0, newest - self.last_n)
        if self.tail > (self._tail_max if passed_by or not idle else 0):
            return True
        left = self.first_n > 1 or self._merging or bool(self.scrub)
        return idle and (left or self._has_changes())

    @property
    def _outdated(self) -> bool:
        return self.edition != EDITION and self.last_n >= self.first_n

    def _has_changes(self) -> bool:
        return bool(self._one("SELECT EXISTS (SELECT 1 FROM search_changes)")[0])

    def _one(self, sql: str) -> tuple[Any, ...]:
        rows: list[tuple[Any, ...]] = self._db.execute(sql).fetchall()
        return rows[0]

    # One slice -------------------------------------------------------------------------------

    def slice(self, *, idle: bool) -> None:
        """Make the most urgent slice, or leave everything as it was.

        Raises only what a commit raises whose outcome nobody knows.
        """
        db = self._db
        passed_by = self._passed_by >= _PATIENCE and self.tail <= self._tail_max
        if idle or passed_by:
            self._passed_by = 0
        try:
            db.execute("BEGIN IMMEDIATE")
            if self._one("SELECT epoch FROM pen") != (self._epoch,):
                self._undo()  # the file has another owner, as the next batch will find out
                self._resting = True
                return
            self._work(idle=idle, passed_by=passed_by and not idle)
            # What the index still holds in memory would be written by the commit; an error there
            # would leave us in doubt about it.
            if self.phase == "ready":
                db.execute("INSERT INTO search_index (search_index) VALUES ('flush')")
            db.execute(
                "UPDATE search_state SET first_n = ?, last_n = ?, edition = ?, phase = ?, "
                "scrub = ?",
                (self.first_n, self.last_n, self.edition, self.phase, self.scrub),
            )
        except (apsw.CorruptError, apsw.SQLError) as error:
            self._give_up(str(error))
            return
        except (apsw.Error, MemoryError) as error:
            # A full or a sick disk. The next batch will say so to somebody who can act.
            logger.warning("an index slice failed and is tried again: %s", error)
            self._undo()
            self._resting = True
            return
        except BaseException:
            self._undo()
            raise
        db.execute("COMMIT")

    def _give_up(self, problem: str) -> None:
        logger.error("the search index is damaged, searches read the messages instead: %s", problem)
        self._undo()
        self.damage = problem

    def _undo(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        self._load()

    def _work(self, *, idle: bool, passed_by: bool) -> None:
        if self.phase == "clearing" or self._outdated:
            self._clear()
        elif passed_by:
            if not (self._redo_changes() or self._index_older()):
                self._merge(_PAGES)
        elif not idle:
            # More than the last batch brought, so that the tail gets no longer; and many, because
            # each slice costs a sync.
            rows = min(_ROWS_MAX, max(_ROWS_MIN, self._rows_last * 2))
            self._index_tail(rows)
            if self._merging:
                self._merge(max(_PAGES, rows // _ROWS_PER_PAGE))
        elif (self._merging and not self.scrub) or not self._index_more():
            self._merge(_PAGES)

    def _index_more(self) -> bool:
        return self._redo_changes() or self._index_tail(_ROWS_IDLE) or self._index_older()

    def _index_tail(self, limit: int) -> bool:
        rows = self._within(_ROWS + "n > ? ORDER BY n LIMIT ?", (self.last_n, limit))
        if not rows:
            return False
        if self.last_n < self.first_n:
            self.edition = EDITION
        self._add(rows)
        self.last_n = rows[-1][0]
        self._piece_made()
        return True

    def _index_older(self) -> bool:
        if self.first_n <= 1:
            return False
        rows = self._within(_ROWS + "n < ? ORDER BY n DESC LIMIT ?", (self.first_n, _ROWS_IDLE))
        if self.last_n < self.first_n:
            self.edition = EDITION
        self._add(reversed(rows))
        self.first_n = rows[-1][0] if rows else 1
        self._piece_made()
        return True

    def _piece_made(self) -> None:
        self._pieces += 1
        self._merging = self._merging or self._pieces >= _PIECES

    def _within(self, sql: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Rows up to the slice's bytes, and at least one."""
        rows: list[tuple[Any, ...]] = []
        size = 0
        for row in self._db.execute(sql.replace("SELECT ", f"SELECT {_SIZE}, ", 1), parameters):
            size += row[0]
            if rows and size > _SLICE_BYTES:
                break
            rows.append(row[1:])
        return rows

    def _add(self, rows: Iterable[tuple[Any, ...]]) -> None:
        entries: list[tuple[int, str, str]] = []
        for n, session, text, details, findable in rows:
            if not findable:
                continue
            form = indexed_form(searchable_text(readable(text), readable(details)))
            if form:
                entries.append((n, form, facet_of(session)))
        self._db.executemany(
            "INSERT INTO search_index (rowid, text, facets) VALUES (?, ?, ?)", entries
        )

    def _redo_changes(self) -> bool:
        numbers = [
            n for (n,) in self._db.execute("SELECT n FROM search_changes LIMIT ?", (_CHANGES,))
        ]
        for n in numbers:
            self._db.execute("DELETE FROM search_index WHERE rowid = ?", (n,))
            rows = list(self._db.execute(_ROWS + "n = ?", (n,)))
            self._add(rows)
            if not rows or not rows[0][-1]:
                self.scrub = 1
            self._db.execute("DELETE FROM search_changes WHERE n = ?", (n,))
        if numbers:
            self._piece_made()
        return bool(numbers)

    def _merge(self, pages: int) -> None:
        """A few pages of several pieces into one, so that a search has few pieces to look at.

        To get rid of what was deleted, all pieces are put into one.
        """
        before = self._db.total_changes()
        self._db.execute(
            "INSERT INTO search_index (search_index, rank) VALUES ('merge', ?)",
            (-pages if self.scrub == 1 else pages,),
        )
        self._pieces = 0
        if self.scrub == 1:
            self.scrub = 2  # begun: from now on it goes on with what it has
        elif self._db.total_changes() - before < 2:
            self._merging = False
            self.scrub = 0

    def _clear(self) -> None:
        """Empty the index, page by page; at its end a new one begins."""
        if self.phase != "clearing":
            logger.warning("the search index is of another edition and is made again")
            self.phase = "clearing"
            self.first_n, self.last_n = 1, 0  # nothing is indexed, so nothing needs to be noted
        # Any of them may be what was damaged. First of all it forgets what it has, so that it is a
        # sound index, an empty one, for whoever checks the file meanwhile.
        self._db.execute(_SHADOWS + _EMPTY)
        for table in ("search_index_data", "search_index_docsize", "search_changes"):
            name = "n" if table == "search_changes" else "id"
            self._db.execute(
                f"DELETE FROM {table} WHERE {name} IN "
                f"(SELECT {name} FROM {table} WHERE {name} > ? LIMIT ?)",
                (10 if table == "search_index_data" else 0, _PAGES * 16),
            )
            if self._db.changes():
                return
        # Empty, so quickly gone; by hand where the declaration that owns the others is.
        self._db.execute("DROP TABLE IF EXISTS search_index")
        for name in ("data", "idx", "docsize", "config"):
            self._db.execute(f"DROP TABLE IF EXISTS search_index_{name}")
        self._db.execute(SEARCH_INDEX + SEARCH_CONFIG)
        (newest,) = self._one("SELECT coalesce(max(n), 0) FROM messages")
        self.first_n, self.last_n, self.edition = newest + 1, newest, EDITION
        self.phase, self.scrub, self._merging = "ready", 0, False
