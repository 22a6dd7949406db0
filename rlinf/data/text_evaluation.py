"""Evaluation of generated text as a contract: prompts, samples, seeds and reward, with a hash.

See :mod:`rlinf.data.specifications`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from rlinf.data.estimates import Estimate, Metric, estimate
from rlinf.data.prompts.dataset import PromptDataset
from rlinf.data.sequences import PromptGroup
from rlinf.data.specifications import HashedSpec, SpecifiedResult, in_order
from rlinf.errors import ConfigError
from rlinf.rewards.math_answer import MathConfig, MathReward
from rlinf.rewards.text import last_boxed

AnswerKind = Literal["math", "letter"]
"""``math``: a formula, equal to others by value; ``letter``: that of a choice."""

_LETTER = re.compile(
    r"\s*(?:\\(?:text|mathrm|textbf|mathbf)\s*\{)?\s*\(?\s*([A-Za-z])(?![A-Za-z0-9])"
)


@dataclass(frozen=True, kw_only=True)
class TextEvaluationSpec(HashedSpec):
    """What is sampled in an evaluation, to the last seed; ConfigError where that is nothing."""

    format = "rlinf-text-evaluation-spec/1"

    dataset_sha256: str
    """Hash of the prompt set: texts, tokens and answers."""
    prompt_ids: tuple[int, ...]
    """The prompts, by number."""
    samples: int
    """n, completions per prompt."""
    sampling: Mapping[str, Any]
    """Temperature, length and the like, as JSON values."""
    reward: Mapping[str, Any]
    """What scores a completion, as JSON values."""
    threshold: float
    """Value from which on a completion is right."""
    seed: int = 0
    """What the seeds of all completions are derived from."""
    part: str | None = None
    """The reward function whose value that is; None: the weighted sum."""
    answers: AnswerKind | None = None
    """What is read off the completions for votes; None: nothing."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ConfigError("an evaluation needs at least one prompt")
        if len(set(self.prompt_ids)) < len(self.prompt_ids):
            raise ConfigError("an evaluation lists every prompt once")
        numbers = {"samples": self.samples, "seed": self.seed}
        for name, value in [*numbers.items(), *(("prompt_ids", each) for each in self.prompt_ids)]:
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name}: {value!r} is no whole number from 0 on")
        if not self.samples:
            raise ConfigError(f"an evaluation needs samples of each prompt, not {self.samples}")
        if type(self.threshold) not in (int, float) or not math.isfinite(self.threshold):
            raise ConfigError(f"threshold: {self.threshold!r} is no number")
        if self.answers not in (None, *get_args(AnswerKind)):
            known = ", ".join(get_args(AnswerKind))
            raise ConfigError(f"answers: {self.answers!r} is none of: {known}, null")

    @classmethod
    def of(
        cls, dataset: PromptDataset, *, prompt_ids: Iterable[int] | None = None, **rest: Any
    ) -> TextEvaluationSpec:
        """The specification of a prompt set, or of some of its prompts, which must be in it."""
        ids = tuple(range(len(dataset)) if prompt_ids is None else prompt_ids)
        found = cls(dataset_sha256=dataset.sha256, prompt_ids=ids, **rest)
        found.check_dataset(dataset)
        return found

    def check_dataset(self, dataset: PromptDataset) -> None:
        """Refuse, by a ConfigError, another prompt set than the one that was specified, and prompts
        that it has not."""
        if dataset.sha256 != self.dataset_sha256:
            raise ConfigError(
                f"the specification is of prompt set {self.dataset_sha256[:12]}…, this one is "
                f"{dataset.sha256[:12]}…: its prompts, answers, template or tokenizer differ"
            )
        strangers = [number for number in self.prompt_ids if not 0 <= number < len(dataset)]
        if strangers:
            raise ConfigError(f"the set has prompts 0 to {len(dataset) - 1}, not {strangers[0]}")

    def seeds(self, prompt_id: int) -> tuple[int, ...]:
        """[n] seeds of a prompt's completions, of 63 bits; they depend on nothing else."""
        texts = (f"{self.seed}/{prompt_id}/{sample}" for sample in range(self.samples))
        digests = (hashlib.sha256(text.encode()).digest() for text in texts)
        return tuple(int.from_bytes(digest[:8], "big") >> 1 for digest in digests)

    def contents(self) -> dict[str, Any]:
        """Without what says nothing, so that a specification without it keeps its hash."""
        optional = ("answers", "part")
        found = super().contents()
        return {k: v for k, v in found.items() if k not in optional or v is not None}


