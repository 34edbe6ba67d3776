"""What can be done to a session from outside, each as one unit, when no turn is in the way.

| operation                                                  | the running turn               |
| ---------------------------------------------------------- | ------------------------------ |
| `branch`, `open_session`, `post`                           | is waited for                  |
| `rotate`, `compact`, `set_title`                           | so too, unless it waits itself |
| `switch`, `reset`, `rewind`, `restore`, `close`, `reopen`  | is interrupted and stored first |

Keeps: a key's session changes only by a committed route write (contract B5); memory follows behind
the receipt, never before it. Everything that sets a value reads the version it replaces when it is
its turn: nobody else writes this key meanwhile, and if somebody does, the unit is refused as stale.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from ..storage.commands import ReopenSession, Restore, Rewind
from ..storage.errors import ConflictError, MissingError, SessionEndedError
from ..storage.identity import Seq, SessionId, TurnId
from ..storage.units import Guard, Refused
from . import compression
from .erasing import Blanked, blank_user
from .exchanges import closing_results, open_calls
from .finalize import Finalized, finalize
from .line import SHUTDOWN, Operate
from .messages import draft_of
from .outbox import Target, delivery_of, posting, shown_of
from .sources import name_of
from .titles import give_title

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..storage.commands import PostDelivery
    from ..storage.engine import Reader
    from ..storage.identity import Uid
    from ..storage.records import Delivery, Message, TitleOrigin, ToolCall
    from .compression import Compression
    from .page import Page
    from .session import Session


REST = "rest"


def _own(session: Session, session_id: SessionId | None = None) -> Guard:
    scribe = session.scribe
    return Guard(key=scribe.key, incarnation=scribe.incarnation, session_id=session_id)


# Shortening and going back -------------------------------------------------------------------


def rotate(asked: Compression) -> Operate[SessionId]:
    async def run(session: Session) -> SessionId:
        useless_max = session.settings.useless_compressions_max
        _check_open(session)
        keeping = _keeping_turn(session, asked)
        child_id = await compression.rotate(session.scribe, keeping, useless_max)
        _seen(session)
        return child_id

    return Operate("rotate", run, interrupts=False, beside=True)


def compact(asked: Compression) -> Operate[SessionId]:
    async def run(session: Session) -> SessionId:
        useless_max = session.settings.useless_compressions_max
        _check_open(session)
        keeping = _keeping_turn(session, asked)
        session_id = await compression.compact(session.scribe, keeping, useless_max)
        session.surroundings.counters.compactions += 1
        session.line.stream.publish("compacted", session_id=session_id)
        _seen(session)
        return session_id

    return Operate("compact", run, interrupts=False, beside=True)


def _keeping_turn(session: Session, asked: Compression) -> Compression:
    """A turn that waits for a person is carried whole: it will go on."""
    turn_id = next(iter(session.parked), None)
    if session.turn is not None:
        turn_id = session.turn.waiting.turn_id
    # By its first row, and not as what stands at the end: others may have spoken behind it.
    return asked if turn_id is None else asked._replace(turn_id=turn_id, attempt=2)


def _seen(session: Session) -> None:
    """Our own change is no reason to rebuild the agent."""
    page = session.scribe.page
    session.slot.seen(page.session_id, page.revision)


def _check_open(session: Session) -> None:
    page = session.scribe.page
    if not page.stored:
        raise MissingError(f"a stored session of {session.key}")
    if page.end_kind == "boundary":
        raise SessionEndedError(page.session_id, "closed")


def rewind(to: Uid | None, turns: int) -> Operate[int]:
    """Everything from a message on becomes inactive; without one, the last turns."""

    async def run(session: Session) -> int:
        scribe = session.scribe
        _check_open(session)
        page = scribe.page
        if to is None:
            cut = _at(page.messages, _turns_back(session, turns))
        elif page.has(to):
            cut = _at(page.messages, page.index_of(to))
        else:
            cut = await scribe.read(partial(_inside_summary, page, to))
        now = scribe.now()
        command = Rewind(
            session_id=page.session_id,
            to_seq=cut.to_seq,
            replaces=page.revision,
            at_ms=now,
            closing=closing_results(
                cut.open_calls.values(), "the conversation was rewound", scribe.fresh_uid, now
            ),
        )
        await scribe.commit((*scribe.reopening(), command), (_own(session, page.session_id),))
        before = {message.uid for message in page.messages}
        await _follow_transcript(session)
        return len(before - {message.uid for message in scribe.page.messages})

    return Operate("rewind", run, interrupts=True)


class _Point(NamedTuple):
    """Where a rewind goes back to, and what is left open before it."""

    to_seq: Seq
    open_calls: dict[str, ToolCall]


def _at(messages: Sequence[Message], index: int) -> _Point:
    """In front of an active message; a summary goes with all that it covers."""
    target = messages[index]
    to_seq = target.covers[0] if target.covers else target.seq
    return _Point(to_seq, open_calls(messages[:index]))


def _inside_summary(page: Page, to: Uid, reader: Reader) -> _Point:
    """In front of a message that a summary covers: what stands before it comes back (B10)."""
    target = reader.around(page.session_id, to, before=0, after=0).messages[0]
    if target.uid != to or target.state != "summarised":
        raise MissingError(f"a message {to} in session {page.session_id} that was not rewound")
    to_seq = target.covers[0] if target.covers else target.seq
    stands = [m for m in page.messages if _place(m) < to_seq]
    place: tuple[int, int] | None = (-1, -1)
    if stands:
        place = (_place(stands[-1]), stands[-1].seq)
    back: list[Message] = []
    while place is not None and place[0] < to_seq:
        found = reader.transcript(page.session_id, include_inactive=True, after=place)
        back += (
            m for m in found.messages if m.seq < to_seq and m.state == "summarised" and not m.covers
        )
        place = found.next
    return _Point(to_seq, open_calls([*stands, *back]))


def _place(message: Message) -> int:
    """Where it stands when the transcript is read."""
    return message.covers[1] if message.covers else message.seq


def _turns_back(session: Session, turns: int) -> int:
    """Where the last turns begin."""
    messages = session.scribe.page.messages
    index, seen = len(messages), set[TurnId | None]()
    while index:
        turn_id = messages[index - 1].turn_id
        if turn_id is None and not seen and not messages[index - 1].summary:
            index -= 1  # behind the last turn, of no turn: somebody else wrote it
            continue
        if turn_id not in seen and (turn_id is None or len(seen) == turns):
            break
        seen.add(turn_id)
        index -= 1
    if not seen:
        raise MissingError(f"a turn of {session.key} that could be rewound")
    return index


async def _follow_transcript(session: Session) -> None:
    await session.scribe.reload()
    _seen(session)


def restore() -> Operate[SessionId]:
    """Undo the last rewind, if nothing came after it."""

    async def run(session: Session) -> SessionId:
        scribe = session.scribe
        _check_open(session)
        page = scribe.page
        command = Restore(session_id=page.session_id, replaces=page.revision, at_ms=scribe.now())
        await session.scribe.commit(
            (*scribe.reopening(), command), (_own(session, page.session_id),)
        )
        await _follow_transcript(session)
        return page.session_id

    return Operate("restore", run, interrupts=True)


def set_title(title: str, origin: TitleOrigin) -> Operate[bool]:
    """Give the session a title; false if a person's title stands against an automatic one."""

    async def run(session: Session) -> bool:
        return await give_title(session.scribe, title, origin)

    return Operate("set_title", run, interrupts=False, beside=True)


