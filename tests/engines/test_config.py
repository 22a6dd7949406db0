"""Sections of engines and of sampling, and the packages behind them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.engines.config import REGISTRY, HFEngineConfig, SamplingConfig, VLLMEngineConfig
from rlinf.engines.protocol import Lora, ModelSource
from rlinf.engines.weight_files import AdapterFile, end_tokens_of, given_names
from rlinf.errors import ConfigError, MissingPackageError


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"max_new_tokens": 4, "min_new_tokens": 6}, "nearest: 4"),
        ({"greedy": True, "temperature": 0.5}, "leave it at 1.0"),
        ({"temperature": 0.0}, "must be > 0; the most likely token each time is `greedy: true`"),
        ({"temperature": -1.0}, "greater than 0"),
        ({"top_p": 1.5}, "less than or equal to 1"),
        ({"stop": [""]}, "at least 1 character"),
        ({"max_tokens": 4}, "Extra inputs"),
    ],
)
def test_illegal_sampling_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingConfig.model_validate(section)


def test_engines_are_found_by_name() -> None:
    assert REGISTRY.names() == ["hf", "sglang", "vllm"]
    assert REGISTRY.load("hf") is HFEngineConfig
    with pytest.raises(ConfigError, match="vllm"):
        REGISTRY.load("vlm")


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_missing_package_is_named(name: str) -> None:
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(MissingPackageError, match=name):
        REGISTRY.load(name)().build(ModelSource(path=Path()))


def test_options_cannot_write_a_value_twice() -> None:
    with pytest.raises(ValueError, match="max_num_seqs is written elsewhere"):
        VLLMEngineConfig(options={"max_num_seqs": 3})
    assert VLLMEngineConfig(options={"block_size": 16}).options == {"block_size": 16}


def test_an_adapter_is_written_as_servers_read_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    file = AdapterFile(Lora(rank=2, alpha=8.0))
    names = [f"base_model.model.m.0.q_proj.lora_{part}.weight" for part in "AB"]
    folder = file.write({names[0]: torch.ones(2, 4), names[1]: torch.ones(4, 2)})
    settings = peft.PeftConfig.from_pretrained(folder)
    assert (settings.r, settings.lora_alpha, set(settings.target_modules)) == (2, 8.0, {"q_proj"})
    with pytest.raises(ValueError, match="norm belongs to no adapter"):
        file.write({"norm": torch.ones(2)})
    with pytest.raises(ValueError, match="no tensors"):
        file.write({})


def test_a_model_directory_names_its_end_tokens_and_weights(tmp_path: Path) -> None:
    assert end_tokens_of(tmp_path) == ()
    assert given_names(tmp_path) is None
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert end_tokens_of(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert end_tokens_of(tmp_path) == (7, 9)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x"}}')
    assert given_names(tmp_path) == {"a"}
