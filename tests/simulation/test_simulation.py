"""The simulator itself: what a schedule decides, what a search covers, and what both must find."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import count, product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import find, given, settings

from onepen import open_sqlite, open_writer
from onepen.runtime.testing.simulation.runs import probe
from onepen.storage.errors import InvariantError
from onepen.testing import (
    Exploration,
    SimulationStuckError,
    SimulationUnsupportedError,
    explore,
    schedules,
    simulate,
)

from ..actors.fixtures import StillClock, Talk

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from onepen import Reader
    from onepen.storage.identity import SessionId

checkpoint = trio.lowlevel.checkpoint


class DuplicateError(Exception):
    """The planted bug showed."""


async def two_tasks() -> str:
    """Two tasks of three steps each; the value is the order of the steps."""
    steps: list[str] = []

    async def walk(name: str) -> None:
        for _ in range(2):
            steps.append(name)
            await checkpoint()
        steps.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(walk, "a")
        nursery.start_soon(walk, "b")
    return "".join(steps)


def flushing(*, mark_first: bool) -> Callable[[], Awaitable[None]]:
    """Two flushers of one outbox: right if the marker is set before the awaited write."""

    async def main() -> None:
        written: list[str] = []
        flushed = False

        async def flush() -> None:
            nonlocal flushed
            if flushed:
                return
            if mark_first:
                flushed = True
            await checkpoint()  # the write
            written.append("message")
            flushed = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flush)
            nursery.start_soon(flush)
        if written != ["message"]:
            raise DuplicateError(written)

    return main


async def deep() -> None:
    """Fails only if one task goes five steps while the other, which could go on, waits."""
    moves = 0

    async def move() -> None:
        nonlocal moves
        for _ in range(5):
            moves += 1
            await checkpoint()

    async def watch() -> None:
        before = moves
        await checkpoint()
        if moves - before == 5:
            raise DuplicateError

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        nursery.start_soon(move)


def fails(main: Callable[[], Awaitable[None]], schedule: list[int]) -> bool:
    try:
        simulate(main, schedule)
    except DuplicateError:
        return True
    return False


def replaying(error: BaseException) -> list[int]:
    """The schedule that the note of a failure holds."""
    match = re.search(r"simulate\(main, (\[.*\])\)", "\n".join(error.__notes__))
    assert match is not None
    schedule: list[int] = ast.literal_eval(match[1])
    return schedule


def private_names() -> tuple[object, ...]:
    """What a run replaces in trio."""
    run: Any = sys.modules["trio._core._run"]
    threads: Any = sys.modules["trio._core._thread_cache"]
    return run._r, run._ALLOW_DETERMINISTIC_SCHEDULING, threads.THREAD_CACHE


# One run.


def test_canary_every_choice_of_a_schedule_counts() -> None:
    """INV-22: if trio schedules in another way one day, this is the test that says so."""
    runs = [simulate(two_tasks, schedule) for schedule in product((0, 1), repeat=3)]
    assert [run.value for run in runs] == [
        "aaabbb",
        "aabbba",
        "abbbaa",
        "abaabb",
        "bbbaaa",
        "bbaaab",
        "baaabb",
        "babbaa",
    ]
    assert len({run.digest for run in runs}) == len({run.trace for run in runs}) == 8


def test_a_trace_names_tasks_by_their_place_in_the_run() -> None:
    run = simulate(two_tasks)
    names = [step.rpartition(".")[2] for step in run.trace]
    assert names == ["two_tasks#1", *["walk#3"] * 3, *["walk#4"] * 3, "two_tasks#1"]
    assert (run.choices, run.widths) == ((0, 0, 0), (2, 2, 2))


def test_arguments_are_handed_on_and_the_value_is_returned() -> None:
    async def add(left: int, right: int) -> int:
        return left + right

    assert simulate(add, (), 2, 3).value == 5


def test_the_choices_of_a_run_replay_it() -> None:
    run = simulate(two_tasks, [5, 6, 7])
    assert simulate(two_tasks, run.choices) == run


SCRIPT = """
import sys, trio
from onepen.testing import simulate

async def main():
    woken, done = trio.Event(), []

    async def wait(number):
        await woken.wait()
        done.append(number)
        with trio.move_on_after(1):
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(wait, number)
        await trio.sleep(1)
        woken.set()
        await trio.sleep(0.5)
        nursery.cancel_scope.cancel()
    return done

run = simulate(main, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
sys.stdout.write(f"{run.digest} {run.value}")
"""


def test_a_schedule_gives_the_same_run_in_every_process() -> None:
    """INV-22: events and cancelled scopes hold sets of tasks, whose order is no input."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1", "2")
    ]
    answers = [process.communicate(timeout=60)[0] for process in processes]
    assert answers[0]
    assert len(set(answers)) == 1


def test_a_thousand_seconds_of_sleep_take_no_time() -> None:
    async def nap() -> float:
        start = trio.current_time()
        await trio.sleep(1000)
        return trio.current_time() - start

    started = time.monotonic()
    assert simulate(nap).value == pytest.approx(1000)
    assert time.monotonic() - started < 5


