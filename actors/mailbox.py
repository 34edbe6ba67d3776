"""The kit's smallest parts: a bounded mailbox, the answer that a message may carry, and the loop.

| a caller does       | what happens                            | it ends                    |
| ------------------- | --------------------------------------- | -------------------------- |
| `box.tell(message)` | queued, no answer                       | at once                    |
| `await box.ask(…)`  | queued, then waits for the answer       | with it, or with the actor |
| `box.close()`       | drains: what is queued is read, no more | at once                    |

Keeps:
- A mailbox is bounded; a full one refuses with `MailboxFullError`, it never drops.
- A message is read once, in order, by the one actor that owns the mailbox.
- Every message that was read and carries an answer is answered before its actor is gone, at the
  worst with an error; what was not read stays for the actor's successor, or is answered when the
  mailbox ends.

A mailbox outlives the actors that read it, so that a crash loses no message that was not read.
Belongs to the trio thread. Cancelling a wait for an answer takes nothing back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, final

import outcome
import trio

from ..storage.errors import OnepenError

if TYPE_CHECKING:
    from collections.abc import Callable

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)
T = TypeVar("T")


class MailboxFullError(OnepenError):
    """The actor has more messages waiting than it may have."""

    hint = "wait a little and send it again"

    def __init__(self, size_max: int) -> None:
        super().__init__(f"{size_max} messages are waiting already")
        self.size_max = size_max


class MailboxClosedError(OnepenError):
    """The actor is draining, or gone; the message was not read."""

    hint = "send it again: it reaches the actor's successor"


@final
class Answer(Generic[T]):
    """The promise of one answer. Given once; may be waited for by many, or by nobody."""

    __slots__ = ("__weakref__", "_box", "_outcome", "_waiters")

    def __init__(self) -> None:
        self._outcome: outcome.Outcome[T] | None = None
        self._waiters: list[trio.lowlevel.Task] | None = None
        self._box: Mailbox[object] | None = None

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for it just now."""
        return bool(self._waiters)

    @property
    def given(self) -> bool:
        return self._outcome is not None

    def give(self, value: T) -> None:
        self._settle(outcome.Value(value))

    def fail(self, error: BaseException) -> None:
        self._settle(outcome.Error(error))

    def _settle(self, result: outcome.Outcome[T]) -> None:
        if self._outcome is not None:
            return  # the first answer stands: a late one comes from a task that outlived its actor
        self._outcome = result
        if self._box is not None:
            self._box.unanswered.pop(self, None)
            self._box = None
        self.wake()

    def wake(self, error: BaseException | None = None) -> None:
        """Let those who wait look again, or end their waits with an error; the answer stays open
        in that case, and waiting again is allowed.
        """
        waiters, self._waiters = self._waiters, None
        for task in waiters or ():
            # An outcome may be used once, so each task gets its own.
            result: outcome.Outcome[None] = outcome.Error(error) if error else outcome.Value(None)
            trio.lowlevel.reschedule(task, result)

    async def wait(self) -> T:
        """The answer, or the error it failed with. Does not yield if it is there already."""
        while self._outcome is None:
            task = trio.lowlevel.current_task()
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(task)

            def abort(
                _: trio.lowlevel.RaiseCancelT, task: trio.lowlevel.Task = task
            ) -> trio.lowlevel.Abort:
                if self._waiters is not None:
                    self._waiters.remove(task)
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        if isinstance(self._outcome, outcome.Error):
            raise self._outcome.error
        assert isinstance(self._outcome, outcome.Value)
        value: T = self._outcome.value
        return value

    def belongs_to(self, box: Mailbox[object]) -> None:
        """For the mailbox: somebody has to answer this."""
        self._box = box


class Envelope(NamedTuple, Generic[M]):
    """A message and where its answer goes, if it wants one."""

    message: M
    answer: Answer[object] | None


