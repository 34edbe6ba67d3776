"""What of a file is here already: told apart by ids, then row by row, before anything is written.

Keeps: what is stored under an id is the file's session only if one of them is a beginning of the
other, by uid and content; everything else is a conflict, and it is the whole import's. What was
deleted here stays deleted.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec.structs import replace

from ..errors import ConflictError
from ..records import Draft
from ..sqlite.rows import canonical, digest
from . import looking
from .format import EndLine, MessageLine, SessionLine, decoded

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from ..records import Message, Session
    from ..sqlite.scratch import Planned, Status
    from .asking import Ask, Asking
    from .files import Source
    from .looking import Standing

_PAGE = 200
Found: TypeAlias = "Generator[Ask, Any, tuple[Status, int]]"


# Rows of a file ------------------------------------------------------------------------------


def block_of(source: Source, planned: Planned) -> Iterator[Any]:
    """The lines of a session, behind its first."""
    lines = source.lines(planned.offset, planned.number)
    for place, (_, _, data) in enumerate(lines):
        one: Any = decoded(data)
        if isinstance(one, SessionLine | EndLine) and place > 0:
            return
        if place > 0:
            yield one


def rows_in(source: Source, planned: Planned, line: SessionLine) -> Iterator[Message]:
    """Its messages."""
    for one in block_of(source, planned):
        if isinstance(one, MessageLine):
            yield one.message(line.id)


def content_digest(draft: Draft) -> str:
    """What two rows are compared by when they are told apart."""
    return digest(_as_given(draft)).hex()


def _as_given(draft: Draft) -> Draft:
    return Draft(**{name: getattr(draft, name) for name in Draft.__struct_fields__})


def same_message(stored: Message, given: Message) -> bool:
    """By uid and content; of an erased row, on either side, nothing but the uid is left."""
    if stored.uid != given.uid:
        return False
    if stored.erased or given.erased:
        return True
    return canonical(_as_given(stored)) == canonical(_as_given(given))


# Comparing -----------------------------------------------------------------------------------


def compare(source: Source, planned: Planned, line: SessionLine, standing: Standing) -> Found:
    """What is to be done with a session, and from which row on. Raises `ConflictError`."""
    stored = standing.session
    if standing.holder is not None and standing.holder != line.key:
        raise ConflictError(f"session {line.id}", stored=standing.holder, given=line.key)
    if stored is None or (stored.hidden and not stored.deleted):
        _check_edge(line, standing)
        if standing.holder is not None and (line.deleted or line.end_kind == "rotation"):
            what = f"the end of session {line.id}"
            raise ConflictError(what, stored="current", given=line.end_reason)
        if stored is None or stored.next_seq == 0:
            return "new", 0
        same = yield from _begins_with(source, planned, line, stored)
        return ("new", stored.next_seq) if same else ("restart", 0)
    if stored.deleted:
        return ("same" if line.deleted else "kept"), 0
    if stored.key != line.key:
        raise ConflictError(f"session {line.id}", stored=stored.key, given=line.key)
    if stored.parent_id != line.parent_id and not line.deleted:
        what = f"the parent of session {line.id}"
        raise ConflictError(what, stored=stored.parent_id, given=line.parent_id)
    if line.deleted:
        return "same", 0
    yield from _compare_rows(source, planned, line, stored)
    if stored.next_seq >= line.messages:
        return "same", 0
    if stored.end_kind == "rotation":
        what = f"the length of session {line.id}, which was rotated away,"
        raise ConflictError(what, stored=stored.next_seq, given=line.messages)
    return "extend", stored.next_seq


def _check_edge(line: SessionLine, standing: Standing) -> None:
    """Whether a session that is here can have this one as its child by rotation."""
    parent = standing.parent
    if line.edge != "rotation" or parent is None or parent.hidden:
        return
    other = standing.parent_successor
    if other is not None and other != line.id:
        raise ConflictError(f"the child of session {parent.id}", stored=other, given=line.id)
    if parent.end_kind == "boundary" and not parent.deleted:
        what = f"the end of session {parent.id}"
        raise ConflictError(what, stored=parent.end_reason, given="compression")


def _compare_rows(source: Source, planned: Planned, line: SessionLine, stored: Session) -> Asking:
    """What is stored and what is given are the same, as far as both go."""
    rows = islice(rows_in(source, planned, line), stored.next_seq)
    while page := list(islice(rows, _PAGE)):
        found = yield looking.rows_of(line.id, page[0].seq, len(page))
        for here, given in zip(found, page, strict=True):
            if not same_message(here, given):
                raise ConflictError(
                    f"message {given.seq} of session {line.id}",
                    stored=content_digest(here),
                    given=content_digest(given),
                )


def _begins_with(
    source: Source, planned: Planned, line: SessionLine, stored: Session
) -> Generator[Ask, Any, bool]:
    """Whether what was staged by an import that was cut off is what this one would stage."""
    if line.deleted or stored.next_seq > line.messages:
        return False
    rows = islice(rows_in(source, planned, line), stored.next_seq)
    while page := list(islice(rows, _PAGE)):
        found = yield looking.rows_of(line.id, page[0].seq, len(page))
        # An original may have become a copy, because it is one elsewhere.
        wanted = [
            replace(m, carried=m.carried or here.carried)
            for m, here in zip(page, found, strict=False)
        ]
        if list(found) != wanted or len(wanted) != len(page):
            return False
    return True
