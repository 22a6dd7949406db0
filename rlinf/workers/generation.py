"""Generation worker: samples groups of completions and keeps those that are worth training on."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf.agents.config import AgentConfig
from rlinf.agents.conversations import Conversations
from rlinf.agents.tool_use import ToolUse
from rlinf.algorithms.tokens.config import TokenAlgorithmConfig
from rlinf.data.sequences import PromptGroup
from rlinf.engines.config import EngineConfig, SamplingConfig
from rlinf.engines.protocol import Engine, ModelSource
from rlinf.errors import in_section
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, InputStream
from rlinf.models.language import build_language_model, load_tokenizer
from rlinf.models.language_config import LanguageModelConfig
from rlinf.weight_sync.config import WeightSyncConfig
from rlinf.weight_sync.protocol import Parties, WeightReceiver
from rlinf.workers.carried_groups import CarryBook
from rlinf.workers.filling import DeviceSharing, Filling, RolloutHook
from rlinf.workers.group_book import (
    Drawn,
    GenerationReport,
    GroupBook,
    SlotBook,
    completion_seed,
)
from rlinf.workers.partial_config import PartialRolloutConfig

__all__ = ["Drawn", "GenerationReport", "GenerationSetup", "GenerationWorker"]


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
        partial: How groups are carried from step to step; None: not at all.
        tells_progress: Whether the trainer must know how long unfinished answers are already.
        agent: Tools that answers may call; None: an answer is one turn.
    """

    model: LanguageModelConfig
    engine: EngineConfig
    sampling: SamplingConfig
    algorithm: TokenAlgorithmConfig
    group_size: int
    seed: int
    weight_sync: WeightSyncConfig
    parties: Parties
    partial: PartialRolloutConfig | None = None
    tells_progress: bool = False
    agent: AgentConfig | None = None


