"""Actions as tokens: 256 bins of each dimension, and the distribution over them.

Brohan et al. 2023 (RT-2), as in OpenVLA (Kim et al. 2024): the last tokens of the vocabulary stand
for bins between -1 and 1. A token is written here as its *index* k among them, so that its id is
``first_id + k`` and its row of logits is k of 256.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rlinf.errors import ConfigError
from rlinf.models.adapters import LowRankLinear


class ActionTokens(torch.nn.Module):
    """Which tokens are actions, and what they mean.

    Args:
        vocabulary: Tokens of the tokenizer, V; the ids of actions are V - bins … V - 1.
        bins: Number of edges, linearly spaced in [-1, 1], and of tokens.
    """

    centers: Tensor
    """[bins] what each token index means. Ids count downwards, -1 is the last one; the first two
    mean the same, as 256 edges have 255 intervals."""
    edges: Tensor
    """[bins] of the bins, in increasing order."""

    def __init__(self, vocabulary: int, bins: int = 256) -> None:
        super().__init__()
        if vocabulary <= bins or bins < 2:
            raise ConfigError(
                f"a vocabulary of {vocabulary} tokens has no room for {bins} actions beside words",
                key="model.path",
            )
        self.bins = bins
        self.first_id = vocabulary - bins
        edges = torch.linspace(-1.0, 1.0, bins, dtype=torch.float64)
        middle = (edges[:-1] + edges[1:]) / 2
        order = (bins - 1 - torch.arange(bins)).clamp(max=bins - 2)
        self.register_buffer("centers", middle[order].float(), persistent=False)
        self.register_buffer("edges", edges.float(), persistent=False)

    def decode(self, tokens: Tensor) -> Tensor:
        """Token indices to values in (-1, 1), elementwise."""
        return self.centers[tokens]

    def encode(self, values: Tensor) -> Tensor:
        """Values, clipped to [-1, 1], to the indices of their tokens."""
        inside = values.float().clamp(-1.0, 1.0).contiguous()
        return self.bins - torch.bucketize(inside, self.edges, right=True)


def scaled_logits(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Logits [B, N, K] of K tokens, in float32, whose softmax the tokens are drawn from.

    Args:
        logits: Of the tokens that are actions; others have probability 0.
        temperature: [B], logits are divided by it; None: by 1.
        top_k: [B] int64, only the k largest logits of a position count; 0, or None: all.
        kept: [B, N] a token that counts in any case: one that was among the largest when it was
            drawn, and may be the next one by a rounding now.
    """
    scaled = logits.float()
    if temperature is not None:
        scaled = scaled / temperature.float()[:, None, None]
    if top_k is None or not bool((top_k > 0).any()):
        return scaled
    size = scaled.shape[-1]
    place = torch.where(top_k > 0, top_k, size).clamp(max=size) - 1
    ordered = scaled.detach().sort(dim=-1, descending=True).values
    least = ordered.gather(-1, place[:, None, None].expand(*scaled.shape[:2], 1))
    out = scaled < least
    if kept is not None:
        out = out.scatter(-1, kept.unsqueeze(-1), False)
    return scaled.masked_fill(out, -torch.inf)


def token_log_probs(logits: Tensor, **settings: Tensor | None) -> Tensor:
    """Log-probabilities [B, N, K] of tokens; see :func:`scaled_logits`."""
    return torch.log_softmax(scaled_logits(logits, **settings), dim=-1)


def drawn_tokens(logits: Tensor, uniform: Tensor | None) -> Tensor:
    """Tokens [B, N] where the cumulated probabilities of logits [B, N, K] pass uniform numbers
    [B, N] in [0, 1); the most probable ones without these."""
    if uniform is None:
        return logits.argmax(dim=-1)
    cumulated = logits.softmax(dim=-1).cumsum(dim=-1)
    # A float32 below 1 is at most 1 − 2⁻²⁴, so that the product, rounded too, is less than the sum:
    # never a token behind the one that completes it.
    wanted = uniform.unsqueeze(-1) * cumulated[..., -1:]
    return torch.searchsorted(cumulated, wanted, right=True).squeeze(-1)


def chosen(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [B, N] of tokens [B, N]."""
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def entropy(log_probs: Tensor) -> Tensor:
    """[B, N] in nats, of log-probabilities [B, N, K]."""
    # 0 · log 0 = 0, also in gradients.
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
    return -(finite * log_probs.exp()).sum(dim=-1)


def logits_of_rows(layer: torch.nn.Module, hidden: Tensor, rows: slice) -> Tensor:
    """Some rows of what an output layer, perhaps with an adapter, gives for hidden [..., width]."""
    weight = layer.get_parameter("weight")
    logits = functional.linear(hidden, weight[rows])
    if isinstance(layer, LowRankLinear):
        logits = logits + layer.update(hidden, rows)
    return logits
