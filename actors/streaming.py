"""A message that is being written, piece by piece.

Keeps: what is shown of it is provisional until the whole is stored; the pieces together are the
message. Must never store anything: the turn does, when the block ends or is cut off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import trio

from ..storage.errors import InvalidContentError
from .messages import plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..storage.identity import Uid


@final
class Streaming:
    """A message that is being written. What is shown of it is provisional until it is stored."""

    __slots__ = ("_pieces", "_show", "finish_reason", "uid")

    def __init__(self, uid: Uid, show: Callable[[Uid, str], None]) -> None:
        self._show = show
        self._pieces: list[str] = []
        self.uid = uid
        self.finish_reason: str | None = None

    async def write(self, piece: str) -> None:
        """Show one more piece. Raises `InvalidContentError` for what no text can hold."""
        self.write_nowait(piece)
        await trio.lowlevel.checkpoint()

    def write_nowait(self, piece: str) -> None:
        """The same, for a loop that lets others go on by itself."""
        if not isinstance(piece, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidContentError(
                "piece", f"{type(piece).__name__} is not text", hint="give a string"
            )
        try:
            piece.encode()
        except UnicodeEncodeError as error:
            hint = "decode it properly, or replace such characters by U+FFFD"
            raise InvalidContentError("piece", "it holds half a character", hint=hint) from error
        self._pieces.append(piece := plain(piece))
        self._show(self.uid, piece)

    @property
    def text(self) -> str:
        """What was written so far."""
        if len(self._pieces) > 1:
            self._pieces[:] = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""
