"""Execution modes that follow from where components are placed."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

from rlinf.scheduler.component_placement import ComponentPlacement, read_config
from rlinf.scheduler.errors import PlacementError, PlacementModeError
from rlinf.scheduler.node import ClusterView
from rlinf.scheduler.placement import PackedPlacementStrategy
from rlinf.scheduler.ranks import format_ranks


class PlacementMode(Enum):
    """How the components of a program share devices."""

    COLLOCATED = auto()
    """All take turns on the same devices."""

    DISAGGREGATED = auto()
    """Each has devices of its own."""

    HYBRID = auto()
    """Any sets of devices."""

    AUTO = auto()
    """Each starts on devices of its own, and devices move between them during a step."""


class RolloutSyncMode(Enum):
    """How rollout workers get the actor's weights."""

    COLLOCATED = auto()
    """From the one actor rank on the same device."""

    DISAGGREGATED = auto()
    """From one actor rank to many rollout ranks on other devices."""


class HybridComponentPlacement(ComponentPlacement):
    """Components on any sets of devices, shared or not, as the configuration says."""

    def __init__(self, config: Any, cluster: ClusterView) -> None:
        super().__init__(config, cluster)
        self._placement_mode = PlacementMode.HYBRID


class ModelParallelComponentPlacement(ComponentPlacement):
    """Components whose models may span devices: all on the same devices, or each on its own.

    ``actor``, ``rollout`` and ``reward`` are required; ``inference`` (or ``actor_inference``),
    ``critic`` and ``critic_inference`` are optional. Every set of devices must be contiguous.

    Collocated (actor and rollout on equal sets), the devices of one rollout engine are
    ``actor_tp / rollout_tp`` apart, so that each holds the actor's shard that it needs.

    Raises:
        PlacementError: A required component is missing, a set has gaps, or sizes do not fit.
        PlacementModeError: The sets overlap without being equal.
    """

    def __init__(self, config: Any, cluster: ClusterView) -> None:
        super().__init__(config, cluster)
        self._num_devices = cluster.num_accelerators
        self._inference_name = "inference" if "inference" in self.components else "actor_inference"
        self._actor = self._required("actor")
        self._rollout = self._required("rollout")
        self._reward = self._required("reward")
        self._inference = self._contiguous(self._inference_name)
        self._critic = self._contiguous("critic")
        self._critic_inference = self._contiguous("critic_inference")
        self._placement_mode = self._find_mode()
        self._check_sizes()
        self._place()

    # Which mode

    def _required(self, name: str) -> list[int]:
        ranks = self._ranks(name) if name == "reward" else self._contiguous(name)
        if not ranks:
            raise PlacementError(
                f"{name.capitalize()} GPUs must be specified in the component_placement config, "
                f"which places {self.components}. For example '{name}: all'."
            )
        return ranks

    def _contiguous(self, name: str) -> list[int]:
        ranks = self._ranks(name)
        if ranks and ranks != list(range(ranks[0], ranks[-1] + 1)):
            what = name.replace("_", " ").capitalize()
            raise PlacementError(
                f"{what} GPUs {format_ranks(ranks)} must be continuous, because its model spans "
                f"neighbouring devices. Nearest legal: '{ranks[0]}-{ranks[-1]}'."
            )
        return ranks

    def _ranks(self, name: str) -> list[int]:
        return self.get_hardware_ranks(name) if name in self.components else []

    def _find_mode(self) -> PlacementMode:
        if read_config(self._config, "cluster.auto_scheduler", False) and not self._critic:
            self._check_auto()
            return PlacementMode.AUTO
        if self._actor == self._rollout:
            self._check_no_inference()
            return PlacementMode.COLLOCATED
        if not self._overlaps():
            return PlacementMode.DISAGGREGATED
        sets = {name: format_ranks(self.get_hardware_ranks(name)) for name in self.components}
        raise PlacementModeError(
            f"The placement {sets} is neither collocated (actor and rollout on the same devices) "
            f"nor disaggregated (each on its own): {self._overlaps()[0]} share devices. Nearest "
            "legal: give them equal or separate ranges."
        )

    def _overlaps(self) -> list[str]:
        pairs = [
            ("actor", self._actor, "rollout", self._rollout),
            ("actor", self._actor, "inference", self._inference),
            ("rollout", self._rollout, "inference", self._inference),
            ("critic", self._critic, "actor", self._actor),
            ("critic", self._critic, "rollout", self._rollout),
            ("critic", self._critic, "critic_inference", self._critic_inference),
            ("rollout", self._rollout, "critic_inference", self._critic_inference),
        ]
        return [f"{a} and {b}" for a, ranks, b, others in pairs if set(ranks) & set(others)]

    def _check_auto(self) -> None:
        order = [self._actor, self._rollout] + ([self._inference] if self._inference else [])
        covered = [rank for ranks in order for rank in ranks]
        if covered != list(range(self._num_devices)):
            raise PlacementError(
                "AUTO mode (cluster.auto_scheduler) requires components to be placed in the order "
                "of actor -> rollout -> inference, each on its own devices, from device 0 to the "
                f"last ({self._num_devices - 1}); got {[format_ranks(ranks) for ranks in order]}."
            )

    def _check_no_inference(self) -> None:
        for name, ranks in (
            ("Inference", self._inference),
            ("Critic inference", self._critic_inference),
        ):
            if ranks:
                raise PlacementError(
                    f"{name} GPUs must not be specified in collocated mode: the actor computes "
                    "log-probs itself. Remove the component from component_placement."
                )

    def _check_sizes(self) -> None:
        for name, shards, ranks in (
            ("Actor", self.actor_tp_size, self._actor),
            ("Rollout", self.rollout_tp_size, self._rollout),
            ("Inference", self.inference_tp_size, self._inference),
            ("Critic inference", self.critic_inference_tp_size, self._critic_inference),
        ):
            if ranks and shards > len(ranks):
                raise PlacementError(
                    f"{name} TP size {shards} must be less than or equal to {name} world size "
                    f"{len(ranks)}: a shard needs a device. Nearest legal: {len(ranks)}."
                )
        recomputed = read_config(self._config, "algorithm.recompute_logprobs", True)
        if self.is_pipeline and self._inference and not recomputed:
            raise PlacementError(
                "algorithm.recompute_logprobs is false, which disables inference, so inference "
                f"GPUs {format_ranks(self._inference)} must not be specified. Remove the component "
                "or set algorithm.recompute_logprobs to true."
            )

    # Where

    def _place(self) -> None:
        actor: Sequence[int] = self._actor
        if self.is_auto:
            actor = range(self._num_devices)
            if read_config(self._config, "cluster.use_pre_process_policy", False):
                self._extend_rollout()
        stride = self._rollout_stride() if self.is_collocated else 1
        devices = self.rollout_tp_size
        if not self.is_collocated:
            devices = len(self._rollout) // max(1, self.rollout_dp_size)
        self._placements["actor"] = _packed(actor)
        self._placements["rollout"] = _packed(self._rollout, devices, stride)
        self._placements["reward"] = _packed(self._reward)
        for name, ranks in (
            (self._inference_name, self._inference),
            ("critic", self._critic),
            ("critic_inference", self._critic_inference),
        ):
            if ranks:
                self._placements[name] = _packed(ranks)

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

    def _extend_rollout(self) -> None:
        if len(self._actor) % self.rollout_tp_size:
            raise PlacementError(
                f"cluster.use_pre_process_policy puts rollout engines on the actor's "
                f"{len(self._actor)} devices too, so that number must be divisible by the rollout "
                f"TP size {self.rollout_tp_size}."
            )
        self._rollout = [*self._actor, *self._rollout]

    # What follows

    @property
    def is_collocated(self) -> bool:
        """Whether actor and rollout take turns on the same devices."""
        return self._placement_mode is PlacementMode.COLLOCATED

    @property
    def is_disaggregated(self) -> bool:
        """Whether each component has its own devices."""
        return self._placement_mode is PlacementMode.DISAGGREGATED

    @property
    def is_auto(self) -> bool:
        """Whether devices move between components during a step."""
        return self._placement_mode is PlacementMode.AUTO

    @property
    def is_pipeline(self) -> bool:
        """Whether components run at the same time."""
        return self.is_disaggregated or self.is_auto

    @property
    def rollout_sync_mode(self) -> RolloutSyncMode:
        """How rollout workers get weights."""
        return RolloutSyncMode.COLLOCATED if self.is_collocated else RolloutSyncMode.DISAGGREGATED

    @property
    def has_dedicated_inference(self) -> bool:
        """Whether log-probs of the actor are recomputed on devices of their own."""
        return self.is_pipeline and bool(self._inference)

    @property
    def has_dedicated_actor_inference(self) -> bool:
        """The same as :attr:`has_dedicated_inference`."""
        return self.has_dedicated_inference

    @property
    def has_dedicated_critic_inference(self) -> bool:
        """Whether values are computed on devices of their own."""
        return self.is_pipeline and bool(self._critic_inference)

    def has_dedicated_inference_for_role(self, role: str) -> bool:
        """Whether ``actor`` or ``critic`` has an inference component of its own.

        Raises:
            PlacementError: Another role.
        """
        if role == "actor":
            return self.has_dedicated_actor_inference
        if role == "critic":
            return self.has_dedicated_critic_inference
        raise PlacementError(f"Unknown role '{role}': expected 'actor' or 'critic'.")

    @property
    def actor_world_size(self) -> int:
        """Devices of the actor."""
        return len(self._actor)

    @property
    def rollout_world_size(self) -> int:
        """Devices of the rollout."""
        return len(self._rollout)

    @property
    def inference_world_size(self) -> int:
        """Devices of the actor's inference."""
        return len(self._inference)

    @property
    def reward_world_size(self) -> int:
        """Devices of the reward."""
        return len(self._reward)

    @property
    def critic_world_size(self) -> int:
        """Devices of the critic."""
        return len(self._critic)

    @property
    def critic_inference_world_size(self) -> int:
        """Devices of the critic's inference."""
        return len(self._critic_inference)

    @property
    def actor_tp_size(self) -> int:
        """Devices over which a layer of the actor is split."""
        return self._size("actor.model.tensor_model_parallel_size")

    @property
    def actor_pp_size(self) -> int:
        """Stages over which the layers of the actor are split."""
        return self._size("actor.model.pipeline_model_parallel_size")

    @property
    def actor_dp_size(self) -> int:
        """Copies of the actor."""
        context = self._size("actor.model.context_parallel_size")
        return self.actor_world_size // (self.actor_tp_size * self.actor_pp_size * context)

    @property
    def rollout_tp_size(self) -> int:
        """Devices over which a layer of a rollout engine is split."""
        return self._size("rollout.tensor_parallel_size")

    @property
    def rollout_dp_size(self) -> int:
        """Number of rollout engines."""
        stages = self._size("rollout.pipeline_parallel_size")
        return self.rollout_world_size // (self.rollout_tp_size * stages)

    @property
    def inference_tp_size(self) -> int:
        """Devices over which a layer of the inference model is split; the actor's by default."""
        path = f"{self._inference_name}.model.tensor_model_parallel_size"
        return self._size(path, self.actor_tp_size)

    @property
    def inference_pp_size(self) -> int:
        """Stages of the inference model; the actor's by default."""
        path = f"{self._inference_name}.model.pipeline_model_parallel_size"
        return self._size(path, self.actor_pp_size)

    @property
    def inference_dp_size(self) -> int:
        """Copies of the inference model."""
        return self.inference_world_size // (self.inference_tp_size * self.inference_pp_size)

    @property
    def critic_tp_size(self) -> int:
        """Devices over which a layer of the critic is split."""
        return self._size("critic.model.tensor_model_parallel_size")

    @property
    def critic_pp_size(self) -> int:
        """Stages over which the layers of the critic are split."""
        return self._size("critic.model.pipeline_model_parallel_size")

    @property
    def critic_dp_size(self) -> int:
        """Copies of the critic."""
        context = self._size("critic.model.context_parallel_size")
        return self.critic_world_size // (self.critic_tp_size * self.critic_pp_size * context)

    @property
    def critic_inference_tp_size(self) -> int:
        """Devices over which a layer of the critic's inference is split; default the critic's."""
        path = "critic_inference.model.tensor_model_parallel_size"
        return self._size(path, self.critic_tp_size)

    @property
    def critic_inference_pp_size(self) -> int:
        """Stages of the critic's inference; the critic's by default."""
        path = "critic_inference.model.pipeline_model_parallel_size"
        return self._size(path, self.critic_pp_size)

    @property
    def critic_inference_dp_size(self) -> int:
        """Copies of the critic's inference model."""
        shards = self.critic_inference_tp_size * self.critic_inference_pp_size
        return self.critic_inference_world_size // shards

    def _size(self, path: str, default: int = 1) -> int:
        return int(read_config(self._config, path, default))


def _packed(ranks: Sequence[int], devices: int = 1, stride: int = 1) -> PackedPlacementStrategy:
    return PackedPlacementStrategy(ranks[0], ranks[-1], devices, stride)
