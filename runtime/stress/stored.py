"""What the file holds, read with SQL of its own while no process has it open.

Keeps: it shares no code with what wrote the file, so that a mistake there does not hide itself
here. Nothing is judged: `verdict` holds it against what was promised.

Must never write, and must never be asked while the process under test is alive.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, final

import msgspec

from ...storage.records import TurnOutcome
from ..testing.exchanges import count_open_calls
from ..testing.invariants import check_connection, inspecting
from .before import NOTHING, digest_of
from .script import SOURCE, key_of, place_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import apsw

    from .before import Before
    from .ledger import Promise
    from .plan import Plan
    from .script import Place

_KEPT = {
    "message": f"SELECT 1 FROM inbox WHERE source = '{SOURCE}' AND inbound_id = ?",
    # A cut turn that was told to be over may have been taken up again since.
    "turn": "SELECT 1 FROM turns WHERE id = ? AND (state = 'ended' OR attempt > 1)",
    "delivery": "SELECT 1 FROM deliveries WHERE id = ?",
    "session": "SELECT 1 FROM sessions WHERE id = ?",
    "event": "SELECT 1 FROM messages WHERE uid = ? AND carried = 0",
}
_FOREIGN_SHOWN = 20

_decode_outcome = msgspec.json.Decoder(TurnOutcome).decode


class Entry(NamedTuple):
    """A row of the inbox."""

    n: int
    key: str
    turn_id: str
    into: str | None
    body: str | None


class TurnRow(NamedTuple):
    """A turn, and what it came to."""

    key: str
    state: str
    attempt: int
    outcome: TurnOutcome | None


class Posted(NamedTuple):
    """A row of the outbox."""

    n: int
    id: str
    key: str
    turn_id: str | None
    state: str
    text: str


class _Call(NamedTuple):
    id: str


class _Row(NamedTuple):
    role: str
    tool_calls: tuple[_Call, ...]
    tool_call_id: str | None


@final
class Stored:
    """One look at the whole file."""

    def __init__(self) -> None:
        self.said: defaultdict[Place, list[tuple[int, str | None]]] = defaultdict(list)
        """People's messages where they were said: their place in the order of commits, turn."""
        self.answers: defaultdict[str, list[str]] = defaultdict(list)
        self.foreign: list[str] = []
        self.foreign_count = 0
        self.inbox: dict[Place, Entry] = {}
        self.turns: dict[str, TurnRow] = {}
        self.outbox: list[Posted] = []
        self.current: dict[str, str | None] = {}
        self.parents: dict[str, str] = {}
        """Children by rotation, and their parents."""
        self.keys: dict[str, str] = {}
        """Sessions, and whose they are."""
        self.effects: set[str] = set()
        self.calls_open: list[str] = []
        self.transcripts = 0
        self.rewound: set[Place] = set()
        self.violations: list[str] = []
        self.before = ""
        """The digest of what an older test has said."""

    def line_of(self, session_id: str | None) -> set[str]:
        """A session, and those that were rotated into it."""
        line: set[str] = set()
        while session_id is not None and session_id not in line:
            line.add(session_id)
            session_id = self.parents.get(session_id)
        return line


def broken(path: Path, promises: Iterable[Promise]) -> list[Promise]:
    """Those of them that are not kept."""
    with inspecting(path) as db:
        return [promise for promise in promises if not _is_kept(db, promise)]


def _is_kept(db: apsw.Connection, promise: Promise) -> bool:
    name: Any = bytes.fromhex(promise.id) if promise.kind == "event" else promise.id
    return db.execute(_KEPT[promise.kind], (name,)).fetchone() is not None


def look(path: Path, plan: Plan, before: Before = NOTHING) -> Stored:
    """Read everything. What an older test has said is taken as it is."""
    stored = Stored()
    with inspecting(path) as db:
        stored.violations = [str(violation) for violation in check_connection(db)]
        _look_at_sessions(db, stored)
        _look_at_turns(db, stored)
        _look_at_messages(db, plan, before, stored)
        _look_at_calls(db, stored)
        stored.before = digest_of(db, before.messages)
    return stored


