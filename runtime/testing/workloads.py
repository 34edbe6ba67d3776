"""Canonical workloads: every kind of transaction that an engine makes, as data.

A workload is units that prepare a database, then the steps under test: batches, checkpoints,
restarts. Crash tests run the steps on a simulated disk and stop them everywhere; `WORKLOADS` covers
every command.

Invariants:
- Deterministic: ids, times and texts are fixed, so two undisturbed runs leave equal databases.
- Every unit is accepted in an undisturbed run, under the guards that its actor would give: base seq
  and revision are always the expected ones, so a change that does not move them is refused by the
  next unit.

Must never read a clock or draw anything; and never opens a database, which is left to whoever runs
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from msgspec.structs import replace

from ...storage import commands as c
from ...storage.identity import BlobId, Incarnation, Seq, SessionId, SessionKey, TurnId
from ...storage.records import (
    Inbound,
    Message,
    SessionFacts,
    StateRange,
    Tokens,
    Turn,
    TurnOutcome,
)
from ...storage.units import Guard, Unit
from .conversation import START_MS, Conversation, uid_of

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = [
    "START_MS",
    "WORKLOADS",
    "Batch",
    "Conversation",
    "Step",
    "Upkeep",
    "Workload",
    "uid_of",
]


@dataclass(frozen=True, slots=True)
class Batch:
    """Units that are staged together and committed once."""

    units: tuple[Unit, ...]


Upkeep: TypeAlias = Literal["checkpoint", "chores", "rest", "restart", "reopen"]
"""`checkpoint` is `maintain`, `chores` is all of it until nothing is left, `rest` is what comes
after a quiet while, `restart` closes the engine and opens it again, `reopen` is the way back from
an error."""

Step: TypeAlias = Batch | Upkeep


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of transaction: what must be there first, and the steps under test."""

    name: str
    preparation: tuple[Unit, ...]
    steps: tuple[Step, ...]
    created: bool = True
    """Whether the database exists before the steps; if not, its creation is under test as well."""

    @property
    def batches(self) -> tuple[Batch, ...]:
        """The steps that commit something."""
        return tuple(step for step in self.steps if isinstance(step, Batch))

    @property
    def kinds(self) -> frozenset[type[c.Command]]:
        """The commands under test."""
        return frozenset(
            type(command)
            for batch in self.batches
            for unit in batch.units
            for command in unit.commands
        )


def _chat(name: str = "ann") -> tuple[Conversation, tuple[Unit, ...]]:
    """A conversation with a title and one turn: seqs 0 to 3, revision 3."""
    chat = Conversation(name)
    opening = chat.opening()
    titled = chat.unit(chat.title(f"Chat of {name}"))
    return chat, (*opening, titled, *chat.exchange("first"))


def _single(name: str, preparation: tuple[Unit, ...], *units: Unit) -> Workload:
    """Units under test, each in a batch of its own."""
    return Workload(name, preparation, tuple(Batch((unit,)) for unit in units))


# Keys and sessions


def _keys() -> list[Workload]:
    chat, before = _chat()
    taken = Unit((c.OpenIncarnation(key=chat.key, incarnation=Incarnation(2)),))
    pending = c.SetPendingTitle(
        key=chat.key, title="Later", origin="automatic", replaces=0, at_ms=chat.at()
    )
    useless = c.CountUselessCompressions(key=chat.key, count=1, replaces=0, at_ms=chat.at())
    loads = [
        _single("open_incarnation", before, taken),
        _single("set_pending_title", before, chat.unit(pending)),
        _single("count_useless_compressions", before, chat.unit(useless)),
    ]
    moved = chat.unit(chat.route_to(SessionId("ann-fresh")))
    return [*loads, _single("set_route", before, moved)]


