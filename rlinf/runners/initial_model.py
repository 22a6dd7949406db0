"""The language model that a run begins with, as a directory that every worker loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlinf.errors import in_section
from rlinf.models.language import build_network, save_language_model
from rlinf.models.language_config import LanguageModelConfig
from rlinf.scheduler.services.files import SharedDirectory


def write_initial_model(
    config: LanguageModelConfig,
    directory: Path,
    *,
    seed: int,
    tokenizer: Callable[[Path], Any],
    teach: Callable[[Any, Any], None] = lambda network, tokenizer: None,
) -> LanguageModelConfig:
    """Write a model whole, tokenizer included; one that is there is used.

    So a resumed run and every worker load the same, and so can any other program.

    Args:
        config: The section of the run.
        directory: Where the model is kept.
        seed: Of weights that are created.
        tokenizer: Makes the tokenizer, given a directory to write one to.
        teach: Changes the network, given with its tokenizer, before it is written.

    Returns:
        The section of the model that was written.
    """
    path = SharedDirectory(directory)  # written on this machine alone
    created = config.model_copy(update={"path": path, "architecture": None})
    if directory.is_dir():
        return created
    unfinished = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        with in_section("model"):
            words = tokenizer(unfinished)
            network = build_network(config, tokenizer=words, seed=seed)
        teach(network, words)
        save_language_model(network, unfinished, tokenizer=words)
        os.replace(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return created
