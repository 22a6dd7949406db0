"""``rlinf check env|engine|demonstrations``: the conformance suite of an adapter, or of a set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rlinf.cli.failure import Debug
from rlinf.cli.screen import say, show_table
from rlinf.conformance import CheckResult

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
    from rlinf.config.load import with_overrides
    from rlinf.config.validate import check, validate
    from rlinf.envs.config import EnvConfig

    section = {"type": name, "max_episode_steps": 50}
    recipe = with_overrides(f"env {name}", section, settings or [])
    config = validate(EnvConfig, recipe.data, recipe)
    check(config, recipe)

    from rlinf.envs.conformance import check_env as run_suite

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
    from rlinf.config.load import with_overrides
    from rlinf.config.validate import check, validate
    from rlinf.engines.config import REGISTRY

    recipe = with_overrides(f"engine {name}", {"type": name}, settings or [])
    config = validate(REGISTRY.load(name), recipe.data, recipe)
    check(config, recipe)

    from rlinf.engines.conformance import check_engine as run_suite

    _show(f"engine {name}", run_suite(config))


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


def _show(title: str, results: Sequence[CheckResult]) -> None:
    """Print the outcome of every check; exit with 1 where one failed."""
    marks = [(each.name, "ok" if each.passed else "failed", each.detail) for each in results]
    show_table(title, ("check", "", ""), marks)
    failed = [each.name for each in results if not each.passed]
    say(f"\n{len(results) - len(failed)} of {len(results)} checks passed")
    if failed:
        raise typer.Exit(1)