def _sessions() -> list[Workload]:
    chat, before = _chat()
    delegate = c.CreateSession(
        session_id=SessionId("ann-helper"),
        key=SessionKey("helper:ann"),
        at_ms=chat.at(),
        parent_id=chat.session_id,
        edge="delegate",
        meta={"depth": 1},
    )
    flags = c.SetFlags(
        session_id=chat.session_id, archived=True, pinned=True, replaces=0, at_ms=chat.at()
    )
    details = c.SetDetails(
        session_id=chat.session_id,
        user="bea",
        model="model-2",
        meta={"a": {"b": "c"}},
        replaces=0,
        at_ms=chat.at(),
    )
    ended = chat.unit(chat.end())
    reopened = c.ReopenSession(session_id=chat.session_id, replaces=1, at_ms=chat.at())
    return [
        _single("create_session", before, chat.unit(delegate)),
        _single("set_title", before, chat.unit(chat.title("Other", replaces=1))),
        _single("set_flags", before, chat.unit(flags)),
        _single("set_details", before, chat.unit(details)),
        _single("end_session", before, ended),
        _single("reopen_session", (*before, ended), chat.unit(reopened)),
    ]


def _deletion() -> list[Workload]:
    """A parent goes whose child holds copies: they become the originals."""
    chat, before = _chat()
    guard, parent = chat.guard(), chat.session_id
    before = (*before, *_work_of(chat), chat.guarded(guard, chat.rotate(1, 2, 3)))
    give = tuple(
        Unit((c.GiveOriginals(session_id=parent, first_seq=Seq(first), last_seq=Seq(last)),))
        for first, last in ((0, 1), (2, 3))
    )
    delete = c.DeleteSession(session_id=parent, at_ms=chat.at())
    turn_id = TurnId(uid_of("ann/first"))
    slices = (
        c.PurgeSession(session_id=parent, step=0, before_seq=Seq(2), turn_ids=(turn_id,)),
        c.PurgeSession(session_id=parent, step=1, before_seq=Seq(3)),
        c.PurgeSession(session_id=parent, step=2, last=True),
    )
    deleted, purged = Unit((delete,)), tuple(Unit((one,)) for one in slices)
    at_once = Unit((delete, c.PurgeSession(session_id=parent, step=0, last=True)))
    return [
        _single("give_originals", before, *give),
        _single("delete_session", before, deleted),
        _single("delete_session_in_slices", before, *give, deleted, *purged),
        _single("purge_session", (*before, deleted), *purged),
        _single("delete_a_short_session", before, at_once),
        Workload(
            "delete_and_index", before, (Batch((at_once,)), "chores", "checkpoint", "restart")
        ),
    ]


def _work_of(chat: Conversation) -> tuple[Unit, ...]:
    """What surrounds its first turn, which has ended, and what is sent to it later."""
    turn_id = TurnId(uid_of(f"{chat.key.rpartition(':')[2]}/first"))
    base: dict[str, Any] = {"key": chat.key, "turn_id": turn_id}
    commands: list[c.AnyCommand] = [
        c.AskQuestion(question_key="q", question="may I?", at_ms=chat.at(), **base),
        c.AnswerQuestion(
            key=chat.key,
            question_key="q",
            state="answered",
            answer="yes",
            by="bob",
            at_ms=chat.at(),
        ),
        c.BeginEffect(
            turn_id=turn_id,
            effect_key="e",
            effect_id=uid_of("effect"),
            tool="mail",
            digest="d",
            attempt=1,
            at_ms=chat.at(),
        ),
        c.SetAside(turn_id=turn_id, reason="fails", tries=1, at_ms=chat.at()),
        c.ResolveDeadLetter(turn_id=turn_id, tries=1, resolution="dropped", at_ms=chat.at()),
    ]
    for number in (1, 2):
        name = f"{chat.key}/{number}"
        commands += (
            c.PostDelivery(
                delivery_id=name, source="chat", target={}, body={}, at_ms=chat.at(), **base
            ),
            c.MarkDelivery(delivery_id=name, attempt=1, state="sending", at_ms=chat.at()),
            c.MarkDelivery(delivery_id=name, attempt=1, state="sent", at_ms=chat.at()),
        )
    timer = c.SetTimer(
        timer_id="t",
        key=chat.key,
        source="chat",
        due_ms=1,
        inbound=Inbound(text="up", user="ann"),
        at_ms=chat.at(),
    )
    fired = c.ResolveTimer(timer_id="t", resolution="fired", at_ms=chat.at())
    return tuple(chat.unit(command) for command in (*commands, timer, fired))


