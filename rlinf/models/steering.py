"""A frozen policy that is steered by the noise from which it denoises its actions.

Wagenmaker et al. 2025, "Steering your diffusion policy with latent space reinforcement learning",
https://arxiv.org/abs/2506.15799.

The noise is the action of a small policy: actor and Q functions see it alone, and what the frozen
policy makes of it belongs to the environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.envs.results import ACTION_MASK, TASK_IDS
from rlinf.errors import ConfigError, in_section
from rlinf.models.actor_critic import (
    normalizer_of,
    orthogonal_layer,
    told_tasks,
    with_task,
)
from rlinf.models.cnn import ImageEncoder, image_shape, module_name
from rlinf.models.gaussian import GaussianPolicy
from rlinf.models.policy import (
    ACTIONS,
    RAW_ACTIONS,
    ActionEvaluation,
    ActionSample,
    NoiseSpec,
    Policy,
)
from rlinf.models.soft_actor_critic import QFunctions, SquashedMLPPolicy, register_box
from rlinf.models.steering_config import SteeredConfig
from rlinf.models.vla.preprocessing import square_pixels

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

START = "start"
"""Name of the noise of a policy from which it denoises."""


class CompactEncoder(nn.Module):
    """Pictures, scaled to one size, and states into few features within ±1."""

    def __init__(
        self, config: SteeredConfig, env_spec: EnvSpec, *, generator: torch.Generator
    ) -> None:
        super().__init__()
        self._size, self._tasks = config.image_size, told_tasks(env_spec)
        self.pictures = nn.ModuleDict()
        self._image_keys = tuple(dict.fromkeys(config.image_keys))
        for key in self._image_keys:
            *views, _, _, colours = image_shape(env_spec, key)
            shape = (*views, config.image_size, config.image_size, colours)
            self.pictures[module_name(key)] = ImageEncoder(
                config, shape, key=key, generator=generator
            )
        states = env_spec.observation_shapes.get("states") if config.use_states else None
        self.states: nn.Linear | None = None
        if states is not None:
            layer = nn.Linear(states[0], config.state_features, device="meta")
            self.states = orthogonal_layer(layer, gain=1.0, generator=generator)
        reads = self.states is not None
        self.normalizer = normalizer_of(config, env_spec) if reads else None
        parts = [config.image_features] * len(self.pictures)
        parts += [] if self.states is None else [config.state_features]
        if not parts:
            raise ConfigError(
                "neither pictures nor states are read, so that noise could be chosen by nothing; "
                "name a picture",
                key="model.image_keys",
            )
        self.width = sum(parts) + self._tasks

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, width]."""
        parts = []
        for key in self._image_keys:
            encoder, images = self.pictures[module_name(key)], observations[key]
            views = [images] if images.ndim == 4 else list(images.unbind(1))
            pixels = torch.cat([square_pixels(view, self._size) for view in views], dim=1)
            assert isinstance(encoder, ImageEncoder)
            parts.append(encoder.layers(pixels))
        if self.states is not None:
            states = observations["states"].float()
            if self.normalizer is not None:
                states = self.normalizer(states, observations.get(TASK_IDS))
            parts.append(self.states(states))
        squashed = [torch.tanh(functional.layer_norm(part, part.shape[1:])) for part in parts]
        return with_task(torch.cat(squashed, dim=1), observations, self._tasks)

    def update_normalizer(self, observations: Mapping[str, Tensor]) -> None:
        """Take states [N, D] into the running statistics, where such are kept."""
        if self.normalizer is not None:
            self.normalizer.update(observations["states"].float(), observations.get(TASK_IDS))


