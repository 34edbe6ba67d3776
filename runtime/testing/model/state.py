"""The state of the plain model of an engine: dicts of frozen records, nothing derived, nothing
cached.

Every value in a dict is immutable, so a copy of the dicts is a snapshot: a unit is applied to a
copy, which is kept or thrown away whole. Counters of messages, tokens and cost are not here: the
views count the rows.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

if TYPE_CHECKING:
    from ....storage.identity import BlobId, SessionId, SessionKey, TurnId, Uid
    from ....storage.records import (
        Blob,
        DeadLetter,
        Delivery,
        Effect,
        InboxEntry,
        Message,
        Question,
        Route,
        Session,
        Timer,
        Turn,
        Usage,
    )
    from ....storage.units import Reason


class RefusedByModelError(Exception):
    """A command can't be applied; the unit it belongs to changes nothing."""

    def __init__(self, reason: Reason, what: str) -> None:
        super().__init__(f"{reason}: {what}")
        self.reason: Reason = reason
        self.what = what


def refuse(reason: Reason, what: str = "") -> NoReturn:
    raise RefusedByModelError(reason, what)


def canonical(value: Any) -> bytes:
    """Equal bytes for equal content: `1`, `1.0` and `true` differ, member order does not count."""
    return msgspec.json.encode(value, order="deterministic")


@dataclass
class State:
    """Everything that is stored."""

    keys: dict[SessionKey, Route] = field(default_factory=dict)
    sessions: dict[SessionId, Session] = field(default_factory=dict)  # in the order of creation
    transcripts: dict[SessionId, tuple[Message, ...]] = field(default_factory=dict)  # index = seq
    former_keys: dict[SessionId, tuple[SessionKey, ...]] = field(default_factory=dict)
    undo: dict[SessionId, tuple[int, tuple[Message, ...]]] = field(default_factory=dict)
    """For a session that was rewound: the revision that it made, and the rows before it."""

    values: dict[tuple[str, str, int], bytes] = field(default_factory=dict)
    """(scope, aspect, version) -> the command that set it, in canonical form."""

    steps: frozenset[bytes] = frozenset()
    """What turns, deliveries and effects went through: a repeated step is recognised."""

    found: bool = False
    """Whether all of the current unit until now was stored already."""

    revised: frozenset[SessionId] = frozenset()
    """Sessions whose revision the current unit has moved: it moves them once."""

    turns: dict[TurnId, Turn] = field(default_factory=dict)
    inbox: dict[tuple[str, str], InboxEntry] = field(default_factory=dict)
    prunings: int = 0
    given: dict[SessionId, int] = field(default_factory=dict)
    """Before this seq no message of the session has a copy elsewhere that is not the original."""
    purges: dict[SessionId, int] = field(default_factory=dict)
    """Deleted sessions of which rows are left, and how many slices were taken away."""
    rebuilds: int = 0
    dead_letters: dict[TurnId, DeadLetter] = field(default_factory=dict)
    usage: dict[Uid, Usage] = field(default_factory=dict)
    deliveries: dict[str, Delivery] = field(default_factory=dict)
    effects: dict[tuple[TurnId, str], Effect] = field(default_factory=dict)
    questions: dict[tuple[SessionKey, str], Question] = field(default_factory=dict)
    timers: dict[str, Timer] = field(default_factory=dict)
    blobs: dict[BlobId, Blob] = field(default_factory=dict)
    chunks: dict[tuple[BlobId, int], bytes] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)

    def snapshot(self) -> State:
        """The same state, independent of what happens to this one."""
        copied = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):
                setattr(copied, name, value.copy())
        return copied

    # What several commands ask ------------------------------------------------------------------

    def known_session(self, session_id: SessionId) -> Session:
        """The session, which must be there and hold its text."""
        session = self.sessions.get(session_id)
        if session is None:
            refuse("missing", f"session {session_id}")
        if session.deleted:
            refuse("ended", f"session {session_id} is deleted")
        return session

    def known_turn(self, turn_id: TurnId | None) -> TurnId | None:
        if turn_id is not None and turn_id not in self.turns:
            refuse("missing", f"turn {turn_id}")
        return turn_id

    def holder(self, session_id: SessionId) -> SessionKey | None:
        """The key whose route names the session."""
        return next((r.key for r in self.keys.values() if r.session_id == session_id), None)

    def successor(self, session_id: SessionId) -> Session | None:
        """The child that the session was rotated to."""
        return next(
            (
                s
                for s in self.sessions.values()
                if (s.parent_id, s.edge) == (session_id, "rotation")
            ),
            None,
        )

    def text_gone(self, turn_id: TurnId) -> bool:
        """Whether the turn ran in a session that was deleted since."""
        turn = self.turns.get(turn_id)
        if turn is None or turn.session_id is None:
            return False
        return self.sessions[turn.session_id].deleted

    def forgettable(self, entry: InboxEntry) -> bool:
        """Whether its turn and the one that it was steered into have ended, and nobody has a
        decision to make about them.
        """
        turns = [turn_id for turn_id in (entry.turn_id, entry.into) if turn_id is not None]
        letters = (self.dead_letters.get(turn_id) for turn_id in turns)
        undecided = any(letter is not None and letter.state == "open" for letter in letters)
        return not undecided and all(self.turns[one].state == "ended" for one in turns)

    def blob_in_use(self, blob_id: BlobId) -> bool:
        waiting = (
            e.body
            for e in self.inbox.values()
            if e.body is not None and self.turns[e.turn_id].state != "ended"
        )
        timers = (t.inbound for t in self.timers.values() if t.state == "set")
        inbound = any(blob_id in one.blobs for one in (*waiting, *timers))
        return inbound or any(
            blob_id in m.blobs for rows in self.transcripts.values() for m in rows
        )

    def turns_of(self, session_id: SessionId) -> set[TurnId]:
        return {t.id for t in self.turns.values() if t.session_id == session_id}

    def is_needed(self, session_id: SessionId) -> bool:
        """Whether a person keeps it, or something of it is open."""
        later = self.sessions.get(session_id)
        while later is not None:
            if later.pinned:
                return True
            later = self.successor(later.id)
        turns = self.turns_of(session_id)
        letters = (self.dead_letters.get(turn_id) for turn_id in turns)
        return (
            any(self.turns[turn_id].state != "ended" for turn_id in turns)
            or any(letter is not None and letter.state == "open" for letter in letters)
            or any(q.state == "open" and q.turn_id in turns for q in self.questions.values())
            or any(
                d.state in ("pending", "sending")
                and (d.session_id == session_id or d.turn_id in turns)
                for d in self.deliveries.values()
            )
        )

    # Values with a version, and steps -----------------------------------------------------------

    def was_set(self, scope: str, aspect: str, replaces: int, command: Any) -> bool:
        return self.values.get((scope, aspect, replaces + 1)) == canonical(command)

    def set_value(self, scope: str, aspect: str, stored: int, replaces: int, command: Any) -> int:
        """Record that the command made the next version; refuse it if it replaces another one."""
        if stored != replaces:
            refuse("stale", f"{aspect} of {scope}")
        self.values[scope, aspect, replaces + 1] = canonical(command)
        return replaces + 1

    def took(self, *step: Any) -> bool:
        return canonical(step) in self.steps

    def take(self, *step: Any) -> None:
        self.steps |= {canonical(step)}

    def forget(self, *names: Any) -> None:
        """What begins so is gone, and the steps that it took with it."""
        beginning = canonical(names)[:-1] + b","
        self.steps = frozenset(step for step in self.steps if not step.startswith(beginning))
