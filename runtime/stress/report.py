"""What a stress test says in the end: one value for programs, tables for people.

Keeps: the shape of the JSON is versioned by `format`; within one, fields are only added. Everything
in it is plain JSON, and everything in the tables and in the HTML page comes from it.

Must never say that something holds that was not looked at.
"""

from __future__ import annotations

import platform
from collections import Counter
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import apsw
import msgspec
import trio
from rich.table import Table

from .figures import facts_of_life, spread_of
from .plan import command_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .run import Result

FORMAT = "onepen-stress/1"
_ROWS_SHOWN_MAX = 20
_CAVEAT = (
    "The same seed and options give the same plan: who says what, what the agent does about it, and"
    " when the process is to be ended. Which message an end, a cancel or an interrupt hits depends"
    " on timing."
)


def report_of(result: Result) -> dict[str, Any]:
    """Everything, as plain JSON."""
    ledger, figures, lives = result.ledger, result.figures, result.lives
    ends = Counter(life.asked or "by itself" for life in lives)
    ready_s = [life.ready_s - life.started_s for life in lives if life.ready_s is not None]
    seconds = max(result.seconds, 1e-9)
    opened_ms = [life.opened_s * 1000 for life in lives if life.ready is not None]
    plain = msgspec.to_builtins
    growth = [{"life": number, "share": round(share, 4)} for number, share in figures.growth()]
    return {
        "format": FORMAT,
        "sound": result.sound,
        "interrupted": result.interrupted,
        "command": command_of(result.plan),
        "caveat": _CAVEAT,
        "database": str(result.path),
        "plan": plain(result.plan),
        "versions": {
            "onepen": version("onepen"),
            "python": platform.python_version(),
            "sqlite": apsw.sqlite_lib_version(),
            "trio": trio.__version__,
            "system": platform.platform(),
        },
        "verdict": [{**plain(one), "verdict": one.verdict} for one in result.findings],
        "counts": {
            "messages": len(ledger.messages),
            "acknowledged": ledger.acknowledged,
            "told": sum(said.told for said in ledger.messages.values()),
            "repeats_recognised": ledger.repeats,
            "deliveries_shown": len(ledger.shown),
            "deliveries_shown_again": ledger.shown_again,
            "side_effects": len(ledger.effects),
            "side_effects_again": ledger.effects.total() - len(ledger.effects),
            "actions": dict(ledger.actions),
            "dispositions": dict(ledger.dispositions),
            "outcomes": dict(ledger.outcomes),
            "refusals": dict(ledger.refusals),
            "ends": dict(ends),
            "inside": dict(figures.counters),
        },
        "latency_ms": {
            "acknowledged": plain(figures.accept_ms()),
            "replied": plain(figures.reply_ms()),
            "loop_gaps": plain(spread_of(figures.gaps_ms)),
            "commit_p99": round(figures.commit_p99_s * 1000, 3),
        },
        "recovery_ms": plain(spread_of(s * 1000 for s in ready_s)),
        "opening_ms": plain(spread_of(opened_ms)),
        "peaks": dict(figures.peaks),
        "memory_growth": growth,
        "seconds": round(result.seconds, 3),
        "looking_s": round(result.looks_s, 3),
        "judging_s": round(result.judged_s, 3),
        "per_second": {
            "acknowledged": round(ledger.acknowledged / seconds, 1),
            "told": round(sum(said.told for said in ledger.messages.values()) / seconds, 1),
        },
        "lives": [facts_of_life(life, figures.started_s) for life in lives],
        "over_time": [plain(slot) for slot in figures.slots()],
    }


# For people --------------------------------------------------------------------------------------


def tables_of(report: dict[str, Any]) -> list[Table]:
    """Over time, latency, counts, and the verdict, which comes last."""
    return [
        _over_time(report),
        _numbers("milliseconds", LATENCY_COLUMNS, latencies(report)),
        _counts(report),
        _verdict(report),
    ]


