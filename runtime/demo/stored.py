"""What a file holds of the demo's conversations, read through the engine's own views.

Owns no judgement about loss: it says what is there, and `account` holds it against what was told.
What can be seen to be wrong by itself (a stored order, a torn rotation, a call without a result) is
counted here. Opening the file is what a restart does first: it rolls nothing forward and nothing
back but what SQLite's own log asks for.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec import Struct, field

from ...storage.identity import SessionKey
from ...storage.records import Delivery, Turn
from ...storage.sqlite import open_sqlite
from ..system import SystemClock
from ..testing.exchanges import count_open_calls
from ..testing.invariants import check_database
from .gateway import SOURCE, answer_of, call_id_of, inbound_id_of, key_of, place_of, text_of
from .told import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ...storage.engine import Reader
    from ...storage.identity import SessionId
    from ...storage.records import Message, Session
    from .gateway import Script

_PAGE = 500


class Stored(Struct, kw_only=True):
    """One look at the file."""

    messages: Counter[Place] = field(default_factory=lambda: Counter[Place]())
    """User messages, by how often each is stored; copies that a rotation carried don't count."""
    answers: Counter[Place] = field(default_factory=lambda: Counter[Place]())
    waiting: set[Place] = field(default_factory=lambda: set[Place]())
    """Accepted, but their turns have not begun."""
    turns: dict[Place, Turn] = field(default_factory=lambda: dict[Place, Turn]())
    lines: list[set[str]] = field(default_factory=lambda: list[set[str]]())
    """For each conversation, its current session and the sessions that were rotated into it."""
    rotations: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    """Children, and their parents."""
    sessions: int = 0
    foreign: int = 0
    """Rows that belong to another conversation, or that nobody wrote like this."""
    out_of_order: int = 0
    currents_wrong: int = 0
    lineages_wrong: int = 0
    rotations_torn: int = 0
    calls_open: int = 0
    deliveries: list[Delivery] = field(default_factory=lambda: list[Delivery]())
    """The outbox, in the order of posting."""
    violations: tuple[str, ...] = ()

    @property
    def running(self) -> list[Place]:
        return [place for place, turn in self.turns.items() if turn.state == "running"]

    def ended(self, place: Place) -> bool:
        """Whether a message has a turn, and that turn has come to some end."""
        turn = self.turns.get(place)
        return turn is not None and turn.state == "ended"


def look(path: Path, script: Script) -> Stored:
    """Read everything, while nobody has the file open."""
    stored = Stored(violations=tuple(str(violation) for violation in check_database(path)))
    engine = open_sqlite(path, SystemClock())
    try:
        with engine.reading() as reader:
            for conversation in range(script.conversations):
                _look_at(reader, conversation, script.turns, stored)
            stored.foreign += _count_strangers(reader, script.conversations)
            stored.deliveries = _outbox(reader)
    finally:
        engine.close()
    return stored


def _look_at(reader: Reader, conversation: int, turns: int, stored: Stored) -> None:
    key = SessionKey(key_of(conversation))
    route = reader.route(key)
    current = None if route is None else route.session_id
    lineages = _lineages_of(reader, key)
    sessions = list({one.id: one for lineage in lineages for one in lineage}.values())
    stored.sessions += len(sessions)
    stored.lineages_wrong += sum(not _is_one_line(lineage, key) for lineage in lineages)
    # A session that was just opened has a route and no row; else exactly one row is the current.
    holding = [one.id for one in sessions if reader.holder(one.id) == key]
    row = None if current is None else reader.session(current)
    stored.currents_wrong += current is None or holding != ([] if row is None else [current])
    line = () if row is None else reader.lineage(row.id)
    stored.lines.append({*(one.id for one in line), *(() if current is None else (current,))})
    for session in sessions:
        transcript = _transcript(reader, session.id)
        stored.calls_open += count_open_calls(m for m in transcript if m.state == "active")
        stored.out_of_order += _count_out_of_order(transcript)
        _note_texts(conversation, transcript, stored)
        if session.edge == "rotation" and session.parent_id is not None:
            stored.rotations[session.id] = session.parent_id
            stored.rotations_torn += _is_torn(reader, session, transcript, current)
    for number in range(turns):
        entry = reader.inbound(SOURCE, inbound_id_of(conversation, number))
        if entry is None:
            continue
        turn = reader.turn(entry.turn_id)
        assert turn is not None  # a foreign key
        stored.turns[conversation, number] = turn
        if entry.body is not None and entry.body.text == text_of(conversation, number):
            stored.waiting.add((conversation, number))


