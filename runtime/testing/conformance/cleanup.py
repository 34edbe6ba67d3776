"""Conformance of clean-up: deletion in slices, what is spared, what surrounds turns, blobs."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ....storage import commands as c
from ....storage.identity import BlobId, Seq, SessionId, TurnId
from ....storage.records import Inbound, TurnOutcome
from ....storage.units import Unit
from ..conversation import Conversation, uid_of
from .desk import UnderTest, bare
from .sessions import opened

if TYPE_CHECKING:
    from pathlib import Path

    from .desk import Desk

FAR_MS = 10**13
FIRST, OLD = TurnId(uid_of("ann/first")), TurnId(uid_of("old"))


def told(desk: Desk) -> Conversation:
    """A conversation with a turn that has ended."""
    chat = Conversation("ann")
    desk.done(*chat.opening(), *chat.exchange("first"))
    return chat


class CleanupConformance(UnderTest):
    """What must hold when things go."""

    # Deletion in slices ----------------------------------------------------------------------

    def test_what_is_left_of_a_tombstone_goes_step_by_step(self, tmp_path: Path) -> None:
        """INV-19: each slice once, in order; none of it is in any view, and none of it stays."""
        with self.desk(tmp_path) as desk:
            chat, other = told(desk), opened(desk, "bob", "hello")
            gone = chat.session_id
            desk.done(chat.unit(chat.route_to(SessionId("fresh"))))
            first = c.PurgeSession(session_id=gone, step=0, before_seq=Seq(2), turn_ids=(FIRST,))
            desk.refused("stale", bare(first))  # it is not deleted
            desk.done(bare(c.DeleteSession(session_id=gone, at_ms=1)))
            desk.refused("stale", bare(replace(first, step=1)))
            stray = TurnId(uid_of("stray"))
            desk.done(bare(c.OpenTurn(turn_id=stray, key=other.key, at_ms=1)))
            desk.refused("invalid", bare(replace(first, turn_ids=(stray,))))
            desk.done(bare(first))
            desk.again(bare(first))
            with desk.reading() as reader:
                assert reader.purges() == (gone,)
            last = c.PurgeSession(session_id=gone, step=1, last=True)
            desk.done(bare(last))
            desk.again(bare(first), bare(last), bare(replace(last, step=7)))
            with desk.reading() as reader:
                assert reader.purges() == ()
                assert reader.purge_slice(gone) is None
            desk.refused("missing", bare(replace(first, session_id=SessionId("nothing"))))

    def test_the_slices_that_are_proposed_come_to_an_end(self, tmp_path: Path) -> None:
        """PERFORMANCE 10: none is larger than it may be, and the last leaves nothing."""
        with self.desk(tmp_path) as desk:
            chat = told(desk)
            for number in range(9):
                desk.done(*chat.exchange(f"more {number}"))
            gone = chat.session_id
            desk.done(chat.unit(chat.route_to(SessionId("fresh"))))
            desk.done(bare(c.DeleteSession(session_id=gone, at_ms=1)))
            for step in range(100):
                with desk.reading() as reader:
                    part = reader.purge_slice(gone, rows_max=8, bytes_max=1)
                if part is None:
                    break
                assert part.step == step
                assert len(part.turn_ids) <= 8
                purge = c.PurgeSession(
                    session_id=gone,
                    step=part.step,
                    before_seq=part.before_seq,
                    turn_ids=part.turn_ids,
                    last=part.last,
                )
                desk.done(bare(purge))
            else:
                raise AssertionError("it never comes to an end")

    def test_what_comes_late_to_a_deleted_session_leaves_nothing(self, tmp_path: Path) -> None:
        """Its turn may still end, its message be taken: but no text is stored any more."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "hello")
            turn = TurnId(uid_of("late"))
            base: dict[str, Any] = {"turn_id": turn, "at_ms": chat.at()}
            desk.done(chat.unit(c.OpenTurn(key=chat.key, **base)))
            desk.done(chat.unit(c.StartTurn(session_id=chat.session_id, attempt=1, **base)))
            gone = chat.session_id
            desk.done(chat.unit(chat.route_to(SessionId("fresh"))))
            desk.done(bare(c.DeleteSession(session_id=gone, at_ms=1)))
            accept = c.AcceptInbound(
                source="chat",
                inbound_id="1",
                key=chat.key,
                disposition="steered",
                digest="d",
                body=Inbound(text="secret"),
                reply_to={"to": "secret"},
                **base,
            )
            outcome = TurnOutcome(kind="answered", text="secret")
            ended = c.EndTurn(attempt=1, outcome=outcome, **base)
            posted = c.PostDelivery(
                delivery_id="d", key=chat.key, source="chat", target={}, body={}, **base
            )
            aside = c.SetAside(reason="secret", tries=1, **base)
            desk.done(bare(accept), bare(ended), bare(aside))
            desk.again(bare(accept), bare(ended), bare(aside), bare(posted))
            with desk.reading() as reader:
                stored, entry = reader.turn(turn), reader.inbound("chat", "1")
            assert stored is not None
            assert stored.outcome == TurnOutcome(kind="answered")
            assert entry is not None
            assert (entry.body, entry.reply_to) == (None, None)

    def test_a_name_that_a_tombstone_still_holds_may_be_given_again(self, tmp_path: Path) -> None:
        """A delivery or a question of the same name is another one."""
        with self.desk(tmp_path) as desk:
            chat, other = told(desk), opened(desk, "bob", "hello")
            posted = c.PostDelivery(
                delivery_id="d",
                key=chat.key,
                source="chat",
                target={},
                body={"text": "old"},
                at_ms=1,
                turn_id=FIRST,
            )
            sending = c.MarkDelivery(delivery_id="d", attempt=1, state="sending", at_ms=2)
            asked = c.AskQuestion(
                key=chat.key, question_key="q", turn_id=FIRST, question="old?", at_ms=1
            )
            desk.done(bare(posted), bare(sending), bare(replace(sending, state="sent")))
            desk.done(bare(asked))
            gone = chat.session_id
            desk.done(chat.unit(chat.route_to(SessionId("fresh"))))
            desk.done(bare(c.DeleteSession(session_id=gone, at_ms=1)))
            desk.refused("missing", bare(replace(sending, attempt=2)))
            turn = TurnId(uid_of("other"))
            desk.done(bare(c.OpenTurn(turn_id=turn, key=other.key, at_ms=1)))
            desk.done(bare(replace(posted, turn_id=turn, body={"text": "new"})))
            desk.done(bare(replace(asked, turn_id=turn, question="new?")))
            desk.done(bare(c.PurgeSession(session_id=gone, step=0, last=True)))
            with desk.reading() as reader:
                delivery, question = reader.delivery("d"), reader.question(chat.key, "q")
            assert delivery is not None
            assert delivery.text == "new"
            assert question is not None
            assert question.question == "new?"

    # Originals -------------------------------------------------------------------------------

    def test_originals_are_handed_on_slice_by_slice(self, tmp_path: Path) -> None:
        """INV-18: at every step each message has one original; a new copy begins it anew."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "one", "two", "three")
            parent, child = chat.session_id, SessionId("branch")
            give = c.GiveOriginals(session_id=parent, first_seq=Seq(0), last_seq=Seq(1))
            desk.refused("route_conflict", bare(give))
            self._branch(desk, chat, child)
            desk.done(bare(give))
            desk.again(bare(give))
            desk.refused("stale", bare(replace(give, last_seq=Seq(2))))
            assert [m.carried for m in desk.rows(parent)] == [True, True, False]
            assert [m.carried for m in desk.rows(child)] == [False, False, True]
            # The key comes back, and the session is copied once more.
            desk.done(bare(chat.route_to(parent)))
            chat.next_seq, chat.revision = 3, 3
            desk.done(
                chat.guarded(chat.guard(), chat.append(chat.draft("user", "four"))),
            )
            self._branch(desk, chat, SessionId("another"))
            with desk.reading() as reader:
                assert reader.originals_given(parent) == 0
            desk.done(bare(c.DeleteSession(session_id=parent, at_ms=1)))
            assert not any(m.carried for m in desk.rows(child))
            rows = desk.rows(SessionId("another"))
            assert [m.carried for m in rows] == [True, True, True, False]

    def _branch(self, desk: Desk, chat: Conversation, child: SessionId) -> None:
        branch = c.Branch(
            key=chat.key,
            parent_id=chat.session_id,
            child_id=child,
            upto_seq=Seq(chat.next_seq - 1),
            replaces=chat.route_version,
            at_ms=chat.at(),
        )
        desk.done(chat.guarded(chat.guard(), branch))
        chat.route_version += 1
        chat.session_id = child

    # What is spared --------------------------------------------------------------------------

    def test_a_quiet_deletion_spares_what_somebody_needs(self, tmp_path: Path) -> None:
        """Pinned here or later, talked in, at work, waiting to be sent, answered or decided."""
        base: dict[str, Any] = {"turn_id": FIRST, "at_ms": 1}
        key = Conversation("ann").key
        posted = c.PostDelivery(delivery_id="d", key=key, source="chat", target={}, body={}, **base)
        needed: tuple[c.AnyCommand, ...] = (
            c.SetFlags(
                session_id=Conversation("ann").session_id,
                archived=False,
                pinned=True,
                replaces=0,
                at_ms=1,
            ),
            posted,
            replace(posted, turn_id=None, session_id=Conversation("ann").session_id),
            c.AskQuestion(key=key, question_key="q", question="?", **base),
            c.SetAside(reason="r", tries=1, **base),
            c.StartTurn(session_id=Conversation("ann").session_id, attempt=2, **base),
        )
        for number, command in enumerate(needed):
            with self.desk(tmp_path / str(number)) as desk:
                chat = told(desk)
                gone = chat.session_id
                desk.done(bare(command), chat.unit(chat.route_to(SessionId("fresh"))))
                quiet = c.DeleteSession(session_id=gone, at_ms=1, quiet_since_ms=FAR_MS)
                desk.refused("stale", bare(quiet))
                desk.done(bare(replace(quiet, quiet_since_ms=None)))
                desk.again(bare(quiet))

    def test_a_session_that_was_talked_in_is_not_quiet(self, tmp_path: Path) -> None:
        """And one whose later generation a person keeps is kept with it."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "a long message that is worth a summary")
            parent = chat.session_id
            last_ms = desk.session(parent).last_ms
            desk.done(chat.guarded(chat.guard(), chat.rotate()))
            quiet = c.DeleteSession(session_id=parent, at_ms=1, quiet_since_ms=last_ms)
            desk.refused("stale", bare(quiet))
            pin = c.SetFlags(
                session_id=chat.session_id, archived=False, pinned=True, replaces=0, at_ms=1
            )
            desk.done(bare(pin))
            desk.refused("stale", bare(replace(quiet, quiet_since_ms=FAR_MS)))
            desk.done(bare(replace(pin, pinned=False, replaces=1)))
            desk.done(bare(replace(quiet, quiet_since_ms=FAR_MS)))

    # What surrounds turns --------------------------------------------------------------------

    def test_history_goes_when_it_is_old_and_nobody_needs_it(self, tmp_path: Path) -> None:
        """The last delivery of a key, what failed, what is set, what may be resumed: they stay."""
        with self.desk(tmp_path) as desk:
            chat = told(desk)
            states = ("sent", "failed", "sent", "sent")
            for number, state in enumerate(states):
                posted = c.PostDelivery(
                    delivery_id=f"d{number}",
                    key=chat.key,
                    source="chat",
                    target={},
                    body={},
                    at_ms=number,
                )
                sending = c.MarkDelivery(
                    delivery_id=f"d{number}", attempt=1, state="sending", at_ms=number
                )
                desk.done(bare(posted), bare(sending), bare(replace(sending, state=state)))
            for name in ("t-set", "t-fired"):
                timer = c.SetTimer(
                    timer_id=name,
                    key=chat.key,
                    source="chat",
                    due_ms=1,
                    inbound=Inbound(text="up"),
                    at_ms=1,
                )
                desk.done(bare(timer))
            desk.done(bare(c.ResolveTimer(timer_id="t-fired", resolution="fired", at_ms=2)))
            self._remembered_turn(desk, chat)
            prune = c.PruneWork(
                before_ms=2,
                delivery_ids=("d0", "d1", "d2", "d3", "nothing"),
                timer_ids=("t-set", "t-fired", "nothing"),
                turn_ids=(OLD, TurnId(uid_of("nothing"))),
            )
            desk.done(bare(prune))
            with desk.reading() as reader:
                left, _ = reader.deliveries()
                assert [d.id for d in left] == ["d3", "d2", "d1"]  # d2 was sent at 2
                assert reader.timer("t-fired") is not None
            late = replace(prune, before_ms=FAR_MS)
            desk.done(bare(late))
            desk.again(bare(late))
            with desk.reading() as reader:
                left, _ = reader.deliveries()
                assert [d.id for d in left] == ["d3", "d1"]
                assert reader.timer("t-fired") is None
                assert reader.timer("t-set") is not None
                assert len(reader.effects(OLD)) == 1
            inbox = c.PruneInbox(before_ms=FAR_MS, limit=9, replaces=0, at_ms=1)
            desk.done(bare(inbox), bare(late))
            with desk.reading() as reader:
                assert reader.effects(OLD) == ()

    def _remembered_turn(self, desk: Desk, chat: Conversation) -> None:
        """A turn that has ended and done something, and whose message is still known."""
        base: dict[str, Any] = {"turn_id": OLD, "at_ms": 1}
        accept = c.AcceptInbound(
            source="chat",
            inbound_id="1",
            key=chat.key,
            disposition="started",
            digest="d",
            **base,
        )
        effect = c.BeginEffect(
            effect_key="e", effect_id=uid_of("e"), tool="t", digest="d", attempt=1, **base
        )
        commands = (
            c.OpenTurn(key=chat.key, **base),
            accept,
            c.StartTurn(session_id=chat.session_id, attempt=1, **base),
            effect,
            c.EndTurn(attempt=1, outcome=TurnOutcome(kind="silent"), **base),
        )
        desk.done(Unit(commands))

    def test_erased_work_is_blank_and_a_turn_at_work_is_refused(self, tmp_path: Path) -> None:
        """The turn stays, so that a repeat is known; answers of others stay as well."""
        with self.desk(tmp_path) as desk:
            chat = told(desk)
            running = TurnId(uid_of("running"))
            base: dict[str, Any] = {"turn_id": running, "at_ms": 1}
            desk.done(bare(c.OpenTurn(key=chat.key, **base)))
            desk.refused("stale", bare(c.EraseWork(turn_ids=(FIRST, running))))
            for name, by in (("q1", "ann"), ("q2", "bob")):
                asked = c.AskQuestion(key=chat.key, question_key=name, question="?", **base)
                answer = c.AnswerQuestion(
                    key=chat.key, question_key=name, state="answered", answer="y", by=by, at_ms=2
                )
                desk.done(bare(asked), bare(answer))
            answers = c.EraseWork(answered=(running,), user="ann")
            desk.done(bare(answers))
            desk.again(bare(answers), bare(replace(answers, user=None)))
            with desk.reading() as reader:
                assert [q.answer for q in reader.questions(chat.key)] == [None, "y"]
            erase = c.EraseWork(turn_ids=(FIRST,))
            desk.done(bare(erase))
            desk.again(bare(erase))
            with desk.reading() as reader:
                turn = reader.turn(FIRST)
            assert turn is not None
            assert turn.outcome == TurnOutcome(kind="answered")
            missing = TurnId(uid_of("nothing"))
            desk.refused("missing", bare(c.EraseWork(turn_ids=(missing,))))

    # Blobs -----------------------------------------------------------------------------------

    def test_a_blob_that_waits_with_a_message_is_not_dropped(self, tmp_path: Path) -> None:
        """Neither whole nor in part; what is dropped in part can't be referred to."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "hello")
            data = b"piece"
            blob = BlobId(sha256(data).hexdigest())
            pieces = [bare(c.PutChunk(blob_id=blob, index=n, data=data)) for n in range(3)]
            seal = c.SealBlob(blob_id=blob, size_bytes=15, chunk_count=3, media_type="a/b", at_ms=1)
            desk.done(*pieces, bare(seal))
            turn = TurnId(uid_of("waits"))
            base: dict[str, Any] = {"key": chat.key, "turn_id": turn, "at_ms": 1}
            waits = Unit(
                (
                    c.OpenTurn(**base),
                    c.AcceptInbound(
                        source="chat",
                        inbound_id="1",
                        disposition="queued",
                        digest="d",
                        body=Inbound(text="look", blobs=(blob,)),
                        **base,
                    ),
                )
            )
            timer = c.SetTimer(
                timer_id="t",
                key=chat.key,
                source="chat",
                due_ms=1,
                inbound=Inbound(text="look", blobs=(blob,)),
                at_ms=1,
            )
            taken = c.TakeInbound(source="chat", inbound_id="1", turn_id=turn)
            over = c.ResolveTimer(timer_id="t", resolution="cancelled", at_ms=2)
            drop = c.DropBlob(blob_id=blob)
            for use, release in ((waits, taken), (bare(timer), over)):
                desk.done(use)
                desk.refused("conflict", bare(drop))
                desk.refused("conflict", bare(replace(drop, keeping=2)))
                desk.done(bare(release))
            shrink = replace(drop, keeping=1)
            desk.done(bare(shrink))
            desk.again(bare(shrink), bare(replace(shrink, keeping=2)))
            draft = chat.draft("user", "look", blobs=(blob,))
            desk.refused("missing", chat.guarded(chat.guard(), chat.append(draft)))
            desk.done(bare(drop))
            desk.again(bare(drop), bare(shrink))
