"""What a reasoning run counts and logs of the reports of its workers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf.runners.task import Counts

if TYPE_CHECKING:
    from rlinf.flow.executor import StepReport
    from rlinf.runners.reasoning_config import ReasoningConfig
    from rlinf.runners.run import Run
    from rlinf.workers.group_book import GenerationReport
    from rlinf.workers.reward import RewardReport


FIGURES = (
    ("prompts", "rollout/prompts", ",.0f"),
    ("sequences/s", "rollout/sequences_per_second", ",.1f"),
    ("tokens/s", "rollout/tokens_per_second", ",.0f"),
    ("reward", "rollout/rewards", ".3f"),
    ("pass@1", "eval/success", ".3f"),
    ("length", "rollout/response_length", ".1f"),
    ("KL", "actor/approx_kl", ".5f"),
    ("explained variance", "critic/explained_variance", ".3f"),
)
"""What the progress display shows."""


@dataclass
class AnswerCounts(Counts):
    """Totals of a reasoning run, and its pass rate before training."""

    prompts: int = 0
    sequences: int = 0
    tokens: int = 0
    pass_before: float = float("nan")

    def metrics(
        self, report: StepReport, config: ReasoningConfig, seconds: float
    ) -> dict[str, Any]:
        """Of a step: what the workers returned, and totals."""
        found: dict[str, Any] = {}
        for trainer in ("critic", "actor"):
            if trainer in report.stages:
                found.update(report.results(trainer)[0])
        found.update(self._scored(report.results("reward"), config))
        parts: list[GenerationReport] = report.results("rollout")
        found.update(self._generated(parts, config))
        taken = {name: report.seconds(name) for name in report.stages}
        tokens = sum(part.tokens for part in parts)
        found["rollout/tokens_per_second"] = tokens / taken["rollout"]
        found["rollout/sequences_per_second"] = config.rollout.sequences / seconds
        return found | {f"time/{name}": value for name, value in taken.items()}

    def _scored(self, parts: Sequence[RewardReport], config: ReasoningConfig) -> dict[str, float]:
        metrics = {}
        for name in config.reward.functions:
            values = [value for part in parts for value in part.values[name]]
            # The exact sum: the order in which workers scored them changes nothing.
            metrics[f"reward/{name}"] = math.fsum(values) / max(len(values), 1)
        faults = sum((Counter(part.faults) for part in parts), Counter[str]())
        return metrics | self.add_faults(faults, "reward")

    def _generated(
        self, parts: Sequence[GenerationReport], config: ReasoningConfig
    ) -> dict[str, float]:
        def total(name: str) -> int:
            return sum(getattr(part, name) for part in parts)

        rejected = sum(len(part.spares) for part in parts)
        self.prompts += total("begun") + rejected
        self.sequences += total("completions")
        self.tokens += total("tokens")
        metrics = {
            "rollout/prompts": float(self.prompts),
            "rollout/tokens": float(self.tokens),
            "rollout/rejected_groups": float(rejected),
            "rollout/engine_restarts": float(total("engine_restarts")),
        }
        if config.rollout.partial is not None:
            for name in ("interrupted", "carried", "regenerated", "dropped_tokens"):
                metrics[f"rollout/{name}"] = float(total(name))
        if config.rollout.agent is not None:
            metrics["rollout/turns"] = total("turns") / max(total("completions"), 1)
        return metrics

    def summary(self, run: Run) -> str:
        """What a run has done, in words."""
        said = f"training: {self.sequences} sequences, {self.tokens} tokens in "
        said += f"{run.state.training_seconds:.1f} s"
        if math.isfinite(run.state.score):
            before, gain = 100 * self.pass_before, 100 * (run.state.score - self.pass_before)
            said += f"\nheld-out prompts: {run.last_evaluation} "
            said += f"(before training {before:.1f} %: {gain:+.1f} points)"
        return said
