"""The steps of the protocol: from a state, everything that may happen next. The page's first table.

Keeps: a step is a function of the state, in a fixed order, so that an exploration is the same every
time. What chance decides (which frames survive, whether a sync fails) is a step of its own, with
the outcome in its label.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from .rules import Rules
from .state import (
    Actor,
    Budget,
    Client,
    Content,
    Disk,
    Key,
    Label,
    Process,
    Session,
    State,
    Status,
    Unit,
    message_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

Step: TypeAlias = tuple[Label, State]
PROCESSES = ("P", "Q")
_GIVES_UP = "stale_incarnation"
# A move that is refused so has changed nothing, and nothing was posted behind it.
_MOVE_REFUSALS = ("route_conflict", "stale", "conflict", "invalid")


def set_process(state: State, at: int, process: Process) -> State:
    processes = state.processes
    return state._replace(processes=(*processes[:at], process, *processes[at + 1 :]))


def spend(state: State, what: str) -> State:
    left = getattr(state.budget, what)
    return state._replace(budget=state.budget._replace(**{what: left - 1}))


def set_actor(process: Process, actor: Actor) -> Process:
    actors = tuple(actor if a[:2] == actor[:2] else a for a in process.actors)
    return process._replace(actors=actors)


def without(process: Process, actor: Actor) -> Process:
    return process._replace(actors=tuple(a for a in process.actors if a[:2] != actor[:2]))


def set_client(state: State, message: str, status: Status) -> State:
    clients = tuple(c._replace(status=status) if c.message == message else c for c in state.clients)
    return state._replace(clients=clients)


def unheard(state: State, messages: set[str]) -> State:
    """Those who hold these get no answer: they will ask again."""
    clients = tuple(
        c._replace(status="unasked") if c.status == "asked" and c.message in messages else c
        for c in state.clients
    )
    return state._replace(clients=clients)


class Protocol(Rules):
    """As it must be. A planted bug overrides one method."""

    batch_max = 2

    def steps(self, state: State) -> Iterator[Step]:
        for at, process in enumerate(state.processes):
            if not process.up:
                yield from self._open(state, at)
                continue
            if process.phase == "broken":
                yield from self._reopen(state, at, process)
            elif process.phase in ("idle", "taken") and process.ledger:
                yield from self._apply(state, at, process)
            elif process.phase == "staged":
                yield from self._commit(state, at, process)
            elif process.phase == "committed":
                yield ("acknowledge", PROCESSES[at]), self._acknowledge(state, at, process)
            yield from self._actors(state, at, process)
            yield from self._kill(state, at, process)
        yield from self._lost_wait(state)
        yield from self._power_loss(state)

    # Opening: a fence ------------------------------------------------------------------------

    def _free_to_write(self, state: State) -> bool:
        """A transaction that is open keeps everybody else from beginning one."""
        return all(process.phase != "staged" for process in state.processes)

    def _recovered(self, state: State, at: int) -> list[tuple[str, Disk]]:
        """What somebody who opens finds of the commits whose sync nobody has seen: open, unless
        another process has an index in memory that does not name them.
        """
        disk = state.disk
        if disk.shown == len(disk.log):
            return [("", disk)]
        gone = disk._replace(log=disk.log[: disk.shown])
        others = (p for n, p in enumerate(state.processes) if n != at and p.up)
        if any(process.phase != "broken" for process in others):
            return [("gone", gone)]
        return [("found", disk._replace(shown=len(disk.log))), ("gone", gone)]

    def fence(self, disk: Disk) -> Content | None:
        """The commit with which every opening begins: it syncs whatever was found with itself."""
        content = disk.visible
        return content._replace(epoch=content.epoch + 1)

    def _open(self, state: State, at: int) -> Iterator[Step]:
        others = any(process.up for process in state.processes)
        if others:
            if not state.budget.intruders:
                return
            state = spend(state, "intruders")
        if not self._free_to_write(state) or any(not p.up for p in state.processes[:at]):
            return
        name = ("a second process opens" if others else "open", PROCESSES[at])
        for found, disk in self._recovered(state, at):
            fence = self.fence(disk)
            if fence is None:
                process = Process(up=True, epoch=disk.visible.epoch)
                yield (*name, found), set_process(state._replace(disk=disk), at, process)
                continue
            process = Process(up=True, epoch=fence.epoch)
            opened = set_process(state._replace(disk=Disk(fence)), at, process)
            yield (*name, found), opened
            if state.budget.sync_failures:
                failed = disk._replace(log=(*disk.log[: disk.shown], fence), shown=0)
                yield (
                    ("opening fails", PROCESSES[at], found),
                    spend(state._replace(disk=failed), "sync_failures"),
                )

    def _reopen(self, state: State, at: int, process: Process) -> Iterator[Step]:
        if not self._free_to_write(state):
            return
        for found, disk in self._recovered(state, at):
            fence = self.fence(disk) or disk.visible
            opened = self.reopened(process)._replace(epoch=fence.epoch)
            yield (
                ("reopen", PROCESSES[at], found),
                set_process(state._replace(disk=Disk(fence)), at, opened),
            )
            if state.budget.sync_failures:
                failed = disk._replace(log=(*disk.log[: disk.shown], fence), shown=0)
                yield (
                    ("reopening fails", PROCESSES[at], found),
                    spend(state._replace(disk=failed), "sync_failures"),
                )

    def reopened(self, process: Process) -> Process:
        """The ledger has outlived the engine: the batch is still taken."""
        return process._replace(phase="taken" if process.taken else "idle")

    # Batches ---------------------------------------------------------------------------------

    def _apply(self, state: State, at: int, process: Process) -> Iterator[Step]:
        if not self._free_to_write(state):
            return
        content = state.disk.visible
        if not self.owns(process, content):
            yield ("fenced", PROCESSES[at]), self.fenced(state, at, process)
            return
        taken = process.taken or min(len(process.ledger), self.batch_max)
        commits, receipts = self.batch(content, process.ledger[:taken])
        staged = process._replace(phase="staged", taken=taken, staged=commits, receipts=receipts)
        told = ", ".join(f"{u.kind}: {r}" for u, r in zip(process.ledger, receipts, strict=False))
        yield ("apply", PROCESSES[at], told), set_process(state, at, staged)

    def fenced(self, state: State, at: int, process: Process) -> State:
        """Whoever waits here is told that nobody knows; they ask the new owner."""
        return self._down(state, at, process)

    def owns(self, process: Process, content: Content) -> bool:
        return process.epoch == content.epoch

    def batch(
        self, content: Content, units: tuple[Unit, ...]
    ) -> tuple[tuple[Content, ...], tuple[str, ...]]:
        """The commits that the batch makes (one), and its receipts."""
        receipts: list[str] = []
        for unit in units:
            receipt, content = self.apply(content, unit)
            receipts.append(receipt)
        return (content,), tuple(receipts)

    def _commit(self, state: State, at: int, process: Process) -> Iterator[Step]:
        done = process._replace(phase="committed", staged=())
        synced = set_process(state._replace(disk=Disk(process.staged[-1])), at, done)
        yield ("commit", PROCESSES[at]), synced
        if state.budget.sync_failures:
            failed = spend(state, "sync_failures")
            for how, disk in (
                ("kept", state.disk._replace(log=self._written(state, process))),
                ("dropped", state.disk._replace(log=())),
                ("done", Disk(process.staged[-1])),  # it is the answer that was lost
            ):
                label = ("commit fails", PROCESSES[at], how)
                yield label, self.commit_failed(failed._replace(disk=disk), at, process)
        for number, commit in enumerate(process.staged[:-1]):
            part = process._replace(staged=process.staged[number + 1 :])
            yield (
                ("commit a part", PROCESSES[at]),
                set_process(state._replace(disk=Disk(commit)), at, part),
            )

    def _written(self, state: State, process: Process) -> tuple[Content, ...]:
        return (*state.disk.log[: state.disk.shown], *process.staged)

    def commit_failed(self, state: State, at: int, process: Process) -> State:
        """Unknown: nobody is told anything, and nothing is applied until it is reopened."""
        return set_process(state, at, process._replace(phase="broken", staged=(), receipts=()))

    def _acknowledge(self, state: State, at: int, process: Process) -> State:
        """All of a batch at once, in the order of posting."""
        resolved = tuple(zip(process.ledger, process.receipts, strict=False))[: process.taken]
        process = process._replace(
            phase="idle", ledger=process.ledger[process.taken :], taken=0, receipts=()
        )
        state = set_process(state, at, process)
        for unit, receipt in resolved:
            state = self.deliver(state, at, unit, receipt)
        return state

    # Receipts --------------------------------------------------------------------------------

    def deliver(self, state: State, at: int, unit: Unit, receipt: str) -> State:
        durable = receipt in ("durable", "again")
        if unit.kind == "append":
            state = self._answer(state, unit, receipt)
        elif unit.kind != "open" and not durable:
            state = self._deny(state, unit.new if unit.kind == "rotate" else unit.loser_session)
        process = state.processes[at]
        actor = next((a for a in process.actors if a[:2] == unit[1:3]), None)
        if actor is None:
            return state
        if not durable and receipt == _GIVES_UP and not self._is_losers(unit, actor, state):
            return self._actor_ends(state, at, actor)
        match unit.kind:
            case "open":
                return set_process(state, at, set_actor(process, actor._replace(stage="opened")))
            case "append":
                return state if durable else self._break(state, at, actor)
            case "rotate":
                return self._moved(state, at, actor, unit, receipt)
            case "switch":
                return set_process(state, at, set_actor(process, actor._replace(stage="opened")))

    @staticmethod
    def _is_losers(unit: Unit, actor: Actor, state: State) -> bool:
        """Whether it was the other key's incarnation that was too old."""
        return (
            unit.kind == "switch"
            and state.disk.visible.key(unit.key).incarnation == actor.incarnation
        )

    def _answer(self, state: State, unit: Unit, receipt: str) -> State:
        client = next(c for c in state.clients if c.message == unit.message)
        if receipt in ("durable", "again"):
            # A wait that was given up hears nothing; whoever asks again will find it stored.
            if client.status == "asked":
                return set_client(state, unit.message, "acknowledged")
            return state
        state = self._deny(state, unit.new)
        if receipt == "invalid":
            return set_client(state, unit.message, "refused")
        return unheard(state, {unit.message})

    @staticmethod
    def _deny(state: State, what: str) -> State:
        return state._replace(denied=tuple(sorted({*state.denied, what})))

    def _break(self, state: State, at: int, actor: Actor) -> State:
        """The tail is cut: nothing more is posted until it has looked at what is stored."""
        broken = actor._replace(stage="broken", moving="", held=())
        process = set_actor(state.processes[at], broken)
        return unheard(set_process(state, at, process), set(map(message_of, actor.held)))

    def _actor_ends(self, state: State, at: int, actor: Actor) -> State:
        process = without(state.processes[at], actor)
        return unheard(set_process(state, at, process), set(map(message_of, actor.held)))

    def _moved(self, state: State, at: int, actor: Actor, unit: Unit, receipt: str) -> State:
        """The receipt of a rotation: what was held goes where the key is now."""
        if receipt in ("durable", "again"):
            actor = actor._replace(session=unit.new, rows=unit.carried, version=unit.version + 1)
        elif receipt not in _MOVE_REFUSALS:
            return self._break(state, at, actor)
        held, actor = actor.held, actor._replace(moving="", held=())
        state = set_process(state, at, set_actor(state.processes[at], actor))
        for uid in held:
            state = self._post_append(state, at, actor[:2], uid)
        return state

    # Actors ----------------------------------------------------------------------------------

    def _actors(self, state: State, at: int, process: Process) -> Iterator[Step]:
        for key in state.disk.visible.keys:
            present = any(actor.key == key.name for actor in process.actors)
            if not present:
                yield ("start an actor", PROCESSES[at], key.name), self._start(state, at, key.name)
            elif state.budget.successors:
                started = self._start(spend(state, "successors"), at, key.name)
                yield ("start a successor", PROCESSES[at], key.name), started
        for actor in process.actors:
            who = (PROCESSES[at], actor.key, f"{actor.incarnation[0]}.{actor.incarnation[1]}")
            if self.may_load(process, actor):
                yield ("load", *who), self._load(state, at, actor)
            elif actor.stage == "ready":
                yield from self._ready(state, at, actor, who)

    def next_incarnation(self, process: Process) -> tuple[int, int]:
        return (process.epoch, process.started + 1)

    def _start(self, state: State, at: int, key: str) -> State:
        process = state.processes[at]
        incarnation = self.next_incarnation(process)
        process = process._replace(
            started=process.started + 1,
            ledger=(*process.ledger, Unit("open", key, incarnation)),
            actors=(*process.actors, Actor(key, incarnation)),
        )
        return set_process(state, at, process)

    def may_load(self, process: Process, actor: Actor) -> bool:
        """Only behind the receipt of its opening, and with nothing of its own on the way."""
        if actor.stage == "opened":
            return True
        settled = all(unit[1:3] != actor[:2] for unit in process.ledger)
        return actor.stage == "broken" and settled

    def _load(self, state: State, at: int, actor: Actor) -> State:
        content = state.disk.visible
        key = content.key(actor.key)
        session = content.session(key.session)
        loaded = actor._replace(
            stage="ready",
            session=key.session,
            rows=() if session is None else session.rows,
            version=key.version,
        )
        return set_process(state, at, set_actor(state.processes[at], loaded))

    def _ready(self, state: State, at: int, actor: Actor, who: Label) -> Iterator[Step]:
        first = True
        for client in state.clients:
            if client.status != "unasked" or client.key != actor.key:
                continue
            # Those who never asked are alike: they come in their order.
            if first or client.tries:
                yield ("post", *who, client.message), self._ask(state, at, actor, client)
            first = first and client.tries > 0
        if actor.moving:
            return
        if state.budget.rotations and len(actor.rows) > 1:
            yield ("rotate", *who), self.post_rotation(spend(state, "rotations"), at, actor)
        if state.budget.switches:
            yield from self._switch(spend(state, "switches"), at, actor, who)

    def _ask(self, state: State, at: int, actor: Actor, client: Client) -> State:
        message, process = client.message, state.processes[at]
        if self.knows(state.disk.visible, message):
            return set_client(state, message, "acknowledged")
        posted = any(u.message == message and u[1:3] == actor[:2] for u in process.ledger)
        held = any(message_of(uid) == message for uid in actor.held)
        if posted or held:
            return set_client(
                state, message, "asked"
            )  # it holds the ticket; only that is waited for
        tries = client.tries + 1
        clients = tuple(
            c._replace(tries=tries, status="asked") if c.message == message else c
            for c in state.clients
        )
        state, uid = state._replace(clients=clients), f"{message}{tries}"
        if actor.moving:
            holding = actor._replace(held=(*actor.held, uid))
            return set_process(state, at, set_actor(process, holding))
        return self._post_append(state, at, actor[:2], uid)

    def knows(self, content: Content, message: str) -> bool:
        """A repeated message is looked up before anything is posted."""
        return content.accepted(message) is not None

    def _post_append(
        self, state: State, at: int, who: tuple[str, tuple[int, int]], uid: str
    ) -> State:
        process = state.processes[at]
        actor = next(a for a in process.actors if a[:2] == who)
        unit = Unit(
            "append",
            actor.key,
            actor.incarnation,
            actor.session,
            base=len(actor.rows),
            behind=actor.rows[-1] if actor.rows else "",
            new=uid,
            message=message_of(uid),
        )
        process = set_actor(process, actor._replace(rows=(*actor.rows, uid)))
        return set_process(state, at, process._replace(ledger=(*process.ledger, unit)))

    def post_rotation(self, state: State, at: int, actor: Actor) -> State:
        """The summary stands for the first row; everything behind it is carried."""
        child = f"{actor.session}~{state.budget.rotations}"
        unit = Unit(
            "rotate",
            actor.key,
            actor.incarnation,
            actor.session,
            base=len(actor.rows),
            behind=actor.rows[-1],
            new=child,
            carried=(f"s{state.budget.rotations}", *actor.rows[1:]),
            version=actor.version,
        )
        process = set_actor(state.processes[at], actor._replace(moving=child))
        return set_process(state, at, process._replace(ledger=(*process.ledger, unit)))

    def _switch(self, state: State, at: int, actor: Actor, who: Label) -> Iterator[Step]:
        """Take the session of another key; with it goes the loser's incarnation."""
        process, content = state.processes[at], state.disk.visible
        if any(unit[1:3] == actor[:2] for unit in process.ledger):
            return
        for key in content.keys:
            if key.name == actor.key or content.session(key.session) is None:
                continue
            unit = Unit(
                "switch",
                actor.key,
                actor.incarnation,
                new=key.session,
                version=actor.version,
                loser=key.name,
                loser_incarnation=self.next_incarnation(process),
                loser_session=f"fresh{state.budget.switches}",
                loser_version=key.version,
            )
            moving = set_actor(process, actor._replace(stage="switching"))
            moving = moving._replace(started=process.started + 1, ledger=(*process.ledger, unit))
            yield ("switch", *who, key.session), set_process(state, at, moving)

    # Trouble ---------------------------------------------------------------------------------

    def _down(self, state: State, at: int, process: Process) -> State:
        """Nothing of it is left but what is on the disk; whoever waited hears nothing."""
        units = {unit.message for unit in process.ledger}
        held = {message_of(uid) for actor in process.actors for uid in actor.held}
        return unheard(set_process(state, at, Process()), units | held)

    def _kill(self, state: State, at: int, process: Process) -> Iterator[Step]:
        if not state.budget.kills:
            return
        killed = self._down(spend(state, "kills"), at, process)
        yield ("kill", PROCESSES[at]), killed
        if process.phase == "staged":
            for count in range(1, len(process.staged) + 1):
                log = (*state.disk.log[: state.disk.shown], *process.staged[:count])
                disk = state.disk._replace(log=log)
                how = "commit written" if count == len(process.staged) else "commit in part"
                yield ("kill", PROCESSES[at], how), killed._replace(disk=disk)

    def _lost_wait(self, state: State) -> Iterator[Step]:
        if not state.budget.lost_waits:
            return
        for client in state.clients:
            if client.status == "asked":
                lost = unheard(spend(state, "lost_waits"), {client.message})
                yield ("wait given up", client.message), lost

    def _power_loss(self, state: State) -> Iterator[Step]:
        if not state.budget.power_losses:
            return
        after = spend(state, "power_losses")
        for at, process in enumerate(state.processes):
            if process.up:
                after = self._down(after, at, process)
        left = {state.disk.synced: "", **dict.fromkeys(state.disk.log, "the log survives")}
        for process in state.processes:
            if process.phase == "staged":
                left |= dict.fromkeys(self._written(state, process), "commit written")
        for survivor, how in left.items():
            yield ("power loss", how), after._replace(disk=Disk(survivor))


def start_of(keys: tuple[str, ...], messages: dict[str, str], budget: Budget) -> State:
    """A database with one session of one row for each key; nobody has it open."""
    content = Content(
        epoch=0,
        keys=tuple(Key(key, f"S{key}", (0, 0), 1) for key in keys),
        sessions=tuple(Session(f"S{key}", key, (f"o{key}",)) for key in keys),
    )
    clients = tuple(Client(message, key) for message, key in messages.items())
    return State(Disk(content), (Process(), Process()), clients, (), budget)
