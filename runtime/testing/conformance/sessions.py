"""Conformance of keys and sessions: routes, titles, ends, deletion, imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ....storage import commands as c
from ....storage.identity import Incarnation, Seq, SessionId, SessionKey, TurnId
from ....storage.records import Message, Tokens, ToolCall, TurnOutcome
from ....storage.units import Guard, Unit
from ..conversation import Conversation, uid_of
from .desk import UnderTest, bare

if TYPE_CHECKING:
    from pathlib import Path

    from .desk import Desk


def opened(desk: Desk, name: str = "ann", *texts: str) -> Conversation:
    """A conversation with its session and these messages."""
    chat = Conversation(name)
    desk.done(*chat.opening())
    for text in texts:
        desk.done(chat.guarded(chat.guard(), chat.append(chat.draft("user", text))))
    return chat


class SessionConformance(UnderTest):
    """What must hold for keys and sessions."""

    # Routes ----------------------------------------------------------------------------------

    def test_a_route_may_name_a_session_without_a_row(self, tmp_path: Path) -> None:
        """D1: opening a session writes no session row."""
        with self.desk(tmp_path) as desk:
            chat = Conversation("ann")
            taken, first = chat.opening()
            (route, _) = first.commands
            desk.done(taken, Unit((route,), first.guards))
            with desk.reading() as reader:
                assert reader.session_of_key(chat.key) is None
                stored = reader.route(chat.key)
            assert stored is not None
            assert stored.session_id == chat.session_id

    def test_a_session_stands_in_one_route_at_most(self, tmp_path: Path) -> None:
        """B5, D2: a session that is current for one key is refused to another."""
        with self.desk(tmp_path) as desk:
            ann, bob = opened(desk, "ann", "hello"), opened(desk, "bob", "hello")
            for take_over in (False, True):
                stolen = replace(bob.route_to(ann.session_id), take_over=take_over, replaces=1)
                desk.refused("route_conflict", bare(stolen))
            reserved = SessionId("reserved")
            desk.done(bare(replace(ann.route_to(reserved), replaces=1)))
            desk.refused("route_conflict", bare(replace(bob.route_to(reserved), replaces=1)))
            made = c.CreateSession(session_id=reserved, key=bob.key, at_ms=1)
            desk.refused("conflict", bare(made))

    def test_a_session_changes_hands_only_by_taking_over(self, tmp_path: Path) -> None:
        """B5: the losing key gets a fresh id in the same unit; its own units stay recognised."""
        with self.desk(tmp_path) as desk:
            ann, bob = Conversation("ann"), opened(desk, "bob", "hello")
            taken, first = ann.opening()
            desk.done(taken, first)
            session_id = ann.session_id
            fresh = ann.route_to(SessionId("fresh"))
            moved = replace(bob.route_to(session_id), replaces=1)
            desk.refused("route_conflict", bare(fresh, moved))
            desk.done(bare(fresh, replace(moved, take_over=True)))
            assert desk.session(session_id).key == bob.key
            # The first units of the loser may be sent again, after everything.
            desk.again(taken, first)
            created = first.commands[1]
            assert isinstance(created, c.CreateSession)
            desk.refused("conflict", bare(replace(created, at_ms=created.at_ms + 1)))

    def test_a_take_over_is_recognised_behind_the_losers_next_actor(self, tmp_path: Path) -> None:
        """A8: the incarnation that it opened was overtaken since; it is stored all the same."""
        with self.desk(tmp_path) as desk:
            ann, bob = opened(desk, "ann", "hello"), opened(desk, "bob", "hello")
            session_id = ann.session_id
            lost = replace(ann.route_to(SessionId("fresh")), replaces=1)
            fenced = c.OpenIncarnation(key=ann.key, incarnation=Incarnation(2**33))
            won = replace(bob.route_to(session_id), replaces=1, take_over=True)
            switch = bob.unit(lost, fenced, won)
            desk.done(switch, bare(replace(fenced, incarnation=Incarnation(2**33 + 1))))
            desk.again(switch)
            # Alone, or in front, it has nothing to be known by: whoever sends it is a predecessor.
            desk.refused("stale_incarnation", bare(fenced))
            desk.refused("stale_incarnation", bob.unit(fenced, lost, won))

    def test_a_value_of_a_key_needs_the_key(self, tmp_path: Path) -> None:
        """INV-12: a key exists once an incarnation has taken it."""
        with self.desk(tmp_path) as desk:
            key = SessionKey("nobody")
            route = c.SetRoute(key=key, session_id=SessionId("s"), replaces=0, at_ms=1)
            title = c.SetPendingTitle(key=key, title="title", origin="person", replaces=0, at_ms=1)
            count = c.CountUselessCompressions(key=key, count=1, replaces=0, at_ms=1)
            for command in (route, title, count):
                desk.refused("missing", bare(command))

    def test_pending_title_and_brake_stay_with_the_key(self, tmp_path: Path) -> None:
        """B11, B12, E1: both survive a rotation; a title that is taken back has no origin."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "a long message that is worth a summary")
            title = c.SetPendingTitle(
                key=chat.key, title="Later", origin="person", replaces=0, at_ms=1
            )
            count = c.CountUselessCompressions(key=chat.key, count=2, replaces=0, at_ms=1)
            desk.done(chat.unit(title, count))
            desk.done(chat.guarded(chat.guard(), chat.rotate()))
            with desk.reading() as reader:
                route = reader.route(chat.key)
            assert route is not None
            assert (route.pending_title, route.useless_compressions) == ("Later", 2)
            desk.done(chat.unit(replace(title, title=None, replaces=1)))

    # Creation, titles, details ----------------------------------------------------------------

    def test_creating_a_session_twice_changes_nothing(self, tmp_path: Path) -> None:
        """D2: for the same key it is no error, whatever else was given; for another it is."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk)
            made = c.CreateSession(session_id=chat.session_id, key=chat.key, at_ms=9, user="bob")
            desk.again(bare(made))
            desk.refused("conflict", bare(replace(made, key=SessionKey("other"))))
            desk.refused("conflict", bare(replace(made, parent_id=chat.session_id)))

    def test_a_parent_must_exist(self, tmp_path: Path) -> None:
        """B7: an edge has two ends; the edge of a rotation is made by a rotation alone."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk)
            made = c.CreateSession(
                session_id=SessionId("child"), key=chat.key, at_ms=9, parent_id=SessionId("none")
            )
            desk.refused("missing", bare(made))
            rotated = replace(made, parent_id=chat.session_id, edge="rotation")
            desk.refused("invalid", bare(rotated))
            desk.done(bare(replace(rotated, edge="delegate")))

    def test_titles_are_unique(self, tmp_path: Path) -> None:
        """E4: a title that is taken is refused, one that was given up is free."""
        with self.desk(tmp_path) as desk:
            ann, bob = opened(desk, "ann"), opened(desk, "bob")
            desk.done(ann.unit(ann.title("Chat")))
            taken = desk.refused("title_taken", bob.unit(bob.title("Chat")))
            assert taken.stored == ann.session_id
            given_up = replace(ann.title("x", replaces=1), title=None)
            desk.done(ann.unit(given_up), bob.unit(bob.title("Chat")))
            assert desk.session(ann.session_id).title_origin is None

    def test_flags_and_details_are_set_under_their_versions(self, tmp_path: Path) -> None:
        """INV-1: each aspect has a version of its own; none of them moves the revision."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "hello")
            flags = c.SetFlags(
                session_id=chat.session_id, archived=True, pinned=True, replaces=0, at_ms=1
            )
            details = c.SetDetails(
                session_id=chat.session_id,
                user="bob",
                model=None,
                meta={"deep": [{"a": 1.0, "b": None}]},
                replaces=0,
                at_ms=1,
            )
            usage = c.AddUsage(call_id=uid_of("call"), session_id=chat.session_id, at_ms=1)
            units = [chat.unit(x) for x in (flags, details, usage, chat.title("title"))]
            before = desk.session(chat.session_id).revision
            desk.done(*units)
            desk.again(*units)
            session = desk.session(chat.session_id)
            assert session.revision == before
            assert (session.archived, session.pinned, session.user) == (True, True, "bob")
            assert session.meta == {"deep": [{"a": 1.0, "b": None}]}
            desk.refused("stale", chat.unit(replace(details, meta={"deep": [{"a": 1, "b": None}]})))

    def test_an_unknown_session_is_missing(self, tmp_path: Path) -> None:
        """INV-17: values of a session that does not exist are refused as missing."""
        with self.desk(tmp_path) as desk:
            nothing = SessionId("nothing")
            commands: tuple[c.AnyCommand, ...] = (
                c.SetTitle(session_id=nothing, title="t", origin="person", replaces=0, at_ms=1),
                c.SetFlags(session_id=nothing, archived=True, pinned=True, replaces=0, at_ms=1),
                c.EndSession(session_id=nothing, reason="r", kind="boundary", replaces=0, at_ms=1),
                c.ReopenSession(session_id=nothing, replaces=0, at_ms=1),
                c.DeleteSession(session_id=nothing, at_ms=1),
                c.PublishSession(session_id=nothing),
                c.EraseMessages(session_id=nothing, seqs=(Seq(0),)),
                c.Rewind(session_id=nothing, to_seq=Seq(0), replaces=0, at_ms=1),
                c.AddUsage(call_id=uid_of("call"), session_id=nothing, at_ms=1),
            )
            for command in commands:
                desk.refused("missing", bare(command))

    # Ends ------------------------------------------------------------------------------------

    def test_the_first_boundary_wins(self, tmp_path: Path) -> None:
        """B13, I2: a boundary replaces a suspension and nothing replaces a boundary."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "hello")
            suspended = replace(chat.end(), kind="suspension", reason="shutdown")
            desk.done(chat.unit(suspended))
            desk.refused("ended", chat.unit(replace(suspended, replaces=1, reason="again")))
            closed = replace(chat.end(), replaces=1)
            desk.done(chat.unit(closed))
            desk.again(chat.unit(suspended), chat.unit(closed))
            for kind in ("suspension", "boundary"):
                late = replace(closed, replaces=2, reason="late", kind=kind)
                desk.refused("ended", chat.unit(late))
            session = desk.session(chat.session_id)
            assert (session.end_kind, session.end_reason) == ("boundary", closed.reason)

    def test_a_suspended_session_is_reopened_in_the_turns_own_unit(self, tmp_path: Path) -> None:
        """B13: reopening and the first message after it are one transaction."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "hello")
            desk.done(chat.unit(replace(chat.end(), kind="suspension")))
            guard = chat.guard()
            append = chat.append(chat.draft("user", "back again"))
            desk.refused("ended", Unit((append,), (guard,)))
            reopened = c.ReopenSession(session_id=chat.session_id, replaces=1, at_ms=chat.at())
            unit = Unit((reopened, append), (guard,))
            desk.done(unit)
            desk.again(unit)
            assert desk.session(chat.session_id).end_kind is None

    def test_a_session_that_was_rotated_away_is_not_reopened(self, tmp_path: Path) -> None:
        """B13: the error names the tip, not only the next child."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "a long message that is worth a summary")
            parent = chat.session_id
            desk.done(chat.guarded(chat.guard(), chat.rotate()))
            desk.done(
                chat.guarded(chat.guard(), chat.append(chat.draft("user", "another long one " * 9)))
            )
            desk.done(chat.guarded(chat.guard(), chat.rotate()))
            version = desk.session(parent).end_version
            reopened = c.ReopenSession(session_id=parent, replaces=version, at_ms=1)
            refusal = desk.refused("route_conflict", bare(reopened))
            assert refusal.stored == chat.session_id
            back = replace(chat.route_to(parent), replaces=chat.route_version - 1)
            assert desk.refused("route_conflict", bare(back)).stored is not None

    # Deletion --------------------------------------------------------------------------------

    def test_a_deleted_session_leaves_a_tombstone(self, tmp_path: Path) -> None:
        """B7: id, key and edge stay so that lineages hold, no text does, nothing more is taken."""
        with self.desk(tmp_path) as desk:
            chat, units = self._deleted(desk)
            session = desk.session(chat)
            assert session.deleted
            assert (session.title, session.user, session.meta) == (None, None, None)
            assert (session.message_count, session.active_bytes) == (0, 0)
            assert desk.rows(chat, everything=True) == ()
            late = c.SetTitle(session_id=chat, title="t", origin="person", replaces=9, at_ms=1)
            desk.refused("ended", bare(late))
            desk.refused("ended", bare(c.ReopenSession(session_id=chat, replaces=9, at_ms=1)))
            for unit in units:  # what was acknowledged before is still recognised
                desk.again(unit)

    def _deleted(self, desk: Desk) -> tuple[SessionId, list[Unit]]:
        chat = Conversation("ann")
        session_id = chat.session_id
        turn_id = TurnId(uid_of("ann/first"))
        units = [*chat.opening(), chat.unit(chat.title("Chat")), *chat.exchange("first")]
        rewound = c.Rewind(session_id=session_id, to_seq=Seq(3), replaces=3, at_ms=chat.at())
        guard = chat.guard()
        effect = c.BeginEffect(
            turn_id=turn_id,
            effect_key="mail",
            effect_id=uid_of("effect"),
            tool="mail",
            digest="d",
            attempt=1,
            at_ms=chat.at(),
        )
        finished = c.FinishEffect(
            turn_id=turn_id, effect_key="mail", attempt=1, state="done", at_ms=chat.at()
        )
        asked = c.AskQuestion(
            key=chat.key, question_key="ok", turn_id=turn_id, question="may I?", at_ms=chat.at()
        )
        posted = c.PostDelivery(
            delivery_id="d1",
            key=chat.key,
            source="chat",
            target={},
            body={"text": "secret"},
            at_ms=chat.at(),
            turn_id=turn_id,
            session_id=session_id,
        )
        aside = c.SetAside(turn_id=turn_id, reason="secret", tries=1, at_ms=chat.at())
        usage = c.AddUsage(
            call_id=uid_of("c"), session_id=session_id, at_ms=1, tokens=Tokens(input=3)
        )
        more = (effect, finished, asked, posted, aside, usage)
        units += [Unit((rewound,), (guard,)), *(chat.unit(command) for command in more)]
        moved = chat.unit(chat.route_to(SessionId("fresh")))
        deleted = c.DeleteSession(session_id=session_id, at_ms=chat.at())
        desk.done(*units)
        desk.refused("route_conflict", bare(deleted))  # it is current
        desk.done(moved)
        desk.done(bare(deleted))
        return session_id, units[1:]

    def test_carried_copies_become_originals(self, tmp_path: Path) -> None:
        """B1: with the parent deleted, its children's copies are what is counted and searched."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "one " * 30)
            call = ToolCall(id="1", name="look")
            desk.done(
                chat.guarded(
                    chat.guard(), chat.append(chat.draft("assistant", None, tool_calls=(call,)))
                )
            )
            parent = chat.session_id
            desk.done(chat.guarded(chat.guard(), chat.rotate(1)))
            child = chat.session_id
            assert [m.carried for m in desk.rows(child)] == [False, True]
            assert desk.session(child).message_count == 0
            branch = c.Branch(
                key=chat.key,
                parent_id=child,
                child_id=SessionId("branch"),
                upto_seq=Seq(1),
                replaces=chat.route_version,
                at_ms=chat.at(),
            )
            desk.done(chat.guarded(chat.guard(), branch))
            desk.done(bare(c.DeleteSession(session_id=parent, at_ms=1)))
            assert [m.carried for m in desk.rows(child)] == [False, False]
            assert [m.carried for m in desk.rows(SessionId("branch"))] == [True, True]
            session = desk.session(child)
            assert (session.message_count, session.tool_call_count) == (1, 1)
            desk.done(bare(c.DeleteSession(session_id=child, at_ms=1)))
            assert [m.carried for m in desk.rows(SessionId("branch"))] == [False, False]
            with desk.reading() as reader:
                lineage = reader.lineage(SessionId("branch"))
            assert [s.id for s in lineage] == [parent, child, "branch"]

    # Imports ---------------------------------------------------------------------------------

    def test_a_staged_session_is_in_no_view_until_it_is_published(self, tmp_path: Path) -> None:
        """H3: an import is seen whole or not at all, states and marks as it brought them."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "hello")
            staged = SessionId("staged")
            made = c.CreateSession(
                session_id=staged,
                key=chat.key,
                at_ms=1,
                hidden=True,
                parent_id=chat.session_id,
                edge="rotation",
            )
            rows = [_row(staged, seq, **marks) for seq, marks in enumerate(MARKS)]
            units = [
                bare(made),
                bare(c.StageMessages(session_id=staged, messages=tuple(rows[:3]))),
                bare(c.StageMessages(session_id=staged, messages=tuple(rows[3:]))),
            ]
            desk.done(*units)
            desk.again(*units)
            self._hidden(desk, staged, chat)
            gap = c.StageMessages(session_id=staged, messages=(_row(staged, 99),))
            desk.refused("broken_chain", bare(gap))
            desk.done(bare(c.PublishSession(session_id=staged)))
            desk.again(*units)
            assert desk.rows(staged, everything=True) == tuple(
                sorted(rows, key=lambda m: (m.covers[1] if m.covers else m.seq, m.seq))
            )
            more = c.StageMessages(session_id=staged, messages=(_row(staged, len(rows)),))
            desk.refused("invalid", bare(more))

    def _hidden(self, desk: Desk, staged: SessionId, chat: Conversation) -> None:
        with desk.reading() as reader:
            tip = reader.tip(chat.session_id)
            assert tip is not None
            assert tip.id == chat.session_id
            assert [s.id for s in reader.lineage(chat.session_id)] == [chat.session_id]
            listed, _ = reader.listing()
            assert [one.session.id for one in listed] == [chat.session_id]
        moved = replace(chat.route_to(staged), replaces=1)
        desk.refused("missing", bare(moved))

    def test_a_staged_message_keeps_its_turn_or_is_refused(self, tmp_path: Path) -> None:
        """INV-20: a turn that is not stored is not dropped in silence."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk)
            staged = SessionId("staged")
            desk.done(bare(c.CreateSession(session_id=staged, key=chat.key, at_ms=1, hidden=True)))
            row = replace(_row(staged, 0), turn_id=TurnId(uid_of("turn")))
            unit = bare(c.StageMessages(session_id=staged, messages=(row,)))
            desk.refused("missing", unit)
            opening = c.OpenTurn(turn_id=TurnId(uid_of("turn")), key=chat.key, at_ms=1)
            outcome = TurnOutcome(kind="answered", text="yes")
            ended = c.EndTurn(turn_id=TurnId(uid_of("turn")), attempt=0, outcome=outcome, at_ms=2)
            desk.done(bare(opening), unit, bare(ended))
            assert desk.rows(staged) == (row,)

    def test_marks_are_set_once(self, tmp_path: Path) -> None:
        """G1: something that happens once per database has happened."""
        with self.desk(tmp_path) as desk:
            mark = c.SetMark(name="moved", value="yes")
            desk.done(bare(mark))
            desk.again(bare(mark))
            desk.refused("conflict", bare(replace(mark, value="no")))

    def test_a_unit_without_a_session_needs_only_the_incarnation(self, tmp_path: Path) -> None:
        """INV-12: a guard may name a key alone."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk)
            guard = Guard(key=chat.key, incarnation=chat.incarnation)
            mark = c.SetMark(name="moved", value="yes")
            desk.done(Unit((mark,), (guard,)))


MARKS: tuple[dict[str, Any], ...] = (
    {"state": "summarised", "summarised_by": Seq(3)},
    {"state": "rewound"},
    {"carried": True},
    {"summary": True, "covers": (Seq(0), Seq(1))},
    {"summary": True, "carried": True},
    {"summary": True, "erased": True, "text": ""},
    {"erased": True, "text": ""},
    {"role": "tool", "tool_call_id": "1", "name": "look"},
)


def _row(session_id: SessionId, seq: int, **marks: Any) -> Message:
    given: dict[str, Any] = {"role": "user", "text": f"row {seq}", "created_ms": seq * 100, **marks}
    uid = uid_of(f"{session_id}/{seq}")
    return Message(uid=uid, session_id=session_id, seq=Seq(seq), **given)
