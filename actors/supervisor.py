"""The supervisor: starts children in order, restarts them by policy, stops them in reverse.

Keeps:
- Children start one after the other, each after the one before has called `started()`.
- A crash touches the siblings that the strategy names, and nobody else.
- Two lives of one child never overlap: a restart waits until the last life has really ended.
- A child that ended for good is forgotten, and its name is free again.
- Crashes beyond the intensity end everything, in one error that is never a group.

trio can't abandon a task. A child that ignores its cancellation is reported and counted after its
`stop_s`, and the next one is stopped without waiting for it; but the end of the block, and a
restart that needs its place, take as long as it does.

How it works: a crash makes its *lane* broken, and a lane is mended by one task at a time. Under
`one_for_one` each child has a lane of its own, otherwise all share one. Whoever looks at a state
and acts on it does so without a checkpoint between.

Must never run a child under the cancellation of anybody but the supervisor, nor in the context of
whoever happened to start it.
"""

from __future__ import annotations

import contextvars
import logging
import traceback
from contextlib import asynccontextmanager
from itertools import dropwhile, islice
from typing import TYPE_CHECKING, Any, final

import trio

from .children import (
    Child,
    ChildStartError,
    ChildState,
    ChildStatus,
    Lane,
    Life,
    RestartIntensityError,
    SupervisorStatistics,
)
from .policy import ChildSpec, Crashes, Policy, check_policy

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence

__all__ = [
    "ChildStartError",
    "ChildState",
    "ChildStatus",
    "RestartIntensityError",
    "Supervisor",
    "SupervisorStatistics",
    "open_supervisor",
]

logger = logging.getLogger(__name__)

_STACKS_MAX = 10  # tasks of an overdue child whose stacks are logged


@asynccontextmanager
async def open_supervisor(
    policy: Policy, children: Sequence[ChildSpec] = (), *, name: str = "supervisor"
) -> AsyncGenerator[Supervisor]:
    """Run children for as long as the block lasts; its end stops them, the last one first.

    Raises `InvalidPolicyError` before anything is started, `ChildStartError` if one of `children`
    can't be started, and `RestartIntensityError`, in place of whatever the cancelled block then
    raises, after too many crashes. Other errors of the block leave it as they are. If a child
    raises what is no `Exception`, everything is stopped and that is raised.

    Stopping is shielded, and takes at most the sum of all `stop_s`, unless a child ignores its
    cancellation: then it takes as long as that child.
    """
    check_policy(policy, children)
    body_error: BaseException | None = None
    async with trio.open_nursery() as nursery:
        supervisor = Supervisor(policy, name, nursery)
        try:
            with supervisor.body_scope:
                for spec in children:
                    await supervisor.start_child(spec)
                yield supervisor
        except BaseException as error:
            body_error = error
        # Stopping shields itself, and a nursery's exit takes no notice of a cancellation: nothing
        # from here on can put it in the place of the block's error.
        if not supervisor.stopping:
            await supervisor.shut_down()
    failure = supervisor.failure
    if failure is None or isinstance(body_error, KeyboardInterrupt | SystemExit):
        failure, body_error = body_error, None
    if isinstance(body_error, Exception):
        logger.error("%s: the block failed while it was cancelled", name, exc_info=body_error)
    if failure is not None:
        raise failure


