"""A key's session changes by a committed route write, and in no other way (contract B5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from onepen import OnepenError, open_sqlite
from onepen.storage.identity import SessionKey
from onepen.testing import images, simulate

from ..actors.fixtures import StillClock
from .world import (
    DATABASE,
    KEYS,
    OPERATIONS,
    SETTINGS,
    Account,
    Step,
    World,
    check_key,
    directory_of,
    recorded,
    scratch,
    steps,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from onepen.storage.identity import SessionId

Routes = dict[str, "SessionId | None"]


class Seen(NamedTuple):
    """What storage says between two steps."""

    routes: Routes
    writes: int


class Walker(World):
    """One step at a time; between them, a look at where each key is."""

    def __init__(self, directory: Path, account: Account, vfs: str | None = None) -> None:
        super().__init__(directory, account, vfs)
        self.seen: list[Seen] = []

    async def look(self) -> Seen:
        routes = {key: await self.runtime.sessions.current(key) for key in KEYS}
        return Seen(routes, self.runtime.statistics().route_writes)

    async def _lane(self, number: int, lane: Sequence[Step]) -> None:
        self.seen.append(await self.look())
        self.account.told("routes", self.seen[-1].routes)
        for place, step in enumerate(lane):
            try:
                await self._take(step, f"{self.start}.{number}.{place}")
            except OnepenError:
                pass  # refused, with a type
            await self._rest()
            self.seen.append(await self.look())
            self.account.told("routes", self.seen[-1].routes)
            self._compare()

    async def _rest(self) -> None:
        """Until no turn is under way: a submitted message starts one behind the step's back."""
        for key in KEYS:
            while any(s.key == key and not s.idle for s in directory_of(self.runtime).sessions()):
                await self.runtime.open_session(key)

    def _compare(self) -> None:
        before, after = self.seen[-2:]
        moved = [key for key in KEYS if before.routes[key] != after.routes[key]]
        written = after.writes - before.writes
        # A key may move more than once in a step (a turn behind a boundary that rotates), and a
        # submitted message may bring a move along; but never without a write, and no write is idle.
        assert written >= len(moved), f"{moved} moved by {written} route writes"
        assert moved or not written, f"{written} route writes moved nobody"
        for session in directory_of(self.runtime).sessions():
            if session.idle and session.scribe.route.session_id is not None:
                assert session.scribe.route.session_id == after.routes[session.key]
                assert session.binding.session_id == session.scribe.page.session_id


def walks() -> st.SearchStrategy[list[Step]]:
    return st.lists(steps((*OPERATIONS, "open named", "resume first", "evict")), max_size=10)


@given(walks())
@settings(max_examples=60)
def test_no_sequence_of_operations_moves_a_key_without_a_committed_route_write(
    walk: list[Step],
) -> None:
    """B5: and none writes a route that moves nobody (B4)."""
    with scratch() as directory:
        simulate(Walker(directory, Account()).run, [], [walk])


@given(walks(), st.lists(st.floats(0, 1), min_size=3, max_size=3), st.integers(0, 2**16))
@settings(max_examples=15)
def test_wherever_it_crashes_each_key_is_where_it_was_told_or_where_it_was_going(
    walk: list[Step], cuts: list[float], seed: int
) -> None:
    """B1, B5, INV-6: every image names one session for each key, and none that was rotated away."""
    with scratch() as directory:
        account = Account()
        with recorded(directory, account) as disk:
            walker = Walker(directory, account, disk.name)
            simulate(walker.run, [], [walk])
            log = disk.log
        for cut in cuts:
            point = int(cut * len(log.entries))
            for image in images(log, torn=1, seed=seed, start=point, stop=point + 1):
                told = image.payloads("routes")
                following = [seen.routes for seen in walker.seen[len(told) :][:1]]
                with scratch() as left:
                    image.write_to(left / "disk")
                    _check_routes(left / "disk", told, following)


def _check_routes(directory: Path, told: Sequence[Any], following: Sequence[Any]) -> None:
    engine = open_sqlite(directory / DATABASE, StillClock(), SETTINGS.engine)
    try:
        with engine.reading() as reader:
            for key in KEYS:
                route = reader.route(SessionKey(key))
                found = None if route is None else route.session_id
                check_key(reader, SessionKey(key))
                if told and following and told[-1][key] == following[0][key]:
                    # Told before and behind: it can't have been anywhere else, unless it went
                    # there and back within the step, which no step does.
                    assert found == told[-1][key], f"{key} is at {found}, told was {told[-1][key]}"
                elif told and found is None:
                    assert told[-1][key] is None, f"{key} was told to be at {told[-1][key]}"
    finally:
        engine.close()
