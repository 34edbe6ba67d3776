"""The policy of supervision, as data: what is restarted, how often, after which wait, and what
counts as too often.

| restart     | after a return | after an exception | after a group restart |
| ----------- | -------------- | ------------------ | --------------------- |
| `permanent` | started again  | started again      | started again         |
| `transient` | done           | started again      | started again         |
| `temporary` | done           | done               | done                  |

| strategy       | one crash restarts                                 |
| -------------- | -------------------------------------------------- |
| `one_for_one`  | the child that crashed                             |
| `one_for_all`  | every child                                        |
| `rest_for_one` | the child that crashed and those started after it  |

Keeps:
- A policy can be checked without starting anything, and the check names every problem at once.
- Time is handed in, and no wait has chance in it: the same crashes lead to the same decisions.

Must never start, stop or wait for anything: that is the supervisor's part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, final, get_args

from msgspec import Struct

from ..storage.errors import OnepenError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Sequence

    import trio

Strategy: TypeAlias = Literal["one_for_one", "one_for_all", "rest_for_one"]
RestartKind: TypeAlias = Literal["permanent", "transient", "temporary"]


class Start(Protocol):
    """What a child is made of: the same shape that `nursery.start` expects."""

    def __call__(self, *, task_status: trio.TaskStatus[Any]) -> Awaitable[object]: ...


class InvalidPolicyError(OnepenError):
    """A policy or a child can't be used as it is; nothing was started."""

    hint = "correct every problem that is named"

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("the policy is invalid: " + "; ".join(problems))
        self.problems = tuple(problems)


class Backoff(Struct, frozen=True, kw_only=True):
    """How long to wait before a restart."""

    first_s: float = 0.1
    factor: float = 2.0
    max_s: float = 30.0

    def wait_s(self, crash_number: int) -> float:
        """The wait after the crash with this number; the first is number 1."""
        try:
            grown_s = self.first_s * float(self.factor) ** max(crash_number - 1, 0)
        except OverflowError:  # a power beyond every float is beyond the bound as well
            return self.max_s
        return min(grown_s, self.max_s)


class Intensity(Struct, frozen=True, kw_only=True):
    """How many restarts a period may hold; the crash after them is one too many.

    If the waits of the back-off alone fill the period, it is never exceeded, and restarts go on
    for ever at the pace of the back-off.
    """

    restarts_max: int = 5
    period_s: float = 60.0


class Policy(Struct, frozen=True, kw_only=True):
    """What a supervisor does about crashes."""

    strategy: Strategy = "one_for_one"
    intensity: Intensity = Intensity()
    backoff: Backoff = Backoff()


class ChildSpec(Struct, frozen=True):
    """What to run, and what its end means."""

    name: str
    start: Start
    restart: RestartKind = "permanent"
    stop_s: float = 5.0
    """How long it may take to end once it is cancelled."""


@final
class Crashes:
    """Counts the crashes of the latest period.

    Made to be held by the thousand: without a crash it has an empty tuple, and it never remembers
    more crashes than it takes to exceed the intensity.
    """

    __slots__ = ("_intensity", "_times_s")

    def __init__(self, intensity: Intensity) -> None:
        self._intensity = intensity
        self._times_s: tuple[float, ...] = ()

    def note(self, now_s: float) -> bool:
        """Count one more, now; true if that is more than the intensity allows."""
        kept = (*self._recent(now_s), now_s)
        # One more than allowed is enough to tell; older ones could only leave before these do.
        self._times_s = kept[-(self._intensity.restarts_max + 1) :]
        return len(self._times_s) > self._intensity.restarts_max

    def count(self, now_s: float) -> int:
        """How many there were in the period that ends now, up to one more than allowed."""
        self._times_s = self._recent(now_s)
        return len(self._times_s)

    def _recent(self, now_s: float) -> tuple[float, ...]:
        since_s = now_s - self._intensity.period_s
        return tuple(time_s for time_s in self._times_s if time_s >= since_s)


def check_policy(policy: Policy, children: Iterable[ChildSpec]) -> None:
    """Raise `InvalidPolicyError`, with every problem in it, unless this can be run."""
    problems = _problems_of_policy(policy)
    seen: set[str] = set()
    for position, child in enumerate(children):
        problems += _problems_of_child(f"child {position} ({child.name!r})", child)
        if child.name in seen:
            problems.append(f"child {position}: the name {child.name!r} is taken")
        seen.add(child.name)
    if problems:
        raise InvalidPolicyError(problems)


def _problems_of_policy(policy: Policy) -> list[str]:
    intensity, backoff = policy.intensity, policy.backoff
    problems = _word("strategy", policy.strategy, get_args(Strategy))
    problems += _number("intensity.restarts_max", intensity.restarts_max, least=0, whole=True)
    # A period of nothing would hold no two crashes, so that no intensity could be exceeded.
    problems += _number("intensity.period_s", intensity.period_s, above=0)
    in_backoff = _number("backoff.first_s", backoff.first_s, least=0)
    in_backoff += _number("backoff.factor", backoff.factor, least=1)
    in_backoff += _number("backoff.max_s", backoff.max_s, least=0)
    if not in_backoff and backoff.max_s < backoff.first_s:
        in_backoff.append(
            f"backoff.max_s: {backoff.max_s} is below backoff.first_s, {backoff.first_s}"
        )
    return problems + in_backoff


def _problems_of_child(where: str, child: ChildSpec) -> list[str]:
    problems: list[str] = []
    if not _is_name(child.name):
        problems.append(f"{where}: the name must be a text that is not empty")
    if not _is_callable(child.start):
        problems.append(f"{where}: start must be an async function")
    problems += _word(f"{where}: restart", child.restart, get_args(RestartKind))
    # Even a child that ends at once needs a turn of the loop to do so.
    problems += _number(f"{where}: stop_s", child.stop_s, above=0)
    return problems


# Types are checked here although they are declared: a policy may come from a file of settings, and
# structs check nothing when they are made in code.


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _is_callable(value: object) -> bool:
    return callable(value)


def _word(where: str, value: object, known: tuple[str, ...]) -> list[str]:
    return [] if value in known else [f"{where}: {value!r} is none of {', '.join(known)}"]


def _number(
    where: str,
    value: object,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    whole: bool = False,
) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return [f"{where}: {value!r} is not a {'whole ' if whole else ''}number"]
    if not math.isfinite(value):
        return [f"{where}: {value!r} is not finite"]
    if value < least:
        return [f"{where}: {value!r} is below {least}"]
    if value <= above:
        return [f"{where}: {value!r} is not above {above}"]
    return []
