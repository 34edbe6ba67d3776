"""What a gateway declares for its sources: how their messages are taken, how they are answered.

A policy is code, not a setting: it comes with the gateway that knows its platform. It is data that
`check_source` judges before anything is started.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from msgspec import Struct

from ..storage.edge import check_name, shown
from ..storage.errors import InvalidContentError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..storage.records import Delivery

    Deliver: TypeAlias = Callable[[Delivery], Awaitable[str | None] | str | None]

Busy: TypeAlias = Literal["queue", "collect", "steer", "interrupt", "latest", "reject"]
BUSY_POLICIES: tuple[Busy, ...] = get_args(Busy)
OnUnknown: TypeAlias = Literal["resend", "hold"]
OnLate: TypeAlias = Literal["run", "skip"]

_DEBOUNCE_S_MAX = 3600.0
_LATE_S = 60.0


class ResetPolicy(Struct, frozen=True, kw_only=True):
    """When a conversation begins anew. Looked at when a message arrives, and at no other time."""

    idle_minutes: float | None = None
    """Nothing was said for this long."""

    daily_hour: int | None = None
    """This hour has struck since something was said last."""

    zone: str = "UTC"
    """Whose hour, as in `Europe/Berlin`."""

    def due(self, last_ms: int, now_ms: int) -> bool:
        """Whether a conversation in which something was said last at `last_ms` is over."""
        if self.idle_minutes is not None and now_ms - last_ms >= self.idle_minutes * 60_000:
            return True
        if self.daily_hour is None:
            return False
        now = datetime.fromtimestamp(now_ms / 1000, tz=UTC).astimezone(ZoneInfo(self.zone))
        # Once a day, also where the clocks go back over it: then it has struck the first time.
        struck = now.replace(hour=self.daily_hour, minute=0, second=0, microsecond=0, fold=0)
        if struck > now:
            struck -= timedelta(days=1)
        return last_ms < struck.timestamp() * 1000


class SourcePolicy(Struct, frozen=True, kw_only=True):
    """How messages of one source are taken and answered, unless a call says otherwise."""

    busy: Busy = "queue"

    debounce_s: float = 0.0
    """With `collect`: a turn starts when nothing more has come for this long."""

    deliver: Any = None
    """`deliver(delivery)`, sync or async, sends to the platform and may return the platform's id of
    what it sent. Without it deliveries wait to be taken by `runtime.deliveries.take`.
    """

    on_unknown: OnUnknown = "resend"
    """What becomes of a delivery that may or may not have arrived: it is sent again, marked as
    possibly repeated, or it stays `unknown` until a person decides.
    """

    on_late: OnLate = "run"
    """What becomes of a timer whose time came while nobody served."""

    late_after_s: float = _LATE_S
    """From when on a timer counts as late."""

    reset: ResetPolicy | None = None


PLAIN = SourcePolicy()  # of a source about which nobody has said anything


def source_of(key: str) -> str:
    """A key's part before the first colon."""
    return key.partition(":")[0]


def name_of(source: str, given_id: str) -> str:
    """One name for an id of this source, and of no other: a source may have a colon in it."""
    return f"{source.replace('%', '%25').replace(':', '%3A')}:{given_id}"


def check_busy(busy: object, debounce_s: object) -> None:
    """Raise unless it is a policy of ours."""
    if busy not in BUSY_POLICIES:
        hint = f"use one of {', '.join(BUSY_POLICIES)}"
        raise InvalidContentError("busy", f"{shown(busy)} is no policy", hint=hint)
    if not _is_number(debounce_s) or not 0 <= debounce_s <= _DEBOUNCE_S_MAX:
        hint = f"give seconds, from 0 to {_DEBOUNCE_S_MAX:g}"
        raise InvalidContentError(
            "debounce_s", f"{shown(debounce_s)} is no time to wait", hint=hint
        )


def check_source(name: str, policy: object) -> None:
    """Raise unless everything in a source's policy can be done."""
    check_name("sources", name)
    if not isinstance(policy, SourcePolicy):
        problem = f"{type(policy).__name__} is no policy"
        raise InvalidContentError(f"sources[{name!r}]", problem, hint="give a SourcePolicy")
    check_busy(policy.busy, policy.debounce_s)
    check_deliver(policy.deliver, policy.on_unknown)
    if policy.on_late not in get_args(OnLate):
        raise InvalidContentError("on_late", f"{shown(policy.on_late)} is none", hint="run or skip")
    if not _is_number(policy.late_after_s) or not 0 <= policy.late_after_s < float("inf"):
        problem = f"{shown(policy.late_after_s)} is no time"
        raise InvalidContentError("late_after_s", problem, hint="give seconds, 0 or more")
    if policy.reset is not None:
        _check_reset(policy.reset)


def check_deliver(deliver: object, on_unknown: object) -> None:
    """Raise unless it can be called, and knows what to do about the unknown."""
    if deliver is not None and not callable(deliver):
        problem = f"{type(deliver).__name__} can't be called"
        raise InvalidContentError("deliver", problem, hint="give a function of a delivery")
    if on_unknown not in get_args(OnUnknown):
        raise InvalidContentError(
            "on_unknown", f"{shown(on_unknown)} is none", hint="resend or hold"
        )


def _check_reset(reset: object) -> None:
    if not isinstance(reset, ResetPolicy):
        problem = f"{type(reset).__name__} is no policy"
        raise InvalidContentError("reset", problem, hint="give a ResetPolicy")
    idle, hour = reset.idle_minutes, reset.daily_hour
    if idle is not None and (not _is_number(idle) or not 0 < idle < float("inf")):
        raise InvalidContentError("idle_minutes", f"{shown(idle)} is no time", hint="give minutes")
    if hour is not None and (type(hour) is not int or not 0 <= hour <= 23):
        raise InvalidContentError("daily_hour", f"{shown(hour)} is no hour", hint="give 0 to 23")
    try:
        ZoneInfo(reset.zone)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError) as error:
        hint = "use a name like Europe/Berlin, and see that the machine has time zone data"
        raise InvalidContentError(
            "zone", f"{shown(reset.zone)} is not known here", hint=hint
        ) from error


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
