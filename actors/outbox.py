"""What leaves a session: to whom, and as which commands.

Keeps: whatever is to be sent is a row in the transaction of what it belongs to: a reply with the
end of its turn, an interim message and a question with theirs (the output gate: nothing final
leaves before it is durable). Each place is answered once, however many messages came from there.

Pure functions but for fresh ids; the courier sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec

from ..storage.commands import PostDelivery
from ..storage.records import Delivery

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..storage.identity import TurnId, Uid
    from ..storage.records import InboxEntry, JsonObject
    from .line import Said
    from .scribe import Scribe

_TEXT_BYTES_MAX = 512 * 1024

DeliveryKind: TypeAlias = Literal["reply", "interim", "question", "post"]


class Target(NamedTuple):
    """A place that wants an answer."""

    source: str
    reply_to: JsonObject


def targets_of(said: Iterable[Said]) -> tuple[Target, ...]:
    """Where the answer to these messages goes."""
    return tuple(
        Target(one.source, one.body.reply_to) for one in said if one.body.reply_to is not None
    )


def targets_in(entries: Iterable[InboxEntry]) -> tuple[Target, ...]:
    """The same as it is stored."""
    return tuple(Target(e.source, e.reply_to) for e in entries if e.reply_to is not None)


def distinct(targets: Iterable[Target]) -> tuple[Target, ...]:
    """Each place once, in the order in which they first spoke."""
    places = {(t.source, msgspec.json.encode(t.reply_to, order="sorted")): t for t in targets}
    return tuple(places.values())


def posting(
    scribe: Scribe,
    targets: Iterable[Target],
    text: str,
    kind: DeliveryKind,
    *,
    turn_id: TurnId | None = None,
    uid: Uid | None = None,
    more: JsonObject | None = None,
) -> tuple[PostDelivery, ...]:
    """A text for each of these places; none if there is nothing to say."""
    if not text.strip():
        return ()
    shown = shown_of(text)
    body: dict[str, Any] = {"kind": kind, "text": shown, **(more or {})}
    if shown != text:
        body["cut"] = True
    page = scribe.page
    return tuple(
        PostDelivery(
            delivery_id=scribe.fresh_uid(),
            key=scribe.key,
            source=target.source,
            target=target.reply_to,
            body=body,
            at_ms=scribe.now(),
            turn_id=turn_id,
            session_id=page.session_id if page.stored else None,
            message_uid=uid,
        )
        for target in distinct(targets)
    )


def shown_of(text: str) -> str:
    """What of a text is sent: no platform takes more in one message. The row has the whole."""
    if len(text) <= _TEXT_BYTES_MAX // 4:
        return text
    return text.encode(errors="replace")[:_TEXT_BYTES_MAX].decode(errors="ignore")


def delivery_of(command: PostDelivery) -> Delivery:
    """The delivery that this command posts."""
    return Delivery(
        id=command.delivery_id,
        key=command.key,
        source=command.source,
        target=command.target,
        body=command.body,
        turn_id=command.turn_id,
        session_id=command.session_id,
        message_uid=command.message_uid,
        posted_ms=command.at_ms,
    )
