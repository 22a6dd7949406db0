"""``rlinf env list``, ``rlinf env install|remove|lock NAME``."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from rlinf.cli.failure import Debug
from rlinf.cli.screen import say, show_table
from rlinf.errors import ConfigError

app = typer.Typer(help="Simulators: which can be used, and the installing of one.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="Env type, as `rlinf env list` has it.")]


@app.command("list")
def list_envs(debug: Debug = False) -> None:
    """Say which simulators are ready, missing, or cannot run here and why."""
    from rlinf.config.reasons import first_sentence
    from rlinf.envs.base import REGISTRY
    from rlinf.envs.installation import requirements_of, status

    rows = []
    for name, adapter in REGISTRY.usable():
        if isinstance(adapter, ConfigError):
            rows.append((name, "broken", "", str(adapter)))
            continue
        found, needs = status(name), requirements_of(name)
        licence = needs.licence if needs else ""
        about = f"{first_sentence(adapter.__doc__ or '')} {found.detail}"
        rows.append((name, str(found.state), licence, about))
    show_table("", ("env", "state", "licence", "what it is, and how to have it"), rows)


@app.command()
def install(
    name: Name,
    *,
    with_package: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="PACKAGE",
            help="A further package, such as an adapter; without it those of before stay.",
        ),
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="Source of a simulator that has no package.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask above 1 GB.")] = False,
    debug: Debug = False,
) -> None:
    """Make the virtual environment of a simulator, from exact pins."""
    from rlinf.envs import installation

    needs = installation.check(name, source=source)
    if not with_package and installation.is_made(name, source=source):
        say(f"ready: {installation.home() / name}; `rlinf env remove {name}` first makes it anew")
        return
    packages = with_package or installation.packages_of(name)
    more = f"; with {', '.join(packages)}" if packages else ""
    say(f"{name}: {installation.size(needs)}; licence: {needs.licence}{more}")
    if needs.disk_mb > installation.ASK_ABOVE_MB and not yes:
        typer.confirm("Install it? (--yes does not ask)", abort=True)
    with _ended_as_by_interrupt():
        made = installation.install(name, with_packages=packages, source=source)
    say(f"ready: {made}")
    if needs.assets:
        say(f"before it runs: {needs.assets}")


@app.command()
def remove(name: Name, debug: Debug = False) -> None:
    """Delete the virtual environment of a simulator."""
    from rlinf.envs import installation

    installation.remove(name)
    say(f"removed: {installation.home() / name}")


@app.command()
def lock(name: Name, debug: Debug = False) -> None:
    """Print the pins of a simulator and of all that they bring, for `locks/NAME.txt`."""
    from rlinf.envs import installation

    say(installation.resolve(name).rstrip())


@contextlib.contextmanager
def _ended_as_by_interrupt() -> Iterator[None]:
    """Let every signal that asks the command to end be as Ctrl-C, behind which nothing is left."""
    from rlinf.cli.train import end_signals

    others = [number for number in end_signals() if number != signal.SIGINT]
    before = {number: signal.signal(number, signal.default_int_handler) for number in others}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
