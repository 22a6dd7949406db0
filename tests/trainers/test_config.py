"""Sections of the trainers."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from rlinf.errors import ConfigError
from rlinf.models.language_config import LoraConfig
from rlinf.trainers.config import (
    REGISTRY,
    ActorConfig,
    CriticTrainerConfig,
    FirstUpdateBounds,
    FSDPTrainerConfig,
    SupervisedConfig,
)


def test_importing_a_config_does_not_import_torch():
    code = (
        "import sys; import rlinf.trainers.config;"
        "print([m for m in ('torch', 'transformers', 'peft', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_registry_knows_the_backend():
    assert REGISTRY.names() == ["fsdp"]
    assert REGISTRY.load("fsdp") is FSDPTrainerConfig
    with pytest.raises(ConfigError, match="did you mean `fsdp`"):
        REGISTRY.load("fsdp2")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"micro_batch_size": 4, "max_tokens_per_micro_batch": 100}, "bounds the same thing"),
        ({"optim": {"value_lr": 1e-3}}, "a network of its own"),
        ({"packed": True}, "Extra inputs are not permitted"),
        ({"n_minibatches": 0}, "greater than or equal to 1"),
        ({"precision": {"param": "float16"}}, "'float32' or 'bfloat16'"),
        ({"lora": {"rank": 0}}, "greater than or equal to 1"),
    ],
)
def test_illegal_sections(section, message):
    with pytest.raises(ValidationError, match=message):
        FSDPTrainerConfig.model_validate(section)


def test_global_batch():
    config = FSDPTrainerConfig(n_minibatches=4)
    assert config.global_batch_size(512) == 128
    with pytest.raises(ConfigError, match="4 does not divide 510 sequences; nearest: 3, 5"):
        config.global_batch_size(510)


def test_tensor_ranks_must_divide():
    config = FSDPTrainerConfig(tensor_parallel_size=2)
    config.check_ranks(4)
    with pytest.raises(ConfigError, match="2 does not divide 3 ranks; nearest: 1, 3"):
        config.check_ranks(3)


def test_tensor_ranks_must_divide_the_heads():
    config = FSDPTrainerConfig(tensor_parallel_size=4)
    for heads in (4, 8, None):
        config.check_heads(heads)
    with pytest.raises(ConfigError, match=r"4 does not divide the model's 2 heads .*nearest: 2"):
        config.check_heads(2)


def test_bounds_follow_the_number_format():
    assert FSDPTrainerConfig().first_update_bounds == FirstUpdateBounds(1e-4, 0.01)
    half = FSDPTrainerConfig.model_validate({"precision": {"param": "bfloat16"}})
    assert half.first_update_bounds == FirstUpdateBounds(0.05, 0.2)
    assert FSDPTrainerConfig(first_update_kl_bound=1.0).first_update_bounds == FirstUpdateBounds(
        1.0, 0.01
    )


def test_lora_scale_and_missing_adapter(tmp_path):
    assert LoraConfig(rank=8).scale == 1.0
    assert LoraConfig(rank=8, alpha=16).scale == 2.0
    with pytest.raises(ConfigError, match="holds no adapter_model"):
        LoraConfig(path=tmp_path).check()


def test_every_key_is_described():
    for config in (
        ActorConfig,
        FSDPTrainerConfig,
        CriticTrainerConfig,
        SupervisedConfig,
        LoraConfig,
    ):
        for name, field in config.model_fields.items():
            assert field.description, f"{config.__name__}.{name}"
