"""Rollout worker: the policy's side of an embodied rollout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlinf.data.exchange import ObservationBatch, PolicyBatch, RolloutValues
from rlinf.envs.spec import EnvSpec
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import Emit, InputStream
from rlinf.models.policy import (
    ACTIONS,
    RAW_ACTIONS,
    ActingThreads,
    ActionSample,
    NoiseSpec,
    Policy,
    draw_noise,
    drawn_in_evaluation,
    of_own_dimensions,
    require_finite,
    told_elsewhere,
)
from rlinf.models.policy_weights import load_travelling, travelling
from rlinf.weight_sync.protocol import Parties, WeightReceiver
from rlinf.workers.config.acting import ActingConfig
from rlinf.workers.context import WorkerContext

_NOISE = "noise."
_NOISE_STEPS = 16
_EVALUATION = 2
"""What sets the random numbers of evaluations apart from those of training; 1 is of a replay."""


class RolloutWorker(StageWorker):
    """Answers observations with actions under one version of the weights."""

    def __init__(self, config: ActingConfig, context: WorkerContext) -> None:
        super().__init__()
        self._config = config
        # Values that are computed while the environments work would only slow them down there.
        self._shares_devices = config.plan.overlap(("env",), ("rollout",))
        self._version = -1
        self._env_spec: EnvSpec
        self._policy: Policy
        self._weights: WeightReceiver[Any]

    def start(self, env_spec: EnvSpec) -> None:
        """Build the policy; its weights arrive with the first synchronisation."""
        config = self._config
        self._env_spec = env_spec
        with told_elsewhere():  # by the actor
            self._policy = config.build_policy(env_spec).eval()
        if not config.evaluation.deterministic:  # refused now, and not when training has ended
            drawn_in_evaluation(self._policy)
        self._policy.to(self.compute_device)
        parties = Parties(sender="actor", receiver="rollout", receivers=self._world_size)
        self._threads = ActingThreads(self._policy)
        targets = travelling(self._policy)
        self._weights = config.weight_sync.build_receiver(self, parties, targets)

    def receive_weights(self) -> int:
        """Take the weights that the actor sends; returns their version.

        They are applied between rollouts only, so that no action is taken under half of them.
        """
        self._version = self._weights.apply(
            lambda weights, _: load_travelling(self._policy, weights)
        )
        return self._version

    def close(self) -> None:
        """Give back what weights are received in."""
        if hasattr(self, "_weights"):
            self._weights.close()

    def load_weights(
        self, weights: dict[str, torch.Tensor], version: int, base: str | None = None
    ) -> None:
        """Take weights from a checkpoint, where there is no actor to send them; ``base`` says what
        they were trained from."""
        load_travelling(self._policy, weights, base=base)
        self._version = version

    def generate(
        self, observations: InputStream, *, step: int, evaluation: bool = False
    ) -> Iterator[Emit]:
        """Stage: answer every observation batch of one rollout.

        ``step`` chooses the exploration noise. In an ``evaluation`` nothing explores, and nothing
        is kept to be trained on.
        """
        memories: dict[int, _Memory] = {}
        # A policy without a critic reads nothing again, and a picture kept is memory of its device.
        keeps = not evaluation and self._policy.value_dim > 0
        noise = _Noise.of(self._config, self._policy, step, evaluation=evaluation)
        at_random = not evaluation and self._config.acts_at_random(step)
        for item in observations:
            batch: ObservationBatch = item.payload
            memory = memories.setdefault(item.source, _Memory())
            answer: PolicyBatch | RolloutValues
            self._threads.choose(len(batch.env_ids))
            with torch.inference_mode():
                seen = self._on_device(batch.observations)
                if keeps:
                    final = batch.final_observations
                    memory.add(seen, batch, None if final is None else self._on_device(final))
                if batch.act:
                    drawn = None if noise is None else noise.rows(batch)
                    if at_random and drawn is not None and not self._policy.explores:
                        answer = self._act_at_random(batch, drawn[ACTIONS])
                    else:
                        how = self._policy.explore if at_random else self._policy.sample
                        answer, values = self._act(seen, drawn, how)
                        if values is not None and keeps:
                            memory.values.append(values.unsqueeze(0))
                else:
                    memory = memories.pop(item.source)
                    answer = self._values_of(memory) if keeps else _no_values(batch)
            yield Emit("actions", item.source, answer)
            if self._policy.values_in_parts and not self._shares_devices:
                self._value_while_waiting(observations, memories)

    def _on_device(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Observations where the policy computes; each crosses once."""
        device = self.compute_device
        return {key: torch.from_numpy(value).to(device) for key, value in arrays.items()}

    def _act(
        self,
        inputs: dict[str, torch.Tensor],
        noise: dict[str, torch.Tensor] | None,
        how: Callable[[Any, Any], ActionSample],
    ) -> tuple[PolicyBatch, torch.Tensor | None]:
        """What the environments are answered, in host memory: they may have no device; and values
        [n, V] of the observations, where the same forward passes give them. ``how`` is the policy's
        way of acting; a RunFailure where it gives no finite actions."""
        rows = len(next(iter(inputs.values())))
        drawn = {
            _NOISE + name: each.to(self.compute_device) for name, each in (noise or {}).items()
        }
        samples = [
            how(block, {name: block.pop(_NOISE + name) for name in noise} if noise else None)
            for block in self._blocks(inputs | drawn)
        ]
        values = [sample.values for sample in samples if sample.values is not None]
        actions = _join([sample.actions for sample in samples], rows).cpu().numpy()
        require_finite(actions, self._policy, inputs, kind=self._config.model.type)
        answer = PolicyBatch(
            actions=actions,
            log_probs=_array(
                of_own_dimensions(_join([sample.log_probs for sample in samples], rows), inputs)
            ),
            forward_inputs={
                key: _array(_join([sample.forward_inputs[key] for sample in samples], rows))
                for key in samples[0].forward_inputs
                if key not in inputs
            },
            version=self._version,
        )
        return answer, _join(values, rows) if values else None

    def _act_at_random(self, batch: ObservationBatch, noise: torch.Tensor) -> PolicyBatch:
        """Uniform actions [n, C, A] in the box: the quantiles of the noise that would have been."""
        low, high = (
            torch.as_tensor(bound, dtype=torch.float32)
            for bound in (self._env_spec.action_low, self._env_spec.action_high)
        )
        actions = low + (high - low) * torch.special.ndtr(noise)
        density = torch.full_like(noise, -math.log(2.0))  # over the box scaled to [−1, 1]
        seen = {name: torch.from_numpy(each) for name, each in batch.observations.items()}
        return PolicyBatch(
            actions=actions.numpy(),
            log_probs=_array(of_own_dimensions(density, seen)),
            forward_inputs={RAW_ACTIONS: actions.numpy()},
            version=self._version,
        )

    @torch.inference_mode()
    def _value_while_waiting(self, observations: InputStream, memories: dict[int, _Memory]) -> None:
        """Values of what was seen, as long as no environment waits for an answer; each is computed
        by itself, then or at the end, so that the result does not depend on the time."""
        while not observations.ready():
            memory = max(memories.values(), key=lambda each: len(each.unvalued), default=None)
            if memory is None or not memory.unvalued:
                return
            memory.values.append(self._values(memory.unvalued[:1]))

    def _values_of(self, memory: _Memory) -> RolloutValues:
        """Values of everything that a sub-batch saw in the rollout."""
        size = 1 if self._policy.values_in_parts else len(memory.observations)
        while memory.unvalued:
            memory.values.append(self._values(memory.unvalued[:size]))
        values = torch.cat(memory.values)
        final_values = torch.zeros_like(values)[1:]
        for time, (mask, final) in memory.finals.items():
            # Among the other rows of its time: the place of a row stays what it was, and with it
            # the rounding.
            full = {key: value.clone() for key, value in memory.observations[time].items()}
            for key, value in final.items():
                full[key][mask] = value
            final_values[time - 1][mask] = self._values([full])[0][mask]
        return RolloutValues(_array(values[:-1]), _array(final_values), _array(values[-1]))

    def _values(self, observations: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """[T, n, V] values of T observations of n rows."""
        inputs = {key: torch.cat([o[key] for o in observations]) for key in observations[0]}
        rows = len(next(iter(inputs.values())))
        values = _join([self._policy.value(block) for block in self._blocks(inputs)], rows)
        return values.view(len(observations), rows // len(observations), self._policy.value_dim)

    def _blocks(self, inputs: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """The rows in blocks of the configured size, the last one filled up with its last row."""
        rows = len(next(iter(inputs.values())))
        size = self._config.rollout.block_size or rows
        for first in range(0, rows, size):
            block = {key: value[first : first + size] for key, value in inputs.items()}
            if rows - first < size:
                missing = size - (rows - first)
                block = {
                    key: torch.cat([value, value[-1:].expand(missing, *value.shape[1:])])
                    for key, value in block.items()
                }
            yield block


@dataclass
class _Memory:
    """What one sub-batch showed during a rollout, for the critic."""

    observations: list[dict[str, torch.Tensor]] = field(default_factory=list)
    finals: dict[int, tuple[torch.Tensor, dict[str, torch.Tensor]]] = field(default_factory=dict)
    values: list[torch.Tensor] = field(default_factory=list)

    @property
    def unvalued(self) -> list[dict[str, torch.Tensor]]:
        """Observations whose values are not known yet."""
        return self.observations[sum(map(len, self.values)) :]

    def add(
        self,
        seen: dict[str, torch.Tensor],
        batch: ObservationBatch,
        final: dict[str, torch.Tensor] | None,
    ) -> None:
        if final is not None:
            mask = torch.from_numpy(batch.final_mask)
            self.finals[len(self.observations)] = (mask, final)
        self.observations.append(seen)


class _Noise:
    """What a policy draws actions with: a function of seed, rollout, time and environment alone.

    It is drawn for all environments of the run and some chunk steps at once, and sliced, so that
    neither the split of the environments nor the order of the exchanges matters.
    """

    def __init__(
        self,
        key: tuple[int, ...],
        num_envs: int,
        specs: Mapping[str, NoiseSpec],
        purpose: tuple[int, ...] = (),
    ) -> None:
        self._key, self._num_envs, self._specs, self._purpose = key, num_envs, specs, purpose
        self._drawn: dict[int, dict[str, torch.Tensor]] = {}

    @classmethod
    def of(
        cls, config: ActingConfig, policy: Policy, step: int, *, evaluation: bool
    ) -> _Noise | None:
        """That of a training step, or of an evaluation: the same in each, and None where the mode
        acts."""
        if not evaluation:
            return cls((config.seed, step), config.env.num_envs, policy.noise)
        played = config.evaluation
        if played.deterministic:
            return None
        return cls((played.seed,), played.num_envs, drawn_in_evaluation(policy), (_EVALUATION,))

    def rows(self, batch: ObservationBatch) -> dict[str, torch.Tensor]:
        """By name [n, ...], noise of a sub-batch at its time."""
        part, time = divmod(batch.time, _NOISE_STEPS)
        if part not in self._drawn:
            sequence = np.random.SeedSequence((*self._key, part), spawn_key=self._purpose)
            seed = sequence.generate_state(1, np.uint64)[0]
            generator = torch.Generator().manual_seed(int(seed >> np.uint64(1)))
            leading = (_NOISE_STEPS, self._num_envs)
            self._drawn[part] = draw_noise(self._specs, leading, generator)
        first = int(batch.env_ids[0])
        rows = slice(first, first + len(batch.env_ids))
        return {name: drawn[time, rows] for name, drawn in self._drawn[part].items()}


def _no_values(last: ObservationBatch) -> RolloutValues:
    """Those of a policy without a critic, V = 0, by the observations after the last action."""
    nothing = np.zeros((last.time, len(last.env_ids), 0), np.float32)
    return RolloutValues(nothing, nothing, nothing.sum(axis=0))


def _array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor in host memory; bfloat16, which numpy has not, as the same numbers in float32."""
    wider = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return wider.cpu().numpy()


def _join(parts: list[torch.Tensor], rows: int) -> torch.Tensor:
    """The blocks as one tensor, without the rows that filled up the last one."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole if len(whole) == rows else whole[:rows]