class NoisePolicy(SquashedMLPPolicy):
    """Chooses noise, as actions in a box, by a squashed Gaussian on what the encoder says."""

    def __init__(self, config: SteeredConfig, env_spec: EnvSpec, *, noise: EnvSpec, seed: int):
        generator = torch.Generator().manual_seed(seed)
        encoder = CompactEncoder(config, env_spec, generator=generator)
        GaussianPolicy.__init__(
            self, config, noise, feature_dim=encoder.width, value_dim=0, generator=generator
        )
        self.encoder = encoder
        register_box(self, config, noise)

    def encode(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Features [B, width] of the actor, which has no critic beside it."""
        found: Tensor = self.encoder(observations)
        return found

    def update_normalizer(self, forward_inputs: Mapping[str, Tensor]) -> None:
        """See :meth:`Policy.update_normalizer`."""
        self.encoder.update_normalizer(forward_inputs)


class SteeredPolicy(Policy):
    """The actions of a frozen policy, denoised without random steps from noise that another one
    chooses.

    Raw actions are the noise, [B, 1, D] or [B, H, D], within its bound. Log-probs are those of the
    noise, in equal shares over the action dimensions of the environment.
    """

    explores = True

    def __init__(
        self, config: SteeredConfig, env_spec: EnvSpec, *, value_dim: int = 0, seed: int = 0
    ) -> None:
        super().__init__()
        if value_dim:
            raise ConfigError(
                "a steered policy has Q functions and gives no values; nearest: algorithm.type: "
                "dsrl",
                key="model.type",
            )
        self.chunk, self.action_dim = config.num_action_chunks, env_spec.action_dim
        self.value_dim = 0
        with in_section("model.base"):
            self.frozen = config.base.build(env_spec, value_dim=0, seed=seed)
        self.frozen.requires_grad_(False)
        self.base = self.frozen.base
        shape = config.found_noise(self.frozen.noise[START].shape)
        own, noise = of_noise(config, env_spec, shape)
        self.horizon = shape[0]
        self.steering = NoisePolicy(own, env_spec, noise=noise, seed=seed)

    def began_from(self, base: str | None) -> bool:
        """See :meth:`Policy.began_from`."""
        frozen = self.base == self.frozen.base and self.frozen.began_from(base)
        return frozen or super().began_from(base)

    @property
    def noise(self) -> Mapping[str, NoiseSpec]:
        """Of what chooses the noise."""
        return self.steering.noise

    @torch.inference_mode()
    def sample(
        self, observations: Mapping[str, Tensor], noise: Mapping[str, Tensor] | None
    ) -> ActionSample:
        """Act, without gradients; see :meth:`Policy.sample`."""
        chosen = self.steering.sample(observations, noise)
        return self._act(observations, chosen.actions, chosen.log_probs)

    @torch.inference_mode()
    def explore(
        self, observations: Mapping[str, Tensor], noise: Mapping[str, Tensor]
    ) -> ActionSample:
        """Act from noise that is uniform within the bound: the quantiles of what was drawn."""
        steering = self.steering
        uniform = 2.0 * torch.special.ndtr(noise[ACTIONS]) - 1.0
        density = torch.full_like(uniform, -torch.log(torch.tensor(2.0)).item())
        return self._act(observations, steering.centre + steering.radius * uniform, density)

    def _act(
        self, observations: Mapping[str, Tensor], chosen: Tensor, log_probs: Tensor
    ) -> ActionSample:
        start = chosen.expand(-1, self.horizon, -1)
        done = self.frozen.sample(observations, {START: start})
        return ActionSample(done.actions, self._shared_out(log_probs), {RAW_ACTIONS: chosen})

    def _shared_out(self, of_noise: Tensor) -> Tensor:
        """[B, C, A] with the sum of [B, n, D]."""
        total = of_noise.flatten(1).sum(dim=1).reshape(-1, 1, 1)
        return total.expand(-1, self.chunk, self.action_dim) / (self.chunk * self.action_dim)

    def forward(
        self,
        given: Any,
        noise: Tensor | None = None,
        *,
        imitate: bool = False,
        mode: bool = False,
    ) -> Any:
        """As :meth:`SquashedMLPPolicy.forward <rlinf.models.soft_actor_critic.SquashedMLPPolicy>`,
        of the noise: the frozen policy takes no part in training."""
        if noise is None:
            return super().forward(given, imitate=imitate, mode=mode)
        return self.steering.act(given, noise)

    def evaluate_actions(self, forward_inputs: Mapping[str, Tensor]) -> ActionEvaluation:
        """Log-probs and entropy of stored noise; see the base class."""
        found = self.steering.evaluate_actions(forward_inputs)
        log_probs, entropy = (self._shared_out(e) for e in (found.log_probs, found.entropy))
        return ActionEvaluation(log_probs=log_probs, values=found.values, entropy=entropy)

    def value(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, 0]."""
        return self.steering.value(observations)

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """None."""
        return iter(())

    def repeated_layers(self) -> list[nn.Module]:
        """Those of the frozen policy."""
        return self.frozen.repeated_layers()

    def update_normalizer(self, forward_inputs: Mapping[str, Tensor]) -> None:
        """Of what chooses noise; the frozen policy keeps its own."""
        self.steering.update_normalizer(forward_inputs)


class NoiseQFunctions(QFunctions):
    """H value functions of what is seen and of chosen noise, behind an encoder of their own."""

    def __init__(self, config: SteeredConfig, env_spec: EnvSpec, *, seed: int = 0) -> None:
        nn.Module.__init__(self)
        generator = torch.Generator().manual_seed(seed)
        shape = config.noise_shape
        if shape is None:  # no policy was built of this section yet
            with in_section("model.base"):
                shape = config.base.build(env_spec, value_dim=0, seed=seed).noise[START].shape
        own, noise = of_noise(config, env_spec, shape)
        register_box(self, own, noise)
        self.normalizer = None
        self.encoder = CompactEncoder(own, env_spec, generator=generator)
        numbers = own.num_action_chunks * noise.action_dim
        self._add_functions(own, self.encoder.width + numbers, generator)

    def encode(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[N, width]."""
        found: Tensor = self.encoder(observations)
        return found

    def update_normalizer(self, observations: Mapping[str, Tensor]) -> None:
        """Take states [N, D] into the running statistics."""
        self.encoder.update_normalizer(observations)


def of_noise(
    config: SteeredConfig, env_spec: EnvSpec, shape: tuple[int, ...]
) -> tuple[SteeredConfig, EnvSpec]:
    """The section and the environment as what chooses noise sees them: its actions are vectors of
    noise, of a frozen policy that denoises from ``shape`` [H, D]."""
    if ACTION_MASK in env_spec.observation_shapes:
        raise ConfigError(
            "environments with actions of different dimensions have no noise in common; give each "
            "a run of its own",
            key="env.train",
        )
    bound, (horizon, dim) = config.noise_bound, shape
    own = config.model_copy(update={"num_action_chunks": 1 if config.noise == "one" else horizon})
    low, high = (-bound,) * dim, (bound,) * dim
    noise = replace(env_spec, action_dim=dim, action_low=low, action_high=high)
    return own, noise
