"""The supervisor: restart kind x way to end x strategy, escalation, order, isolation, the end.

Each test names `autojump_clock` itself: pytest-trio looks for a clock among the arguments only, and
with `usefixtures` the waits would be real ones.
"""

from __future__ import annotations

import contextvars
import logging
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pytest
import trio
import trio.testing

from onepen.actors.policy import (
    Backoff,
    ChildSpec,
    Intensity,
    InvalidPolicyError,
    Policy,
    RestartKind,
    Strategy,
)
from onepen.actors.supervisor import (
    ChildStartError,
    RestartIntensityError,
    Supervisor,
    open_supervisor,
)

if TYPE_CHECKING:
    from collections.abc import Callable

STRATEGIES: tuple[Strategy, ...] = ("one_for_one", "one_for_all", "rest_for_one")
KINDS: tuple[RestartKind, ...] = ("permanent", "transient", "temporary")
Ending: TypeAlias = Literal["returns", "crashes", "is stopped"]
ENDINGS: tuple[Ending, ...] = ("returns", "crashes", "is stopped")

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


class Boom(Exception):
    pass


class Stage:
    """Children that write down what happens to them and do what the test tells them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.orders: dict[str, trio.MemorySendChannel[BaseException | None]] = {}
        self.start_errors: dict[str, list[BaseException]] = {}
        self.start_s: dict[str, float] = {}
        self.stop_s: dict[str, float] = {}
        self.alive: dict[str, int] = {}
        self.started: dict[str, trio.Event] = {}

    def child(
        self, name: str, restart: RestartKind = "permanent", stop_s: float = 5.0
    ) -> ChildSpec:
        async def start(*, task_status: trio.TaskStatus[str]) -> None:
            self.alive[name] = self.alive.get(name, 0) + 1
            assert self.alive[name] == 1, f"two lives of {name} at once"
            try:
                await self._live(name, task_status)
            finally:
                self.alive[name] -= 1

        return ChildSpec(name, start, restart, stop_s)

    def abc(self, restart: RestartKind = "permanent") -> list[ChildSpec]:
        """Three children; the one in the middle is of the given kind."""
        return [self.child("a"), self.child("b", restart), self.child("c")]

    async def _live(self, name: str, task_status: trio.TaskStatus[str]) -> None:
        send, receive = trio.open_memory_channel[BaseException | None](1)
        self.orders[name] = send
        try:
            await trio.sleep(self.start_s.get(name, 0))
            if self.start_errors.get(name):
                self.log.append(f"?{name}")
                raise self.start_errors[name].pop(0)
            self.log.append(f"+{name}")
            task_status.started(f"value of {name}")
            if name in self.started:
                self.started[name].set()
            error = await receive.receive()
            self.log.append(f"!{name}")
            if error is not None:
                raise error
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await trio.sleep(self.stop_s.get(name, 0))
            self.log.append(f"-{name}")
            raise

    def end(self, name: str, error: BaseException | None = None) -> None:
        self.orders[name].send_nowait(error)

    def taken(self) -> str:
        """What happened since the last look."""
        log, self.log = self.log, []
        return " ".join(log)


async def settle(seconds: float = 5.0) -> None:
    """Long enough for what a crash sets off; the clock jumps."""
    await trio.sleep(seconds)


def states(supervisor: Supervisor) -> dict[str, str]:
    return {child.name: child.state for child in supervisor.children()}


def restarts(supervisor: Supervisor) -> dict[str, int]:
    return {child.name: child.restarts for child in supervisor.children()}


# The matrix: what happens to the middle one of three, and to its siblings ---------------------

GROUP_RESTART = {
    "one_for_one": "!b +b",
    "one_for_all": "!b -c -a +a +b +c",
    "rest_for_one": "!b -c +b +c",
}


def expected(strategy: Strategy, kind: RestartKind, ending: Ending) -> tuple[str, list[str]]:
    """What is written down, and who runs afterwards."""
    if ending == "is stopped":
        return "-b", ["a", "c"]
    if kind == "permanent" or (kind == "transient" and ending == "crashes"):
        return GROUP_RESTART[strategy], ["a", "b", "c"]
    return "!b", ["a", "c"]


@every_strategy
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ending", ENDINGS)
async def test_the_end_of_a_child_does_what_kind_and_strategy_say(
    autojump_clock: trio.testing.MockClock, strategy: Strategy, kind: RestartKind, ending: Ending
) -> None:
    stage = Stage()
    async with open_supervisor(Policy(strategy=strategy), stage.abc(kind)) as supervisor:
        assert stage.taken() == "+a +b +c"
        if ending == "is stopped":
            assert await supervisor.stop_child("b")
        else:
            stage.end("b", Boom() if ending == "crashes" else None)
        await settle()
        happened, running = expected(strategy, kind, ending)
        assert stage.taken() == happened
        assert states(supervisor) == dict.fromkeys(running, "running")
    assert stage.taken() == " ".join(f"-{name}" for name in reversed(running))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["one_for_all", "rest_for_one"])
async def test_a_group_restart_starts_siblings_again_unless_they_are_temporary(
    autojump_clock: trio.testing.MockClock, strategy: Strategy, kind: RestartKind
) -> None:
    stage = Stage()
    async with open_supervisor(Policy(strategy=strategy), stage.abc(kind)) as supervisor:
        stage.taken()
        stage.end("a", Boom())
        await settle()
        again = "" if kind == "temporary" else "+b "
        assert stage.taken() == f"!a -c -b +a {again}+c"
        assert ("b" in states(supervisor)) == (kind != "temporary")


@pytest.mark.parametrize("strategy", ["one_for_all", "rest_for_one"])
async def test_a_transient_child_that_has_returned_stays_out_of_a_group_restart(
    autojump_clock: trio.testing.MockClock, strategy: Strategy
) -> None:
    stage = Stage()
    async with open_supervisor(Policy(strategy=strategy), stage.abc("transient")):
        stage.end("b")
        await settle()
        stage.taken()
        stage.end("a", Boom())
        await settle()
        assert stage.taken() == "!a -c +a +c"


async def test_a_transient_child_that_returns_while_its_group_stops_is_done(
    autojump_clock: trio.testing.MockClock,
) -> None:
    finish = trio.Event()
    lives = 0

    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        nonlocal lives
        lives += 1
        task_status.started()
        with trio.CancelScope(shield=True):
            await finish.wait()

    stage = Stage()
    children = [stage.child("a"), ChildSpec("b", start, "transient")]
    async with open_supervisor(Policy(strategy="one_for_all"), children) as supervisor:
        stage.end("a", Boom())
        await trio.sleep(1)
        finish.set()
        await settle()
        assert states(supervisor) == {"a": "running"}
        assert lives == 1


# Back-off and intensity -----------------------------------------------------------------------


async def test_the_wait_before_a_restart_grows_with_each_crash_of_the_child(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    policy = Policy(backoff=Backoff(first_s=1.0, factor=2.0, max_s=3.0))
    waits: list[float] = []
    async with open_supervisor(policy, [stage.child("a"), stage.child("b")]) as supervisor:
        for name in ("a", "a", "a", "b"):
            crashed_s = trio.current_time()
            stage.end(name, Boom())
            stage.started[name] = trio.Event()
            await trio.testing.wait_all_tasks_blocked()
            assert states(supervisor)[name] == "waiting"
            await stage.started[name].wait()
            waits.append(trio.current_time() - crashed_s)
        assert restarts(supervisor) == {"a": 3, "b": 1}
    assert waits == pytest.approx([1.0, 2.0, 3.0, 1.0])


@pytest.mark.parametrize("strategy", ["one_for_all", "rest_for_one"])
async def test_siblings_are_down_while_the_group_waits(
    autojump_clock: trio.testing.MockClock, strategy: Strategy
) -> None:
    stage = Stage()
    policy = Policy(strategy=strategy, backoff=Backoff(first_s=10.0))
    async with open_supervisor(policy, stage.abc()) as supervisor:
        stage.end("a", Boom())
        await trio.sleep(5)
        assert states(supervisor) == dict.fromkeys("abc", "waiting")


@every_strategy
async def test_crashes_beyond_the_intensity_stop_everything_and_raise_one_error(
    autojump_clock: trio.testing.MockClock, strategy: Strategy
) -> None:
    stage = Stage()
    policy = Policy(strategy=strategy, intensity=Intensity(restarts_max=2))
    last = Boom("last")
    left = False
    with pytest.raises(RestartIntensityError) as caught:
        async with open_supervisor(policy, stage.abc(), name="root") as supervisor:
            for error in (Boom(), Boom()):
                stage.end("b", error)
                await settle()
            assert supervisor.statistics().restarts >= 2
            stage.taken()
            stage.end("b", last)
            try:
                await trio.sleep_forever()
            finally:
                left = True
    assert left
    assert stage.taken() == "!b -c -a"
    assert (caught.value.supervisor, caught.value.child, caught.value.restarts) == ("root", "b", 2)
    assert caught.value.__cause__ is last


async def test_the_intensity_counts_the_crashes_of_all_children_together(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    policy = Policy(intensity=Intensity(restarts_max=2))
    with pytest.raises(RestartIntensityError) as caught:
        async with open_supervisor(policy, stage.abc()):
            for name in "abc":
                stage.end(name, Boom())
                await settle()
    assert caught.value.child == "c"


async def test_crashes_that_lie_further_apart_than_the_period_go_on_for_ever(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    policy = Policy(intensity=Intensity(restarts_max=1, period_s=10.0))
    async with open_supervisor(policy, stage.abc()) as supervisor:
        for _ in range(5):
            stage.end("b", Boom())
            await settle(11)
        assert restarts(supervisor)["b"] == 5


async def test_a_permanent_child_that_keeps_returning_escalates_without_a_cause(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    with pytest.raises(RestartIntensityError) as caught:
        async with open_supervisor(Policy(intensity=Intensity(restarts_max=0)), stage.abc()):
            stage.end("b")
            await trio.sleep_forever()
    assert caught.value.__cause__ is None


async def test_an_escalation_is_raised_even_if_the_cancelled_block_fails(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage()
    with pytest.raises(RestartIntensityError):
        async with open_supervisor(Policy(intensity=Intensity(restarts_max=0)), stage.abc()):
            stage.end("b", Boom())
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("the block's own")
    assert "the block failed" in caplog.text


async def test_an_interrupt_of_the_block_is_not_hidden_by_an_escalation(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    with pytest.raises(KeyboardInterrupt):
        async with open_supervisor(Policy(intensity=Intensity(restarts_max=0)), stage.abc()):
            stage.end("b", Boom())
            try:
                await trio.sleep_forever()
            finally:
                raise KeyboardInterrupt
    assert stage.taken() == "+a +b +c !b -c -a"


async def test_children_stop_at_an_escalation_even_if_the_block_is_slow_to_leave(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    with pytest.raises(RestartIntensityError):
        async with open_supervisor(Policy(intensity=Intensity(restarts_max=0)), stage.abc()):
            stage.end("b", Boom())
            with trio.CancelScope(shield=True):
                await settle()
            assert stage.taken() == "+a +b +c !b -c -a"


# Failed starts --------------------------------------------------------------------------------


@every_strategy
async def test_a_failed_first_start_stops_the_ones_before_it_in_reverse(
    autojump_clock: trio.testing.MockClock, strategy: Strategy
) -> None:
    stage = Stage()
    error = Boom()
    stage.start_errors["c"] = [error]
    with pytest.raises(ChildStartError) as caught:
        async with open_supervisor(Policy(strategy=strategy), [*stage.abc(), stage.child("d")]):
            pytest.fail("the block must not run")
    assert stage.taken() == "+a +b ?c -b -a"
    assert caught.value.child == "c"
    assert caught.value.__cause__ is error


async def test_a_child_that_returns_before_it_has_started_can_not_be_started(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.lowlevel.checkpoint()

    with pytest.raises(ChildStartError):
        async with open_supervisor(Policy(), [ChildSpec("a", start)]):
            pytest.fail("the block must not run")


@every_strategy
async def test_a_failed_restart_counts_as_another_crash_and_is_tried_again(
    autojump_clock: trio.testing.MockClock, strategy: Strategy
) -> None:
    stage = Stage()
    async with open_supervisor(Policy(strategy=strategy), stage.abc()) as supervisor:
        stage.start_errors["b"] = [Boom(), Boom()]
        stage.end("b", Boom())
        await settle()
        assert states(supervisor) == dict.fromkeys("abc", "running")
        assert supervisor.statistics().crashes == 3
        assert restarts(supervisor)["b"] == 3


@every_strategy
async def test_restarts_that_keep_failing_escalate(
    autojump_clock: trio.testing.MockClock, strategy: Strategy
) -> None:
    stage = Stage()
    policy = Policy(strategy=strategy, intensity=Intensity(restarts_max=2))
    last = Boom("last")
    with pytest.raises(RestartIntensityError) as caught:
        async with open_supervisor(policy, stage.abc()):
            stage.start_errors["b"] = [Boom(), last]
            stage.end("b", Boom())
            await trio.sleep_forever()
    assert caught.value.__cause__ is last


async def test_a_transient_child_that_returns_before_a_restart_has_started_has_crashed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    lives = 0

    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        nonlocal lives
        lives += 1
        if lives == 1:
            task_status.started()
            raise Boom
        if lives > 2:
            task_status.started()
            await trio.sleep_forever()

    async with open_supervisor(Policy(), [ChildSpec("a", start, "transient")]) as supervisor:
        await settle()
        assert supervisor.statistics().crashes == 2
        assert states(supervisor) == {"a": "running"}


async def test_a_crash_during_a_group_restart_starts_the_restart_over(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    async with open_supervisor(Policy(strategy="one_for_all"), stage.abc()) as supervisor:
        stage.taken()
        stage.start_s["b"] = 10.0
        stage.end("c", Boom())
        await settle()
        assert states(supervisor) == {"a": "running", "b": "starting", "c": "waiting"}
        stage.end("a", Boom())
        await settle(30)
        assert stage.taken() == "!c -b -a +a !a -b +a +b +c"
        assert supervisor.statistics().crashes == 2


async def test_a_crash_further_up_widens_a_group_restart_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    policy = Policy(strategy="rest_for_one", backoff=Backoff(first_s=10.0))
    async with open_supervisor(policy, stage.abc()) as supervisor:
        stage.taken()
        stage.end("c", Boom())
        await trio.sleep(1)
        stage.end("a", Boom())
        await trio.sleep(1)
        assert states(supervisor) == dict.fromkeys("abc", "waiting")
        await trio.sleep(20)
        assert stage.taken() == "!c !a -b +a +b +c"


# Order ----------------------------------------------------------------------------------------


@every_strategy
async def test_each_child_starts_after_the_one_before_has_started(
    autojump_clock: trio.testing.MockClock, strategy: Strategy
) -> None:
    stage = Stage()
    stage.start_s = {"a": 3.0, "b": 1.0}
    async with open_supervisor(Policy(strategy=strategy), stage.abc()):
        assert stage.taken() == "+a +b +c"
        assert trio.current_time() >= 4.0


@every_strategy
async def test_children_stop_in_reverse_each_after_the_one_behind_it(
    autojump_clock: trio.testing.MockClock, strategy: Strategy
) -> None:
    stage = Stage()
    stage.stop_s = {"c": 3.0, "b": 1.0}
    async with open_supervisor(Policy(strategy=strategy), stage.abc()):
        stage.taken()
    assert stage.taken() == "-c -b -a"


@every_strategy
async def test_a_child_that_waits_for_its_restart_is_not_started_by_the_end(
    autojump_clock: trio.testing.MockClock, strategy: Strategy
) -> None:
    stage = Stage()
    policy = Policy(strategy=strategy, backoff=Backoff(first_s=30.0))
    async with open_supervisor(policy, stage.abc()):
        stage.end("b", Boom())
        await settle()
        stage.taken()
        before_s = trio.current_time()
    assert "+" not in stage.taken()
    assert trio.current_time() - before_s < 1.0


async def test_a_crash_while_the_supervisor_stops_is_not_counted_or_mended(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    stage.stop_s["c"] = 3.0

    async def crash_b() -> None:
        await trio.sleep(1)
        stage.end("b", Boom())

    async with trio.open_nursery() as nursery:
        async with open_supervisor(Policy(), stage.abc()) as supervisor:
            stage.taken()
            nursery.start_soon(crash_b)
        assert stage.taken() == "!b -c -a"
        assert supervisor.statistics().crashes == 0


# Dynamic children -----------------------------------------------------------------------------


@every_strategy
async def test_a_dynamic_child_returns_its_value_and_stops_first(
    autojump_clock: trio.testing.MockClock, strategy: Strategy
) -> None:
    stage = Stage()
    async with open_supervisor(Policy(strategy=strategy), stage.abc()) as supervisor:
        assert await supervisor.start_child(stage.child("d", "transient")) == "value of d"
        assert [child.name for child in supervisor.children()] == ["a", "b", "c", "d"]
        assert supervisor.children()[3].restart == "transient"
        stage.taken()
    assert stage.taken() == "-d -c -b -a"


async def test_a_dynamic_child_that_fails_to_start_is_not_retried_and_harms_nobody(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    error = Boom()
    stage.start_errors["d"] = [error]
    async with open_supervisor(Policy(), stage.abc()) as supervisor:
        with pytest.raises(ChildStartError) as caught:
            await supervisor.start_child(stage.child("d"))
        assert caught.value.__cause__ is error
        await settle()
        assert stage.taken() == "+a +b +c ?d"
        assert supervisor.statistics().crashes == 0
        await supervisor.start_child(stage.child("d"))


async def test_a_name_that_is_taken_is_refused_until_its_holder_is_gone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    async with open_supervisor(Policy(), stage.abc()) as supervisor:
        with pytest.raises(ChildStartError, match="taken"):
            await supervisor.start_child(stage.child("b"))
        assert stage.taken() == "+a +b +c"
        await supervisor.stop_child("b")
        await supervisor.start_child(stage.child("b"))
        assert list(states(supervisor)) == ["a", "c", "b"]


async def test_an_invalid_child_or_policy_starts_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    async with open_supervisor(Policy()) as supervisor:
        with pytest.raises(InvalidPolicyError):
            await supervisor.start_child(stage.child(""))
    with pytest.raises(InvalidPolicyError):
        async with open_supervisor(Policy(), [*stage.abc(), stage.child("a")]):
            pytest.fail("the block must not run")
    assert stage.taken() == ""


async def test_cancelling_the_wait_for_a_start_stops_the_child(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    stage.start_s["d"] = 10.0
    async with open_supervisor(Policy(), stage.abc()) as supervisor:
        with trio.move_on_after(1) as scope:
            await supervisor.start_child(stage.child("d"))
        assert scope.cancelled_caught
        await settle(30)
        assert stage.taken() == "+a +b +c -d"
        assert "d" not in states(supervisor)


async def test_a_child_added_during_a_group_restart_starts_as_its_last_member(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    policy = Policy(strategy="one_for_all", backoff=Backoff(first_s=10.0))
    async with open_supervisor(policy, stage.abc()) as supervisor:
        stage.end("a", Boom())
        await trio.sleep(1)
        stage.taken()
        assert await supervisor.start_child(stage.child("d", "temporary")) == "value of d"
        assert stage.taken() == "+a +b +c +d"
        assert restarts(supervisor) == {"a": 1, "b": 1, "c": 1, "d": 0}


async def test_a_group_restart_takes_a_child_along_that_is_just_being_started(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    stage.start_s["d"] = 5.0
    async with open_supervisor(Policy(strategy="one_for_all"), stage.abc()) as supervisor:
        stage.taken()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.start_child, stage.child("d"))
            await trio.sleep(1)
            stage.end("a", Boom())
        assert stage.taken() == "!a -d -c -b +a +b +c +d"


@every_strategy
async def test_a_child_stopped_while_it_waits_for_its_restart_stays_down(
    autojump_clock: trio.testing.MockClock, strategy: Strategy
) -> None:
    stage = Stage()
    policy = Policy(strategy=strategy, backoff=Backoff(first_s=10.0))
    async with open_supervisor(policy, stage.abc()) as supervisor:
        stage.end("b", Boom())
        await trio.sleep(1)
        assert await supervisor.stop_child("b")
        await trio.sleep(20)
        assert states(supervisor) == dict.fromkeys("ac", "running")


async def test_a_start_cancelled_as_it_fails_leaves_the_name_to_its_next_holder(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Which of the two callers runs first is trio's choice, so there are enough rounds for both."""
    stage = Stage()
    async with open_supervisor(Policy()) as supervisor:

        async def one_round() -> None:
            failed = trio.Event()
            scope = trio.CancelScope()

            async def start(*, task_status: trio.TaskStatus[None]) -> None:
                await trio.sleep(1)
                scope.cancel()
                failed.set()
                raise Boom

            async def first() -> None:
                with scope:
                    await supervisor.start_child(ChildSpec("d", start))

            async def second() -> None:
                await failed.wait()
                await supervisor.start_child(stage.child("d"))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(first)
                nursery.start_soon(second)
            assert states(supervisor) == {"d": "running"}
            await supervisor.stop_child("d")

        for _ in range(30):
            await one_round()