def post(text: str, target: Target | None, source: str, post_id: str | None) -> Operate[Delivery]:
    """An assistant's row that answers nobody, and its delivery: one unit."""

    async def run(session: Session) -> Delivery:
        scribe = session.scribe
        delivery_id = None if post_id is None else f"post:{name_of(source, post_id)}"

        def look(reader: Reader) -> tuple[Delivery | None, Delivery | None]:
            known = None if delivery_id is None else reader.delivery(delivery_id)
            return known, reader.last_delivery(scribe.key, source)

        known, last = await scribe.read(look)
        if known is not None:
            place = known.target if target is None else target.reply_to
            if (known.key, known.text, known.target) != (scribe.key, shown_of(text), place):
                raise ConflictError(f"delivery {delivery_id}", known.key, scribe.key)
            return known
        # Where nobody has said where to, and nothing was sent before, the key says it.
        to = target or Target(source, {} if last is None else last.target)
        draft = draft_of(text, scribe.fresh_uid, scribe.now())
        await scribe.room()

        def commands() -> tuple[PostDelivery, ...]:
            posted = posting(scribe, (to,), text, "post", uid=draft.uid)
            if delivery_id is not None:
                posted = tuple(replace(one, delivery_id=delivery_id) for one in posted)
            return posted

        created = not scribe.page.stored or scribe.page.end_kind == "boundary"
        ticket, sent = scribe.say(draft, commands)
        receipt = await scribe.receipt_of(ticket)
        if isinstance(receipt, Refused):
            raise receipt.error()
        session.follow_page()
        _seen(session)
        if created:
            await session.tell_session_start()
        return delivery_of(sent)

    return Operate("post", run, interrupts=False)


def blank(session_ids: tuple[SessionId, ...], user: str) -> Operate[Blanked]:
    """Blank what a user has said in sessions of this key, and forget what memory holds of it.

    The running turn is stopped and stored first: it might write down again what it has read.
    """

    async def run(session: Session) -> Blanked:
        scribe = session.scribe
        blanked = Blanked(0, 0)
        for session_id in session_ids:
            blanked += await blank_user(scribe.writer, scribe.now(), session_id, user)
        await session.reload()
        session.slot.distrust()
        session.line.stream.forget()
        return blanked

    return Operate("erase", run, interrupts=True)


# Ends ----------------------------------------------------------------------------------------


def close(reason: str) -> Operate[Finalized]:
    """Finalize the session behind a boundary: contract I."""

    async def run(session: Session) -> Finalized:
        return await finalize(session, reason, "boundary")

    return Operate("close", run, interrupts=True)


def suspend(reason: str) -> Operate[Finalized]:
    """Finalize the session as a shutdown does; nothing is started after it."""

    async def run(session: Session) -> Finalized:
        session.stopping = True
        return await finalize(session, reason, "suspension")

    return Operate(SHUTDOWN, run, interrupts=True)


def rest() -> Operate[None]:
    """Let the running turn be stored, and do nothing: whoever asked takes the key over."""

    async def run(session: Session) -> None:
        session.stopping = True
        await session.scribe.wait_settled()
        session.line.mailbox.pause()

    return Operate(REST, run, interrupts=True)


def reopen() -> Operate[SessionId]:
    """The current session, if it has ended, is open again."""

    async def run(session: Session) -> SessionId:
        scribe = session.scribe
        page = scribe.page
        row = await session.scribe.read(lambda reader: reader.session(page.session_id))
        if row is not None and row.end_kind is not None:
            command = ReopenSession(session_id=row.id, replaces=row.end_version, at_ms=scribe.now())
            await session.scribe.commit((command,), (_own(session),))
            await _follow_transcript(session)
        return page.session_id

    return Operate("reopen", run, interrupts=True)
