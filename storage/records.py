"""What is stored, as frozen records: what a reader gets, and what the commands carry.

A record is a value: equal fields, equal record. `Draft` is a message as its session actor gives it,
identity and content; `Message` is the same message as stored, with its place and state. Content is
compared by the fields of `Draft` alone, never by state that changed later.

Times are whole milliseconds since 1970 (`…_ms`), money is whole billionths of the currency unit
(`cost_nanos`): both add up exactly.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from .identity import BlobId, Incarnation, Seq, SessionId, SessionKey, TurnId, Uid

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
MessageState: TypeAlias = Literal["active", "summarised", "rewound"]
Edge: TypeAlias = Literal["rotation", "branch", "reset", "delegate"]
EndKind: TypeAlias = Literal["suspension", "boundary", "rotation"]
TitleOrigin: TypeAlias = Literal["person", "automatic"]
TurnState: TypeAlias = Literal["queued", "running", "waiting", "ended"]
OutcomeKind: TypeAlias = Literal["answered", "failed", "interrupted", "partial", "silent"]
Disposition: TypeAlias = Literal["started", "queued", "merged", "steered", "superseded"]
DeliveryState: TypeAlias = Literal["pending", "sending", "sent", "failed", "unknown"]
EffectState: TypeAlias = Literal["begun", "done", "failed", "skipped", "unknown"]
QuestionState: TypeAlias = Literal["open", "answered", "expired", "withdrawn"]
TimerState: TypeAlias = Literal["set", "fired", "cancelled"]
WorkKind: TypeAlias = Literal["deliveries", "timers", "turns"]
DeadLetterState: TypeAlias = Literal["open", "retried", "dropped"]

JsonObject: TypeAlias = dict[str, Any]


class Record(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """The common shape: immutable, by keyword, compact as JSON, strict when read."""


# Messages ----------------------------------------------------------------------------------------


class ToolCall(Record, frozen=True, kw_only=True):
    """One call that an assistant message asks for.

    `arguments` is the model's own text, kept as it is.
    """

    id: str
    name: str
    arguments: str = ""


class Tokens(Record, frozen=True, kw_only=True):
    """Token counts of one model call."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0


