"""Two ranks that divide a model that reads pictures, one of which has text alone."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.algorithms.supervised import Supervised
from rlinf.models.language import build_language_model
from rlinf.models.language_config import LanguageModelConfig
from rlinf.trainers.config import PolicyTrainerConfig
from rlinf.trainers.language_trainers import policy_trainer, text_batch
from rlinf.trainers.ranks import Ranks
from tests.trainers.processes import results_of
from tests.vision import TASK, picture_prompts


def trained(folder: Path, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The weights after one step on two prompts with pictures and two without."""
    section = LanguageModelConfig(path=folder)
    model, tokenizer = build_language_model(section, seed=0)
    reader, prompts = picture_prompts(section, tokenizer, TASK)
    seen = prompts[:2]
    text = [replace(each, tokens=each.tokens[-4:], pictures=()) for each in prompts[2:4]]
    batch = text_batch(
        [(each.tokens, np.array([3, 4, 5])) for each in (*seen, *text)],
        pictures=[each.pictures for each in (*seen, *text)],
    )
    options: dict[str, Any] = {"balance": False, "micro_batch_size": 1, "optim": {"lr": 1e-2}}
    if ranks.world_size > 1:
        options |= {"reshard": "after_forward", "gradient_checkpointing": True}
    config = PolicyTrainerConfig(**options)
    trainer = policy_trainer(
        model, Supervised(), config, ranks=ranks, total_steps=1, seed=0, reader=reader
    )
    trainer.train([batch], 0)
    found = {name: value.clone() for name, value in trainer.weights()}
    trainer.close()
    return found


def of_two(folder: Path, meeting: Path) -> list[dict[str, torch.Tensor]]:
    """What each of two processes has."""
    return results_of(__name__, lambda rank: (rank, folder, meeting), seconds=480)


if __name__ == "__main__":
    rank, place, meeting = sys.argv[1:]
    store = torch.distributed.FileStore(f"{meeting}/meet", 2)
    world = Ranks(int(rank), 2, store=store, timeout_s=120)
    outcome = trained(Path(place), world)
    world.close()
    sys.stdout.buffer.write(pickle.dumps(outcome))
