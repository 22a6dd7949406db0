"""Evaluation of a language model on held-out prompts, by a specification with a hash."""

from __future__ import annotations

from pathlib import Path

from rlinf.config.dump import to_data
from rlinf.data.prompts.dataset import PromptDataset
from rlinf.data.text_evaluation import PromptOutcome, TextEvaluationResult, TextEvaluationSpec
from rlinf.engines.config import SamplingConfig
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.reasoning_system import ReasoningSystem


def validation_spec(config: ReasoningConfig, dataset: PromptDataset) -> TextEvaluationSpec:
    """What a run is evaluated on: the first prompts of its validation set."""
    validation = config.validation
    return TextEvaluationSpec.of(
        dataset,
        prompt_ids=range(min(validation.prompts, len(dataset))),
        samples=validation.samples,
        sampling=to_data(_sampling(config)),
        reward=to_data(config.reward)["functions"],
        threshold=validation.correct_from,
        seed=validation.seed,
    )


def evaluate_model(
    system: ReasoningSystem, spec: TextEvaluationSpec, dataset: PromptDataset, checkpoint: str
) -> TextEvaluationResult:
    """Answer the prompts of a specification with the weights that the engines hold.

    Raises:
        ConfigError: The specification is of another prompt set.
    """
    spec.check_dataset(dataset)
    prompts = [(number, dataset[number]) for number in spec.prompt_ids]
    seeds = [spec.seeds(number) for number in spec.prompt_ids]
    groups = system.evaluate(prompts, seeds, SamplingConfig(**spec.sampling))
    outcomes = [
        PromptOutcome.of(group, threshold=spec.threshold, level=dataset[group.prompt_id].level)
        for group in groups
    ]
    return TextEvaluationResult.of(spec, outcomes, checkpoint)


def _sampling(config: ReasoningConfig) -> SamplingConfig:
    return config.validation.sampling or config.rollout.sampling


class Evaluator:
    """The evaluations of one run, all by one specification.

    Args:
        config: The run's configuration.
        dataset: Validation prompts; None: nothing is evaluated.
        directory: Where specification and results are written.
    """

    def __init__(
        self, config: ReasoningConfig, dataset: PromptDataset | None, directory: Path
    ) -> None:
        self._dataset = dataset
        self._directory = directory
        self._spec = None if dataset is None else validation_spec(config, dataset)
        self.last: TextEvaluationResult | None = None

    def evaluate(
        self, system: ReasoningSystem, checkpoint: str, step: int
    ) -> dict[str, float] | None:
        """Evaluate, write the result down, and return what is to be logged; None without a set."""
        if self._dataset is None or self._spec is None:
            return None
        self._spec.save(self._directory / "validation_spec.json")
        self.last = result = evaluate_model(system, self._spec, self._dataset, checkpoint)
        result.save(self._directory / f"validation_step_{step:08d}.json")
        success = result.estimate("pass@1")
        return {
            "eval/success": success.value,
            "eval/success_low": success.low,
            "eval/success_high": success.high,
            "eval/response_length": result.mean_length,
            "eval/truncated": result.truncated_share,
            "eval/invalid": float(result.n_invalid),
            **{f"eval/{metric}": result.estimate(metric).value for metric in result.metrics},
        }
