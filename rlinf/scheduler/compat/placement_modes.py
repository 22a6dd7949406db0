"""Execution modes that follow from where components are placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import combinations
from typing import Any

from rlinf.scheduler.component_placement import ComponentPlacement, read_config
from rlinf.scheduler.errors import PlacementError, PlacementModeError
from rlinf.scheduler.node import NodeTable
from rlinf.scheduler.placement import PackedPlacementStrategy
from rlinf.scheduler.rank_text import format_ranks


class PlacementMode(Enum):
    """How the components of a program share devices."""

    COLLOCATED = auto()  # all take turns on the same devices
    DISAGGREGATED = auto()  # each has devices of its own
    HYBRID = auto()  # any sets of devices
    AUTO = auto()  # as disaggregated, but devices move between components during a step


class RolloutSyncMode(Enum):
    """How rollout workers get the actor's weights."""

    COLLOCATED = auto()  # from the one actor rank on the same device
    DISAGGREGATED = auto()  # from one actor rank to many rollout ranks on other devices


class HybridComponentPlacement(ComponentPlacement):
    """Components on any sets of devices, shared or not, as the configuration says."""

    def __init__(self, config: Any, cluster: NodeTable) -> None:
        super().__init__(config, cluster)
        self._placement_mode = PlacementMode.HYBRID


@dataclass
class _Part:
    """The devices of a component, and over how many of them its model is divided."""

    ranks: list[int]
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """World size, tensor-parallel size, pipeline stages, copies of the model."""
        copies = len(self.ranks) // (self.tensor * self.pipeline * self.context)
        return len(self.ranks), self.tensor, self.pipeline, copies


