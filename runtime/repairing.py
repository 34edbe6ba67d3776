"""The repair of a database that nobody has open: what was found, mended step by step.

    1  keep a copy            5  reopen parents whose rotation left no child, move routes to the tip
    2  bring it forward       6  make the search index again, to its end
    3  look at everything     7  look at everything again
    4  mend indices; recount sessions from their rows

Keeps: nothing is changed before the copy is kept, and nothing at all where nothing is wrong; what
stands in tables is changed by commands through a Writer, like by anybody else. Each step can be
repeated: a repair that was killed is done again by the next one. What can't be mended is left as it
is, and told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ..actors.intake import WriterSettings
from ..actors.writer import open_writer
from ..storage.commands import RecountSession, ReopenSession, SetRoute
from ..storage.errors import OlderSchemaError, OnepenError
from ..storage.identity import SessionId, SessionKey
from ..storage.sqlite import check_all, keep_copy, mend_structure, open_sqlite
from ..storage.sqlite.checks import CHILDREN, RECOUNTED, ROUTES
from ..storage.units import Unit
from ..storage.upkeep import Repaired
from .searching import rebuild_search

if TYPE_CHECKING:
    from pathlib import Path

    from ..actors.writer import WriterRef
    from ..storage.engine import Engine
    from ..storage.identity import Clock
    from ..storage.upkeep import Finding, Tick


def repair(path: Path, clock: Clock, tick: Tick) -> Repaired:
    """Mend what can be mended. Blocks; raises `DatabaseHeldError` and what opening raises."""
    kept: str | None = None
    done: list[str] = []
    try:
        found = check_all(path, tick)
    except OlderSchemaError as error:
        kept = keep_copy(path, clock, tick)
        open_sqlite(path, clock).close()
        done.append(f"the schema was brought forward from version {error.stored}")
        found = check_all(path, tick)
    if any(one.repairable for one in found):
        kept = kept or keep_copy(path, clock, tick)
        done += _mend(path, clock, found, tick)
        found = check_all(path, tick)
    return Repaired(kept=kept, done=tuple(done), left=tuple(found))


def _mend(path: Path, clock: Clock, found: list[Finding], tick: Tick) -> list[str]:
    done = mend_structure(path, clock, found)
    if any(one.kind == "structure" and not one.repairable for one in found):
        return done  # on pages that can't be read nothing can be built
    if done:
        # What was hidden behind it: a table without its index was not looked at any further.
        found = check_all(path, tick)

    def open_engine() -> Engine:
        return open_sqlite(path, clock)

    async def by_commands() -> None:
        async with open_writer(open_engine, clock, WriterSettings()) as writer:
            done.extend(await _mend_rows(writer, clock, found, tick))
            if any(one.kind == "search index" for one in found):
                await rebuild_search(writer, clock)

    trio.run(by_commands)
    if any(one.kind == "search index" for one in found):
        _finish_index(open_engine(), tick)
        done.append("the search index was made again")
    return done


async def _mend_rows(
    writer: WriterRef, clock: Clock, found: list[Finding], tick: Tick
) -> list[str]:
    mended = [one for one in found if one.repairable]
    recounted = dict.fromkeys(one.where for one in mended if one.kind in RECOUNTED)
    reopened = dict.fromkeys(one.where for one in mended if one.kind == CHILDREN)
    routes = dict.fromkeys(one.where for one in mended if one.kind == ROUTES)
    total = len(recounted) + len(reopened) + len(routes)
    done: list[str] = []
    steps = (
        *((_recount, one) for one in recounted),
        *((_reopen, one) for one in reopened),
        *((_to_the_tip, one) for one in routes),
    )
    for number, (step, name) in enumerate(steps):
        tick("mending", number, total)
        try:
            done += await step(writer, clock, name)
        except OnepenError as error:
            done.append(f"{name} could not be mended: {error.message}")
    return done


async def _recount(writer: WriterRef, clock: Clock, name: str) -> list[str]:
    session_id = SessionId(name)
    revision = await writer.read(lambda reader: reader.revision(session_id))
    command = RecountSession(session_id=session_id, replaces=revision, at_ms=clock.now())
    await writer.write(Unit((command,)))
    return [f"session {name} was counted again"]


async def _reopen(writer: WriterRef, clock: Clock, name: str) -> list[str]:
    """A parent that ended by compression and has no child is open again: contract G4."""
    session = await writer.read(lambda reader: reader.session(SessionId(name)))
    if session is None or session.end_kind != "rotation":
        return []
    command = ReopenSession(session_id=session.id, replaces=session.end_version, at_ms=clock.now())
    await writer.write(Unit((command,)))
    return [f"session {name} was reopened"]


async def _to_the_tip(writer: WriterRef, clock: Clock, name: str) -> list[str]:
    key = SessionKey(name)
    route = await writer.read(lambda reader: reader.route(key))
    if route is None or route.session_id is None:
        return []
    current = route.session_id
    tip = await writer.read(lambda reader: reader.tip(current))
    if tip is None or tip.id == current:
        return []  # it has been reopened just now
    command = SetRoute(key=key, session_id=tip.id, replaces=route.route_version, at_ms=clock.now())
    await writer.write(Unit((command,)))
    return [f"{name} goes on with session {tip.id}"]


def _finish_index(engine: Engine, tick: Tick) -> None:
    """Slice by slice, as a runtime that has nothing else to do."""
    try:
        while engine.maintain(idle=True):
            left = engine.statistics()
            tick("indexing", 0, left.search_older + left.search_tail)
    finally:
        engine.close()
