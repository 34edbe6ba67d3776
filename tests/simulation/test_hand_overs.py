"""Hand-overs under drawn schedules and power cuts: what leaves, what is done, what is asked.

The world outside is a platform that loses acknowledgements, and a counter of what was done to it;
both outlive the runtime. What they saw is in the same log as what was written to the disk, so that
it is known exactly at any crash point.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onepen import Inbound, OnepenError, SourcePolicy, open_sqlite
from onepen.actors.replies import reply_text
from onepen.storage.identity import SessionKey
from onepen.testing import FakePlatform, explore, images, schedules, simulate

from ..actors.fixtures import StillClock
from ..proving import PROOF
from .cases import Case, Ran, hold, runs
from .world import (
    BUSY,
    DATABASE,
    KEYS,
    SETTINGS,
    Account,
    Step,
    World,
    agent,
    check_world,
    recorded,
    scratch,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from pathlib import Path

    from onepen import Delivery, Turn
    from onepen.storage.records import DeliveryState

    Property = Callable[[str, object], None]

RUNS_MAX, CUTS_MAX = (2_000, 400) if PROOF else (60, 25)
KINDS = ("plain", "many", "say", "effect", "question", "gates", "tools")


class Outside:
    """What outlives every runtime: a platform, and what was done to the world."""

    def __init__(self, seed: int = 1, *, losing: float = 0.0, refusing: float = 0.0) -> None:
        self.platform = FakePlatform(seed, losing=losing, refusing=refusing)
        self.done: Counter[str] = Counter()
        self.account = Account()

    async def deliver(self, delivery: Delivery) -> str:
        self.account.told("asked to show", delivery.id)
        platform_id = await self.platform.deliver(delivery)
        self.account.told("shown", delivery.id)
        return platform_id

    async def pay(self, name: str, effect_id: str) -> str:
        await trio.lowlevel.checkpoint()
        self.done[effect_id] += 1
        self.account.told("done", effect_id)
        await trio.lowlevel.checkpoint()
        return name


class Exchange(World):
    """A runtime between people and the world."""

    def __init__(self, directory: Path, outside: Outside, vfs: str | None = None) -> None:
        super().__init__(directory, outside.account, vfs)
        self.outside = outside
        self.agent: Any = self._agent

    async def _agent(self, turn: Turn) -> str | None:
        kind, _, name = turn.text.partition(" ")
        if kind == "say":
            await turn.say(f"interim {name}")
            await turn.say(f"said {name}")
            return None
        if kind == "effect":
            paid = await turn.effect(self.outside.pay, name, key="pay", on_unknown="retry")
            return f"paid {paid}"
        if kind == "question":
            return f"heard {await turn.ask_user(f'may I {name}?', ('yes', 'no'))}"
        return await agent(turn)

    def sources(self) -> dict[str, SourcePolicy]:
        return {name: SourcePolicy(deliver=self.outside.deliver) for name in ("one", "two")}

    def message(self, key: str, text: str) -> Inbound:
        return Inbound(text, id=text, reply_to=f"chat of {key}")

    async def _take(self, step: Step, name: str) -> None:
        match step.name:
            case "answer":
                await self._answer()
            case "post":
                await self.runtime.post(step.key, f"post {name}", reply_to=f"chat of {step.key}")
            case "timer":
                message = self.message(step.key, f"{step.kind} {name}")
                self.submissions.append(await self.runtime.submit(step.key, message, at=1.0))
            case _:
                await super()._take(step, name)

    async def _answer(self) -> None:
        """What is asked by a turn that waits: whatever else is open, nobody is waiting for."""
        waiting = {t.id for t in await self.runtime.turns.list() if t.state == "waiting"}
        for question in await self.runtime.approvals.list():
            if question.turn_id not in waiting:
                continue
            try:
                await self.runtime.approvals.answer(
                    question.key, "yes", question_key=question.question_key
                )
            except OnepenError:
                pass  # its turn was stopped meanwhile

    async def end(self) -> None:
        """Somebody answers what is asked until nothing is left to do."""
        async with self._answering():
            await super().end()
            while await self.runtime.turns.list():  # noqa: ASYNC110 - the clock is a mock one
                await trio.sleep(1)
        while not await self._all_sent():  # noqa: ASYNC110
            await trio.sleep(1)

    async def _all_sent(self) -> bool:
        return all(d.state == "sent" for d in await self.runtime.deliveries.list(limit=1000))

    async def _lane(self, number: int, lane: Sequence[Step]) -> None:
        async with self._answering():
            await super()._lane(number, lane)

    @asynccontextmanager
    async def _answering(self) -> AsyncGenerator[None]:
        """Whoever waits for a turn that waits must not wait for ever: when nobody can go on, what
        is asked is answered.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_answering)
            yield
            nursery.cancel_scope.cancel()

    async def _keep_answering(self) -> None:
        while True:
            await trio.sleep(1)
            await self._answer()


# What must hold ----------------------------------------------------------------------------------


