"""A turn, as the agent that answers it sees it.

| an agent does                 | what happens                              | durable           |
| ----------------------------- | ----------------------------------------- | ----------------- |
| `await turn.append(…)`        | posted at once, in order                  | by the next gate  |
| `await turn.say(text)`        | the same, as an interim message           | by the next gate  |
| `async with turn.streaming()` | pieces are shown, one message is posted   | by the next gate  |
| `await turn.effect(fn, …)`    | intent, call, result                      | the intent first  |
| `await turn.ask_user(…)`      | the turn waits for a person's answer      | on return         |
| `await turn.rotate(…)`        | the conversation moves to a child session | on return         |
| `await turn.compact(…)`       | the transcript is shortened in place      | on return         |
| `await turn.steering()`       | what the user said since comes in         | by the next gate  |
| `turn.usage(…)`               | counted with the turn's next unit         | with it           |

Keeps: what an agent appends stands in the order in which it was appended, except that an interim
message waits behind the results of tool calls that are open; a call that the agent leaves open gets
a stored result that says so (contract A10). The same message handed over again is not stored again;
identity is the uid (A3). Nothing here writes: the scribe of the session does.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, final

import msgspec
import trio

from ..storage.commands import AddUsage, EndTurn
from ..storage.edge import check_draft, check_unit
from ..storage.errors import ConflictError, InvalidContentError
from ..storage.identity import Uid
from ..storage.records import Draft, Tokens
from ..storage.units import Durable, Unit
from . import compression
from .compression import Compress, Compression, Summarise, SummaryRaised
from .effects import Effects, OnUnknownEffect
from .exchanges import closing_results, open_calls, ordered
from .messages import Given, draft_of, same_message, texts_of, user_draft
from .outbox import posting
from .owned import own_draft, own_inbound
from .pausing import turn_over
from .recovery import taking
from .replies import steered_into
from .results import Attempt
from .streaming import Streaming

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

    from ..storage.commands import AnyCommand
    from ..storage.engine import Reader
    from ..storage.identity import SessionId, SessionKey
    from ..storage.records import Message, ToolCall
    from .binding import Binding
    from .line import Waiting
    from .outbox import Target
    from .scribe import Scribe

logger = logging.getLogger(__name__)


class Host(Protocol):
    """What runs the turn: whom it answers, and what it can do for the agent beside writing."""

    steering: list[Waiting]
    """Messages that are to come into this turn, and wait for a gate."""
    steered: list[Waiting]
    """Those that have found one."""

    @property
    def targets(self) -> tuple[Target, ...]:
        """Who is answered."""
        ...

    def show_delta(self, uid: Uid, piece: str) -> None:
        """A piece of a message, for those who watch."""
        ...

    def withdraw(self, uid: Uid) -> None:
        """What was shown of this message will not be stored."""
        ...

    async def ask(
        self, text: str, choices: Sequence[str], timeout_s: float | None, name: str | None
    ) -> str:
        """A question to a person."""
        ...


def _refuse(orphan: Draft) -> None:
    raise InvalidContentError(
        "tool_call_id",
        f"there is no open call {orphan.tool_call_id!r}: it was never made, or the turn went on",
        hint="append a call before its result, and the result before the next message",
    )


@final
class Turn:
    """One turn of a conversation. Valid until the agent returns."""

    def __init__(
        self,
        scribe: Scribe,
        binding: Binding,
        waiting: Waiting,
        useless_max: int,
        host: Host,
    ) -> None:
        self.id = waiting.turn_id
        self._host = host
        self._heard: list[str] = []  # what was steered in and not asked for yet
        self.attempt = waiting.attempt
        self.resumed = waiting.attempt > 1
        self.inbound = tuple(map(own_inbound, waiting.bodies))
        self._effects = Effects(scribe, waiting.turn_id, waiting.effects)
        self.deadline = float("inf")
        self._scribe = scribe
        self._binding = binding
        self._useless_max = useless_max
        self._given: list[Message] = scribe.page.messages
        self._given_count = len(self._given)
        self._open: dict[str, ToolCall] = {}
        self._posted: set[Uid] = set()  # also what is held until a rotation is durable
        self._deferred: list[Draft] = []  # until the open calls have their results
        self._usage: list[AddUsage] = []
        self._streamed: Uid | None = None
        self._interim = set[Uid]()  # what is sent as soon as it is stored
        self._sent_to: tuple[Target, ...] = ()  # who got the last of it
        self._last: Draft | None = None
        self.said: str | None = None
        self.model_calls = waiting.usage.calls
        self.tokens = waiting.usage.tokens
        self.over = False

    # What an agent reads -----------------------------------------------------------------------

    @property
    def key(self) -> SessionKey:
        """The conversation's address."""
        return self._binding.key

    @property
    def session_id(self) -> SessionId:
        """The session that the turn is in now; rotation changes it."""
        return self._binding.session_id

    @property
    def text(self) -> str:
        """What the user said, the texts of several messages in lines."""
        return "\n".join(text for body in self.inbound for text in texts_of(body))

    @property
    def history(self) -> tuple[Message, ...]:
        """The transcript before this turn's own user message."""
        page = self._scribe.page
        if self.attempt > 1:  # others may have spoken since it began
            return tuple(m for m in page.messages if m.turn_id != self.id)
        return tuple(page.messages[: page.tail_of(self.id)])

    @property
    def messages(self) -> tuple[Message, ...]:
        """This turn's own rows so far, its user message first."""
        page = self._scribe.page
        if self.attempt > 1:
            return tuple(m for m in page.messages if m.turn_id == self.id)
        return tuple(page.messages[page.tail_of(self.id) :])

    # What an agent does ------------------------------------------------------------------------

    async def append(self, *given: Given) -> tuple[Draft, ...]:
        """Store messages of this turn, in order; returns them with their uids.

        What carries a uid that is stored already is not stored again. Returns when they are posted;
        they are durable at the latest when the reply is. Raises `InvalidContentError` before
        anything is posted, and `StorageUnavailableError`.
        """
        self.check_open()
        now, made = self._scribe.now(), set[Uid]()

        def fresh_uid() -> Uid:
            made.add(uid := self._scribe.fresh_uid())
            return uid

        drafts = tuple(draft_of(one, fresh_uid, now) for one in given)
        for draft in drafts:
            check_draft(draft)
        own = tuple(map(own_draft, drafts))  # the agent keeps what it gave, and may change it
        brought = [draft.uid for draft in own if draft.uid not in made]
        if brought:
            self._check_same(own)
        await self._post(await self.not_stored(own, brought, exact=True))
        return drafts

    async def say(self, text: str) -> None:
        """An interim message to the user, sent once it is durable.

        The last one is the answer if nothing is returned. While tool calls are open it waits behind
        their results.
        """
        self.check_open()
        draft = draft_of(text, self._scribe.fresh_uid, self._scribe.now())
        await self._post_interim(draft)
        self.said = text

    @asynccontextmanager
    async def streaming(self) -> AsyncGenerator[Streaming]:
        """One message, piece by piece. If the block is cut off, what there is is stored as partial.

        If the agent returns the same text as its answer, that is this message, not another one.
        """
        out = self.open_stream()
        try:
            yield out
        except BaseException:
            self.cut_stream(out)  # nothing can be awaited here: the next unit takes it along
            raise
        await self.end_stream(out)

    # The steps of a stream, for whoever runs the block elsewhere: on another loop.

    def open_stream(self) -> Streaming:
        """A message to write; it must be ended or cut."""
        self.check_open()
        return Streaming(self._scribe.fresh_uid(), self._host.show_delta)

    async def end_stream(self, out: Streaming) -> None:
        """It is whole: store it."""
        if out.text:
            draft = self._streamed_draft(out, partial=False)
            try:
                check_draft(draft)
            except InvalidContentError:
                self._host.withdraw(out.uid)  # what was shown of it is not stored
                raise
            self._streamed = out.uid
            await self._post_interim(draft)
            self.said = out.text

    def cut_stream(self, out: Streaming) -> None:
        """It was cut off: what there is of it is stored as partial, with the turn's next unit."""
        draft = self._streamed_draft(out, partial=True)
        try:
            check_draft(draft)
        except InvalidContentError:
            logger.warning("%s: a cut-off message can't be stored", self.key, exc_info=True)
            self._host.withdraw(out.uid)
            return
        if out.text:
            self._deferred.append(draft)

    def _streamed_draft(self, out: Streaming, *, partial: bool) -> Draft:
        return Draft(
            uid=out.uid,
            role="assistant",
            text=out.text,
            finish_reason="partial" if partial else out.finish_reason,
            created_ms=self._scribe.now(),
        )

    async def steering(self) -> tuple[str, ...]:
        """What the user has said since, under the policy `steer`: each text once.

        It is in the transcript when this returns it. Messages come in at every gate (`append`,
        `say`, the end of a stream, this call), never between a tool call and its result.
        """
        self.check_open()
        if self._host.steering:
            await self._post(())
        await trio.lowlevel.checkpoint()
        heard, self._heard = tuple(self._heard), []
        return heard

    async def rotate(
        self, summary: Summarise, *, upto: Uid | None = None, force: bool = False
    ) -> SessionId:
        """Move the conversation to a child session that begins with a summary.

        `summary` is text, or a function of the history that writes it. Returns the child's id when
        the move is durable. Raises `NoGainError` if it would not shrink the transcript.
        """
        return await self._compress(compression.rotate, summary, upto, force=force)

    async def compact(
        self, summary: Summarise, *, upto: Uid | None = None, force: bool = False
    ) -> SessionId:
        """Shorten the transcript in place: the history becomes inactive behind its summary."""
        return await self._compress(compression.compact, summary, upto, force=force)

    async def _compress(
        self, compress: Compress, summary: Summarise, upto: Uid | None, *, force: bool
    ) -> SessionId:
        self.check_open()
        asked = Compression(summary, upto, force, self.id, self.attempt, self.check_open)
        try:
            return await compress(self._scribe, asked, self._useless_max)
        except SummaryRaised as raised:
            raise raised.error  # noqa: B904 - it is the agent's own error, as it raised it

    async def effect(
        self,
        fn: Callable[..., Any],
        *args: Any,
        key: str | None = None,
        on_unknown: OnUnknownEffect = "fail",
    ) -> Any:
        """Do something to the world, on the record: `fn(*args)`, sync or async.

        The intent is durable before `fn` runs. If it takes an `effect_id`, it gets one that is the
        same in every attempt of this turn. Returns its result as JSON has it. A resumed turn gets
        what is recorded, and `fn` is not called again; whether an effect has happened that has no
        result is unknown, and `on_unknown` says what follows: `retry` it, `skip` it (`None`),
        `fail` with `EffectUnknownError`, or `ask` the user. `key` names the effect in this turn; a
        tool call names it by itself, if exactly one is open.
        """
        self.check_open()
        if key is None:
            if len(self._open) != 1:
                problem = f"{len(self._open)} tool calls are open, so none names this effect"
                raise InvalidContentError("key", problem, hint="give a key of its own")
            key = next(iter(self._open))

        async def ask(question: str, choices: tuple[str, ...], name: str) -> str:
            return await self._host.ask(question, choices, None, name)

        return await self._effects.run(fn, args, key, on_unknown, ask)

    async def ask_user(
        self,
        question: str,
        choices: Sequence[str] = (),
        timeout: float | None = None,
        *,
        key: str | None = None,
    ) -> str:
        """Ask a person, and wait for the answer; it comes through `runtime.approvals`.

        Meanwhile the turn holds no running slot, and its deadline stands still. A restart leaves
        the question open: its answer begins the turn anew (`resumed`), and asking the same again
        returns it. The same is the same `key`, or else the same question and choices. Raises
        `QuestionExpiredError` when nobody has answered in time.
        """
        self.check_open()
        return await self._host.ask(question, choices, timeout, key)

    def usage(
        self,
        *,
        model: str = "",
        input: int = 0,
        output: int = 0,
        cache_read: int = 0,
        cache_write: int = 0,
        reasoning: int = 0,
        cost_nanos: int = 0,
        auxiliary: bool = False,
    ) -> None:
        """Count one model call; stored with the turn's next unit."""
        self.check_open()
        if not auxiliary:
            self.model_calls += 1
        tokens = Tokens(
            input=input,
            output=output,
            cache_read=cache_read,
            cache_write=cache_write,
            reasoning=reasoning,
        )
        counted = AddUsage(
            call_id=self._scribe.fresh_uid(),
            session_id=self.session_id,
            at_ms=self._scribe.now(),
            turn_id=self.id,
            model=model,
            auxiliary=auxiliary,
            tokens=tokens,
            cost_nanos=cost_nanos,
        )
        check_unit(Unit((counted,)))  # here, where it can be mended, and not at the turn's end
        self._usage.append(counted)
        self.tokens = Tokens(
            input=self.tokens.input + input,
            output=self.tokens.output + output,
            cache_read=self.tokens.cache_read + cache_read,
            cache_write=self.tokens.cache_write + cache_write,
            reasoning=self.tokens.reasoning + reasoning,
        )

    def check_open(self) -> None:
        """Raise when the agent has returned: nothing of this turn is written any more."""
        if self.over:
            raise turn_over()

    # Posting, in the order that keeps a transcript valid -----------------------------------------

    async def _post(self, drafts: tuple[Draft, ...]) -> None:
        for draft in drafts:
            check_draft(draft)  # so that nothing can be refused once the order is settled
        await self._scribe.append(lambda: self._rows(drafts), self.id)

    async def _post_interim(self, draft: Draft) -> None:
        """A message that answers no call and need not stand just here."""
        self._interim.add(draft.uid)
        if self._open:
            check_draft(draft)
            self._deferred.append(draft)
            await trio.lowlevel.checkpoint()
        else:
            await self._post((draft,))

    def _rows(self, drafts: tuple[Draft, ...]) -> tuple[tuple[Draft, ...], tuple[AnyCommand, ...]]:
        """What is posted for these drafts now: with what waited for them, and what they close."""
        self.check_open()  # in the very moment of posting: the turn may have ended meanwhile
        opened, drafts = dict(self._open), tuple(self._not_posted(drafts))
        rows, deferred = self._in_order(drafts, opened, "the turn went on without one", _refuse)
        self._open, self._deferred = opened, deferred
        commands: list[AnyCommand] = []
        if not opened:
            for waiting in self._landing():
                rows += self._user_rows(waiting)
                commands += self._steered_in(waiting)
        if rows:
            self._last = rows[-1]
            self._posted.update(row.uid for row in rows)
        return tuple(rows), (*commands, *self.sending(rows), *self.take_usage())

    def sending(self, rows: Iterable[Draft]) -> tuple[AnyCommand, ...]:
        """The interim messages among these rows, for the outbox."""
        commands: list[AnyCommand] = []
        for row in rows:
            if row.uid in self._interim:
                self._sent_to, text = self._host.targets, row.text or ""
                commands += posting(
                    self._scribe, self._sent_to, text, "interim", turn_id=self.id, uid=row.uid
                )
        return tuple(commands)

    def _landing(self) -> list[Waiting]:
        """The messages that come in at this gate: those that are durable."""
        host = self._host
        landing = [w for w in host.steering if w.ticket and isinstance(w.ticket.receipt, Durable)]
        for waiting in landing:
            host.steering.remove(waiting)
            host.steered.append(waiting)
            self._heard += [text for body in waiting.bodies for text in texts_of(body)]
        return landing

    def _user_rows(self, waiting: Waiting) -> list[Draft]:
        scribe = self._scribe
        return [user_draft(body, scribe.fresh_uid(), scribe.now()) for body in waiting.bodies]

    def _steered_in(self, waiting: Waiting) -> tuple[AnyCommand, ...]:
        """Its own turn is over with that: it is answered with this one."""
        outcome = steered_into(self.id)
        end = EndTurn(turn_id=waiting.turn_id, attempt=0, outcome=outcome, at_ms=self._scribe.now())
        return (*taking(waiting, into=self.id), end)

    def _in_order(
        self,
        drafts: Iterable[Draft],
        opened: dict[str, ToolCall],
        why: str,
        on_orphan: Callable[[Draft], None],
    ) -> tuple[list[Draft], list[Draft]]:
        """The rows, and what must still wait; `opened` is brought up to date."""
        rows: list[Draft] = []
        deferred = self._deferred
        scribe = self._scribe

        def close(calls: Iterable[ToolCall]) -> tuple[Draft, ...]:
            fates = self._effects.fates()
            return closing_results(calls, why, scribe.fresh_uid, scribe.now(), fates)

        for draft in drafts:
            if not opened or draft.role != "tool":
                rows += ordered(deferred, opened, close, on_orphan)
                deferred = []
            rows += ordered((draft,), opened, close, on_orphan)
        if not opened:
            rows += deferred
            deferred = []
        return rows, deferred

    # For the session ---------------------------------------------------------------------------

    async def not_stored(
        self, drafts: tuple[Draft, ...], brought: Sequence[Uid], *, exact: bool = False
    ) -> tuple[Draft, ...]:
        """Those that are not stored; `brought` are the uids that were not given out just now.

        One that is no longer in the transcript (rotated away, summarised, rewound) is stored all
        the same. Raises `ConflictError` for a message of another conversation, and with `exact` for
        other content under a stored uid: a report may repeat a message in short.
        """
        page = self._scribe.page
        unknown = [uid for uid in brought if not page.has(uid) and uid not in self._posted]
        if not unknown:
            return drafts
        key = self.key

        def look(reader: Reader) -> dict[Uid, Message]:
            found: dict[Uid, Message] = {}
            for uid in unknown:
                message = reader.message(uid)
                if message is not None:
                    session = reader.session(message.session_id)
                    if session is not None and session.key != key:
                        raise ConflictError(f"message {uid}", session.key, key)
                    found[uid] = message
            return found

        stored = await self._scribe.writer.read(look)
        for draft in drafts:
            message = stored.get(draft.uid)
            if exact and message is not None and not same_message(message, draft):
                raise ConflictError(f"message {draft.uid}", message.role, draft.role)
        return tuple(draft for draft in drafts if draft.uid not in stored)

    def _check_same(self, drafts: tuple[Draft, ...]) -> None:
        """The same uid with other content is another message under a stolen name."""
        page, seen = self._scribe.page, dict[Uid, Draft]()
        for draft in drafts:
            known: Draft = seen.setdefault(draft.uid, draft)
            if page.has(draft.uid):
                known = page.messages[page.index_of(draft.uid)]
            if not same_message(known, draft):
                raise ConflictError(f"message {draft.uid}", known.role, draft.role)

    def _not_posted(self, drafts: Iterable[Draft]) -> list[Draft]:
        """Each message once, as it stands in this very moment."""
        page, new = self._scribe.page, dict[Uid, Draft]()
        for draft in drafts:
            if not page.has(draft.uid) and draft.uid not in self._posted:
                new.setdefault(draft.uid, draft)
        return list(new.values())

    def as_attempt(self) -> Attempt:
        """What this attempt was given and has stored, for aligning its report."""
        given = [m for m in self._given[: self._given_count] if m.turn_id != self.id]
        return Attempt(self.id, self.attempt, given, self.messages, self._scribe.now())

    def effects_left(self) -> tuple[AnyCommand, ...]:
        """For the turn's end: side effects of which nobody knows what they came to."""
        return self._effects.left(self._scribe.now())

    def take_usage(self) -> tuple[AddUsage, ...]:
        usage, self._usage = [*self._scribe.uncounted, *self._usage], []
        self._scribe.uncounted = []
        if any(u.session_id != self.session_id for u in usage):
            # Counted before a rotation, stored behind it: the parent is closed.
            usage = [msgspec.structs.replace(u, session_id=self.session_id) for u in usage]
        return tuple(usage)

    def last_rows(
        self, drafts: Iterable[Draft], why: str, on_orphan: Callable[[Draft], None]
    ) -> tuple[Draft, ...]:
        """What the end of the turn must store: these, what still waits, results for open calls.

        It goes by what is stored, and changes nothing here, so it can be asked again.
        """
        opened, scribe = open_calls(self.messages), self._scribe
        rows, deferred = self._in_order(self._not_posted(drafts), opened, why, on_orphan)
        fates = self._effects.fates()
        rows += closing_results(opened.values(), why, scribe.fresh_uid, scribe.now(), fates)
        return (*rows, *deferred)

    def sent_to(self, text: str) -> tuple[Target, ...]:
        """Who has this already, because it is the interim message that was said last."""
        return self._sent_to if self.said == text else ()

    def is_streamed_answer(self, text: str) -> bool:
        """Whether this answer is the message that was just streamed."""
        last = self._last
        return last is not None and last.uid == self._streamed and last.text == text
