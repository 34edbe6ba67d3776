"""A key's line: what of a key outlives, in memory, the actors that serve it one after the other.

The mailbox, so that a crash loses no message that was not read; the stream of events, so that a
subscriber is not cut off; and the promises of replies, which the next actor keeps if this one
can't. Also what all session actors share (`Surroundings`), and what the mailbox carries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, final

from ..storage.errors import OnepenError
from ..storage.records import TurnUsage
from .events import Stream
from .mailbox import Answer, Mailbox

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextvars import Context

    from ..storage import records
    from ..storage.commands import AnyCommand
    from ..storage.identity import Clock, Ids, SessionKey, TurnId
    from ..storage.records import Disposition, Effect
    from .courier import Courier
    from .hooks import Hooks
    from .limits import SessionSettings
    from .outbox import Target
    from .replies import Reply
    from .session import Session
    from .slots import Slots
    from .sources import Busy, ResetPolicy
    from .tickets import Ticket
    from .timetable import Bell
    from .warm import AgentSource
    from .writer import WriterRef


T_co = TypeVar("T_co", covariant=True)

SHUTDOWN = "shutdown"  # the cause that leaves alone what a restart may leave alone


class SessionBusyError(OnepenError):
    """The session can't take this just now."""

    hint = "wait, then send it again"

    def __init__(self, key: str, retry_after_s: float, *, why: str) -> None:
        super().__init__(f"{key}: {why}; try again in {retry_after_s:g} s")
        self.key = key
        self.retry_after_s = retry_after_s


class SessionCrashedError(OnepenError):
    """The session's actor died while it had this in hand; what is stored stays stored."""

    hint = "send it again, with the same inbound id if it has one"

    def __init__(self, key: str, cause: BaseException) -> None:
        super().__init__(f"the actor of {key} crashed: {type(cause).__name__}: {cause}")
        self.key = key


class RuntimeClosedError(OnepenError):
    """The runtime is shutting down, or gone."""

    hint = "send it to the next one: nothing of it was stored"


class TurnPendingError(RuntimeClosedError):
    """The runtime ended before the turn did; its message is stored."""

    hint = "it goes on, or is answered for, at the next start: do not send it again"


class Submit(NamedTuple):
    """An inbound message for the session."""

    body: records.Inbound
    inbound_id: str
    source: str
    digest: str
    turn_id: TurnId
    repeatable: bool  # it has an id of its own, so that it may come again
    busy: Busy = "queue"
    debounce_s: float = 0.0
    reset: ResetPolicy | None = None
    along: tuple[AnyCommand, ...] = ()  # what is done by accepting it, in the same unit
    more: tuple[Said, ...] = ()  # further messages of the same turn
    follows: bool = False  # it was accepted before, though that may be forgotten: never again


class Interrupt(NamedTuple):
    """Stop this turn, or take its message back if it still waits."""

    turn_id: TurnId
    cause: str


class Settle(NamedTuple):
    """An answer to a question, or its end without one. Without a key, to the only open one."""

    question_key: str | None
    state: Literal["answered", "expired"]
    answer: str | None = None
    by: str | None = None


class Operate(NamedTuple, Generic[T_co]):
    """Something to be done to the session when no turn is in the way.

    `beside` says that a turn which waits for a person is not in its way.
    """

    name: str
    run: Callable[[Session], Awaitable[T_co]]
    interrupts: bool
    beside: bool = False


# What a session's mailbox carries.
Letter: TypeAlias = "Submit | Interrupt | Settle | Operate[Any]"


class Said(NamedTuple):
    """One inbound message of a turn."""

    source: str
    inbound_id: str
    body: records.Inbound
    ticket: Ticket | None = None  # of its acceptance, if that was this actor's


class Waiting(NamedTuple):
    """A turn that has not started, or has to go on, with the messages that it answers."""

    turn_id: TurnId
    said: tuple[Said, ...]
    attempt: int = 1
    stored: bool = False  # found in storage, by an actor that was started later
    not_before_s: float = 0.0
    ahead: bool = False  # it has stopped a turn, and is next
    targets: tuple[Target, ...] = ()  # who is answered beside those who speak here
    effects: tuple[Effect, ...] = ()  # what its earlier attempts have done to the world
    asks: tuple[str, ...] = ()  # the questions that they have left open
    usage: TurnUsage = TurnUsage()  # that they have counted

    @property
    def source(self) -> str:
        return self.said[0].source

    @property
    def ticket(self) -> Ticket | None:
        """Of what was accepted last."""
        return self.said[-1].ticket

    def without(self, refused: Said) -> Waiting:
        """The same, but for a message that is not stored after all."""
        name = (refused.source, refused.inbound_id)
        kept = tuple(one for one in self.said if (one.source, one.inbound_id) != name)
        return self._replace(said=kept)

    @property
    def bodies(self) -> tuple[records.Inbound, ...]:
        return tuple(said.body for said in self.said)


class Accepted(NamedTuple):
    """What a session did with an inbound message; `durable` says when that is on disk."""

    turn_id: TurnId
    disposition: Disposition | Literal["rejected", "scheduled"]
    position: int
    durable: Callable[[], Awaitable[object]]
    reply: Answer[Reply]
    repeated: bool = False


@final
class Counters:
    """What has happened in this runtime since it was opened."""

    __slots__ = (
        "activated",
        "agents_stuck",
        "compactions",
        "crashes",
        "dead_letters",
        "evicted",
        "reloads",
        "repeats",
        "report_rows_dropped",
        "rotations",
        "turns_ended",
        "turns_queued",
        "turns_recovered",
        "turns_started",
    )

    def __init__(self) -> None:
        self.activated = self.evicted = self.crashes = self.reloads = self.repeats = 0
        self.turns_started = self.turns_ended = self.turns_queued = self.turns_recovered = 0
        self.rotations = self.compactions = self.report_rows_dropped = self.agents_stuck = 0
        self.dead_letters = 0

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


class Surroundings(NamedTuple):
    """What every session actor is given."""

    writer: WriterRef
    clock: Clock
    ids: Ids
    settings: SessionSettings
    hooks: Hooks
    agents: AgentSource
    slots: Slots
    counters: Counters
    courier: Courier
    bell: Bell
    context: Context
    on_idle: Callable[[SessionKey], None]


@final
class Line:
    """One key, whoever serves it."""

    __slots__ = ("key", "mailbox", "replies", "source", "stream")

    def __init__(self, key: SessionKey, source: str, settings: SessionSettings) -> None:
        self.key = key
        self.source = source
        self.mailbox: Mailbox[Letter] = Mailbox(settings.mailbox_size_max)
        self.stream = Stream(
            key, settings.stream_window_events_max, settings.stream_window_bytes_max
        )
        self.replies: dict[TurnId, Answer[Reply]] = {}

    def reply_of(self, turn_id: TurnId) -> Answer[Reply]:
        """The promise of a turn's reply; the same one for as long as it is open."""
        answer = self.replies.get(turn_id)
        if answer is None:
            answer = self.replies[turn_id] = Answer()
        return answer

    def give_reply(self, reply: Reply, turn_id: TurnId | None = None) -> None:
        """The reply of its turn, or of another one that was answered with it."""
        answer = self.replies.pop(turn_id or reply.turn_id, None)
        if answer is not None:
            answer.give(reply)

    def fail_reply(self, turn_id: TurnId, error: Exception) -> None:
        answer = self.replies.pop(turn_id, None)
        if answer is not None:
            answer.fail(error)
