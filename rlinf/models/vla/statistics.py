"""Normalisation statistics of states and actions, as vision-language-action models publish them.

Such a model reads states and gives actions in normalised units; what these are in the units of a
robot says a file beside its weights (:mod:`rlinf.models.vla.statistics_files`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.envs.spec import refuse_foreign_actions
from rlinf.errors import ConfigError
from rlinf.models.vla.statistics_needs import NEEDS, require_numbers

Method = Literal["mean_std", "quantiles", "bounds", "min_max"]
Kind = Literal["states", "actions"]
_NEAR, _BEYOND = 0.4, 0.1
"""Deviations about the mean that are held against a box where no more is known of values, and the
share of its width by which they may lie beyond. Of values in a box of width w, whose mean is e w
from an edge, the deviation is at most w √(e − e²), and so the mean and 0.4 of it at most 0.04 w
beyond the edge. So nothing is refused that was recorded within the box, or a twentieth of w beyond,
such as a gripper that is open nearly always; a whole deviation may lie 0.2 w beyond."""

_FARTHEST = 20.0
"""In normalised units, where what a model was trained on has deviations of 1, or lies between −1
and 1: no other set of the same robot is that far off, while another unit, degrees for radians or
millimetres for metres, is."""


@dataclass(frozen=True)
class Statistics:
    """Of each dimension of a vector; what a file does not say is None.

    :class:`Units` are made of them.

    Args:
        mean: [D] float32, as are ``std``, ``min``, ``max``, ``q01``, ``q99`` (quantiles 0.01 and
            0.99).
        mask: [D] bool, which dimensions are normalised; None: all.
    """

    mean: Tensor | None = None
    std: Tensor | None = None
    min: Tensor | None = None
    max: Tensor | None = None
    q01: Tensor | None = None
    q99: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        lengths = {len(value) for value in self.given().values()}
        if len(lengths) != 1:
            raise ConfigError(
                f"statistics of vectors of {sorted(lengths)} dimensions: expected one"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Statistics:
        """From lists or arrays by name; other names are left out."""
        known = [field.name for field in fields(cls)]
        found = {name: values[name] for name in known if values.get(name) is not None}
        return cls(**{
            name: torch.as_tensor(
                value, dtype=torch.bool if name == "mask" else torch.float32
            ).flatten()
            for name, value in found.items()
        })  # fmt: skip

    def given(self) -> dict[str, Tensor]:
        """What is known, by name."""
        each = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in each.items() if value is not None}

    @property
    def dim(self) -> int:
        """D."""
        return len(next(iter(self.given().values())))

    @property
    def used(self) -> int:
        """D without the last dimensions that never moved, with which models are padded."""
        widths = [
            getattr(self, second) - getattr(self, first)
            for first, second in (("q01", "q99"), ("min", "max"))
            if getattr(self, first) is not None and getattr(self, second) is not None
        ] or ([] if self.std is None else [self.std])
        moved = [int(width.nonzero().max()) + 1 for width in widths if bool(width.any())]
        return max(moved, default=self.dim)

    # -- what they are used for -----------------------------------------------------------------

    def allows(self, method: Method) -> bool:
        """Whether it knows what a method computes with."""
        return all(getattr(self, name) is not None for name in NEEDS[method])

    def require(self, method: Method, *, of: str, key: str = "statistics") -> None:
        """Refuse, by a ConfigError of ``key``, statistics ``of`` something that lack what a method
        computes with."""
        numbers = {name: value.cpu().numpy() for name, value in self.given().items()}
        require_numbers(numbers, method, of=of, key=key)

    def check_recorded(
        self, actions: Tensor, places: Sequence[int], method: Method, *, key: str
    ) -> None:
        """Refuse recorded actions of another robot, or in other units, than the statistics are of.

        What is compared is the middle 98 % of each dimension with the range that these statistics
        know: the quantiles, the extremes, or three deviations around the mean. As sets of one robot
        differ, the whole width of this range may lie beyond it on either side. Actions that are
        small in it are not refused: a dimension need not be moved.

        Args:
            actions: [N, D] in the units that are normalised.
            places: Dimensions that are looked at.
            method: How they will be normalised.
            key: Of the recipe, for the error.

        Raises:
            ConfigError: Names the dimensions; and two that fit when they are swapped.
        """
        used = list(places)
        first, second = (self.required(name)[used] for name in NEEDS[method])
        low, high = (first - 3 * second, first + 3 * second) if method == "mean_std" else (
            first, second
        )  # fmt: skip
        small, large = _middle(actions[:, used].numpy())
        if self.mask is not None:  # what is not normalised has the range that it has
            same = ~self.mask[used]
            low, high = torch.where(same, small, low), torch.where(same, large, high)
        refuse_foreign_actions(
            small.tolist(), large.tolist(), low.tolist(), high.tolist(),
            what="the recorded actions", key=key,
            known="the statistics of the model", beyond=1.0,
            hint="statistics of this set, as model.statistics, with: rlinf data stats",
        )  # fmt: skip

    def check_read(self, states: np.ndarray, method: Method, *, key: str) -> None:
        """Refuse recorded states that the model would read as numbers far from all that it was
        trained on, as they are of another robot, or in other units, than the statistics are of.

        What is looked at is the middle 98 % of each dimension in normalised units. So a dimension
        that never moved is refused where it is divided by next to nothing alone. States of other
        dimensions are those of another environment, which the policy refuses.

        Args:
            states: [N, D] in the units that are normalised.
            method: How they will be normalised.
            key: Of the recipe, for the error.

        Raises:
            ConfigError: Names the first dimension.
        """
        if states.shape[1] not in {self.dim, self.used} or not self.allows(method):
            return
        given = _middle(states)
        read = Units(self, method).normalize(given)
        near = (read.abs() <= _FARTHEST).all(dim=0)
        if self.mask is not None:  # what is not normalised is read as it is
            near |= ~self.mask[: len(near)]
        if bool(near.all()):
            return
        first, count = int((~near).nonzero()[0]), int((~near).sum())
        (low, high), (small, large) = given[:, first].tolist(), read[:, first].tolist()
        raise ConfigError(
            f"the recorded states: dimension {first} goes from {low:.4g} to {high:.4g}, which the "
            f"model would read as {small:.4g} to {large:.4g} in its normalised units"
            f"{f' (and so {count - 1} more)' if count > 1 else ''}; nearest: statistics of this "
            "set, as model.statistics, with: rlinf data stats",
            key=key,
        )

    def may_be_of(self, actions: Tensor, places: Sequence[int], method: Method) -> bool:
        """Whether what a method computes with is, in some dimensions, nearly that of actions
        [N, D]: a fifth of the width apart, as some episodes may be held out or left out of them."""
        own, used = actions.numpy()[:, places].astype(np.float64), list(places)
        first, second = (self.required(name)[used].cpu().numpy() for name in NEEDS[method])
        if method == "mean_std":
            width, (low, high) = second, (own.mean(0), own.std(0))
        else:
            share = 0.01 if method == "quantiles" else 0.0
            width, (low, high) = second - first, np.quantile(own, [share, 1 - share], axis=0)
        off = np.maximum(abs(low - first), abs(high - second))
        return bool((off <= 0.2 * width).all())

    def required(self, name: str) -> Tensor:
        """[D], what is known by this name; ValueError where it is not."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"the statistics have no {name}")
        return value


