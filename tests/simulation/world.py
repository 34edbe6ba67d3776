"""A whole runtime under simulation: programs as data, a disk that remembers, and what must hold.

A program is a few lanes that run beside each other; each lane is a list of steps on a few keys. The
runtime is the real one, on a real file, with its Writer as a task: what varies is the schedule. The
world keeps account of what it was told (`Account`) and holds that against the file afterwards.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import trio
from hypothesis import strategies as st

from onepen import Draft, Guard, Inbound, OnepenError, Settings, SourcePolicy, Unit
from onepen.actors.exchanges import open_calls
from onepen.actors.line import SessionCrashedError
from onepen.actors.page import load_messages
from onepen.actors.warm import AgentSource
from onepen.runtime.opening import assemble
from onepen.storage.commands import AppendMessages
from onepen.storage.engine import EngineSettings
from onepen.storage.errors import InvariantError
from onepen.storage.identity import SessionId, SessionKey, TurnId, Uid
from onepen.storage.sqlite import open_sqlite
from onepen.testing import Disk, check_database

from ..actors.fixtures import StillClock

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from onepen import Reply, Submission
    from onepen.actors.directory import Directory
    from onepen.runtime.runtime import Runtime

DATABASE = "world.db"
KEYS = ("one:a", "two:b")
BESIDE = 5  # messages while a rotation is under way
SETTINGS = Settings(engine=EngineSettings(free_bytes_min=0))


def directory_of(runtime: Runtime) -> Directory:
    return runtime._directory  # pyright: ignore[reportPrivateUsage]


class CountedIds:
    """Ids in the order in which they are asked for."""

    def __init__(self, start: int) -> None:
        self._count = start << 20

    def fresh(self) -> str:
        self._count += 1
        return f"{self._count:032x}"


class Step(NamedTuple):
    """One thing that a lane does."""

    name: str
    key: str = KEYS[0]
    kind: str = "plain"


class Account:
    """What the world outside was told."""

    def __init__(self) -> None:
        self.accepted: dict[str, TurnId] = {}
        self.answered: dict[TurnId, str] = {}
        self.told: Callable[[str, object], None] = lambda label, payload: None

    def accept(self, text: str, turn_id: TurnId) -> None:
        self.accepted[text] = turn_id
        self.told("accepted", text)

    def answer(self, turn_id: TurnId, text: str) -> None:
        self.answered[turn_id] = text
        self.told("answered", (turn_id, text))


class PlantedCrash(Exception):
    """A crash that the program asked for."""


async def agent(turn: Any) -> str | None:
    """Does what the message's first word says."""
    kind, _, name = turn.text.partition(" ")
    if kind == "tools":
        call = {"id": f"call {name}", "name": "look", "arguments": "{}"}
        await turn.append({"role": "assistant", "tool_calls": [call]})
        await trio.lowlevel.checkpoint()
        await turn.append({"role": "tool", "tool_call_id": call["id"], "content": "found"})
    elif kind == "open":
        call = {"id": f"call {name}", "name": "look", "arguments": "{}"}
        await turn.append({"role": "assistant", "tool_calls": [call]})
        await trio.lowlevel.checkpoint()
    elif kind == "rotate":
        await turn.rotate(summarise, force=True)
        await turn.append({"role": "assistant", "content": f"behind the rotation {name}"})
    elif kind == "compact":
        await turn.compact(summarise, force=True)
    elif kind == "beside":
        async with trio.open_nursery() as nursery:
            rotation = partial(turn.rotate, summarise, force=True)
            nursery.start_soon(rotation)
            for number in range(BESIDE):
                await turn.append(f"beside {number} of {name}")
                await trio.lowlevel.checkpoint()
    elif kind == "stream":
        async with turn.streaming() as out:
            await out.write("piece ")
            await out.write(name)
    elif kind == "many":
        for number in range(4):
            await turn.append(f"part {number} of {name}")
            await trio.lowlevel.checkpoint()
    elif kind == "gates":
        for _ in range(3):
            await turn.steering()
            await trio.lowlevel.checkpoint()
    elif kind == "slow":
        await trio.sleep(30)
    elif kind == "fail":
        raise ValueError(name)
    return f"answer to {turn.text}"


async def summarise(history: Sequence[object]) -> str:
    await trio.lowlevel.checkpoint()
    return f"summary of {len(history)}"


