"""What an agent returned: its outcome, and what of its report is new (contract A4, A5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepen import Draft, InvalidContentError, Message, Outcome
from onepen.actors.results import Aligned, Attempt, align, reported, result_of
from onepen.storage.identity import Seq, SessionId, TurnId, Uid, derived_uid

if TYPE_CHECKING:
    from onepen.storage.records import Role

NOW = 1_700_000_000_000
TURN = TurnId("0123456789ab" + "0" * 20)
SESSION = SessionId("session")


def stored(number: int, role: Role, text: str) -> Message:
    uid = Uid(f"{number:032x}")
    return Message(uid=uid, role=role, text=text, session_id=SESSION, seq=Seq(number))


def said(role: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **fields}


GIVEN = (
    stored(0, "user", "one"),
    stored(1, "assistant", "re one"),
    stored(2, "user", "two"),
    stored(3, "assistant", "re two"),
)
OWN = stored(4, "user", "three")


def aligned(
    *messages: Any, given: tuple[Message, ...] = GIVEN, own: tuple[Message, ...] = (OWN,)
) -> Aligned:
    return align(reported(messages, NOW), Attempt(TURN, 1, given, own, NOW))


def texts(drafts: tuple[Draft, ...]) -> list[str | None]:
    return [draft.text for draft in drafts]


def echo(*messages: Message) -> list[dict[str, Any]]:
    """A report of these without uids."""
    return [said(message.role, message.text or "") for message in messages]


def test_of_a_whole_transcript_only_what_is_new_is_taken() -> None:
    """A4."""
    result = aligned(*echo(*GIVEN, OWN), said("assistant", "re three"))
    assert texts(result.new) == ["re three"]
    assert result.rewrite == ()
    assert result.kept == tuple(message.uid for message in GIVEN)


def test_leading_system_messages_are_left_out() -> None:
    """A4."""
    prompts = (said("system", "be kind"), said("system", "be short"))
    result = aligned(*prompts, *echo(*GIVEN, OWN), said("assistant", "re three"))
    assert texts(result.new) == ["re three"]
    assert result.rewrite == ()


def test_a_report_may_begin_in_the_middle_of_what_was_given() -> None:
    """A4: old is the longest *end* of what was given with which the report begins."""
    result = aligned(*echo(*GIVEN[2:], OWN), said("assistant", "re three"))
    assert texts(result.new) == ["re three"]
    assert result.kept == tuple(message.uid for message in GIVEN[2:])


def test_a_report_may_begin_with_the_turns_own_message() -> None:
    """A4."""
    assert texts(aligned(*echo(OWN), said("assistant", "re three")).new) == ["re three"]


def test_a_report_of_the_answer_alone_is_new() -> None:
    """A4."""
    result = aligned(said("assistant", "re three"))
    assert texts(result.new) == ["re three"]
    assert result.rewrite == ()


def test_what_the_attempt_has_stored_already_is_not_new() -> None:
    """A4: a leading run equal to what this attempt has stored."""
    own = (OWN, stored(5, "assistant", "working"), stored(6, "assistant", "still"))
    result = aligned(*echo(*GIVEN, *own), said("assistant", "done"), own=own)
    assert texts(result.new) == ["done"]
    assert result.new[0].uid == derived_uid(TURN, 1, 2)


def test_the_same_text_twice_is_two_messages() -> None:
    """A3, A4: equal text is not identity."""
    result = aligned(*echo(*GIVEN, OWN), said("assistant", "ok"), said("assistant", "ok"))
    assert texts(result.new) == ["ok", "ok"]
    assert result.new[0].uid != result.new[1].uid


def test_a_user_who_repeats_himself_is_not_taken_for_the_past() -> None:
    """A4: the turn's own message equals an old one."""
    own = stored(4, "user", "two")
    result = aligned(*echo(*GIVEN, own), said("assistant", "again"), own=(own,))
    assert texts(result.new) == ["again"]


def test_reporting_twice_gives_the_same_uids() -> None:
    """A4: the i-th new message's uid comes from turn, attempt and i."""
    report = (*echo(*GIVEN, OWN), said("assistant", "x"), said("assistant", "y"))
    first, second = aligned(*report), aligned(*report)
    assert [d.uid for d in first.new] == [d.uid for d in second.new]
    assert [d.uid for d in first.new] == [derived_uid(TURN, 1, 0), derived_uid(TURN, 1, 1)]
    alone = aligned(said("assistant", "x"), said("assistant", "y"))
    assert [d.uid for d in alone.new] == [d.uid for d in first.new]


