"""A chat platform that behaves as badly as real ones do, and counts what people see.

It sends webhooks again, out of order and more than once; it loses the acknowledgements of what it
was sent, answers late or not at all, and is down for a while. `seen` is what stands in each chat in
the end: a platform with idempotency keys shows a repeat once, one without them shows it twice.

What it does is a function of its seed. Must never know anything of the runtime but what a platform
would: what it was sent, and what it was answered.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, final

import trio

from ...actors.messages import Inbound
from ...actors.sending import DeliverLaterError, UndeliverableError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...storage.records import Delivery


class Shown(NamedTuple):
    """One message of ours in a chat."""

    chat: str
    text: str
    delivery_id: str
    kind: str


class PlatformError(Exception):
    """The platform has refused a request, or has lost its answer."""


@final
class FakePlatform:
    """Chats, and the doors to them.

    `losing` is the chance that what was delivered is shown, but its acknowledgement gets lost;
    `refusing` that a request fails before anything is shown. `idempotent` platforms show each
    delivery id once.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        losing: float = 0.0,
        refusing: float = 0.0,
        idempotent: bool = True,
        delay_s: float = 0.0,
    ) -> None:
        self._chance = random.Random(seed)
        self.losing = losing
        self.refusing = refusing
        self.idempotent = idempotent
        self.delay_s = delay_s
        self.stuck: set[str] = set()
        """Chats in which a request hangs."""
        self.blocked: set[str] = set()
        """Chats that nobody can write to any more."""
        self.down = False
        """Everything is refused, with the request to come back later."""
        self.seen: defaultdict[str, list[Shown]] = defaultdict(list)
        self.requests: Counter[str] = Counter()
        """How often each delivery was asked for."""
        self._shown: set[str] = set()

    # To the platform -----------------------------------------------------------------------------

    async def deliver(self, delivery: Delivery) -> str:
        """What a gateway registers: show it in its chat; returns the platform's id of it."""
        chat = str(delivery.target.get("to") or delivery.key)
        self.requests[delivery.id] += 1
        await trio.sleep(self.delay_s)
        if chat in self.stuck:
            await trio.sleep_forever()
        if self.down:
            raise DeliverLaterError(1.0)
        if chat in self.blocked:
            raise UndeliverableError("the user has blocked us")
        if self._chance.random() < self.refusing:
            raise PlatformError("500")
        if not (self.idempotent and delivery.id in self._shown):
            self._shown.add(delivery.id)
            self.seen[chat].append(Shown(chat, delivery.text, delivery.id, delivery.kind))
        if self._chance.random() < self.losing:
            raise PlatformError("the connection was reset")
        return f"platform-{delivery.id}"

    def texts(self, chat: str, kind: str | None = None) -> list[str]:
        """What people read there, in order."""
        return [shown.text for shown in self.seen[chat] if kind in (None, shown.kind)]

    def remember(self, chat: str, shown: Iterable[Shown]) -> None:
        """What people saw before the gateway that is tested was started."""
        for one in shown:
            self.seen[chat].append(one)
            self._shown.add(one.delivery_id)

    # From the platform ---------------------------------------------------------------------------

    def webhooks(
        self, chat: str, texts: Iterable[str], *, again: int = 2, shuffled: bool = False
    ) -> list[Inbound]:
        """The updates of one chat, each of them up to `again` more times, perhaps out of order."""
        updates: list[Inbound] = []
        for text in texts:
            update: Any = Inbound(text, id=f"{chat}/{text}", reply_to=chat)
            updates += [update] * (1 + self._chance.randrange(again + 1))
        if shuffled:
            self._chance.shuffle(updates)
        return updates
