"""The SQLite engine where no protocol reaches: reopening, counting, deletion at size."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from onepen import EngineSettings, open_sqlite
from onepen.storage import commands as c
from onepen.storage.edge import check_unit
from onepen.storage.errors import (
    BatchUnknownError,
    InvalidContentError,
    InvalidUnitError,
    OpenError,
    StorageUnavailableError,
)
from onepen.storage.identity import Incarnation, Seq, SessionId, Uid
from onepen.storage.records import Draft, Tokens
from onepen.storage.units import Durable, Refused, Unit
from tests.actors.fixtures import StillClock, Talk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from onepen.storage.sqlite import SqliteEngine


@pytest.fixture
def engine() -> Iterator[SqliteEngine]:
    opened = open_sqlite(None, StillClock(), EngineSettings(busy_timeout_s=0.01))
    yield opened
    opened.close()


def apply(engine: SqliteEngine, *units: Unit) -> list[Durable | Refused]:
    receipts = engine.stage(units)
    engine.commit()
    return receipts


def test_a_database_in_memory_survives_a_reader_that_stays(engine: SqliteEngine) -> None:
    """A6: a commit that a reader holds up is unknown, and is written once the reader is gone."""
    talk = Talk(1)
    apply(engine, talk.opening())
    unit = talk.message()
    with engine.reading() as reader:
        assert reader.revision(talk.session_id) == 0
        engine.stage([unit])
        with pytest.raises(BatchUnknownError):
            engine.commit()
    engine.reopen()
    assert isinstance(apply(engine, unit)[0], Durable)
    with engine.reading() as reader:
        assert reader.revision(talk.session_id) == 1


def test_a_refused_route_is_not_counted(engine: SqliteEngine) -> None:
    """B4: the number of route writes is that of committed ones."""
    talk = Talk(1)
    apply(engine, talk.opening())
    before = engine.statistics().route_writes
    move = c.SetRoute(key=talk.key, session_id=SessionId("other"), replaces=1, at_ms=2)
    missing = c.ResolveTimer(timer_id="none", resolution="fired", at_ms=2)
    receipts = apply(engine, Unit((move, missing)), talk.message())
    assert [type(receipt) for receipt in receipts] == [Refused, Durable]
    assert engine.statistics().route_writes == before


def test_a_unit_moves_a_revision_once(engine: SqliteEngine) -> None:
    """H4: an actor predicts its own revision by counting its units."""
    talk = Talk(1)
    apply(engine, talk.opening())
    first, second = talk.message(), talk.message()
    (receipt,) = apply(engine, Unit((*first.commands, *second.commands), (talk.guard,)))
    assert isinstance(receipt, Durable)
    assert (receipt.heads[0].next_seq, receipt.heads[0].revision) == (2, 1)


def test_a_rewind_stands_alone_in_its_unit() -> None:
    """H4: it names the revision that it replaces, and a unit moves a revision once."""
    talk = Talk(1)
    rewind = c.Rewind(session_id=talk.session_id, to_seq=Seq(0), replaces=1, at_ms=2)
    append = talk.message()
    check_unit(Unit((rewind,), append.guards))
    with pytest.raises(InvalidUnitError, match="alone"):
        check_unit(Unit((rewind, *append.commands), append.guards))


def test_a_command_from_before_opens_no_door(engine: SqliteEngine) -> None:
    """B8: a stored route or reopening in the unit does not vouch for what is new in it."""
    talk = Talk(1)
    apply(engine, talk.opening())
    (old_route,) = (x for x in talk.opening().commands if isinstance(x, c.SetRoute))
    apply(engine, Unit((replace(old_route, session_id=SessionId("next"), replaces=1),)))
    late = talk.message()
    (receipt,) = apply(engine, Unit((old_route, *late.commands), late.guards))
    assert isinstance(receipt, Refused)
    assert receipt.reason == "route_conflict"


def test_a_rotation_replaces_a_suspension(engine: SqliteEngine) -> None:
    """I2: a suspended session may be rotated or closed for good under its guard."""
    talk = Talk(1)
    apply(engine, talk.opening(), talk.message("long " * 50), talk.message("long " * 50))
    suspend = c.EndSession(
        session_id=talk.session_id, reason="shutdown", kind="suspension", replaces=0, at_ms=3
    )
    apply(engine, Unit((suspend,), (talk.guard,)))
    summary = Draft(uid=Uid("f" * 32), role="system", text="short")
    rotate = c.Rotate(
        key=talk.key,
        parent_id=talk.session_id,
        parent_base_seq=Seq(2),
        child_id=SessionId("child"),
        summary=(summary,),
        carried=(),
        replaces=1,
        at_ms=4,
    )
    (receipt,) = apply(engine, Unit((rotate,), (talk.guard,)))
    assert isinstance(receipt, Durable)
    with engine.reading() as reader:
        parent = reader.session(talk.session_id)
    assert parent is not None
    assert (parent.end_kind, parent.end_reason) == ("rotation", "compression")


def test_two_senders_can_not_both_open_an_attempt(engine: SqliteEngine) -> None:
    """A delivery's attempt is opened once: the second sender is refused, the first recognised."""
    talk = Talk(1)
    apply(engine, talk.opening())
    post = c.PostDelivery(delivery_id="d", key=talk.key, source="chat", target={}, body={}, at_ms=1)
    sending = c.MarkDelivery(delivery_id="d", attempt=1, state="sending", at_ms=2)
    sent = c.MarkDelivery(delivery_id="d", attempt=1, state="sent", at_ms=3)
    other = replace(sending, at_ms=5)
    apply(engine, Unit((post,)), Unit((sending,)))
    for _ in range(2):
        again, stale = apply(engine, Unit((sending,)), Unit((other,)))
        assert isinstance(again, Durable)
        assert again.again
        assert isinstance(stale, Refused)
        apply(engine, Unit((sent,)))


