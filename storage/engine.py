"""What an engine is: the protocol that SQLite implements today and another database may
tomorrow.

An engine takes batches of units and makes them durable, in order. `stage` applies a batch
inside one transaction, `commit` makes it durable; between the two nothing is visible to
readers. Nobody above `storage/` writes SQL.

Errors of an engine mean one of three things:
- a unit that can't be applied is `Refused` in its receipt, and hurts no other unit of the
  batch;
- `BatchUnknownError`: whether the batch is durable can't be told; `reopen`, then the same units
  in order;
- `LowSpaceError`: nothing was begun; the same units again, later.

Opening for writing is a fence: before anything is read or acknowledged, one real commit has
moved the epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from .identity import BlobId, Seq, SessionId, SessionKey, TurnId, Uid
    from .records import (
        Blob,
        DeadLetter,
        Delivery,
        DeliveryState,
        Effect,
        Found,
        Hits,
        InboxEntry,
        Listed,
        Message,
        PartOfUser,
        PurgeSlice,
        Question,
        Route,
        Search,
        Session,
        Staged,
        Timer,
        Turn,
        TurnUsage,
        Usage,
        UsageTotal,
        WorkKind,
        WorkOfUser,
    )
    from .units import Durable, Refused, Unit
    from .upkeep import Copied, Finding, Tick


class EngineSettings(Struct, frozen=True, kw_only=True):
    """What an operator may set; the defaults are the safe ones."""

    synchronous: Literal["FULL", "NORMAL"] = "FULL"
    """NORMAL survives a killed process, but a power cut may take acknowledged writes with it.
    """

    busy_timeout_s: float = 5.0
    """How long to wait for a reader outside this process that holds a lock."""

    free_bytes_min: int = 64 * 1024 * 1024
    """Below this much free space writing stops, while there is still room for checkpoints."""

    readers_max: int = 4
    """Read connections that may be open at once."""

    search_tail_rows_max: int = 1_000
    """So many new messages may wait until there is nothing else to do before they are indexed.

    Searches read them one by one, so that what was acknowledged is found at once.
    """

    wal_pages_checkpoint: int = 1_000
    """From this size on the log is copied into the database file when there is nothing else to
    do.
    """

    wal_empty_after_s: float = 10.0
    """After so long without a write the log is emptied: its space is given back, and what was
    deleted is not in it any more.
    """

    wal_bytes_alarm: int = 64 * 1024 * 1024
    """A log that is longer is told of, in the log of the process and in the statistics."""

    free_pages_max: int = 2_500
    """So many unused pages may stay in the file; more are given back, a few at a time, when there
    is nothing else to do.
    """

    backup_pages_step: int = 256
    """Pages that a backup copies before it pauses."""

    backup_pause_s: float = 0.002
    """How long a backup pauses after each step, so that others get at the disk."""


class EngineStatistics(Struct, frozen=True, kw_only=True):
    """A look at the engine; numbers count from its opening."""

    durable: bool
    epoch: int
    commit_seq: int
    commits: int
    route_writes: int
    refusals: int
    careful_batches: int
    reopenings: int
    wal_pages: int
    """In the log, and not copied into the file yet."""
    log_bytes: int
    """The size of the log's file."""
    log_alarm: bool
    """Whether the log is longer than its bound."""
    free_pages: int
    """Unused pages of the file, when the engine looked last."""
    search_tail: int
    """New messages that searches read one by one, because they are not indexed yet."""
    search_older: int
    """So many old messages, at most, are not in a new index yet."""
    search_damage: str | None
    """Why the search index is not used; `None` while it is."""


