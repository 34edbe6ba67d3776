"""The log and the file: copied, emptied, given back, while everything else goes on."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

import apsw
import pytest
import trio
from msgspec.structs import replace

from onepen import EngineSettings, open_sqlite
from onepen.actors.intake import WriterSettings
from onepen.actors.writer import open_writer
from onepen.runtime.system import SystemClock
from onepen.runtime.testing.invariants import check_database
from onepen.storage import commands as c
from onepen.storage.identity import SessionId
from onepen.storage.sqlite import open_onlooker
from onepen.storage.units import Durable, Unit
from tests.actors.fixtures import StillClock, Talk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from onepen.storage.sqlite import SqliteEngine

SETTINGS = EngineSettings(free_bytes_min=0, busy_timeout_s=60, free_pages_max=100)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SqliteEngine]:
    opened = open_sqlite(tmp_path / "chat.db", StillClock(), SETTINGS)
    yield opened
    opened.close()


def apply(engine: SqliteEngine, *units: Unit) -> None:
    receipts = engine.stage(units)
    engine.commit()
    assert all(isinstance(receipt, Durable) for receipt in receipts)


def filled(engine: SqliteEngine, messages: int = 100) -> Talk:
    """A conversation of so many pages, about."""
    talk = Talk(1)
    apply(engine, talk.opening())
    apply(engine, *(talk.message("word " * 1_000) for _ in range(messages)))
    return talk


def delete(engine: SqliteEngine, talk: Talk) -> None:
    away = c.SetRoute(
        key=talk.key, session_id=SessionId(f"none-{talk.number}"), replaces=1, at_ms=8
    )
    gone = (
        c.DeleteSession(session_id=talk.session_id, at_ms=9),
        c.PurgeSession(session_id=talk.session_id, step=0, last=True),
    )
    apply(engine, Unit((away,)), Unit(gone))


def log_of(path: Path) -> int:
    return os.stat(path / "chat.db-wal").st_size


def chores(engine: SqliteEngine) -> int:
    done = 0
    while engine.chore_due(idle=True):
        engine.chore(idle=True)
        done += 1
    return done


def test_a_log_that_is_emptied_gives_its_space_back(engine: SqliteEngine, tmp_path: Path) -> None:
    """Copying alone leaves the file as large as it was, with all that it held."""
    filled(engine)
    before = engine.statistics()
    assert before.log_bytes == log_of(tmp_path) > 400_000
    assert engine.upkeep_due(idle=True) is False
    engine.upkeep()
    engine.finish_upkeep()
    assert engine.statistics().wal_pages == 0
    assert log_of(tmp_path) == before.log_bytes
    assert engine.rest_due() == SETTINGS.wal_empty_after_s
    engine.rest()
    assert log_of(tmp_path) == engine.statistics().log_bytes == 0
    assert engine.rest_due() is None


def test_a_reader_with_an_old_snapshot_holds_up_nothing(
    engine: SqliteEngine, tmp_path: Path
) -> None:
    """With a minute of patience for locks, none of it is spent, neither on copying nor emptying."""
    talk = filled(engine)
    with engine.reading() as reader:
        assert reader.revision(talk.session_id) == 100
        started_s = time.monotonic()
        apply(engine, *(talk.message("word " * 1_000) for _ in range(1_000)))
        assert engine.upkeep_due(idle=True)
        engine.upkeep()
        engine.finish_upkeep()
        assert not engine.upkeep_due(idle=True), "it came no further, and would not if it tried"
        engine.rest()
        assert time.monotonic() - started_s < 30
        assert log_of(tmp_path) > 4_000_000
        assert engine.rest_due() is not None
        assert reader.revision(talk.session_id) == 100
        apply(engine, *(talk.message("word " * 1_000) for _ in range(1_000)))
        assert engine.upkeep_due(idle=True), "it has grown as much again"
    engine.rest()
    assert log_of(tmp_path) == 0


def test_a_log_beyond_its_bound_is_told_of_once_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """INV-14: a reader that stays lets it grow; an operator can see that, and why."""
    settings = replace(SETTINGS, wal_bytes_alarm=1024 * 1024)
    engine = open_sqlite(tmp_path / "chat.db", StillClock(), settings)
    caplog.set_level(logging.WARNING)
    talk = filled(engine)
    for _ in range(2):
        assert not engine.statistics().log_alarm
        with engine.reading() as reader:
            reader.revision(talk.session_id)
            for _ in range(3):
                apply(engine, *(talk.message("word " * 1_000) for _ in range(200)))
                engine.upkeep()
                engine.finish_upkeep()
            assert engine.statistics().log_alarm
        engine.upkeep()
        engine.finish_upkeep()
        apply(engine, talk.message())
    assert not engine.statistics().log_alarm
    engine.close()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, told
    assert "chat.db is longer than 1 MB" in told[0]


def test_pages_that_are_not_used_are_given_back_a_few_at_a_time(
    engine: SqliteEngine, tmp_path: Path
) -> None:
    """Beyond the bound only, and then half-way: a file is not moved about for every deletion."""
    keeping = Talk(2)
    talk = filled(engine, 300)
    apply(engine, keeping.opening(), *(keeping.message("kept " * 1_000) for _ in range(20)))
    chores(engine)
    engine.rest()
    size = os.stat(tmp_path / "chat.db").st_size
    delete(engine, talk)
    assert chores(engine) > 3
    free = engine.statistics().free_pages
    assert 50 - 64 <= free <= 50
    engine.rest()
    assert os.stat(tmp_path / "chat.db").st_size < size - 250 * 4096
    with engine.reading() as reader:
        found = reader.transcript(keeping.session_id)
    assert {message.text for message in found.messages} == {"kept " * 1_000}
    assert check_database(tmp_path / "chat.db") == []
    delete(engine, keeping)
    chores(engine)
    assert engine.statistics().free_pages > free, "that few may stay"


def test_an_engine_whose_file_has_another_owner_gives_nothing_back(
    engine: SqliteEngine, tmp_path: Path
) -> None:
    """INV-12: also upkeep writes under the engine's own epoch."""
    talk = filled(engine, 300)
    delete(engine, talk)
    while engine.statistics().free_pages <= SETTINGS.free_pages_max:
        assert engine.chore_due(idle=True)
        engine.chore(idle=True)
    other = apsw.Connection(str(tmp_path / "chat.db"))
    other.execute("UPDATE pen SET epoch = epoch + 1")
    free = other.pragma("freelist_count")
    other.close()
    engine.chore(idle=True)
    assert not engine.chore_due(idle=True)
    assert engine._connection.pragma("freelist_count") == free  # pyright: ignore[reportPrivateUsage]


