"""The language model in a checkpoint, as other programs read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlinf.algorithms.supervised import Supervised
from rlinf.checkpoint.contents import Checkpoint
from rlinf.models.language import build_language_model
from rlinf.models.language_config import LanguageModelConfig
from rlinf.trainers.language_trainers import policy_trainer, save_pretrained
from rlinf.trainers.ranks import Ranks


def write_language_model(
    config: Any, began: LanguageModelConfig, checkpoint: Checkpoint, directory: Path
) -> None:
    """Write what a checkpoint holds as its run does at its end: see
    :func:`~rlinf.trainers.language_trainers.save_pretrained`.

    It is read into a trainer of one rank on the CPU, with as many bytes for each weight as the
    checkpoint has.

    Args:
        config: Of the run.
        began: The section of the model that the run began with.
        checkpoint: Whole, or in the parts of its ranks.
        directory: Is made.

    Raises:
        CheckpointError: The checkpoint is of another model.
        ConfigError: The model that the run began with cannot be read.
    """
    model, tokenizer = build_language_model(began, seed=config.seed)
    algorithm = getattr(config, "algorithm", None)
    trainer = policy_trainer(
        model,
        Supervised() if algorithm is None else algorithm.build(),
        config.actor.model_copy(update={"tensor_parallel_size": 1}),
        ranks=Ranks(),
        total_steps=config.training_steps,
        seed=config.seed,
    )
    with checkpoint.read_as_written():
        state = checkpoint.tree["workers"]["actor"]["trainer"]
        if state is None:
            trainer.load_sharded(checkpoint.path / "actor")
        else:
            trainer.load_state_dict(state)
    save_pretrained(trainer, directory, tokenizer, began.path)
