"""All durable changes, as data, on one page.

A command has a natural key in the database: applied twice it equals applied once, and the same
key with other content is a conflict. A command that sets a value without a row of its own
(title, flags, end, route, …) carries the version it `replaces`; if that is no longer the stored
version it is refused as stale.

Commands travel in units (`units.py`), which are applied whole or not at all. A command never
holds anything that the engine would have to make up: ids, times and seqs are given.

| natural key                    | commands                                                        |
| ------------------------------ | --------------------------------------------------------------- |
| (key, incarnation)             | OpenIncarnation                                                 |
| (key, aspect, version)         | SetRoute, SetPendingTitle, CountUselessCompressions             |
| session id                     | CreateSession, DeleteSession, PublishSession, PruneSession,     |
|                                | DropStaged                                                      |
| (session id, place or step)    | GiveOriginals, PurgeSession                                     |
| (session, aspect, version)     | SetTitle, SetFlags, SetDetails, EndSession, ReopenSession,      |
|                                | EndOrphan                                                       |
| (session, seq)                 | AppendMessages, StageMessages, Compact (summary), EraseMessages |
| child session id               | Rotate, Branch                                                  |
| (session, revision)            | Rewind, Restore, ExtendSession, RecountSession                  |
| turn id                        | OpenTurn, StageTurns, SetAside, ResolveDeadLetter               |
| (turn id, attempt)             | StartTurn, SuspendTurn, EndTurn                                 |
| (source, inbound id)           | AcceptInbound, TakeInbound                                      |
| call id                        | AddUsage                                                        |
| (delivery id, attempt)         | PostDelivery, MarkDelivery                                      |
| (turn id, effect key, attempt) | BeginEffect, FinishEffect                                       |
| (key, question key)            | AskQuestion, AnswerQuestion                                     |
| timer id                       | SetTimer, ResolveTimer                                          |
| (blob id, index)               | PutChunk, SealBlob, DropBlob                                    |
| name                           | SetMark                                                         |
| ("inbox", aspect, version)     | PruneInbox                                                      |
| what they name                 | PruneWork, EraseWork                                            |
| ("search", aspect, version)    | RebuildSearch                                                   |
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from .identity import BlobId, Incarnation, Seq, SessionId, SessionKey, TurnId, Uid
from .records import (
    DeliveryState,
    Disposition,
    Draft,
    Edge,
    Inbound,
    JsonObject,
    Message,
    SessionFacts,
    StateRange,
    TitleOrigin,
    Tokens,
    Turn,
    TurnOutcome,
)


class Command(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, gc=False):
    """One durable change. Never part of a reference cycle, so the collector need not look at it."""


# Keys ----------------------------------------------------------------------------------------


class OpenIncarnation(Command, frozen=True, kw_only=True):
    """A new actor takes the key over; units of earlier incarnations are refused from here on."""

    key: SessionKey
    incarnation: Incarnation


class SetRoute(Command, frozen=True, kw_only=True):
    """The key's current session is this one, which may have no row yet.

    A session of another key is refused unless `take_over` says that it changes hands.
    """

    key: SessionKey
    session_id: SessionId
    replaces: int
    at_ms: int
    take_over: bool = False


class SetPendingTitle(Command, frozen=True, kw_only=True):
    """A title that waits for its session's row; `None` takes it back."""

    key: SessionKey
    title: str | None
    origin: TitleOrigin
    replaces: int
    at_ms: int


class CountUselessCompressions(Command, frozen=True, kw_only=True):
    """How many compressions of this key in a row gained nothing.

    The brake against compressing for ever.
    """

    key: SessionKey
    count: int
    replaces: int
    at_ms: int


# Sessions ------------------------------------------------------------------------------------


class CreateSession(Command, frozen=True, kw_only=True):
    """The session's row. A hidden one is being staged by an import and is in no view."""

    session_id: SessionId
    key: SessionKey
    at_ms: int
    parent_id: SessionId | None = None
    edge: Edge | None = None
    source: str = ""
    user: str | None = None
    model: str | None = None
    meta: JsonObject | None = None
    hidden: bool = False


