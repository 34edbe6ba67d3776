"""`onepen stress`: the runtime under everything at once, on this machine, and a verdict.

Owns the options, which are made of the plan, and the exit codes. `stressing` does the rest: it is
imported by the one command that needs it.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import click
from msgspec import Meta

from ..settings import Settings, SettingsError, names_of
from ..settings.names import nearest
from ..stress.plan import CHILD, PROFILES, Plan, PlanError, option_of, plan_of, settings_of
from .screen import Screen

if TYPE_CHECKING:
    from collections.abc import Callable


_INTERRUPTED = 130
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
    from .stressing import run_stress  # with it comes the test kit, which no other command needs

    ctx = click.get_current_context()
    try:
        given = {name: value for name, value in options.items() if value is not None}
        given.setdefault("seed", secrets.randbelow(_SEED_MAX))
        plan = plan_of({**given, "settings": _settings_of(sets)}, profile)
        settings_of(plan)
        sound, interrupted = run_stress(
            Screen.of(ctx), plan, database, child_module, json_to, html_to, going_on=going_on
        )
    except (PlanError, SettingsError) as error:
        raise click.UsageError(str(error)) from error
    if not sound:
        ctx.exit(1)
    if interrupted:
        ctx.exit(_INTERRUPTED)
