"""What a reasoning run shows: what it counts and logs, and evaluations on prompts."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlinf.checkpoint.files import is_disk_full
from rlinf.config.dump import to_data
from rlinf.config.nearest import did_you_mean
from rlinf.config.validate import validate
from rlinf.data.played_episodes import PlayedEpisodes
from rlinf.data.prompts.dataset import PromptDataset
from rlinf.data.sequences import PromptGroup
from rlinf.data.text_evaluation import (
    PromptOutcome,
    TextEvaluationResult,
    TextEvaluationSpec,
    read_answers,
)
from rlinf.engines.config import SamplingConfig
from rlinf.errors import ConfigError, UserError
from rlinf.flow.graph import Flow, Stage
from rlinf.rewards.math_answer import MathConfig
from rlinf.runners.evaluation import Evaluator
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.task import Counts, Purpose

if TYPE_CHECKING:
    from rlinf.flow.executor import StepReport
    from rlinf.runners.groups import Groups
    from rlinf.runners.run import Run
    from rlinf.workers.generation import GenerationReport
    from rlinf.workers.reward import RewardReport

log = logging.getLogger(__name__)


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
        if items is not None and items > len(dataset):
            most = len(dataset)
            raise ConfigError(f"--episodes {items}: there are {most} prompts; nearest: {most}")
        formulas = any(isinstance(f, MathConfig) for f in config.reward.functions.values())
        return TextEvaluationSpec.of(
            dataset,
            prompt_ids=range(min(items or validation.prompts, len(dataset))),
            samples=validation.samples,
            sampling=to_data(validation.sampling or config.rollout.sampling),
            reward=config.reward.specified(),
            threshold=validation.correct_from,
            part=validation.decides(config.reward),
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
        own = self._config.reward.specified()
        if spec.reward != own:
            raise ConfigError(
                f"the evaluation specification is for the reward {dict(spec.reward)}, the run has "
                f"{own}: evaluate a run of that reward, or write a specification for this one"
            )
        functions = self._config.reward.functions
        if spec.part is not None and spec.part not in functions:
            raise ConfigError(
                f"the evaluation specification has part: {spec.part!r}; "
                f"{did_you_mean(spec.part, functions)}"
            )
        self._config.rollout.engine.check_served(sampling_of(spec))

    def play(
        self,
        groups: Groups,
        spec: TextEvaluationSpec,
        name: str,
        kept: PlayedEpisodes | None = None,
    ) -> TextEvaluationResult:
        """Answer the prompts of a specification."""
        del kept
        return answer_prompts(groups, spec, self._prompts, name, self._tokenizer)

    def metrics(self, result: TextEvaluationResult) -> dict[str, float]:
        """Pass rate with its interval, other rates, and what became of the completions."""
        success = result.estimate("pass@1")
        turns = {} if self._config.rollout.agent is None else {"eval/turns": result.mean_turns}
        return {
            "eval/success": success.value,
            "eval/success_low": success.low,
            "eval/success_high": success.high,
            "eval/response_length": result.mean_length,
            "eval/truncated": result.truncated_share,
            "eval/invalid": float(result.n_invalid),
            **turns,
            **{f"eval/{metric}": result.estimate(metric).value for metric in result.metrics},
        }

    @property
    def _prompts(self) -> PromptDataset:
        if self._dataset is None:
            raise ConfigError(
                "the run has no validation prompts; name files in data.files.validation"
            )
        return self._dataset


def sampling_of(spec: TextEvaluationSpec) -> SamplingConfig:
    """How a specification says that tokens are drawn; ConfigError where it cannot be."""
    return validate(SamplingConfig, spec.sampling, "sampling of the evaluation specification")


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
        UserError: Not one completion could be scored, so that no rate is known.
    """
    spec.check_dataset(dataset)
    report = groups.evaluate(
        {
            "rollout": {
                "prompts": [(number, dataset[number]) for number in spec.prompt_ids],
                "seeds": [spec.seeds(number) for number in spec.prompt_ids],
                "sampling": sampling_of(spec),
            }
        },
        sources=len(spec.prompt_ids),
    )
    rewards: list[RewardReport] = report.results("reward")
    require_scores(rewards, of="evaluation")
    for why in {fault: why for part in rewards for fault, why in part.reasons.items()}.values():
        log.warning("a completion of the evaluation cannot be scored, and counts as wrong: %s", why)
    parts: list[GenerationReport] = report.results("rollout")
    if failures := sum(part.tool_failures for part in parts):
        log.warning("%d calls of the evaluation were answered by no tool, as it failed", failures)
    outcomes = [
        PromptOutcome.of(
            group,
            threshold=spec.threshold,
            part=spec.part,
            answers=_answers(group, spec, tokenizer),
            level=dataset[group.prompt_id].level,
            prompt=dataset[group.prompt_id].text,
            texts=tokenizer.batch_decode([each.tokens.tolist() for each in group.completions]),
        )
        for part in parts
        for group in part.groups
    ]
    return TextEvaluationResult.of(spec, outcomes, checkpoint)


