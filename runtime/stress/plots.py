"""Small charts over time as SVG text, readable on a light and on a dark page.

Keeps: all text is escaped; nothing is fetched and nothing runs. A series without a value in a slot
has a gap there, and no line across it.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT = 860, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 30
_STEPS = (1.0, 2.0, 5.0, 10.0)
_LINES = 4


def chart(
    name: str,
    at_s: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Lines over seconds; `marks` are moments with a name, shown when pointed at."""
    last = max([*at_s, *(moment for moment, _ in marks), 1.0])
    top = _ceiling(max((v for values in series.values() for v in values if v), default=1.0))

    def x(seconds: float) -> float:
        return _LEFT + seconds / last * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)

    drawn = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(name)}">',
    ]
    for step in range(_LINES + 1):
        value = top * step / _LINES
        drawn.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" '
            f'y2="{y(value):.1f}"/><text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" '
            f'text-anchor="end">{value:,g}</text>'
        )
    for step in range(6):
        seconds = last * step / 5
        drawn.append(
            f'<text x="{x(seconds):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{seconds:.0f} s'
            "</text>"
        )
    for moment, words in marks:
        drawn.append(
            f'<line class="mark" x1="{x(moment):.1f}" x2="{x(moment):.1f}" y1="{_TOP}" '
            f'y2="{_HEIGHT - _BOTTOM}"><title>{escape(words)}</title></line>'
        )
    for number, values in enumerate(series.values()):
        for run in _runs(at_s, values):
            points = " ".join(f"{x(seconds):.1f},{y(value):.1f}" for seconds, value in run)
            drawn.append(f'<polyline class="s{number}" points="{points}"/>')
            if len(run) == 1:
                drawn.append(
                    f'<circle class="s{number}" cx="{x(run[0][0]):.1f}" cy="{y(run[0][1]):.1f}" '
                    'r="2"/>'
                )
    drawn.append("</svg>")
    return "".join(drawn)


def legend(names: Sequence[str]) -> str:
    return "".join(
        f'<span class="key"><i class="s{number}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )


def _runs(at_s: Sequence[float], values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    """Pieces of a line between its gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for seconds, value in zip(at_s, values, strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((seconds, value))
    return [run for run in runs if run]


def _ceiling(value: float) -> float:
    """A round number that is not below it."""
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(step * power for step in _STEPS if step * power >= value)
