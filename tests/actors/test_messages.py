"""Messages in the forms that people and agents use."""

from __future__ import annotations

from typing import Any

import pytest

from onepen import Draft, InvalidContentError, Message, Tokens, ToolCall
from onepen.actors.messages import draft_of, same_message
from onepen.storage.edge import check_draft
from onepen.storage.identity import Seq, SessionId, Uid

NOW = 1_700_000_000_000
FRESH = Uid("a" * 32)


def drafted(given_: Any) -> Draft:
    return draft_of(given_, lambda: FRESH, NOW)


def test_text_is_the_assistants() -> None:
    assert drafted("hi") == Draft(uid=FRESH, role="assistant", text="hi", created_ms=NOW)


def test_a_draft_is_taken_as_it_is() -> None:
    draft = Draft(uid=Uid("b" * 32), role="tool", text="x", tool_call_id="c", created_ms=5)
    assert drafted(draft) is draft


def test_a_draft_without_a_time_was_written_now() -> None:
    draft = Draft(uid=Uid("b" * 32), role="assistant", text="x")
    assert drafted(draft).created_ms == NOW


def test_a_stored_message_becomes_the_draft_that_it_was() -> None:
    draft = Draft(uid=Uid("b" * 32), role="user", text="x", meta={"a": 1}, created_ms=5)
    fields: dict[str, Any] = {name: getattr(draft, name) for name in Draft.__struct_fields__}
    message = Message(**fields, session_id=SessionId("s"), seq=Seq(3), carried=True)
    assert drafted(message) == draft
    assert type(drafted(message)) is Draft


def test_the_chat_completion_form_is_understood() -> None:
    draft = drafted(
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "search", "arguments": '{"q": 1}'},
                },
                {"id": "c2", "name": "look", "arguments": {"q": [1, "é"]}},
                ToolCall(id="c3", name="go"),
            ],
            "finish_reason": "tool_calls",
            "tokens": {"input": 3, "output": 4},
        }
    )
    assert draft.tool_calls == (
        ToolCall(id="c1", name="search", arguments='{"q": 1}'),
        ToolCall(id="c2", name="look", arguments='{"q":[1,"é"]}'),
        ToolCall(id="c3", name="go"),
    )
    assert (draft.text, draft.reasoning, draft.finish_reason) == (None, "hm", "tool_calls")
    assert draft.tokens == Tokens(input=3, output=4)
    assert (draft.uid, draft.created_ms) == (FRESH, NOW)
    check_draft(draft)


def test_a_tool_result_names_its_call() -> None:
    draft = drafted({"role": "tool", "tool_call_id": "c1", "content": "42", "name": "search"})
    assert (draft.role, draft.tool_call_id, draft.text, draft.name) == (
        "tool",
        "c1",
        "42",
        "search",
    )


def test_content_in_parts_stays_in_parts() -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image", "id": "x"}]
    assert drafted({"role": "user", "content": parts}).parts == tuple(parts)
    assert drafted({"role": "user", "parts": parts}).parts == tuple(parts)


def test_a_uid_that_is_given_stays_and_an_empty_one_is_replaced() -> None:
    """A3."""
    own = Uid("b" * 32)
    assert drafted({"role": "user", "content": "x", "uid": own}).uid == own
    assert drafted({"role": "user", "content": "x", "uid": None}).uid == FRESH
    assert drafted({"role": "user", "content": "x", "uid": ""}).uid == FRESH


def test_nothing_that_an_agent_says_is_dropped() -> None:
    draft = drafted({"role": "user", "content": "x", "refusal": None, "audio": {"id": 1}})
    assert draft.meta == {"more": {"audio": {"id": 1}}}
    draft = drafted({"role": "user", "content": "x", "meta": {"a": 1}, "audio": 2})
    assert draft.meta == {"a": 1, "more": {"audio": 2}}


@pytest.mark.parametrize(
    "given_",
    [
        None,
        5,
        b"bytes",
        ["text"],
        {},
        {"content": "without a role"},
        {"role": None, "content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": b"bytes"},
        {"role": "assistant", "tool_calls": ["c1"]},
        {"role": "assistant", "tool_calls": "c1"},
        {"role": "assistant", "tool_calls": 5},
        {"role": "assistant", "tool_calls": [{"id": "c", "name": "f", "arguments": object()}]},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": 5}]},
        {"role": "user", "content": "x", "tokens": {"unknown": 1}},
        {"role": "user", "content": "x", "meta": 5, "more": 6},
    ],
)
def test_what_is_not_understood_is_refused_with_a_typed_error(given_: object) -> None:
    """INV-20."""
    with pytest.raises(InvalidContentError):
        check_draft(drafted(given_))


def test_messages_say_the_same_whatever_their_identity() -> None:
    one = drafted({"role": "user", "content": "x"})
    assert same_message(one, drafted({"role": "user", "content": "x", "uid": "c" * 32}))
    assert same_message(
        drafted({"role": "assistant", "content": ""}), drafted({"role": "assistant"})
    )
    assert not same_message(one, drafted({"role": "assistant", "content": "x"}))
    assert not same_message(one, drafted({"role": "user", "content": "y"}))
    call = {"role": "assistant", "tool_calls": [{"id": "c", "name": "f"}]}
    other = {"role": "assistant", "tool_calls": [{"id": "d", "name": "f"}]}
    assert same_message(drafted(call), drafted(call))
    assert not same_message(drafted(call), drafted(other))
