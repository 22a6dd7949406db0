"""What planning and profiling must know of a language model that answers prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlinf.config.ranges import device_span
from rlinf.runners.planning_traits import (
    Knob,
    PlanningTraits,
    Trial,
    device_counts,
    first_devices,
    timed_sections,
)

if TYPE_CHECKING:
    from rlinf.runners.reasoning_config import ReasoningConfig

_TIMED = (
    "algorithm", "actor", "critic", "data", "reward", "rollout", "warm_start", "weight_sync",
)  # fmt: skip


def reasoning_traits(config: ReasoningConfig) -> PlanningTraits:
    """Of a language model that answers prompts: the items are sequences."""
    from rlinf.flow.planning import ComponentConstraint, Constraints

    devices, group = config.devices, config.rollout.group_size
    staleness, one_rank = config.rollout.max_staleness, config.cluster.runtime == "local"
    batch = config.global_batch_size
    ranks = (1,) if one_rank else tuple(n for n in range(1, batch + 1) if batch % n == 0)
    trainer = ComponentConstraint(
        streams=_trains_parts(config),
        even=False,
        processes=ranks,
        devices_per_process=config.actor.tensor_parallel_size,
    )
    constraints = Constraints(
        items=config.rollout.sequences,
        group_size=group,
        # Training begins with the sequences of a whole global batch, or with all.
        granularities=(batch if _trains_parts(config) else config.rollout.sequences,),
        staleness=staleness,
        components={
            # An engine that runs ahead keeps its weights.
            "rollout": ComponentConstraint(residency="resident" if staleness else None),
            "reward": ComponentConstraint(residency="resident"),
            **dict.fromkeys(_trainers(config), trainer),
        },
    )
    sections = timed_sections(config, _TIMED)
    sections["rollout"].pop("prompts")
    sections["rollout"].pop("max_staleness")
    return PlanningTraits(
        items=config.rollout.sequences,
        constraints=constraints,
        trials=tuple(_trials(config, devices)),
        concurrent=frozenset({"rollout"}),
        packages=("transformers", config.rollout.engine.package),
        sections=sections,
        worst_case=_worst_step(config),
        memory_knobs=_knobs(config),
    )


def _trainers(config: ReasoningConfig) -> list[str]:
    return [name for name in config.components if name not in ("rollout", "reward")]


def _trains_parts(config: ReasoningConfig) -> bool:
    """Whether a global batch is trained on as soon as its sequences are there."""
    return config.actor.trains_in_order and config.algorithm.prepares_parts


def _worst_step(config: ReasoningConfig) -> tuple[str, ...]:
    longest = config.rollout.sampling.max_new_tokens
    found = ("runner.total_steps=1", f"rollout.sampling.min_new_tokens={longest}")
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


def _trials(config: ReasoningConfig, devices: int) -> Iterator[Trial]:
    trainers = _trainers(config)
    for count in device_counts(devices):
        ranks = "0" if config.cluster.runtime == "local" else first_devices(count)
        place = f"{{'rollout,reward': '{first_devices(count)}', '{','.join(trainers)}': '{ranks}'}}"
        for parts in (1, 2, 4):
            if parts > 1 and count not in (1, devices):
                continue
            prompts = config.rollout.prompts // parts
            yield Trial(
                f"{prompts * config.rollout.group_size} sequences on {count} devices",
                (f"cluster.component_placement={place}", f"rollout.prompts={prompts}"),
            )
    if devices > 1:
        half = devices // 2
        ranks = f"{half}" if config.cluster.runtime == "local" else device_span(half, devices)
        place = f"{{'rollout,reward': '{first_devices(half)}', '{','.join(trainers)}': '{ranks}'}}"
        yield Trial(
            "trainers apart, one step ahead",
            (f"cluster.component_placement={place}", "rollout.max_staleness=1"),
        )
    ranks = "0" if config.cluster.runtime == "local" else first_devices(devices)
    place = f"{{'rollout,reward': '{first_devices(devices)}', '{','.join(trainers)}': '{ranks}'}}"
    # An engine that runs ahead keeps its weights.
    leaving = [n for n in config.offloading if n != "rollout" or not config.rollout.max_staleness]
    yield Trial(
        "offloaded while idle",
        (
            f"cluster.component_placement={place}",
            f"cluster.residency={{'{','.join(leaving)}': offload}}",
        ),
    )
