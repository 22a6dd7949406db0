"""The network of OpenVLA (Kim et al. 2024) and OpenVLA-OFT (Kim, Finn and Liang 2025).

Two vision transformers look at each picture (DINOv2 and SigLIP); the features of a patch lie side
by side, a perceptron projects them to the width of a Llama (of transformers), which reads
``BOS, patches…, instruction, actions…``. The names of all parts are those of published files, but
for FiLM. transformers is not imported before a network is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.errors import ConfigError, MissingPackageError
from rlinf.models.language import BUILDING
from rlinf.models.vla.action_tokens import logits_of_rows
from rlinf.models.vla.openvla.vision_transformer import Perceptron, VisionSize, VisionTransformer

TOWERS = ("featurizer", "fused_featurizer")
"""Names of the vision transformers."""


@dataclass(frozen=True)
class Extras:
    """What OpenVLA-OFT may have beside the network.

    Args:
        action_head: (values of an action, A) of the head that regresses actions; None: tokens.
        proprioception: Values of a state that is one more input token; 0: none.
        film: Let the instruction modulate each block of the vision transformers.
    """

    action_head: int | None = None
    proprioception: int = 0
    film: bool = False


@dataclass(frozen=True)
class Architecture:
    """Sizes of a network.

    Args:
        towers: One or two.
        image_size: Pixels of the square that both look at.
        text: Values of a configuration of Llama.
        unused_rows: Rows of the embedding behind the vocabulary of the tokenizer.
        action_bins: Tokens that are actions.
    """

    towers: tuple[VisionSize, ...]
    image_size: int
    text: Mapping[str, Any]
    unused_rows: int = 64
    action_bins: int = 256

    @property
    def vocabulary(self) -> int:
        """Tokens of the tokenizer; the last ones are actions."""
        return int(self.text["vocab_size"]) - self.unused_rows


class VisionBackbone(nn.Module):
    """Features [B, patches, width] of pictures, those of all towers side by side."""

    def __init__(
        self, towers: tuple[VisionSize, ...], image_size: int, language_width: int | None
    ) -> None:
        super().__init__()
        self.names = TOWERS[: len(towers)]
        for name, size in zip(self.names, towers, strict=True):
            tower = VisionTransformer(size, image_size, language_width=language_width)
            self.add_module(name, tower)
            self.patches = tower.patches
        self.width = sum(size.width for size in towers)

    def forward(self, pixels: Tensor, language: Tensor | None) -> Tensor:
        """Features of B pictures.

        Args:
            pixels: [B, 3 · towers, H, W], as each tower wants them.
            language: [B, language_width] mean embedding of the instruction, where FiLM is used.
        """
        views = zip(self.names, torch.split(pixels, 3, dim=1), strict=True)
        return torch.cat([getattr(self, name)(each, language) for name, each in views], dim=-1)


class _ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.ffn(x))


class _ResidualPerceptron(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int, blocks: int = 2) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(width) for _ in range(blocks))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return cast(Tensor, self.fc2(self.layer_norm2(x)))


class ActionHead(nn.Module):
    """Actions by regression from the hidden states of their A positions each."""

    def __init__(self, width: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.model = _ResidualPerceptron(action_dim * width, width, action_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, C · A, width] to normalised actions [B, C, A]."""
        steps = hidden.shape[1] // self.action_dim
        return cast(Tensor, self.model(hidden.reshape(len(hidden), steps, -1)))


