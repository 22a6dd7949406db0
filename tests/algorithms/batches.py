"""Batches of token sequences with random content for the tests of this room."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlinf.algorithms.base_config import REGISTRY, AlgorithmConfig
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import Algorithm

VOCABULARY = 7
PROMPT = 3


def random_batch(
    *,
    sequences: int = 8,
    length: int = 6,
    group_size: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **replaced: Any,
) -> Batch:
    """Responses of different lengths, all log-probs and values given, unless replaced."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    shape = (sequences, length)
    lengths = torch.randint(1, length + 1, (sequences,), generator=generator)
    mask = (torch.arange(length) < lengths.unsqueeze(1)).to(dtype)
    log_probs = -normal(*shape).abs() - 0.05
    tensors: dict[str, Any] = {
        "inputs": {
            "input_ids": torch.randint(
                0, VOCABULARY, (sequences, PROMPT + length), generator=generator
            ),
            "attention_mask": torch.cat([torch.ones(sequences, PROMPT), mask], dim=1).bool(),
        },
        "mask": mask,
        "log_probs": log_probs,
        "proximal_log_probs": log_probs + 0.3 * normal(*shape),
        "reference_log_probs": log_probs + 0.5 * normal(*shape),
        "values": normal(*shape),
        "rewards": normal(sequences),
        "groups": torch.arange(sequences) // group_size,
        "versions": torch.randint(2, 6, shape, generator=generator),
        "version": 5,
        "truncated": torch.zeros(sequences, dtype=torch.bool),
        "valid": torch.ones(sequences, dtype=torch.bool),
    }
    return Batch(**(tensors | replaced))


def build(name: str, **keys: Any) -> Algorithm:
    """An algorithm by its name, with other keys at their defaults."""
    config: AlgorithmConfig = REGISTRY.load(name).model_validate({"type": name} | keys)
    return config.build(family="tokens")


EVERY_ALGORITHM: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "grpo, all options": (
        "grpo",
        {
            "kl_beta": 0.1,
            "kl_reward_beta": 0.05,
            "entropy_bonus": 0.01,
            "clip_ratio_c": 1.5,
            "loss_agg_func": "seq-mean-token-mean",
            "proximal": "recomputed",
            "importance_sampling": "token",
            "normalize_advantages": True,
            "overlong_filter": True,
        },
    ),
    "ppo": ("ppo", {"gae_lambda": 0.9, "kl_reward_beta": 0.1}),
    "dapo": ("dapo", {"safe_length": 2, "max_length": 5}),
    "dr_grpo": ("dr_grpo", {"loss_agg_length": 10}),
    "reinforce_pp": ("reinforce_pp", {"kl_reward_beta": 0.1}),
    "reinforce_pp, baseline": (
        "reinforce_pp",
        {"group_baseline": True, "kl_beta": 0.1, "kl_penalty_type": "k2"},
    ),
    "rloo": ("rloo", {"kl_reward_beta": 0.05}),
    "rloo, sequence weights": (
        "rloo",
        {
            "proximal": "recomputed",
            "importance_sampling": "sequence",
            "importance_sampling_mode": "mask",
        },
    ),
    "gspo": ("gspo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}),
    "gspo-token": ("gspo", {"per_token": True, "clip_ratio_low": 0.1, "clip_ratio_high": 0.1}),
    "cispo": ("cispo", {"clip_ratio_high": 0.3}),
    "decoupled_ppo": ("decoupled_ppo", {}),
    "decoupled_ppo, interpolated": (
        "decoupled_ppo",
        {"proximal": "interpolated", "advantage": "gae", "normalize_advantages": True},
    ),
}
"""Every algorithm and every option that acts on the loss at least once."""


class TinyModel(torch.nn.Module):
    """Logits of a token from the two before it, in float32; small enough for any test."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(0.5 * torch.randn(*shape, generator=generator))

        self.embedding = parameter(VOCABULARY, 5)
        self.recurrent = parameter(5, 5)
        self.head = parameter(5, VOCABULARY)
        self.value_head = parameter(5)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[n, L] log-probs, entropies and values of the response tokens."""
        embedded = self.embedding[input_ids]
        before, present = embedded[:, PROMPT - 2 : -2], embedded[:, PROMPT - 1 : -1]
        hidden = torch.tanh(present + before @ self.recurrent)
        log_softmax = (hidden @ self.head).log_softmax(dim=-1)
        picked = log_softmax.gather(-1, input_ids[:, PROMPT:].unsqueeze(-1)).squeeze(-1)
        entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
        return picked, entropy, hidden @ self.value_head
