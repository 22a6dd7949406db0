"""Rollout and trainer that share devices inside a step: rules, arguments, decisions."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticCustomError

from rlinf.config.component import illegal
from rlinf.config.registry import load_attribute
from rlinf.monitor.decisions import Decision, note_decision

if TYPE_CHECKING:
    from rlinf.flow.executor import Arguments, StepReport
    from rlinf.runners.reasoning_config import ReasoningConfig
    from rlinf.scheduler import Channel

HANDING_OVER = ("rollout", "actor")
"""Components whose workers lease their devices themselves."""

_KEY = "cluster.auto_scheduler"
_PLUGIN = "rlinf.rescale"
"""Loaded for a run that hands devices over, and for no other."""


def trainer_sizes(config: ReasoningConfig) -> tuple[int, ...]:
    """Ranks that the actor can have inside a step: those that divide its global batch."""
    batch = config.global_batch_size
    return tuple(n for n in range(1, config.world_size("actor") + 1) if batch % n == 0)


def rescaling_problems(config: ReasoningConfig) -> Iterator[PydanticCustomError]:
    """What stands against handing devices over, where the recipe asks for it."""
    if not config.cluster.auto_scheduler:
        return
    rollout, actor = (config.plan.components[name] for name in HANDING_OVER)
    if config.cluster.runtime != "ray":
        yield illegal(_KEY, "needs a process for each rank", hint="cluster.runtime: ray")
    shared = rollout.devices == actor.devices and len(actor.devices) > 1
    if not shared or not rollout.processes == actor.processes == len(actor.devices):
        yield illegal(
            _KEY,
            "hands devices over between a rollout worker and an actor rank on each of them",
            hint="place rollout and actor on the same devices, two or more, a process on each",
        )
    if actor.processes and config.actor.order != "length":
        yield illegal(
            "actor.order",
            f"is {config.actor.order}, so that training could not begin before the longest answers",
            hint="order: length and shuffle: false",
        )
    if config.actor.tensor_parallel_size > 1:
        yield illegal("actor.tensor_parallel_size", "does not change in a step", hint="nearest: 1")
    if config.auto_plan is not None:
        yield illegal(
            "cluster.plan",
            f"cannot change a placement inside which {_KEY} hands devices over",
            hint="one of the two",
        )
    if config.rollout.engine.generates_between_steps:
        yield illegal(
            "rollout.engine.asynchronous",
            f"generates between the steps, by whose times {_KEY} decides",
            hint="nearest: false",
        )
    if config.rollout.max_staleness:
        yield illegal(
            _KEY, "cannot be where rollouts run ahead", hint="max_staleness: 0, or leave it out"
        )


def order_problems(config: ReasoningConfig) -> Iterator[PydanticCustomError]:
    """What stands against global batches by length."""
    if config.actor.order != "length":
        return
    if config.algorithm.dynamic_sampling:
        yield illegal(
            "actor.order",
            "needs lengths that are final, but groups are drawn again",
            hint="order: position, or no dynamic_sampling",
        )
    if config.rollout.partial is not None:
        yield illegal(
            "actor.order",
            "needs all answers of a step, but some are carried on",
            hint="order: position",
        )
    if not config.rollout.engine.tells_progress:
        yield illegal(
            "actor.order",
            "needs the length of unfinished answers, which the engine "
            f"{config.rollout.engine.type} does not tell",
            hint="order: position, or the engine hf or vllm",
        )
    if not config.algorithm.prepares_parts:
        yield illegal(
            "actor.order",
            "trains on parts of the rollout, but the algorithm needs all of it first "
            "(a critic, kl_reward_beta, normalize_advantages or recomputed log-probs)",
            hint="order: position",
        )


def rescaled_training() -> Any:
    """What lets the ranks of an actor change; see :class:`WorkerContext`."""
    return load_attribute(f"{_PLUGIN}.training:RescaledTraining")


def open_mailboxes(config: ReasoningConfig) -> list[Channel]:
    """A channel to each rollout worker, through which it is told of others inside a step."""
    from rlinf.scheduler import Channel

    run = uuid.uuid4().hex[:8]
    return [
        Channel.create(f"rollout-{run}/{rank}", host=f"rollout:{rank}")
        for rank in range(config.world_size("rollout"))
    ]


def step_arguments(config: ReasoningConfig, mailboxes: Sequence[Channel]) -> Arguments:
    """Arguments of the stages of a step in which devices are handed over."""
    rollout, sizes = config.rollout, trainer_sizes(config)
    devices = load_attribute(f"{_PLUGIN}.rollout:RolloutDevices")(
        leases=(),
        mailboxes=tuple(mailboxes),
        sizes=load_attribute(f"{_PLUGIN}.leader:RolloutSizes")(
            workers=len(mailboxes),
            positions=rollout.prompts,
            group_size=rollout.group_size,
            global_batches=config.actor.n_minibatches,
            max_new_tokens=rollout.sampling.max_new_tokens,
            capacity=rollout.engine.max_running_requests,
            trainer_sizes=sizes,
        ),
        offload=config.plan.components["rollout"].residency == "offload",
    )
    trainer = load_attribute(f"{_PLUGIN}.training:TrainerDevices")(
        leases=(),
        leader=mailboxes[-1],
        sizes=sizes,
        offload=config.plan.components["actor"].residency == "offload",
    )
    return {"rollout": {"shared": devices}, "actor": {"shared": trainer}}


def note_choices(
    directory: Path, step: int, report: StepReport, choices: Iterable[Mapping[str, Any]]
) -> dict[str, float]:
    """Write down what was decided inside a step, by the trainer and else; returns metrics."""
    parts = report.results("rollout")
    write_choices(directory, step, (*(each for part in parts for each in part.choices), *choices))
    return {"rollout/moved": float(sum(part.moved for part in parts))}


def write_choices(directory: Path, step: int, choices: Iterable[Mapping[str, Any]]) -> None:
    """Append to the decisions of a run what :class:`~rlinf.rescale.choices.DeviceChoice`, as
    plain data, says of a step."""
    for choice in choices:
        decision = Decision(
            step=step,
            what="rescale",
            reason=f"{choice['action']} {choice['count']}: {choice['reason']}",
            cost_seconds=choice["cost_seconds"],
            gain_predicted=choice["gain_seconds"],
            numbers=choice["numbers"],
        )
        note_decision(directory, decision)
