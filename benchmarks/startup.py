"""How long a start takes on a file with many stored sessions and some unfinished turns, and what it
takes to bring one long conversation back into memory.

The file is built once through the engine, two short messages to a session, and kept below `build/`
under a name that says what is in it. Before each measured start a process serves a few hundred
messages with an agent that never answers, and dies: half of its turns are cut off, half still wait,
and the log is as a crash leaves it.

What is timed is `open_runtime` until its block begins, in a process that has imported everything:
the log is recovered, the epoch moved, unfinished turns are looked up and those that were cut off
are marked, durably. *Not cached* means that the system's cache was told to forget the file.
"""

from __future__ import annotations

import os
import time
from hashlib import blake2b
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

import trio

from onepen import (
    Draft,
    Durable,
    Guard,
    SessionSettings,
    Settings,
    SystemClock,
    SystemIds,
    Unit,
    open_runtime,
    open_sqlite,
)
from onepen.storage.commands import (
    AppendMessages,
    Compact,
    CreateSession,
    OpenIncarnation,
    SetRoute,
)
from onepen.storage.identity import Incarnation, Seq, SessionId, SessionKey, Uid
from onepen.storage.sqlite import schema

from .surroundings import BUILD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from onepen import Engine, Runtime, Turn

    from .cells import Probe

UNFINISHED = 300
FIRST = Incarnation(1)
LONG, ACTIVE = 10_000, 20
LONG_KEY, SHORT_KEY = SessionKey("bench:long"), SessionKey("bench:short")
ACTIVATIONS = 40
_BUILT_AS = "1"  # to be raised with every change of what `build` stores
_BATCH_UNITS = 5_000
_UNITS_OF_A_SESSION = 2
_APPENDED = 500
_SETTLE_S = 60.0


# Building --------------------------------------------------------------------------------------


def path_of(sessions: int) -> Path:
    """Where the file is kept; another schema or another way to build it is another file."""
    made_by = "".join((_BUILT_AS, *schema.MIGRATIONS)).encode()
    return BUILD / f"stored-{sessions}-{blake2b(made_by, digest_size=6).hexdigest()}.db"


def _guard(key: SessionKey, session_id: SessionId) -> Guard:
    return Guard(key=key, incarnation=FIRST, session_id=session_id)


def _drafts(ids: SystemIds, count: int) -> tuple[Draft, ...]:
    return tuple(
        Draft(
            uid=Uid(ids.fresh()),
            role="assistant" if n % 2 else "user",
            text=f"message {n} of a conversation",
        )
        for n in range(count)
    )


def _conversation(ids: SystemIds, key: SessionKey, messages: int) -> Iterator[Unit]:
    """A session with so many messages, as few units as allowed."""
    session_id = SessionId(ids.fresh())
    guard = _guard(key, session_id)
    route = SetRoute(key=key, session_id=session_id, replaces=0, at_ms=0)
    create = CreateSession(session_id=session_id, key=key, at_ms=0, source="bench")
    yield Unit((OpenIncarnation(key=key, incarnation=FIRST),))
    for base in range(0, messages, _APPENDED):
        drafts = _drafts(ids, min(_APPENDED, messages - base))
        append = AppendMessages(session_id=session_id, base_seq=Seq(base), messages=drafts)
        yield Unit((append,) if base else (route, create, append), (guard,))
    if key == LONG_KEY:
        summary = Draft(uid=Uid(ids.fresh()), role="assistant", text="what was said before")
        compact = Compact(
            session_id=session_id,
            base_seq=Seq(messages),
            first_seq=Seq(0),
            last_seq=Seq(messages - ACTIVE),  # the summary is active as well
            summary=summary,
            at_ms=0,
            force=True,
        )
        yield Unit((compact,), (guard,))


def _units(sessions: int) -> Iterator[Unit]:
    ids = SystemIds()
    yield from _conversation(ids, LONG_KEY, LONG - 1)
    yield from _conversation(ids, SHORT_KEY, ACTIVE)
    for number in range(sessions - 2):
        yield from _conversation(ids, SessionKey(f"bench:{number}"), 2)


