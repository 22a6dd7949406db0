"""Convolutional policies for image observations, with states beside them where given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlinf.config.nearest import did_you_mean
from rlinf.envs.results import TASK_IDS
from rlinf.errors import ConfigError
from rlinf.models.actor_critic import (
    ActorCriticPolicy,
    normalizer_of,
    orthogonal_layer,
    told_tasks,
    with_task,
)
from rlinf.models.categorical import CategoricalPolicy
from rlinf.models.config import PictureEncoderConfig, PicturePolicyConfig
from rlinf.models.gaussian import GaussianPolicy

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec


class ReadsPictures(ActorCriticPolicy):
    """Images and states as features; before the class that says what the distribution is in the
    order of the bases."""

    values_in_parts = True

    def __init__(
        self, config: PicturePolicyConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        tasks, state_dim = told_tasks(env_spec), _state_dim(config, env_spec)
        own = value_dim > 0 and config.critic_reads == "states"
        distribution: Callable[..., None] = super().__init__  # of the class beside this one
        distribution(
            config,
            env_spec,
            feature_dim=state_dim + config.image_features * len(config.image_keys) + tasks,
            critic_dim=_critic_dim(env_spec) + tasks if own else None,
            value_dim=value_dim,
            generator=generator,
        )
        self._image_keys, self._tasks = config.image_keys, tasks
        self._depth_keys = config.depth_keys
        _require_depths(env_spec, self._depth_keys)
        self._reads_states, self._critic_reads_states = state_dim > 0, own
        self.encoder = self._encoders(config, env_spec, generator)
        separate = value_dim > 0 and not config.shared_encoder
        self.critic_encoder = self._encoders(config, env_spec, generator) if separate else None
        reads_states = self._reads_states or self._critic_reads_states
        self.normalizer = normalizer_of(config, env_spec) if reads_states else None

    def _encoders(
        self, config: PicturePolicyConfig, env_spec: EnvSpec, generator: torch.Generator
    ) -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict(
            {
                module_name(key): ImageEncoder(
                    config,
                    image_shape(env_spec, key),
                    key=key,
                    depth_range=config.depth_range,
                    generator=generator,
                )
                for key in config.image_keys
            }
        )

    def encode(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Features of images [B, (n,) H, W, 3] uint8, of their depths [B, H, W] in metres where
        these are read, and of states [B, D]."""
        return self._features(self.encoder, observations)

    def critic_features(
        self, observations: Mapping[str, Tensor], shared: Tensor | None = None
    ) -> Tensor:
        """The states alone, features by encoders of its own, or those of the actor."""
        if self._critic_reads_states:
            return with_task(self.normalized(observations), observations, self._tasks)
        if self.critic_encoder is not None:
            return self._features(self.critic_encoder, observations)
        return super().critic_features(observations, shared)

    def _features(
        self, encoders: torch.nn.ModuleDict, observations: Mapping[str, Tensor]
    ) -> Tensor:
        parts = []
        for key in self._image_keys:
            depth = observations[self._depth_keys[key]] if self._depth_keys else None
            parts.append(encoders[module_name(key)](observations[key], depth))
        if self._reads_states:
            parts.append(self.normalized(observations))
        return with_task(torch.cat(parts, dim=-1), observations, self._tasks)

    def acts_on(self, observations: Collection[str]) -> tuple[str, ...]:
        """Pictures and depths, which task it is, and states where the actor reads them."""
        read = {*self._image_keys, *self._depth_keys.values(), TASK_IDS}
        read.update(("states",) if self._reads_states else ())
        return tuple(name for name in observations if name in read)

    def critic_state(self) -> set[str]:
        """Statistics of states, too, that the critic alone reads."""
        found = super().critic_state()
        if self._critic_reads_states and not self._reads_states and self.normalizer is not None:
            found.update(f"normalizer.{name}" for name in self.normalizer.state_dict())
        return found

    def value_parameters(self) -> Iterator[torch.nn.Parameter]:
        """Parameters of the critic trunk and of its own encoders."""
        own = () if self.critic_encoder is None else self.critic_encoder.parameters()
        return chain(super().value_parameters(), own)


class CNNPolicy(ReadsPictures, GaussianPolicy):
    """Gaussian actions."""


