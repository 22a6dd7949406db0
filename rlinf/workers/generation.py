"""Generation worker: samples groups of completions and keeps those that are worth training on."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np

from rlinf.agents.conversations import Conversations
from rlinf.agents.tool_use import ToolUse
from rlinf.data.sequences import Completion, PromptGroup, Score
from rlinf.engines.config import SamplingConfig
from rlinf.engines.protocol import Engine, GenerationRequest, ModelSource
from rlinf.errors import in_section
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, InputStream, NextItem
from rlinf.models.language import build_language_model, load_tokenizer
from rlinf.rescale.length_forecast import LengthForecast
from rlinf.rescale.prediction_bias import PredictionBias
from rlinf.weight_sync.protocol import Parties, WeightReceiver
from rlinf.workers.answering_config import AnsweringConfig
from rlinf.workers.context import WorkerContext
from rlinf.workers.generation_round import Drawn, GenerationReport, Round, completion_seed
from rlinf.workers.group_pool import GroupPool
from rlinf.workers.moving_rollout import MovingRollout, step_times
from rlinf.workers.moving_round import MovingRound, SharedDevices, Trained
from rlinf.workers.partial_rollout import fill_from_pool
from rlinf.workers.rollout_leader import RolloutLeader

__all__ = ["Drawn", "GenerationReport", "GenerationWorker"]


class GenerationWorker(StageWorker):
    """Answers prompts under one version of the weights.

    A *slot* is the place of a group in the batch of a step. Its number is the source of the items
    that concern it, so that everything about a slot stays in order and with one worker.
    """

    records = (PromptGroup, Completion, Score, GenerationReport)
    divides_state = True

    def __init__(self, config: AnsweringConfig, context: WorkerContext) -> None:
        super().__init__()
        self._config, self._context = config, context
        self._engine: Engine
        self._weights: WeightReceiver[Any] | None = None
        self._released = False
        if context.trains:
            self._prepare_training(config)

    def _prepare_training(self, config: AnsweringConfig) -> None:
        """What no evaluation needs, whose config may say nothing of it."""
        rollout = config.rollout
        self._algorithm = config.algorithm.build()
        self._pool: GroupPool | None = None
        self._mailbox: NextItem | None = None
        self._step_times = step_times()
        self._trained: Trained | None = None
        self._forecast = LengthForecast(rollout.sampling.max_new_tokens)
        self._rollout_bias = PredictionBias()
        if rollout.partial is not None:
            self._pool = GroupPool(
                rollout.partial,
                group_size=rollout.group_size,
                sampling=rollout.sampling,
                seed=config.seed,
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
        self._engine = engine.build(
            ModelSource(
                path=source.path,
                module=model,
                shared=False,
                tokenizer=tokenizer,
                dtype=source.dtype,
            )
        )
        if not self._context.trains:
            return
        agent = config.rollout.agent
        if agent is not None:
            self._engine = Conversations(
                self._engine,
                ToolUse(agent, tokenizer),
                max_turns=agent.max_turns,
                max_turn_tokens=agent.max_turn_tokens,
            )
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
        slots: int,
        prompts: Sequence[Drawn],
        spares: Sequence[Drawn] = (),
        shared: SharedDevices | None = None,
    ) -> Generator[Emit, None, GenerationReport]:
        """Stage: one scored group for each slot; returns a :class:`GenerationReport`.

        Groups go to the reward as they finish. One that is not worth training on makes room for a
        spare prompt, at once, while there are any for its slot; the last group of a slot stays.

        Args:
            scored: Stream of scored :class:`~rlinf.data.sequences.PromptGroup`.
            step: Number of the training phase that the groups are for.
            slots: Slots of the step; this worker fills its share.
            prompts: Prompts to begin with, of which this worker takes its share: one for each slot,
                or with a pool as many as it lacks.
            spares: Prompts to draw again from: attempt a of slot s, both from 0, has number
                a · ``slots`` + s, so that neither the speed of the reward nor the number of workers
                changes a group. With a pool, where groups have no slots yet, a worker takes its
                share one by one.
            shared: How devices are shared with the trainer inside the step; None: they are not.
        """
        if self._config.actor.order == "length":
            report = yield from self._fill_moving(scored, prompts, step, shared)
        elif self._pool is None:
            report = yield from self._fill_slots(scored, prompts, spares)
        else:
            mine = [prompts[place] for place in self._slots(len(prompts))]
            report = yield from fill_from_pool(
                self._pool,
                self._engine,
                scored,
                slots=self._slots(slots),
                step=step,
                prompts=mine,
                spares=spares[self._rank :: self._world_size],
                worth=self._worth,
            )
        report.engine_restarts = self._engine.restarts
        return report

    def _fill_moving(
        self,
        scored: InputStream,
        prompts: Sequence[Drawn],
        step: int,
        shared: SharedDevices | None,
    ) -> Generator[Emit, None, GenerationReport]:
        """As :meth:`_fill_slots`, by workers of which some may leave their groups to others."""
        settings, leader = self._config.rollout, None
        if shared is not None and self._mailbox is None:
            self._mailbox = NextItem(shared.mailboxes[self._rank])
        if shared is not None and self._rank == self._world_size - 1:
            leader = RolloutLeader(
                shared,
                step=step,
                slots=len(prompts),
                group_size=settings.group_size,
                global_batches=self._config.actor.n_minibatches,
                forecast=self._forecast,
                bias=self._rollout_bias,
                trained=self._trained,
                handover_seconds=self._step_times.at(1),
                reads_again=not self._engine.carries_caches,
            )
        rollout = MovingRollout(
            self._engine,
            MovingRound(settings.group_size, settings.sampling),
            scored,
            step=step,
            rank=self._rank,
            devices=shared,
            mailbox=self._mailbox,
            times=self._step_times,
            leader=leader,
            release=self.offload,
        )
        mine = [(s, prompts[s], self._seeds(prompts[s])) for s in self._slots(len(prompts))]
        report = yield from rollout.fill(mine)
        if leader is not None:
            self._trained = leader.trained
            self._forecast.next_step()
            self._rollout_bias.next_step()
        return report

    def _fill_slots(
        self, scored: InputStream, prompts: Sequence[Drawn], spares: Sequence[Drawn]
    ) -> Generator[Emit, None, GenerationReport]:
        """Every slot has its prompt from the beginning, and all are generated to their end."""
        rollout = self._config.rollout
        round_ = Round(rollout.group_size, rollout.sampling)
        # A slot has spares of its own, as which group is scored first depends on who is faster.
        waiting: dict[int, deque[Drawn]] = {}
        for slot in self._slots(len(prompts)):
            waiting[slot] = deque(spares[slot :: len(prompts)])
            self._submit(round_.begin(slot, prompts[slot], self._seeds(prompts[slot])))
            round_.report.begun += 1
        while round_.open:
            for group, slot in round_.take(self._engine.step()):
                yield Emit("completions", slot, group)
            while round_.open and (scored.ready() or not self._engine.unfinished):
                item = next(scored)
                group = item.payload
                if waiting[item.source] and not self._worth(group):
                    spare = waiting[item.source].popleft()
                    round_.report.spares.append(spare[0])
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
        round_ = Round(len(seeds[0]), sampling)
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
        seed, size = self._config.seed, self._config.rollout.group_size
        return [completion_seed(seed, drawn[0], place) for place in range(size)]

    def _worth(self, group: PromptGroup) -> bool:
        valid = np.array([score.valid for score in group.scores or ()])
        return self._algorithm.keep_group(group.rewards, valid)

    def state(self) -> dict[str, Any]:
        """Groups that go on in the next step."""
        return {} if self._pool is None else self._pool.state()

    def load_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from the :meth:`state` of every rank."""
        if self._pool is not None:
            self._pool.load_state(states, self._rank, self._world_size)

    def close(self) -> None:
        """Give the engine back."""
        if self._weights is not None:
            self._weights.close()
        if hasattr(self, "_engine"):
            self._engine.close()
