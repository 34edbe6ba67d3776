"""Reception: what a session does with an inbound message, by the policy of whoever sent it.

| policy      | idle    | while a turn runs, or messages wait                                     |
| ----------- | ------- | ----------------------------------------------------------------------- |
| `queue`     | started | queued behind the others                                                |
| `collect`   | started | merged into the turn that waits last, or queued if none does            |
| `steer`     | started | handed to the running turn at its next gate; if it ends first, queued   |
| `interrupt` | started | the running turn is stopped, and this one is next, behind earlier such  |
| `latest`    | started | takes the place of all that wait; the running turn goes on              |
| `reject`    | started | rejected: nothing of it is stored, not even its id                      |

Keeps: accepting is one unit; idle, accepting, starting and the user's row are the same one. What
waits is bounded, and a full line pushes back. A message that gives way ends as interrupted, with
the cause `superseded`, durably: nobody who waits for its reply waits for ever.

With a debounce a collected turn starts only when nothing more has come for that long.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import trio

from ..storage.commands import AcceptInbound, OpenTurn
from ..storage.records import TurnOutcome
from ..storage.units import Durable
from . import moves, recovery
from .line import Accepted, Said, SessionBusyError, Waiting
from .mailbox import Answer
from .messages import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..storage.commands import AnyCommand
    from ..storage.identity import SessionKey, TurnId
    from ..storage.records import Disposition, Message
    from ..storage.units import Receipt
    from .line import Submit
    from .replies import Reply
    from .session import Session

_SUPERSEDED = TurnOutcome(kind="interrupted", cause="superseded")


async def prepare(session: Session, submit: Submit) -> None:
    """What must be known, or done, before a message is accepted. Raises as storage does."""
    if not _is_busy(session) and _is_due(session, submit):
        # Before it is accepted: a crash between the two must not leave it to the old session.
        await session.perform(moves.reset("expired"))
    if submit.busy == "latest":
        # Whose place it takes is said in its own unit, which must not name what was refused.
        for waiting in tuple(session.waiting):
            if waiting.ticket is not None:
                await waiting.ticket.wait()


def accept(session: Session, submit: Submit) -> Accepted:
    """Take a message in; with room in hand and no checkpoint."""
    line, waiting = session.line, session.waiting
    said = Said(submit.source, submit.inbound_id, submit.body)
    busy = _is_busy(session)
    if busy and submit.busy == "reject":
        return _rejected(session, submit)
    if submit.busy == "collect" and waiting and waiting[-1].attempt == 1:
        return _merge(session, submit, said)
    if submit.busy == "steer" and session.turn is not None and not session.turn.done:
        return _steer(session, submit, said)
    superseded: list[Waiting] = []
    if submit.busy == "latest":
        superseded = [one for one in waiting if one.attempt == 1 and _is_stored(one)]
    _check_room(session, len(waiting) - len(superseded))
    debounce_s = submit.debounce_s if submit.busy == "collect" else 0.0
    start = session.may_start and debounce_s <= 0 and session.claim.take()
    disposition: Disposition = "started" if start else "superseded" if superseded else "queued"
    opened = (
        *submit.along,
        OpenTurn(turn_id=submit.turn_id, key=line.key, at_ms=session.scribe.now()),
        _acceptance(session, submit, submit.turn_id, disposition, keep=not start),
        *(_more(session, submit, one, keep=not start) for one in submit.more),
        *(c for one in superseded for c in recovery.ending(session, one, _SUPERSEDED)),
    )
    reply = line.reply_of(submit.turn_id)
    if submit.repeatable:
        session.accepting.note(line.key, submit)
    all_said = (said, *submit.more)
    turn = Waiting(submit.turn_id, all_said, not_before_s=trio.current_time() + debounce_s)
    try:
        if start:
            running = session.start(turn, opened)
            return Accepted(submit.turn_id, "started", 0, running.accepted.wait, reply)
        ticket = session.scribe.note(opened, then=_announcing(session, submit, superseded))
    except BaseException:
        if start and session.turn is None:
            session.claim.give_back()
        line.replies.pop(submit.turn_id, None)
        session.accepting.forget(submit.source, submit.inbound_id)
        raise
    for one in superseded:
        waiting.remove(one)
    if submit.busy == "latest":
        for one in [one for one in waiting if one.attempt == 1]:  # not stored, or not yet
            session.take_back(one.turn_id, "superseded")
    turn = turn._replace(said=tuple(one._replace(ticket=ticket) for one in all_said))
    if submit.busy == "interrupt":
        # Behind those that have jumped the line before it: nobody's own words change places.
        place = next((n for n, one in enumerate(waiting) if not one.ahead), len(waiting))
        waiting.insert(place, turn._replace(ahead=True))
        session.interrupt("superseded")
    else:
        waiting.append(turn)
    session.surroundings.counters.turns_queued += 1
    session.go_on()
    return Accepted(submit.turn_id, disposition, len(waiting), ticket.durable, reply)


def acceptance(
    key: SessionKey,
    submit: Submit,
    turn_id: TurnId,
    disposition: Disposition,
    *,
    at_ms: int = 0,
    keep: bool,
) -> AcceptInbound:
    """What is stored of a message that is taken in; with its body if that has to wait."""
    return AcceptInbound(
        source=submit.source,
        inbound_id=submit.inbound_id,
        key=key,
        turn_id=turn_id,
        disposition=disposition,
        digest=submit.digest,
        at_ms=at_ms,
        body=submit.body if keep else None,
        reply_to=submit.body.reply_to,
    )


def _acceptance(
    session: Session, submit: Submit, turn_id: TurnId, disposition: Disposition, *, keep: bool
) -> AcceptInbound:
    at_ms, key = session.scribe.now(), session.line.key
    return acceptance(key, submit, turn_id, disposition, at_ms=at_ms, keep=keep)


def _more(session: Session, submit: Submit, said: Said, *, keep: bool) -> AcceptInbound:
    """One of several messages that are accepted together."""
    one = submit._replace(
        source=said.source,
        inbound_id=said.inbound_id,
        digest=digest_of(said.body),
        body=said.body,
    )
    return _acceptance(session, one, submit.turn_id, "merged", keep=keep)


def _is_busy(session: Session) -> bool:
    return session.turn is not None or bool(session.waiting) or bool(session.parked)


def _is_due(session: Session, submit: Submit) -> bool:
    """Whether its source says that the session is over, and this is the first of a new one."""
    page = session.scribe.page
    if submit.reset is None or not page.messages or page.end_kind == "boundary":
        return False
    now_ms, last = session.scribe.now(), page.messages[-1]
    # An agent dates its rows as it likes; the user's own, in the same turn, has our time.
    times = [m.created_ms for m in _last_turn(page.messages) if m.created_ms <= now_ms]
    return submit.reset.due(max(times, default=last.created_ms), now_ms)


def _last_turn(messages: Sequence[Message]) -> Iterator[Message]:
    """The rows of the turn that stands at the end, the last one first."""
    return takewhile(lambda m: m.turn_id == messages[-1].turn_id, reversed(messages))


def _is_stored(waiting: Waiting) -> bool:
    return waiting.ticket is None or isinstance(waiting.ticket.receipt, Durable)


def _announcing(
    session: Session, submit: Submit, superseded: Sequence[Waiting] = ()
) -> Callable[[Receipt], None]:
    def received(receipt: Receipt) -> None:
        if isinstance(receipt, Durable):
            session.line.stream.publish("turn.queued", turn_id=submit.turn_id)
            for one in superseded:
                recovery.has_ended(session, one, _SUPERSEDED)
        else:
            session.accepting.forget(submit.source, submit.inbound_id)
            session.waiting[:0] = superseded
            session.go_on()

    return received


def _rejected(session: Session, submit: Submit) -> Accepted:
    reply: Answer[Reply] = Answer()
    reply.fail(SessionBusyError(session.key, 1.0, why="it is busy, and the message may not wait"))
    return Accepted(submit.turn_id, "rejected", 0, trio.lowlevel.checkpoint, reply)


def _check_room(session: Session, waiting: int) -> None:
    """For one more beside so many that wait, and those that are to come into the running turn."""
    waiting += 0 if session.turn is None else len(session.turn.steering)
    if waiting >= session.settings.waiting_per_key_max:
        raise SessionBusyError(session.key, 1.0, why=f"{waiting} messages wait already")


def _merge(session: Session, submit: Submit, said: Said) -> Accepted:
    """One more message for the turn that waits last."""
    before = session.waiting[-1]
    _check_room(session, sum(len(one.said) for one in session.waiting))
    turn_id = before.turn_id
    accepted: AnyCommand = _acceptance(session, submit, turn_id, "merged", keep=True)

    def received(receipt: Receipt) -> None:
        if not isinstance(receipt, Durable):
            session.accepting.forget(submit.source, submit.inbound_id)
            session.replace_waiting(turn_id, lambda waiting: waiting.without(said))

    ticket = session.scribe.note((*submit.along, accepted), then=received)
    if submit.repeatable:
        session.accepting.note(session.line.key, submit._replace(turn_id=turn_id))
    not_before_s = trio.current_time() + submit.debounce_s
    session.waiting[-1] = before._replace(
        said=(*before.said, said._replace(ticket=ticket)), not_before_s=not_before_s
    )
    session.go_on()  # perhaps this one has nothing to wait for
    reply = session.line.reply_of(turn_id)
    return Accepted(turn_id, "merged", len(session.waiting), ticket.durable, reply)


def _steer(session: Session, submit: Submit, said: Said) -> Accepted:
    """A turn of its own that waits for nothing but a gate of the running one.

    So that nothing is lost if that one ends first: then it is simply the next.
    """
    assert session.turn is not None
    _check_room(session, len(session.waiting))
    opened = (
        *submit.along,
        OpenTurn(turn_id=submit.turn_id, key=session.line.key, at_ms=session.scribe.now()),
        _acceptance(session, submit, submit.turn_id, "steered", keep=True),
    )
    reply = session.line.reply_of(submit.turn_id)
    ticket = session.scribe.note(opened, then=_announcing(session, submit))
    if submit.repeatable:
        session.accepting.note(session.line.key, submit)
    session.turn.steering.append(Waiting(submit.turn_id, (said._replace(ticket=ticket),)))
    return Accepted(submit.turn_id, "steered", 0, ticket.durable, reply)
