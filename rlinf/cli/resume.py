"""``rlinf resume RUN [key=value …]``."""

from __future__ import annotations

from typing import Annotated

import typer

from rlinf.cli.failure import Debug
from rlinf.cli.run_paths import CONFIG_FILE, check_writable, find_run
from rlinf.cli.train import Overrides, execute


def resume(
    run: Annotated[str, typer.Argument(help="A run directory, or a name below runs/.")],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Continue a run from its newest good checkpoint."""
    from rlinf.cli.tasks import read_config, refuse_fixed_keys, require_training
    from rlinf.config.validate import check

    path = find_run(run)
    check_writable(path, "run directory")
    task, _, before = read_config(str(path / CONFIG_FILE), [])
    require_training(task, run)
    _, recipe, config = read_config(str(path / CONFIG_FILE), overrides or [])
    refuse_fixed_keys(task, before, config)
    check(config, recipe)

    from rlinf.config.dump import to_yaml
    from rlinf.flow.plan import PLAN_FILE
    from rlinf.monitor.run_directory import RunDirectory

    with RunDirectory.open(path) as directory:
        directory.write_config(to_yaml(config))
        config.plan.save(directory.path / PLAN_FILE)
        execute(task, config, directory, resume=True)