class ModelParallelComponentPlacement(ComponentPlacement):
    """Components whose models may span devices: all on the same devices, or each on its own.

    ``actor``, ``rollout`` and ``reward`` are required; ``inference`` (or ``actor_inference``),
    ``critic`` and ``critic_inference`` are optional. Every set of devices must be contiguous.
    Of each there are ``NAME_world_size`` (its devices), ``NAME_tp_size`` (devices over which a
    layer is split), ``NAME_pp_size`` (stages of layers) and ``NAME_dp_size`` (copies of the model).

    Collocated (actor and rollout on equal sets), the devices of one rollout engine are
    ``actor_tp / rollout_tp`` apart, so that each holds the actor's shard that it needs; the first
    must be a multiple of the second. An engine with more shards than the actor has finds none ready
    made, as beside an actor that FSDP divides (``actor_tp`` 1): it has neighbouring devices.

    Raises:
        PlacementError: A required component is missing, a set has gaps, or sizes do not fit.
        PlacementModeError: The sets overlap without being equal.
    """

    def __init__(self, config: Any, cluster: NodeTable) -> None:
        super().__init__(config, cluster)
        self._num_devices = cluster.num_accelerators
        self._inference_name = "inference" if "inference" in self.components else "actor_inference"
        self._actor = self._trained("actor")
        self._rollout = _Part(
            self._contiguous("rollout", required=True),
            self._size("rollout.tensor_parallel_size"),
            self._size("rollout.pipeline_parallel_size"),
        )
        self._reward = self._ranks("reward", required=True)
        self._inference = self._inferring(self._inference_name, self._actor)
        self._critic = self._trained("critic")
        self._critic_inference = self._inferring("critic_inference", self._critic)

        mode = self._placement_mode = self._find_mode()
        self.is_collocated = mode is PlacementMode.COLLOCATED
        self.is_disaggregated = mode is PlacementMode.DISAGGREGATED
        self.is_auto = mode is PlacementMode.AUTO
        self.is_pipeline = not self.is_collocated  # components run at the same time
        self.rollout_sync_mode = RolloutSyncMode[
            "COLLOCATED" if self.is_collocated else "DISAGGREGATED"
        ]
        # Whether log-probs, or values, are recomputed on devices of their own.
        self.has_dedicated_inference = self.is_pipeline and bool(self._inference.ranks)
        self.has_dedicated_actor_inference = self.has_dedicated_inference
        self.has_dedicated_critic_inference = (
            self.is_pipeline and bool(self._critic_inference.ranks)
        )  # fmt: skip
        self._check_sizes()
        if self.is_auto and read_config(config, "cluster.use_pre_process_policy", False):
            self._extend_rollout()

        self.reward_world_size = len(self._reward)
        (
            self.actor_world_size,
            self.actor_tp_size,
            self.actor_pp_size,
            self.actor_dp_size,
        ) = self._actor.sizes
        self.rollout_world_size, self.rollout_tp_size, _, self.rollout_dp_size = self._rollout.sizes
        (
            self.inference_world_size,
            self.inference_tp_size,
            self.inference_pp_size,
            self.inference_dp_size,
        ) = self._inference.sizes
        (
            self.critic_world_size,
            self.critic_tp_size,
            self.critic_pp_size,
            self.critic_dp_size,
        ) = self._critic.sizes
        (
            self.critic_inference_world_size,
            self.critic_inference_tp_size,
            self.critic_inference_pp_size,
            self.critic_inference_dp_size,
        ) = self._critic_inference.sizes
        self._place()

    def has_dedicated_inference_for_role(self, role: str) -> bool:
        """Whether ``actor`` or ``critic`` has an inference component of its own."""
        if role == "actor":
            return self.has_dedicated_actor_inference
        if role == "critic":
            return self.has_dedicated_critic_inference
        raise PlacementError(f"Unknown role '{role}': expected 'actor' or 'critic'.")

    # What the configuration says

    def _ranks(self, name: str, *, required: bool = False) -> list[int]:
        ranks = self.get_hardware_ranks(name) if name in self.components else []
        if required and not ranks:
            raise PlacementError(
                f"{name.capitalize()} GPUs must be specified in the component_placement config, "
                f"which places {self.components}. For example '{name}: all'."
            )
        return ranks

    def _contiguous(self, name: str, *, required: bool = False) -> list[int]:
        ranks = self._ranks(name, required=required)
        if ranks and ranks != list(range(ranks[0], ranks[-1] + 1)):
            what = name.replace("_", " ").capitalize()
            raise PlacementError(
                f"{what} GPUs {format_ranks(ranks)} must be continuous, because its model spans "
                f"neighbouring devices. Nearest legal: '{ranks[0]}-{ranks[-1]}'."
            )
        return ranks

    def _trained(self, name: str) -> _Part:
        return _Part(
            self._contiguous(name, required=name == "actor"),
            self._size(f"{name}.model.tensor_model_parallel_size"),
            self._size(f"{name}.model.pipeline_model_parallel_size"),
            self._size(f"{name}.model.context_parallel_size"),
        )

    def _inferring(self, name: str, trained: _Part) -> _Part:
        """An inference model is divided as the trained one by default."""
        return _Part(
            self._contiguous(name),
            self._size(f"{name}.model.tensor_model_parallel_size", trained.tensor),
            self._size(f"{name}.model.pipeline_model_parallel_size", trained.pipeline),
        )

    def _size(self, path: str, default: int = 1) -> int:
        size = read_config(self._config, path, default)
        if not str(size).isdecimal() or int(size) < 1:
            raise PlacementError(
                f"{path} is a number of 1 or more, got {size!r}. Nearest legal: 1."
            )
        return int(size)

    # Which mode

    def _find_mode(self) -> PlacementMode:
        actor, rollout = self._actor.ranks, self._rollout.ranks
        inference, critic_inference = self._inference.ranks, self._critic_inference.ranks
        critic = self._critic.ranks
        if read_config(self._config, "cluster.auto_scheduler", False) and not critic:
            order = [actor, rollout] + ([inference] if inference else [])
            if [rank for ranks in order for rank in ranks] != list(range(self._num_devices)):
                raise PlacementError(
                    "AUTO mode (cluster.auto_scheduler) requires components to be placed in the "
                    "order of actor -> rollout -> inference, each on its own devices, from 0 to "
                    f"the last ({self._num_devices - 1}); got {list(map(format_ranks, order))}."
                )
            return PlacementMode.AUTO
        if actor == rollout:
            for name, ranks in (("Inference", inference), ("Critic inference", critic_inference)):
                if ranks:
                    raise PlacementError(
                        f"{name} GPUs must not be specified in collocated mode: the actor computes "
                        "log-probs itself. Remove the component from component_placement."
                    )
            return PlacementMode.COLLOCATED
        for (one, part), (other, beside) in combinations(self._parts(), 2):
            if set(part.ranks) & set(beside.ranks):
                sets = {name: format_ranks(self._ranks(name)) for name in self.components}
                raise PlacementModeError(
                    f"The placement {sets} is neither collocated (actor and rollout on the same "
                    f"devices) nor disaggregated (each on its own): {one.lower()} and "
                    f"{other.lower()} share devices. Nearest legal: give them equal or separate "
                    "ranges."
                )
        return PlacementMode.DISAGGREGATED

    def _check_sizes(self) -> None:
        for name, part in self._parts():
            if part.ranks and part.tensor > len(part.ranks):
                raise PlacementError(
                    f"{name} TP size {part.tensor} must be less than or equal to {name} world size "
                    f"{len(part.ranks)}: a shard needs a device. Nearest legal: {len(part.ranks)}."
                )
        recomputed = read_config(self._config, "algorithm.recompute_logprobs", True)
        if self.has_dedicated_inference and not recomputed:
            raise PlacementError(
                "algorithm.recompute_logprobs is false, which disables inference, so inference "
                f"GPUs {format_ranks(self._inference.ranks)} must not be specified. Remove the "
                "component or set algorithm.recompute_logprobs to true."
            )

    def _check_copies(self) -> None:
        for name, part in self._parts():
            size = part.tensor * part.pipeline * part.context
            if len(part.ranks) % size:
                nearest = max(1, len(part.ranks) // size) * size
                raise PlacementError(
                    f"{name} world size {len(part.ranks)} must be divisible by the {size} devices "
                    "that one copy of its model takes (tensor x pipeline x context), or some would "
                    f"be left over. Nearest legal: {nearest} devices."
                )

    def _parts(self) -> list[tuple[str, _Part]]:
        return [
            ("Actor", self._actor),
            ("Rollout", self._rollout),
            ("Inference", self._inference),
            ("Critic", self._critic),
            ("Critic inference", self._critic_inference),
        ]

    # Where

    def _extend_rollout(self) -> None:
        actor, shards = self._actor.ranks, self._rollout.tensor
        if len(actor) % shards:
            raise PlacementError(
                f"cluster.use_pre_process_policy puts rollout engines on the actor's {len(actor)} "
                f"devices too, so that number must be divisible by the rollout TP size {shards}."
            )
        self._rollout.ranks = [*actor, *self._rollout.ranks]

    def _place(self) -> None:
        if self.is_collocated:
            devices, stride = self.rollout_tp_size, self._rollout_stride()
        else:
            devices, stride = self.rollout_world_size // max(1, self.rollout_dp_size), 1
        self._check_copies()
        actor = range(self._num_devices) if self.is_auto else self._actor.ranks
        self._placements["actor"] = _packed(actor)
        self._placements["rollout"] = _packed(self._rollout.ranks, devices, stride)
        self._placements["reward"] = _packed(self._reward)
        for name, part in (
            (self._inference_name, self._inference),
            ("critic", self._critic),
            ("critic_inference", self._critic_inference),
        ):
            if part.ranks:
                self._placements[name] = _packed(part.ranks)

    def _rollout_stride(self) -> int:
        actor, rollout = self.actor_tp_size, self.rollout_tp_size
        if actor > rollout and actor % rollout:
            divisors = [n for n in range(1, actor + 1) if actor % n == 0]
            raise PlacementError(
                f"Actor TP size ({actor}) must be divisible by Rollout TP size ({rollout}), so "
                "that each engine finds its shards on its own devices. Nearest legal: "
                f"{min(divisors, key=lambda n: abs(n - rollout))}."
            )
        return max(1, actor // rollout)


def _packed(ranks: Sequence[int], devices: int = 1, stride: int = 1) -> PackedPlacementStrategy:
    return PackedPlacementStrategy(ranks[0], ranks[-1], devices, stride)
