"""Which cells a run has, and for how long each is measured."""

from __future__ import annotations

from msgspec import Struct

from onepen.actors.limits import SessionSettings

from .cells import (
    ALTERNATIVES,
    OURS,
    PRODUCERS,
    RUNTIMES,
    Condition,
    Contender,
    Disk,
    Probe,
    Synchronous,
)

PARTS = (
    "limits",
    "alternatives",
    "normal",
    "slow",
    "growth",
    "turns",
    "idle",
    "ask",
    "startup",
)

STORED_GOAL = 1_000_000
"""How many stored sessions the goal of a start is about."""


class Pace(Struct, frozen=True):
    """How long everything takes."""

    rounds: int
    growth_rounds: int
    warm_up_s: float
    window_s: float
    least_each: int = 3
    """So many messages of each producer, in the mean, make a window; see `meter.py`."""
    producers: tuple[int, ...] = PRODUCERS
    every_level_on_every_disk: bool = True
    turn_sessions: tuple[int, ...] = PRODUCERS
    idle_sessions: tuple[int, ...] = (1_000, 10_000)
    ask_messages: int = 100_000
    stored_sessions: int = STORED_GOAL


FULL_PACE = Pace(rounds=3, growth_rounds=7, warm_up_s=0.4, window_s=1.2)
QUICK_PACE = Pace(
    rounds=1,
    growth_rounds=1,
    warm_up_s=0.1,
    window_s=0.3,
    least_each=1,
    producers=(1, 16, 256),
    every_level_on_every_disk=False,
    turn_sessions=(1, 256),
    idle_sessions=(1_000,),
    ask_messages=10_000,
    stored_sessions=20_000,
)

IDLE_CASES = ("runtime in memory", "actor alone")
STARTUP_CASES = ("cached", "not cached")

# One connection for each session and worker thread: more sessions than this run out of descriptors.
OPENAI_PRODUCERS_MAX = 256


# Turns that may run at once unless it is set otherwise; read from the library, never repeated.
TURNS_RUNNING_MAX = SessionSettings().turns_running_max

_LONG_WAITS = 1_000
"""From so many producers on, each waits longer for the others than a short window lasts."""


def stretch(condition: Condition) -> int:
    """How many times longer than usual a cell is measured."""
    if condition.producers < _LONG_WAITS:
        return 1
    return 2 if condition.work == "append" else 4


def least_messages(pace: Pace, condition: Condition) -> int:
    """How many messages a cell counts at least; where it takes long, one for each producer."""
    return condition.producers * (pace.least_each if condition.producers < _LONG_WAITS else 1)


def conditions(pace: Pace, parts: frozenset[str], *, slow: bool) -> list[Condition]:
    levels: tuple[Synchronous, ...] = ("FULL", "NORMAL") if "normal" in parts else ("FULL",)
    disks: tuple[Disk, ...] = ("native", "1 ms") if slow else ("native",)
    appends = [
        Condition(producers, synchronous, disk)
        for disk in (disks if "slow" in parts else disks[:1])
        for synchronous in levels
        for producers in pace.producers
        if pace.every_level_on_every_disk or synchronous == "FULL" or disk == "native"
    ]
    # A part of its own, always on both disks: what a turn costs is mostly its two syncs.
    turns = [
        Condition(sessions, "FULL", disk, "turn")
        for disk in disks
        for sessions in pace.turn_sessions
        if "turns" in parts
    ]
    return appends + turns


def contenders(
    condition: Condition, parts: frozenset[str], *, alternatives: bool
) -> list[Contender]:
    """Who runs under a condition: `raw` has no producers, the alternatives are compared at FULL."""
    chosen: list[Contender] = []
    if condition.work == "turn":
        limited = condition.producers > TURNS_RUNNING_MAX
        chosen.extend(RUNTIMES if limited else RUNTIMES[:1])
    elif "limits" in parts:
        chosen.extend(name for name in OURS if name != "raw" or condition.producers == 256)
    compared = condition.work == "turn" or "alternatives" in parts
    if alternatives and compared and condition.synchronous == "FULL":
        chosen.extend(
            name
            for name in ALTERNATIVES
            if name != "openai-agents" or condition.producers <= OPENAI_PRODUCERS_MAX
        )
    return chosen


def probes(pace: Pace, parts: frozenset[str], *, slow: bool) -> list[Probe]:
    """The measurements of one round that are no rate of messages."""
    chosen: list[Probe] = []
    if "idle" in parts:
        chosen.extend(
            Probe("idle", case, size) for size in pace.idle_sessions for case in IDLE_CASES
        )
    if "ask" in parts:
        chosen.append(Probe("ask", "", pace.ask_messages))
    if "startup" in parts:
        disks: tuple[Disk, ...] = ("native", "1 ms") if slow else ("native",)
        chosen.extend(
            Probe("startup", case, pace.stored_sessions, disk)
            for disk in disks
            for case in STARTUP_CASES
        )
        chosen.append(Probe("activation", "", pace.stored_sessions))
    return chosen
