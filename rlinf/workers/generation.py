"""Generation worker: samples groups of completions and keeps those that are worth training on."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from rlinf.agents.conversations import Conversations
from rlinf.agents.tool_use import ToolUse
from rlinf.data.pictures import Picture
from rlinf.data.sequences import Completion, PromptGroup, Score
from rlinf.engines.config import SamplingConfig
from rlinf.engines.protocol import Engine, ModelSource
from rlinf.errors import in_section
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, InputStream
from rlinf.models.language import build_language_model, load_tokenizer
from rlinf.weight_sync.protocol import Parties, WeightReceiver
from rlinf.workers.carried_groups import CarryBook
from rlinf.workers.config.answering import AnsweringConfig
from rlinf.workers.context import WorkerContext
from rlinf.workers.filling import DeviceSharing, Filling, RolloutHook
from rlinf.workers.global_batches import LengthBounds
from rlinf.workers.group_book import (
    Drawn,
    GenerationReport,
    GroupBook,
    PositionBook,
    completion_seed,
)

__all__ = ["Drawn", "GenerationReport", "GenerationWorker"]


class GenerationWorker(StageWorker):
    """Answers prompts under one version of the weights.

    The number of a position is the source of the items that concern it, so that everything about it
    stays in order and with one worker.
    """

    records = (PromptGroup, Completion, Score, Picture, LengthBounds, GenerationReport)
    divides_state = True

    def __init__(self, config: AnsweringConfig, context: WorkerContext) -> None:
        super().__init__()
        self._config, self._context = config, context
        self._engine: Engine
        self._tools: ToolUse | None = None
        self._weights: WeightReceiver[Any] | None = None
        self._released = False
        self._restarts = 0
        """Of the engine, as far as they were reported."""
        if not context.trains:
            return  # the config of an evaluation may say nothing of what follows
        rollout = config.rollout
        self._algorithm = config.algorithm.build()
        self._hook: RolloutHook | None = None
        self._carried: CarryBook | None = None
        if rollout.partial is not None:
            self._carried = CarryBook(
                rollout.partial, rollout.group_size, rollout.sampling, self._seeds, self._worth
            )

    def start(self) -> None:
        """Build the engine; the weights that training begins with arrive with the first sync."""
        config = self._config
        engine, source = config.rollout.engine, self._context.model or config.model
        with in_section("model"):
            if engine.shares_module or source.architecture is not None:
                model, tokenizer = build_language_model(source, seed=config.seed)
            else:
                model, tokenizer = None, load_tokenizer(source)
        found = ModelSource(
            path=source.path, module=model, shared=False, tokenizer=tokenizer, dtype=source.dtype
        )
        self._engine = engine.build(found)
        agent = config.rollout.agent
        if agent is not None:
            self._tools = ToolUse(agent, tokenizer, config.template_arguments)
            self._engine = Conversations(
                self._engine,
                self._tools,
                max_turns=agent.max_turns,
                max_turn_tokens=agent.max_turn_tokens,
            )
        if not self._context.trains:
            return
        parties = Parties(sender="actor", receiver="rollout", receivers=self._world_size)
        self._weights = config.weight_sync.build_receiver(self, parties)

    def receive_weights(self) -> int:
        """Take the weights that the actor sends; returns their version.

        They are applied between steps only, so that no batch is generated under half of them.
        """
        if self._weights is None:
            raise RuntimeError("the worker receives no weights")
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
        positions: int,
        prompts: Sequence[Drawn],
        spares: Sequence[Drawn] = (),
        shared: DeviceSharing | None = None,
    ) -> Generator[Emit, None, GenerationReport]:
        """Stage: one scored group for each position; returns a :class:`GenerationReport`.

        Groups go to the reward as they finish. One that is not worth training on makes room for a
        spare prompt, at once, while there are any for its position, whose last group stays.

        Args:
            scored: Stream of scored :class:`~rlinf.data.sequences.PromptGroup`.
            step: Number of the training phase that the groups are for.
            positions: How many the step has; this worker fills its share.
            prompts: To begin with, of which this worker takes its share: one for each position, or,
                where groups are carried from step to step, as many as are lacking.
            spares: To draw again from: attempt a at position p, both from 0, has number
                a · ``positions`` + p, so that neither the speed of the reward nor the number of
                workers changes a group. Where groups have no positions yet, a worker takes its
                share one by one.
            shared: How devices are shared with the trainer inside the step; None: they are not.
        """
        book: GroupBook
        hook: RolloutHook | None = None
        if self._carried is not None:
            mine = [prompts[place] for place in self._positions(len(prompts))]
            own = spares[self._rank :: self._world_size]
            book = self._carried
            requests = book.begin(step, self._positions(positions), mine, own)
        else:
            rollout = self._config.rollout
            book = PositionBook(rollout.group_size, rollout.sampling, self._seeds, self._worth)
            if shared is not None:
                hook = self._hook = shared.begin(
                    self._hook, engine=self._engine, book=book, step=step, rank=self._rank,
                    release=self.offload,
                )  # fmt: skip
            positions_here = self._positions(len(prompts))
            requests = book.begin(
                {position: prompts[position] for position in positions_here},
                {position: spares[position :: len(prompts)] for position in positions_here},
            )
        failed_before = self._tool_failures
        filling = Filling(book, self._engine, hook, self._config.actor.order == "length")
        yield from filling.run(requests, scored)
        # Also of what came before the stage, such as weights that were taken.
        book.report.engine_restarts = self._engine.restarts - self._restarts
        self._restarts = self._engine.restarts
        book.report.tool_failures = self._tool_failures - failed_before
        return book.report

    @property
    def _tool_failures(self) -> int:
        """Calls so far that a tool failed."""
        return 0 if self._tools is None else self._tools.failures

    def evaluate(
        self,
        scored: InputStream,
        *,
        prompts: Sequence[Drawn],
        seeds: Sequence[Sequence[int]],
        sampling: SamplingConfig,
    ) -> Generator[Emit, None, GenerationReport]:
        """Stage: answer prompts for an evaluation; the report holds the scored groups.

        No two prompts are of one draw; ``seeds`` are those of the completions of each.
        """
        mine = {position: prompts[position] for position in self._positions(len(prompts))}
        by_draw = {draw: seeds[position] for position, (draw, _) in mine.items()}
        book = PositionBook(len(seeds[0]), sampling, by_draw.__getitem__, scored=False)
        found: dict[int, PromptGroup] = {}
        failed_before = self._tool_failures
        for emitted in Filling(book, self._engine).run(book.begin(mine), scored):
            if emitted.edge == "groups":
                found[emitted.source] = emitted.payload
            else:
                yield emitted
        book.report.groups = [found[position] for position in sorted(found)]
        book.report.tool_failures = self._tool_failures - failed_before
        return book.report

    def _positions(self, count: int) -> range:
        """This worker's share of the positions: those whose items come back to it."""
        edges = [-(-rank * count // self._world_size) for rank in (self._rank, self._rank + 1)]
        return range(*edges)

    def _seeds(self, draw: int) -> list[int]:
        """Seeds of a group in training."""
        seed, size = self._config.seed, self._config.rollout.group_size
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
        if self._weights is not None:
            self._weights.close()
        if hasattr(self, "_engine"):
            self._engine.close()
