"""The process that `onepen stress` tests, with a bug in it: `PLANTED_BUG` names one.

Run as `python -m tests.runtime.planted`. Each bug is put into the library's own code, and `BUGS`
says by which rule of the verdict it must be found.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
import trio

from onepen import Runtime, Submission
from onepen.actors.events import Subscription
from onepen.actors.line import Accepted
from onepen.actors.outbox import posting as posted
from onepen.runtime import runtime as runtime_module
from onepen.runtime.opening import open_runtime
from onepen.runtime.stress import child
from onepen.storage.sqlite.engine import SqliteEngine

if TYPE_CHECKING:
    from collections.abc import Callable

_commit, _submit, _reply = SqliteEngine.commit, Runtime.submit, Submission.reply
_checked = runtime_module._checked  # pyright: ignore[reportPrivateUsage]
_offer = Subscription.offer
_seen = 0


def every(number: int) -> bool:
    """Each so-manieth time that somebody asks."""
    global _seen
    _seen += 1
    return _seen % number == 0


def slow_commit(engine: SqliteEngine) -> None:
    time.sleep(0.3)  # in the writer's own thread
    _commit(engine)


def early_acknowledgement() -> None:
    """It says durable before the commit; and the commit takes its time, as on a slow disk."""
    early = property(lambda _: trio.lowlevel.checkpoint)
    patch.object(Accepted, "durable", early).start()
    patch.object(SqliteEngine, "commit", slow_commit).start()


def no_dedupe() -> None:
    """Each message is a new one, whatever its id."""

    def checked(inbound: Any, source: str, fresh_id: Any, turn_id: Any) -> Any:
        return _checked(msgspec.structs.replace(inbound, id=None), source, fresh_id, turn_id)

    patch.object(runtime_module, "_checked", checked).start()


def other_words() -> None:
    """What is told is not what is stored."""

    async def reply(submission: Submission) -> Any:
        told = await _reply(submission)
        return msgspec.structs.replace(told, text=f"{told.text}!") if every(4) else told

    patch.object(Submission, "reply", reply).start()


def dropped_reply() -> None:
    """Some turns end, and nothing of it is put into the outbox."""

    def posting(*given: Any, **named: Any) -> Any:
        return () if every(4) else posted(*given, **named)

    patch("onepen.actors.ending.posting", posting).start()


def lost_events() -> None:
    def offer(subscription: Subscription, event: Any) -> None:
        if not every(7):
            _offer(subscription, event)

    patch.object(Subscription, "offer", offer).start()


def deaf() -> None:
    """Some requests never come to anything."""

    async def submit(runtime: Runtime, *given: Any, **named: Any) -> Submission:
        if every(9):
            await trio.sleep_forever()
        return await _submit(runtime, *given, **named)

    patch.object(Runtime, "submit", submit).start()


def untyped_errors() -> None:
    async def submit(runtime: Runtime, *given: Any, **named: Any) -> Submission:
        if every(9):
            raise KeyError("<b>something</b> that nobody has planned")
        return await _submit(runtime, *given, **named)

    patch.object(Runtime, "submit", submit).start()


def dies() -> None:
    async def submit(runtime: Runtime, *given: Any, **named: Any) -> Submission:
        if every(9):
            os._exit(3)
        return await _submit(runtime, *given, **named)

    patch.object(Runtime, "submit", submit).start()


def no_lock() -> None:
    def flock(_: int, __: int) -> None:
        pass

    patch.object(fcntl, "flock", flock).start()


def miscounts() -> None:
    """A counter of a session moves without its rows."""

    def commit(engine: SqliteEngine) -> None:
        if every(7):
            connection: Any = engine._connection  # pyright: ignore[reportPrivateUsage]
            connection.execute(
                "UPDATE heads SET message_count = message_count + 1 "
                "WHERE session = (SELECT max(session) FROM heads)"
            )
        _commit(engine)

    patch.object(SqliteEngine, "commit", commit).start()


def leaks() -> None:
    """Opening leaves a descriptor and a task's worth of memory behind."""

    def opening(*given: Any, **named: Any) -> Any:
        os.dup(2)
        return open_runtime(*given, **named)

    patch("onepen.runtime.stress.child.open_runtime", opening).start()


def stays() -> None:
    """It does not end when it is asked to."""

    async def heed(*_: object) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT):
            await trio.sleep_forever()

    patch("onepen.runtime.stress.child.Life.heed_signals", heed).start()


BUGS: dict[str, tuple[Callable[[], None], str, tuple[str, ...]]] = {
    "early acknowledgement": (
        early_acknowledgement,
        "acknowledged messages in the file behind each end",
        (),
    ),
    "no dedupe": (no_dedupe, "no message is stored twice", ()),
    "other words": (other_words, "replies are what is stored of their turns", ()),
    "dropped reply": (dropped_reply, "ends are in the outbox", ()),
    "lost events": (lost_events, "events numbered without gap or repeat", ("--following", "1")),
    "deaf": (deaf, "acknowledged, or refused, in time", ("--request", "0.5", "--drain", "3")),
    "untyped errors": (untyped_errors, "errors are of the kinds that callers are told", ()),
    "dies": (dies, "the process lives until it is asked to end", ()),
    "no lock": (no_lock, "a second writer is kept out", ("--intruders", "1", "--drain", "5")),
    "miscounts": (miscounts, "the file keeps every rule of its own", ()),
    "leaks": (leaks, "orderly ends leave nothing behind", ()),
}
"""How it is planted, the rule that must find it, and what else the command is given."""

if __name__ == "__main__":
    name = os.environ["PLANTED_BUG"]
    (stays if name == "stays" else BUGS[name][0])()
    child.main()
