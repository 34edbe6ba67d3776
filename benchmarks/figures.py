"""From samples to figures: medians over rounds, ratios inside each round, goals met or missed."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from msgspec import Struct

from .cells import TEXT_BYTES, Condition, Contender, Outcome
from .growth import HISTORIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .runner import Results

RATIO_MIN = 0.90
SYNCS_MAX = {1: 4, 16: 9, 256: 20}
GROWTH_MAX = 1.1
BYTES_MAX = 1.4


class Figure(Struct, frozen=True):
    """Medians over the rounds of one cell."""

    rate: float
    p50_ms: float | None
    p99_ms: float | None
    cpu_us: float
    bytes_per_message: float | None
    note: str


class Goal(Struct, frozen=True):
    """What was aimed at and what was found."""

    aim: str
    limit: str
    found: str
    met: bool


class Spread(Struct, frozen=True):
    """The median of the rounds, and the lowest and the highest of them."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        found = sorted(values)
        return cls(median(found), found[0], found[-1]) if found else None

    def text(self, digits: int) -> str:
        """The median, and behind it the range if there is one."""
        middle, low, high = (f"{value:,.{digits}f}" for value in (self.middle, self.low, self.high))
        return middle if low == high else f"{middle} ({low} to {high})"


def _median(values: Iterable[float | None]) -> float | None:
    given = [value for value in values if value is not None]
    return median(given) if given else None


def _outcomes(results: Results, contender: Contender, condition: Condition) -> dict[int, Outcome]:
    return {
        sample.round: sample.outcome
        for sample in results.samples
        if (sample.contender, sample.condition) == (contender, condition)
    }


def figure(results: Results, contender: Contender, condition: Condition) -> Figure | None:
    found = list(_outcomes(results, contender, condition).values())
    if not found:
        return None
    return Figure(
        rate=median(outcome.rate for outcome in found),
        p50_ms=_median(outcome.p50_ms for outcome in found),
        p99_ms=_median(outcome.p99_ms for outcome in found),
        cpu_us=median(outcome.cpu_us for outcome in found),
        bytes_per_message=_median(outcome.bytes_per_message for outcome in found),
        note=found[-1].note,
    )


def ratio(
    results: Results, other: Contender, condition: Condition, own: Contender = "writer"
) -> Spread | None:
    """How many times the other's messages a second our own contender writes, inside each round."""
    ours = _outcomes(results, own, condition)
    theirs = _outcomes(results, other, condition)
    return Spread.of(
        ours[turn].rate / theirs[turn].rate for turn in ours if turn in theirs and theirs[turn].rate
    )


def growth_ratio(
    results: Results, history: str, cost: Callable[[Outcome], float]
) -> tuple[float, float] | None:
    """The cost of an append, and its ratio to the smallest history: medians of the rounds."""
    found = {(s.history, s.round): cost(s.outcome) for s in results.growth}
    turns = [turn for name, turn in found if name == history and (HISTORIES[0].name, turn) in found]
    if not turns:
        return None
    ratios = [found[history, turn] / found[HISTORIES[0].name, turn] for turn in turns]
    return median(found[history, turn] for turn in turns), median(ratios)


def cpu_us(outcome: Outcome) -> float:
    return outcome.cpu_us


def wall_us(outcome: Outcome) -> float:
    return 1e6 / outcome.rate


def goals(results: Results) -> list[Goal]:
    """All goals that this run can judge."""
    return [
        *_throughput_goals(results),
        *_latency_goals(results),
        *_growth_goals(results),
        *_size_goals(results),
    ]


def _throughput_goals(results: Results) -> Iterable[Goal]:
    for disk in results.sync_us:
        for producers in (16, 256):
            found = ratio(results, "reference", Condition(producers, "FULL", disk))
            if found is not None:
                yield Goal(
                    f"Writer ÷ reference, producers: {producers}, {disk} disk",
                    f"≥ {RATIO_MIN:.2f}",
                    found.text(2),
                    met=found.middle >= RATIO_MIN,
                )


def _latency_goals(results: Results) -> Iterable[Goal]:
    sync_us = results.sync_us.get("1 ms")
    if sync_us is None:
        return
    for producers, limit in SYNCS_MAX.items():
        found = figure(results, "writer", Condition(producers, "FULL", "1 ms"))
        if found is not None and found.p99_ms is not None:
            syncs = found.p99_ms * 1000 / sync_us
            yield Goal(
                f"p99 of a durable append, producers: {producers}, 1 ms disk",
                f"≤ {limit} syncs",
                f"{syncs:.1f} syncs ({found.p99_ms:.1f} ms)",
                met=syncs <= limit,
            )


def _growth_goals(results: Results) -> Iterable[Goal]:
    for history in HISTORIES[1:]:
        for name, cost in (("CPU", cpu_us), ("wall", wall_us)):
            found = growth_ratio(results, history.name, cost)
            if found is not None:
                yield Goal(
                    f"append with {history.name}, {name} time ÷ at 10",
                    f"≤ {GROWTH_MAX:.2f}",
                    f"{found[1]:.2f}",
                    met=found[1] <= GROWTH_MAX,
                )


def _size_goals(results: Results) -> Iterable[Goal]:
    found = figure(results, "writer", Condition(256, "FULL", "native"))
    if found is not None and found.bytes_per_message is not None:
        share = found.bytes_per_message / TEXT_BYTES
        yield Goal(
            f"messages table and indices ÷ content, {TEXT_BYTES}-byte messages",
            f"≤ {BYTES_MAX:.2f}",
            f"{share:.2f}",
            met=share <= BYTES_MAX,
        )