def test_another_attempt_gives_other_uids() -> None:
    """A4."""
    report = reported((said("assistant", "x"),), NOW)
    first = align(report, Attempt(TURN, 1, GIVEN, (OWN,), NOW))
    second = align(report, Attempt(TURN, 2, GIVEN, (OWN,), NOW))
    assert first.new[0].uid != second.new[0].uid


def test_a_partial_report_and_a_longer_one_agree_on_uids() -> None:
    """A4: what a later report adds comes behind what an earlier one had."""
    short = aligned(*echo(*GIVEN, OWN), said("assistant", "x"))
    own = (OWN, stored(5, "assistant", "x"))
    longer = aligned(*echo(*GIVEN, *own), said("assistant", "y"), own=own)
    assert short.new[0].uid == derived_uid(TURN, 1, 0)
    assert longer.new[0].uid == derived_uid(TURN, 1, 1)


def test_if_nothing_aligns_new_begins_behind_the_turns_own_message() -> None:
    """A4: what comes before is a rewrite, never new."""
    result = aligned(
        said("assistant", "summary of it all"), *echo(OWN), said("assistant", "re three")
    )
    assert texts(result.new) == ["re three"]
    assert texts(result.rewrite) == ["summary of it all"]


def test_if_not_even_that_aligns_new_begins_behind_the_last_user_message() -> None:
    """A4."""
    result = aligned(
        said("assistant", "summary"), said("user", "three, reworded"), said("assistant", "re three")
    )
    assert texts(result.new) == ["re three"]
    assert texts(result.rewrite) == ["summary", "three, reworded"]


def test_a_rewritten_past_whose_user_said_the_same_is_a_rewrite() -> None:
    """A4: the report begins with the turn's own words, and has them again where the turn begins."""
    given_ = (stored(0, "user", "go"), stored(1, "assistant", "a long answer"))
    own = stored(2, "user", "go")
    report = (*echo(given_[0]), said("assistant", "pruned"), *echo(own), said("assistant", "new"))
    result = aligned(*report, given=given_, own=(own,))
    assert texts(result.new) == ["new"]
    assert texts(result.rewrite) == ["go", "pruned"]


@pytest.mark.parametrize("uids", [False, True])
def test_the_turns_own_message_in_other_words_is_not_new(*, uids: bool) -> None:
    """A4: an agent may put something in front of what the user said."""
    past = GIVEN if uids else echo(*GIVEN)
    result = aligned(*past, said("user", "[memory] three"), said("assistant", "re three"))
    assert texts(result.new) == ["re three"]
    assert result.rewrite == ()
    assert result.new[0].uid == derived_uid(TURN, 1, 0)


def test_leading_system_messages_are_handed_on_for_a_rotation() -> None:
    """A4: they may be all that is left of the past."""
    result = aligned(said("system", "in short"), *echo(OWN), said("assistant", "re three"))
    assert texts(result.leading) == ["in short"]
    assert (texts(result.new), result.rewrite, result.kept) == (["re three"], (), ())


def test_echoed_uids_match_by_themselves() -> None:
    """A4: history with uids, in whatever words."""
    history = [{**said(m.role, "shortened"), "uid": m.uid} for m in (*GIVEN, OWN)]
    result = aligned(*history, said("assistant", "re three"))
    assert texts(result.new) == ["re three"]
    assert result.rewrite == ()
    assert result.kept == tuple(message.uid for message in GIVEN)
    assert result.new[0].uid == derived_uid(TURN, 1, 0)


def test_messages_and_drafts_echo_their_uids() -> None:
    """A4."""
    result = aligned(*GIVEN, OWN, said("assistant", "re three"))
    assert texts(result.new) == ["re three"]


def test_what_stands_before_echoed_uids_without_one_is_a_rewrite() -> None:
    """A4."""
    result = aligned(said("user", "summary"), GIVEN[3], OWN, said("assistant", "re three"))
    assert texts(result.new) == ["re three"]
    assert texts(result.rewrite) == ["summary"]
    assert result.kept == (GIVEN[3].uid,)


def test_a_new_message_that_brings_its_own_uid_keeps_it() -> None:
    """A3: and storage is asked whether it is known."""
    own = Uid("f" * 32)
    result = aligned(*GIVEN, OWN, {**said("assistant", "re three"), "uid": own})
    assert [draft.uid for draft in result.new] == [own]
    assert result.known == (own,)


def test_an_empty_report_brings_nothing() -> None:
    """A4."""
    assert aligned() == Aligned((), (), (), (), (), sure=False)
    assert aligned(*echo(*GIVEN, OWN)).new == ()