def build(sessions: int, tell: Callable[[int], None]) -> Path:
    """The file, made if it is not there; the name is given to it only when it is complete.

    `tell` is called with the number of sessions that are stored so far.
    """
    path = path_of(sessions)
    if path.exists():
        return path
    for old in BUILD.glob(f"stored-{sessions}-*"):
        old.unlink()
    growing = path.with_name(f"growing-{os.getpid()}.db")
    engine = open_sqlite(growing, SystemClock())
    try:
        units = _units(sessions)
        stored = 0
        while batch := list(islice(units, _BATCH_UNITS)):
            tell(min(sessions, stored))
            _store(engine, batch)
            stored += len(batch) // _UNITS_OF_A_SESSION
        engine.close()
        growing.rename(path)
    finally:
        engine.close()  # twice is harmless
        for left in BUILD.glob(f"{growing.name}*"):
            left.unlink()
    return path


def _store(engine: Engine, batch: list[Unit]) -> None:
    for receipt in engine.stage(batch):
        if not isinstance(receipt, Durable):
            raise RuntimeError(f"the file can't be built: {receipt}")
    engine.commit()
    engine.maintain(idle=False)


# What a crash leaves ---------------------------------------------------------------------------


async def _never(_: Turn) -> str:
    await trio.sleep_forever()
    raise AssertionError


async def crash(path: str) -> None:
    """Accept messages, begin half of their turns, and die. Does not return."""
    limits = SessionSettings(turns_running_max=UNFINISHED // 2)
    async with open_runtime(path, agent=_never, settings=Settings(sessions=limits)) as runtime:
        async with trio.open_nursery() as nursery:
            for number in range(UNFINISHED):
                nursery.start_soon(runtime.submit, f"bench:{number}", "is anybody there?")
        os._exit(0)


# Measuring -------------------------------------------------------------------------------------


def forget_cached(path: str) -> None:
    """Ask the system to drop the file from its cache. Nobody has it open: no lock can be lost."""
    for name in (path, f"{path}-wal"):
        if os.path.exists(name):
            file = os.open(name, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


async def _until(condition: Callable[[], bool]) -> None:
    """The runtime's statistics are there to be looked at; nothing tells when they change."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.002)


async def _answer(turn: Turn) -> str:
    return "yes"


async def run_startup(probe: Probe) -> dict[str, float]:
    assert probe.database is not None
    if probe.case == "not cached":
        forget_cached(probe.database)
    cpu_s, begun_s = time.process_time(), time.perf_counter()
    async with open_runtime(probe.database, agent=_answer) as runtime:
        opened_s = time.perf_counter() - begun_s
        cpu_s = time.process_time() - cpu_s
        recovered = runtime.statistics().counters["turns_recovered"]
        with trio.fail_after(_SETTLE_S):
            await _until(lambda: runtime.statistics().counters["turns_ended"] >= UNFINISHED // 2)
        settled_s = time.perf_counter() - begun_s
    return {
        "opened_s": opened_s,
        "cpu_s": cpu_s,
        "settled_s": settled_s,
        "recovered": recovered,
        "file_bytes": (await trio.Path(probe.database).stat()).st_size,
    }


async def _activate_us(runtime: Runtime, key: SessionKey) -> tuple[float, int]:
    """Time to bring a stored session into memory, and how much of it is there then."""
    begun_s = time.perf_counter()
    await runtime.open_session(key)
    took_us = (time.perf_counter() - begun_s) * 1e6
    size = runtime.statistics().sessions.bytes_live
    await _until(lambda: not runtime.statistics().sessions.live)
    return took_us, size


async def run_activation(probe: Probe) -> dict[str, float]:
    """The long and the short conversation, in turns; housekeeping evicts each as soon as it may."""
    assert probe.database is not None
    settings = Settings(sessions=SessionSettings(idle_evict_s=0.004))
    long: list[tuple[float, int]] = []
    short: list[tuple[float, int]] = []
    async with open_runtime(probe.database, agent=_answer, settings=settings) as runtime:
        await _until(lambda: not runtime.statistics().sessions.live)
        for turn in range(-2, ACTIVATIONS):
            took = await _activate_us(runtime, LONG_KEY), await _activate_us(runtime, SHORT_KEY)
            if turn >= 0:  # the first ones fill the caches
                long.append(took[0])
                short.append(took[1])
    return {
        "long_us": median(us for us, _ in long),
        "short_us": median(us for us, _ in short),
        "long_per_short": median(a / b for (a, _), (b, _) in zip(long, short, strict=True)),
        "long_bytes": max(size for _, size in long),
        "short_bytes": max(size for _, size in short),
    }
