"""What planning and profiling must know of a language model that answers prompts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from rlinf.flow.planning_traits import (
    ComponentConstraint,
    Constraints,
    Generation,
    Knob,
    PlanningTraits,
    Trial,
    device_counts,
    first_devices,
    timed_sections,
)

if TYPE_CHECKING:
    from rlinf.runners.reasoning_config import ReasoningConfig
    from rlinf.trainers.config import PhaseConfig

_TIMED = (
    "algorithm", "actor", "critic", "data", "reward", "rollout", "warm_start", "weight_sync",
)  # fmt: skip


def reasoning_traits(config: ReasoningConfig) -> PlanningTraits:
    """Of a language model that answers prompts: the items are sequences."""
    group = config.rollout.group_size
    staleness, batch = config.rollout.max_staleness, config.global_batch_size
    trainers = {
        name: ComponentConstraint(
            streams=_trains_parts(config),
            even=False,
            processes=_ranks(config, trainer),
            processes_per_replica=trainer.ranks_per_replica,
        )
        for name, trainer in _trainers(config).items()
    }
    constraints = Constraints(
        items=config.rollout.sequences,
        group_size=group,
        # Training begins with the sequences of a whole global batch, or with all.
        granularities=(batch if _trains_parts(config) else config.rollout.sequences,),
        staleness=staleness,
        components={
            # An engine that runs ahead keeps its weights.
            "rollout": ComponentConstraint(
                residency="resident" if staleness else None,
                devices_per_process=config.rollout.engine.devices_per_engine,
            ),
            "reward": ComponentConstraint(residency="resident"),
            **trainers,
        },
    )
    sections = timed_sections(config, _TIMED)
    sections["rollout"].pop("prompts")
    sections["rollout"].pop("max_staleness")
    return PlanningTraits(
        items=config.rollout.sequences,
        constraints=constraints,
        trials=partial(_trials, config),
        concurrent=frozenset({"rollout"}),
        packages=("transformers", config.rollout.engine.package),
        sections=sections,
        worst_case=_worst_step(config),
        memory_knobs=_knobs(config),
        generation=Generation(
            component="rollout",
            most_tokens=config.rollout.sampling.max_new_tokens,
            max_running=config.rollout.engine.max_running_requests,
        ),
    )


def _trainers(config: ReasoningConfig) -> dict[str, PhaseConfig]:
    found: dict[str, PhaseConfig] = {"actor": config.actor}
    return found if config.critic is None else found | {"critic": config.critic}


def _ranks(config: ReasoningConfig, trainer: PhaseConfig) -> tuple[int, ...]:
    """Numbers of ranks that a trainer can have: replicas that divide its global batch, whole."""
    if config.cluster.runtime == "local":
        return (1,)
    batch = config.rollout.sequences // trainer.n_minibatches
    size = trainer.ranks_per_replica
    return tuple(size * n for n in range(1, batch + 1) if batch % n == 0)


def _trains_parts(config: ReasoningConfig) -> bool:
    """Whether a global batch is trained on as soon as its sequences are there."""
    return config.actor.trains_in_order and config.algorithm.prepares_parts


def _worst_step(config: ReasoningConfig) -> tuple[str, ...]:
    sampling = config.rollout.sampling
    longest = sampling.model_copy(update={"min_new_tokens": sampling.max_new_tokens})
    if config.rollout.engine.unscored(longest) is None:
        forced = [f"rollout.sampling.min_new_tokens={sampling.max_new_tokens}"]
    else:  # as long as nothing ends a turn of an agent
        forced = [f"rollout.sampling.{key}=[]" for key in ("stop_token_ids", "stop")]
    found = ("runner.total_steps=1", *config.algorithm.from_the_first_step, *forced)
    return found if config.warm_start is None else (*found, "warm_start.steps=2")


def _knobs(config: ReasoningConfig) -> tuple[Knob, ...]:
    actor, rollout = config.actor, config.rollout
    if actor.max_tokens_per_micro_batch is not None:
        micro = Knob("actor.max_tokens_per_micro_batch", actor.max_tokens_per_micro_batch)
    else:
        per_rank = config.global_batch_size // config.data_parallel_size
        micro = Knob("actor.micro_batch_size", actor.micro_batch_size or per_rank)
    return (
        micro,
        Knob("rollout.engine.max_running_requests", rollout.engine.max_running_requests),
        Knob("rollout.sampling.max_new_tokens", rollout.sampling.max_new_tokens),
        Knob("rollout.prompts", rollout.prompts),
    )


def _placement(config: ReasoningConfig, first: int, count: int, ranks: str) -> str:
    """A placement of engines and rewards on so many devices from the first on, and of ranks."""
    rewards = first_devices(count, first)
    engines = first_devices(count // config.rollout.engine.devices_per_engine)
    trainers = ",".join(_trainers(config))
    return f"{{rollout: '{rewards}:{engines}', reward: '{rewards}', '{trainers}': '{ranks}'}}"


def _trials(config: ReasoningConfig, first: int, devices: int) -> Iterator[Trial]:
    local = config.cluster.runtime == "local"
    each = config.rollout.engine.devices_per_engine
    # Those that hold whole engines.
    counts = [count for count in device_counts(devices) if count % each == 0]
    for count in counts:
        place = _placement(config, first, count, first_devices(1 if local else count, first))
        for parts in (1, 2, 4):
            if parts > 1 and count not in (counts[0], counts[-1]):
                continue
            prompts = config.rollout.prompts // parts
            yield Trial(
                f"{prompts * config.rollout.group_size} sequences on {count} devices",
                (f"cluster.component_placement={place}", f"rollout.prompts={prompts}"),
            )
    half = devices // 2 // each * each
    if half:
        ranks = first_devices(1 if local else devices - half, first + half)
        place = _placement(config, first, half, ranks)
        yield Trial(
            "trainers apart, one step ahead",
            (f"cluster.component_placement={place}", "rollout.max_staleness=1"),
        )
    if devices % each == 0:
        place = _placement(config, first, devices, first_devices(1 if local else devices, first))
        # An engine that runs ahead keeps its weights.
        ahead = config.rollout.max_staleness
        leaving = [name for name in config.offloading if name != "rollout" or not ahead]
        yield Trial(
            "offloaded while idle",
            (
                f"cluster.component_placement={place}",
                f"cluster.residency={{'{','.join(leaving)}': offload}}",
            ),
        )
