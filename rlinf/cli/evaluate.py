"""``rlinf eval RUN|CHECKPOINT|RECIPE``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf.cli.failure import Debug, nothing_left_if_refused, reporting
from rlinf.cli.lasting_output import lasting
from rlinf.cli.run_paths import check_writable, find_run_or_checkpoint, is_recipe, run_given
from rlinf.cli.serve import TOKEN_VARIABLE, require_serving
from rlinf.cli.train import Overrides, print_batches, print_dry_run
from rlinf.errors import ConfigError
from rlinf.processes.interrupt import raise_noted
from rlinf.serving.server_address import require_server

if TYPE_CHECKING:
    from rlinf.cli.tasks import AnyTask
    from rlinf.config.load import LoadedRecipe
    from rlinf.flow.placed_config import PlacedConfig
    from rlinf.monitor.run_directory import RunDirectory
    from rlinf.workers.config.served_policy import Server


_COUNTS = ("evaluation.episodes", "validation.prompts")
_IN_SPECS = ("evaluation.seed", "evaluation.success", "evaluation.walk", "validation.correct",
             "validation.sampl", "validation.seed")  # fmt: skip


@dataclass(frozen=True)
class _Options:
    """What the command line says beside what is evaluated; ``token_given``: in its words."""

    episodes: int | None
    spec: Path | None
    video: bool
    compare: str | None
    server: str | None
    token: str | None
    token_given: bool

    def given(self) -> list[str]:
        """Names of those that were given."""
        values = {"--episodes": self.episodes, "--spec": self.spec, "--video": self.video,
                  "--compare": self.compare, "--server": self.server,
                  "--token": self.token_given}  # fmt: skip
        return [name for name, value in values.items() if value]

    def check(self, overrides: list[str]) -> None:
        """Refuse what has no effect, what is said twice, and a server that cannot be asked."""
        if self.token_given and self.server is None:
            raise ConfigError(
                "--token has no effect without --server; give the server, or leave it out"
            )
        _check_items(self.episodes, self.spec, overrides)
        if self.server is not None:
            require_serving("--server")
            require_server(self.server)

    @property
    def through(self) -> Server | None:
        """Who acts in place of the policy in this process."""
        from rlinf.workers.config.served_policy import Server

        return None if self.server is None else Server(self.server, self.token)


def evaluate(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|RECIPE",
            help="A run directory, one of its checkpoints, or a recipe: one that evaluates, or "
            "the model that one begins with.",
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
    options = _Options(episodes, spec, video, compare, server, token, written)
    if is_recipe(source):
        _evaluate_recipe(source, overrides or [], options, dry_run=dry_run)
        return
    options.check(overrides or [])
    path, other = _runs(source, compare, dry_run=dry_run)
    from rlinf.cli.tasks import config_of_run, of_other_types

    changed = of_other_types(config_of_run(path), overrides or [])
    task, other_task = _tasks_of(source, path, other, changed)

    from rlinf.monitor.run_directory import showing_warnings
    from rlinf.runners import evaluation

    check_writable(evaluation.run_of(path), "run directory")
    raise_noted()
    with showing_warnings(), lasting("stdout"):
        evaluation.evaluate(
            task, path, overrides=changed, items=episodes, spec=spec, video=video,
            compare=None if other is None or other_task is None else (other_task, other),
            server=options.through,
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
        raise ConfigError(f"--spec: '{spec}' is a directory" if spec.is_dir() else
                          f"--spec: no file '{spec}'")  # fmt: skip
    option = "--episodes" if spec is None else "--spec"
    decided = _COUNTS if spec is None else (*_COUNTS, *_IN_SPECS)
    for key in (each.partition("=")[0] for each in overrides):
        if (spec, episodes) != (None, None) and key.startswith(decided):
            raise ConfigError(f"{option} and {key} exclude each other; leave one out")


def _tasks_of(
    source: str, path: Path, other: Path | None, overrides: list[str]
) -> tuple[AnyTask, AnyTask | None]:
    """The tasks of a run and of the other one, if any; both may be changed so."""
    from rlinf.cli.tasks import check_changed, require_training, task_of_run

    task = task_of_run(path)
    require_training(task, source)
    for each in [path, *([] if other is None else [other])] if overrides else []:
        check_changed(each, overrides, why="an evaluated run")
    return task, None if other is None else task_of_run(other)


def _evaluate_recipe(
    source: str, overrides: list[str], options: _Options, *, dry_run: bool
) -> None:
    """Run a recipe that only evaluates, or evaluate what one that trains begins with, in a run
    directory of its own."""
    from rlinf.cli.tasks import read_config
    from rlinf.config.named_files import at_absolute_paths
    from rlinf.config.validate import check

    task, loaded, config = read_config(source, overrides, evaluated=True)
    for name in options.given():
        if not task.trains or name == "--compare":
            raise ConfigError(f"{name} has no effect on a recipe; leave it out")
    if task.trains:
        options.check(overrides)
        config = _beginning(source, task, config, served=options.server is not None)
    check_writable(config.runner.output_dir, "runner.output_dir")
    check(config, loaded)
    config = at_absolute_paths(config)
    if dry_run:
        print_dry_run(config)
        return
    _in_directory(task, config, loaded, options)


def _beginning(source: str, task: AnyTask, config: PlacedConfig, *, served: bool) -> PlacedConfig:
    """The config of a recipe that trains, without what only training reads."""
    from rlinf.runners.evaluation import require_beginning
    from rlinf.runners.task import Task

    if next(each for each in task.__mro__ if "evaluation" in vars(each)) is Task:
        raise ConfigError(
            f"{source} is not evaluated, nor are its runs; nearest: a benchmark, such as `rlinf "
            "eval evaluation/math500 model.path=DIRECTORY benchmark.path=FILE`"
        )
    if not served:
        require_beginning(config, source)
    prepared: PlacedConfig = task.for_evaluation(config)
    return prepared


def _in_directory(
    task: AnyTask, config: PlacedConfig, recipe: LoadedRecipe, options: _Options
) -> None:
    raise_noted()
    from rlinf.config.dump import to_yaml
    from rlinf.monitor.run_directory import RunDirectory, logging_to

    name = f"{recipe.short_name}_eval" if task.trains else recipe.short_name
    with (
        RunDirectory.create(config.runner.output_dir, name) as directory,
        nothing_left_if_refused(directory),
    ):
        if task.trains:  # by another name, as nothing can go on from here
            (directory.path / "evaluated.yaml").write_text(to_yaml(config), encoding="utf-8")
        else:
            directory.write_config(to_yaml(config))
        reporting.log, reporting.resumes = directory.log, False
        with logging_to(directory.log), lasting("stdout"):
            if task.trains:
                _evaluate_beginning(task, config, directory, options)
            else:
                print_batches(config)
                task(config, directory.path).evaluate_alone(directory)


def _evaluate_beginning(
    task: AnyTask, config: PlacedConfig, directory: RunDirectory, options: _Options
) -> None:
    from rlinf.runners import evaluation

    begun = evaluation.Beginning(config, str(evaluation.beginning(config)), directory.path)
    evaluation.evaluate(
        task, begun, items=options.episodes, spec=options.spec, video=options.video,
        server=options.through,
    )  # fmt: skip
