"""`onepen doctor`: what is wrong with a database, and the mending of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.console import Group
from rich.text import Text

from ..repairing import repair as mend
from ..system import SystemClock
from ..upkeep import Pace
from .backup import Stages
from .database import looking_at
from .screen import Screen, shown, table, with_database, with_screen

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ...storage.upkeep import Finding, Repaired

_FOUND = 1


@click.command()
@click.option("--full", is_flag=True, help="Compare every index with its table, too.")
@click.option(
    "--repair", is_flag=True, help="Mend what can be mended; a copy of the file is kept first."
)
@with_database
@with_screen
def doctor(
    screen: Screen,
    database: Path,
    full: bool,  # noqa: FBT001
    repair: bool,  # noqa: FBT001
) -> None:
    """Look for everything that is wrong with the database.

    Without --repair nothing is changed, and a process may own the file. Ends with 1 if something
    is wrong, or was left so.
    """
    if repair:
        with screen.progress() as display:
            repaired = mend(database, SystemClock(), Pace(0, Stages(display).tell))
        screen.show(repaired, lambda: _repaired(repaired))
        found: Sequence[Finding] = repaired.left
    else:
        with looking_at(database) as onlooker, screen.progress() as display:
            found = onlooker.check(Pace(0, Stages(display).tell), full=full)
        screen.show(found, lambda: _found(found))
        if any(one.repairable for one in found) and not screen.as_json:
            screen.warn("`onepen doctor --repair` mends what is marked")
    if any(one.severity == "error" for one in found):
        click.get_current_context().exit(_FOUND)


def _found(found: Sequence[Finding]) -> Any:
    if not found:
        return Text("nothing is wrong", style="green")
    return table(
        ("what should hold", "where", "what was found", "repair", "what to do"),
        [
            (one.kind, one.where, one.what, "yes" if one.repairable else "", one.advice)
            for one in found
        ],
    )


def _repaired(repaired: Repaired) -> Any:
    said = [Text(shown(words)) for words in repaired.done]
    if repaired.kept is not None:
        said.append(Text(f"the database before is kept: {shown(repaired.kept)}"))
    return Group(*said, _found(repaired.left))
