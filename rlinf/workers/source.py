"""Source worker: hands out the global batches of supervised training."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlinf.agents.tool_use import ToolUse
from rlinf.algorithms.batch import Batch
from rlinf.data.augmentation import AugmentationConfig
from rlinf.data.imitation import DemonstrationsConfig, Recorded, WeightedDraws
from rlinf.data.prompts.loader import Draws
from rlinf.data.text_examples import TextExamples
from rlinf.envs.config import EnvConfig, Environments
from rlinf.envs.spec import EnvSpec
from rlinf.errors import CheckpointError, in_section
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit
from rlinf.models.config import ModelConfig
from rlinf.models.language import load_tokenizer, picture_reader
from rlinf.models.policy import RAW_ACTIONS
from rlinf.trainers.language_trainers import text_batch
from rlinf.trainers.trainer import row_order
from rlinf.workers.config.answering import WarmStartConfig
from rlinf.workers.config.supervised import (
    BehaviourCloningConfig,
    FineTuningConfig,
    SupervisedRunConfig,
)
from rlinf.workers.context import WorkerContext

Rows = Sequence[int] | np.ndarray
_EXAMPLES = "examples_sha256"


class Texts:
    """Prompts with answers as rows."""

    def __init__(self, examples: TextExamples) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def longest(self, count: int) -> Rows:
        """The rows of most tokens, over again where there are fewer."""
        lengths = [len(each.prompt) + len(each.target) for each in self._examples.examples]
        return np.resize(np.argsort(lengths, kind="stable")[::-1], count)

    def batch(self, rows: Rows) -> Batch:
        """Some rows; terms are the tokens of the answers."""
        chosen = [self._examples.examples[row] for row in rows]
        texts = [(each.prompt.tolist(), each.target.tolist()) for each in chosen]
        return text_batch(texts, pictures=[each.pictures for each in chosen])


class Chunks:
    """Observations with the ``size`` primitive actions that followed, and so many ``before``, as
    rows.

    The rows of several sets are numbered one set behind the other.
    """

    def __init__(self, sets: Sequence[Recorded], size: int, *, before: int = 0) -> None:
        self._sets = sets
        self._rows = [each.rows() for each in sets]
        self._chunks = [each.chunks(size, before=before) for each in sets]
        self._firsts = np.cumsum([0, *map(len, self._rows)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def longest(self, count: int) -> Rows:
        """Any rows: all are of one size."""
        return np.resize(np.arange(len(self)), count)

    def draws(self, seed: int) -> Draws | WeightedDraws:
        """The order in which they are drawn."""
        if len(self._sets) == 1:
            return Draws(len(self), seed=seed)
        weights = (each.weight for each in self._sets)
        return WeightedDraws(map(len, self._rows), weights, seed=seed)

    def batch(self, rows: Rows) -> Batch:
        """Some rows; terms are the dimensions of the actions."""
        wanted = np.asarray(rows)
        of_set = np.searchsorted(self._firsts, wanted, side="right") - 1
        parts = [(number, np.flatnonzero(of_set == number)) for number in range(len(self._sets))]
        present = [(number, places) for number, places in parts if len(places)]
        found = [self._part(number, wanted[places] - self._firsts[number])
                 for number, places in present]  # fmt: skip
        order = torch.from_numpy(np.argsort(np.concatenate([places for _, places in present])))
        joined = {name: torch.cat([part[name] for part in found])[order] for name in found[0]}
        return Batch.of(mask=joined.pop("mask"), inputs=joined)

    def _part(self, number: int, rows: np.ndarray) -> dict[str, torch.Tensor]:
        held, (steps, acted) = self._sets[number], self._chunks[number]
        seen = self._rows[number][rows]
        inputs = {name: column[seen] for name, column in held.columns.items()}
        actions = torch.from_numpy(held.actions[steps[rows]])
        # Beyond the ends of an episode nothing was done: nothing is learnt there.
        mask = torch.from_numpy(acted[rows]).float()[:, :, None].expand_as(actions).flatten(1)
        found = {name: torch.from_numpy(array) for name, array in inputs.items()}
        return {**found, RAW_ACTIONS: actions, "mask": mask}


class SourceWorker(StageWorker):
    """Holds what is learnt; which rows a step gets is a function of seed and step alone."""

    state_is_optional = True  # that of before it had one holds nothing of it

    def __init__(self, config: SupervisedRunConfig, context: WorkerContext) -> None:
        super().__init__()
        self._config, self._context = config, context
        self._train: Texts | Chunks
        self._held_out: Texts | Chunks | None
        self._state: dict[str, str] = {}
        self._counted_otherwise = False

    def start(
        self, env_spec: EnvSpec | None = None, trained: Mapping[str, Any] | None = None
    ) -> str:
        """Read the data; returns in words what was read, and how many steps pass over all of it.

        Args:
            env_spec: What the environments show and take in which the policy acts afterwards.
            trained: What :meth:`~rlinf.workers.fit.CloningWorker.start` says of the policy.

        Raises:
            ConfigError: The data cannot be used, or is of other environments.
        """
        config = self._config
        if isinstance(config, FineTuningConfig):
            report = self._read_texts(config)
        elif isinstance(config, BehaviourCloningConfig):
            with in_section("data"):
                assert env_spec is not None
                assert trained is not None
                recorded, kept_back = (
                    read_by(config.model, env_spec, sets)
                    for sets in config.data.build(env_spec, _simulator(config.env))
                )
                _check_units(recorded, config.model)
                before, size = trained["imitated"]
                self._train = Chunks(recorded, size, before=before)
                self._held_out = Chunks(kept_back, size, before=before) if kept_back else None
                self._draws: Draws | WeightedDraws = self._train.draws(config.order_seed)
            report = f"training: {len(self._train)} steps of recorded episodes"
        size = config.actor.global_batch_size
        return f"{report}\nan epoch is {len(self._train) / size:.4g} steps of {size} rows"

    def _read_texts(self, config: FineTuningConfig) -> str:
        model = self._context.model or config.model
        with in_section("model"):
            tokenizer = load_tokenizer(model)
            reader = picture_reader(model, tokenizer) if config.has_pictures else None
        with in_section("data"):
            sets = config.data.build(tokenizer, reader)
        self._train = Texts(sets.train)
        self._held_out = None if sets.validation is None else Texts(sets.validation)
        self._draws = Draws(len(self._train), seed=config.order_seed)
        self._state = {_EXAMPLES: sets.sha256}
        self._counted_otherwise = config.data.counted_otherwise(sets)
        return sets.report

    def state(self) -> dict[str, str]:
        """What the rows are, for a checkpoint, if they are texts: files of sets have hashes of
        their own, and the pictures that a file of texts names have none."""
        return self._state

    def load_state(self, state: Mapping[str, str]) -> None:
        """Compare with :meth:`state`; CheckpointError where the rows are others, be it that an
        earlier version, which wrote none, counted them otherwise."""
        if self._counted_otherwise and _EXAMPLES not in state:
            raise CheckpointError(
                "the checkpoint is of a version in which data.files.limit and data.held_out "
                "counted the turns of conversations, and they count conversations now: a step "
                "would learn others, some of them held out before; nearest: a new run from its "
                "weights, which `rlinf convert run` writes"
            )
        for key, own in self._state.items():
            if state.get(key, own) != own:
                raise CheckpointError(
                    "the examples changed after the checkpoint was written, so that a step would "
                    "learn others: restore the files, pictures, tokenizer and length, or begin a "
                    "new run from its weights"
                )

    def draw(
        self, *, step: int, validate: bool, longest: bool = False
    ) -> Generator[Emit, None, dict[str, Any]]:
        """Stage: the global batch of a step, from 0, and what validates after it, where due; with
        ``longest`` of the longest rows, to see what memory they take.

        Returns how often the rows have been passed over, on average.
        """
        size = self._config.actor.global_batch_size
        drawn = self._draws.batch(step, size)
        batch = self._train.batch(self._train.longest(size) if longest else drawn)
        if isinstance(self._config, BehaviourCloningConfig):
            batch = _varied(batch, self._config.data, self._config.order_seed, step)
        yield Emit("batches", 0, batch)
        if validate and self._held_out is not None:
            count = len(self._held_out)
            for number, first in enumerate(range(0, count, size)):
                rows = range(first, min(first + size, count))
                yield Emit("held_out", number, self._held_out.batch(rows))
        return {"train/epoch": (step + 1) * size / len(self._train)}


def _simulator(environments: Environments) -> EnvConfig | None:
    """The one that recorded episodes may be of; None where a run has several."""
    sections = list(environments.sections.values())
    return sections[0] if len(sections) == 1 else None


def read_by(model: ModelConfig, spec: EnvSpec, sets: Sequence[Recorded]) -> list[Recorded]:
    """Without pictures that the policy does not read: each would be decoded for every row."""
    left = model.unread(spec.seen_by_cameras)
    return [
        replace(each, columns={n: column for n, column in each.columns.items() if n not in left})
        for each in sets
    ]


def _check_units(sets: Sequence[Recorded], model: ModelConfig) -> None:
    """Refuse sets of actions in other units than the model has."""
    for number, each in enumerate(sets):
        rows, states = each.rows(), each.columns.get("states")
        key = "path" if len(sets) == 1 else f"sets.{number}.path"
        began = None if states is None else states[rows]
        model.check_recorded(each.actions[rows], began, key=key)


def _varied(batch: Batch, config: DemonstrationsConfig, seed: int, step: int) -> Batch:
    """With other pictures at each step, if the recipe says so; before ranks divide the batch."""
    if config.augmentation == AugmentationConfig():
        return batch
    words = np.random.SeedSequence((seed, step)).generate_state(2)
    return replace(batch, inputs=config.augmentation.applied(batch.inputs, int(words[0])))


class DemonstrationsSource(StageWorker):
    """Hands out recorded chunks, as many as a rollout has samples, to be imitated beside it."""

    records = (Batch,)

    def __init__(self, config: Any, context: WorkerContext) -> None:
        super().__init__()
        del context
        self._config = config

    def start(self, env_spec: EnvSpec, trained: Mapping[str, Any]) -> None:
        """Read the episodes, as environments of this spec show things; ConfigError. What is
        ``trained`` is what :meth:`~rlinf.workers.actor.ActorWorker.start` says of the policy."""
        config = self._config
        with in_section("demonstrations"):
            found, _ = config.demonstrations.build(env_spec, _simulator(config.env))
            recorded = read_by(config.model, env_spec, found)
            _check_units(recorded, config.model)
        before, size = trained["imitated"]
        self._chunks = Chunks(recorded, size, before=before)
        self._seed = config.demonstrations.seed + config.seed
        self._draws = self._chunks.draws(self._seed)

    def draw(self, *, step: int) -> Generator[Emit, None, None]:
        """Stage: the chunks of a step, from 0."""
        batch = self._chunks.batch(self._draws.batch(step, self._config.samples))
        varied = _varied(batch, self._config.demonstrations, self._seed, step)
        yield Emit("demonstrations", 0, varied)


class WarmStartSource(StageWorker):
    """Hands out the targets of a generated task, pass after pass, each in another order.

    A remainder smaller than a batch is left out of a pass.
    """

    def __init__(self, config: WarmStartConfig, context: WorkerContext) -> None:
        super().__init__()
        self._config, self._context = config, context

    def start(self) -> None:
        """Generate the task, with prompts as they are given later, and let its tools reply to what
        the targets call.

        Raises:
            ConfigError: No prompt is left, or one is too long, as in the data of the run.
        """
        config = self._config
        model = self._context.model or config.model
        tokenizer = load_tokenizer(model)
        reader = picture_reader(model, tokenizer) if config.has_pictures else None
        with in_section("data"):
            prompts = config.data.build_targets(tokenizer, reader)
        said, learnt = [target for prompt in prompts for target in prompt.answer], None
        if config.agent is None:
            targets = tokenizer(said, add_special_tokens=False)["input_ids"]
        else:
            use = ToolUse(config.agent, tokenizer)
            targets, masks = zip(*map(use.demonstration, said), strict=True)
            use.close()
            learnt = [[*mask, True] for mask in masks]
        ended = [[*target, tokenizer.eos_token_id] for target in targets]
        texts = [(each.tokens.tolist(), end) for each, end in zip(prompts, ended, strict=True)]
        self._texts = text_batch(texts, learnt, [each.pictures for each in prompts])

    def draw(self, *, step: int) -> Generator[Emit, None, None]:
        """Stage: the global batch of a step, from 0."""
        count = len(self._texts)
        size = min(self._config.learning.batch_size, count)
        epoch, number = divmod(step, count // size)
        order = row_order(count, seed=self._config.seed, step=0, epoch=epoch)
        rows = order[number * size : (number + 1) * size]
        yield Emit("batches", 0, self._texts.select(rows))
