"""The recipe of supervised training: what is learnt, by which model, in which batches.

Batch vocabulary: *rows* (a prompt with its answer, or one observation with the action chunk that
followed) → *global batch* (one optimizer step) → *micro batch* (one forward and backward pass).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.nearest import join_choices, nearest_multiples
from rlinf.data.imitation import DemonstrationsConfig
from rlinf.data.text_examples import TextExamplesConfig
from rlinf.errors import ConfigError
from rlinf.flow.placed_config import PlacedConfig, RunnerConfig
from rlinf.flow.planning_traits import (
    ComponentConstraint,
    Constraints,
    Knob,
    PlanningTraits,
    Trial,
    device_counts,
    first_devices,
    timed_sections,
)
from rlinf.models.config import ModelConfig
from rlinf.models.language_config import LanguageModelConfig
from rlinf.trainers.config import OptimizerConfig, PolicyTrainerConfig, RowTrainerConfig
from rlinf.workers.config.acting import EvaluatedConfig, ModelSection, dividing_ranks, rank_problems
from rlinf.workers.config.picture_rules import check_model, model_problems


class SupervisedRunnerConfig(RunnerConfig):
    """How long the run lasts and where it is written."""

    total_steps: int = Field(ge=1)
    """Optimizer steps of the run, one global batch each."""


class ValidationLossConfig(StrictModel):
    """The loss on what is not trained on, and when it ends the run."""

    interval: int = Field(default=50, ge=1)
    """Training steps between two validations."""
    patience: int | None = Field(default=None, ge=1)
    """End training after so many validations in a row without a smaller loss; null: never."""
    min_improvement: float = Field(default=0.0, ge=0)
    """By how much a loss must be smaller than the smallest so far to count as such."""


class FineTuningActorConfig(PolicyTrainerConfig):
    """How a language model is trained on texts."""

    global_batch_size: int = Field(default=64, ge=1)
    """Texts of one optimizer step, over all ranks."""
    optim: OptimizerConfig = OptimizerConfig(lr=1e-5, max_grad_norm=1.0)
    """Optimizer."""


class CloningActorConfig(RowTrainerConfig):
    """How a policy for actions is trained on recorded episodes."""

    global_batch_size: int = Field(default=256, ge=1)
    """Observations with their action chunks of one optimizer step, over all ranks."""


class CoTrainingConfig(DemonstrationsConfig):
    """Recorded episodes that a policy goes on imitating while it is trained by what it does."""

    weight: float = Field(default=0.2, gt=0)
    """Of the mean error of recorded actions in the loss of the policy."""
    objective: Literal["likelihood", "squared_error", "model"] = "likelihood"
    """What that error is: −log π, the squared distance to the most likely actions, or the
    supervised loss that the model itself has."""

    @model_validator(mode="after")
    def _check_held_out(self) -> Self:
        if self.held_out:
            raise illegal("held_out", "nothing validates here", hint="nearest: 0")
        return self


class SupervisedRunConfig(PlacedConfig):
    """A run that learns what it is shown."""

    runner: SupervisedRunnerConfig
    validation: ValidationLossConfig = ValidationLossConfig()
    data: TextExamplesConfig | DemonstrationsConfig
    model: LanguageModelConfig | ModelConfig
    actor: FineTuningActorConfig | CloningActorConfig

    @property
    def components(self) -> tuple[str, ...]:
        """Worker groups of the run."""
        return ("source", "actor")

    @property
    def training_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.runner.total_steps

    @property
    def order_seed(self) -> int:
        """Seed of the order of the rows."""
        return self.data.seed + self.seed

    def validates_after(self, step: int) -> bool:
        """Whether a validation follows the training step of this number, from 0."""
        return self.data.validates and (step + 1) % self.validation.interval == 0

    @property
    def data_parallel_size(self) -> int:
        """Ranks of the actor that hold different data."""
        return self.world_size("actor") // self.actor.ranks_per_replica

    def batch_table(self) -> list[tuple[str, str]]:
        """Rows that show how rows become batches and updates."""
        batch = self.actor.global_batch_size
        per_rank = batch // self.data_parallel_size
        most = getattr(self.actor, "max_tokens_per_micro_batch", None)
        micro = f"up to {most} tokens" if most else str(self.actor.micro_batch_size or per_rank)
        return [
            ("global batch", f"{batch} rows"),
            ("micro batch", f"{micro}, of {per_rank} rows per rank"),
            ("training steps", f"{self.training_steps}, {self.training_steps * batch} rows"),
        ]

    @property
    def planning(self) -> PlanningTraits:
        """What planning and profiling must know of the recipe."""
        return _traits(self)

    @property
    @abstractmethod
    def legal_ranks(self) -> tuple[int, ...]:
        """Numbers of ranks that the actor can have."""

    # -- rules between sections -----------------------------------------------------------------

    @model_validator(mode="after")
    def _rules(self) -> Self:
        self.check_cluster()
        for problem in (*self._batch_problems(), *self._own_problems()):
            raise problem
        return self

    def _batch_problems(self) -> Iterator[PydanticCustomError]:
        actor, ranks = self.actor, self.world_size("actor")
        if actor.update_epoch != 1:
            why = "has no effect: every global batch is drawn anew"
            yield illegal("actor.update_epoch", why, hint="nearest: 1, and more runner.total_steps")
        batch, replicas = actor.global_batch_size, self.data_parallel_size
        if ranks % actor.ranks_per_replica == 0 and batch % max(replicas, 1):
            yield illegal(
                "actor.global_batch_size",
                f"does not divide over {replicas} actor ranks",
                hint=f"nearest: {join_choices(nearest_multiples(replicas, batch))}",
            )
        given = self.validation.model_fields_set
        if given and not self.data.validates:
            yield illegal(
                f"validation.{sorted(given)[0]}",
                "nothing validates",
                hint="write data.held_out, or leave the section out",
            )

    def _own_problems(self) -> Iterator[PydanticCustomError]:
        yield from ()


class FineTuningConfig(SupervisedRunConfig):
    """A run that trains a language model on prompts and answers."""

    task: Literal["sft"]
    """Which runner executes the recipe."""
    data: TextExamplesConfig
    model: LanguageModelConfig
    actor: FineTuningActorConfig = FineTuningActorConfig()

    @property
    def has_pictures(self) -> bool:
        """Whether prompts may have pictures."""
        return self.data.has_pictures

    def check(self) -> None:
        """Look at the files, also at what says how pictures are read."""
        super().check()
        if self.has_pictures:
            check_model(self.model)

    @property
    def offloading(self) -> tuple[str, ...]:
        """What holds a model."""
        return ("actor",)

    @property
    def legal_ranks(self) -> tuple[int, ...]:
        """Replicas that divide the global batch."""
        if self.cluster.runtime == "local":
            return (1,)
        size, batch = self.actor.ranks_per_replica, self.actor.global_batch_size
        return tuple(size * n for n in range(1, batch + 1) if batch % n == 0)

    def _own_problems(self) -> Iterator[PydanticCustomError]:
        if self.has_pictures:
            yield from model_problems(self.model, {"actor": self.actor})
        ranks = self.world_size("actor")
        if self.cluster.runtime == "local" and ranks > 1:
            yield illegal(
                "cluster.component_placement",
                f"places {ranks} actor ranks, which need a process each",
                hint="cluster.runtime: ray, or one actor rank",
            )
        try:
            self.actor.check_ranks(ranks)
        except ConfigError as error:
            yield illegal(f"actor.{error.key}", error.reason)
        if self.model.lora is not None:
            yield illegal("model.lora", "has no effect here", hint="write it as actor.lora")
        if self.model.path is None and self.data.task is None:
            yield illegal(
                "model.path",
                "is missing: a tokenizer is trained on generated tasks only",
                hint="the directory of a model or tokenizer",
            )


class BehaviourCloningConfig(SupervisedRunConfig, EvaluatedConfig):
    """A run that trains a policy to do what was recorded (Pomerleau 1991)."""

    task: Literal["behaviour_cloning"]
    """Which runner executes the recipe."""
    data: DemonstrationsConfig
    model: ModelSection
    objective: Literal["likelihood", "squared_error", "model"] = "likelihood"
    """What is made small: −log π of the recorded actions, with which the policy also learns how
    certain it is; the squared distance between them and its most likely actions, which leaves its
    standard deviation as it is for what explores afterwards; or the supervised loss that the model
    itself has, as flow matching."""
    actor: CloningActorConfig = CloningActorConfig()

    @property
    def components(self) -> tuple[str, ...]:
        """Worker groups of the run: simulators and who acts in them for the evaluation."""
        return ("source", "actor", "env", "rollout")

    def placement(self) -> dict[str, Any]:
        """As given; who only evaluates is at the first device where nothing else is said."""
        given = super().placement()
        placed = {name.strip() for key in given for name in str(key).split(",")}
        rest = [name for name in ("env", "rollout") if name not in placed]
        return {**given, ",".join(rest): "0"} if rest else given

    @property
    def value_dim(self) -> int:
        """No critic."""
        return 0

    @property
    def divides_policy(self) -> bool:
        """Whether each actor rank has a part of the policy."""
        return self.actor.type == "fsdp" and self.world_size("actor") > 1

    @property
    def legal_ranks(self) -> tuple[int, ...]:
        """Ranks whose shares of the global batch are whole micro batches."""
        return dividing_ranks(self.actor)

    def _own_problems(self) -> Iterator[PydanticCustomError]:
        if len(self.env.sections) > 1:
            yield illegal(
                "env.train",
                f"lists {len(self.env.sections)} simulators, and recorded episodes are of one",
                hint="nearest: the section that they were recorded in",
            )
        for name in ("start", "stop_at_success"):
            if getattr(self.evaluation, name) and not self.evaluation.interval:
                yield illegal(
                    f"evaluation.{name}",
                    "has no effect: the policy plays in the end alone",
                    hint="write evaluation.interval",
                )
        yield from self.evaluation_problems()
        yield from rank_problems(self.actor, self.world_size("actor"), "rows")


# -- planning -----------------------------------------------------------------------------------


def _traits(config: SupervisedRunConfig) -> PlanningTraits:
    """Of a run that learns what it is shown: the items are the rows of a global batch."""
    actor, batch = config.actor, config.actor.global_batch_size
    constraints = Constraints(
        items=batch,
        # A batch is handed over whole.
        granularities=(batch,),
        components={
            "source": ComponentConstraint(even=False, processes=(1,), residency="resident"),
            "actor": ComponentConstraint(
                streams=False,
                even=False,
                processes=config.legal_ranks,
                processes_per_replica=actor.ranks_per_replica,
                residency=None if "actor" in config.offloading else "resident",
            ),
        },
    )
    most = getattr(actor, "max_tokens_per_micro_batch", None)
    micro = actor.micro_batch_size or batch // config.data_parallel_size
    return PlanningTraits(
        items=batch,
        constraints=constraints,
        trials=partial(_trials, config),
        concurrent=frozenset(),
        packages=("transformers",) if isinstance(config.model, LanguageModelConfig) else (),
        sections=timed_sections(config, ("actor", "data")),
        worst_case=("runner.total_steps=1",),
        memory_knobs=(
            Knob("actor.max_tokens_per_micro_batch", most)
            if most
            else Knob("actor.micro_batch_size", micro),
            Knob("actor.global_batch_size", batch),
        ),
    )


def _trials(config: SupervisedRunConfig, first: int, devices: int) -> Iterator[Trial]:
    batch, others = config.actor.global_batch_size, ",".join(config.components[2:])
    beside = f", '{others}': '{first}'" if others else ""
    for count in device_counts(devices):
        if count not in config.legal_ranks:
            continue
        ranks = first_devices(count, first)
        place = f"cluster.component_placement={{source: '{first}', actor: '{ranks}'{beside}}}"
        for parts in (1, 2, 4):
            if batch % (parts * count) == 0:
                yield Trial(
                    f"{batch // parts} rows on {count} devices",
                    (place, f"actor.global_batch_size={batch // parts}"),
                )
