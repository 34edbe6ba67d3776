"""What somebody else's code raised: an agent's, a hook's, a summary's. Whose it is, and in words.

Keeps: whatever such code raises ends what it was called for and nothing else; also an exit, or
asyncio's cancellation, which is no `Exception`. Only trio's cancellation and the user's Ctrl-C go
on, because somebody wants an end of all this.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

_OURS = (trio.Cancelled, KeyboardInterrupt)


def is_theirs(error: BaseException) -> bool:
    """Whether nothing in it is trio's cancellation, or the user's Ctrl-C."""
    return ours_of(error) is None


def ours_of(error: BaseException) -> BaseException | None:
    """What of an error must go on; of a group, only that part."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return group.subgroup(_OURS)
    return error if isinstance(error, _OURS) else None


def being_cancelled() -> bool:
    """Whether somebody wants an end of the calling task, even if other code has caught that."""
    return trio.current_effective_deadline() == -math.inf


def sole_cause(error: BaseException) -> BaseException:
    """What a nursery has wrapped, if it is one thing."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    return sole_cause(group.exceptions[0]) if len(group.exceptions) == 1 else group


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error, what is in it if it is a group, and what it was raised from."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, BaseExceptionGroup):
            waiting += cast("BaseExceptionGroup[BaseException]", one).exceptions
        cause = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        if cause is not None:
            waiting.append(cause)


def said_by(error: BaseException) -> str:
    """An error in one line, whatever its own `str` does."""
    error = sole_cause(error)
    if isinstance(error, BaseExceptionGroup):
        each = map(said_by, cast("BaseExceptionGroup[BaseException]", error).exceptions)
        return "; ".join(dict.fromkeys(each))
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return f"{name}: (it can't be shown)"
    return name if text in ("", "None") else f"{name}: {text}"
