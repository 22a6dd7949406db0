"""``rlinf eval RUN|CHECKPOINT``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf.cli.failure import Debug, nothing_left_if_refused, reporting
from rlinf.cli.lasting_output import lasting
from rlinf.cli.run_paths import check_writable, find_run_or_checkpoint, is_recipe, run_given
from rlinf.cli.serve import TOKEN_VARIABLE, require_serving
from rlinf.cli.train import Overrides, print_batches, print_dry_run
from rlinf.errors import ConfigError
from rlinf.serving.server_address import require_server

if TYPE_CHECKING:
    from rlinf.cli.tasks import AnyTask


_COUNTS = ("evaluation.episodes", "validation.prompts")
_IN_SPECS = ("evaluation.seed", "evaluation.success", "evaluation.walk", "validation.correct",
             "validation.sampl", "validation.seed")  # fmt: skip


def evaluate(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|RECIPE",
            help="A run directory, one of its checkpoints, or a recipe that evaluates.",
        ),
    ],
    overrides: Overrides = None,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check a recipe and print it; start nothing.")
    ] = False,
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
    server: Annotated[
        str | None,
        typer.Option(metavar="ws://HOST:PORT", help="Let a `rlinf serve policy` act instead."),
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar=TOKEN_VARIABLE, help="What the server asks for.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Evaluate on held-out episodes or prompts, or on a benchmark; rates with 95 % intervals."""
    # The variable may be set for other commands; the option is meant for this one.
    source_of_token = context.get_parameter_source("token")
    written = source_of_token is not None and source_of_token.name == "COMMANDLINE"
    if is_recipe(source):
        options = {"--episodes": episodes, "--spec": spec, "--video": video, "--compare": compare,
                   "--server": server, "--token": written}  # fmt: skip
        _evaluate_recipe(source, overrides or [], options, dry_run=dry_run)
        return
    if written and server is None:
        raise ConfigError(
            "--token has no effect without --server; give the server, or leave it out"
        )
    _check_items(episodes, spec, overrides or [])
    if server is not None:
        require_serving("--server")
        require_server(server)
    path, other = _runs(source, compare, dry_run=dry_run)
    task = _task_of(source, path, other, overrides or [])

    from rlinf.monitor.run_directory import showing_warnings
    from rlinf.runners import evaluation

    check_writable(evaluation.run_of(path), "run directory")
    through = None if server is None else evaluation.Server(server, token)
    with showing_warnings(), lasting("stdout"):
        evaluation.evaluate(
            task, path, overrides=overrides or [], items=episodes, spec=spec, video=video,
            compare=other, server=through,
        )  # fmt: skip


def _runs(source: str, compare: str | None, *, dry_run: bool) -> tuple[Path, Path | None]:
    """What is evaluated, and what it is compared with."""
    from rlinf.config.load import recipe_names

    benchmarks = [name for name in recipe_names() if name.startswith("evaluation/")]
    path = run_given(source, ["--dry-run"] if dry_run else [], benchmarks)
    return path, None if compare is None else find_run_or_checkpoint(compare)


def _check_items(episodes: int | None, spec: Path | None, overrides: list[str]) -> None:
    """Refuse a missing specification, more episodes than one lists, and what two options or keys
    say in different ways."""
    from rlinf.workers.config.acting import MOST_EPISODES

    if episodes is not None and episodes > MOST_EPISODES:
        raise ConfigError(f"--episodes {episodes}: nearest: {MOST_EPISODES}, the most there may be")
    if spec is not None and episodes is not None:
        raise ConfigError("--episodes and --spec exclude each other: a spec lists its episodes")
    if spec is not None and not spec.is_file():
        raise ConfigError(f"--spec: no file '{spec}'")
    option = "--episodes" if spec is None else "--spec"
    decided = _COUNTS if spec is None else (*_COUNTS, *_IN_SPECS)
    for key in (each.partition("=")[0] for each in overrides):
        if (spec, episodes) != (None, None) and key.startswith(decided):
            raise ConfigError(f"{option} and {key} exclude each other; leave one out")


def _task_of(source: str, path: Path, other: Path | None, overrides: list[str]) -> AnyTask:
    """The task of a run, which is that of the other one too; both may be changed so."""
    from rlinf.cli.tasks import check_changed, require_training, task_of_run

    task = task_of_run(path)
    require_training(task, source)
    if other is not None and task_of_run(other) is not task:
        raise ConfigError("--compare: the two runs are of different tasks")
    for each in [path, *([] if other is None else [other])] if overrides else []:
        check_changed(each, overrides, why="an evaluated run")
    return task


def _evaluate_recipe(
    source: str, overrides: list[str], options: Mapping[str, object], *, dry_run: bool
) -> None:
    """Run a recipe that only evaluates, in a run directory of its own; ``options`` are for runs."""
    from rlinf.cli.tasks import read_config
    from rlinf.config.named_files import at_absolute_paths
    from rlinf.config.validate import check

    for name, value in options.items():
        if value:
            raise ConfigError(f"{name} has no effect on a recipe; leave it out")
    task, loaded, config = read_config(source, overrides)
    if task.trains:
        raise ConfigError(f"{source} is a recipe to train; use: rlinf train {shlex.quote(source)}")
    check_writable(config.runner.output_dir, "runner.output_dir")
    check(config, loaded)
    config = at_absolute_paths(config)
    if dry_run:
        print_dry_run(config)
        return

    from rlinf.config.dump import to_yaml
    from rlinf.monitor.run_directory import RunDirectory, logging_to

    with (
        RunDirectory.create(config.runner.output_dir, loaded.short_name) as directory,
        nothing_left_if_refused(directory),
    ):
        directory.write_config(to_yaml(config))
        reporting.log = directory.log
        with logging_to(directory.log), lasting("stdout"):
            print_batches(config)
            task(config, directory.path).evaluate_alone(directory)
