"""``rlinf convert policy SOURCE --to LAYOUT --out FILE``, ``rlinf convert run RUN --out DIR``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from rlinf.checkpoint.files import new_directory
from rlinf.checkpoint.weights_file import POLICY_FILE
from rlinf.cli.failure import Debug
from rlinf.cli.run_paths import check_file_writable, find_run_or_checkpoint
from rlinf.cli.screen import say
from rlinf.cli.train import Moved
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.cli.tasks import AnyTask
    from rlinf.models.vla.config import PublishedConfig
    from rlinf.runners.embodied_evaluation import TrainedPolicy

app = typer.Typer(
    help="Bring weights into the layout that another program reads.", no_args_is_help=True
)


@app.command("run")
def run(
    source: Annotated[str, typer.Argument(help="A run directory, or one of its checkpoints.")],
    moved: Moved = None,
    *,
    out: Annotated[Path, typer.Option(help="The directory; it must not exist yet.")],
    whole: Annotated[
        bool,
        typer.Option(
            help="Of a robot's policy, policy.safetensors with every weight and adapters in their "
            "matrices, whatever it began from: `model.weights` of a published model takes it, "
            "`model.path` of any other policy."
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Write the model that a run has trained so far, in the format that it began from.

    That is the format of transformers for a language model, that of `model.path` for a published
    robot model, and policy.safetensors for any other policy.
    """
    from rlinf.cli.tasks import of_moved_model, task_of_run
    from rlinf.workers.config.acting import EvaluatedConfig

    if out.exists():
        raise ConfigError(f"--out = '{out}' exists; give a new directory")
    check_file_writable(out, "--out", "exported")
    path = find_run_or_checkpoint(source)
    task, words = task_of_run(path), of_moved_model(moved)
    from rlinf.monitor.run_directory import showing_warnings

    with showing_warnings():
        if issubclass(task.config_class, EvaluatedConfig):
            _write_policy(task, path, out, words, whole=whole)
        elif whole:
            raise ConfigError(
                "--whole has no effect on a language model, which is written with every weight, "
                "adapters in their matrices; leave it out"
            )
        else:
            _write_language_model(task, path, out, words)


def _write_policy(task: AnyTask, source: Path, out: Path, words: list[str], *, whole: bool) -> None:
    """In the format that it began from, or every weight in a file of this project."""
    from rlinf.models.vla.config import PublishedConfig
    from rlinf.runners.embodied_evaluation import TrainedPolicy

    trained = TrainedPolicy(task, source, words)
    config = trained.config.model
    if isinstance(config, PublishedConfig) and config.path is not None and not whole:
        _publish(trained, config, out)
        return
    with new_directory(out) as part:
        trained.write(part / POLICY_FILE, whole=whole)
    say(f"{out / POLICY_FILE}: the policy of {trained.name}")


def _write_language_model(task: AnyTask, source: Path, out: Path, moved: list[str]) -> None:
    """In the format of transformers, on top of the model that the run began with."""
    from rlinf.runners.evaluation import load_run, run_of
    from rlinf.workers.initial_model import INITIAL_MODEL
    from rlinf.workers.language_export import write_language_model

    found, checkpoint = load_run(task, source, moved)
    config, run = cast(Any, found), run_of(source)
    began, made = config.model, run / INITIAL_MODEL
    if made.is_dir():
        began = began.model_copy(update={"path": made, "architecture": None})
    elif began.path is None:
        raise ConfigError(f"the model that the run began with is gone: there is no {made}")
    with new_directory(out) as part:
        write_language_model(config, began, checkpoint, part)
    say(f"{out}: the model of {run.name} step {checkpoint.step}")


def _publish(trained: TrainedPolicy, config: PublishedConfig, out: Path) -> None:
    """In the format, and with the files, of the model that the run began from."""
    from rlinf.models.vla.policy import VLAPolicy
    from rlinf.models.vla.publishing import publish

    assert config.path is not None
    policy = trained.as_kept()
    assert isinstance(policy, VLAPolicy)
    found = publish(policy, config.path, out, config.own_statistics())
    say(f"{out}: {found.trained} tensors of {trained.name}, {found.copied} as in {config.path}")
    if found.left_out:
        say(f"left out, as the format has no place for them: {', '.join(found.left_out)}")


@app.command("policy")
def policy(
    source: Annotated[
        Path,
        typer.Argument(help="A published file or directory, or policy.safetensors of a run."),
    ],
    *,
    to: Annotated[str, typer.Option(help="Layout of names, such as openpi or lerobot-0.6.")],
    out: Annotated[Path, typer.Option(help="The safetensors file; it must not exist yet.")],
    debug: Debug = False,
) -> None:
    """Rename the weights of π₀, π₀.₅ or SmolVLA, bit for bit."""
    from rlinf.models.vla.conversion import convert, left_statistics, write_weights
    from rlinf.models.vla.pi0.layouts import OF_PI05

    if out.exists():
        raise ConfigError(f"--out = '{out}' exists; give a new file")
    check_file_writable(out, "--out", "model.safetensors")
    found, tensors = convert(source, to)
    write_weights(out, tensors)
    say(f"{len(tensors)} tensors, from layout {found.layout.name} to {to}: {out}")
    if found.unknown:
        say(f"left out, as they are no part of the published model: {', '.join(found.unknown)}")
    if count := left_statistics(found, tensors):
        say(
            f"left out, as {to} has no statistics among the weights: {count} tensors of them. A "
            f"run takes them by model.statistics, the file of weights in {source}; lerobot makes "
            "processors of them by its migrate_policy_normalization.py"
        )
    if to == "lerobot-0.4" and OF_PI05 in found.names:
        say(
            "lerobot 0.4 tells the state with zeros up to max_state_dim, later ones and openpi "
            "without: a model that was not trained so acts in lerobot 0.5 or later"
        )