class GenerationWorker(StageWorker):
    """Answers prompts under one version of the weights.

    The number of a slot is the source of the items that concern it, so that everything about a slot
    stays in order and with one worker.
    """

    def __init__(self, setup: GenerationSetup) -> None:
        super().__init__()
        self._setup = setup
        self._algorithm = setup.algorithm.build()
        self._engine: Engine
        self._weights: WeightReceiver[Any]
        self._released = False
        self._hook: RolloutHook | None = None
        self._carried: CarryBook | None = None
        if setup.partial is not None:
            self._carried = CarryBook(
                setup.partial, setup.group_size, setup.sampling, self._seeds, self._worth
            )

    def start(self) -> None:
        """Build the engine; the weights that training begins with arrive with the first sync."""
        setup = self._setup
        with in_section("model"):
            if setup.engine.shares_module or setup.model.architecture is not None:
                model, tokenizer = build_language_model(setup.model, seed=setup.seed)
            else:
                model, tokenizer = None, load_tokenizer(setup.model)
        self._engine = setup.engine.build(
            ModelSource(
                path=setup.model.path,
                module=model,
                shared=False,
                tokenizer=tokenizer,
                dtype=setup.model.dtype,
            )
        )
        if setup.agent is not None:
            self._engine = Conversations(
                self._engine,
                ToolUse(setup.agent, tokenizer),
                max_turns=setup.agent.max_turns,
                max_turn_tokens=setup.agent.max_turn_tokens,
            )
        self._weights = setup.weight_sync.build_receiver(self, setup.parties)

    def receive_weights(self) -> int:
        """Take the weights that the actor sends; returns their version.

        They are applied between steps only, so that no batch is generated under half of them.
        """
        return self._weights.apply(self._load)

    def _load(self, weights: dict[str, Any], version: int) -> None:
        # Only now, so that a sender on the same device has given back what it sends from.
        self.onload()
        self._engine.update_weights(weights.items(), version)

    def onload(self) -> None:
        """Take again the memory that :meth:`offload` gave back."""
        if self._released:
            self._engine.restore_memory()
            self._released = False

    def offload(self) -> None:
        """Give the memory of weights and caches back; new weights must come before it is used."""
        if not self._released:
            self._engine.release_memory()
            self._released = True

    def generate(
        self,
        scored: InputStream,
        *,
        step: int,
        slots: int,
        prompts: Sequence[Drawn],
        spares: Sequence[Drawn] = (),
        shared: DeviceSharing | None = None,
    ) -> Generator[Emit, None, GenerationReport]:
        """Stage: one scored group for each slot; returns a :class:`GenerationReport`.

        Groups go to the reward as they finish. One that is not worth training on makes room for a
        spare prompt, at once, while there are any for its slot; the last group of a slot stays.

        Args:
            scored: Stream of scored :class:`~rlinf.data.sequences.PromptGroup`.
            step: Number of the training phase that the groups are for.
            slots: Slots of the step; this worker fills its share.
            prompts: Prompts to begin with, of which this worker takes its share: one for each slot,
                or, where groups are carried from step to step, as many as are lacking.
            spares: Prompts to draw again from: attempt a of slot s, both from 0, has number
                a · ``slots`` + s, so that neither the speed of the reward nor the number of workers
                changes a group. Where groups have no slots yet, a worker takes its share one by
                one.
            shared: How devices are shared with the trainer inside the step; None: they are not.
        """
        book: GroupBook
        hook: RolloutHook | None = None
        if self._carried is not None:
            mine = [prompts[place] for place in self._slots(len(prompts))]
            own = spares[self._rank :: self._world_size]
            book = self._carried
            requests = book.begin(step, self._slots(slots), mine, own)
        else:
            setup = self._setup
            book = SlotBook(setup.group_size, setup.sampling, self._seeds, self._worth)
            if shared is not None:
                hook = self._hook = shared.begin(
                    self._hook, engine=self._engine, book=book, step=step, rank=self._rank,
                    release=self.offload,
                )  # fmt: skip
            slots_here = self._slots(len(prompts))
            requests = book.begin(
                {slot: prompts[slot] for slot in slots_here},
                {slot: spares[slot :: len(prompts)] for slot in slots_here},
            )
        filling = Filling(book, self._engine, hook, self._setup.tells_progress)
        yield from filling.run(requests, scored)
        book.report.engine_restarts = self._engine.restarts
        return book.report

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
            prompts: Prompts of all slots, no two of them of one draw; this worker takes its share.
            seeds: Of the completions of each slot, equally many.
            sampling: How tokens are drawn.
        """
        mine = {slot: prompts[slot] for slot in self._slots(len(prompts))}
        by_draw = {draw: seeds[slot] for slot, (draw, _) in mine.items()}
        book = SlotBook(len(seeds[0]), sampling, by_draw.__getitem__)
        found: dict[int, PromptGroup] = {}
        for emitted in Filling(book, self._engine).run(book.begin(mine), scored):
            if emitted.edge == "groups":
                found[emitted.source] = emitted.payload
            else:
                yield emitted
        book.report.groups = [found[slot] for slot in sorted(found)]
        return book.report

    def _slots(self, count: int) -> range:
        """This worker's share of the slots: those whose items come back to it."""
        edges = [-(-rank * count // self._world_size) for rank in (self._rank, self._rank + 1)]
        return range(*edges)

    def _seeds(self, draw: int) -> list[int]:
        """Seeds of a group in training."""
        seed, size = self._setup.seed, self._setup.group_size
        return [completion_seed(seed, draw, place) for place in range(size)]

    def _worth(self, group: PromptGroup) -> bool:
        valid = np.array([score.valid for score in group.scores or ()])
        return self._algorithm.keep_group(group.rewards, valid)

    def state(self) -> dict[str, Any]:
        """Groups that go on in the next step."""
        return {} if self._carried is None else self._carried.state()

    def load_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from the :meth:`state` of every rank."""
        if self._carried is not None:
            self._carried.load_state(states, self._rank, self._world_size)

    def close(self) -> None:
        """Give the engine back."""
        if hasattr(self, "_weights"):
            self._weights.close()
            self._engine.close()