def _cleanup() -> list[Workload]:
    """Contract G, and what surrounds turns."""
    chat, before = _chat()
    guard = chat.guard()
    rotated = chat.guarded(guard, chat.rotate(2))
    orphan = chat.session_id
    lost = (*before, rotated, *chat.exchange("second"), chat.unit(chat.route_to(SessionId("n"))))
    end = c.EndOrphan(session_id=orphan, before_ms=START_MS * 2, replaces=0, at_ms=chat.at())
    empty = SessionId("empty")
    made = c.CreateSession(session_id=empty, key=chat.key, at_ms=chat.at())
    over = c.EndSession(session_id=empty, reason="r", kind="boundary", replaces=0, at_ms=chat.at())
    prune = c.PruneSession(session_id=empty, before_ms=START_MS * 2)
    worked, done = _chat()
    turn_id = TurnId(uid_of("ann/first"))
    done = (*done, *_work_of(worked))
    pruned = c.PruneWork(
        before_ms=START_MS * 2,
        delivery_ids=(f"{worked.key}/1", f"{worked.key}/2"),
        timer_ids=("t",),
        turn_ids=(turn_id,),
    )
    answers = c.EraseWork(answered=(turn_id,), user="bob")
    erased = c.EraseWork(turn_ids=(turn_id,), timer_ids=("t",))
    return [
        _single("end_orphan", lost, Unit((end,))),
        _single("prune_session", (*before, Unit((made,)), Unit((over,))), Unit((prune,))),
        _single("prune_work", done, Unit((pruned,))),
        _single("erase_work", done, Unit((answers,)), Unit((erased,))),
    ]


# Transcripts


def _appending() -> list[Workload]:
    chat, before = _chat()
    put, seal, blob_id = _blob(b"picture" * 300)
    before = (*before, put, seal)
    guard = chat.guard()
    first = chat.guarded(
        guard,
        chat.append(
            chat.draft("user", "look: 日本\0", blobs=(blob_id,), platform_id="p-1", user="ann"),
            chat.draft(
                "assistant",
                None,
                parts=({"type": "text", "text": "a picture"},),
                tokens=Tokens(input=10, output=3),
                finish_reason="stop",
            ),
        ),
    )
    guard = chat.guard()
    second = chat.guarded(guard, chat.append(chat.draft("user", "more " * 1_500)))
    return [_single("append_messages", before, first, second)]


def _rotation() -> list[Workload]:
    chat, before = _chat()
    before = (*before, *chat.exchange("second"))
    guard = chat.guard()
    plain = _single("rotate", before, chat.guarded(guard, chat.rotate()))

    chat, before = _chat()
    before = (*before, *chat.exchange("second"))
    turn_id = TurnId(uid_of("ann/running"))
    guard = chat.guard()
    running = chat.guarded(
        guard,
        c.OpenTurn(turn_id=turn_id, key=chat.key, at_ms=chat.at()),
        c.StartTurn(turn_id=turn_id, session_id=chat.session_id, attempt=1, at_ms=chat.at()),
        chat.append(chat.draft("user", "and now?"), turn_id=turn_id),
    )
    guard = chat.guard()
    rotated = chat.guarded(guard, chat.rotate(6, 7, 8, turn_id=turn_id))
    guard = chat.guard()
    answer = chat.append(chat.draft("assistant", "now this"), turn_id=turn_id)
    answered = chat.guarded(guard, answer, chat.end_turn(turn_id))
    return [plain, _single("rotate_in_a_turn", (*before, running), rotated, answered)]