def test_behind_the_budget_no_task_starves() -> None:
    """Three tasks, because with two of them many an unfair rotation is fair."""

    async def poll() -> int:
        moves = 0

        async def spin() -> None:
            while moves < 10:
                await checkpoint()

        async def move() -> None:
            nonlocal moves
            while moves < 10:
                moves += 1
                await checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(spin)
            nursery.start_soon(move)
            nursery.start_soon(spin)
        return moves

    for budget in range(20, 26):
        run = simulate(poll, budget=budget)
        assert run.value == 10
        assert not any(run.choices[:budget])
        assert len(run.choices) < budget + 40


def test_a_program_that_nobody_wakes_is_given_up() -> None:
    async def forget() -> None:
        await trio.Event().wait()

    with pytest.raises(SimulationStuckError, match="every task waits") as caught:
        simulate(forget)
    assert replaying(caught.value) == []


def test_a_program_that_never_ends_is_given_up() -> None:
    """A timer that goes on for ever hides that everybody else waits."""

    async def tick() -> None:
        for _ in count():
            await trio.sleep(1)

    with pytest.raises(SimulationStuckError, match="has not ended"):
        simulate(tick, budget=100)


def test_a_failure_carries_the_schedule_that_replays_it() -> None:
    main = flushing(mark_first=False)
    with pytest.raises(DuplicateError) as first:
        simulate(main, [2, 5, 0, 4, 0, 0])
    schedule = replaying(first.value)
    assert schedule == [0, 1]
    with pytest.raises(DuplicateError) as again:
        simulate(main, schedule)
    assert again.value.__notes__ == first.value.__notes__
    assert "flush#3" in first.value.__notes__[0]


def test_errors_are_not_unwrapped() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        simulate(deep, [0, 1])
    assert [type(error) for error in caught.value.exceptions] == [DuplicateError]
    assert replaying(caught.value) == [0, 1]


@pytest.mark.parametrize("schedule", [[], [0, 1]], ids=["success", "failure"])
def test_trio_is_left_as_it_was(schedule: list[int]) -> None:
    before = private_names()
    assert fails(flushing(mark_first=False), schedule) == bool(schedule)
    assert all(now is then for now, then in zip(private_names(), before, strict=True))


def test_inside_a_run_trio_asks_the_scheduler() -> None:
    """Otherwise the test above would pass on a simulator that replaces nothing."""

    async def look() -> tuple[object, ...]:
        return private_names()

    before, inside = private_names(), simulate(look).value
    assert inside[0] is not before[0]
    assert inside[1] is True
    assert inside[2] is not before[2]


def test_a_schedule_that_is_none_is_refused_before_the_run() -> None:
    async def never() -> None:
        raise AssertionError("it was run")

    wrong: Any = [0, "1"]
    with pytest.raises(TypeError):
        simulate(never, wrong)


# No threads.


def test_trios_threads_are_refused_even_if_one_is_idle() -> None:
    """Trio keeps its threads for a while, so counting them afterwards would miss this one."""

    async def use_a_thread() -> None:
        await trio.to_thread.run_sync(lambda: None)

    trio.run(use_a_thread)
    with pytest.raises(InvariantError, match="a thread was asked for"):
        simulate(use_a_thread)
    trio.run(use_a_thread)


def test_a_thread_that_is_left_behind_is_named() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="stray", daemon=True)

    async def start() -> None:
        thread.start()

    try:
        with pytest.raises(InvariantError, match="stray"):
            simulate(start)
    finally:
        release.set()
        thread.join()


def test_a_loop_in_another_thread_goes_on_beside_a_run() -> None:
    """Trio's names are there once for all threads, so that loop asks the scheduler too."""
    finished: list[str] = []

    def beside() -> None:
        finished.append(trio.run(two_tasks))

    async def main() -> None:
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()

    run = simulate(main)
    assert sorted(finished[0]) == list("aaabbb")
    assert len(run.trace) == 1


# Another trio.


def test_a_trio_without_the_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING")
    with pytest.raises(SimulationUnsupportedError, match="DETERMINISTIC") as caught:
        simulate(two_tasks)
    assert caught.value.trio_version == trio.__version__


