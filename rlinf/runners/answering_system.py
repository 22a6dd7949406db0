"""Worker groups that answer prompts and score what they answered."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.data.sequences import PromptGroup
from rlinf.engines.config import SamplingConfig
from rlinf.flow.executor import Executor
from rlinf.flow.graph import Flow, Stage
from rlinf.flow.placed_config import PlacedConfig
from rlinf.runners.worker_system import WorkerSystem
from rlinf.workers.generation import Drawn, GenerationReport


def evaluation_flow() -> Flow:
    """One evaluation: completions of validation prompts are generated and scored."""
    flow = Flow("evaluate")
    flow.loop(
        "evaluation",
        Stage("rollout", "evaluate", inputs=("scored",), outputs=("completions",)),
        Stage("reward", "score", inputs=("completions",), outputs=("scored",)),
    )
    return flow


class AnsweringSystem(WorkerSystem):
    """A system with generation and reward workers, among others or alone.

    Args:
        config: The run's configuration.
    """

    def __init__(self, config: PlacedConfig) -> None:
        super().__init__(config)
        self._evaluations: dict[int, Executor] = {}

    def evaluate(
        self, prompts: Sequence[Drawn], seeds: Sequence[Sequence[int]], sampling: SamplingConfig
    ) -> list[PromptGroup]:
        """Scored completions of some prompts, in their order.

        Args:
            prompts: What is answered.
            seeds: Of the completions of each prompt, equally many.
            sampling: How tokens are drawn.
        """
        if len(prompts) not in self._evaluations:
            self._evaluations[len(prompts)] = self._new_executor(evaluation_flow(), len(prompts))
        report = self._evaluations[len(prompts)].run(
            0, {"rollout": {"prompts": prompts, "seeds": seeds, "sampling": sampling}}
        )
        parts: list[GenerationReport] = report.results("rollout")
        return [group for part in parts for group in part.groups]
