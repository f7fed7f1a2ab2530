"""Curves over time as an SVG file, one panel above the other; without any library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_WIDTH, _HEIGHT = 900, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 20, 30, 40
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#7f7f7f")
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Panel:
    """`curves` by name: points (x, y). With `dots` each point is a mark of its own."""

    title: str
    curves: dict[str, Sequence[tuple[float, float]]]
    dots: bool = False


def write_chart(path: Path, panels: Sequence[Panel], x_label: str) -> None:
    """Write the panels, which share the x axis."""
    points = [point for panel in panels for curve in panel.curves.values() for point in curve]
    most_x = max((x for x, _ in points), default=1) or 1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT * len(panels)}"'
        ' font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, number * _HEIGHT, most_x, x_label)
    path.write_text("\n".join([*parts, "</svg>\n"]))


def _panel(panel: Panel, top: int, most_x: float, x_label: str) -> list[str]:
    most_y = max((y for curve in panel.curves.values() for _, y in curve), default=1) or 1
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    bottom = top + _TOP + high

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + wide * x / most_x, bottom - high * y / most_y

    parts = [f'<text x="{_LEFT}" y="{top + 18}" font-weight="bold">{escape(panel.title)}</text>']
    for tick in range(_TICKS + 1):
        _, y = at(0, most_y * tick / _TICKS)
        x, _ = at(most_x * tick / _TICKS, 0)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        value = f"{most_y * tick / _TICKS:.3g}"
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
        time = f"{most_x * tick / _TICKS:.4g}"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{time}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{bottom + 32}" text-anchor="end">{escape(x_label)}</text>')
    for number, (name, curve) in enumerate(panel.curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        placed = [at(x, y) for x, y in curve]
        if panel.dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in placed]
        else:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        x = _WIDTH - _RIGHT - 190 * (number + 1)
        parts.append(f'<text x="{x}" y="{top + 18}" fill="{colour}">{escape(name)}</text>')
    return parts