async def until(holds: Callable[[], bool]) -> None:
    """Wait for another thread."""
    with trio.fail_after(10):
        while not holds():  # noqa: ASYNC110 - a file's size has no event
            await trio.sleep(0.01)


async def test_a_quiet_writer_empties_the_log_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the quiet while that is set, also when a reader was in the way the first time."""
    clock = SystemClock()
    settings = replace(SETTINGS, wal_empty_after_s=0.05)
    talk = Talk(1)
    engine = open_sqlite(tmp_path / "chat.db", clock, settings)
    rest, tries = engine.rest, 0

    def counted() -> None:
        nonlocal tries
        rest()
        tries += 1

    monkeypatch.setattr(engine, "rest", counted)
    async with open_writer(lambda: engine, clock, WriterSettings()) as writer:
        await writer.write(talk.opening())
        await writer.write(talk.message("hello"))
        looking = open_onlooker(tmp_path / "chat.db")
        with looking.reading() as reader:
            assert reader.revision(talk.session_id) == 1
            await writer.write(talk.message("hello " * 5_000))
            tries = 0
            await until(lambda: tries >= 3)
            assert log_of(tmp_path) > 0
        await until(lambda: log_of(tmp_path) == 0)
        await writer.write(talk.message("and on"))
        assert log_of(tmp_path) > 0
        await until(lambda: log_of(tmp_path) == 0)
        looking.close()
        assert writer.statistics().engine.log_bytes == 0
