"""How large a world is explored: keys, messages, and how often each trouble may come.

A scope is small on purpose: a mistake of a protocol shows with few parts, if they may meet in every
order. What one scope leaves out another has; the wider ones are for `make proof`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .state import Budget
from .steps import start_of

if TYPE_CHECKING:
    from .state import State


class Scope(NamedTuple):
    """What there is, and what may happen to it."""

    name: str
    budget: Budget
    keys: tuple[str, ...] = ("k",)
    messages: str = "ab"
    """The n-th is for the n-th key, or for the last one."""

    @property
    def start(self) -> State:
        owners = (*self.keys, *(self.keys[-1:] * len(self.messages)))
        return start_of(self.keys, dict(zip(self.messages, owners, strict=False)), self.budget)


SCOPES = (
    Scope("crashes", Budget(kills=1, power_losses=1, sync_failures=1, rotations=1)),
    Scope("two kills", Budget(kills=2, sync_failures=1, rotations=1)),
    Scope("predecessors", Budget(successors=1, lost_waits=1, sync_failures=1, rotations=1)),
    Scope("a unit fails alone", Budget(sync_failures=2, rotations=1), messages="xbc"),
    Scope(
        "two processes",
        Budget(intruders=1, kills=1, sync_failures=1, rotations=1),
        messages="a",
    ),
    Scope("two owners", Budget(intruders=1), messages="a"),
    Scope("to and fro", Budget(intruders=2, sync_failures=1, rotations=1), messages="a"),
    Scope("two keys", Budget(sync_failures=1, rotations=1, switches=1), ("k", "l"), messages="a"),
)

WIDE = (
    Scope("crashes, two rotations", Budget(1, 1, 1, rotations=2)),
    Scope("crashes, three messages", Budget(1, 1, 1, rotations=2), messages="abc"),
    Scope("two kills and a power loss", Budget(2, 1, 1, rotations=1)),
    Scope("three incarnations", Budget(successors=2, lost_waits=1, rotations=1)),
    Scope("two processes, lost waits", Budget(0, 0, 1, 1, intruders=1, rotations=1)),
    Scope("two keys, two processes", Budget(intruders=1, switches=1), ("k", "l")),
    Scope("two keys, two messages", Budget(sync_failures=1, rotations=1, switches=1), ("k", "l")),
)


def scope(name: str) -> Scope:
    return next(scope for scope in (*SCOPES, *WIDE) if scope.name == name)
