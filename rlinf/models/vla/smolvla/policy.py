"""SmolVLA as a policy, from a directory as lerobot publishes it or of a small random network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlinf.errors import ConfigError
from rlinf.models.vla.config import FlowConfig
from rlinf.models.vla.flow_policy import FlowPolicy
from rlinf.models.vla.instructions import InstructionTable, encoding, read_tokenizer
from rlinf.models.vla.loading import NameLayout
from rlinf.models.vla.networks import Published, fresh_network, published_network, tiny_ends
from rlinf.models.vla.pi0.layouts import EMBEDDING, HEAD, decoder_rules, vision_rules
from rlinf.models.vla.pi0.prompts import TINY_VOCABULARY, tiny_encoder
from rlinf.models.vla.preprocessing import side_by_side
from rlinf.models.vla.smolvla.network import SmolVLANetwork, SmolVLASize
from rlinf.models.vla.statistics_files import BUFFERS, NORMALISERS
from rlinf.models.vla.transformer import Prefix, TransformerSize

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

_BOTH = "model.vlm_with_expert"
_OWN = ("state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in",
        "action_time_mlp_out")  # fmt: skip
_VISION = ("layers", "patch_embedding", "position_embedding", "post_layernorm")
LAYOUTS = (
    NameLayout(
        "lerobot",
        (
            *NORMALISERS,
            *vision_rules(f"{_BOTH}.vlm.model.vision_model"),
            (f"{_BOTH}.vlm.model.connector.modality_projection.proj", "vision.projector"),
            (f"{_BOTH}.vlm.model.text_model.embed_tokens", "language.embed_tokens"),
            *decoder_rules(f"{_BOTH}.vlm.model.text_model", "language"),
            (f"{_BOTH}.vlm.lm_head", "language.lm_head"),
            *decoder_rules(f"{_BOTH}.lm_expert", "expert"),
            *((f"model.{name}", name) for name in _OWN),
        ),
        unused=(HEAD, *BUFFERS),
    ),
    # policy.safetensors of a run. The projector is named by its weight: it has no bias, by which
    # a file of π₀ is told apart.
    NameLayout(
        "rlinf",
        tuple(
            (f"network.{name}", name)
            for name in (
                *(f"vision.{part}" for part in _VISION),
                "vision.projector.weight",
                "language",
                "expert",
                *_OWN,
            )
        ),
    ),
)
_KNOWN = {
    "attention_mode": "cross_attn",
    "add_image_special_tokens": False,
    "adapt_to_pi_aloha": False,
    "min_period": 4e-3,
    "max_period": 4.0,
}
"""Keys of a published config.json with the only value that is computed here, their default."""


class SmolVLAPolicy(FlowPolicy):
    """SmolVLA (https://arxiv.org/abs/2506.01844)."""

    network: SmolVLANetwork
    _centred = False

    def _prompts(self, config: FlowConfig) -> nn.Module:
        path = config.tokenizer or config.path
        return InstructionTable(
            encode=tiny_encoder()[0]
            if path is None
            else encoding(read_tokenizer(path), special=True),
            **self.prompts_of(lambda text: text if text.endswith("\n") else f"{text}\n"),
            limit=config.max_prompt_tokens,
        )

    def _network(self, config: FlowConfig, env_spec: EnvSpec, *, seed: int) -> SmolVLANetwork:
        if config.path is None:
            return fresh_network(lambda: SmolVLANetwork(_tiny_size(config, env_spec)), seed=seed)
        return published_network(
            config, LAYOUTS, lambda held: SmolVLANetwork(_published_size(held))
        )

    def _prefix(
        self, pixels: Sequence[Tensor], tokens: Tensor, mask: Tensor, states: Tensor
    ) -> Prefix:
        seen = side_by_side(pixels)
        there = torch.ones(seen.shape[:2], dtype=torch.bool, device=seen.device)
        return self.network.prefix(seen, there, tokens, mask, states)

    def _denoise(
        self, prefix: Prefix, states: Tensor, x: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.network.denoise(prefix, x, time)


def _tiny_size(config: FlowConfig, env_spec: EnvSpec) -> SmolVLASize:
    """Of a small network for pictures of about 64 × 64."""
    return SmolVLASize(
        vision=TransformerSize(96, 2, 192),
        language=TransformerSize(96, 2, 192),
        expert=TransformerSize(72, 2, 192),
        vision_heads=4,
        heads=4,
        kv_heads=2,
        head_dim=24,
        vocabulary=TINY_VOCABULARY,
        shuffle=2,
        **tiny_ends(config, env_spec),
    )


def _published_size(held: Published) -> SmolVLASize:
    """Sizes from the shapes of weights; what these do not say from config.json, or as SmolVLM2."""
    config, settings = held.config, held.settings
    vision = held.transformer("vision", "fc1")
    patch = held.shape("vision.patch_embedding.weight")[-1]
    image = math.isqrt(held.shape("vision.position_embedding.weight")[0]) * patch
    language, expert = (held.transformer(each, "gate_proj") for each in ("language", "expert"))
    head_dim = settings.get("head_dim", 64)  # of SmolVLM2 in all sizes
    every = settings.get("self_attn_every_n_layers", 2)
    held.refuse_others(_KNOWN | {"resize_imgs_with_padding": [image, image]}, settings)
    if expert.depth != language.depth or every < 1:
        raise ConfigError(
            f"{config.path} has {expert.depth} layers of the expert, of which each {every}th "
            f"attends to actions, beside {language.depth} that read; only as many, and every ≥ 1, "
            "are known",
            key="path",
        )
    return SmolVLASize(
        vision=vision,
        language=language,
        expert=expert,
        vision_heads=settings.get("vision_heads", held.vision_heads(vision)),
        heads=held.shape("expert.layers.0.self_attn.q_proj.weight")[0] // head_dim,
        kv_heads=held.shape("expert.layers.0.self_attn.k_proj.weight")[0] // head_dim,
        head_dim=head_dim,
        vocabulary=held.shape(EMBEDDING)[0],
        patch=patch,
        image=image,
        shuffle=math.isqrt(held.shape("vision.projector.weight")[1] // vision.width),
        every=every,
        horizon=held.actions_at_once(),
        action_dim=held.shape("action_in_proj.weight")[1],
        state_dim=held.shape("state_proj.weight")[1],
    )