class Units(nn.Module):
    """Vectors in the units of a model, and back in those that its statistics are of.

    A method says what x [..., D] becomes:

    - ``mean_std``: (x − μ) / (σ + ε);
    - ``quantiles``: 2 (x − q01) / (q99 − q01 + ε) − 1, where ε is 1e-8 in OpenVLA;
    - ``bounds``: 2 (x − min) / (max − min) − 1, and 0 where a dimension never moved;
    - ``min_max``: the same, but −1 where a dimension never moved, as lerobot has it.

    A vector with fewer dimensions than the statistics uses the first ones; dimensions beyond the
    statistics (padding of a model) pass unchanged, as those do that the mask leaves out.
    """

    offset: Tensor
    """[D], as the others: x becomes (x − offset) / divisor + shift, and comes back as
    (x − shift) · factor + offset."""
    divisor: Tensor
    factor: Tensor
    shift: Tensor

    def __init__(self, statistics: Statistics, method: Method, *, epsilon: float = 1e-6) -> None:
        super().__init__()
        first, second = (statistics.required(name) for name in NEEDS[method])
        offset, shift, still = first, torch.zeros_like(first), torch.zeros_like(first).bool()
        if method == "mean_std":
            factor = second + epsilon
        else:
            still = (second == first) & (method != "quantiles")
            factor = (second - first + (epsilon if method == "quantiles" else 0.0)) / 2
            shift = torch.where(still & (method == "bounds"), 0.0, -1.0)
        # What never moved has no width that it could be divided by: everything becomes 0 there.
        divisor = torch.where(still, torch.inf, factor)
        found = {"offset": offset, "divisor": divisor, "factor": factor, "shift": shift}
        for name, value in found.items():
            if statistics.mask is not None:
                same = 1.0 if name in ("divisor", "factor") else 0.0
                value = torch.where(statistics.mask, value, same)  # noqa: PLW2901 - the rest of it
            self.register_buffer(name, value, persistent=False)

    def normalize(self, x: Tensor) -> Tensor:
        """[..., D] in the units of the model."""
        known, offset, divisor, shift = self._known(x, self.offset, self.divisor, self.shift)
        return _with_rest((known - offset) / divisor + shift, x)

    def unnormalize(self, x: Tensor) -> Tensor:
        """[..., D] in the units of the statistics; the inverse."""
        known, offset, factor, shift = self._known(x, self.offset, self.factor, self.shift)
        return _with_rest(torch.addcmul(offset, known - shift, factor), x)

    def _known(self, x: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        """The dimensions that x and the statistics have both."""
        count, given = len(self.offset), x.shape[-1]
        if given < count:
            return (x, *(part[:given] for part in parts))
        return (x if given == count else x[..., :count], *parts)


def _middle(rows: np.ndarray) -> Tensor:
    """[2, D], between which the middle 98 % of rows [N, D] lie; torch takes 16 million at most."""
    return torch.from_numpy(np.quantile(rows.astype(np.float32), [0.01, 0.99], axis=0)).float()


def _with_rest(found: Tensor, x: Tensor) -> Tensor:
    count = found.shape[-1]
    return found if count == x.shape[-1] else torch.cat([found, x[..., count:]], dim=-1)


@dataclass(frozen=True)
class ModelStatistics:
    """Of what a model reads and gives.

    Args:
        actions: Of the actions.
        states: Of the states; None where the model reads none.
        key: Under which they were found; empty in layouts without keys.
        pictures: Of the colours of pictures from 0 to 1, by the name of their feature, with
            underscores for dots.
    """

    actions: Statistics
    states: Statistics | None = None
    key: str = ""
    pictures: Mapping[str, Statistics] = field(default_factory=dict)

    def to_data(self) -> dict[str, dict[str, list[float]]]:
        """Those of actions and states as JSON has them; :mod:`rlinf.models.vla.statistics_files`
        reads them back to the bit."""
        kinds = {"actions": self.actions, "state": self.states}
        return {
            kind: {name: value.tolist() for name, value in each.given().items()}
            for kind, each in kinds.items()
            if each is not None
        }

    def require(self, units: Mapping[Kind, Method | None], *, key: str) -> None:
        """Refuse, by a ConfigError of ``key``, statistics that lack what they are used by."""
        for kind, method in units.items():
            held: Statistics | None = getattr(self, kind)
            if method is not None and held is None:
                raise ConfigError(
                    f"the statistics have none of {kind}, which the model reads; nearest: those of "
                    "the set itself, with: rlinf data stats",
                    key=key,
                )
            if method is not None and held is not None:
                held.require(method, of=kind, key=key)

    def check(
        self,
        low: Sequence[float],
        high: Sequence[float],
        *,
        dimensions: Sequence[int] | None = None,
        otherwise: Collection[int] = (),
        state_dim: int = 0,
        key: str = "",
    ) -> None:
        """Refuse statistics of the actions of something else than an environment with this box.

        What is compared are the values as they were recorded: quantiles where there are some,
        otherwise the extremes, otherwise what is near the mean.

        Args:
            low: [A] bounds of the environment, as ``high``.
            high: The upper ones.
            dimensions: Which dimension of the model each of the environment's is; None: the same.
            otherwise: Those of the environment whose values are not compared, as they mean
                something else.
            state_dim: D of the environment's states; 0: they are not read.
            key: Of the recipe, for the error.

        Raises:
            ConfigError: Another dimension, or values out of the box; swapped ones are named.
        """
        known = self.actions.given()
        names = ("q01", "q99") if "q01" in known and "q99" in known else ("min", "max")
        count = self.actions.dim if self.actions.dim == len(low) else self.actions.used
        places = list(dimensions or range(count))
        said = f"the statistics{f' `{self.key}`' if self.key else ''}"
        if len(places) != len(low) or max(places) >= self.actions.dim:
            raise ConfigError(
                f"{said} are of {count} action dimensions, the environment takes {len(low)}; "
                "nearest: statistics of its own, with: rlinf data stats",
                key=key,
            )
        states = self.states
        if state_dim and states is not None and state_dim not in {states.dim, states.used}:
            raise ConfigError(
                f"{said} are of {states.used} state dimensions, the environment gives {state_dim}; "
                "nearest: statistics of its own, with: rlinf data stats",
                key=key,
            )
        if set(names) <= known.keys():
            what, ends, beyond = "the statistics", [known[name] for name in names], 0.05
        elif {"mean", "std"} <= known.keys():
            mean, near = known["mean"], _NEAR * known["std"]
            what = f"the statistics, mean ± {_NEAR} std"
            ends, beyond = [mean - near, mean + near], _BEYOND
        else:
            return
        smallest, largest = (each[places].tolist() for each in ends)
        for place in {*otherwise} & {*range(len(low))}:
            smallest[place], largest[place] = low[place], high[place]
        refuse_foreign_actions(smallest, largest, low, high, what=what, key=key, beyond=beyond)
