"""Figures with their spread, and what is written of them: a table, a CSV file, a chart."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

GOALS = "goals"
"""The part that is drawn from the others; its figures are of many units."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured thing, a value per round."""

    part: str
    row: str
    column: str
    values: tuple[float, ...]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median, upper quartile."""
        if len(self.values) < 2:
            return (self.values[0],) * 3
        low, middle, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, middle, high


class Results:
    """Every figure of a run, and the remarks in place of those that could not be had."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self.notes: dict[tuple[str, str], str] = {}
        self.remarks: list[str] = []

    def add(self, part: str, row: str, column: str, values: Iterable[float]) -> None:
        self.figures.append(Figure(part, row, column, tuple(values)))

    def note(self, part: str, row: str, text: str) -> None:
        """What a reader must know of a row; also of one that has no figures."""
        self.notes[part, row] = text

    def values(self, part: str, row: str, column: str) -> tuple[float, ...] | None:
        return next(
            (f.values for f in self.figures if (f.part, f.row, f.column) == (part, row, column)),
            None,
        )

    def parts(self) -> list[str]:
        return list(dict.fromkeys(figure.part for figure in self.figures))

    def markdown(self) -> str:
        """One table a part; a cell is the median and, where there is a spread, the quartiles."""
        lines: list[str] = []
        for part in self.parts():
            mine = [figure for figure in self.figures if figure.part == part]
            columns = list(dict.fromkeys(figure.column for figure in mine))
            rows = list(dict.fromkeys(figure.row for figure in mine))
            rows += [row for each, row in self.notes if each == part and row not in rows]
            cells = {(figure.row, figure.column): _cell(figure) for figure in mine}
            noted = any((part, row) in self.notes for row in rows)
            head = ["", *columns, *(["note"] if noted else [])]
            lines += [f"\n### {part}\n", _line(head), "|---" * len(head) + "|"]
            for row in rows:
                note = [self.notes.get((part, row), "")] if noted else []
                lines.append(_line([row, *(cells.get((row, c), "–") for c in columns), *note]))
        lines += ["", *(f"- {remark}" for remark in self.remarks)]
        return "\n".join(lines)

    def write(self, directory: Path) -> list[Path]:
        """Table, CSV and, where matplotlib is installed, the chart."""
        if not directory.exists():
            directory.mkdir(parents=True)
            (directory / ".gitignore").write_text("*\n")  # as caches do: none of it is a source
        table, sheet = directory / "results.md", directory / "results.csv"
        with sheet.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["part", "row", "figure", "rounds", "median", "low", "high", "values"])
            for each in self.figures:
                low, middle, high = each.quartiles
                values = " ".join(f"{value:.6g}" for value in each.values)
                spread = (f"{x:.6g}" for x in (middle, low, high))
                writer.writerow(
                    [each.part, each.row, each.column, len(each.values), *spread, values]
                )
        written = [table, sheet]
        try:
            written.append(_chart(self, directory / "results.png"))
        except ImportError:
            self.remarks.append("no chart: matplotlib is not installed")
        table.write_text(self.markdown() + "\n")
        return written


def ratio(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Round by round: what slows a whole round down cancels out."""
    return [a / b for a, b in zip(over, under, strict=True) if b > 0]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float) -> str:
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _cell(figure: Figure) -> str:
    low, middle, high = figure.quartiles
    if low == high:
        return _number(middle)
    return f"{_number(middle)} ({_number(low)}–{_number(high)})"


def _chart(results: Results, path: Path) -> Path:
    """The first column of each part that has one unit as bars, the quartiles as whiskers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    for part in results.parts():
        mine = [figure for figure in results.figures if figure.part == part]
        if part == GOALS:
            continue
        drawn.append([figure for figure in mine if figure.column == mine[0].column])
    heights = [len(bars) + 2 for bars in drawn]
    chart, axes = pyplot.subplots(
        len(drawn),
        1,
        figsize=(10, 0.32 * sum(heights) + 1),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for plot, bars in zip(axes[:, 0], drawn, strict=True):
        spread = [figure.quartiles for figure in bars]
        plot.barh(
            [figure.row for figure in bars],
            [middle for _, middle, _ in spread],
            xerr=[[m - low for low, m, _ in spread], [high - m for _, m, high in spread]],
            color=["#2a6" if "retrysafe" in figure.row else "#9ab" for figure in bars],
        )
        plot.invert_yaxis()
        plot.set_title(f"{bars[0].part}: {bars[0].column}", loc="left", fontsize=9)
        plot.tick_params(labelsize=8)
    chart.savefig(path, dpi=120)
    pyplot.close(chart)
    return path