def write_completions(
    directory: Path, step: int, groups: Sequence[PromptGroup], tokenizer: Any
) -> None:
    """Write what a model said in a step, and what it was given for it, one line per completion.

    The file of a step that is done again is replaced. While the disk is full nothing is written.
    """
    lines = []
    for group in groups:
        prompt = tokenizer.decode(group.prompt_tokens.tolist())
        texts = tokenizer.batch_decode([each.tokens.tolist() for each in group.completions])
        for text, completion, score in zip(
            texts, group.completions, group.scores or (), strict=True
        ):
            line = {
                "step": step,
                "prompt_id": group.prompt_id,
                "prompt": prompt,
                "completion": text,
                "reward": score.reward if score.valid else None,
                "parts": dict(score.parts),
                "reason": score.reason,
                "tokens": len(completion.sampled_tokens),
                "stop_reason": completion.stop_reason,
            }
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    path = directory / "completions" / f"{step}.jsonl"
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        if not is_disk_full(error):
            raise
        log.warning("the disk is full: the completions of step %d are not kept", step)


def require_scores(parts: Sequence[RewardReport], *, of: str) -> None:
    """Refuse, by a UserError, that not one completion of something could be scored."""
    reasons = [why for part in parts for why in part.reasons.values()]
    if reasons and not any(values for part in parts for values in part.values.values()):
        raise UserError(f"no completion of the {of} could be scored; the first: {reasons[0]}")


def _answers(
    group: PromptGroup, spec: TextEvaluationSpec, tokenizer: Any
) -> tuple[str | None, ...] | None:
    if spec.answers is None:
        return None
    texts = tokenizer.batch_decode(
        [completion.sampled_tokens.tolist() for completion in group.completions],
        skip_special_tokens=True,
    )
    return read_answers(texts, spec.answers, _comparing(spec))


def _comparing(spec: TextEvaluationSpec) -> MathConfig | None:
    """The reward that compares formulas, of several the one that decides; None without any."""
    names = sorted(spec.reward, key=lambda name: name != spec.part)
    sections = (spec.reward[name] for name in names)
    found = next((each for each in sections if each["type"] == "math"), None)
    return found and validate(MathConfig, found, "reward of the evaluation specification")


FIGURES = (
    ("prompts", "rollout/prompts", ",.0f"),
    ("sequences/s", "rollout/sequences_per_second", ",.1f"),
    ("tokens/s", "rollout/tokens_per_second", ",.0f"),
    ("reward", "rollout/rewards", ".3f"),
    ("pass@1", "eval/success", ".3f"),
    ("length", "rollout/response_length", ".1f"),
    ("cut off", "rollout/truncated", ".2f"),
    ("entropy", "rollout/entropy", ".3f"),
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
    figures: ClassVar = FIGURES

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
        self._tell_of_faults(parts)
        faults = sum((Counter(part.faults) for part in parts), Counter[str]())
        return metrics | self.add_faults(faults, "reward")

    def _tell_of_faults(self, parts: Sequence[RewardReport]) -> None:
        """Warn of what a run sees for the first time.

        Raises:
            UserError: Not one completion of the step could be scored, so that nothing is learnt.
        """
        require_scores(parts, of="step")
        reasons = {fault: why for part in parts for fault, why in part.reasons.items()}
        for fault, why in reasons.items():
            if fault not in self.faults:
                log.warning("a completion cannot be scored and is not trained on: %s", why)

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
            metrics["rollout/tool_failures"] = float(total("tool_failures"))
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
