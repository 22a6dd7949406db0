"""Diffusion policy, from a directory as lerobot publishes it or of a small random network.

Random denoising steps are Gaussian, and so a chain of them has a log-prob by which it is trained
(Ren et al. 2024, DPPO, arXiv 2409.00588); how that is done is said in
:mod:`rlinf.models.vla.denoising_policy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rlinf.envs.observation_names import earlier
from rlinf.errors import ConfigError
from rlinf.models.policy import RAW_ACTIONS, NoiseSpec
from rlinf.models.visuomotor.config import DiffusionConfig
from rlinf.models.visuomotor.noise_schedule import (
    Prediction,
    both_ends,
    kept_shares,
    mixed,
    posterior,
)
from rlinf.models.visuomotor.policy import VisuomotorPolicy
from rlinf.models.visuomotor.published import VisuomotorFiles, stages_of
from rlinf.models.visuomotor.resnet import ResNetSize
from rlinf.models.visuomotor.unet import DiffusionNetwork, DiffusionSize
from rlinf.models.vla.denoising_policy import DenoisingPolicy
from rlinf.models.vla.loading import NameLayout, Translated
from rlinf.models.vla.statistics_files import BUFFERS, NORMALISERS

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

_COUNTS = "num_batches_tracked"
_TIMES = 100  # T of a model of random weights


def _encoder_rules(theirs: str, ours: str) -> tuple[tuple[str, str], ...]:
    """Of one encoder, whose ResNet has numbers for names."""
    net, part = f"{theirs}.backbone", f"{ours}.backbone"
    return (
        *((f"{net}.{'.'.join(['{}'] * deep)}.{_COUNTS}", f"{_COUNTS}.{'.'.join(['{}'] * deep)}")
          for deep in (1, 3, 4)),
        (f"{net}.0", f"{part}.conv1"),
        (f"{net}.1", f"{part}.bn1"),
        *((f"{net}.{3 + stage}", f"{part}.layer{stage}") for stage in range(1, 5)),
        (f"{theirs}.pool.pos_grid", "pos_grid"),
        (f"{theirs}.pool", f"{ours}.pool"),
        (f"{theirs}.out", f"{ours}.out"),
    )  # fmt: skip


class _Ends(NamedTuple):
    """Actions and noise that a step lies between, and the shares of actions in it and after it."""

    actions: Tensor
    noise: Tensor
    kept: Tensor
    after: Tensor


class DiffusionPolicy(VisuomotorPolicy, DenoisingPolicy):
    """See the module."""

    _config: DiffusionConfig
    network: DiffusionNetwork
    without_random_steps = ("ddim", "ddpm")
    kept: Tensor
    layouts = (
        NameLayout(
            "lerobot",
            (
                *NORMALISERS,
                *_encoder_rules("diffusion.rgb_encoder", "rgb_encoder.0"),
                *(
                    rule
                    for view in range(8)
                    for rule in _encoder_rules(
                        f"diffusion.rgb_encoder.{view}", f"rgb_encoder.{view}"
                    )
                ),
                ("diffusion.unet", "unet"),
            ),
            unused=(*BUFFERS, f"{_COUNTS}.", "pos_grid"),
        ),
    )

    def __init__(
        self, config: DiffusionConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
    ) -> None:
        self._shown = env_spec.observation_steps
        super().__init__(config, env_spec, value_dim=value_dim, seed=seed)
        states = ["states"] if self._reads_states else []
        self._read_keys = [*dict.fromkeys(key for key, _ in self.views), *states]
        said: Mapping[str, Any] = {} if self._published is None else self._published.settings
        self.prediction: Prediction = said.get("prediction_type", config.prediction)
        self.clip: float | None = None
        if said.get("clip_sample", True):
            self.clip = said.get("clip_sample_range", 1.0)
        kept = kept_shares(
            said.get("beta_schedule", "squaredcos_cap_v2"),
            said.get("num_train_timesteps", _TIMES),
            first=said.get("beta_start", 1e-4),
            last=said.get("beta_end", 0.02),
        )
        self.register_buffer("kept", kept, persistent=False)
        if config.denoising_steps > len(kept):
            raise ConfigError(
                f"{config.denoising_steps} steps are more than the {len(kept)} times that the "
                f"model was trained with; nearest: {len(kept)}",
                key="model.denoising_steps",
            )
        self.add_values(config, self.network.size.condition, seed=seed)

    # -- what a model is ----------------------------------------------------------------------

    def _published_network(self, found: Translated, published: VisuomotorFiles) -> DiffusionNetwork:
        settings = published.settings
        published.setting("prediction_type", ("epsilon", "sample"))
        published.setting("beta_schedule", ("squaredcos_cap_v2", "linear", "scaled_linear"))
        history = settings.get("n_obs_steps", 2)
        if history > self._shown and not self._config.repeat_observation:
            raise ConfigError(
                f"{published.path} reads {history} successive observations (n_obs_steps), the "
                f"environment shows {self._shown}; nearest: env.train.observation_steps: "
                f"{history}; or repeat_observation: true, which lets the present one stand for "
                "those before it",
                key="repeat_observation",
            )
        self.begin = history - 1
        encoder = "rgb_encoder.0."
        blocks, channels = stages_of(found, f"{encoder}backbone.")
        kind = "frozen" if f"{encoder}backbone.bn1.running_mean" in found.names else "group"
        levels = found.count("unet.down_modules")
        first = "unet.down_modules.0.0."
        down = tuple(
            found.shape(f"unet.down_modules.{level}.0.conv1.block.0.weight")[0]
            for level in range(levels)
        )
        sizes = list(published.pictures.values())
        resized, cropped = settings.get("resize_shape"), settings.get("crop_shape")
        return DiffusionNetwork(
            DiffusionSize(
                backbone=ResNetSize(blocks, channels, kind),  # type: ignore[arg-type]
                views=len(sizes),
                encoders=found.count("rgb_encoder"),
                picture=tuple(cropped or resized or sizes[0]),
                resized=None if resized is None else tuple(resized),
                cropped=cropped is not None,
                key_points=found.shape(f"{encoder}pool.nets.weight")[0],
                history=history,
                horizon=settings.get("horizon", 16),
                action_dim=published.action_dim,
                state_dim=published.state_dim,
                channels=down,
                kernel=found.shape(f"{first}conv1.block.0.weight")[2],
                groups=settings.get("n_groups", 8),
                step_width=found.shape("unet.diffusion_step_encoder.1.weight")[1],
                scales=found.shape(f"{first}cond_encoder.1.weight")[0] == 2 * down[0],
            )
        )

    def _tiny_network(self, action_dim: int, state_dim: int) -> DiffusionNetwork:
        channels = (64, 128)
        smallest = 2 ** (len(channels) - 1)
        horizon = self._config.horizon or -(-self.chunk // smallest) * smallest
        if horizon % smallest:
            raise ConfigError(
                f"{horizon} is no multiple of {smallest}, by which the U-Net divides time; "
                f"nearest: {-(-horizon // smallest) * smallest}",
                key="model.horizon",
            )
        return DiffusionNetwork(
            DiffusionSize(
                backbone=ResNetSize((1, 1, 1), (32, 64, 96), "group"),
                views=len(self.views), encoders=len(self.views), key_points=16, horizon=horizon,
                action_dim=action_dim, state_dim=state_dim, channels=channels, step_width=32,
                history=self._shown,
            )
        )  # fmt: skip

    # -- passes of the network ----------------------------------------------------------------

    def _read(
        self, observations: Mapping[str, Tensor], corner: Tensor | None = None
    ) -> tuple[Tensor]:
        """The condition [B, condition], the oldest step first."""
        history = self.network.size.history
        if history > self._shown:
            return (self._features(observations, corner).repeat(1, history),)
        found = [
            self._features(
                {key: observations[earlier(key, back)] for key in self._read_keys}, corner
            )
            for back in reversed(range(history))
        ]
        return (torch.cat(found, -1),)

    def _features(self, step: Mapping[str, Tensor], corner: Tensor | None) -> Tensor:
        """Of one step [B, condition / history]."""
        return self.network.features(
            self._pixels(self.pictures_of(step)), self._states(step), corner
        )

    def _time(self, step: int | Tensor, like: Tensor) -> Tensor:
        """[B] int64 of 0 to T − 1, ever smaller."""
        stride = len(self.kept) // self._config.denoising_steps
        places = torch.as_tensor(step, device=like.device).expand(len(like))
        return (self._config.denoising_steps - 1 - places) * stride

    def _predicted(self, condition: Tensor, x: Tensor, step: int | Tensor) -> _Ends:
        time, stride = self._time(step, x), len(self.kept) // self._config.denoising_steps
        kept, before = self.kept[time], (time - stride).clamp(min=0)
        after = torch.where(time < stride, 1.0, self.kept[before])
        predicted = self.network.denoise(condition, x, time)
        actions, noise = both_ends(self.prediction, predicted=predicted, x=x, kept=kept)
        if self.clip is not None:
            actions = actions.clamp(-self.clip, self.clip)
        return _Ends(actions, noise, kept, after)

    def _random_step(self, said: _Ends, x: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor]:
        mean, std = posterior(actions=said.actions, x=x, kept=said.kept, after=said.after)
        return mean, std.clamp(min=self._config.min_std)

    def _plain_step(self, said: _Ends, x: Tensor, step: int) -> Tensor:
        return mixed(actions=said.actions, noise=said.noise, kept=said.after)

    def _values(self, *read: Tensor) -> Tensor:
        return self.values_of(read[0])

    @property
    def _choices(self) -> int:
        config = self._config
        if config.method == "ddim":
            return 0
        return config.denoising_steps - int(config.min_std == 0)  # its last is the end itself

    # -- supervised learning ------------------------------------------------------------------

    @property
    def imitation_noise(self) -> Mapping[str, NoiseSpec]:
        """What actions are mixed with, at which time, and what is cut out of pictures."""
        size = self.network.size
        found = {
            "noise": NoiseSpec((size.horizon, size.action_dim)),
            "time": NoiseSpec((), "uniform"),
        }
        said: Mapping[str, Any] = {} if self._published is None else self._published.settings
        if size.cropped and said.get("crop_is_random", True):
            found["corner"] = NoiseSpec((2,), "uniform")
        return found

    def imitation_errors(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N, H, A] squared errors of what is predicted (arXiv 2303.04137, eq. 3)."""
        actions = self._to_model(inputs[RAW_ACTIONS], inputs)
        time = (inputs["time"] * len(self.kept)).long().clamp(max=len(self.kept) - 1)
        x = mixed(actions=actions, noise=inputs["noise"], kept=self.kept[time])
        (condition,) = self._read(inputs, inputs.get("corner"))
        predicted = self.network.denoise(condition, x, time)
        wanted = actions if self.prediction == "sample" else inputs["noise"]
        return self._in_env((predicted - wanted).square())

    # -- training -----------------------------------------------------------------------------

    def repeated_layers(self) -> list[nn.Module]:
        """Blocks of the ResNets and of the U-Net."""
        return list(self.network.layers())
