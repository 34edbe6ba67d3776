"""Contract G: what nobody can reach is ended, what holds nothing is removed, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import apsw
import pytest

from onepen import Runtime, open_runtime, open_sqlite
from onepen.actors import clearing
from onepen.storage import commands as c
from onepen.storage.identity import Incarnation, Seq, SessionId, SessionKey, TurnId, Uid
from onepen.storage.records import Message
from onepen.storage.units import Durable, Unit

from .agents import KEY, current, echo, query, row, sound, texts_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


DAY_MS = 24 * 3600 * 1000


class Clock:
    """A wall clock that is set by hand."""

    def __init__(self) -> None:
        self.ms = 1_800_000_000_000

    def now(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return 0.0

    def pass_days(self, days: float) -> None:
        self.ms += int(days * DAY_MS)


async def lose_a_child(runtime: Runtime, key: str = KEY, *, own: bool = True) -> str:
    """A rotation's child that the key has left: as old as the clock says."""
    await runtime.ask(key, "something long enough to be worth a summary " * 3)
    child = await runtime.rotate(key, "short")
    if own:
        await runtime.ask(key, "in the child")
    await runtime.switch(key, f"{key.replace(':', '-')}-elsewhere")
    return child


def write(path: Path, *commands: c.AnyCommand) -> None:
    """What no public call writes: rows as an older version, or an import, leaves them."""
    engine = open_sqlite(path, Clock())
    try:
        (receipt,) = engine.stage([Unit(commands)])
        assert isinstance(receipt, Durable), receipt
        engine.commit()
    finally:
        engine.close()


# G1, G2 ----------------------------------------------------------------------------------------


async def test_an_orphan_is_ended_and_nothing_is_deleted(tmp_path: Path) -> None:
    """G1: as a suspension, so that switching back reopens it; a title does not matter."""
    path, clock = tmp_path / "chat.db", Clock()
    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        await runtime.ask(KEY, "something long enough to be worth a summary " * 3)
        await runtime.set_title(KEY, "Titled")
        child = await runtime.rotate(KEY, "short")
        await runtime.ask(KEY, "in the child")
        await runtime.switch(KEY, "elsewhere")
        before = await texts_of(runtime, child)
        clock.pass_days(7.1)
        assert await runtime.finalize_orphaned_rotations() == 1
        assert await runtime.finalize_orphaned_rotations() == 0
        ended = await row(runtime, child)
        assert (ended.end_reason, ended.end_kind) == ("orphaned_compression", "suspension")
        assert ended.ended_ms == clock.now()
        assert ended.title == "Titled #2"
        assert await texts_of(runtime, child) == before
        await runtime.switch(KEY, child)
        assert (await row(runtime, child)).end_kind is None
        await runtime.ask(KEY, "back again")
    sound(path)


async def test_what_is_no_orphan_is_left_alone(tmp_path: Path) -> None:
    """G2: no parent, too young, ended already, another reason, no messages, current, at work."""
    path, clock = tmp_path / "chat.db", Clock()
    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        await runtime.ask("a:no-parent", "hello")
        alone = await current(runtime, "a:no-parent")
        await runtime.switch("a:no-parent", "elsewhere-1")
        closed = await lose_a_child(runtime, "a:closed")
        await runtime.switch("a:closed", closed)
        await runtime.close_session("a:closed", reason="done with it")
        await runtime.switch("a:closed", "elsewhere-2")
        await runtime.ask("a:reset", "hello")
        await runtime.reset("a:reset")
        await runtime.ask("a:reset", "hello again")
        other_reason = await current(runtime, "a:reset")
        await runtime.switch("a:reset", "elsewhere-3")
        nothing_own = await lose_a_child(runtime, "a:nothing-own", own=False)
        current_one = await lose_a_child(runtime, "a:current")
        await runtime.switch("a:current", current_one)
        clock.pass_days(5)
        young = await lose_a_child(runtime, "a:young")
        clock.pass_days(6)
        assert await runtime.finalize_orphaned_rotations() == 0
        for session_id in (alone, other_reason, nothing_own, current_one, young):
            assert (await row(runtime, session_id)).end_kind is None, session_id
        assert (await row(runtime, closed)).end_reason == "done with it"
        assert (await row(runtime, other_reason)).parent_id is not None
        clock.pass_days(2)
        assert await runtime.finalize_orphaned_rotations() == 1  # the young one
    sound(path)


async def test_a_turn_that_waits_for_a_person_keeps_its_session_open(tmp_path: Path) -> None:
    """G1: an unfinished turn is a reason to stay open, wherever its key is by now."""
    path, clock = tmp_path / "chat.db", Clock()
    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        child = await lose_a_child(runtime)
    turn_id = TurnId("f" * 32)
    write(
        path,
        c.OpenTurn(turn_id=turn_id, key=SessionKey(KEY), at_ms=1),
        c.StartTurn(turn_id=turn_id, session_id=SessionId(child), attempt=1, at_ms=2),
        c.SuspendTurn(turn_id=turn_id, attempt=1, at_ms=3),
    )
    clock.pass_days(30)
    engine = open_sqlite(path, clock)
    with engine.reading() as reader:
        assert reader.orphaned_rotations(clock.now()) == ((), None)
    command = c.EndOrphan(
        session_id=SessionId(child), before_ms=clock.now(), replaces=0, at_ms=clock.now()
    )
    (receipt,) = engine.stage([Unit((command,))])
    engine.commit()
    engine.close()
    assert getattr(receipt, "reason", None) == "stale"