class OpenVLANetwork(nn.Module):
    """From pictures, tokens and states to hidden states and logits of actions.

    Weights are what torch makes of them at construction: build it on the meta device and load it,
    or under a seed.
    """

    def __init__(self, architecture: Architecture, extras: Extras | None = None) -> None:
        super().__init__()
        extras = extras or Extras()
        self._film = extras.film
        self.language_model = _llama(architecture.text)
        width = int(architecture.text["hidden_size"])
        self.vision_backbone = VisionBackbone(
            architecture.towers, architecture.image_size, width if extras.film else None
        )
        vision = self.vision_backbone.width
        fused = (4 * vision,) if len(architecture.towers) > 1 else ()
        self.projector = Perceptron(vision, *fused, width, width)
        self.proprio_projector = (
            Perceptron(extras.proprioception, width, width) if extras.proprioception else None
        )
        self.action_head = (
            None if extras.action_head is None else ActionHead(width, extras.action_head)
        )
        self._actions = slice(
            architecture.vocabulary - architecture.action_bins, architecture.vocabulary
        )

    def add_constants(self) -> None:
        """Make what no file holds, where the network was built on the meta device."""
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        model = self.language_model
        model.model.rotary_emb = LlamaRotaryEmbedding(model.config)

    def new_cache(self) -> Any:
        """For the keys and values of :meth:`causal`."""
        from transformers import DynamicCache

        return DynamicCache()

    @property
    def width(self) -> int:
        """Of the language model."""
        return int(self.language_model.config.hidden_size)

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, L] ids to [B, L, width]."""
        return cast(Tensor, self.language_model.model.embed_tokens(tokens))

    def action_logits(self, hidden: Tensor) -> Tensor:
        """[B, N, width] to logits [B, N, bins] of the tokens that are actions; of the other rows of
        the output layer none is computed."""
        return logits_of_rows(self.language_model.lm_head, hidden, self._actions)

    def prompt(
        self,
        pixels: Tensor,
        ids: Tensor,
        mask: Tensor,
        *,
        states: Tensor | None = None,
        behind: Iterable[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """Embeddings [B, T, width] of ``BOS, patches…, state, instruction…`` and their mask [B, T].

        Args:
            pixels: [B, views, 3 · towers, H, W].
            ids: [B, L], the first one is BOS.
            mask: [B, L], False at padding.
            states: [B, D] normalised, where the network has a projector of them.
            behind: Tokens behind the actions, which count as language for FiLM.
        """
        text = self.embed(ids)
        mask = mask.bool()
        language = None
        if self._film:
            more = self.embed(torch.tensor(list(behind), device=ids.device, dtype=ids.dtype))
            total = (text * mask.unsqueeze(-1)).sum(dim=1) + more.sum(dim=0)
            language = total / (mask.sum(dim=1, keepdim=True) + len(more))
        rows, views = pixels.shape[:2]
        if language is not None:
            language = language.repeat_interleave(views, dim=0)
        features = self.vision_backbone(pixels.flatten(0, 1).to(text.dtype), language)
        seen = self.projector(features).reshape(rows, -1, self.width)
        if self.proprio_projector is not None:
            if states is None:
                raise ValueError("the network reads states, and is given none")
            token = self.proprio_projector(states.to(text.dtype))
            seen = torch.cat([seen, token.unsqueeze(1)], dim=1)
        full = torch.ones(rows, seen.shape[1], dtype=torch.bool, device=mask.device)
        return (
            torch.cat([text[:, :1], seen, text[:, 1:]], dim=1),
            torch.cat([mask[:, :1], full, mask[:, 1:]], dim=1),
        )

    def at_once(
        self, embedded: Tensor, mask: Tensor, actions: int, behind: Iterable[int]
    ) -> Tensor:
        """Hidden states [B, actions, width] from which the actions are read, in one pass in which
        every position sees every other one.

        The positions of the actions have no embedding of their own, only a place; each is read one
        position before it.
        """
        rows = len(embedded)
        parts = [embedded, embedded.new_zeros(rows, actions, self.width)]
        if last := list(behind):
            tokens = torch.tensor(last, device=embedded.device).expand(rows, -1)
            parts.append(self.embed(tokens).to(embedded.dtype))
        whole = torch.cat(parts, dim=1)
        visible = functional.pad(mask, (0, whole.shape[1] - mask.shape[1]), value=True)
        hidden = self.language_model.model(
            inputs_embeds=whole,
            attention_mask=visible[:, None, None].expand(-1, 1, whole.shape[1], -1),
            position_ids=_positions(visible),
            use_cache=False,
        ).last_hidden_state
        first = embedded.shape[1] - 1
        return cast(Tensor, hidden[:, first : first + actions])

    def causal(self, embedded: Tensor, mask: Tensor, *, cache: Any = None) -> Tensor:
        """Hidden states [B, N, width] of N embeddings, the last ones of those that the mask [B, T]
        is of; the others are in the cache, which takes in the N."""
        return cast(
            Tensor,
            self.language_model.model(
                inputs_embeds=embedded,
                attention_mask=mask.long(),
                position_ids=_positions(mask)[:, -embedded.shape[1] :],
                past_key_values=cache,
                use_cache=cache is not None,
            ).last_hidden_state,
        )


def _positions(mask: Tensor) -> Tensor:
    """Places of tokens, padding not counted."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def _llama(values: Mapping[str, Any]) -> Any:
    try:
        with BUILDING:  # several threads must not import transformers at once
            from huggingface_hub.errors import StrictDataclassError
            from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise MissingPackageError("transformers", "language", "OpenVLA") from error
    try:
        with BUILDING:
            return LlamaForCausalLM(LlamaConfig(**values, attn_implementation="sdpa"))
    except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
        raise ConfigError(
            "config.json: its text_config is none of a Llama: "
            + " ".join(str(error).split())[:200],
            key="model.path",
        ) from error
