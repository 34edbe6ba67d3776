"""Strategies for histories: sensible sequences of units for a few keys, with some disturbance.

An `Author` keeps a model of what it has written so far and proposes what would come next: mostly
what an actor would post, sometimes with one value changed, sometimes a unit that was sent before.
Everything is drawn, so a history shrinks to the few units that matter.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, get_args

from hypothesis import strategies as st
from msgspec.structs import replace

from onepen.runtime.testing.conversation import uid_of
from onepen.runtime.testing.model.model import Model
from onepen.storage import commands as c
from onepen.storage.identity import (
    BlobId,
    Incarnation,
    Seq,
    SessionId,
    SessionKey,
    TurnId,
    Uid,
)
from onepen.storage.records import (
    Draft,
    Inbound,
    Message,
    Role,
    Route,
    Session,
    SessionFacts,
    StateRange,
    Tokens,
    ToolCall,
    Turn,
    TurnOutcome,
)
from onepen.storage.units import Guard, Unit

KEYS = tuple(SessionKey(name) for name in ("tg:ann", "tg:bob", "web:eve"))
TEXTS = ("", "hi", "a\0b", "e\u0301👩\u200d👧", "long " * 20, "longer " * 40)
TITLES = ("Chat", "Chat #2", "Chat #12", "Plan")

JSON: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, True, 0, 1, 1.0, -0.5, 2**63 - 1, "", "é\0"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=4,
)
OBJECTS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(st.sampled_from("xyz"), JSON)

Draw = Callable[[st.SearchStrategy[Any]], Any]


class StillClock:
    """A clock that stands still: two runs of one history differ in nothing."""

    def now(self) -> int:
        return 1_000_000

    def monotonic(self) -> float:
        return 0.0


class Author:
    """Proposes the next unit, knowing what is stored."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self.model = Model()
        self._numbers = 0
        self._now = 1_000_000

    def _one(self, choices: Sequence[Any]) -> Any:
        return self._draw(st.sampled_from(choices))

    def _fresh(self, kind: str) -> str:
        self._numbers += 1
        return f"{kind}-{self._numbers}"

    def _at(self) -> int:
        self._now += self._one((1, 1_000, 70_000))
        return self._now

    # What is there ---------------------------------------------------------------------------

    def _route(self, key: SessionKey) -> Route:
        return self.model.state.keys.get(key, Route(key=key))

    def _current(self, key: SessionKey) -> Session | None:
        session_id = self._route(key).session_id
        return None if session_id is None else self.model.state.sessions.get(session_id)

    def _guard(self, key: SessionKey, *, chained: bool = True) -> Guard:
        route, session = self._route(key), self._current(key)
        guard = Guard(key=key, incarnation=route.incarnation)
        if not chained or route.session_id is None:
            return guard
        next_seq, revision = (0, 0) if session is None else (session.next_seq, session.revision)
        rows = self.model.state.transcripts.get(route.session_id, ())
        return replace(
            guard,
            session_id=route.session_id,
            base_seq=self._one((Seq(next_seq), None)),
            revision=self._one((None, revision)),
            behind=self._one((None, rows[-1].uid if rows else None)),
        )

    def _keyed(self) -> SessionKey | None:
        """A key that has an open session with a row."""
        found = [
            key
            for key in KEYS
            if (session := self._current(key)) is not None and session.end_kind is None
        ]
        return self._one(found) if found else None

    def _rows(self, session_id: SessionId) -> tuple[Message, ...]:
        return self.model.state.transcripts[session_id]

    def _draft(self, *, tool_calls: bool = True) -> Draft:
        fields: dict[str, Any] = {"text": self._one((*TEXTS, None))}
        extra = self._one(("", "", "meta", "calls", "parts", "user", "blobs"))
        sealed = [b.id for b in self.model.state.blobs.values() if b.sealed]
        if extra == "meta":
            fields |= {"meta": self._draw(OBJECTS), "name": "n", "tokens": Tokens(input=3)}
        elif extra == "calls" and tool_calls:
            fields |= {"tool_calls": (ToolCall(id="1", name="look"), ToolCall(id="2", name="do"))}
        elif extra == "parts":
            fields |= {"text": None, "parts": (self._draw(OBJECTS),)}
        elif extra == "user":
            fields |= {"user": "ann", "reasoning": "hm"}
        elif extra == "blobs" and sealed:
            fields |= {"blobs": (self._one(sealed),)}
        uid = uid_of(self._fresh("message"))
        return Draft(uid=uid, role=self._one(get_args(Role)), created_ms=self._at(), **fields)

    # Proposals -------------------------------------------------------------------------------

    def propose(self) -> Unit | None:
        """The next unit, or none if what was drawn makes no sense now."""
        proposal = self._one(PROPOSALS)(self)
        return None if proposal is None else self._disturbed(proposal)

    def _disturbed(self, unit: Unit) -> Unit:
        """Now and then one value is another than it should be."""
        what = self._one(("", "", "", "", "", "", "command", "guard", "no guard"))
        if what == "command":
            index = self._draw(st.integers(0, len(unit.commands) - 1))
            commands = list(unit.commands)
            commands[index] = self._changed(commands[index])
            return replace(unit, commands=tuple(commands))
        if what == "guard" and unit.guards:
            return replace(unit, guards=(self._changed(unit.guards[0]), *unit.guards[1:]))
        return replace(unit, guards=()) if what == "no guard" else unit

    def _changed(self, struct: Any) -> Any:
        names: dict[str, Sequence[str]] = {
            "session_id": list(self.model.state.sessions),
            "parent_id": list(self.model.state.sessions),
            "child_id": list(self.model.state.sessions),
            "turn_id": list(self.model.state.turns),
            "key": KEYS,
            "title": TITLES,
        }
        fields: list[str] = [
            name
            for name in struct.__struct_fields__
            if name in names or type(getattr(struct, name)) is int
        ]
        if not fields:
            return struct
        name = self._one(fields)
        value = getattr(struct, name)
        if type(value) is int:
            return replace(struct, **{name: value + self._one((-1, 1, 5))})
        known = names[name]
        return replace(struct, **{name: self._one(known)}) if known else struct

    def open_incarnation(self) -> Unit | None:
        key = self._one(KEYS)
        incarnation = Incarnation(self._route(key).incarnation + 1)
        return Unit((c.OpenIncarnation(key=key, incarnation=incarnation),))

    def begin_session(self) -> Unit | None:
        key = self._one(KEYS)
        route = self._route(key)
        if route.incarnation == 0:
            return self.open_incarnation()
        session_id = SessionId(self._fresh("session"))
        parent = route.session_id if route.session_id in self.model.state.sessions else None
        commands: list[c.AnyCommand] = [
            c.SetRoute(
                key=key, session_id=session_id, replaces=route.route_version, at_ms=self._at()
            )
        ]
        if self._one((True, True, False)):
            made = c.CreateSession(
                session_id=session_id,
                key=key,
                at_ms=self._at(),
                source=key.partition(":")[0],
                user=self._one((None, "ann")),
                meta=self._one((None, {"a": 1})),
                parent_id=parent,
                edge=None if parent is None else "reset",
            )
            commands.append(made)
        return Unit(tuple(commands), (self._guard(key, chained=False),))

    def create_row(self) -> Unit | None:
        key = self._one(KEYS)
        session_id = self._route(key).session_id
        if session_id is None:
            return None
        made = c.CreateSession(session_id=session_id, key=key, at_ms=self._at())
        return Unit((made,), (self._guard(key),))

    def append(self) -> Unit | None:
        key = self._keyed()
        session = None if key is None else self._current(key)
        if key is None or session is None:
            return self.begin_session()
        turns = [
            t.id
            for t in self.model.state.turns.values()
            if t.session_id == session.id and t.state == "running"
        ]
        count = self._draw(st.integers(1, 3))
        append = c.AppendMessages(
            session_id=session.id,
            base_seq=session.next_seq,
            messages=tuple(self._draft() for _ in range(count)),
            turn_id=self._one((None, *turns)),
        )
        return Unit((append,), (self._guard(key),))

    def set_value(self) -> Unit | None:
        key = self._keyed()
        session = None if key is None else self._current(key)
        if key is None or session is None:
            return None
        route, at_ms = self._route(key), self._at()
        base: dict[str, Any] = {"session_id": session.id, "at_ms": at_ms}
        keyed: dict[str, Any] = {"key": key, "at_ms": at_ms}
        title = self._one((None, *TITLES))
        command = self._one(
            (
                c.SetTitle(title=title, origin="person", replaces=session.title_version, **base),
                c.SetFlags(
                    archived=self._one((True, False)),
                    pinned=True,
                    replaces=session.flags_version,
                    **base,
                ),
                c.SetDetails(
                    user=None,
                    model="m",
                    meta=self._draw(OBJECTS),
                    replaces=session.details_version,
                    **base,
                ),
                c.SetPendingTitle(
                    title=title,
                    origin="automatic",
                    replaces=route.pending_title_version,
                    **keyed,
                ),
                c.CountUselessCompressions(count=3, replaces=route.compression_version, **keyed),
            )
        )
        return Unit((command,), (self._guard(key, chained=False),))

    def end_or_reopen(self) -> Unit | None:
        sessions = [s for s in self.model.state.sessions.values() if not s.deleted]
        if not sessions:
            return None
        session = self._one(sessions)
        base: dict[str, Any] = {
            "session_id": session.id,
            "replaces": session.end_version,
            "at_ms": self._at(),
        }
        kind = self._one(("suspension", "boundary", "reopen"))
        if kind == "reopen":
            return Unit((c.ReopenSession(**base),))
        return Unit((c.EndSession(reason="over", kind=kind, **base),))

    def rotate(self) -> Unit | None:
        key = self._keyed()
        session = None if key is None else self._current(key)
        if key is None or session is None:
            return None
        active = [m for m in self._rows(session.id) if m.state == "active"]
        turn_id = self._one((None, *{m.turn_id: None for m in active}))
        kept = {m.seq for m in active if turn_id is not None and m.turn_id == turn_id}
        kept |= {m.seq for m in active if self._one((True, False))}
        rotated = c.Rotate(
            key=key,
            parent_id=session.id,
            parent_base_seq=session.next_seq,
            child_id=SessionId(self._fresh("session")),
            summary=tuple(self._draft() for _ in range(self._one((1, 1, 0, 2)))),
            carried=tuple(sorted(kept)),
            replaces=self._route(key).route_version,
            at_ms=self._at(),
            turn_id=turn_id,
            force=self._one((True, True, False)),
        )
        return Unit((rotated,), (self._guard(key),))

    def branch(self) -> Unit | None:
        key = self._keyed()
        session = None if key is None else self._current(key)
        if key is None or session is None:
            return None
        branched = c.Branch(
            key=key,
            parent_id=session.id,
            child_id=SessionId(self._fresh("session")),
            upto_seq=Seq(self._draw(st.integers(0, session.next_seq))),
            replaces=self._route(key).route_version,
            at_ms=self._at(),
        )
        return Unit((branched,), (self._guard(key),))

    def edit(self) -> Unit | None:
        key = self._keyed()
        session = None if key is None else self._current(key)
        if key is None or session is None or session.next_seq == 0:
            return self.append()
        some_seq = st.integers(0, session.next_seq - 1)
        first, last = sorted((self._draw(some_seq), self._draw(some_seq)))
        base: dict[str, Any] = {"session_id": session.id, "at_ms": self._at()}
        kind = self._one(("compact", "compact", "rewind", "rewind", "restore", "erase"))
        command: c.AnyCommand
        if kind == "compact":
            command = c.Compact(
                base_seq=session.next_seq,
                first_seq=Seq(first),
                last_seq=Seq(last),
                summary=self._draft(tool_calls=False),
                force=self._one((True, False)),
                **base,
            )
        elif kind == "rewind":
            closing = tuple(self._draft() for _ in range(self._one((0, 0, 1))))
            command = c.Rewind(
                to_seq=Seq(first), replaces=session.revision, closing=closing, **base
            )
        elif kind == "restore":
            command = c.Restore(replaces=session.revision, **base)
        else:
            command = c.EraseMessages(session_id=session.id, seqs=(Seq(first), Seq(last)))
        return Unit((command,), (self._guard(key),))

    def delete(self) -> Unit | None:
        sessions = [s for s in self.model.state.sessions.values() if not s.deleted]
        if not sessions:
            return None
        session = self._one(sessions)
        since_ms = self._one((None, None, self._now, self._now + 100_000))
        delete = c.DeleteSession(session_id=session.id, at_ms=self._at(), quiet_since_ms=since_ms)
        purge = c.PurgeSession(session_id=session.id, step=0, last=True)
        return Unit(self._one(((delete,), (delete,), (delete, purge))))

    def clean_up(self) -> Unit | None:
        """What is sent when things are old or unwanted, and often when they are not."""
        state = self.model.state
        sessions = list(state.sessions.values())
        turns = list(state.turns)
        if not sessions:
            return None
        session = self._one(sessions)
        before_ms = self._now + self._one((-70_000, 1, 1))
        kind = self._one(("purge", "purge", "give", "orphan", "empty", "prune", "erase"))
        some = tuple(dict.fromkeys(self._one(turns) for _ in range(2))) if turns else ()
        if kind == "purge" and state.purges:
            session_id = self._one(list(state.purges))
            rows = st.integers(0, 6)
            command: c.AnyCommand = c.PurgeSession(
                session_id=session_id,
                step=state.purges[session_id],
                before_seq=Seq(self._draw(rows)),
                turn_ids=some,
                last=self._one((False, True)),
            )
            own = tuple(t for t in some if state.turns[t].session_id == session_id)
            if self._one((True, True, False)):
                command = replace(command, turn_ids=own)
            return Unit((command,))
        if kind == "orphan":
            command = c.EndOrphan(
                session_id=session.id,
                before_ms=before_ms,
                replaces=session.end_version,
                at_ms=self._at(),
            )
        elif kind == "empty":
            command = c.PruneSession(session_id=session.id, before_ms=before_ms)
        elif kind == "prune":
            command = c.PruneWork(
                before_ms=before_ms,
                delivery_ids=tuple(state.deliveries),
                timer_ids=tuple(state.timers),
                turn_ids=some,
            )
        elif kind == "erase":
            timers = list(state.timers)
            command = c.EraseWork(
                turn_ids=self._one(((), some)),
                timer_ids=(self._one(timers),) if timers else (),
                answered=some,
                user=self._one((None, "ann")),
            )
        else:
            first = state.given.get(session.id, 0)
            last = first + self._draw(st.integers(0, 3))
            command = c.GiveOriginals(
                session_id=session.id, first_seq=Seq(first), last_seq=Seq(last)
            )
        return Unit((command,))

    def stage(self) -> Unit | None:
        hidden = [s for s in self.model.state.sessions.values() if s.hidden and not s.deleted]
        if not hidden:
            made = c.CreateSession(
                session_id=SessionId(self._fresh("staged")),
                key=self._one(KEYS),
                at_ms=self._at(),
                hidden=True,
            )
            return Unit((made,))
        session = self._one(hidden)
        kind = self._one(("stage", "stage", "stage", "publish", "turns", "drop"))
        if kind == "drop":
            return Unit((self._dropped(session),))
        if kind == "turns":
            return Unit((self._staged_turns(session),))
        if kind == "stage":
            given = self._draft()
            fields = {name: getattr(given, name) for name in Draft.__struct_fields__}
            message = Message(
                **fields,
                session_id=session.id,
                seq=session.next_seq,
                state=self._one(("active", "rewound")),
                summary=self._one((False, True)),
            )
            return Unit((c.StageMessages(session_id=session.id, messages=(message,)),))
        return Unit((c.PublishSession(session_id=session.id, facts=self._facts(session)),))

    def _facts(self, session: Session) -> SessionFacts | None:
        state = self.model.state
        if self._one((True, False)):
            return None
        parent = self._one((None, *state.sessions.values()))
        ended = self._one((None, "boundary", "suspension"))
        return SessionFacts(
            key=self._one(KEYS) if parent is None else parent.key,
            parent_id=None if parent is None else parent.id,
            edge=None if parent is None else self._one(("rotation", "branch", "delegate")),
            user=self._one((None, "ann")),
            title=self._one((None, *TITLES)),
            title_origin="person",
            started_ms=self._at(),
            last_ms=self._now,
            ended_ms=None if ended is None else self._now,
            end_reason=None if ended is None else "over",
            end_kind=ended,
            pinned=self._one((True, False)),
            meta=self._one((None, {"a": 1.0})),
            next_seq=self._one((session.next_seq, session.next_seq, Seq(session.next_seq + 1))),
        )

    def _dropped(self, session: Session) -> c.DropStaged:
        state = self.model.state
        return c.DropStaged(
            session_id=session.id,
            from_seq=Seq(self._draw(st.integers(0, session.next_seq))),
            calls=tuple(state.usage)[:2],
            turns=tuple(t.id for t in state.turns.values() if t.state == "ended")[:2],
            whole=self._one((True, False)),
        )

    def _staged_turns(self, session: Session) -> c.StageTurns:
        known = [t.id for t in self.model.state.turns.values()]
        turn = Turn(
            id=self._one((TurnId(uid_of(self._fresh("turn"))), *known)),
            key=session.key,
            session_id=self._one((session.id, None)),
            state="ended",
            attempt=self._one((0, 2)),
            outcome=TurnOutcome(kind="partial", cause=self._one((None, "imported", "exported"))),
            opened_ms=self._at(),
            ended_ms=self._now,
        )
        return c.StageTurns(session_id=session.id, turns=(turn,))

    def extend(self) -> Unit | None:
        """An import goes on in a session: rows behind its last, and states of those before."""
        found = [s for s in self.model.state.sessions.values() if not s.deleted]
        if not found:
            return None
        session = self._one(found)
        given = [self._draft() for _ in range(self._one((0, 1, 2)))]
        names = Draft.__struct_fields__
        rows = tuple(
            Message(
                **{name: getattr(draft, name) for name in names},
                session_id=session.id,
                seq=Seq(session.next_seq + place),
                state=self._one(("active", "rewound")),
            )
            for place, draft in enumerate(given)
        )
        last = session.next_seq + len(rows) - 1
        covered = [m.summarised_by for m in self._rows(session.id) if m.summarised_by is not None]
        states: list[StateRange] = []
        if last >= 0 and not covered and self._one((True, False)):
            first = self._draw(st.integers(0, last))
            states.append(
                StateRange(first=Seq(first), last=Seq(last), state=self._one(("active", "rewound")))
            )
        extended = c.ExtendSession(
            session_id=session.id,
            base_seq=session.next_seq,
            messages=rows,
            states=tuple(states),
            replaces=session.revision,
            at_ms=self._at(),
        )
        return Unit((extended,))

    def switch(self) -> Unit | None:
        key = self._one(KEYS)
        if self._route(key).incarnation == 0 or not self.model.state.sessions:
            return None
        session = self._one(list(self.model.state.sessions.values()))
        moved = c.SetRoute(
            key=key,
            session_id=session.id,
            replaces=self._route(key).route_version,
            at_ms=self._at(),
            take_over=self._one((True, False)),
        )
        holder = self.model.state.holder(session.id)
        if holder is None or holder == key:
            return Unit((moved,), (self._guard(key, chained=False),))
        fresh = c.SetRoute(
            key=holder,
            session_id=SessionId(self._fresh("session")),
            replaces=self._route(holder).route_version,
            at_ms=self._at(),
        )
        if self._one((True, False)):
            # As a session actor does it: the loser's actor is fenced in the same unit.
            incarnation = Incarnation(self._route(holder).incarnation + 1)
            fenced = c.OpenIncarnation(key=holder, incarnation=incarnation)
            return Unit((fresh, fenced, moved), (self._guard(key, chained=False),))
        guards = (self._guard(key, chained=False), self._guard(holder, chained=False))
        return Unit((fresh, moved), guards)

    # Work ------------------------------------------------------------------------------------

    def turn(self) -> Unit | None:
        state = self.model.state
        if not state.turns or self._one((False, False, False, True)):
            turn_id = TurnId(uid_of(self._fresh("turn")))
            key = self._one(KEYS)
            opened = c.OpenTurn(turn_id=turn_id, key=key, at_ms=self._at())
            accepted = c.AcceptInbound(
                source=key.partition(":")[0],
                inbound_id=self._fresh("in"),
                key=key,
                turn_id=turn_id,
                disposition="queued",
                digest="d",
                at_ms=self._at(),
                body=self._one((None, Inbound(text="hi", meta={"a": 1.0}))),
                reply_to=self._one((None, {"chat": 1})),
            )
            return Unit((opened, accepted))
        turn = self._one(list(state.turns.values()))
        base: dict[str, Any] = {"turn_id": turn.id, "at_ms": self._at()}
        letter = state.dead_letters.get(turn.id)
        tries = 0 if letter is None else letter.tries
        proposals: list[c.AnyCommand] = [
            c.EndTurn(
                attempt=turn.attempt,
                outcome=TurnOutcome(kind="answered", text="yes", detail={"n": 1}),
                **base,
            ),
            c.SuspendTurn(attempt=turn.attempt, **base),
            c.SetAside(reason="kept failing", tries=tries + 1, **base),
            c.ResolveDeadLetter(tries=tries, resolution=self._one(("retried", "dropped")), **base),
        ]
        session = self._current(turn.key)
        if session is not None:
            started = c.StartTurn(session_id=session.id, attempt=turn.attempt + 1, **base)
            proposals += [started] * 3
        return Unit((self._one(proposals),))

    def inbox(self) -> Unit | None:
        state = self.model.state
        if self._one((True, False)):
            prune = c.PruneInbox(
                before_ms=self._now - self._one((0, 50_000)),
                limit=self._one((1, 9)),
                replaces=state.prunings,
                at_ms=self._at(),
            )
            return Unit((prune,))
        if not state.inbox:
            return None
        source, inbound_id = self._one(list(state.inbox))
        own = state.inbox[source, inbound_id].turn_id
        taken = c.TakeInbound(
            source=source,
            inbound_id=inbound_id,
            turn_id=self._one((own, own, own, *state.turns)),
            into=self._one((None, None, *state.turns)),
        )
        return Unit((taken,))

    def usage(self) -> Unit | None:
        sessions = list(self.model.state.sessions)
        if not sessions:
            return None
        used = c.AddUsage(
            call_id=uid_of(self._fresh("call")),
            session_id=self._one(sessions),
            at_ms=self._at(),
            turn_id=self._one((None, *self.model.state.turns)),
            model=self._one(("m", "n")),
            auxiliary=self._one((True, False)),
            tokens=Tokens(input=self._one((0, 7)), reasoning=2**40),
            cost_nanos=self._one((0, 12)),
        )
        return Unit((used,))

    def delivery(self) -> Unit | None:
        state = self.model.state
        if not state.deliveries or self._one((True, False, False)):
            posted = c.PostDelivery(
                delivery_id=self._fresh("delivery"),
                key=self._one(KEYS),
                source=self._one(("tg", "web")),
                target={"chat": 1},
                body=self._draw(OBJECTS),
                at_ms=self._at(),
                turn_id=self._one((None, *state.turns)),
                session_id=self._one((None, *state.sessions)),
                message_uid=self._one((None, uid_of("some message"))),
            )
            return Unit((posted,))
        delivery = self._one(list(state.deliveries.values()))
        mark = self._one(("sending", "sending", "pending", "sent", "failed", "unknown"))
        marked = c.MarkDelivery(
            delivery_id=delivery.id,
            attempt=delivery.attempt + (mark == "sending"),
            state=mark,
            at_ms=self._at(),
            error=self._one((None, "no")),
        )
        return Unit((marked,))

    def effect(self) -> Unit | None:
        state = self.model.state
        if not state.turns:
            return self.turn()
        turn_id = self._one(list(state.turns))
        effect = state.effects.get((turn_id, "mail"))
        attempt = 0 if effect is None else effect.attempt
        base: dict[str, Any] = {"turn_id": turn_id, "effect_key": "mail", "at_ms": self._at()}
        if effect is None or self._one((True, False, False)):
            begun = c.BeginEffect(
                effect_id=Uid(uid_of(f"effect of {turn_id}")),
                tool="mail",
                digest="d",
                attempt=attempt + 1,
                **base,
            )
            return Unit((begun,))
        finished = c.FinishEffect(
            attempt=attempt,
            state=self._one(("done", "failed", "skipped", "unknown")),
            result=self._one((None, {"a": 1.0})),
            **base,
        )
        return Unit((finished,))

    def question(self) -> Unit | None:
        state = self.model.state
        if not state.turns:
            return self.turn()
        turn = self._one(list(state.turns.values()))
        base: dict[str, Any] = {"key": turn.key, "question_key": turn.id, "at_ms": self._at()}
        if (turn.key, turn.id) not in state.questions:
            expires_ms = self._one((None, self._now + 10))
            asked = c.AskQuestion(
                turn_id=turn.id,
                question="may I?",
                choices=("y", "n"),
                expires_ms=expires_ms,
                **base,
            )
            return Unit((asked,))
        answer = c.AnswerQuestion(
            state=self._one(("answered", "expired", "withdrawn")), answer="y", by="ann", **base
        )
        return Unit((answer,))

    def timer(self) -> Unit | None:
        timers = list(self.model.state.timers)
        if not timers or self._one((True, False)):
            timer = c.SetTimer(
                timer_id=self._fresh("timer"),
                key=self._one(KEYS),
                source="tg",
                due_ms=self._now + self._one((10, 100_000)),
                inbound=Inbound(text="later", user=self._one((None, "ann"))),
                at_ms=self._at(),
                busy=self._one((None, "steer")),
            )
            return Unit((timer,))
        resolution = self._one(("fired", "cancelled"))
        done = c.ResolveTimer(timer_id=self._one(timers), resolution=resolution, at_ms=self._at())
        return Unit((done,))

    def blob(self) -> Unit | None:
        data = self._one((b"", b"one", b"two\0"))
        blob_id = BlobId(sha256(data).hexdigest())
        put = c.PutChunk(blob_id=blob_id, index=0, data=data)
        seal = c.SealBlob(
            blob_id=blob_id,
            size_bytes=len(data),
            chunk_count=1,
            media_type="a/b",
            at_ms=self._at(),
        )
        drop = c.DropBlob(blob_id=blob_id, keeping=self._one((0, 0, 1)))
        return Unit(self._one(((put,), (put, seal), (seal,), (drop,))))

    def mark(self) -> Unit | None:
        if self._one((True, False, False)) and self.model.state.sessions:
            session = self._one(list(self.model.state.sessions.values()))
            replaces = self._one((session.revision, session.revision, 0))
            recount = c.RecountSession(session_id=session.id, replaces=replaces, at_ms=self._at())
            return Unit((recount,))
        if self._one((True, False, False)):
            rebuilds = self.model.state.rebuilds
            return Unit((c.RebuildSearch(replaces=rebuilds, at_ms=self._at()),))
        return Unit((c.SetMark(name=self._one("ab"), value=self._one("xy")),))


