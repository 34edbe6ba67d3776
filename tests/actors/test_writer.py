"""The Writer on real files: order, batches, back-pressure, cancellation, failure, the end."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import apsw
import pytest
import trio
import trio.testing

from onepen import Receipt, Ticket, WriterRef, WriterSettings, open_sqlite, open_writer
from onepen.storage.errors import (
    BatchUnknownError,
    InvalidContentError,
    LowSpaceError,
    StaleEpochError,
    StorageUnavailableError,
    WriterClosedError,
    WriterFailedError,
    WriterFullError,
)
from onepen.storage.units import Durable, Refused, Unit, Unknown

from .fixtures import StillClock, Talk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from onepen.storage.sqlite import SqliteEngine


class Gate:
    """Holds a step of the engine until it is opened, from any thread; then it may fail."""

    def __init__(self, engine: SqliteEngine, step: str) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.error: BaseException | None = None
        original: Callable[..., Any] = getattr(engine, step)

        def gated(*arguments: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(10)
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            return original(*arguments)

        setattr(engine, step, gated)

    async def wait_reached(self) -> None:
        await trio.to_thread.run_sync(self.reached.wait)


class Bench:
    """A Writer on a file, with its engine at hand."""

    def __init__(self, path: Path, *, inline: bool, settings: WriterSettings | None = None) -> None:
        self.path = path
        self.inline = inline
        self.settings = settings or WriterSettings(backoff_first_s=0.001, backoff_max_s=0.01)
        self.clock = StillClock()
        self.engine: SqliteEngine

    def _open(self) -> SqliteEngine:
        self.engine = open_sqlite(self.path, self.clock)
        return self.engine

    @asynccontextmanager
    async def open(self, at: Callable[[str], object] | None = None) -> AsyncGenerator[WriterRef]:
        async with open_writer(
            self._open, self.clock, self.settings, inline=self.inline, at=at
        ) as writer:
            yield writer

    def stored(self, talk: Talk) -> list[str | None]:
        """What a fresh process would find."""
        engine = open_sqlite(self.path, self.clock)
        try:
            with engine.reading() as reader:
                return [m.text for m in reader.transcript(talk.session_id, limit=10_000).messages]
        finally:
            engine.close()


@pytest.fixture(params=["thread", "inline"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    """The same tests for both drivers: they run the same pen."""
    return Bench(tmp_path / "chat.db", inline=request.param == "inline")


@pytest.fixture
def threaded(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "chat.db", inline=False)


async def resolved(ticket: Ticket) -> Receipt:
    """The receipt of a ticket whose wait may end early while storage is down."""
    while ticket.receipt is None:
        # One hop through a thread: lets the writer's thread and the loop go on, without a clock.
        await trio.to_thread.run_sync(lambda: None)
    return ticket.receipt


async def test_a_written_unit_is_on_disk_when_write_returns(bench: Bench) -> None:
    """INV-2: the receipt comes after the commit."""
    talk = Talk(1)
    async with bench.open() as writer:
        await writer.write(talk.opening())
        receipt = await writer.write(talk.message("first"))
        assert receipt.heads[0].next_seq == 1
        texts = await writer.read(
            lambda reader: [m.text for m in reader.transcript(talk.session_id).messages]
        )
        assert texts == ["first"]
    assert bench.stored(talk) == ["first"]


async def test_units_are_written_in_the_order_of_posting(bench: Bench) -> None:
    """INV-4: many posts without waiting keep their order, and each ticket gets its own receipt."""
    talk = Talk(1)
    async with bench.open() as writer:
        tickets = [writer.post(talk.opening())]
        tickets += [writer.post(talk.message(str(n))) for n in range(50)]
        receipts = [await ticket.wait() for ticket in tickets]
    assert all(isinstance(receipt, Durable) for receipt in receipts)
    assert bench.stored(talk) == [str(n) for n in range(50)]


async def test_what_waits_becomes_one_batch(threaded: Bench) -> None:
    """DESIGN: while one batch commits the next gathers; no timer is needed."""
    talk = Talk(1)
    async with threaded.open() as writer:
        gate = Gate(threaded.engine, "commit")
        first = writer.post(talk.opening())
        await gate.wait_reached()
        rest = [writer.post(talk.message(str(n))) for n in range(100)]
        gate.opened.set()
        await first.wait()
        commits = {(await ticket.durable()).commit_seq for ticket in rest}
        assert len(commits) == 1
        assert writer.statistics().traffic.batch_units_max == 100


async def test_batches_are_capped_in_rows(tmp_path: Path) -> None:
    """INV-14: a long queue is cut into batches of a bounded size."""
    settings = WriterSettings(batch_rows_max=10)
    bench = Bench(tmp_path / "chat.db", inline=True, settings=settings)
    talk = Talk(1)
    async with bench.open() as writer:
        await writer.write(talk.opening())
        tickets = [writer.post(talk.message()) for _ in range(35)]
        for ticket in tickets:
            await ticket.durable()
        assert writer.statistics().traffic.batch_units_max == 10


async def test_a_full_ledger_pushes_back_and_room_waits(tmp_path: Path) -> None:
    """INV-14: nothing is dropped; posting is refused, and room comes when a batch is done."""
    settings = WriterSettings(units_waiting_max=3)
    bench = Bench(tmp_path / "chat.db", inline=False, settings=settings)
    talk = Talk(1)
    async with bench.open() as writer:
        gate = Gate(bench.engine, "commit")
        writer.post(talk.opening())
        writer.post(talk.message("0"))
        writer.post(talk.message("1"))
        with pytest.raises(WriterFullError) as caught:
            writer.post(talk.message_at(2))
        assert caught.value.units == 3
        async with trio.open_nursery() as nursery:
            got_room = trio.Event()

            async def post_later() -> None:
                await writer.room()
                writer.post(talk.message("2"))
                got_room.set()

            nursery.start_soon(post_later)
            await trio.testing.wait_all_tasks_blocked()
            assert not got_room.is_set()
            gate.opened.set()
    assert bench.stored(talk) == ["0", "1", "2"]


async def test_room_is_bounded_in_bytes_too(tmp_path: Path) -> None:
    """INV-14: a few large units fill the ledger as many small ones do."""
    settings = WriterSettings(bytes_waiting_max=10_000)
    bench = Bench(tmp_path / "chat.db", inline=False, settings=settings)
    talk = Talk(1)
    async with bench.open() as writer:
        gate = Gate(bench.engine, "commit")
        writer.post(talk.opening())
        writer.post(talk.message("x" * 20_000))
        with pytest.raises(WriterFullError):
            writer.post(talk.message_at(1))
        gate.opened.set()


async def test_a_cancelled_wait_for_room_leaves_the_others_waiting_safely(tmp_path: Path) -> None:
    """INV-15: room that a cancelled waiter was given is not lost for the next one."""
    settings = WriterSettings(units_waiting_max=1)
    bench = Bench(tmp_path / "chat.db", inline=False, settings=settings)
    talk = Talk(1)
    async with bench.open() as writer:
        gate = Gate(bench.engine, "commit")
        writer.post(talk.opening())
        async with trio.open_nursery() as nursery:
            scopes = [trio.CancelScope() for _ in range(3)]

            async def wait_only(scope: trio.CancelScope) -> None:
                with scope:
                    await writer.room()

            async def wait_and_post() -> None:
                await writer.room()
                writer.post(talk.message("last"))

            for scope in scopes:
                nursery.start_soon(wait_only, scope)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(wait_and_post)
            await trio.testing.wait_all_tasks_blocked()
            scopes[0].cancel()
            gate.opened.set()
    assert bench.stored(talk) == ["last"]


async def test_cancelling_a_wait_never_revokes_the_write(threaded: Bench) -> None:
    """A8, INV-10: the caller is gone, the unit is stored, and the ticket still tells."""
    talk = Talk(1)
    async with threaded.open() as writer:
        await writer.write(talk.opening())
        gate = Gate(threaded.engine, "commit")
        ticket = writer.post(talk.message("kept"))
        await gate.wait_reached()
        with trio.move_on_after(0):
            await ticket.wait()
        assert ticket.receipt is None
        gate.opened.set()
        assert isinstance(await ticket.wait(), Durable)
    assert threaded.stored(talk) == ["kept"]


async def test_several_tasks_may_wait_for_one_ticket(bench: Bench) -> None:
    """Each waiter gets the receipt, also one that comes late."""
    talk = Talk(1)
    receipts: list[object] = []
    async with bench.open() as writer:
        ticket = writer.post(talk.opening())

        async def wait() -> None:
            receipts.append(await ticket.wait())

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait)
        await wait()
    assert len(receipts) == 4
    assert len(set(map(id, receipts))) == 1


async def test_a_refused_unit_refuses_the_later_ones_of_its_session_only(bench: Bench) -> None:
    """INV-13: one broken chain hurts nobody else."""
    talk, other = Talk(1), Talk(2)
    async with bench.open() as writer:
        await writer.write(talk.opening())
        await writer.write(other.opening())
        refused = [writer.post(talk.message_at(5)), writer.post(talk.message_at(6))]
        fine = writer.post(other.message("fine"))
        receipts = [await ticket.wait() for ticket in refused]
        assert [r.reason for r in receipts if isinstance(r, Refused)] == ["broken_chain"] * 2
        assert isinstance(await fine.wait(), Durable)


async def test_bad_content_is_refused_before_it_is_posted(bench: Bench) -> None:
    """INV-20: a lone surrogate never reaches the ledger."""
    talk = Talk(1)
    async with bench.open() as writer:
        await writer.write(talk.opening())
        with pytest.raises(InvalidContentError) as caught:
            writer.post(talk.message_at(0, "\ud800"))
        assert caught.value.field == "text"
        await writer.write(talk.message("fine"))
    assert bench.stored(talk) == ["fine"]


async def test_a_failed_commit_is_unknown_and_written_once_after_reopening(bench: Bench) -> None:
    """A8, INV-11: the caller sees a slower ticket, never a failure, and the row is there once."""
    talk = Talk(1)
    async with bench.open() as writer:
        await writer.write(talk.opening())
        engine, commit, failures = bench.engine, bench.engine.commit, [1, 2, 3]

        def fail_thrice() -> None:
            if failures:
                failures.pop()
                engine._roll_back()  # pyright: ignore[reportPrivateUsage]
                raise BatchUnknownError("commit", OSError("the sync failed"))
            commit()

        engine.commit = fail_thrice  # type: ignore[method-assign]
        receipt = await writer.write(talk.message("once"))
        assert not receipt.again
        statistics = writer.statistics()
        assert statistics.engine.reopenings == 3
        assert statistics.traffic.state == "open"
    assert bench.stored(talk) == ["once"]


async def test_a_commit_that_failed_after_it_was_done_is_recognised(bench: Bench) -> None:
    """A8: committed but not acknowledged; the re-sent unit is found stored, not stored twice."""
    talk = Talk(1)
    async with bench.open() as writer:
        await writer.write(talk.opening())
        engine, commit, failures = bench.engine, bench.engine.commit, [1]

        def commit_then_fail() -> None:
            commit()
            if failures:
                failures.pop()
                raise BatchUnknownError("commit", OSError("the answer was lost"))

        engine.commit = commit_then_fail  # type: ignore[method-assign]
        receipt = await writer.write(talk.message("once"))
        assert receipt.again
    assert bench.stored(talk) == ["once"]


async def test_storage_that_stays_down_fails_closed_and_recovers_by_itself(tmp_path: Path) -> None:
    """INV-15: waits end with an error, new work is refused, the ledger is written later."""
    settings = WriterSettings(down_after_s=0.05, backoff_first_s=0.001, backoff_max_s=0.01)
    bench = Bench(tmp_path / "chat.db", inline=False, settings=settings)
    talk = Talk(1)
    async with bench.open() as writer:
        await writer.write(talk.opening())
        bench.engine.free_bytes = lambda: 0
        ticket = writer.post(talk.message("patient"))
        with pytest.raises(StorageUnavailableError) as caught:
            await ticket.wait()
        assert "must stay free" in caught.value.reason
        with pytest.raises(StorageUnavailableError):
            writer.post(talk.message_at(1))
        with pytest.raises(StorageUnavailableError):
            await writer.room()
        assert ticket.receipt is None
        assert writer.statistics().traffic.state == "down"
        bench.engine.free_bytes = lambda: 10**12
        assert isinstance(await resolved(ticket), Durable)
        await writer.write(talk.message("after"))
        assert writer.statistics().engine.reopenings == 0  # nothing was begun, nothing to doubt
    assert bench.stored(talk) == ["patient", "after"]


async def test_a_stalled_commit_counts_as_down_until_it_returns(tmp_path: Path) -> None:
    """INV-15: a disk that hangs ends the waits; when it answers after all, the ticket resolves."""
    settings = WriterSettings(down_after_s=0.05)
    bench = Bench(tmp_path / "chat.db", inline=False, settings=settings)
    talk = Talk(1)
    async with bench.open() as writer:
        await writer.write(talk.opening())
        gate = Gate(bench.engine, "commit")
        ticket = writer.post(talk.message("slow"))
        with pytest.raises(StorageUnavailableError, match="no progress"):
            await ticket.wait()
        gate.opened.set()
        assert isinstance(await resolved(ticket), Durable)
        assert writer.statistics().traffic.state == "open"
    assert bench.stored(talk) == ["slow"]


async def test_a_crashed_driver_is_restarted_and_nothing_is_lost(bench: Bench) -> None:
    """INV-13: a bug in the writer's thread is a slower ticket for everybody else."""
    talk = Talk(1)
    async with bench.open() as writer:
        await writer.write(talk.opening())
        stage, crashes = bench.engine.stage, [1, 2]

        def crash_twice(units: Any) -> Any:
            if crashes:
                crashes.pop()
                raise ZeroDivisionError
            return stage(units)

        bench.engine.stage = crash_twice  # type: ignore[method-assign]
        await writer.write(talk.message("once"))
        assert writer.statistics().restarts == 2
    assert bench.stored(talk) == ["once"]