class SetTitle(Command, frozen=True, kw_only=True):
    """The session's title; refused as `title_taken` when another session has it."""

    session_id: SessionId
    title: str | None
    origin: TitleOrigin
    replaces: int
    at_ms: int


class SetFlags(Command, frozen=True, kw_only=True):
    """Archived and pinned."""

    session_id: SessionId
    archived: bool
    pinned: bool
    replaces: int
    at_ms: int


class SetDetails(Command, frozen=True, kw_only=True):
    """User, model and free JSON."""

    session_id: SessionId
    user: str | None
    model: str | None
    meta: JsonObject | None
    replaces: int
    at_ms: int


class EndSession(Command, frozen=True, kw_only=True):
    """The session ends. The first boundary wins; a boundary replaces a suspension."""

    session_id: SessionId
    reason: str
    kind: Literal["suspension", "boundary"]
    replaces: int
    at_ms: int


class ReopenSession(Command, frozen=True, kw_only=True):
    """An ended session is open again; refused for a parent that was rotated away."""

    session_id: SessionId
    replaces: int
    at_ms: int


class EndOrphan(Command, frozen=True, kw_only=True):
    """A child of a rotation that nobody can reach ends, as a suspension: contract G1.

    Refused as `stale` unless it is open, began before `before_ms`, has messages of its own, its
    parent ended by compression, no key names it and no turn of it is unfinished.
    """

    session_id: SessionId
    before_ms: int
    replaces: int
    at_ms: int


class PruneSession(Command, frozen=True, kw_only=True):
    """The row of a session in which nothing was ever said goes: contract G3.

    Refused as `stale` unless it ended before `before_ms`, has neither message nor title, and
    nothing refers to it.
    """

    session_id: SessionId
    before_ms: int


class GiveOriginals(Command, frozen=True, kw_only=True):
    """Of these rows, what was carried on elsewhere belongs there from now on.

    The oldest copy of each becomes the original, and the row here its copy. Done in slices, from
    seq 0 on, before a long session is deleted; `DeleteSession` does what is left.
    """

    session_id: SessionId
    first_seq: Seq
    last_seq: Seq


class DeleteSession(Command, frozen=True, kw_only=True):
    """The session is gone from every view; a tombstone stays, so that lineages hold.

    What is left of its rows goes by `PurgeSession`. With `quiet_since_ms` only if nobody misses it:
    refused as `stale` if something happened in it since, if it or what it was rotated to is pinned,
    or if a turn, a delivery, a question or a dead letter of it is open.
    """

    session_id: SessionId
    at_ms: int
    quiet_since_ms: int | None = None


class PurgeSession(Command, frozen=True, kw_only=True):
    """The next slice of what is left of a deleted session.

    Its rows below `before_seq` and what surrounded these turns; with `last`, everything.
    """

    session_id: SessionId
    step: int
    before_seq: Seq = Seq(0)
    turn_ids: tuple[TurnId, ...] = ()
    last: bool = False


class RecountSession(Command, frozen=True, kw_only=True):
    """What a session keeps about its rows (counts, bytes, tokens) is made anew from them.

    A repair: `replaces` is its revision, which moves, so that whoever holds it reads it again.
    """

    session_id: SessionId
    replaces: int
    at_ms: int


# Transcripts ---------------------------------------------------------------------------------


class AppendMessages(Command, frozen=True, kw_only=True):
    """Messages at the end of a transcript; `base_seq` is the seq of the first."""

    session_id: SessionId
    base_seq: Seq
    messages: tuple[Draft, ...]
    turn_id: TurnId | None = None


