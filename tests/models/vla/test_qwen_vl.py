"""Qwen-VL as policies: what they say is what the library says of the same text and pictures."""

from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("transformers")

import torch
from pydantic import ValidationError

from rlinf.data.pictures import VISION_TOKENS, write_settings
from rlinf.data.tokenizer import train_tokenizer
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError
from rlinf.models.adapters import adapt_policy
from rlinf.models.config import REGISTRY
from rlinf.models.language_config import AdapterConfig
from rlinf.models.policy_weights import merged_adapters
from rlinf.models.vla.qwen_vl import files
from rlinf.models.vla.qwen_vl.config import QwenVLConfig
from rlinf.models.vla.qwen_vl.files import question
from rlinf.models.vla.token_policy import TOKENS

CHUNK, ACTIONS, ROWS = 2, 3, 3
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
ONE = pytest.mark.parametrize("policy", ["qwen2_5_vl"], indirect=True)
"""For what does not depend on the family."""
TEXTS = ("Open the drawer", "close the big drawer now")


def spec(**replaced):
    values = {
        "observation_shapes": {"main_images": (48, 64, 3), "extra_images": (32, 32, 3),
                               "task_ids": ()},
        "observation_dtypes": {"main_images": "uint8", "extra_images": "uint8",
                               "task_ids": "int64"},
        "action_kind": "continuous",
        "action_dim": ACTIONS,
        "action_low": (-1.0,) * ACTIONS,
        "action_high": (1.0,) * ACTIONS,
        "task_descriptions": TEXTS,
        "max_episode_steps": 20,
    }  # fmt: skip
    return EnvSpec(**{**values, **replaced})


def build(**options):
    given = {"num_action_chunks": CHUNK, "cameras": ("main_images", "extra_images"), **options}
    if "path" not in given:
        given["preset"] = "tiny"
    config = QwenVLConfig.model_validate(given)
    return config.build(spec(), value_dim=1, seed=0).eval()


def seen():
    generator = torch.Generator().manual_seed(0)
    return {
        "main_images": torch.randint(0, 256, (ROWS, 48, 64, 3), generator=generator).byte(),
        "extra_images": torch.randint(0, 256, (ROWS, 32, 32, 3), generator=generator).byte(),
        "task_ids": torch.arange(ROWS) % 2,
    }


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request):
    found = build(family=request.param, temperature=1.5)
    with torch.no_grad():
        for parameter in found.network.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return found


def test_log_probs_are_those_of_the_library(policy):
    assert "qwen_vl" in REGISTRY.names()
    assert sum(parameter.numel() for parameter in policy.parameters()) <= 3_000_000
    noise = {"actions": torch.rand(ROWS, CHUNK, ACTIONS)}
    observations = seen()
    sample = policy.sample(observations, noise)
    scored = policy.evaluate_actions({**observations, **sample.forward_inputs})
    assert (scored.log_probs - sample.log_probs).abs().max() < 1e-5
    network, first = policy.network, policy.tokens.first_id
    for row in range(ROWS):
        ids, mask = policy.instructions({"task_ids": observations["task_ids"][row : row + 1]})
        said = sample.forward_inputs[TOKENS][row].flatten() + first
        text = torch.cat([network.beginning, ids[mask], said])[None]
        kinds = torch.zeros_like(text).int()
        kinds[0, network.places] = 1
        shown = [observations[name][row : row + 1] for name in ("main_images", "extra_images")]
        pixels = [cut(each)[0] for cut, each in zip(policy.patches, shown, strict=True)]
        network.model.model.rope_deltas = None
        logits = network.model(
            input_ids=text,
            attention_mask=torch.ones_like(text),
            pixel_values=torch.cat(pixels),
            image_grid_thw=network.grids,
            mm_token_type_ids=kinds,
        ).logits[0, -len(said) - 1 : -1, first:]
        expected = (logits / 1.5).log_softmax(-1).gather(-1, said[:, None] - first)[:, 0]
        assert (expected.view(CHUNK, ACTIONS) - sample.log_probs[row]).abs().max() < 1e-5


