"""How far a run is: one live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Metrics = Mapping[str, float]

_TIME = "time/"
_WHOLE_STEP = "time/step"
_EVALUATED = ("eval/", "validation/")


class Progress:
    """Shows the progress of a run on standard output.

    On a terminal one display is kept up to date, and whatever else is printed or logged appears
    above it. Elsewhere each line stands alone and at most one appears per ``line_interval``
    seconds, not counting the first, the last and those with an evaluation. A figure that a step
    does not have, such as the success rate between two evaluations, keeps its last value.

    A context manager that starts and stops the display.

    Args:
        total_steps: Training steps of the whole run.
        figures: What is shown, besides step, times and ETA: label, metric and format.
        done_steps: Training steps that were done before, by a run that is resumed.
        line_interval: Least seconds between two plain lines.
        console: Where to write; standard output by default.
        clock: Returns seconds.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        figures: Sequence[tuple[str, str, str]],
        done_steps: int = 0,
        line_interval: float = 5.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._shown_figures = tuple(figures)
        self._first = self._step = done_steps
        self._line_interval = line_interval
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._begin = self._updated = clock()
        self._last_line = -math.inf
        self._is_told = True
        self._figures: dict[str, float] = {}
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        """Show the display; the time of the run counts from here."""
        self._begin = self._updated = self._clock()
        if self._console.is_terminal and self._live is None:
            self._live = Live(
                get_renderable=self._display, console=self._console, refresh_per_second=2
            )
            self._live.start(refresh=True)
        return self

    def update(self, step: int, metrics: Metrics) -> None:
        """Show that ``step`` training steps are done, with the metrics of the last one."""
        self._step = step
        self._updated = self._clock()
        self._figures.update(metrics)
        if self._live is not None:
            return
        due = self._updated - self._last_line >= self._line_interval
        evaluated = any(name.startswith(_EVALUATED) for name in metrics)
        self._is_told = due or step >= self._total or evaluated
        if self._is_told:
            self._last_line = self._updated
            self._print_line()

    def _print_line(self) -> None:
        self._console.print(Text(self.line()), soft_wrap=True)

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the last state on the screen, be it that of a run that ends early."""
        if not self._is_told:
            self._is_told = True
            self._print_line()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self) -> str:
        """The present state in one line of text."""
        figures = (f"{label} {value}" for label, value in self._shown())
        parts = [f"step {self._step}/{self._total}", *figures, f"ETA {self._eta()}"]
        times = self._times()
        return "  ".join([*parts, f"[{times}]"] if times else parts)

    def _shown(self) -> list[tuple[str, str]]:
        return [
            (label, format(self._figures[name], style))
            for label, name, style in self._shown_figures
            if math.isfinite(self._figures.get(name, math.nan))
        ]

    def _times(self) -> str:
        """Seconds of each stage, and of the whole step last."""
        stages = [name for name in self._figures if name.startswith(_TIME)]
        stages.sort(key=lambda name: name == _WHOLE_STEP)
        return ", ".join(
            f"{name.removeprefix(_TIME)} {self._figures[name]:.2f} s" for name in stages
        )

    def _eta(self) -> str:
        """Time left at the pace since the start of this process."""
        done = self._step - self._first
        if done <= 0:
            return "-"
        per_step = (self._updated - self._begin) / done
        since = self._clock() - self._updated
        return _clock_text(max(per_step * (self._total - self._step) - since, 0.0))

    def _display(self) -> RenderableType:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text("training", style="bold"),
            ProgressBar(total=max(self._total, 1), completed=self._step, width=40),
            f"{self._step}/{self._total}",
            f"elapsed {_clock_text(self._clock() - self._begin)}",
            f"ETA {self._eta()}",
        )
        figures = Columns(
            [Text.assemble((label, "dim"), " ", (value, "bold")) for label, value in self._shown()],
            padding=(0, 2),
        )
        return Group(bar, figures, Text(self._times(), style="dim"))


def _clock_text(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
