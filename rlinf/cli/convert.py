"""``rlinf convert policy SOURCE --to LAYOUT --out FILE``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlinf.cli.failure import Debug
from rlinf.cli.run_paths import check_file_writable
from rlinf.cli.screen import say
from rlinf.errors import ConfigError

app = typer.Typer(
    help="Bring weights into the layout that another program reads.", no_args_is_help=True
)


@app.callback()
def _group() -> None:
    """Keep the name of what is converted in the command, even while there is only one."""


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
    from rlinf.models.vla.conversion import convert, write_weights

    if out.exists():
        raise ConfigError(f"--out = '{out}' exists; give a new file")
    check_file_writable(out, "--out", "model.safetensors")
    found, tensors = convert(source, to)
    write_weights(out, tensors)
    say(f"{len(tensors)} tensors, from layout {found.layout.name} to {to}: {out}")
    if found.unknown:
        say(f"left out, as layout {found.layout.name} has no name for them: "
            f"{', '.join(found.unknown)}")  # fmt: skip
