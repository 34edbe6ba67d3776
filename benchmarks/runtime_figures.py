"""The runtime's figures: turns, idle actors, asking, starting; and their goals, met or missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cells import Condition, Disk, ProbeKind
from .figures import Goal, Spread, ratio
from .plan import STORED_GOAL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .runner import Results

TURN_RATIO_MIN: dict[tuple[int, Disk], float] = {
    (1, "native"): 0.8,
    (1, "1 ms"): 1.0,
    (256, "native"): 5.0,
    (256, "1 ms"): 20.0,
}
IDLE_BYTES_MAX = 8 * 1024
IDLE_START_US_MAX = 100
EVICTED_BYTES_MAX = IDLE_BYTES_MAX // 20
"""What counts as nothing: a twentieth of what a live actor may take."""
ASK_RATIO_MAX = 2.0
STARTUP_S_MAX = 0.5


def _rounds(
    results: Results, kind: ProbeKind, case: str, size: int, disk: Disk
) -> dict[int, dict[str, float]]:
    return {
        sample.round: sample.figures
        for sample in results.probes
        if (sample.kind, sample.case, sample.size, sample.disk) == (kind, case, size, disk)
    }


def probe_figures(
    results: Results, kind: ProbeKind, case: str, size: int, disk: Disk = "native"
) -> dict[str, Spread]:
    """What the rounds of one probe gave; empty if it was not measured."""
    found = list(_rounds(results, kind, case, size, disk).values())
    spreads = {
        name: Spread.of(each[name] for each in found) for name in (found[0] if found else ())
    }
    return {name: spread for name, spread in spreads.items() if spread is not None}


def idle_growth(results: Results, case: str, size: int) -> Spread | None:
    """An actor's bytes beside so many others ÷ beside the fewest, inside each round."""
    few = _rounds(results, "idle", case, min(results.pace.idle_sessions), "native")
    many = _rounds(results, "idle", case, size, "native")
    return Spread.of(
        many[turn]["live_bytes"] / few[turn]["live_bytes"] for turn in many if turn in few
    )


def runtime_goals(results: Results) -> list[Goal]:
    """All goals of the runtime that this run can judge."""
    return [
        *_turn_goals(results),
        *_idle_goals(results),
        *_ask_goals(results),
        *_startup_goals(results),
    ]


def _turn_goals(results: Results) -> Iterable[Goal]:
    for (sessions, disk), least in TURN_RATIO_MIN.items():
        condition = Condition(sessions, "FULL", disk, "turn")
        found = ratio(results, "openai-agents", condition, "onepen")
        if found is not None:
            yield Goal(
                f"turns ÷ openai-agents, sessions: {sessions}, {disk} disk, default limits",
                f"≥ {least:.1f}",
                found.text(2),
                met=found.middle >= least,
            )


def _kib(size_bytes: float) -> str:
    return f"{size_bytes / 1024:.2f} KiB"


def _idle_goals(results: Results) -> Iterable[Goal]:
    for size in results.pace.idle_sessions:
        whole = probe_figures(results, "idle", "runtime in memory", size)
        alone = probe_figures(results, "idle", "actor alone", size)
        if whole:
            live, left = whole["live_bytes"].middle, whole["evicted_bytes"].middle
            yield Goal(
                f"memory of an idle actor, {size:,} of them, runtime in memory",
                f"≤ {_kib(IDLE_BYTES_MAX)}",
                _kib(live),
                met=live <= IDLE_BYTES_MAX,
            )
            yield Goal(
                f"memory left of an evicted actor, {size:,} of them, runtime in memory",
                f"≤ {_kib(EVICTED_BYTES_MAX)}",
                _kib(left),
                met=left <= EVICTED_BYTES_MAX,
            )
            # Some of that the allocator keeps and uses again; what is lost adds up with every key.
            more = whole["later_bytes"].middle
            yield Goal(
                f"memory that {size:,} further actors leave, each, runtime in memory",
                f"≤ {_kib(EVICTED_BYTES_MAX)}",
                _kib(more),
                met=more <= EVICTED_BYTES_MAX,
            )
        if alone:
            start = alone["start_us"].middle
            yield Goal(
                f"start of an actor, {size:,} of them, without its storage",
                f"≤ {IDLE_START_US_MAX} µs",
                f"{start:.0f} µs",
                met=start <= IDLE_START_US_MAX,
            )


def _ask_goals(results: Results) -> Iterable[Goal]:
    found = probe_figures(results, "ask", "", results.pace.ask_messages)
    if found:
        times = found["ask_per_hop"]
        yield Goal(
            "asking an actor ÷ a hop through a channel",
            f"≤ {ASK_RATIO_MAX:.1f}",
            times.text(2),
            met=times.middle <= ASK_RATIO_MAX,
        )


def _startup_goals(results: Results) -> Iterable[Goal]:
    size = results.pace.stored_sessions
    if size < STORED_GOAL:
        return  # a smaller file says nothing about the goal
    for disk in results.sync_us:
        for case in ("cached", "not cached"):
            found = probe_figures(results, "startup", case, size, disk)
            if found:
                took_s = found["opened_s"]
                yield Goal(
                    f"start with {size:,} stored sessions, {case}, {disk} disk",
                    f"< {STARTUP_S_MAX} s",
                    f"{took_s.text(2)} s",
                    met=took_s.middle < STARTUP_S_MAX,
                )
