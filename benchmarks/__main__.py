"""`python -m benchmarks`: run, show, and if asked keep the results."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from . import docs, surroundings
from .plan import FULL_PACE, PARTS, QUICK_PACE, Pace
from .runner import Results, Runner
from .runtime_tables import all_tables

if TYPE_CHECKING:
    from .tables import Table


_TELL_EVERY_S = 5.0
_WIDTH_IN_A_FILE = 130


def show(console: Console, table: Table) -> None:
    shown = RichTable(title=table.title, title_justify="left", title_style="bold")
    for number, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if number == 0 else "right")
    previous = None
    for row in table.rows:
        if previous is not None and row[0] != previous and len(table.columns) > 5:
            shown.add_section()
        previous = row[0]
        style = {"met": "green", "missed": "red"}.get(row[-1])
        shown.add_row(*row, style=style)
    console.print(shown)


def measure(console: Console, pace: Pace, parts: frozenset[str]) -> Results:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("preparing", total=None)

        told_s = 0.0

        def tell(label: str, done: int, total: int) -> None:
            nonlocal told_s
            progress.update(task, description=label, completed=done, total=total)
            # Without a terminal there is no bar: a line now and then instead.
            if not console.is_terminal and time.monotonic() - told_s >= _TELL_EVERY_S:
                told_s = time.monotonic()
                click.echo(f"{done:,} of {total:,}: {label}", err=True)

        return Runner(pace, parts, tell).run()


@click.command()
@click.option(
    "--quick", is_flag=True, help="One short round: shows that it works, not how fast it is."
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(PARTS),
    help="Measure only these parts (may be repeated). limits: raw, reference and writer; turns, "
    "idle, ask, startup: the runtime, each complete in itself.",
)
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds of each cell.")
@click.option(
    "--stored",
    type=click.IntRange(min=1_000),
    help="Sessions in the file of `startup`; built once and kept below build/.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write everything that was measured to this file.",
)
@click.option(
    "--from-json",
    "from_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Measure nothing: show, or write into the documentation, what such a file holds.",
)
@click.option("--write-docs", is_flag=True, help="Write tables and plots into docs/performance.md.")
def main(
    *,
    quick: bool,
    only: tuple[str, ...],
    rounds: int | None,
    stored: int | None,
    json_path: Path | None,
    from_path: Path | None,
    write_docs: bool,
) -> None:
    """What messages and turns cost: the Writer and the runtime beside limits and alternatives."""
    if quick and write_docs:
        raise click.UsageError("a quick run says nothing about speed: it is not written down")
    if write_docs and (missing := docs.missing_places()):
        raise click.UsageError(f"{docs.PAGE.name} has no place for: {', '.join(missing)}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_IN_A_FILE)
    pace = QUICK_PACE if quick else FULL_PACE
    if rounds is not None:
        pace = msgspec.structs.replace(pace, rounds=rounds, growth_rounds=rounds)
    if stored is not None:
        pace = msgspec.structs.replace(pace, stored_sessions=stored)
    if from_path is not None:
        results = msgspec.json.decode(from_path.read_bytes(), type=Results)
    else:
        results = measure(console, pace, frozenset(only or PARTS))
    for table in all_tables(results).values():
        show(console, table)
    for remark in results.remarks:
        console.print(f"note: {remark}", style="yellow", markup=False)
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    if write_docs:
        docs.write(results)
        console.print(f"wrote {docs.PAGE.relative_to(surroundings.ROOT)} and the plots beside it")


if __name__ == "__main__":
    main()
