"""`onepen backup` and `onepen restore`: a copy of a database, and a database out of a copy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from ...storage.engine import EngineSettings
from ...storage.sqlite import restore as put_in_place
from ..system import SystemClock
from ..upkeep import Pace
from ..upkeep import hold_deliveries as hold_them
from .database import looking_at
from .screen import Screen, shown, with_database, with_screen

if TYPE_CHECKING:
    from ...storage.upkeep import Copied, Restored
    from ..display import Display

_DEFAULTS = EngineSettings()
_FILE = click.Path(path_type=Path)  # what is no file is refused with a hint, later


class Stages:
    """What a tick tells, as stages on the screen."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._stage = ""

    def tell(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            self._display.begin(stage, max(total, 1))
        self._display.update(done, f"{done:,} of {total:,}")
        if done >= total:
            self._display.end(f"{total:,}")


@click.command()
@click.argument("target", type=_FILE)
@click.option("--replace", is_flag=True, help="TARGET may be there already, and is replaced.")
@click.option(
    "--pages-per-step",
    type=click.IntRange(1),
    default=_DEFAULTS.backup_pages_step,
    show_default=True,
    help="How many pages are copied between two pauses.",
)
@click.option(
    "--pause",
    type=click.FloatRange(0, 60),
    default=_DEFAULTS.backup_pause_s,
    show_default=True,
    help="How many seconds a pause takes.",
)
@with_database
@with_screen
def backup(
    screen: Screen,
    database: Path,
    target: Path,
    replace: bool,  # noqa: FBT001
    pages_per_step: int,
    pause: float,
) -> None:
    """Copy the database to the file TARGET, also while a process writes it.

    The copy is of one moment. It is checked before it gets its name.
    """
    settings = EngineSettings(backup_pages_step=pages_per_step)
    with looking_at(database, settings) as onlooker, screen.progress() as display:
        pace = Pace(pause, Stages(display).tell)
        copied = onlooker.backup(target, SystemClock(), pace, replace=replace)
    screen.show(copied, lambda: Text(_told(copied)))
    _warn_of(screen, copied)


@click.command()
@click.argument("backup", type=_FILE)
@click.option(
    "--replace", is_flag=True, help="The database may be there already; it is kept beside."
)
@click.option(
    "--hold-deliveries",
    is_flag=True,
    help="What was still to be sent then is not sent again by itself.",
)
@with_database
@with_screen
def restore(
    screen: Screen,
    database: Path,
    backup: Path,
    replace: bool,  # noqa: FBT001
    hold_deliveries: bool,  # noqa: FBT001
) -> None:
    """Put the file BACKUP in the place of the database.

    BACKUP is checked first and stays as it is. Nobody may own the database. What it is the backup
    of goes back to that moment: what was sent since then may be sent again.
    """
    hold = _holding if hold_deliveries else None
    with screen.progress() as display:
        restored = put_in_place(
            backup,
            database,
            SystemClock(),
            Pace(0, Stages(display).tell),
            pages_step=_DEFAULTS.backup_pages_step,
            replace=replace,
            hold=hold,
        )
    screen.show(restored, lambda: Text(_restored(database, restored)))
    _warn_of(screen, restored.copied)


def _holding(path: Path) -> int:
    return hold_them(path, SystemClock())


def _told(copied: Copied) -> str:
    return (
        f"{shown(copied.path)}: {copied.messages:,} messages in {copied.sessions:,} sessions, "
        f"{copied.size_bytes:,} bytes, checked"
    )


def _restored(database: Path, restored: Restored) -> str:
    said = [f"{shown(str(database))} is as the backup was: {restored.copied.messages:,} messages"]
    if restored.kept is not None:
        said.append(f"the database before is kept: {shown(restored.kept)}")
    if restored.held:
        said.append(f"{restored.held:,} deliveries are held")
    return "\n".join(said)


def _warn_of(screen: Screen, copied: Copied) -> None:
    if copied.warnings:
        screen.warn("its search index is damaged: `onepen doctor --repair` makes a new one")
