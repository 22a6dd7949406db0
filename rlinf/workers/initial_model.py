"""The language model that a run begins with, as a directory that every worker loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rlinf.data.pictures import VISION_TOKENS, write_settings
from rlinf.data.tasks import ANSWER_TAGS
from rlinf.data.tokenizer import train_tokenizer
from rlinf.errors import in_section
from rlinf.models.language import build_network, load_tokenizer, save_language_model
from rlinf.models.language_config import LanguageModelConfig
from rlinf.scheduler.services.shared_directory import SharedDirectory

INITIAL_MODEL = "initial_model"


def write_initial_model(
    config: LanguageModelConfig,
    run: Path,
    seed: int,
    *,
    texts: Callable[[], Iterable[str]] | None,
    whole: Sequence[str] = ANSWER_TAGS,
    teach: Callable[[LanguageModelConfig, Path], None] | None = None,
) -> LanguageModelConfig:
    """Write a model whole, tokenizer included; one that is there is used. Returns its section.

    So a resumed run and every worker load the same, and so can any other program.

    Args:
        config: The section of the run.
        run: Directory of the run.
        seed: Of weights that are created.
        texts: What a tokenizer is trained on; None: that of the model is used.
        whole: What each is one token in such a tokenizer.
        teach: Writes the taught model to a directory, given the section of what it is before.
    """
    directory = SharedDirectory(run / INITIAL_MODEL)  # written on this machine alone
    created = config.model_copy(update={"path": directory, "architecture": None})
    if directory.is_dir():
        return created
    vision = None if config.architecture is None else config.architecture.vision
    seen = () if vision is None else VISION_TOKENS
    unfinished = SharedDirectory(directory.with_name(f".{directory.name}.{os.getpid()}"))
    complete = unfinished / "complete"
    try:
        with in_section("model"):
            if texts is None:
                words = load_tokenizer(config)
            else:
                words = train_tokenizer(texts(), unfinished, whole=(*whole, *seen))
        if teach is None:
            with in_section("model"):
                network = build_network(config, tokenizer=words, seed=seed)
            save_language_model(network, complete, tokenizer=words)
            if vision is not None:
                write_settings(complete, patch_size=vision.patch_size)
        else:
            words.save_pretrained(unfinished)
            if vision is not None:
                write_settings(unfinished, patch_size=vision.patch_size)
            own = {} if config.path else {"path": unfinished}
            teach(config.model_copy(update=own), complete)
        os.replace(complete, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return created
