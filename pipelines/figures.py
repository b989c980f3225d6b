"""The figures of a report, drawn from plain numbers into PNG files; no global plotting state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Series = Sequence[tuple[int, float]]
"""(step, value) pairs, by step."""

INK, MUTED, GRID, FAINT = "#0b0b0b", "#52514e", "#e4e3df", "#b9cfe9"
COLOURS = ("#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#e87ba4", "#008300", "#4a3aa7", "#e34948")
BLUES = ("#0d366b", "#184f95", "#256abf", "#3987e5", "#5598e7", "#86b6ef", "#b7d3f6")
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": GRID,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "text.parse_math": False,  # a domain may be called anything
}


def training_curves(metrics: Mapping[str, Series], path: Path) -> None:
    """Loss, estimated acceptance length and accuracy by position, over steps."""
    accuracy = {
        int(name.rsplit("_", 1)[1]): series
        for name, series in metrics.items()
        if name.startswith("accuracy_pos_")
    }
    panels = [
        ("loss", "Training loss", "per supervised token"),
        ("acceptance_length_estimate", "Acceptance length, estimated", "tokens per round"),
    ]
    panels = [panel for panel in panels if panel[0] in metrics]
    count = len(panels) + bool(accuracy)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * count, 3.4), layout="constrained")
        axes = figure.subplots(1, count, squeeze=False)[0]
        for ax, (name, title, unit) in zip(axes, panels, strict=False):
            _draw_smoothed(ax, metrics[name], COLOURS[0])
            _finish(ax, title, "step", unit)
        if accuracy:
            _draw_accuracy(axes[-1], accuracy)
        _save(figure, path)


def acceptance_histogram(histogram: Sequence[int], path: Path) -> None:
    """Share of rounds by the number of drafted tokens they accepted."""
    rounds = max(sum(histogram), 1)
    shares = [100 * count / rounds for count in histogram]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.2, 3.4), layout="constrained")
        ax = figure.subplots()
        bars = ax.bar(range(len(shares)), shares, width=0.72, color=COLOURS[0])
        ax.bar_label(bars, [f"{share:.0f} %" for share in shares], padding=2, color=MUTED)
        ax.set_xticks(range(len(shares)))
        ax.set_ylim(0, max(shares, default=0) * 1.15 or 1)
        title = f"Drafted tokens accepted per round ({rounds:,} rounds)"
        _finish(ax, title, "accepted tokens, the bonus token not counted", "% of rounds")
        _save(figure, path)


def accept_rate_per_position(rates: Mapping[str, Sequence[float]], path: Path) -> None:
    """Share of rounds that accepted position k, a line for each domain and a bold one for all."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.2, 3.4), layout="constrained")
        ax = figure.subplots()
        domains = [domain for domain in rates if domain != "total"]
        for domain, colour in zip(domains, _colours(len(domains)), strict=True):
            _draw_rates(ax, rates[domain], domain, colour, width=1.5)
        if "total" in rates:
            _draw_rates(ax, rates["total"], "total", INK, width=2.5)
        ax.set_ylim(0, 100)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        _finish(ax, "Accept rate by position", "position in the draft", "% of rounds")
        _save(figure, path)


def speed_by_domain(speeds: Mapping[str, tuple[float, float]], path: Path) -> None:
    """Plain and speculative tokens/s side by side for each domain."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.2, 0.9 + 0.62 * len(speeds)), layout="constrained")
        ax = figure.subplots()
        rows = range(len(speeds))
        for offset, index, label, colour in (
            (-0.19, 0, "plain", FAINT),
            (0.19, 1, "speculative", COLOURS[0]),
        ):
            values = [pair[index] for pair in speeds.values()]
            bars = ax.barh([row + offset for row in rows], values, 0.34, color=colour, label=label)
            ax.bar_label(bars, [f"{value:.1f}" for value in values], padding=3, color=MUTED)
        ax.set_yticks(rows, list(speeds))
        ax.invert_yaxis()
        ax.margins(x=0.12)
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        _finish(ax, "Decoding speed", "tokens/s", None, grid="x")
        _save(figure, path)


def stage_timeline(stages: Sequence[tuple[str, float, float]], path: Path) -> None:
    """When each stage ran, in minutes since the first began; stages of one name share a row."""
    origin = min(start for _, start, _ in stages)
    names = list(dict.fromkeys(name for name, _, _ in sorted(stages, key=lambda stage: stage[1])))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 0.9 + 0.42 * len(names)), layout="constrained")
        ax = figure.subplots()
        for row, name in enumerate(names):
            spans = [((s - origin) / 60, (e - s) / 60) for n, s, e in stages if n == name]
            ax.broken_barh(spans, (row - 0.32, 0.64), color=COLOURS[row % len(COLOURS)])
            end = max(start + length for start, length in spans)
            total = _duration(60 * sum(length for _, length in spans))
            ax.annotate(
                total, (end, row), (4, 0), textcoords="offset points", va="center", color=MUTED
            )
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.margins(x=0.1)
        ax.set_xlim(left=0)
        _finish(ax, "Stages", "minutes since the start", None, grid="x")
        _save(figure, path)


def _draw_smoothed(ax: Axes, series: Series, colour: str) -> None:
    steps, values = zip(*series, strict=True)
    if len(series) < 10:
        ax.plot(steps, values, color=colour, marker="o", markersize=4)
        return
    ax.plot(steps, values, color=FAINT, linewidth=1, label="as logged")
    ax.plot(steps, _smoothed(values), color=colour, linewidth=2, label="running mean")
    ax.legend()


def _smoothed(values: Sequence[float]) -> list[float]:
    """Running mean over a twentieth of the run, centred so that it does not lag behind."""
    reach = len(values) // 40
    windows = (values[max(i - reach, 0) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _draw_accuracy(ax: Axes, accuracy: Mapping[int, Series]) -> None:
    """One line for each position, the first the darkest."""
    positions = sorted(accuracy)
    for order, position in enumerate(positions):
        steps, values = zip(*accuracy[position], strict=True)
        shade = BLUES[order * (len(BLUES) - 1) // max(len(positions) - 1, 1)]
        percent = [100 * value for value in _smoothed(values)]
        ax.plot(steps, percent, color=shade, linewidth=1.6, label=f"{position + 1}")
    ax.set_ylim(bottom=0)
    ax.legend(title="position", loc="center left", bbox_to_anchor=(1.0, 0.5))
    _finish(ax, "Accuracy by position", "step", "% right, running mean")


def _draw_rates(ax: Axes, rates: Sequence[float], label: str, colour: str, width: float) -> None:
    positions = range(1, len(rates) + 1)
    percent = [100 * rate for rate in rates]
    ax.plot(positions, percent, color=colour, linewidth=width, marker="o", ms=4, label=label)


def _colours(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def _finish(ax: Axes, title: str, x: str, y: str | None, grid: Literal["x", "y"] = "y") -> None:
    ax.set_title(title, pad=10)
    ax.set_xlabel(x)
    if y is not None:
        ax.set_ylabel(y)
    ax.grid(axis=grid, linewidth=0.8)
    ax.tick_params(length=0)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_figure(path, dpi=150)
