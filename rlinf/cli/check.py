"""``rlinf check env NAME``: the conformance suite of an adapter."""

from __future__ import annotations

from typing import Annotated

import typer

from rlinf.cli.failure import Debug
from rlinf.cli.screen import say, show_table

app = typer.Typer(help="Run the conformance suite of an adapter.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Run the conformance suite of an adapter."""


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

    results = run_suite(config)
    marks = [
        (result.name, "ok" if result.passed else "failed", result.detail) for result in results
    ]
    show_table(f"env {name}", ("check", "", ""), marks)
    failed = [result.name for result in results if not result.passed]
    say(f"\n{len(results) - len(failed)} of {len(results)} checks passed")
    if failed:
        raise typer.Exit(1)