KINDS = (
    "plain",
    "gates",
    "many",
    "tools",
    "open",
    "rotate",
    "compact",
    "beside",
    "stream",
    "slow",
    "fail",
)
BUSY = ("queueing", "collect", "steer", "interrupting", "latest", "reject")
OPERATIONS = (
    "rotate",
    "compact",
    "reset",
    "branch",
    "rewind",
    "restore",
    "close",
    "reopen",
    "title",
    "switch back",
    "take over",
)


class World:
    """One runtime on one file, and the lanes of one program."""

    agent: Any = staticmethod(agent)

    def __init__(self, directory: Path, account: Account, vfs: str | None = None) -> None:
        self.directory = directory
        self.account = account
        self.vfs = vfs
        self.start = 1
        self.crash_writer_at: str | None = None
        self.foreign: set[str] = set()
        self.reloads = 0
        self.refused: list[OnepenError] = []
        self.submissions: list[Submission] = []
        self.replies: list[tuple[Submission, Reply]] = []
        self.runtime: Runtime
        self._texts = 0
        self._first: dict[str, SessionId] = {}

    def engine(self) -> Any:
        return open_sqlite(self.directory / DATABASE, StillClock(), SETTINGS.engine, vfs=self.vfs)

    def _at(self, point: str) -> None:
        if self.crash_writer_at == point:
            self.crash_writer_at = None
            raise PlantedCrash(point)

    async def run(self, program: Sequence[Sequence[Step]]) -> None:
        """The whole life of a runtime: open, all lanes, shutdown."""
        ids = CountedIds(self.start)
        self.start += 1
        async with assemble(
            self.engine,
            StillClock(),
            ids,
            SETTINGS,
            AgentSource(self.agent),
            sources=self.sources(),
            inline=True,
            at=self._at,
        ) as runtime:
            self.runtime = runtime
            async with trio.open_nursery() as nursery:
                for number, lane in enumerate(program):
                    nursery.start_soon(self._lane, number, lane, name=f"lane {number}")
            await self.end()
            for number, key in enumerate(sorted(self.foreign), len(program)):
                # An actor finds out by its next turn.
                await self._lane(number, [Step("ask", SessionKey(key))])
            counters = runtime.statistics().counters
            self.reloads += counters["reloads"]
            planted = any(step.name.startswith("crash") for lane in program for step in lane)
            assert planted or not counters["crashes"], "an actor crashed by itself"
            assert not runtime.statistics().writer.traffic.receipts_failed, "a taker raised"
            for session in list(directory_of(runtime).sessions()):
                if session.idle:  # the others are still about to change
                    await compare_memory(session)

    def sources(self) -> dict[str, SourcePolicy]:
        """How messages are taken and answered."""
        return {}

    def message(self, key: str, text: str) -> str | Inbound:
        """What a lane says."""
        return text

    async def end(self) -> None:
        """INV-15: whatever was submitted ends, in whatever way."""
        for submission in self.submissions:
            try:
                self.replies.append((submission, await submission.reply()))
            except OnepenError as error:
                self.refused.append(error)

    async def _lane(self, number: int, lane: Sequence[Step]) -> None:
        for place, step in enumerate(lane):
            try:
                await self._take(step, f"{self.start}.{number}.{place}")
            except (InvariantError, AssertionError):
                raise
            except SessionCrashedError:
                pass  # only a program with a planted crash sees one: `lanes_with_crashes`
            except OnepenError as error:
                self.refused.append(error)  # with a type: nothing was done

    async def _take(self, step: Step, name: str) -> None:
        runtime, key = self.runtime, step.key
        text = f"{step.kind} {name}"
        match step.name:
            case "ask":
                submission = await runtime.submit(key, self.message(key, text))
                self.account.accept(text, submission.turn_id)
                reply = await submission.reply()
                if reply.outcome.kind == "answered":
                    self.account.answer(submission.turn_id, reply.text)
            case "submit":
                submission = await runtime.submit(key, self.message(key, text))
                self.account.accept(text, submission.turn_id)
            case "cancelled ask":
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(runtime.ask, key, text)
                        await trio.lowlevel.checkpoint()
                        scope.cancel()
            case "queueing" | "collect" | "steer" | "interrupting" | "latest" | "reject":
                busy: Any = {"interrupting": "interrupt", "queueing": "queue"}.get(
                    step.name, step.name
                )
                submission = await runtime.submit(key, self.message(key, text), busy=busy)
                self.submissions.append(submission)
                if submission.disposition != "rejected":
                    self.account.accept(text, submission.turn_id)
            case "repeat":
                inbound = Inbound(f"{step.kind} hook", id="hook")
                submission = await runtime.submit(key, inbound)
                self.submissions.append(submission)
                self.account.accepted[f"{step.kind} hook"] = submission.turn_id
            case "take back":
                if self.submissions:
                    self.submissions[-1].interrupt()
            case "interrupt":
                runtime.interrupt(key)
            case "evict":
                directory_of(runtime).evict_idle()
            case "crash session":
                for session in list(directory_of(runtime).sessions()):
                    if session.line.key == key:
                        session.spawn(_raise)
            case "crash writer":
                self.crash_writer_at = step.kind
            case "shutdown":
                await runtime.shutdown()
            case _:
                await self._operate(step, name)

    async def _operate(self, step: Step, name: str) -> None:
        runtime, key = self.runtime, step.key
        match step.name:
            case "open named":
                await runtime.open_session(key, f"named-{key.partition(':')[0]}")
            case "resume first":
                await runtime.resume(key, self._first.get(key) or f"{self.start << 20:032x}"[:28])
            case "foreign":
                await self._write_behind(key, name)
            case "rotate":
                await runtime.rotate(key, summarise, force=True)
            case "compact":
                await runtime.compact(key, summarise, force=True)
            case "reset":
                await runtime.reset(key)
            case "branch":
                await runtime.branch(key)
            case "rewind":
                await runtime.rewind(key)
            case "restore":
                await runtime.restore(key)
            case "close":
                await runtime.close_session(key)
            case "reopen":
                await runtime.reopen(key)
            case "title":
                await runtime.set_title(key, f"title {name}")
            case "switch back":
                if key not in self._first:
                    current = await runtime.sessions.current(key)
                    if current is not None:
                        self._first[key] = current
                    await runtime.switch(key, f"other-{key.partition(':')[0]}")
                else:
                    await runtime.switch(key, self._first.pop(key))
            case "take over":
                other = KEYS[1 - KEYS.index(key)]
                current = await runtime.sessions.current(other)
                if current is not None:
                    await runtime.switch(key, current, take_over=True)
            case _:
                raise AssertionError(f"no such step: {step.name}")

    async def _write_behind(self, key: str, name: str) -> None:
        """A row that is not the actor's: another process would write so."""
        writer = self.runtime.sessions._writer  # pyright: ignore[reportPrivateUsage]
        self.foreign.add(key)

        def look(reader: Any) -> Any:
            route = reader.route(SessionKey(key))
            found = None if route is None or route.session_id is None else route.session_id
            return route, None if found is None else reader.session(found)

        route, row = await writer.read(look)
        if row is None:
            return
        uid = Uid(name.encode().hex().zfill(32))
        draft = Draft(uid=uid, role="system", text=f"foreign {name}", created_ms=1)
        append = AppendMessages(session_id=row.id, base_seq=row.next_seq, messages=(draft,))
        guard = Guard(
            key=SessionKey(key),
            incarnation=route.incarnation,
            session_id=row.id,
            base_seq=row.next_seq,
        )
        await writer.write(Unit((append,), (guard,)))


