"""What an import asks of whoever drives it, and how large its units are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..sqlite.rows import canonical
from ..units import Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from ..commands import AnyCommand
    from ..engine import Reader
    from ..identity import SessionKey
    from ..records import Message

ROWS_PER_UNIT = 200
BYTES_PER_UNIT = 256 * 1024
_ROW_BYTES = 500  # what a row costs beside its content, roughly


class Read(NamedTuple):
    """Call it with a reader; the answer is what it returns."""

    view: Callable[[Reader], Any]


class Write(NamedTuple):
    """Make it durable; a refusal ends the import."""

    unit: Unit


class Hold(NamedTuple):
    """From the answer on nobody else writes to the key."""

    key: SessionKey


class Release(NamedTuple):
    """That is over."""


class Told(NamedTuple):
    """How far it is."""

    stage: str
    done: int
    total: int


Ask: TypeAlias = Read | Write | Hold | Release | Told
Asking: TypeAlias = "Generator[Ask, Any, None]"


def write(*commands: AnyCommand) -> Write:
    """One unit. An import has no session actor, so nothing of it is guarded."""
    return Write(Unit(commands))


def slices(rows: Iterator[Message]) -> Iterator[list[Message]]:
    """As many rows at a time as one unit takes."""
    page: list[Message] = []
    size = 0
    for message in rows:
        more = _ROW_BYTES + (len(message.text or "") if message.plain else len(canonical(message)))
        if page and (len(page) >= ROWS_PER_UNIT or size + more > BYTES_PER_UNIT):
            yield page
            page, size = [], 0
        page.append(message)
        size += more
    if page:
        yield page