def check_exchange(directory: Path, outside: Outside, *, shut_down: bool = False) -> None:
    """The outbox says what people saw, and every turn with something to say has said it once."""
    engine = open_sqlite(directory / DATABASE, StillClock(), SETTINGS.engine)
    try:
        with engine.reading() as reader:
            deliveries: list[Delivery] = []
            after: int | None = None
            while True:
                page, after = reader.deliveries(limit=500, after=after)
                deliveries += page
                if after is None:
                    break
            deliveries.reverse()
            _check_replies(reader, deliveries)
            _check_paid(reader)
            for key in KEYS:
                assert not reader.unfinished_turns(SessionKey(key))
                assert not reader.questions(SessionKey(key), open_only=True)
            done = {
                effect.effect_id: effect
                for turn_id in turn_ids(reader)
                for effect in reader.effects(turn_id)
            }
    finally:
        engine.close()
    _check_effects(done, outside)
    states: set[DeliveryState] = {delivery.state for delivery in deliveries}
    assert states <= {"sent"}, f"something is left in the outbox: {states}"
    expected: defaultdict[str, list[str]] = defaultdict(list)
    for delivery in deliveries:
        expected[delivery.target["to"]].append(delivery.text)
    for chat, texts in expected.items():
        assert outside.platform.texts(chat) == texts, "people saw it in another order, or not"


def turn_ids(reader: Any) -> list[Any]:
    """All that ever were; no view lists them."""
    return [row[0] for row in reader._all("SELECT id FROM turns ORDER BY n")]


def _check_replies(reader: Any, deliveries: list[Delivery]) -> None:
    """A turn that has something to say has one reply in the outbox, or has said it before."""
    replies: defaultdict[str, list[Delivery]] = defaultdict(list)
    for delivery in deliveries:
        if delivery.turn_id is not None:
            replies[delivery.turn_id].append(delivery)
    for turn_id in turn_ids(reader):
        turn = reader.turn(turn_id)
        assert turn is not None
        assert turn.outcome is not None
        told = [d.text for d in replies[turn.id] if d.kind in ("reply", "interim")]
        text = reply_text(turn.outcome)
        if turn.outcome.cause == "steered" or not text:
            assert not any(d.kind == "reply" for d in replies[turn.id])
        else:
            assert told.count(text) == 1, f"{text!r} is told as {told}"
            assert told[-1] == text


def _check_paid(reader: Any) -> None:
    """Whoever says that it has paid has a record of it."""
    for turn_id in turn_ids(reader):
        outcome = reader.turn(turn_id).outcome
        if (outcome.text or "").startswith("paid"):
            assert [effect.state for effect in reader.effects(turn_id)] == ["done"]


def _check_effects(stored: Mapping[Any, Any], outside: Outside) -> None:
    for effect_id, count in outside.done.items():
        assert effect_id in stored, "something was done of which there is no record"
        effect = stored[effect_id]
        assert count <= effect.attempt, f"done {count} times in {effect.attempt} attempts"
    for effect_id, effect in stored.items():
        if effect.state == "done":
            assert outside.done[effect_id] >= 1, "recorded as done, and never done"
        assert effect.state != "begun", "a turn has ended, and its effect is still under way"


# Programs ----------------------------------------------------------------------------------------

STEPS = ("answer", "post", "timer", "interrupt", "evict", "rotate", "reset", "close", "title")


def programs() -> st.SearchStrategy[list[list[Step]]]:
    talking = st.builds(
        Step,
        st.sampled_from(("submit", "timer", *BUSY)),
        st.sampled_from(KEYS),
        st.sampled_from(KINDS),
    )
    others = st.builds(Step, st.sampled_from(STEPS), st.sampled_from(KEYS), st.just("plain"))
    lane = st.lists(st.one_of(talking, talking, others), min_size=1, max_size=4)
    return st.lists(lane, min_size=1, max_size=3)


@runs("hand-overs")
def run_case(case: Case) -> Ran:
    if case.cut is not None:
        return cut_off(case)
    with scratch() as directory:
        outside = Outside(case.seed, losing=0.2, refusing=0.2)
        run = simulate(Exchange(directory, outside).run, case.schedule, case.program)
        check_world(directory, outside.account.accepted, outside.account.answered, ended=True)
        check_exchange(directory, outside)
        return Ran(run.digest)


@pytest.mark.parametrize("shard", range(3 if PROOF else 1))
def test_whatever_the_schedule_people_get_every_answer_once_and_in_order(
    shard: int, record_property: Property
) -> None:
    """INV-1, INV-3, INV-4, PROOF-1: also where the platform loses acknowledgements and refuses."""
    ran = Counter[str]()

    @given(programs(), schedules(), st.integers(0, 5))
    @settings(max_examples=RUNS_MAX)
    @example([[Step("submit", kind="question"), Step("answer")], [Step("interrupt")]], [], 0)
    @example([[Step("submit", kind="effect"), Step("interrupt")]], [0, 1, 1], 0)
    @example([[Step("submit", kind="question"), Step("rotate"), Step("answer")]], [], 0)
    def any_run_holds(program: list[list[Step]], schedule: list[int], seed: int) -> None:
        hold(Case("hand-overs", program, schedule, seed))
        ran["runs"] += 1

    any_run_holds()
    record_property("interleavings", ran["runs"])


