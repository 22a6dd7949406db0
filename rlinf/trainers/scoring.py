"""Log-probs, entropies and values of tokens, by models of transformers without padding.

M tokens, H hidden width, V vocabulary. Only tokens that count reach the vocabulary layer, and only
a bounded number of logits exists at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import Scores
from rlinf.data.pictures import PictureReader
from rlinf.errors import ConfigError
from rlinf.models import vision_language
from rlinf.models.vision_language import attended_layers, set_text_attention, vision_of
from rlinf.trainers.forward_inputs import Arrangement, Layout, layout_of

_ATTENTION = "rlinf_packed"
_NOT_COMPUTED = ("softcap", "s_aux", "head_mask")
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class ScoringModel(nn.Module):
    """A model of transformers that gives numbers for the tokens that count.

    Dropout is switched off, as probabilities of the same weights must be the same.

    Args:
        model: The model; with ``packing`` its attention is replaced.
        packing: Forward passes come without padding.
        reader: Makes pixel values, where prompts have pictures.

    Raises:
        ConfigError: They have, and the model reads text only.
    """

    def __init__(self, model: Any, *, packing: bool, reader: PictureReader | None = None) -> None:
        super().__init__()
        if reader is not None and vision_of(model) is None:
            raise ConfigError(f"{type(model).__name__} reads text only, and prompts have pictures")
        self.model = model
        self._packing, self._reader = packing, reader
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = 0.0
        if packing:
            from transformers import AttentionInterface

            AttentionInterface.register(_ATTENTION, packed_attention)
            set_text_attention(model, _ATTENTION)

    def layout(self, batch: Batch) -> Layout:
        """The forward pass on a batch whose ``inputs`` lie on the host."""
        device = next(self.parameters()).device
        return layout_of(batch, packing=self._packing, device=device, reader=self._reader)

    def repeated_layers(self) -> list[nn.Module]:
        """The layers that ranks gather one after another where they divide the model."""
        return attended_layers(self)


class TokenScorer(ScoringModel):
    """A causal language model of transformers that gives log-probs instead of logits.

    Args:
        model: See :class:`ScoringModel`.
        packing: Likewise.
        reader: Likewise.
        logits_per_chunk: See :class:`~rlinf.trainers.config.SequenceConfig`.
        temperature: Divisor of the logits.
        entropy: Whether the entropy is wanted.
        adapter: Settings of peft for the adapter in the model; None: there is none.

    Raises:
        ConfigError: The architecture changes its logits after the vocabulary layer.
    """

    def __init__(
        self,
        model: Any,
        *,
        packing: bool,
        logits_per_chunk: int,
        reader: PictureReader | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        adapter: Any = None,
    ) -> None:
        for name in _LOGIT_CHANGES:
            if getattr(model.config.get_text_config(), name, None) not in (None, 1, 1.0):
                raise ConfigError(f"{type(model).__name__} changes its logits by {name}")
        super().__init__(model, packing=packing, reader=reader)
        self._logits_per_chunk = logits_per_chunk
        self._temperature, self._entropy = temperature, entropy
        self.adapter = adapter

    def forward(
        self, batch: Batch, *, temperature: float | None = None, entropy: bool | None = None
    ) -> Scores:
        """Log-probs and entropies, float32; None: as it was made."""
        layout = self.layout(batch)
        log_probs, entropies = token_log_probs(
            hidden=hidden_states(self.model.base_model, layout),
            head=self.model.get_output_embeddings(),
            targets=layout.targets,
            temperature=self._temperature if temperature is None else temperature,
            entropy=self._entropy if entropy is None else entropy,
            logits_per_chunk=self._logits_per_chunk,
        )
        return Scores(
            layout.scatter(log_probs), None if entropies is None else layout.scatter(entropies)
        )


class ValueScorer(ScoringModel):
    """The layers of a language model without its vocabulary layer, and one linear output."""

    def __init__(
        self, backbone: Any, *, packing: bool, reader: PictureReader | None = None
    ) -> None:
        super().__init__(backbone, packing=packing, reader=reader)
        text = backbone.config.get_text_config()
        weight = next(backbone.parameters())
        self.head = nn.Linear(text.hidden_size, 1, device=weight.device, dtype=weight.dtype)
        # All values start at 0, so that the first advantages are the returns themselves.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Batch) -> Tensor:
        """[n, L] values before each token that counts, float32; 0 where ``mask`` is 0."""
        layout = self.layout(batch)
        values: Tensor = self.head(hidden_states(self.model, layout))
        return layout.scatter(values.squeeze(-1).float())


def hidden_states(backbone: Any, layout: Layout) -> Tensor:
    """[M, H], what the layers say before each scored token."""
    packed = {} if layout.arrangement is None else {"arrangement": layout.arrangement}
    options = {
        "attention_mask": layout.attention_mask,
        "position_ids": layout.position_ids,
        "use_cache": False,
        **packed,
    }
    if layout.pictures is None:
        hidden = backbone(input_ids=layout.input_ids, **options).last_hidden_state
    else:
        hidden = vision_language.hidden_states(
            backbone, layout.input_ids, layout.pictures, **options
        )
    picked: Tensor = hidden.flatten(0, 1).index_select(0, layout.scored)
    return picked


def token_log_probs(
    *,
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: float,
    entropy: bool,
    logits_per_chunk: int,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) of the targets, and entropies, without all logits at once.

    Args:
        hidden: [M, H].
        head: Vocabulary layer, [m, H] to [m, V].
        targets: [M] int64.
        temperature: Divisor of the logits.
        entropy: Whether the entropy is wanted.
        logits_per_chunk: Where M · V exceeds it, rows are computed in chunks of at most that many
            logits, and again in the backward pass.

    Returns:
        [M] float32, and [M] float32 in nats or None.
    """
    vocabulary = int(getattr(head, "out_features", 1))
    rows = max(1, logits_per_chunk // vocabulary)

    def score(part: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(part).float()
        if temperature != 1.0:
            logits = logits / temperature
        log_probs = -functional.cross_entropy(logits, wanted, reduction="none")
        if not entropy:
            return log_probs, log_probs
        normalized = functional.log_softmax(logits, dim=-1)
        return log_probs, -(normalized.exp() * normalized).sum(dim=-1)

    if len(targets) <= rows:
        log_probs, entropies = score(hidden, targets)
        return log_probs, entropies if entropy else None
    chunks = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    scored = [checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks]
    log_probs = torch.cat([one for one, _ in scored])
    return log_probs, torch.cat([two for _, two in scored]) if entropy else None


# Linear layers and norms see no padding, and a prompt of several sequences once; in attention alone
# the sequences stand whole side by side, padded on the right, where causality hides the padding, so
# that no mask is built. T rows, F places, Z heads, K key-value heads, D head dimension.


class _Spread(torch.autograd.Function):
    """Rows [T, …] to places [F, …]; the gradient of a row is the sum of those at its places."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, arrangement: Arrangement) -> Tensor:
        ctx.arrangement = arrangement
        assert arrangement.padded is not None
        return rows.index_select(0, arrangement.padded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        arrangement, flat = ctx.arrangement, gradient.flatten(1)
        if len(arrangement.places) == len(arrangement.chosen):
            summed = flat.index_select(0, arrangement.chosen)
        else:
            summed = functional.embedding_bag(
                arrangement.places, flat, arrangement.offsets, mode="sum"
            )
        return summed.view(-1, *gradient.shape[1:]), None


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    arrangement: Arrangement | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Each token looks at those before it in its own sequence; the mask is not used.

    Args:
        module: The attention layer.
        query: [1, Z, T, D].
        key: [1, K, T, D].
        value: [1, K, T, D].
        attention_mask: None.
        scaling: Factor of the scores.
        arrangement: Where the sequences stand.
        options: What the architecture asks for besides; a ConfigError where it is not computed.

    Returns:
        [1, T, Z, D], and nothing for the attention weights.
    """
    window = options.get("sliding_window")
    assert arrangement is not None
    refused = [name for name in _NOT_COMPUTED if options.get(name) is not None]
    if window is not None and window < arrangement.longest:
        refused.append("sliding_window")
    if refused:
        raise ConfigError(
            f"{type(module).__name__} uses {refused[0]}, which is not computed without padding; "
            "nearest: false",
            key="packing",
        )
    rows = [tensor.transpose(1, 2)[0] for tensor in (query, key, value)]
    if arrangement.padded is not None:
        rows = [_Spread.apply(part, arrangement) for part in rows]  # type: ignore[no-untyped-call]
    sizes = [number * length for number, length in arrangement.shapes]
    split = zip(*(torch.split(part, sizes) for part in rows), strict=True)
    parts = [
        _attend([part.unflatten(0, shape) for part in block], scaling)
        for shape, block in zip(arrangement.shapes, split, strict=True)
    ]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    if arrangement.chosen is not None:
        flat = flat.index_select(0, arrangement.chosen)
    return flat.unsqueeze(0), None


def _attend(block: list[Tensor], scaling: float | None) -> Tensor:
    """[n · W, Z, D] from [n, W, Z or K, D] of queries, keys and values."""
    query, key, value = (part.transpose(1, 2) for part in block)
    dtype = query.dtype
    if query.device.type == "cpu" and dtype != torch.float32:
        # Torch's kernel for this on CPU is several times slower backward than the one for float32.
        query, key, value = query.float(), key.float(), value.float()
    grouped = query.shape[1] != key.shape[1]
    attended = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return attended.transpose(1, 2).flatten(0, 1).to(dtype)
