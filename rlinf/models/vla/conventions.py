"""What a model's actions mean: which of its dimensions an env has, the gripper, and deltas."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class GripperConvention(StrictModel):
    """How a model says that a gripper is open or closed, and how an env does.

    OpenVLA's data sets have 0 closed and 1 open, LIBERO −1 open and 1 closed: ``model_range: [0,
    1]``, ``env_range: [1, -1]``, ``threshold: 0.5``.
    """

    dimension: int = Field(default=6, ge=0)
    """Which dimension of the env's action."""
    model_range: tuple[float, float] = (0.0, 1.0)
    """Two values of the model."""
    env_range: tuple[float, float] = (-1.0, 1.0)
    """The values of the env that they stand for."""
    threshold: float | None = None
    """Only these two values are executed: the second one above this value of the model; null: what
    lies between is scaled."""

    @model_validator(mode="after")
    def _rules(self) -> Self:
        for name in ("model_range", "env_range"):
            first, second = getattr(self, name)
            if first == second:
                raise illegal(name, f"is [{first}, {second}]", hint="two different values")
        return self


class ActionConventions(StrictModel):
    """From a model's actions, un-normalised, to those of an env, and back."""

    dimensions: tuple[int, ...] | None = None
    """The model's dimension for each of the env's; null: the first ones. Where each dimension is a
    token, those of the env in another order."""
    gripper: GripperConvention | None = None
    """The gripper; null: both speak of it alike."""
    delta_dimensions: tuple[int, ...] = ()
    """Dimensions of the env in which the model says how far from the present state, of the same
    dimension, and the env is told where. Statistics are of these distances: rlinf data stats
    --deltas."""

    def model_dim(self, action_dim: int) -> int:
        """D, the least that a model must give for an env with A actions."""
        return max((*(self.dimensions or ()), action_dim - 1)) + 1

    @property
    def other_units(self) -> frozenset[int]:
        """Dimensions of the env in which the numbers of a model mean something else than its."""
        gripper = () if self.gripper is None else (self.gripper.dimension,)
        return frozenset((*gripper, *self.delta_dimensions))

    def check_dimensions(self, action_dim: int, model_dim: int, state_dim: int = 0) -> None:
        """Refuse dimensions that an env with A actions, or a model, lacks; ConfigError."""
        used = self.dimensions
        if used is not None and len(used) != action_dim:
            raise ConfigError(
                f"names {len(used)} dimensions, the environment takes {action_dim}",
                key="dimensions",
            )
        places = {
            "dimensions": (used or (action_dim - 1,), model_dim),
            "gripper.dimension": ((self.gripper.dimension,) if self.gripper else (), action_dim),
            "delta_dimensions": (self.delta_dimensions, min(action_dim, state_dim)),
        }
        for key, (numbers, count) in places.items():
            beyond = [number for number in numbers if not 0 <= number < count]
            if beyond:
                raise ConfigError(
                    f"names dimension {beyond[0]}, there are {count}; nearest: {count - 1}", key=key
                )
            if twice := [number for number, times in Counter(numbers).items() if times > 1]:
                raise ConfigError(f"names dimension {twice[0]} twice", key=key)

    def to_env(self, actions: Tensor, action_dim: int, states: Tensor | None = None) -> Tensor:
        """Actions [..., C, D] of a model to those [..., C, A] of an env.

        Args:
            actions: In the model's units, un-normalised.
            action_dim: A.
            states: [..., S] before the chunk; needed for deltas.
        """
        used = self.dimensions
        found = actions[..., :action_dim] if used is None else actions[..., list(used)]
        if self.gripper is not None:
            held, found = self.gripper, found.clone()
            (low, high), (first, second) = held.model_range, held.env_range
            value = found[..., held.dimension]
            if held.threshold is None:
                value = first + (value - low) / (high - low) * (second - first)
            else:
                above = value > held.threshold
                value = above * second + ~above * first
            found[..., held.dimension] = value
        return self._moved(found, states, 1.0)

    def to_model(self, actions: Tensor, model_dim: int, states: Tensor | None = None) -> Tensor:
        """The inverse, [..., C, A] to [..., C, D]; dimensions that the env lacks are 0."""
        moved = self._moved(actions, states, -1.0)
        if self.gripper is not None:
            held, moved = self.gripper, moved.clone()
            (low, high), (first, second) = held.model_range, held.env_range
            value = moved[..., held.dimension]
            moved[..., held.dimension] = low + (value - first) / (second - first) * (high - low)
        found = moved.new_zeros(*moved.shape[:-1], model_dim)
        found[..., list(self.dimensions or range(moved.shape[-1]))] = moved
        return found

    def of_recorded(self, actions: np.ndarray, model_dim: int, states: np.ndarray | None) -> Tensor:
        """Recorded actions [N, A], each with the states [N, S] it began in, as those [N, D] of a
        model; where deltas have no states to begin at, as they are."""
        import torch

        if self.delta_dimensions and states is None:
            return torch.from_numpy(actions)
        began = None if states is None else torch.from_numpy(states)
        return self.to_model(torch.from_numpy(actions)[:, None], model_dim, began)[:, 0]

    def _moved(self, actions: Tensor, states: Tensor | None, sign: float) -> Tensor:
        if self.delta_dimensions:
            if states is None:
                raise ValueError("actions that are deltas need the states they begin at")
            places = list(self.delta_dimensions)
            actions = actions.clone()  # it may be what training goes on from
            actions[..., places] += sign * states[..., None, places].to(actions)
        return actions
