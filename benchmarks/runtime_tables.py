"""The runtime's tables, and all tables of a run by the name of their place in the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cells import ALTERNATIVES, PRODUCERS, RUNTIMES, Condition, Contender, Disk
from .figures import figure, ratio
from .plan import IDLE_CASES, STARTUP_CASES, TURNS_RUNNING_MAX
from .runtime_figures import idle_growth, probe_figures
from .tables import (
    Rows,
    Table,
    condition_table,
    goal_table,
    growth_table,
    machine_table,
    number,
    ratio_table,
    spread,
)

if TYPE_CHECKING:
    from .runner import Results


def _label(contender: Contender) -> str:
    return f"onepen, {TURNS_RUNNING_MAX} at once" if contender == "onepen" else contender


def turn_table(results: Results, disk: Disk) -> Table:
    """Every contender at every number of sessions."""
    rows: Rows = []
    for contender in (*RUNTIMES, *ALTERNATIVES):
        for sessions in PRODUCERS:
            condition = Condition(sessions, "FULL", disk, "turn")
            found = figure(results, contender, condition)
            if found is None:
                continue
            rows.append(
                [
                    _label(contender),
                    number(sessions),
                    number(found.rate),
                    number(found.p50_ms, 2),
                    number(found.p99_ms, 2),
                    number(found.cpu_us, 1),
                ]
            )
    columns = ["", "sessions", "turns/s", "p50 ms", "p99 ms", "CPU µs"]
    return Table(f"Whole turns, {disk} disk", columns, rows)


def turn_ratio_table(results: Results) -> Table:
    """The runtime's turns a second as a multiple of the others'."""
    rows: Rows = []
    for disk in results.sync_us:
        for own in RUNTIMES:
            for sessions in PRODUCERS:
                condition = Condition(sessions, "FULL", disk, "turn")
                found = [ratio(results, other, condition, own) for other in ALTERNATIVES]
                if any(value is not None for value in found):
                    name = f"{_label(own)}, {disk}"
                    rows.append([name, number(sessions), *(spread(value, 2) for value in found)])
    columns = ["", "sessions", *(f"÷ {other}" for other in ALTERNATIVES)]
    return Table("The runtime's turns/s ÷ the others'", columns, rows)


def idle_table(results: Results) -> Table:
    rows: Rows = []
    for case in IDLE_CASES:
        for size in results.pace.idle_sessions:
            found = probe_figures(results, "idle", case, size)
            if found:
                rows.append(
                    [
                        case,
                        number(size),
                        found["start_us"].text(1),
                        found["start_cpu_us"].text(1),
                        found["wake_us"].text(1),
                        found["live_bytes"].text(0),
                        spread(idle_growth(results, case, size), 2),
                        found["evicted_bytes"].text(0),
                        found["later_bytes"].text(0),
                        found["evicted_blocks"].text(2),
                    ]
                )
    fewest = f"÷ at {min(results.pace.idle_sessions):,}"
    columns = ["", "actors", "start µs", "CPU µs", "wake µs", "bytes live", fewest]
    columns += ["bytes evicted", "bytes, as many again", "objects evicted"]
    return Table("Idle actors: for each of them", columns, rows)


def ask_table(results: Results) -> Table:
    found = probe_figures(results, "ask", "", results.pace.ask_messages)
    rows: Rows = []
    if found:
        hop, both, ask = found["hop_us"], found["round_trip_us"], found["ask_us"]
        rows = [
            ["hop through a channel, one way", hop.text(2), "1.00", ""],
            [
                "two channels, there and back",
                both.text(2),
                found["round_trip_per_hop"].text(2),
                "1.00",
            ],
            [
                "asking an actor, there and back",
                ask.text(2),
                found["ask_per_hop"].text(2),
                found["ask_per_round_trip"].text(2),
            ],
        ]
    return Table("Asking", ["", "µs", "÷ hop", "÷ there and back"], rows)


def startup_table(results: Results) -> Table:
    size = results.pace.stored_sessions
    rows: Rows = []
    for disk in results.sync_us:
        for case in STARTUP_CASES:
            found = probe_figures(results, "startup", case, size, disk)
            if found:
                rows.append(
                    [
                        f"{case}, {disk} disk",
                        number(size),
                        number(found["file_bytes"].middle / 2**20),
                        number(found["recovered"].middle),
                        found["opened_s"].text(3),
                        found["cpu_s"].text(3),
                        found["settled_s"].text(3),
                    ]
                )
    columns = ["", "sessions", "MiB", "cut off", "open s", "CPU s", "all answered s"]
    return Table("Start", columns, rows)


def activation_table(results: Results) -> Table:
    found = probe_figures(results, "activation", "", results.pace.stored_sessions)
    rows: Rows = []
    if found:
        rows = [
            ["20 messages", found["short_us"].text(0), "1.00", found["short_bytes"].text(0)],
            [
                "10,000 messages, 20 of them active",
                found["long_us"].text(0),
                found["long_per_short"].text(2),
                found["long_bytes"].text(0),
            ],
        ]
    columns = ["activating a session of", "µs", "÷ at 20", "bytes in memory"]
    return Table("Activation", columns, rows)


def all_tables(results: Results) -> dict[str, Table]:
    """Every table that has rows, by the name of its place in the documentation."""
    tables = {
        "machine": machine_table(results),
        "full-native": condition_table(results, "FULL", "native"),
        "full-slow": condition_table(results, "FULL", "1 ms"),
        "normal-native": condition_table(results, "NORMAL", "native"),
        "normal-slow": condition_table(results, "NORMAL", "1 ms"),
        "ratios": ratio_table(results),
        "growth": growth_table(results),
        "turns-native": turn_table(results, "native"),
        "turns-slow": turn_table(results, "1 ms"),
        "turn-ratios": turn_ratio_table(results),
        "idle": idle_table(results),
        "ask": ask_table(results),
        "startup": startup_table(results),
        "activation": activation_table(results),
        "goals": goal_table(results),
    }
    return {name: table for name, table in tables.items() if table.rows}
