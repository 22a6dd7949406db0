"""Generation worker: samples groups of completions and keeps those that are worth training on."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf.algorithms.tokens.config import TokenAlgorithmConfig
from rlinf.data.prompts.dataset import Prompt
from rlinf.data.sequences import Completion, PromptGroup
from rlinf.engines.config import EngineConfig, SamplingConfig
from rlinf.engines.protocol import Engine, FinishedCompletion, GenerationRequest, ModelSource
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, InputStream
from rlinf.models.language import build_language_model
from rlinf.models.language_config import LanguageModelConfig
from rlinf.weight_sync.config import WeightSyncConfig
from rlinf.weight_sync.protocol import Parties, WeightReceiver


@dataclass(frozen=True)
class GenerationSetup:
    """What a generation worker needs to build its engine.

    Args:
        model: Directory and number format of the model.
        engine: Which engine generates, and how.
        sampling: How tokens are drawn in training.
        algorithm: Says which groups are worth training on.
        group_size: G, completions of a prompt in training.
        seed: Seed of the run.
        weight_sync: How new weights arrive.
        parties: Who sends them, and who receives.
    """

    model: LanguageModelConfig
    engine: EngineConfig
    sampling: SamplingConfig
    algorithm: TokenAlgorithmConfig
    group_size: int
    seed: int
    weight_sync: WeightSyncConfig
    parties: Parties


@dataclass
class GenerationReport:
    """What one worker generated in a step.

    Args:
        tokens: Sampled tokens, those of rejected groups included.
        completions: Completions that they belong to.
        rejected: Groups that were not worth training on.
        spares_used: Spare prompts that took their places.
        faults: What went wrong with rewards, by reason.
        groups: The scored groups in the order of their slots, where they were asked for.
    """

    tokens: int = 0
    completions: int = 0
    rejected: int = 0
    spares_used: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    groups: list[PromptGroup] = field(default_factory=list)


Drawn = tuple[int, Prompt]
"""A prompt with the number of its draw."""


class GenerationWorker(StageWorker):
    """Answers prompts under one version of the weights.

    A *slot* is the place of a group in the batch of a step. Its number is the source of the items
    that concern it, so that everything about a slot stays in order and with one worker.
    """

    def __init__(self, setup: GenerationSetup) -> None:
        super().__init__()
        self._setup = setup
        self._algorithm = setup.algorithm.build()
        self._engine: Engine
        self._weights: WeightReceiver[Any]

    def start(self) -> None:
        """Build the engine; the weights that training begins with arrive with the first sync."""
        setup = self._setup
        model, tokenizer = build_language_model(setup.model, seed=setup.seed)
        self._engine = setup.engine.build(
            ModelSource(path=setup.model.path, module=model, tokenizer=tokenizer)
        )
        self._weights = setup.weight_sync.build_receiver(self, setup.parties)

    def receive_weights(self) -> int:
        """Take the weights that the actor sends; returns their version.

        They are applied between steps only, so that no batch is generated under half of them.
        """
        return self._weights.apply(
            lambda weights, version: self._engine.update_weights(weights.items(), version)
        )

    def generate(
        self,
        scored: InputStream,
        *,
        prompts: Sequence[Drawn],
        spares: Sequence[Drawn] = (),
    ) -> Generator[Emit, None, GenerationReport]:
        """Stage: one scored group for each slot; returns a :class:`GenerationReport`.

        Groups go to the reward as they finish. One that is not worth training on makes room for a
        spare prompt while there are any.

        Args:
            scored: Stream of scored :class:`~rlinf.data.sequences.PromptGroup`.
            prompts: Prompts of all slots; this worker takes its share.
            spares: Prompts to draw again from, likewise.
        """
        setup = self._setup
        round_ = _Round(setup.group_size, setup.sampling)
        waiting = list(spares)[self._rank :: self._world_size]
        for slot in self._slots(len(prompts)):
            self._submit(round_.begin(slot, prompts[slot], self._seeds(prompts[slot])))
        while round_.open:
            for group, slot in round_.take(self._engine.step()):
                yield Emit("completions", slot, group)
            while round_.open and (scored.ready() or not self._engine.unfinished):
                item = next(scored)
                group = item.payload
                if waiting and not self._worth(group):
                    round_.report.rejected += 1
                    round_.report.spares_used += 1
                    spare = waiting.pop(0)
                    self._submit(round_.begin(item.source, spare, self._seeds(spare)))
                    continue
                round_.close(item.source)
                yield Emit("groups", item.source, group)
        return round_.report

    def evaluate(
        self,
        scored: InputStream,
        *,
        prompts: Sequence[Drawn],
        seeds: Sequence[Sequence[int]],
        sampling: SamplingConfig,
    ) -> Generator[Emit, None, GenerationReport]:
        """Stage: answer prompts for an evaluation; the report holds the scored groups.

        Args:
            scored: Stream of scored groups.
            prompts: Prompts of all slots; this worker takes its share.
            seeds: Of the completions of each slot, equally many.
            sampling: How tokens are drawn.
        """
        round_ = _Round(len(seeds[0]), sampling)
        for slot in self._slots(len(prompts)):
            self._submit(round_.begin(slot, prompts[slot], seeds[slot]))
        found: dict[int, PromptGroup] = {}
        while round_.open:
            for group, slot in round_.take(self._engine.step()):
                yield Emit("completions", slot, group)
            while round_.open and (scored.ready() or not self._engine.unfinished):
                item = next(scored)
                round_.close(item.source)
                found[item.source] = item.payload
        round_.report.groups = [found[slot] for slot in sorted(found)]
        return round_.report

    def _slots(self, count: int) -> range:
        """This worker's share of the slots: those whose items come back to it."""
        edges = [-(-rank * count // self._world_size) for rank in (self._rank, self._rank + 1)]
        return range(*edges)

    def _submit(self, requests: Iterable[GenerationRequest]) -> None:
        for request in requests:
            self._engine.submit(request)

    def _seeds(self, drawn: Drawn) -> list[int]:
        """Seeds of a group in training."""
        seed, size = self._setup.seed, self._setup.group_size
        return [completion_seed(seed, drawn[0], place) for place in range(size)]

    def _worth(self, group: PromptGroup) -> bool:
        valid = np.array([score.valid for score in group.scores or ()])
        return self._algorithm.keep_group(group.rewards, valid)

    def close(self) -> None:
        """Give the engine back."""
        if hasattr(self, "_weights"):
            self._weights.close()
            self._engine.close()


class _Round:
    """The groups of one step that are being generated or scored."""

    def __init__(self, group_size: int, sampling: SamplingConfig) -> None:
        self._size = group_size
        self._sampling = sampling
        self._prompts: dict[int, Drawn] = {}
        self._finished: dict[int, dict[int, Completion]] = {}
        self.report = GenerationReport()

    @property
    def open(self) -> bool:
        """Whether a slot has no final group yet."""
        return bool(self._prompts)

    def begin(self, slot: int, drawn: Drawn, seeds: Sequence[int]) -> list[GenerationRequest]:
        """The requests of a slot's group; a request's number tells slot and place."""
        self._prompts[slot] = drawn
        self._finished[slot] = {}
        return [
            GenerationRequest(
                request_id=slot * self._size + place,
                prompt_tokens=drawn[1].tokens,
                seed=seed,
                sampling=self._sampling,
            )
            for place, seed in enumerate(seeds)
        ]

    def take(self, ended: Iterable[FinishedCompletion]) -> list[tuple[PromptGroup, int]]:
        """The groups, with their slots, that are complete by these completions."""
        complete = []
        for item in ended:
            slot, place = divmod(item.request_id, self._size)
            finished = self._finished[slot]
            finished[place] = item.completion
            self.report.tokens += len(item.completion)
            self.report.completions += 1
            if len(finished) == self._size:
                complete.append((self._group(slot), slot))
        return complete

    def close(self, slot: int) -> None:
        """Note that a slot has its final group."""
        del self._prompts[slot], self._finished[slot]

    def _group(self, slot: int) -> PromptGroup:
        (draw, prompt), finished = self._prompts[slot], self._finished[slot]
        return PromptGroup(
            prompt_id=prompt.prompt_id,
            draw=draw,
            prompt_tokens=prompt.tokens,
            answer=prompt.answer,
            completions=tuple(finished[place] for place in range(self._size)),
        )


def completion_seed(seed: int, draw: int, place: int) -> int:
    """Seed of one completion: a function of the run, the draw of its prompt and its place."""
    state = np.random.SeedSequence((seed, draw, place)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
