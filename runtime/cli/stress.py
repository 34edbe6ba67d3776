"""`onepen stress`: the runtime under everything at once, on this machine, and a verdict.

Owns the options, which are made of the plan, and where the file and the reports go. Keeps: a file
that holds anything else is never touched; a temporary one stays only where there is something to
look at in it.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, final, get_args, get_type_hints

import click
import msgspec
import trio
from msgspec import Meta
from rich.text import Text

from ...storage.errors import OnepenError
from ..settings import Settings, names_of
from ..settings.names import nearest
from ..stress.before import NOTHING, before_of
from ..stress.link import CHILD
from ..stress.page import page_of
from ..stress.plan import PROFILES, Plan, PlanError, option_of, plan_of, settings_of
from ..stress.report import report_of, tables_of
from ..stress.run import Test
from .screen import Screen, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..display import Display
    from ..stress.before import Before

_INTERRUPTED = 130
_EXAMPLES_SHOWN = 5
_SEED_MAX = 2**31
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


# Options, one for each field of the plan ---------------------------------------------------------


def seconds(given: str) -> float:
    """`90`, `90s`, `10m`, `8h`."""
    text = str(given).strip().lower()
    unit = _UNITS.get(text[-1:], 0.0)
    try:
        return float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        raise click.BadParameter(f"{given!r} is no time; write like 90, 90s, 10m or 8h") from None


def _plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """All of them, in the order of the plan. Without a value the profile's holds."""
    default, hints = Plan(), get_type_hints(Plan, include_extras=True)
    for field in reversed(Plan.__struct_fields__):
        if field == "settings":
            continue
        kind, *notes = get_args(hints[field])
        description = next(note.description for note in notes if isinstance(note, Meta))
        choices = [one for one in get_args(kind) if isinstance(one, str)]
        taken: Any = click.Choice(choices) if choices else kind
        if field.endswith("_s"):
            taken = seconds
        value = getattr(default, field)
        told = f"{value:g}" if isinstance(value, float) else value
        text = description if field == "seed" else f"{description}  [default: {told}]"
        command = click.option(option_of(field), field, type=taken, help=text)(command)
    return command


def _settings_of(words: tuple[str, ...]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise PlanError(f"--set {word}: no value", hint="write like engine.readers_max=2")
        if name not in names_of(Settings):
            hint = "did you mean " + (nearest(name) or "something else")
            raise PlanError(f"--set {name}: there is no such setting", hint=hint)
        settings[name] = value
    return settings


# The command -------------------------------------------------------------------------------------


@click.command()
@click.option(
    "--profile",
    type=click.Choice(list(PROFILES)),
    default="default",
    show_default=True,
    help="A plan to begin with; options change it.",
)
@_plan_options
@click.option("--set", "sets", multiple=True, metavar="NAME=VALUE", help="A setting, by its name.")
@click.option(
    "--database",
    "-d",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep the file here. It must not exist, unless it goes on.",
)
@click.option("--continue", "going_on", is_flag=True, help="Go on with the file of another test.")
@click.option(
    "--json", "json_to", type=click.Path(allow_dash=True), help="The report as JSON; - for here."
)
@click.option("--html", "html_to", type=click.Path(dir_okay=False), help="The report as a page.")
@click.option("--child-module", default=CHILD, hidden=True)
def stress(
    profile: str,
    sets: tuple[str, ...],
    database: Path | None,
    going_on: bool,  # noqa: FBT001
    json_to: str | None,
    html_to: str | None,
    child_module: str,
    **options: Any,
) -> None:
    """Run the runtime hard, kill it again and again, and account for everything.

    The process under test is a child with a scripted agent. It is killed and started again while
    people send, repeat and reorder messages; in the end everything that was promised is looked for
    in the file.

    \b
    Exit codes:
      0    sound
      1    something is wrong; what it is, is named
      2    the command was not understood
      130  interrupted, and sound so far
    """
    try:
        given = {name: value for name, value in options.items() if value is not None}
        given.setdefault("seed", secrets.randbelow(_SEED_MAX))
        plan = plan_of({**given, "settings": _settings_of(sets)}, profile)
        settings_of(plan)
        before = _before(database, going_on=going_on)
    except OnepenError as error:
        raise click.UsageError(str(error)) from error
    ctx = click.get_current_context()
    screen = Screen.of(ctx)
    folder = None if database is not None else Path(tempfile.mkdtemp(prefix="onepen-stress-"))
    path = database if database is not None else (folder or Path()) / "stress.db"
    report = _run(screen, plan, path, child_module, before)
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
    if not report["sound"]:
        ctx.exit(1)
    if report["interrupted"]:
        ctx.exit(_INTERRUPTED)


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
