"""What a person sees while something long runs: bars on a terminal, plain lines everywhere else.

Owns the screen until the verdict. Keeps: one stage at a time, and each of them is seen to begin
and to end. Must never decide anything: it is given finished words and numbers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, final

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

_LINE_EACH_S = 1.0  # a log is read later: a line a second tells enough


class Display(Protocol):
    """Stages that follow each other, each with a share that is done and a few words of news."""

    def __enter__(self) -> Display: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def begin(self, name: str, total: int) -> None: ...
    def update(self, done: int, news: str) -> None: ...
    def end(self, news: str) -> None: ...


def display_on(console: Console) -> Display:
    """Bars if somebody looks at a terminal, else lines."""
    return _Bars(console) if console.is_terminal else _Lines(console)


@final
class _Bars:
    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[news]}"),
            console=console,
        )
        self._task = TaskID(0)

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, name: str, total: int) -> None:
        self._task = self._progress.add_task(name, total=total, news="")

    def update(self, done: int, news: str) -> None:
        self._progress.update(self._task, completed=done, news=news)

    def end(self, news: str) -> None:
        # A stage that was killed has ended too, however much of it was left.
        task = next(task for task in self._progress.tasks if task.id == self._task)
        self._progress.update(self._task, total=max(task.completed, 1), news=news)
        if not task.completed:
            self._progress.update(self._task, completed=1)


@final
class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._name = ""
        self._said = ""
        self._next_s = 0.0

    def __enter__(self) -> _Lines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass  # every line is out already

    def begin(self, name: str, total: int) -> None:
        self._name = name
        self._next_s = time.monotonic() + _LINE_EACH_S
        self._say("begins")

    def update(self, done: int, news: str) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LINE_EACH_S
            self._say(news)

    def end(self, news: str) -> None:
        self._say(news)

    def _say(self, words: str) -> None:
        if words == self._said:
            return
        self._said = words
        # Not wrapped at the width of a terminal that isn't there.
        self._console.print(f"{self._name}: {words}", soft_wrap=True, markup=False, highlight=False)
