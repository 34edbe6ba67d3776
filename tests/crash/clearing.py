"""A process that is killed in the middle of a large deletion, or of erasing a user.

Run as `python -m tests.crash.clearing PATH delete|erase NTH`. It fills a database, begins, and
kills itself with SIGKILL when the engine is to commit the NTH unit of the kind; what stands in the
file is whatever was committed before. It prints the session's id first.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import trio

from onepen import Inbound, Turn, open_runtime
from onepen.storage.sqlite.engine import SqliteEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onepen import Unit

MESSAGES = 700
KINDS = {"GiveOriginals", "DeleteSession", "PurgeSession", "EraseWork", "EraseMessages"}


async def agent(turn: Turn) -> str:
    """It says much to those who ask for it."""
    for number in range(MESSAGES if turn.text == "talk" else 0):
        await turn.append(f"pelican number {number}")
    return "done"


async def fill(path: str) -> str:
    """One long session of Ann's, and one that she shares with Bob."""
    async with open_runtime(path, agent=agent) as runtime:
        await runtime.ask("tg:ann", Inbound("talk", user="ann"))
        for number in range(60):
            user = "ann" if number % 2 else "bob"
            await runtime.ask("tg:group", Inbound(f"{user} says {number}", user=user))
        session_id = await runtime.sessions.current("tg:ann")
        await runtime.reset("tg:ann")
    assert session_id is not None
    return session_id


async def run(path: str, what: str, nth: int) -> None:
    session_id = await fill(path)
    os.write(1, f"{session_id}\n".encode())
    stage, seen = SqliteEngine.stage, 0

    def counted(engine: SqliteEngine, units: Sequence[Unit]) -> Any:
        nonlocal seen
        kinds = {type(command).__name__ for unit in units for command in unit.commands}
        if kinds & KINDS:
            seen += 1
            if seen == nth:
                stage(engine, units)
                os.kill(os.getpid(), signal.SIGKILL)
        return stage(engine, units)

    method = "stage"
    setattr(SqliteEngine, method, counted)
    async with open_runtime(path, agent=agent) as runtime:
        if what == "delete":
            await runtime.delete(session_id)
        else:
            await runtime.erase("ann")


if __name__ == "__main__":
    trio.run(run, sys.argv[1], sys.argv[2], int(sys.argv[3]))
