"""The report as one HTML page that needs nothing else: no network, no script, no other file.

Keeps: whatever came out of the test (names, words of errors, texts that were sent) is escaped; a
browser is told to fetch nothing and to run nothing, should anything slip through.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, cast

from .plots import chart, legend
from .report import LATENCY_COLUMNS, latencies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_STYLE = """
:root{color-scheme:light dark;--ink:#1d2129;--dim:#667085;--paper:#fff;--soft:#f3f4f7;
--line:#d9dde5;--good:#14804a;--bad:#c4320a;--s0:#0b6bcb;--s1:#d97706;--s2:#7c3aed}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--dim:#98a2b3;--paper:#14171c;
--soft:#1d2229;--line:#313843;--good:#4ade80;--bad:#fb923c;--s0:#60a5fa;--s1:#fbbf24;--s2:#a78bfa}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0 auto;
max-width:960px;padding:24px}
h1{font-size:26px;margin:0}h2{font-size:18px;margin:36px 0 8px}
.good{color:var(--good)}.bad{color:var(--bad)}.dim{color:var(--dim)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0}
.card{background:var(--soft);border-radius:8px;padding:12px 14px}
.card b{display:block;font-size:22px;font-variant-numeric:tabular-nums}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:5px 8px;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
pre,code{font:13px/1.4 ui-monospace,monospace;background:var(--soft);border-radius:6px}
pre{padding:10px 12px;overflow-x:auto;white-space:pre-wrap;overflow-wrap:anywhere}
ul{margin:4px 0;padding-left:18px;overflow-wrap:anywhere}
svg{width:100%;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:var(--dim)}
.grid{stroke:var(--line)}.mark{stroke:var(--bad);stroke-dasharray:3 3;opacity:.7}
polyline{fill:none;stroke-width:1.8}
.s0{stroke:var(--s0)}.s1{stroke:var(--s1)}.s2{stroke:var(--s2)}
i.s0{background:var(--s0)}i.s1{background:var(--s1)}i.s2{background:var(--s2)}
.key{margin-right:16px;font-size:13px;color:var(--dim)}
.key i{display:inline-block;width:12px;height:3px;margin-right:6px;vertical-align:middle}
.scroll{overflow-x:auto}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'"


def page_of(report: dict[str, Any]) -> str:
    """The whole page."""
    counts = report["counts"]
    violated = [one for one in report["verdict"] if one["wrong"]]
    words = "sound" if report["sound"] else f"{len(violated)} rules violated"
    if report["interrupted"]:
        words += ", interrupted"
    colour = "good" if report["sound"] else "bad"
    killed = sum(n for name, n in counts["ends"].items() if name.startswith("SIG"))
    cards = (
        (f"{counts['acknowledged']:,}", "messages acknowledged"),
        (f"{report['per_second']['acknowledged']:,.0f}", "acknowledged per second"),
        (f"{killed:,}", "times ended by a signal"),
        (f"{report['latency_ms']['acknowledged']['p99']:,.1f} ms", "acknowledgement, p99"),
        (f"{report['recovery_ms']['p50']:,.0f} ms", "from start to serving, p50"),
        (f"{report['peaks'].get('memory', 0) / 2**20:,.0f} MiB", "memory at most"),
    )
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>onepen stress: {escape(words)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>onepen stress: <span class='{colour}'>{escape(words)}</span></h1>",
        f"<p class='dim'>{escape(_surroundings(report))}</p><div class='cards'>",
        *(f"<div class='card'><b>{escape(n)}</b>{escape(what)}</div>" for n, what in cards),
        "</div>",
        _violations(violated),
        *_charts(report),
        "<h2>The verdict</h2>",
        _verdict(report["verdict"]),
        "<h2>Milliseconds</h2>",
        _table(LATENCY_COLUMNS, latencies(report), 1),
        "<h2>Lives of the process</h2>",
        _lives(report["lives"]),
        "<h2>Counts</h2>",
        *(_count(name, counts[name]) for name in counts),
        "<h2>Again</h2>",
        f"<pre>{escape(report['command'])}</pre><p class='dim'>{escape(report['caveat'])}</p>",
        "</body></html>\n",
    ]
    return "".join(parts)