def _verdict(report: dict[str, Any]) -> Table:
    table = Table(title="the verdict", title_justify="left", header_style="bold")
    for name in ("rule", "about", "looked at", ""):
        table.add_column(name, justify="right" if name == "looked at" else "left")
    colours = {"violated": "red", "holds": "green", "not seen": "dim"}
    for one in sorted(report["verdict"], key=lambda one: bool(one["wrong"])):
        said = f"{one['wrong']:,} wrong" if one["wrong"] else one["verdict"]
        colour = colours[one["verdict"]]
        about = " ".join(one["invariants"])
        table.add_row(one["rule"], about, f"{one['looked']:,}", f"[{colour}]{said}[/]")
    return table


def _over_time(report: dict[str, Any]) -> Table:
    """As many rows as fit on a screen."""
    slots = report["over_time"]
    each = len(slots) // _ROWS_SHOWN_MAX + 1
    rows: list[Sequence[object]] = []
    for start in range(0, len(slots), each):
        some = slots[start : start + each]
        seconds = sum(slot["seconds"] for slot in some)
        begin = some[0]["at_s"]
        ends = [
            life["end"]
            for life in report["lives"]
            if life["ended_s"] is not None and begin <= life["ended_s"] < begin + seconds
        ]
        rows.append(
            (
                f"{begin:.0f} s",
                f"{sum(slot['acknowledged'] for slot in some) / seconds:,.0f}",
                f"{sum(slot['replied'] for slot in some) / seconds:,.0f}",
                f"{max(slot['accept_ms']['p99'] for slot in some):,.0f}",
                f"{max(slot['reply_ms']['p99'] for slot in some):,.0f}",
                f"{max(slot['memory_mb'] for slot in some):,.0f}",
                f"{max(slot['units'] for slot in some):,}",
                f"{max(slot['gap_max_ms'] for slot in some):,.0f}",
                " ".join(f"{name}" for name in ends if name),
            )
        )
    columns = (
        "from",
        "acks/s",
        "turns/s",
        "ack p99 ms",
        "turn p99 ms",
        "MiB",
        "units waiting",
        "longest gap ms",
        "ends",
    )
    return _numbers("over time", columns, rows)


LATENCY_COLUMNS = ("", "count", "p50", "p95", "p99", "longest")


def latencies(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows of milliseconds, under `LATENCY_COLUMNS`."""
    return [
        (name, f"{spread['count']:,}", *(f"{spread[p]:,.1f}" for p in ("p50", "p95", "p99", "max")))
        for name, spread in (
            ("a message is acknowledged", report["latency_ms"]["acknowledged"]),
            ("its turn has ended", report["latency_ms"]["replied"]),
            ("a gap of the event loop", report["latency_ms"]["loop_gaps"]),
            ("from start to serving", report["recovery_ms"]),
            ("of that, opening and recovery", report["opening_ms"]),
        )
    ]


def _counts(report: dict[str, Any]) -> Table:
    counts = report["counts"]
    rows = [
        (title, ", ".join(f"{name} {count:,}" for name, count in sorted(counts[field].items())))
        for title, field in (
            ("done", "actions"),
            ("taken as", "dispositions"),
            ("came to", "outcomes"),
            ("refused", "refusals"),
            ("ends", "ends"),
        )
    ]
    acknowledged = f"{counts['acknowledged']:,} of {counts['messages']:,} messages"
    again = f"{counts['repeats_recognised']:,} repeats recognised"
    rows.insert(0, ("acknowledged", f"{acknowledged}, {again}"))
    shown, twice = counts["deliveries_shown"], counts["deliveries_shown_again"]
    rows.append(("deliveries", f"{shown:,} shown, {twice:,} of them again, under the same id"))
    return _numbers("counts", ("", ""), rows, numeric=False)


def _numbers(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, numeric: bool = True
) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", show_header=numeric)
    for place, name in enumerate(columns):
        right = numeric and place > 0
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    return table