@final
class Supervisor:
    """Made by `open_supervisor`. Use it on the trio thread.

    `body_scope`, `stopping`, `failure` and `shut_down` are for `open_supervisor` alone.
    """

    def __init__(self, policy: Policy, name: str, nursery: trio.Nursery) -> None:
        self.name = name
        self._policy = policy
        self._nursery = nursery
        self._context = contextvars.copy_context()
        self._children: dict[str, Child] = {}
        self._shared_lane = None if policy.strategy == "one_for_one" else Lane(self._children)
        self._mending: set[trio.CancelScope] = set()
        self.body_scope = trio.CancelScope()
        self.stopping = False
        self.failure: BaseException | None = None
        self._recent = Crashes(policy.intensity)
        self._crashes = self._restarts = self._overdue = 0

    async def start_child(self, spec: ChildSpec) -> Any:
        """Add a child after all others and wait until it has started; the value it started with.

        Raises `InvalidPolicyError`, and `ChildStartError` if it fails, if its name is taken or if
        the supervisor is stopping; a first start is not tried again. Cancelling the wait stops
        the child. While a group restart is under way, the child starts as its last member.
        """
        check_policy(self._policy, (spec,))
        if self.stopping:
            raise ChildStartError(spec.name, "the supervisor is stopping")
        if spec.name in self._children:
            raise ChildStartError(spec.name, "the name is taken")
        child = self._children[spec.name] = Child(spec, Crashes(self._policy.intensity))
        child.lane = self._shared_lane or child.lane
        if not child.lane.busy:
            self._launch(child)
        try:
            await child.settled.wait()
        except trio.Cancelled:
            await self._dismiss(child)
            raise
        if child.new:
            raise ChildStartError(spec.name) from child.error
        return child.value

    async def stop_child(self, name: str) -> bool:
        """Stop a child for good and forget it; true once it is gone, or if there is none.

        Waits up to its `stop_s`, shielded. False means that it ignores its cancellation: it keeps
        its name until it ends. A child can't stop itself this way; it returns instead.
        """
        child = self._children.get(name)
        gone = True if child is None else await self._dismiss(child)
        await trio.lowlevel.checkpoint()
        return gone

    def children(self) -> tuple[ChildStatus, ...]:
        """All children, in start order."""
        return tuple(
            ChildStatus(
                name=child.spec.name,
                state=child.state,
                restarts=child.restarts,
                restart=child.spec.restart,
            )
            for child in self._children.values()
        )

    def statistics(self) -> SupervisorStatistics:
        return SupervisorStatistics(
            children=len(self._children),
            crashes=self._crashes,
            restarts=self._restarts,
            overdue=self._overdue,
        )

    # One life --------------------------------------------------------------------------------

    def _launch(self, child: Child) -> Life:
        child.life = life = Life(child)
        child.state = "starting"
        self._spawn(self._live, child, life, name=f"{self.name}/{child.spec.name}")
        return life

    def _spawn(self, run: Callable[..., Awaitable[object]], *arguments: Any, name: str) -> None:
        # A task inherits the context it is spawned in, and a restarted child would otherwise
        # carry that of whoever started it, or of the sibling that crashed.
        self._context.run(self._nursery.start_soon, run, *arguments, name=name)

    async def _live(self, child: Child, life: Life) -> None:
        life.task = trio.lowlevel.current_task()
        error: BaseException | None = None
        try:
            with life.scope:
                await child.spec.start(task_status=life)
        except BaseException as raised:
            error = raised
        child.life = None
        life.settled.set()
        life.ended.set()
        if error is not None and not isinstance(error, Exception):
            self._fail(error)
            self._forget(child, error)
        else:
            self._judge(child, life, error)

    def _judge(self, child: Child, life: Life, error: BaseException | None) -> None:
        """A life has ended: is the child forgotten, started again, or has it crashed?"""
        restart = child.spec.restart
        if self.stopping or not child.wanted or life.stopping:
            if error is not None:
                logger.error("%s: %s failed while stopping", *self._who(child), exc_info=error)
            # A transient child whose return came before its cancellation has done its work.
            done = restart == "transient" and error is None and not life.scope.cancelled_caught
            if self.stopping or not child.wanted:
                self._forget(child, error)
            elif not child.new and (done or restart == "temporary"):
                self._forget(child, None)
            else:
                child.state = "waiting"
        elif child.new:
            self._forget(child, error)
        elif restart == "temporary" or (restart == "transient" and life.ready and error is None):
            if error is not None:
                logger.error("%s: %s crashed for good", *self._who(child), exc_info=error)
            self._forget(child, None)
        else:
            self._on_crash(child, error)

    def _on_crash(self, child: Child, error: BaseException | None) -> None:
        """Have the lane mended, or give up. A return counts, where it is not allowed."""
        how = "returned" if error is None else "crashed"
        logger.error("%s: %s %s", *self._who(child), how, exc_info=error)
        now_s = trio.current_time()
        self._crashes += 1
        child.state = "waiting"
        child.crashes.note(now_s)
        if self._recent.note(now_s):
            restarts = self._policy.intensity.restarts_max
            failure = RestartIntensityError(self.name, child.spec.name, restarts)
            failure.__cause__ = error
            self._fail(failure)
            return
        lane = child.lane
        lane.broken.append(child)
        wait_s = self._policy.backoff.wait_s(child.crashes.count(now_s))
        lane.wait_s = max(lane.wait_s, wait_s)
        if lane.attempt is not None:
            lane.attempt.cancel()
        if not lane.busy:
            lane.busy = True
            self._spawn(self._mend, lane, name=f"{self.name}: mending")

    def _forget(self, child: Child, error: BaseException | None) -> None:
        # Whoever is told twice must not take the name from its next holder.
        if self._children.get(child.spec.name) is child:
            del self._children[child.spec.name]
            child.lane.members.pop(child.spec.name, None)
        child.error = error
        child.settled.set()

    # Restarting ------------------------------------------------------------------------------

    async def _mend(self, lane: Lane) -> None:
        """Stop the group in reverse, wait, start it in order; again if it crashes meanwhile."""
        with trio.CancelScope(shield=True) as scope:  # ended by the supervisor, not by the block
            self._mending.add(scope)
            while lane.broken and not self.stopping:
                lane.attempt = trio.CancelScope()
                for child in reversed(self._group(lane)):
                    life = child.life
                    if life is not None and not await self._stop(child, life):
                        await life.ended.wait()
                with lane.attempt:
                    await trio.sleep(lane.wait_s)
                    while (waiting := self._next_waiting(lane)) is not None:
                        if not waiting.new:
                            waiting.restarts += 1
                            self._restarts += 1
                        await self._launch(waiting).settled.wait()
                if not lane.attempt.cancel_called:
                    lane.broken.clear()
                    lane.wait_s = 0.0
        self._mending.discard(scope)
        lane.busy, lane.attempt = False, None

    def _group(self, lane: Lane) -> list[Child]:
        members = list(lane.members.values())
        if self._policy.strategy != "rest_for_one":
            return members
        return list(dropwhile(lambda child: child not in lane.broken, members))

    def _next_waiting(self, lane: Lane) -> Child | None:
        # A task that is due to run already is not woken by a cancellation, only at its next wait;
        # without this look it would start one more child first, and with no back-off.
        if self.stopping or (lane.attempt is not None and lane.attempt.cancel_called):
            return None
        # Asked anew before each start: members come and go while the last one starts.
        return next((child for child in lane.members.values() if child.state == "waiting"), None)

    # Stopping --------------------------------------------------------------------------------

    async def _dismiss(self, child: Child) -> bool:
        """Stop it for good. Does not yield if it isn't running."""
        child.wanted = False
        if child.life is not None:
            return await self._stop(child, child.life)
        self._forget(child, None)
        return True

    async def _stop(self, child: Child, life: Life) -> bool:
        """Cancel it and wait, shielded, up to its `stop_s`; whether it is gone."""
        child.state = "stopping"
        life.stopping = True
        life.scope.cancel()
        with trio.move_on_after(child.spec.stop_s, shield=True):
            await life.ended.wait()
        if not life.ended.is_set() and not life.overdue:
            life.overdue = True
            self._overdue += 1
            stacks = "\n".join(islice(_stacks(life.task), _STACKS_MAX))
            who = (*self._who(child), child.spec.stop_s)
            logger.error("%s: %s ignores its cancellation for %s s:\n%s", *who, stacks)
        return life.ended.is_set()

    def _fail(self, failure: BaseException) -> None:
        """Stop everything, the block included, without waiting for it."""
        if self.failure is None or not isinstance(failure, Exception):
            self.failure = failure
        self.body_scope.cancel()
        if not self.stopping:
            self.stopping = True
            self._spawn(self.shut_down, name=f"{self.name}: stopping")

    async def shut_down(self) -> None:
        """Stop every child in reverse. One that is overdue is left to the nursery's exit."""
        self.stopping = True
        with trio.CancelScope(shield=True):  # each wait in here has a limit
            for scope in self._mending:
                scope.cancel()
            for child in reversed(list(self._children.values())):
                await self._dismiss(child)

    def _who(self, child: Child) -> tuple[str, str]:
        return self.name, child.spec.name


def _stacks(task: trio.lowlevel.Task | None) -> Iterator[str]:
    """Where a task stands, and where those stand that it waits for."""
    if task is None:
        return
    yield f"{task.name}:\n" + "".join(
        traceback.StackSummary.extract(task.iter_await_frames()).format()
    )
    for nursery in task.child_nurseries:
        for child_task in nursery.child_tasks:
            yield from _stacks(child_task)
