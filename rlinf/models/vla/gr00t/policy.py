"""GR00T N1.5 as a policy, from a published directory or of a small random network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlinf.data.json_files import read_settings
from rlinf.errors import ConfigError
from rlinf.models.vla.config import FlowConfig
from rlinf.models.vla.flow_policy import FlowPolicy
from rlinf.models.vla.gr00t.config import GR00TConfig
from rlinf.models.vla.gr00t.layouts import LAYOUTS
from rlinf.models.vla.gr00t.network import GR00TNetwork, GR00TSize
from rlinf.models.vla.gr00t.prompts import TINY_PICTURE, eagle_encode, prompt, tiny_encode
from rlinf.models.vla.instructions import PicturePrompts
from rlinf.models.vla.networks import Published, fresh_network, published_network, tiny_ends
from rlinf.models.vla.pi0.layouts import EMBEDDING
from rlinf.models.vla.preprocessing import cropped_pixels, side_by_side
from rlinf.models.vla.transformer import Prefix, TransformerSize

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

_LAST_TIME = 0.999
_KNOWN_HEAD = {
    "use_vlln": True,
    "add_pos_embed": True,
    "noise_beta_alpha": 1.5,
    "noise_beta_beta": 1.0,
    "noise_s": _LAST_TIME,
}
_KNOWN_DIFFUSION = {
    "interleave_self_attention": True,
    "norm_type": "ada_norm",
    "positional_embeddings": None,
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "norm_elementwise_affine": False,
}
_KNOWN_LOOK = {"positional_embeddings": None, "activation_fn": "gelu-approximate"}
"""Keys of a published config.json with the only value that is computed here."""


class GR00TPolicy(FlowPolicy):
    """GR00T N1.5 (https://arxiv.org/abs/2503.14734).

    Its time runs from noise at 0 to actions at 1, and its velocity from noise to actions; here it
    is turned around, so that all the rest is as of the other models.
    """

    network: GR00TNetwork
    _needs_views = True
    prompts: PicturePrompts

    def __init__(
        self, config: GR00TConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
    ) -> None:
        self._embodiment = config.matrices
        super().__init__(config, env_spec, value_dim=value_dim, seed=seed)
        self._crop = config.crop
        size = self.network.size
        self.prompts.show([size.patches] * len(self.views), picture=size.picture_token)

    def _trained_on(self, path: Path) -> Sequence[str]:
        file = path / "experiment_cfg" / "metadata.json"
        if not file.is_file():
            return super()._trained_on(path)
        found = read_settings(file, key="model.path")
        return [
            *found.get(self._config.statistics_choice["key"], {})
            .get("modalities", {})
            .get("video", {})
        ]

    def _prompts(self, config: FlowConfig) -> PicturePrompts:
        path = config.tokenizer or config.path
        return PicturePrompts(
            encode=tiny_encode if path is None else eagle_encode(path),
            **self.prompts_of(lambda text: prompt(text, len(self.views))),
            limit=config.max_prompt_tokens,
        )

    def _network(self, config: FlowConfig, env_spec: EnvSpec, *, seed: int) -> GR00TNetwork:
        if config.path is None:
            network = fresh_network(lambda: GR00TNetwork(_tiny_size(config, env_spec)), seed=seed)
        else:
            network = published_network(
                config, LAYOUTS, lambda held: GR00TNetwork(_published_size(held))
            )
        count = network.size.embodiments
        if self._embodiment >= count:
            raise ConfigError(
                f"the model has matrices of {count} embodiments, {self._embodiment} is none of "
                f"them; nearest: {count - 1}",
                key="model.embodiment_id",
            )
        if network.size.horizon > network.size.places:
            raise ConfigError(
                f"the model tells {network.size.places} actions apart, horizon is "
                f"{network.size.horizon}; nearest: {network.size.places}",
                key="model.horizon",
            )
        return network

    # -- reading ------------------------------------------------------------------------------

    def _pixels(self, view: Tensor) -> Tensor:
        return cropped_pixels(view, self.network.size.image, share=self._crop)

    def _states(self, observations: Mapping[str, Tensor]) -> Tensor:
        states = super()._states(observations)
        clipped = self._normalisation.get("states") == "quantiles"
        return states.clamp(-1.0, 1.0) if clipped else states

    def _prefix(
        self, pixels: Sequence[Tensor], tokens: Tensor, mask: Tensor, states: Tensor
    ) -> Prefix:
        return self.network.prefix(side_by_side(pixels), tokens, mask)

    def _denoise(
        self, prefix: Prefix, states: Tensor, x: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        velocity, hidden = self.network.denoise(prefix, states, x, 1.0 - time, self._embodiment)
        return -velocity, hidden

    def _training_time(self, uniform: Tensor) -> Tensor:
        """From Beta(1.5, 1) / 0.999: the noise, at 1, is learned a little more often."""
        return uniform.pow(1.0 / 1.5) / _LAST_TIME

    # -- values -------------------------------------------------------------------------------

    @property
    def _hidden_width(self) -> int:
        return self.network.size.hidden

    @property
    def _feature_width(self) -> int:
        if self._config.value_from is not None:
            return super()._feature_width
        return self.network.size.language.width + self.network.size.expert.width

    def _features(self, prefix: Prefix, states: Tensor) -> Tensor:
        """The mean of what was read, and the token of the state, as RLinf has it, unless the
        section says otherwise."""
        if self._config.value_from is not None:
            return super()._features(prefix, states)
        return torch.cat(
            [prefix.mean, self.network.state_token(states, self._embodiment)[:, 0]], dim=-1
        )

    # -- training -----------------------------------------------------------------------------

    def repeated_layers(self) -> list[nn.Module]:
        """Layers of all four transformers."""
        return [*super().repeated_layers(), *self.network.look.layers]


def _tiny_size(config: FlowConfig, env_spec: EnvSpec) -> GR00TSize:
    """Of a small network for pictures of about 64 × 64."""
    return GR00TSize(
        vision=TransformerSize(96, 2, 192),
        language=TransformerSize(96, 2, 192),
        look=TransformerSize(96, 1, 192),
        expert=TransformerSize(64, 4, 192),
        vision_heads=4,
        heads=4,
        kv_heads=2,
        head_dim=24,
        look_heads=4,
        expert_heads=4,
        hidden=48,
        future=4,
        places=64,
        vocabulary=TINY_PICTURE + 1,
        picture_token=TINY_PICTURE,
        patch=16,
        **tiny_ends(config, env_spec),
    )


def _published_size(held: Published) -> GR00TSize:
    """Sizes from the shapes of weights; what these do not say from config.json, or as published:
    that of lerobot says nothing of the network."""
    settings, shape, standard = held.settings, held.shape, GR00TSize()
    head: Mapping[str, Any] = settings.get("action_head_cfg", {})
    diffusion: Mapping[str, Any] = head.get("diffusion_model_cfg", {})
    look: Mapping[str, Any] = head.get("vl_self_attention_cfg", {})
    backbone: Mapping[str, Any] = settings.get("backbone_cfg", {})
    language = held.transformer("language", "gate_proj")
    held.refuse_others(_KNOWN_HEAD, head)
    held.refuse_others(_KNOWN_DIFFUSION, diffusion)
    held.refuse_others(_KNOWN_LOOK, look)
    held.refuse_others(
        {"project_to_dim": None, "reproject_vision": False, "select_layer": language.depth},
        backbone,
    )
    vision = held.transformer("vision", "fc1")
    patch = shape("vision.patch_embedding.weight")[-1]
    head_dim = shape("language.layers.0.self_attn.k_norm.weight")[0]
    embodiments, state_dim, hidden = shape("state_encoder.layer1.W")
    return GR00TSize(
        vision=vision,
        language=language,
        look=held.transformer("look", "ff_in"),
        expert=held.transformer("expert", "ff_in"),
        vision_heads=backbone.get("vision_heads", held.vision_heads(vision)),
        heads=shape("language.layers.0.self_attn.q_proj.weight")[0] // head_dim,
        kv_heads=shape("language.layers.0.self_attn.k_proj.weight")[0] // head_dim,
        head_dim=head_dim,
        look_heads=look.get("num_attention_heads", standard.look_heads),
        expert_heads=diffusion.get("num_attention_heads", standard.expert_heads),
        hidden=hidden,
        embodiments=embodiments,
        future=shape("future_tokens.weight")[0],
        places=shape("position_embedding.weight")[0],
        buckets=head.get("num_timestep_buckets", standard.buckets),
        picture_token=backbone.get("image_token_index", standard.picture_token),
        vocabulary=shape(EMBEDDING)[0],
        patch=patch,
        image=math.isqrt(shape("vision.position_embedding.weight")[0]) * patch,
        horizon=held.actions_at_once(said="action_horizon", always=standard.horizon),
        action_dim=shape("action_encoder.W1.W")[1],
        state_dim=state_dim,
    )