class Reader(Protocol):
    """Read views, all of one snapshot.

    Use it in a `with` block of `Engine.reading`, and briefly.
    """

    # Sessions
    def route(self, key: SessionKey) -> Route | None: ...
    def session(self, session_id: SessionId) -> Session | None: ...
    def session_of_key(self, key: SessionKey) -> Session | None:
        """The row of the key's current session; `None` too when it has no row yet."""
        ...

    def holder(self, session_id: SessionId) -> SessionKey | None:
        """The key whose route names this session."""
        ...

    def find_session(self, given: str) -> Session:
        """By id, unique id prefix or title, in this order; a title means the latest of its lineage.

        Raises `MissingError` or `AmbiguousError`.
        """
        ...

    def lineage(self, session_id: SessionId) -> tuple[Session, ...]:
        """From the oldest ancestor to the tip of its rotations; tombstones included."""
        ...

    def tip(self, session_id: SessionId) -> Session | None: ...
    def listing(
        self,
        *,
        source: str | None = None,
        key: SessionKey | None = None,
        archived: bool | None = False,
        since_ms: int | None = None,
        until_ms: int | None = None,
        limit: int = 50,
        after: tuple[int, int] | None = None,
    ) -> tuple[tuple[Listed, ...], tuple[int, int] | None]:
        """Most recent first, a lineage shown as its tip; and where the next page begins."""
        ...

    # Transcripts
    def transcript(
        self,
        session_id: SessionId,
        *,
        include_inactive: bool = False,
        after: tuple[int, int] | None = None,
        limit: int = 200,
    ) -> Found:
        """One page in reading order: a summary stands where the messages stood that it covers."""
        ...

    def around(
        self, session_id: SessionId, uid: Uid, *, before: int = 5, after: int = 5
    ) -> Found: ...
    def message(self, uid: Uid) -> Message | None:
        """The original under this uid, wherever it is, active or not."""
        ...

    def turn_messages(self, turn_id: TurnId) -> tuple[Message, ...]:
        """The rows of one turn in the session it is in, in order, active or not."""
        ...

    def said_since(self, session_id: SessionId, seq: int, limit: int = 200) -> tuple[Message, ...]:
        """What came behind a seq, by seq: no copies, and nothing that was rewound."""
        ...

    def revision(self, session_id: SessionId) -> int: ...

    # Export and import
    def root_sessions(
        self, after: str = "", limit: int = 200, *, key: SessionKey | None = None
    ) -> tuple[SessionId, ...]:
        """Sessions without a parent that shows (of this key), by id; tombstones included."""
        ...

    def child_sessions(
        self, session_id: SessionId, *, key: SessionKey | None = None
    ) -> tuple[SessionId, ...]:
        """Its children: the one by rotation first, then the others by id."""
        ...

    def successor(self, session_id: SessionId) -> SessionId | None:
        """The child that it was rotated to."""
        ...

    def stored_rows(self) -> int:
        """How many messages there are, in all sessions that show."""
        ...

    def rows_of(self, session_id: SessionId, first: int, limit: int) -> tuple[Message, ...]:
        """All rows by seq, whatever their state."""
        ...

    def turns_of(
        self, session_id: SessionId, after: tuple[int, str] | None = None, limit: int = 200
    ) -> tuple[Turn, ...]:
        """The turns that are in the session, by (opened_ms, id)."""
        ...

    def usage_of(
        self, session_id: SessionId, after: Uid | None = None, limit: int = 200
    ) -> tuple[Usage, ...]:
        """The model calls that it paid for, by their ids."""
        ...

    def blobs_of(
        self, session_id: SessionId, after: str = "", limit: int = 200
    ) -> tuple[BlobId, ...]:
        """The attachments that its messages refer to."""
        ...

    def staged_sessions(self, after: str = "", limit: int = 200) -> tuple[Staged, ...]:
        """What imports have begun with, by id."""
        ...

    def originals(self, uids: Sequence[Uid]) -> tuple[Message, ...]:
        """Those of these messages that are originals, wherever, hidden ones as well."""
        ...

    # Search
    def search(self, search: Search) -> Hits:
        """One page of what is found: each message once, all that are acknowledged, none that were
        rewound or erased.
        """
        ...

    def search_rebuilds(self) -> int:
        """How often a new search index was asked for: what `RebuildSearch` replaces."""
        ...

    # Work
    def turn(self, turn_id: TurnId) -> Turn | None: ...
    def unfinished_turns(self, key: SessionKey | None = None) -> tuple[Turn, ...]: ...
    def waiting_inbound(self, key: SessionKey) -> tuple[InboxEntry, ...]:
        """Accepted messages whose body has not been taken yet, in the order of their acceptance."""
        ...

    def inbound(self, source: str, inbound_id: str) -> InboxEntry | None: ...
    def inbound_of_turn(self, turn_id: TurnId) -> tuple[InboxEntry, ...]:
        """The messages that a turn answers, as far as they are still known."""
        ...

    def oldest_ended_inbound_ms(self) -> int | None:
        """When the first message was accepted that is still known and whose turn has ended."""
        ...

    def inbox_pruned_version(self) -> int: ...
    def dead_letters(self) -> tuple[DeadLetter, ...]: ...
    def usage(self, session_id: SessionId | None = None) -> tuple[UsageTotal, ...]: ...
    def turn_usage(self, turn_id: TurnId) -> TurnUsage: ...

    def delivery(self, delivery_id: str) -> Delivery | None: ...
    def open_deliveries(self, source: str | None = None, limit: int = 500) -> tuple[Delivery, ...]:
        """What is to be sent, or is being sent, in the order of posting."""
        ...

    def first_deliveries(
        self, source: str, limit: int = 500, *, now_ms: int | None = None
    ) -> tuple[Delivery, ...]:
        """The first of each key among them; with `now_ms` without those that rest until later.

        One that was put off later than `now_ms` does not rest: the clock was set back since.
        """
        ...

    def lane_deliveries(
        self, source: str, key: SessionKey, after: str | None = None, limit: int = 500
    ) -> tuple[Delivery, ...]:
        """Those of one key, behind this one."""
        ...

    def deliveries(
        self,
        *,
        state: DeliveryState | None = None,
        source: str | None = None,
        key: SessionKey | None = None,
        limit: int = 100,
        after: int | None = None,
    ) -> tuple[tuple[Delivery, ...], int | None]:
        """The last that was posted first; and where the next page begins."""
        ...

    def last_delivery(self, key: SessionKey, source: str) -> Delivery | None: ...
    def effects(self, turn_id: TurnId) -> tuple[Effect, ...]: ...
    def question(self, key: SessionKey, question_key: str) -> Question | None: ...
    def questions(
        self, key: SessionKey | None = None, *, open_only: bool = False, limit: int = 500
    ) -> tuple[Question, ...]: ...
    def expired_questions(self, now_ms: int, limit: int = 500) -> tuple[Question, ...]:
        """Open questions whose time is over."""
        ...

    def timer(self, timer_id: str) -> Timer | None: ...
    def timers(
        self, due_ms: int | None = None, *, key: SessionKey | None = None, limit: int = 500
    ) -> tuple[Timer, ...]:
        """Timers that are set, the next one first."""
        ...

    def due_timers(self, now_ms: int, limit: int = 500) -> tuple[Timer, ...]:
        """The first of each key whose time has come."""
        ...

    def next_due_ms(self, now_ms: int) -> int | None:
        """When the next timer is due, or the next question expires, after this moment."""
        ...

    # Blobs and marks
    def blob(self, blob_id: BlobId) -> Blob | None: ...
    def blob_chunk(self, blob_id: BlobId, index: int) -> bytes | None: ...
    def mark(self, name: str) -> str | None: ...
    def seqs(self, session_id: SessionId, uids: Sequence[Uid]) -> dict[Uid, Seq]:
        """Which of these messages the session has, and where."""
        ...

    # What may go. A page each, and where the next one begins
    def orphaned_rotations(
        self, before_ms: int, *, after: int = 0, limit: int = 200
    ) -> tuple[tuple[Session, ...], int | None]:
        """What `EndOrphan` would end."""
        ...

    def empty_sessions(
        self, before_ms: int, *, after: int = 0, limit: int = 200
    ) -> tuple[tuple[Session, ...], int | None]:
        """What `PruneSession` would remove."""
        ...

    def quiet_sessions(
        self,
        before_ms: int,
        *,
        source: str | None = None,
        key: SessionKey | None = None,
        archived_only: bool = False,
        ended_only: bool = False,
        after: tuple[int, int] | None = None,
        limit: int = 200,
    ) -> tuple[tuple[Session, ...], tuple[int, int] | None]:
        """Sessions that no key has and nobody misses, the oldest first: see `DeleteSession`."""
        ...

    def old_work(
        self, kind: WorkKind, before_ms: int, *, after: str | None = None, limit: int = 200
    ) -> tuple[tuple[str, ...], str | None]:
        """The ids of what `PruneWork` would remove."""
        ...

    def unused_blobs(
        self, *, after: str = "", limit: int = 200
    ) -> tuple[tuple[tuple[Blob, int], ...], str | None]:
        """Blobs that nothing refers to, each with the number of its pieces, by id."""
        ...

    def blob_in_use(self, blob_id: BlobId) -> bool: ...
    def originals_given(self, session_id: SessionId) -> int:
        """Up to which seq `GiveOriginals` has come."""
        ...

    def originals_slice(
        self, session_id: SessionId, *, rows_max: int = 2_000, heirs_max: int = 50
    ) -> tuple[Seq, Seq] | None:
        """The next seqs for `GiveOriginals`; `None` when so few are left that it need not be."""
        ...

    def purges(self, limit: int = 100) -> tuple[SessionId, ...]:
        """Deleted sessions of which rows are left."""
        ...

    def purge_slice(
        self, session_id: SessionId, *, rows_max: int = 128, bytes_max: int = 256 * 1024
    ) -> PurgeSlice | None:
        """What `PurgeSession` is to take away next; `None` when nothing is left."""
        ...

    def sessions_of_user(
        self, user: str, *, after: int = -1, span: int = 20_000
    ) -> tuple[tuple[SessionId, ...], int | None]:
        """Sessions that a user has said something in; so many messages are looked at."""
        ...

    def part_of_user(
        self, session_id: SessionId, user: str, *, after: int = -1, limit: int = 100
    ) -> PartOfUser: ...
    def work_of_user(self, user: str) -> WorkOfUser:
        """What is a user's beside the transcripts."""
        ...


