"""What was given, as our own: whoever gave it, or is shown it, can't change it any more.

A gateway uses the mapping that says where a reply goes for its next message as well; an agent marks
a part of a message for its model; whoever sends takes the target apart. None of that may reach what
is posted, what is kept in memory or who is answered.

Keeps: what is stored and sent is what was checked. Only for content that the edge has let through:
its depth and its size are bounded, and so is copying it. What holds no JSON is handed on as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from msgspec.structs import replace

if TYPE_CHECKING:
    from ..storage.records import Delivery, Draft, Inbound

T = TypeVar("T")
D = TypeVar("D", bound="Draft")


def own_json(value: T) -> T:
    """The same JSON value, in containers of its own."""
    return cast("T", _copied(value))


def _copied(value: Any) -> Any:
    kind = cast("object", type(value))  # so that nothing is narrowed to unknown types
    if kind is dict:
        return {name: _copied(member) for name, member in value.items()}
    if kind is list:
        return [_copied(item) for item in value]
    return value


def own_draft(draft: D) -> D:
    """The same message; most have neither parts nor details."""
    if draft.parts is None and draft.meta is None:
        return draft
    parts = None if draft.parts is None else tuple(map(own_json, draft.parts))
    return replace(draft, parts=parts, meta=own_json(draft.meta))


def own_inbound(body: Inbound) -> Inbound:
    """The same message from outside, with its own idea of where the reply goes."""
    if body.parts is None and body.meta is None and body.reply_to is None:
        return body
    return replace(
        body,
        parts=None if body.parts is None else tuple(map(own_json, body.parts)),
        meta=own_json(body.meta),
        reply_to=own_json(body.reply_to),
    )


def own_delivery(delivery: Delivery) -> Delivery:
    """The same delivery, for somebody who may take it apart."""
    return replace(delivery, target=own_json(delivery.target), body=own_json(delivery.body))
