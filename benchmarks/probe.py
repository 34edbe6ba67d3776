"""One probe in a process of its own: `python -m benchmarks.probe PROBE` prints its figures, both as
JSON.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import trio

from .asking import run_ask
from .cells import Probe
from .idle import run_idle
from .startup import crash, run_activation, run_startup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CRASH_TIMEOUT_S = 60


def run(probe: Probe) -> dict[str, float]:
    work: Callable[[Probe], Awaitable[dict[str, float]]]
    match probe.kind:
        case "idle":
            work = run_idle
        case "ask":
            work = run_ask
        case "startup":
            assert probe.database is not None
            # In a process of its own, since it dies.
            command = [sys.executable, "-m", f"{__package__}.probe", "--crash", probe.database]
            subprocess.run(command, timeout=CRASH_TIMEOUT_S, check=True)
            work = run_startup
        case "activation":
            work = run_activation
    return trio.run(work, probe)


if __name__ == "__main__":
    if sys.argv[1] == "--crash":
        trio.run(crash, sys.argv[2])
    print(msgspec.json.encode(run(msgspec.json.decode(sys.argv[1], type=Probe))).decode())
