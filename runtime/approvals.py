"""`runtime.approvals`: what people are asked, and their answers.

An answer goes past everything that waits for the conversation, and is durable when `answer`
returns; the turn that asked goes on, in this process or, after a restart, in the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ..actors.line import Settle
from ..actors.sources import source_of
from ..storage.edge import check_count, check_name
from ..storage.errors import InvalidContentError
from ..storage.identity import SessionKey

if TYPE_CHECKING:
    from ..actors.directory import Directory
    from ..actors.writer import WriterRef
    from ..storage.records import Question


@final
class Approvals:
    """The questions of a runtime's turns."""

    def __init__(self, directory: Directory, writer: WriterRef) -> None:
        self._directory = directory
        self._writer = writer

    async def list(
        self, key: str | None = None, *, open_only: bool = True, limit: int = 500
    ) -> tuple[Question, ...]:
        """What is asked just now, the oldest first; with `open_only=False` also what was."""
        if key is not None:
            check_name("key", key)
        check_count("limit", limit)
        wanted = None if key is None else SessionKey(key)
        return await self._writer.read(
            lambda reader: reader.questions(wanted, open_only=open_only, limit=limit)
        )

    async def get(self, key: str, question_key: str) -> Question | None:
        """What is stored of a question."""
        check_name("key", key)
        check_name("question_key", question_key)
        wanted = SessionKey(key)
        return await self._writer.read(lambda reader: reader.question(wanted, question_key))

    async def answer(
        self, key: str, answer: str, *, question_key: str | None = None, by: str | None = None
    ) -> Question:
        """Answer a question of this key, the only open one if none is named.

        The same answer again is harmless. Raises `MissingError`, `AmbiguousError` if several are
        open, `InvalidContentError` for what is none of the choices, and `ConflictError` if it was
        answered otherwise, or has expired; `StorageUnavailableError` while storage is down.
        """
        check_name("key", key)
        if type(answer) is not str:
            problem = f"{type(answer).__name__} is not text"
            raise InvalidContentError("answer", problem, hint="give a string")
        for field, value in (("question_key", question_key), ("by", by)):
            if value is not None:
                check_name(field, value)
        settled = Settle(question_key, "answered", answer, by)
        source = source_of(key)
        return await self._writer.while_up(
            lambda: self._directory.ask(SessionKey(key), source, settled)
        )