@dataclass(frozen=True, kw_only=True)
class PromptOutcome:
    """The n completions of one prompt, in the order of their seeds."""

    prompt_id: int
    correct: tuple[bool, ...]
    """Whether each is right; one whose reward could not be computed is wrong."""
    answers: tuple[str | None, ...] | None = None
    """What each gave as its answer, None where it gave none; needed for votes."""
    lengths: tuple[int, ...]
    """Sampled tokens of each."""
    truncated: tuple[bool, ...]
    """Whether the token limit cut it off."""
    valid: tuple[bool, ...]
    """Whether its reward could be computed."""
    level: int | None = None
    """Level of difficulty of the prompt."""
    rewards: tuple[float | None, ...] | None = None
    """The weighted sum that each got; None where it could not be computed."""
    prompt: str | None = None
    """The text that the model was given."""
    texts: tuple[str, ...] | None = None
    """What each says, with its end token and what tools replied."""
    turns: tuple[int, ...] | None = None
    """Turns of each: one more than replies of tools."""

    def sizes(self) -> tuple[int, ...]:
        """For how many completions each column has a value."""
        columns = (
            self.correct, self.lengths, self.truncated, self.valid, self.answers, self.rewards,
            self.texts, self.turns,
        )  # fmt: skip
        return tuple(len(column) for column in columns if column is not None)

    @classmethod
    def of(
        cls,
        group: PromptGroup,
        *,
        threshold: float,
        part: str | None = None,
        answers: Iterable[str | None] | None = None,
        level: int | None = None,
        prompt: str | None = None,
        texts: Iterable[str] | None = None,
    ) -> PromptOutcome:
        """The outcome of a group, which has scores."""
        if group.scores is None:
            raise ValueError(f"the group of prompt {group.prompt_id} has no scores yet")
        return cls(
            prompt_id=group.prompt_id,
            correct=tuple(
                bool(s.valid and (s.reward if part is None else s.parts[part]) >= threshold)
                for s in group.scores
            ),
            answers=None if answers is None else tuple(answers),
            lengths=tuple(len(c.sampled_tokens) for c in group.completions),
            truncated=tuple(completion.truncated for completion in group.completions),
            valid=tuple(bool(score.valid) for score in group.scores),
            level=level,
            rewards=tuple(float(s.reward) if s.valid else None for s in group.scores),
            prompt=prompt,
            texts=None if texts is None else tuple(texts),
            turns=tuple(completion.turns for completion in group.completions),
        )


