"""How the public API looks to a type checker. Checked by mypy and basedpyright, never run."""

from typing import assert_type

from onepen import (
    Durable,
    Receipt,
    SystemClock,
    Ticket,
    Unit,
    WriterRef,
    open_sqlite,
    open_writer,
)
from onepen.storage.identity import SessionId
from onepen.storage.records import Message, Session


async def writer_api(unit: Unit, session_id: SessionId) -> None:
    clock = SystemClock()
    async with open_writer(lambda: open_sqlite("chat.db", clock), clock) as writer:
        assert_type(writer, WriterRef)
        assert_type(writer.post(unit), Ticket)
        assert_type(await writer.post(unit).wait(), Receipt)
        assert_type(await writer.write(unit), Durable)
        assert_type(await writer.read(lambda reader: reader.session(session_id)), Session | None)
        page = await writer.read(lambda reader: reader.transcript(session_id))
        assert_type(page.messages, tuple[Message, ...])