class Draft(Record, frozen=True, kw_only=True):
    """A message as given: its identity and everything a chat transcript keeps of it.

    Content is `text` or structured `parts` (a list of JSON objects), or neither for a bare tool
    call.
    """

    uid: Uid
    role: Role
    text: str | None = None
    parts: tuple[JsonObject, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    finish_reason: str | None = None
    tokens: Tokens | None = None
    platform_id: str | None = None
    user: str | None = None
    created_ms: int = 0
    meta: JsonObject | None = None
    blobs: tuple[BlobId, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether it is text and nothing else, as most messages are."""
        return (
            self.parts is None
            and self.tool_calls == ()
            and self.tool_call_id is None
            and self.name is None
            and self.reasoning is None
            and self.finish_reason is None
            and self.tokens is None
            and self.platform_id is None
            and self.meta is None
            and self.blobs == ()
        )


class Message(Draft, frozen=True, kw_only=True):
    """A message as stored: its place in one session's transcript, and its state.

    `carried` marks a copy that came along from a parent session; the original has the same uid.
    `covers` is the range of seqs that a summary stands for when it was written in place. `erased`
    marks a row whose content was blanked on request; `damaged` one whose stored bytes were not
    readable as text.
    """

    session_id: SessionId
    seq: Seq
    state: MessageState = "active"
    turn_id: TurnId | None = None
    carried: bool = False
    summary: bool = False
    covers: tuple[Seq, Seq] | None = None
    summarised_by: Seq | None = None
    erased: bool = False
    damaged: bool = False


# Sessions and keys -------------------------------------------------------------------------------


class Session(Record, frozen=True, kw_only=True):
    """One generation of a conversation's transcript, with its counters.

    A deleted session stays as a tombstone: id, key and edge, no text. `versions` are what a command
    that sets one of these values must name as the one it replaces.
    """

    id: SessionId
    key: SessionKey
    parent_id: SessionId | None = None
    edge: Edge | None = None
    source: str = ""
    user: str | None = None
    model: str | None = None
    title: str | None = None
    title_origin: TitleOrigin | None = None
    started_ms: int = 0
    ended_ms: int | None = None
    end_reason: str | None = None
    end_kind: EndKind | None = None
    archived: bool = False
    pinned: bool = False
    meta: JsonObject | None = None
    deleted: bool = False
    hidden: bool = False
    next_seq: Seq = Seq(0)
    revision: int = 0
    message_count: int = 0
    active_count: int = 0
    active_bytes: int = 0
    tool_call_count: int = 0
    compaction_count: int = 0
    last_ms: int = 0
    tokens: Tokens = Tokens()
    cost_nanos: int = 0
    auxiliary_tokens: Tokens = Tokens()
    auxiliary_cost_nanos: int = 0
    title_version: int = 0
    end_version: int = 0
    flags_version: int = 0
    details_version: int = 0


class SessionFacts(Record, frozen=True, kw_only=True):
    """What an import says of a session beside its rows; `next_seq` is how many of them it has."""

    key: SessionKey
    parent_id: SessionId | None = None
    edge: Edge | None = None
    source: str = ""
    user: str | None = None
    model: str | None = None
    title: str | None = None
    title_origin: TitleOrigin | None = None
    started_ms: int = 0
    last_ms: int = 0
    ended_ms: int | None = None
    end_reason: str | None = None
    end_kind: EndKind | None = None
    archived: bool = False
    pinned: bool = False
    meta: JsonObject | None = None
    deleted: bool = False
    compaction_count: int = 0
    next_seq: Seq = Seq(0)


class Staged(Record, frozen=True, kw_only=True):
    """A session that an import has begun with: hidden, with so many rows.

    One that is a parent keeps the place of a session that was never imported.
    """

    id: SessionId
    next_seq: Seq
    is_parent: bool


class StateRange(Record, frozen=True, kw_only=True):
    """The rows from one seq to another are in this state."""

    first: Seq
    last: Seq
    state: MessageState
    summarised_by: Seq | None = None


class Route(Record, frozen=True, kw_only=True):
    """A key.

    Its current session, its actor's incarnation, and what waits for it without a session row.
    """

    key: SessionKey
    session_id: SessionId | None = None
    incarnation: Incarnation = Incarnation(0)
    pending_title: str | None = None
    pending_title_origin: TitleOrigin | None = None
    useless_compressions: int = 0
    route_version: int = 0
    pending_title_version: int = 0
    compression_version: int = 0


class Listed(Record, frozen=True, kw_only=True):
    """A session in a listing: what a person needs to recognise it."""

    session: Session
    preview: str | None = None
    lineage_length: int = 1

    @property
    def id(self) -> SessionId:
        return self.session.id

    @property
    def key(self) -> SessionKey:
        return self.session.key

    @property
    def title(self) -> str | None:
        return self.session.title


class Found(Record, frozen=True, kw_only=True):
    """One page of a transcript, and where the next one begins (`None` at the end)."""

    messages: tuple[Message, ...]
    next: tuple[int, int] | None = None


class PurgeSlice(Record, frozen=True, kw_only=True):
    """What the next slice of a deleted session's rest is, small enough for one transaction."""

    session_id: SessionId
    step: int
    before_seq: Seq
    turn_ids: tuple[TurnId, ...]
    last: bool
    blob_ids: tuple[BlobId, ...] = ()
    """Blobs that its rows refer to: perhaps nothing else does."""


class PartOfUser(Record, frozen=True, kw_only=True):
    """What of a session is a user's: a page of rows that are not erased yet, and their turns.

    `only` says that nobody else has said anything in it.
    """

    only: bool
    seqs: tuple[Seq, ...]
    turn_ids: tuple[TurnId, ...]
    blob_ids: tuple[BlobId, ...] = ()


class WorkOfUser(Record, frozen=True, kw_only=True):
    """What a user has left outside of transcripts, or waits to be said in one."""

    waiting: tuple[tuple[SessionKey, TurnId], ...] = ()
    """Turns that have not begun, and their keys."""
    timers: tuple[tuple[SessionKey, str], ...] = ()
    answered: tuple[TurnId, ...] = ()
    """Turns of others whose questions this user has answered."""


# Search ------------------------------------------------------------------------------------------


class Search(Record, frozen=True, kw_only=True):
    """What is looked for, where, and in which order.

    Filters narrow it down: a session, all sessions of a key or of a source, those of a user (or
    what a user said in others), a role, a span of time; `active` leaves out what a summary stands
    for. `around` is how many messages come along on either side of a hit.
    """

    text: str
    order: Literal["rank", "newest"] = "rank"
    session_id: SessionId | None = None
    key: SessionKey | None = None
    source: str | None = None
    user: str | None = None
    role: Role | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    active: bool = False
    limit: int = 20
    after: tuple[int, int, int] | None = None
    around: int = 0
    marks: tuple[str, str] = ("«", "»")


class Hit(Record, frozen=True, kw_only=True):
    """A message that was found, and enough around it to recognise it."""

    message: Message
    key: SessionKey
    source: str
    title: str | None = None
    snippet: str = ""
    before: tuple[Message, ...] = ()
    after: tuple[Message, ...] = ()

    @property
    def session_id(self) -> SessionId:
        return self.message.session_id

    @property
    def uid(self) -> Uid:
        return self.message.uid

    @property
    def text(self) -> str:
        return self.message.text or ""


class Hits(Record, frozen=True, kw_only=True):
    """One page of a search, and where the next one begins (`None` when everything was looked at).

    `index` says how it was searched: `ready`; `building`, when older messages are not indexed yet
    and are read one by one, behind those that are; `damaged`, when all are. A page may hold fewer
    hits than were asked for, or none, and there may be more behind it all the same.
    """

    hits: tuple[Hit, ...]
    next: tuple[int, int, int] | None = None
    index: Literal["ready", "building", "damaged"] = "ready"


# Turns and what surrounds them -------------------------------------------------------------------


class Inbound(Record, frozen=True, kw_only=True):
    """What arrived from outside, kept until its turn starts."""

    text: str | None = None
    parts: tuple[JsonObject, ...] | None = None
    user: str | None = None
    reply_to: JsonObject | None = None
    platform_id: str | None = None
    blobs: tuple[BlobId, ...] = ()
    meta: JsonObject | None = None


class InboxEntry(Record, frozen=True, kw_only=True):
    """One accepted inbound message, known by (source, inbound id).

    `body` is gone once its turn started; `reply_to` stays. `into` is the turn that it was steered
    into.
    """

    source: str
    inbound_id: str
    key: SessionKey
    turn_id: TurnId
    disposition: Disposition
    digest: str
    accepted_ms: int
    body: Inbound | None = None
    reply_to: JsonObject | None = None
    into: TurnId | None = None


class TurnOutcome(Record, frozen=True, kw_only=True):
    """How a turn ended; the reply text follows from it."""

    kind: OutcomeKind
    text: str | None = None
    error: str | None = None
    cause: str | None = None
    detail: JsonObject | None = None


class Turn(Record, frozen=True, kw_only=True):
    """One or more inbound messages and all that answering them produced.

    `waits` is how often it has waited for a person; each of them began an attempt as well.
    """

    id: TurnId
    key: SessionKey
    session_id: SessionId | None = None
    state: TurnState = "queued"
    attempt: int = 0
    outcome: TurnOutcome | None = None
    opened_ms: int = 0
    started_ms: int | None = None
    ended_ms: int | None = None
    waits: int = 0

    @property
    def tries(self) -> int:
        """How often it was begun because the last time was cut off, the first time included."""
        return self.attempt - self.waits


class DeadLetter(Record, frozen=True, kw_only=True):
    """A turn that was set aside because it kept failing."""

    turn_id: TurnId
    key: SessionKey
    reason: str
    tries: int
    state: DeadLetterState = "open"
    at_ms: int = 0
    resolved_ms: int | None = None


class Usage(Record, frozen=True, kw_only=True):
    """What one model call cost. Auxiliary calls (titles, summaries) are counted apart."""

    call_id: Uid
    session_id: SessionId
    turn_id: TurnId | None = None
    model: str = ""
    auxiliary: bool = False
    tokens: Tokens = Tokens()
    cost_nanos: int = 0
    at_ms: int = 0


class TurnUsage(Record, frozen=True, kw_only=True):
    """What a turn has cost until now, in all of its attempts."""

    calls: int = 0
    """Auxiliary ones left out."""
    tokens: Tokens = Tokens()


class UsageTotal(Record, frozen=True, kw_only=True):
    """Usage added up for one model and source."""

    source: str
    model: str
    auxiliary: bool
    calls: int
    tokens: Tokens
    cost_nanos: int


class Delivery(Record, frozen=True, kw_only=True):
    """Something on its way out: a reply, an interim message, a question, a notice.

    `id` is stable, so that a platform can use it as its idempotency key. `target` is what the
    inbound message gave as `reply_to`; empty where nobody gave one and the key must do.
    """

    id: str
    key: SessionKey
    source: str
    target: JsonObject
    body: JsonObject
    turn_id: TurnId | None = None
    session_id: SessionId | None = None
    message_uid: Uid | None = None
    state: DeliveryState = "pending"
    attempt: int = 0
    error: str | None = None
    platform_id: str | None = None
    next_ms: int | None = None
    posted_ms: int = 0
    marked_ms: int | None = None

    @property
    def text(self) -> str:
        """What is to be sent."""
        return str(self.body.get("text") or "")

    @property
    def kind(self) -> str:
        """`reply`, `interim`, `question`, or `post` for what the runtime was asked to send."""
        return str(self.body.get("kind") or "reply")

    @property
    def possibly_repeated(self) -> bool:
        """Whether there was an attempt before, which may have reached the platform after all."""
        return self.attempt > 1


class Effect(Record, frozen=True, kw_only=True):
    """One tool side effect: the intent is stored before it runs, the result after."""

    turn_id: TurnId
    effect_key: str
    effect_id: Uid
    tool: str
    digest: str
    state: EffectState = "begun"
    attempt: int = 1
    result: JsonObject | None = None
    begun_ms: int = 0
    finished_ms: int | None = None


class Question(Record, frozen=True, kw_only=True):
    """Something a turn asked a person: an approval, a choice, a free answer."""

    key: SessionKey
    question_key: str
    turn_id: TurnId
    question: str
    choices: tuple[str, ...] = ()
    state: QuestionState = "open"
    answer: str | None = None
    answered_by: str | None = None
    asked_ms: int = 0
    expires_ms: int | None = None
    answered_ms: int | None = None


class Timer(Record, frozen=True, kw_only=True):
    """An inbound message that waits for its time."""

    id: str
    key: SessionKey
    source: str
    due_ms: int
    inbound: Inbound
    state: TimerState = "set"
    set_ms: int = 0
    resolved_ms: int | None = None
    busy: str | None = None


class Blob(Record, frozen=True, kw_only=True):
    """An attachment, named by the SHA-256 of its bytes."""

    id: BlobId
    size_bytes: int
    chunk_count: int
    media_type: str = "application/octet-stream"
    sealed: bool = False
    sealed_ms: int | None = None
