"""`onepen export` and `onepen import`: conversations into a file, and out of one."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click
import trio

from ..transfer import check_file, import_file, selection
from ..transfer import export as export_to
from .database import looking_at, write
from .screen import Screen, table, with_database, with_screen

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ...actors.writer import WriterRef
    from ...storage.engine import Reader
    from ...storage.identity import SessionId
    from ...storage.sqlite import Onlooker
    from ...storage.transfer import ExportReport, ImportReport
    from ...storage.transfer.exporting import Selection
    from ..display import Display

T = TypeVar("T")


class _Stages:
    """Progress as a display shows it: one stage after the other."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._stage = ""
        self._news = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self.end()
            self._stage = stage
            self._display.begin(stage, max(total, 1))
        unit = "bytes" if stage == "check" else "messages"
        self._news = f"{done:,} of {total:,} {unit}"
        self._display.update(done, self._news)

    def end(self) -> None:
        if self._stage:
            self._display.end(self._news)


@click.command()
@click.argument("file")
@click.option("--session", help="One session: an id, the beginning of one, or a title.")
@click.option("--lineage", help="What a session came from, and what it was rotated to.")
@click.option("--key", help="All sessions of a key.")
@click.option("--all", "everything", is_flag=True, help="Everything.")
@click.option("--overwrite", is_flag=True, help="Even if there is such a file.")
@with_database
@with_screen
def export(
    screen: Screen,
    database: Path,
    file: str,
    session: str | None,
    lineage: str | None,
    key: str | None,
    everything: bool,  # noqa: FBT001
    overwrite: bool,  # noqa: FBT001
) -> None:
    """Write conversations to FILE, or to standard output if it is `-`.

    Packed if its name ends in .gz. Works beside a process that has the database open.
    """
    with looking_at(database) as onlooker, screen.progress() as display:
        what = selection(
            _found(onlooker, session), _found(onlooker, lineage), key, everything=everything
        )
        stages = _Stages(display)
        target: str | IO[bytes] = sys.stdout.buffer if file == "-" else file
        report = trio.run(_export, onlooker, target, what, overwrite, stages)
        stages.end()
    if report.damaged:
        screen.warn(
            f"{report.damaged} messages could not be read as they were stored: what no text can "
            "hold was replaced; `onepen doctor` tells more"
        )
    if file != "-":  # there the export itself is the result
        facts = {"file": file, **{n: getattr(report, n) for n in report.__struct_fields__}}
        screen.show(facts, lambda: _listed(facts))


def _found(onlooker: Onlooker, given: str | None) -> SessionId | None:
    if given is None:
        return None
    with onlooker.reading() as reader:
        return reader.find_session(given).id


async def _export(
    onlooker: Onlooker,
    target: str | IO[bytes],
    what: Selection,
    overwrite: bool,  # noqa: FBT001
    stages: _Stages,
) -> ExportReport:
    async def read(view: Callable[[Reader], T]) -> T:
        def look() -> T:
            with onlooker.reading() as reader:
                return view(reader)

        return await trio.to_thread.run_sync(look)

    return await export_to(read, target, what, overwrite=overwrite, progress=stages)


@click.command("import")
@click.argument("file")
@click.option("--dry-run", is_flag=True, help="Only check and compare; write nothing.")
@with_database
@with_screen
def import_(
    screen: Screen,
    database: Path,
    file: str,
    dry_run: bool,  # noqa: FBT001
) -> None:
    """Import what `onepen export` has written into the database, which is made if need be.

    A second time it changes nothing. Nobody else may have the database open: in a running gateway
    `runtime.sessions.import_from` does the same.
    """
    with screen.progress() as display:
        stages = _Stages(display)
        if not database.exists():
            check_file(file)  # a file that is refused makes no database

        async def run(writer: WriterRef) -> ImportReport:
            return await import_file(writer, file, dry_run=dry_run, progress=stages)

        report = write(database, run, create=not dry_run)
        stages.end()
    for session_id, wanted, given in report.titles:
        got = "none" if given is None else repr(given)
        screen.warn(f"session {session_id}: the title {wanted!r} was taken, it has {got}")
    if report.sessions_deleted:
        screen.warn(f"{report.sessions_deleted} sessions were deleted here and stay so")
    facts = {n: getattr(report, n) for n in report.__struct_fields__}
    facts = {"dry_run": dry_run, **facts}
    screen.show(facts, lambda: _listed(facts))


def _listed(facts: dict[str, Any]) -> Any:
    rows = [(name.replace("_", " "), value) for name, value in facts.items() if name != "titles"]
    drawn = table(("", ""), rows)
    drawn.show_header = False
    return drawn
