"""Rollout worker: the policy's side of an embodied rollout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rlinf.checkpoint.compatibility import check_compatible
from rlinf.data.exchange import ObservationBatch, PolicyBatch
from rlinf.envs.spec import EnvSpec
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, InputStream
from rlinf.models.policy import Policy
from rlinf.models.registry import ModelConfig, build_policy


@dataclass(frozen=True)
class RolloutSetup:
    """What a rollout worker needs to build its policy.

    Args:
        model: Configuration of the policy.
        value_dim: V, values per chunk that the algorithm needs.
        seed: Seed of the exploration noise.
        block_size: Rows per forward pass; None: whatever arrives. A fixed size makes the result
            independent of how environments are split, because a matrix product may round
            differently for another number of rows.
        total_envs: Environments of the whole run; noise is drawn for all of them and sliced, so
            that it does not depend on the split either.
    """

    model: ModelConfig
    value_dim: int
    seed: int
    block_size: int | None
    total_envs: int


_NOISE = "noise"


class RolloutWorker(StageWorker):
    """Answers observations with actions under one version of the weights."""

    def __init__(self, setup: RolloutSetup) -> None:
        super().__init__()
        self._setup = setup
        self._version = -1
        self._policy: Policy

    def start(self, env_spec: EnvSpec) -> None:
        """Build the policy; its weights arrive with the first synchronisation."""
        setup = self._setup
        self._policy = build_policy(
            setup.model, env_spec, value_dim=setup.value_dim, seed=setup.seed
        ).eval()

    def receive_weights(self, sender: str, receivers: int) -> int:
        """Take the weights that the sender's rank 0 broadcasts; returns their version.

        They are applied between rollouts only, so that no action is taken under half of them.
        """
        weights: dict[str, torch.Tensor]
        version: int
        weights, version = self.broadcast(
            None, groups=[(sender, 0), (self._group_name, list(range(receivers)))]
        )
        self._policy.load_state_dict(weights)
        self._version = version
        return version

    def load_weights(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Take weights from a checkpoint, where there is no actor to send them.

        Raises:
            CheckpointError: The weights are of another model.
        """
        check_compatible(self._policy.state_dict(), weights)
        self._policy.load_state_dict(weights)
        self._version = version

    def generate(
        self, observations: InputStream, *, step: int, deterministic: bool = False
    ) -> Iterator[Emit]:
        """Stage: answer every observation batch of one rollout.

        Args:
            observations: Stream of :class:`ObservationBatch`.
            step: Number of the rollout; it chooses the exploration noise.
            deterministic: Whether to take the most likely action, for evaluation.
        """
        for item in observations:
            with torch.inference_mode():
                answer = self._answer(item.payload, step, deterministic)
            yield Emit("actions", item.source, answer)

    def _answer(self, batch: ObservationBatch, step: int, deterministic: bool) -> PolicyBatch:
        inputs = _tensors(batch.observations)
        rows = len(batch.env_ids)
        final_values = torch.zeros(rows, self._policy.value_dim)
        if batch.final_observations is not None:
            # Evaluated among the other rows, so that the number of rows, and with it the rounding,
            # is the same however many episodes ended.
            mask = torch.from_numpy(batch.final_mask)
            full = {key: value.clone() for key, value in inputs.items()}
            for key, value in _tensors(batch.final_observations).items():
                full[key][mask] = value
            final_values[mask] = self._values(full)[mask]
        if not batch.act:
            return PolicyBatch(
                actions=np.empty((0, 0, 0), dtype=np.float32),
                log_probs=torch.empty(0),
                values=self._values(inputs),
                final_values=final_values,
                forward_inputs={},
                version=self._version,
            )
        noise = None if deterministic else self._noise(step, batch)
        samples = [
            self._policy.sample(block, None if noise is None else block.pop(_NOISE))
            for block in self._blocks(inputs if noise is None else {**inputs, _NOISE: noise})
        ]
        return PolicyBatch(
            actions=_join([sample.actions for sample in samples], rows).numpy(),
            log_probs=_join([sample.log_probs for sample in samples], rows),
            values=_join([sample.values for sample in samples], rows),
            final_values=final_values,
            forward_inputs={
                key: _join([sample.forward_inputs[key] for sample in samples], rows)
                for key in samples[0].forward_inputs
                if key not in inputs
            },
            version=self._version,
        )

    def _values(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = len(next(iter(inputs.values())))
        return _join([self._policy.value(block) for block in self._blocks(inputs)], rows)

    def _blocks(self, inputs: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """The rows in blocks of the configured size, the last one filled up with its last row."""
        rows = len(next(iter(inputs.values())))
        size = self._setup.block_size or rows
        for first in range(0, rows, size):
            block = {key: value[first : first + size] for key, value in inputs.items()}
            if rows - first < size:
                missing = size - (rows - first)
                block = {
                    key: torch.cat([value, value[-1:].expand(missing, *value.shape[1:])])
                    for key, value in block.items()
                }
            yield block

    def _noise(self, step: int, batch: ObservationBatch) -> torch.Tensor:
        """[n, C, A] standard normal noise, a function of seed, step, time and environment alone."""
        mixed = np.random.SeedSequence((self._setup.seed, step, batch.time)).generate_state(
            1, np.uint64
        )
        generator = torch.Generator().manual_seed(int(mixed[0] >> np.uint64(1)))
        shape = (self._setup.total_envs, self._policy.chunk, self._policy.action_dim)
        return torch.randn(shape, generator=generator)[torch.from_numpy(batch.env_ids)]


def _tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value) for key, value in arrays.items()}


def _join(parts: list[torch.Tensor], rows: int) -> torch.Tensor:
    """The blocks as one tensor, without the rows that filled up the last one."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole if len(whole) == rows else whole[:rows]
