"""Evaluation of a language model on held-out prompts, by a specification with a hash."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rlinf.config.dump import to_data
from rlinf.data.prompts.dataset import PromptDataset
from rlinf.data.sequences import PromptGroup
from rlinf.data.text_answers import AnswerKind, read_answers
from rlinf.data.text_evaluation import PromptOutcome, TextEvaluationResult, TextEvaluationSpec
from rlinf.engines.config import SamplingConfig
from rlinf.rewards.config import MathConfig
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.workers.generation import Drawn


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
        part=validation.correct_by,
        seed=validation.seed,
        answers="math" if validation.samples > 1 and _formulas(config) else None,
    )


class Answering(Protocol):
    """Workers that answer prompts and score what they answered."""

    def evaluate(
        self, prompts: Sequence[Drawn], seeds: Sequence[Sequence[int]], sampling: SamplingConfig
    ) -> list[PromptGroup]:
        """Scored completions of some prompts, in their order."""
        ...


def evaluate_model(
    system: Answering,
    spec: TextEvaluationSpec,
    dataset: PromptDataset,
    checkpoint: str,
    tokenizer: Any,
) -> TextEvaluationResult:
    """Answer the prompts of a specification with the weights that the engines hold.

    Args:
        system: The workers.
        spec: What is sampled.
        dataset: The prompts.
        checkpoint: What the weights are called.
        tokenizer: Of the model; turns tokens into the texts from which answers are read.

    Raises:
        ConfigError: The specification is of another prompt set.
    """
    spec.check_dataset(dataset)
    prompts = [(number, dataset[number]) for number in spec.prompt_ids]
    seeds = [spec.seeds(number) for number in spec.prompt_ids]
    groups = system.evaluate(prompts, seeds, SamplingConfig(**spec.sampling))
    outcomes = [
        PromptOutcome.of(
            group,
            threshold=spec.threshold,
            part=spec.part,
            answers=_answers(group, spec.answers, tokenizer),
            level=dataset[group.prompt_id].level,
        )
        for group in groups
    ]
    return TextEvaluationResult.of(spec, outcomes, checkpoint)


def _answers(
    group: PromptGroup, kind: AnswerKind | None, tokenizer: Any
) -> tuple[str | None, ...] | None:
    if kind is None:
        return None
    texts = tokenizer.batch_decode(
        [completion.sampled_tokens.tolist() for completion in group.completions],
        skip_special_tokens=True,
    )
    return read_answers(texts, kind)


def _formulas(config: ReasoningConfig) -> bool:
    """Whether answers are compared as formulas, so that they can be counted as such."""
    return any(isinstance(f, MathConfig) for f in config.reward.functions.values())


def _sampling(config: ReasoningConfig) -> SamplingConfig:
    return config.validation.sampling or config.rollout.sampling


class Evaluator:
    """The evaluations of one run, all by one specification.

    Args:
        config: The run's configuration.
        dataset: Validation prompts; None: nothing is evaluated.
        directory: Where specification and results are written.
        tokenizer: Of the model.
    """

    def __init__(
        self,
        config: ReasoningConfig,
        dataset: PromptDataset | None,
        directory: Path,
        tokenizer: Any,
    ) -> None:
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._directory = directory
        self._spec = None if dataset is None else validation_spec(config, dataset)
        self.last: TextEvaluationResult | None = None

    def evaluate(self, system: Answering, checkpoint: str, step: int) -> dict[str, float] | None:
        """Evaluate, write the result down, and return what is to be logged; None without a set."""
        if self._dataset is None or self._spec is None:
            return None
        self._spec.save(self._directory / "validation_spec.json")
        self.last = result = evaluate_model(
            system, self._spec, self._dataset, checkpoint, self._tokenizer
        )
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
