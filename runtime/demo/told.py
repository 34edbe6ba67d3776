"""What the world outside is told, as lines through a pipe; and the world's memory of it.

Must never judge: `account` holds what was told against what is stored.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

import msgspec
from msgspec import Struct

from ..pipe import Lines

Place: TypeAlias = tuple[int, int]
"""A message: the number of its conversation, and its own number there."""


class Accepted(Struct, frozen=True, tag="accepted", array_like=True):
    """A message was acknowledged; `again` if it was found stored, from before the kill."""

    conversation: int
    number: int
    again: bool


class Replied(Struct, frozen=True, tag="replied", array_like=True):
    """A turn's end was told; `text` is what the user was shown."""

    conversation: int
    number: int
    outcome: str
    text: str
    seconds: float


class Rotated(Struct, frozen=True, tag="rotated", array_like=True):
    """A conversation moved to a child session."""

    conversation: int
    parent: str
    child: str


class Switched(Struct, frozen=True, tag="switched", array_like=True):
    """A conversation was given another session."""

    conversation: int
    session: str


class Shown(Struct, frozen=True, tag="shown", array_like=True):
    """A person was shown a message; the world outside has it before the gateway hears so."""

    conversation: int
    delivery: str
    text: str


Line: TypeAlias = Accepted | Replied | Rotated | Switched | Shown

_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class Told:
    """Everything that the world outside knows."""

    def __init__(self, conversations: int) -> None:
        self.acknowledged = [0] * conversations
        self.recognised = 0
        self.replies: dict[Place, Replied] = {}
        self.outcomes: Counter[str] = Counter()
        self.rotations: list[Rotated] = []
        self.switches = 0
        self.last_switch: dict[int, str] = {}
        self.shown: dict[str, Shown] = {}
        """What people read, in its order: a delivery that comes again is recognised by its id."""
        self.shown_again = 0
        self.seconds = 0.0
        self._lines = Lines()

    @property
    def total(self) -> int:
        """Messages that were acknowledged."""
        return sum(self.acknowledged)

    def messages(self) -> set[Place]:
        """Acknowledgements come in order, so that a number stands for all below it."""
        return {(c, n) for c, count in enumerate(self.acknowledged) for n in range(count)}

    def take(self, data: bytes) -> None:
        """What came through the pipe."""
        for line in self._lines.take(data):
            self.note(_decoder.decode(line))

    def hang_up(self) -> None:
        """The pipe has ended."""
        self._lines.hang_up()

    def note(self, line: Line) -> None:
        match line:
            case Accepted(conversation, number, again):
                assert number == self.acknowledged[conversation], line
                self.acknowledged[conversation] += 1
                self.recognised += again
            case Replied(conversation, number):
                self.replies[conversation, number] = line
                self.outcomes[line.outcome] += 1
            case Rotated():
                self.rotations.append(line)
            case Shown(_, delivery):
                self.shown_again += delivery in self.shown
                self.shown.setdefault(delivery, line)
            case Switched(conversation, session):
                self.switches += 1
                self.last_switch[conversation] = session