@dataclass(frozen=True, kw_only=True)
class TextEvaluationResult(SpecifiedResult):
    """Outcomes of every prompt of a specification, in its order; built by :meth:`of`."""

    format = "rlinf-text-evaluation-result/1"
    outcome = PromptOutcome
    items = "prompts"
    metric = "pass@1"

    spec_sha256: str
    checkpoint: str
    samples: int
    """n, completions per prompt."""
    outcomes: tuple[PromptOutcome, ...]
    """One per prompt."""

    @classmethod
    def of(
        cls, spec: TextEvaluationSpec, outcomes: Iterable[PromptOutcome], checkpoint: str
    ) -> TextEvaluationResult:
        """Put the outcomes in the order of the specification; ValueError for others than its."""
        ordered = in_order(
            spec.prompt_ids, outcomes, lambda o: o.prompt_id, item="prompt", done="answered"
        )
        for outcome in ordered:
            if any(size != spec.samples for size in outcome.sizes()):
                raise ValueError(f"prompt {outcome.prompt_id} has not {spec.samples} completions")
        return cls(
            spec_sha256=spec.sha256,
            checkpoint=checkpoint,
            samples=spec.samples,
            outcomes=ordered,
        )

    def scores(self, metric: str) -> np.ndarray:
        """[prompts] float64, the metric of each prompt: ``pass@k``, ``mean@n`` or ``maj@n``.

        Raises:
            ConfigError: The metric is unknown, needs more samples or recorded answers.
        """
        known = Metric.parse(metric, self.samples)
        return np.array([known.of(outcome.correct, outcome.answers) for outcome in self.outcomes])

    def estimate(self, metric: str) -> Estimate:
        """The mean over prompts, with a 95 % interval; raises as :meth:`scores`."""
        return estimate(self.scores(metric), name=metric)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that are usual for so many samples; votes only where there are any."""
        n = self.samples
        if n == 1:
            return ("pass@1",)
        powers = [2**i for i in range(n.bit_length()) if 2**i < n]
        answers = [outcome.answers for outcome in self.outcomes]
        votes = None not in answers and any(any(each or ()) for each in answers)
        passes = tuple(f"pass@{k}" for k in [*powers, n])
        return (*passes, f"mean@{n}", *([f"maj@{n}"] if votes else []))

    @property
    def truncated_share(self) -> float:
        """Share of completions that the token limit cut off."""
        return float(np.mean([outcome.truncated for outcome in self.outcomes]))

    @property
    def mean_length(self) -> float:
        """Mean tokens of a completion."""
        return float(np.mean([outcome.lengths for outcome in self.outcomes]))

    @property
    def mean_turns(self) -> float:
        """Mean turns of a completion; NaN in results that say nothing of them."""
        return float(
            np.mean([outcome.turns or (np.nan,) * self.samples for outcome in self.outcomes])
        )

    @property
    def n_invalid(self) -> int:
        """Completions whose reward could not be computed; they count as wrong."""
        return sum(not valid for outcome in self.outcomes for valid in outcome.valid)

    def __str__(self) -> str:
        shown = self.metrics if self.samples == 1 else ("pass@1", f"pass@{self.samples}")
        parts = "; ".join(str(self.estimate(metric)) for metric in shown)
        lost = f", {self.n_invalid} completions not scored" if self.n_invalid else ""
        return f"{parts} (n = {self.samples}, spec {self.spec_sha256[:12]}{lost})"

    def summary(self) -> dict[str, Any]:
        """Every usual metric with its interval, and what became of the completions."""
        return {
            **{metric: asdict(self.estimate(metric)) for metric in self.metrics},
            "truncated_share": self.truncated_share,
            "mean_length": self.mean_length,
            "n_invalid": self.n_invalid,
        }


# -- what completions give as their answers, so that equal ones can be counted as votes ----------


def read_answers(
    texts: Sequence[str], kind: AnswerKind, reward: MathConfig | None = None
) -> tuple[str | None, ...]:
    """The answers of each text of one prompt, None where it gives none.

    Formulas are looked for where the ``reward`` of type math looks for them (None: one with
    defaults), and equal ones are written equally, as the first of them. Must run in the main
    thread, in which alone comparing two formulas can be limited in time. A letter is looked for in
    the last ``\\boxed{…}`` alone.
    """
    if kind == "letter":
        letters = [_LETTER.match(last_boxed(text) or "") for text in texts]
        return tuple(None if letter is None else letter[1].upper() for letter in letters)
    math_reward = MathReward(reward or MathConfig())
    answers = [math_reward.answer_in(text) for text in texts]
    first: dict[str | None, str] = {}
    for answer in dict.fromkeys(each for each in answers if each is not None):
        known = dict.fromkeys(first.values())
        first[answer] = next((k for k in known if math_reward.are_equal(answer, k)), answer)
    return tuple(first.get(answer) for answer in answers)
