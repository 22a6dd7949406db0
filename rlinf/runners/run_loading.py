"""What is left of a run: its configuration and its newest good checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from rlinf.checkpoint.reading import Checkpoint, load_checkpoint
from rlinf.checkpoint.store import CheckpointStore
from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.errors import CheckpointError
from rlinf.flow.placed_config import PlacedConfig
from rlinf.monitor.run_directory import CONFIG_FILE

ConfigT = TypeVar("ConfigT", bound=PlacedConfig)


def load_run(source: Path, config_class: type[ConfigT]) -> tuple[ConfigT, Checkpoint]:
    """Configuration and newest good checkpoint of a run, or those of one checkpoint.

    Args:
        source: A run directory, or one of its checkpoints.
        config_class: Of the run's task.

    Raises:
        CheckpointError: There is no good checkpoint.
    """
    if (source / CONFIG_FILE).is_file():
        run = source
        store = CheckpointStore(run / "checkpoints", read_only=True)
        if not store.steps():
            raise CheckpointError(f"the run {run} has no checkpoint yet")
        checkpoint = store.load()
    else:
        run = source.parent.parent
        checkpoint = load_checkpoint(source)
    recipe = load_recipe(str(run / CONFIG_FILE), [])
    return validate(config_class, recipe.data, recipe), checkpoint
