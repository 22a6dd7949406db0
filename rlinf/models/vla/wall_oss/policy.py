"""WALL-OSS as a policy, from a published directory or of a small random network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlinf.errors import ConfigError
from rlinf.models.vla.config import FlowConfig
from rlinf.models.vla.flow_policy import FlowPolicy
from rlinf.models.vla.instructions import Encode, PicturePrompts, encoding, read_tokenizer
from rlinf.models.vla.loading import NameLayout
from rlinf.models.vla.networks import Published, fresh_network, published_network, tiny_ends
from rlinf.models.vla.pi0.layouts import EMBEDDING, HEAD
from rlinf.models.vla.pi0.prompts import TINY_VOCABULARY, tiny_encoder
from rlinf.models.vla.preprocessing import resized_pixels
from rlinf.models.vla.transformer import Prefix, TransformerSize
from rlinf.models.vla.wall_oss.config import VIEWS, WallOSSConfig
from rlinf.models.vla.wall_oss.network import ACTIONS, WallNetwork, WallSize

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

_TOWER = {
    "attn.qkv": "qkv", "attn.proj": "proj", "mlp.gate_proj": "gate_proj",
    "mlp.up_proj": "up_proj", "mlp.down_proj": "down_proj", "norm1": "norm1", "norm2": "norm2",
}  # fmt: skip
_HEAD = {
    "w1": "action_in", "w2": "time_in", "w3": "time_out", "action_proj_back": "action_out",
    "propri_proj": "state_proj",
}  # fmt: skip


def _rules(begin: str) -> tuple[tuple[str, str], ...]:
    visual, text = f"{begin}visual", f"{begin}model"
    head = f"{begin}action_preprocessor"
    return (
        (f"{visual}.patch_embed.proj", "vision.patch_embedding"),
        *(
            (f"{visual}.blocks.{{}}.{theirs}", f"vision.layers.{{}}.{ours}")
            for theirs, ours in _TOWER.items()
        ),
        (f"{visual}.merger.ln_q", "vision.norm"),
        (f"{visual}.merger.mlp.0", "vision.merge_in"),
        (f"{visual}.merger.mlp.2", "vision.merge_out"),
        (f"{text}.embed_tokens", "language.embed_tokens"),
        (f"{text}.layers.{{}}.moe.experts", "language.layers.{}.experts"),
        (f"{text}.layers", "language.layers"),
        (f"{text}.norm", "language.norm"),
        (f"{begin}lm_head", "language.lm_head"),
        *((f"{head}.{theirs}", ours) for theirs, ours in _HEAD.items()),
        # The units of the sets that it was trained on, by their names.
        (f"{head}.normalizer_action", "units.action"),
        (f"{head}.normalizer_propri", "units.state"),
    )


LAYOUTS = tuple(
    NameLayout(name, _rules(begin), tied=((EMBEDDING, HEAD),), unused=(HEAD, "units."))
    for name, begin in (("wall-x", ""), ("lerobot", "model."))
)
"""Names of the weights in published files."""

_PICTURE, _STATE = "<|image_pad|>", "<|propri|>"
_TINY = {_PICTURE: TINY_VOCABULARY, _STATE: TINY_VOCABULARY + 1}
_KNOWN = {
    "attention_moe": False,
    "norm_moe": False,
    "use_adarms": False,
    "hidden_act": "silu",
    "prediction_mode": "diffusion",
    "rms_norm_eps": 1e-6,
}
"""Keys of a published config.json with the only value that is computed here."""


class WallOSSPolicy(FlowPolicy):
    """WALL-OSS (https://arxiv.org/abs/2509.11766), which denoises by flow matching.

    Its time runs from noise at 0 to actions at 1, and its velocity from noise to actions; here it
    is turned around, so that all the rest is as of the other models.
    """

    network: WallNetwork
    prompts: PicturePrompts
    _special: dict[str, int]
    """Tokens in whose places something is read."""
    moved: Tensor
    """[A] 1 for dimensions of an action that the environment has."""
    known: Tensor
    """[D] 1 for dimensions of the state that it gives."""

    def __init__(
        self, config: WallOSSConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
    ) -> None:
        super().__init__(config, env_spec, value_dim=value_dim, seed=seed)
        picture = self._special[_PICTURE]
        size = replace(self.network.size, picture_token=picture, state_token=self._special[_STATE])
        self.network.size = size
        moved, known = torch.zeros(size.action_dim), torch.zeros(size.state_dim)
        moved[self._places], known[: self.state_dim] = 1.0, 1.0
        self.register_buffer("moved", moved, persistent=False)
        self.register_buffer("known", known, persistent=False)
        grids = [
            self.network.vision.grid(self._pixels(torch.zeros(1, *shape, dtype=torch.uint8)))
            for shape in self._picture_shapes(env_spec)
        ]
        patches = [rows * columns for rows, columns in grids]
        self.prompts.show(patches, picture=picture, others=[size.state_token])

    def _prompts(self, config: FlowConfig) -> PicturePrompts:
        assert isinstance(config, WallOSSConfig)
        names = self._view_names(config)
        encode, self._special = (
            (tiny_encode, _TINY) if config.path is None else _published_tokens(config)
        )
        return PicturePrompts(
            encode=encode,
            limit=config.max_prompt_tokens,
            **self.prompts_of(lambda text: _prompt(text, names)),
        )

    def _network(self, config: FlowConfig, env_spec: EnvSpec, *, seed: int) -> WallNetwork:
        if config.path is None:
            return fresh_network(lambda: WallNetwork(_tiny_size(config, env_spec)), seed=seed)
        return published_network(config, LAYOUTS, lambda held: WallNetwork(_published_size(held)))

    def _freeze_readers(self) -> None:
        """All but the perceptrons for actions, and what reads and writes actions and the state."""
        super()._freeze_readers()
        for layer in self.network.language.layers:
            layer.get_submodule(f"experts.{ACTIONS}").requires_grad_(True)

    # -- what it is shown ---------------------------------------------------------------------

    def _picture_shapes(self, env_spec: EnvSpec) -> list[tuple[int, ...]]:
        """Of each view that is shown: height, width, 3."""
        return [tuple(env_spec.observation_shapes[key])[-3:] for key, _ in self.views]

    def _view_names(self, config: WallOSSConfig) -> list[str]:
        shown = len(self.views)
        names = list(config.view_names or (VIEWS.get(key, "move view") for key, _ in self.views))
        if len(names) != shown:
            raise ConfigError(
                f"names {len(names)} views, the model is shown {shown}; nearest: one name for each",
                key="model.view_names",
            )
        return names

    def _pixels(self, view: Tensor) -> Tensor:
        size = self.network.size
        return resized_pixels(view, size.image, multiple=size.patch * size.merge)

    def _prefix(
        self, pixels: Sequence[Tensor], tokens: Tensor, mask: Tensor, states: Tensor
    ) -> Prefix:
        return self.network.prefix(pixels, tokens, mask, states, self.known)

    def _denoise(
        self, prefix: Prefix, states: Tensor, x: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        velocity, hidden = self.network.denoise(prefix, x, 1.0 - time, self.moved)
        return -velocity, hidden

    @property
    def _hidden_width(self) -> int:
        return self.network.size.language.width

    def repeated_layers(self) -> list[nn.Module]:
        """Layers of the tower and of the language model."""
        return [*self.network.vision.layers, *self.network.language.layers]


def _prompt(text: str, names: Sequence[str]) -> str:
    """The chat, as wall-x has it, with one picture token for each picture."""
    shown = "".join(f" {name}: <|vision_start|>{_PICTURE}<|vision_end|>" for name in names)
    return (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\nObservation:{shown}\nInstruction: {text}\n"
        f"Predict the next action in robot action.\nProprioception: {_STATE}\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def tiny_encode(text: str) -> list[int]:
    """Of presets: hashed words, and the two tokens in whose places something is read."""
    encode, _ = tiny_encoder()
    special = "|".join(map(re.escape, _TINY))
    pieces = re.split(f"({special})", text)
    return [id for piece in pieces for id in ([_TINY[piece]] if piece in _TINY else encode(piece))]


def _published_tokens(config: FlowConfig) -> tuple[Encode, dict[str, int]]:
    path = config.tokenizer or config.path
    assert path is not None
    tokenizer = read_tokenizer(path, *_TINY)
    return encoding(tokenizer), {name: tokenizer.token_to_id(name) for name in _TINY}


def _tiny_size(config: FlowConfig, env_spec: EnvSpec) -> WallSize:
    """Of a small network for pictures of about 64 × 64."""
    return WallSize(
        vision=TransformerSize(64, 2, 128),
        language=TransformerSize(96, 2, 192),
        expert=TransformerSize(96, 2, 192),
        vision_heads=4,
        heads=4,
        kv_heads=2,
        head_dim=24,
        vocabulary=TINY_VOCABULARY + len(_TINY),
        patch=8,
        window=2,
        whole=(1,),
        sections=(4, 4, 4),
        **tiny_ends(config, env_spec),
    )


def _published_size(held: Published) -> WallSize:
    """Sizes from the shapes of weights; what these do not say from config.json, or as published."""
    settings, shape, standard = held.settings, held.shape, WallSize()
    text = {**settings, **settings.get("text_config", {})}
    vision = settings.get("vision_config", {})
    held.refuse_others(_KNOWN, text)
    width, taken = shape(EMBEDDING)[1], shape("language.layers.0.experts.1.gate_proj.weight")[1]
    if taken != width:
        raise ConfigError(
            f"{held.config.path} has perceptrons for actions of {taken} of the {width} numbers of "
            "a token, which is not computed here; nearest: a model with as many",
            key="path",
        )
    patch = shape("vision.patch_embedding.weight")[-1]
    merge = vision.get("spatial_merge_size", standard.merge)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    sections = tuple(scaling.get("mrope_section", standard.sections))
    head_dim = 2 * sum(sections)
    return WallSize(
        vision=held.transformer("vision", "gate_proj"),
        language=held.transformer("language", "experts.0.gate_proj"),
        expert=held.transformer("language", "experts.1.gate_proj"),
        vision_heads=vision.get("num_heads", standard.vision_heads),
        heads=shape("language.layers.0.self_attn.q_proj.weight")[0] // head_dim,
        kv_heads=shape("language.layers.0.self_attn.k_proj.weight")[0] // head_dim,
        head_dim=head_dim,
        vocabulary=shape(EMBEDDING)[0],
        patch=patch,
        merge=merge,
        window=vision.get("window_size", 112) // patch // merge,
        whole=tuple(vision.get("fullatt_block_indexes", standard.whole)),
        sections=sections,
        image=settings.get("resolution", standard.image),
        horizon=held.actions_at_once(always=standard.horizon),
        action_dim=shape("action_out.weight")[0],
        state_dim=shape("state_proj.weight")[1] // 2,
    )
