"""Tool calls and their results: what makes a transcript valid for a model (contract A10).

Every call has its result before anything else is said, and no result stands without its call.
`open_calls` finds calls that have none, `closing_results` gives them one, `ordered` puts those in
where a turn went on without them, `safe_cut` moves a cut to where nothing is torn apart, and
`whole_exchanges` completes a choice of messages.

Pure functions: uids and times are handed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..storage.records import Draft

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ..storage.identity import Uid
    from ..storage.records import ToolCall


def open_calls(messages: Iterable[Draft]) -> dict[str, ToolCall]:
    """The calls, by id and in order, that have no result behind them."""
    calls: dict[str, ToolCall] = {}
    for message in messages:
        for call in message.tool_calls:
            calls[call.id] = call
        if message.role == "tool" and message.tool_call_id is not None:
            calls.pop(message.tool_call_id, None)
    return calls


def closing_results(
    calls: Iterable[ToolCall],
    why: str,
    fresh_uid: Callable[[], Uid],
    now_ms: int,
    fates: Mapping[str, str] | None = None,
) -> tuple[Draft, ...]:
    """A stored result for each call that will get none, which says so.

    `fates` is what is known of the side effects that bear the calls' ids: a model that reads that
    one was done has no reason to do it again.
    """
    return tuple(
        Draft(
            uid=fresh_uid(),
            role="tool",
            tool_call_id=call.id,
            name=call.name or None,
            text=f"no result: {why}"
            + (f"; {fates[call.id]}" if fates and call.id in fates else ""),
            created_ms=now_ms,
            meta={"closed": why},
        )
        for call in calls
    )


def ordered(
    drafts: Iterable[Draft],
    opened: dict[str, ToolCall],
    close: Callable[[Iterable[ToolCall]], Iterable[Draft]],
    on_orphan: Callable[[Draft], None],
) -> list[Draft]:
    """The drafts with a result for every call that they leave behind.

    `opened` are the calls that are open before them; it is brought up to date. A result of no open
    call is left out and handed to `on_orphan`, which may raise.
    """
    rows: list[Draft] = []
    for draft in drafts:
        if draft.role == "tool":
            if draft.tool_call_id not in opened:
                on_orphan(draft)
                continue
            del opened[draft.tool_call_id]
        elif opened:
            rows += close(opened.values())
            opened.clear()
        rows.append(draft)
        opened.update((call.id, call) for call in draft.tool_calls)
    return rows


def safe_cut(messages: Sequence[Draft], cut: int) -> int:
    """The largest cut that is not behind `cut` and tears no call from its result.

    A cut is an index: what stands before it is on one side, the rest on the other.
    """
    while cut > 0 and open_calls(messages[:cut]):
        cut -= 1
    # In front of a result whose call is before the cut there is nothing to tear; a result that
    # stands alone (its call was compressed away) belongs to what stands before it.
    return cut


def whole_exchanges(messages: Sequence[Draft], chosen: set[int]) -> set[int]:
    """The chosen indices, and whatever belongs to an exchange of which one is chosen."""
    whole = set(chosen)
    start = 0
    while start < len(messages):
        end = start + 1
        if messages[start].tool_calls:
            while end < len(messages) and messages[end].role == "tool":
                end += 1
        if not chosen.isdisjoint(range(start, end)):
            whole.update(range(start, end))
        start = end
    return whole
