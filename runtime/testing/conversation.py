"""The units of one conversation, built in the order in which its actor would post them.

`Conversation` knows where its session stands, so that every guard carries the base seq and the
revision that are stored when its turn comes. Ids and times are fixed: the same calls give equal
units.

Must never read a clock or draw anything.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from ...storage import commands as c
from ...storage.identity import Incarnation, Seq, SessionId, SessionKey, TurnId, Uid
from ...storage.records import Draft, Role, ToolCall, TurnOutcome
from ...storage.units import Guard, Unit

START_MS = 1_700_000_000_000
"""When every workload takes place."""


def uid_of(name: str) -> Uid:
    """A fixed id for a readable name."""
    return Uid(blake2b(name.encode(), digest_size=16).hexdigest())


class Conversation:
    """The units of one key, in order, with the guards of its actor; it knows where its session
    stands.
    """

    def __init__(self, name: str, *, source: str = "chat") -> None:
        self.name = name
        self.key = SessionKey(f"{source}:{name}")
        self.source = source
        self.session_id = SessionId(f"{name}-1")
        self.incarnation = Incarnation(1)
        self.next_seq = 0
        self.revision = 0
        self.route_version = 0
        self.now_ms = START_MS
        self.drafts = 0

    def at(self) -> int:
        """A time, one second after the last one."""
        self.now_ms += 1_000
        return self.now_ms

    def draft(self, role: Role, text: str | None, **fields: Any) -> Draft:
        """The next message of this conversation."""
        self.drafts += 1
        uid = uid_of(f"{self.name}/message/{self.drafts}")
        return Draft(uid=uid, role=role, text=text, created_ms=self.at(), **fields)

    def guard(self) -> Guard:
        return Guard(
            key=self.key,
            incarnation=self.incarnation,
            session_id=self.session_id,
            base_seq=Seq(self.next_seq),
            revision=self.revision,
        )

    def unit(self, *commands: c.AnyCommand) -> Unit:
        """Commands that leave the transcript alone."""
        return Unit(commands, (Guard(key=self.key, incarnation=self.incarnation),))

    def opening(self) -> tuple[Unit, ...]:
        """The actor takes its key, then makes its first session."""
        taken = Unit((c.OpenIncarnation(key=self.key, incarnation=self.incarnation),))
        route = c.SetRoute(
            key=self.key, session_id=self.session_id, replaces=self.route_version, at_ms=self.at()
        )
        self.route_version += 1
        created = c.CreateSession(
            session_id=self.session_id,
            key=self.key,
            at_ms=self.at(),
            source=self.source,
            user="ann",
            model="model-1",
            meta={"theme": "dark", "n": [1, 2.5, None]},
        )
        return taken, Unit((route, created), (self.guard(),))

    def append(self, *drafts: Draft, turn_id: TurnId | None = None) -> c.AppendMessages:
        command = c.AppendMessages(
            session_id=self.session_id,
            base_seq=Seq(self.next_seq),
            messages=drafts,
            turn_id=turn_id,
        )
        self.next_seq += len(drafts)
        self.revision += 1
        return command

    def guarded(self, guard: Guard, *commands: c.AnyCommand) -> Unit:
        """Commands under a guard that was taken before they were made."""
        return Unit(commands, (guard,))

    def exchange(self, turn: str) -> tuple[Unit, ...]:
        """A whole turn with a tool call, in three units."""
        turn_id = TurnId(uid_of(f"{self.name}/{turn}"))
        guard = self.guard()
        question = self.append(self.draft("user", f"{turn}? " + "why " * 40), turn_id=turn_id)
        begun = self.guarded(
            guard,
            c.OpenTurn(turn_id=turn_id, key=self.key, at_ms=self.at()),
            c.StartTurn(turn_id=turn_id, session_id=self.session_id, attempt=1, at_ms=self.at()),
            question,
        )
        guard = self.guard()
        call = ToolCall(id=f"{turn}-call", name="search", arguments='{"q": "\\u00e9"}')
        worked = self.guarded(
            guard,
            self.append(
                self.draft("assistant", None, tool_calls=(call,), reasoning="look it up"),
                self.draft("tool", "found: naïve 日本 \0 " + "x" * 200, tool_call_id=call.id),
                turn_id=turn_id,
            ),
        )
        guard = self.guard()
        answered = self.guarded(
            guard,
            self.append(self.draft("assistant", "because " * 40), turn_id=turn_id),
            self.end_turn(turn_id),
        )
        return begun, worked, answered

    def end_turn(self, turn_id: TurnId, attempt: int = 1) -> c.EndTurn:
        outcome = TurnOutcome(kind="answered", text="because")
        return c.EndTurn(turn_id=turn_id, attempt=attempt, outcome=outcome, at_ms=self.at())

    def title(self, text: str, replaces: int = 0) -> c.SetTitle:
        return c.SetTitle(
            session_id=self.session_id,
            title=text,
            origin="person",
            replaces=replaces,
            at_ms=self.at(),
        )

    def end(self, replaces: int = 0) -> c.EndSession:
        return c.EndSession(
            session_id=self.session_id,
            reason="user_exit",
            kind="boundary",
            replaces=replaces,
            at_ms=self.at(),
        )

    def route_to(self, session_id: SessionId, *, take_over: bool = False) -> c.SetRoute:
        command = c.SetRoute(
            key=self.key,
            session_id=session_id,
            replaces=self.route_version,
            at_ms=self.at(),
            take_over=take_over,
        )
        self.route_version += 1
        self.session_id, self.next_seq, self.revision = session_id, 0, 0
        return command

    def rotate(self, *carried: int, turn_id: TurnId | None = None) -> c.Rotate:
        """The session is compressed into its child, which this conversation goes on with."""
        command = c.Rotate(
            key=self.key,
            parent_id=self.session_id,
            parent_base_seq=Seq(self.next_seq),
            child_id=SessionId(f"{self.session_id}-next"),
            summary=(self.draft("user", "so far: hello"),),
            carried=tuple(Seq(seq) for seq in carried),
            replaces=self.route_version,
            at_ms=self.at(),
            turn_id=turn_id,
        )
        self.route_version += 1
        self.session_id = command.child_id
        self.next_seq, self.revision = 1 + len(carried), 1
        return command
