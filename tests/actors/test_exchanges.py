"""Tool calls and their results: no cut, choice or late result makes a transcript invalid (A10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from onepen import Draft, ToolCall
from onepen.actors.exchanges import (
    closing_results,
    open_calls,
    ordered,
    safe_cut,
    whole_exchanges,
)
from onepen.storage.edge import check_draft
from onepen.storage.identity import Uid

if TYPE_CHECKING:
    from collections.abc import Iterable

NOW = 1_700_000_000_000
FRESH = Uid("a" * 32)


def calls(*ids: str) -> Draft:
    made = tuple(ToolCall(id=one, name="f") for one in ids)
    return Draft(uid=FRESH, role="assistant", tool_calls=made)


def answer(call_id: str) -> Draft:
    return Draft(uid=FRESH, role="tool", text="r", tool_call_id=call_id)


def plain(text: str = "x") -> Draft:
    return Draft(uid=FRESH, role="user", text=text)


def test_open_calls_are_those_without_a_result_behind_them_in_order() -> None:
    """A10."""
    assert list(open_calls([calls("a", "b", "c"), answer("b")])) == ["a", "c"]
    assert open_calls([calls("a"), answer("a")]) == {}
    assert list(open_calls([answer("a"), calls("a")])) == ["a"]


def test_every_open_call_gets_a_result_that_says_why() -> None:
    """A10."""
    messages = [calls("a", "b"), answer("a")]
    closing = closing_results(open_calls(messages).values(), "it was cut", lambda: FRESH, NOW)
    assert open_calls([*messages, *closing]) == {}
    assert [(c.role, c.tool_call_id, c.text) for c in closing] == [
        ("tool", "b", "no result: it was cut")
    ]
    for draft in closing:
        check_draft(draft)


@st.composite
def transcripts(draw: st.DrawFn) -> list[Draft]:
    """Plain messages and calls with their results behind them; ids may come again later, the last
    calls may be open.
    """
    messages: list[Draft] = []
    for block in draw(st.lists(st.integers(0, 3), max_size=6)):
        if block == 0:
            messages.append(plain())
            continue
        ids = [str(n) for n in range(block)]
        messages.append(calls(*ids))
        messages += [answer(one) for one in draw(st.permutations(ids))]
        if draw(st.booleans()):
            messages.append(plain())
    if draw(st.booleans()):
        messages.append(calls("open", "too"))
        messages += draw(st.sampled_from([[], [answer("too")]]))
    return messages


def pairs(messages: list[Draft]) -> list[tuple[int, int]]:
    """Where each call and its result stand: found without the code under test."""
    found: list[tuple[int, int]] = []
    for at, message in enumerate(messages):
        if message.tool_call_id is not None:
            asked = [
                n
                for n in range(at)
                if any(call.id == message.tool_call_id for call in messages[n].tool_calls)
            ]
            found.append((asked[-1], at))
    return found


def torn(messages: list[Draft], cut: int) -> bool:
    return any(asked < cut <= answered for asked, answered in pairs(messages))


def test_the_checker_of_the_next_tests_finds_a_torn_call() -> None:
    messages = [plain(), calls("a"), answer("a"), plain()]
    assert [torn(messages, cut) for cut in range(5)] == [False, False, True, False, False]


@given(messages=transcripts(), where=st.data())
def test_no_cut_separates_a_call_from_its_result(
    messages: list[Draft], where: st.DataObject
) -> None:
    """A10: and no cut leaves a call open before it, that is, waiting for a result behind it."""
    wanted = where.draw(st.integers(0, len(messages)))
    cut = safe_cut(messages, wanted)
    assert 0 <= cut <= wanted
    assert not torn(messages, cut)
    assert not open_calls(messages[:cut])
    # It is the largest: every cut between is torn or behind a call without a result.
    for other in range(cut + 1, wanted + 1):
        assert torn(messages, other) or open_calls(messages[:other])


@given(messages=transcripts(), where=st.data())
def test_a_choice_is_completed_to_whole_exchanges_and_no_further(
    messages: list[Draft], where: st.DataObject
) -> None:
    """A10: what an agent keeps of the past takes along what belongs to it."""
    chosen = where.draw(st.sets(st.integers(0, max(0, len(messages) - 1)), max_size=4))
    chosen = {one for one in chosen if one < len(messages)}
    whole = whole_exchanges(messages, chosen)
    assert chosen <= whole
    for asked, answered in pairs(messages):
        assert (asked in whole) == (answered in whole)
    for added in whole - chosen:
        exchange = {n for pair in pairs(messages) if added in pair for n in pair}
        siblings = {n for pair in pairs(messages) if exchange & set(pair) for n in pair}
        assert siblings & chosen


def close(calls: Iterable[ToolCall]) -> tuple[Draft, ...]:
    return closing_results(calls, "cut", lambda: FRESH, NOW)


def valid(messages: list[Draft]) -> bool:
    """Whether a model takes it: said in another way than the code under test says it."""
    wanted: set[str] = set()
    for message in messages:
        if message.role == "tool":
            if message.tool_call_id not in wanted:
                return False
            wanted.discard(message.tool_call_id)
        elif wanted:
            return False
        wanted |= {call.id for call in message.tool_calls}
    return not wanted


ANYTHING = st.lists(
    st.one_of(
        st.builds(plain),
        st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True).map(
            lambda ids: calls(*ids)
        ),
        st.sampled_from("abcd").map(answer),
    ),
    max_size=8,
)


@given(before=st.sets(st.sampled_from("abc"), max_size=2), drafts=ANYTHING)
def test_whatever_is_handed_over_comes_out_valid_and_loses_only_orphans(
    before: set[str], drafts: list[Draft]
) -> None:
    """A10."""
    first = [calls(*sorted(before))] if before else []
    opened, orphans = open_calls(first), list[Draft]()
    rows = ordered(drafts, opened, close, orphans.append)
    assert valid([*first, *rows, *close(opened.values())])
    assert [one for one in rows if one.meta is None] == [
        one for one in drafts if not any(one is orphan for orphan in orphans)
    ]
    assert all(orphan.role == "tool" for orphan in orphans)


def test_a_valid_transcript_is_left_as_it_is() -> None:
    drafts = [plain(), calls("a", "b"), answer("b"), answer("a"), plain()]
    assert ordered(drafts, {}, close, lambda _: None) == drafts
