"""What the world was promised, and what it has seen: the memory that outlives every kill.

Keeps: a promise is noted when its line is read, and never taken back. What contradicts itself is
noted as wrong at once; what can only be seen in the file is for the verdict.

Must never look at the file, and must never forget a message because the process did.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple, final

from .script import Place, inbound_id_of

if TYPE_CHECKING:
    from .wire import Accepted, Did, Heard, Replied, Rotated, Shown

_WORDS_KEPT_MAX = 20  # of each rule; the count goes on


class Promise(NamedTuple):
    """Something that must be in the file from now on."""

    kind: str
    """message · turn · delivery · session · event"""
    id: str
    who: str


@final
class Said:
    """One message, from its first sending on."""

    __slots__ = ("accepted", "busy", "replies", "sent", "told", "turns")

    def __init__(self, sent: int, busy: str) -> None:
        self.busy = busy
        self.sent = sent
        """When it was sent first, and acknowledged first, in the world's own order."""
        self.accepted: int | None = None
        self.turns: set[str] = set()
        """The turns that were said to answer it: its own, or the one that it was steered into."""
        self.replies: list[tuple[str, str, str | None, str]] = []
        """Ends that were told: turn, kind, cause and text."""
        self.told = False


@final
class Ledger:
    """Everything that was heard."""

    def __init__(self) -> None:
        self.messages: dict[Place, Said] = {}
        self.promises: list[Promise] = []
        """Since somebody looked whether they are kept."""
        self.promised: Counter[str] = Counter()
        self.shown: dict[str, Shown] = {}
        """What people saw, in its order; a repeat is recognised by its id."""
        self.shown_again = 0
        self.rotations: list[Rotated] = []
        self.effects: Counter[str] = Counter()
        self.placed: dict[int, str] = {}
        """The session that a conversation was told to have, where nothing uncertain came after."""
        self.outcomes: Counter[str] = Counter()
        self.dispositions: Counter[str] = Counter()
        self.repeats = 0
        self.actions: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.words: defaultdict[str, list[str]] = defaultdict(list)
        self.looked: Counter[str] = Counter()
        """How often something was looked at that could have been wrong, by rule."""
        self._order = 0

    def note(self, rule: str, words: str) -> None:
        """Something must not be as it is."""
        self.wrong[rule] += 1
        if len(self.words[rule]) < _WORDS_KEPT_MAX:
            self.words[rule].append(words)

    def promise(self, kind: str, id: str, who: str) -> None:
        self.promises.append(Promise(kind, id, who))
        self.promised[kind] += 1

    def take_promises(self) -> list[Promise]:
        promises, self.promises = self.promises, []
        return promises

    # Messages ------------------------------------------------------------------------------------

    def sent(self, place: Place, busy: str) -> Said:
        """It leaves for the first time."""
        self._order += 1
        said = self.messages[place] = Said(self._order, busy)
        return said

    @property
    def now(self) -> int:
        """The world's own order."""
        return self._order

    def accepted(self, place: Place, line: Accepted, asked: int) -> None:
        """An acknowledgement; `asked` is when it was asked for."""
        said, who = self.messages[place], inbound_id_of(place)
        self.dispositions[line.disposition] += 1
        if line.disposition == "rejected":
            return
        self.repeats += line.repeated
        self._order += 1
        said.turns.add(line.turn_id)
        if said.accepted is not None:
            self.looked["recognised"] += 1
            if not line.repeated and asked > said.accepted:
                self.note("recognised", f"{who} was acknowledged before, and taken as new")
            return
        said.accepted = self._order
        self.promise("message", who, who)

    def replied(self, place: Place, line: Replied) -> None:
        said = self.messages[place]
        said.replies.append((line.turn_id, line.kind, line.cause, line.text))
        if not said.told:
            self.outcomes[line.kind] += 1
        said.told = True
        self.promise("turn", line.turn_id, inbound_id_of(place))

    @property
    def acknowledged(self) -> int:
        return self.promised["message"]

    # Everything else -----------------------------------------------------------------------------

    def shows(self, line: Shown) -> bool:
        """A person sees a message; whether it is the first time."""
        if line.delivery in self.shown:
            self.shown_again += 1
            first = self.shown[line.delivery]
            if (first.text, first.conversation) != (line.text, line.conversation):
                self.note("deliveries", f"{line.delivery} says something else when sent again")
            return False
        self.shown[line.delivery] = line
        self.promise("delivery", line.delivery, f"conversation {line.conversation}")
        return True

    def did(self, line: Did) -> None:
        self.effects[line.effect_id] += 1

    def heard(self, line: Heard) -> None:
        self.promise("event", line.uid, f"{line.session} {line.seq}")

    def rotated(self, line: Rotated) -> None:
        self.rotations.append(line)
        self.actions["rotate in a turn"] += 1
        self.promise("session", line.child, f"conversation {line.conversation}")
