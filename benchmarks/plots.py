"""Small line charts as SVG text: both axes logarithmic, readable on a light and on a dark page."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 80, 150, 44, 52
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#999999")  # told apart by most eyes
INK = "#777777"


def line_chart(
    title: str, x_name: str, y_name: str, series: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """One line for each series that has points."""
    drawn = {name: points for name, points in series.items() if points}
    xs = sorted({x for points in drawn.values() for x, _ in points})
    ys = [y for points in drawn.values() for _, y in points]
    bottom, top = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    top = max(top, bottom + 1)

    def place_x(x: float) -> float:
        span = math.log(xs[-1] / xs[0]) or 1.0
        return LEFT + math.log(x / xs[0]) / span * (WIDTH - LEFT - RIGHT)

    def place_y(y: float) -> float:
        share = (math.log10(y) - bottom) / (top - bottom)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        _text(LEFT, 24, title, size=15),
    ]
    for power in range(bottom, top + 1):
        y = place_y(10.0**power)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, INK, width=0.4))
        parts.append(_text(LEFT - 8, y + 4, f"{10.0**power:,g}", anchor="end"))
    for x in xs:
        parts.append(_line(place_x(x), TOP, place_x(x), HEIGHT - BOTTOM, INK, width=0.4))
        parts.append(_text(place_x(x), HEIGHT - BOTTOM + 18, f"{x:,g}", anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_name, anchor="middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="18" y="{middle:.1f}" fill="{INK}" text-anchor="middle" '
        f'transform="rotate(-90 18 {middle:.1f})">{escape(y_name)}</text>'
    )
    labels = _spread({name: place_y(points[-1][1]) for name, points in drawn.items()})
    for colour, (name, points) in zip(COLOURS, drawn.items(), strict=False):
        placed = [(place_x(x), place_y(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"/>'
        )
        parts.extend(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in placed
        )
        parts.append(_text(WIDTH - RIGHT + 12, labels[name] + 4, name, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def _spread(wanted: dict[str, float], gap: float = 17) -> dict[str, float]:
    """Labels beside the ends of their lines, moved down where they would cover one another."""
    placed: dict[str, float] = {}
    last = -math.inf
    for name, y in sorted(wanted.items(), key=lambda item: item[1]):
        last = placed[name] = max(y, last + gap)
    return placed


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"/>'
    )


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, colour: str = INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )
