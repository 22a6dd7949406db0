"""Adapters: what is trained, sent and saved."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from rlinf.trainers.config import FSDPTrainerConfig
from rlinf.trainers.language_trainers import save_pretrained
from tests.trainers.language_models import algorithm, model, naive_log_probs, random_batch, trainer

LORA = {"lora": {"rank": 4, "alpha": 8.0}}


def trained(**config):
    one = trainer(model(), keys={"kl_beta": 0.1}, **(LORA | config))
    batch = algorithm("grpo").prepare(random_batch())[0]
    for step in range(2):
        one.train(batch, step)
    return one


def test_a_fresh_adapter_changes_nothing():
    batch = random_batch()
    one = trainer(model(), **LORA)
    torch.testing.assert_close(
        one.log_probs(batch), naive_log_probs(model(), batch), atol=1e-5, rtol=0
    )


def test_only_the_adapter_is_trained_and_the_reference_is_the_rest():
    batch, base = random_batch(), model()
    one = trained()
    assert {"lora_" in name for name in one.modules.held["policy"].named} == {True}
    expected = naive_log_probs(base, batch)
    assert (one.log_probs(batch) - expected).abs().max() > 1e-2
    torch.testing.assert_close(one.reference_log_probs(batch), expected, atol=1e-5, rtol=0)
    for name, parameter in one.modules.modules["policy"].model.named_parameters():
        if "lora_" not in name:
            plain = name.replace(".base_layer.", ".")
            assert torch.equal(parameter, base.get_parameter(plain)), name
    assert (one.log_probs(batch) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("target", [None, ["q_proj", "down_proj"]])
def test_merged_weights_are_those_of_a_plain_model(target):
    batch = random_batch()
    one = trained(lora={"rank": 4, "target_modules": target})
    plain = model()
    weights = dict(one.weights())
    assert list(weights) == [name for name, _ in plain.named_parameters()]
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(
        naive_log_probs(plain, batch), one.log_probs(batch), atol=1e-5, rtol=0
    )


def test_saved_merged_and_alone(tmp_path):
    batch = random_batch()
    one = trained()
    save_pretrained(one, tmp_path)
    # Others may read the weights as they do the rest.
    assert len({file.stat().st_mode for file in tmp_path.rglob("*") if file.is_file()}) == 1
    expected = one.log_probs(batch)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(naive_log_probs(merged, batch), expected, atol=1e-5, rtol=0)
    alone = PeftModel.from_pretrained(model(), tmp_path / "adapter")
    torch.testing.assert_close(naive_log_probs(alone, batch), expected, atol=1e-5, rtol=0)
    names = set(alone.state_dict())
    for name, _ in one.weights("adapter"):
        assert name.replace(".weight", ".default.weight") in names

    again = trainer(model(), lora={"rank": 4, "alpha": 8.0, "path": str(tmp_path / "adapter")})
    torch.testing.assert_close(again.log_probs(batch), expected, atol=1e-6, rtol=0)


def test_state_holds_the_adapter_and_continues():
    one, other = trained(), trainer(model(), keys={"kl_beta": 0.1}, **LORA)
    other.load_state_dict(one.state_dict())
    batch = random_batch()
    assert torch.equal(one.log_probs(batch), other.log_probs(batch))
    assert all("lora_" in name for name in one.state_dict()["modules"]["policy"]["master"])


def test_frozen_weights_in_the_pages_of_a_file_stay_while_the_rest_is_offloaded(tmp_path):
    batch = algorithm("grpo").prepare(random_batch())[0]
    model().save_pretrained(tmp_path)
    everything = {"weights": True, "gradients": True, "optimizer": True}

    def read(**config):
        return trainer(AutoModelForCausalLM.from_pretrained(tmp_path), **LORA, **config)

    one, other = read(offload=everything), read()
    policy = one.modules.held["policy"]
    weights = list(policy.module.parameters())
    frozen = next(weight for weight in weights if not weight.requires_grad)
    assert not frozen.untyped_storage().resizable()  # else this test asks nothing
    for step in range(2):
        one.train(batch, step)
        other.train(batch, step)
        one.offload()
        assert {w.untyped_storage().nbytes() for w in weights if w.requires_grad} == {0}
        one.onload()
    torch.testing.assert_close(one.log_probs(batch), other.log_probs(batch), atol=0, rtol=0)


def test_a_plain_model_has_no_adapter_to_send():
    with pytest.raises(ValueError, match="write a section lora"):
        list(trainer().weights("adapter"))


def test_adapters_are_not_divided():
    with pytest.raises(ValidationError, match="adapters are not divided over ranks; nearest: 1"):
        FSDPTrainerConfig.model_validate({"lora": {}, "tensor_parallel_size": 2})
