"""How a command gets at a database: looking on, or owning it for a moment.

Keeps: a command that only reads takes no lock and changes nothing; one that writes goes through a
Writer like everybody else, and starts nothing else: no agent is called, no turn is recovered, no
message is delivered by it.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeVar

import trio

from ...actors.intake import WriterSettings
from ...actors.writer import open_writer
from ...storage.errors import MissingFileError
from ...storage.sqlite import open_onlooker, open_sqlite
from ..system import SystemClock

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
    from pathlib import Path

    from ...actors.writer import WriterRef
    from ...storage.engine import Engine, EngineSettings
    from ...storage.sqlite import Onlooker

T = TypeVar("T")


@contextmanager
def looking_at(path: Path, settings: EngineSettings | None = None) -> Generator[Onlooker]:
    """The read views of a file, whoever owns it."""
    onlooker = open_onlooker(path, settings)
    try:
        yield onlooker
    finally:
        onlooker.close()


@asynccontextmanager
async def owning(path: Path) -> AsyncGenerator[WriterRef]:
    """A Writer of a file that nobody else owns. Raises `DatabaseHeldError` with its owner."""
    clock = SystemClock()

    def open_engine() -> Engine:
        return open_sqlite(path, clock)

    async with open_writer(open_engine, clock, WriterSettings()) as writer:
        yield writer


def write(path: Path, work: Callable[[WriterRef], Awaitable[T]], *, create: bool = False) -> T:
    """Do something with a Writer of the file, and wait until it is durable.

    Raises `MissingFileError` unless it may be made: opening would make an empty database, in which
    there is nothing to do for most commands.
    """
    if not create and not path.exists():
        raise MissingFileError(str(path))

    async def run() -> T:
        async with owning(path) as writer:
            return await work(writer)

    return trio.run(run)
