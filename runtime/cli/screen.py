"""What a command prints: tables for people, one JSON value for programs.

Results go to standard output, everything else (progress, warnings, errors) to standard error, so
that a pipe carries results only. Text of a conversation is printed as text: no markup in it is
obeyed, and no control character of it reaches the terminal.
"""

from __future__ import annotations

from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...storage.errors import DatabaseHeldError, MissingError, MissingFileError, OnepenError
from ..display import Display, display_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_FAILED, _HELD, _MISSING = 1, 3, 4
_PIPE_WIDTH = 240
# Line breaks and tabs stay; what could move a cursor, change colours or turn text around does not.
_UNSHOWN = {
    **dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}"),
    **dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\N{REPLACEMENT CHARACTER}"),
}


def exit_code_of(error: OnepenError) -> int:
    """The exit code that stands for an error."""
    if isinstance(error, DatabaseHeldError):
        return _HELD
    return _MISSING if isinstance(error, MissingError | MissingFileError) else _FAILED


@final
class Screen:
    """Where a command's results go."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.out = Console(highlight=False)
        if not self.out.is_terminal:
            self.out.width = _PIPE_WIDTH  # cells are not folded at the width of no terminal
        self.err = Console(stderr=True, highlight=False)

    @classmethod
    def of(cls, ctx: click.Context) -> Screen:
        """The screen of this invocation."""
        root = ctx.find_root()
        if not isinstance(root.obj, Screen):
            root.obj = cls()
        return root.obj

    def show(self, value: object, drawn: Callable[[], Any]) -> None:
        """One result: as JSON if that was asked for, else as `drawn` draws it."""
        if self.as_json:
            click.echo(msgspec.json.encode(facts_of(value)))
        else:
            self.out.print(drawn(), soft_wrap=True)

    def warn(self, words: str) -> None:
        """Something that a person should know and a pipe should not carry."""
        self.err.print(Text(shown(words), style="yellow"), soft_wrap=True)

    def fail(self, error: OnepenError) -> None:
        if self.as_json:
            facts = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
            click.echo(msgspec.json.encode({"error": facts}), err=True)
            return
        self.err.print(Text(f"onepen: {shown(error.message)}", style="red"), soft_wrap=True)
        if error.hint:
            self.err.print(Text(f"        {shown(error.hint)}"), soft_wrap=True)

    def progress(self) -> Display:
        """Stages of something long, on standard error."""
        return display_on(self.err)


def shown(text: str) -> str:
    """A text that a terminal may be given."""
    return text.translate(_UNSHOWN)


def facts_of(value: Any) -> Any:
    """Records as plain JSON with every field in it, so that a program finds what it looks for."""
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
        return {name: facts_of(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        members = cast("dict[Any, Any]", value)  # type: ignore[redundant-cast] # not for pyright
        return {str(key): facts_of(one) for key, one in members.items()}
    if isinstance(value, list | tuple):
        return [facts_of(one) for one in cast("list[Any]", value)]
    return value


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> Table:
    """A table whose cells are text and nothing but text; numbers stand to the right."""
    filled = [[_cell(value) for value in row] for row in rows]
    drawn = Table(title=title or None, title_justify="left", header_style="bold")
    for place, name in enumerate(columns):
        numeric = bool(filled) and all(row[place].justify == "right" for row in filled)
        drawn.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in filled:
        drawn.add_row(*row)
    return drawn


def _cell(value: object) -> Text:
    if value is None:
        return Text("")
    if isinstance(value, Text):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Text(f"{value:,}", justify="right")
    return Text(shown(str(value)))


def when(at_ms: int | None) -> str:
    """A time as a person reads it, in the zone of the machine."""
    if at_ms is None:
        return ""
    try:
        return datetime.fromtimestamp(at_ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # a clock that was wrong, or an odd import
        return f"{at_ms} ms"


# Options that several commands have --------------------------------------------------------------


def _choose_json(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
    Screen.of(ctx).as_json = value


def with_screen(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`; the screen comes as the argument `screen`."""

    @wraps(command)  # with the options that it has so far
    def given(*arguments: Any, **options: Any) -> Any:
        return command(*arguments, screen=Screen.of(click.get_current_context()), **options)

    return click.option(
        "--json",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_choose_json,
        help="One JSON value on standard output, for programs.",
    )(given)


def with_database(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--database`, or the environment."""
    return click.option(
        "--database",
        "-d",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="ONEPEN_DATABASE",
        show_envvar=True,
        required=True,
        help="The database file.",
    )(command)
