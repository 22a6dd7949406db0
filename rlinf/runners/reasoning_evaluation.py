"""Evaluation of a language model on prompts, by a specification with a hash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlinf.config.dump import to_data
from rlinf.data.prompts.dataset import PromptDataset
from rlinf.data.sequences import PromptGroup
from rlinf.data.text_evaluation import (
    AnswerKind,
    PromptOutcome,
    TextEvaluationResult,
    TextEvaluationSpec,
    read_answers,
)
from rlinf.engines.config import SamplingConfig
from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow, Stage
from rlinf.rewards.math_answer import MathConfig
from rlinf.runners.evaluation import Evaluator
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.task import Purpose

if TYPE_CHECKING:
    from rlinf.runners.groups import Groups
    from rlinf.workers.generation import GenerationReport


class PromptEvaluator(Evaluator[TextEvaluationSpec, TextEvaluationResult]):
    """Answers the first prompts of a validation set, where there is one, and scores the answers."""

    spec_class = TextEvaluationSpec

    def __init__(
        self, config: ReasoningConfig, dataset: PromptDataset | None, tokenizer: Any
    ) -> None:
        self._config = config
        self._dataset = dataset
        self._tokenizer = tokenizer

    def spec(self, purpose: Purpose, items: int | None = None) -> TextEvaluationSpec | None:
        """What a run is evaluated on, whatever the purpose; None without a set."""
        config, validation, dataset = self._config, self._config.validation, self._dataset
        if dataset is None:
            return None
        formulas = any(isinstance(f, MathConfig) for f in config.reward.functions.values())
        return TextEvaluationSpec.of(
            dataset,
            prompt_ids=range(min(items or validation.prompts, len(dataset))),
            samples=validation.samples,
            sampling=to_data(validation.sampling or config.rollout.sampling),
            reward=to_data(config.reward)["functions"],
            threshold=validation.correct_from,
            part=validation.correct_by,
            seed=validation.seed,
            # Where they are compared as formulas, they can be counted as such.
            answers="math" if validation.samples > 1 and formulas else None,
        )

    def stem(self, purpose: Purpose) -> str:
        """All evaluations of a run are of the same prompts."""
        return "validation"

    def check(self, spec: TextEvaluationSpec) -> None:
        """Refuse the specification of other prompts, or of another reward."""
        spec.check_dataset(self._prompts)
        own = to_data(self._config.reward)["functions"]
        if spec.reward != own:
            raise ConfigError(
                f"the evaluation specification is for the reward {dict(spec.reward)}, the run has "
                f"{own}: evaluate a run of that reward, or write a specification for this one"
            )

    def play(self, groups: Groups, spec: TextEvaluationSpec, name: str) -> TextEvaluationResult:
        """Answer the prompts of a specification."""
        return answer_prompts(groups, spec, self._prompts, name, self._tokenizer)

    def metrics(self, result: TextEvaluationResult) -> dict[str, float]:
        """Pass rate with its interval, other rates, and what became of the completions."""
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

    @property
    def _prompts(self) -> PromptDataset:
        if self._dataset is None:
            raise ConfigError(
                "the run has no validation prompts; name files in data.files.validation"
            )
        return self._dataset


def answering_step(flow: Flow) -> None:
    """One evaluation: completions of prompts are generated and scored."""
    flow.loop(
        "evaluation",
        Stage("rollout", "evaluate", inputs=("scored",), outputs=("completions",)),
        Stage("reward", "score", inputs=("completions",), outputs=("scored",)),
    )


def answer_prompts(
    groups: Groups,
    spec: TextEvaluationSpec,
    dataset: PromptDataset,
    checkpoint: str,
    tokenizer: Any,
) -> TextEvaluationResult:
    """Answer the prompts of a specification with the weights that the engines hold.

    Raises:
        ConfigError: The specification is of another prompt set.
    """
    spec.check_dataset(dataset)
    report = groups.evaluate(
        {
            "rollout": {
                "prompts": [(number, dataset[number]) for number in spec.prompt_ids],
                "seeds": [spec.seeds(number) for number in spec.prompt_ids],
                "sampling": SamplingConfig(**spec.sampling),
            }
        },
        sources=len(spec.prompt_ids),
    )
    parts: list[GenerationReport] = report.results("rollout")
    outcomes = [
        PromptOutcome.of(
            group,
            threshold=spec.threshold,
            part=spec.part,
            answers=_answers(group, spec.answers, tokenizer),
            level=dataset[group.prompt_id].level,
        )
        for part in parts
        for group in part.groups
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