def _editing() -> list[Workload]:
    chat, before = _chat()
    before = (*before, *chat.exchange("second"))
    recount = c.RecountSession(session_id=chat.session_id, replaces=chat.revision, at_ms=chat.at())
    compact = c.Compact(
        session_id=chat.session_id,
        base_seq=Seq(chat.next_seq),
        first_seq=Seq(0),
        last_seq=Seq(3),
        summary=chat.draft("assistant", "first: because"),
        at_ms=chat.at(),
    )
    compacted = chat.guarded(chat.guard(), compact)
    erased = chat.unit(c.EraseMessages(session_id=chat.session_id, seqs=(Seq(1), Seq(2))))
    branch = c.Branch(
        key=chat.key,
        parent_id=chat.session_id,
        child_id=SessionId("ann-branch"),
        upto_seq=Seq(3),
        replaces=chat.route_version,
        at_ms=chat.at(),
    )
    branched = chat.guarded(chat.guard(), branch)
    guard = chat.guard()
    rewind = c.Rewind(
        session_id=chat.session_id,
        to_seq=Seq(6),
        replaces=chat.revision,
        at_ms=chat.at(),
        closing=(chat.draft("tool", "cut short", tool_call_id="second-call"),),
    )
    rewound = chat.guarded(guard, rewind)
    chat.next_seq, chat.revision = chat.next_seq + 1, chat.revision + 1
    restore = c.Restore(session_id=chat.session_id, replaces=chat.revision, at_ms=chat.at())
    restored = chat.guarded(chat.guard(), restore)
    return [
        _single("compact", before, compacted),
        _single("erase_messages", before, erased),
        _single("recount_session", before, chat.unit(recount)),
        _single("branch", before, branched),
        _single("rewind", before, rewound),
        _single("restore", (*before, rewound), restored),
    ]


def _importing() -> list[Workload]:
    chat, before = _chat()
    session_id = SessionId("imported")
    hidden = c.CreateSession(
        session_id=session_id, key=SessionKey("file:old"), at_ms=chat.at(), hidden=True
    )
    stage = c.StageMessages(
        session_id=session_id,
        messages=(
            _imported(session_id, 0, "old question", state="rewound"),
            _imported(session_id, 1, "old summary", summary=True, covers=(Seq(0), Seq(0))),
            _imported(session_id, 2, "old answer"),
        ),
    )
    publish = c.PublishSession(session_id=session_id)
    made, staged, published = (Unit((command,)) for command in (hidden, stage, publish))
    facts = SessionFacts(
        key=chat.key,
        parent_id=chat.session_id,
        edge="rotation",
        title="Chat of ann",
        title_origin="person",
        started_ms=START_MS + 5,
        last_ms=START_MS + 9,
        meta={"from": "a file"},
        next_seq=Seq(3),
    )
    told = Unit((c.PublishSession(session_id=session_id, facts=facts),))
    turn_id = TurnId(uid_of("imported/turn"))
    turns = Unit((_staged_turns(session_id, turn_id, chat.key),))
    used = Unit((c.AddUsage(call_id=uid_of("call"), session_id=session_id, at_ms=1),))
    fewer = Unit((c.DropStaged(session_id=session_id, from_seq=Seq(1)),))
    none = Unit(
        (
            c.DropStaged(
                session_id=session_id,
                from_seq=Seq(0),
                calls=(uid_of("call"),),
                turns=(turn_id,),
                whole=True,
            ),
        )
    )
    return [
        _single("stage_messages", (*before, made), staged),
        _single("publish_session", (*before, made, staged), published),
        _single("publish_with_facts", (*before, made, staged), told),
        _single("stage_turns", (*before, made), turns),
        _single("drop_staged", (*before, made, staged, turns, used), fewer, none),
        _extending(),
        _whole_import(),
    ]


def _staged_turns(session_id: SessionId, turn_id: TurnId, key: SessionKey) -> c.StageTurns:
    ended: dict[str, Any] = {"key": key, "state": "ended", "opened_ms": 1, "ended_ms": 3}
    whole = Turn(
        id=turn_id,
        session_id=session_id,
        attempt=2,
        outcome=TurnOutcome(kind="answered", text="yes", detail={"n": 1}),
        started_ms=2,
        **ended,
    )
    stand_in = Turn(
        id=TurnId(uid_of("imported/elsewhere")),
        outcome=TurnOutcome(kind="interrupted", cause="imported"),
        **ended,
    )
    return c.StageTurns(session_id=session_id, turns=(whole, stand_in))


