"""ACT as a policy, from a directory as lerobot publishes it or of a small random network.

The network gives actions, not a distribution. Reinforcement learning explores by a Gaussian around
them whose deviation is a parameter of its own; evaluation and supervised training know nothing of
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlinf.models.gaussian import gaussian_entropy, gaussian_log_prob
from rlinf.models.policy import (
    ACTIONS,
    RAW_ACTIONS,
    RECORDED,
    ActionEvaluation,
    ActionSample,
    NoiseSpec,
)
from rlinf.models.visuomotor.act import ACTNetwork, ACTSize
from rlinf.models.visuomotor.config import ACTConfig, VisuomotorConfig
from rlinf.models.visuomotor.policy import VisuomotorPolicy
from rlinf.models.visuomotor.published import VisuomotorFiles, stages_of
from rlinf.models.visuomotor.resnet import ResNetSize
from rlinf.models.vla.loading import NameLayout, Translated
from rlinf.models.vla.statistics_files import BUFFERS, NORMALISERS

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

LATENT = "latent"
"""Name of the noise of supervised training."""
SAMPLED = "sampled"
"""Name in ``forward_inputs`` of what was drawn, in units of the model."""


class ACTPolicy(VisuomotorPolicy):
    """See the module."""

    _config: ACTConfig
    network: ACTNetwork
    layouts = (
        NameLayout(
            "lerobot",
            (*NORMALISERS, ("model", "")),
            unused=(*BUFFERS, "vae_encoder_pos_enc"),
            divided=tuple(
                (f"in_proj_{kind}", tuple(f"{part}_proj.{kind}" for part in "qkv"))
                for kind in ("weight", "bias")
            ),
        ),
    )

    def __init__(
        self, config: ACTConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
    ) -> None:
        super().__init__(config, env_spec, value_dim=value_dim, seed=seed)
        shape = (self.chunk, self.action_dim)
        self.log_std = nn.Parameter(torch.full(shape, config.initial_log_std))
        self.add_values(config, self.network.size.width, seed=seed)

    def _published_network(self, found: Translated, published: VisuomotorFiles) -> ACTNetwork:
        published.setting("n_obs_steps", (1,))
        published.setting("replace_final_stride_with_dilation", (False,))
        blocks, channels = stages_of(found, "backbone.")
        head, mlp = found.shape("action_head.weight"), "encoder.layers.0.linear1.weight"
        divisors = (n for n in range(1, head[1] + 1) if head[1] % n == 0)
        return ACTNetwork(
            ACTSize(
                backbone=ResNetSize(blocks, channels),
                width=head[1],
                mlp=found.shape(mlp)[0],
                heads=published.setting("n_heads", (8, *divisors)),
                encoder_layers=found.count("encoder.layers"),
                decoder_layers=found.count("decoder.layers"),
                latent_layers=found.count("vae_encoder.layers"),
                latent=found.shape("encoder_latent_input_proj.weight")[1],
                horizon=found.shape("decoder_pos_embed.weight")[0],
                action_dim=head[0],
                state_dim=published.state_dim,
                before=published.setting("pre_norm", (False, True)),
                activation=published.setting("feedforward_activation", ("relu", "gelu")),
            )
        )

    def _tiny_network(self, action_dim: int, state_dim: int) -> ACTNetwork:
        return ACTNetwork(
            ACTSize(
                backbone=ResNetSize((1, 1, 1), (24, 48, 96)),
                width=96, mlp=192, heads=4, encoder_layers=2, decoder_layers=1, latent_layers=1,
                latent=16, horizon=self._config.horizon or self.chunk, action_dim=action_dim,
                state_dim=state_dim,
            )
        )  # fmt: skip

    def _network(self, config: VisuomotorConfig, env_spec: EnvSpec, *, seed: int) -> Any:
        network = super()._network(config, env_spec, seed=seed)
        if config.path is None:
            network.begin_without_divergence()
        return network

    # -- passes of the network ----------------------------------------------------------------

    def _read(
        self, observations: Mapping[str, Tensor], latent: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B, L, D] of the observations and their positions."""
        pictures = self._pixels(self.pictures_of(observations))
        return self.network.encode(pictures, self._states(observations), latent)

    def _features(self, memory: Tensor) -> Tensor:
        """[B, D] that values are read from."""
        return memory.mean(dim=1)

    def _distribution(self, memory: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [B, C, A'] in units of the model, and logarithm of the deviation [C, A]."""
        return self.network.decode(memory, positions)[:, : self.chunk], self.log_std.float()

    # -- acting -------------------------------------------------------------------------------

    @property
    def evaluation_noise(self) -> Mapping[str, NoiseSpec]:
        """Nothing: the deviation is for exploration alone."""
        return {}

    @torch.inference_mode()
    def sample(
        self, observations: Mapping[str, Tensor], noise: Mapping[str, Tensor] | None
    ) -> ActionSample:
        """The chunk that the network gives; with noise, disturbed in each dimension."""
        memory, positions = self._read(observations)
        mean, log_std = self._distribution(memory, positions)
        drawn = middle = self._of_env(mean)
        if noise is not None:
            drawn = middle + log_std.exp() * noise[ACTIONS]
            mean = mean.clone()
            mean[..., self._places] = drawn
        return ActionSample(
            actions=self._to_env(mean, observations),
            log_probs=_log_probs(drawn, middle, log_std),
            forward_inputs={SAMPLED: drawn},
            values=self.values_of(self._features(memory)) if self.value_dim else None,
        )

    def evaluate_actions(self, forward_inputs: Mapping[str, Tensor]) -> ActionEvaluation:
        """Log-probs of stored actions; see the base class."""
        memory, positions = self._read(forward_inputs)
        mean, log_std = self._distribution(memory, positions)
        middle = self._of_env(mean)
        return ActionEvaluation(
            log_probs=_log_probs(forward_inputs[SAMPLED], middle, log_std),
            values=self.values_of(self._features(memory)),
            entropy=gaussian_entropy(log_std=log_std).expand_as(middle),
        )

    @torch.no_grad()
    def sample_continuing(
        self, observations: Mapping[str, Tensor], prefix: Tensor, weights: Tensor
    ) -> ActionSample:
        """The mean of a new chunk and of actions [B, C, A] that were decided before, which count as
        much as weights [B, C] say: temporal ensembling (section IV of the paper) of two chunks."""
        actions = self.sample(observations, None).actions
        held = weights.unsqueeze(-1).to(actions)
        mixed = self.in_box(torch.lerp(actions, prefix.to(actions), held))
        return ActionSample(mixed, torch.zeros_like(mixed), {})

    @torch.inference_mode()
    def value(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, V] values of observations, without gradients."""
        if not self.value_dim:
            first = next(iter(observations.values()))
            return torch.zeros(len(first), 0, device=first.device)
        return self.values_of(self._features(self._read(observations)[0]))

    # -- supervised learning ------------------------------------------------------------------

    @property
    def imitation_noise(self) -> Mapping[str, NoiseSpec]:
        """By which the latent of a recorded chunk is drawn."""
        size = self.network.size
        return {LATENT: NoiseSpec((size.latent,))} if size.latent_layers else {}

    def imitation_errors(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N, H, A] absolute errors in units of the model, each with ``kl_weight`` times the
        divergence of the row's latent, so that their mean is the loss (arXiv 2304.13705, eq. 1 with
        the absolute error of section IV-C)."""
        actions = self._to_model(inputs[RAW_ACTIONS], inputs)
        latent, divergence = None, actions.new_zeros(len(actions))
        if self.network.size.latent_layers:
            latent, divergence = self._drawn_latent(actions, inputs)
        wanted = self._in_env(actions)
        found = self._in_env(self.network.decode(*self._read(inputs, latent)))
        return (found - wanted).abs() + self._config.kl_weight * divergence[:, None, None]

    def _drawn_latent(self, actions: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Latent [N, latent] of recorded chunks [N, H, A'], and its divergence [N] from N(0, 1)."""
        recorded = inputs.get(RECORDED)
        if recorded is None:
            recorded = actions.new_ones(actions.shape[:2], dtype=torch.bool)
        mean, log_variance = self.network.latent_of(self._states(inputs), actions, recorded)
        latent = mean + (0.5 * log_variance).exp() * inputs[LATENT]
        terms = 1 + log_variance - mean.square() - log_variance.exp()
        return latent, -0.5 * terms.sum(dim=-1)

    # -- training -----------------------------------------------------------------------------

    def repeated_layers(self) -> list[nn.Module]:
        """Blocks of the ResNet and layers of the transformers."""
        return list(self.network.layers())

    def trained_beside_adapters(self) -> Iterator[nn.Parameter]:
        """What begins afresh: values and deviation."""
        yield from self.value_parameters()
        yield self.log_std


def _log_probs(drawn: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    return gaussian_log_prob(deviation=(drawn - mean) * (-log_std).exp(), log_std=log_std)
