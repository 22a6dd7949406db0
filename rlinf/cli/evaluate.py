"""``rlinf eval RUN|CHECKPOINT``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlinf.cli.failure import Debug
from rlinf.cli.run_paths import find_run_or_checkpoint
from rlinf.errors import ConfigError


def evaluate(
    source: Annotated[
        str,
        typer.Argument(metavar="RUN|CHECKPOINT", help="A run directory or one of its checkpoints."),
    ],
    *,
    episodes: Annotated[
        int | None,
        typer.Option(min=1, help="Held-out episodes or prompts; default: the run's."),
    ] = None,
    spec: Annotated[
        Path | None, typer.Option(help="Evaluation spec with an exact list of episodes or prompts.")
    ] = None,
    video: Annotated[bool, typer.Option("--video", help="Write a video as well.")] = False,
    compare: Annotated[
        str | None,
        typer.Option(metavar="RUN|CHECKPOINT", help="Compare on the same episodes (paired)."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Evaluate on held-out episodes or prompts; success rate with its 95 % interval."""
    path = find_run_or_checkpoint(source)
    other = None if compare is None else find_run_or_checkpoint(compare)
    if spec is not None and episodes is not None:
        raise ConfigError("--episodes and --spec exclude each other: a spec lists its episodes")
    if spec is not None and not spec.is_file():
        raise ConfigError(f"--spec: no file '{spec}'")

    from rlinf.cli.tasks import task_of_run

    task = task_of_run(path)
    if other is not None and task_of_run(other) is not task:
        raise ConfigError("--compare: the two runs are of different tasks")
    task.evaluation_module().evaluate(
        path, episodes=episodes, spec=spec, video=video, compare=other
    )