class Engine(Protocol):
    """One open database: the only one that writes it."""

    @property
    def durable(self) -> bool:
        """Whether a file is behind it."""
        ...

    @property
    def epoch(self) -> int: ...

    def stage(self, units: Sequence[Unit]) -> list[Durable | Refused]:
        """Apply a batch inside a transaction that stays open.

        The receipts hold once `commit` returns.
        """
        ...

    def commit(self) -> None:
        """Make the staged batch durable."""
        ...

    def reopen(self) -> None:
        """Bring the database back, after `BatchUnknownError`, to a state that can be trusted."""
        ...

    def reading(self) -> AbstractContextManager[Reader]:
        """One snapshot. Any thread; waits while all readers are in use."""
        ...

    def backup(
        self, target: str | os.PathLike[str], tick: Tick = ..., *, replace: bool = False
    ) -> Copied:
        """A copy of one snapshot under another name, looked through. Any thread; blocks for long.

        Commits are not delayed. Raises `CopyError` and `DamagedFileError`; if `tick` raises, it is
        stopped. Nothing but a whole copy ever gets the name.
        """
        ...

    def check(self, tick: Tick = ..., *, full: bool = False) -> list[Finding]:
        """Everything that is wrong with what is stored. Any thread; blocks for long."""
        ...

    def upkeep_due(self, *, idle: bool) -> bool:
        """Whether there is upkeep to do; when idle, sooner."""
        ...

    def upkeep(self) -> None:
        """The bulk of it, beside the writer: from another thread, on a connection of its own."""
        ...

    def finish_upkeep(self) -> None:
        """The rest of it, which needs the writer's own thread, and little of its time."""
        ...

    def rest_due(self) -> float | None:
        """After how many seconds without a write there is something left to do; `None`: nothing."""
        ...

    def rest(self) -> None:
        """Do it, after `upkeep`: give back what was needed while there was more to do.

        At once or not at all: whoever is in the way is not waited for. Raises nothing.
        """
        ...

    def maintain(self, *, idle: bool) -> bool:
        """All of it on one thread, if it is due; false when there was nothing to do."""
        ...

    def chore_due(self, *, idle: bool) -> bool:
        """Whether a piece of derived work waits; when idle, also what could wait longer."""
        ...

    def chore(self, *, idle: bool) -> None:
        """Do one of them: a few milliseconds, a transaction of its own.

        Raises nothing. Where its commit leaves doubts, the next batch is told to recover first.
        """
        ...

    def statistics(self) -> EngineStatistics: ...

    def close(self) -> None:
        """Close everything, at the latest after a short wait for readers. Twice is harmless."""
        ...
