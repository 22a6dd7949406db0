"""One rollout of a batch of environments, immutable and stamped with where it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

_NAMED = ("forward_inputs", "next_observations")
_WITHOUT_TIME = ("env_ids", "bootstrap_values")

NO_EPISODE = -1
"""In place of an episode's number: nothing was played."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """T chunk steps of B environments; row t holds action t and what followed it.

    Flags stand in the last primitive step of a chunk. A row whose ``valid`` is false was spoilt by
    a fault (crash, hang, NaN): the environment was rebuilt, so the next row starts an episode.

    Args:
        forward_inputs: All that is needed to recompute log-probs, each [T, B, ...]: the observation
            before the action and the raw action.
        next_observations: What followed each row, each [T, B, ...] under the names of the
            observations; at the end of an episode its last observation and not the first of the
            next. Empty where nothing is learnt from single transitions, which saves the memory.
        log_probs: [T, B, C, A] float32, under the policy that acted.
        values: [T, B, V] float32; V is 1 (one value per chunk), C (one per primitive step) or 0
            (no critic).
        rewards: [T, B, C] float32.
        terminations: [T, B, C] bool, the episode ended in a state of its own.
        truncations: [T, B, C] bool, the episode was cut by a time limit.
        final_values: [T, B, V] float32, value of the last observation of an episode that ended in
            row t and was reset there, 0 elsewhere.
        bootstrap_values: [B, V] float32, value of the observation after the last row.
        valid: [T, B] bool.
        versions: [T, B] int64, weight version that acted.
        env_ids: [B] int64, global environment numbers.
        episode_ids: [T, B] int64, :data:`NO_EPISODE` in rows that only fill up a joined rollout.
        reset_seeds: [T, B] int64, seed of the episode's initial state.
        final_mask: [T, B] bool, which ``final_values`` are values; None: those that are not 0.

    Raises:
        ValueError: a tensor does not have the shape or dtype above.
    """

    forward_inputs: Mapping[str, Tensor]
    log_probs: Tensor
    values: Tensor
    rewards: Tensor
    terminations: Tensor
    truncations: Tensor
    final_values: Tensor
    bootstrap_values: Tensor
    valid: Tensor
    versions: Tensor
    env_ids: Tensor
    episode_ids: Tensor
    reset_seeds: Tensor
    next_observations: Mapping[str, Tensor] = field(default_factory=dict)
    final_mask: Tensor | None = None

    def __post_init__(self) -> None:
        if self.final_mask is None:
            object.__setattr__(self, "final_mask", (self.final_values != 0).any(dim=-1))
        if self.log_probs.ndim != 4:
            raise ValueError(
                f"log_probs has shape {tuple(self.log_probs.shape)}, expected [T, B, C, A]"
            )
        steps, envs, chunk, _ = self.log_probs.shape
        value_dim = self.values.shape[-1]
        if value_dim not in (0, 1, chunk):
            raise ValueError(
                f"values has {value_dim} values per row; a row holds one value per chunk (1), one "
                f"per primitive step ({chunk}) or none (0)"
            )
        rows, per_value = (steps, envs), (steps, envs, value_dim)
        expected = {
            torch.float32: {
                "log_probs": self.log_probs.shape,
                "values": per_value,
                "rewards": (steps, envs, chunk),
                "final_values": per_value,
                "bootstrap_values": (envs, value_dim),
            },
            torch.bool: {
                "terminations": (steps, envs, chunk),
                "truncations": (steps, envs, chunk),
                "valid": rows,
                "final_mask": rows,
            },
            torch.int64: {
                "env_ids": (envs,),
                "versions": rows,
                "episode_ids": rows,
                "reset_seeds": rows,
            },
        }
        for dtype, shapes in expected.items():
            for name, shape in shapes.items():
                tensor: Tensor = getattr(self, name)
                if tuple(tensor.shape) != tuple(shape):
                    raise ValueError(
                        f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)} "
                        f"(log_probs gives [T, B, C, A] = {tuple(self.log_probs.shape)})"
                    )
                if tensor.dtype != dtype:
                    raise ValueError(f"{name} has dtype {tensor.dtype}, expected {dtype}")
        for group in _NAMED:
            for name, tensor in getattr(self, group).items():
                if tuple(tensor.shape[:2]) != rows:
                    raise ValueError(
                        f"{group}[{name!r}] has shape {tuple(tensor.shape)}, expected "
                        f"[T={steps}, B={envs}, ...]"
                    )

    @property
    def num_steps(self) -> int:
        """T, chunk steps."""
        return self.log_probs.shape[0]

    @property
    def num_envs(self) -> int:
        """B, environments."""
        return self.log_probs.shape[1]

    @property
    def chunk(self) -> int:
        """C, primitive actions per chunk."""
        return self.log_probs.shape[2]

    @property
    def played(self) -> Tensor:
        """[T, B] bool: the row is of an episode, and does not only fill up a joined rollout."""
        return self.episode_ids != NO_EPISODE

    def of_first_row(self, column: Tensor) -> Tensor:
        """[B] of a column [T, B]: what stands in the first row that was played."""
        first = self.played.int().argmax(dim=0, keepdim=True)
        return column.gather(0, first)[0]

    @property
    def dones(self) -> Tensor:
        """[T, B] bool: the episode ended in this row, for whatever reason."""
        return (self.terminations | self.truncations).any(dim=-1)

    def uninterrupted(self) -> Tensor:
        """[T, B] bool: rows whose episode met no fault later in this rollout.

        A fault spoils the whole episode it happened in, so the rows before it are false as well,
        back to the end of the previous episode.
        """
        if bool(self.valid.all()):
            return self.valid.clone()
        dones = self.dones
        intact = torch.empty_like(self.valid)
        spoilt = torch.zeros_like(self.valid[0])
        for step in reversed(range(self.num_steps)):
            spoilt = (spoilt & ~dones[step]) | ~self.valid[step]
            intact[step] = ~spoilt
        return intact

    def with_values(self, values: Tensor) -> Trajectory:
        """The same rollout valued by another critic, as [T, B, V].

        The observations after the last row and after the end of an episode are not kept. Their
        values, where they have one, move by as much as the value of the row before them.
        """
        assert self.final_mask is not None
        shift = (values - self.values)[..., -1:]
        return replace(
            self,
            values=values,
            final_values=torch.where(
                self.final_mask.unsqueeze(-1), self.final_values + shift, self.final_values
            ),
            bootstrap_values=self.bootstrap_values + shift[-1],
        )

    def to(self, device: torch.device | str) -> Trajectory:
        """The same rollout on a device."""
        if self.log_probs.device == torch.device(device):
            return self
        return self.from_tensors({k: t.to(device) for k, t in self.to_tensors().items()})

    def to_tensors(self) -> dict[str, Tensor]:
        """A flat dictionary of tensors; entries of a mapping get its name and a dot as a prefix."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NAMED}
        for group in _NAMED:
            tensors |= {f"{group}.{name}": each for name, each in getattr(self, group).items()}
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Trajectory:
        """The inverse of :meth:`to_tensors`; ValueError for other names or shapes."""
        expected = {each.name for each in fields(cls)} - {*_NAMED, "final_mask"}
        plain: dict[str, Tensor] = {}
        named: dict[str, dict[str, Tensor]] = {group: {} for group in _NAMED}
        for key, tensor in tensors.items():
            group, dot, name = key.partition(".")
            if dot and group in named:
                named[group][name] = tensor
            else:
                plain[key] = tensor
        if plain.keys() - {"final_mask"} != expected:
            raise ValueError(
                f"not a trajectory: missing {sorted(expected - plain.keys())}, "
                f"unknown {sorted(plain.keys() - expected - {'final_mask'})}"
            )
        return cls(**named, **plain)  # type: ignore[arg-type]

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Trajectory:
        """From arrays under the keys of :meth:`to_tensors`, which the tensors share."""
        return cls.from_tensors({key: torch.from_numpy(each) for key, each in arrays.items()})


