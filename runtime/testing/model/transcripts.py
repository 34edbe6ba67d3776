"""The model of transcripts: append, rotate, compact, rewind, restore, branch, erase, stage.

A transcript is a tuple of messages whose index is their seq. A message stands at its own seq when
the transcript is read, a summary written in place at the end of the range that it covers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict, replace

from ....storage import commands as c
from ....storage.identity import Seq
from ....storage.records import Draft, Message, Session
from .sessions import move_route, next_title, session_key_of
from .state import State, canonical, refuse

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ....storage.identity import SessionId, TurnId

_IN_COLUMNS = {"uid", "role", "text", "user", "created_ms"}
_DRAFT_FIELDS = Draft.__struct_fields__


def place(message: Message) -> tuple[int, int]:
    """Where a message stands when the transcript is read."""
    return (message.covers[1] if message.covers else message.seq, message.seq)


def content_bytes(draft: Draft) -> int:
    """The size of a message: its text in UTF-8, and the JSON of everything else that was given."""
    given = msgspec.to_builtins(as_given(draft))
    rest = {name: value for name, value in given.items() if name not in _IN_COLUMNS}
    text = 0 if draft.text is None else len(draft.text.encode())
    return text + (len(msgspec.json.encode(rest)) if rest else 0)


def total_bytes(messages: Iterable[Message]) -> int:
    return sum(content_bytes(m) for m in messages)


def as_given(draft: Draft) -> Draft:
    """A stored message without its place and state."""
    return Draft(**{name: getattr(draft, name) for name in _DRAFT_FIELDS})


def same_content(stored: Message, given: Draft) -> bool:
    if stored.erased:  # its identity is all there is to compare
        return stored.uid == given.uid
    return canonical(as_given(stored)) == canonical(as_given(given))


def stored_as_given(
    state: State, session: Session, base_seq: int, drafts: Collection[Draft]
) -> bool:
    if base_seq + len(drafts) > session.next_seq or base_seq < 0:
        return False
    if (
        session.deleted
    ):  # the rows are gone on purpose; the tombstone's next seq says they were there
        return True
    rows = state.transcripts[session.id][base_seq : base_seq + len(drafts)]
    return all(map(same_content, rows, drafts))


def _refuse_known_uid(state: State, session_id: SessionId, uid: str, *, carried: bool) -> None:
    """A uid has one original, and one copy in a session."""
    for owner, rows in state.transcripts.items():
        for m in rows:
            if m.uid == uid and m.carried == carried and (not carried or owner == session_id):
                refuse("conflict", f"message {uid}")


def add(state: State, session_id: SessionId, draft: Draft, /, **marks: Any) -> None:
    """One new row at the end."""
    session = state.sessions[session_id]
    for blob_id in draft.blobs:
        if blob_id not in state.blobs or not state.blobs[blob_id].sealed:
            refuse("missing", f"blob {blob_id}")
    _refuse_known_uid(state, session_id, draft.uid, carried=marks.get("carried", False))
    given = {name: getattr(draft, name) for name in _DRAFT_FIELDS}
    message = Message(**given, session_id=session_id, seq=session.next_seq, **marks)
    state.transcripts[session_id] += (message,)
    state.sessions[session_id] = replace(
        session,
        next_seq=Seq(session.next_seq + 1),
        last_ms=session.last_ms if message.carried else max(session.last_ms, draft.created_ms),
    )


def revise(state: State, session_id: SessionId, at_ms: int | None = None) -> int:
    """The transcript has changed."""
    session = state.sessions[session_id]
    last_ms = session.last_ms if at_ms is None else max(session.last_ms, at_ms)
    revision = session.revision + (session_id not in state.revised)
    state.revised |= {session_id}
    state.sessions[session_id] = replace(session, revision=revision, last_ms=last_ms)
    return revision


def append_messages(state: State, command: c.AppendMessages) -> bool:
    stored = state.sessions.get(command.session_id)
    if stored and stored_as_given(state, stored, command.base_seq, command.messages):
        return False
    session = state.known_session(command.session_id)
    if command.base_seq != session.next_seq:
        rows = state.transcripts[session.id]
        known = 0 <= command.base_seq < len(rows)
        if known and rows[command.base_seq].uid == command.messages[0].uid:
            refuse("conflict", f"message {command.base_seq}")
        refuse("broken_chain", session.id)
    turn_id = state.known_turn(command.turn_id)
    for draft in command.messages:
        add(state, session.id, draft, turn_id=turn_id)
    revise(state, session.id)
    return True


# Rotation and branching --------------------------------------------------------------------------


def _child_made(state: State, command: c.Rotate | c.Branch) -> bool:
    child = state.sessions.get(command.child_id)
    if child is None or child.parent_id != command.parent_id:
        return False
    return state.was_set(command.key, "route", command.replaces, command)


def rotate(state: State, command: c.Rotate) -> bool:
    if _child_made(state, command):
        return False
    parent = state.known_session(command.parent_id)
    if parent.next_seq != command.parent_base_seq:
        refuse("broken_chain", parent.id)
    _refuse_elsewhere(state, command)
    _refuse_taken_child(state, command)
    turn_id = state.known_turn(command.turn_id)
    active = [m for m in state.transcripts[parent.id] if m.state == "active"]
    if not set(command.carried) <= {m.seq for m in active}:
        refuse("invalid", "carried rows that are not active")
    if not {m.seq for m in active if _runs(m, turn_id)} <= set(command.carried):
        refuse("invalid", "a row of the running turn left behind")
    if not command.force:
        _refuse_without_gain(command, [m for m in active if not _runs(m, turn_id)])
    state.sessions[parent.id] = replace(
        parent,
        ended_ms=command.at_ms,
        end_reason="compression",
        end_kind="rotation",
        end_version=parent.end_version + 1,
    )
    _make_child(state, parent, command, "rotation")
    for draft in command.summary:
        add(state, command.child_id, draft, summary=True)
    _carry(state, [m for m in active if m.seq in command.carried], command.child_id)
    if turn_id is not None and state.turns[turn_id].session_id == parent.id:
        state.turns[turn_id] = replace(state.turns[turn_id], session_id=command.child_id)
    revise(state, command.child_id, command.at_ms)
    move_route(state, command, command.child_id)
    return True


def _runs(message: Message, turn_id: TurnId | None) -> bool:
    return turn_id is not None and message.turn_id == turn_id


def _refuse_elsewhere(state: State, command: c.Rotate) -> None:
    """Only a key's current session is rotated: no route may name one that was rotated away."""
    route = state.keys.get(command.key)
    if route is None or route.session_id != command.parent_id:
        refuse("route_conflict", "it is not the key's current session")


