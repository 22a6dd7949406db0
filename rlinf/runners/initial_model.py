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
from rlinf.scheduler.files import SharedDirectory

INITIAL_MODEL = "initial_model"


def write_initial_model(
    config: LanguageModelConfig,
    run: Path,
    *,
    seed: int,
    tokenizer: Callable[[Path], Any],
    teach: Callable[[LanguageModelConfig, Path], None] | None = None,
) -> LanguageModelConfig:
    """Write a model whole, tokenizer included; one that is there is used.

    So a resumed run and every worker load the same, and so can any other program.

    Args:
        config: The section of the run.
        run: Directory of the run.
        seed: Of weights that are created.
        tokenizer: Makes the tokenizer, given a directory to write one to.
        teach: Writes the taught model to a directory, given the section of what it is before; None:
            it is not taught.

    Returns:
        The section of the model that was written.
    """
    directory = SharedDirectory(run / INITIAL_MODEL)  # written on this machine alone
    created = config.model_copy(update={"path": directory, "architecture": None})
    if directory.is_dir():
        return created
    unfinished = SharedDirectory(directory.with_name(f".{directory.name}.{os.getpid()}"))
    whole = unfinished / "whole"
    try:
        with in_section("model"):
            words = tokenizer(unfinished)
        if teach is None:
            with in_section("model"):
                network = build_network(config, tokenizer=words, seed=seed)
            save_language_model(network, whole, tokenizer=words)
        else:
            words.save_pretrained(unfinished)
            teach(config if config.path else config.model_copy(update={"path": unfinished}), whole)
        os.replace(whole, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return created