def _whole_import() -> Workload:
    """A lineage: staged in slices, then both sessions and the key's route in one unit."""
    _, before = _chat()
    key, parent, child = SessionKey("file:old"), SessionId("old-1"), SessionId("old-2")
    turn_id = TurnId(uid_of("old/turn"))
    steps: list[Batch] = []
    for number, session_id in enumerate((parent, child)):
        made = c.CreateSession(session_id=session_id, key=key, at_ms=START_MS, hidden=True)
        turns = _staged_turns(session_id, TurnId(f"{turn_id}{number}"), key)
        rows = [_imported(session_id, seq, f"old {seq} " * 40, kept=number) for seq in range(4)]
        first = c.StageMessages(session_id=session_id, messages=tuple(rows[:2]))
        second = c.StageMessages(session_id=session_id, messages=tuple(rows[2:]))
        steps += [Batch((Unit((made, turns, first)),)), Batch((Unit((second,)),))]
    facts = SessionFacts(key=key, started_ms=START_MS, last_ms=START_MS + 9, next_seq=Seq(4))
    ended = replace(
        facts, ended_ms=START_MS + 4, end_reason="compression", end_kind="rotation", title="Old"
    )
    went_on = replace(facts, parent_id=parent, edge="rotation", title="Old #2")
    published = (
        c.PublishSession(session_id=parent, facts=ended),
        c.PublishSession(session_id=child, facts=went_on),
        c.OpenIncarnation(key=key, incarnation=Incarnation(1)),
        c.SetRoute(key=key, session_id=child, replaces=0, at_ms=START_MS),
    )
    return Workload("import_lineage", before, (*steps, Batch((Unit(published),))))


def _extending() -> Workload:
    """An import goes on in a session that is here, and takes its first messages back."""
    chat, before = _chat()
    session_id, base = chat.session_id, chat.next_seq
    extend = c.ExtendSession(
        session_id=session_id,
        base_seq=Seq(base),
        messages=(
            _imported(session_id, base, "a summary", summary=True, covers=(Seq(0), Seq(1))),
            _imported(session_id, base + 1, "more"),
        ),
        states=(
            StateRange(first=Seq(0), last=Seq(1), state="summarised", summarised_by=Seq(base)),
            StateRange(first=Seq(2), last=Seq(2), state="rewound"),
        ),
        replaces=chat.revision,
        at_ms=chat.at(),
    )
    return _single("extend_session", before, Unit((extend,)))


def _imported(
    session_id: SessionId, seq: int, text: str, *, kept: int = 0, **fields: Any
) -> Message:
    """A row as a file has it; `kept` tells those of several sessions apart."""
    return Message(
        session_id=session_id,
        seq=Seq(seq),
        uid=uid_of(f"imported/{seq}" if kept == 0 else f"imported/{kept}/{seq}"),
        role="user",
        text=text,
        created_ms=START_MS + seq,
        **fields,
    )


# Turns, the inbox, usage


