"""Conformance of work: turns, the inbox, usage, deliveries, effects, questions, timers, blobs."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ....storage import commands as c
from ....storage.identity import BlobId, Seq, SessionId, SessionKey, TurnId
from ....storage.records import Inbound, Tokens, TurnOutcome
from ..conversation import uid_of
from .desk import UnderTest, bare
from .sessions import opened

if TYPE_CHECKING:
    from pathlib import Path

    from ....storage.records import Delivery
    from ..conversation import Conversation
    from .desk import Desk

TURN = TurnId(uid_of("turn"))
ANSWERED = TurnOutcome(kind="answered", text="yes", detail={"n": [1, 1.0, True]})


def with_turn(desk: Desk, *, started: bool = True) -> Conversation:
    """A conversation with one turn."""
    chat = opened(desk, "ann", "hello")
    desk.done(bare(c.OpenTurn(turn_id=TURN, key=chat.key, at_ms=1)))
    if started:
        desk.done(bare(_start(chat)))
    return chat


def _start(chat: Conversation, attempt: int = 1, at_ms: int = 2) -> c.StartTurn:
    return c.StartTurn(turn_id=TURN, session_id=chat.session_id, attempt=attempt, at_ms=at_ms)


def _end(attempt: int = 1, at_ms: int = 9, outcome: TurnOutcome = ANSWERED) -> c.EndTurn:
    return c.EndTurn(turn_id=TURN, attempt=attempt, outcome=outcome, at_ms=at_ms)


class WorkConformance(UnderTest):
    """What must hold for everything around the transcripts."""

    # Turns -----------------------------------------------------------------------------------

    def test_a_turn_goes_through_its_attempts_in_order(self, tmp_path: Path) -> None:
        """A7: queued, running, waiting, running again, ended, resumed; each step known for ever."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk, started=False)
            desk.refused("stale", bare(_start(chat, attempt=2)))
            suspended = c.SuspendTurn(turn_id=TURN, attempt=1, at_ms=3)
            desk.refused("stale", bare(suspended))
            steps: list[c.AnyCommand] = [
                _start(chat),
                suspended,
                _start(chat, 2, 4),
                _end(2),
                _start(chat, 3, 10),
                c.SuspendTurn(turn_id=TURN, attempt=3, at_ms=11),
                _end(3, 12, TurnOutcome(kind="interrupted", cause="crash")),
            ]
            for number, step in enumerate(steps):
                desk.done(bare(step))
                desk.again(*(bare(earlier) for earlier in steps[: number + 1]))
            desk.refused("conflict", bare(_end(3, 13)))
            desk.refused("stale", bare(_end(2, 13)))
            desk.refused("stale", bare(c.SuspendTurn(turn_id=TURN, attempt=2, at_ms=13)))

    def test_a_turn_that_waits_may_be_cancelled(self, tmp_path: Path) -> None:
        """A7: attempt 0 ends a turn that never began."""
        with self.desk(tmp_path) as desk:
            with_turn(desk, started=False)
            desk.done(bare(_end(0)))
            with desk.reading() as reader:
                assert reader.unfinished_turns() == ()
                turn = reader.turn(TURN)
            assert turn is not None
            assert turn.outcome == ANSWERED

    def test_an_unknown_turn_is_missing(self, tmp_path: Path) -> None:
        """INV-5: nothing starts, ends, or hangs on a turn that was never opened."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk)
            commands: tuple[c.AnyCommand, ...] = (
                _start(chat),
                _end(),
                c.SuspendTurn(turn_id=TURN, attempt=1, at_ms=1),
                c.SetAside(turn_id=TURN, reason="r", tries=1, at_ms=1),
                c.ResolveDeadLetter(turn_id=TURN, tries=1, resolution="dropped", at_ms=1),
                _accept(chat),
                _begin(),
                c.FinishEffect(turn_id=TURN, effect_key="mail", attempt=1, state="done", at_ms=1),
                c.AskQuestion(key=chat.key, question_key="q", turn_id=TURN, question="?", at_ms=1),
                c.AddUsage(call_id=uid_of("c"), session_id=chat.session_id, at_ms=1, turn_id=TURN),
                _post(chat, turn_id=TURN),
            )
            for command in commands:
                desk.refused("missing", bare(command))

    # The inbox -------------------------------------------------------------------------------

    def test_an_inbound_message_is_known_by_its_source_and_id(self, tmp_path: Path) -> None:
        """A7: a repeat is recognised, its body taken or not; other content is refused."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk, started=False)
            accepted = _accept(chat)
            desk.done(bare(accepted))
            desk.again(bare(accepted))
            with desk.reading() as reader:
                (waiting,) = reader.waiting_inbound(chat.key)
            assert waiting.body == accepted.body
            taken = bare(c.TakeInbound(source="chat", inbound_id="1", turn_id=TURN))
            desk.done(taken)
            desk.again(bare(accepted), taken)
            with desk.reading() as reader:
                assert reader.waiting_inbound(chat.key) == ()
            with desk.reading() as reader:
                (entry,) = reader.inbound_of_turn(TURN)
            assert (entry.body, entry.reply_to) == (None, {"id": 1})
            changes: tuple[dict[str, Any], ...] = ({"digest": "x"}, {"key": SessionKey("x")})
            for change in (*changes, {"disposition": "merged"}):
                desk.refused("conflict", bare(replace(accepted, **change)))

    def test_a_steered_message_is_answered_by_the_turn_it_went_into(self, tmp_path: Path) -> None:
        """A7: its own turn stays the one that its id stands for."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk)
            other = TurnId(uid_of("steered"))
            accepted = replace(_accept(chat), inbound_id="2", turn_id=other)
            taken = c.TakeInbound(source="chat", inbound_id="2", turn_id=other, into=TURN)
            opened_too = bare(c.OpenTurn(turn_id=other, key=chat.key, at_ms=3), accepted)
            desk.done(opened_too)
            desk.refused("missing", bare(replace(taken, into=TurnId("nothing"))))
            desk.done(bare(taken))
            desk.again(opened_too, bare(taken))
            with desk.reading() as reader:
                (entry,) = reader.inbound_of_turn(TURN)
                assert reader.inbound_of_turn(other) == (entry,)
            assert (entry.turn_id, entry.into, entry.body) == (other, TURN, None)

    def test_only_the_turn_of_an_inbound_message_takes_it(self, tmp_path: Path) -> None:
        """A1: a turn that was refused the same id must not take away another's body."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk, started=False)
            other = TurnId(uid_of("another"))
            desk.done(bare(c.OpenTurn(turn_id=other, key=chat.key, at_ms=3)))
            desk.done(bare(_accept(chat)))
            taken = c.TakeInbound(source="chat", inbound_id="1", turn_id=TURN)
            desk.refused("conflict", bare(replace(taken, turn_id=other)))
            desk.refused("conflict", bare(replace(taken, turn_id=TurnId("nothing"))))
            with desk.reading() as reader:
                assert len(reader.waiting_inbound(chat.key)) == 1
            desk.done(bare(taken))
            desk.refused("conflict", bare(replace(taken, turn_id=other)))

    def test_waiting_messages_come_in_the_order_of_their_acceptance(self, tmp_path: Path) -> None:
        """A2: the order of acceptance is that of commits, whatever a clock said."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk, started=False)
            for inbound_id, at_ms in (("b", 5), ("a", 5), ("z", 4), ("y", 6)):
                accepted = replace(_accept(chat), inbound_id=inbound_id, at_ms=at_ms)
                desk.done(bare(accepted))
            with desk.reading() as reader:
                order = [entry.inbound_id for entry in reader.waiting_inbound(chat.key)]
            assert order == ["b", "a", "z", "y"]
            desk.done(bare(_end(0)))
            with desk.reading() as reader:
                assert reader.waiting_inbound(chat.key) == ()

    def test_pruning_forgets_only_what_is_old_and_over(self, tmp_path: Path) -> None:
        """A7: dedupe rows of ended turns, at most so many, once; a late repeat starts nothing."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk, started=False)
            units = [
                bare(replace(_accept(chat), inbound_id=name, at_ms=at_ms))
                for name, at_ms in (("a", 10), ("b", 20), ("c", 30))
            ]
            desk.done(*units)
            prune = c.PruneInbox(before_ms=30, limit=1, replaces=0, at_ms=99)
            desk.done(bare(prune))  # the turn is not over
            desk.done(bare(_end(0)))
            desk.done(bare(replace(prune, replaces=1)))
            with desk.reading() as reader:
                left = [reader.inbound("chat", name) is not None for name in "abc"]
                assert reader.inbox_pruned_version() == 2
            assert left == [False, True, True]
            desk.done(bare(replace(prune, replaces=2, limit=9)))
            desk.again(bare(prune), bare(replace(prune, replaces=1)), *units)
            desk.refused("stale", bare(replace(prune, limit=5)))

    def test_a_dead_letter_is_opened_and_resolved_by_its_tries(self, tmp_path: Path) -> None:
        """A7: set aside, retried, set aside again; an older decision changes nothing."""
        with self.desk(tmp_path) as desk:
            with_turn(desk)
            aside = c.SetAside(turn_id=TURN, reason="kept failing", tries=3, at_ms=5)
            retried = c.ResolveDeadLetter(turn_id=TURN, tries=3, resolution="retried", at_ms=6)
            desk.done(bare(aside))
            desk.refused("missing", bare(replace(retried, tries=4)))
            desk.done(bare(retried))
            desk.again(bare(aside), bare(retried))
            desk.refused("conflict", bare(replace(retried, resolution="dropped")))
            desk.done(bare(replace(aside, tries=6)))
            desk.again(bare(retried), bare(replace(retried, resolution="dropped")))
            with desk.reading() as reader:
                (letter,) = reader.dead_letters()
            assert (letter.state, letter.tries, letter.resolved_ms) == ("open", 6, None)

    # Usage -----------------------------------------------------------------------------------

    def test_usage_is_added_once_and_adds_up(self, tmp_path: Path) -> None:
        """H8: by model and source, auxiliary calls apart, also after a rotation."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk)
            for number in range(6):
                usage = c.AddUsage(
                    call_id=uid_of(f"call {number}"),
                    session_id=chat.session_id,
                    at_ms=number,
                    turn_id=TURN,
                    model=f"model {number % 2}",
                    auxiliary=number > 3,
                    tokens=Tokens(input=number, output=1, reasoning=2**40),
                    cost_nanos=number * 10,
                )
                desk.done(bare(usage))
                desk.again(bare(usage))
                desk.refused("conflict", bare(replace(usage, model="other")))
            session = desk.session(chat.session_id)
            assert session.tokens == Tokens(input=6, output=4, reasoning=2**42)
            assert session.auxiliary_tokens == Tokens(input=9, output=2, reasoning=2**41)
            assert (session.cost_nanos, session.auxiliary_cost_nanos) == (60, 90)
            assert session.revision == 1
            with desk.reading() as reader:
                totals = reader.usage()
            assert [(t.model, t.auxiliary, t.calls) for t in totals] == [
                ("model 0", False, 2),
                ("model 0", True, 1),
                ("model 1", False, 2),
                ("model 1", True, 1),
            ]

    # Deliveries ------------------------------------------------------------------------------

    def test_a_delivery_goes_through_its_attempts(self, tmp_path: Path) -> None:
        """INV-3: sending, pending, sending, unknown, failed, sent; each step known for ever."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk)
            posted = _post(chat)
            desk.done(bare(posted))
            desk.again(bare(posted))
            steps = [
                _mark(1, "sending", 10),
                _mark(1, "pending", 11, error="slow", next_ms=50),
                _mark(2, "sending", 50),
                _mark(2, "unknown", 51, error="cut"),
                _mark(2, "failed", 52, error="refused"),
                _mark(2, "pending", 53),
                _mark(3, "sending", 60),
                _mark(3, "unknown", 61),
                _mark(3, "pending", 62),
                _mark(4, "sending", 63),
                _mark(4, "sent", 64, platform_id="p-1"),
            ]
            for number, step in enumerate(steps):
                desk.done(bare(step))
                desk.again(*(bare(earlier) for earlier in steps[: number + 1]))
            for late in (
                _mark(4, "failed", 65),
                _mark(5, "sending", 65),
                _mark(4, "pending", 65),
                _mark(4, "unknown", 65),
                _mark(1, "pending", 12),
            ):
                desk.refused("stale", bare(late))
            assert _delivery(desk).platform_id == "p-1"

    def test_what_was_put_back_may_turn_out_to_have_arrived(self, tmp_path: Path) -> None:
        """INV-3: an acknowledgement that comes late; nothing arrives that was never sent."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk)
            desk.done(bare(_post(chat)))
            desk.refused("stale", bare(_mark(0, "sent", 9)))
            desk.done(bare(_mark(1, "sending", 10)), bare(_mark(1, "pending", 11)))
            sent = bare(_mark(1, "sent", 12))
            desk.done(sent)
            desk.again(sent)
            desk.refused("stale", bare(_mark(2, "sending", 13)))

    def test_the_first_open_delivery_of_each_key_is_found(self, tmp_path: Path) -> None:
        """INV-13: however many wait behind it."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk)
            for number in range(9):
                key = SessionKey(f"key {number % 3}")
                desk.done(bare(replace(_post(chat), delivery_id=f"{number}", key=key)))
            steps = (_mark(1, "sending", 10), _mark(1, "sent", 11))
            desk.done(*(bare(replace(step, delivery_id="1")) for step in steps))
            desk.done(bare(replace(steps[0], delivery_id="2")))
            with desk.reading() as reader:
                assert [d.id for d in reader.first_deliveries("chat")] == ["0", "2", "4"]
                assert [d.id for d in reader.first_deliveries("chat", 2)] == ["0", "2"]
                assert reader.first_deliveries("other") == ()
                assert [d.id for d in reader.lane_deliveries("chat", SessionKey("key 0"))] == [
                    *("0", "3", "6")
                ]
                behind = reader.lane_deliveries("chat", SessionKey("key 1"), "1", 1)
                assert [d.id for d in behind] == ["4"]
                gone = reader.lane_deliveries("chat", SessionKey("key 2"), "gone")
                assert [d.id for d in gone] == ["2", "5", "8"]

    def test_a_delivery_that_rests_is_passed_over_until_its_time(self, tmp_path: Path) -> None:
        """INV-13: and no longer, if the clock was set back behind the step that put it off."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk)
            for number in range(4):
                key = SessionKey(f"key {number % 2}")
                desk.done(bare(replace(_post(chat), delivery_id=f"{number}", key=key)))
            steps = (_mark(1, "sending", 10), _mark(1, "pending", 20, next_ms=50))
            desk.done(*(bare(replace(step, delivery_id="0")) for step in steps))
            with desk.reading() as reader:
                for now_ms, ids in ((20, ["1"]), (49, ["1"]), (50, ["0", "1"]), (19, ["0", "1"])):
                    found = reader.first_deliveries("chat", now_ms=now_ms)
                    assert [d.id for d in found] == ids
                assert [d.id for d in reader.first_deliveries("chat", 1, now_ms=30)] == ["1"]

    def test_an_undecided_dead_letter_keeps_its_messages(self, tmp_path: Path) -> None:
        """A7: whom it answers is needed until somebody has decided."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk, started=False)
            desk.done(bare(_accept(chat)), bare(_end(0)))
            desk.done(bare(c.SetAside(turn_id=TURN, reason="r", tries=3, at_ms=5)))
            prune = c.PruneInbox(before_ms=99, limit=9, replaces=0, at_ms=99)
            desk.done(bare(prune))
            with desk.reading() as reader:
                assert reader.inbound("chat", "1") is not None
                assert reader.oldest_ended_inbound_ms() is None
            resolved = c.ResolveDeadLetter(turn_id=TURN, tries=3, resolution="dropped", at_ms=6)
            desk.done(bare(resolved), bare(replace(prune, replaces=1)))
            with desk.reading() as reader:
                assert reader.inbound("chat", "1") is None

    def test_a_steered_message_is_kept_for_the_turn_that_answers_it(self, tmp_path: Path) -> None:
        """A7: whom that one answers is needed until it has ended, and is no open dead letter."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk)
            steered = TurnId("steered")
            opened = c.OpenTurn(turn_id=steered, key=chat.key, at_ms=2)
            desk.done(bare(opened), bare(replace(_accept(chat), turn_id=steered)))
            taken = c.TakeInbound(source="chat", inbound_id="1", turn_id=steered, into=TURN)
            desk.done(bare(taken), bare(replace(_end(0), turn_id=steered)))
            prune = c.PruneInbox(before_ms=99, limit=9, replaces=0, at_ms=99)
            letter = c.SetAside(turn_id=TURN, reason="r", tries=3, at_ms=10)
            resolved = c.ResolveDeadLetter(turn_id=TURN, tries=3, resolution="dropped", at_ms=11)
            kept = (((), True), ((_end(), letter), True), ((resolved,), False))
            for replaces, (steps, there) in enumerate(kept):
                desk.done(*map(bare, steps), bare(replace(prune, replaces=replaces)))
                with desk.reading() as reader:
                    assert (reader.inbound("chat", "1") is not None) == there
                    assert reader.oldest_ended_inbound_ms() is None

    def test_open_deliveries_come_in_order(self, tmp_path: Path) -> None:
        """A2: the order of posting, by source if asked, at most so many."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk)
            for number in range(6):
                posted = replace(_post(chat), delivery_id=f"{9 - number}", source=f"s{number % 2}")
                desk.done(bare(posted))
            desk.done(bare(replace(_mark(1, "sending", 10), delivery_id="8")))
            desk.done(bare(replace(_mark(1, "sending", 10), delivery_id="7")))
            desk.done(bare(replace(_mark(1, "sent", 11), delivery_id="7")))
            with desk.reading() as reader:
                assert [d.id for d in reader.open_deliveries()] == ["9", "8", "6", "5", "4"]
                assert [d.id for d in reader.open_deliveries("s1")] == ["8", "6", "4"]
                assert [d.id for d in reader.open_deliveries(limit=2)] == ["9", "8"]
                found, after = reader.deliveries(state="pending", limit=2)
                assert [d.id for d in found] == ["4", "5"]
                found, _ = reader.deliveries(state="pending", limit=2, after=after)
                assert [d.id for d in found] == ["6", "9"]
                last = reader.last_delivery(chat.key, "s0")
            assert last is not None
            assert last.id == "5"

    def test_a_delivery_of_an_unknown_session_is_refused(self, tmp_path: Path) -> None:
        """INV-5: and marking one that was never posted is, too."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk)
            desk.refused("missing", bare(_post(chat, session_id=SessionId("nothing"))))
            desk.refused("missing", bare(_mark(1, "sending", 10)))

    # Effects ---------------------------------------------------------------------------------

    def test_an_effect_is_begun_and_finished_by_attempt(self, tmp_path: Path) -> None:
        """INV-1: unknown may become known, failed may be tried again, done is done."""
        with self.desk(tmp_path) as desk:
            with_turn(desk)
            desk.refused("stale", bare(_begin(attempt=2)))
            steps: list[c.AnyCommand] = [
                _begin(),
                _finish(1, "unknown", 11),
                _finish(1, "failed", 12, {"error": "no"}),
                _begin(attempt=2),
                _begin(attempt=3),  # the process died after it had begun
                _finish(3, "done", 20, {"id": 1.0, "b": True}),
            ]
            for number, step in enumerate(steps):
                desk.done(bare(step))
                desk.again(*(bare(earlier) for earlier in steps[: number + 1]))
            desk.refused("stale", bare(_begin(attempt=4)))
            desk.refused("stale", bare(_finish(3, "done", 20, {"id": 1, "b": True})))
            desk.refused("stale", bare(_finish(2, "done", 21)))
            desk.refused("conflict", bare(replace(_begin(attempt=4), digest="other")))

    # Questions and timers --------------------------------------------------------------------

    def test_the_first_answer_stands(self, tmp_path: Path) -> None:
        """B12: a question stays with its key, through a rotation and for ever."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk)
            asked = c.AskQuestion(
                key=chat.key,
                question_key="q",
                turn_id=TURN,
                question="may I?",
                choices=("yes", "no"),
                expires_ms=99,
                at_ms=5,
            )
            answer = c.AnswerQuestion(
                key=chat.key, question_key="q", state="answered", answer="yes", by="ann", at_ms=6
            )
            desk.refused("missing", bare(answer))
            desk.done(bare(asked), bare(answer))
            desk.again(bare(asked), bare(answer))
            desk.refused("conflict", bare(replace(answer, answer="no")))
            desk.refused("conflict", bare(replace(answer, state="expired", answer=None)))
            desk.refused("conflict", bare(replace(asked, choices=("yes",))))
            with desk.reading() as reader:
                (question,) = reader.questions(chat.key)
                assert reader.questions(SessionKey("nobody")) == ()
            assert (question.answer, question.answered_by) == ("yes", "ann")

    def test_questions_expire_in_order(self, tmp_path: Path) -> None:
        """B12: those that are open and have a time; an answered one expires no more."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk)
            for name, expires_ms in (("a", 30), ("b", 20), ("c", None), ("d", 10)):
                asked = c.AskQuestion(
                    key=chat.key,
                    question_key=name,
                    turn_id=TURN,
                    question="may I?",
                    expires_ms=expires_ms,
                    at_ms=5,
                )
                desk.done(bare(asked))
            answered = c.AnswerQuestion(key=chat.key, question_key="d", state="expired", at_ms=11)
            desk.done(bare(answered))
            with desk.reading() as reader:
                assert [q.question_key for q in reader.expired_questions(30)] == ["b", "a"]
                assert [q.question_key for q in reader.expired_questions(29)] == ["b"]
                assert len(reader.questions(open_only=True)) == 3
                assert [reader.next_due_ms(now) for now in (0, 19, 20, 30)] == [20, 20, 30, None]

    def test_a_wait_for_a_person_is_no_try(self, tmp_path: Path) -> None:
        """A7: an attempt that an answer began does not count against a turn."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk)
            desk.done(
                bare(c.SuspendTurn(turn_id=TURN, attempt=1, at_ms=3)), bare(_start(chat, 2, 4))
            )
            desk.done(bare(_start(chat, 3, 5)))
            with desk.reading() as reader:
                turn = reader.turn(TURN)
            assert turn is not None
            assert (turn.attempt, turn.waits, turn.tries) == (3, 1, 2)

    def test_a_timer_fires_or_is_cancelled_once(self, tmp_path: Path) -> None:
        """A7: firing and accepting its inbound message are one unit."""
        with self.desk(tmp_path) as desk:
            chat = with_turn(desk, started=False)
            timers = [
                c.SetTimer(
                    timer_id=name,
                    key=chat.key,
                    source="chat",
                    due_ms=due_ms,
                    inbound=Inbound(text="later", meta={"n": 1.0}),
                    at_ms=5,
                )
                for name, due_ms in (("b", 20), ("a", 20), ("c", 10))
            ]
            desk.done(*map(bare, timers))
            desk.again(*map(bare, timers))
            other = Inbound(text="later", meta={"n": 1})
            desk.refused("conflict", bare(replace(timers[0], inbound=other)))
            with desk.reading() as reader:
                assert [t.id for t in reader.timers()] == ["c", "a", "b"]
                assert [t.id for t in reader.timers(19)] == ["c"]
            fired = c.ResolveTimer(timer_id="c", resolution="fired", at_ms=11)
            unit = bare(fired, replace(_accept(chat), inbound_id="timer:c"))
            desk.done(unit)
            desk.again(unit)
            desk.refused("conflict", bare(replace(fired, resolution="cancelled")))
            desk.refused("missing", bare(replace(fired, timer_id="nothing")))
            with desk.reading() as reader:
                assert [t.id for t in reader.timers()] == ["a", "b"]

    # Blobs -----------------------------------------------------------------------------------

    def test_a_blob_is_whole_before_it_is_referred_to(self, tmp_path: Path) -> None:
        """INV-5: pieces in any order, sealed when all are there, dropped when nothing needs it."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk)
            pieces = [bytes([number]) * 1000 for number in range(3)]
            blob_id = BlobId(sha256(b"".join(pieces)).hexdigest())
            puts = [
                bare(c.PutChunk(blob_id=blob_id, index=index, data=data))
                for index, data in enumerate(pieces)
            ]
            seal = c.SealBlob(
                blob_id=blob_id, size_bytes=3000, chunk_count=3, media_type="a/b", at_ms=1
            )
            desk.refused("missing", bare(seal))
            desk.done(puts[2], puts[0])
            desk.refused("missing", bare(seal))
            guard = chat.guard()
            used = chat.guarded(guard, chat.append(chat.draft("user", "see", blobs=(blob_id,))))
            desk.done(puts[1])
            desk.refused("missing", used)
            desk.refused("missing", bare(replace(seal, size_bytes=2999)))
            desk.done(bare(seal), used)
            desk.again(*puts, bare(seal), used)
            desk.refused("conflict", bare(replace(seal, chunk_count=2)))
            desk.refused("conflict", bare(c.PutChunk(blob_id=blob_id, index=3, data=b"more")))
            dropped = bare(c.DropBlob(blob_id=blob_id))
            desk.refused("conflict", dropped)
            desk.done(bare(c.EraseMessages(session_id=chat.session_id, seqs=(Seq(0),))))
            desk.done(dropped)
            desk.again(dropped)
            with desk.reading() as reader:
                assert reader.blob_chunk(blob_id, 0) is None

    def test_pieces_are_numbered_from_zero(self, tmp_path: Path) -> None:
        """INV-20: a piece at a place that nobody reads does not count."""
        with self.desk(tmp_path) as desk:
            blob_id = BlobId("b" * 64)
            for index in (-1, 1):
                desk.done(bare(c.PutChunk(blob_id=blob_id, index=index, data=b"x")))
            seal = c.SealBlob(blob_id=blob_id, size_bytes=2, chunk_count=2, media_type="", at_ms=1)
            desk.refused("missing", bare(seal))

    def test_a_carried_message_keeps_its_blob_alive(self, tmp_path: Path) -> None:
        """B1: a copy refers to the blob as its original does."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "a long message that is worth a summary")
            blob_id = BlobId("b" * 64)
            put = c.PutChunk(blob_id=blob_id, index=0, data=b"x")
            seal = c.SealBlob(blob_id=blob_id, size_bytes=1, chunk_count=1, media_type="", at_ms=1)
            desk.done(bare(put, seal))
            draft = chat.draft("user", "see", blobs=(blob_id,))
            desk.done(chat.guarded(chat.guard(), chat.append(draft)))
            parent = chat.session_id
            desk.done(chat.guarded(chat.guard(), chat.rotate(1)))
            desk.done(bare(c.DeleteSession(session_id=parent, at_ms=9)))
            desk.refused("conflict", bare(c.DropBlob(blob_id=blob_id)))


