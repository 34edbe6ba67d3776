"""A process that serves several keys and is killed in the middle of their turns, or of recovery.

Run as `python -m tests.contract.killed_serving PATH serve` or `… PATH recover POLICY NUMBER`. Every
acknowledgement goes out by `os.write`, a line each: the key, the turn and the text. The second form
opens what the first one left and kills itself behind commit number NUMBER, or comes to its end.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import trio

from onepen import SessionSettings, Settings, Turn, open_runtime

from .agents import call
from .killed import die, die_at_commit


async def agent(turn: Turn) -> str:
    if turn.text == "stream":
        await turn.say("working")
        await trio.sleep_forever()
    if turn.text == "call":
        await turn.append(call("c1", "c2"), {"role": "tool", "tool_call_id": "c2", "content": "2"})
        await trio.sleep_forever()
    return f"re: {turn.text}"


async def serve(path: str) -> None:
    """One turn that ended, two that run (one with a call open), one that waits; then the end."""
    async with open_runtime(path, agent=agent) as runtime:
        submissions = [
            await runtime.submit(key, text)
            for key, text in (
                ("test:done", "hello"),
                ("test:stream", "stream"),
                ("test:stream", "later"),
                ("test:call", "call"),
            )
        ]
        texts = ("hello", "stream", "later", "call")
        reply = await submissions[0].reply()
        for submission, text in zip(submissions, texts, strict=True):
            os.write(1, f"{submission.key}\t{submission.turn_id}\t{text}\n".encode())
        os.write(1, f"test:done\t{reply.turn_id}\t{reply.text}\n".encode())
        # Reading sees what is durable: only then is it known that the rows are there to be lost.
        for key, count in (("test:stream", 2), ("test:call", 3)):
            session_id = await runtime.sessions.current(key)
            assert session_id is not None
            while len(await runtime.sessions.transcript(session_id)) < count:
                await trio.lowlevel.checkpoint()
        die()


async def recover(path: str, policy: Any, number: str) -> None:
    """Open what was left; killed behind one of the commits of that."""
    die_at_commit(int(number), after=True)
    settings = Settings(sessions=SessionSettings(recovery=policy))
    async with open_runtime(path, agent=again, settings=settings) as runtime:
        while runtime.statistics().sessions.running or runtime.statistics().sessions.waiting:
            await trio.lowlevel.checkpoint()


async def again(turn: Turn) -> str:
    return f"resumed {turn.resumed}: {turn.text}"


if __name__ == "__main__":
    if sys.argv[2] == "serve":
        trio.run(serve, sys.argv[1])
    else:
        trio.run(recover, sys.argv[1], sys.argv[3], sys.argv[4])