def _turns() -> list[Workload]:
    chat, before = _chat()
    turn_id = TurnId(uid_of("ann/waiting"))
    opened = chat.unit(c.OpenTurn(turn_id=turn_id, key=chat.key, at_ms=chat.at()))
    accept = c.AcceptInbound(
        source="chat",
        inbound_id="in-1",
        key=chat.key,
        turn_id=turn_id,
        disposition="queued",
        digest="d" * 32,
        at_ms=chat.at(),
        body=Inbound(text="are you there?", user="ann", reply_to={"channel": 7}),
    )
    accepted = chat.unit(accept)
    taken = chat.unit(c.TakeInbound(source="chat", inbound_id="in-1", turn_id=turn_id))
    started = chat.unit(
        c.StartTurn(turn_id=turn_id, session_id=chat.session_id, attempt=1, at_ms=chat.at())
    )
    suspended = chat.unit(c.SuspendTurn(turn_id=turn_id, attempt=1, at_ms=chat.at()))
    ended = chat.unit(chat.end_turn(turn_id))
    aside = chat.unit(c.SetAside(turn_id=turn_id, reason="fails", tries=3, at_ms=chat.at()))
    resolved = chat.unit(
        c.ResolveDeadLetter(turn_id=turn_id, tries=3, resolution="retried", at_ms=chat.at())
    )
    prune = c.PruneInbox(before_ms=START_MS * 2, limit=10, replaces=0, at_ms=chat.at())
    usage = c.AddUsage(
        call_id=uid_of("call"),
        session_id=chat.session_id,
        at_ms=chat.at(),
        turn_id=turn_id,
        model="model-1",
        tokens=Tokens(input=100, output=20, cache_read=3),
        cost_nanos=12_345,
    )
    waiting = (*before, opened, accepted)
    return [
        _single("open_turn", before, opened),
        _single("accept_inbound", (*before, opened), accepted),
        _single("take_inbound", waiting, taken),
        _single("start_turn", waiting, started),
        _single("suspend_turn", (*waiting, started), suspended),
        _single("end_turn", (*waiting, started, suspended), ended),
        _single("set_aside", (*waiting, started, ended), aside),
        _single("resolve_dead_letter", (*waiting, started, ended, aside), resolved),
        _single("prune_inbox", (*waiting, started, taken, ended), Unit((prune,))),
        _single("add_usage", (*waiting, started), chat.unit(usage)),
    ]


# What leaves, and what is waited for


def _exchange() -> list[Workload]:
    chat, before = _chat()
    turn_id = TurnId(uid_of("ann/first"))
    posted = chat.unit(
        c.PostDelivery(
            delivery_id="out-1",
            key=chat.key,
            source="chat",
            target={"channel": 7},
            body={"text": "because"},
            at_ms=chat.at(),
            turn_id=turn_id,
            session_id=chat.session_id,
            message_uid=uid_of("ann/message/4"),
        )
    )
    sending = chat.unit(
        c.MarkDelivery(delivery_id="out-1", attempt=1, state="sending", at_ms=chat.at())
    )
    put_off = chat.unit(
        c.MarkDelivery(
            delivery_id="out-1",
            attempt=1,
            state="pending",
            at_ms=chat.at(),
            error="later",
            next_ms=chat.at() + 60_000,
        )
    )
    sent = chat.unit(
        c.MarkDelivery(
            delivery_id="out-1", attempt=1, state="sent", at_ms=chat.at(), platform_id="p-9"
        )
    )
    begun = chat.unit(
        c.BeginEffect(
            turn_id=turn_id,
            effect_key="mail",
            effect_id=uid_of("effect"),
            tool="mail",
            digest="e" * 32,
            attempt=1,
            at_ms=chat.at(),
        )
    )
    finished = chat.unit(
        c.FinishEffect(
            turn_id=turn_id,
            effect_key="mail",
            attempt=1,
            state="done",
            at_ms=chat.at(),
            result={"id": 5},
        )
    )
    asked = chat.unit(
        c.AskQuestion(
            key=chat.key,
            question_key="q-1",
            turn_id=turn_id,
            question="may I?",
            at_ms=chat.at(),
            choices=("yes", "no"),
        )
    )
    answered = chat.unit(
        c.AnswerQuestion(
            key=chat.key,
            question_key="q-1",
            state="answered",
            at_ms=chat.at(),
            answer="yes",
            by="ann",
        )
    )
    return [
        _single("post_delivery", before, posted),
        _single("mark_delivery", (*before, posted), sending, put_off, sent),
        _single("begin_effect", before, begun),
        _single("finish_effect", (*before, begun), finished),
        _single("ask_question", before, asked),
        _single("answer_question", (*before, asked), answered),
    ]


