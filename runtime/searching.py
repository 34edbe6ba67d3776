"""A search as its callers see it: checked at the edge, filled page by page.

A reader looks at a bounded piece of the file and may come back with little or nothing. Here such
pages are put together, each read in a snapshot of its own, until there is enough or until it is
time to let the caller decide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, get_args

from msgspec.structs import replace

from ..storage.commands import RebuildSearch
from ..storage.edge import check_count, check_integer, check_name
from ..storage.errors import InvalidContentError, StaleError
from ..storage.records import Hits, Role, Search
from ..storage.units import Unit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..actors.writer import WriterRef
    from ..storage.engine import Reader
    from ..storage.identity import Clock

LIMIT_MAX = 1_000
_AROUND_MAX = 50
_READS_MAX = 40  # pieces of the file that one call looks at
_TEXT_LENGTH_MAX = 100_000


def check_search(search: Search) -> None:
    """Raise unless it can be looked for. Any text is a query; only its size is bounded."""
    if not isinstance(cast("Any", search.text), str):
        raise InvalidContentError("text", "it is not text", hint="give the words to look for")
    if len(search.text) > _TEXT_LENGTH_MAX:
        problem = f"{len(search.text)} characters are too many for a query"
        raise InvalidContentError("text", problem, hint="give the words to look for")
    for field in ("session_id", "key", "source", "user"):
        value = getattr(search, field)
        if value is not None:
            check_name(field, value)
    for field in ("since_ms", "until_ms"):
        value = getattr(search, field)
        if value is not None:
            check_integer(field, value)
    for field, allowed in (("order", ("rank", "newest")), ("role", (None, *get_args(Role)))):
        if getattr(search, field) not in allowed:
            names = ", ".join(str(name) for name in allowed if name)
            raise InvalidContentError(field, "it is not known", hint=f"one of {names}")
    check_count("limit", search.limit)
    if search.limit > LIMIT_MAX:
        raise InvalidContentError("limit", f"{search.limit} is too many", hint="page with `after`")
    check_integer("around", search.around)
    if not 0 <= search.around <= _AROUND_MAX:
        hint = f"from 0 to {_AROUND_MAX}"
        raise InvalidContentError("around", f"{search.around} is out of range", hint=hint)
    _check_cursor(search.after)
    marks = cast("Any", search.marks)
    if not isinstance(marks, tuple | list) or [type(mark) for mark in cast("Any", marks)] != [
        str,
        str,
    ]:
        raise InvalidContentError("marks", "they are not two texts", hint='like ("[", "]")')


def _check_cursor(after: Any) -> None:
    if after is None:
        return
    parts = cast("tuple[Any, ...]", after) if isinstance(after, tuple | list) else ()
    if len(parts) != 3 or any(type(part) is not int or not 0 <= part < 2**63 for part in parts):
        problem = "it is no place in a search"
        raise InvalidContentError("after", problem, hint="give a page's `next`")


async def find_page(
    read: Callable[[Callable[[Reader], Hits]], Awaitable[Hits]], search: Search
) -> Hits:
    """One page for the caller, from as many pieces as it takes."""
    page = await read(_search_by(search))
    for _ in range(_READS_MAX - 1):
        missing = search.limit - len(page.hits)
        if page.next is None or missing <= 0:
            break
        more = await read(_search_by(replace(search, after=page.next, limit=missing)))
        page = replace(more, hits=(*page.hits, *more.hits))
    return page


def _search_by(search: Search) -> Callable[[Reader], Hits]:
    return lambda reader: reader.search(search)


async def rebuild_search(writer: WriterRef, clock: Clock) -> None:
    """Ask for a new index; if somebody else does at this moment, theirs is as new."""
    replaces = await writer.read(lambda reader: reader.search_rebuilds())
    try:
        await writer.write(Unit((RebuildSearch(replaces=replaces, at_ms=clock.now()),)))
    except StaleError:
        return