def _rows(db: apsw.Connection, query: str) -> Iterable[Any]:
    return db.execute(query)


def _look_at_sessions(db: apsw.Connection, stored: Stored) -> None:
    stored.current = dict(_rows(db, "SELECT key, session_id FROM routes"))
    query = (
        "SELECT s.id, s.key, p.id, s.edge FROM sessions s LEFT JOIN sessions p ON p.n = s.parent"
    )
    for name, key, parent, edge in _rows(db, query):
        stored.keys[name] = key
        if edge == "rotation":
            stored.parents[name] = parent
    stored.effects = {row[0] for row in _rows(db, "SELECT lower(hex(effect_id)) FROM effects")}


def _look_at_turns(db: apsw.Connection, stored: Stored) -> None:
    for name, key, state, attempt, outcome in _rows(
        db, "SELECT id, key, state, attempt, outcome FROM turns"
    ):
        decoded = None if outcome is None else _decode_outcome(outcome)
        stored.turns[name] = TurnRow(key, state, attempt, decoded)
    query = (
        "SELECT i.inbound_id, i.n, i.key, t.id, u.id, i.body ->> '$.text' FROM inbox i "
        "JOIN turns t ON t.n = i.turn LEFT JOIN turns u ON u.n = i.into_turn"
    )
    for inbound_id, *rest in _rows(db, query):
        place = place_of(inbound_id)
        if place is not None:
            stored.inbox[place] = Entry(*rest)
    query = (
        "SELECT d.n, d.id, d.key, t.id, d.state, d.body ->> '$.text' FROM deliveries d "
        "LEFT JOIN turns t ON t.n = d.turn ORDER BY d.n"
    )
    stored.outbox = [Posted(*row) for row in _rows(db, query)]


def _look_at_messages(db: apsw.Connection, plan: Plan, before: Before, stored: Stored) -> None:
    """Messages count where they were said, and only if every character is as it was sent."""
    query = (
        "SELECT m.n, m.role, m.text, m.state, s.key, t.id, m.details ->> '$.finish_reason' "
        "FROM messages m "
        "JOIN sessions s ON s.n = m.session LEFT JOIN turns t ON t.n = m.turn "
        "WHERE m.carried = 0 AND m.kind = 0 AND m.role IN ('user', 'assistant') "
        "AND m.text IS NOT NULL ORDER BY m.n"
    )
    for n, role, text, state, key, turn_id, finish in _rows(db, query):
        place = place_of(text)
        ours = place is not None and key == key_of(place[0])
        if finish == "partial" and place is None:  # cut before it had said whose it is
            ours = f"re {key.removeprefix(f'{SOURCE}:')}/".startswith(text[:3])
        if role == "user" and place is not None and ours:
            ours = before.is_older(place) or text == text_of(plan, place)
            if ours:
                stored.said[place].append((n, turn_id))
                if state == 2:
                    stored.rewound.add(place)
        if role == "assistant" and turn_id is not None:
            stored.answers[turn_id].append(text)
        if not ours:
            stored.foreign_count += 1
            if len(stored.foreign) < _FOREIGN_SHOWN:
                stored.foreign.append(f"{key}, row {n}: {text[:60]!r}")


def _look_at_calls(db: apsw.Connection, stored: Stored) -> None:
    query = (
        "SELECT s.id, m.role, m.details -> '$.tool_calls', m.details ->> '$.tool_call_id' "
        "FROM messages m JOIN sessions s ON s.n = m.session WHERE m.state = 0 "
        "ORDER BY m.session, coalesce(m.covers_last, m.seq), m.seq"
    )
    transcripts: defaultdict[str, list[_Row]] = defaultdict(list)
    for session_id, role, calls, call_id in _rows(db, query):
        made: list[dict[str, str]] = msgspec.json.decode(calls) if calls else []
        transcripts[session_id].append(_Row(role, tuple(_Call(c["id"]) for c in made), call_id))
    stored.transcripts = len(transcripts)
    for session_id, transcript in transcripts.items():
        if count_open_calls(transcript):
            stored.calls_open.append(session_id)
