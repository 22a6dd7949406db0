"""Evaluates a model on a published benchmark: pass@k, mean@n and maj@n over its questions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlinf.algorithms.config import GRPOConfig
from rlinf.config.dump import to_data
from rlinf.data.prompts.dataset import PromptDataset
from rlinf.data.text_answers import AnswerKind
from rlinf.data.text_evaluation import TextEvaluationResult, TextEvaluationSpec
from rlinf.errors import in_section
from rlinf.models.language import load_tokenizer
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.answering_system import AnsweringSystem
from rlinf.runners.benchmark_config import BenchmarkRunConfig
from rlinf.runners.context_limits import check_context
from rlinf.runners.reasoning_evaluation import evaluate_model
from rlinf.weight_sync.config import AutoConfig
from rlinf.weight_sync.protocol import Parties
from rlinf.workers.generation import GenerationSetup, GenerationWorker
from rlinf.workers.reward import RewardSetup, RewardWorker


def evaluate(config: BenchmarkRunConfig, directory: RunDirectory) -> TextEvaluationResult:
    """Answer every question, print the rates and write specification and result down.

    Args:
        config: The recipe.
        directory: Where they are written.

    Raises:
        ConfigError: The file is not of the benchmark's format, or the model cannot be read.
    """
    with in_section("model"):
        tokenizer = load_tokenizer(config.model)
    with in_section("benchmark"):
        dataset = config.benchmark.build(tokenizer)
    check_context(
        dataset,
        config.rollout.sampling,
        model=config.model,
        engine=config.rollout.engine,
        key="rollout.sampling",
    )
    spec = benchmark_spec(config, dataset)
    spec.save(directory.evaluations / "spec.json")
    with BenchmarkSystem(config) as system:
        result = evaluate_model(system, spec, dataset, str(config.model.path), tokenizer)
    result.save(directory.evaluations / "result.json")
    print(f"{config.benchmark.format}, {len(dataset)} questions, {config.model.path}")
    for metric in result.metrics:
        print(f"  {result.estimate(metric)}")
    print(
        f"  {result.truncated_share:.1%} of the completions were cut off, mean length "
        f"{result.mean_length:.0f} tokens, {result.n_invalid} not scored\n"
        f"written to {directory.evaluations}",
        flush=True,
    )
    return result


def benchmark_spec(config: BenchmarkRunConfig, dataset: PromptDataset) -> TextEvaluationSpec:
    """Every question of a benchmark, with the answers that votes need."""
    kind: AnswerKind = "letter" if config.benchmark.format == "gpqa_diamond" else "math"
    return TextEvaluationSpec.of(
        dataset,
        samples=config.rollout.samples,
        sampling=to_data(config.rollout.sampling),
        reward=to_data(config.reward)["functions"],
        threshold=config.correct_from,
        part=config.correct_by,
        seed=config.seed,
        answers=kind if config.rollout.samples > 1 else None,
    )


class BenchmarkSystem(AnsweringSystem):
    """Generation and reward workers on a cluster; a context manager that ends them.

    Args:
        config: The recipe.
    """

    def __init__(self, config: BenchmarkRunConfig) -> None:
        super().__init__(config)
        self._config = config

    def _start(self) -> None:
        config = self._config
        # Nothing is trained: no group is judged by the algorithm, and no weights are received.
        generation = GenerationSetup(
            model=config.model,
            engine=config.rollout.engine,
            sampling=config.rollout.sampling,
            algorithm=GRPOConfig().of_family("tokens"),
            group_size=config.rollout.samples,
            seed=config.seed,
            weight_sync=AutoConfig(),
            parties=Parties(sender="", receiver="rollout", receivers=config.world_size("rollout")),
        )
        self._launch(
            {
                "rollout": (GenerationWorker, generation),
                "reward": (RewardWorker, RewardSetup(reward=config.reward, model=config.model)),
            }
        )
        for handle in [group.start() for group in self._groups.values()]:
            handle.wait()

    def state(self) -> dict[str, Any]:
        """Nothing: an evaluation is not resumed."""
        return {}

    def load_state(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Nothing, likewise."""

    def _closing(self) -> Iterable[str]:
        return self._config.components
