"""The part of a recipe by which a policy acts in simulators, and what planning knows of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field
from pydantic_core import PydanticCustomError

from rlinf.algorithms.base_config import ActionAlgorithm
from rlinf.config.base import StrictModel
from rlinf.config.component import Component, illegal
from rlinf.config.effects import unused
from rlinf.config.nearest import (
    join_choices,
    nearest_divisors,
    nearest_multiples,
    nearest_numbers,
)
from rlinf.config.ranges import device_span
from rlinf.envs.config import EnvConfig, Environments, Shares, TrainingEnvironments
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
from rlinf.models.config import REGISTRY as MODELS
from rlinf.models.config import ModelConfig
from rlinf.trainers.config import OptimizerConfig, RowTrainerConfig
from rlinf.weight_sync.config import AutoConfig, WeightSyncSection

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec
    from rlinf.models.policy import Policy

ModelSection = Annotated[ModelConfig, Component(MODELS)]


class ActingRunnerConfig(RunnerConfig):
    """How long the run lasts and where it is written."""

    total_env_steps: int = Field(ge=1)
    """Environment steps of the run, over all environments; rounded up to whole rollouts."""


MOST_EPISODES = 1_000_000
"""Of one evaluation; each is listed in its specification."""


class EvaluationConfig(StrictModel):
    """Evaluation on fixed episodes that training never sees."""

    only_with: ClassVar = {"start": "interval", "stop_at_success": "interval"}
    interval: int = Field(default=0, ge=0)
    """Training steps between two evaluations; 0: at the end of the run only."""
    start: int = Field(default=0, ge=0)
    """Training steps before the first evaluation during training."""
    periodic_episodes: int = Field(default=20, ge=1, le=MOST_EPISODES)
    """Episodes of an evaluation during training."""
    episodes: int = Field(default=100, ge=1, le=MOST_EPISODES)
    """Episodes of the evaluation at the end, disjoint from those during training."""
    num_envs: int = Field(default=10, ge=1)
    """Evaluation environments, over all env workers."""
    seed: int = Field(default=10_000, ge=0)
    """Seed of the episode list."""
    walk: bool = False
    """Whether held-out episodes have the seeds 0, 1, 2, … instead of drawn ones: a suite of tasks
    plays each of them equally often, and from each recorded initial state in turn. Episodes during
    training have the seeds behind them, and so the same states where a suite has no more."""
    deterministic: bool = True
    """Whether the mode of the policy acts. False: its actions are drawn, as a published
    vision-language-action model is evaluated; denoising then starts at noise, and its steps stay
    deterministic. The draws depend on ``seed`` and ``num_envs``."""
    success: Literal["success_once", "success_at_end"] = "success_once"
    """What counts as success of an episode."""
    stop_at_success: float | None = Field(default=None, gt=0, le=1)
    """End training once an evaluation reaches this success rate; null: never."""
    video_episodes: int = Field(default=4, ge=0)
    """Held-out episodes that the video of the trained policy shows side by side; 0: no video."""

    def environments(self, train: EnvConfig) -> EnvConfig:
        """Training environments as they are evaluated in: true rewards, one reset each."""
        return train.model_copy(
            update={
                "group_size": 1,
                "use_fixed_reset_states": False,
                "reward_scale": 1.0,
                "step_penalty": 0.0,
            }
        )


class ExchangeConfig(StrictModel):
    """How environments and policy answer each other."""

    pipeline_stage_num: int = Field(default=1, ge=1)
    """Sub-batches of each env worker that are in flight at once, so that simulators step while the
    policy answers the others."""
    block_size: int | None = Field(default=None, ge=1)
    """Rows per forward pass of the policy. A fixed size gives bitwise equal results under any
    split of the environments; null: whatever arrives, the fastest."""


class RolloutConfig(ExchangeConfig):
    """How experience is collected."""

    steps: int = Field(ge=1, le=1_000_000)
    """Environment steps of each environment in one rollout."""
    max_staleness: int = Field(default=0, ge=0)
    """How many training phases may lie between the weights that act and the training: with 0 each
    rollout waits for the training step before it, with k it runs up to k steps ahead."""


class EvaluatedConfig(PlacedConfig):
    """A run whose policy is evaluated in simulators."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of weights, exploration noise, sample order and episodes."""
    env: Environments
    rollout: ExchangeConfig = ExchangeConfig()
    model: ModelSection
    actor: RowTrainerConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    weight_sync: WeightSyncSection = AutoConfig()

    @property
    def needs_values(self) -> bool:
        """Whether what trains the policy needs a critic."""
        return False

    @property
    def explores(self) -> bool:
        """Whether actions are sampled to explore."""
        return True

    @property
    def value_dim(self) -> int:
        """V, values that the policy gives for a chunk: 0, 1, or one for each action."""
        return 0

    def build_policy(self, env_spec: EnvSpec, *, as_kept: bool = False) -> Policy:
        """The policy as those who act with trained weights have it, with fresh ones.

        ``as_kept`` is in float32, in which the trainer keeps it, whatever it acts in.
        """
        from rlinf.models.adapters import acting_policy
        from rlinf.trainers.trained import DTYPES

        return acting_policy(
            self.model,
            env_spec,
            value_dim=self.value_dim,
            seed=self.seed,
            lora=self.actor.lora,
            dtype=DTYPES["float32" if as_kept else self.actor.precision.param],
        )

    def may_be_told(self, key: str, was: Any, value: Any) -> bool:
        """That adapters were trained in the vision: they once were, frozen or not. Where they were
        not, the checkpoint lacks them and is refused."""
        unfrozen = key == "model.freeze_vision" and (was, value) == (True, False)
        return (unfrozen and self.actor.lora is not None) or super().may_be_told(key, was, value)

    @property
    def evaluated(self) -> dict[str, EnvConfig]:
        """The sections of the environments as they are evaluated in, by their keys."""
        sections = self.env.sections.items()
        return {key: self.evaluation.environments(section) for key, section in sections}

    @property
    def evaluation_shares(self) -> Shares:
        """Which evaluation environment, and which episode, is of which section."""
        return Shares.of(list(self.evaluated.values()))

    @property
    def sub_batches(self) -> int:
        """Sub-batches of environments that are in flight at once, over all env workers."""
        return self.world_size("env") * self.rollout.pipeline_stage_num

    @property
    def offloading(self) -> tuple[str, ...]:
        """What trains, where the plan says so by hand; who acts keeps its policy."""
        return ("actor",)

    pipeline_key: ClassVar[str] = "rollout.pipeline_stage_num"

    def pipeline_stages(self, component: str) -> int:
        """Sub-batches of a worker's environments that are in flight at once."""
        return self.rollout.pipeline_stage_num if component in {"env", "rollout"} else 1

    def check(self) -> None:
        """Look at the weights to begin with, too."""
        super().check()
        start = self.model.starting_weights
        if start is not None:  # else nothing asks the algorithm, which imports torch
            self.model.check_starting_weights(start, value_dim=self.value_dim, seed=self.seed)

    def problems(self) -> Iterator[PydanticCustomError]:
        """What stands against the numbers of environments and workers of an evaluation."""
        yield from super().problems()
        workers, stages = self.world_size("env"), self.rollout.pipeline_stage_num
        parts, count, shares = workers * stages, self.evaluation.num_envs, self.evaluation_shares
        unit = parts * shares.unit
        if count % unit:
            yield illegal(
                "evaluation.num_envs",
                f"does not divide into {workers} env workers × {stages} pipeline stages"
                f"{_in_shares(shares)}",
                hint=f"nearest: {join_choices(nearest_multiples(unit, count))}",
            )
        yield from self._crowding_problems("evaluation.num_envs", count, shares)
        yield from self._stage_problems()
        for name in ("episodes", "periodic_episodes"):
            played = getattr(self.evaluation, name)
            if not all(shares.count(section, played) for section in range(len(shares.sizes))):
                yield illegal(
                    f"evaluation.{name}",
                    f"are too few for each of {len(shares.sizes)} sections",
                    hint=f"nearest: {shares.starts[-1] + 1}",
                )
        if self.world_size("rollout") > parts:
            yield illegal(
                "cluster.component_placement",
                f"places {self.world_size('rollout')} rollout workers, but there are only {parts} "
                "sub-batches of environments (env workers × pipeline stages)",
                hint=f"at most {parts} rollout processes, or a larger rollout.pipeline_stage_num",
            )
        yield from self._policy_problems()

    @property
    def _of_one_stage(self) -> list[str]:
        """Keys of the sections whose simulator can have no second pipeline stage."""
        return [key for key, env in self.env.sections.items() if env.one_batch_per_process]

    def _stage_problems(self) -> Iterator[PydanticCustomError]:
        """What stands against more than one pipeline stage."""
        if self.rollout.pipeline_stage_num > 1 and (keys := self._of_one_stage):
            why = f"is {self.rollout.pipeline_stage_num}, but `{self.env.sections[keys[0]].type}`"
            why += f" of {keys[0]} steps one batch in a process, and each pipeline stage is a batch"
            yield illegal(self.pipeline_key, why, hint="nearest: 1")

    def _crowding_problems(
        self, key: str, count: int, shares: Shares
    ) -> Iterator[PydanticCustomError]:
        """What stands against so many environments, where one may be open at a time."""
        for place, (section, env) in enumerate(self.env.sections.items()):
            if env.one_at_a_time and shares.count(place, count) > 1:
                why = f"is more than one environment of {section}, which has one_at_a_time: true"
                yield illegal(key, why, hint=f"nearest: {len(shares.sizes)}")

    def _policy_problems(self) -> Iterator[PydanticCustomError]:
        """What the policy is not made for."""
        without = "algorithm.type: ppo" if self.explores else "task: embodied"
        if not self.needs_values:
            yield from unused(self.model, self.model.of_values, without=without, at="model.")
            yield from unused(self.actor.optim, ("value_lr",), without=without, at="actor.optim.")
        idle = ["group_size", "use_fixed_reset_states", "reward_scale", "step_penalty"]
        if not self.explores:
            for key, section in self.env.sections.items():
                yield from unused(section, idle, without=without, at=f"{key}.")
            yield from unused(self.model, self.model.of_exploration, without=without, at="model.")
        # One rank of fsdp has no part either: a run of several may go on there.
        if self.checkpoint.layout == "sharded" and self.actor.type != "fsdp":
            yield illegal(
                "checkpoint.layout",
                "is sharded, but no rank has a part of a robot's policy",
                hint="nearest: whole, or actor.type: fsdp",
            )
        param = self.actor.precision.param
        if param != "float32" and not self.model.half_precision:
            yield illegal(
                "actor.precision.param",
                f"is {param}, but policies of type {self.model.type} act and train in float32",
                hint="nearest: float32",
            )
        if self.actor.gradient_checkpointing and not self.model.repeats_layers:
            yield illegal(
                "actor.gradient_checkpointing",
                f"has no effect on policies of type {self.model.type}, of whose layers none is "
                "computed again",
                hint="nearest: false",
            )
        for key, section in self.env.sections.items():
            if section.observation_steps > 1 and not self.model.reads_earlier:
                yield illegal(
                    f"{key}.observation_steps",
                    f"is {section.observation_steps}, but policies of type {self.model.type} read "
                    "the present observation alone",
                    hint="nearest: 1, or model.type: diffusion",
                )
        if self.divides_policy and self.cluster.runtime == "local":
            yield illegal(
                "actor.type",
                "divides the policy over ranks, which takes a process for each",
                hint="nearest: plain, or cluster.runtime: ray",
            )

    @property
    def divides_policy(self) -> bool:
        """Whether each actor rank has a part of the policy."""
        return self.actor.type == "fsdp" and self.world_size("actor") > 1


