"""The recipe of a reasoning run: prompts, model, rewards, batches, and where they run.

Batch vocabulary: *prompts* × group size → *sequences* → *global batch* (one optimizer step) →
*micro batch* (one forward and backward pass).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from rlinf.algorithms.config import DAPOConfig
from rlinf.config.component import illegal
from rlinf.config.effects import unused
from rlinf.config.nearest import join_choices, nearest_divisors, nearest_multiples
from rlinf.config.schema import value_at
from rlinf.data.prompts.config import FilesConfig, PromptDataConfig
from rlinf.data.prompts.prompt_files import RawPrompt
from rlinf.engines.config import SamplingConfig
from rlinf.errors import ConfigError, in_section
from rlinf.flow.placed_config import RunnerConfig
from rlinf.flow.planning_traits import PlanningTraits
from rlinf.rewards.config import CorrectnessConfig, RewardConfig
from rlinf.rewards.text import LengthConfig
from rlinf.runners.reasoning_planning import reasoning_traits
from rlinf.runners.rescaling import order_problems, rescaling_problems
from rlinf.trainers.config import SupervisedConfig
from rlinf.workers.config.answering import (
    AnsweringConfig,
    calling_problems,
    check_described,
    equal_samples_problems,
    unserved_problems,
)
from rlinf.workers.config.language import Trainers, picture_problems, rollout_problems

log = logging.getLogger(__name__)

COMPONENTS = ("rollout", "reward", "actor")


class ReasoningRunnerConfig(RunnerConfig):
    """How long the run lasts and where it is written."""

    total_steps: int = Field(ge=1)
    """Training steps of the run."""
    completions_kept: int = Field(default=1, ge=0)
    """Prompts of each step whose completions are kept in `completions/STEP.jsonl`; 0: of none."""


class ReasoningValidationConfig(CorrectnessConfig):
    """Evaluation on prompts that training never sees."""

    val_check_interval: int = Field(default=0, ge=0)
    """Training steps between two evaluations; 0: before and after training only."""
    prompts: int = Field(default=200, ge=1)
    """Validation prompts of an evaluation, from the first on; all, where there are fewer."""
    samples: int = Field(default=1, ge=1)
    """Completions of each prompt."""
    sampling: SamplingConfig | None = None
    """How tokens are drawn; keys that are left out are those of training, and null: all are."""
    seed: int = Field(default=10_000, ge=0)
    """Seed of these completions."""


class ReasoningConfig(AnsweringConfig):
    """A run that trains a language model on prompts with rewards."""

    task: Literal["reasoning"]
    """Which runner executes the recipe."""
    runner: ReasoningRunnerConfig
    data: PromptDataConfig
    warm_start: SupervisedConfig | None = None
    """Supervised training on the targets of a generated task before the first step; null: none."""
    validation: ReasoningValidationConfig = ReasoningValidationConfig()

    @model_validator(mode="before")
    @classmethod
    def _sample_as_in_training(cls, data: Any) -> Any:
        """Complete what `validation.sampling` says by `rollout.sampling`."""
        own = value_at(data, "validation.sampling")
        training = value_at(data, "rollout.sampling")
        if not isinstance(own, Mapping) or not isinstance(training, Mapping):
            return data
        try:
            SamplingConfig.model_validate(training)
        except ValidationError:
            return data  # what is wrong there is told once
        unlike = SamplingConfig.only_with if own.get("greedy") is True else ()
        rest = {key: value for key, value in training.items() if key not in unlike}
        most = own.get("max_new_tokens")
        if type(most) is int and "min_new_tokens" in rest:
            rest["min_new_tokens"] = min(int(rest["min_new_tokens"]), most)
        return {**data, "validation": {**data["validation"], "sampling": {**rest, **own}}}

    @property
    def has_pictures(self) -> bool:
        """Whether prompts may have pictures."""
        return self.data.has_pictures

    @property
    def components(self) -> tuple[str, ...]:
        """Worker groups of the run: a critic only where the algorithm needs one."""
        return COMPONENTS if self.critic is None else (*COMPONENTS, "critic")

    @property
    def can_rescale(self) -> bool:
        """Rollout and trainer can; `cluster.auto_scheduler` lets them."""
        return True

    @property
    def offloading(self) -> tuple[str, ...]:
        """All that hold a model."""
        return tuple(name for name in self.components if name != "reward")

    @property
    def prompts_at_once(self) -> int:
        """Prompts that are generated at the same time, over all rollout workers."""
        prompts, partial = self.rollout.prompts, self.rollout.partial
        if partial is None:
            return prompts
        workers = self.world_size("rollout")
        return ceil(prompts / workers * partial.oversample) * workers

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step."""
        return self.actor.global_batch_size(self.rollout.sequences)

    @property
    def template_arguments(self) -> dict[str, Any]:
        """See :attr:`ChatTemplateConfig.template_arguments`."""
        return self.data.template_arguments

    @property
    def training_steps(self) -> int:
        """Steps of the run."""
        return self.runner.total_steps

    @property
    def data_parallel_size(self) -> int:
        """Ranks of the actor that hold different data."""
        return self.world_size("actor") // self.actor.ranks_per_replica

    def batch_table(self) -> list[tuple[str, str]]:
        """Rows that show how prompts become sequences, batches and updates."""
        rollout, actor, batch = self.rollout, self.actor, self.global_batch_size
        per_rank = batch // self.data_parallel_size
        if actor.max_tokens_per_micro_batch is not None:
            micro = f"up to {actor.max_tokens_per_micro_batch} tokens"
        else:
            micro = f"{actor.micro_batch_size or per_rank} sequences"
        updates = actor.n_minibatches * actor.update_epoch
        return [
            ("prompts per step", str(rollout.prompts)),
            (
                "sequences",
                f"{rollout.prompts} prompts × {rollout.group_size} = {rollout.sequences}",
            ),
            ("new tokens", f"up to {rollout.sampling.max_new_tokens} per sequence"),
            ("global batch", f"{batch} sequences, {actor.n_minibatches} per epoch"),
            ("micro batch", f"{micro}, of {per_rank} sequences per rank"),
            (
                "updates per step",
                f"{actor.update_epoch} epochs × {actor.n_minibatches} = {updates}",
            ),
            ("training steps", str(self.training_steps)),
        ]

    @property
    def planning(self) -> PlanningTraits:
        """What planning and profiling must know of the recipe."""
        return reasoning_traits(self)

    @property
    def trainers(self) -> Trainers:
        """See :attr:`LanguageRunConfig.trainers`."""
        return {"actor": self.actor, "critic": self.critic}

    def check(self) -> None:
        """Look also whether rewards can be computed by the answers that files begin with, and
        tools be called as the model is told."""
        super().check()
        check_described(self.rollout.agent, self.data)
        if self.data.files is not None:
            with in_section("data.files"):
                _check_answers(self.data.files, self.reward)

    # -- rules between sections -----------------------------------------------------------------

    def problems(self) -> Iterator[PydanticCustomError]:
        """See :meth:`PlacedConfig.problems`."""
        yield from super().problems()
        yield from self._batch_problems()
        yield from self._staleness_problems()
        yield from self._algorithm_problems()
        yield from self._data_problems()
        yield from self._picture_problems()
        yield from order_problems(self)
        yield from rescaling_problems(self)

    def problems_of_training(self) -> Iterator[PydanticCustomError]:
        """Log-probs that the engine reports otherwise, penalties of lengths that no answer has, and
        what leaves nothing to learn: evaluations use none."""
        yield from super().problems_of_training()
        yield from self.algorithm.problems_of_training(steps=self.training_steps)
        if self.algorithm.dynamic_sampling and self.rollout.group_size < 2:
            yield illegal(
                "rollout.group_size",
                f"is {self.rollout.group_size}, but algorithm.dynamic_sampling trains on prompts "
                "whose answers have different rewards",
                hint="at least 2, or algorithm.dynamic_sampling: false",
            )
        if not any(function.weight for function in self.reward.functions.values()):
            name = next(iter(self.reward.functions))
            why = "is 0, as every other one, so that nothing can be learnt"
            yield illegal(f"reward.functions.{name}.weight", why, hint="nearest: 1")
        if (unscored := self.rollout.engine.unscored(self.rollout.sampling)) is not None:
            yield illegal(f"rollout.sampling.{unscored.key}", unscored.why, hint=unscored.hint)
        yield from self._penalty_problems()

    def _penalty_problems(self) -> Iterator[PydanticCustomError]:
        longest, algorithm = self.rollout.longest_answer, self.algorithm
        never = f"no answer is that long: the longest that is sampled has {longest} tokens"
        if isinstance(algorithm, DAPOConfig) and (algorithm.safe_length or 0) >= longest:
            why = f"{algorithm.safe_length} tokens and more are penalised, and {never}"
            yield illegal("algorithm.safe_length", why, hint=f"nearest: {longest - 1}")
        for name, function in self.reward.functions.items():
            if not isinstance(function, LengthConfig):
                continue
            free = function.max_length - function.cache_length
            if free >= longest:
                why = (
                    f"less cache_length is {free} tokens, from which on answers are penalised, and "
                    f"{never}"
                )
                most = longest - 1 + function.cache_length
                yield illegal(f"reward.functions.{name}.max_length", why, hint=f"nearest: {most}")

    def _staleness_problems(self) -> Iterator[PydanticCustomError]:
        rollout, partial = self.rollout, self.rollout.partial
        if rollout.max_staleness and self.plan.components["rollout"].residency == "offload":
            yield illegal(
                "rollout.max_staleness",
                "has no effect where the engine gives its weights back after each rollout",
                hint="nearest: 0, or devices of its own for the rollout",
            )
        bound = None if partial is None else partial.max_token_staleness
        if bound is not None and bound <= rollout.max_staleness:
            yield illegal(
                "rollout.partial.max_token_staleness",
                f"{bound} leaves no step in which an interrupted answer could go on, as its tokens "
                f"are {rollout.max_staleness} phases old already",
                hint=f"nearest: {rollout.max_staleness + 1}",
            )

    def _batch_problems(self) -> Iterator[PydanticCustomError]:
        prompts, size = self.rollout.prompts, self.rollout.group_size
        workers = self.world_size("rollout")
        if prompts % workers:
            near = join_choices(nearest_multiples(workers, prompts))
            yield illegal(
                "rollout.prompts",
                f"{prompts} does not divide over {workers} rollout workers",
                hint=f"nearest: {near}",
            )
        if prompts % self.actor.n_minibatches:
            near = join_choices(nearest_divisors(prompts, self.actor.n_minibatches))
            yield illegal(
                "actor.n_minibatches",
                f"{self.actor.n_minibatches} does not divide {prompts} prompts, whose groups stay "
                "whole",
                hint=f"nearest: {near}",
            )
            return
        problems = list(self.trainer_problems())
        yield from problems
        if problems:
            return
        batch, replicas = self.global_batch_size, self.data_parallel_size
        if batch % replicas:
            each = self.actor.ranks_per_replica
            shared = f", of which {each} share a layer" if each > 1 else ""
            counts = [each * count for count in nearest_divisors(batch, replicas)]
            yield illegal(
                "cluster.component_placement",
                f"the global batch of {batch} sequences ({prompts} prompts × {size} / "
                f"{self.actor.n_minibatches}) does not divide over {each * replicas} actor ranks"
                f"{shared}",
                hint=f"nearest: {join_choices(counts)} ranks",
            )

    def _algorithm_problems(self) -> Iterator[PydanticCustomError]:
        algorithm = self.algorithm
        if algorithm.needs_groups and self.rollout.group_size < 2:
            yield illegal(
                "rollout.group_size",
                f"is {self.rollout.group_size}, but {algorithm.type} compares the answers to one "
                "prompt",
                hint="at least 2",
            )
        sampling = self.rollout.sampling
        if sampling.greedy or sampling.top_k == 1:
            key, hint = ("greedy", "false") if sampling.greedy else ("top_k", "0, of all tokens")
            why = "takes the most likely token each time: nothing else is tried, or learnt from"
            yield illegal(f"rollout.sampling.{key}", why, hint=f"nearest: {hint}")
        if algorithm.needs_values != (self.critic is not None):
            needs = "needs a critic" if algorithm.needs_values else "has no critic"
            hint = "write `critic: {}`" if algorithm.needs_values else "leave the section out"
            yield illegal("critic", f"{algorithm.type} {needs}", hint=hint)
        if getattr(self.weight_sync, "in_place", False):
            why = "engines are given whole tensors here, and have none that a patch could write to"
            yield illegal("weight_sync.in_place", why, hint="nearest: false")
        if self.critic is not None and self.critic.model and self.critic.model.lora is not None:
            hint = "leave it out: a critic trains all its weights"
            yield illegal("critic.model.lora", "has no effect on a critic", hint=hint)

    def _picture_problems(self) -> Iterator[PydanticCustomError]:
        if not self.has_pictures:
            return
        yield from picture_problems(self.model, self.trainers)
        yield from rollout_problems(self.rollout)
        if self.data.long_prompts == "truncate":
            why = "a prompt that is cut could lose a part of a picture"
            yield illegal("data.long_prompts", why, hint="nearest: skip")
        if self.cluster.auto_scheduler:
            why = "devices that change hands inside a step were not tried with pictures"
            yield illegal("cluster.auto_scheduler", why, hint="nearest: false")

    def _data_problems(self) -> Iterator[PydanticCustomError]:
        generated = self.data.task is not None
        if self.data.validates:
            validation = self.validation
            yield from validation.correctness_problems(self.reward, "validation.")
            sampling = validation.sampling or self.rollout.sampling
            yield from equal_samples_problems(sampling, validation.samples, "validation.")
            where = "rollout." if validation.sampling is None else "validation."
            yield from unserved_problems(self.rollout.engine, sampling, where)
        else:
            keys, files = ("val_check_interval",), "data.files.validation"
            yield from unused(self.validation, keys, without=files, at="validation.")
        if self.warm_start is not None and not generated:
            yield illegal(
                "warm_start",
                "files of prompts have no targets to learn from",
                hint="leave the section out, or write data.task",
            )
        agent, task = self.rollout.agent, self.data.task
        yield from calling_problems(agent, self.data, "data.")
        if agent is not None and agent.calls == "chat_template" and self.warm_start is not None:
            yield illegal(
                "rollout.agent.calls",
                "is chat_template, and what a warm start learns calls by tags",
                hint="nearest: tags, or no warm_start",
            )
        for name in () if task is None else task.called_tools:
            if agent is None or name not in agent.tools:
                yield illegal(
                    "data.task.calls",
                    f"names a tool `{name}` that answers cannot call",
                    hint=f"write it as rollout.agent.tools.{name}, or data.task.calls=null",
                )
        yield from self.model_problems(generated=generated)


