"""``rlinf check env|engine|model|demonstrations``: the suite of an adapter, a model, or a set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rlinf.cli.failure import Debug
from rlinf.cli.screen import say, show_table
from rlinf.conformance import CheckResult
from rlinf.errors import ConfigError, RunFailure, UserError, sought

if TYPE_CHECKING:
    from rlinf.config.base import StrictModel
    from rlinf.envs.config import EnvConfig

_MOST_ENVS = 64
_WIDEST = 4096
"""Numbers of a state or an action, and pixels, that a suite tries; all it needs is a shape."""

SectionT = TypeVar("SectionT", bound="StrictModel")

app = typer.Typer(help="Run the conformance suite of an adapter or a set.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Run the conformance suite of an adapter or a set."""


@app.command("env")
def check_env(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME... [KEY=VALUE...]",
            help="Env types, as `rlinf list envs` shows them, and keys of an env section: "
            "options.task=reach-v3 …; of several types each plays its example.",
        ),
    ] = None,
    installed: Annotated[
        bool, typer.Option("--installed", help="Check every type whose simulator is ready.")
    ] = False,
    num_envs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST_ENVS,
            show_default=False,
            help="Envs that are open at once; by default 4, or 1 with one_at_a_time=true.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Check that environment adapters keep the env protocol."""
    names = [word for word in words or [] if "=" not in word]
    settings = [word for word in words or [] if "=" in word]
    if installed:
        from rlinf.envs.installation import ready

        if names:
            raise ConfigError(f"either --installed or names: {', '.join(names)}")
        names = ready()
    if not names:
        raise ConfigError("name an env type, as `rlinf list envs` shows it, or give --installed")
    if len(names) == 1 and not installed:
        config = _env_config(names[0], settings, {})

        from rlinf.envs.env_conformance import CHECKS, examine_env

        found = examine_env(config, num_envs, _shown_one_by_one(f"env {names[0]}", list(CHECKS)))
        _conclude(found.results)
    else:
        _check_envs(names, settings, num_envs)


def _env_config(name: str, settings: Sequence[str], options: Mapping[str, Any]) -> EnvConfig:
    """Return the section of an env, which can be built."""
    from rlinf.envs.config import EnvConfig

    section = {"type": name, "max_episode_steps": 50}
    given = {**section, "options": dict(options)} if options else section
    return _checked(f"env {name}", EnvConfig, given, settings)


def _check_envs(names: Sequence[str], settings: Sequence[str], num_envs: int | None) -> None:
    """Run the suites of several env types, then print what each came to; 1 where one failed."""
    from rlinf.envs.base import REGISTRY
    from rlinf.envs.env_conformance import CHECKS, examine_env

    adapters = {name: REGISTRY.load(name) for name in names}  # an unknown name is refused first
    rows, sound = [], 0
    for name, adapter in adapters.items():
        try:
            config = _env_config(name, settings, adapter.example)
            show = _shown_one_by_one(f"env {name}", list(CHECKS))
            found = examine_env(config, num_envs, show)
        except (UserError, RunFailure) as error:
            rows.append((name, "not run", "", " ".join(str(error).split())))
            continue
        failed = [each.name for each in found.results if not each.passed]
        say()
        passed = f"{len(found.results) - len(failed)} of {len(found.results)}"
        speed = "" if math.isnan(found.steps_per_second) else f"{found.steps_per_second:.0f}"
        rows.append((name, passed, speed, ", ".join(failed)))
        sound += not failed
    show_table("", ("env", "passed", "env steps/s", "failed"), rows)
    say(f"\n{sound} of {len(rows)} env types passed")
    if sound < len(rows):
        raise typer.Exit(1)


