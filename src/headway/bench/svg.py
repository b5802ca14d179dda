"""Charts as SVG text, self-contained and without a plotting library: lines over a (base 2 logarithmic) axis, and heat maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 620, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 150, 34, 44
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99", "#997700", "#6699cc", "#994455")
GRAY = "#888888"


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. `strong` lines stand out; the others are the background they are compared with."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str
    strong: bool = False
    dashed: bool = False


def line_chart(title: str, x_label: str, y_label: str, lines: Sequence[Line], *, log_x: bool = False) -> str:
    """The lines over common axes that begin at y = 0, with a legend on the right."""
    points = [point for line in lines for point in line.points]
    xs = sorted({x for x, _ in points}) or [0.0]
    x_ticks = xs if log_x else _ticks(xs[0], xs[-1])
    y_ticks = _ticks(0.0, max((y for _, y in points), default=1.0))
    x_of = _scale([_log(x) for x in x_ticks] if log_x else x_ticks, LEFT, WIDTH - RIGHT)
    y_of = _scale(y_ticks, HEIGHT - BOTTOM, TOP)
    parts = [_text(LEFT, 20, title, "start", bold=True), _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label)]
    parts.append(f'<g transform="rotate(-90 14 {(TOP + HEIGHT - BOTTOM) / 2})">{_text(14, (TOP + HEIGHT - BOTTOM) / 2, y_label)}</g>')
    for y in y_ticks:
        parts.append(f'<path d="M{LEFT} {y_of(y):.1f}H{WIDTH - RIGHT}" stroke="{GRAY}" stroke-opacity="0.25"/>')
        parts.append(_text(LEFT - 6, y_of(y) + 4, _short(y), "end"))
    for x in x_ticks:
        parts.append(_text(x_of(_log(x) if log_x else x), HEIGHT - BOTTOM + 16, _short(x)))
    for number, line in enumerate(lines):
        places = [(x_of(_log(x) if log_x else x), y_of(y)) for x, y in line.points]
        parts.append(_curve(line, places))
        row = TOP + 10 + 16 * number
        parts.append(_curve(line, [(WIDTH - RIGHT + 10, row - 4), (WIDTH - RIGHT + 30, row - 4)], dots=False))
        parts.append(_text(WIDTH - RIGHT + 35, row, line.name, "start", bold=line.strong))
    height = max(HEIGHT, TOP + 20 + 16 * len(lines))
    return _svg(WIDTH, height, parts)


def heat_map(title: str, rows: Sequence[str], columns: Sequence[str], values: Mapping[tuple[str, str], float]) -> str:
    """One coloured ratio per (row, column): blue above 1, red below, white at it; empty where there is no value."""
    left, cell_w, cell_h, top = 12 + 7 * max(map(len, rows), default=0), 58, 24, 44 + 6 * max(map(len, columns), default=0)
    parts = [_text(8, 20, title, "start", bold=True)]
    for j, column in enumerate(columns):
        x = left + cell_w * (j + 0.5)
        parts.append(f'<g transform="rotate(-45 {x:.0f} {top - 8})">{_text(x, top - 8, column, "start")}</g>')
    for i, row in enumerate(rows):
        y = top + cell_h * i
        parts.append(_text(left - 6, y + 16, row, "end"))
        for j, column in enumerate(columns):
            if (row, column) in values:
                value = values[row, column]
                x = left + cell_w * j
                parts.append(f'<rect x="{x}" y="{y}" width="{cell_w - 2}" height="{cell_h - 2}" rx="3" fill="{_diverging(value)}"/>')
                parts.append(_text(x + cell_w / 2 - 1, y + 16, f"{value:.2f}", color="#111111"))
    return _svg(left + cell_w * len(columns) + 60, top + cell_h * len(rows) + 10, parts)


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">' + "".join(parts) + "</svg>"
    )


def _curve(line: Line, places: Sequence[tuple[float, float]], *, dots: bool = True) -> str:
    if not places:
        return ""
    width, opacity = (2.8, 1.0) if line.strong else (1.4, 0.8)
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="{width}" stroke-opacity="{opacity}"{dash}/>'
    if dots and len(places) <= 12:
        drawn += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{width:.1f}" fill="{line.color}"/>' for x, y in places)
    return drawn


def _text(x: float, y: float, text: str, anchor: str = "middle", *, bold: bool = False, color: str = "") -> str:
    style = (' font-weight="600"' if bold else "") + (f' fill="{color}"' if color else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _scale(ticks: Sequence[float], low: float, high: float) -> Callable[[float], float]:
    first, last = ticks[0], ticks[-1]
    span = (last - first) or 1.0
    return lambda value: low + (value - first) / span * (high - low) if last > first else (low + high) / 2


def _ticks(least: float, most: float, count: int = 5) -> list[float]:
    """Round numbers from at or below `least` to at or above `most`."""
    span = max(most - least, 1e-9)
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if span / (factor * power) <= count)
    first = math.floor(least / step)
    return [step * i for i in range(first, math.ceil(most / step - 1e-9) + 1)] if most > least else [least, least + 1.0]


def _log(value: float) -> float:
    return math.log2(max(value, 1e-9))


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.3g}"


def _diverging(ratio: float) -> str:
    """White at 1; full colour at 40 % away from it."""
    share = max(-1.0, min(1.0, (ratio - 1.0) / 0.4))
    far = (238, 102, 119) if share < 0 else (102, 153, 221)
    return "#" + "".join(f"{round(255 + (channel - 255) * abs(share)):02x}" for channel in far)
