"""Learning curves: success rate and return or reward against steps and time."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from rlinf.errors import UserError
from rlinf.monitor.metrics_log import read_metrics
from rlinf.monitor.run_directory import METRICS_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]

EVAL_SUCCESS, EVAL_LOW, EVAL_HIGH = "eval/success", "eval/success_low", "eval/success_high"
VALIDATION_LOSS = "validation/loss"
STEP_TIME = "time/step"
_LEGEND = 40
"""Characters of a line of a legend, which else may be wider than the picture."""


@dataclass(frozen=True)
class CurveKind:
    """What is drawn of a kind of run: metrics, and what they are called."""

    steps: tuple[str, str]
    """What runs along the bottom."""
    success: tuple[str, str] | None
    """Success rate while training, where there is one."""
    value: tuple[str, str]
    """What the right picture shows."""


EMBODIED = CurveKind(
    steps=("env/steps", "environment steps"),
    success=("env/success_once", "training episodes"),
    value=("env/return", "return"),
)
REASONING = CurveKind(
    steps=("step", "training steps"), success=None, value=("rollout/rewards", "mean reward")
)

SUPERVISED = CurveKind(steps=("step", "training steps"), success=None, value=("train/loss", "loss"))


@dataclass(frozen=True)
class Curve:
    """The numbers of one run, read from its ``metrics.jsonl``."""

    lines: Sequence[Mapping[str, float]]

    @classmethod
    def of(cls, run_dir: Path | str) -> Curve:
        """Read a run.

        Raises:
            UserError: It has no metrics yet.
        """
        path = Path(run_dir) / METRICS_FILE
        lines = read_metrics(path) if path.is_file() else []
        if not lines:
            raise UserError(f"{run_dir} has no metrics yet: no learning curve can be drawn")
        return cls(lines)

    @cached_property
    def kind(self) -> CurveKind:
        """What kind of run it is, by the metrics that it has."""
        if any(EMBODIED.steps[0] in line for line in self.lines):
            return EMBODIED
        learns = any(SUPERVISED.value[0] in line for line in self.lines)
        return SUPERVISED if learns else REASONING

    def _at(self, line: Mapping[str, float]) -> float:
        return line.get(self.kind.steps[0], line["step"])

    def series(self, name: str) -> list[Point]:
        """(steps, value) of every step that has the metric."""
        return [
            (self._at(line), line[name])
            for line in self.lines
            if math.isfinite(line.get(name, math.nan))
        ]

    def seconds(self) -> list[Point]:
        """(steps, training seconds so far); pauses between resumes do not count."""
        totals = accumulate(line.get(STEP_TIME, 0.0) for line in self.lines)
        return [(self._at(line), total) for line, total in zip(self.lines, totals, strict=True)]

    def seconds_of_steps(self) -> list[Point]:
        """The same of training steps alone: what is evaluated before the first or after the last
        one has a line of its own."""
        return [
            point
            for point, line in zip(self.seconds(), self.lines, strict=True)
            if STEP_TIME in line
        ]

    def over_seconds(self, points: Sequence[Point]) -> list[Point]:
        """The same points by training seconds instead of steps."""
        seconds = dict(self.seconds())
        return [(seconds[steps], value) for steps, value in points]


def write_learning_curve(run_dir: Path | str, path: Path | str | None = None) -> Path:
    """Draw the learning curve of one run as a PNG, by default in the run directory.

    Raises:
        UserError: The run has no metrics yet.
    """
    curve = Curve.of(run_dir)
    kind = curve.kind
    figure, (left, right) = _figure(2, kind.steps[1])
    if kind.success is not None:
        _draw_line(left, curve.series(kind.success[0]), kind.success[1], "tab:blue")
    evaluated = curve.series(EVAL_SUCCESS)
    if evaluated:
        low, high = dict(curve.series(EVAL_LOW)), dict(curve.series(EVAL_HIGH))
        left.errorbar(
            [x for x, _ in evaluated],
            [y for _, y in evaluated],
            yerr=[
                [max(y - low.get(x, y), 0.0) for x, y in evaluated],
                [max(high.get(x, y) - y, 0.0) for x, y in evaluated],
            ],
            fmt="o-",
            capsize=3,
            clip_on=False,
            color="tab:orange",
            label="evaluation, 95 % interval",
        )
    _draw_line(right, curve.series(kind.value[0]), kind.value[1], "tab:blue")
    right.set_ylabel(kind.value[1])
    validated = curve.series(VALIDATION_LOSS) if kind is SUPERVISED else []
    if kind is SUPERVISED and not evaluated:
        _draw_line(left, validated, "validation loss", "tab:orange")
        left.set_ylabel("validation loss")
    else:
        _success_axis(left)
        if validated:
            _draw_line(right, validated, "validation loss", "tab:orange")
            right.legend(fontsize="small")
    for axes in (left, right):
        _time_axis(axes, curve.seconds_of_steps())
    return _save(figure, Path(path) if path else Path(run_dir) / "learning_curve.png")


def overlay_curves(
    runs: Mapping[str, Sequence[Path | str]],
    path: Path | str,
    *,
    metric: str = EVAL_SUCCESS,
    against: Literal["steps", "seconds"] = "steps",
) -> Path:
    """Draw several runs in one picture: per label the median over seeds, and their range.

    Args:
        runs: Run directories of every seed, by label.
        path: The picture.
        metric: What is drawn; where runs were not evaluated, their training success.
        against: What runs along the bottom: steps, or training seconds.

    Raises:
        UserError: A run has no metrics yet.
    """
    read = {label: [Curve.of(run_dir) for run_dir in dirs] for label, dirs in runs.items()}
    kind = next(iter(read.values()))[0].kind
    figure, (axes,) = _figure(1, "training seconds" if against == "seconds" else kind.steps[1])
    fallback = metric if kind.success is None else kind.success[0]
    for number, (label, curves) in enumerate(read.items()):
        series = [curve.series(metric) or curve.series(fallback) for curve in curves]
        if against == "seconds":
            series = [
                curve.over_seconds(points) for curve, points in zip(curves, series, strict=True)
            ]
        _draw_band(axes, series, f"{label} ({len(series)} seeds)", f"C{number}")
    if metric == EVAL_SUCCESS or (kind.success is not None and metric == kind.success[0]):
        _success_axis(axes)
    else:
        axes.set_ylabel(metric)
    return _save(figure, Path(path))


def _figure(columns: int, steps: str) -> tuple[Figure, list[Axes]]:
    # The object interface draws without a display and leaves the user's pyplot state alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(5.5 * columns, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, column + 1) for column in range(columns)]
    for each in axes:
        each.set_xlabel(steps)
        each.xaxis.set_major_formatter(EngFormatter(sep=""))
        each.grid(alpha=0.3)
    return figure, axes


def _draw_line(axes: Axes, points: Sequence[Point], label: str, color: str) -> None:
    axes.plot([x for x, _ in points], [y for _, y in points], label=label, color=color)


def _draw_band(axes: Axes, series: Sequence[Sequence[Point]], label: str, color: str) -> None:
    grid = np.unique([x for points in series for x, _ in points])
    # Beyond its last point a run that reached its goal early keeps its value.
    values = [np.interp(grid, *np.array(points).T) for points in series if points]
    if not values:
        return
    told = textwrap.fill(label, _LEGEND, break_long_words=False)
    axes.plot(grid, np.median(values, axis=0), color=color, label=told)
    axes.fill_between(grid, np.min(values, axis=0), np.max(values, axis=0), color=color, alpha=0.2)


def _success_axis(axes: Axes) -> None:
    axes.set_ylabel("success rate")
    axes.set_ylim(-0.02, 1.02)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", fontsize="small")


def _time_axis(axes: Axes, seconds: Sequence[Point]) -> None:
    """Training time along the top."""
    steps = np.array([0.0, *(step for step, _ in seconds)])
    times = np.array([0.0, *(time for _, time in seconds)])
    if not seconds or np.any(np.diff(steps) <= 0) or np.any(np.diff(times) <= 0):
        return

    to_time = partial(np.interp, xp=steps, fp=times)
    to_steps = partial(np.interp, xp=times, fp=steps)
    # Time is known between the first and the last step alone.
    axes.set_xlim(0, steps[-1])
    axes.secondary_xaxis("top", functions=(to_time, to_steps)).set_xlabel("training seconds")


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)
    return path
