"""Reward worker: scores the completions of prompt groups."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field

from rlinf.data.sequences import PromptGroup, Score
from rlinf.errors import in_section
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, InputStream, Item
from rlinf.models.language import load_tokenizer
from rlinf.rewards.pool import RewardPool
from rlinf.rewards.protocol import RewardInput
from rlinf.workers.config.answering import AnsweringConfig
from rlinf.workers.context import WorkerContext


@dataclass
class RewardReport:
    """How often what went wrong and why it did so first, what each function returned for the
    valid completions, and the groups that were asked for."""

    faults: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)
    kept: list[PromptGroup] = field(default_factory=list)


class RewardWorker(StageWorker):
    """Turns tokens into text and text into rewards, in processes of their own."""

    records = (RewardReport,)

    def __init__(self, config: AnsweringConfig, context: WorkerContext) -> None:
        super().__init__()
        self._reward = config.reward
        self._model = context.model or config.model
        self._pool: RewardPool | None = None

    def start(self) -> None:
        """Start the processes that score."""
        with in_section("model"):
            self._tokenizer = load_tokenizer(self._model)
        with in_section("reward"):
            self._pool = RewardPool(self._reward)

    def score(self, completions: InputStream, keep: int = 0) -> Generator[Emit, None, RewardReport]:
        """Stage: score groups as they come; returns a :class:`RewardReport` with those ``keep`` of
        them that were drawn first, whenever they came."""
        if self._pool is None:
            raise RuntimeError("the worker was not started")
        report = RewardReport(values={name: [] for name in self._reward.functions})
        for first in completions:
            # All that is there is handed out at once, so that every process has work.
            items = [first]
            while completions.ready():
                items.append(next(completions))
            yield from self._scored(self._pool, items, report)
            report.kept = heapq.nsmallest(keep, report.kept, key=lambda group: group.draw)
        report.faults = dict(Counter(self._pool.take_faults()))
        return report

    def _scored(
        self, pool: RewardPool, items: list[Item], report: RewardReport
    ) -> Generator[Emit, None, None]:
        groups: list[PromptGroup] = [item.payload for item in items]
        outputs = pool.score_groups([self._inputs(group) for group in groups])
        for item, group, found in zip(items, groups, outputs, strict=True):
            for each in found:
                if each.fault is not None:
                    report.reasons.setdefault(each.fault, each.reason or each.fault)
            scores = tuple(
                Score(reward=each.reward, parts=each.parts, valid=each.valid, reason=each.reason)
                for each in found
            )
            for score in (score for score in scores if score.valid):
                for name, value in score.parts.items():
                    report.values[name].append(value)
            report.kept.append(group.scored(scores))
            yield Emit("scored", item.source, report.kept[-1])

    def _inputs(self, group: PromptGroup) -> list[RewardInput]:
        prompt = self._tokenizer.decode(group.prompt_tokens.tolist())
        texts = self._tokenizer.batch_decode(
            # What a tool replied may hold the marks of an answer, and is not the model's.
            [completion.sampled_tokens.tolist() for completion in group.completions],
            skip_special_tokens=True,
        )
        return [
            RewardInput(
                prompt=prompt,
                completion=text,
                num_tokens=len(completion.sampled_tokens),
                stop_reason=completion.stop_reason,
                answer=group.answer,
                columns=group.columns,
                calls=[
                    self._tokenizer.batch_decode([part.tolist() for part in call])
                    for call in completion.calls
                ],
            )
            for text, completion in zip(texts, group.completions, strict=True)
        ]

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()
