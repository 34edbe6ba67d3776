"""The part of the verdict that is about the process and its folder, and not about messages.

Keeps: a limit is judged only where it was measured, and the measured value is in the finding.

Must never take the process's word where there is another one: memory is what the kernel says, modes
are what the file system says, and a search is made by somebody who looks on.
"""

from __future__ import annotations

import stat
from itertools import pairwise
from typing import TYPE_CHECKING

from ...storage.identity import SessionKey
from ...storage.records import Hits, Search
from ...storage.sqlite import open_onlooker
from ..searching import find_page
from .figures import spread_of
from .script import inbound_id_of, key_of, word_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ...storage.engine import Reader
    from .figures import Figures
    from .link import Life
    from .plan import Plan
    from .stored import Stored
    from .verdict import Verdict

_SEARCHES_MAX = 24  # each reads what is not indexed yet
_PAST_BOUNDS = 1.25  # what is on its way already may be posted past a bound
_NOT_PLANNED = {
    "crashes": "session actors crashed",
    "receipts_failed": "receipts could not be taken",
    "writer_restarts": "the Writer was restarted",
    "agents_stuck": "agents did not end when they were stopped",
    "search_damaged": "the search index was damaged",
    "deliveries_failed": "deliveries were given up",
}


def judge_health(
    verdict: Verdict, plan: Plan, figures: Figures, lives: Sequence[Life], path: Path
) -> None:
    """Processes, queues, memory, the event loop, what is left behind, and the files' modes."""
    _lives(verdict, lives)
    _queues(verdict, figures, lives)
    _loop(verdict, plan, figures)
    _memory(verdict, plan, figures)
    counts = figures.counters
    odd = [f"{counts[name]}: {words}" for name, words in _NOT_PLANNED.items() if counts[name]]
    verdict.add("nothing inside breaks", ("INV-13",), len(counts) and 1, odd)
    readable = [
        f"{file.name} has mode {stat.S_IMODE(file.stat().st_mode):o}"
        for file in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", ".lock")))
        if file.exists() and file.stat().st_mode & 0o077
    ]
    verdict.add("nobody else may read the files", ("INV-21",), 1, readable)


def _lives(verdict: Verdict, lives: Sequence[Life]) -> None:
    epochs = [life.epoch for life in lives if life.ready is not None]
    back = [f"{b} behind {a}" for a, b in pairwise(epochs) if b <= a]
    verdict.add("each opening moves the epoch", ("INV-12", "INV-19"), len(epochs), back)
    ended = [life for life in lives if life.left is not None]
    left: list[str] = []
    for life in ended:
        assert life.left is not None
        who = f"life {life.number} ({life.asked})"
        if life.left.tasks:
            left.append(f"{who}: {life.left.tasks} tasks")
        left += [f"{who}: thread {name}" for name in life.left.threads]
        left += [f"{who}: descriptor of {name}" for name in life.left.descriptors]
        if life.left.agents:
            left.append(f"{who}: {life.left.agents} agents were never closed")
        left += [f"{who}: {words}" for words in life.left.warnings]
        if not life.left.in_time:
            left.append(f"{who}: not everything was finalized and sent in time")
    verdict.add("orderly ends leave nothing behind", ("INV-14",), len(ended), left)


def _queues(verdict: Verdict, figures: Figures, lives: Sequence[Life]) -> None:
    ready = next((life.ready for life in lives if life.ready is not None), None)
    if ready is None:
        verdict.add("queues stay within their bounds", ("INV-14",), 0, ())
        return
    bounds = {
        "units": ready.units_max * _PAST_BOUNDS,
        "bytes": ready.bytes_max * _PAST_BOUNDS,
        "live": ready.live_max,
        "running": ready.running_max,
    }
    over = [
        f"{name}: {figures.peaks[name]:,} of {bound:,.0f}"
        for name, bound in bounds.items()
        if figures.peaks[name] > bound
    ]
    verdict.add("queues stay within their bounds", ("INV-14",), len(figures.gaps_ms), over)


def _loop(verdict: Verdict, plan: Plan, figures: Figures) -> None:
    gaps = spread_of(figures.gaps_ms)
    if not plan.loop_gap_p99_max_ms:
        return
    limit = plan.loop_gap_p99_max_ms
    words = f"p99 is {gaps.p99:.1f} ms, the limit {limit:g} ms (longest {gaps.max:.0f} ms)"
    slow = [words] if gaps.p99 > limit else []
    verdict.add("the event loop is never held up for long", ("INV-13",), gaps.count, slow)


def _memory(verdict: Verdict, plan: Plan, figures: Figures) -> None:
    peak_mb = figures.peaks["memory"] / 2**20
    if plan.memory_max_mb:
        over = [f"{peak_mb:.0f} MiB"] if peak_mb > plan.memory_max_mb else []
        verdict.add("memory stays under its limit", ("INV-14",), int(peak_mb > 0), over)
    if plan.memory_growth_max:
        grown = figures.growth()
        over = [f"life {n}: {share:.1%}" for n, share in grown if share > plan.memory_growth_max]
        verdict.add("memory stops growing", ("INV-14",), len(grown), over)


async def judge_search(verdict: Verdict, stored: Stored, path: Path) -> None:
    """What was said is found by its own word; what was rewound is not."""
    if not stored.said:  # nor, perhaps, a file
        verdict.add("search finds what was said", ("INV-18",), 0, ())
        return
    places = sorted(stored.said)
    places = places[:: max(1, len(places) // _SEARCHES_MAX)][:_SEARCHES_MAX]
    wrong: list[str] = []
    onlooker = open_onlooker(path)

    async def read(view: Callable[[Reader], Hits]) -> Hits:
        with onlooker.reading() as reader:
            return view(reader)

    try:
        for place in places:
            key = SessionKey(key_of(place[0]))
            wanted = Search(text=word_of(place), role="user", key=key, limit=5)
            found = (await find_page(read, wanted)).hits
            expected = place not in stored.rewound
            if len(found) != expected:
                wrong.append(f"{inbound_id_of(place)}: {len(found)} hits, {int(expected)} expected")
    finally:
        onlooker.close()
    verdict.add("search finds what was said", ("INV-18",), len(places), wrong)