def _refuse_taken_child(state: State, command: c.Rotate | c.Branch) -> None:
    if session_key_of(state, command.child_id) is not None:
        refuse("route_conflict", "the child's id is taken")


def _refuse_without_gain(command: c.Rotate, before: list[Message]) -> None:
    kept = [m for m in before if m.seq in command.carried]
    count = len(kept) + len(command.summary)
    size = total_bytes(kept) + sum(map(content_bytes, command.summary))
    if size >= total_bytes(before) or count > len(before):
        refuse("no_gain", command.parent_id)


def _make_child(state: State, parent: Session, command: c.Rotate | c.Branch, edge: Any) -> None:
    title = None if parent.title is None else next_title(state, parent.title)
    state.sessions[command.child_id] = Session(
        id=command.child_id,
        key=command.key,
        parent_id=parent.id,
        edge=edge,
        source=parent.source,
        user=parent.user,
        model=parent.model,
        meta=parent.meta,
        title=title,
        title_origin=parent.title_origin,
        started_ms=command.at_ms,
        last_ms=command.at_ms,
    )
    state.transcripts[command.child_id] = ()


def _carry(state: State, rows: list[Message], child_id: SessionId) -> None:
    parent_id = state.sessions[child_id].parent_id
    if parent_id is not None and parent_id in state.given:
        state.given[parent_id] = 0  # there are new copies of what was handed on
    for m in sorted(rows, key=place):
        marks = {"turn_id": m.turn_id, "summary": m.summary, "erased": m.erased}
        add(state, child_id, m, carried=True, **marks)


def branch(state: State, command: c.Branch) -> bool:
    if _child_made(state, command):
        return False
    parent = state.known_session(command.parent_id)
    _refuse_taken_child(state, command)
    rows = [m for m in state.transcripts[parent.id] if m.state == "active"]
    _make_child(state, parent, command, "branch")
    _carry(state, [m for m in rows if place(m)[0] <= command.upto_seq], command.child_id)
    revise(state, command.child_id, command.at_ms)
    move_route(state, command, command.child_id)
    return True


# Compaction, rewind, restore ---------------------------------------------------------------------


def compact(state: State, command: c.Compact) -> bool:
    stored = state.sessions.get(command.session_id)
    covers = (command.first_seq, command.last_seq)
    if (
        stored is not None
        and stored_as_given(state, stored, command.base_seq, [command.summary])
        and (stored.deleted or state.transcripts[stored.id][command.base_seq].covers == covers)
    ):
        return False
    session = state.known_session(command.session_id)
    if command.base_seq != session.next_seq:
        refuse("broken_chain", session.id)
    turn_id = state.known_turn(command.turn_id)
    if not 0 <= command.first_seq <= command.last_seq < command.base_seq:
        refuse("invalid", "no range of stored messages")
    rows = state.transcripts[session.id]
    covered = [m for m in rows if m.state == "active" and covers[0] <= place(m)[0] <= covers[1]]
    if not covered:
        refuse("invalid", "no active message in the range")
    if any(_runs(m, turn_id) for m in covered):
        refuse("invalid", "a cut into the running turn")
    if not command.force and content_bytes(command.summary) >= total_bytes(covered):
        refuse("no_gain", session.id)
    state.transcripts[session.id] = tuple(
        replace(m, state="summarised", summarised_by=command.base_seq) if m in covered else m
        for m in rows
    )
    add(state, session.id, command.summary, summary=True, covers=covers)
    state.sessions[session.id] = replace(
        state.sessions[session.id], compaction_count=session.compaction_count + 1
    )
    revise(state, session.id, command.at_ms)
    return True


