"""Small agents for the contract tests, and ways to look at what is stored.

Nothing here stands in for storage. `Commits` and `Trouble` wrap the real engine's own steps: they
watch it, hold it, or make it fail, and then let it go on.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw
import trio

from onepen import Message, MissingError, Runtime, Session, ToolCall, Turn
from onepen.runtime.testing.invariants import inspecting
from onepen.storage.sqlite.engine import SqliteEngine
from onepen.testing import check_database

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    import pytest

ROOT = Path(__file__).resolve().parents[2]
KEY = "test:dm:1"
LONG = "something that was said at length " * 20


# Agents --------------------------------------------------------------------------------------


async def echo(turn: Turn) -> str:
    """Answers with what it heard."""
    return f"re: {turn.text}"


class Switchboard:
    """An agent whose behaviour is chosen for each turn; an echo unless a test says otherwise."""

    def __init__(self) -> None:
        self.next: Any = echo
        self.seen: list[tuple[Message, ...]] = []

    async def run(self, turn: Turn) -> Any:
        self.seen.append(turn.history)
        behaviour, self.next = self.next, echo
        return await behaviour(turn)


def call(*ids: str) -> dict[str, Any]:
    """An assistant message that calls tools, as a chat completion has it."""
    calls = [{"id": one, "function": {"name": "look", "arguments": "{}"}} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id: str, text: str = "found") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def plain(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Messages as an agent that knows no uids would repeat them."""
    given: list[dict[str, Any]] = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.tool_calls:
            one["tool_calls"] = [
                {"id": c.id, "function": {"name": c.name, "arguments": c.arguments}}
                for c in message.tool_calls
            ]
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
        given.append(one)
    return given


# Looking -------------------------------------------------------------------------------------


async def current(runtime: Runtime, key: str = KEY) -> str:
    session_id = await runtime.sessions.current(key)
    assert session_id is not None
    return session_id


async def row(runtime: Runtime, session_id: str) -> Session:
    found = await runtime.sessions.get(session_id)
    if found is None:
        raise MissingError(f"session {session_id}")
    return found


async def stored(
    runtime: Runtime, key: str = KEY, *, include_inactive: bool = False
) -> tuple[Message, ...]:
    """The transcript of the key's current session."""
    session_id = await current(runtime, key)
    return await runtime.sessions.transcript(session_id, include_inactive=include_inactive)


async def texts(runtime: Runtime, key: str = KEY) -> list[str | None]:
    return [message.text for message in await stored(runtime, key)]


async def texts_of(runtime: Runtime, session_id: str) -> list[str | None]:
    return [message.text for message in await runtime.sessions.transcript(session_id)]


def shape(messages: Sequence[Message]) -> list[str]:
    """A transcript in short: who spoke, with calls and results by their ids."""
    return [_shape_of(message) for message in messages]


def _shape_of(message: Message) -> str:
    if message.tool_calls:
        return "call " + " ".join(one.id for one in message.tool_calls)
    if message.role == "tool":
        return f"result {message.tool_call_id}"
    return f"{message.role} {message.text}"


def problems(messages: Iterable[Message]) -> list[str]:
    """Why a model would refuse this transcript; empty if it would not. Written from the outside."""
    found: list[str] = []
    waiting: dict[str, ToolCall] = {}
    for message in messages:
        if message.role == "tool":
            if waiting.pop(message.tool_call_id or "", None) is None:
                found.append(f"seq {message.seq}: a result of no call: {message.tool_call_id}")
            continue
        if waiting:
            found.append(f"seq {message.seq}: {', '.join(waiting)} had no result")
            waiting.clear()
        waiting = {one.id: one for one in message.tool_calls}
    if waiting:
        found.append(f"the end: {', '.join(waiting)} had no result")
    return found


def sound(path: Path) -> None:
    """The file keeps every invariant."""
    assert [str(violation) for violation in check_database(path)] == []


def query(path: Path, sql: str, *arguments: Any) -> list[tuple[Any, ...]]:
    """What another connection sees, read-only and through the same SQLite."""
    with inspecting(path) as db:
        return list(db.execute(sql, arguments).fetchall())


def snapshot(path: Path, to: Path) -> Path:
    """What the file holds just now, as a crash in this moment would leave it."""
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        db.execute("VACUUM INTO ?", (str(to),))
    finally:
        db.close()
    return to


# The engine's steps --------------------------------------------------------------------------


class Commits:
    """The real engine's commits: they can be watched, held and let go, from the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.after: Callable[[], None] | None = None
        self._held: threading.Event | None = None
        self._reached = threading.Event()
        original = SqliteEngine.commit

        def commit(engine: SqliteEngine) -> None:
            held = self._held
            if held is not None:
                self._reached.set()
                assert held.wait(30)
            original(engine)
            if self.after is not None:
                self.after()

        monkeypatch.setattr(SqliteEngine, "commit", commit)

    @contextmanager
    def holding(self) -> Generator[None]:
        """From here on nothing becomes durable, until the block ends."""
        self._reached.clear()
        self._held = held = threading.Event()
        try:
            yield
        finally:
            self._held = None
            held.set()

    async def wait_reached(self) -> None:
        """Until a batch stands before its commit."""
        await trio.to_thread.run_sync(self._reached.wait)


class Trouble:
    """One step of the real engine fails, once, before or after it was done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
        self.error: BaseException | None = None
        self.after = False
        self.failed = 0
        original: Callable[..., Any] = getattr(SqliteEngine, step)

        def trouble(engine: SqliteEngine, *arguments: Any) -> Any:
            error, self.error = self.error, None
            done = original(engine, *arguments) if error is None or self.after else None
            if error is not None:
                self.failed += 1
                raise error
            return done

        monkeypatch.setattr(SqliteEngine, step, trouble)


# Another process -----------------------------------------------------------------------------


async def in_another_process(*arguments: str) -> tuple[int, list[str]]:
    """Run `killed.py`; its exit code (negative for a signal), and what it had said until then."""
    command = [sys.executable, "-m", "tests.contract.killed", *arguments]
    done = await trio.run_process(command, cwd=ROOT, capture_stdout=True, check=False)
    return done.returncode, done.stdout.decode().splitlines()