_HOLDING_ANSWERS = ("ground_truth", "answer", "answers", "solution", "target", "label")
_SHOWN = 12  # keys that a message names


def _check_answers(files: FilesConfig, reward: RewardConfig) -> None:
    """Refuse a file of which no answer can be scored: every completion would be invalid, which is
    seen after a whole step. Only where this is so of the first answers the others are looked at."""
    for paths, limit in (files.part("train"), files.part("validation")):
        for path in paths:
            _check_answers_of(path, limit, files, reward)


def _check_answers_of(
    path: Path, limit: int | None, files: FilesConfig, reward: RewardConfig
) -> None:
    found = [reward.unusable(prompt.answer) for prompt in files.first(path)]
    if not found or None in found:
        return
    prompts = files.first(path, most=limit)
    found = [reward.unusable(prompt.answer) for prompt in prompts]
    if None in found:
        log.warning(
            "%s: %d of %d answers cannot be scored, and nothing is learnt from their prompts; the "
            "first: %s", path, len(found) - found.count(None), len(found), found[0],
        )  # fmt: skip
    elif found:
        raise _unusable(prompts[0], found[0], files.answer_key, reward)


def _unusable(prompt: RawPrompt, why: str | None, key: str, reward: RewardConfig) -> ConfigError:
    held = prompt.answer if isinstance(prompt.answer, Mapping) else {}
    usable = [name for name, value in held.items() if reward.unusable(value) is None]
    likely = [name for name in _HOLDING_ANSWERS if name in usable]
    hint = f"; did you mean `{key}.{likely[0]}`?" if likely else ""
    if held:
        hint += f"; it holds {', '.join(f'{key}.{name}' for name in list(held)[:_SHOWN])}"
    reason = f"{prompt.where}: no completion could be scored, {why}{hint}"
    return ConfigError(reason, key="answer_key")
