"""``rlinf record RECIPE|RUN --out DIRECTORY``."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlinf.cli.failure import Debug
from rlinf.cli.lasting_output import lasting
from rlinf.cli.run_paths import check_writable, find_run_or_checkpoint, is_recipe
from rlinf.cli.screen import say
from rlinf.cli.train import INTERRUPTED, Overrides, stop_on_interrupt
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.envs.recording import Actor


def record(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN|CHECKPOINT",
            help="A recipe, whose simulator brings an expert; or a run, whose policy acts.",
        ),
    ],
    overrides: Overrides = None,
    *,
    out: Annotated[Path, typer.Option(help="Directory of the set; it must not exist yet.")],
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to record.")] = 50,
    num_envs: Annotated[int, typer.Option(min=1, help="Environments at the same time.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of episodes, noise and draws.")] = 0,
    noise: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Standard deviation of noise on what is executed, which is not recorded.",
        ),
    ] = 0.0,
    form: Annotated[
        Literal["rlinf", "lerobot"],
        typer.Option("--format", help="What the set is written as: ours, or LeRobotDataset v3.0."),
    ] = "rlinf",
    pictures: Annotated[
        Literal["video", "image"] | None,
        typer.Option(
            help="How a LeRobot set keeps pictures; `image` changes no pixel; default: video."
        ),
    ] = None,
    fps: Annotated[
        float | None,
        typer.Option(min=0.1, help="Frames per second of a LeRobot set, where none is known."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Record episodes to learn from; no evaluation of the recipe plays any of them."""
    if out.exists():
        raise ConfigError(f"--out = '{out}' exists; give a new directory")
    from rlinf.workers.config.acting import MOST_EPISODES

    if episodes > MOST_EPISODES:
        raise ConfigError(f"--episodes {episodes}: nearest: {MOST_EPISODES}, the most there may be")
    if not math.isfinite(noise):
        near = "a tenth of what an action spans"
        raise ConfigError(f"--noise {noise}: must be a finite number; nearest: {near}")
    for option, given in {"--pictures": pictures, "--fps": fps}.items():
        if form == "rlinf" and given is not None:
            raise ConfigError(
                f"{option} = {given} has no effect without --format lerobot; nearest: with it, or "
                f"leave {option} out"
            )
    check_writable(out, "--out")
    from rlinf.monitor.run_directory import showing_warnings

    with showing_warnings():
        config, actor, name = _played(source, overrides, seed)
    from rlinf.runners.record import LeRobotFormat
    from rlinf.runners.record import record as play

    written = LeRobotFormat(pictures or "video", fps) if form == "lerobot" else None
    look = "data show" if written else "check demonstrations"
    interrupted = stop_on_interrupt("the episodes that have ended are written")
    with showing_warnings(), lasting("stdout"), interrupted as stop:
        found, place = play(
            config, out, actor=actor, name=name, episodes=episodes, num_envs=num_envs, seed=seed,
            noise=noise, form=written, stop=stop,
        )  # fmt: skip
        meanwhile = "" if place == out else f" ({out} has been made meanwhile)"
        say(f"recorded of {name}: {found}\nwritten to {place}{meanwhile}; look at it with: "
            f"rlinf {look} {shlex.quote(str(place))}")  # fmt: skip
        if stop.is_set():
            say(f"interrupted: {len(found.episodes)} of {episodes} episodes")
            raise typer.Exit(INTERRUPTED)


def _played(source: str, overrides: list[str] | None, seed: int) -> tuple[Any, Actor | None, str]:
    """The config that is played in, who acts (None: the simulator's expert), and their name."""
    from rlinf.cli.tasks import check_changed, read_config, task_of_run
    from rlinf.config.load import recipe_names
    from rlinf.config.validate import check

    if is_recipe(source, runs_first=False):
        task, loaded, config = read_config(source, overrides or [], evaluated=True)
        _require_simulator(task.config_class, source)
        check(config, loaded, section="env")  # what it learns from may not be there yet
        return config, None, "expert"
    path = find_run_or_checkpoint(source, recipe_names())
    task = task_of_run(path)
    _require_simulator(task.config_class, source)
    if overrides:
        check_changed(path, overrides, why="a recorded run")
    from rlinf.runners.record import policy_of

    return policy_of(task, path, overrides or [], seed=seed)


def _require_simulator(config_class: type, source: str) -> None:
    if "env" not in getattr(config_class, "model_fields", {}):
        raise ConfigError(f"{source} plays in no simulator, so that there is nothing to record")