@app.command("engine")
def check_engine(
    name: Annotated[str, typer.Argument(help="Engine type, as `rlinf list engines` shows it.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of an engine section: deterministic=true …"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Check that a rollout engine keeps the engine protocol, on a model of random weights."""
    from rlinf.engines.config import REGISTRY

    config = _checked(f"engine {name}", REGISTRY.load(name), {"type": name}, settings)

    from rlinf.engines.engine_conformance import check_engine as run_suite

    _show(f"engine {name}", run_suite(config))


@app.command("model")
def check_model(  # noqa: PLR0917 - options of the command
    name: Annotated[
        str, typer.Argument(help="Model type, as `rlinf list models` shows it, or a directory.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of a model section: preset=tiny …"),
    ] = None,
    state_dim: Annotated[
        int, typer.Option(min=0, max=_WIDEST, help="Numbers in a state; 0: none.")
    ] = 8,
    action_dim: Annotated[
        int, typer.Option(min=1, max=_WIDEST, help="Dimensions of an action, from -1 to 1.")
    ] = 7,
    choices: Annotated[
        int | None,
        typer.Option(min=2, max=_WIDEST, help="Instead, so many discrete actions to choose from."),
    ] = None,
    image_size: Annotated[
        int, typer.Option(min=1, max=_WIDEST, help="Height and width of pictures.")
    ] = 64,
    run: Annotated[
        Path | None, typer.Option(help="Instead, the environment that this run was trained in.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Check that a policy keeps the policy protocol, in an environment of these shapes."""
    from rlinf.envs.observation_names import depth_of
    from rlinf.envs.spec import EnvSpec, written_spec
    from rlinf.models.config import REGISTRY, type_of_directory

    section: dict[str, object] = {"type": name}
    if Path(name).is_dir():
        section = {"type": type_of_directory(Path(name)), "path": name}
    elif Path(name).name != name:  # as no type is called
        raise ConfigError(
            f"there is no directory {sought(Path(name))}; nearest: that of a published model, or a "
            "type of model, as `rlinf list models` shows it"
        )
    model = REGISTRY.load(str(section["type"]))
    given = {each.partition("=")[0] for each in settings or []} | section.keys()
    if "preset" in model.model_fields and not given & {"preset", "path"}:
        section["preset"] = "tiny"
    config = _checked(f"model {name}", model, section, settings)

    from rlinf.trainers.policy_conformance import check_policy

    views = ("main_images", "wrist_images")
    shapes = dict.fromkeys(views, (image_size, image_size, 3))
    states: dict[str, tuple[int, ...]] = {"states": (state_dim,)} if state_dim else {}
    depths = [depth_of(view) for view in views]
    states |= {key: (image_size, image_size) for key in depths if key not in config.unread(depths)}
    spec = EnvSpec(
        observation_shapes={**states, **shapes},
        observation_dtypes={**dict.fromkeys(states, "float32"), **dict.fromkeys(views, "uint8")},
        action_kind="discrete" if choices else "continuous",
        action_dim=1 if choices else action_dim,
        action_low=(0.0,) if choices else (-1.0,) * action_dim,
        action_high=(choices - 1.0,) if choices else (1.0,) * action_dim,
        task_descriptions=("push the button",),
        max_episode_steps=100,
    )
    if run is not None:
        found = written_spec(run.expanduser())
        if found is None:
            raise ConfigError(f"--run = '{run}' has no env_spec.json; give the directory of a run")
        spec = found
    _show(f"model {name}", check_policy(config, spec))


@app.command("demonstrations")
def check_demonstrations(
    path: Annotated[
        Path, typer.Argument(help="Directory, as `rlinf record` or lerobot writes it.")
    ],
    debug: Debug = False,
) -> None:
    """Check that a set of recorded episodes is whole and can be learnt from."""
    from rlinf.data.demonstrations import Demonstrations, check_set
    from rlinf.data.lerobot.layout import is_lerobot

    if is_lerobot(path.expanduser()):
        from rlinf.data.lerobot.reader import LeRobotSet
        from rlinf.data.lerobot.set_check import check_lerobot_set

        _show(f"demonstrations {path}", check_lerobot_set(LeRobotSet(path.expanduser())))
        return
    found = Demonstrations.load(path.expanduser())  # compares the hash
    say(f"{found}; {', '.join(f'{k} {v}' for k, v in found.source.items() if k != 'spec')}")
    _show(f"demonstrations {path}", check_set(found))


def _checked(
    title: str, model: type[SectionT], section: Mapping[str, Any], settings: Sequence[str] | None
) -> SectionT:
    """A section with what the command line says of it, which can be run on this machine."""
    from rlinf.config.load import with_overrides
    from rlinf.config.validate import check, validate

    recipe = with_overrides(title, section, settings or [])
    config = validate(model, recipe.data, recipe)
    check(config, recipe)
    return config


def _show(title: str, results: Sequence[CheckResult]) -> None:
    """Print the outcome of every check; exit with 1 where one failed."""
    show = _shown_one_by_one(title, [each.name for each in results])
    for each in results:
        show(each)
    _conclude(results)


def _conclude(results: Sequence[CheckResult]) -> None:
    """Print how many checks passed; exit with 1 where one failed."""
    failed = [each.name for each in results if not each.passed]
    say(f"\n{len(results) - len(failed)} of {len(results)} checks passed")
    if failed:
        raise typer.Exit(1)


def _shown_one_by_one(title: str, names: Sequence[str]) -> Callable[[CheckResult], None]:
    """Print the head of a table of these checks; what is returned prints a row of it."""
    widths = (max(map(len, names), default=0), len("failed"), 0)
    told: set[str] = set()
    show_table(title, ("check", "", ""), (), widths)

    def show(each: CheckResult) -> None:
        first, *trace = each.detail.splitlines() or [""]
        detail = f"{first} (as above)" if trace and each.detail in told else each.detail
        told.add(each.detail)
        row = (each.name, "ok" if each.passed else "failed", detail)
        show_table("", ("", "", ""), [row], widths)

    return show