async def _raise() -> None:
    raise PlantedCrash("session")


async def compare_memory(session: Any) -> None:
    """INV-10: once everything is resolved, what an actor remembers is what is stored."""
    await session.scribe.wait_settled()
    page, route = session.scribe.page, session.scribe.route
    if not page.stored:
        return

    def look(reader: Any) -> tuple[Any, Any, Any]:
        messages = load_messages(reader, page.session_id, 100)
        return reader.route(session.line.key), reader.session(page.session_id), messages

    stored_route, row, messages = await session.scribe.writer.read(look)
    assert page.messages == messages, "an actor remembers other messages than are stored"
    assert (page.next_seq, page.revision) == (row.next_seq, row.revision)
    assert (page.end_kind, page.end_version) == (row.end_kind, row.end_version)
    assert route == stored_route, f"an actor remembers {route}, stored is {stored_route}"
    assert session.binding.session_id == page.session_id == stored_route.session_id


# What must hold of the file --------------------------------------------------------------------


def check_world(
    directory: Path, accepted: dict[str, TurnId], answered: dict[TurnId, str], *, ended: bool
) -> None:
    """Everything that was told is true, once; every transcript is valid; every key has one session.

    `ended`: the runtime was shut down in peace, so no turn is left running.
    """
    path = directory / DATABASE
    engine = open_sqlite(path, StillClock(), SETTINGS.engine)  # what recovery makes of it
    try:
        with engine.reading() as reader:
            users, answers = Counter[str](), Counter[tuple[str, str]]()
            for listed in _all_sessions(reader):
                found = reader.transcript(listed, include_inactive=True, limit=10_000)
                for message in found.messages:
                    if message.carried:
                        continue
                    if message.role == "user":
                        users[message.text or ""] += 1
                    elif message.role == "assistant" and message.turn_id is not None:
                        answers[message.turn_id, message.text or ""] += 1
            assert all(count == 1 for count in users.values()), f"stored twice: {users}"
            for text, turn_id in accepted.items():
                turn = reader.turn(turn_id)
                assert turn is not None, f"{text} was accepted and is gone"
                waits = turn.state == "queued" or turn.session_id is None
                if turn.outcome is not None and turn.outcome.cause == "steered":
                    waits = False  # its row is one of the turn that it was steered into
                assert users[text] == (0 if waits else 1), f"{text}: {turn}"
                assert not (ended and turn.state == "running"), f"{text} is still running"
            for turn_id, text in answered.items():
                assert answers[turn_id, text] == 1, f"the answer {text} is stored otherwise"
            for key in KEYS:
                check_key(reader, SessionKey(key))
    finally:
        engine.close()
    assert check_database(path) == []