def _outbox(reader: Reader) -> list[Delivery]:
    deliveries: list[Delivery] = []
    after: int | None = None
    while True:
        page, after = reader.deliveries(limit=_PAGE, after=after)
        deliveries += page
        if after is None:
            return deliveries[::-1]


def _lineages_of(reader: Reader, key: SessionKey) -> list[tuple[Session, ...]]:
    """All of a key's sessions: a listing shows the tips, and their lineages have the rest."""
    tips, following = reader.listing(key=key, archived=None, limit=_PAGE)
    assert following is None
    return [reader.lineage(tip.session.id) for tip in tips]


def _is_one_line(lineage: Sequence[Session], key: SessionKey) -> bool:
    """From a first session to one tip, each rotated into the next, all of the same key."""
    first, tip = lineage[0], lineage[-1]
    return (
        first.parent_id is None
        and tip.end_kind != "rotation"
        and all(one.key == key for one in lineage)
        and all(one.end_kind == "rotation" for one in lineage[:-1])
        and all(
            newer.edge == "rotation" and newer.parent_id == older.id
            for older, newer in pairwise(lineage)
        )
    )


def _count_strangers(reader: Reader, conversations: int) -> int:
    """Lineages under keys that nobody talks through."""
    known = {key_of(conversation) for conversation in range(conversations)}
    strangers, after = 0, None
    while True:
        tips, after = reader.listing(archived=None, limit=_PAGE, after=after)
        strangers += sum(tip.session.key not in known for tip in tips)
        if after is None:
            return strangers


def _transcript(reader: Reader, session_id: SessionId) -> list[Message]:
    messages: list[Message] = []
    after: tuple[int, int] | None = None
    while True:
        page = reader.transcript(session_id, include_inactive=True, after=after, limit=_PAGE)
        messages += page.messages
        after = page.next
        if after is None:
            return messages


def _note_texts(conversation: int, transcript: Iterable[Message], stored: Stored) -> None:
    """Messages count where they were said, and only if every character is as it was sent."""
    for message in transcript:
        calls = [call.id for call in message.tool_calls] + [message.tool_call_id or ""]
        prefix = call_id_of(conversation, 0).removesuffix("0")
        stored.foreign += any(call and not call.startswith(prefix) for call in calls)
        if message.role not in ("user", "assistant") or message.text is None:
            continue
        place = place_of(message.text)
        as_sent = text_of if message.role == "user" else answer_of
        if place is None or place[0] != conversation or message.text != as_sent(*place):
            stored.foreign += 1
        elif not message.carried:
            counted = stored.messages if message.role == "user" else stored.answers
            counted[place] += 1


def _count_out_of_order(transcript: Sequence[Message]) -> int:
    """In one session people's messages stand as they were sent, carried ones included."""
    places = [place_of(m.text) for m in transcript if m.role == "user" and m.text]
    numbers = [place[1] for place in places if place is not None]
    return sum(later <= earlier for earlier, later in pairwise(numbers))


def _is_torn(
    reader: Reader, child: Session, transcript: Sequence[Message], current: str | None
) -> bool:
    """A rotation is whole: its parent is closed and left, its child begins with the summary."""
    assert child.parent_id is not None
    parent = reader.session(child.parent_id)
    return (
        parent is None
        or parent.end_kind != "rotation"
        or parent.id == current
        or reader.holder(parent.id) is not None
        or not transcript
        or not transcript[0].summary
    )
