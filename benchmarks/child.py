"""One cell in a process of its own: `python -m benchmarks.child CELL` prints its outcome, both as
JSON.
"""

from __future__ import annotations

import sys

import msgspec
import trio

from .cells import Cell, Outcome
from .reference import run_raw, run_reference
from .turns import run_turns
from .writer import run_writer


def run(cell: Cell) -> Outcome:
    match cell.contender:
        case "raw":
            return run_raw(cell)
        case "reference":
            return trio.run(run_reference, cell)
        case "writer":
            return trio.run(run_writer, cell)
        case "onepen" | "onepen, all at once":
            return trio.run(run_turns, cell)
        case _:
            raise ValueError(f"{cell.contender} runs in alternatives.py")


if __name__ == "__main__":
    print(msgspec.json.encode(run(msgspec.json.decode(sys.argv[1], type=Cell))).decode())
