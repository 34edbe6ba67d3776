"""Policies as data: waits grow to a bound, periods forget, and a check names every problem."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, cast

import pytest

from onepen.actors.policy import (
    Backoff,
    ChildSpec,
    Crashes,
    Intensity,
    InvalidPolicyError,
    Policy,
    check_policy,
)
from onepen.storage.errors import OnepenError

if TYPE_CHECKING:
    import trio


async def idle(*, task_status: trio.TaskStatus[None]) -> None:
    raise AssertionError("a check must start nothing")


def problems_of(policy: Policy, *children: ChildSpec) -> tuple[str, ...]:
    with pytest.raises(InvalidPolicyError) as caught:
        check_policy(policy, children)
    return caught.value.problems


def test_the_wait_grows_by_the_factor_up_to_its_bound() -> None:
    backoff = Backoff(first_s=1.0, factor=3.0, max_s=20.0)
    assert [backoff.wait_s(number) for number in range(1, 6)] == [1.0, 3.0, 9.0, 20.0, 20.0]


def test_a_wait_too_large_for_a_number_is_the_bound() -> None:
    assert Backoff().wait_s(1_000_000) == 30.0


def test_a_crash_that_the_period_has_forgotten_waits_like_the_first() -> None:
    assert Backoff(first_s=0.5).wait_s(0) == 0.5


def test_as_many_crashes_as_allowed_are_not_too_many_and_one_more_is() -> None:
    crashes = Crashes(Intensity(restarts_max=2, period_s=10.0))
    assert [crashes.note(0.0), crashes.note(1.0), crashes.note(2.0)] == [False, False, True]


def test_with_no_restart_allowed_the_first_crash_is_too_many() -> None:
    assert Crashes(Intensity(restarts_max=0)).note(0.0)


def test_crashes_older_than_the_period_are_forgotten() -> None:
    crashes = Crashes(Intensity(restarts_max=1, period_s=10.0))
    assert not crashes.note(0.0)
    assert crashes.count(10.0) == 1  # the edge belongs to the period
    assert not crashes.note(10.5)
    assert crashes.count(10.5) == 1
    assert crashes.note(20.5)
    assert crashes.count(40.0) == 0


def test_crashes_never_remember_more_than_they_need() -> None:
    crashes = Crashes(Intensity(restarts_max=3))
    for _ in range(100):
        crashes.note(1.0)
    assert crashes.count(1.0) == 4
    assert not hasattr(crashes, "__dict__")
    assert sys.getsizeof(Crashes(Intensity())) < 100


def test_the_defaults_and_a_plain_child_are_valid() -> None:
    check_policy(Policy(), [ChildSpec("a", idle), ChildSpec("b", idle)])


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (Policy(strategy=cast("Any", "some_for_some")), "strategy"),
        (Policy(intensity=Intensity(restarts_max=-1)), "restarts_max"),
        (Policy(intensity=Intensity(restarts_max=cast("Any", 1.5))), "restarts_max"),
        (Policy(intensity=Intensity(restarts_max=True)), "restarts_max"),
        (Policy(intensity=Intensity(period_s=0)), "period_s"),
        (Policy(intensity=Intensity(period_s=math.inf)), "period_s"),
        (Policy(backoff=Backoff(first_s=-0.1)), "first_s"),
        (Policy(backoff=Backoff(factor=0.5)), "factor"),
        (Policy(backoff=Backoff(factor=math.nan)), "factor"),
        (Policy(backoff=Backoff(max_s=-1)), "max_s"),
        (Policy(backoff=Backoff(first_s=2.0, max_s=1.0)), "max_s"),
        (Policy(backoff=Backoff(max_s=cast("Any", "30"))), "max_s"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(policy: Policy, problem: str) -> None:
    (found,) = problems_of(policy)
    assert problem in found


@pytest.mark.parametrize(
    ("child", "problem"),
    [
        (ChildSpec("", idle), "name"),
        (ChildSpec("  ", idle), "name"),
        (ChildSpec(cast("Any", 7), idle), "name"),
        (ChildSpec("a", cast("Any", None)), "start"),
        (ChildSpec("a", idle, restart=cast("Any", "always")), "restart"),
        (ChildSpec("a", idle, stop_s=-1), "stop_s"),
        (ChildSpec("a", idle, stop_s=0), "stop_s"),
        (ChildSpec("a", idle, stop_s=math.inf), "stop_s"),
    ],
)
def test_a_child_that_makes_no_sense_is_refused(child: ChildSpec, problem: str) -> None:
    (found,) = problems_of(Policy(), child)
    assert problem in found


def test_a_name_can_be_given_once() -> None:
    (found,) = problems_of(
        Policy(), ChildSpec("a", idle), ChildSpec("b", idle), ChildSpec("a", idle)
    )
    assert "'a' is taken" in found


def test_every_problem_is_named_at_once_with_a_hint() -> None:
    policy = Policy(intensity=Intensity(restarts_max=-1), backoff=Backoff(factor=0))
    with pytest.raises(OnepenError) as caught:
        check_policy(policy, [ChildSpec("", idle, stop_s=-1)])
    assert isinstance(caught.value, InvalidPolicyError)
    assert len(caught.value.problems) == 4
    assert caught.value.hint
    for problem in caught.value.problems:
        assert problem in str(caught.value)
