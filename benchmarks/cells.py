"""The words of a run: a cell is one contender under one condition, an outcome is what one round of
it gave.

Both cross a process border as JSON. `alternatives.py` runs in an environment without this package,
so it speaks the same JSON by hand.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

Contender: TypeAlias = Literal[
    "raw", "reference", "writer", "onepen", "onepen, all at once", "openai-agents", "langgraph"
]
Disk: TypeAlias = Literal["native", "1 ms"]
Synchronous: TypeAlias = Literal["FULL", "NORMAL"]
Work: TypeAlias = Literal["append", "turn"]

OURS: tuple[Contender, ...] = ("raw", "reference", "writer")
RUNTIMES: tuple[Contender, ...] = ("onepen", "onepen, all at once")
"""The runtime with its default limit of running turns, and with a slot for every session."""
ALTERNATIVES: tuple[Contender, ...] = ("openai-agents", "langgraph")
PRODUCERS = (1, 16, 256, 4096)
TEXT_BYTES = 400


class Condition(Struct, frozen=True):
    """What is the same for all contenders that are compared."""

    producers: int
    synchronous: Synchronous
    disk: Disk
    work: Work = "append"
    """What is counted as one message: an append, or a whole turn of two durable messages."""


class Cell(Struct, frozen=True):
    """One contender under one condition, for so long."""

    contender: Contender
    condition: Condition
    folder: str
    warm_up_s: float
    window_s: float
    database: str | None = None
    """A prepared database to append to; `None` makes a new one."""
    least_messages: int = 0
    """The window stays open until so many are counted; see `meter.py`."""


class Outcome(Struct, frozen=True):
    """What one round gave. Rate and latencies are of the window, CPU time is of all messages."""

    messages: int
    rate: float
    p50_ms: float | None
    p99_ms: float | None
    cpu_us: float
    bytes_per_message: float | None
    sqlite: str
    note: str = ""


class Sample(Struct, frozen=True):
    """An outcome with where it comes from."""

    contender: Contender
    condition: Condition
    round: int
    outcome: Outcome


# Measurements that are not a rate of messages --------------------------------------------------

ProbeKind: TypeAlias = Literal["idle", "ask", "startup", "activation"]


class Probe(Struct, frozen=True):
    """One measurement in a process of its own that gives named figures."""

    kind: ProbeKind
    case: str
    size: int
    disk: Disk = "native"
    database: str | None = None


class ProbeSample(Struct, frozen=True):
    """What one round of a probe gave."""

    kind: ProbeKind
    case: str
    size: int
    disk: Disk
    round: int
    figures: dict[str, float]