class CategoricalCNNPolicy(ReadsPictures, CategoricalPolicy):
    """Discrete actions."""


def _state_dim(config: PicturePolicyConfig, env_spec: EnvSpec) -> int:
    shape = env_spec.observation_shapes.get("states", ()) if config.use_states else ()
    return shape[0] if shape else 0


def _critic_dim(env_spec: EnvSpec) -> int:
    shape = env_spec.observation_shapes.get("states")
    if shape is None:
        raise ConfigError(
            "the environment shows no `states` that the critic could read; nearest: pictures, or "
            "let the simulator show them (env.train.options)",
            key="model.critic_reads",
        )
    return shape[0]


class ImageEncoder(torch.nn.Module):
    """Convolutions with ReLU and one linear layer; several views are stacked as channels, and
    behind them depth, 1 from ``depth_range`` metres on, where there is such a range."""

    def __init__(
        self,
        config: PictureEncoderConfig,
        shape: tuple[int, ...],
        *,
        key: str,
        depth_range: float | None = None,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        *views, height, width, colours = shape
        self._depth_range = depth_range
        channels = colours * (views[0] if views else 1) + (depth_range is not None)
        layers: list[torch.nn.Module] = []
        for out, kernel, stride in zip(
            config.channels, config.kernel_sizes, config.strides, strict=True
        ):
            if min(height, width) < kernel:
                raise ConfigError(
                    f"model.kernel_sizes: an image of {shape[-3]} x {shape[-2]} pixels ({key}) "
                    f"has shrunk to {height} x {width} where a kernel of {kernel} reads it; use "
                    "larger images, smaller strides or fewer convolutions"
                )
            convolution = torch.nn.Conv2d(channels, out, kernel, stride, device="meta")
            layers.append(
                orthogonal_layer(convolution, gain=config.hidden_gain, generator=generator)
            )
            layers.append(torch.nn.ReLU())
            channels = out
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        linear = torch.nn.Linear(channels * height * width, config.image_features, device="meta")
        last = orthogonal_layer(linear, gain=config.hidden_gain, generator=generator)
        self.layers = torch.nn.Sequential(*layers, torch.nn.Flatten(), last, torch.nn.ReLU())

    def forward(self, images: Tensor, depth: Tensor | None = None) -> Tensor:
        """[B, (n,) H, W, 3] uint8, with depth [B, H, W] in metres, to [B, image_features]."""
        if images.ndim == 5:
            images = images.permute(0, 2, 3, 1, 4).flatten(3)
        pixels = images.permute(0, 3, 1, 2).to(torch.float32).mul_(1.0 / 255.0)
        if depth is not None and self._depth_range is not None:
            scaled = (depth / self._depth_range).clamp(max=1.0)
            pixels = torch.cat([pixels, scaled.unsqueeze(1)], dim=1)
        features: Tensor = self.layers(pixels)
        return features


def _require_depths(env_spec: EnvSpec, depth_keys: Mapping[str, str]) -> None:
    """Refuse, by a ConfigError, pictures of which the environment does not show the depth."""
    shapes = env_spec.observation_shapes
    for key, depth in depth_keys.items():
        picture = image_shape(env_spec, key)
        if depth not in shapes or shapes[depth] != picture[:-1]:
            raise ConfigError(
                f"the environment shows no `{depth}` of the size of {key} {list(picture)}; "
                "nearest: null, or env.train.options.depth: true of a simulator that has it",
                key="model.depth_range",
            )


def module_name(key: str) -> str:
    """Of the module that reads an observation: names of modules hold no dots."""
    return key.replace(".", "_")


def image_shape(env_spec: EnvSpec, key: str) -> tuple[int, ...]:
    """Of an observation of pictures, [H, W, 3] or [n, H, W, 3]; a ConfigError for another."""
    shapes = env_spec.observation_shapes
    shape = shapes.get(key)
    if shape is None or len(shape) not in (3, 4):
        known = [name for name, each in shapes.items() if len(each) in (3, 4)]
        near = did_you_mean(key, known) or (
            "use mlp for states, or let the environment render images"
        )
        raise ConfigError(
            f"model.image_keys: {key!r} is to be pictures [H, W, 3] or [n, H, W, 3], but the "
            f"environment gives {dict(shapes)}; {near}"
        )
    return tuple(shape)
