"""Models of a few thousand weights in the architectures that recipes are for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlinf.cli.main import main

CHARACTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-*/=%()[]{}.,:;?!'\\$_^ \n"
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a model with its tokenizer, once for each architecture."""
    pytest.importorskip("transformers")
    made: dict[str, Path] = {}

    def directory(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = write_model(architecture, tmp_path_factory.mktemp(architecture))
        return made[architecture]

    return directory


def write_model(architecture: str, path: Path, *, marks: Sequence[str] = ()) -> Path:
    """A model with its tokenizer, of which each of the marks is one token."""
    import torch
    import transformers

    from rlinf.data.tasks import ANSWER_TAGS
    from rlinf.data.tokenizer import train_tokenizer
    from tests.trainers.language_models import EXPERTS, LATENT

    tokenizer = train_tokenizer([CHARACTERS], path, whole=(*ANSWER_TAGS, *marks))
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if architecture == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**sizes, **EXPERTS, head_dim=8, num_experts=4)
    elif architecture == "deepseek_v3":
        config = transformers.DeepseekV3Config(**sizes | EXPERTS | LATENT)
    else:
        config = transformers.Qwen2Config(**sizes)
    assert config.model_type == architecture
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture
def vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For checks that start nothing: they look only whether the package is there."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return real("json") if name == "vllm" else real(name, package)

    monkeypatch.setattr("rlinf.engines.config.find_spec", find_spec)


def rlinf(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code and both outputs of a command line."""
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err