class Rotate(Command, frozen=True, kw_only=True):
    """The key moves to a child.

    The parent ends by compression, summary and carried rows are copied.

    The child's seqs start at 0: first the summary, then the carried rows in the order of the
    parent's transcript. `turn_id` is the running turn, whose rows are left out when the gain is
    measured.
    """

    key: SessionKey
    parent_id: SessionId
    parent_base_seq: Seq
    child_id: SessionId
    summary: tuple[Draft, ...]
    carried: tuple[Seq, ...]
    replaces: int
    at_ms: int
    turn_id: TurnId | None = None
    force: bool = False


class Compact(Command, frozen=True, kw_only=True):
    """The same in place.

    Active rows from `first_seq` to `last_seq` become inactive behind their summary.
    """

    session_id: SessionId
    base_seq: Seq
    first_seq: Seq
    last_seq: Seq
    summary: Draft
    at_ms: int
    turn_id: TurnId | None = None
    force: bool = False


class Rewind(Command, frozen=True, kw_only=True):
    """Everything that stands at or after `to_seq` in the transcript becomes inactive.

    `replaces` is the revision that is rewound. `closing` are results for tool calls that would
    stay open.
    """

    session_id: SessionId
    to_seq: Seq
    replaces: int
    at_ms: int
    closing: tuple[Draft, ...] = ()


class Restore(Command, frozen=True, kw_only=True):
    """The last rewind is undone; refused once something was appended after it."""

    session_id: SessionId
    replaces: int
    at_ms: int


class Branch(Command, frozen=True, kw_only=True):
    """The key moves to a copy of the transcript up to and with `upto_seq`.

    The parent stays as it is.
    """

    key: SessionKey
    parent_id: SessionId
    child_id: SessionId
    upto_seq: Seq
    replaces: int
    at_ms: int


class EraseMessages(Command, frozen=True, kw_only=True):
    """The content of these rows is blanked; their seq and uid stay."""

    session_id: SessionId
    seqs: tuple[Seq, ...]


class StageMessages(Command, frozen=True, kw_only=True):
    """Rows of a hidden session, as an import brings them: with seq, state and marks."""

    session_id: SessionId
    messages: tuple[Message, ...]


class PublishSession(Command, frozen=True, kw_only=True):
    """A staged session becomes an ordinary one, with the facts that are given.

    A title that is taken gets the next free number. A child by rotation ends its parent, if nothing
    has, and takes its place in the key's route.
    """

    session_id: SessionId
    facts: SessionFacts | None = None


class ExtendSession(Command, frozen=True, kw_only=True):
    """An import goes on in a session that is here: rows behind its last one, and what the states
    of those before have become. `replaces` is the revision that it goes on from.
    """

    session_id: SessionId
    base_seq: Seq
    messages: tuple[Message, ...]
    states: tuple[StateRange, ...]
    replaces: int
    at_ms: int


class StageTurns(Command, frozen=True, kw_only=True):
    """Ended turns, as an import brings them; those that are here stand.

    One without a session is a stand-in: rows refer to it, and nobody knows more. It gives way to
    the turn itself, and so does one that was cut off by its export.
    """

    session_id: SessionId
    turns: tuple[Turn, ...]


class DropStaged(Command, frozen=True, kw_only=True):
    """Staged rows from `from_seq` on go, and what is named of the rest; at last the session, if
    `whole`. Its turns become stand-ins: rows elsewhere may refer to them.
    """

    session_id: SessionId
    from_seq: Seq
    calls: tuple[Uid, ...] = ()
    turns: tuple[TurnId, ...] = ()
    whole: bool = False


# Turns and the inbox -------------------------------------------------------------------------


class OpenTurn(Command, frozen=True, kw_only=True):
    """A turn is queued under its key."""

    turn_id: TurnId
    key: SessionKey
    at_ms: int


