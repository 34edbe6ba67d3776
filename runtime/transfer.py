"""Exports and imports for callers: the steps of `storage/transfer`, driven on a Writer.

Owns the hand-over between the steps and the world: what is read goes to a reader's thread, what is
written is posted and waited for, one unit at a time, so that nobody waits behind more than one
slice. Used by the runtime and by the command line; only the runtime has actors, so it says how a
key is held.

Keeps: an import holds one key at a time, and lets go of it whatever happens; two imports into one
runtime come one after the other. Cancelled, an export leaves no file, and an import leaves what is
whole, and rows that nobody sees, which the next import goes on with or takes away.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import trio

from ..actors.clearing import finish_purges
from ..actors.line import Operate
from ..actors.sources import source_of
from ..storage.edge import check_name
from ..storage.errors import OnepenError
from ..storage.identity import SessionId, SessionKey
from ..storage.sqlite.scratch import Scratch
from ..storage.transfer import (
    Exporter,
    Hold,
    ImportLimits,
    Read,
    Release,
    Selection,
    Told,
    Write,
    importing,
    open_source,
    output_to,
    written_file,
)
from ..storage.transfer.checking import Checker
from ..storage.units import Refused

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
    from contextlib import AbstractAsyncContextManager

    from ..actors.directory import Directory
    from ..actors.session import Session
    from ..actors.writer import WriterRef
    from ..storage.engine import Reader
    from ..storage.transfer import ExportReport, ImportReport
    from ..storage.transfer.files import Output

T = TypeVar("T")
Progress: TypeAlias = "Callable[[str, int, int], object]"
"""Called with a stage (`export`, `check`, `compare`, `import`), what is done, and of how much."""


class Reads(Protocol):
    """How an export gets at a snapshot."""

    def __call__(self, view: Callable[[Reader], T], /) -> Awaitable[T]: ...


class Keys(Protocol):
    """What an import asks of those who serve keys."""

    def is_live(self, key: SessionKey) -> bool: ...
    def held(self, key: SessionKey) -> AbstractAsyncContextManager[None]: ...


class NoActors:
    """Nobody serves any key: a command that owns the file."""

    def is_live(self, key: SessionKey) -> bool:
        return False

    @asynccontextmanager
    async def held(self, key: SessionKey) -> AsyncGenerator[None]:
        yield


class ActorKeys:
    """The keys of a runtime: one that is served is held by its own actor, between its turns."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def is_live(self, key: SessionKey) -> bool:
        return self._directory.has(key)

    @asynccontextmanager
    async def held(self, key: SessionKey) -> AsyncGenerator[None]:
        """Waits for the running turn; what the actor knows of the session is read again after."""
        if not self._directory.has(key):
            # Nothing is awaited before the unit is posted, and an actor that starts behind it
            # loads what it made.
            yield
            return
        ready, done = trio.Event(), trio.Event()
        failure: OnepenError | None = None
        body_error: BaseException | None = None

        async def rest(session: Session) -> None:
            ready.set()
            await done.wait()
            await session.reload()

        async def hold() -> None:
            nonlocal failure
            operation = Operate("import", rest, interrupts=False)
            try:
                await self._directory.ask(key, source_of(key), operation)
            except OnepenError as error:
                failure = error
                ready.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold)
            await ready.wait()
            if failure is None:
                try:
                    yield
                except BaseException as error:  # not to be wrapped by the nursery
                    body_error = error
                done.set()
        if body_error is not None:
            raise body_error
        if failure is not None:
            raise failure


# Export ------------------------------------------------------------------------------------------


def selection(
    session_id: str | None, lineage: str | None, key: str | None, *, everything: bool
) -> Selection:
    """What is exported, checked."""
    for field, given in (("session_id", session_id), ("lineage", lineage), ("key", key)):
        if given is not None:
            check_name(field, given)
    chosen = Selection(
        session_id=None if session_id is None else SessionId(session_id),
        lineage=None if lineage is None else SessionId(lineage),
        key=None if key is None else SessionKey(key),
        everything=everything,
    )
    chosen.check()
    return chosen


