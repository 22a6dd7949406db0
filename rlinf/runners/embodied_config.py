"""The recipe of an embodied run: policy, environments, batches, and where they run.

Batch vocabulary: *environments* × chunk steps of a rollout → *samples* → *global batch* (one
optimizer step) → *micro batch* (one forward and backward pass).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlinf.config.component import illegal
from rlinf.config.nearest import join_choices, nearest_divisors, nearest_multiples
from rlinf.config.ranges import device_span
from rlinf.flow.placed_config import RunnerConfig
from rlinf.flow.planning_traits import (
    Knob,
    PlanningTraits,
    Trial,
    device_counts,
    first_devices,
    timed_sections,
)
from rlinf.workers.acting_config import OnPolicyConfig

COMPONENTS = ("env", "rollout", "actor")
_TIMED = ("algorithm", "actor", "env", "rollout")


class EmbodiedRunnerConfig(RunnerConfig):
    """How long the run lasts and where it is written."""

    total_env_steps: int = Field(ge=1)
    """Environment steps of the run, over all environments; rounded up to whole rollouts."""


class EmbodiedConfig(OnPolicyConfig):
    """A run that trains a policy in simulators."""

    task: Literal["embodied"]
    """Which runner executes the recipe."""
    runner: EmbodiedRunnerConfig

    @property
    def components(self) -> tuple[str, ...]:
        """Worker groups of the run."""
        return COMPONENTS

    # -- derived sizes --------------------------------------------------------------------------

    @property
    def training_steps(self) -> int:
        """Rollouts of the run, each followed by one training phase."""
        return -(-self.runner.total_env_steps // self.env_steps_per_rollout)

    def batch_table(self) -> list[tuple[str, str]]:
        """Rows that show how environments become samples, batches and updates."""
        batch, micro = self.actor.global_batch_size, self.micro_batch_size
        updates = self.samples // batch * self.actor.update_epoch
        groups = self.env.num_envs // self.group_size
        return [
            ("environments", f"{groups} groups × {self.group_size} = {self.env.num_envs}"),
            ("steps per rollout", f"{self.rollout.steps} ({self.chunk_steps} chunk steps)"),
            ("samples per rollout", f"{self.env.num_envs} × {self.chunk_steps} = {self.samples}"),
            ("global batch", f"{batch} samples, {self.samples // batch} per epoch"),
            ("micro batch", f"{micro} samples, {batch // micro} per global batch"),
            (
                "updates per step",
                f"{self.actor.update_epoch} epochs × {self.samples // batch} = {updates}",
            ),
            ("training steps", f"{self.training_steps} ({self.runner.total_env_steps} env steps)"),
        ]

    @property
    def micro_batch_size(self) -> int:
        """Samples of one forward and backward pass."""
        actor = self.actor
        return actor.micro_batch_size or actor.global_batch_size // self.world_size("actor")

    @property
    def planning(self) -> PlanningTraits:
        """What planning and profiling must know of the recipe."""
        return _traits(self)

    # -- rules between sections -----------------------------------------------------------------

    @model_validator(mode="after")
    def _rules(self) -> EmbodiedConfig:
        self.check_cluster()
        problems = (*self.acting_problems(), *self._batch_problems(), *self._group_problems())
        for problem in problems:
            raise problem
        return self

    def _batch_problems(self) -> Iterator[PydanticCustomError]:
        batch, ranks = self.actor.global_batch_size, self.world_size("actor")
        if self.samples % batch:
            yield illegal(
                "actor.global_batch_size",
                f"does not divide {self.samples} samples "
                f"({self.env.num_envs} environments × {self.chunk_steps} chunk steps)",
                hint=f"nearest: {join_choices(nearest_divisors(self.samples, batch))}",
            )
        if batch % ranks:
            yield illegal(
                "actor.global_batch_size",
                f"does not divide over {ranks} actor ranks",
                hint=f"nearest: {join_choices(nearest_multiples(ranks, batch))}",
            )
        micro = self.actor.micro_batch_size
        if micro is not None and (batch // ranks) % micro:
            yield illegal(
                "actor.micro_batch_size",
                f"does not divide the {batch // ranks} samples of a rank",
                hint=f"nearest: {join_choices(nearest_divisors(batch // ranks, micro))}",
            )

    def _group_problems(self) -> Iterator[PydanticCustomError]:
        if self.algorithm.needs_groups and self.group_size < 2:
            yield illegal(
                "env.train.group_size",
                f"is {self.group_size}, but {self.algorithm.type} compares environments that start "
                "from equal states",
                hint="at least 2",
            )
        horizon = self.env.train.max_episode_steps
        if self.algorithm.needs_groups and self.rollout.steps % horizon:
            yield illegal(
                "rollout.steps",
                f"{self.algorithm.type} compares whole episodes of up to {horizon} steps, which a "
                "rollout of this length would cut",
                hint=f"nearest: {join_choices(nearest_multiples(horizon, self.rollout.steps))}",
            )


# -- planning -----------------------------------------------------------------------------------


def _traits(config: EmbodiedConfig) -> PlanningTraits:
    """Of a run in simulators: the items are environments."""
    from rlinf.planner.described_cluster import on_each_kind
    from rlinf.planner.search import ComponentConstraint, Constraints

    envs = config.env.num_envs
    stages = config.rollout.pipeline_stage_num
    batch = config.actor.global_batch_size
    # Nothing is offloaded.
    loop = ComponentConstraint(pipeline_stages=tuple(sorted({1, 2, stages})), residency="resident")
    # A rank's share of the global batch is trained on in whole micro batches.
    pieces = batch // (config.actor.micro_batch_size or 1)
    ranks = tuple(n for n in range(1, pieces + 1) if pieces % n == 0)
    constraints = Constraints(
        items=envs,
        group_size=config.group_size,
        # The rollout hands its trajectories over at its end.
        granularities=(envs,),
        staleness=config.rollout.max_staleness,
        exchanges={"rollout": config.chunk_steps},
        components={
            # They divide the environments of an evaluation as they do those of training.
            "env": loop.model_copy(update={"also_divide": (config.evaluation.num_envs,)}),
            "rollout": loop.model_copy(update={"serves": "env"}),
            # A training phase begins with all trajectories of the rollout.
            "actor": ComponentConstraint(
                streams=False, even=False, processes=ranks, residency="resident"
            ),
        },
    )
    sections = timed_sections(config, _TIMED)
    sections["env"].pop("num_envs")
    sections["rollout"].pop("pipeline_stage_num")
    sections["rollout"].pop("max_staleness")
    return PlanningTraits(
        items=envs,
        constraints=constraints,
        trials=on_each_kind(config, partial(_trials, envs)),
        concurrent=frozenset(),
        packages=("gymnasium", "mujoco", "metaworld"),
        sections=sections,
        worst_case=(
            f"runner.total_env_steps={config.env_steps_per_rollout}",
            # More episodes take longer, not more memory.
            f"evaluation.episodes={config.evaluation.num_envs}",
        ),
        memory_knobs=(
            Knob("actor.micro_batch_size", config.micro_batch_size),
            Knob("env.num_envs", envs),
        ),
        pipeline_key="rollout.pipeline_stage_num",
    )


def _trials(envs: int, first: int, devices: int) -> Iterator[Trial]:
    for count in device_counts(devices):
        place = _together(first_devices(count, first))
        for parts in (1, 2, 4):
            if parts > 1 and count not in (1, devices):
                continue
            yield Trial(
                f"{envs // parts} environments on {count} devices",
                (place, f"env.num_envs={envs // parts}", "rollout.pipeline_stage_num=1"),
            )
    if devices > 1:
        yield Trial(
            f"{envs} environments on {devices} devices, 2 pipeline stages",
            (_together(first_devices(devices, first)), "rollout.pipeline_stage_num=2"),
        )
        half = devices // 2
        front, rear = first_devices(half, first), device_span(first + half, first + devices)
        yield Trial(
            f"{envs} environments, actor apart, one step ahead",
            (
                f"cluster.component_placement={{'env,rollout': '{front}', actor: '{rear}'}}",
                "rollout.pipeline_stage_num=1",
                "rollout.max_staleness=1",
            ),
        )
        apart = f"{{env: '{front}', rollout: '{rear}', actor: '{first}'}}"
        yield Trial(
            f"{envs} environments, env and rollout apart, 2 pipeline stages",
            (f"cluster.component_placement={apart}", "rollout.pipeline_stage_num=2"),
        )
        yield Trial(
            f"{envs} environments, env and rollout apart",
            (f"cluster.component_placement={apart}", "rollout.pipeline_stage_num=1"),
        )


def _together(devices: str) -> str:
    return f"cluster.component_placement={{'env,rollout,actor': '{devices}'}}"
