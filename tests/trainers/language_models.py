"""Tiny models and batches for the tests of this room."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlinf.algorithms.base_config import REGISTRY
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import Algorithm
from rlinf.trainers.config import FSDPTrainerConfig
from rlinf.trainers.ranks import Ranks
from rlinf.trainers.trainer import Trainer

VOCABULARY, PROMPT, LENGTH = 19, 5, 7

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    # Every head has keys and values of its own, made from the latent ones.
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "v_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def model(family: str = "qwen2", *, tied: bool = True, seed: int = 0, **sizes: Any) -> Any:
    """A causal language model with random weights."""
    torch.manual_seed(seed)
    values = SIZES | {"tie_word_embeddings": tied} | sizes
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**values))
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**values, head_dim=8))
    if family == "qwen3_moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**values, **EXPERTS, num_experts=4, head_dim=8))
    if family == "deepseek_v3":
        latent = DeepseekV3ForCausalLM(DeepseekV3Config(**values | EXPERTS | LATENT))
        for name, buffer in latent.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer))
        return latent
    return Qwen2ForCausalLM(Qwen2Config(**values))


def random_batch(
    sequences: int = 12, *, group_size: int = 4, seed: int = 0, **replaced: Any
) -> Batch:
    """Prompts of groups, responses of different lengths, and everything an algorithm asks for."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    shape = (sequences, LENGTH)
    groups = torch.arange(sequences) // group_size
    prompts = integers(1, PROMPT + 1, sequences, 1)[groups]
    lengths = integers(1, LENGTH + 1, sequences, 1)
    prompt_mask = torch.arange(PROMPT) >= PROMPT - prompts
    mask = torch.arange(LENGTH) < lengths
    attention_mask = torch.cat([prompt_mask, mask], dim=1)
    ids = integers(3, VOCABULARY, sequences, PROMPT + LENGTH)
    ids[:, :PROMPT] = ids[groups, :PROMPT]
    tensors: dict[str, Any] = {
        "inputs": {
            "input_ids": torch.where(attention_mask, ids, 0),
            "attention_mask": attention_mask,
        },
        "mask": mask.float(),
        "log_probs": -normal(*shape).abs() - 2.0,
        "proximal_log_probs": -normal(*shape).abs() - 2.0,
        "reference_log_probs": -normal(*shape).abs() - 2.0,
        "values": normal(*shape),
        "rewards": normal(sequences),
        "groups": groups,
        "versions": torch.zeros(shape, dtype=torch.int64),
        "truncated": torch.zeros(sequences, dtype=torch.bool),
        "valid": torch.ones(sequences, dtype=torch.bool),
    }
    return Batch(**(tensors | replaced))


def algorithm(name: str = "grpo", **keys: Any) -> Algorithm:
    """An algorithm that never refuses an update, with other keys at their defaults."""
    keys = {"early_stop_imp_ratio": None} | keys
    built: Algorithm = (
        REGISTRY.load(name).model_validate({"type": name} | keys).build(family="tokens")
    )
    return built


def trainer(
    of: Any = None,
    *,
    name: str = "grpo",
    keys: dict[str, Any] | None = None,
    ranks: Ranks | None = None,
    **config: Any,
) -> Trainer:
    """A trainer of a tiny model at a learning rate that shows."""
    config = {"optim": {"lr": 1e-2}} | config
    return FSDPTrainerConfig.model_validate(config).build(
        model() if of is None else of,
        algorithm(name, **(keys or {})),
        ranks=ranks or Ranks(),
        total_steps=10,
        seed=3,
    )


def log_probs_and_entropy(one: Trainer, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the tokens that count, each [N, L]."""
    policy = one.modules.modules["policy"]

    def score(part: Batch) -> list[torch.Tensor]:
        found = policy(part, entropy=True)
        return [found.log_probs, found.entropy]

    log_probs, entropy = one.evaluate(batch, score)
    return log_probs, entropy


def naive_log_probs(of: Any, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """Sequence by sequence without padding, all logits."""
    result = torch.zeros(batch.mask.shape)
    offset = batch.inputs["input_ids"].shape[1] - batch.mask.shape[1]
    for row in range(len(batch)):
        attended = batch.inputs["attention_mask"][row]
        ids = batch.inputs["input_ids"][row][attended]
        with torch.no_grad():
            logits = of(input_ids=ids[None]).logits[0].float() / temperature
        log_probs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        places = attended.nonzero().flatten()[1:]
        for place, value in zip(places.tolist(), log_probs.tolist(), strict=True):
            if place >= offset and batch.mask[row, place - offset]:
                result[row, place - offset] = value
    return result
