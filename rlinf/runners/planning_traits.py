"""What planning and profiling must know of a recipe: items, limits, settings to measure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf.config.dump import to_data

if TYPE_CHECKING:
    from rlinf.flow.plan import ComponentPlan, Plan
    from rlinf.flow.planning import Constraints
    from rlinf.runners.embodied_config import EmbodiedConfig
    from rlinf.runners.placed_config import PlacedConfig
    from rlinf.runners.reasoning_config import ReasoningConfig


@dataclass(frozen=True)
class Trial:
    """A setting in which a recipe is measured.

    Args:
        label: What is special about it.
        overrides: Values that replace the recipe's, as on the command line.
    """

    label: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Knob:
    """A key whose smaller values need less memory.

    Args:
        key: The key.
        now: Its value.
    """

    key: str
    now: int

    def smaller(self) -> tuple[int, ...]:
        """Smaller values that may be legal, descending: divisors, and halves of the value."""
        halves = {self.now >> n for n in range(1, self.now.bit_length())}
        divisors = {n for n in range(1, self.now) if self.now % n == 0}
        return tuple(sorted(halves | divisors, reverse=True))


@dataclass(frozen=True)
class PlanningTraits:
    """What planning must know of a recipe.

    Args:
        items: Items of a step: environments or sequences.
        constraints: What its components can do.
        trials: Settings to measure; those that its rules refuse are left out.
        concurrent: Components that serve all items at once.
        packages: Distributions whose version changes times.
        sections: Sections of the recipe that change times, the model left out.
        worst_case: Overrides under which a step needs most memory, and the run is one step long.
        memory_knobs: Keys whose smaller values need less memory, those first that change the
            result of training least.
        pipeline_key: Key that says how many sub-batches of a loop are in flight; empty: none.
    """

    items: int
    constraints: Constraints
    trials: tuple[Trial, ...]
    concurrent: frozenset[str]
    packages: tuple[str, ...]
    sections: Mapping[str, Any]
    worst_case: tuple[str, ...]
    memory_knobs: tuple[Knob, ...]
    pipeline_key: str = ""


# Not among what changes times: seeds, paths, how long a run lasts, what is written. Numbers of
# items and pipeline stages, and placements, are what is measured.
_EMBODIED_TIMED = ("algorithm", "actor", "env", "rollout")
_REASONING_TIMED = (
    "algorithm", "actor", "critic", "data", "reward", "rollout", "warm_start", "weight_sync",
)  # fmt: skip


def embodied_traits(config: EmbodiedConfig) -> PlanningTraits:
    """Of a run in simulators: the items are environments."""
    from rlinf.flow.planning import ComponentConstraint, Constraints

    envs, devices = config.env.num_envs, config.devices
    stages = config.rollout.pipeline_stage_num
    batch = config.actor.global_batch_size
    loop = ComponentConstraint(pipeline_stages=tuple(sorted({1, 2, stages})))
    ranks = tuple(n for n in range(1, batch + 1) if batch % n == 0)
    constraints = Constraints(
        items=envs,
        group_size=config.group_size,
        # The rollout hands its trajectories over at its end.
        granularities=(envs,),
        staleness=config.rollout.max_staleness,
        exchanges={"rollout": config.chunk_steps},
        components={
            "env": loop,
            "rollout": loop,
            # A training phase begins with all trajectories of the rollout.
            "actor": ComponentConstraint(streams=False, even=False, processes=ranks),
        },
    )
    sections = _sections(config, _EMBODIED_TIMED)
    sections["env"].pop("num_envs")
    sections["rollout"].pop("pipeline_stage_num")
    sections["rollout"].pop("max_staleness")
    return PlanningTraits(
        items=envs,
        constraints=constraints,
        trials=tuple(_embodied_trials(envs, devices)),
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


def _embodied_trials(envs: int, devices: int) -> Iterator[Trial]:
    for count in _counts(devices):
        place = f"cluster.component_placement={{'env,rollout,actor': '{_first(count)}'}}"
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
            (
                f"cluster.component_placement={{'env,rollout,actor': '{_first(devices)}'}}",
                "rollout.pipeline_stage_num=2",
            ),
        )
        half = devices // 2
        yield Trial(
            f"{envs} environments, actor apart, one step ahead",
            (
                "cluster.component_placement="
                f"{{'env,rollout': '{_first(half)}', actor: '{_span(half, devices)}'}}",
                "rollout.pipeline_stage_num=1",
                "rollout.max_staleness=1",
            ),
        )
        apart = f"{{env: '{_first(half)}', rollout: '{_span(half, devices)}', actor: '0'}}"
        yield Trial(
            f"{envs} environments, env and rollout apart, 2 pipeline stages",
            (f"cluster.component_placement={apart}", "rollout.pipeline_stage_num=2"),
        )
        yield Trial(
            f"{envs} environments, env and rollout apart",
            (f"cluster.component_placement={apart}", "rollout.pipeline_stage_num=1"),
        )


def reasoning_traits(config: ReasoningConfig) -> PlanningTraits:
    """Of a language model that answers prompts: the items are sequences."""
    from rlinf.flow.planning import ComponentConstraint, Constraints

    devices, group = config.devices, config.rollout.group_size
    one_rank = config.cluster.runtime == "local"
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
        staleness=config.rollout.max_staleness,
        components={
            name: trainer for name in config.components if name not in ("rollout", "reward")
        },
    )
    sections = _sections(config, _REASONING_TIMED)
    sections["rollout"].pop("prompts")
    sections["rollout"].pop("max_staleness")
    return PlanningTraits(
        items=config.rollout.sequences,
        constraints=constraints,
        trials=tuple(_reasoning_trials(config, devices)),
        concurrent=frozenset({"rollout"}),
        packages=("transformers", config.rollout.engine.package),
        sections=sections,
        worst_case=_worst_reasoning_step(config),
        memory_knobs=_reasoning_knobs(config),
    )


def _trains_parts(config: ReasoningConfig) -> bool:
    """Whether a global batch is trained on as soon as its sequences are there."""
    return config.actor.trains_in_order and config.algorithm.prepares_parts


def _worst_reasoning_step(config: ReasoningConfig) -> tuple[str, ...]:
    longest = config.rollout.sampling.max_new_tokens
    found = ("runner.total_steps=1", f"rollout.sampling.min_new_tokens={longest}")
    return found if config.warm_start is None else (*found, "warm_start.steps=2")


def _reasoning_knobs(config: ReasoningConfig) -> tuple[Knob, ...]:
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


def _reasoning_trials(config: ReasoningConfig, devices: int) -> Iterator[Trial]:
    trainers = [name for name in config.components if name not in ("rollout", "reward")]
    for count in _counts(devices):
        ranks = "0" if config.cluster.runtime == "local" else _first(count)
        place = f"{{'rollout,reward': '{_first(count)}', '{','.join(trainers)}': '{ranks}'}}"
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
        ranks = f"{half}" if config.cluster.runtime == "local" else _span(half, devices)
        place = f"{{'rollout,reward': '{_first(half)}', '{','.join(trainers)}': '{ranks}'}}"
        yield Trial(
            "trainers apart, one step ahead",
            (f"cluster.component_placement={place}", "rollout.max_staleness=1"),
        )
    if config.on_accelerators:
        place = f"{{'{','.join(config.components)}': '{_first(devices)}'}}"
        away = f"{{'{','.join(config.offloading)}': offload}}"
        yield Trial(
            "offloaded while idle",
            (f"cluster.component_placement={place}", f"cluster.residency={away}"),
        )


def _counts(devices: int) -> list[int]:
    """Numbers of devices to measure: powers of two, and all."""
    return sorted({devices, *(2**n for n in range(devices.bit_length()) if 2**n <= devices)})


def _first(count: int) -> str:
    return _span(0, count)


def _span(begin: int, end: int) -> str:
    return str(begin) if end == begin + 1 else f"{begin}-{end - 1}"


def _sections(config: PlacedConfig, names: tuple[str, ...]) -> dict[str, Any]:
    data = to_data(config)
    found = {name: data[name] for name in names}
    cluster = data["cluster"]
    found["cluster"] = {
        key: cluster[key] for key in ("runtime", "num_nodes", "cpu_devices_per_node")
    }
    return found


def plan_overrides(traits: PlanningTraits, plan: Plan) -> list[str]:
    """What to write into a recipe, as on the command line, so that it runs under a plan."""
    parts = plan.components.items()
    placement = ", ".join(f'{name}: "{placement_text(part)}"' for name, part in parts)
    found = [f"cluster.component_placement={{{placement}}}"]
    away = [name for name, part in parts if part.residency == "offload"]
    if away:
        found.append(f"cluster.residency={{{', '.join(f'{name}: offload' for name in away)}}}")
    stages = max((part.pipeline_stages for _, part in parts), default=1)
    if traits.pipeline_key:
        found.append(f"{traits.pipeline_key}={stages}")
    return found


def placement_text(part: ComponentPlan) -> str:
    """Devices and processes of a component in the grammar of placements."""
    ranges: list[tuple[int, int]] = []
    for device in part.devices:
        if ranges and device == ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], device + 1)
        else:
            ranges.append((device, device + 1))
    if part.processes == len(part.devices):
        return ",".join(_span(*each) for each in ranges)
    texts, first = [], 0
    for begin, end in ranges:
        count = part.processes * (end - begin) // len(part.devices)
        texts.append(f"{_span(begin, end)}:{_span(first, first + count)}")
        first += count
    return ",".join(texts)
