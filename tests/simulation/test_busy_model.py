"""Each busy policy against a plain model of it, whatever the schedule and whoever comes at once.

The model is the table of policies, read by somebody who knows nothing of actors: a turn that runs,
a line of those that wait, and what is to be steered in. What comes at once may be taken in any
order, and while a turn is being stopped it may be at any stage of that; so the model is a set of
states, and every observation leaves out those that it contradicts. One must be left.
"""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onepen import Inbound, SessionBusyError, SessionSettings, Settings, open_sqlite
from onepen.actors import reception, recovery
from onepen.actors.running import RunningTurn
from onepen.actors.session import Session
from onepen.actors.turn import Turn
from onepen.actors.warm import AgentSource
from onepen.runtime.opening import assemble
from onepen.storage.engine import EngineSettings
from onepen.storage.identity import SessionKey
from onepen.testing import SimulationStuckError, check_database, schedules, simulate

from ..actors.fixtures import StillClock
from ..proving import PROOF
from .world import DATABASE, CountedIds, directory_of, scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from onepen import Runtime, Submission

KEY = "one:a"
WAITING_MAX = 3
QUIET_S = 10.0  # the debounce of those who speak slowly; everything else takes no time
SETTINGS = Settings(
    sessions=SessionSettings(waiting_per_key_max=WAITING_MAX),
    engine=EngineSettings(free_bytes_min=0),
)
POLICIES = ("queue", "collect", "slowly", "steer", "interrupt", "latest", "reject")


# The model -----------------------------------------------------------------------------------


class Line(NamedTuple):
    """A turn that waits."""

    texts: tuple[str, ...]
    ahead: bool = False
    quiet: bool = False  # it waits for more to come


class State(NamedTuple):
    """One key, as far as anybody outside can tell."""

    running: tuple[str, ...] = ()
    stage: str = "idle"  # runs · stopping · stopped
    landed: tuple[str, ...] = ()
    steering: tuple[str, ...] = ()
    line: tuple[Line, ...] = ()
    opened: tuple[str, ...] = ()  # the first words of each turn, in the order of acceptance
    said: tuple[str, ...] = ()
    ends: tuple[tuple[str, str, str | None], ...] = ()  # text, kind or answer, cause

    @property
    def busy(self) -> bool:
        return self.stage != "idle" or bool(self.line)

    def ending(self, texts: Sequence[str], kind: str, cause: str | None) -> State:
        return self._replace(ends=(*self.ends, *((text, kind, cause) for text in texts)))

    def start(self, turn: Line) -> State:
        said = (*self.said, *turn.texts)
        return self._replace(running=turn.texts, stage="runs", said=said)

    def over(self, kind: str, cause: str | None) -> State:
        """The turn has ended; what found no gate is next."""
        state = self.ending((*self.running, *self.landed), kind, cause)
        left = tuple(Line((text,)) for text in self.steering)
        return state._replace(
            running=(), stage="idle", landed=(), steering=(), line=(*left, *state.line)
        )

    def further(self) -> State | None:
        """What happens next by itself."""
        if self.stage == "stopping":
            return self._replace(stage="stopped")
        if self.stage == "stopped":
            return self.over("interrupted", "superseded")
        if self.stage == "idle" and self.line and not self.line[0].quiet:
            return self._replace(line=self.line[1:]).start(self.line[0])
        return None

    def stages(self) -> Iterator[State]:
        state: State | None = self
        while state is not None:
            yield state
            state = state.further()

    def settled(self) -> State:
        return list(self.stages())[-1]


def submit(state: State, text: str, policy: str) -> tuple[State, tuple[str, int]]:
    """What becomes of a message: the table."""
    line, turn = state.line, Line((text,), quiet=policy == "slowly")
    collecting = policy in ("collect", "slowly")
    if policy == "reject" and state.busy:
        return state, ("rejected", 0)
    if collecting and line:
        if sum(len(one.texts) for one in line) + len(state.steering) >= WAITING_MAX:
            return state, ("full", 0)
        joined = line[-1]._replace(texts=(*line[-1].texts, text), quiet=turn.quiet)
        return state._replace(line=(*line[:-1], joined)), ("merged", len(line))
    gone = line if policy == "latest" else ()
    if len(line) - len(gone) + len(state.steering) >= WAITING_MAX:
        return state, ("full", 0)
    state = state._replace(opened=(*state.opened, text))
    if policy == "steer" and state.stage in ("runs", "stopping"):
        return state._replace(steering=(*state.steering, text)), ("steered", 0)
    if not state.busy and not turn.quiet:
        return state.start(turn), ("started", 0)
    for one in gone:
        state = state.ending(one.texts, "interrupted", "superseded")
    place = len(line) - len(gone)
    if policy == "interrupt":
        place = next((n for n, one in enumerate(line) if not one.ahead), len(line))
        turn = turn._replace(ahead=True)
        if state.stage == "runs":
            state = state._replace(stage="stopping")
    kept = line[len(gone) :]
    state = state._replace(line=(*kept[:place], turn, *kept[place:]))
    return state, ("superseded" if gone else "queued", len(state.line))


