"""Run a case again: `python -m tests.simulation.replay CASE`, or `--corpus` for all stored ones.

Prints a digest of each run's steps: the same case gives the same digest, in every process.
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import test_hand_overs, test_sessions  # they bring the worlds that cases are of
from .cases import decoded, hold

WORLDS = (test_sessions, test_hand_overs)
CORPUS = Path(__file__).with_name("corpus.jsonl")


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write(f"{__doc__}")
        return 2
    lines = CORPUS.read_text().splitlines() if arguments == ["--corpus"] else arguments
    for line in lines:
        sys.stdout.write(f"{hold(decoded(line)).digest}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