def test_deleting_a_carried_transcript_takes_steps_that_grow_with_it(engine: SqliteEngine) -> None:
    """PERFORMANCE: no statement of a deletion walks the session once for each of its rows."""
    talk = Talk(1)
    drafts = tuple(
        Draft(uid=Uid(f"{n:032x}"), role="user", text="x", created_ms=1) for n in range(1, 3_001)
    )
    append = c.AppendMessages(session_id=talk.session_id, base_seq=Seq(0), messages=drafts)
    branch = c.Branch(
        key=talk.key,
        parent_id=talk.session_id,
        child_id=SessionId("copy"),
        upto_seq=Seq(3_000),
        replaces=1,
        at_ms=2,
    )
    apply(engine, talk.opening(), Unit((append,), (talk.guard,)), Unit((branch,), (talk.guard,)))
    steps = 0

    def count() -> bool:
        nonlocal steps
        steps += 1
        return False

    connection = engine._connection  # pyright: ignore[reportPrivateUsage]
    connection.set_progress_handler(count, 1_000)
    apply(engine, Unit((c.DeleteSession(session_id=talk.session_id, at_ms=3),)))
    connection.set_progress_handler(None, 1_000)
    # Thousands of instructions of SQLite's machine: 3,000 rows at 300 each, with room to spare;
    # a walk for each row would be 3,000 x 3,000 x 5.
    assert steps < 2_000
    with engine.reading() as reader:
        copy = reader.session(SessionId("copy"))
    assert copy is not None
    assert copy.message_count == 3_000


def test_a_lock_that_can_not_be_written_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-12: a full disk at the wrong moment locks nobody out."""

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OpenError, match="lock file"):
            open_sqlite(tmp_path / "chat.db", StillClock())
    open_sqlite(tmp_path / "chat.db", StillClock()).close()


def test_a_reader_that_fails_gives_its_place_back(engine: SqliteEngine) -> None:
    """INV-14: four broken reads don't use up the four readers."""
    for _ in range(5):
        with pytest.raises(StorageUnavailableError), engine.reading() as reader:
            reader._db.execute("SELECT nothing")  # pyright: ignore[reportPrivateUsage]
    with engine.reading() as reader:
        assert reader.mark("none") is None


@pytest.mark.parametrize(
    "command",
    [
        c.EndSession(
            session_id=SessionId("s"),
            reason="x",
            kind="rotation",  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            replaces=0,
            at_ms=1,
        ),
        c.SetFlags(
            session_id=SessionId("s"),
            archived=5,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            pinned=False,
            replaces=0,
            at_ms=1,
        ),
        c.AddUsage(
            call_id=Uid("0" * 32),
            session_id=SessionId("s"),
            at_ms=1,
            tokens=Tokens(input=2**63 - 1),
        ),
        c.OpenIncarnation(
            key="k",  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            incarnation=Incarnation(True),
        ),
    ],
    ids=["a word that is no kind", "a number for true", "tokens beyond measure", "true for one"],
)
def test_a_field_is_what_its_type_says(command: c.AnyCommand) -> None:
    """INV-20: what the type does not allow is refused at the edge, not stored as something else."""
    with pytest.raises(InvalidContentError):
        check_unit(Unit((command,)))