class AcceptInbound(Command, frozen=True, kw_only=True):
    """An inbound message is accepted.

    Its turn is named, its body (if it must wait) is kept until taken; `reply_to` for as long as the
    row is, so that a turn that was cut off still knows whom it answers.
    """

    source: str
    inbound_id: str
    key: SessionKey
    turn_id: TurnId
    disposition: Disposition
    digest: str
    at_ms: int
    body: Inbound | None = None
    reply_to: JsonObject | None = None


class TakeInbound(Command, frozen=True, kw_only=True):
    """The inbound message is in the transcript now (or its turn was cancelled): its body goes.

    `turn_id` is the turn that it was accepted for: nobody else may take it. `into` names the turn
    that it was steered into, which answers it.
    """

    source: str
    inbound_id: str
    turn_id: TurnId
    into: TurnId | None = None


class StartTurn(Command, frozen=True, kw_only=True):
    """The turn runs in this session.

    `attempt` is one more than the stored one: 1 starts, 2 resumes, …
    """

    turn_id: TurnId
    session_id: SessionId
    attempt: int
    at_ms: int


class SuspendTurn(Command, frozen=True, kw_only=True):
    """The turn waits for a person."""

    turn_id: TurnId
    attempt: int
    at_ms: int


class EndTurn(Command, frozen=True, kw_only=True):
    """The turn is over, with an outcome."""

    turn_id: TurnId
    attempt: int
    outcome: TurnOutcome
    at_ms: int


class SetAside(Command, frozen=True, kw_only=True):
    """The turn kept failing and becomes a dead letter."""

    turn_id: TurnId
    reason: str
    tries: int
    at_ms: int


class ResolveDeadLetter(Command, frozen=True, kw_only=True):
    """Somebody decided about a dead letter."""

    turn_id: TurnId
    tries: int
    resolution: Literal["retried", "dropped"]
    at_ms: int


class PruneInbox(Command, frozen=True, kw_only=True):
    """Dedupe rows of ended turns that were accepted before this time go.

    In the order of acceptance, up to the first that is younger, and at most `limit` of them.
    """

    before_ms: int
    limit: int
    replaces: int
    at_ms: int


class PruneWork(Command, frozen=True, kw_only=True):
    """What is only history goes: those of these that came to their end before this time.

    Deliveries that were sent, unless they are the last of their key and source; timers that fired
    or were cancelled; and of turns that ended, whose messages are forgotten, what they did and
    asked. Whatever is still needed is left alone.
    """

    before_ms: int
    delivery_ids: tuple[str, ...] = ()
    timer_ids: tuple[str, ...] = ()
    turn_ids: tuple[TurnId, ...] = ()


class EraseWork(Command, frozen=True, kw_only=True):
    """What these turns did, asked, sent and came to is blanked, as when their session is deleted.

    Refused as `stale` while one of them has not ended. Timers go as they are; of `answered` turns
    only the answers that `user` gave.
    """

    turn_ids: tuple[TurnId, ...] = ()
    timer_ids: tuple[str, ...] = ()
    answered: tuple[TurnId, ...] = ()
    user: str | None = None


class AddUsage(Command, frozen=True, kw_only=True):
    """One model call's tokens and cost, added to its session's counters."""

    call_id: Uid
    session_id: SessionId
    at_ms: int
    turn_id: TurnId | None = None
    model: str = ""
    auxiliary: bool = False
    tokens: Tokens = Tokens()
    cost_nanos: int = 0


# What leaves, and what is waited for ---------------------------------------------------------


class PostDelivery(Command, frozen=True, kw_only=True):
    """A reply for the outbox."""

    delivery_id: str
    key: SessionKey
    source: str
    target: JsonObject
    body: JsonObject
    at_ms: int
    turn_id: TurnId | None = None
    session_id: SessionId | None = None
    message_uid: Uid | None = None


class MarkDelivery(Command, frozen=True, kw_only=True):
    """What became of a delivery.

    `sending` opens the next attempt, anything else closes this one; `pending` is to be tried again.
    """

    delivery_id: str
    attempt: int
    state: DeliveryState
    at_ms: int
    error: str | None = None
    platform_id: str | None = None
    next_ms: int | None = None