def cancel(state: State, text: str) -> tuple[State, bool]:
    if text in state.running:
        return state.over("interrupted", "person"), True
    if text in state.steering:
        left = tuple(one for one in state.steering if one != text)
        return state._replace(steering=left).ending((text,), "interrupted", "person"), True
    for place, turn in enumerate(state.line):
        if text in turn.texts:
            line = state.line[:place] + state.line[place + 1 :]
            return state._replace(line=line).ending(turn.texts, "interrupted", "person"), True
    return state, False


def restarted(state: State) -> State:
    """The runtime was shut down, and the next one answers whatever waits, in its order."""
    state = state.over("interrupted", "shutdown") if state.running else state
    for turn in sorted(state.line, key=lambda turn: state.opened.index(turn.texts[0])):
        state = state.start(turn).over("answered", None)._replace(line=())
    return state._replace(line=())


# The real one --------------------------------------------------------------------------------


class Desk:
    """An agent that does what it is told: to look for what was said since, or to answer."""

    def __init__(self) -> None:
        self.tell, self._told = trio.open_memory_channel[str](1)
        self.free = False

    async def run(self, turn: Turn) -> str:
        while not self.free and await self._told.receive() == "gate":
            await turn.steering()
        return f"re {turn.text}"


Step = tuple[str, Any]