class ActingConfig(EvaluatedConfig):
    """A run in which a policy collects, in simulators, what it is trained on."""

    runner: ActingRunnerConfig
    env: TrainingEnvironments
    rollout: RolloutConfig
    algorithm: ActionAlgorithm
    actor: RowTrainerConfig

    @property
    def keeps_next_observations(self) -> bool:
        """Whether rollouts hold what followed each of their rows."""
        return False

    def acts_at_random(self, step: int) -> bool:
        """Whether the rollout of a step is taken with uniformly random actions."""
        del step
        return False

    @property
    def optimizers(self) -> dict[str, OptimizerConfig]:
        """Settings of modules that are not trained by ``actor.optim``."""
        return {}

    # -- derived sizes --------------------------------------------------------------------------

    @property
    def chunk_steps(self) -> int:
        """T, policy queries per environment and rollout."""
        return self.rollout.steps // self.model.num_action_chunks

    @property
    def episode_chunk_steps(self) -> list[int]:
        """Policy queries of the longest episode of each section, whose last chunk may be cut."""
        chunk = self.model.num_action_chunks
        return [-(-section.max_episode_steps // chunk) for section in self.env.sections.values()]

    @property
    def samples(self) -> int:
        """Samples of one rollout: one per environment and chunk step."""
        return self.env.num_envs * self.chunk_steps

    @property
    def env_steps_per_rollout(self) -> int:
        """Environment steps of one rollout."""
        return self.env.num_envs * self.rollout.steps

    @property
    def group_size(self) -> int:
        """Environments that share their reset states."""
        return next(iter(self.env.sections.values())).group_size

    @property
    def auto_reset(self) -> bool:
        """Whether environments start their next episodes by themselves."""
        return next(iter(self.env.sections.values())).auto_reset

    @property
    def begins_afresh(self) -> bool:
        """Whether every rollout begins with a reset. Episodes go on from one to the next where
        environments reset themselves, except where they are compared: the members of a group that
        end at different times, or after a fault, would meet no sibling of their seed again."""
        return not self.auto_reset or self.algorithm.needs_whole_episodes

    @property
    def training_steps(self) -> int:
        """Rollouts of the run, each followed by one training phase."""
        return -(-self.runner.total_env_steps // self.env_steps_per_rollout)

    @property
    def micro_batch_size(self) -> int:
        """Rows of one forward and backward pass."""
        actor = self.actor
        return actor.micro_batch_size or actor.global_batch_size // self.world_size("actor")

    def section_table(self) -> list[tuple[str, str]]:
        """Rows that show the share of each of several sections in the environments."""
        sections, shares = self.env.sections, self.env.shares
        return [
            (key, f"{shares.count(place, self.env.num_envs)} environments, {section.type}")
            for place, (key, section) in enumerate(sections.items())
            if len(sections) > 1
        ]

    # -- rules between sections -----------------------------------------------------------------

    def problems(self) -> Iterator[PydanticCustomError]:
        """What stands against the numbers of environments, steps and workers."""
        workers, stages = self.world_size("env"), self.rollout.pipeline_stage_num
        shares = self.env.shares
        unit = workers * stages * shares.unit
        if self.env.num_envs % unit:
            yield illegal(
                "env.num_envs",
                f"does not divide into {workers} env workers × {stages} pipeline stages"
                f"{_in_shares(shares, f' × groups of {self.group_size}')}",
                hint=f"nearest: {join_choices(nearest_multiples(unit, self.env.num_envs))}",
            )
        yield from self._crowding_problems("env.num_envs", self.env.num_envs, shares)
        chunk = self.model.num_action_chunks
        if self.rollout.steps % chunk:
            yield illegal(
                "rollout.steps",
                f"is not a multiple of the {chunk} actions of a chunk (model.num_action_chunks)",
                hint=f"nearest: {join_choices(nearest_multiples(chunk, self.rollout.steps))}",
            )
        yield from super().problems()

    def problems_of_training(self) -> Iterator[PydanticCustomError]:
        """What stands against how the algorithm trains the model."""
        yield from super().problems_of_training()
        yield from self.algorithm.problems_of_training(steps=self.training_steps, model=self.model)

    # -- planning -------------------------------------------------------------------------------

    @property
    def planning(self) -> PlanningTraits:
        """What planning and profiling must know of the recipe: the items are environments."""
        envs, stages = self.env.num_envs, self.rollout.pipeline_stage_num
        learners = [name for name in self.components if name not in ("env", "rollout")]
        # A training phase begins with all trajectories of the rollout.
        whole = ComponentConstraint(streams=False, even=False, residency="resident")
        # Nothing is offloaded.
        tried = {1} if self._of_one_stage else {1, 2, stages}
        loop = ComponentConstraint(pipeline_stages=tuple(sorted(tried)), residency="resident")
        constraints = Constraints(
            items=envs,
            # What has the shares of all sections is divided no further.
            group_size=self.env.shares.unit,
            # The rollout hands its trajectories over at its end.
            granularities=(envs,),
            staleness=self.rollout.max_staleness,
            exchanges={"rollout": self.chunk_steps},
            components={
                # They divide the environments of an evaluation as they do those of training.
                "env": loop.model_copy(
                    update={
                        "also_divide": (self.evaluation.num_envs // self.evaluation_shares.unit,)
                    }
                ),
                "rollout": loop.model_copy(update={"serves": "env"}),
                **{name: whole.model_copy(update={"processes": (1,)}) for name in learners},
                "actor": whole.model_copy(
                    update={
                        "processes": dividing_ranks(self.actor),
                        # The planner chooses none by itself, but keeps what is said by hand.
                        "residency": self.residency().get("actor", "resident"),
                    }
                ),
            },
        )
        # What hands out demonstrations is configured by their section.
        own = ["demonstrations" if name == "source" else name for name in learners]
        sections = timed_sections(self, ("algorithm", "env", "rollout", "weight_sync", *own))
        del sections["env"]["num_envs"]
        del sections["rollout"]["pipeline_stage_num"], sections["rollout"]["max_staleness"]
        return PlanningTraits(
            items=envs,
            constraints=constraints,
            trials=partial(_trials, self),
            concurrent=frozenset(),
            packages=("gymnasium", "mujoco", "metaworld"),
            sections=sections,
            worst_case=(
                *_from_the_first_step(self),
                f"runner.total_env_steps={self.env_steps_per_rollout}",
                # More episodes take longer, not more memory.
                f"evaluation.episodes={self.evaluation.num_envs}",
            ),
            memory_knobs=(
                Knob("actor.micro_batch_size", self.micro_batch_size),
                Knob("evaluation.num_envs", self.evaluation.num_envs),
                Knob("env.num_envs", envs),
            ),
        )


def _in_shares(shares: Shares, of_one: str = "") -> str:
    """What else than parts must divide, in the words of a message; ``of_one`` for one section."""
    if len(shares.sizes) == 1:
        return of_one
    return f" × {shares.unit} environments ({' : '.join(map(str, shares.sizes))} of the sections)"


# -- a global batch over ranks ------------------------------------------------------------------


class _Batches(Protocol):
    global_batch_size: int
    micro_batch_size: int | None


def dividing_ranks(actor: _Batches) -> tuple[int, ...]:
    """Numbers of ranks whose shares of the global batch are whole micro batches."""
    pieces = actor.global_batch_size // (actor.micro_batch_size or 1)
    return tuple(n for n in range(1, pieces + 1) if pieces % n == 0)


def rank_problems(
    actor: _Batches, ranks: int, rows: str, *, whole: int | None = None, made_of: str = ""
) -> Iterator[PydanticCustomError]:
    """What stands against dividing the global batch over ranks, and a share into micro batches;
    and the ``whole`` rows of a rollout, in words ``made_of``, into global batches, unless None."""
    batch, micro = actor.global_batch_size, actor.micro_batch_size
    if whole is not None and whole % ranks:
        yield illegal(
            "cluster.component_placement",
            f"places {ranks} actor ranks, and no batch that divides {whole} {rows}{made_of} "
            "divides over them",
            hint=f"nearest: {join_choices(nearest_divisors(whole, ranks))} actor ranks",
        )
    elif whole is not None and whole % batch:
        yield illegal(
            "actor.global_batch_size",
            f"does not divide {whole} {rows}{made_of}",
            hint=f"nearest: {_nearest_batches(actor, ranks, whole)}",
        )
    elif batch % ranks:
        yield illegal(
            "actor.global_batch_size",
            f"does not divide over {ranks} actor ranks",
            hint=f"nearest: {_nearest_batches(actor, ranks, whole)}",
        )
    elif micro is not None and (batch // ranks) % micro:
        yield illegal(
            "actor.micro_batch_size",
            f"does not divide the {batch // ranks} {rows} of a rank",
            hint=f"nearest: {join_choices(nearest_divisors(batch // ranks, micro))}",
        )


def _nearest_batches(actor: _Batches, ranks: int, whole: int | None) -> str:
    """Global batches that ``whole`` rows, unless None, divide into and that divide over the ranks;
    where there are such, those of whole micro batches."""
    batch, unit = actor.global_batch_size, ranks * (actor.micro_batch_size or 1)
    if not whole:
        return join_choices(nearest_multiples(unit, batch))
    if whole % unit:
        unit = ranks
    legal = (size for size in range(unit, whole + 1, unit) if whole % size == 0)
    return join_choices(nearest_numbers(legal, batch))


def _trials(config: ActingConfig, first: int, devices: int) -> Iterator[Trial]:
    envs, one_stage = config.env.num_envs, "rollout.pipeline_stage_num=1"
    kept = [f"cluster.residency={{{name}: {it}}}" for name, it in config.residency().items()]

    def trial(label: str, places: dict[str, str], *overrides: str) -> Trial:
        # What there is one of stands with the first device of the actor.
        rest = {n: places["actor"] for n in config.components if n not in places}
        alone = {n: p.partition("-")[0] for n, p in rest.items()}
        written = ", ".join(f"{name}: '{place}'" for name, place in (places | alone).items())
        placed = f"cluster.component_placement={{{written}}}"
        return Trial(label, (*_from_the_first_step(config), placed, *kept, *overrides))

    def together(count: int) -> dict[str, str]:
        return dict.fromkeys(("env", "rollout", "actor"), first_devices(count, first))

    for count in device_counts(devices):
        for parts in (1, 2, 4):
            if parts > 1 and count not in (1, devices):
                continue
            label = f"{envs // parts} environments on {count} devices"
            yield trial(label, together(count), f"env.num_envs={envs // parts}", one_stage)
    if devices > 1:
        stages = f"{envs} environments on {devices} devices, 2 pipeline stages"
        yield trial(stages, together(devices), "rollout.pipeline_stage_num=2")
        half = devices // 2
        front, rear = first_devices(half, first), device_span(first + half, first + devices)
        yield trial(
            f"{envs} environments, actor apart, one step ahead",
            {"env": front, "rollout": front, "actor": rear},
            one_stage,
            "rollout.max_staleness=1",
        )
        apart = {"env": front, "rollout": rear, "actor": str(first)}
        label = f"{envs} environments, env and rollout apart"
        yield trial(f"{label}, 2 pipeline stages", apart, "rollout.pipeline_stage_num=2")
        yield trial(label, apart, one_stage)


def _from_the_first_step(config: ActingConfig) -> tuple[str, ...]:
    """Overrides by which every step trains."""
    found = ("replay.start_steps=0",) if "replay" in config.components else ()
    return (*found, *config.algorithm.from_the_first_step)
