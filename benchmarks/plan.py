"""Which cells a run has, and for how long each is measured."""

from __future__ import annotations

from msgspec import Struct

from .cells import ALTERNATIVES, OURS, PRODUCERS, Condition, Contender, Disk, Synchronous

PARTS = ("limits", "alternatives", "normal", "slow", "growth")


class Pace(Struct, frozen=True):
    """How long everything takes."""

    rounds: int
    growth_rounds: int
    warm_up_s: float
    window_s: float
    producers: tuple[int, ...] = PRODUCERS
    every_level_on_every_disk: bool = True


FULL_PACE = Pace(rounds=3, growth_rounds=7, warm_up_s=0.4, window_s=1.2)
QUICK_PACE = Pace(
    rounds=1,
    growth_rounds=1,
    warm_up_s=0.1,
    window_s=0.3,
    producers=(1, 16, 256),
    every_level_on_every_disk=False,
)

# One connection for each session and worker thread: more sessions than this run out of descriptors.
OPENAI_PRODUCERS_MAX = 256


def conditions(pace: Pace, parts: frozenset[str]) -> list[Condition]:
    levels: tuple[Synchronous, ...] = ("FULL", "NORMAL") if "normal" in parts else ("FULL",)
    disks: tuple[Disk, ...] = ("native", "1 ms") if "slow" in parts else ("native",)
    return [
        Condition(producers, synchronous, disk)
        for disk in disks
        for synchronous in levels
        for producers in pace.producers
        if pace.every_level_on_every_disk or synchronous == "FULL" or disk == "native"
    ]


def contenders(condition: Condition, parts: frozenset[str]) -> list[Contender]:
    """Who runs under a condition: `raw` has no producers, the alternatives are compared at FULL."""
    chosen: list[Contender] = []
    if "limits" in parts:
        chosen.extend(name for name in OURS if name != "raw" or condition.producers == 256)
    if "alternatives" in parts and condition.synchronous == "FULL":
        chosen.extend(
            name
            for name in ALTERNATIVES
            if name != "openai-agents" or condition.producers <= OPENAI_PRODUCERS_MAX
        )
    return chosen
