"""The language model that a run has trained so far, as other programs read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlinf.algorithms.supervised import Supervised
from rlinf.errors import ConfigError
from rlinf.models.language import build_language_model
from rlinf.runners.evaluation import load_run, run_of
from rlinf.runners.initial_model import INITIAL_MODEL
from rlinf.runners.task import Task
from rlinf.trainers.language_trainers import policy_trainer, save_pretrained
from rlinf.trainers.ranks import Ranks


def write_language_model(task: type[Task[Any]], source: Path, directory: Path) -> str:
    """Write what a checkpoint holds as the run itself does at its end: see
    :func:`~rlinf.trainers.language_trainers.save_pretrained`.

    It is read into a trainer of one rank on the CPU, with as many bytes for each weight as the
    checkpoint has.

    Args:
        task: Of the run.
        source: A run directory, whose newest or best checkpoint counts; or one of its checkpoints.
        directory: Is made.

    Returns:
        What was written, in words.

    Raises:
        CheckpointError: There is no good checkpoint.
        ConfigError: The model that the run began with is gone.
    """
    found, checkpoint = load_run(task, source)
    config: Any = found
    began = run_of(source) / INITIAL_MODEL
    section = config.model
    if began.is_dir():
        section = section.model_copy(update={"path": began, "architecture": None})
    elif section.path is None:
        raise ConfigError(f"the model that the run began with is gone: there is no {began}")
    model, tokenizer = build_language_model(section, seed=config.seed)
    algorithm = getattr(config, "algorithm", None)
    trainer = policy_trainer(
        model,
        Supervised() if algorithm is None else algorithm.build(),
        config.actor.model_copy(update={"tensor_parallel_size": 1}),
        ranks=Ranks(),
        total_steps=config.training_steps,
        seed=config.seed,
    )
    state = checkpoint.tree["workers"]["actor"]["trainer"]
    if state is None:
        trainer.load_sharded(checkpoint.path / "actor")
    else:
        trainer.load_state_dict(state)
    save_pretrained(trainer, directory, tokenizer, section.path)
    return f"{run_of(source).name} step {checkpoint.step}"
