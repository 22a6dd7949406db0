"""π₀ and π₀.₅ as policies, from published files or of small random networks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlinf.errors import ConfigError
from rlinf.models.policy import warn_of_policy
from rlinf.models.vla.config import FlowConfig
from rlinf.models.vla.flow_policy import FlowPolicy
from rlinf.models.vla.instructions import InstructionTable
from rlinf.models.vla.loading import NameLayout
from rlinf.models.vla.networks import Published, fresh_network, published_network, tiny_ends
from rlinf.models.vla.pi0.config import PI05Config
from rlinf.models.vla.pi0.layouts import EMBEDDING, LAYOUTS, OF_OPENPI
from rlinf.models.vla.pi0.network import PI0Network, PI0Size
from rlinf.models.vla.pi0.prompts import (
    TINY_VOCABULARY,
    StatePrompts,
    plain_prompt,
    published_encoder,
    state_head,
    tiny_encoder,
)
from rlinf.models.vla.preprocessing import side_by_side, square_pixels
from rlinf.models.vla.statistics_files import BUFFERS
from rlinf.models.vla.transformer import Prefix, TransformerSize

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

log = logging.getLogger(__name__)

_KNOWN = {
    "adapt_to_pi_aloha": False,
    "use_delta_joint_actions_aloha": False,
    "min_period": 4e-3,
    "max_period": 4.0,
}
"""Keys of a config.json of lerobot with the only value that is computed here, their default."""


class PI0Policy(FlowPolicy):
    """π₀ or π₀.₅, by the section's type."""

    network: PI0Network
    tells_state: bool

    def _prompts(self, config: FlowConfig) -> nn.Module:
        encoder = tiny_encoder() if config.path is None else published_encoder(
            config.tokenizer or config.path
        )  # fmt: skip
        limit, dim, self.tells_state = config.max_prompt_tokens, self.state_dim, False
        if isinstance(config, PI05Config) and config.state_in_prompt and dim:
            self.tells_state = True
            _warn_of_padding(config, dim)
            heads = self.prompts_of(state_head)
            return StatePrompts(encoder, limit=limit, dim=dim, told=config.told_state_dim, **heads)
        return InstructionTable(encode=encoder[0], limit=limit, **self.prompts_of(plain_prompt))

    def _network(self, config: FlowConfig, env_spec: EnvSpec, *, seed: int) -> PI0Network:
        if config.path is None:
            return fresh_network(lambda: PI0Network(_tiny_size(config, env_spec)), seed=seed)

        def make(held: Published) -> PI0Network:
            # Whoever has statistics among the weights was trained by lerobot before 0.4.
            self._centred = not any(name.startswith(BUFFERS) for name in held.found.unused)
            return PI0Network(_published_size(held))

        return published_network(config, LAYOUTS, make)

    @property
    def _reads_states(self) -> bool:
        return not self.network.size.adaptive

    def _tokens(self, observations: Mapping[str, Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
        tokens, mask = self.prompts(observations, *((states,) if self.tells_state else ()))
        return tokens, mask

    def _pixels(self, view: Tensor) -> Tensor:
        layout: NameLayout | None = getattr(self.network, "published_layout", None)
        filtered = layout is not None and layout.name in OF_OPENPI
        return square_pixels(
            view, self.network.size.image, centred=self._centred, filtered=filtered
        )

    def _prefix(
        self, pixels: Sequence[Tensor], tokens: Tensor, mask: Tensor, states: Tensor
    ) -> Prefix:
        seen = side_by_side(pixels)
        there = torch.ones(seen.shape[:2], dtype=torch.bool, device=seen.device)
        return self.network.prefix(seen, there, tokens, mask)

    def _denoise(
        self, prefix: Prefix, states: Tensor, x: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.network.denoise(prefix, x, time, states)

    @property
    def _values_from(self) -> str:
        return self._config.value_from or ("mean" if self.network.size.adaptive else "expert")


def _warn_of_padding(config: PI05Config, dim: int) -> None:
    """Tell where a directory may be one of lerobot 0.4, which told more dimensions of the state
    than it has, and the section does not say whether it is.

    What lerobot writes is the same from 0.4 to 0.5.0; what came next has `use_relative_actions`.
    """
    if config.path is None or "told_state_dim" in config.model_fields_set:
        return
    settings = config.settings()
    filled = settings.get("max_state_dim")
    if (
        settings.get("type") != "pi05"
        or "use_relative_actions" in settings
        or filled in (None, dim)
    ):
        return
    warn_of_policy(
        log,
        "model.told_state_dim: %s is told the %d dimensions of the state, as openpi and lerobot "
        "since 0.5 do; if it was trained by lerobot 0.4, which filled them up with zeros, give %s, "
        "otherwise null",
        config.path, dim, filled,
    )  # fmt: skip


def _tiny_size(config: FlowConfig, env_spec: EnvSpec) -> PI0Size:
    """Of a small network for pictures of about 64 × 64."""
    return PI0Size(
        adaptive=isinstance(config, PI05Config),
        vision=TransformerSize(96, 2, 192),
        language=TransformerSize(96, 2, 192),
        expert=TransformerSize(96, 2, 192),
        vision_heads=4,
        heads=4,
        head_dim=24,
        vocabulary=TINY_VOCABULARY,
        patch=16,
        **tiny_ends(config, env_spec),
    )


def _published_size(held: Published) -> PI0Size:
    """Sizes from the shapes of weights; what these do not say from config.json."""
    config, settings = held.config, held.settings
    adaptive = "time_mlp_in.weight" in held.found.names
    if adaptive != isinstance(config, PI05Config):
        other, wanted = ("pi05", "pi0") if adaptive else ("pi0", "pi05")
        raise ConfigError(
            f"{config.path} holds {other}, not {wanted}; nearest: {other}", key="type"
        )
    held.refuse_others(_KNOWN, settings)
    if settings.get("use_relative_actions") and not config.conventions.delta_dimensions:
        raise ConfigError(
            f"{config.path} has use_relative_actions in its config.json: its actions say how far "
            "from the present state; nearest: name the dimensions in which they do",
            key="conventions.delta_dimensions",
        )
    patch = held.shape("vision.patch_embedding.weight")[-1]
    patches = held.shape("vision.position_embedding.weight")[0]
    head_dim = held.shape("expert.layers.0.self_attn.k_proj.weight")[0]  # of one head, as all have
    said = "action_horizon" if settings.get("chunk_size") is None else "chunk_size"
    size = PI0Size(
        adaptive=adaptive,
        vision=held.transformer("vision", "fc1"),
        language=held.transformer("language", "gate_proj"),
        expert=held.transformer("expert", "gate_proj"),
        vision_heads=settings.get("vision_heads", 16),
        heads=held.shape("expert.layers.0.self_attn.q_proj.weight")[0] // head_dim,
        head_dim=head_dim,
        vocabulary=held.shape(EMBEDDING)[0],
        patch=patch,
        image=round(patches**0.5) * patch,
        horizon=held.actions_at_once(said=said),
        action_dim=held.shape("action_in_proj.weight")[1],
    )
    return size if adaptive else replace(size, state_dim=held.shape("state_proj.weight")[1])