def _timers() -> list[Workload]:
    chat, before = _chat()
    timer = c.SetTimer(
        timer_id="t-1",
        key=chat.key,
        source="timer",
        due_ms=START_MS + 60_000,
        inbound=Inbound(text="remember the milk"),
        at_ms=chat.at(),
    )
    was_set = chat.unit(timer)
    fired = c.ResolveTimer(timer_id="t-1", resolution="fired", at_ms=chat.at())
    return [
        _single("set_timer", before, was_set),
        _single("resolve_timer", (*before, was_set), chat.unit(fired)),
    ]


def _blob(data: bytes) -> tuple[Unit, Unit, BlobId]:
    blob_id = BlobId(sha256(data).hexdigest())
    put = c.PutChunk(blob_id=blob_id, index=0, data=data)
    seal = c.SealBlob(
        blob_id=blob_id,
        size_bytes=len(data),
        chunk_count=1,
        media_type="image/png",
        at_ms=START_MS,
    )
    return Unit((put,)), Unit((seal,)), blob_id


def _blobs() -> list[Workload]:
    _, before = _chat()
    put, seal, blob_id = _blob(
        bytes(range(256)) * 64
    )  # larger than a page: it overflows into a chain
    dropped = Unit((c.DropBlob(blob_id=blob_id),))
    shrunk = Unit((c.DropBlob(blob_id=blob_id, keeping=1),))
    more = Unit((c.PutChunk(blob_id=blob_id, index=1, data=b"more"),))
    return [
        _single("put_chunk", before, put),
        _single("seal_blob", (*before, put), seal),
        _single("drop_blob", (*before, put, seal), dropped),
        _single("drop_blob_in_slices", (*before, put, more), shrunk, dropped),
        _single("set_mark", before, Unit((c.SetMark(name="moved", value="yes"),))),
        _single("rebuild_search", before, Unit((c.RebuildSearch(replaces=0, at_ms=START_MS),))),
    ]


# Whole stories


def _whole_turn() -> list[Workload]:
    """Accepted, opened, started and in the transcript, as one unit; then the answer and the end."""
    chat, before = _chat()
    turn_id = TurnId(uid_of("ann/whole"))
    guard = chat.guard()
    accept = c.AcceptInbound(
        source="chat",
        inbound_id="in-2",
        key=chat.key,
        turn_id=turn_id,
        disposition="started",
        digest="f" * 32,
        at_ms=chat.at(),
    )
    begun = chat.guarded(
        guard,
        c.OpenTurn(turn_id=turn_id, key=chat.key, at_ms=chat.at()),
        accept,
        c.StartTurn(turn_id=turn_id, session_id=chat.session_id, attempt=1, at_ms=chat.at()),
        chat.append(chat.draft("user", "all at once"), turn_id=turn_id),
    )
    guard = chat.guard()
    answered = chat.guarded(
        guard,
        chat.append(chat.draft("assistant", "done"), turn_id=turn_id),
        chat.end_turn(turn_id),
    )
    return [_single("whole_turn", before, begun, answered)]


def _finalize() -> list[Workload]:
    """The last messages and the end of the session, in one unit."""
    chat, before = _chat()
    guard = chat.guard()
    last = chat.guarded(guard, chat.append(chat.draft("assistant", "goodbye")), chat.end())
    return [_single("finalize", before, last)]


def _take_over() -> list[Workload]:
    """A session changes hands: one unit, two keys, two guards."""
    ann, of_ann = _chat("ann")
    bob, of_bob = _chat("bob")
    held = ann.session_id
    guards = (
        Guard(key=ann.key, incarnation=ann.incarnation, session_id=held, revision=ann.revision),
        Guard(key=bob.key, incarnation=bob.incarnation, session_id=held),
    )
    away = ann.route_to(SessionId("ann-fresh"))
    over = bob.route_to(held, take_over=True)
    return [_single("take_over", (*of_ann, *of_bob), Unit((away, over), guards))]


