"""A gateway that kills itself with SIGKILL in the middle of handing something over.

Run as `python -m tests.crash.handing_over FOLDER SCENARIO POINT`. What it does to the world goes
into files, by one write each, so that they tell exactly what happened before the end: `world` has a
line for each side effect, `chat` one for each message that people were shown. A point is a command
and a side of the commit that stores it (`EndTurn before`), or a side of something that is done to
the world (`pay after`). It comes to its end if it never gets to the point.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from onepen import (
    Delivery,
    Inbound,
    SessionSettings,
    Settings,
    SourcePolicy,
    Turn,
    WriterSettings,
    open_runtime,
)
from onepen.storage.sqlite.engine import SqliteEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from onepen import Runtime

KEY = "chat:dm:1"
DATABASE = "chat.db"
WEBHOOK = Inbound("pay 5", id="u1", reply_to="chat-1")
QUESTION = Inbound("ask", id="u1", reply_to="chat-1")
ALARM = Inbound("tick", id="u1", reply_to="chat-1")


class World:
    """The outside, as files that outlive the process."""

    def __init__(self, folder: Path, at: Callable[[str], object]) -> None:
        self._folder = folder
        self._at = at

    def _note(self, file: str, line: str) -> None:
        descriptor = os.open(self._folder / file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)

    def lines(self, file: str) -> list[str]:
        path = self._folder / file
        return path.read_text().splitlines() if path.exists() else []

    def pay(self, amount: int, effect_id: str) -> dict[str, int]:
        self._at("pay before")
        self._note("world", f"{effect_id} {amount}")
        self._at("pay after")
        return {"paid": amount}

    def deliver(self, delivery: Delivery) -> str:
        self._at(f"deliver {delivery.kind} before")
        self._note("chat", f"{delivery.id} {delivery.text}")
        self._at(f"deliver {delivery.kind} after")
        return f"platform-{delivery.id}"

    def shown(self) -> list[str]:
        """What people read: a platform with idempotency keys shows each delivery once."""
        return list(dict(line.split(" ", 1) for line in self.lines("chat")).values())


class Agent:
    """Pays, asks, or just answers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.attempts: list[int] = []

    async def run(self, turn: Turn) -> str:
        self.attempts.append(turn.attempt)
        word, _, rest = turn.text.partition(" ")
        if word == "pay":
            call = {"id": "c1", "name": "pay", "arguments": rest}
            await turn.append({"role": "assistant", "tool_calls": [call]})
            paid = await turn.effect(self._world.pay, int(rest), on_unknown="retry")
            await turn.append({"role": "tool", "tool_call_id": "c1", "content": str(paid)})
            return f"paid {paid['paid']}"
        if word == "ask":
            return f"you said {await turn.ask_user('may I?', ('yes', 'no'))}"
        return f"re {turn.text}"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str) -> Callable[[str], object]:
    """Watch the commits; what is returned watches the world."""
    name, _, side = point.rpartition(" ")
    stage, commit = SqliteEngine.stage, SqliteEngine.commit
    reached = False

    def staged(engine: SqliteEngine, units: Any) -> Any:
        nonlocal reached
        reached = any(name in _names(command) for unit in units for command in unit.commands)
        return stage(engine, units)

    def committed(engine: SqliteEngine) -> None:
        if reached and side == "before":
            die()
        commit(engine)
        if reached:
            die()

    setattr(SqliteEngine, "stage", staged)  # noqa: B010 - a method, which types forbid
    setattr(SqliteEngine, "commit", committed)  # noqa: B010

    def at(passed: str) -> None:
        if passed == point:
            die()

    return at


def _names(command: Any) -> tuple[str, ...]:
    kind = type(command).__name__
    state = getattr(command, "state", None) or getattr(command, "attempt", None)
    return (kind, f"{kind} {state}")


async def live(folder: str, scenario: str, point: str) -> None:
    world = World(Path(folder), die_at(point))
    async with opened(Path(folder), world) as runtime:
        await SCENARIOS[scenario](runtime)
        while runtime.statistics().deliveries.sent < len(await runtime.deliveries.list()):
            await trio.lowlevel.checkpoint()


def opened(folder: Path, world: World, recovery: Any = "mark", agent: Agent | None = None) -> Any:
    # A commit for each unit, so that a point is between two steps and not in a batch of several.
    writer = WriterSettings(batch_rows_max=1)
    settings = Settings(sessions=SessionSettings(recovery=recovery), writer=writer)
    sources = {"chat": SourcePolicy(deliver=world.deliver)}
    return open_runtime(
        folder / DATABASE, agent=agent or Agent(world), settings=settings, sources=sources
    )


async def pay(runtime: Runtime) -> None:
    await (await runtime.submit(KEY, WEBHOOK)).reply()


async def ask(runtime: Runtime) -> None:
    submission = await runtime.submit(KEY, QUESTION)
    while not runtime.statistics().deliveries.sent:  # the question was shown
        await trio.lowlevel.checkpoint()
    await runtime.approvals.answer(KEY, "yes")
    await submission.reply()


async def alarm(runtime: Runtime) -> None:
    at = datetime.now(UTC) + timedelta(seconds=0.05)
    await (await runtime.submit(KEY, ALARM, at=at)).reply()


async def post(runtime: Runtime) -> None:
    await runtime.post(KEY, "good morning", reply_to="chat-1", id="p1")


SCENARIOS = {"pay": pay, "ask": ask, "alarm": alarm, "post": post}

if __name__ == "__main__":
    trio.run(live, sys.argv[1], sys.argv[2], sys.argv[3])