class Play:
    """A program on the runtime and on the model beside each other."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._states: set[State] = {State()}
        self._submissions: dict[str, Submission] = {}
        self._lost = 0  # messages that were turned away
        self._runtime: Runtime

    def _opened(self, agent: Any, start: int) -> Any:
        return assemble(
            lambda: open_sqlite(self._directory / DATABASE, StillClock(), SETTINGS.engine),
            StillClock(),
            CountedIds(start),
            SETTINGS,
            AgentSource(agent),
            inline=True,
        )

    async def run(self, program: Sequence[Step], restart: bool) -> None:  # noqa: FBT001
        desk = Desk()
        async with self._opened(desk, 1) as self._runtime:
            for step in program:
                await self._take(desk, step)
                self._check()
            while not restart and any(state.busy for state in self._states):
                await self._take(desk, ("finish", None))
                await self._take(desk, ("wait", None))
                self._check()
        if restart:
            free = Desk()
            free.free = True
            async with self._opened(free, 2) as self._runtime:
                await self._runtime.post(KEY, "wake up")
                while await self._runtime.turns.list():  # noqa: ASYNC110 - a mock clock jumps
                    await trio.sleep(0.01)
            self._states = {restarted(state) for state in self._states}
        await self._compare()

    async def _take(self, desk: Desk, step: Step) -> None:
        name, given = step
        runs = {state.stage for state in self._states} == {"runs"}
        match name:
            case "submit":
                await self._submit(given)
            case "gate" if runs:
                await desk.tell.send("gate")
                self._states = {_gate(state) for state in self._states}
            case "finish" if runs:
                await desk.tell.send("finish")
                self._states = {state.over("answered", None).settled() for state in self._states}
            case "cancel" if self._submissions:
                texts = sorted(self._submissions)
                await self._cancel(texts[int(given) % len(texts)])
            case "wait":
                await trio.sleep(3 * QUIET_S)
                self._states = {_quiet(state).settled() for state in self._states}
            case _:
                pass
        await trio.sleep(0.01)

    async def _submit(self, policies: Sequence[str]) -> None:
        """Several messages at once."""
        seen: dict[str, tuple[str, int]] = {}

        async def one(text: str, policy: Any) -> None:
            debounce_s = QUIET_S if policy == "slowly" else 0.0
            busy: Any = "collect" if policy == "slowly" else policy
            try:
                submission = await self._runtime.submit(
                    KEY, Inbound(text, id=text), busy=busy, debounce_s=debounce_s
                )
            except SessionBusyError:
                seen[text] = ("full", 0)
                return
            seen[text] = (submission.disposition, submission.position)
            if submission.disposition != "rejected":
                self._submissions[text] = submission

        first = len(self._submissions) + self._lost
        said = [(f"m{first + n}", policy) for n, policy in enumerate(policies)]
        async with trio.open_nursery() as nursery:
            for text, policy in said:
                nursery.start_soon(one, text, policy)
        self._lost += sum(text not in self._submissions for text, _ in said)
        before, self._states = self._states, set()
        for order in permutations(said):
            states = before
            for text, policy in order:
                after = (submit(s, text, policy) for state in states for s in state.stages())
                states = {state for state, told in after if told == seen[text]}
            self._states |= {state.settled() for state in states}
        assert self._states, f"no reading of the policies explains {seen} in any of {before}"

    async def _cancel(self, text: str) -> None:
        done = await self._runtime.turns.cancel(self._submissions[text].turn_id)
        after = (cancel(state, text) for state in self._states)
        self._states = {state.settled() for state, told in after if told == done}
        assert self._states, f"{text} was{'' if done else ' not'} cancelled"

    def _check(self) -> None:
        """Nobody is forgotten, and nobody waits who could run."""
        texts: tuple[str, ...] = ()
        for session in directory_of(self._runtime).sessions():
            if session.turn is not None:
                texts = tuple(str(body.text) for body in session.turn.waiting.bodies)
        self._states = {state for state in self._states if state.running == texts}
        assert self._states, f"{texts} is running"

    async def _compare(self) -> None:
        """What is stored, and what everybody was told."""
        said, ends = await self._stored()
        found = {(state.said, frozenset(state.ends)) for state in self._states}
        assert (said, ends) in found, f"{(said, ends)} is none of {found}"
        assert check_database(self._directory / DATABASE) == []

    async def _stored(self) -> tuple[tuple[str, ...], frozenset[tuple[str, str, str | None]]]:
        engine = open_sqlite(self._directory / DATABASE, StillClock(), SETTINGS.engine)
        try:
            with engine.reading() as reader:
                session = reader.session_of_key(SessionKey(KEY))
                rows = () if session is None else reader.transcript(session.id, limit=999).messages
                said = tuple(str(row.text) for row in rows if row.role == "user")
                ends: set[tuple[str, str, str | None]] = set()
                for text in self._submissions:
                    entry = reader.inbound("one", text)
                    assert entry is not None
                    turn = reader.turn(entry.into or entry.turn_id)
                    assert turn is not None
                    assert turn.outcome is not None
                    ends.add((text, turn.outcome.kind, turn.outcome.cause))
        finally:
            engine.close()
        return said, frozenset(ends)


def _gate(state: State) -> State:
    said = (*state.said, *state.steering)
    return state._replace(landed=(*state.landed, *state.steering), steering=(), said=said)


def _quiet(state: State) -> State:
    return state._replace(line=tuple(one._replace(quiet=False) for one in state.line))


def programs() -> st.SearchStrategy[list[Step]]:
    burst = st.lists(st.sampled_from(POLICIES), min_size=1, max_size=3)
    step = st.one_of(
        st.tuples(st.just("submit"), burst),
        st.tuples(st.just("submit"), burst),
        st.tuples(st.sampled_from(("gate", "finish", "wait")), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
    )
    return st.lists(step, min_size=1, max_size=8)


@given(programs(), schedules(), st.booleans())
@settings(max_examples=2_000 if PROOF else 100)
@example([("submit", ["queue"]), ("submit", ["interrupt"] * 3)], [], False)
@example([("submit", ["queue"]), ("submit", ["interrupt", "steer"])], [], False)
@example([("submit", ["queue"]), ("submit", ["steer", "steer"]), ("gate", None)], [], True)
@example([("submit", ["slowly"]), ("submit", ["queue"]), ("cancel", 0)], [], False)
@example([("submit", ["queue"]), ("submit", ["queue", "queue"]), ("submit", ["latest"])], [], True)
def test_a_busy_key_does_what_a_plain_reading_of_its_policies_says(
    program: list[Step],
    schedule: list[int],
    restart: bool,  # noqa: FBT001 - drawn
) -> None:
    """A7, INV-1, INV-4, INV-15: dispositions, places, the order of rows, and how each turn ends."""
    with scratch() as directory:
        simulate(Play(directory).run, schedule, program, restart)


# Tests of the test ---------------------------------------------------------------------------


def _nothing(*_: object) -> None:
    pass


def _reversed(session: Any, loaded: Any) -> Any:
    return RECOVER(session, loaded._replace(turns=loaded.turns[::-1]))


def _never(*_: object) -> bool:
    return False


def _none_lands(_: object) -> list[object]:
    return []


RECOVER = recovery.recover
THREE = ("submit", ["queue"] * 3)
BUGS: dict[str, tuple[Any, str, Any, list[Step]]] = {
    "nothing is too much": (reception, "_check_room", _nothing, [THREE, THREE]),
    "the latest is one more": (reception, "_is_stored", _never, [THREE, ("submit", ["latest"])]),
    "nothing is taken back": (Session, "take_back", _never, [THREE, ("cancel", 2)]),
    "nobody is interrupted": (RunningTurn, "interrupt", _never, [("submit", ["interrupt"] * 2)]),
    "nothing is steered in": (
        *(Turn, "_landing", _none_lands),
        [("submit", ["queue"]), ("submit", ["steer"]), ("gate", None)],
    ),
    "nobody waits for more": (Session, "_debounce", _nothing, [("submit", ["slowly"])]),
    "the last is the first": (recovery, "recover", _reversed, [THREE]),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str, record_property: Callable[[str, object], None]) -> None:
    """PROOF-8: in a program that holds without it."""
    owner, method, bug, program = BUGS[name]

    def play() -> None:
        with scratch() as directory:
            simulate(Play(directory).run, [], program, name == "the last is the first")

    play()
    with (
        patch.object(owner, method, bug),
        pytest.raises((AssertionError, ExceptionGroup, SimulationStuckError)),
    ):
        play()
    record_property("planted bug", f"{name}: a plain model of the policies, in one run")