def _group() -> list[Workload]:
    """Several sessions in one batch, twice."""
    chats = [_chat(name) for name in ("ann", "bob", "cat")]
    before = tuple(unit for _, units in chats for unit in units)
    batches: list[Batch] = []
    for number in range(2):
        units: list[Unit] = []
        for chat, _ in chats:
            guard = chat.guard()
            units.append(chat.guarded(guard, chat.append(chat.draft("user", f"{number} " * 500))))
        batches.append(Batch(tuple(units)))
    return [Workload("group_commit", before, tuple(batches))]


def _upkeep() -> list[Workload]:
    def appends(chat: Conversation, count: int) -> list[Batch]:
        batches: list[Batch] = []
        for number in range(count):
            guard = chat.guard()
            message = chat.draft("user", f"{number} " * 300)
            batches.append(Batch((chat.guarded(guard, chat.append(message)),)))
        return batches

    fresh = Conversation("new")
    opening = tuple(Batch((unit,)) for unit in fresh.opening())
    steps_of = {name: _chat() for name in ("checkpoint", "restart", "reopen")}
    loads = [
        Workload("create_database", (), (), created=False),
        Workload("create_and_use", (), (*opening, *appends(fresh, 1)), created=False),
    ]
    names: tuple[Upkeep, ...] = ("checkpoint", "restart", "reopen")
    for name in names:
        chat, before = steps_of[name]
        first, second, third = appends(chat, 3)
        # Twice, and something after it: what comes next overwrites the log that was copied.
        loads.append(Workload(name, before, (first, name, second, name, third)))
    return loads


def _giving_back() -> list[Workload]:
    """A session of some size goes: its pages are given back, and the log is emptied."""
    chat, before = _chat()
    other, of_other = _chat("bob")
    for number in range(3):
        guard = chat.guard()
        before = (
            *before,
            chat.guarded(guard, chat.append(chat.draft("user", f"{number}" * 9_000))),
        )
    guard = other.guard()
    said = other.guarded(guard, other.append(other.draft("user", "still here " * 900)))
    large = chat.session_id
    away = chat.unit(chat.route_to(SessionId("ann-fresh")))
    gone = chat.unit(
        c.DeleteSession(session_id=large, at_ms=chat.at()),
        c.PurgeSession(session_id=large, step=0, last=True),
    )
    guard = other.guard()
    last = other.guarded(guard, other.append(other.draft("user", "and on")))
    steps = ("chores", Batch((said,)), "rest", Batch((gone,)), "chores", "rest", Batch((last,)))
    return [Workload("give_back", (*before, away, *of_other), cast("tuple[Step, ...]", steps))]


def _indexing() -> list[Workload]:
    """Slices of the search index between commits that change what is in it."""
    chat, before = _chat()
    guard = chat.guard()
    said = chat.guarded(guard, chat.append(chat.draft("user", "a pelican")))
    guard = chat.guard()
    rewind = c.Rewind(
        session_id=chat.session_id,
        to_seq=Seq(chat.next_seq - 1),
        replaces=chat.revision,
        at_ms=chat.at(),
    )
    rewound = chat.guarded(guard, rewind)
    rebuilt = Unit((c.RebuildSearch(replaces=0, at_ms=START_MS),))
    steps = (Batch((said,)), "chores", Batch((rewound,)), "chores", Batch((rebuilt,)), "chores")
    return [Workload("indexing", before, cast("tuple[Step, ...]", steps))]


def _all() -> Mapping[str, Workload]:
    makers = (
        _keys,
        _sessions,
        _deletion,
        _cleanup,
        _appending,
        _rotation,
        _editing,
        _importing,
        _turns,
        _exchange,
        _timers,
        _blobs,
        _whole_turn,
        _finalize,
        _take_over,
        _group,
        _upkeep,
        _giving_back,
        _indexing,
    )
    loads = [load for make in makers for load in make()]
    assert len({load.name for load in loads}) == len(loads)
    return {load.name: load for load in loads}


WORKLOADS: Mapping[str, Workload] = _all()
"""Every workload, by its name."""
