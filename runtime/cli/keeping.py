"""`onepen sessions delete|archive|pin`: one conversation, by its id or its title.

Keeps: what is destroyed is shown first, as by `onepen prune`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.text import Text

from .. import cleanup
from ..system import SystemClock, SystemIds
from .cleanup import is_meant, with_yes
from .database import looking_at, write
from .screen import shown, with_database, with_screen

if TYPE_CHECKING:
    from pathlib import Path

    from ...actors.writer import WriterRef
    from ...storage.records import Session
    from .screen import Screen


def _found(database: Path, given: str) -> Session:
    with looking_at(database) as onlooker, onlooker.reading() as reader:
        return reader.find_session(given)


@click.command()
@click.argument("session")
@with_yes
@with_database
@with_screen
def delete(
    screen: Screen,
    database: Path,
    session: str,
    dry_run: bool,  # noqa: FBT001
    yes: bool,  # noqa: FBT001
) -> None:
    """Delete a conversation. SESSION is an id, the beginning of one, or a title."""
    found = _found(database, session)
    said = (
        f"{found.id} of {shown(found.key)}"
        f"{'' if found.title is None else f', {shown(found.title)!r}'}"
        f", with {found.message_count:,} messages"
    )
    if dry_run:
        screen.show({"deleted": False, "session": found}, lambda: Text(f"would be deleted: {said}"))
        return
    if not is_meant(screen, f"Delete {said}?", yes=yes):
        screen.show({"deleted": False, "session": found}, lambda: Text("nothing was changed"))
        return
    clock = SystemClock()

    async def work(writer: WriterRef) -> bool:
        keys = cleanup.NoActors(writer, clock, SystemIds())
        return await cleanup.delete(writer, clock, keys, found.id)

    done = write(database, work)
    words = "deleted" if done else "there is nothing left of it"
    screen.show({"deleted": done, "session": found}, lambda: Text(f"{words}: {said}"))


def _flag(name: str, words: str, help_: str) -> click.Command:
    @click.command(name, help=help_)
    @click.argument("session")
    @click.option("--undo", is_flag=True, help="The other way round.")
    @with_database
    @with_screen
    def command(screen: Screen, database: Path, session: str, undo: bool) -> None:  # noqa: FBT001
        found = _found(database, session)
        flags = {words: not undo}

        async def work(writer: WriterRef) -> bool:
            return await cleanup.set_flags(writer, SystemClock(), found.id, **flags)

        changed = write(database, work)
        told = f"{found.id} is {'not ' if undo else ''}{words}"
        screen.show(
            {"session_id": found.id, "changed": changed, **flags},
            lambda: Text(told if changed else f"{told} already"),
        )

    return command


archive = _flag("archive", "archived", "Leave a conversation out of listings; it stays searchable.")
pin = _flag("pin", "pinned", "Keep a conversation from pruning.")
