"""The state of the protocol, as values: what is on the disk, in the processes, and what was said.

Everything is a tuple of tuples, so that a state can be hashed and compared. The names are those of
`docs/protocol.md`. A message is named `a`, `b`, …; the uid of its row is its name and the number of
the try, so that the same message asked for twice is two units with two uids, as it is in reality.

Keeps: a state is canonical. What is gone (an actor, a process that is down, a unit with its
receipt) has left no trace but in what is stored or was said, so that two ways to the same state
meet.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Incarnation: TypeAlias = tuple[int, int]
"""The epoch that it was given out under, and its number there: compared in this order."""

Phase: TypeAlias = Literal["idle", "taken", "staged", "committed", "broken"]
Stage: TypeAlias = Literal["opening", "opened", "ready", "switching", "broken"]
Kind: TypeAlias = Literal["open", "append", "rotate", "switch"]
Status: TypeAlias = Literal["unasked", "asked", "acknowledged", "refused"]


class Session(NamedTuple):
    """One generation of a transcript. The first `carried` rows came from its parent."""

    id: str
    key: str
    rows: tuple[str, ...]
    carried: int = 0
    parent: str = ""
    ended: bool = False
    """Rotated away."""


class Key(NamedTuple):
    """A key's route and its fence."""

    name: str
    session: str
    incarnation: Incarnation
    version: int


class Content(NamedTuple):
    """All that is stored, at one commit."""

    epoch: int
    keys: tuple[Key, ...]
    sessions: tuple[Session, ...]
    inbox: tuple[tuple[str, str], ...] = ()
    """Message, and the uid that it was accepted under."""
    switched: tuple[str, ...] = ()
    """The switches that were made, by the fresh session that each gave to the loser."""

    def key(self, name: str) -> Key:
        return next(key for key in self.keys if key.name == name)

    def session(self, session_id: str) -> Session | None:
        return next((s for s in self.sessions if s.id == session_id), None)

    def holder(self, session_id: str) -> str | None:
        return next((key.name for key in self.keys if key.session == session_id), None)

    def accepted(self, message: str) -> str | None:
        return next((uid for name, uid in self.inbox if name == message), None)

    def with_key(self, changed: Key) -> Content:
        keys = tuple(changed if key.name == changed.name else key for key in self.keys)
        return self._replace(keys=keys)

    def with_session(self, changed: Session) -> Content:
        if self.session(changed.id) is None:
            return self._replace(sessions=(*self.sessions, changed))
        sessions = tuple(changed if s.id == changed.id else s for s in self.sessions)
        return self._replace(sessions=sessions)


class Disk(NamedTuple):
    """What a power loss can't take, and the commits behind it that it can.

    The first `shown` of those can be read; the others are seen by whoever recovers, if at all.
    """

    synced: Content
    log: tuple[Content, ...] = ()
    shown: int = 0

    @property
    def visible(self) -> Content:
        return self.log[self.shown - 1] if self.shown else self.synced

    @property
    def possible(self) -> tuple[Content, ...]:
        """Everything that may turn out to be the content."""
        return (self.synced, *self.log)


class Unit(NamedTuple):
    """A guarded change, with an identity of its own: `new`, or its incarnation if it opens one."""

    kind: Kind
    key: str
    incarnation: Incarnation
    session: str = ""
    base: int = 0
    behind: str = ""
    """The last row that its actor knows of."""
    new: str = ""
    """The uid that is appended, the child, or the session that is taken over."""
    message: str = ""
    carried: tuple[str, ...] = ()
    version: int = 0
    loser: str = ""
    loser_incarnation: Incarnation = (0, 0)
    loser_session: str = ""
    loser_version: int = 0


class Actor(NamedTuple):
    """One incarnation of a key, and what it remembers: a durable prefix and a posted tail."""

    key: str
    incarnation: Incarnation
    stage: Stage = "opening"
    session: str = ""
    rows: tuple[str, ...] = ()
    version: int = 0
    moving: str = ""
    """The child of a rotation that has no receipt yet: appends are held."""
    held: tuple[str, ...] = ()


class Process(NamedTuple):
    """One process: its engine, its ledger, its actors. When it is down, nothing of it is left."""

    up: bool = False
    epoch: int = 0
    started: int = 0
    """How many incarnations it has given out."""
    phase: Phase = "idle"
    ledger: tuple[Unit, ...] = ()
    taken: int = 0
    staged: tuple[Content, ...] = ()
    """What the batch will commit: one commit, whatever is in it."""
    receipts: tuple[str, ...] = ()
    actors: tuple[Actor, ...] = ()


class Client(NamedTuple):
    """Somebody who wants one message stored and asks until it is."""

    message: str
    key: str
    status: Status = "unasked"
    tries: int = 0


class Budget(NamedTuple):
    """How often each trouble may still come."""

    kills: int = 0
    power_losses: int = 0
    sync_failures: int = 0
    lost_waits: int = 0
    """Waits that are given up, and acknowledgements that nobody hears."""
    successors: int = 0
    """Actors that are started although the one before may still write."""
    intruders: int = 0
    """Processes that open the file although another has it open."""
    rotations: int = 0
    switches: int = 0


class State(NamedTuple):
    disk: Disk
    processes: tuple[Process, ...]
    clients: tuple[Client, ...]
    denied: tuple[str, ...]
    """What was told that it is not stored: uids and children, sorted."""
    budget: Budget


Label: TypeAlias = tuple[str, ...]
"""A step in the words of the page, then who takes it and what chance decided."""


def message_of(uid: str) -> str:
    return uid.rstrip("0123456789")