async def test_a_driver_that_dies_for_good_answers_every_ticket(bench: Bench) -> None:
    """INV-15: the owner gets one clear error, every ticket is answered first."""
    talk = Talk(1)
    tickets: list[Ticket] = []

    def always_crash(units: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(WriterFailedError) as caught:
        async with bench.open() as writer:
            await writer.write(talk.opening())
            bench.engine.stage = always_crash  # type: ignore[method-assign]
            tickets += [writer.post(talk.message()) for _ in range(3)]
            await trio.sleep_forever()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert [type(ticket.receipt) for ticket in tickets] == [Unknown] * 3


async def test_an_engine_with_a_stale_epoch_is_never_reopened(tmp_path: Path) -> None:
    """INV-12: when somebody else owns the file, recovering would take it back from them."""
    bench = Bench(tmp_path / "chat.db", inline=False)
    talk = Talk(1)
    with pytest.raises(WriterFailedError) as caught:
        async with bench.open() as writer:
            await writer.write(talk.opening())
            other = apsw.Connection(str(bench.path))
            other.execute("UPDATE pen SET epoch = epoch + 1")
            other.close()
            await writer.post(talk.message()).wait()
            await trio.sleep_forever()
    assert isinstance(caught.value.__cause__, StaleEpochError)
    assert bench.stored(talk) == []


async def test_errors_of_the_block_leave_it_unwrapped(bench: Bench) -> None:
    """The caller's own exception is not buried in a group, and what was posted is still written."""
    talk = Talk(1)
    with pytest.raises(KeyError):
        async with bench.open() as writer:
            writer.post(talk.opening())
            writer.post(talk.message("posted"))
            raise KeyError("mine")
    assert bench.stored(talk) == ["posted"]


async def test_a_cancelled_block_drains_first(bench: Bench) -> None:
    """Shutdown is shielded, with a deadline: what was posted before the cancel is written."""
    talk = Talk(1)
    with trio.CancelScope() as scope:
        async with bench.open() as writer:
            writer.post(talk.opening())
            writer.post(talk.message("posted"))
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert bench.stored(talk) == ["posted"]


async def test_a_drain_that_can_not_finish_says_unknown(tmp_path: Path) -> None:
    """INV-15: the end comes at its deadline, and the honest answer is: not known."""
    settings = WriterSettings(drain_s=0.05, down_after_s=60)
    bench = Bench(tmp_path / "chat.db", inline=False, settings=settings)
    talk = Talk(1)
    gate: Gate | None = None
    async with bench.open() as writer:
        await writer.write(talk.opening())
        gate = Gate(bench.engine, "commit")
        ticket = writer.post(talk.message())
        await gate.wait_reached()
    assert isinstance(ticket.receipt, Unknown)
    gate.opened.set()  # let the thread that was left behind go


async def test_a_closed_writer_takes_nothing_new(bench: Bench) -> None:
    """After the end, and while it drains, posting is refused in words."""
    talk = Talk(1)
    async with bench.open() as writer:
        await writer.write(talk.opening())
    with pytest.raises(WriterClosedError):
        writer.post(talk.message_at(0))
    with pytest.raises(WriterClosedError):
        await writer.room()


async def test_a_writer_opened_again_has_the_next_epoch(bench: Bench) -> None:
    """INV-12: opening for writing is a fence."""
    async with bench.open() as writer:
        first = writer.epoch
    async with bench.open() as writer:
        assert writer.epoch > first


async def test_the_inline_driver_passes_its_named_points_in_order(tmp_path: Path) -> None:
    """Simulation stops and fails the Writer at these points: their order is a promise."""
    bench = Bench(tmp_path / "chat.db", inline=True)
    points: list[str] = []
    async with bench.open(at=points.append) as writer:
        await writer.write(Talk(1).opening())
        await trio.testing.wait_all_tasks_blocked()
        assert points == ["taken", "before commit", "committed", "acked"]


async def test_an_unresolved_ticket_has_no_receipt_at_the_point_behind_the_commit(
    tmp_path: Path,
) -> None:
    """INV-3: at `committed` nobody has been told yet; at `acked` everybody has."""
    bench = Bench(tmp_path / "chat.db", inline=True)
    seen: dict[str, bool] = {}
    ticket: Ticket | None = None

    def look(point: str) -> None:
        assert ticket is not None
        seen[point] = ticket.receipt is not None

    async with bench.open(at=look) as writer:
        ticket = writer.post(Talk(1).opening())
        await ticket.wait()
        await trio.testing.wait_all_tasks_blocked()
    assert seen == {"taken": False, "before commit": False, "committed": False, "acked": True}


async def test_an_inline_read_waits_for_a_staged_batch_in_memory() -> None:
    """INV-15: on one thread, nobody would end the transaction that such a read waits for."""
    clock, talk = StillClock(), Talk(1)
    read_at_commit: list[int] = []

    async with (
        trio.open_nursery() as nursery,
        open_writer(
            lambda: open_sqlite(None, clock),
            clock,
            inline=True,
            at=lambda point: nursery.start_soon(look) if point == "before commit" else None,
        ) as writer,
    ):

        async def look() -> None:
            read_at_commit.append(
                await writer.read(lambda reader: reader.revision(talk.session_id))
            )

        await writer.write(talk.opening())
        await writer.write(talk.message())
        await trio.testing.wait_all_tasks_blocked()
        assert read_at_commit == [0, 1]


async def test_free_space_that_can_not_be_told_is_trouble_not_a_crash(threaded: Bench) -> None:
    """INV-15: a sick disk makes tickets slower; the Writer lives."""
    talk, failures = Talk(1), [1, 2, 3]

    def free_bytes() -> int:
        if failures:
            failures.pop()
            raise OSError("the disk is sick")
        return 10**12

    async with threaded.open() as writer:
        threaded.engine.free_bytes = free_bytes
        await writer.write(talk.opening())
        assert writer.statistics().restarts == 0


async def test_the_end_does_not_wait_for_other_peoples_threads(threaded: Bench) -> None:
    """I6: closing has a thread of its own, whatever fills the common ones."""
    release = threading.Event()

    async def hold() -> None:
        await trio.to_thread.run_sync(release.wait)

    async with trio.open_nursery() as nursery:
        async with threaded.open() as writer:
            await writer.write(Talk(1).opening())
            limiter = trio.to_thread.current_default_thread_limiter()
            for _ in range(int(limiter.total_tokens)):
                nursery.start_soon(hold)
            await trio.testing.wait_all_tasks_blocked()
        assert limiter.available_tokens == 0
        release.set()


async def test_a_driver_that_can_not_start_is_tried_again(
    threaded: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-15: no thread to be had is an error like others, and nothing is left locked."""
    start, failures = threading.Thread.start, [1]

    def start_later(thread: threading.Thread) -> None:
        if thread.name == "onepen writer" and failures:
            failures.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    async with threaded.open() as writer:
        await writer.write(Talk(1).opening())
        assert writer.statistics().restarts == 1


async def test_statistics_tell_depth_age_batches_and_state(threaded: Bench) -> None:
    """What an operator looks at first."""
    talk = Talk(1)
    async with threaded.open() as writer:
        gate = Gate(threaded.engine, "commit")
        writer.post(talk.opening())
        ticket = writer.post(talk.message("x" * 100))
        before = writer.statistics().traffic
        assert (before.units_waiting, before.state) == (2, "open")
        assert before.bytes_waiting > 100
        assert before.oldest_age_s >= 0
        gate.opened.set()
        await ticket.wait()
        after = writer.statistics()
        assert (after.traffic.units_waiting, after.traffic.bytes_waiting) == (0, 0)
        assert after.traffic.units == 2
        assert after.engine.durable
        assert after.engine.commits == after.traffic.batches


async def test_many_producers_through_one_pen(bench: Bench) -> None:
    """A3, INV-4: fifty sessions at once, each with its own order, each message once."""
    talks = [Talk(n) for n in range(50)]
    async with bench.open() as writer:

        async def produce(talk: Talk) -> None:
            await writer.write(talk.opening())
            for n in range(20):
                await writer.write(talk.message(str(n)))

        async with trio.open_nursery() as nursery:
            for talk in talks:
                nursery.start_soon(produce, talk)
    for talk in talks:
        assert bench.stored(talk) == [str(n) for n in range(20)]


async def test_a_low_disk_is_an_error_with_its_numbers(threaded: Bench) -> None:
    """The watermark stops writing while there is still room for checkpoints."""
    async with threaded.open():
        threaded.engine.free_bytes = lambda: 5
        with pytest.raises(LowSpaceError) as caught:
            threaded.engine.stage([Unit(())])
        assert caught.value.free_bytes == 5
