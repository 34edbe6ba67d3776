"""The read views of the model: every answer is computed from the rows, each time.

Counters are counted here, so that an engine that keeps them is checked against a count. Where a
page ends is an engine's own business: listings and transcripts of the model come in pages too, but
their cursors mean something to the model alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from ....storage.errors import AmbiguousError, MissingError
from ....storage.identity import Seq
from ....storage.records import (
    Found,
    Listed,
    PartOfUser,
    PurgeSlice,
    Staged,
    Tokens,
    TurnUsage,
    UsageTotal,
    WorkOfUser,
)
from .cleanup import is_empty, is_old_delivery, is_old_timer, is_old_turn, is_orphaned
from .search import found_in
from .sessions import tip
from .transcripts import place, total_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ....storage.identity import BlobId, SessionId, SessionKey, TurnId, Uid
    from ....storage.records import (
        Blob,
        DeadLetter,
        Delivery,
        DeliveryState,
        Effect,
        Hits,
        InboxEntry,
        Message,
        Question,
        Route,
        Search,
        Session,
        Timer,
        Turn,
        Usage,
        WorkKind,
    )
    from .state import State

PREVIEW_LENGTH_MAX = 200


def _total(usage: Sequence[Usage]) -> Tokens:
    names = Tokens.__struct_fields__
    return Tokens(**{name: sum(getattr(u.tokens, name) for u in usage) for name in names})


def _rests(delivery: Delivery, now_ms: int) -> bool:
    """Whether it was put off until later, by a clock that has gone on since."""
    waits = delivery.next_ms is not None and delivery.next_ms > now_ms
    return waits and (delivery.marked_ms is None or delivery.marked_ms <= now_ms)


class ModelReader:
    """One snapshot of the model."""

    def __init__(self, state: State) -> None:
        self._state = state

    # Sessions -----------------------------------------------------------------------------------

    def route(self, key: SessionKey) -> Route | None:
        return self._state.keys.get(key)

    def session(self, session_id: SessionId) -> Session | None:
        session = self._state.sessions.get(session_id)
        if session is None:
            return None
        rows = self._state.transcripts[session_id]
        active = [m for m in rows if m.state == "active"]
        own = [m for m in rows if not m.carried and not m.summary]
        calls = [u for u in self._state.usage.values() if u.session_id == session_id]
        main, auxiliary = ([u for u in calls if u.auxiliary == which] for which in (False, True))
        return replace(
            session,
            message_count=len(own),
            active_count=len(active),
            active_bytes=total_bytes(active),
            tool_call_count=sum(len(m.tool_calls) for m in own),
            tokens=_total(main),
            cost_nanos=sum(u.cost_nanos for u in main),
            auxiliary_tokens=_total(auxiliary),
            auxiliary_cost_nanos=sum(u.cost_nanos for u in auxiliary),
        )

    def session_of_key(self, key: SessionKey) -> Session | None:
        route = self._state.keys.get(key)
        return None if route is None or route.session_id is None else self.session(route.session_id)

    def holder(self, session_id: SessionId) -> SessionKey | None:
        routes = self._state.keys.items()
        return next((key for key, route in routes if route.session_id == session_id), None)

    def find_session(self, given: str) -> Session:
        ids = self._with_prefix(given)
        unique = self.session(ids[0]) if len(ids) == 1 else None
        found = self._by_id(given) or unique or self._by_title(given)
        if found is not None:
            return found
        if ids:
            raise AmbiguousError(given, tuple(ids[:6]))
        raise MissingError(f"a session with id, prefix or title {given!r}")

    def _visible(self, session_id: SessionId) -> Session | None:
        session = self.session(session_id)
        return None if session is None or session.hidden else session

    def _by_id(self, given: str) -> Session | None:
        return next((self._visible(i) for i in self._state.sessions if i == given), None)

    def _with_prefix(self, given: str) -> list[SessionId]:
        return sorted(
            s.id
            for s in self._state.sessions.values()
            if given and s.id.startswith(given) and not s.deleted and not s.hidden
        )

    def _by_title(self, given: str) -> Session | None:
        titled = {s.title: s.id for s in self._state.sessions.values() if s.title is not None}
        if given in titled:
            return self._visible(tip(self._state, titled[given]))
        numbered = [
            (int(number), session_id)
            for title, session_id in titled.items()
            for base, separator, number in [title.rpartition(" #")]
            if separator and base == given and number.isascii() and number.isdecimal()
        ]
        return self._visible(tip(self._state, max(numbered)[1])) if numbered else None

    def lineage(self, session_id: SessionId) -> tuple[Session, ...]:
        if session_id not in self._state.sessions:
            return ()
        line = [session_id]
        while (parent := self._state.sessions[line[0]].parent_id) is not None:
            line.insert(0, parent)
        while (child := self._state.successor(line[-1])) is not None and not child.hidden:
            line.append(child.id)
        return tuple(s for i in line if (s := self._visible(i)) is not None)

    def tip(self, session_id: SessionId) -> Session | None:
        return self.session(tip(self._state, session_id))

    def listing(
        self,
        *,
        source: str | None = None,
        key: SessionKey | None = None,
        archived: bool | None = False,
        since_ms: int | None = None,
        until_ms: int | None = None,
        limit: int = 50,
        after: tuple[int, int] | None = None,
    ) -> tuple[tuple[Listed, ...], tuple[int, int] | None]:
        found = [
            ((s.last_ms // 60_000, number), s)
            for number, s in enumerate(self._state.sessions.values())
            if not s.deleted
            and not s.hidden
            and tip(self._state, s.id) == s.id
            and source in (None, s.source)
            and key in (None, s.key)
            and archived in (None, s.archived)
            and (since_ms is None or s.last_ms >= since_ms)
            and (until_ms is None or s.last_ms < until_ms)
        ]
        found = [one for one in found if after is None or one[0] < after]
        page = sorted(found, key=lambda one: one[0], reverse=True)[:limit]
        listed = tuple(self._listed(s.id) for _, s in page)
        return listed, page[-1][0] if page and len(page) < len(found) else None

    def _listed(self, session_id: SessionId) -> Listed:
        session = self.session(session_id)
        assert session is not None
        said = (
            m.text[:PREVIEW_LENGTH_MAX]
            for m in self._state.transcripts[session_id]
            if m.state == "active" and m.role == "user" and m.text is not None
        )
        length, oldest = 1, session
        while oldest.edge == "rotation" and oldest.parent_id is not None:
            length, oldest = length + 1, self._state.sessions[oldest.parent_id]
        return Listed(session=session, preview=next(said, None), lineage_length=length)

    # Transcripts --------------------------------------------------------------------------------

    def _rows(self, session_id: SessionId) -> list[Message]:
        return sorted(self._state.transcripts.get(session_id, ()), key=place)

    def transcript(
        self,
        session_id: SessionId,
        *,
        include_inactive: bool = False,
        after: tuple[int, int] | None = None,
        limit: int = 200,
    ) -> Found:
        rows = [
            m
            for m in self._rows(session_id)
            if (include_inactive or m.state == "active") and (after is None or place(m) > after)
        ]
        page = rows[:limit]
        return Found(
            messages=tuple(page), next=place(page[-1]) if page and len(page) < len(rows) else None
        )

    def around(self, session_id: SessionId, uid: Uid, *, before: int = 5, after: int = 5) -> Found:
        rows = [m for m in self._rows(session_id) if m.state == "active" or m.uid == uid]
        here = next((i for i, m in enumerate(rows) if m.uid == uid), None)
        if here is None:
            raise MissingError(f"message {uid} in session {session_id}")
        return Found(messages=tuple(rows[max(here - before, 0) : here + 1 + after]))

    def message(self, uid: Uid) -> Message | None:
        rows = (m for rows in self._state.transcripts.values() for m in rows)
        own = (m for m in rows if m.uid == uid and not m.carried)
        return next((m for m in own if self._visible(m.session_id) is not None), None)

    def turn_messages(self, turn_id: TurnId) -> tuple[Message, ...]:
        turn = self._state.turns.get(turn_id)
        if turn is None or turn.session_id is None:
            return ()
        rows = self._state.transcripts.get(turn.session_id, ())
        return tuple(m for m in rows if m.turn_id == turn_id)

    def said_since(self, session_id: SessionId, seq: int, limit: int = 200) -> tuple[Message, ...]:
        rows = self._state.transcripts.get(session_id, ())
        return tuple(m for m in rows if m.seq > seq and not m.carried and m.state != "rewound")[
            :limit
        ]

    def revision(self, session_id: SessionId) -> int:
        session = self._state.sessions.get(session_id)
        return 0 if session is None else session.revision

    def seqs(self, session_id: SessionId, uids: Sequence[Uid]) -> dict[Uid, Seq]:
        rows = self._state.transcripts.get(session_id, ())
        return {m.uid: m.seq for m in rows if m.uid in uids}

    # Work ---------------------------------------------------------------------------------------

    def turn(self, turn_id: TurnId) -> Turn | None:
        return self._state.turns.get(turn_id)

    def unfinished_turns(self, key: SessionKey | None = None) -> tuple[Turn, ...]:
        turns = self._state.turns.values()
        return tuple(t for t in turns if t.state != "ended" and key in (None, t.key))

    def waiting_inbound(self, key: SessionKey) -> tuple[InboxEntry, ...]:
        return tuple(
            e
            for e in self._state.inbox.values()
            if e.key == key and e.body is not None
            if self._state.turns[e.turn_id].state != "ended"
        )

    def inbound(self, source: str, inbound_id: str) -> InboxEntry | None:
        return self._state.inbox.get((source, inbound_id))

    def inbound_of_turn(self, turn_id: TurnId) -> tuple[InboxEntry, ...]:
        entries = self._state.inbox.values()
        return tuple(e for e in entries if turn_id in (e.turn_id, e.into))

    def oldest_ended_inbound_ms(self) -> int | None:
        ended = (e for e in self._state.inbox.values() if self._state.forgettable(e))
        return next((e.accepted_ms for e in ended), None)

    def search(self, search: Search) -> Hits:
        return found_in(self._state, search)

    def search_rebuilds(self) -> int:
        return self._state.rebuilds

    def inbox_pruned_version(self) -> int:
        return self._state.prunings

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        letters = self._state.dead_letters
        return tuple(letters[turn_id] for turn_id in self._state.turns if turn_id in letters)

    # Export and import -----------------------------------------------------------------------

    def root_sessions(
        self, after: str = "", limit: int = 200, *, key: SessionKey | None = None
    ) -> tuple[SessionId, ...]:
        def root(session: Session) -> bool:
            parent = None if session.parent_id is None else self._visible(session.parent_id)
            return parent is None or (key is not None and parent.key != key)

        found = [
            s.id
            for s in self._state.sessions.values()
            if not s.hidden and s.id > after and key in (None, s.key) and root(s)
        ]
        return tuple(sorted(found)[:limit])

    def child_sessions(
        self, session_id: SessionId, *, key: SessionKey | None = None
    ) -> tuple[SessionId, ...]:
        children = [
            s
            for s in self._state.sessions.values()
            if s.parent_id == session_id and not s.hidden and key in (None, s.key)
        ]
        return tuple(s.id for s in sorted(children, key=lambda s: (s.edge != "rotation", s.id)))

    def successor(self, session_id: SessionId) -> SessionId | None:
        child = self._state.successor(session_id)
        return None if child is None or child.hidden else child.id

    def stored_rows(self) -> int:
        rows = self._state.transcripts
        return sum(len(rows[s.id]) for s in self._state.sessions.values() if not s.hidden)

    def rows_of(self, session_id: SessionId, first: int, limit: int) -> tuple[Message, ...]:
        return self._state.transcripts.get(session_id, ())[first : first + limit]

    def turns_of(
        self, session_id: SessionId, after: tuple[int, str] | None = None, limit: int = 200
    ) -> tuple[Turn, ...]:
        turns = sorted(
            (t for t in self._state.turns.values() if t.session_id == session_id),
            key=lambda t: (t.opened_ms, t.id),
        )
        behind = (t for t in turns if after is None or (t.opened_ms, t.id) > after)
        return tuple(replace(t, waits=0) for t in behind)[:limit]

    def usage_of(
        self, session_id: SessionId, after: Uid | None = None, limit: int = 200
    ) -> tuple[Usage, ...]:
        used = [u for u in self._state.usage.values() if u.session_id == session_id]
        behind = (u for u in used if after is None or u.call_id > after)
        return tuple(sorted(behind, key=lambda u: u.call_id)[:limit])

    def blobs_of(
        self, session_id: SessionId, after: str = "", limit: int = 200
    ) -> tuple[BlobId, ...]:
        rows = self._state.transcripts.get(session_id, ())
        used = {blob_id for m in rows for blob_id in m.blobs if blob_id > after}
        return tuple(sorted(used)[:limit])

    def staged_sessions(self, after: str = "", limit: int = 200) -> tuple[Staged, ...]:
        parents = {s.parent_id for s in self._state.sessions.values()}
        staged = [
            Staged(id=s.id, next_seq=s.next_seq, is_parent=s.id in parents)
            for s in self._state.sessions.values()
            if s.hidden and not s.deleted and s.id > after
        ]
        return tuple(sorted(staged, key=lambda s: s.id)[:limit])

    def originals(self, uids: Sequence[Uid]) -> tuple[Message, ...]:
        rows = (m for rows in self._state.transcripts.values() for m in rows)
        return tuple(m for m in rows if not m.carried and m.uid in uids)

    # Usage -----------------------------------------------------------------------------------

    def usage(self, session_id: SessionId | None = None) -> tuple[UsageTotal, ...]:
        groups: dict[tuple[str, str, bool], list[Usage]] = {}
        for u in self._state.usage.values():
            if session_id in (None, u.session_id):
                name = (self._state.sessions[u.session_id].source, u.model, u.auxiliary)
                groups.setdefault(name, []).append(u)
        return tuple(
            UsageTotal(
                source=source,
                model=model,
                auxiliary=auxiliary,
                calls=len(calls),
                tokens=_total(calls),
                cost_nanos=sum(u.cost_nanos for u in calls),
            )
            for (source, model, auxiliary), calls in sorted(groups.items())
        )

    def turn_usage(self, turn_id: TurnId) -> TurnUsage:
        turn, sessions = self._state.turns.get(turn_id), self._state.sessions
        counted = [
            u
            for u in self._state.usage.values()
            if u.turn_id == turn_id and turn is not None and sessions[u.session_id].key == turn.key
        ]
        calls = sum(not u.auxiliary for u in counted)
        return TurnUsage(calls=calls, tokens=_total(counted))

    def delivery(self, delivery_id: str) -> Delivery | None:
        return self._state.deliveries.get(delivery_id)

    def open_deliveries(self, source: str | None = None, limit: int = 500) -> tuple[Delivery, ...]:
        is_open = [
            d
            for d in self._state.deliveries.values()
            if d.state in ("pending", "sending") and source in (None, d.source)
        ]
        return tuple(is_open[:limit])

    def first_deliveries(
        self, source: str, limit: int = 500, *, now_ms: int | None = None
    ) -> tuple[Delivery, ...]:
        firsts: dict[SessionKey, Delivery] = {}
        for delivery in self.open_deliveries(source, limit=2**31):
            firsts.setdefault(delivery.key, delivery)
        awake = (d for d in firsts.values() if now_ms is None or not _rests(d, now_ms))
        return tuple(awake)[:limit]

    def lane_deliveries(
        self, source: str, key: SessionKey, after: str | None = None, limit: int = 500
    ) -> tuple[Delivery, ...]:
        numbers = {delivery_id: n for n, delivery_id in enumerate(self._state.deliveries)}
        first = numbers.get(after or "", -1)
        lane = [d for d in self.open_deliveries(source, limit=2**31) if d.key == key]
        return tuple(d for d in lane if numbers[d.id] > first)[:limit]

    def deliveries(
        self,
        *,
        state: DeliveryState | None = None,
        source: str | None = None,
        key: SessionKey | None = None,
        limit: int = 100,
        after: int | None = None,
    ) -> tuple[tuple[Delivery, ...], int | None]:
        found = [
            (number, d)
            for number, d in enumerate(self._state.deliveries.values())
            if state in (None, d.state) and source in (None, d.source) and key in (None, d.key)
        ]
        page = [one for one in reversed(found) if after is None or one[0] < after][:limit]
        return tuple(d for _, d in page), page[-1][0] if len(page) == limit else None

    def last_delivery(self, key: SessionKey, source: str) -> Delivery | None:
        posted = reversed(self._state.deliveries.values())
        return next((d for d in posted if (d.key, d.source) == (key, source)), None)

    def effects(self, turn_id: TurnId) -> tuple[Effect, ...]:
        found = [e for e in self._state.effects.values() if e.turn_id == turn_id]
        return tuple(sorted(found, key=lambda e: (e.begun_ms, e.effect_key)))

    def question(self, key: SessionKey, question_key: str) -> Question | None:
        return self._state.questions.get((key, question_key))

    def questions(
        self, key: SessionKey | None = None, *, open_only: bool = False, limit: int = 500
    ) -> tuple[Question, ...]:
        found = [
            q
            for q in self._state.questions.values()
            if key in (None, q.key) and (q.state == "open" or not open_only)
        ]
        return tuple(sorted(found, key=lambda q: (q.asked_ms, q.key, q.question_key))[:limit])

    def expired_questions(self, now_ms: int, limit: int = 500) -> tuple[Question, ...]:
        over = [
            (q.expires_ms, q.key, q.question_key, q)
            for q in self._state.questions.values()
            if q.state == "open" and q.expires_ms is not None and q.expires_ms <= now_ms
        ]
        return tuple(one[-1] for one in sorted(over, key=lambda one: one[:-1])[:limit])

    def timer(self, timer_id: str) -> Timer | None:
        return self._state.timers.get(timer_id)

    def timers(
        self, due_ms: int | None = None, *, key: SessionKey | None = None, limit: int = 500
    ) -> tuple[Timer, ...]:
        waiting = [
            t
            for t in self._state.timers.values()
            if t.state == "set" and (due_ms is None or t.due_ms <= due_ms) and key in (None, t.key)
        ]
        return tuple(sorted(waiting, key=lambda t: (t.due_ms, t.id))[:limit])

    def due_timers(self, now_ms: int, limit: int = 500) -> tuple[Timer, ...]:
        firsts: dict[SessionKey, Timer] = {}
        for timer in self.timers(now_ms, limit=2**31):
            firsts.setdefault(timer.key, timer)
        return tuple(firsts.values())[:limit]

    def next_due_ms(self, now_ms: int) -> int | None:
        questions = (q for q in self._state.questions.values() if q.state == "open")
        times = [t.due_ms for t in self.timers(limit=2**31)]
        times += [q.expires_ms for q in questions if q.expires_ms is not None]
        return min((time for time in times if time > now_ms), default=None)

    # What may go --------------------------------------------------------------------------------

    def orphaned_rotations(
        self, before_ms: int, *, after: int = 0, limit: int = 200
    ) -> tuple[tuple[Session, ...], int | None]:
        found = [s for s in self._all_sessions() if is_orphaned(self._state, s, before_ms)]
        return self._page(found, after, limit)

    def empty_sessions(
        self, before_ms: int, *, after: int = 0, limit: int = 200
    ) -> tuple[tuple[Session, ...], int | None]:
        found = [s for s in self._all_sessions() if is_empty(self._state, s, before_ms)]
        return self._page(found, after, limit)

    def _all_sessions(self) -> list[Session]:
        return [s for i in self._state.sessions if (s := self.session(i)) is not None]

    def _page(
        self, found: list[Session], after: int, limit: int
    ) -> tuple[tuple[Session, ...], int | None]:
        page = found[after : after + limit]
        return tuple(page), after + limit if len(page) == limit else None

    def quiet_sessions(
        self,
        before_ms: int,
        *,
        source: str | None = None,
        key: SessionKey | None = None,
        archived_only: bool = False,
        ended_only: bool = False,
        after: tuple[int, int] | None = None,
        limit: int = 200,
    ) -> tuple[tuple[Session, ...], tuple[int, int] | None]:
        found = [
            s
            for s in sorted(self._all_sessions(), key=lambda s: s.last_ms // 60_000)
            if not s.deleted
            and not s.hidden
            and s.last_ms < before_ms
            and self.holder(s.id) is None
            and source in (None, s.source)
            and key in (None, s.key)
            and (s.archived or not archived_only)
            and (s.ended_ms is not None or not ended_only)
            and not self._state.is_needed(s.id)
        ]
        first = 0 if after is None else after[0]
        page, following = self._page(found, first, limit)
        return page, None if following is None else (following, 0)

    def old_work(
        self, kind: WorkKind, before_ms: int, *, after: str | None = None, limit: int = 200
    ) -> tuple[tuple[str, ...], str | None]:
        state = self._state
        found: dict[WorkKind, list[str]] = {
            "deliveries": [
                d.id for d in state.deliveries.values() if is_old_delivery(state, d, before_ms)
            ],
            "timers": sorted(t.id for t in state.timers.values() if is_old_timer(t, before_ms)),
            "turns": [turn_id for turn_id in state.turns if is_old_turn(state, turn_id, before_ms)],
        }
        first = int(after or 0)
        page = found[kind][first : first + limit]
        return tuple(page), str(first + limit) if len(page) == limit else None

    def unused_blobs(
        self, *, after: str = "", limit: int = 200
    ) -> tuple[tuple[tuple[Blob, int], ...], str | None]:
        found = sorted(
            (blob.id, (blob, sum(name[0] == blob.id for name in self._state.chunks)))
            for blob in self._state.blobs.values()
            if not self.blob_in_use(blob.id) and blob.id > after
        )
        page = found[:limit]
        return tuple(one for _, one in page), page[-1][0] if len(page) == limit else None

    def blob_in_use(self, blob_id: BlobId) -> bool:
        return self._state.blob_in_use(blob_id)

    def originals_given(self, session_id: SessionId) -> int:
        return self._state.given.get(session_id, 0)

    def originals_slice(
        self, session_id: SessionId, *, rows_max: int = 2_000, heirs_max: int = 50
    ) -> tuple[Seq, Seq] | None:
        """None: in a model everything is little."""
        return None

    def purges(self, limit: int = 100) -> tuple[SessionId, ...]:
        return tuple(i for i in self._state.sessions if i in self._state.purges)[:limit]

    def purge_slice(
        self, session_id: SessionId, *, rows_max: int = 128, bytes_max: int = 256 * 1024
    ) -> PurgeSlice | None:
        """The last one at once: there are no rows that would have to go."""
        step = self._state.purges.get(session_id)
        if step is None:
            return None
        return PurgeSlice(
            session_id=session_id, step=step, before_seq=Seq(0), turn_ids=(), last=True
        )

    # Users ---------------------------------------------------------------------------------------

    def sessions_of_user(
        self, user: str, *, after: int = -1, span: int = 20_000
    ) -> tuple[tuple[SessionId, ...], int | None]:
        found = (
            s
            for s in self._state.sessions.values()
            if not s.deleted and not s.hidden
            if s.user == user or any(m.user == user for m in self._state.transcripts[s.id])
        )
        return tuple(s.id for s in found), None

    def part_of_user(
        self, session_id: SessionId, user: str, *, after: int = -1, limit: int = 100
    ) -> PartOfUser:
        session = self._state.sessions.get(session_id)
        if session is None:
            return PartOfUser(only=True, seqs=(), turn_ids=())
        said = [
            (m, m.user if m.user is not None else session.user if m.role == "user" else None)
            for m in self._state.transcripts[session_id]
            if not m.erased
        ]
        own = [m for m, by in said if by == user and m.seq > after][:limit]
        others = any(
            by != user and (m.user is not None or m.role == "user") for m, by in said
        ) or session.user not in (None, user)
        seqs = tuple(m.seq for m in own)
        blobs = {
            blob_id
            for m in self._state.transcripts[session_id]
            if seqs and seqs[0] <= m.seq <= seqs[-1]
            for blob_id in m.blobs
        }
        return PartOfUser(
            only=not others,
            seqs=seqs,
            turn_ids=tuple(dict.fromkeys(m.turn_id for m in own if m.turn_id is not None)),
            blob_ids=tuple(sorted(blobs)),
        )

    def work_of_user(self, user: str) -> WorkOfUser:
        state = self._state
        return WorkOfUser(
            waiting=tuple(
                dict.fromkeys(
                    (e.key, e.turn_id)
                    for e in state.inbox.values()
                    if e.body is not None and e.body.user == user
                    if state.turns[e.turn_id].state != "ended"
                )
            ),
            timers=tuple((t.key, t.id) for t in state.timers.values() if t.inbound.user == user),
            answered=tuple(
                dict.fromkeys(q.turn_id for q in state.questions.values() if q.answered_by == user)
            ),
        )

    # Blobs and marks ----------------------------------------------------------------------------

    def blob(self, blob_id: BlobId) -> Blob | None:
        return self._state.blobs.get(blob_id)

    def blob_chunk(self, blob_id: BlobId, index: int) -> bytes | None:
        return self._state.chunks.get((blob_id, index))

    def mark(self, name: str) -> str | None:
        return self._state.marks.get(name)
