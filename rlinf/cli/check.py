"""``rlinf check env|engine|model|demonstrations``: the suite of an adapter, a model, or a set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rlinf.cli.failure import Debug
from rlinf.cli.screen import say, show_table
from rlinf.conformance import CheckResult

if TYPE_CHECKING:
    from rlinf.config.base import StrictModel

SectionT = TypeVar("SectionT", bound="StrictModel")

app = typer.Typer(help="Run the conformance suite of an adapter or a set.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Run the conformance suite of an adapter or a set."""


@app.command("env")
def check_env(
    name: Annotated[str, typer.Argument(help="Env type, as `rlinf list envs` shows it.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of an env section: options.task=reach-v3 …"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Check that an environment adapter keeps the env protocol."""
    from rlinf.envs.config import EnvConfig

    section = {"type": name, "max_episode_steps": 50}
    config = _checked(f"env {name}", EnvConfig, section, settings)

    from rlinf.envs.env_conformance import check_env as run_suite

    _show(f"env {name}", run_suite(config))


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
    state_dim: Annotated[int, typer.Option(help="Numbers in a state; 0: none.")] = 8,
    action_dim: Annotated[int, typer.Option(help="Dimensions of an action, from -1 to 1.")] = 7,
    image_size: Annotated[int, typer.Option(help="Height and width of pictures.")] = 64,
    debug: Debug = False,
) -> None:
    """Check that a policy keeps the policy protocol, in an environment of these shapes."""
    from rlinf.envs.spec import EnvSpec
    from rlinf.models.config import REGISTRY, type_of_directory

    section: dict[str, object] = {"type": name}
    if Path(name).is_dir():
        section = {"type": type_of_directory(Path(name)), "path": name}
    model = REGISTRY.load(str(section["type"]))
    given = {each.partition("=")[0] for each in settings or []} | section.keys()
    if "preset" in model.model_fields and not given & {"preset", "path"}:
        section["preset"] = "tiny"
    config = _checked(f"model {name}", model, section, settings)

    from rlinf.trainers.policy_conformance import check_policy

    views = ("main_images", "wrist_images")
    shapes = dict.fromkeys(views, (image_size, image_size, 3))
    states = {"states": (state_dim,)} if state_dim else {}
    spec = EnvSpec(
        observation_shapes={**states, **shapes},
        observation_dtypes={**dict.fromkeys(states, "float32"), **dict.fromkeys(views, "uint8")},
        action_kind="continuous",
        action_dim=action_dim,
        action_low=(-1.0,) * action_dim,
        action_high=(1.0,) * action_dim,
        task_descriptions=("push the button",),
        max_episode_steps=100,
    )
    _show(f"model {name}", check_policy(config, spec))


@app.command("demonstrations")
def check_demonstrations(
    path: Annotated[Path, typer.Argument(help="Directory, as `rlinf record` writes it.")],
    debug: Debug = False,
) -> None:
    """Check that a set of recorded episodes is whole and can be learnt from."""
    from rlinf.data.demonstrations import Demonstrations, check_set

    found = Demonstrations.load(path.expanduser())  # compares the hash
    say(f"{found}; {', '.join(f'{k} {v}' for k, v in found.source.items() if k != 'spec')}")
    _show(f"demonstrations {path}", check_set(found))


def _checked(
    title: str, model: type[SectionT], section: Mapping[str, Any], settings: list[str] | None
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
    marks = [(each.name, "ok" if each.passed else "failed", each.detail) for each in results]
    show_table(title, ("check", "", ""), marks)
    failed = [each.name for each in results if not each.passed]
    say(f"\n{len(results) - len(failed)} of {len(results)} checks passed")
    if failed:
        raise typer.Exit(1)
