"""Named points at which a test may crash, kill or look: in a simulation, in threads, in a child.

| point           | what is true there                                                    |
| --------------- | --------------------------------------------------------------------- |
| `opening`       | the engine is about to open the file                                  |
| `opened`        | it has, behind its fence                                              |
| `taken`         | the Writer has taken a batch; nothing of it is in the file            |
| `before commit` | the batch is applied, in a transaction that is open                   |
| `committed`     | the batch is durable, and nobody was told                             |
| `acked`         | the answers are on their way                                          |
| `recovering`    | a commit has failed, and the file is about to be opened again         |
| `closing`       | the engine is about to be closed                                      |

A point is installed from outside, for as long as a block lasts, around a step that both forms of
the Writer take: its thread, and its task in a simulation. The shipped code knows nothing of points,
and is as it was when the block ends.

Run as a program, it arms one in a process of its own: `python -m onepen.testing.failpoints
"committed:3" gateway.py chat.db` runs `gateway.py` and ends it by SIGKILL at the third commit.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

from ...actors import drivers
from ...storage.errors import OnepenError
from ...storage.pen import Pen
from ...storage.sqlite.engine import SqliteEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence


class _Place(NamedTuple):
    owner: Any
    method: str
    when: Literal["before", "after"]
    only_if_true: bool = False


_backoff: Any = drivers._Backoff  # pyright: ignore[reportPrivateUsage] # reset behind each batch
_PLACES = {
    "opening": _Place(SqliteEngine, "__init__", "before"),
    "opened": _Place(SqliteEngine, "__init__", "after"),
    "taken": _Place(Pen, "take", "after", only_if_true=True),
    "before commit": _Place(Pen, "commit", "before"),
    "committed": _Place(Pen, "commit", "after"),
    "acked": _Place(_backoff, "reset", "before"),
    "recovering": _Place(Pen, "recover", "before"),
    "closing": _Place(SqliteEngine, "close", "before"),
}
FAILPOINTS = tuple(_PLACES)
"""The names of all points."""


class FailpointError(OnepenError):
    """A failpoint was given that does not exist."""

    hint = f"use one of: {', '.join(FAILPOINTS)}; with a number behind a colon for a later time"


class FailpointCrash(Exception):  # noqa: N818, RUF100 - no error of anybody's
    """The crash that a test has asked for."""


def crash() -> None:
    """Raise here, as a bug would: the Writer is restarted, and sends again what it had."""
    raise FailpointCrash("a test has asked for a crash here")


def kill() -> None:
    """End this process at once, as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


@final
class Failpoint:
    """A point that is armed. `hits` counts how often it was passed, `fired` whether it was used."""

    def __init__(self, name: str, nth: int) -> None:
        self.name = name
        self.nth = nth
        self.hits = 0

    @property
    def fired(self) -> bool:
        return self.hits >= self.nth

    def passed(self, do: Callable[[], object]) -> None:
        self.hits += 1
        if self.hits == self.nth:
            do()


@contextmanager
def failpoint(name: str, *, nth: int = 1, do: Callable[[], object] = crash) -> Generator[Failpoint]:
    """Do something when this point is passed for the `nth` time, once, within this block.

    For the whole process: whichever runtime passes it. Raises `FailpointError`.
    """
    place = _PLACES.get(name)
    if place is None or nth < 1:
        raise FailpointError(f"there is no failpoint {name!r}, for the {nth}. time")
    armed = Failpoint(name, nth)
    original: Callable[..., Any] = getattr(place.owner, place.method)

    @wraps(original)
    def stepping(*arguments: Any, **named: Any) -> Any:
        if place.when == "before":
            armed.passed(do)
        result = original(*arguments, **named)
        if place.when == "after" and (result or not place.only_if_true):
            armed.passed(do)
        return result

    setattr(place.owner, place.method, stepping)
    try:
        yield armed
    finally:
        setattr(place.owner, place.method, original)


# In a process of its own --------------------------------------------------------------------------


class Ended(NamedTuple):
    """How a program ended. `killed`: by its failpoint; otherwise it never came to it."""

    killed: bool
    returncode: int
    output: str


def run_until(
    point: str, program: str | os.PathLike[str], *arguments: str, timeout_s: float = 60.0
) -> Ended:
    """Run a Python program that SIGKILLs itself at this point: `"committed"`, or `"committed:3"`.

    Blocks until it has ended, and gives what it had written to its standard output. Raises
    `FailpointError`, and `subprocess.TimeoutExpired` for one that does not end.
    """
    _parsed(point)
    command = [sys.executable, "-m", "onepen.testing.failpoints", point, os.fspath(program)]
    done = subprocess.run(
        [*command, *arguments], check=False, stdout=subprocess.PIPE, text=True, timeout=timeout_s
    )
    return Ended(done.returncode == -signal.SIGKILL, done.returncode, done.stdout)


def _parsed(point: str) -> tuple[str, int]:
    name, _, nth = point.partition(":")
    if name not in _PLACES or not (nth or "1").isdecimal() or int(nth or 1) < 1:
        raise FailpointError(f"there is no failpoint {point!r}")
    return name, int(nth or 1)


def main(arguments: Sequence[str]) -> None:
    """Arm a point, then run a program as if it had been called by itself."""
    if len(arguments) < 2:
        raise SystemExit('usage: python -m onepen.testing.failpoints "POINT[:NTH]" PROGRAM [...]')
    try:
        name, nth = _parsed(arguments[0])
    except FailpointError as error:
        raise SystemExit(str(error)) from None
    sys.argv = list(arguments[1:])
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[1]))
    with failpoint(name, nth=nth, do=kill):
        runpy.run_path(arguments[1], run_name="__main__")
