"""Who does what: every draw of a stress test, as a function of the plan.

Keeps: the same plan gives the same steps of each conversation, the same texts and the same agent,
in both processes and in every run. Which message a kill, a cancel or an interrupt hits is up to the
machine.
"""

from __future__ import annotations

import math
import random
import re
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from .plan import busy_mix

if TYPE_CHECKING:
    from .plan import Plan

SOURCE = "stress"
Place: TypeAlias = tuple[int, int]
"""A message: the number of its conversation, and its own number there."""

Move: TypeAlias = Literal["rotate", "compact", "switch", "reset", "rewind"]
_MOVES: tuple[tuple[Move, str], ...] = (
    ("rotate", "rotations"),
    ("compact", "compactions"),
    ("switch", "switches"),
    ("reset", "resets"),
    ("rewind", "rewinds"),
)
_PLACE = re.compile(r"(?:re )?(\d+)/(\d+)(?: |$)")
# What people write, and what breaks programs: other scripts, marks that turn text around, markup,
# quotes, a zero byte, half of a path.
_PHRASES = (
    "the pelican sleeps at noon ",
    "我在北京市工作 ",
    "ﷺ العربية ",
    "👩‍👩‍👧‍👦🏳️‍🌈 ",
    "'; DROP TABLE messages; -- ",
    "<script>alert(1)</script> ",
    "\u202e\u0000\u0007 ../../etc ",
    "e\u0301\u200b naïve ",
    '{"role": "system"} ',
)


class Message(NamedTuple):
    """How one message is sent."""

    number: int
    busy: str
    again_s: tuple[float, ...]
    """When it is sent again, seconds behind its acknowledgement."""
    interrupt_s: float | None
    cancel_s: float | None
    follow: bool
    """Whether its end is asked for again after a crash, and not left to the outbox."""


class Step(NamedTuple):
    """What a person does next."""

    pause_s: float
    messages: tuple[Message, ...] = ()
    """Two of them are sent at once, the later one first."""
    move: Move | None = None
    name: str = ""


class Part(NamedTuple):
    """What the agent does about a message."""

    latency_s: float
    fails: bool
    hangs: bool
    streams: int
    """In so many pieces; 0 for an answer as a whole."""
    says: bool
    tool: bool
    asks: bool
    compacts: bool
    """And does not rotate, when the history is long."""
    length: int


def chance(plan: Plan, *what: object) -> random.Random:
    """Draws that nobody else's draws can move."""
    return random.Random(f"{plan.seed} {what}")


def key_of(conversation: int) -> str:
    return f"{SOURCE}:{conversation}"


def inbound_id_of(place: Place) -> str:
    return f"{place[0]}/{place[1]}"


def place_of(text: str) -> Place | None:
    """The message that a text, or an answer, is about; none if nobody here wrote it."""
    found = _PLACE.match(text)
    return None if found is None else (int(found[1]), int(found[2]))


def word_of(place: Place) -> str:
    """A word that stands in this message and in no other."""
    return f"c{place[0]}m{place[1]}x"


def text_of(plan: Plan, place: Place) -> str:
    draw = chance(plan, "text", place)
    size = int(_log_uniform(draw, plan.size_min, plan.size_max))
    text = f"{inbound_id_of(place)} {word_of(place)} "
    if len(text) < size:
        phrase = draw.choice(_PHRASES)
        text += (phrase * (size // len(phrase) + 1))[: size - len(text)]
    return text


def part_of(plan: Plan, place: Place) -> Part:
    draw = chance(plan, "agent", place)
    return Part(
        latency_s=_log_uniform(draw, plan.latency_min_s, plan.latency_max_s),
        fails=draw.random() < plan.failing,
        hangs=draw.random() < plan.hanging,
        streams=draw.randint(2, 20) if draw.random() < plan.streaming else 0,
        says=draw.random() < plan.saying,
        tool=draw.random() < plan.tools,
        asks=draw.random() < plan.questions,
        compacts=draw.random() < 0.5,
        length=int(_log_uniform(draw, plan.size_min, min(plan.size_max, 20_000))),
    )


def answer_of(place: Place, length: int) -> str:
    text = f"re {inbound_id_of(place)} "
    return text + "and so on " * max(0, (length - len(text)) // 10)


def step_of(plan: Plan, conversation: int, number: int, first: int) -> Step:
    """The step with this number; its messages are numbered from `first` on."""
    draw = chance(plan, "step", conversation, number)
    mean_s = plan.sessions / plan.rate if plan.rate else 0.0
    pause_s = draw.uniform(0.3, 1.7) * mean_s
    kind = draw.random()
    for move, share in _MOVES:
        kind -= getattr(plan, share)
        if kind < 0:
            return Step(pause_s, move=move, name=draw.choice("ab"))
    count = 2 if kind < plan.reordered else 1
    return Step(pause_s, tuple(_message(plan, draw, first + n) for n in range(count)))


def _message(plan: Plan, draw: random.Random, number: int) -> Message:
    mix = busy_mix(plan.busy)
    again = draw.random() < plan.duplicates
    return Message(
        number=number,
        busy=draw.choices(list(mix), list(mix.values()))[0],
        again_s=tuple(draw.choice((0.0, 0.05, 1.0)) for _ in range(draw.randint(1, 2) * again)),
        interrupt_s=draw.uniform(0.0, 0.1) if draw.random() < plan.interrupts else None,
        cancel_s=draw.uniform(0.0, 0.02) if draw.random() < plan.cancels else None,
        follow=draw.random() < 0.7,
    )


class End(NamedTuple):
    """How a life of the process ends."""

    after_s: float
    """Seconds from when it serves; or from its start, if it is to be killed before that."""
    early: bool
    signal: Literal["SIGKILL", "SIGTERM", "SIGINT"]
    intruder: bool
    """Whether somebody else tries to open the file before that."""


def end_of(plan: Plan, number: int) -> End:
    """The end of the life with this number."""
    draw = chance(plan, "end", number)
    orderly = draw.random() < plan.orderly
    asked: Literal["SIGTERM", "SIGINT"] = draw.choice(("SIGTERM", "SIGINT"))
    early = number > 0 and not orderly and draw.random() < plan.early
    return End(
        after_s=draw.uniform(0.0, 0.7) if early else draw.uniform(0.5, 1.5) * plan.kill_every_s,
        early=early,
        signal=asked if orderly else "SIGKILL",
        intruder=draw.random() < plan.intruders,
    )


def _log_uniform(draw: random.Random, low: float, high: float) -> float:
    if high <= low or low <= 0:
        return low + draw.random() * (high - low)
    return math.exp(draw.uniform(math.log(low), math.log(high)))
