"""A process with a runtime of its own, which kills itself with SIGKILL at a chosen point.

Run as `python -m tests.contract.killed PATH SCENARIO POINT`. What was acknowledged goes out by
`os.write`, a line each, so that it is known exactly however the process ends. It comes to its end
if it never gets to the point.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import trio

from onepen import Inbound, Runtime, Turn, open_runtime
from onepen.storage.sqlite.engine import SqliteEngine

from .agents import KEY, LONG, call, echo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_commit(number: int, *, after: bool) -> None:
    """The process ends right before, or right behind, this commit from now on."""
    original = SqliteEngine.commit
    seen = 0

    def commit(engine: SqliteEngine) -> None:
        nonlocal seen
        seen += 1
        if seen == number and not after:
            die()
        original(engine)
        if seen == number:
            die()

    setattr(SqliteEngine, "commit", commit)  # noqa: B010 - a method, which types forbid


async def in_the_agent(path: str, point: str) -> None:
    """Killed by its own agent: at once, or with a tool call open."""

    async def agent(turn: Turn) -> str:
        if turn.text == "kill":
            if point == "open call":
                await turn.append(call("c1"))
                await turn.say("never stored, it waits for the result")
                # Reading is behind everything that was posted, once that is durable.
                while len(await runtime.sessions.transcript(turn.session_id)) < 4:
                    await trio.lowlevel.checkpoint()
            die()
        return await echo(turn)

    async with open_runtime(path, agent=agent) as runtime:
        say((await runtime.ask(KEY, "hello")).text)
        await runtime.ask(KEY, "kill")


async def in_a_rotation(path: str, point: str) -> None:
    """Killed around one of the commits of a rotation and the turn behind it."""

    async def agent(turn: Turn) -> str:
        if turn.text == "rotate":
            await turn.append("before")
            say(f"child {await turn.rotate('summary')}")
            await turn.append("behind")
        return await echo(turn)

    async with open_runtime(path, agent=agent) as runtime:
        parent = await _begin(runtime)
        say(f"parent {parent}")
        where, _, number = point.partition(" ")
        die_at_commit(int(number), after=where == "after")
        say((await runtime.ask(KEY, "rotate")).text)
        say((await runtime.ask(KEY, "next")).text)


async def _begin(runtime: Runtime) -> str:
    for number in range(3):
        await runtime.ask(KEY, f"{number}: {LONG}")
    await runtime.set_title(KEY, "Chat")
    parent = await runtime.sessions.current(KEY)
    assert parent is not None
    return parent


async def at_commits(path: str, point: str) -> None:
    """Numbered messages until the end comes at some commit; each reply is told."""
    where, _, number = point.partition(" ")
    async with open_runtime(path, agent=echo) as runtime:
        die_at_commit(int(number), after=where == "after")
        for n in range(20):
            reply = await runtime.ask(KEY, Inbound(text=str(n), id=f"m{n}"))
            say(reply.text)


SCENARIOS: dict[str, Callable[[str, str], Awaitable[None]]] = {
    "agent": in_the_agent,
    "rotation": in_a_rotation,
    "commits": at_commits,
}


if __name__ == "__main__":
    trio.run(SCENARIOS[sys.argv[2]], sys.argv[1], sys.argv[3])
