"""The recipe of supervised training: what is learnt, by which model, in which batches.

Batch vocabulary: *rows* (a prompt with its answer, or one observation with the action chunk that
followed) → *global batch* (one optimizer step) → *micro batch* (one forward and backward pass).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.nearest import join_choices, nearest_multiples
from rlinf.data.imitation import DemonstrationsConfig
from rlinf.data.text_examples import TextExamplesConfig
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
from rlinf.trainers.config import (
    FineTuningOptimizerConfig,
    PolicyTrainerConfig,
    RowTrainerConfig,
)
from rlinf.weight_sync.config import AutoConfig
from rlinf.workers.config.acting import EvaluatedConfig, ModelSection, dividing_ranks, rank_problems
from rlinf.workers.config.language import LanguageRunConfig, Trainers, picture_problems


class SupervisedRunnerConfig(RunnerConfig):
    """How long the run lasts and where it is written."""

    total_steps: int = Field(ge=1)
    """Optimizer steps of the run, one global batch each."""


class ValidationLossConfig(StrictModel):
    """The loss on what is not trained on, and when it ends the run."""

    only_with: ClassVar = {"min_improvement": "patience"}

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
    optim: FineTuningOptimizerConfig = FineTuningOptimizerConfig()
    """Optimizer."""


class CloningActorConfig(RowTrainerConfig):
    """How a policy for actions is trained on recorded episodes."""

    global_batch_size: int = Field(default=256, ge=1)
    """Observations with their action chunks of one optimizer step, over all ranks."""


def objective_problems(
    model: ModelConfig, objective: str, *, key: str
) -> Iterator[PydanticCustomError]:
    """An objective, under ``key``, that a policy of this model does not have."""
    if model.only_imitates and objective != "model":
        yield illegal(
            key,
            f"a policy of type {model.type} gives recorded actions no log-prob and has no mode in "
            "closed form, but a supervised loss of its own",
            hint="nearest: model",
        )


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

    def problems(self) -> Iterator[PydanticCustomError]:
        """See :meth:`PlacedConfig.problems`."""
        if self.actor.update_epoch != 1:
            why = "has no effect: every global batch is drawn anew"
            yield illegal("actor.update_epoch", why, hint="nearest: 1, and more runner.total_steps")
        # By value: the file of a run writes defaults, too.
        given = [
            key for key, value in self.validation if value != getattr(ValidationLossConfig(), key)
        ]
        if given and not self.data.validates:
            yield illegal(
                f"validation.{min(given)}",
                "nothing validates",
                hint="write data.held_out, or leave the section out",
            )
        yield from super().problems()


class FineTuningConfig(SupervisedRunConfig, LanguageRunConfig):
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

    @property
    def trainers(self) -> Trainers:
        """See :attr:`LanguageRunConfig.trainers`."""
        return {"actor": self.actor}

    def problems(self) -> Iterator[PydanticCustomError]:
        """See :meth:`PlacedConfig.problems`."""
        yield from super().problems()
        batch, replicas = self.actor.global_batch_size, self.data_parallel_size
        if self.world_size("actor") % self.actor.ranks_per_replica == 0 and batch % replicas:
            yield illegal(
                "actor.global_batch_size",
                f"does not divide over {replicas} actor ranks",
                hint=f"nearest: {join_choices(nearest_multiples(replicas, batch))}",
            )
        if self.has_pictures:
            yield from picture_problems(self.model, self.trainers)
        yield from self.trainer_problems()
        yield from self.model_problems(generated=self.data.task is not None)


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

    @property
    def placed_by_default(self) -> tuple[str, ...]:
        """Who only evaluates."""
        return ("env", "rollout")

    @property
    def explores(self) -> bool:
        """Nothing is tried out."""
        return False

    @property
    def legal_ranks(self) -> tuple[int, ...]:
        """Ranks whose shares of the global batch are whole micro batches."""
        return dividing_ranks(self.actor)

    def problems(self) -> Iterator[PydanticCustomError]:
        """See :meth:`PlacedConfig.problems`."""
        yield from super().problems()
        if len(self.env.sections) > 1:
            yield illegal(
                "env.train",
                f"lists {len(self.env.sections)} simulators, and recorded episodes are of one",
                hint="nearest: the section that they were recorded in",
            )
        if self.weight_sync != AutoConfig():
            why = "has no effect: who plays is given the weights of checkpoints"
            yield illegal("weight_sync.type", why, hint="leave the section out")
        yield from objective_problems(self.model, self.objective, key="objective")
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
        worst_case=(
            "runner.total_steps=1",
            *(("validation.interval=1",) if config.data.validates else ()),
        ),
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
