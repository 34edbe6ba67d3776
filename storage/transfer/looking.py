"""What an import looks up: each a `Read`, whose answer is what its view returns."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from .asking import Read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..engine import Reader
    from ..identity import BlobId, SessionId, SessionKey, Uid
    from ..records import Blob, Message, Route, Session, Staged, Turn, Usage
    from .format import SessionLine


class Standing(NamedTuple):
    """What is stored under a session's id, and around it."""

    session: Session | None
    holder: SessionKey | None
    parent: Session | None
    parent_successor: SessionId | None


def session_of(session_id: SessionId) -> Read:
    return Read(partial(_sessions, [session_id]))


def sessions_of(session_ids: Sequence[SessionId]) -> Read:
    return Read(partial(_sessions, session_ids))


def _sessions(session_ids: Sequence[SessionId], reader: Reader) -> list[Session | None]:
    return [reader.session(one) for one in session_ids]


def rows_of(session_id: SessionId, first: int, limit: int) -> Read:
    def look(reader: Reader) -> tuple[Message, ...]:
        return reader.rows_of(session_id, first, limit)

    return Read(look)


def successor_of(session_id: SessionId) -> Read:
    def look(reader: Reader) -> SessionId | None:
        return reader.successor(session_id)

    return Read(look)


def originals_of(uids: Sequence[Uid]) -> Read:
    def look(reader: Reader) -> tuple[Message, ...]:
        return reader.originals(uids)

    return Read(look)


def blob_of(blob_id: BlobId) -> Read:
    def look(reader: Reader) -> Blob | None:
        return reader.blob(blob_id)

    return Read(look)


def routes_of(keys: Sequence[SessionKey]) -> Read:
    def look(reader: Reader) -> list[Route | None]:
        return [reader.route(key) for key in keys]

    return Read(look)


def staged_behind(after: str) -> Read:
    def look(reader: Reader) -> tuple[Staged, ...]:
        return reader.staged_sessions(after)

    return Read(look)


def work_in(session_id: SessionId) -> Read:
    """Some of the usage and of the turns of a session."""

    def look(reader: Reader) -> tuple[tuple[Usage, ...], tuple[Turn, ...]]:
        return reader.usage_of(session_id), reader.turns_of(session_id)

    return Read(look)


def standings_of(lines: Sequence[SessionLine]) -> Read:
    return Read(partial(_standings, lines))


def _standings(lines: Sequence[SessionLine], reader: Reader) -> list[Standing]:
    found: list[Standing] = []
    for line in lines:
        parent = successor = None
        if line.edge == "rotation" and line.parent_id is not None:
            parent = reader.session(line.parent_id)
            successor = reader.successor(line.parent_id)
        session, holder = reader.session(line.id), reader.holder(line.id)
        found.append(Standing(session, holder, parent, successor))
    return found


def border_of(lines: Sequence[SessionLine]) -> Read:
    """The key whose session is rotated away by what is published, or `None`."""
    return Read(partial(_border, lines))


def _border(lines: Sequence[SessionLine], reader: Reader) -> SessionKey | None:
    for line in lines:
        if line.edge != "rotation" or line.parent_id is None:
            continue
        parent = reader.session(line.parent_id)
        if parent is not None and not parent.hidden:
            holder = reader.holder(parent.id)
            return parent.key if holder is None else holder
    return None
