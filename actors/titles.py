"""Titles: given to a row at once, or kept with the key until there is one (contract E).

Keeps: a title's form is checked when it is given, its uniqueness when it is applied; a pending
title reserves nothing. Applying it and clearing it are one unit, so it is never both. A title given
by a person beats an automatic one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..storage.commands import SetPendingTitle, SetTitle
from ..storage.edge import check_title, clean_title
from ..storage.errors import InvalidContentError, MissingError
from ..storage.units import Refused

if TYPE_CHECKING:
    from ..storage.records import Session as SessionRow
    from ..storage.records import TitleOrigin
    from .scribe import Scribe


async def give_title(scribe: Scribe, title: str, origin: TitleOrigin) -> bool:
    """Set it, or keep it for the row that is to come. A person's title beats an automatic one."""
    if not isinstance(title, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidContentError("title", "it is not text", hint="give a string")
    cleaned = clean_title(title)
    if len(title.strip()) > 100 or not cleaned:
        check_title(title.strip() or title)
    title = cleaned
    check_title(title)
    page, route = scribe.page, scribe.route
    if not page.stored or page.end_kind == "boundary":
        if origin == "automatic" and route.pending_title_origin == "person":
            return False
        await _set_pending(scribe, title, origin)
        return True
    row = await scribe.read(lambda reader: reader.session(page.session_id))
    if row is None:
        raise MissingError(f"session {page.session_id}")
    if origin == "automatic" and row.title_origin == "person":
        return False
    unit: tuple[Any, ...] = ()
    if (row.title, row.title_origin) != (title, origin):
        unit = (_title_command(scribe, row, title, origin),)
    # A title that still waits is older than this one, unless a person's waits behind an automatic.
    outdated = route.pending_title is not None and (
        origin == "person" or route.pending_title_origin == "automatic"
    )
    if outdated:
        unit = (*unit, _pending_command(scribe, None))
    if unit:
        await scribe.commit(unit)
    if outdated:
        scribe.pended(None, None)
    return True


def _title_command(scribe: Scribe, row: SessionRow, title: str, origin: TitleOrigin) -> SetTitle:
    return SetTitle(
        session_id=row.id,
        title=title,
        origin=origin,
        replaces=row.title_version,
        at_ms=scribe.now(),
    )


def _pending_command(
    scribe: Scribe, title: str | None, origin: TitleOrigin = "person"
) -> SetPendingTitle:
    return SetPendingTitle(
        key=scribe.key,
        title=title,
        origin=origin,
        replaces=scribe.route.pending_title_version,
        at_ms=scribe.now(),
    )


async def _set_pending(scribe: Scribe, title: str | None, origin: TitleOrigin) -> None:
    await scribe.commit((_pending_command(scribe, title, origin),))
    scribe.pended(title, origin)


async def apply_pending_title(scribe: Scribe) -> None:
    """After a turn: give the row the title that waits for it (contract E1 to E3)."""
    title, origin = scribe.route.pending_title, scribe.route.pending_title_origin
    page = scribe.page
    if title is None or not page.stored or page.end_kind is not None:
        return
    row = await scribe.read(lambda reader: reader.session(page.session_id))
    if row is None or (row.title_origin == "person" and origin != "automatic"):
        return  # it waits for another session of the key: this one was named by a person
    drop = _pending_command(scribe, None)
    # In one unit: a title that is applied is no longer pending, at any crash point.
    unit: tuple[Any, ...] = (_title_command(scribe, row, title, origin or "person"), drop)
    if row.title_origin == "person" and origin == "automatic":
        unit = (drop,)
    await scribe.room()
    receipt = await scribe.receipt_of(scribe.note(unit))
    if isinstance(receipt, Refused) and receipt.reason in ("title_taken", "invalid", "stale"):
        await scribe.commit((drop,))
    elif isinstance(receipt, Refused):
        raise receipt.error()
    scribe.pended(None, None)
