"""The command line as a person or a script types it, in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from click.testing import CliRunner

from onepen.runtime.cli import main

if TYPE_CHECKING:
    from click.testing import Result


def typed(*words: object, exit_code: int = 0, says: str | None = None) -> Result:
    """What a command prints; fails unless it ends with this exit code. `says` is typed into it."""
    result = CliRunner().invoke(main, [str(word) for word in words], input=says)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == exit_code, result.output
    return result


def answered(*words: object) -> Any:
    """The one JSON value that it prints with `--json`."""
    return msgspec.json.decode(typed(*words, "--json").stdout)


def refused(*words: object, exit_code: int) -> str:
    """What it says on standard error when it can't do it."""
    result = typed(*words, exit_code=exit_code)
    assert result.stdout == ""
    return result.stderr
