"""What planning and profiling must know of a run in simulators."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from rlinf.config.ranges import device_span
from rlinf.flow.planning_traits import (
    Knob,
    PlanningTraits,
    Trial,
    device_counts,
    first_devices,
    timed_sections,
)

if TYPE_CHECKING:
    from rlinf.runners.embodied_config import EmbodiedConfig

_TIMED = ("algorithm", "actor", "env", "rollout")


def embodied_traits(config: EmbodiedConfig) -> PlanningTraits:
    """Of a run in simulators: the items are environments."""
    from rlinf.flow.constraints import ComponentConstraint, Constraints

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
        trials=partial(_trials, envs),
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