def test_a_trio_that_does_not_ask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are there, but the loop looks elsewhere."""
    run: Any = sys.modules["trio._core._run"]
    deaf = SimpleNamespace(
        _r=None, _ALLOW_DETERMINISTIC_SCHEDULING=False, GLOBAL_RUN_CONTEXT=run.GLOBAL_RUN_CONTEXT
    )
    monkeypatch.setitem(sys.modules, "trio._core._run", deaf)
    probe.cache_clear()
    with pytest.raises(SimulationUnsupportedError, match="does not ask"):
        simulate(two_tasks)


# Searching.


def test_all_interleavings_of_two_tasks_are_found() -> None:
    """Six steps, three of each: 20 orders, each run once."""
    orders: list[str] = []

    async def main() -> None:
        orders.append(await two_tasks())

    found = explore(lambda: main, preemptions_max=4)
    assert found == Exploration(runs=20, traces=20, complete=True)
    assert len(set(orders)) == len(orders) == 20


def test_the_bound_counts_preemptions_and_forced_switches_are_free() -> None:
    """With none, either task goes first and the other follows when it has ended."""
    counts = [explore(lambda: two_tasks, preemptions_max=bound).runs for bound in range(5)]
    assert counts == [2, 6, 14, 18, 20]


def test_without_free_switches_the_bound_counts_every_choice() -> None:
    """So with none there is one order, and five choices come to all 20."""

    def runs(bound: int) -> int:
        return explore(lambda: two_tasks, preemptions_max=bound, free_switches=False).runs

    counts = [runs(bound) for bound in range(6)]
    assert counts[0] == 1
    assert counts == sorted(set(counts)), "each further choice brings more"
    assert counts[-1] == 20


@pytest.mark.parametrize("runs_max", [0, 19, 20])
def test_a_search_that_was_cut_short_says_so(runs_max: int) -> None:
    found = explore(lambda: two_tasks, preemptions_max=4, runs_max=runs_max)
    assert found.runs == runs_max
    assert found.complete is (runs_max == 20)


def test_a_search_beyond_the_budget_is_not_complete() -> None:
    assert not explore(lambda: two_tasks, preemptions_max=4, budget=2).complete


def test_a_program_with_inputs_of_its_own_is_no_subject() -> None:
    """Its schedules would mean something else each time."""
    numbers = iter(range(100))

    def factory() -> Callable[[], Awaitable[None]]:
        number = next(numbers)

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(2 + number):
                    nursery.start_soon(checkpoint)

        return main

    with pytest.raises(InvariantError, match="did not come to the same choices"):
        explore(factory)


def test_a_search_finds_the_duplicate_with_one_preemption() -> None:
    assert explore(lambda: flushing(mark_first=False), preemptions_max=0).complete
    with pytest.raises(DuplicateError) as caught:
        explore(lambda: flushing(mark_first=False), preemptions_max=1)
    assert sum(replaying(caught.value)) >= 1
    assert fails(flushing(mark_first=False), replaying(caught.value))


def test_a_search_shows_that_the_marker_before_the_write_is_right() -> None:
    found = explore(lambda: flushing(mark_first=True), preemptions_max=2)
    assert found.complete
    assert found.runs > 2


def test_a_search_finds_what_needs_five_steps_beside_a_task_that_waits() -> None:
    assert explore(lambda: deep, preemptions_max=0).complete
    with pytest.raises(ExceptionGroup) as caught:
        explore(lambda: deep, preemptions_max=1)
    assert caught.group_contains(DuplicateError)
    assert replaying(caught.value) == [0, 1]


def test_a_search_can_be_kept_to_some_tasks() -> None:
    """Of the 20 orders, those in which the first task is never chosen against the default."""
    second = explore(lambda: two_tasks, preemptions_max=4, only_at=lambda step: "#4" in step)
    assert second.complete
    assert 1 < second.runs < 20
    assert explore(lambda: two_tasks, only_at=lambda step: False).runs == 1


# Drawing.


def test_a_property_finds_the_duplicate_and_shrinks_it_to_one_preemption() -> None:
    main = flushing(mark_first=False)
    fixed = settings(max_examples=500, derandomize=True, database=None)
    assert find(schedules(), lambda schedule: fails(main, schedule), settings=fixed) == [0, 1]


@given(schedules())
def test_with_the_marker_before_the_write_no_schedule_duplicates(schedule: list[int]) -> None:
    simulate(flushing(mark_first=True), schedule)


# The Writer.


def texts_of(session_id: SessionId, reader: Reader) -> list[str | None]:
    return [message.text for message in reader.transcript(session_id).messages]


def two_producers() -> Callable[[], Awaitable[None]]:
    """Two sessions through one inline Writer in memory; each message must be there once."""

    async def main() -> None:
        clock, talks = StillClock(), [Talk(1), Talk(2)]
        async with open_writer(lambda: open_sqlite(None, clock), clock, inline=True) as writer:

            async def produce(talk: Talk) -> None:
                writer.post(talk.opening())
                await writer.write(talk.message(f"of {talk.number}"))

            async with trio.open_nursery() as nursery:
                for talk in talks:
                    nursery.start_soon(produce, talk)
            for talk in talks:
                read = partial(texts_of, talk.session_id)
                assert await writer.read(read) == [f"of {talk.number}"]

    return main


def of_producers_or_pen(step: str) -> bool:
    """Not of the driver's helpers and the watch: they touch no data, and with them as choices the
    schedules are tens of thousands.
    """
    return "until" not in step and "watch" not in step


def test_two_producers_are_stored_once_wherever_they_and_the_pen_preempt_each_other() -> None:
    """INV-4, INV-22: complete for one preemption, by a producer, the pen or the block itself."""
    found = explore(two_producers, preemptions_max=1, only_at=of_producers_or_pen)
    assert found.complete
    assert found.traces > 100
