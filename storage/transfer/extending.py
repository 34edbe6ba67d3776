"""Going on in a session that is here: rows behind its last one, then what became of those before.

Keeps: what is stored stays a beginning of what is given, unit by unit, and each unit leaves a
transcript in which nothing is summarised without its summary: a row is summarised in the unit that
brings its summary, and the rows from before get their states with the last unit. So an import that
was cut off here goes on when it is begun again.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..commands import ExtendSession
from ..errors import ConflictError
from ..records import StateRange
from .asking import ROWS_PER_UNIT, Read, slices, write

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from ..engine import Reader
    from ..identity import SessionId
    from ..records import Message, Session
    from .asking import Ask, Asking

# What becomes active lets go of its summary before that one goes; a new one stands before it is
# referred to.
_ORDER = {"active": 0, "summarised": 1, "rewound": 2}


def extending(
    session_id: SessionId,
    rows: Iterator[Message],
    start: int,
    count: int,
    at_ms: int,
    prepared: Callable[[list[Message]], Generator[Ask, Any, list[Message]]],
) -> Asking:
    """Append the rows from `start` on; all of them are given. Nobody else writes meanwhile.

    Raises `ConflictError` if somebody has written since the two were compared.
    """

    def look(reader: Reader) -> Session | None:
        return reader.session(session_id)

    session: Session | None = yield Read(look)
    if session is None or session.next_seq != start:
        stored = None if session is None else session.next_seq
        what = f"the length of session {session_id}, which changed while it was imported,"
        raise ConflictError(what, stored=stored, given=start)
    before = yield from _changed_states(session_id, islice(rows, start))
    later: dict[int, list[StateRange]] = {}
    revision = session.revision
    for page in slices(rows):
        given = yield from prepared(page)
        end = page[-1].seq + 1
        sent: list[Message] = []
        for message in given:
            by = message.summarised_by
            if by is None or by < end:
                sent.append(message)
            else:
                later[by] = _joined(later.get(by, []), [_state_of(message)])
                sent.append(replace(message, state="active", summarised_by=None))
        due = [ready for message in page for ready in later.pop(message.seq, [])]
        states = [*due, *before] if end == count else due
        yield write(
            ExtendSession(
                session_id=session_id,
                base_seq=page[0].seq,
                messages=tuple(sent),
                states=tuple(states),
                replaces=revision,
                at_ms=at_ms,
            )
        )
        revision += 1


def _changed_states(
    session_id: SessionId, rows: Iterator[Message]
) -> Generator[Ask, Any, list[StateRange]]:
    """Where what is stored is in another state than what is given."""
    changed: list[StateRange] = []
    while page := list(islice(rows, ROWS_PER_UNIT)):
        first = page[0].seq

        def look(reader: Reader, first: int = first) -> tuple[Message, ...]:
            return reader.rows_of(session_id, first, ROWS_PER_UNIT)

        found: tuple[Message, ...] = yield Read(look)
        stored = {m.seq: (m.state, m.summarised_by) for m in found}
        differ = [m for m in page if stored.get(m.seq) != (m.state, m.summarised_by)]
        changed = _joined(changed, map(_state_of, differ))
    return sorted(changed, key=lambda one: (_ORDER[one.state], one.first))


def _state_of(message: Message) -> StateRange:
    seq = message.seq
    by = message.summarised_by
    return StateRange(first=seq, last=seq, state=message.state, summarised_by=by)


def _joined(ranges: list[StateRange], more: Iterable[StateRange]) -> list[StateRange]:
    """Runs of rows that are in one state, with those that come behind them."""
    for one in more:
        last = ranges[-1] if ranges else None
        same = last is not None and (last.state, last.summarised_by) == (
            one.state,
            one.summarised_by,
        )
        if last is not None and same and last.last + 1 == one.first:
            ranges[-1] = replace(last, last=one.last)
        else:
            ranges.append(one)
    return ranges
