"""What upkeep tells: how far it is, what it has copied, what it has found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from msgspec import Struct

Tick: TypeAlias = Callable[[str, int, int], None]
"""Called between the steps of something long: what is being done, and how much of how much. It may
take its time, and it may raise in order to stop."""


def unhurried(stage: str, done: int, total: int) -> None:
    """A tick for whoever does not look."""


class Copied(Struct, frozen=True, kw_only=True):
    """A copy of a database that was made and looked through."""

    path: str
    size_bytes: int
    commit_seq: int
    """As of which commit."""
    sessions: int
    messages: int
    verified: bool
    warnings: tuple[str, ...] = ()
    """What is not as it should be, in the original as in the copy, and loses nothing."""


class Restored(Struct, frozen=True, kw_only=True):
    """A database that was put in the place of another."""

    copied: Copied
    kept: str | None
    """Where the one before is; `None` if there was none."""
    held: int
    """Open deliveries that are not sent again by themselves."""


Severity: TypeAlias = Literal["error", "warning"]


class Finding(Struct, frozen=True, kw_only=True):
    """Something that is not as it should be."""

    kind: str
    severity: Severity
    where: str
    what: str
    advice: str
    repairable: bool


class Repaired(Struct, frozen=True, kw_only=True):
    """What a repair has done, and what it left."""

    kept: str | None
    """Where the database is as it was before; `None` if there was nothing to do."""
    done: tuple[str, ...]
    left: tuple[Finding, ...]
