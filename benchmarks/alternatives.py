"""The same work on other libraries' stores. A script: run by the Python of an environment that has
them.

`python alternatives.py CELL` prints an outcome; both are the JSON of `cells.py`. It imports nothing
of this package, and reaches each library's connection only to read back and set the two pragmas
that decide what an acknowledgement is worth, and to ask how large the file is.

Producers are asyncio tasks, because these libraries are made for asyncio or for plain threads.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

TEXT_BYTES = 400
THREAD_MESSAGES = (
    10  # a checkpoint holds the whole list: a new thread after this many keeps it short
)
TEXTS = tuple(
    " ".join(f"{word * 7919 + text * 104729:x}" for word in range(TEXT_BYTES))[:TEXT_BYTES]
    for text in range(64)
)
# What is stored, one durable write after the other, before one message or one turn is counted.
ROLES = {"append": ("user",), "turn": ("user", "assistant")}

Append = Callable[[], Awaitable[None]]


class Meter:
    """The same as `meter.Meter`, which can't be imported here."""

    def __init__(self, cell: Any) -> None:
        self._window_s: float = cell["window_s"]
        self._open_s = time.perf_counter() + cell["warm_up_s"]
        self._close_s = self._open_s + self._window_s
        self._producers: int = cell["condition"]["producers"]
        self._least: int = cell["least_messages"]
        self._opened_s = time.perf_counter()
        self._closed = False
        self._latencies_s: list[float] = []
        self._cpu_s = time.process_time()
        self.messages = 0

    async def produce(self, append: Append) -> None:
        begun_s = time.perf_counter()
        while True:
            await append()
            ended_s = time.perf_counter()
            self.messages += 1
            if self._closed:
                break
            if ended_s < self._open_s or self.messages <= self._producers:
                self._opened_s, self._close_s = ended_s, ended_s + self._window_s
            else:
                self._latencies_s.append(ended_s - begun_s)
                count = len(self._latencies_s)
                whole = count >= self._least and count % self._producers == 0
                if whole and ended_s >= self._close_s:
                    self._closed = True
                    self._window_s = ended_s - self._opened_s
            begun_s = ended_s

    def outcome(self) -> dict[str, Any]:
        cpu_s = time.process_time() - self._cpu_s
        found = sorted(self._latencies_s)
        return {
            "messages": self.messages,
            "rate": len(found) / self._window_s,
            "p50_ms": found[len(found) // 2] * 1000 if found else None,
            "p99_ms": found[len(found) * 99 // 100] * 1000 if found else None,
            "cpu_us": cpu_s / max(1, self.messages) * 1e6,
        }


def _settings_of(connection: Any) -> str:
    """What the connection really has, which is what the comparison rests on."""
    mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    level = connection.execute("PRAGMA synchronous").fetchone()[0]
    return f"{mode}, synchronous {('OFF', 'NORMAL', 'FULL', 'EXTRA')[level]}"


def _facts(connection: Any, messages: int) -> dict[str, Any]:
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    size = pages * connection.execute("PRAGMA page_size").fetchone()[0]
    version = connection.execute("SELECT sqlite_version()").fetchone()[0]
    return {"bytes_per_message": size / max(1, messages), "sqlite": version}


async def _run(cell: Any, appenders: list[Append]) -> dict[str, Any]:
    meter = Meter(cell)
    await asyncio.gather(*(meter.produce(append) for append in appenders))
    return meter.outcome()


# openai-agents --------------------------------------------------------------------------------


async def run_openai_agents(cell: Any) -> dict[str, Any]:
    """One `SQLiteSession` for each producer, `add_items` with one message.

    It sets WAL by itself and leaves `synchronous` as SQLite was built, which is FULL; both are read
    back. Its connections belong to its own worker threads, so there is no public way to set
    anything else.
    """
    session_class = import_module("agents.memory.sqlite_session").SQLiteSession
    path = os.path.join(cell["folder"], "openai-agents.db")
    roles = ROLES[cell["condition"]["work"]]
    sessions = [session_class(f"s{n}", path) for n in range(cell["condition"]["producers"])]

    def appender(session: Any) -> Append:
        count = 0

        async def append() -> None:
            nonlocal count
            for role in roles:
                text = TEXTS[count % len(TEXTS)]
                await session.add_items([{"role": role, "content": text}])
                count += 1

        return append

    result = await _run(cell, [appender(session) for session in sessions])
    with sessions[0]._locked_connection() as connection:
        result |= _facts(connection, result["messages"])
        result["note"] = _settings_of(connection)
    for session in sessions:
        session.close()
    return result


# langgraph ------------------------------------------------------------------------------------


async def run_langgraph(cell: Any) -> dict[str, Any]:
    """One shared `SqliteSaver`, one `put` for each message, from asyncio's worker threads.

    A checkpoint holds a thread's whole list of messages. Here a thread is left after a few
    messages, so what is measured is the cost at the beginning of a conversation.
    """
    saver_class = import_module("langgraph.checkpoint.sqlite").SqliteSaver
    empty_checkpoint = import_module("langgraph.checkpoint.base").empty_checkpoint
    path = os.path.join(cell["folder"], "langgraph.db")
    roles = ROLES[cell["condition"]["work"]]
    with saver_class.from_conn_string(path) as saver:
        saver.setup()
        saver.conn.execute(f"PRAGMA synchronous={cell['condition']['synchronous']}")

        def appender(number: int) -> Append:
            messages: list[dict[str, str]] = []
            thread = 0
            config: Any = None

            def put(step: int) -> None:
                nonlocal config
                checkpoint = empty_checkpoint()
                checkpoint["channel_values"] = {"messages": messages}
                checkpoint["channel_versions"] = {"messages": step}
                metadata = {"source": "loop", "step": step}
                config = saver.put(config, checkpoint, metadata, {"messages": step})

            async def append() -> None:
                nonlocal thread, config
                for role in roles:
                    step = len(messages) % THREAD_MESSAGES
                    if step == 0:
                        messages.clear()
                        thread += 1
                        name = f"s{number}-{thread}"
                        config = {"configurable": {"thread_id": name, "checkpoint_ns": ""}}
                    text = TEXTS[(thread + step) % len(TEXTS)]
                    messages.append({"role": role, "content": text})
                    await asyncio.to_thread(put, step)

            return append

        result = await _run(cell, [appender(n) for n in range(cell["condition"]["producers"])])
        result |= _facts(saver.conn, result["messages"])
        result["note"] = _settings_of(saver.conn)
    return result


def main() -> None:
    cell = json.loads(sys.argv[1])
    run = run_openai_agents if cell["contender"] == "openai-agents" else run_langgraph
    print(json.dumps(asyncio.run(run(cell))))


if __name__ == "__main__":
    main()
