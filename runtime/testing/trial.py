"""One life of a runtime with somebody's agent in a simulation, and whether it kept its word.

A trial opens the real runtime, inline, on a real file; gateways send messages under several keys
beside each other, as platforms do: in order, with an id, and again when no answer came. It keeps
account of what they were told, and holds that against the file when everything is over:

- every message is stored once, in the order in which it was sent, and every turn has ended;
- whatever a reply showed is stored, once, as it was shown;
- every transcript is valid for a model: each tool call has its result, each result its call;
- the file keeps every invariant (`check_database`);
- the agent itself has failed in no turn, unless it may.

Must never know of schedules or of what goes wrong: `checking` has those.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import trio

from ...actors.exchanges import open_calls
from ...actors.line import SessionBusyError, SessionCrashedError, TurnPendingError
from ...actors.messages import Inbound
from ...actors.page import load_messages
from ...actors.warm import AgentSource
from ...storage.engine import EngineSettings
from ...storage.errors import OnepenError, StorageUnavailableError
from ...storage.identity import SessionId, SessionKey
from ...storage.sqlite import open_sqlite
from ..opening import assemble
from ..settings import Settings
from .invariants import check_database, inspecting

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from ...actors.replies import Reply
    from ...actors.session import Session
    from ...storage.engine import Engine, Reader
    from ...storage.records import Message
    from ..runtime import Runtime

    Rows = Mapping[SessionId, tuple[SessionKey, list[Message]]]

DATABASE = "trial.db"
_START_MS = 1_700_000_000_000
_TRIES_MAX = 50
_AGAIN = (SessionBusyError, SessionCrashedError, StorageUnavailableError, TurnPendingError)
_PAGE = 10_000


class CheckFailedError(OnepenError, AssertionError):
    """A runtime with this agent did not keep its word."""

    hint = "the notes say which run it was, and what replays it"


@final
class _LoopClock:
    """A wall clock that goes with the mock clock."""

    def now(self) -> int:
        return _START_MS + int(trio.current_time() * 1000)

    def monotonic(self) -> float:
        return trio.current_time()


@final
class _Still:
    """For looking at the file, when no loop runs."""

    def now(self) -> int:
        return _START_MS

    def monotonic(self) -> float:
        return 0.0


@final
class _CountedIds:
    """Ids in the order in which they are asked for, other ones in each life."""

    def __init__(self, life: int) -> None:
        self._count = life << 32

    def fresh(self) -> str:
        self._count += 1
        return f"{self._count:032x}"


@contextmanager
def scratch() -> Generator[Path]:
    """A folder that is gone afterwards; in memory where there is such a place."""
    shared = Path("/dev/shm")
    parent = shared if os.access(shared, os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="onepen-trial-", dir=parent)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder)


@final
class Trial:
    """An agent, what people say to it, and the account of one try.

    `run` is a program for `simulate` and `explore`: a life in a folder of its own, then everything
    is checked. `expect` is given the messages of each key's current session at the end, and may
    assert what it likes.
    """

    def __init__(
        self,
        agent: Any = None,
        messages: Mapping[str, Sequence[str]] | Sequence[str] = ("hello",),
        *,
        factory: Callable[..., Any] | None = None,
        settings: Settings | None = None,
        expect: Callable[[dict[str, list[Message]]], object] | None = None,
        may_fail: bool = False,
    ) -> None:
        lanes = messages if isinstance(messages, Mapping) else {"chat:1": messages}
        self.lanes = {key: list(texts) for key, texts in lanes.items()}
        self._agent = agent
        self._factory = factory
        self._settings = settings or Settings(engine=EngineSettings(free_bytes_min=0))
        self._expect = expect
        self._may_fail = may_fail
        self._lives = 0
        self.accepted: list[tuple[str, int]] = []
        """What the runtime has said to have stored: key and place of the message."""
        self.replies: dict[tuple[str, int], Reply] = {}
        self.mark: Callable[[str, object], object] = lambda label, payload: None
        """Told of each `accepted` and `replied`, in the very moment."""
        self.runtime: Runtime | None = None
        """That of the life that is being lived."""

    async def run(self) -> None:
        with scratch() as folder:
            await self.live(folder)
            self.check(folder)

    # A life --------------------------------------------------------------------------------------

    async def live(self, folder: Path, vfs: str | None = None) -> None:
        """Open the runtime, say everything that has no answer yet, and close it in order."""
        clock, ids = _LoopClock(), _CountedIds(self._lives + 1)
        self._lives += 1

        def open_engine() -> Engine:
            return open_sqlite(folder / DATABASE, clock, self._settings.engine, vfs=vfs)

        agents = AgentSource(self._agent, self._factory)
        parts = (open_engine, clock, ids, self._settings, agents)
        async with assemble(*parts, inline=True) as runtime:
            self.runtime = runtime
            async with trio.open_nursery() as nursery:
                for key in self.lanes:
                    talk = partial(self._talk, runtime, key)
                    nursery.start_soon(talk, name=f"gateway {key}")
        self.runtime = None

    def sessions(self) -> list[Session]:
        """The actors that are alive just now."""
        if self.runtime is None:
            return []
        directory = self.runtime._directory  # pyright: ignore[reportPrivateUsage]
        return list(directory.sessions())

    async def _talk(self, runtime: Runtime, key: str) -> None:
        for place, text in enumerate(self.lanes[key]):
            if (key, place) not in self.replies:
                inbound = Inbound(text=text, id=f"{key}/{place}")
                await self._say(runtime, key, place, inbound)

    async def _say(self, runtime: Runtime, key: str, place: int, inbound: Inbound) -> None:
        """Until it is answered, as a gateway does: the same id is the same message."""
        for _ in range(_TRIES_MAX):
            try:
                submission = await runtime.submit(key, inbound)
                if (key, place) not in self.accepted:
                    self.accepted.append((key, place))
                    self.mark("accepted", (key, place))
                reply = await submission.reply()
            except _AGAIN:
                await trio.sleep(1)
                continue
            self.replies[key, place] = reply
            self.mark("replied", (key, place))
            return
        raise CheckFailedError(f"message {place} of {key} got no answer in {_TRIES_MAX} tries")

    def before(self, accepted: list[Any], replied: list[Any]) -> Trial:
        """The same trial as it stood when it had been told so much: for the life behind a crash."""
        again = Trial(
            self._agent,
            self.lanes,
            factory=self._factory,
            settings=self._settings,
            expect=self._expect,
            may_fail=self._may_fail,
        )
        again._lives = self._lives
        again.accepted = list(accepted)
        again.replies = {one: self.replies[one] for one in replied}
        return again

    # The account ---------------------------------------------------------------------------------

    def check(self, folder: Path) -> None:
        """Hold what was told against the file. Raises `CheckFailedError`, or what `expect` does."""
        violations = check_database(folder / DATABASE)
        if violations:
            raise CheckFailedError(f"the file is damaged: {'; '.join(map(str, violations[:5]))}")
        sessions = _sessions(folder)
        engine = open_sqlite(folder / DATABASE, _Still(), self._settings.engine)
        try:
            with engine.reading() as reader:
                rows = {session: _stored(reader, session) for session in sessions}
                self._check_messages(rows)
                self._check_replies(rows)
                if left := reader.unfinished_turns():
                    raise CheckFailedError(f"{len(left)} turns have not ended: {left[0].id}")
                current = {key: _current(reader, key) for key in self.lanes}
        finally:
            engine.close()
        for session, (_, messages) in rows.items():
            _check_valid(session, [one for one in messages if one.state == "active"])
        if self._expect is not None:
            self._expect(current)

    def _check_messages(self, rows: Rows) -> None:
        for key, texts in self.lanes.items():
            stored = [
                message.text
                for owner, messages in rows.values()
                for message in messages
                if owner == key and message.role == "user" and not message.carried
                if message.text in texts  # an agent may have said something under that role
            ]
            if Counter(stored) != Counter(texts):
                raise CheckFailedError(f"{key} was sent {texts}, and stored is {stored}")
            if stored != texts:
                raise CheckFailedError(f"{key} was sent {texts}, and it is stored as {stored}")

    def _check_replies(self, rows: Rows) -> None:
        stored = Counter(
            (message.uid, message.role, message.text)
            for _, messages in rows.values()
            for message in messages
            if not message.carried
        )
        for (key, place), reply in self.replies.items():
            for message in reply.messages:
                count = stored[message.uid, message.role, message.text]
                if count != 1:
                    raise CheckFailedError(
                        f"the reply to message {place} of {key} showed a message of role "
                        f"{message.role} that is stored {count} times"
                    )
            outcome = reply.outcome
            own = outcome.kind == "failed" and outcome.cause in ("agent", "deadline")
            if own and not self._may_fail:
                raise CheckFailedError(
                    f"the agent has failed at message {place} of {key}: {outcome.error}",
                    hint="mend it, or say may_fail=True",
                )


def _sessions(folder: Path) -> list[SessionId]:
    with inspecting(folder / DATABASE) as db:
        found = db.execute("SELECT id FROM sessions WHERE deleted = 0 ORDER BY n").fetchall()
    return [SessionId(str(row[0])) for row in found]


def _stored(reader: Reader, session: SessionId) -> tuple[SessionKey, list[Message]]:
    row = reader.session(session)
    assert row is not None
    found = reader.transcript(session, include_inactive=True, limit=_PAGE).messages
    return row.key, sorted(found, key=lambda message: message.seq)


def _current(reader: Reader, key: str) -> list[Message]:
    route = reader.route(SessionKey(key))
    if route is None or route.session_id is None or reader.session(route.session_id) is None:
        return []
    return load_messages(reader, route.session_id, _PAGE)


def _check_valid(session: str, messages: Sequence[Message]) -> None:
    if unanswered := open_calls(messages):
        raise CheckFailedError(f"{session}: {len(unanswered)} tool calls have no result")
    called = set[str]()
    for message in messages:
        called.update(call.id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id not in called:
            raise CheckFailedError(f"{session}: a result without a call: {message.tool_call_id}")
