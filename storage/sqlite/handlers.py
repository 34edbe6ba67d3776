"""How a command is recognised and applied: the two functions each command has, in one table.

`applied(tx, command)` answers whether the command is stored exactly as given, looking only at what
was given, never at what changed later. `apply(tx, command)` changes the database, or leaves by
`refuse`. The engine takes the commands of a unit in order: it asks the first function, checks the
guards before the first command that is new, and calls the second function for the new ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..commands import Command
    from .transaction import Transaction


class Handler(NamedTuple):
    applied: Callable[[Transaction, Any], bool]
    apply: Callable[[Transaction, Any], None]


Handlers: TypeAlias = "dict[type[Command], Handler]"