async def export(
    read: Reads,
    target: str | os.PathLike[str] | IO[bytes],
    what: Selection,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write a selection to a file, or to a binary stream; a file is there when all of it is."""
    if not isinstance(target, str | os.PathLike):
        report = await _export(read, output_to(target), what, progress)
        await trio.to_thread.run_sync(target.flush)
        return report
    async with _in_threads(written_file(target, overwrite=overwrite)) as out:
        return await _export(read, out, what, progress)


@asynccontextmanager
async def _in_threads(manager: Any) -> AsyncGenerator[Output]:
    """A context manager that blocks: its ends are waited for, a cancellation notwithstanding."""
    out: Output = await trio.to_thread.run_sync(manager.__enter__)
    try:
        yield out
        await trio.lowlevel.checkpoint_if_cancelled()
    except BaseException as error:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(manager.__exit__, type(error), error, None)
        raise
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(manager.__exit__, None, None, None)


async def _export(
    read: Reads, out: Output, what: Selection, progress: Progress | None
) -> ExportReport:
    exporter = Exporter(out, what)
    try:
        more = True
        while more:
            more = await read(exporter.step)
            if progress is not None:
                done = exporter.report.messages
                progress("export", done, max(done, exporter.rows_total))
        return exporter.report
    finally:
        exporter.close()


# Import ------------------------------------------------------------------------------------------


def check_file(path: str | os.PathLike[str], limits: ImportLimits | None = None) -> None:
    """Look through a file as an import does first of all. Blocks; raises `ImportFileError`."""
    source = open_source(path, limits or ImportLimits())
    scratch = Scratch()
    try:
        for _ in Checker(source, scratch).check():
            pass
    finally:
        source.close()
        scratch.close()


async def import_file(
    writer: WriterRef,
    path: str | os.PathLike[str],
    *,
    keys: Keys | None = None,
    dry_run: bool = False,
    limits: ImportLimits | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Import a file; everything that the report tells is durable when this returns.

    Raises `ImportFileError` and `ConflictError`, as a rule before anything is written.
    """
    keys = keys or NoActors()
    source = await trio.to_thread.run_sync(open_source, path, limits or ImportLimits())
    scratch = Scratch()
    try:
        if not dry_run:
            # What is left of a deleted session would stand in the way of its own messages.
            await finish_purges(writer)
        steps = importing(source, scratch, dry_run=dry_run, is_live=keys.is_live)
        return await _Driver(writer, keys, steps, progress).run()
    finally:
        source.close()
        scratch.close()


class _Driver:
    """Does what an import asks for."""

    def __init__(
        self,
        writer: WriterRef,
        keys: Keys,
        steps: Generator[Any, Any, ImportReport],
        progress: Progress | None,
    ) -> None:
        self._writer = writer
        self._keys = keys
        self._steps = steps
        self._progress = progress
        self._limiter = trio.CapacityLimiter(1)
        self._report: ImportReport | None = None

    def _advance(self, answer: Any) -> Any:
        try:
            return self._steps.send(answer)
        except StopIteration as stop:  # must not cross an await
            self._report = stop.value
            return None

    async def run(self) -> ImportReport:
        await self._go_on()
        assert self._report is not None
        return self._report

    async def _go_on(self) -> None:
        """Step by step, to the end or up to a release."""
        answer: Any = None
        while True:
            # Reading, parsing and comparing are work for a thread of its own.
            ask = await trio.to_thread.run_sync(self._advance, answer, limiter=self._limiter)
            answer = None
            match ask:
                case None:
                    return
                case Read():
                    answer = await self._writer.read(ask.view)
                case Write():
                    await self._write(ask)
                case Hold():
                    async with self._keys.held(ask.key):
                        await self._go_on()
                case Release():
                    return
                case Told():
                    if self._progress is not None:
                        self._progress(ask.stage, ask.done, ask.total)
                case _:
                    raise AssertionError(ask)

    async def _write(self, ask: Write) -> None:
        receipt = await self._writer.commit(ask.unit)
        if isinstance(receipt, Refused):
            raise receipt.error()