def _accept(chat: Conversation) -> c.AcceptInbound:
    return c.AcceptInbound(
        source="chat",
        inbound_id="1",
        key=chat.key,
        turn_id=TURN,
        disposition="queued",
        digest="digest",
        at_ms=5,
        body=Inbound(text="hello", parts=None, reply_to={"id": 1}, meta={"n": [1.0]}),
        reply_to={"id": 1},
    )


def _begin(attempt: int = 1) -> c.BeginEffect:
    return c.BeginEffect(
        turn_id=TURN,
        effect_key="mail",
        effect_id=uid_of("effect"),
        tool="mail",
        digest="digest",
        attempt=attempt,
        at_ms=attempt * 10,
    )


def _finish(
    attempt: int, state: Any, at_ms: int, result: dict[str, Any] | None = None
) -> c.FinishEffect:
    return c.FinishEffect(
        turn_id=TURN, effect_key="mail", attempt=attempt, state=state, at_ms=at_ms, result=result
    )


def _post(chat: Conversation, **changes: Any) -> c.PostDelivery:
    posted = c.PostDelivery(
        delivery_id="d1",
        key=chat.key,
        source="chat",
        target={"chat": 42},
        body={"text": "hello", "n": 1.0},
        at_ms=5,
        session_id=chat.session_id,
        message_uid=uid_of("message"),
    )
    return replace(posted, **changes)


def _mark(attempt: int, state: Any, at_ms: int, **fields: Any) -> c.MarkDelivery:
    return c.MarkDelivery(delivery_id="d1", attempt=attempt, state=state, at_ms=at_ms, **fields)


def _delivery(desk: Desk) -> Delivery:
    with desk.reading() as reader:
        delivery = reader.delivery("d1")
    assert delivery is not None
    return delivery
