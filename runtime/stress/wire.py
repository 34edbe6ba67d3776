"""What goes through the pipes: orders in, lines out, one JSON value on each.

Keeps: whatever a line says had been promised when it was written. A number `n` names a request of
one life of the process; nothing of it outlives that life.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec import Struct

from .plan import Plan

# Orders ------------------------------------------------------------------------------------------


class Begin(Struct, frozen=True, tag="begin", array_like=True):
    """The first line: what to open, and how."""

    plan: Plan
    path: str


class Send(Struct, frozen=True, tag="send", array_like=True):
    """An inbound message, under its id."""

    n: int
    conversation: int
    number: int
    busy: str
    text: str


class Cancel(Struct, frozen=True, tag="cancel", array_like=True):
    """Whoever made this request goes away."""

    n: int


class Interrupt(Struct, frozen=True, tag="interrupt", array_like=True):
    """Stop what the conversation does."""

    conversation: int


class Do(Struct, frozen=True, tag="do", array_like=True):
    """Rotate, compact, switch, reset or rewind."""

    n: int
    conversation: int
    move: str
    name: str


class Answer(Struct, frozen=True, tag="answer", array_like=True):
    """A person's answer to a question."""

    n: int
    conversation: int
    question: str
    answer: str


class Finish(Struct, frozen=True, tag="finish", array_like=True):
    """Serve what is left, then end in order."""


Order: TypeAlias = Send | Cancel | Interrupt | Do | Answer | Finish


# Lines -------------------------------------------------------------------------------------------


class Ready(Struct, frozen=True, tag="ready", array_like=True):
    """It serves; what is configured comes along, as bounds for what is measured."""

    epoch: int
    opened_s: float
    units_max: int
    bytes_max: int
    live_max: int
    running_max: int


class Accepted(Struct, frozen=True, tag="accepted", array_like=True):
    """A message is durable, or was turned away (`rejected`); how long that took, in the process."""

    n: int
    turn_id: str
    disposition: str
    repeated: bool
    seconds: float


class Replied(Struct, frozen=True, tag="replied", array_like=True):
    """A turn's end is durable; `text` is what the user is shown."""

    n: int
    turn_id: str
    kind: str
    cause: str | None
    text: str
    session_id: str
    seconds: float


class Done(Struct, frozen=True, tag="done", array_like=True):
    """An operation is durable; `session` is where the conversation is now, if it says."""

    n: int
    session: str


class Refused(Struct, frozen=True, tag="refused", array_like=True):
    """A request came to an error; `typed` if it is one that callers are told of."""

    n: int
    error: str
    words: str
    retry_s: float
    typed: bool


class Cancelled(Struct, frozen=True, tag="cancelled", array_like=True):
    """The caller is gone; what became of the request nobody has heard."""

    n: int


class Rotated(Struct, frozen=True, tag="rotated", array_like=True):
    """Inside a turn, a conversation moved to a child session."""

    conversation: int
    parent: str
    child: str


class Shown(Struct, frozen=True, tag="shown", array_like=True):
    """A person sees a message; the world has it before the process hears so."""

    conversation: int
    delivery: str
    kind: str
    text: str
    turn_id: str
    question: str


class Did(Struct, frozen=True, tag="did", array_like=True):
    """A tool has done something to the world."""

    effect_id: str
    conversation: int
    number: int


class Heard(Struct, frozen=True, tag="heard", array_like=True):
    """An event told of a message that is durable."""

    conversation: int
    session: str
    seq: int
    uid: str


class Wrong(Struct, frozen=True, tag="wrong", array_like=True):
    """The process itself has seen something that must not be."""

    rule: str
    words: str


class Pulse(Struct, frozen=True, tag="pulse", array_like=True):
    """How it is, since the last one."""

    gaps_ms: tuple[float, ...]
    units: int
    bytes: int
    oldest_s: float
    live: int
    running: int
    waiting: int
    sending: int
    search_tail: int
    wal_pages: int
    tasks: int
    commit_p99_s: float
    batch_units_mean: float
    counters: dict[str, int]


class Ended(Struct, frozen=True, tag="ended", array_like=True):
    """What is left when the runtime is closed, beside what was there before it was opened."""

    tasks: int
    threads: tuple[str, ...]
    descriptors: tuple[str, ...]
    agents: int
    warnings: tuple[str, ...]
    in_time: bool


Line: TypeAlias = (
    Ready
    | Accepted
    | Replied
    | Done
    | Refused
    | Cancelled
    | Rotated
    | Shown
    | Did
    | Heard
    | Wrong
    | Pulse
    | Ended
)

decode_line = msgspec.json.Decoder(Line).decode
decode_order = msgspec.json.Decoder(Order).decode
decode_begin = msgspec.json.Decoder(Begin).decode
