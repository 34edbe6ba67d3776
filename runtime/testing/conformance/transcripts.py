"""Conformance of transcripts: append, rotate, compact, rewind, branch, erase; and round trips."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from msgspec.structs import replace

from ....storage import commands as c
from ....storage.edge import check_unit
from ....storage.identity import Seq, SessionId, TurnId
from ....storage.records import Draft, Role, Tokens, ToolCall
from ....storage.units import Unit
from ..conversation import Conversation, uid_of
from ..model.transcripts import as_given
from .desk import UnderTest, bare
from .sessions import opened

if TYPE_CHECKING:
    from pathlib import Path

    from .desk import Desk

LONG = "a long message that is worth a summary " * 3

HOSTILE = (
    "",
    " ",
    "\0",
    "a\0b\0",
    "\ufeffmark",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "\u05e9\u05dc\u05d5\u05dd \u202eabc\u202c \u0645\u0631\u062d\u0628\u0627",
    "e\u0301 \u1100\u1161\u11a8 Z̷̧͑a",
    "\U0010ffff\uffff\ufffe",
    "\r\n\t\x0b\x1b[31m\x7f\x85\u2028\u2029",
    "'; DROP TABLE messages; -- \" \\ % _ *",
    '{"not": "parsed"}',
    "x" * 1024 * 1024,
    "é" * (512 * 1024),
)


class TranscriptConformance(UnderTest):
    """What must hold for transcripts."""

    # Append ----------------------------------------------------------------------------------

    def test_each_change_moves_the_revision_by_one(self, tmp_path: Path) -> None:
        """H4: append, compaction, rewind, restore, erasure; however many rows they touch."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", *([LONG] * 3))
            session_id = chat.session_id
            drafts = [chat.draft("user", LONG) for _ in range(5)]
            desk.done(chat.guarded(chat.guard(), chat.append(*drafts)))
            assert desk.session(session_id).revision == 4
            guarded: list[c.AnyCommand] = [
                _compact(chat, 0, 3, base=8),
                c.Rewind(session_id=session_id, to_seq=Seq(5), replaces=5, at_ms=chat.at()),
                c.Restore(session_id=session_id, replaces=6, at_ms=chat.at()),
                c.EraseMessages(session_id=session_id, seqs=(Seq(4), Seq(5))),
            ]
            for revision, command in enumerate(guarded, start=5):
                desk.done(bare(command))
                desk.again(bare(command))
                assert desk.session(session_id).revision == revision
            assert (desk.session(session_id).next_seq, desk.session(session_id).revision) == (9, 8)

    def test_counters_move_with_their_rows(self, tmp_path: Path) -> None:
        """INV-1: they are checked against a count of the rows after each batch."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk)
            calls = tuple(ToolCall(id=str(i), name="look") for i in range(3))
            drafts = [
                chat.draft("user", "hello"),
                chat.draft("assistant", None, tool_calls=calls),
                chat.draft("tool", "found", tool_call_id="0"),
            ]
            desk.done(chat.guarded(chat.guard(), chat.append(*drafts)))
            session = desk.session(chat.session_id)
            assert (session.message_count, session.active_count) == (3, 3)
            assert session.tool_call_count == 3
            assert session.last_ms == drafts[-1].created_ms
            desk.done(bare(c.EraseMessages(session_id=chat.session_id, seqs=(Seq(1),))))
            session = desk.session(chat.session_id)
            assert (session.message_count, session.tool_call_count) == (3, 0)

    def test_a_message_of_an_unknown_turn_or_blob_is_refused(self, tmp_path: Path) -> None:
        """INV-5: a reference to something that is not stored refuses the whole unit."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk)
            guard = chat.guard()
            turn_id = TurnId(uid_of("nothing"))
            unit = chat.guarded(guard, chat.append(chat.draft("user", "hi"), turn_id=turn_id))
            desk.refused("missing", unit)
            chat.next_seq, chat.revision = 0, 0
            drafts = [chat.draft("user", "hi"), chat.draft("user", "look", blobs=("nothing",))]
            desk.refused("missing", chat.guarded(guard, chat.append(*drafts)))

    # Rotation --------------------------------------------------------------------------------

    def test_a_rotation_is_everything_at_once(self, tmp_path: Path) -> None:
        """B1, B9, E4, INV-6: end, child, summary, carried rows in order, title, route, turn."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", LONG, LONG)
            desk.done(chat.unit(chat.title("Chat")))
            turn_id, running = _running_turn(chat)
            desk.done(*running)
            parent = chat.session_id
            unit = chat.guarded(chat.guard(), chat.rotate(1, 2, 3, turn_id=turn_id))
            desk.done(unit)
            desk.again(unit)
            old, new = desk.session(parent), desk.session(chat.session_id)
            assert (old.end_kind, old.end_reason) == ("rotation", "compression")
            assert (new.parent_id, new.edge, new.title) == (parent, "rotation", "Chat #2")
            assert (old.title, new.user, new.meta) == ("Chat", old.user, old.meta)
            rows = desk.rows(chat.session_id)
            assert [m.seq for m in rows] == [0, 1, 2, 3]
            assert [m.carried for m in rows] == [False, True, True, True]
            assert [m.summary for m in rows] == [True, False, False, False]
            originals = desk.rows(parent)
            assert [m.uid for m in rows[1:]] == [m.uid for m in originals[1:]]
            assert new.message_count == 0
            with desk.reading() as reader:
                turn = reader.turn(turn_id)
                current = reader.session_of_key(chat.key)
            assert turn is not None
            assert turn.session_id == chat.session_id
            assert current == new

    def test_a_rotation_moves_only_the_turn_that_runs_there(self, tmp_path: Path) -> None:
        """B9: a turn that has not begun stays queued, without a session."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", LONG)
            turn_id = TurnId(uid_of("queued"))
            desk.done(bare(c.OpenTurn(turn_id=turn_id, key=chat.key, at_ms=chat.at())))
            desk.done(chat.guarded(chat.guard(), chat.rotate(turn_id=turn_id)))
            with desk.reading() as reader:
                turn = reader.turn(turn_id)
            assert turn is not None
            assert (turn.state, turn.session_id) == ("queued", None)

    def test_nothing_is_written_behind_a_rotation(self, tmp_path: Path) -> None:
        """B8, INV-7: a late write is refused, and the refusal says where the conversation went."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", LONG)
            guard = chat.guard()
            late = chat.guarded(guard, chat.append(chat.draft("user", "late")))
            chat.next_seq, chat.revision = 1, 1
            rotated = chat.guarded(chat.guard(), chat.rotate())
            desk.done(rotated)
            refusal = desk.refused("ended", late)
            assert chat.session_id in str(refusal.stored)

    def test_a_session_is_rotated_once(self, tmp_path: Path) -> None:
        """B7: a parent has at most one child by rotation, also in one batch."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", LONG)
            guard = chat.guard()
            first = chat.rotate()
            draft = chat.draft("user", "other summary")
            other = replace(first, child_id=SessionId("other"), summary=(draft,))
            receipts = desk.apply(Unit((first,), (guard,)), Unit((other,), (guard,)))
            assert [type(r).__name__ for r in receipts] == ["Durable", "Refused"]
            desk.refused("ended", Unit((other,), (guard,)))

    def test_a_rotation_needs_its_whole_chain(self, tmp_path: Path) -> None:
        """B2, A10: wrong base, taken child, stray or missing carried rows, another key."""
        with self.desk(tmp_path) as desk:
            chat, bob = opened(desk, "ann", LONG, LONG), opened(desk, "bob", LONG)
            turn_id, running = _running_turn(chat)
            desk.done(*running)
            guard = chat.guard()
            good = chat.rotate(2, 3, turn_id=turn_id)
            desk.refused("broken_chain", bare(replace(good, parent_base_seq=Seq(1))))
            desk.refused("route_conflict", bare(replace(good, child_id=bob.session_id)))
            desk.refused("route_conflict", bare(replace(good, key=bob.key)))
            desk.refused("invalid", bare(replace(good, carried=(Seq(2), Seq(3), Seq(77)))))
            desk.refused("invalid", bare(replace(good, carried=(Seq(2),))))
            desk.refused("missing", bare(replace(good, turn_id=TurnId(uid_of("nothing")))))
            desk.refused("stale", bare(replace(good, replaces=9)))
            desk.done(Unit((good,), (guard,)))

    def test_a_rotation_that_gains_nothing_is_refused(self, tmp_path: Path) -> None:
        """B11: unless a person forces it; the running turn counts on neither side."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "short")
            turn_id, running = _running_turn(chat)
            desk.done(*running)
            guard = chat.guard()
            rotated = replace(chat.rotate(1, 2, turn_id=turn_id))
            refusal = desk.refused("no_gain", Unit((rotated,), (guard,)))
            assert refusal.stored != refusal.given
            more = tuple(chat.draft("user", "x") for _ in range(3))
            desk.refused("no_gain", Unit((replace(rotated, summary=more),), (guard,)))
            desk.done(Unit((replace(rotated, force=True),), (guard,)))

    def test_a_child_takes_the_next_free_title(self, tmp_path: Path) -> None:
        """E4: a clash never refuses a rotation, and a long title is cut for its number."""
        with self.desk(tmp_path) as desk:
            chat, bob = opened(desk, "ann", LONG), opened(desk, "bob", LONG)
            desk.done(chat.unit(chat.title("Chat #9")), bob.unit(bob.title("Chat #10")))
            desk.done(chat.guarded(chat.guard(), chat.rotate()))
            assert desk.session(chat.session_id).title == "Chat #11"
            eve = opened(desk, "eve", LONG)
            desk.done(eve.unit(eve.title("x" * 100)))
            desk.done(eve.guarded(eve.guard(), eve.rotate()))
            assert desk.session(eve.session_id).title == "x" * 97 + " #2"
            with desk.reading() as reader:
                assert reader.find_session("x" * 100).id == eve.session_id

    # Compaction ------------------------------------------------------------------------------

    def test_a_summary_stands_where_its_messages_stood(self, tmp_path: Path) -> None:
        """B10: seqs never change; inactive rows are shown on request, each once (A9)."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", *(f"{n} {LONG}" for n in range(6)))
            command = _compact(chat, 1, 3)
            unit = chat.guarded(chat.guard(), command)
            desk.done(unit)
            desk.again(unit)
            assert [m.seq for m in desk.rows(chat.session_id)] == [0, 6, 4, 5]
            rows = desk.rows(chat.session_id, everything=True)
            assert [m.seq for m in rows] == [0, 1, 2, 3, 6, 4, 5]
            assert [m.state for m in rows] == ["active", *["summarised"] * 3, *["active"] * 3]
            assert {m.summarised_by for m in rows[1:4]} == {6}
            assert rows[4].covers == (1, 3)
            assert desk.session(chat.session_id).compaction_count == 1

    def test_a_compaction_that_can_not_be_is_refused(self, tmp_path: Path) -> None:
        """B10, B11, A10: no gain, nothing in the range, a range beyond the end, a running turn."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "short", LONG, LONG)
            turn_id, running = _running_turn(chat)
            desk.done(*running)
            base = chat.next_seq
            good = _compact(chat, 1, 2)
            desk.refused("broken_chain", bare(replace(good, base_seq=Seq(0))))
            desk.refused("no_gain", bare(replace(good, first_seq=Seq(0), last_seq=Seq(0))))
            for first, last in ((2, 1), (-1, 2), (1, base), (1, 99)):
                desk.refused(
                    "invalid", bare(replace(good, first_seq=Seq(first), last_seq=Seq(last)))
                )
            cut = replace(good, last_seq=Seq(base - 1), turn_id=turn_id)
            desk.refused("invalid", bare(cut))
            desk.done(bare(good))
            empty = replace(good, base_seq=Seq(base + 1), summary=chat.draft("user", "x"))
            desk.refused("invalid", bare(replace(empty, last_seq=Seq(1))))
            forced = replace(
                empty,
                first_seq=Seq(0),
                last_seq=Seq(0),
                force=True,
                summary=chat.draft("user", LONG),
            )
            desk.done(bare(forced))

    def test_a_rewind_into_a_summary_brings_its_messages_back(self, tmp_path: Path) -> None:
        """B10: rows before the point are active again, the summary is gone; restore undoes it."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", *(f"{n} {LONG}" for n in range(6)))
            desk.done(bare(_compact(chat, 1, 4)))
            session_id = chat.session_id
            before = desk.rows(session_id, everything=True)
            rewound = c.Rewind(session_id=session_id, to_seq=Seq(3), replaces=7, at_ms=chat.at())
            desk.done(bare(rewound))
            assert [m.seq for m in desk.rows(session_id)] == [0, 1, 2]
            restored = c.Restore(session_id=session_id, replaces=8, at_ms=chat.at())
            desk.done(bare(restored))
            desk.again(bare(rewound), bare(restored))
            assert desk.rows(session_id, everything=True) == before

    def test_nested_summaries_are_rewound_together(self, tmp_path: Path) -> None:
        """B10: a summary of a summary; a point inside the inner one brings back the inner rows."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", *(f"{n} {LONG}" for n in range(8)))
            session_id = chat.session_id
            desk.done(bare(_compact(chat, 1, 3)))
            desk.done(bare(_compact(chat, 0, 5, base=9, text="outer")))
            assert [m.seq for m in desk.rows(session_id)] == [9, 6, 7]
            before = desk.rows(session_id, everything=True)
            inside_outer = c.Rewind(session_id=session_id, to_seq=Seq(5), replaces=10, at_ms=1)
            desk.done(bare(inside_outer))
            assert [m.seq for m in desk.rows(session_id)] == [0, 8, 4]
            desk.done(bare(c.Restore(session_id=session_id, replaces=11, at_ms=2)))
            assert desk.rows(session_id, everything=True) == before
            inside_inner = c.Rewind(session_id=session_id, to_seq=Seq(2), replaces=12, at_ms=3)
            desk.done(bare(inside_inner))
            assert [m.seq for m in desk.rows(session_id)] == [0, 1]
            desk.done(bare(c.Restore(session_id=session_id, replaces=13, at_ms=4)))
            assert desk.rows(session_id, everything=True) == before

    # Rewind and restore ----------------------------------------------------------------------

    def test_a_rewind_closes_open_tool_calls(self, tmp_path: Path) -> None:
        """A10: the result that says so is stored with the rewind, and leaves with its undoing."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "do it")
            call = ToolCall(id="1", name="look")
            drafts = [
                chat.draft("assistant", None, tool_calls=(call,)),
                chat.draft("tool", "found", tool_call_id="1"),
            ]
            desk.done(chat.guarded(chat.guard(), chat.append(*drafts)))
            closing = chat.draft("tool", "rewound", tool_call_id="1")
            for to_seq in (2, 50):  # also from a point that nothing stands behind
                revision = desk.session(chat.session_id).revision
                closing = replace(closing, uid=uid_of(f"closing {to_seq}"))
                rewound = c.Rewind(
                    session_id=chat.session_id,
                    to_seq=Seq(to_seq),
                    replaces=revision,
                    at_ms=chat.at(),
                    closing=(closing,),
                )
                before = desk.texts(chat.session_id)
                desk.done(bare(rewound))
                desk.again(bare(rewound))
                assert desk.texts(chat.session_id)[-1] == "rewound"
                desk.refused("stale", bare(replace(rewound, closing=())))
                restored = c.Restore(
                    session_id=chat.session_id, replaces=revision + 1, at_ms=chat.at()
                )
                desk.done(bare(restored))
                assert desk.texts(chat.session_id) == before

    def test_only_the_last_change_is_restored(self, tmp_path: Path) -> None:
        """INV-4: once something was appended after a rewind, it stays rewound."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", "one", "two", "three")
            session_id = chat.session_id
            restored = c.Restore(session_id=session_id, replaces=3, at_ms=1)
            desk.refused("stale", bare(restored))
            rewound = c.Rewind(session_id=session_id, to_seq=Seq(1), replaces=3, at_ms=1)
            desk.refused("stale", bare(replace(rewound, replaces=2)))
            desk.done(bare(rewound))
            desk.refused("stale", bare(replace(restored, replaces=3)))
            chat.revision = 4
            desk.done(chat.guarded(chat.guard(), chat.append(chat.draft("user", "new"))))
            desk.refused("stale", bare(replace(restored, replaces=4)))
            desk.refused("stale", bare(replace(restored, replaces=5)))
            assert desk.texts(session_id) == ["one", "new"]

    # Branch and erase ------------------------------------------------------------------------

    def test_a_branch_copies_what_is_read_up_to_its_point(self, tmp_path: Path) -> None:
        """B5: the parent stays as it is, the key moves, summaries are copied in their place."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", *(f"{n} {LONG}" for n in range(5)))
            desk.done(chat.unit(chat.title("Chat")))
            desk.done(bare(_compact(chat, 0, 2)))
            chat.next_seq, chat.revision = 6, 6
            before = desk.session(chat.session_id)
            command = c.Branch(
                key=chat.key,
                parent_id=chat.session_id,
                child_id=SessionId("branch"),
                upto_seq=Seq(3),
                replaces=chat.route_version,
                at_ms=chat.at(),
            )
            unit = chat.guarded(chat.guard(), command)
            desk.done(unit)
            desk.again(unit)
            assert desk.session(chat.session_id) == before
            child = desk.session(SessionId("branch"))
            assert (child.edge, child.title, child.revision) == ("branch", "Chat #2", 1)
            assert next(m.text for m in desk.rows(child.id)) == "so far"
            assert [m.summary for m in desk.rows(child.id)] == [True, False]
            with desk.reading() as reader:
                tip = reader.tip(chat.session_id)
                listed, _ = reader.listing()
            assert tip == before
            assert {one.session.id for one in listed} == {chat.session_id, "branch"}
            desk.refused("route_conflict", bare(replace(command, upto_seq=Seq(2))))

    def test_an_erased_message_keeps_its_place_and_its_uid(self, tmp_path: Path) -> None:
        """A9: the row is blank, counted and recognised; a summary stays one."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", LONG, LONG, LONG)
            appended = chat.guarded(
                chat.guard(), chat.append(chat.draft("user", "secret", user="ann", meta={"a": 1}))
            )
            desk.done(appended)
            desk.done(bare(_compact(chat, 0, 1)))
            erased = c.EraseMessages(session_id=chat.session_id, seqs=(Seq(3), Seq(4)))
            desk.done(bare(erased))
            desk.again(bare(erased), appended)
            rows = {int(m.seq): m for m in desk.rows(chat.session_id, everything=True)}
            assert (rows[3].text, rows[3].user, rows[3].meta, rows[3].erased) == (
                "",
                None,
                None,
                True,
            )
            assert (rows[4].summary, rows[4].erased, rows[4].covers) == (True, True, (0, 1))
            assert desk.session(chat.session_id).message_count == 4
            beyond = c.EraseMessages(session_id=chat.session_id, seqs=(Seq(99),))
            desk.refused("missing", bare(beyond))

    def test_a_sound_session_that_is_recounted_has_only_another_revision(
        self, tmp_path: Path
    ) -> None:
        """H3: whoever holds the transcript reads it again, and finds the same."""
        with self.desk(tmp_path) as desk:
            chat = opened(desk, "ann", LONG, LONG, LONG)
            desk.done(bare(_compact(chat, 0, 1)))
            desk.done(bare(c.EraseMessages(session_id=chat.session_id, seqs=(Seq(2),))))
            before, rows = desk.session(chat.session_id), desk.rows(chat.session_id)
            recount = c.RecountSession(
                session_id=chat.session_id, replaces=before.revision, at_ms=chat.at()
            )
            desk.done(bare(recount))
            desk.again(bare(recount))
            after = desk.session(chat.session_id)
            assert after == replace(before, revision=before.revision + 1)
            assert desk.rows(chat.session_id) == rows
            desk.refused("stale", bare(replace(recount, at_ms=recount.at_ms + 1)))
            nobody = replace(recount, session_id=SessionId("nobody"))
            desk.refused("missing", bare(nobody))

    # Round trips -----------------------------------------------------------------------------

    def test_every_field_comes_back_as_it_was(self, tmp_path: Path) -> None:
        """INV-20: for every role and hostile text, exactly, also after opening again."""
        drafts = _every_draft()
        with self.desk(tmp_path) as desk:
            chat = opened(desk)
            put = c.PutChunk(blob_id=BLOB, index=0, data=b"\0\xff")
            seal = c.SealBlob(
                blob_id=BLOB, size_bytes=2, chunk_count=1, media_type="image/png", at_ms=1
            )
            desk.engine_receipts(bare(put, seal))
            unit = chat.guarded(chat.guard(), chat.append(*drafts))
            check_unit(unit)
            (receipt,) = desk.engine_receipts(unit)
            (again,) = desk.engine_receipts(unit)
            assert (type(receipt).__name__, getattr(again, "again", None)) == ("Durable", True)
            self._same(desk, chat, drafts)
        if self.reopens:
            with self.desk(tmp_path) as desk:
                self._same(desk, chat, drafts)

    def _same(self, desk: Desk, chat: Conversation, drafts: list[Draft]) -> None:
        rows = desk.rows(chat.session_id)
        assert len(rows) == len(drafts)
        for row, draft in zip(rows, drafts, strict=True):
            # By representation: 1, 1.0 and True are equal, and must not be confused.
            assert repr(as_given(row)) == repr(draft)


BLOB: Any = "b" * 64


def _every_draft() -> list[Draft]:
    chat = Conversation("roundtrip")
    everything: dict[str, Any] = {
        "tool_calls": (
            ToolCall(id="1", name="look", arguments='{"q": "\0é"}'),
            ToolCall(id="", name=""),
        ),
        "tool_call_id": "call",
        "name": "name",
        "reasoning": "because\0",
        "finish_reason": "stop",
        "tokens": Tokens(input=2**62, output=1, cache_read=2, cache_write=3, reasoning=4),
        "platform_id": "p-1",
        "user": "ann",
        "meta": {
            "z": 1,
            "a": [1.0, True, None, -0.0, 1e-300, {"": {}}],
            "n": [2**63 - 1, -(2**63)],
        },
        "blobs": (BLOB, BLOB),
    }
    drafts = [chat.draft(role, text) for role in get_args(Role) for text in (None, "", "hello")]
    drafts += [chat.draft(role, "all", **everything) for role in get_args(Role)]
    parts: tuple[Any, ...] = ({"type": "text", "text": "hi"}, {})
    drafts += [chat.draft("user", None, parts=parts), chat.draft("user", None, parts=())]
    drafts += [chat.draft("user", text) for text in HOSTILE]
    for text in HOSTILE[:-2]:
        members: dict[str, Any] = {"user": text, "name": text, "meta": {text: text}}
        drafts.append(chat.draft("assistant", text, **members))
    drafts += [chat.draft("tool", None, meta={"deep": HOSTILE[-2][:900_000]})]
    drafts += [
        replace(chat.draft("user", "then"), created_ms=time)
        for time in (0, -1, 2**63 - 1, -(2**63))
    ]
    return drafts


def _compact(
    chat: Conversation, first: int, last: int, *, base: int | None = None, text: str = "so far"
) -> c.Compact:
    return c.Compact(
        session_id=chat.session_id,
        base_seq=Seq(chat.next_seq if base is None else base),
        first_seq=Seq(first),
        last_seq=Seq(last),
        summary=chat.draft("user", text),
        at_ms=chat.at(),
    )


def _running_turn(chat: Conversation) -> tuple[TurnId, list[Unit]]:
    """A turn that has begun: two rows of the transcript are its own."""
    turn_id = TurnId(uid_of(f"{chat.name}/running"))
    begun = (
        c.OpenTurn(turn_id=turn_id, key=chat.key, at_ms=chat.at()),
        c.StartTurn(turn_id=turn_id, session_id=chat.session_id, attempt=1, at_ms=chat.at()),
    )
    guard = chat.guard()
    drafts = [chat.draft("user", f"now {LONG}"), chat.draft("assistant", f"well {LONG}")]
    return turn_id, [Unit((*begun, chat.append(*drafts, turn_id=turn_id)), (guard,))]
