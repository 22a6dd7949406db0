"""π₀ and π₀.₅ as policies, from published files or of small random networks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlinf.errors import ConfigError, in_section
from rlinf.models.vla.config import FlowConfig
from rlinf.models.vla.flow_matching import fill_fresh
from rlinf.models.vla.flow_policy import FlowPolicy
from rlinf.models.vla.loading import Translated, load_published, open_weights, translate
from rlinf.models.vla.pi0.config import PI05Config
from rlinf.models.vla.pi0.layouts import EMBEDDING, LAYOUTS
from rlinf.models.vla.pi0.network import PI0Network, PI0Size, Prefix, TransformerSize
from rlinf.models.vla.pi0.prompts import (
    TINY_VOCABULARY,
    StatePrompts,
    plain_prompts,
    published_encoder,
    tiny_encoder,
)

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec


class PI0Policy(FlowPolicy):
    """π₀ or π₀.₅, by the section's type."""

    network: PI0Network

    tells_state: bool

    def _prompts(self, config: FlowConfig) -> nn.Module:
        encoder = tiny_encoder() if config.path is None else published_encoder(
            config.tokenizer or config.path
        )  # fmt: skip
        told = isinstance(config, PI05Config) and config.state_in_prompt
        self.tells_state = told and self.state_dim > 0
        limit = config.max_prompt_tokens
        if self.tells_state:
            return StatePrompts(self.texts, encoder, limit=limit, dim=self.state_dim)
        return plain_prompts(self.texts, encoder, limit=limit)

    def _network(self, config: FlowConfig, env_spec: EnvSpec, *, seed: int) -> PI0Network:
        if config.path is None:
            return tiny_network(config, env_spec, seed=seed)
        return published_network(config)

    @property
    def _reads_states(self) -> bool:
        return not self.network.size.adaptive

    def _tokens(self, observations: Mapping[str, Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
        tokens, mask = self.prompts(observations, *((states,) if self.tells_state else ()))
        return tokens, mask

    def _prefix(
        self, pixels: Tensor, there: Tensor, tokens: Tensor, mask: Tensor, states: Tensor
    ) -> Prefix:
        return self.network.prefix(pixels, there, tokens, mask)

    def _denoise(
        self, prefix: Prefix, states: Tensor, x: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.network.denoise(prefix, x, time, states)

    @property
    def _feature_width(self) -> int:
        size = self.network.size
        return (size.language if size.adaptive else size.expert).width

    def _features(self, prefix: Prefix, states: Tensor) -> Tensor:
        """Of π₀.₅ the mean of what was read."""
        if not self.network.size.adaptive:
            return super()._features(prefix, states)
        mask = prefix.mask.unsqueeze(-1).to(prefix.hidden.dtype)
        return (prefix.hidden * mask).sum(1) / mask.sum(1)


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
    fill_fresh(network, torch.Generator().manual_seed(seed))
    return network


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