async def test_stopping_a_child_that_is_not_there_is_no_error(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_supervisor(Policy()) as supervisor:
        assert await supervisor.stop_child("nobody")


async def test_nothing_can_be_started_while_the_supervisor_stops(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    refused = False
    supervisor: Supervisor

    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        nonlocal refused
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True), pytest.raises(ChildStartError, match="stopping"):
                await supervisor.start_child(stage.child("late"))
            refused = True

    async with open_supervisor(Policy(), [ChildSpec("a", start)]) as supervisor:
        pass
    assert refused


# Isolation ------------------------------------------------------------------------------------

WHO = contextvars.ContextVar("WHO", default="nobody")


async def test_children_run_in_the_context_of_the_supervisor_not_of_their_starter(
    autojump_clock: trio.testing.MockClock,
) -> None:
    seen: list[str] = []

    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        seen.append(WHO.get())
        WHO.set("child")
        task_status.started()
        if len(seen) == 1:
            raise Boom
        await trio.sleep_forever()

    WHO.set("owner")
    async with open_supervisor(Policy()) as supervisor:
        WHO.set("caller")
        await supervisor.start_child(ChildSpec("a", start))
        await settle()
        await supervisor.start_child(ChildSpec("b", start))
    assert seen == ["owner", "owner", "owner"]


async def test_a_group_of_errors_is_one_crash(autojump_clock: trio.testing.MockClock) -> None:
    async def fail() -> None:
        raise Boom

    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            nursery.start_soon(fail)

    stage = Stage()
    children = [stage.child("a"), ChildSpec("b", start, "temporary")]
    async with open_supervisor(Policy(), children) as supervisor:
        await settle()
        assert states(supervisor) == {"a": "running"}


async def test_an_error_while_stopping_is_logged_and_changes_nothing(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            raise Boom

    stage = Stage()
    children = [stage.child("a"), ChildSpec("b", start), stage.child("c")]
    async with open_supervisor(Policy(), children) as supervisor:
        pass
    assert stage.taken() == "+a +c -c -a"
    assert supervisor.statistics().crashes == 0
    assert "b failed while stopping" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
async def test_what_is_no_exception_stops_everything_and_is_raised_as_it_is(
    autojump_clock: trio.testing.MockClock, error: BaseException
) -> None:
    stage = Stage()
    with pytest.raises(type(error)) as caught:
        async with open_supervisor(Policy(), stage.abc("temporary")):
            stage.end("b", error)
            await trio.sleep_forever()
    assert caught.value is error
    assert stage.taken() == "+a +b +c !b -c -a"


async def test_starting_twice_is_the_childs_own_crash(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        task_status.started()

    with pytest.raises(RestartIntensityError) as caught:
        async with open_supervisor(
            Policy(intensity=Intensity(restarts_max=0)), [ChildSpec("a", start)]
        ):
            await trio.sleep_forever()
    assert isinstance(caught.value.__cause__, RuntimeError)


# Children that ignore their cancellation ------------------------------------------------------


async def test_an_overdue_child_is_reported_with_its_stack_and_holds_up_no_sibling(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage()
    stage.stop_s["c"] = 100.0
    stopped_s: list[float] = []

    async def watch(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            stopped_s.append(trio.current_time())

    children = [ChildSpec("w", watch), stage.child("c", stop_s=2.0)]
    async with open_supervisor(Policy(), children) as supervisor:
        began_s = trio.current_time()
    assert stopped_s[0] - began_s == pytest.approx(2.0, abs=0.1)
    # trio can't abandon a task: the end of the block takes as long as the child.
    assert trio.current_time() - began_s >= 100.0
    assert supervisor.statistics().overdue == 1
    (record,) = [r for r in caplog.records if "ignores its cancellation" in r.getMessage()]
    assert record.levelno == logging.ERROR
    assert "in _live" in record.getMessage()
    assert "trio.sleep(self.stop_s" in record.getMessage()


async def test_stopping_an_overdue_child_says_so_and_its_name_stays_taken(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    stage.stop_s["b"] = 100.0
    async with open_supervisor(Policy(), [stage.child("b", stop_s=2.0)]) as supervisor:
        assert not await supervisor.stop_child("b")
        assert states(supervisor) == {"b": "stopping"}
        with pytest.raises(ChildStartError):
            await supervisor.start_child(stage.child("b"))
        await settle(100)
        assert states(supervisor) == {}
        assert stage.taken() == "+b -b"


async def test_a_restart_waits_until_an_overdue_sibling_is_really_gone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """`Stage` fails a child of which two lives overlap."""
    stage = Stage()
    stage.stop_s["b"] = 50.0
    children = [stage.child("a"), stage.child("b", stop_s=2.0)]
    async with open_supervisor(Policy(strategy="one_for_all"), children) as supervisor:
        stage.taken()
        stage.end("a", Boom())
        await settle(40)
        assert stage.taken() == "!a"
        await settle(40)
        assert stage.taken() == "-b +a +b"
        assert supervisor.statistics().overdue == 1
        stage.stop_s.clear()


# The block ------------------------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("make", [Boom, lambda: ExceptionGroup("own", [Boom()]), KeyboardInterrupt])
async def test_an_error_of_the_block_leaves_it_as_it_is(
    autojump_clock: trio.testing.MockClock, strategy: Strategy, make: Callable[[], BaseException]
) -> None:
    stage = Stage()
    error = make()
    with pytest.raises(type(error)) as caught:
        async with open_supervisor(Policy(strategy=strategy), stage.abc()):
            raise error
    assert caught.value is error
    assert stage.taken() == "+a +b +c -c -b -a"


@every_strategy
async def test_a_cancelled_block_stops_children_in_reverse_with_their_time(
    autojump_clock: trio.testing.MockClock, strategy: Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage()
    stage.stop_s = {"c": 3.0, "b": 2.0, "a": 1.0}
    with trio.move_on_after(1) as scope:
        async with open_supervisor(Policy(strategy=strategy), stage.abc()):
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert stage.taken() == "+a +b +c -c -b -a"
    assert trio.current_time() >= 7.0
    assert "ignores its cancellation" not in caplog.text


async def test_an_error_of_a_cancelled_block_is_not_lost_to_an_overdue_child(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    stage.stop_s["a"] = 100.0
    with pytest.raises(Boom), trio.move_on_after(1):
        async with open_supervisor(Policy(), [stage.child("a", stop_s=2.0)]):
            try:
                await trio.sleep_forever()
            finally:
                raise Boom
    assert stage.taken() == "+a -a"


async def test_children_work_and_restart_until_a_cancelled_block_has_left(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    with trio.move_on_after(1):
        async with open_supervisor(Policy(), stage.abc()):
            stage.taken()
            with trio.CancelScope(shield=True):
                await settle()
                stage.end("b", Boom())
                await settle()
                assert stage.taken() == "!b +b"
    assert stage.taken() == "-c -b -a"


async def test_cancelling_the_first_starts_stops_what_has_started(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    stage.start_s["c"] = 10.0
    with trio.move_on_after(1) as scope:
        async with open_supervisor(Policy(), stage.abc()):
            pytest.fail("the block must not run")
    assert scope.cancelled_caught
    assert stage.taken() == "+a +b -c -b -a"


async def test_an_escalation_during_the_first_starts_is_raised(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage()
    stage.start_s["c"] = 10.0
    policy = Policy(intensity=Intensity(restarts_max=0))

    async def crash_b() -> None:
        await trio.sleep(1)
        stage.end("b", Boom())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(crash_b)
        with pytest.raises(RestartIntensityError):
            async with open_supervisor(policy, stage.abc()):
                pytest.fail("the block must not run")
    assert stage.taken() == "+a +b !b -c -a"


async def test_a_thousand_children_come_and_go_and_leave_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()

    async with open_supervisor(Policy()) as supervisor:
        for number in range(1_000):
            await supervisor.start_child(ChildSpec(f"s{number}", start, "transient"))
        stage = Stage()
        await supervisor.start_child(stage.child("a"))
        stage.end("a", Boom())
        await settle()
        await supervisor.stop_child("a")
        assert supervisor.statistics().restarts == 1
        assert supervisor.statistics().children == 0
        inside: dict[str, Any] = vars(supervisor)
        assert not inside["_children"]
        assert not inside["_mending"]
