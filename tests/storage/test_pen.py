"""The pen, step by step, on a real engine: phases, caps, and what a broken batch leaves behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from onepen import open_sqlite
from onepen.storage.errors import BatchUnknownError, InvariantError, LowSpaceError
from onepen.storage.pen import Ledger, Pen, Posted
from onepen.storage.units import Durable
from tests.actors.fixtures import StillClock, Talk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from onepen.storage.sqlite import SqliteEngine
    from onepen.storage.units import Unit


@pytest.fixture
def engine() -> Iterator[SqliteEngine]:
    opened = open_sqlite(None, StillClock())
    yield opened
    opened.close()


def make_pen(engine: SqliteEngine, *units: Unit, rows_max: int = 100) -> Pen[int]:
    ledger: Ledger[int] = Ledger()
    for number, unit in enumerate(units):
        ledger.post(Posted(unit, 10, number))
    return Pen(engine, ledger, batch_rows_max=rows_max, batch_bytes_max=1_000)


def test_a_batch_goes_through_four_steps(engine: SqliteEngine) -> None:
    """Take, stage, commit, resolve; receipts come out in the order of posting."""
    talk = Talk(1)
    pen = make_pen(engine, talk.opening(), talk.message(), talk.message())
    assert pen.take(0)
    pen.stage()
    pen.commit()
    resolved = pen.resolve()
    assert [posted.ticket for posted, _ in resolved] == [0, 1, 2]
    assert all(isinstance(receipt, Durable) for _, receipt in resolved)
    assert not pen.take(0)


@pytest.mark.parametrize("step", ["stage", "commit", "resolve", "recover"])
def test_a_step_out_of_turn_is_our_own_bug(engine: SqliteEngine, step: str) -> None:
    """A receipt can't be had before its commit, by construction."""
    pen = make_pen(engine, Talk(1).opening())
    with pytest.raises(InvariantError):
        getattr(pen, step)()


def test_a_staged_batch_can_not_be_resolved(engine: SqliteEngine) -> None:
    """INV-3: the early acknowledgement is not expressible."""
    pen = make_pen(engine, Talk(1).opening())
    pen.take(0)
    pen.stage()
    with pytest.raises(InvariantError):
        pen.resolve()


def test_batches_are_capped_in_rows_and_keep_the_order(engine: SqliteEngine) -> None:
    """INV-14: what did not fit is the next batch, from its first unit on."""
    talk = Talk(1)
    pen = make_pen(engine, *(talk.message_at(n) for n in range(7)), rows_max=3)
    batches: list[list[int]] = []
    while pen.take(0):
        batches.append([posted.ticket for posted in pen.ledger.taken])
        pen.stage()
        pen.commit()
        pen.resolve()
    assert batches == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_unit_larger_than_the_cap_still_goes_alone(engine: SqliteEngine) -> None:
    """A cap must not make a unit wait for ever."""
    talk = Talk(1)
    pen = make_pen(engine, talk.opening(), talk.message(), rows_max=1)
    assert pen.take(0)
    assert len(pen.ledger.taken) == 1


def test_a_broken_batch_is_taken_again_as_it_was(
    engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-11: the same units in the same order, and nothing new between them."""
    talk = Talk(1)
    pen = make_pen(engine, talk.opening(), talk.message())
    pen.take(0)
    taken = list(pen.ledger.taken)
    pen.stage()

    def fail() -> None:
        raise BatchUnknownError("commit", OSError())

    with monkeypatch.context() as patch:
        patch.setattr(engine, "commit", fail)
        with pytest.raises(BatchUnknownError):
            pen.commit()
    pen.ledger.post(Posted(talk.message(), 10, 2))
    with pytest.raises(InvariantError):
        pen.take(0)  # not before it is recovered
    pen.recover()
    assert pen.take(0)
    assert pen.ledger.taken == taken
    pen.stage()
    pen.commit()
    assert [posted.ticket for posted, _ in pen.resolve()] == [0, 1]


def test_too_little_space_reopens_nothing(engine: SqliteEngine) -> None:
    """Nothing was begun, so there is nothing to doubt."""
    engine.free_bytes = lambda: 0
    pen = make_pen(engine, Talk(1).opening())
    pen.take(0)
    with pytest.raises(LowSpaceError):
        pen.stage()
    pen.recover()
    assert engine.statistics().reopenings == 0
    engine.free_bytes = lambda: 10**12
    pen.take(0)
    pen.stage()
    pen.commit()
    assert isinstance(pen.resolve()[0][1], Durable)


def test_what_is_left_at_the_end_comes_out_in_order(engine: SqliteEngine) -> None:
    """INV-15: taken, set aside by the cap, and waiting: all of it is answered, once."""
    talk = Talk(1)
    pen = make_pen(engine, *(talk.message_at(n) for n in range(5)), rows_max=2)
    pen.take(0)
    assert [posted.ticket for posted in pen.ledger.clear()] == [0, 1, 2, 3, 4]
    assert pen.ledger.clear() == []
