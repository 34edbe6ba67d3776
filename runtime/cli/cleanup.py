"""`onepen prune` and `onepen erase`: what goes.

Keeps: what is destroyed is shown first, by looking on, which works whoever owns the file; then a
person is asked, unless `--yes` says that somebody has been. Nothing is asked where nobody can
answer: a program says `--yes` or `--dry-run`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click
import trio
from rich.console import Group
from rich.text import Text

from ...actors.clearing import (
    EMPTY_AFTER_MS,
    ORPHANED_AFTER_MS,
    finalize_orphans,
    prune_empty,
)
from .. import cleanup
from ..forgetting import AloneVisitor, affected
from ..forgetting import erase as erase_user
from ..system import SystemClock, SystemIds
from .database import looking_at, write
from .screen import shown, table, when, with_database, with_screen

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ...actors.writer import WriterRef
    from ...storage.engine import Reader
    from ...storage.sqlite import Onlooker
    from ..cleanup import Pruned
    from .screen import Screen

T = TypeVar("T")

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "y": 365 * 86_400}
_SHOWN_MAX = 20
_PAGE = 1_000


class _Looker:
    """An onlooker, for those who read as a Writer's readers do."""

    def __init__(self, onlooker: Onlooker) -> None:
        self._onlooker = onlooker

    async def read(self, view: Callable[[Reader], T]) -> T:
        with self._onlooker.reading() as reader:
            return view(reader)