def _all_sessions(reader: Any) -> list[SessionId]:
    ids = {row[0] for row in reader._all("SELECT id FROM sessions")}
    return sorted(ids)


def count_messages(directory: Path, prefix: str) -> int:
    """How many originals of the file begin so."""
    engine = open_sqlite(directory / DATABASE, StillClock(), SETTINGS.engine)
    try:
        with engine.reading() as reader:
            found = [reader.transcript(s, include_inactive=True) for s in _all_sessions(reader)]
    finally:
        engine.close()
    rows = [message for one in found for message in one.messages if not message.carried]
    return sum((message.text or "").startswith(prefix) for message in rows)


def check_key(reader: Any, key: SessionKey) -> None:
    route = reader.route(key)
    if route is None or route.session_id is None:
        return
    row = reader.session(route.session_id)
    if row is None:
        return
    assert row.end_kind != "rotation", f"{key} points at a session that was rotated away"
    messages = load_messages(reader, row.id, 100)
    running = {turn.id for turn in reader.unfinished_turns(key)}
    assert not open_calls(m for m in messages if m.turn_id not in running), "a call without result"
    seen: set[str] = set()
    for message in messages:
        seen.update(call.id for call in message.tool_calls)
        if message.role == "tool":
            assert message.tool_call_id in seen, "a result without its call"


# Programs ------------------------------------------------------------------------------------


@contextmanager
def scratch() -> Generator[Path]:
    """A folder that is gone afterwards; in memory where there is such a place."""
    shared = Path("/dev/shm")
    parent = shared if os.access(shared, os.W_OK) else None
    directory = tempfile.mkdtemp(prefix="onepen-sim-", dir=parent)
    try:
        yield Path(directory)
    finally:
        shutil.rmtree(directory)


def steps(names: Sequence[str]) -> st.SearchStrategy[Step]:
    talking = st.builds(
        Step,
        st.sampled_from(("ask", "ask", "submit", "cancelled ask", *BUSY)),
        st.sampled_from(KEYS),
        st.sampled_from(KINDS),
    )
    others = st.builds(Step, st.sampled_from(tuple(names)), st.sampled_from(KEYS))
    return st.one_of(talking, others)


def programs(*more: str) -> st.SearchStrategy[list[list[Step]]]:
    """A few lanes of a few steps."""
    names = ("interrupt", "evict", *OPERATIONS, *more)
    return st.lists(st.lists(steps(names), min_size=1, max_size=4), min_size=1, max_size=3)


def recorded(directory: Path, account: Account) -> Disk:
    """A disk whose log has what the world was told between what was written."""
    disk = Disk(directory, skip=(f"{DATABASE}.lock",))
    account.told = disk.mark
    return disk
