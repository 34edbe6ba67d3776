"""Whether a transcript is valid for a model: each tool call is followed by its result.

Knows nothing of how the library keeps it so. Must never repair anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class HasId(Protocol):
    """A tool call."""

    @property
    def id(self) -> str: ...


class Row(Protocol):
    """What this looks at in a message."""

    @property
    def role(self) -> str: ...
    @property
    def tool_calls(self) -> Sequence[HasId]: ...
    @property
    def tool_call_id(self) -> str | None: ...


def count_open_calls(transcript: Iterable[Row]) -> int:
    """Calls without a result before the next word, and results without a call."""
    wrong = 0
    waiting: set[str] = set()
    for message in transcript:
        if message.role == "tool":
            wrong += message.tool_call_id not in waiting
            waiting.discard(message.tool_call_id or "")
            continue
        wrong += len(waiting)
        waiting = {call.id for call in message.tool_calls}
    return wrong + len(waiting)
