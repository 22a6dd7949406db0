"""Policies that denoise actions by flow matching, from one pass over pictures and text.

Random steps are those of πRL (https://arxiv.org/abs/2510.25889).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from rlinf.errors import ConfigError
from rlinf.models.denoising import POINT, POINT_TIME, FlowPoints, TargetSpace
from rlinf.models.guidance import guided_velocity
from rlinf.models.policy import RAW_ACTIONS, ActionSample, NoiseSpec, owned, warn_of_policy
from rlinf.models.vla.config import FlowConfig
from rlinf.models.vla.denoising_policy import DenoisingPolicy
from rlinf.models.vla.flow_matching import (
    NoiseHead,
    Spread,
    noisy_actions,
    spread_of,
    squashed_std,
    training_time,
    transition,
    transition_weights,
)
from rlinf.models.vla.instructions import refuse_unknown
from rlinf.models.vla.preprocessing import square_pixels
from rlinf.models.vla.transformer import Prefix

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

log = logging.getLogger(__name__)


class FlowPolicy(DenoisingPolicy):
    """Reads pictures, an instruction and the state once, and denoises a chunk of actions from that.

    A subclass gives its ``prompts``, the network and three passes of it: ``_network``,
    ``_prefix``, ``_denoise``. The network has ``vision``, ``language`` and ``expert``, each with
    ``layers``, and its ``size``.
    """

    _config: FlowConfig
    _needs_views: ClassVar = False
    """Whether another number of views than it was trained on is refused, as none is masked."""
    _centred: bool = True
    """Whether pictures that are not square lie in the middle of one, or at its lower right."""
    prompts: nn.Module
    """From observations to tokens and their mask, both [B, L]."""
    step_weights: Tensor
    """[3, K, 1, 1] float32 of all denoising steps: see :func:`~rlinf.models.vla.flow_matching.
    transition_weights`."""
    step_spread: Tensor
    """[2, 1, K, 1, 1] float32 of the deviations among them."""

    def __init__(
        self, config: FlowConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
    ) -> None:
        super().__init__(config, env_spec, value_dim=value_dim, seed=seed)
        size = self.network.size
        refuse_unknown(self.prompts, size.vocabulary)
        steps = config.denoising_steps
        times = (steps - torch.arange(steps)).float() / steps
        weights = transition_weights(
            config.method, times, steps=steps, noise_level=config.noise_level
        )
        self.register_buffer(
            "step_weights", torch.stack(weights)[..., None, None], persistent=False
        )
        spread = torch.stack(spread_of(weights[-1]))[:, None, :, None, None]
        self.register_buffer("step_spread", spread, persistent=False)
        self.noise_head: NoiseHead | None = None
        if config.method == "flow_noise":
            self.noise_head = NoiseHead(self._hidden_width, size.action_dim, seed=seed)
        if config.train_expert_only:
            self._freeze_readers()
        self.add_values(config, self._feature_width, seed=seed)

    # -- what a model is ----------------------------------------------------------------------

    def _begin(self, config: FlowConfig, env_spec: EnvSpec) -> None:
        if config.path is not None and config.statistics_source == config.path:
            self._check_views(config, self._trained_on(config.path.expanduser()))
        self.prompts = self._prompts(config)

    def _trained_on(self, path: Path) -> Sequence[str]:
        """Pictures that a directory says its model was trained on; empty where it says nothing."""
        features = self._config.settings(key="model.path").get("input_features") or {}
        return [
            name
            for name, each in features.items()
            if each.get("type") == "VISUAL" and "empty_camera" not in name
        ]

    def _check_views(self, config: FlowConfig, trained: Sequence[str]) -> None:
        """Tell of another number of views than a model that is used as it was published was trained
        on; a view that the section leaves out by null is known to be."""
        given = len(self.views) + config.cameras.count(None)
        if not trained or given == len(trained):
            return
        told = (
            f"the model in {config.path} was trained on {len(trained)} pictures "
            f"({', '.join(trained)}), and the recipe gives {given}; nearest: name {len(trained)}, "
            "null for one that is left out"
        )
        if self._needs_views:
            raise ConfigError(told, key="model.cameras")
        warn_of_policy(log, "model.cameras: %s", told)

    @abstractmethod
    def _prompts(self, config: FlowConfig) -> nn.Module:
        """From observations to tokens; ConfigError where an instruction has too many of them."""

    @abstractmethod
    def _prefix(
        self, pixels: Sequence[Tensor], tokens: Tensor, mask: Tensor, states: Tensor
    ) -> Prefix:
        """Read pictures, each [B, 3, H, W], tokens of ``mask`` [B, L] and padded states [B, D]."""

    @abstractmethod
    def _denoise(
        self, prefix: Prefix, states: Tensor, x: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Velocity [B, H, A'] float32 at time [B], and hidden states [B, H, W] of the expert."""

    def _pixels(self, view: Tensor) -> Tensor:
        """Pictures [B, H, W, 3] uint8 as they are read, [B, 3, H', W']."""
        return square_pixels(view, self.network.size.image, centred=self._centred)

    def _freeze_readers(self) -> None:
        """Leave what reads as it is."""
        for part in (self.network.vision, self.network.language):
            part.requires_grad_(False)

    @property
    def _hidden_width(self) -> int:
        """Width of the hidden states that :meth:`_denoise` gives."""
        width: int = self.network.size.expert.width
        return width

    @property
    def _feature_width(self) -> int:
        """Width of what values are read from."""
        if self._values_from == "expert":
            return self._hidden_width
        width: int = self.network.size.language.width
        return width

    @property
    def _values_from(self) -> str:
        """What values are read from, see :attr:`FlowConfig.value_from`."""
        return self._config.value_from or "expert"

    def _tokens(self, observations: Mapping[str, Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of a prompt and their mask, [B, L], with normalised states [B, D]."""
        tokens, mask = self.prompts(observations)
        return tokens, mask

    def _features(self, prefix: Prefix, states: Tensor) -> Tensor:
        """[B, W] that values are read from: of what was read, or what the expert makes of no action
        at all at the noise end, so that they depend on the observation alone."""
        if self._values_from != "expert":
            return prefix.feature(self._values_from)
        size = self.network.size
        blank = states.new_zeros(len(states), size.horizon, size.action_dim)
        return self._denoise(prefix, states, blank, self._time(0, blank))[1].mean(1)

    @property
    def _told_states(self) -> bool:
        return bool(self._config.told_states)

    # -- passes of the network ----------------------------------------------------------------

    def _read(self, observations: Mapping[str, Tensor]) -> tuple[Prefix, Tensor]:
        """Pictures and text of observations, once for all denoising steps, and padded states."""
        states = self._states(observations)
        tokens, mask = self._tokens(observations, states)
        states = self._padded_states(states)
        pixels = [self._pixels(view) for view in self.pictures_of(observations)]
        return self._prefix(pixels, tokens, mask, states), states

    def _time(self, step: int | Tensor, like: Tensor) -> Tensor:
        """[B] float32, the time 1 − k / K of denoising steps [B], or of one for all rows."""
        steps = self._config.denoising_steps
        if isinstance(step, int):
            return like.new_full((len(like),), (steps - step) / steps, dtype=torch.float32)
        return (steps - step).to(torch.float32) / steps

    def _predicted(
        self, prefix: Prefix, states: Tensor, x: Tensor, step: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Velocity, and hidden states of the expert."""
        return self._denoise(prefix, states, x, self._time(step, x))

    def _random_step(
        self, said: tuple[Tensor, Tensor], x: Tensor, step: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        velocity, hidden = said
        place = slice(step, step + 1) if isinstance(step, int) else step
        of_x, of_velocity, std = self.step_weights[:, place].unbind()
        if self.noise_head is not None:
            std = squashed_std(self.noise_head(hidden).float(), self._config.noise_bounds)
        return torch.addcmul(of_x * x, of_velocity, velocity), std

    @property
    def _spread(self) -> Spread | None:
        if self.noise_head is not None or not self._config.all_random:
            return None
        return Spread(*self.step_spread.unbind())

    def _plain_step(self, said: tuple[Tensor, Tensor], x: Tensor, step: int) -> Tensor:
        """The Euler step of the ODE."""
        return torch.sub(x, said[0], alpha=1.0 / self._config.denoising_steps)

    def _values(self, prefix: Prefix, states: Tensor) -> Tensor:
        """[B, V]."""
        if not self.value_dim:
            return torch.zeros(len(states), 0, device=states.device)
        return self.values_of(self._features(prefix, states))

    # -- randomness ---------------------------------------------------------------------------

    @property
    def _choices(self) -> int:
        config = self._config
        if config.method == "ode":
            return 0
        return config.denoising_steps - int(config.method == "flow_cps")  # its last has no noise

    @torch.no_grad()
    def sample_continuing(
        self, observations: Mapping[str, Tensor], prefix: Tensor, weights: Tensor
    ) -> ActionSample:
        """Denoise by the ODE from 0 a chunk that begins with actions [B, C, A] of the environment,
        as firmly as weights [B, C] say; see :func:`~rlinf.models.guidance.guided_velocity`."""
        read, states = self._read(observations)
        behind = self.horizon - self.chunk
        # Those that follow the chunk count nothing.
        begun = self._to_model(_lengthened(prefix, behind), observations)
        firmly = nn.functional.pad(weights, (0, behind))
        steps, x = self._config.denoising_steps, torch.zeros_like(begun)
        for step in range(steps):
            time = self._time(step, x)

            def velocity(at: Tensor, time: Tensor = time) -> Tensor:
                return self._denoise(read, states, at, time)[0]

            bent = guided_velocity(
                velocity, x=x, time=1.0 - step / steps, prefix=begun, weights=firmly
            )
            x = torch.sub(x, bent, alpha=1.0 / steps)
        actions = self._to_env(x, observations)
        return ActionSample(actions, torch.zeros_like(actions), {})

    # -- supervised learning ------------------------------------------------------------------

    @property
    def imitation_noise(self) -> Mapping[str, NoiseSpec]:
        """The noise that actions come from, and the time at which the velocity is asked for."""
        chain = NoiseSpec((self.horizon, self.network.size.action_dim))
        return {"noise": chain, "time": NoiseSpec((), "uniform")}

    def _training_time(self, uniform: Tensor) -> Tensor:
        """Times at which is learned, from uniform numbers in [0, 1)."""
        return training_time(uniform)

    def imitation_errors(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N, H, A] squared errors of the velocity (flow matching, arXiv 2410.24164, eq. 1)."""
        prefix, states = self._read(inputs)
        actions = self._to_model(inputs[RAW_ACTIONS], inputs)
        time = self._training_time(inputs["time"])
        x, wanted = noisy_actions(actions, inputs["noise"], time)
        velocity, _ = self._denoise(prefix, states, x, time)
        return self._in_env((velocity - wanted).square())

    # -- the noising of what was done ---------------------------------------------------------

    def forward(
        self, batch: Any, *, imitate: bool = False, mode: bool = False, velocity: bool = False
    ) -> Any:
        """See :meth:`Policy.forward`; with ``velocity`` :meth:`velocity` at the points of a
        batch."""
        if velocity:
            return owned(self.velocity(batch.inputs))
        return super().forward(batch, imitate=imitate, mode=mode)

    def velocity(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """See :meth:`~rlinf.models.denoising.Denoising.velocity`."""
        prefix, states = self._read(inputs)
        velocity, _ = self._denoise(prefix, states, inputs[POINT], inputs[POINT_TIME])
        return self._of_env(velocity)

    def points(
        self, inputs: Mapping[str, Tensor], *, target: TargetSpace, resampled: bool
    ) -> FlowPoints:
        """See :meth:`~rlinf.models.denoising.Denoising.points`."""
        config, chain, step = self._config, inputs["chain"], inputs.get("step_index")
        whole, steps = step is None, config.denoising_steps
        done = chain[:, -1] if whole else inputs["denoised"]
        if step is None or resampled:
            step = (inputs["time"] * steps).long().clamp(max=steps - 1)
        rows, time = torch.arange(len(chain), device=chain.device), self._time(step, chain)
        if resampled:
            x, wanted = noisy_actions(done, inputs["noise"], time)
            after = x
        else:
            x, after = (chain[rows, step + n] if whole else chain[:, n] for n in (0, 1))
            wanted = (x - done) / time.reshape(-1, 1, 1)
        moved = partial(
            transition, config.method, time=time, steps=steps, noise_level=config.noise_level
        )
        mean, std = moved(x=x, velocity=torch.zeros_like(x))
        scale = time
        if target == "xnext":  # the mean of the next step is linear in the velocity
            slope = moved(x=torch.zeros_like(x), velocity=torch.ones_like(x))[0]
            wanted, scale = (after - mean) / slope, slope[:, 0, 0].abs()
        return FlowPoints(x, time, self._of_env(wanted), scale, std[:, 0, 0])

    # -- training -----------------------------------------------------------------------------

    def repeated_layers(self) -> list[nn.Module]:
        """Layers of all three transformers."""
        parts = (self.network.vision, self.network.language, self.network.expert)
        return [layer for part in parts for layer in part.layers]

    def trained_beside_adapters(self) -> Iterator[nn.Parameter]:
        """What begins afresh: the value head and the deviation of Flow-Noise."""
        yield from self.value_parameters()
        if self.noise_head is not None:
            yield from self.noise_head.parameters()


def _lengthened(actions: Tensor, count: int) -> Tensor:
    """Actions [B, C, A] with the last one repeated so often."""
    return torch.cat([actions, actions[:, -1:].expand(-1, count, -1)], dim=1)
