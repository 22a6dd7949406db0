"""The networks of π₀ and π₀.₅: from published files, or small ones of random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlinf.errors import ConfigError, in_section
from rlinf.models.vla.loading import Translated, load_published, open_weights, translate
from rlinf.models.vla.pi0 import PI0Network, PI0Size, TransformerSize
from rlinf.models.vla.pi0_config import FlowConfig, PI05Config
from rlinf.models.vla.pi0_layouts import EMBEDDING, LAYOUTS
from rlinf.models.vla.pi0_prompts import TINY_VOCABULARY

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec


class NoiseHead(nn.Module):
    """What the deviation of Flow-Noise is made of, from hidden states of the expert."""

    def __init__(self, size: PI0Size, *, seed: int) -> None:
        super().__init__()
        widths = (size.expert.width, 128, 64, size.action_dim)
        self.layers = nn.ModuleList(
            nn.Linear(rows, columns, device="meta") for rows, columns in pairwise(widths)
        )
        self.to_empty(device="cpu")
        _fill(self, torch.Generator().manual_seed(seed + 1))

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, H, W] to [B, H, A]."""
        x = hidden.to(next(self.parameters()).dtype)
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        raw: Tensor = self.layers[-1](x)
        return raw


def tiny_network(config: FlowConfig, env_spec: EnvSpec, *, seed: int) -> PI0Network:
    """Random weights of the published architecture, for pictures of about 64 × 64."""
    (state_dim,) = env_spec.observation_shapes.get("states") or (0,)
    size = PI0Size(
        adaptive=isinstance(config, PI05Config),
        vision=TransformerSize(96, 2, 192),
        language=TransformerSize(96, 2, 192),
        expert=TransformerSize(96, 2, 192),
        vision_heads=4,
        heads=4,
        head_dim=24,
        vocabulary=TINY_VOCABULARY,
        patch=16,
        image=64,
        horizon=config.horizon or config.num_action_chunks,
        action_dim=max((*(config.conventions.dimensions or ()), env_spec.action_dim - 1)) + 1,
        state_dim=max(state_dim, 1),
    )
    with torch.device("meta"):
        network = PI0Network(size)
    network.to_empty(device="cpu")
    _fill(network, torch.Generator().manual_seed(seed))
    return network


@torch.no_grad()
def _fill(module: nn.Module, generator: torch.Generator) -> None:
    """Fresh weights: matrices of variance 1 / inputs; norms and adaptive ones begin as identity."""
    for name, parameter in module.named_parameters():
        adaptive = ".dense." in name
        if parameter.ndim > 1 and not adaptive:
            of_table = "embed" in name and parameter.ndim == 2
            inputs = parameter.shape[1] if of_table else parameter[0].numel()
            parameter.normal_(0.0, inputs**-0.5, generator=generator)
        else:
            parameter.zero_()
            if "layer_norm" in name or name == "vision.post_layernorm.weight":
                parameter.fill_(float(name.endswith("weight")))
            if adaptive and parameter.ndim == 1:
                parameter[-len(parameter) // 3 :] = 1.0  # the gates are open


def published_network(config: FlowConfig) -> PI0Network:
    """The network in the directory that the section names; ConfigError where it is none."""
    assert config.path is not None
    path = config.path.expanduser()
    with in_section("model"):
        found = translate(open_weights(path), LAYOUTS)
        size = _size(found, json.loads((path / "config.json").read_text()), config)
        with torch.device("meta"):
            network = PI0Network(size)
        load_published(network, path, LAYOUTS)
    if len({parameter.dtype for parameter in network.parameters()}) > 1:
        network.float()  # as openpi stores them: norms in float32, the rest in bfloat16
    return network


def _size(found: Translated, settings: Mapping[str, Any], config: FlowConfig) -> PI0Size:
    """Sizes from the shapes of weights; what these do not say from config.json."""
    adaptive = "time_mlp_in.weight" in found.names
    if adaptive != isinstance(config, PI05Config):
        held, wanted = ("pi05", "pi0") if adaptive else ("pi0", "pi05")
        raise ConfigError(f"{config.path} holds {held}, not {wanted}; nearest: {held}", key="type")

    def shape(name: str) -> tuple[int, ...]:
        if name not in found.names:
            raise ConfigError(f"{config.path} holds no {config.type}: no {name}", key="path")
        return found.shape(name)

    def transformer(part: str, inner: str) -> TransformerSize:
        layers = {name.split(".")[2] for name in found.names if name.startswith(f"{part}.layers.")}
        mlp, width = shape(f"{part}.layers.0.{inner}.weight")
        return TransformerSize(width, len(layers), mlp)

    patch = shape("vision.patch_embedding.weight")[-1]
    patches = shape("vision.position_embedding.weight")[0]
    head_dim = shape("expert.layers.0.self_attn.k_proj.weight")[0]  # of one head, as all have
    horizon = settings.get("chunk_size") or settings.get("action_horizon") or 50
    size = PI0Size(
        adaptive=adaptive,
        vision=transformer("vision", "fc1"),
        language=transformer("language", "gate_proj"),
        expert=transformer("expert", "gate_proj"),
        vision_heads=settings.get("vision_heads", 16),
        heads=shape("expert.layers.0.self_attn.q_proj.weight")[0] // head_dim,
        head_dim=head_dim,
        vocabulary=shape(EMBEDDING)[0],
        patch=patch,
        image=round(patches**0.5) * patch,
        horizon=config.horizon or int(horizon),
        action_dim=shape("action_in_proj.weight")[1],
    )
    return size if adaptive else replace(size, state_dim=shape("state_proj.weight")[1])