def concatenate(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Join rollouts of different environments along B, in the order of their global numbers.

    The order does not depend on how the environments were split over workers. A rollout with fewer
    rows than another (one that was not topped up after a fault) gets invalid rows in front.

    Raises:
        ValueError: nothing to join, an environment occurs twice, or C, A, V or the names of
            ``forward_inputs`` or ``next_observations`` differ.
    """
    tensors = _joinable(trajectories)
    env_ids = torch.cat([trajectory.env_ids for trajectory in trajectories])
    order = torch.argsort(env_ids)
    if bool((env_ids[order].diff() == 0).any()):
        raise ValueError(f"an environment occurs in two rollouts: {sorted(env_ids.tolist())}")
    ordered = bool((order == torch.arange(len(order))).all())
    if len(trajectories) == 1 and ordered:
        return trajectories[0]
    rows = max(trajectory.num_steps for trajectory in trajectories)
    joined = {}
    for name in tensors[0]:
        parts = [each[name] for each in tensors]
        dim = 0 if name in _WITHOUT_TIME else 1
        whole = torch.cat([_pad_front(name, part, rows) for part in parts] if dim else parts, dim)
        joined[name] = whole if ordered else whole.index_select(dim, order)
    return Trajectory.from_tensors(joined)


def _joinable(trajectories: Sequence[Trajectory]) -> list[dict[str, Tensor]]:
    """The tensors of rollouts that differ in nothing but T and B."""
    if not trajectories:
        raise ValueError("no rollouts to join")
    first, *others = tensors = [trajectory.to_tensors() for trajectory in trajectories]
    for other in others:
        if other.keys() != first.keys():
            differing = sorted(other.keys() ^ first.keys())
            raise ValueError(f"{differing[0].partition('.')[0]} differ: {', '.join(differing)}")
        for name, tensor in other.items():
            lead = 1 if name in _WITHOUT_TIME else 2
            if tensor.shape[lead:] != first[name].shape[lead:]:
                raise ValueError(
                    f"{name} of one rollout has rows of shape {tuple(tensor.shape[lead:])}, of "
                    f"another {tuple(first[name].shape[lead:])}"
                )
    return tensors


def _pad_front(name: str, tensor: Tensor, rows: int) -> Tensor:
    """Rows in front along T that are not valid and of no episode: zeros, and the version of those
    behind them, which makes no rollout older than it is."""
    missing = rows - tensor.shape[0]
    if not missing:
        return tensor
    if name == "versions":
        filler = tensor[:1].expand(missing, *tensor.shape[1:])
    else:
        value = NO_EPISODE if name == "episode_ids" else 0
        filler = tensor.new_full((missing, *tensor.shape[1:]), value)
    return torch.cat([filler, tensor])
