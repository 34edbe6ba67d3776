"""The tables of a run, as plain rows: shown on the terminal and written into the documentation
alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from .cells import (
    ALTERNATIVES,
    OURS,
    PRODUCERS,
    TEXT_BYTES,
    Condition,
    Contender,
    Disk,
    Synchronous,
)
from .figures import cpu_us, figure, goals, growth_ratio, ratio, wall_us
from .growth import HISTORIES
from .runtime_figures import runtime_goals

if TYPE_CHECKING:
    from .figures import Spread
    from .runner import Results

Rows: TypeAlias = list[list[str]]


class Table(Struct, frozen=True):
    """A heading, column names, rows of text; the first column is a name, the others are numbers."""

    title: str
    columns: list[str]
    rows: Rows


def number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def spread(value: Spread | None, digits: int) -> str:
    return "" if value is None else value.text(digits)


def goal_table(results: Results) -> Table:
    rows = [
        [goal.aim, goal.limit, goal.found, "met" if goal.met else "missed"]
        for goal in (*goals(results), *runtime_goals(results))
    ]
    return Table("Goals", ["goal", "aim", "measured", ""], rows)


def condition_table(results: Results, synchronous: Synchronous, disk: Disk) -> Table:
    """Every contender at every number of producers."""
    rows: Rows = []
    for contender in (*OURS, *ALTERNATIVES):
        for producers in PRODUCERS:
            found = figure(results, contender, Condition(producers, synchronous, disk))
            if found is None:
                continue
            rows.append(
                [
                    contender,
                    "batches" if contender == "raw" else number(producers),
                    number(found.rate),
                    number(found.p50_ms, 2),
                    number(found.p99_ms, 2),
                    number(found.cpu_us, 1),
                    number(found.bytes_per_message),
                ]
            )
    columns = ["", "producers", "messages/s", "p50 ms", "p99 ms", "CPU µs", "bytes"]
    return Table(f"synchronous={synchronous}, {disk} disk", columns, rows)


def ratio_table(results: Results) -> Table:
    """The Writer's messages a second as a multiple of the others'."""
    others: tuple[Contender, ...] = ("reference", *ALTERNATIVES)
    rows: Rows = []
    for disk in results.sync_us:
        for synchronous in ("FULL", "NORMAL"):
            for producers in PRODUCERS:
                condition = Condition(producers, synchronous, disk)
                found = [ratio(results, other, condition) for other in others]
                if any(value is not None for value in found):
                    name = f"{synchronous}, {disk}"
                    rows.append([name, number(producers), *(spread(value, 2) for value in found)])
    columns = ["", "producers", *(f"÷ {other}" for other in others)]
    return Table("The Writer's messages/s ÷ the others'", columns, rows)


def growth_table(results: Results) -> Table:
    rows: Rows = []
    for history in HISTORIES:
        cpu = growth_ratio(results, history.name, cpu_us)
        wall = growth_ratio(results, history.name, wall_us)
        if cpu is not None and wall is not None:
            rows.append(
                [
                    history.name,
                    number(cpu[0], 1),
                    number(cpu[1], 2),
                    number(wall[0], 1),
                    number(wall[1], 2),
                ]
            )
    columns = ["stored before", "CPU µs/append", "÷ at 10", "wall µs/append", "÷ at 10"]
    return Table("Growth", columns, rows)


def machine_table(results: Results) -> Table:
    machine = results.machine
    rows = [
        ["cores", str(machine.cores)],
        ["memory", f"{machine.memory_gib} GiB"],
        ["kernel", machine.kernel],
        ["Python", machine.python],
        ["SQLite", f"{machine.sqlite} (apsw {machine.apsw}); the alternatives use their Python's"],
        ["trio", machine.trio],
        *([f"one sync, {disk} disk", f"{us:,.0f} µs"] for disk, us in results.sync_us.items()),
        ["rounds", f"{results.pace.rounds}, {results.pace.window_s} s each or longer"],
        ["message", f"{TEXT_BYTES} bytes"],
    ]
    versions = {
        s.contender: s.outcome.sqlite for s in results.samples if s.contender in ALTERNATIVES
    }
    rows.extend([f"SQLite of {name}", version] for name, version in versions.items())
    notes = {s.contender: s.outcome.note for s in results.samples if s.contender in ALTERNATIVES}
    rows.extend([f"connection of {name}", note] for name, note in notes.items())
    return Table("Machine", ["", ""], rows)
