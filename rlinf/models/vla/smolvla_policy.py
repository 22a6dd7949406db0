"""SmolVLA as a policy, from a directory as lerobot publishes it or of a small random network."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlinf.errors import ConfigError, in_section
from rlinf.models.vla.config import FlowConfig
from rlinf.models.vla.flow_matching import fill_fresh
from rlinf.models.vla.flow_policy import FlowPolicy
from rlinf.models.vla.instructions import Encode, InstructionTable, read_tokenizer
from rlinf.models.vla.loading import Layout, Translated, load_published, open_weights, translate
from rlinf.models.vla.pi0.layouts import EMBEDDING, HEAD, decoder_rules, vision_rules
from rlinf.models.vla.pi0.network import Prefix, TransformerSize
from rlinf.models.vla.pi0.prompts import TINY_VOCABULARY, tiny_encoder
from rlinf.models.vla.smolvla import SmolVLANetwork, SmolVLASize

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

_BOTH = "model.vlm_with_expert"
_OWN = ("state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in",
        "action_time_mlp_out")  # fmt: skip
_VISION = ("layers", "patch_embedding", "position_embedding", "post_layernorm")
LAYOUTS = (
    Layout(
        "lerobot",
        (
            *vision_rules(f"{_BOTH}.vlm.model.vision_model"),
            (f"{_BOTH}.vlm.model.connector.modality_projection.proj", "vision.projector"),
            (f"{_BOTH}.vlm.model.text_model.embed_tokens", "language.embed_tokens"),
            *decoder_rules(f"{_BOTH}.vlm.model.text_model", "language"),
            (f"{_BOTH}.vlm.lm_head", "language.lm_head"),
            *decoder_rules(f"{_BOTH}.lm_expert", "expert"),
            *((f"model.{name}", name) for name in _OWN),
        ),
        unused=(HEAD,),
    ),
    # policy.safetensors of a run. The projector is named by its weight: it has no bias, by which
    # a file of π₀ is told apart.
    Layout(
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
    centred_pictures = False

    def _prompts(self, config: FlowConfig) -> nn.Module:
        path = config.tokenizer or config.path
        return InstructionTable(
            [text if text.endswith("\n") else f"{text}\n" for text in self.texts],
            tiny_encoder()[0] if path is None else _encoder(read_tokenizer(path)),
            limit=config.max_prompt_tokens,
            padding=0,
            side="right",
        )

    def _network(self, config: FlowConfig, env_spec: EnvSpec, *, seed: int) -> SmolVLANetwork:
        if config.path is None:
            return _tiny_network(config, env_spec, seed=seed)
        return _published_network(config)

    def _prefix(
        self, pixels: Tensor, there: Tensor, tokens: Tensor, mask: Tensor, states: Tensor
    ) -> Prefix:
        return self.network.prefix(pixels, there, tokens, mask, states)

    def _denoise(
        self, prefix: Prefix, states: Tensor, x: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.network.denoise(prefix, x, time)


def _encoder(tokenizer: Any) -> Encode:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    return encode


def _tiny_network(config: FlowConfig, env_spec: EnvSpec, *, seed: int) -> SmolVLANetwork:
    """Random weights of the published architecture, for pictures of about 64 × 64."""
    (state_dim,) = env_spec.observation_shapes.get("states") or (0,)
    size = SmolVLASize(
        vision=TransformerSize(96, 2, 192),
        language=TransformerSize(96, 2, 192),
        expert=TransformerSize(72, 2, 192),
        vision_heads=4,
        heads=4,
        kv_heads=2,
        head_dim=24,
        vocabulary=TINY_VOCABULARY,
        image=64,
        shuffle=2,
        horizon=config.horizon or config.num_action_chunks,
        action_dim=max((*(config.conventions.dimensions or ()), env_spec.action_dim - 1)) + 1,
        state_dim=max(state_dim, 1),
    )
    with torch.device("meta"):
        network = SmolVLANetwork(size)
    network.to_empty(device="cpu")
    fill_fresh(network, torch.Generator().manual_seed(seed))
    return network


def _published_network(config: FlowConfig) -> SmolVLANetwork:
    """The network in the directory that the section names; ConfigError where it is none.

    Published files mix number formats; all are read as float32.
    """
    assert config.path is not None
    path = config.path.expanduser()
    with in_section("model"):
        found = translate(open_weights(path), LAYOUTS)
        size = _size(found, json.loads((path / "config.json").read_text()), config)
        with torch.device("meta"):
            network = SmolVLANetwork(size)
        load_published(network, path, LAYOUTS, dtype=torch.float32)
    return network


def _size(found: Translated, settings: Mapping[str, Any], config: FlowConfig) -> SmolVLASize:
    """Sizes from the shapes of weights; what these do not say from config.json, or as SmolVLM2."""

    def shape(name: str) -> tuple[int, ...]:
        if name not in found.names:
            raise ConfigError(f"{config.path} holds no smolvla: no {name}", key="path")
        return found.shape(name)

    def transformer(part: str, inner: str) -> TransformerSize:
        layers = {name.split(".")[2] for name in found.names if name.startswith(f"{part}.layers.")}
        mlp, width = shape(f"{part}.layers.0.{inner}.weight")
        return TransformerSize(width, len(layers), mlp)

    vision, patch = transformer("vision", "fc1"), shape("vision.patch_embedding.weight")[-1]
    image = math.isqrt(shape("vision.position_embedding.weight")[0]) * patch
    language, expert = transformer("language", "gate_proj"), transformer("expert", "gate_proj")
    head_dim = settings.get("head_dim", 64)  # of SmolVLM2 in all sizes
    every = settings.get("self_attn_every_n_layers", 2)
    _check(settings, config, image)
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
        vision_heads=settings.get(
            "vision_heads", 16 if vision.width == 1152 else vision.width // 64
        ),
        heads=shape("expert.layers.0.self_attn.q_proj.weight")[0] // head_dim,
        kv_heads=shape("expert.layers.0.self_attn.k_proj.weight")[0] // head_dim,
        head_dim=head_dim,
        vocabulary=shape(EMBEDDING)[0],
        patch=patch,
        image=image,
        shuffle=math.isqrt(shape("vision.projector.weight")[1] // vision.width),
        every=every,
        horizon=config.horizon or settings.get("chunk_size", 50),
        action_dim=shape("action_in_proj.weight")[1],
        state_dim=shape("state_proj.weight")[1],
    )


def _check(settings: Mapping[str, Any], config: FlowConfig, image: int) -> None:
    """Refuse a directory that wants something computed which is not, rather than compute else."""
    wanted = _KNOWN | {"resize_imgs_with_padding": [image, image]}
    given = {name: settings.get(name, value) for name, value in wanted.items()}
    scaled = settings.get("normalization_mapping", {})
    for kind in ("STATE", "ACTION"):
        name = f"normalization_mapping.{kind}"
        wanted[name], given[name] = "MEAN_STD", scaled.get(kind, "MEAN_STD")
    for name, value in wanted.items():
        if given[name] != value:
            raise ConfigError(
                f"{config.path} has {name}: {given[name]} in its config.json, which is not "
                f"computed here; nearest: a model with {value}",
                key="path",
            )