@pytest.mark.parametrize("when", ["before the write", "never"])
async def test_a_key_that_comes_back_meanwhile_is_not_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """G1: the guards are looked at in the transaction, not only by the look before it."""
    path, clock, done = tmp_path / "chat.db", Clock(), clearing.was_done

    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        child = await lose_a_child(runtime)
        clock.pass_days(8)

        async def late(*arguments: Any) -> bool:
            if when != "never":
                await runtime.switch(KEY, child)
            return await done(*arguments)

        monkeypatch.setattr(clearing, "was_done", late)
        assert await runtime.finalize_orphaned_rotations() == (when == "never")
        assert ((await row(runtime, child)).end_kind is None) == (when != "never")


async def test_it_runs_once_for_a_database(tmp_path: Path) -> None:
    """G1: a new database has it recorded; without the record the next start does it, once."""
    path, clock = tmp_path / "chat.db", Clock()
    mark = "SELECT value FROM marks WHERE name = 'finalize_orphaned_rotations'"
    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        first = await lose_a_child(runtime, "a:1")
    assert query(path, mark) == [("new",)]
    clock.pass_days(8)
    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        assert (await row(runtime, first)).end_kind is None
    db = apsw.Connection(str(path))
    db.execute("DELETE FROM marks")
    db.close()
    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        assert (await row(runtime, first)).end_reason == "orphaned_compression"
        second = await lose_a_child(runtime, "a:2")
    assert query(path, mark) == [("done",)]
    clock.pass_days(8)
    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        assert (await row(runtime, second)).end_kind is None
        assert await runtime.finalize_orphaned_rotations() == 1
    sound(path)


async def test_a_session_that_is_being_imported_is_not_touched(tmp_path: Path) -> None:
    """G1, G3: hidden sessions are nobody's business yet."""
    path, clock = tmp_path / "chat.db", Clock()
    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        child = await lose_a_child(runtime)
        parent = (await row(runtime, child)).parent_id
    assert parent is not None
    staged = SessionId("staged")
    said = Message(session_id=staged, seq=Seq(0), uid=Uid("e" * 32), role="user", text="?")
    write(
        path,
        c.CreateSession(
            session_id=staged, key=SessionKey("a:b"), at_ms=1, parent_id=parent, hidden=True
        ),
        c.StageMessages(session_id=staged, messages=(said,)),
        c.CreateSession(session_id=SessionId("empty"), key=SessionKey("a:b"), at_ms=1, hidden=True),
        c.EndSession(
            session_id=SessionId("empty"), reason="r", kind="boundary", replaces=0, at_ms=1
        ),
    )
    clock.pass_days(8)
    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        assert await runtime.finalize_orphaned_rotations() == 1  # the one that was lost
        assert await runtime.prune_empty_sessions() == 0
    assert query(path, "SELECT count(*) FROM sessions WHERE hidden AND ended_ms IS NULL") == [(1,)]


# G3 ----------------------------------------------------------------------------------------------

EMPTY = SessionId("empty")


def ended(at_ms: int, session_id: SessionId = EMPTY, **fields: Any) -> tuple[c.AnyCommand, ...]:
    """A row in which nothing was said."""
    made: dict[str, Any] = {"key": SessionKey("b:1"), "at_ms": at_ms, **fields}
    return (
        c.CreateSession(session_id=session_id, **made),
        c.EndSession(
            session_id=session_id, reason="over", kind="boundary", replaces=0, at_ms=at_ms
        ),
    )


def titled(at_ms: int) -> tuple[c.AnyCommand, ...]:
    title = c.SetTitle(session_id=EMPTY, title="T", origin="person", replaces=0, at_ms=at_ms)
    return (*ended(at_ms), title)


def with_a_child(at_ms: int) -> tuple[c.AnyCommand, ...]:
    child = c.CreateSession(
        session_id=SessionId("child"), key=SessionKey("b:1"), at_ms=at_ms, parent_id=EMPTY
    )
    return (*ended(at_ms), child)


def with_a_turn(at_ms: int) -> tuple[c.AnyCommand, ...]:
    """And an inbox row, which refers to the turn."""
    turn_id = TurnId("d" * 32)
    accept = c.AcceptInbound(
        source="b",
        inbound_id="1",
        key=SessionKey("b:1"),
        turn_id=turn_id,
        disposition="queued",
        digest="d",
        at_ms=at_ms,
    )
    make, end = ended(at_ms)
    opening = c.OpenTurn(turn_id=turn_id, key=SessionKey("b:1"), at_ms=at_ms)
    start = c.StartTurn(turn_id=turn_id, session_id=EMPTY, attempt=1, at_ms=at_ms)
    return (opening, accept, make, start, end)


