"""The real engine and pen do what the page says: traces of the model, replayed and compared."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from onepen.storage.commands import OpenIncarnation
from onepen.storage.errors import BatchUnknownError
from onepen.storage.sqlite import engine as engine_module
from onepen.storage.sqlite.engine import HANDLERS, SqliteEngine
from onepen.storage.sqlite.handlers import Handler
from tests.crash.campaign import scratch

from ..proving import PROOF
from .bugs import BUGS
from .explorer import explore
from .replaying import Difference, covering, replay
from .rig import past_the_lock, prepared_files
from .scopes import SCOPES, scope
from .steps import Protocol
from .test_model import explored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from onepen.storage.sqlite.transaction import Transaction
    from onepen.storage.units import Unit

    from .explorer import Explored
    from .replaying import Pair, Replayed
    from .scopes import Scope
    from .state import Label

RANDOM_TRACES = 400 if PROOF else 10


class Replayer:
    """Traces of one scope, each on a file of its own."""

    def __init__(self, chosen: Scope) -> None:
        self._start = chosen.start
        with scratch() as root:
            self._files = prepared_files(root, self._start.disk.synced)
        self.traces = self.steps = self.finished = 0

    def run_all(self, traces: Iterable[tuple[Label, ...]]) -> None:
        for trace in traces:
            self.run(trace)

    def run(self, trace: tuple[Label, ...], protocol: Protocol | None = None) -> Replayed:
        with scratch() as root, past_the_lock():
            done = replay(root, self._files, protocol or Protocol(), self._start, trace)
        self.traces += 1
        self.steps += done.steps
        self.finished += done.finished
        return done


def cover(chosen: Scope, done: set[Pair]) -> Replayer:
    replayer = Replayer(chosen)
    traces = covering(explored(chosen.name), done, Random(0))
    trace = next(traces, None)
    while trace is not None:
        try:
            trace = traces.send(replayer.run(trace).steps)
        except StopIteration:
            break
    return replayer


def test_each_step_behind_each_other_is_done_as_the_page_says(
    record_property: Callable[[str, object], None],
) -> None:
    """What is stored, what is told and what is left to do agree after every step.

    Over all scopes together; `make proof` covers each scope by itself.
    """
    done: set[Pair] = set()
    traces = steps = finished = 0
    for chosen in SCOPES:
        replayer = cover(chosen, set() if PROOF else done)
        traces += replayer.traces
        steps += replayer.steps
        finished += replayer.finished
    print(traces, steps, finished)  # noqa: T201 - how much was shown
    assert finished > traces / 2, "most traces must be followed to their end"
    record_property("protocol traces replayed", traces)
    record_property("protocol steps replayed", steps)


@pytest.mark.parametrize("name", [chosen.name for chosen in SCOPES])
def test_any_run_is_done_as_the_page_says(name: str) -> None:
    """From the start to where nothing is left to do, by chance."""
    chance = Random(name)
    Replayer(scope(name)).run_all(_any_run(explored(name), chance) for _ in range(RANDOM_TRACES))


def _any_run(graph: Explored, chance: Random) -> tuple[Label, ...]:
    # Steps alone would hardly ever come far: from a state anywhere, on to an end.
    number = chance.randrange(len(graph.states))
    trace = list(graph.trace(number))
    while out := graph.edges[number]:
        label, number = chance.choice(out)
        trace.append(label)
    return tuple(trace)


# Tests of the test: an engine that is wrong, and a page that is


def _no_guards() -> AbstractContextManager[object]:
    def accept(tx: Transaction, unit: Unit) -> None:
        pass

    return patch.object(engine_module, "check_guards", accept)


def _no_epoch_check() -> AbstractContextManager[object]:
    def begin(engine: SqliteEngine, tx: Transaction) -> None:
        db: Any = engine._db  # pyright: ignore[reportPrivateUsage]
        db.execute("BEGIN IMMEDIATE")
        rows = db.execute("UPDATE pen SET commit_seq = commit_seq + 1 RETURNING commit_seq")
        tx.commit_seq = rows.fetchall()[0][0]
        tx.forget()

    return patch.object(SqliteEngine, "_begin", begin)


def _commit_error_ignored() -> AbstractContextManager[object]:
    committed = SqliteEngine.commit

    def commit(engine: SqliteEngine) -> None:
        try:
            committed(engine)
        except BatchUnknownError:
            engine._broken = False  # pyright: ignore[reportPrivateUsage]

    return patch.object(SqliteEngine, "commit", commit)


def _judged_alone() -> AbstractContextManager[object]:
    """A take-over that is sent again is judged by the loser's incarnation, as it once was."""

    def applied(tx: Transaction, command: OpenIncarnation) -> bool:
        return tx.route(command.key).incarnation == command.incarnation

    handler = Handler(applied, HANDLERS[OpenIncarnation].apply)
    return patch.dict(HANDLERS, {OpenIncarnation: handler})


WRONG_ENGINES: dict[str, tuple[Callable[[], AbstractContextManager[object]], str]] = {
    "no guards": (_no_guards, "predecessors"),
    "no epoch check": (_no_epoch_check, "two processes"),
    "a failed commit is believed": (_commit_error_ignored, "crashes"),
    "a take-over is judged alone": (_judged_alone, "two keys"),
}


@pytest.mark.parametrize("name", WRONG_ENGINES)
def test_an_engine_that_is_wrong_is_found(name: str) -> None:
    plant, where = WRONG_ENGINES[name]
    with plant(), pytest.raises(Difference):
        cover(scope(where), set())


@pytest.mark.parametrize("name", ["no incarnation check", "no base seq", "no epoch check"])
def test_a_page_that_is_wrong_is_found(name: str) -> None:
    """The trace of a planted bug of the protocol is one that the real engine refuses to follow."""
    planted = BUGS[name]
    found = explore(planted.bug(), scope(planted.scope).start).found
    assert found is not None
    with pytest.raises(Difference, match="page"):
        Replayer(scope(planted.scope)).run(found.trace, planted.bug())