ROLES = st.sampled_from(["user", "assistant"])
TEXTS = st.sampled_from(["a", "b"])


@given(
    past=st.lists(st.tuples(ROLES, TEXTS), max_size=6),
    own=TEXTS,
    new=st.lists(TEXTS, max_size=4),
    written=st.integers(0, 4),
)
def test_an_honest_report_never_stores_the_past_again_nor_loses_what_is_new(
    past: list[tuple[Any, str]], own: str, new: list[str], written: int
) -> None:
    """A4: history (or all of it), the turn's own message, then the answers."""
    given_ = tuple(stored(n, role, text) for n, (role, text) in enumerate(past))
    user = stored(len(past), "user", own)
    already = tuple(
        stored(len(past) + 1 + n, "assistant", text) for n, text in enumerate(new[:written])
    )
    report = (*echo(*given_, user), *(said("assistant", text) for text in new))
    result = aligned(*report, given=given_, own=(user, *already))
    assert texts(result.new) == new[written:]
    assert result.rewrite == ()
    for number, draft in enumerate(result.new, start=len(already)):
        assert draft.uid == derived_uid(TURN, 1, number)


# Results -------------------------------------------------------------------------------------


def test_text_is_an_answer_and_one_more_message() -> None:
    result = result_of("hello", NOW, said=None)
    assert result.outcome == Outcome(kind="answered", text="hello")
    assert result.answer == "hello"


def test_nothing_returned_means_that_what_was_said_last_is_the_answer() -> None:
    assert result_of(None, NOW, said="interim").outcome.text == "interim"
    assert result_of(None, NOW, said="interim").answer is None
    assert result_of(None, NOW, said=None).outcome == Outcome(kind="answered")


def test_another_session_id_counts_although_something_was_said() -> None:
    """B6: without text and without messages."""
    result = result_of({"session_id": "child"}, NOW, said="interim")
    assert (result.session_id, result.outcome.text) == ("child", "interim")
    assert result.answer is None


def test_an_outcome_is_taken_as_it_is() -> None:
    outcome = Outcome(kind="partial", text="half", error="cut")
    result = result_of(outcome, NOW, said=None)
    assert (result.outcome, result.answer) == (outcome, "half")


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({}, "answered"),
        ({"partial": True}, "partial"),
        ({"partial": True, "interrupted": True}, "interrupted"),
        ({"partial": True, "interrupted": True, "failed": True}, "failed"),
        ({"failed": False}, "answered"),
    ],
)
def test_the_gravest_flag_of_a_mapping_counts(flags: dict[str, Any], kind: str) -> None:
    result = result_of({"final_response": "x", **flags}, NOW, said=None)
    assert result.outcome.kind == kind


@pytest.mark.parametrize("persisted", [True, False, None])
def test_agent_persisted_is_information_only(*, persisted: bool | None) -> None:
    """A5."""
    returned: dict[str, Any] = {"final_response": "x", "messages": [said("assistant", "x")]}
    plain = result_of(returned, NOW, said=None)
    result = result_of({**returned, "agent_persisted": persisted}, NOW, said=None)
    assert result.report == plain.report
    assert result.answer == plain.answer
    assert result.outcome.detail == {"agent_persisted": bool(persisted)}


def test_an_answer_that_is_among_the_reported_messages_is_not_one_more() -> None:
    returned = {"final_response": "x", "messages": [said("user", "q"), said("assistant", "x")]}
    assert result_of(returned, NOW, said=None).answer is None
    returned = {"final_response": "other", "messages": [said("assistant", "x")]}
    assert result_of(returned, NOW, said=None).answer == "other"
    returned = {"final_response": "x", "messages": [said("assistant", "x"), said("user", "q")]}
    assert result_of(returned, NOW, said=None).answer == "x"


def test_a_missing_error_is_not_the_word_none() -> None:
    """F5."""
    assert result_of({"failed": True, "error": None}, NOW, said=None).outcome.error is None


@pytest.mark.parametrize("returned", [5, 1.5, object(), b"bytes", ["text"], {"messages": "text"}])
def test_what_is_not_understood_is_refused(returned: object) -> None:
    with pytest.raises(InvalidContentError):
        result_of(returned, NOW, said=None)


@pytest.mark.parametrize("message", [5, None, {"content": "no role"}, b"bytes"])
def test_a_reported_message_that_is_none_is_refused(message: object) -> None:
    with pytest.raises(InvalidContentError):
        result_of({"messages": [message]}, NOW, said=None)
