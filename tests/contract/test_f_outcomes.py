"""F: the one text that follows from an outcome. (A turn's own end to end is in `tests/runtime`.)"""

from __future__ import annotations

import pytest

from onepen import Outcome
from onepen.actors.replies import reply_text


@pytest.mark.parametrize("kind", ["answered", "failed", "interrupted", "partial", "silent"])
def test_a_non_empty_answer_passes_unchanged_whatever_the_kind(kind: str) -> None:
    """F1: non-blank text comes first."""
    outcome = Outcome(kind=kind, text=" as it is \n", error="ignored")  # type: ignore[arg-type]
    assert reply_text(outcome) == " as it is \n"


def test_a_partial_answer_names_its_error_in_short() -> None:
    """F2."""
    error = "Model generated invalid tool call: nonexistent_tool"
    assert error in reply_text(Outcome(kind="partial", error=error))
    long = reply_text(Outcome(kind="partial", error="x" * 5000))
    assert "x" * 200 in long
    assert "x" * 201 not in long


@pytest.mark.parametrize(
    ("error", "history_length"),
    [
        ("400 context length exceeded", 1),
        ("the prompt is too large", 1),
        ("input is too long", 1),
        ("too many tokens", 1),
        ("413 payload", 1),
        ("Error code: 400", 51),
    ],
)
def test_a_context_that_is_too_long_offers_to_compact(error: str, history_length: int) -> None:
    """F4: a bare 400 only behind a long history."""
    detail = {"history_length": history_length}
    text = reply_text(Outcome(kind="failed", error=error, detail=detail))
    assert "context window" in text
    assert "/compact" in text
    short = reply_text(
        Outcome(kind="failed", error="Error code: 400", detail={"history_length": 50})
    )
    assert "context window" not in short
    assert "/reset" in short
