"""What planning and profiling must know of a run in which a policy acts in simulators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from rlinf.config.ranges import device_span
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
from rlinf.workers.config.acting import LearningConfig

_TIMED = ("algorithm", "env", "rollout", "weight_sync")


def acting_traits(
    config: LearningConfig, *, ranks: Iterable[int], micro_batch: int
) -> PlanningTraits:
    """Of a run in simulators: the items are environments.

    Args:
        config: The recipe.
        ranks: Numbers of actor ranks that may be.
        micro_batch: Rows of one forward and backward pass.
    """
    envs = config.env.num_envs
    stages = config.rollout.pipeline_stage_num
    learners = [name for name in config.components if name not in ("env", "rollout")]
    # A training phase begins with all trajectories of the rollout.
    whole = ComponentConstraint(streams=False, even=False, residency="resident")
    # Nothing is offloaded.
    loop = ComponentConstraint(pipeline_stages=tuple(sorted({1, 2, stages})), residency="resident")
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
            **{name: whole.model_copy(update={"processes": (1,)}) for name in learners},
            "actor": whole.model_copy(update={"processes": tuple(ranks)}),
        },
    )
    sections = timed_sections(config, (*_TIMED, *learners))
    sections["env"].pop("num_envs")
    sections["rollout"].pop("pipeline_stage_num")
    sections["rollout"].pop("max_staleness")
    return PlanningTraits(
        items=envs,
        constraints=constraints,
        trials=partial(_trials, config),
        concurrent=frozenset(),
        packages=("gymnasium", "mujoco", "metaworld"),
        sections=sections,
        worst_case=(
            *_from_the_first_step(config),
            f"runner.total_env_steps={config.env_steps_per_rollout}",
            # More episodes take longer, not more memory.
            f"evaluation.episodes={config.evaluation.num_envs}",
        ),
        memory_knobs=(
            Knob("actor.micro_batch_size", micro_batch),
            Knob("env.num_envs", envs),
        ),
    )


def _trials(config: LearningConfig, first: int, devices: int) -> Iterator[Trial]:
    envs, one_stage = config.env.num_envs, "rollout.pipeline_stage_num=1"

    def trial(label: str, places: dict[str, str], *overrides: str) -> Trial:
        # What there is one of stands with the first device of the actor.
        rest = {n: places["actor"] for n in config.components if n not in places}
        alone = {n: p.partition("-")[0] for n, p in rest.items()}
        written = ", ".join(f"{name}: '{place}'" for name, place in (places | alone).items())
        placed = f"cluster.component_placement={{{written}}}"
        return Trial(label, (*_from_the_first_step(config), placed, *overrides))

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


def _from_the_first_step(config: LearningConfig) -> tuple[str, ...]:
    """Overrides by which every step trains."""
    return ("replay.start_steps=0",) if "replay" in config.components else ()