@ONE
def test_recorded_actions_are_imitated_and_what_is_frozen_stays(policy):
    inputs = {**seen(), "raw_actions": torch.zeros(ROWS, CHUNK, ACTIONS)}
    assert policy.imitation_errors(inputs).shape == (ROWS, CHUNK, ACTIONS)
    frozen = build(family="qwen3_vl", freeze_vision=True)
    names = {name for name, each in frozen.named_parameters() if not each.requires_grad}
    assert names
    assert all(".visual." in name for name in names)
    assert len(frozen.repeated_layers()) == 4


def published(policy, folder):
    """The model in its published layout; its tokenizer has 256 rows less than the model."""
    words = "".join([question(text) for text in TEXTS]).replace("<|vision_end|>", "")
    train_tokenizer([words, "user<|im_start|>"], folder, whole=VISION_TOKENS)
    write_settings(folder, patch_size=8)
    policy.network.model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def directory(policy, tmp_path_factory):
    return published(policy, tmp_path_factory.mktemp("published"))


@ONE
def test_a_published_directory_is_read(policy, directory):
    loaded = build(path=directory, max_prompt_tokens=200)
    own = policy.network.model.state_dict()
    for name, value in loaded.network.model.state_dict().items():
        assert torch.equal(value, own[name]), name
    noise = {"actions": torch.rand(ROWS, CHUNK, ACTIONS)}
    sample = loaded.sample(seen(), noise)
    again = loaded.evaluate_actions({**seen(), **sample.forward_inputs})
    assert (again.log_probs - sample.log_probs).abs().max() < 1e-5


def test_adapters_leave_an_output_layer_alone_that_is_the_embedding(tmp_path, monkeypatch):
    untied = files.ArchitectureConfig
    monkeypatch.setattr(
        files, "ArchitectureConfig", lambda **k: untied(**(k | {"tie_word_embeddings": True}))
    )
    folder = published(build(family="qwen2_5_vl"), tmp_path)
    adapted, plain = (build(path=folder, max_prompt_tokens=200) for _ in range(2))
    model = adapted.network.model
    assert model.lm_head.weight is model.get_input_embeddings().weight
    with pytest.raises(ConfigError, match=r"lm_head has the weights of the input embedding.*legal"):
        adapt_policy(adapted, AdapterConfig(rank=2, target_modules=("lm_head",)), seed=0)
    adapt_policy(adapted, AdapterConfig(rank=2), seed=0)
    with torch.no_grad():
        for name, each in adapted.named_parameters():
            if "lora_B" in name:
                each.normal_(0.0, 0.3)
    sample = adapted.sample(seen(), {"actions": torch.rand(ROWS, CHUNK, ACTIONS)})
    state = adapted.state_dict()
    plain.load_state_dict(merged_adapters(state, state))
    found = plain.evaluate_actions({**seen(), **sample.forward_inputs})
    assert (found.log_probs - sample.log_probs).abs().max() < 1e-4


@ONE
def test_patches_are_those_of_the_published_processor(policy, directory):
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    picture = seen()["main_images"][:1]
    published = Qwen2VLImageProcessorPil.from_pretrained(directory)
    found = published(images=[Image.fromarray(picture[0].numpy())], return_tensors="pt")
    own = policy.patches[0](picture)[0]
    assert own.shape == found["pixel_values"].shape
    assert (own - found["pixel_values"]).abs().max() < 1e-5


@ONE
def test_what_does_not_fit_is_refused(policy, directory, tmp_path):
    assert policy.network.places.ndim == 1
    with pytest.raises(ValidationError, match="the directory says which it is"):
        build(path=directory, family="qwen3_vl")
    with pytest.raises(ConfigError, match=r"has \d+ tokens, the model is given at most 3"):
        build(max_prompt_tokens=3)
    small = build(max_image_tokens=4)
    assert len(small.network.places) < len(build().network.places)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(ConfigError, match="reads text only"):
        build(path=tmp_path)


@ONE
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_prompt_tokens": 2}, r"^model\.max_prompt_tokens: .* the model is given at most 2"),
        ({}, r"^model\.path: .*model\.safetensors"),
    ],
)
def test_what_is_small_is_refused_before_a_weight_is_read(
    policy, directory, tmp_path, options, told
):
    assert policy.tokens
    for file in directory.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    with pytest.raises(ConfigError, match=told):
        build(path=tmp_path, **{"max_prompt_tokens": 200, **options})
