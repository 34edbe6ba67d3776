"""Writes a run's results into `docs/performance.md`, between its marker comments, and the plots
beside it.

The text around the markers is written by hand and stays. All tables are of one run: what it has not
measured, the page says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cells import ALTERNATIVES, PRODUCERS, Condition, Contender, Disk
from .figures import figure
from .plots import line_chart
from .runtime_tables import all_tables
from .surroundings import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from .figures import Figure
    from .runner import Results
    from .tables import Table

PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "plots"
PLACES = (
    "machine",
    "goals",
    "full-native",
    "full-slow",
    "normal-native",
    "normal-slow",
    "ratios",
    "growth",
    "turns-native",
    "turns-slow",
    "turn-ratios",
    "idle",
    "ask",
    "startup",
    "activation",
)
DRAWN: tuple[Contender, ...] = ("reference", "writer", *ALTERNATIVES)


def markdown(table: Table) -> str:
    lines = [
        "| " + " | ".join(table.columns) + " |",
        "| --- |" + " ---: |" * (len(table.columns) - 1),
        *("| " + " | ".join(row) + " |" for row in table.rows),
    ]
    return "\n".join(lines)


def missing_places(page: Path = PAGE) -> list[str]:
    """Tables that the page has no marker comments for; better known before hours of measuring."""
    text = page.read_text(encoding="utf-8")
    return [
        name
        for name in (*PLACES, "remarks")
        if f"<!-- begin {name} -->\n" not in text or f"<!-- end {name} -->" not in text
    ]


def write(results: Results, page: Path = PAGE, plots: Path = PLOTS) -> None:
    text = page.read_text(encoding="utf-8")
    places = dict.fromkeys(PLACES, "Not measured in this run.")
    places |= {name: markdown(table) for name, table in all_tables(results).items()}
    places["remarks"] = "\n".join(f"- {remark}" for remark in results.remarks)
    for name, content in places.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"{page.name} has no place for {name}")
        body = f"\n{content}\n\n" if content else "\n"
        text = before + begin + body + end + after
    page.write_text(text, encoding="utf-8")
    plots.mkdir(parents=True, exist_ok=True)
    for name, drawing in draw(results).items():
        (plots / f"{name}.svg").write_text(drawing, encoding="utf-8")


def _rate(found: Figure) -> float | None:
    return found.rate


def _p99(found: Figure) -> float | None:
    return found.p99_ms


def draw(results: Results) -> dict[str, str]:
    """Throughput and p99 by producers, for each disk, at synchronous=FULL."""
    drawings: dict[str, str] = {}
    files: dict[Disk, str] = {"native": "native", "1 ms": "slow"}
    for disk in results.sync_us:
        for quantity, unit, value in (
            ("throughput", "acknowledged messages/s", _rate),
            ("p99", "p99 of the acknowledgement, ms", _p99),
        ):
            series: dict[str, list[tuple[float, float]]] = {}
            for contender in DRAWN:
                found = (
                    (producers, figure(results, contender, Condition(producers, "FULL", disk)))
                    for producers in PRODUCERS
                )
                series[contender] = [
                    (producers, y)
                    for producers, each in found
                    if each is not None and (y := value(each)) is not None and y > 0
                ]
            if any(series.values()):
                title = f"{quantity}, synchronous=FULL, {disk} disk"
                drawings[f"{quantity}-{files[disk]}"] = line_chart(title, "producers", unit, series)
    return drawings
