"""Source worker: hands out the global batches of supervised training."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch

from rlinf.agents.tool_use import ToolUse
from rlinf.algorithms.batch import Batch
from rlinf.data.demonstrations import Demonstrations
from rlinf.data.prompts.loader import Draws
from rlinf.data.text_examples import TextExamples
from rlinf.envs.spec import EnvSpec
from rlinf.errors import in_section
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit
from rlinf.models.language import load_tokenizer
from rlinf.models.policy import RAW_ACTIONS
from rlinf.trainers.sequences import text_batch
from rlinf.trainers.trainer import row_order
from rlinf.workers.config.answering import WarmStartConfig
from rlinf.workers.config.supervised import (
    BehaviourCloningConfig,
    FineTuningConfig,
    SupervisedRunConfig,
)
from rlinf.workers.context import WorkerContext

Rows = Sequence[int] | np.ndarray


class Texts:
    """Prompts with answers as rows."""

    def __init__(self, examples: TextExamples) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def batch(self, rows: Rows) -> Batch:
        """Some rows; terms are the tokens of the answers."""
        chosen = (self._examples.examples[row] for row in rows)
        return text_batch([(prompt.tolist(), target.tolist()) for prompt, target in chosen])


class Chunks:
    """Observations with the chunks of C primitive actions that followed, as rows."""

    def __init__(self, demonstrations: Demonstrations, size: int) -> None:
        self._seen = {
            name: torch.from_numpy(array) for name, array in demonstrations.observations.items()
        }
        actions, acted = demonstrations.chunks(size)
        self._actions = torch.from_numpy(actions)
        # Beyond the end of an episode nothing was done: nothing is learnt there.
        self._mask = torch.from_numpy(acted).float()[:, :, None].expand_as(self._actions).flatten(1)

    def __len__(self) -> int:
        return len(self._actions)

    def batch(self, rows: Rows) -> Batch:
        """Some rows; terms are the dimensions of the actions."""
        chosen = torch.as_tensor(rows)
        inputs = {name: array[chosen] for name, array in self._seen.items()}
        return Batch.of(
            inputs={**inputs, RAW_ACTIONS: self._actions[chosen]}, mask=self._mask[chosen]
        )


class SourceWorker(StageWorker):
    """Holds what is learnt; which rows a step gets is a function of seed and step alone."""

    def __init__(self, config: SupervisedRunConfig, context: WorkerContext) -> None:
        super().__init__()
        self._config, self._context = config, context
        self._train: Texts | Chunks
        self._held_out: Texts | Chunks | None

    def start(self) -> EnvSpec | None:
        """Read the data; returns what recorded episodes say of observations and actions.

        Raises:
            ConfigError: The data cannot be used.
        """
        config, spec = self._config, None
        with in_section("data"):
            if isinstance(config, BehaviourCloningConfig):
                recorded, kept_back = config.data.build()
                spec = EnvSpec.from_json(recorded.source["spec"])
                size = config.model.num_action_chunks
                self._train = Chunks(recorded, size)
                self._held_out = None if kept_back is None else Chunks(kept_back, size)
            elif isinstance(config, FineTuningConfig):
                sets = config.data.build(load_tokenizer(self._context.model or config.model))
                self._train = Texts(sets.train)
                self._held_out = None if sets.validation is None else Texts(sets.validation)
        self._draws = Draws(len(self._train), seed=config.order_seed)
        return spec

    def draw(self, *, step: int, validate: bool) -> Generator[Emit, None, dict[str, Any]]:
        """Stage: the global batch of a step, from 0, and what validates after it, where due.

        Returns how often the rows have been passed over.
        """
        size = self._config.actor.global_batch_size
        yield Emit("batches", 0, self._train.batch(self._draws.batch(step, size)))
        if validate and self._held_out is not None:
            count = len(self._held_out)
            for number, first in enumerate(range(0, count, size)):
                rows = range(first, min(first + size, count))
                yield Emit("held_out", number, self._held_out.batch(rows))
        return {"train/epoch": (step + 1) * size / len(self._train)}


class DemonstrationsSource(StageWorker):
    """Hands out recorded chunks, as many as a rollout has samples, to be imitated beside it."""

    def __init__(self, config: Any, context: WorkerContext) -> None:
        super().__init__()
        del context
        self._config = config

    def start(self) -> EnvSpec:
        """Read the episodes; returns what they say of observations and actions."""
        config = self._config
        with in_section("demonstrations"):
            recorded, _ = config.demonstrations.build()
        self._chunks = Chunks(recorded, config.model.num_action_chunks)
        seed = config.demonstrations.seed + config.seed
        self._draws = Draws(len(self._chunks), seed=seed)
        return EnvSpec.from_json(recorded.source["spec"])

    def draw(self, *, step: int) -> Generator[Emit, None, None]:
        """Stage: the chunks of a step, from 0."""
        rows = self._draws.batch(step, self._config.samples)
        yield Emit("demonstrations", 0, self._chunks.batch(rows))


class WarmStartSource(StageWorker):
    """Hands out the targets of a generated task, pass after pass, each in another order.

    A remainder smaller than a batch is left out of a pass.
    """

    def __init__(self, config: WarmStartConfig, context: WorkerContext) -> None:
        super().__init__()
        self._config, self._context = config, context

    def start(self) -> None:
        """Generate the task, and let its tools reply to what the targets call."""
        config = self._config
        tokenizer = load_tokenizer(self._context.model or config.model)
        items = config.examples.items("train")
        prompts = tokenizer([item.prompt for item in items], add_special_tokens=False)["input_ids"]
        said, learnt = [item.target for item in items], None
        if config.agent is None:
            targets = tokenizer(said, add_special_tokens=False)["input_ids"]
        else:
            use = ToolUse(config.agent, tokenizer)
            targets, masks = zip(*map(use.demonstration, said), strict=True)
            learnt = [[*mask, True] for mask in masks]
        ended = [[*target, tokenizer.eos_token_id] for target in targets]
        self._texts = text_batch(list(zip(prompts, ended, strict=True)), learnt)

    def draw(self, *, step: int) -> Generator[Emit, None, None]:
        """Stage: the global batch of a step, from 0."""
        count = len(self._texts)
        size = min(self._config.learning.batch_size, count)
        epoch, number = divmod(step, count // size)
        order = row_order(count, seed=self._config.seed, step=0, epoch=epoch)
        rows = order[number * size : (number + 1) * size]
        yield Emit("batches", 0, self._texts.select(rows))
