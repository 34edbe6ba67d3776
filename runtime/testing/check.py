"""The invariant checker as a program: everything that is wrong with database files, in words.

Keeps: nothing is written and no lock is taken, so a file may be checked while it is served; what is
found then is one snapshot. Exit code 0 for sound files, 1 for what is violated, 2 for what can't be
looked at. It looks at content; whether a file can be repaired is `onepen doctor`'s business.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from ...storage.errors import OnepenError
from ...storage.sqlite.rules import RULES
from .invariants import check_database

if TYPE_CHECKING:
    from .invariants import Violation

_SHOWN_MAX = 20  # of each file, for people


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON value, for programs.")
def main(*, files: tuple[Path, ...], as_json: bool) -> None:
    """Check every invariant of onepen databases, without writing anything."""
    found: dict[str, list[Violation]] = {}
    refused: dict[str, str] = {}
    for file in files:
        try:
            found[str(file)] = check_database(file)
        except (OnepenError, OSError) as error:
            refused[str(file)] = str(error)
    if as_json:
        facts = {
            "violations": {
                file: [{"rule": one.rule, "found": one.found} for one in violations]
                for file, violations in found.items()
            },
            "refused": refused,
        }
        click.echo(msgspec.json.encode(facts))
    else:
        for name, violations in found.items():
            _tell(name, violations)
        for name, problem in refused.items():
            click.echo(f"{name}: {problem}", err=True)
    sys.exit(2 if refused else 1 if any(found.values()) else 0)


def _tell(file: str, violations: list[Violation]) -> None:
    if not violations:
        click.echo(f"{file}: sound; {len(RULES)} rules and SQLite's own checks hold")
        return
    click.echo(f"{file}: {len(violations)} violations")
    for one in violations[:_SHOWN_MAX]:
        # What is stored is shown as `repr` has it, so no control character reaches a terminal.
        click.echo(f"  {one}")
    if len(violations) > _SHOWN_MAX:
        click.echo(f"  … and {len(violations) - _SHOWN_MAX} more; --json has all of them")
