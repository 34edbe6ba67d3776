"""Where a stress test runs, what is shown of it, and where its reports go.

Keeps: a file that holds anything else is never touched; a temporary one stays only where there is
something to look at in it. Results go to standard output, progress to standard error.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import click
import msgspec
import trio
from rich.text import Text

from ...storage.sqlite import open_sqlite
from ..stress.before import NOTHING, before_of
from ..stress.page import page_of
from ..stress.plan import PlanError
from ..stress.report import report_of, tables_of
from ..stress.run import Test
from ..system import SystemClock
from .screen import shown

if TYPE_CHECKING:
    from ..display import Display
    from ..stress.before import Before
    from ..stress.plan import Plan
    from .screen import Screen

_EXAMPLES_SHOWN = 5


class Ended(NamedTuple):
    """What an exit code is made of."""

    sound: bool
    interrupted: bool


def run_stress(
    screen: Screen,
    plan: Plan,
    database: Path | None,
    module: str,
    json_to: str | None,
    html_to: str | None,
    *,
    going_on: bool,
) -> Ended:
    """Run it, show it, write it down. Raises `PlanError` for a file that it may not have."""
    for report_to in (json_to, html_to):
        if report_to not in (None, "-") and not Path(report_to or "").parent.is_dir():
            raise PlanError(f"{report_to} is in no folder", hint="make the folder first")
    before = _before(database, going_on=going_on)
    folder = None if database is not None else Path(tempfile.mkdtemp(prefix="onepen-stress-"))
    path = database if database is not None else (folder or Path()) / "stress.db"
    report = _run(screen, plan, path, module, before)
    if folder is not None and report["sound"]:
        shutil.rmtree(folder, ignore_errors=True)
    if html_to is not None:
        Path(html_to).write_text(page_of(report), encoding="utf-8")
    if json_to is not None:
        data = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
        with click.open_file(json_to, "wb") as file:
            file.write(data)
    if json_to != "-":
        _show(screen, report, kept=path.exists())
    return Ended(report["sound"], report["interrupted"])


def _before(database: Path | None, *, going_on: bool) -> Before:
    """What the file holds already. Whatever is of no stress test is somebody's."""
    if database is None:
        if going_on:
            raise PlanError("--continue needs a file", hint="name it by --database")
        return NOTHING
    if not database.parent.is_dir():
        raise PlanError(f"{database.parent} is no folder", hint="make it first")
    if going_on:
        if not database.exists():
            raise PlanError(f"{database} does not exist", hint="leave out --continue")
        # An owner, a foreign file and an older schema are told here, and not by each start anew.
        open_sqlite(database, SystemClock()).close()
        return before_of(database)
    if database.exists() and database.stat().st_size:
        hint = "name another file, or give --continue for the file of another stress test"
        raise PlanError(f"{database} is there already", hint=hint)
    return NOTHING


def _run(screen: Screen, plan: Plan, path: Path, module: str, before: Before) -> dict[str, Any]:
    with screen.progress() as display:
        news = _News(display, plan)

        async def run() -> dict[str, Any]:
            test = Test(plan, path, news.tick, module=module, before=before)
            return report_of(await test.run())

        report = trio.run(run)
        news.end()
    return report


@final
class _News:
    """What is shown while it runs: one line for each stage."""

    def __init__(self, display: Display, plan: Plan) -> None:
        self._display = display
        self._plan = plan
        self._stage = ""
        self._words = ""

    def tick(self, test: Test) -> None:
        if test.stage != self._stage:
            self.end()
            self._stage = test.stage
            self._display.begin(test.stage, max(1, int(self._plan.duration_s)))
        ledger, figures = test.ledger, test.figures
        ends = sum(life.asked == "SIGKILL" for life in test.link.lives)
        wrong = ledger.wrong.total()
        self._words = (
            f"{figures.now_s:.0f} s, {ledger.acknowledged:,} messages acknowledged, "
            f"{test.link.open_calls:,} open, {len(ledger.shown):,} shown, {ends} kills, "
            f"{figures.peaks['memory'] / 2**20:.0f} MiB at most"
        )
        if wrong:
            self._words += f", {wrong} WRONG"
        self._display.update(int(figures.now_s), self._words)

    def end(self) -> None:
        if self._stage:
            self._display.end(self._words)
            self._stage = ""


def _show(screen: Screen, report: dict[str, Any], *, kept: bool) -> None:
    for table in tables_of(report):
        screen.out.print(table)
    for one in report["verdict"]:
        if one["wrong"]:
            screen.out.print(Text(f"{one['rule']}: {one['wrong']:,} wrong", style="red"))
            for words in one["examples"][:_EXAMPLES_SHOWN]:
                screen.out.print(Text(f"  {shown(words)}"), soft_wrap=True)
    if kept:
        screen.out.print(Text(f"the file is {report['database']}"), soft_wrap=True)
    if report["sound"]:
        words = "interrupted; sound so far" if report["interrupted"] else "sound"
        screen.out.print(Text(words, style="green"))
    else:
        screen.out.print(Text("NOT SOUND", style="red"))
    screen.out.print(Text(f"the same plan again: {report['command']}"), soft_wrap=True)
    if not report["sound"]:
        screen.out.print(Text(report["caveat"], style="dim"), soft_wrap=True)
