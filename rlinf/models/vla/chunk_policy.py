"""Policies whose chunk of actions is a table of numbers, in the normalised units of a model."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from rlinf.errors import ConfigError, in_section
from rlinf.models.policy import warn_of_policy
from rlinf.models.vla.policy import VLAPolicy
from rlinf.models.vla.statistics import Kind, Method, ModelStatistics, Statistics, Units

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

log = logging.getLogger(__name__)


class ChunkPolicy(VLAPolicy):
    """Between the units of an environment and those of a network, which gives H actions of A'
    numbers, of which the first C are executed.

    A subclass gives ``_network``, whose ``size`` has ``horizon``, ``action_dim`` and ``state_dim``.
    Its section has ``horizon`` and ``conventions``.
    """

    _config: Any
    begin: int = 0
    """Which of the H actions is the first that is executed."""

    def __init__(
        self, config: Any, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
    ) -> None:
        super().__init__(config, env_spec, value_dim=value_dim, seed=seed)
        self._config = config
        self._begin(config, env_spec)
        self._statistics, self._normalisation = self._read_statistics(config, env_spec)
        self.state_units = self._units_of("states")
        self.action_units = self._units_of("actions")
        self.network = self._network(config, env_spec, seed=seed)
        size = self.network.size
        self.horizon: int = size.horizon
        self._check(config, size)
        self._conventions = config.conventions
        used = config.conventions.dimensions
        self._places = slice(self.action_dim) if used is None else list(used)

    def _begin(self, config: Any, env_spec: EnvSpec) -> None:
        """Make what is small, and may be refused, before the weights are read."""

    @abstractmethod
    def _network(self, config: Any, env_spec: EnvSpec, *, seed: int) -> Any:
        """The network that the section names, or one of random weights."""

    @property
    def _reads_states(self) -> bool:
        """Whether states are read as numbers, padded to the dimensions of the model."""
        return True

    @property
    def _told_states(self) -> bool:
        """Whether statistics of states are needed: read as numbers or otherwise."""
        return self._reads_states

    @property
    def _acts_on_states(self) -> bool:
        """Where they are read, or actions are said as what is to be added to them."""
        moved = bool(self._conventions.delta_dimensions)
        return super()._acts_on_states and (self._told_states or moved)

    def _check(self, config: Any, size: Any) -> None:
        if size.horizon - self.begin < self.chunk:
            raise ConfigError(
                f"{self.chunk} actions are to be executed, the model gives "
                f"{size.horizon - self.begin} at once; nearest: {size.horizon - self.begin}",
                key="model.num_action_chunks",
            )
        if self._reads_states and self.state_dim > size.state_dim:
            raise ConfigError(
                f"the environment's states have {self.state_dim} dimensions, the model reads "
                f"{size.state_dim}; nearest: an environment whose states have {size.state_dim} or "
                "fewer, or that shows none",
                key="model.type",
            )
        known = None if config.path is None else getattr(self._statistics, "states", None)
        if known is not None and not self.state_dim and self._told_states:
            warn_of_policy(
                log,
                "the model in %s was trained with states, and the environment shows none: it takes "
                "them for 0, or is not told them. Nearest: let the environment show them, by its "
                "options",
                config.path,
            )
        with in_section("model.conventions"):
            config.conventions.check_dimensions(self.action_dim, size.action_dim, self.state_dim)

    def _read_statistics(
        self, config: Any, env_spec: EnvSpec
    ) -> tuple[ModelStatistics | None, Mapping[Kind, Method | None]]:
        """Statistics and how they are used. None: the units of the environment are those of the
        model, as its box has no bounds."""
        with in_section("model"):
            found: ModelStatistics | None = config.read_statistics()
            units = config.units
        if found is None:
            known = bool(torch.isfinite(self.action_high - self.action_low).all())
            low, high = self.model_box(config)
            box = ModelStatistics(Statistics(min=low, max=high)) if known else None
            return box, {"actions": "bounds"}
        found = config.prepared(found)
        told = self.state_dim > 0 and self._told_states
        found.check(
            self.action_low.tolist(),
            self.action_high.tolist(),
            dimensions=config.conventions.dimensions,
            otherwise=config.conventions.other_units,
            state_dim=self.state_dim if told else 0,
            key="model.statistics",
        )
        found.require(units if told else {"actions": units["actions"]}, key="model.statistics")
        return found, units

    # -- units --------------------------------------------------------------------------------

    def _units_of(self, kind: Kind) -> Units | None:
        """Of states or actions; None where these are read or given as they are."""
        known, method = getattr(self._statistics, kind, None), self._normalisation.get(kind)
        if known is None or method is None or not known.allows(method):
            return None
        return Units(known, method, epsilon=self._epsilon(method))

    def _epsilon(self, method: Method) -> float:
        """What is added to widths, so that they are not 0."""
        return 1e-6

    def _states(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, D] normalised; [B, 0] where there are none, or the model reads none."""
        if not (self.state_dim and self._told_states):
            first = next(iter(observations.values()))
            return torch.zeros(len(first), 0, device=first.device)
        states = observations["states"].float()
        return states if self.state_units is None else self.state_units.normalize(states)

    def _padded_states(self, states: Tensor) -> Tensor:
        """[B, D] with as many zeros behind as the model has more dimensions."""
        behind = self.network.size.state_dim - states.shape[-1]
        return functional.pad(states, (0, behind)) if behind else states

    def _to_env(self, x: Tensor, observations: Mapping[str, Tensor]) -> Tensor:
        """What the model gave, [B, H, A'], as actions [B, C, A] of the environment."""
        actions = self._executed(x)
        if self.action_units is not None:
            actions = self.action_units.unnormalize(actions)
        found = self._conventions.to_env(actions, self.action_dim, observations.get("states"))
        return self.in_box(found)

    @property
    def imitated(self) -> tuple[int, int]:
        """All H actions."""
        return self.begin, self.horizon - self.begin

    def _to_model(self, actions: Tensor, observations: Mapping[str, Tensor]) -> Tensor:
        """Actions [B, H, A] of the environment as what the model is to give, [B, H, A']."""
        size = self.network.size
        known = size.action_dim if self._statistics is None else self._statistics.actions.dim
        states = observations.get("states")
        found = self._conventions.to_model(actions.float(), known, states)
        if self.action_units is not None:
            found = self.action_units.normalize(found)
        return functional.pad(found, (0, size.action_dim - known))

    def _of_env(self, x: Tensor) -> Tensor:
        """[B, H, A'] of the model cut to what is executed, [B, C, A]."""
        return self._in_env(self._executed(x))

    def _in_env(self, x: Tensor) -> Tensor:
        """[..., A'] of the model cut to the dimensions of the environment, [..., A]."""
        return x[..., self._places]

    def _executed(self, x: Tensor) -> Tensor:
        """[B, C, A'] of [B, H, A']."""
        return x[:, self.begin : self.begin + self.chunk]
