"""A session's transcript as its actor remembers it: the durable prefix and the posted tail.

Owns what a session actor knows of its current session without asking storage: the active messages
in reading order, the next seq, the revision that the posted units will have made, and how the
session stands (no row yet, open, ended). `load` reads it in one snapshot.

Must never be changed but by the scribe that posts the units, in the moment of posting or of the
receipt. The list of messages is only appended to; every other change makes a new list, so whoever
holds the old one (an agent's history) keeps what it was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

import msgspec
from msgspec import Struct

from ..storage.errors import MissingError
from ..storage.identity import Seq, SessionId
from ..storage.records import Draft, InboxEntry, Message, Route, Session, Turn
from .messages import size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..storage.engine import Reader
    from ..storage.identity import SessionKey, TurnId, Uid
    from ..storage.records import Edge, EndKind

_FIELDS = Draft.__struct_fields__


def message_of(
    draft: Draft,
    session_id: SessionId,
    seq: int,
    turn_id: TurnId | None = None,
    *,
    summary: bool = False,
    covers: tuple[Seq, Seq] | None = None,
) -> Message:
    """The message that storing this draft makes."""
    if draft.plain:  # most are; naming the few fields is several times faster than copying all
        return Message(
            uid=draft.uid,
            role=draft.role,
            text=draft.text,
            user=draft.user,
            created_ms=draft.created_ms,
            session_id=session_id,
            seq=Seq(seq),
            turn_id=turn_id,
            summary=summary,
            covers=covers,
        )
    return Message(
        **{name: getattr(draft, name) for name in _FIELDS},
        session_id=session_id,
        seq=Seq(seq),
        turn_id=turn_id,
        summary=summary,
        covers=covers,
    )


class LazyPage(NamedTuple):
    """What an opened session without a row is to have when it gets one."""

    session_id: SessionId
    user: str | None
    model: str | None
    parent_id: SessionId | None
    edge: Edge | None


class Loaded(Struct, frozen=True):
    """What storage knows of a key, in one snapshot."""

    route: Route
    session: Session | None
    messages: list[Message]
    turns: tuple[Turn, ...]
    waiting: tuple[InboxEntry, ...]


def load(reader: Reader, key: SessionKey, page_size: int) -> Loaded:
    """The key, its current session with its active messages, and its unfinished work."""
    route = reader.route(key) or Route(key=key)
    session = None if route.session_id is None else reader.session(route.session_id)
    messages = [] if session is None else load_messages(reader, session.id, page_size)
    turns = reader.unfinished_turns(key)
    waiting = reader.waiting_inbound(key) if turns else ()
    return Loaded(route, session, messages, turns, waiting)


def load_messages(reader: Reader, session_id: SessionId, page_size: int) -> list[Message]:
    messages: list[Message] = []
    after: tuple[int, int] | None = None
    while True:
        found = reader.transcript(session_id, after=after, limit=page_size)
        messages.extend(found.messages)
        if found.next is None:
            return messages
        after = found.next


@final
class Page:
    """One session, as its actor sees it."""

    __slots__ = (
        "_uids",
        "edge",
        "end_kind",
        "end_version",
        "last_uid",
        "messages",
        "model",
        "next_seq",
        "parent_id",
        "revision",
        "session_id",
        "size_bytes",
        "stored",
        "user",
    )

    def __init__(self, session_id: SessionId) -> None:
        self.session_id = session_id
        self.stored = False  # whether it has a row, or will have one by a posted unit
        self.messages: list[Message] = []
        self.next_seq = 0
        self.last_uid: Uid | None = None  # of the row before `next_seq`, where it is known
        self.revision = 0
        self.size_bytes = 0
        self.end_kind: EndKind | None = None
        self.end_version = 0
        self.parent_id: SessionId | None = None
        self.edge: Edge | None = None
        self.user: str | None = None
        self.model: str | None = None
        self._uids: set[Uid] | None = None

    @classmethod
    def of(cls, session: Session, messages: list[Message]) -> Page:
        page = cls(session.id)
        page.stored = True
        page.end_kind, page.end_version = session.end_kind, session.end_version
        page.user, page.model = session.user, session.model
        page.next_seq, page.revision = session.next_seq, session.revision
        page.replace(messages)
        return page

    @property
    def lazy(self) -> LazyPage | None:
        if self.stored or not (self.user or self.model or self.parent_id):
            return None
        return LazyPage(self.session_id, self.user, self.model, self.parent_id, self.edge)

    def recall(self, lazy: LazyPage) -> None:
        """What the key's last actor knew of this session, if it was this one."""
        if lazy.session_id == self.session_id:
            self.user, self.model = lazy.user, lazy.model
            self.parent_id, self.edge = lazy.parent_id, lazy.edge

    def append(self, drafts: Sequence[Draft], turn_id: TurnId | None) -> list[Message]:
        """New rows at the end, as one unit brings them."""
        added = [
            message_of(draft, self.session_id, self.next_seq + n, turn_id)
            for n, draft in enumerate(drafts)
        ]
        self.messages.extend(added)
        self.next_seq += len(added)
        self.last_uid = added[-1].uid
        self.revision += 1
        for message in added:
            self.size_bytes += size_of(message)
            if self._uids is not None:
                self._uids.add(message.uid)
        return added

    def replace(self, messages: list[Message]) -> None:
        """Another list of active messages; whoever holds the old one keeps it."""
        self.messages = messages
        self.size_bytes = sum(map(size_of, messages))
        self._uids = None

    def has(self, uid: Uid) -> bool:
        """Whether this message is among the active ones."""
        if self._uids is None:
            self._uids = {message.uid for message in self.messages}
        return uid in self._uids

    def index_of(self, uid: Uid) -> int:
        """Where an active message stands. Raises `MissingError`."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].uid == uid:
                return index
        raise MissingError(f"an active message {uid} in session {self.session_id}")

    def tail_of(self, turn_id: TurnId) -> int:
        """The index at which the rows begin that a turn has at the end."""
        index = len(self.messages)
        while index and self.messages[index - 1].turn_id == turn_id:
            index -= 1
        return index

    def start_of(self, turn_id: TurnId, attempt: int) -> int:
        """The index of a turn's first row.

        They stand at the end while it runs; only if it was resumed may others have come between.
        """
        if attempt == 1:
            return self.tail_of(turn_id)
        ours = (n for n, message in enumerate(self.messages) if message.turn_id == turn_id)
        return next(ours, len(self.messages))

    def child(
        self,
        child_id: SessionId,
        summary: Sequence[Draft],
        carried: Sequence[Message],
        *,
        revision: int = 1,
    ) -> Page:
        """The page that rotation (or branching) makes of this one: summary first, then copies."""
        page = Page(child_id)
        page.stored = True
        page.user, page.model = self.user, self.model
        rows = [message_of(d, child_id, n, summary=True) for n, d in enumerate(summary)]
        rows += [
            msgspec.structs.replace(
                message,
                session_id=child_id,
                seq=Seq(len(summary) + n),
                carried=True,
                covers=None,
                summarised_by=None,
            )
            for n, message in enumerate(carried)
        ]
        page.replace(rows)
        page.next_seq, page.revision = len(rows), revision
        page.last_uid = rows[-1].uid if rows else None
        return page
