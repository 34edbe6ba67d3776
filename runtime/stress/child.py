"""The process under test: `python -m onepen.runtime.stress.child`.

Its first line of input says what to open; orders follow. It ends in order on `Finish`, at the end
of its input, on SIGTERM (an orderly shutdown) and on SIGINT (its block is cancelled); on SIGKILL it
ends at once, as everything does.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import trio

from ...actors.sources import SourcePolicy
from ..opening import open_runtime
from ..pipe import Lines, Teller
from .agent import Crew
from .desk import Desk
from .plan import settings_of
from .script import SOURCE
from .vitals import collect_warnings, keep_telling, what_is_left, what_is_there
from .wire import Ended, Ready, decode_begin, decode_order

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ..runtime import Runtime
    from .wire import Begin, Line

_READ_BYTES = 1 << 16


async def _lines(source: trio.abc.ReceiveStream) -> AsyncIterator[bytes]:
    lines = Lines()
    while data := await source.receive_some(_READ_BYTES):
        for line in lines.take(bytes(data)):
            yield line


class Life:
    """From the first line of input to the last of output."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._in_time = True

    def _show(self, line: Line) -> None:
        self._teller.tell(line)
        self._teller.flush()  # what the world has seen does not go with the process

    async def run(self) -> None:
        warned = collect_warnings()
        orders = trio.lowlevel.FdStream(os.dup(0))
        lines = _lines(orders)
        begin = decode_begin(await anext(lines))
        crew = Crew(begin.plan, self._teller.tell, self._show)
        before = what_is_there()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._teller.keep_telling)
            await self._serve(begin, crew, lines)
            nursery.cancel_scope.cancel()
        gc.collect()  # what nobody closed warns when it goes
        left = await what_is_left(before)
        self._show(
            Ended(
                left.tasks,
                tuple(left.threads.elements()),
                tuple(left.descriptors.elements()),
                crew.alive,
                tuple(warned[:20]),
                self._in_time,
            )
        )

    async def _serve(self, begin: Begin, crew: Crew, lines: AsyncIterator[bytes]) -> None:
        started_s = time.perf_counter()
        settings = settings_of(begin.plan)
        sources = {SOURCE: SourcePolicy(deliver=crew.deliver)}
        with trio.CancelScope() as block:
            async with (
                open_runtime(
                    begin.path, factory=crew.build, settings=settings, sources=sources
                ) as runtime,
                trio.open_nursery() as nursery,
            ):
                self._show(
                    Ready(
                        runtime.statistics().writer.engine.epoch,
                        time.perf_counter() - started_s,
                        settings.writer.units_waiting_max,
                        settings.writer.bytes_waiting_max,
                        settings.sessions.live_actors_max,
                        settings.sessions.turns_running_max,
                    )
                )
                nursery.start_soon(self.heed_signals, runtime, nursery.cancel_scope, block)
                nursery.start_soon(keep_telling, runtime, self._teller.tell)
                desk = Desk(runtime, begin.plan, self._teller.tell, nursery)
                desk.follow_some()
                async for line in lines:
                    if not desk.take(decode_order(line)):
                        await desk.drain()
                        break
                nursery.cancel_scope.cancel()

    async def heed_signals(
        self, runtime: Runtime, serving: trio.CancelScope, block: trio.CancelScope
    ) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                if number == signal.SIGINT:
                    block.cancel()
                else:
                    self._in_time = await runtime.shutdown()
                    serving.cancel()


def main() -> None:
    # Planned failures are warnings; an error is something that nobody has planned.
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    teller = Teller()
    trio.run(Life(teller).run)
    teller.flush()


if __name__ == "__main__":
    main()
