"""Onepen's Writer on its SQLite engine, used as an application would use it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trio
from msgspec.structs import replace

from onepen.actors.writer import open_writer
from onepen.runtime.system import SystemClock, SystemIds
from onepen.storage.commands import AppendMessages, CreateSession, OpenIncarnation, SetRoute
from onepen.storage.engine import EngineSettings
from onepen.storage.identity import Incarnation, Seq, SessionId, SessionKey, Uid
from onepen.storage.records import Draft
from onepen.storage.sqlite import open_sqlite
from onepen.storage.units import Guard, Unit

from .meter import TEXTS, Meter, message_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from onepen.actors.writer import WriterRef
    from onepen.storage.engine import Reader

    from .cells import Cell, Outcome


def key_of(number: int) -> SessionKey:
    return SessionKey(f"k{number}")


def session_id_of(number: int) -> SessionId:
    return SessionId(f"s{number}")


def _look(reader: Reader, number: int) -> tuple[int, int | None]:
    """The key's incarnation, and its session's next seq if there is one."""
    route, session = reader.route(key_of(number)), reader.session(session_id_of(number))
    incarnation = 0 if route is None else route.incarnation
    return incarnation, None if session is None else session.next_seq


async def _prepare(
    writer: WriterRef, number: int, found: int, next_seq: int | None
) -> tuple[Guard, int]:
    """Take the key over, make its session unless it is there; the guard of its units and its next
    seq.
    """
    key, session_id = key_of(number), session_id_of(number)
    incarnation = Incarnation(found + 1)
    guard = Guard(key=key, incarnation=incarnation, session_id=session_id)
    await writer.write(Unit((OpenIncarnation(key=key, incarnation=incarnation),)))
    if next_seq is None:
        route = SetRoute(key=key, session_id=session_id, replaces=0, at_ms=0)
        create = CreateSession(session_id=session_id, key=key, at_ms=0)
        await writer.write(Unit((route, create), (guard,)))
    return guard, next_seq or 0


def _appender(writer: WriterRef, guard: Guard, next_seq: int) -> Callable[[], Awaitable[object]]:
    """Appends the next message of one session, built as a session actor would build it."""
    fresh = SystemIds().fresh
    guards = (guard,)
    session_id = guard.session_id
    assert session_id is not None
    seq = next_seq

    async def append() -> None:
        nonlocal seq
        text = TEXTS[seq % len(TEXTS)]
        draft = Draft(uid=Uid(fresh()), role="user", text=text, created_ms=seq)
        command = AppendMessages(session_id=session_id, base_seq=Seq(seq), messages=(draft,))
        await writer.write(Unit((command,), guards))
        seq += 1

    return append


async def run_writer(cell: Cell) -> Outcome:
    path = cell.database or os.path.join(cell.folder, "writer.db")
    clock = SystemClock()
    settings = EngineSettings(synchronous=cell.condition.synchronous)
    async with open_writer(lambda: open_sqlite(path, clock, settings), clock) as writer:
        appenders: list[Callable[[], Awaitable[object]]] = []
        numbers = range(cell.condition.producers)
        found = await writer.read(lambda reader: [_look(reader, number) for number in numbers])

        async def prepare(number: int) -> None:
            appenders.append(_appender(writer, *await _prepare(writer, number, *found[number])))

        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(prepare, number)
        meter = Meter(cell)
        async with trio.open_nursery() as nursery:
            for append in appenders:
                nursery.start_soon(meter.produce, append)
        result = meter.outcome(None)
        traffic = writer.statistics().traffic
    note = f"{traffic.batch_units_mean:.1f} units a batch"
    if cell.database is not None:
        return replace(result, note=note)
    return replace(result, note=note, bytes_per_message=message_bytes(path))