def _surroundings(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    plan = report["plan"]
    asked = f"{plan['sessions']:,} sessions, {plan['duration_s']:g} s, seed {plan['seed']}"
    return (
        f"{asked}; {report['seconds']:.1f} s in all; synchronous {plan['synchronous']}; {versions}"
    )


def _violations(violated: Sequence[dict[str, Any]]) -> str:
    if not violated:
        return ""
    rows = [
        f"<p><b class='bad'>{escape(one['rule'])}</b>: {one['wrong']:,} wrong"
        f"<ul>{''.join(f'<li>{escape(words)}</li>' for words in one['examples'])}</ul></p>"
        for one in violated
    ]
    return f"<h2>What is wrong</h2>{''.join(rows)}"


def _charts(report: dict[str, Any]) -> Iterable[str]:
    slots = report["over_time"]
    at_s = [slot["at_s"] for slot in slots]
    marks = [
        (life["ended_s"], f"{life['end'] or 'ended by itself'} at {life['ended_s']:.1f} s")
        for life in report["lives"]
        if life["ended_s"] is not None
    ]

    def each(value: Callable[[dict[str, Any]], float | None]) -> list[float | None]:
        return [value(slot) for slot in slots]

    def spread(name: str, point: str) -> list[float | None]:
        return each(lambda slot: slot[name][point] if slot[name]["count"] else None)

    yield "<p class='dim'>A dashed line is the end of a process.</p>"
    for title, series in (
        (
            "Per second",
            {
                "acknowledged": each(lambda slot: slot["acknowledged"] / slot["seconds"]),
                "turns ended": each(lambda slot: slot["replied"] / slot["seconds"]),
                "deliveries shown": each(lambda slot: slot["shown"] / slot["seconds"]),
            },
        ),
        (
            "Milliseconds to an acknowledgement",
            {"p50": spread("accept_ms", "p50"), "p99": spread("accept_ms", "p99")},
        ),
        (
            "Milliseconds to the end of a turn",
            {"p50": spread("reply_ms", "p50"), "p99": spread("reply_ms", "p99")},
        ),
        ("Memory, MiB", {"of the process": each(lambda slot: slot["memory_mb"] or None)}),
        (
            "Queues",
            {
                "units that wait for the Writer": each(lambda slot: slot["units"]),
                "turns that run": each(lambda slot: slot["running"]),
            },
        ),
        ("Longest gap of the event loop, ms", {"gap": each(lambda slot: slot["gap_max_ms"])}),
    ):
        drawn = chart(title, at_s, series, marks)
        yield f"<h2>{escape(title)}</h2>{legend(list(series))}{drawn}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: int) -> str:
    """Cells are text; those from `numbers` on stand to the right."""

    def line(cells: Sequence[object], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if place >= numbers else ''}>{escape(str(cell))}</{tag}>"
            for place, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    head = line(columns, "th")
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead>{body}</table></div>"


def _verdict(verdict: Sequence[dict[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>{escape(one['rule'])}</td><td class='dim'>{escape(' '.join(one['invariants']))}"
        f"</td><td class=n>{one['looked']:,}</td>"
        f"<td class='{_colour_of(one)}'>{escape(one['verdict'])}</td></tr>"
        for one in verdict
    )
    head = "<th>rule</th><th>about</th><th class=n>looked at</th><th></th>"
    return f"<table><thead><tr>{head}</tr></thead>{rows}</table>"


def _colour_of(finding: dict[str, Any]) -> str:
    return {"violated": "bad", "holds": "good"}.get(finding["verdict"], "dim")


def _lives(lives: Sequence[dict[str, Any]]) -> str:
    def ms(seconds: float | None) -> str:
        return "never" if seconds is None else f"{seconds * 1000:,.0f}"

    rows = [
        (
            life["end"] or "by itself",
            life["number"],
            f"{life['started_s']:.1f}",
            "" if life["ended_s"] is None else f"{life['ended_s']:.1f}",
            life["code"],
            ms(life["ready_after_s"]),
            ms(life["acknowledged_after_s"]),
        )
        for life in lives
    ]
    columns = ("ended by", "life", "from s", "to s", "code", "serves after ms", "first ack ms")
    return _table(columns, rows, 1)


def _count(name: str, value: Any) -> str:
    what = name.replace("_", " ")
    if not isinstance(value, dict):
        return f"<p>{escape(what)}: <b>{value:,}</b></p>"
    counts = cast("dict[str, int]", value)
    listed = ", ".join(f"{one} {count:,}" for one, count in sorted(counts.items())) or "none"
    return f"<p>{escape(what)}: {escape(listed)}</p>"