def rewind(state: State, command: c.Rewind) -> bool:
    if state.was_set(command.session_id, "revision", command.replaces, command):
        return False
    session = state.known_session(command.session_id)
    state.set_value(session.id, "revision", session.revision, command.replaces, command)
    before = state.transcripts[session.id]
    gone = {m.seq for m in before if m.state != "rewound" and place(m)[0] >= command.to_seq}

    def rewound(m: Message) -> Message:
        if m.seq in gone:
            return replace(m, state="rewound", summarised_by=None)
        if m.state == "summarised" and m.summarised_by in gone:
            return replace(m, state="active", summarised_by=None)
        return m

    state.transcripts[session.id] = tuple(map(rewound, before))
    for draft in command.closing:
        add(state, session.id, draft)
    state.undo[session.id] = (revise(state, session.id, command.at_ms), before)
    return True


def restore(state: State, command: c.Restore) -> bool:
    if state.was_set(command.session_id, "revision", command.replaces, command):
        return False
    session = state.known_session(command.session_id)
    state.set_value(session.id, "revision", session.revision, command.replaces, command)
    revision, before = state.undo.get(session.id, (None, ()))
    if revision != session.revision:
        refuse("stale", "the last change was no rewind")
    closing = state.transcripts[session.id][len(before) :]
    state.transcripts[session.id] = (*before, *(replace(m, state="rewound") for m in closing))
    revise(state, session.id, command.at_ms)
    return True


# Erasing and staging -----------------------------------------------------------------------------


def erase_messages(state: State, command: c.EraseMessages) -> bool:
    stored = state.sessions.get(command.session_id)
    if stored is not None:
        rows = state.transcripts[stored.id]
        if stored.deleted or all(0 <= s < len(rows) and rows[s].erased for s in command.seqs):
            return False
    session = state.known_session(command.session_id)
    if any(not 0 <= seq < session.next_seq for seq in command.seqs):
        refuse("missing", "a message")
    state.transcripts[session.id] = tuple(
        _blank(m) if m.seq in command.seqs else m for m in state.transcripts[session.id]
    )
    revise(state, session.id)
    return True


def recount_session(state: State, command: c.RecountSession) -> bool:
    """Nothing was counted wrong here: only the revision moves."""
    if state.was_set(command.session_id, "recount", command.replaces, command):
        return False
    session = state.sessions.get(command.session_id)
    if session is None:
        refuse("missing", f"session {command.session_id}")
    state.set_value(session.id, "recount", session.revision, command.replaces, command)
    revise(state, session.id)
    return True


def _blank(m: Message) -> Message:
    kept = ("uid", "role", "created_ms", "session_id", "seq", "state", "turn_id", "carried")
    marks = ("summary", "covers", "summarised_by")
    stays = {name: value for name, value in asdict(m).items() if name in (*kept, *marks)}
    return Message(**stays, text="", erased=True)


def stage_messages(state: State, command: c.StageMessages) -> bool:
    stored = state.sessions.get(command.session_id)
    if stored is not None and stored_as_given(
        state, stored, command.messages[0].seq, command.messages
    ):
        return False
    session = state.known_session(command.session_id)
    if not session.hidden:
        refuse("invalid", "it is not hidden")
    for message in command.messages:
        if message.seq != state.sessions[session.id].next_seq:
            refuse("broken_chain", session.id)
        state.known_turn(message.turn_id)
        add_as_is(state, session.id, message)
    revise(state, session.id)
    return True


def add_as_is(state: State, session_id: SessionId, message: Message) -> None:
    given = {*_DRAFT_FIELDS, "session_id", "seq"}
    marks = {name: value for name, value in asdict(message).items() if name not in given}
    add(state, session_id, message, **marks)
    session = state.sessions[session_id]
    last_ms = max(session.last_ms, message.created_ms)
    state.sessions[session_id] = replace(session, last_ms=last_ms)


COMMANDS: dict[type[c.Command], Any] = {
    c.AppendMessages: append_messages,
    c.Rotate: rotate,
    c.Branch: branch,
    c.Compact: compact,
    c.Rewind: rewind,
    c.Restore: restore,
    c.EraseMessages: erase_messages,
    c.RecountSession: recount_session,
    c.StageMessages: stage_messages,
}