class _Age(click.ParamType[float]):
    name = "age"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        found = re.fullmatch(r"(\d{1,9})([smhdwy])", str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no age; give one like 90d, 12h, 2w or 1y", param, ctx)
        return int(found[1]) * float(_SECONDS[found[2]])


def with_yes(command: Callable[..., Any]) -> Callable[..., Any]:
    dry_run = click.option("--dry-run", is_flag=True, help="Only say what would be done.")
    return dry_run(click.option("--yes", is_flag=True, help="Do not ask.")(command))


def is_meant(screen: Screen, question: str, *, yes: bool) -> bool:
    """Whether to go on; whoever is asked and says no has changed nothing."""
    if yes:
        return True
    if screen.as_json:
        raise click.UsageError("nobody can be asked with --json: add --yes or --dry-run")
    return click.confirm(question, err=True)


# By age ------------------------------------------------------------------------------------------


@click.command()
@click.option("--older-than", type=_Age(), help="Sessions without a message for so long: 90d.")
@click.option("--source", help="Of those only the ones of a source, like telegram.")
@click.option("--key", help="Of those only the ones of a session key.")
@click.option("--archived", is_flag=True, help="Of those only archived ones.")
@click.option("--ended", is_flag=True, help="Of those only ones that have ended.")
@click.option("--empty", is_flag=True, help="Rows of sessions in which nothing was ever said.")
@click.option("--orphaned", is_flag=True, help="End what no key leads to behind a rotation.")
@with_yes
@with_database
@with_screen
def prune(
    screen: Screen,
    database: Path,
    older_than: float | None,
    empty: bool,  # noqa: FBT001
    orphaned: bool,  # noqa: FBT001
    archived: bool,  # noqa: FBT001
    ended: bool,  # noqa: FBT001
    dry_run: bool,  # noqa: FBT001
    yes: bool,  # noqa: FBT001
    **filters: Any,
) -> None:
    """Delete old conversations.

    Never a key's current one, one that is pinned, or one of which anything is unfinished.
    """
    if older_than is None and not empty and not orphaned:
        raise click.UsageError("say what is to go: --older-than 90d, --empty or --orphaned")
    clock = SystemClock()
    before_ms = None if older_than is None else clock.now() - int(older_than * 1000)
    chosen: dict[str, Any] = {"archived_only": archived, "ended_only": ended, **filters}
    with looking_at(database) as onlooker:
        found: dict[str, Any] = {
            "pruned": None
            if before_ms is None
            else trio.run(partial(cleanup.prune, _Looker(onlooker), before_ms, **chosen)),
            "empty": _count(onlooker, "empty_sessions", clock.now() - EMPTY_AFTER_MS, empty),
            "orphaned": _count(
                onlooker, "orphaned_rotations", clock.now() - ORPHANED_AFTER_MS, orphaned
            ),
        }
    if dry_run:
        screen.show(found, lambda: _drawn(found, "would be"))
        return
    if not screen.as_json and not yes:
        screen.err.print(_drawn(found, "would be"))
    if not _any(found) or not is_meant(screen, "Do it?", yes=yes):
        screen.show(
            {"pruned": None, "empty": 0, "orphaned": 0}, lambda: Text("nothing was changed")
        )
        return

    async def work(writer: WriterRef) -> dict[str, Any]:
        done: dict[str, Any] = {"pruned": None, "empty": 0, "orphaned": 0}
        if orphaned:
            done["orphaned"] = await finalize_orphans(writer, clock)
        if before_ms is not None:
            delete = cleanup.deleting(writer, clock, before_ms)
            total = 0 if found["pruned"] is None else found["pruned"].count
            with screen.progress() as display:
                display.begin("pruning", total)
                done["pruned"] = await cleanup.prune(
                    writer,
                    before_ms,
                    **chosen,
                    delete=delete,
                    told=lambda count: display.update(count, f"{count:,} sessions"),
                )
                display.end(f"{done['pruned'].count:,} sessions")
        if empty:
            done["empty"] = await prune_empty(writer, clock)
        return done

    result = write(database, work)
    screen.show(result, lambda: _drawn(result, "were"))


def _count(onlooker: Onlooker, view: str, before_ms: int, wanted: bool) -> int:  # noqa: FBT001
    count, place = 0, 0
    while wanted:
        with onlooker.reading() as reader:
            page, following = getattr(reader, view)(before_ms, after=place, limit=_PAGE)
        count += len(page)
        if following is None:
            break
        place = following
    return count


def _any(found: dict[str, Any]) -> bool:
    pruned: Pruned | None = found["pruned"]
    return bool(found["empty"] or found["orphaned"] or (pruned is not None and pruned.count))


def _drawn(found: dict[str, Any], verb: str) -> Any:
    pruned: Pruned | None = found["pruned"]
    lines: list[Any] = []
    if pruned is not None and pruned.sessions:
        lines.append(
            table(
                ("session", "key", "title", "messages", "last"),
                [
                    (one.id[:16], one.key, one.title, one.messages, when(one.last_ms))
                    for one in pruned.sessions[:_SHOWN_MAX]
                ],
            )
        )
        if pruned.count > _SHOWN_MAX:
            lines.append(Text(f"and {pruned.count - _SHOWN_MAX:,} more", style="dim"))
    if pruned is not None:
        said = f"{pruned.count:,} sessions with {pruned.messages:,} messages {verb} deleted"
        lines.append(Text(said))
    if found["empty"]:
        lines.append(Text(f"{found['empty']:,} empty sessions {verb} removed"))
    if found["orphaned"]:
        lines.append(Text(f"{found['orphaned']:,} orphaned sessions {verb} ended"))
    return Group(*(lines or [Text("there is nothing to do", style="dim")]))


# A user ------------------------------------------------------------------------------------------


@click.command()
@click.argument("user")
@with_yes
@with_database
@with_screen
def erase(
    screen: Screen,
    database: Path,
    user: str,
    dry_run: bool,  # noqa: FBT001
    yes: bool,  # noqa: FBT001
) -> None:
    """Erase what USER has said, wherever it is.

    Conversations that are only this user's are deleted; in those that others share, the user's
    messages are blanked.
    """
    with looking_at(database) as onlooker:
        only, shared = trio.run(affected, _Looker(onlooker), user)
    said = f"{only:,} sessions are only theirs, in {shared:,} that others share rows are blanked"
    if dry_run:
        screen.show({"user": user, "only": only, "shared": shared}, lambda: Text(said))
        return
    question = f"{shown(user)}: {said}. Erase it all?"
    if not is_meant(screen, question, yes=yes):
        screen.show(None, lambda: Text("nothing was changed"))
        return
    clock = SystemClock()

    async def work(writer: WriterRef) -> Any:
        visitor = AloneVisitor(writer, clock, SystemIds())
        with screen.progress() as display:
            display.begin(f"erasing {shown(user)}", only + shared)
            result = await erase_user(
                writer,
                clock,
                visitor,
                user,
                lambda what, count: display.update(
                    count if what == "sessions" else 0, f"{count:,} {what}"
                ),
            )
            display.end(f"{result.rows_blanked:,} rows blanked")
        return result

    result = write(database, work)
    facts = [(name.replace("_", " "), getattr(result, name)) for name in result.__struct_fields__]
    screen.show(result, lambda: table(("what", "how many"), facts))