CANONICAL: dict[str, list[list[Step]]] = {
    "reply/reply": [[Step("submit")], [Step("submit")]],
    "ask/answer": [[Step("submit", kind="question")], [Step("answer"), Step("answer")]],
    "ask/interrupt": [[Step("submit", kind="question")], [Step("interrupt")]],
    "ask/answer/interrupt": [
        [Step("submit", kind="question"), Step("answer")],
        [Step("interrupt")],
    ],
    "ask/rotate": [[Step("submit"), Step("submit", kind="question"), Step("rotate")]],
    "ask/reset": [[Step("submit", kind="question"), Step("answer")], [Step("reset")]],
    "effect/interrupt": [[Step("submit", kind="effect")], [Step("interrupt")]],
    "say/steer": [[Step("submit", kind="gates"), Step("steer")], [Step("steer")]],
    "post/turn": [[Step("submit", kind="tools")], [Step("post"), Step("post")]],
    "timer/submit": [[Step("timer")], [Step("submit")]],
    "timer/close": [[Step("timer"), Step("close")], [Step("timer")]],
}


@pytest.mark.parametrize("name", CANONICAL)
def test_every_schedule_with_one_choice_holds(name: str, record_property: Property) -> None:
    """INV-1, INV-3, PROOF-2: the named programs, completely: at most one choice against the
    default.
    """
    program = CANONICAL[name]

    def factory() -> object:
        async def main() -> None:
            with scratch() as directory:
                outside = Outside()
                await Exchange(directory, outside).run(program)
                check_exchange(directory, outside)

        return main

    found = explore(factory, preemptions_max=1, free_switches=False)  # type: ignore[arg-type]
    assert found.complete
    assert found.runs > 50
    record_property("schedules searched", found.runs)


@pytest.mark.parametrize("shard", range(2 if PROOF else 1))
def test_after_a_power_cut_people_get_what_they_were_still_to_get(
    shard: int, record_property: Property
) -> None:
    """INV-2, INV-3, INV-19, PROOF-3: whatever survives; what was shown is not shown again."""
    ran = Counter[str]()

    @given(programs(), schedules(), st.floats(0, 1), st.integers(0, 2**16))
    @settings(max_examples=CUTS_MAX)
    @example([[Step("submit", kind="question"), Step("answer")]], [], 0.8, 1)
    @example([[Step("submit", kind="effect")]], [], 0.7, 3)
    def any_cut_holds(
        program: list[list[Step]], schedule: list[int], where: float, seed: int
    ) -> None:
        ran["disks"] += hold(Case("hand-overs", program, schedule, seed, where)).disks

    any_cut_holds()
    record_property("power cuts of a runtime", ran["disks"])


def cut_off(case: Case) -> Ran:
    """What is left of the run goes on, in a world that has seen what it had seen by then."""
    assert case.cut is not None
    disks = 0
    with scratch() as directory:
        outside = Outside()
        with recorded(directory, outside.account) as disk:
            world = Exchange(directory, outside, disk.name)
            run = simulate(world.run, case.schedule, case.program)
            log = disk.log
        point = int(case.cut * len(log.entries))
        for image in images(log, torn=1, seed=case.seed, start=point, stop=point + 1):
            with scratch() as left:
                image.write_to(left / "disk")
                check_recovery(left / "disk", outside, image)
            disks += 1
    return Ran(run.digest, disks)


def check_recovery(directory: Path, before: Outside, image: Any) -> None:
    """The world is as it was at the crash, and the next runtime goes on from there."""
    outside = Outside()
    asked = {str(payload) for payload in image.payloads("asked to show")}
    for chat, shown in before.platform.seen.items():
        outside.platform.remember(chat, [one for one in shown if one.delivery_id in asked])
    outside.done.update(map(str, image.payloads("done")))
    world = Exchange(directory, outside)
    world.start = 100
    waiting = _turns_of(directory, "waiting")
    simulate(world.run, [], [[Step("submit")]])
    check_exchange(directory, outside)
    for turn in _turns_of(directory, "ended"):
        cut_off = turn.outcome.kind == "interrupted"
        assert not (cut_off and turn.id in {one.id for one in waiting}), "it was only waiting"


def _turns_of(directory: Path, state: str) -> list[Any]:
    engine = open_sqlite(directory / DATABASE, StillClock(), SETTINGS.engine)
    try:
        with engine.reading() as reader:
            turns = [reader.turn(turn_id) for turn_id in turn_ids(reader)]
    finally:
        engine.close()
    return [turn for turn in turns if turn is not None and turn.state == state]