class BeginEffect(Command, frozen=True, kw_only=True):
    """The intent of a side effect, stored before it runs. `digest` is the hash of its arguments."""

    turn_id: TurnId
    effect_key: str
    effect_id: Uid
    tool: str
    digest: str
    attempt: int
    at_ms: int


class FinishEffect(Command, frozen=True, kw_only=True):
    """What came of it."""

    turn_id: TurnId
    effect_key: str
    attempt: int
    state: Literal["done", "failed", "skipped", "unknown"]
    at_ms: int
    result: JsonObject | None = None


class AskQuestion(Command, frozen=True, kw_only=True):
    """A question to a person, kept under the session key."""

    key: SessionKey
    question_key: str
    turn_id: TurnId
    question: str
    at_ms: int
    choices: tuple[str, ...] = ()
    expires_ms: int | None = None


class AnswerQuestion(Command, frozen=True, kw_only=True):
    """Its end; the first answer stands."""

    key: SessionKey
    question_key: str
    state: Literal["answered", "expired", "withdrawn"]
    at_ms: int
    answer: str | None = None
    by: str | None = None


class SetTimer(Command, frozen=True, kw_only=True):
    """An inbound message for later. `busy` is the policy that it asks for when its time comes."""

    timer_id: str
    key: SessionKey
    source: str
    due_ms: int
    inbound: Inbound
    at_ms: int
    busy: str | None = None


class ResolveTimer(Command, frozen=True, kw_only=True):
    """The timer fired (its inbound is accepted in the same unit) or was cancelled."""

    timer_id: str
    resolution: Literal["fired", "cancelled"]
    at_ms: int


# Blobs and marks -----------------------------------------------------------------------------


class PutChunk(Command, frozen=True, kw_only=True):
    """One piece of a blob."""

    blob_id: BlobId
    index: int
    data: bytes


class SealBlob(Command, frozen=True, kw_only=True):
    """All pieces are there; messages may refer to the blob from now on."""

    blob_id: BlobId
    size_bytes: int
    chunk_count: int
    media_type: str
    at_ms: int


class DropBlob(Command, frozen=True, kw_only=True):
    """A blob that nothing refers to goes: no message, none that waits, and no timer.

    With `keeping` only its pieces from that one on, so that a large one goes in slices: nothing can
    refer to it from then on.
    """

    blob_id: BlobId
    keeping: int = 0


class SetMark(Command, frozen=True, kw_only=True):
    """Something that happens once per database has happened."""

    name: str
    value: str


class RebuildSearch(Command, frozen=True, kw_only=True):
    """The search index is emptied and made again, in slices."""

    replaces: int
    at_ms: int


AnyCommand: TypeAlias = (
    OpenIncarnation
    | SetRoute
    | SetPendingTitle
    | CountUselessCompressions
    | CreateSession
    | SetTitle
    | SetFlags
    | SetDetails
    | EndSession
    | ReopenSession
    | EndOrphan
    | PruneSession
    | GiveOriginals
    | DeleteSession
    | PurgeSession
    | AppendMessages
    | Rotate
    | Compact
    | Rewind
    | Restore
    | Branch
    | EraseMessages
    | StageMessages
    | PublishSession
    | ExtendSession
    | StageTurns
    | DropStaged
    | OpenTurn
    | AcceptInbound
    | TakeInbound
    | StartTurn
    | SuspendTurn
    | EndTurn
    | SetAside
    | ResolveDeadLetter
    | PruneInbox
    | PruneWork
    | EraseWork
    | AddUsage
    | PostDelivery
    | MarkDelivery
    | BeginEffect
    | FinishEffect
    | AskQuestion
    | AnswerQuestion
    | SetTimer
    | ResolveTimer
    | PutChunk
    | SealBlob
    | DropBlob
    | SetMark
    | RebuildSearch
    | RecountSession
)
