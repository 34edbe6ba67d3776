"""What a supervisor knows of its children: the states, the errors, the looks at them from outside.

Keeps:
- A child has one life at a time, or none; a new life is a new object.
- `started()` counts once per life, and only the first one of a child settles its start.
- What is handed out, `ChildStatus` and `SupervisorStatistics`, is frozen: a look and not a handle.

`Lane`, `Child` and `Life` are the supervisor's alone: it changes them, on the trio thread.

Must never start, stop or wait for anything, nor decide what follows from a crash.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, final

import trio
from msgspec import Struct

from ..storage.errors import OnepenError
from .policy import ChildSpec, Crashes, RestartKind

ChildState: TypeAlias = Literal["starting", "running", "waiting", "stopping"]


class ChildStartError(OnepenError):
    """A child did not get as far as `started()`; it is not running."""

    hint = "look at the cause; the child may be started again"

    def __init__(self, child: str, problem: str = "it ended before it had started") -> None:
        super().__init__(f"{child} can't be started: {problem}")
        self.child = child
        self.problem = problem


class RestartIntensityError(OnepenError):
    """Children crash more often than the policy allows; the last crash is the cause.

    Everything below the supervisor was stopped.
    """

    hint = "look at the cause; restarting does not cure it"

    def __init__(self, supervisor: str, child: str, restarts: int) -> None:
        super().__init__(f"{supervisor}: {child} crashed, and {restarts} restarts were used up")
        self.supervisor = supervisor
        self.child = child
        self.restarts = restarts


class ChildStatus(Struct, frozen=True, kw_only=True):
    """A look at one child. It is `waiting` when it is down and will be started again."""

    name: str
    state: ChildState
    restarts: int
    restart: RestartKind


class SupervisorStatistics(Struct, frozen=True, kw_only=True):
    """A look at the supervisor; the counts are of its whole life."""

    children: int
    crashes: int
    restarts: int
    overdue: int
    """Children that were not gone `stop_s` after they were cancelled."""


class Lane:
    """Children that are mended together, in start order."""

    __slots__ = ("attempt", "broken", "busy", "members", "wait_s")

    def __init__(self, members: dict[str, Child]) -> None:
        self.members = members
        self.broken: list[Child] = []
        self.wait_s = 0.0
        self.busy = False
        self.attempt: trio.CancelScope | None = None  # a crash during an attempt ends it


class Child:
    """One child from its first start until it is forgotten, over all of its lives."""

    __slots__ = (
        *("crashes", "error", "lane", "life", "new", "restarts", "settled"),
        *("spec", "state", "value", "wanted"),
    )

    def __init__(self, spec: ChildSpec, crashes: Crashes) -> None:
        self.spec = spec
        self.crashes = crashes
        self.lane = Lane({spec.name: self})
        self.state: ChildState = "waiting"
        self.life: Life | None = None
        self.restarts = 0
        self.wanted = True
        self.new = True  # until the first `started()`; whoever starts it waits for `settled`
        self.settled = trio.Event()
        self.value: Any = None
        self.error: BaseException | None = None


@final
class Life:
    """One run of a child, from a start to its end. The child gets it as its `task_status`."""

    __slots__ = ("child", "ended", "overdue", "ready", "scope", "settled", "stopping", "task")

    def __init__(self, child: Child) -> None:
        self.child = child
        # Shielded: when the block is cancelled, children end one by one and not all at once.
        self.scope = trio.CancelScope(shield=True)
        self.task: trio.lowlevel.Task | None = None
        self.ready = self.stopping = self.overdue = False
        self.settled = trio.Event()  # started, or ended before that
        self.ended = trio.Event()

    def started(self, value: Any = None) -> None:
        if self.ready:
            # The contract is trio's, and so is the error.
            raise RuntimeError("started() was called twice")
        self.ready = True
        if not self.stopping:
            self.child.state = "running"
        if self.child.new:
            self.child.new, self.child.value = False, value
            self.child.settled.set()
        self.settled.set()
