"""Planted bugs: each breaks the protocol in one place, and names the rule that must catch it.

A bug is the right protocol with one method replaced, so what it changes can be read off. The scope
is the one in which it is looked for; a scope without the trouble that it needs would prove nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .steps import Protocol, Step, set_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .rules import Reason
    from .state import Actor, Content, Disk, Process, Session, State, Unit


class NoIncarnationCheck(Protocol):
    """A predecessor's late unit is judged like any other."""

    def is_predecessor(self, content: Content, unit: Unit) -> bool:
        return False


class NoChain(Protocol):
    """A unit does not say what it follows."""

    def follows(self, session: Session | None, unit: Unit) -> bool:
        return True


class NoEpochCheck(Protocol):
    """A batch is applied whoever has opened the file meanwhile."""

    def owns(self, process: Process, content: Content) -> bool:
        return True


class TakesItBack(Protocol):
    """Who finds itself fenced opens again, as after a failed commit."""

    def fenced(self, state: State, at: int, process: Process) -> State:
        return set_process(state, at, process._replace(phase="broken"))


class NoFence(Protocol):
    """Opening commits nothing: what recovery found may be in the page cache only."""

    def fence(self, disk: Disk) -> Content | None:
        return None


class EarlyAcknowledgement(Protocol):
    """The receipts leave when the batch is applied; its commit follows."""

    def _apply(self, state: State, at: int, process: Process) -> Iterator[Step]:
        for label, after in super()._apply(state, at, process):
            if label[0] == "apply":
                staged = after.processes[at]
                told = self._acknowledge(after, at, staged)
                process = told.processes[at]._replace(phase="staged")
                yield label, set_process(told, at, process)
            else:
                yield label, after


class CommitErrorIsRefusal(Protocol):
    """A commit that fails is told as "not stored", and forgotten."""

    def commit_failed(self, state: State, at: int, process: Process) -> State:
        told = process._replace(receipts=("invalid",) * process.taken, staged=())
        after = self._acknowledge(set_process(state, at, told), at, told)
        return set_process(after, at, after.processes[at]._replace(phase="broken"))


class CommitErrorIsIgnored(Protocol):
    """A failed sync is tried once more on the same connection, and the success believed."""

    def commit_failed(self, state: State, at: int, process: Process) -> State:
        return set_process(state, at, process._replace(phase="committed", staged=()))


class LedgerDiesWithTheEngine(Protocol):
    """Reopening begins with an empty ledger; whoever waits goes on waiting."""

    def reopened(self, process: Process) -> Process:
        return process._replace(phase="idle", taken=0, ledger=process.ledger[process.taken :])


class TwoTransactions(Protocol):
    """The child is committed first, and the key is moved to it afterwards."""

    def batch(
        self, content: Content, units: tuple[Unit, ...]
    ) -> tuple[tuple[Content, ...], tuple[str, ...]]:
        commits: list[Content] = []
        receipts: list[str] = []
        for unit in units:
            receipt, after = self.apply(content, unit)
            if unit.kind == "rotate" and receipt == "durable":
                commits.append(self.rotated(content, unit))
            receipts.append(receipt)
            content = after
        return (*commits, content), tuple(receipts)


class NoIdentity(Protocol):
    """What is sent again is judged as if it were new."""

    def is_stored(self, content: Content, unit: Unit) -> bool:
        return False


class NoIdentityNoChain(NoIdentity, NoChain):
    """The same with nothing behind it: the next free seq, whatever was given."""

    def _append_refusal(self, content: Content, unit: Unit) -> Reason | None:
        return None


class RouteMovedUnchecked(Protocol):
    """A session is taken over without a look at who has it."""

    def taken_over(self, content: Content, unit: Unit) -> Content:
        session = content.session(unit.new)
        assert session is not None
        return content.with_session(session._replace(key=unit.key))


class LoserKeepsItsIncarnation(Protocol):
    """The loser's route moves, its incarnation does not; and nobody asks what the route names."""

    def taken_over(self, content: Content, unit: Unit) -> Content:
        before = content.key(unit.loser)
        after = super().taken_over(content, unit)
        return after.with_key(after.key(unit.loser)._replace(incarnation=before.incarnation))


class LoadsTooEarly(Protocol):
    """A new actor looks at what is stored before its incarnation is open."""

    def may_load(self, process: Process, actor: Actor) -> bool:
        return actor.stage == "opening" or super().may_load(process, actor)


class MovesTooEarly(Protocol):
    """Memory is in the child as soon as the rotation is posted."""

    def post_rotation(self, state: State, at: int, actor: Actor) -> State:
        after = super().post_rotation(state, at, actor)
        process = after.processes[at]
        unit = process.ledger[-1]
        actors = tuple(
            a._replace(session=unit.new, rows=unit.carried) if a[:2] == actor[:2] else a
            for a in process.actors
        )
        return set_process(after, at, process._replace(actors=actors))


class CountsFromOneAgain(Protocol):
    """An incarnation is a mere count, and begins anew with every process."""

    def next_incarnation(self, process: Process) -> tuple[int, int]:
        return (0, process.started + 1)


class Planted(NamedTuple):
    """A bug, where to look for it, and what must be said of it."""

    bug: type[Protocol]
    scope: str
    rule: str


BUGS = {
    "no incarnation check": Planted(NoIncarnationCheck, "predecessors", "INV-12"),
    "no base seq": Planted(NoChain, "a unit fails alone", "INV-4"),
    "no epoch check": Planted(NoEpochCheck, "two processes", "INV-12"),
    "the fenced one takes it back": Planted(TakesItBack, "two owners", "liveness"),
    "no fence at open": Planted(NoFence, "crashes", "INV-2"),
    "acknowledged before the sync": Planted(EarlyAcknowledgement, "crashes", "INV-2"),
    "a commit error told as not stored": Planted(CommitErrorIsRefusal, "crashes", "INV-11"),
    "a failed sync tried again and believed": Planted(CommitErrorIsIgnored, "crashes", "INV-2"),
    "the ledger dies with the engine": Planted(LedgerDiesWithTheEngine, "crashes", "liveness"),
    "rotation in two transactions": Planted(TwoTransactions, "crashes", "INV-6"),
    "no identity: sent again, judged anew": Planted(NoIdentity, "crashes", "INV-11"),
    "no identity and no chain": Planted(NoIdentityNoChain, "crashes", "INV-1"),
    "a route moved without a look at its holder": Planted(RouteMovedUnchecked, "two keys", "INV-6"),
    "the loser keeps its incarnation": Planted(LoserKeepsItsIncarnation, "two keys", "INV-8"),
    "loads before its incarnation is open": Planted(LoadsTooEarly, "crashes", "INV-4"),
    "in the child before the receipt": Planted(MovesTooEarly, "crashes", "INV-8"),
    "incarnations count from one in each process": Planted(
        CountsFromOneAgain, "two processes", "INV-8"
    ),
}
