"""The network of a Qwen-VL policy: a prompt with pictures of fixed sizes, and what follows it.

B rows, F columns of the prompt up to its last picture, T columns, S of them squares of pictures.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.data.pictures import Pictures, places_of, positions_of, shift_of
from rlinf.models.language import BUILDING
from rlinf.models.vla.action_tokens import logits_of_rows


class QwenVLNetwork(nn.Module):
    """A model of transformers, read from embeddings.

    What Qwen3-VL adds to its first layers rides along behind each embedding, so that one is
    ``width`` · (1 + depths) numbers.

    Args:
        model: Of the families Qwen2.5-VL and Qwen3-VL.
        beginning: [F] tokens of each prompt up to its last picture.
        pictures: Where they stand in these.
        merge: Patches of the side of a square.
        bins: Tokens that are actions, the last ones.
    """

    positions: Tensor
    places: Tensor
    grids: Tensor

    def __init__(
        self, model: Any, beginning: list[int], pictures: Pictures, *, merge: int, bins: int
    ) -> None:
        super().__init__()
        with BUILDING:
            from transformers import DynamicCache

        self.model, self._cache_class = model, DynamicCache
        text = model.config.get_text_config()
        self.width = int(text.hidden_size)
        self._depths = len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))
        self._actions = slice(int(text.vocab_size) - bins, int(text.vocab_size))
        self._next = len(beginning) + shift_of(pictures)
        grids = [[1, merge * each.rows, merge * each.columns] for each in pictures]
        for name, constant in {
            "beginning": torch.tensor(beginning),
            "positions": torch.from_numpy(positions_of(len(beginning), pictures)),
            "places": torch.from_numpy(places_of(pictures)),
            "grids": torch.tensor(grids),
        }.items():
            self.register_buffer(name, constant, persistent=False)

    def new_cache(self) -> Any:
        """For the keys and values of :meth:`causal`."""
        return self._cache_class()

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, L] ids to embeddings [B, L, ·]."""
        found: Tensor = self.model.get_input_embeddings()(tokens)
        return functional.pad(found, (0, self._depths * self.width))

    def action_logits(self, hidden: Tensor) -> Tensor:
        """[B, N, width] to logits [B, N, bins] of the tokens that are actions."""
        return logits_of_rows(self.model.lm_head, hidden, self._actions)

    def prompt(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [B, T, ·] of ``beginning, ids`` and their mask [B, T].

        Args:
            pixels: [B, K, D], K patches of the pictures of a row.
            ids: [B, L] of the rest.
            mask: [B, L], False at padding.
        """
        rows = len(ids)
        beginning = cast(Tensor, self.beginning).expand(rows, -1)
        embedded = self.embed(torch.cat([beginning, ids], dim=1))
        found = self.model.model.get_image_features(
            pixels.flatten(0, 1), self.grids.repeat(rows, 1), return_dict=True
        )
        deep = getattr(found, "deepstack_features", None) or ()
        features = [torch.cat(list(part)) for part in (found.pooler_output, *deep)]
        seen = torch.cat(features, dim=-1).view(rows, len(self.places), -1).to(embedded.dtype)
        mask = functional.pad(mask.bool(), (beginning.shape[1], 0), value=True)
        return embedded.index_copy(1, self.places, seen), mask

    def causal(self, embedded: Tensor, mask: Tensor, *, cache: Any = None) -> Tensor:
        """Hidden states [B, N, width] of N embeddings, the last ones of those that the mask [B, T]
        is of; the others are in the cache, which takes in the N."""
        count, width = embedded.shape[1], self.width
        options: dict[str, Any] = {}
        if self._depths and count == mask.shape[1]:
            shown = torch.zeros_like(mask).index_fill(1, self.places, True)
            seen = embedded[:, self.places].flatten(0, 1)
            options["visual_pos_masks"] = shown
            options["deepstack_visual_embeds"] = list(torch.split(seen, width, dim=-1)[1:])
        found = self.model.model.language_model(
            inputs_embeds=embedded[..., :width],
            attention_mask=mask.long(),
            position_ids=self._positions(mask)[..., -count:],
            past_key_values=cache,
            use_cache=cache is not None,
            **options,
        )
        return cast(Tensor, found.last_hidden_state)

    def _positions(self, mask: Tensor) -> Tensor:
        """[3, B, T]; padding behind the pictures is not counted."""
        behind = mask[:, self.positions.shape[1] :].long()
        later = self._next + (behind.cumsum(dim=1) - 1).clamp(min=0)
        first = self.positions.unsqueeze(1).expand(3, len(mask), -1)
        return torch.cat([first, later.expand(3, *later.shape)], dim=2)
