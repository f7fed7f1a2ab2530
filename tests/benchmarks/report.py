"""What a benchmark found: a table on the terminal, a JSON file, a chart.

One rule: a figure that misses its goal is printed as missed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class Figure:
    """One action at one place: seconds per round, and those of the place it is compared with, round by round.

    `goal` is a ratio to native (at least); with `in_seconds` it is about the figure itself: at most, or with
    `at_least` at least so much. Where `unit` is not seconds, `seconds` and `native_s` are in that unit.
    """

    name: str
    place: str
    seconds: list[float] = field(default_factory=list)
    native_s: list[float] = field(default_factory=list)
    daemon_cpu_s: list[float] = field(default_factory=list)
    client_cpu_s: list[float] = field(default_factory=list)
    data_bytes: int = 0
    goal: float | None = None
    in_seconds: bool = False
    at_least: bool = False
    unit: str = "s"

    @property
    def ratio(self) -> float | None:
        """The median over rounds of native's time to this place's; None without native beside it."""
        if len(self.native_s) != len(self.seconds):
            return None
        return median(native / own for native, own in zip(self.native_s, self.seconds, strict=True))

    @property
    def holds(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.goal is None:
            return None
        if self.in_seconds:
            found = median(self.seconds)
            return found >= self.goal if self.at_least else found <= self.goal
        return self.ratio is not None and self.ratio >= self.goal

    def cpu_per_gib(self, seconds: list[float]) -> float | None:
        """CPU seconds per GiB."""
        return median(seconds) / (self.data_bytes / 2**30) if seconds and self.data_bytes else None


def show(figures: list[Figure]) -> None:
    """The table."""
    table = Table(title="medians; ratio = time of native / time here, in the same round")
    for column in ("figure", "place", "median", "", "ratio", "CPU s/GiB client", "daemon", "goal", ""):
        table.add_column(column, justify="left" if column in ("figure", "place", "") else "right")
    for figure in figures:
        bound = "≤" if figure.in_seconds and not figure.at_least else "≥"
        goal = "" if figure.goal is None else f"{bound} {figure.goal:.3g}"
        table.add_row(
            figure.name,
            figure.place,
            f"{median(figure.seconds):.3f}",
            figure.unit,
            "" if figure.ratio is None else f"{figure.ratio:.2f}",
            _number(figure.cpu_per_gib(figure.client_cpu_s)),
            _number(figure.cpu_per_gib(figure.daemon_cpu_s)),
            goal,
            {None: "", True: "met", False: "MISSED"}[figure.holds],
        )
    Console(width=130).print(table)


def save(figures: list[Figure], path: Path) -> None:
    """Every round, as JSON."""
    rows = [asdict(figure) | {"ratio": figure.ratio, "holds": figure.holds} for figure in figures]
    path.write_text(json.dumps(rows, indent=1) + "\n")


def draw(figures: list[Figure], path: Path) -> None:
    """Ratios as bars. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [figure for figure in figures if figure.ratio is not None and figure.place != "native"]
    chart, axes = pyplot.subplots(figsize=(9, 0.32 * len(shown) + 1.5))
    colours = [{None: "grey", True: "tab:green", False: "tab:red"}[figure.holds] for figure in shown]
    axes.barh([f"{f.name} · {f.place}" for f in shown], [f.ratio or 0 for f in shown], color=colours)
    for row, figure in enumerate(shown):
        if figure.goal is not None and not figure.in_seconds:
            axes.plot([figure.goal] * 2, [row - 0.4, row + 0.4], color="black")
    axes.axvline(1, linestyle=":", color="black")
    axes.invert_yaxis()
    axes.set_xlabel("speed relative to native (1 = the same; black bar = goal)")
    chart.tight_layout()
    chart.savefig(path, dpi=120)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
