"""The conformance suite: what every engine must do, whichever database is behind it.

To check an engine, subclass `EngineConformance` in a pytest module and say how it is opened; all
tests are inherited. Each runs the engine beside the model (`Desk`), so that a scenario proves more
than it asserts: after every batch all read views agree with the specification.

It needs no pytest: the tests are plain methods that get a folder. It must never reach behind the
`Engine` and `Reader` protocols.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from msgspec.structs import replace

from ....storage import commands as c
from ....storage.identity import Incarnation, Seq, SessionId, SessionKey
from ....storage.records import Draft
from ....storage.units import Durable, Refused, Unit
from ..conversation import Conversation, uid_of
from ..workloads import WORKLOADS
from .agreement import names_in, views_of
from .cleanup import CleanupConformance
from .desk import bare, outcome_of
from .sessions import SessionConformance
from .transcripts import TranscriptConformance
from .variants import VARIANTS
from .work import WorkConformance

if TYPE_CHECKING:
    from pathlib import Path

# What slips past anybody who forgets to check it: none of it can be bound or stored as it is.
POISONS: tuple[dict[str, Any], ...] = (
    {"text": "half \ud800 of a pair"},
    {"user": "\udfff"},
    {"meta": {"text": "\ud800"}},
    {"created_ms": 2**63},
    {"created_ms": -(2**63) - 1},
    {"uid": "abcd"},
    {"uid": "no digits"},
    {"text": b"bytes"},
    {"role": None},
)


class EngineConformance(
    SessionConformance, TranscriptConformance, WorkConformance, CleanupConformance
):
    """All of it. Override `open_engine`, and `reopens` if the engine keeps nothing."""

    # Commands and units ----------------------------------------------------------------------

    def test_the_workloads_cover_every_command(self) -> None:
        """What is not in a workload would be in no test of this class."""
        covered = {kind for load in WORKLOADS.values() for kind in load.kinds}
        assert covered == set(get_args(c.AnyCommand))

    def test_a_unit_sent_again_changes_nothing(self, tmp_path: Path) -> None:
        """A8 and INV-1: every kind of command, applied once and sent again right away."""
        for number, load in enumerate(WORKLOADS.values()):
            with self.desk(tmp_path / str(number)) as desk:
                desk.done(*load.preparation)
                for batch in load.batches:
                    desk.done(*batch.units)
                    desk.again(*batch.units)

    def test_a_whole_history_sent_again_changes_nothing(self, tmp_path: Path) -> None:
        """A8: the ledger is replayed from its start, in order, and twice."""
        for number, load in enumerate(WORKLOADS.values()):
            with self.desk(tmp_path / str(number)) as desk:
                units = [*load.preparation, *(u for batch in load.batches for u in batch.units)]
                desk.send(*units)
                before = desk.views()
                for unit in units * 2:
                    desk.send(unit)
                assert desk.views() == before
                desk.agree()

    def test_the_same_name_with_other_content_is_refused(self, tmp_path: Path) -> None:
        """A7, A8: a natural key is never taken twice for different things."""
        assert set(VARIANTS) == set(get_args(c.AnyCommand))
        for number, (kind, (vary, expected)) in enumerate(VARIANTS.items()):
            load = next(load for load in WORKLOADS.values() if kind in load.kinds)
            with self.desk(tmp_path / str(number)) as desk:
                desk.send(*load.preparation)
                found: list[c.AnyCommand] = []
                for batch in load.batches:
                    desk.send(*batch.units)
                    found = [x for u in batch.units for x in u.commands if type(x) is kind]
                    if found:
                        break
                variant = bare(vary(found[0]))
                names_in([variant], desk.names)
                before = desk.views()
                (receipt,) = desk.send(variant)
                assert (kind.__name__, outcome_of(receipt)) == (kind.__name__, expected)
                assert desk.views() == before, kind.__name__

    def test_a_unit_is_applied_whole_or_not_at_all(self, tmp_path: Path) -> None:
        """INV-5: the last of three commands is refused, and nothing is left of the first two."""
        with self.desk(tmp_path) as desk:
            chat = Conversation("ann")
            desk.done(*chat.opening())
            guard = chat.guard()
            unit = chat.guarded(
                guard,
                chat.append(chat.draft("user", "hello")),
                chat.title("A title"),
                chat.title("Another title", replaces=7),
            )
            desk.refused("stale", unit)
            assert desk.session(chat.session_id).next_seq == 0

    def test_commands_of_a_unit_see_those_before_them(self, tmp_path: Path) -> None:
        """INV-5: an inbound message that is accepted and taken in one unit is taken."""
        with self.desk(tmp_path) as desk:
            load = WORKLOADS["accept_inbound"]
            desk.apply(*load.preparation)
            (unit,) = load.batches[0].units
            (accepted,) = [x for x in unit.commands if isinstance(x, c.AcceptInbound)]
            taken = c.TakeInbound(
                source=accepted.source, inbound_id=accepted.inbound_id, turn_id=accepted.turn_id
            )
            desk.done(replace(unit, commands=(*unit.commands, taken)))
            with desk.reading() as reader:
                entry = reader.inbound(accepted.source, accepted.inbound_id)
            assert entry is not None
            assert entry.body is None

    def test_a_receipt_tells_where_the_session_stands(self, tmp_path: Path) -> None:
        """H4: heads name the next seq and the revision, for a new unit and for one sent again."""
        with self.desk(tmp_path) as desk:
            chat = Conversation("ann")
            desk.done(*chat.opening())
            unit = chat.guarded(chat.guard(), chat.append(chat.draft("user", "hello")))
            for receipt in (*desk.done(unit), *desk.engine_receipts(unit)):
                assert isinstance(receipt, Durable)
                (head,) = receipt.heads
                assert (head.session_id, head.next_seq, head.revision) == (chat.session_id, 1, 1)

    # Guards ----------------------------------------------------------------------------------

    def test_guards_refuse_with_their_reason(self, tmp_path: Path) -> None:
        """INV-7 and INV-12: incarnation, end, route, base seq, revision, in this order."""
        with self.desk(tmp_path) as desk:
            chat = Conversation("ann")
            desk.done(*chat.opening())
            guard = chat.guard()
            append = chat.append(chat.draft("user", "hello"))
            wrong = {
                "stale_incarnation": replace(guard, incarnation=Incarnation(9)),
                "route_conflict": replace(guard, session_id=SessionId("other")),
                "broken_chain": replace(guard, base_seq=Seq(5)),
                "stale_revision": replace(guard, revision=5),
            }
            for reason, bad in wrong.items():
                desk.refused(reason, Unit((append,), (bad,)))  # type: ignore[arg-type]
            desk.refused("stale_incarnation", Unit((append,), (guard, wrong["stale_incarnation"])))
            desk.done(Unit((append,), (guard,)))
            # What is stored already asks for no permission any more.
            for bad in wrong.values():
                desk.again(Unit((append,), (bad,)))
            desk.done(chat.unit(chat.end()))
            late = Unit((chat.append(chat.draft("user", "late")),), (chat.guard(),))
            desk.refused("ended", late)

    def test_a_predecessor_is_refused(self, tmp_path: Path) -> None:
        """INV-12: after a new incarnation, nothing of the old one is applied."""
        with self.desk(tmp_path) as desk:
            chat = Conversation("ann")
            desk.done(*chat.opening())
            taken = c.OpenIncarnation(key=chat.key, incarnation=Incarnation(2**33))
            old = chat.guarded(chat.guard(), chat.append(chat.draft("user", "late")))
            desk.done(bare(taken))
            desk.again(bare(taken))
            desk.refused("stale_incarnation", old)
            desk.refused("stale_incarnation", chat.unit(chat.title("late")))
            lower = c.OpenIncarnation(key=chat.key, incarnation=Incarnation(1))
            desk.refused("stale_incarnation", bare(lower))

    def test_one_refusal_refuses_all_later_units_of_the_session(self, tmp_path: Path) -> None:
        """INV-4: no gap and no torn order, in the same batch and in later ones."""
        with self.desk(tmp_path) as desk:
            chat, other = Conversation("ann"), Conversation("bob")
            desk.done(*chat.opening(), *other.opening())
            units = [
                chat.guarded(chat.guard(), chat.append(chat.draft("user", f"message {number}")))
                for number in range(6)
            ]
            refused = replace(units[1], guards=(replace(units[1].guards[0], revision=77),))
            alive = other.guarded(other.guard(), other.append(other.draft("user", "hello")))
            batch = [units[0], refused, units[2], alive, units[3]]
            outcomes = [outcome_of(receipt) for receipt in desk.apply(*batch)]
            expected = ["durable", "stale_revision", "broken_chain", "durable", "broken_chain"]
            assert outcomes == expected
            for unit in units[4:]:
                desk.refused("broken_chain", unit)
            desk.done(*units[1:])  # from the first refused one on, in order, they fit again
            assert desk.texts(chat.session_id) == [f"message {number}" for number in range(6)]

    def test_a_foreign_row_in_the_place_of_a_refused_one_refuses_what_follows(
        self, tmp_path: Path
    ) -> None:
        """INV-4: by seq alone the next unit would fit; it was written behind another row."""
        with self.desk(tmp_path) as desk:
            chat = Conversation("ann")
            desk.done(*chat.opening())
            first = chat.draft("user", "hello")
            desk.done(chat.guarded(chat.guard(), chat.append(first)))
            foreign = chat.draft("system", "somebody else's")
            guard = replace(chat.guard(), behind=first.uid)
            append = chat.append(foreign)
            own = replace(append, messages=(chat.draft("assistant", "ours"),))
            desk.done(Unit((append,), (guard,)))
            desk.refused("broken_chain", Unit((own,), (guard,)))
            fits = replace(chat.guard(), revision=None)
            end = chat.end()
            ours = own.messages[0].uid
            desk.refused("broken_chain", Unit((end,), (replace(fits, behind=ours),)))
            desk.done(Unit((end,), (replace(fits, behind=foreign.uid),)))
            empty = Conversation("bob")
            desk.done(*empty.opening())
            bad = replace(empty.guard(), behind=ours)
            desk.refused("broken_chain", Unit((empty.append(empty.draft("user", "x")),), (bad,)))

    def test_a_stale_value_is_refused_and_never_applied(self, tmp_path: Path) -> None:
        """INV-1: a value that was replaced does not come back with a late command."""
        with self.desk(tmp_path) as desk:
            chat = Conversation("ann")
            desk.done(*chat.opening())
            first, second = chat.title("first"), chat.title("second", replaces=1)
            desk.done(chat.unit(first), chat.unit(second))
            desk.again(chat.unit(first))
            desk.refused("stale", chat.unit(chat.title("late")))
            desk.refused("stale", chat.unit(chat.title("early", replaces=9)))
            assert desk.session(chat.session_id).title == "second"

    # Batches ---------------------------------------------------------------------------------

    def test_a_poisoned_unit_fails_alone(self, tmp_path: Path) -> None:
        """INV-13: ninety-nine others in the batch are durable, and the engine goes on."""
        for number, poison in enumerate(POISONS):
            with self.desk(tmp_path / str(number)) as desk:
                chats = [Conversation(f"chat-{index}") for index in range(100)]
                desk.engine_receipts(*(unit for chat in chats for unit in chat.opening()))
                units = [
                    chat.guarded(chat.guard(), chat.append(chat.draft("user", "hello")))
                    for chat in chats
                ]
                units[50] = _poisoned(units[50], poison)
                receipts = desk.engine_receipts(*units)
                assert [outcome_of(r) for r in receipts].count("durable") == 99, poison
                assert isinstance(receipts[50], Refused)
                assert receipts[50].reason == "invalid"
                for index, chat in enumerate(chats):
                    assert len(desk.rows(chat.session_id)) == (index != 50)
                good = [
                    chat.guarded(chat.guard(), chat.append(chat.draft("user", "on")))
                    for chat in chats
                    if chat is not chats[50]
                ]
                assert {outcome_of(r) for r in desk.engine_receipts(*good)} == {"durable"}

    def test_a_message_is_stored_once_in_all_sessions(self, tmp_path: Path) -> None:
        """A3: a uid has one original; a second one is a conflict, alone, in the same batch too."""
        with self.desk(tmp_path) as desk:
            ann, bob = Conversation("ann"), Conversation("bob")
            desk.done(*ann.opening(), *bob.opening())
            draft = ann.draft("user", "hello")
            first = ann.guarded(ann.guard(), ann.append(draft))
            stolen = bob.guarded(bob.guard(), bob.append(draft))
            outcomes = [outcome_of(receipt) for receipt in desk.apply(first, stolen)]
            assert outcomes == ["durable", "conflict"]
            desk.refused("conflict", stolen)
            twice = ann.guarded(ann.guard(), ann.append(draft))
            desk.refused("conflict", twice)

    def test_equal_texts_are_different_messages(self, tmp_path: Path) -> None:
        """A3: identity is the uid, never the text."""
        with self.desk(tmp_path) as desk:
            chat = Conversation("ann")
            desk.done(*chat.opening())
            for _ in range(3):
                desk.done(chat.guarded(chat.guard(), chat.append(chat.draft("user", "same"))))
            assert desk.texts(chat.session_id) == ["same"] * 3

    def test_nothing_is_visible_before_the_commit(self, tmp_path: Path) -> None:
        """INV-3: a staged batch is nobody's business."""
        with self.desk(tmp_path) as desk:
            chat = Conversation("ann")
            units = chat.opening()
            receipts = desk.engine.stage(units)
            if self.reads_while_staged:
                with desk.engine.reading() as reader:
                    assert reader.route(chat.key) is None
            desk.engine.commit()
            with desk.engine.reading() as reader:
                assert reader.route(chat.key) is not None
            assert {outcome_of(receipt) for receipt in receipts} == {"durable"}

    def test_every_batch_is_a_commit_of_its_own(self, tmp_path: Path) -> None:
        """A8: commit_seq moves by one with each batch, also one that finds everything stored."""
        with self.desk(tmp_path) as desk:
            units = Conversation("ann").opening()
            seen = [desk.engine_receipts(*units) for _ in range(3)]
            numbers = [{r.commit_seq for r in batch if isinstance(r, Durable)} for batch in seen]
            first = min(numbers[0])
            assert numbers == [{first}, {first + 1}, {first + 2}]
            assert desk.engine.statistics().commit_seq == first + 2

    def test_only_a_move_writes_a_route(self, tmp_path: Path) -> None:
        """B4: ordinary turns count no route write, a careful batch counts none twice."""
        with self.desk(tmp_path) as desk:
            chat = Conversation("ann")
            desk.done(*chat.opening())
            assert desk.engine.statistics().route_writes == 1
            desk.done(*chat.exchange("first"), *chat.exchange("second"))
            assert desk.engine.statistics().route_writes == 1
            rotated = chat.guarded(chat.guard(), chat.rotate())
            poisoned = _poisoned(
                chat.guarded(chat.guard(), chat.append(chat.draft("user", "x"))), POISONS[0]
            )
            desk.engine_receipts(rotated, poisoned)
            assert desk.engine.statistics().route_writes == 2

    # Opening ---------------------------------------------------------------------------------

    def test_the_epoch_moves_with_every_opening(self, tmp_path: Path) -> None:
        """INV-12: opening and reopening for writing are fences."""
        epochs: list[int] = []
        for _ in range(3 if self.reopens else 1):
            with self.desk(tmp_path) as desk:
                epochs.append(desk.engine.epoch)
                desk.engine.reopen()
                epochs.append(desk.engine.epoch)
        assert epochs == list(range(1, len(epochs) + 1))

    def test_a_staged_batch_is_forgotten_by_reopening(self, tmp_path: Path) -> None:
        """INV-11: after `reopen` the same units are sent again and stored once."""
        with self.desk(tmp_path) as desk:
            chat = Conversation("ann")
            units = [*chat.opening(), *chat.exchange("first")]
            desk.engine.stage(units)
            desk.engine.reopen()
            desk.done(*units)
            assert len(desk.rows(chat.session_id)) == 4

    def test_everything_is_there_after_opening_again(self, tmp_path: Path) -> None:
        """INV-2: what was acknowledged is read by the next process."""
        if not self.reopens:
            return
        for number, load in enumerate(WORKLOADS.values()):
            folder = tmp_path / str(number)
            units = [*load.preparation, *(u for batch in load.batches for u in batch.units)]
            with self.desk(folder) as desk:
                desk.done(*units)
                before = desk.views()
            names = names_in(units)
            with self.desk(folder) as desk, desk.reading() as reader:
                assert views_of(reader, names) == before

    def test_closing_twice_is_harmless(self, tmp_path: Path) -> None:
        """I3: the second close has nothing to do."""
        with self.desk(tmp_path) as desk:
            desk.engine.close()
            desk.engine.close()

    def test_a_new_database_has_its_marks(self, tmp_path: Path) -> None:
        """G1: a new database has no orphans from before its time, and says so."""
        with self.desk(tmp_path) as desk, desk.reading() as reader:
            assert reader.mark("finalize_orphaned_rotations") is not None

    def test_nobody_is_there_at_first(self, tmp_path: Path) -> None:
        """INV-17: views of what does not exist answer, they do not fail."""
        with self.desk(tmp_path) as desk:
            chat = Conversation("ann")
            names_in([*chat.opening(), *chat.exchange("first")], desk.names)
            desk.agree()
            with desk.reading() as reader:
                assert reader.session_of_key(SessionKey("nobody")) is None
                assert reader.revision(SessionId("nothing")) == 0
                assert reader.seqs(SessionId("nothing"), [uid_of("x")]) == {}
                assert reader.message(uid_of("x")) is None


def _poisoned(unit: Unit, poison: dict[str, Any]) -> Unit:
    """The same unit with one value that can't be stored; the types are broken on purpose."""
    (append,) = unit.commands
    assert isinstance(append, c.AppendMessages)
    given = {name: getattr(append.messages[0], name) for name in Draft.__struct_fields__}
    draft = Draft(**{**given, **poison})
    return replace(unit, commands=(replace(append, messages=(draft,)),))