_FREQUENT = (Author.append, Author.edit, Author.begin_session)
PROPOSALS: tuple[Callable[[Author], Unit | None], ...] = (
    *_FREQUENT * 4,
    *(Author.rotate, Author.rotate, Author.branch, Author.set_value, *[Author.turn] * 5),
    *(Author.open_incarnation, Author.create_row, Author.end_or_reopen, Author.delete),
    *(Author.clean_up, Author.clean_up, Author.clean_up),
    *(
        Author.stage,
        Author.stage,
        Author.extend,
        Author.switch,
        Author.inbox,
        Author.usage,
        Author.delivery,
        Author.effect,
    ),
    *(Author.question, Author.timer, Author.blob, Author.mark, Author.set_value),
)


@st.composite
def histories(draw: Draw, *, size_max: int = 30) -> list[Unit]:
    """Units in the order in which they are sent, some of them twice."""
    author = Author(draw)
    for key in KEYS[: draw(st.integers(1, len(KEYS)))]:
        author.model.apply([Unit((c.OpenIncarnation(key=key, incarnation=Incarnation(1)),))])
    units = [
        Unit((c.OpenIncarnation(key=key, incarnation=Incarnation(1)),))
        for key in author.model.state.keys
    ]
    for _ in range(draw(st.integers(1, size_max))):
        unit = author.propose()
        if unit is None:
            continue
        units.append(unit)
        author.model.apply([unit])
        if draw(st.sampled_from((False,) * 9 + (True,))):
            units.append(draw(st.sampled_from(units)))
            author.model.apply([units[-1]])
    return units


def in_batches(draw: Draw, units: Sequence[Unit]) -> list[list[Unit]]:
    """The same units, cut into batches of any size."""
    batches: list[list[Unit]] = []
    rest = list(units)
    while rest:
        size = draw(st.integers(1, 9))
        batches.append(rest[:size])
        rest = rest[size:]
    return batches