def with_a_delivery(at_ms: int) -> tuple[c.AnyCommand, ...]:
    posted = c.PostDelivery(
        delivery_id="d",
        key=SessionKey("b:1"),
        source="b",
        target={},
        body={},
        at_ms=at_ms,
        session_id=EMPTY,
    )
    make, end = ended(at_ms)
    return (make, posted, end)


def with_a_route(at_ms: int) -> tuple[c.AnyCommand, ...]:
    route = c.SetRoute(key=SessionKey("b:1"), session_id=EMPTY, replaces=0, at_ms=at_ms)
    key = c.OpenIncarnation(key=SessionKey("b:1"), incarnation=Incarnation(1))
    return (key, *ended(at_ms), route)


def still_open(at_ms: int) -> tuple[c.AnyCommand, ...]:
    return ended(at_ms)[:1]


async def test_an_empty_session_is_removed_with_its_traces(tmp_path: Path) -> None:
    """G3: its row, and what tells who set what of it, so that its id may be chosen again."""
    path, clock = tmp_path / "chat.db", Clock()
    inner = c.CreateSession(
        session_id=SessionId("inner"), key=SessionKey("b:1"), at_ms=1, parent_id=EMPTY
    )
    over = c.EndSession(
        session_id=SessionId("inner"), reason="r", kind="boundary", replaces=0, at_ms=clock.now()
    )
    write(path, *ended(clock.now()), inner, over)
    clock.pass_days(1.1)
    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        assert await runtime.prune_empty_sessions() == 2  # the child first, then its parent
        assert await runtime.prune_empty_sessions() == 0
        await runtime.open_session("b:2", EMPTY, title="chosen again")
        await runtime.ask("b:2", "hello")
        assert (await row(runtime, EMPTY)).title == "chosen again"
    sound(path)


@pytest.mark.parametrize(
    "made", [titled, with_a_child, with_a_turn, with_a_delivery, with_a_route, still_open]
)
async def test_a_session_that_is_referred_to_or_named_stays(
    tmp_path: Path, made: Callable[[int], tuple[c.AnyCommand, ...]]
) -> None:
    """G3: no route, child, turn, inbox or outbox row may refer to it, and it has no title."""
    path, clock = tmp_path / "chat.db", Clock()
    write(path, *made(clock.now()))
    clock.pass_days(30)
    async with open_runtime(path, clock=clock, agent=echo) as runtime:
        assert await runtime.prune_empty_sessions() == 0
        assert (await row(runtime, EMPTY)).id == EMPTY
    sound(path)


async def test_a_session_with_messages_or_that_ended_today_stays(tmp_path: Path) -> None:
    """G3: messages of any kind, carried ones too; and nothing before a day is over."""
    path, clock = tmp_path / "chat.db", Clock()
    write(path, *ended(clock.now()))
    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        await runtime.ask(KEY, "hello")
        said = await current(runtime)
        await runtime.reset(KEY)
        carried = await lose_a_child(runtime, "b:carried", own=False)
        await runtime.switch("b:carried", carried)
        await runtime.close_session("b:carried")
        await runtime.switch("b:carried", "elsewhere")
        clock.pass_days(0.9)
        assert await runtime.prune_empty_sessions() == 0
        clock.pass_days(9)
        assert await runtime.prune_empty_sessions() == 1
        for session_id in (said, carried):
            assert (await row(runtime, session_id)).next_seq > 0
    sound(path)


async def test_a_session_that_is_taken_up_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G3: the guards are looked at in the transaction."""
    path, clock, done = tmp_path / "chat.db", Clock(), clearing.was_done
    write(path, *ended(clock.now()))
    clock.pass_days(2)
    async with open_runtime(path, agent=echo, clock=clock) as runtime:

        async def late(*arguments: Any) -> bool:
            await runtime.switch("b:1", EMPTY)
            return await done(*arguments)

        monkeypatch.setattr(clearing, "was_done", late)
        assert await runtime.prune_empty_sessions() == 0
        await runtime.ask("b:1", "hello")
        assert await texts_of(runtime, EMPTY) == ["hello", "re: hello"]


async def test_a_reset_does_not_build_on_a_row_that_may_go(tmp_path: Path) -> None:
    """G3, B5: the next session of a key has no parent that could be removed under it."""
    path, clock = tmp_path / "chat.db", Clock()
    key = SessionKey("b:1")
    write(
        path,
        c.OpenIncarnation(key=key, incarnation=Incarnation(1)),
        *ended(clock.now()),
        c.SetRoute(key=key, session_id=EMPTY, replaces=0, at_ms=clock.now()),
    )
    clock.pass_days(2)
    async with open_runtime(path, agent=echo, clock=clock) as runtime:
        await runtime.reset("b:1")
        assert await runtime.prune_empty_sessions() == 1
        assert (await runtime.ask("b:1", "hello")).text == "re: hello"
