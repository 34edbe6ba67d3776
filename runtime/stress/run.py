"""One stress test, from an empty file to a verdict.

Keeps: it comes to an end, whatever the process under test does; interrupted, it goes straight to
the end and judges what there is. No process outlives it.

    people talk ──▶ all are calm ──▶ the rest is answered ──▶ the last life ends ──▶ the verdict
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NamedTuple, final

import apsw
import trio

from ...storage.errors import OnepenError
from .before import NOTHING
from .figures import Figures
from .health import judge_health, judge_search
from .ledger import Ledger
from .link import Link
from .people import People
from .plan import CHILD
from .stored import Stored, look
from .trouble import HopelessError, Trouble
from .verdict import Verdict
from .wire import Did, Heard, Pulse, Rotated, Shown, Wrong

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .before import Before
    from .link import Life
    from .plan import Plan
    from .verdict import Finding
    from .wire import Line

_TICK_S = 0.25
_HURRIED_S = 10.0  # how long an interrupted test waits for what is under way


class Result(NamedTuple):
    """What a stress test came to."""

    plan: Plan
    path: Path
    findings: list[Finding]
    ledger: Ledger
    figures: Figures
    lives: list[Life]
    seconds: float
    looks_s: float
    judged_s: float
    interrupted: bool

    @property
    def sound(self) -> bool:
        return not any(finding.wrong for finding in self.findings)


@final
class Test:
    """Everybody who takes part."""

    def __init__(
        self,
        plan: Plan,
        path: Path,
        tick: Callable[[Test], None],
        *,
        module: str = CHILD,
        before: Before = NOTHING,
    ) -> None:
        self.plan = plan
        self._before = before
        self.path = path
        self.ledger = Ledger()
        self.figures = Figures()
        self.link = Link(plan, path, module, self.ledger.note, self._take)
        self.people = People(plan, self.link, self.ledger, self.figures, before.first)
        self.trouble = Trouble(plan, path, self.link, self.ledger)
        self.stage = "people talk"
        self.interrupted = False
        self._tick = tick
        self._hurry = trio.Event()

    async def run(self) -> Result:
        """To the verdict. Whatever goes wrong in the process under test is a part of it.

        Raises `KeyboardInterrupt` when it is interrupted a second time.
        """
        with trio.CancelScope() as everything:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._heed_signals, everything)
                nursery.start_soon(self._keep_ticking)
                await self._play()
                nursery.cancel_scope.cancel()
        if everything.cancelled_caught:
            raise KeyboardInterrupt
        seconds = self.figures.now_s
        self.stage = "the file is judged"
        self._tick(self)
        verdict = await self._judge()
        return Result(
            plan=self.plan,
            path=self.path,
            findings=verdict.findings,
            ledger=self.ledger,
            figures=self.figures,
            lives=self.link.lives,
            seconds=seconds,
            looks_s=self.trouble.looks_s,
            judged_s=self.figures.now_s - seconds,
            interrupted=self.interrupted,
        )

    async def _play(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                self.people.beside = nursery
                nursery.start_soon(self._keep_alive, nursery.cancel_scope)
                nursery.start_soon(self._calm_down)
                await self._talk()
                self.stage = "the process ends in order"
                self.trouble.finish()
        except* HopelessError:
            self.ledger.note("drain", f"nobody serves {self.people.talking} people any more")

    async def _keep_alive(self, playing: trio.CancelScope) -> None:
        """One process after the other; behind the last one there is nobody to talk to."""
        await self.trouble.run()
        playing.cancel()

    async def _talk(self) -> None:
        with trio.CancelScope() as talking:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._limit, talking)
                await self.people.run()
                nursery.cancel_scope.cancel()
        if talking.cancelled_caught:
            left = [p for p, said in self.ledger.messages.items() if not said.told]
            words = f"{self.people.talking} people still wait, {len(left)} messages are untold"
            self.ledger.note("drain", words)

    async def _calm_down(self) -> None:
        await self._enough()
        self.stage = "the rest is answered"
        self.people.calm_down()
        self.trouble.calm_down()

    async def _enough(self) -> None:
        """Time counts from when somebody serves. A test with ends has at least one of them."""
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_when_hurried, scope)
                await self.link.serving()
                await trio.sleep(self.plan.duration_s)
                if 0 < self.plan.kill_every_s <= self.plan.duration_s:
                    await self.trouble.begun.wait()
                nursery.cancel_scope.cancel()

    async def _cancel_when_hurried(self, scope: trio.CancelScope) -> None:
        await self._hurry.wait()
        scope.cancel()

    async def _limit(self, talking: trio.CancelScope) -> None:
        """How long the rest may take, once nobody begins anything new."""
        await self.people.calm.wait()
        limit_s = min(self.plan.drain_s, _HURRIED_S) if self.interrupted else self.plan.drain_s
        talking.deadline = trio.current_time() + limit_s

    async def _heed_signals(self, everything: trio.CancelScope) -> None:
        """The first asks for the verdict so far; the second does not wait for it."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                if self.interrupted:
                    everything.cancel()
                self.interrupted = True
                self._hurry.set()

    async def _keep_ticking(self) -> None:
        while True:
            self._tick(self)
            await trio.sleep(_TICK_S)

    # What the process says -----------------------------------------------------------------------

    def _take(self, line: Line, life: Life) -> None:
        match line:
            case Shown():
                self.figures.shown()
                if self.ledger.shows(line) and line.kind == "question":
                    self.people.asked(line)
            case Did():
                self.ledger.did(line)
            case Heard():
                self.ledger.heard(line)
            case Rotated():
                self.ledger.rotated(line)
            case Wrong(rule, words):
                self.ledger.note(rule, words)
            case Pulse():
                self.figures.pulse(line, life)
            case _:
                pass

    # The verdict ---------------------------------------------------------------------------------

    async def _judge(self) -> Verdict:
        try:
            stored = await trio.to_thread.run_sync(look, self.path, self.plan, self._before)
        except (OSError, apsw.Error, OnepenError) as error:
            self.ledger.note("file", f"it can't be read: {error}")
            stored = Stored()
        verdict = Verdict(self.plan, self.ledger, stored, self._before)
        verdict.judge()
        judge_health(verdict, self.plan, self.figures, self.link.lives, self.path)
        await judge_search(verdict, stored, self.path)
        verdict.findings.sort(key=lambda finding: -bool(finding.wrong))
        return verdict
