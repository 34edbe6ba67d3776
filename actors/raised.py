"""What somebody else's code raised: an agent's, a hook's, a summary's. Whose it is, and in words.

Keeps: whatever such code raises ends what it was called for and nothing else; also an exit, or
asyncio's cancellation, which is no `Exception`. Only trio's cancellation and the user's Ctrl-C go
on, because somebody wants an end of all this.
"""

from __future__ import annotations

from typing import cast

import trio

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


def said_by(error: BaseException) -> str:
    """An error in one line, whatever its own `str` does."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return f"{name}: (it can't be shown)"
    return f"{name}: {text}" if text else name
