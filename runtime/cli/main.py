"""The group of all commands, and what becomes of an error.

Owns the list of commands. Keeps: an error of ours ends in one sentence that says what happened, a
hint that says what to do, and an exit code that a script can tell apart; everything else is a bug
and shows its traceback.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, final

import click

from ...actors.raised import sole_cause
from ...storage.errors import OnepenError
from .backup import backup, restore
from .cleanup import erase, prune
from .doctor import doctor
from .screen import Screen, exit_code_of
from .search import search
from .sessions import sessions
from .stress import stress
from .transfer import export, import_

_INTERRUPTED = 130  # as a shell has it: 128 and the number of the signal


@final
class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (OnepenError, BaseExceptionGroup) as raised:
            error = sole_cause(raised)
            if not isinstance(error, OnepenError):
                raise
            Screen.of(ctx).fail(error)
            ctx.exit(exit_code_of(error))
        except KeyboardInterrupt:
            Screen.of(ctx).warn("interrupted; what was acknowledged is stored")
            ctx.exit(_INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("onepen"), prog_name="onepen")
def main() -> None:
    """Look at and look after a onepen database.

    \b
    Exit codes:
      0    done
      1    it could not be done, or something was found to be wrong
      2    the command was not understood
      3    another process owns the database
      4    what was named is not there
      130  interrupted
    """


for command in (
    backup,
    doctor,
    erase,
    export,
    import_,
    prune,
    restore,
    search,
    sessions,
    stress,
):
    main.add_command(command)
