"""The verdict: what was promised and seen, held against what is stored, rule by rule.

Keeps: each rule says which invariants it is about, how much it has looked at, how much of that is
wrong, and the first offenders. A rule that has looked at nothing has shown nothing, and says so.

Must never be kinder to the runtime than its contract: a message that is lost once in a million is a
violation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from msgspec import Struct

from ...actors.replies import reply_text
from .before import NOTHING
from .script import inbound_id_of, key_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...storage.records import TurnOutcome
    from .before import Before
    from .ledger import Ledger, Said
    from .plan import Plan
    from .script import Place
    from .stored import Stored

_EXAMPLES_MAX = 10
_ORDERED = ("queue", "collect")  # the others jump the line, on purpose


class Finding(Struct, frozen=True, kw_only=True):
    """One rule, and what came of it."""

    rule: str
    invariants: tuple[str, ...]
    looked: int
    wrong: int
    examples: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        if self.wrong:
            return "violated"
        return "holds" if self.looked else "not seen"


# What a note in the ledger is called in the verdict.
_NOTED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("kept messages", "acknowledged messages in the file behind each end", ("INV-1", "INV-2")),
    ("kept replies", "replies in the file behind each end", ("INV-2", "INV-3")),
    ("kept deliveries", "deliveries shown, in the file behind each end", ("INV-3",)),
    ("kept sessions", "rotations told, in the file behind each end", ("INV-6",)),
    ("kept events", "events told, in the file behind each end", ("INV-3", "INV-17")),
    ("recognised", "repeats recognised", ("INV-1", "INV-11")),
    ("file", "the file can be read", ("INV-2", "INV-12")),
    ("one writer", "a second writer is kept out", ("INV-12",)),
    ("events", "events numbered without gap or repeat", ("INV-4",)),
    ("requests end", "acknowledged, or refused, in time", ("INV-15",)),
    ("errors", "errors are of the kinds that callers are told", ("INV-13", "INV-15")),
    ("drain", "every message comes to an end", ("INV-15",)),
    ("process", "the process lives until it is asked to end", ("INV-13",)),
    ("orderly ends", "orderly ends are in time", ("INV-15",)),
)


@final
class Verdict:
    """Rules, one after the other, over one ledger and one look at the file."""

    def __init__(
        self, plan: Plan, ledger: Ledger, stored: Stored, before: Before = NOTHING
    ) -> None:
        self._before = before
        self._plan = plan
        self._ledger = ledger
        self._stored = stored
        self.findings: list[Finding] = []

    def add(
        self, rule: str, invariants: Sequence[str], looked: int, offenders: Iterable[str]
    ) -> None:
        wrong = list(offenders)
        self.findings.append(
            Finding(
                rule=rule,
                invariants=tuple(invariants),
                looked=looked,
                wrong=len(wrong),
                examples=tuple(wrong[:_EXAMPLES_MAX]),
            )
        )

    def judge(self) -> None:
        """Everything that the file and the ledger can tell."""
        self._messages()
        self._order()
        self._replies()
        self._turns()
        self._outbox()
        self._sessions()
        self._noted()

    def _acknowledged(self) -> Iterable[tuple[Place, Said]]:
        return ((p, said) for p, said in self._ledger.messages.items() if said.accepted is not None)

    # Messages ------------------------------------------------------------------------------------

    def _messages(self) -> None:
        stored = self._stored
        places = [place for place, _ in self._acknowledged()]
        lost = [f"{inbound_id_of(p)}: {why}" for p in places if (why := self._loss(p))]
        self.add("acknowledged messages are stored", ("INV-1", "INV-2"), len(places), lost)
        twice = [inbound_id_of(p) for p, rows in stored.said.items() if len(rows) > 1]
        self.add("no message is stored twice", ("INV-1",), len(stored.said), twice)
        unsaid = [p for p in stored.said if p not in stored.inbox]
        foreign = [*stored.foreign, *(f"{inbound_id_of(p)} was never accepted" for p in unsaid)]
        self.add(
            "rows are as they were said, and where", ("INV-16", "INV-20"), len(places), foreign
        )

        changed = ["it is not"] if stored.before != self._before.digest else []
        rule = "what an older test has said is as it was"
        self.add(rule, ("INV-1",), self._before.messages, changed)

    def _loss(self, place: Place) -> str | None:
        """Why a message counts as lost; one whose turn never began stays out of the transcript."""
        stored = self._stored
        entry = stored.inbox.get(place)
        if entry is None:
            return "it is not in the inbox"
        if entry.key != key_of(place[0]):
            return f"it is in the inbox of {entry.key}"
        if entry.body is not None:
            return None  # it waits
        turn = stored.turns[entry.into or entry.turn_id]
        rows = stored.said.get(place, [])
        if not rows and turn.attempt:
            return f"its turn began, and it is no row ({turn.state}, {turn.outcome})"
        if rows and rows[0][1] not in (entry.turn_id, entry.into):
            return f"it is a row of turn {rows[0][1]}"
        return None

    def _order(self) -> None:
        """What was sent behind an acknowledgement stands behind it."""
        stored, wrong, looked = self._stored, list[str](), 0
        conversations: dict[int, list[tuple[Place, Said]]] = {}
        for place, said in self._acknowledged():
            conversations.setdefault(place[0], []).append((place, said))
        for messages in conversations.values():
            for what, ranked in (
                ("accepted", [(s, e.n, p) for p, s in messages if (e := stored.inbox.get(p))]),
                (
                    "said",
                    [
                        (s, rows[0][0], p)
                        for p, s in messages
                        if s.busy in _ORDERED and (rows := stored.said.get(p))
                    ],
                ),
            ):
                looked += len(ranked)
                wrong += out_of_order(ranked, what)
        self.add("messages stand in the order of their sending", ("INV-4",), looked, wrong)

    # Replies and turns ---------------------------------------------------------------------------

    def _replies(self) -> None:
        stored, wrong, rowless, strange = self._stored, list[str](), list[str](), list[str]()
        looked = answered = 0
        for place, said in self._acknowledged():
            entry, who = stored.inbox.get(place), inbound_id_of(place)
            mine: set[str | None] = set() if entry is None else {entry.turn_id, entry.into}
            strange += [f"{who}: turn {name}" for name in sorted(said.turns) if name not in mine]
            for name, *told in said.replies:
                looked += 1
                turn = stored.turns.get(name)
                outcome = None if turn is None or name not in mine else turn.outcome
                if outcome is None or _told(outcome) != told:
                    # A turn that was cut may have been taken up again by a later repeat.
                    if turn is None or told[0] != "interrupted" or turn.attempt < 2:
                        wrong.append(f"{who}: told {told!r}, stored {outcome}")
                elif told[0] == "answered":
                    answered += 1
                    if told[2] not in stored.answers[name]:
                        rowless.append(f"{who}: {str(told[2])[:40]!r}")
        rule = "a message has one turn, whoever repeats it"
        self.add(rule, ("INV-1",), self._ledger.looked["recognised"], strange)
        self.add("replies are what is stored of their turns", ("INV-3",), looked, wrong)
        self.add("answers are rows of their turns", ("INV-3", "INV-5"), answered, rowless)

    def _turns(self) -> None:
        stored = self._stored
        left = [f"{name}: {t.state}" for name, t in stored.turns.items() if t.state != "ended"]
        self.add("no turn is left without an end", ("INV-9", "INV-15"), len(stored.turns), left)
        shown = {line.turn_id for line in self._ledger.shown.values()}
        untold = [
            inbound_id_of(place)
            for place, said in self._acknowledged()
            if not said.told and not said.turns & shown and self._has_words(place)
        ]
        count = len(self._ledger.messages)
        self.add("everybody is told of the end", ("INV-3", "INV-15"), count, untold)
        calls = stored.calls_open
        self.add("transcripts are valid for a model", ("INV-5",), stored.transcripts, calls)
        known = stored.effects
        effects = [e for e in self._ledger.effects if e not in known]
        count = len(self._ledger.effects)
        self.add("side effects were on record before", ("INV-3",), count, effects)

    def _has_words(self, place: Place) -> bool:
        entry = self._stored.inbox.get(place)
        turn = None if entry is None else self._stored.turns[entry.turn_id]
        return turn is not None and turn.outcome is not None and bool(reply_text(turn.outcome))

    # The outbox ----------------------------------------------------------------------------------

    def _outbox(self) -> None:
        stored, shown = self._stored, self._ledger.shown
        by_id = {row.id: row for row in stored.outbox}
        wrong = [f"{name} is not stored" for name in shown if name not in by_id]
        wrong += [
            f"{name} says something else"
            for name, line in shown.items()
            if name in by_id and by_id[name].text != line.text
        ]
        self.add("what was shown is stored", ("INV-3",), len(shown), wrong)
        mine = {key_of(conversation) for conversation in range(self._plan.sessions)}
        rows = [row for row in stored.outbox if row.key in mine and row.n > self._before.deliveries]
        unshown = [f"{row.id} is {row.state}" for row in rows if row.id not in shown]
        unsent = [f"{row.id} is {row.state}" for row in rows if row.state != "sent"]
        self.add("deliveries are shown", ("INV-15",), len(rows), unshown)
        self.add("deliveries shown are stored as sent", ("INV-15",), len(rows), unsent)
        said: dict[str, set[str]] = {}
        for row in stored.outbox:
            said.setdefault(row.turn_id or "", set()).add(row.text)
        unposted = [
            f"turn {name}: {text[:40]!r}"
            for name, turn in stored.turns.items()
            if turn.outcome is not None
            and (text := reply_text(turn.outcome))
            and text not in said.get(name, ())
        ]
        self.add("ends are in the outbox", ("INV-3", "INV-5"), len(stored.turns), unposted)
        last: dict[int, int] = {}
        jumped: list[str] = []
        for name, line in shown.items():
            n = by_id[name].n if name in by_id else 0
            if n < last.get(line.conversation, 0):
                jumped.append(f"{name} in conversation {line.conversation}")
            last[line.conversation] = n
        self.add("deliveries are shown in order", ("INV-4",), len(shown), jumped)

    # Sessions ------------------------------------------------------------------------------------

    def _sessions(self) -> None:
        stored, ledger = self._stored, self._ledger
        talked = {key_of(place[0]) for place, _ in self._acknowledged()}
        homeless = [key for key in sorted(talked) if stored.current.get(key) is None]
        homeless += [
            f"{key} has {name}"
            for key, name in stored.current.items()
            if name is not None and stored.keys.get(name, key) != key
        ]
        self.add("each key has one current session", ("INV-6",), len(talked), homeless)
        astray = [
            f"{key_of(conversation)} is not in {name}"
            for conversation, name in ledger.placed.items()
            if name not in stored.line_of(stored.current.get(key_of(conversation)))
        ]
        rule = "conversations are where they were told"
        self.add(rule, ("INV-7", "INV-8"), len(ledger.placed), astray)
        torn = [
            f"{line.parent} to {line.child}"
            for line in ledger.rotations
            if stored.parents.get(line.child) != line.parent
        ]
        self.add("rotations told are stored", ("INV-6",), len(ledger.rotations), torn)
        violations = stored.violations
        self.add("the file keeps every rule of its own", ("INV-4", "INV-5", "INV-6"), 1, violations)

    def _noted(self) -> None:
        for name, rule, invariants in _NOTED:
            wrong, words = self._ledger.wrong[name], self._ledger.words[name]
            self.findings.append(
                Finding(
                    rule=rule,
                    invariants=invariants,
                    looked=max(self._looked(name), wrong),
                    wrong=wrong,
                    examples=tuple(words[:_EXAMPLES_MAX]),
                )
            )

    def _looked(self, name: str) -> int:
        ledger = self._ledger
        if name in ("requests end", "errors", "drain"):
            return len(ledger.messages)
        if name == "file":
            return 1
        if name == "events":
            return ledger.promised["event"]
        return ledger.looked[name]


def _told(outcome: TurnOutcome) -> list[str | None]:
    """What whoever follows a turn is told of its end."""
    return [outcome.kind, outcome.cause, reply_text(outcome)]


def out_of_order(ranked: list[tuple[Said, int, Place]], what: str) -> list[str]:
    """Pairs of which the one was sent behind the other's acknowledgement, and stands before it."""
    wrong: list[str] = []
    ranked.sort(key=lambda one: one[1])
    # From the end: the earliest acknowledgement among those that stand behind.
    earliest: tuple[int, Place] | None = None
    for said, _, place in reversed(ranked):
        if earliest is not None and earliest[0] < said.sent:
            later, sooner = inbound_id_of(earliest[1]), inbound_id_of(place)
            wrong.append(f"{sooner} is {what} before {later}")
        accepted = said.accepted or 0
        if earliest is None or accepted < earliest[0]:
            earliest = (accepted, place)
    return wrong
