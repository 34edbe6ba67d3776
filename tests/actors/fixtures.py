"""Small, deterministic parts for tests of the Writer: a clock, and a session's units."""

from __future__ import annotations

from onepen.storage.commands import AppendMessages, CreateSession, OpenIncarnation, SetRoute
from onepen.storage.identity import Incarnation, Seq, SessionId, SessionKey, Uid
from onepen.storage.records import Draft
from onepen.storage.units import Guard, Unit


class StillClock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000
        self.monotonic_s = 0.0

    def now(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return self.monotonic_s


class Talk:
    """One key and one session, whose units are made in order, each following the last."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.key = SessionKey(f"test:{number}")
        self.session_id = SessionId(f"session-{number}")
        self.next_seq = 0
        self.guard = Guard(key=self.key, incarnation=Incarnation(1), session_id=self.session_id)

    def opening(self) -> Unit:
        """Key, route and session in one unit."""
        return Unit(
            (
                OpenIncarnation(key=self.key, incarnation=Incarnation(1)),
                SetRoute(key=self.key, session_id=self.session_id, replaces=0, at_ms=1),
                CreateSession(session_id=self.session_id, key=self.key, at_ms=1),
            )
        )

    def message(self, text: str = "hello") -> Unit:
        """The next message."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        return self.message_at(seq, text)

    def message_at(self, seq: int, text: str = "hello") -> Unit:
        uid = Uid(f"{self.number:016x}{seq:016x}")
        draft = Draft(uid=uid, role="user", text=text, created_ms=1)
        append = AppendMessages(session_id=self.session_id, base_seq=Seq(seq), messages=(draft,))
        return Unit((append,), (self.guard,))
