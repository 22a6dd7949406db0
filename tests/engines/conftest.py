"""A tiny model, and requests to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.engines.config import HFEngineConfig, SamplingConfig
from rlinf.engines.protocol import GenerationRequest, ModelSource

VOCABULARY = 61


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny matrices are slower in two threads, much slower on busy cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model() -> Any:
    """A Qwen3 of random weights; nobody changes it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=256,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).train()


@pytest.fixture
def build(model: Any) -> Callable[..., Any]:
    """Builds an engine on the model."""

    def build_engine(source: Any = None, **config: Any) -> Any:
        return HFEngineConfig(**config).build(ModelSource(module=source or model))

    return build_engine


def requests(count: int, *, group: int = 4, longest: int = 30, **sampling: Any) -> list[Any]:
    """Requests in groups of equal prompts, each with its own length limit."""
    rng = np.random.default_rng(1)
    made = []
    for number in range(count):
        if number % group == 0:
            prompt = rng.integers(2, VOCABULARY, rng.integers(1, 24))
        limit = int(rng.integers(1, longest + 1))
        how = SamplingConfig(**{"max_new_tokens": limit, **sampling})
        made.append(
            GenerationRequest(request_id=number, prompt_tokens=prompt, seed=number, sampling=how)
        )
    return made


def scores(model: Any, request: GenerationRequest, tokens: np.ndarray) -> np.ndarray:
    """[L] log-probs of a completion by one full forward pass."""
    text = np.concatenate([request.prompt_tokens, tokens])
    with torch.no_grad():
        logits = model(torch.from_numpy(text)[None]).logits[0] / request.sampling.temperature
    positions = torch.arange(len(request.prompt_tokens) - 1, len(text) - 1)
    found: np.ndarray = logits.log_softmax(-1)[positions, torch.from_numpy(tokens)].numpy()
    return found