@final
class Mailbox(Generic[M]):
    """Bounded, in order, read by one actor at a time."""

    __slots__ = ("_closed", "_envelopes", "_paused", "_reader", "_size_max", "unanswered")

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        # A list: it is short, and an empty one is a tenth of an empty deque.
        self._envelopes: list[Envelope[M]] = []
        self._reader: trio.lowlevel.Task | None = None
        self._closed = self._paused = False
        # Of those that were read, in that order.
        self.unanswered: dict[Answer[Any], None] = {}

    def __len__(self) -> int:
        return len(self._envelopes)

    @property
    def closed(self) -> bool:
        return self._closed

    def tell(self, message: M) -> None:
        """Queue a message. Raises `MailboxFullError` and `MailboxClosedError`."""
        self._put(Envelope(message, None))

    def ask_nowait(self, message: M) -> Answer[object]:
        """Queue a message and return the promise of its answer."""
        answer: Answer[object] = Answer()
        self._put(Envelope(message, answer))
        return answer

    async def ask(self, message: M) -> object:
        """Queue a message and wait for its answer, or for the end of whoever should give it."""
        return await self.ask_nowait(message).wait()

    def _put(self, envelope: Envelope[M]) -> None:
        if self._closed:
            raise MailboxClosedError("the actor takes no more messages")
        if len(self._envelopes) >= self._size_max:
            raise MailboxFullError(self._size_max)
        self._envelopes.append(envelope)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None:
            reader, self._reader = self._reader, None
            trio.lowlevel.reschedule(reader)

    async def get(self) -> Envelope[M] | None:
        """The next message; `None` when the reader shall end: paused, or closed and read."""
        while not self._envelopes or self._paused:
            if self._closed or self._paused:
                self._paused = False
                return None
            self._reader = trio.lowlevel.current_task()

            def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
                self._reader = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        envelope = self._envelopes.pop(0)
        if envelope.answer is not None and not envelope.answer.given:
            envelope.answer.belongs_to(self)  # type: ignore[arg-type]
            self.unanswered[envelope.answer] = None
        return envelope

    def close(self) -> None:
        """Take nothing more; the actor reads what is there and ends."""
        self._closed = True
        self._wake()

    def pause(self) -> None:
        """Let the actor end; the mailbox stays open, and what is in it is its successor's."""
        self._paused = True
        self._wake()

    def answer_unread(self, which: Callable[[M], bool], value: object) -> None:
        """Answer those messages in the reader's place."""
        kept: list[Envelope[M]] = []
        for envelope in self._envelopes:
            if which(envelope.message):
                if envelope.answer is not None:
                    envelope.answer.give(value)
            else:
                kept.append(envelope)
        self._envelopes = kept

    def fail_unanswered(self, error: BaseException) -> None:
        """The actor is gone: what it had read and not answered, it never will."""
        for answer in list(self.unanswered):
            answer.fail(error)

    def end(self, error: BaseException) -> None:
        """There will be no successor: answer everything that is left."""
        self._closed = True
        self.fail_unanswered(error)
        while self._envelopes:
            answer = self._envelopes.pop(0).answer
            if answer is not None:
                answer.fail(error)


class Actor(Protocol[M_contra]):
    """What the loop runs."""

    async def on_start(self) -> None: ...
    async def on_message(self, message: M_contra, answer: Answer[object] | None) -> None: ...
    async def on_stop(self) -> None: ...


async def run_actor(actor: Actor[M], mailbox: Mailbox[M], gone: Callable[[], Exception]) -> None:
    """Setup, running, teardown: until the mailbox is closed and read, or the actor raises.

    Whatever ends it, `on_stop` runs and every message that was read is answered, with `gone()`
    where the actor gave no answer itself.
    """
    try:
        await actor.on_start()
        while (envelope := await mailbox.get()) is not None:
            await actor.on_message(envelope.message, envelope.answer)
    finally:
        try:
            await actor.on_stop()
        finally:
            mailbox.fail_unanswered(gone())
