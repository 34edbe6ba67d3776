"""A process that is killed while it answers somebody who wants a reply, or while it makes up for
that.

Run as `python -m tests.contract.killed_answering PATH answer HOW`, which kills itself in the middle
of a turn, or as `… PATH recover POLICY POINT`, which opens what the first one has left and kills
itself around one of its commits, or comes to its end.
"""

from __future__ import annotations

import sys
from typing import Any

import trio

from onepen import Inbound, SessionSettings, Settings, Turn, open_runtime

from .agents import KEY, call, echo
from .killed import die, die_at_commit

FIRST = Inbound("hello", id="m1", reply_to="chat-1")
JOINED = Inbound("me too", id="m2", reply_to="chat-2")
ROWS = {"at once": 1, "open call": 2, "joined": 2}
"""How the turn is cut, and how many of its rows are durable by then."""


async def answer(path: str, how: str) -> None:
    """One turn, from which nobody gets an answer any more."""
    begun = trio.Event()

    async def agent(turn: Turn) -> None:
        begun.set()
        if how == "open call":
            await turn.append(call("c1"))
        while how == "joined" and not await turn.steering():
            pass
        # Reading sees what is durable: only then is it known that the rows are there.
        while len(await runtime.sessions.transcript(turn.session_id)) < ROWS[how]:
            await trio.lowlevel.checkpoint()
        die()

    async with open_runtime(path, agent=agent) as runtime:
        submission = await runtime.submit(KEY, FIRST)
        await begun.wait()
        if how == "joined":
            await runtime.submit(KEY, JOINED, busy="steer")
        await submission.reply()


async def recover(path: str, policy: Any, point: str) -> None:
    """The next start, up to the end of the turn if it gets there."""
    where, _, number = point.partition(" ")
    die_at_commit(int(number), after=where == "after")
    # It is killed more often than any message would be tried.
    sessions = SessionSettings(recovery=policy, turn_tries_max=1000)
    async with open_runtime(path, agent=echo, settings=Settings(sessions=sessions)) as runtime:
        while await runtime.turns.list():
            await trio.lowlevel.checkpoint()


if __name__ == "__main__":
    if sys.argv[2] == "answer":
        trio.run(answer, sys.argv[1], sys.argv[3])
    else:
        trio.run(recover, sys.argv[1], sys.argv[3], sys.argv[4])
