"""SmolVLA against the original code (see make_parity.py), and as a policy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributions import Normal

from rlinf.errors import ConfigError
from rlinf.models.config import REGISTRY, type_of_directory
from rlinf.models.policy import draw_noise
from rlinf.models.policy_weights import travelling
from rlinf.models.vla.preprocessing import square_pixels
from rlinf.models.vla.smolvla.network import SmolVLANetwork, SmolVLASize
from rlinf.models.vla.smolvla.policy import LAYOUTS, SmolVLAPolicy
from tests.models.test_policies import env_spec
from tests.models.vla.test_loading import PARITY
from tests.models.vla.test_pi0_policy import CHUNK, ROWS, SPEC, STEPS, drawn, seen

SETTINGS: dict[str, Any] = {
    "type": "smolvla", "chunk_size": 8, "head_dim": 16, "vision_heads": 2,
    "resize_imgs_with_padding": [64, 64],
}  # fmt: skip
SEVEN = env_spec(
    observation_shapes={"states": (5,), "main_images": (48, 64, 3)},
    task_descriptions=("close the drawer",),
    action_dim=7,
    action_low=(-1.0,) * 7,
    action_high=(1.0,) * 7,
)


def build(**options: Any) -> SmolVLAPolicy:
    given = {"preset": "tiny", "num_action_chunks": CHUNK, "denoising_steps": STEPS} | options
    policy = REGISTRY.load("smolvla")(**given).build(SPEC, value_dim=1, seed=0)
    assert isinstance(policy, SmolVLAPolicy)
    return policy


def published(path: Path, **settings: Any) -> Path:
    """A directory as lerobot writes it, and beside it a tokenizer and statistics."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    shutil.copy(PARITY / "smolvla" / "model.safetensors", path)
    (path / "config.json").write_text(json.dumps(SETTINGS | settings))
    pieces = ["<unk>", "close", "the", "drawer", " ", "\n"]
    tokenizer = Tokenizer(WordLevel({p: n for n, p in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[a-z]+|."), "isolated")
    tokenizer.save(str(path / "tokenizer.json"))
    given = {"mean": [0.1] * 7, "std": [0.5] * 7}
    (path / "meta").mkdir(exist_ok=True)
    stats = {"action": given, "observation.state": {"mean": [0.2] * 5, "std": [2.0] * 5}}
    (path / "meta" / "stats.json").write_text(json.dumps(stats))
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> SmolVLAPolicy:
    path = published(tmp_path_factory.mktemp("smolvla"))
    assert type_of_directory(path) == "smolvla"
    config = REGISTRY.load("smolvla")(path=path, num_action_chunks=5, denoising_steps=4)
    config.check()
    policy = config.build(SEVEN, value_dim=1, seed=0)
    assert isinstance(policy, SmolVLAPolicy)
    return policy


@pytest.fixture(scope="module")
def io() -> dict[str, Tensor]:
    return load_file(PARITY / "smolvla" / "io.safetensors")


@pytest.fixture(scope="module")
def policy() -> SmolVLAPolicy:
    return build(train_expert_only=False)


def sampled(model: SmolVLANetwork, io: dict[str, Tensor]) -> Tensor:
    pixels = torch.stack([io["image_0"], io["image_1"]], dim=1)
    there = torch.stack([io["image_mask_0"], io["image_mask_1"]], dim=1)
    x = io["noise"]
    with torch.inference_mode():
        prefix = model.prefix(pixels, there, io["tokens"], io["token_mask"], io["state"])
        for step in range(4):
            x = x - model.denoise(prefix, x, torch.full((len(x),), 1 - step / 4))[0] / 4
    return x


def test_actions_are_those_of_the_original(original: SmolVLAPolicy, io: dict[str, Tensor]) -> None:
    assert io["actions"].abs().mean() > 0.5
    torch.testing.assert_close(sampled(original.network, io), io["actions"], atol=1e-5, rtol=0)


def test_what_is_masked_is_not_seen(original: SmolVLAPolicy, io: dict[str, Tensor]) -> None:
    changed = io | {
        "image_1": torch.cat([io["image_1"][:1], -io["image_1"][1:]]),
        "tokens": torch.where(io["token_mask"], io["tokens"], 3),
    }
    model, before = original.network, sampled(original.network, io)
    torch.testing.assert_close(sampled(model, changed), before, atol=1e-6, rtol=0)
    for name in ("image_0", "state", "tokens"):
        other = io | {name: io[name].flip(0)}
        assert (sampled(model, other) - before).abs().max() > 1e-3, name


def test_an_action_sees_those_before_it(original: SmolVLAPolicy, io: dict[str, Tensor]) -> None:
    noise = io["noise"].clone()
    noise[:, 5] += 1
    moved = (sampled(original.network, io | {"noise": noise}) - io["actions"]).abs().amax((0, 2))
    assert moved[:5].max() < 1e-5
    assert moved[5:].min() > 1e-4


def test_every_published_tensor_has_its_place() -> None:
    """Shapes of SmolVLM2-500M in 16 layers and the expert, as lerobot writes them."""
    with torch.device("meta"):
        model = SmolVLANetwork(SmolVLASize())
    both, llama = (
        "model.vlm_with_expert",
        {"mlp.gate_proj": (2560, 960), "mlp.up_proj": (2560, 960)},
    )
    vision, text = f"{both}.vlm.model.vision_model", f"{both}.vlm.model.text_model"
    expected: dict[str, tuple[int, ...]] = {
        f"{vision}.embeddings.patch_embedding.weight": (768, 3, 16, 16),
        f"{vision}.embeddings.patch_embedding.bias": (768,),
        f"{vision}.embeddings.position_embedding.weight": (1024, 768),
        f"{both}.vlm.model.connector.modality_projection.proj.weight": (960, 12288),
        f"{text}.embed_tokens.weight": (49280, 960),
        f"{text}.norm.weight": (960,),
        f"{both}.vlm.lm_head.weight": (49280, 960),
        f"{both}.lm_expert.norm.weight": (720,),
    }
    linear = {
        "state_proj": (960, 32), "action_in_proj": (720, 32), "action_out_proj": (32, 720),
        "action_time_mlp_in": (720, 1440), "action_time_mlp_out": (720, 720),
    }  # fmt: skip
    linear = {f"model.{name}": shape for name, shape in linear.items()}
    weights: dict[str, tuple[int, int]] = {}
    norms = {f"{vision}.post_layernorm": 768}
    for place in range(12):
        layer = f"{vision}.encoder.layers.{place}"
        norms |= {f"{layer}.layer_norm{number}": 768 for number in (1, 2)}
        linear |= {f"{layer}.self_attn.{n}_proj": (768, 768) for n in ("q", "k", "v", "out")}
        linear |= {f"{layer}.mlp.fc1": (3072, 768), f"{layer}.mlp.fc2": (768, 3072)}
    for place in range(16):
        layer, beside = f"{text}.layers.{place}", f"{both}.lm_expert.layers.{place}"
        keys = (320, 320 if place % 2 else 720)
        weights |= {f"{layer}.{name}": shape for name, shape in llama.items()}
        weights |= {
            f"{layer}.mlp.down_proj": (960, 2560), f"{layer}.self_attn.q_proj": (960, 960),
            f"{layer}.self_attn.k_proj": (320, 960), f"{layer}.self_attn.v_proj": (320, 960),
            f"{layer}.self_attn.o_proj": (960, 960), f"{beside}.mlp.gate_proj": (2048, 720),
            f"{beside}.mlp.up_proj": (2048, 720), f"{beside}.mlp.down_proj": (720, 2048),
            f"{beside}.self_attn.q_proj": (960, 720), f"{beside}.self_attn.o_proj": (720, 960),
            f"{beside}.self_attn.k_proj": keys, f"{beside}.self_attn.v_proj": keys,
        }  # fmt: skip
        for norm in ("input_layernorm", "post_attention_layernorm"):
            expected[f"{layer}.{norm}.weight"] = (960,)
            expected[f"{beside}.{norm}.weight"] = (720,)
    for name, width in norms.items():
        expected |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    for name, shape in linear.items():
        expected |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    expected |= {f"{name}.weight": shape for name, shape in weights.items()}

    own = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    own["language.lm_head.weight"] = (49280, 960)
    assert {LAYOUTS[0].theirs(name): shape for name, shape in own.items()} == expected
    assert {str(LAYOUTS[0].ours(name)) for name in expected} == own.keys()
    assert round(sum(torch.Size(shape).numel() for shape in own.values()) / 1e6) == 450


def test_statistics_are_those_that_lerobot_saves_with_a_model(tmp_path: Path) -> None:
    path = published(tmp_path)
    shutil.rmtree(path / "meta")
    tensors = {"action.mean": torch.full((7,), 0.3), "action.std": torch.full((7,), 0.5),
               "observation.state.mean": torch.ones(5), "observation.state.std": torch.ones(5),
               "observation.images.top.mean": torch.zeros(3, 1, 1)}  # fmt: skip
    for name, wrong in (("preprocessor_step_5_normalizer", 0.0),
                        ("postprocessor_step_0_unnormalizer", 1.0)):  # fmt: skip
        file = path / f"policy_{name}_processor.safetensors"
        save_file({key: each + wrong for key, each in tensors.items()}, file)
    policy = REGISTRY.load("smolvla")(path=path, num_action_chunks=5).build(SEVEN)
    assert isinstance(policy, SmolVLAPolicy)
    given = policy._to_model(torch.zeros(1, 8, 7), {})
    torch.testing.assert_close(given, torch.full((1, 8, 7), -0.6), atol=1e-5, rtol=0)
    torch.testing.assert_close(policy._states({"states": torch.ones(1, 5)}), torch.zeros(1, 5))


def test_missing_and_left_over_weights_are_one_error(tmp_path: Path) -> None:
    path = published(tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.state_proj.bias"]
    save_file(tensors | {"model.more": torch.zeros(1)}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 missing .*state_proj\.bias; 1 unknown .*model\.more"):
        REGISTRY.load("smolvla")(path=path, num_action_chunks=5).build(SEVEN)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"add_image_special_tokens": True}, "add_image_special_tokens: True .* with False"),
        ({"resize_imgs_with_padding": [512, 512]}, r"with \[64, 64\]"),
        ({"normalization_mapping": {"STATE": "MINMAX"}}, r"mapping\.STATE: MINMAX .* MIN_MAX"),
        ({"self_attn_every_n_layers": -1}, "every ≥ 1"),
        ({"chunk_size": 3}, "nearest: 3"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    path = published(tmp_path, **settings)
    with pytest.raises(ConfigError, match=match):
        REGISTRY.load("smolvla")(path=path, num_action_chunks=5).build(SEVEN)


def test_a_published_directory_becomes_the_policy(original: SmolVLAPolicy) -> None:
    generator = torch.Generator().manual_seed(0)
    observations = {
        "states": torch.rand(2, 5, generator=generator),
        "main_images": torch.randint(0, 256, (2, 48, 64, 3), dtype=torch.uint8),
    }
    tokens, mask = original.prompts(observations)
    assert tokens[0][mask[0]].tolist() == [1, 4, 2, 4, 3, 5]  # with a line end, without more
    sample = original.sample(observations, draw_noise(original.noise, (2,), generator))
    assert (original.horizon, original.chunk) == (8, 5)
    assert sample.forward_inputs["chain"].shape == (2, 2, 8, 7)

    raw = torch.zeros(2, 8, 7)
    given = original._to_model(raw, {})
    torch.testing.assert_close(given, torch.full((2, 8, 7), -0.2), atol=1e-5, rtol=0)
    torch.testing.assert_close(original._to_env(given, {}), raw[:, :5], atol=1e-5, rtol=0)
    states = (observations["states"] - 0.2) / 2.0
    torch.testing.assert_close(original._read(observations)[1][:, :5], states, atol=1e-5, rtol=0)


def test_pictures_are_at_the_lower_right() -> None:
    white = torch.full((1, 32, 64, 3), 255, dtype=torch.uint8)
    found = square_pixels(white, 64, centred=False)
    assert bool((found[:, :, :32] == -1).all())
    torch.testing.assert_close(found[:, :, 32:], torch.ones(1, 3, 32, 64), atol=1e-6, rtol=0)


def test_a_directory_of_lerobot_before_0_4_is_read_with_its_statistics(tmp_path: Path) -> None:
    shutil.rmtree(published(tmp_path) / "meta")
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    for part, feature, dim in (("normalize_inputs", "observation_state", 5),
                               ("unnormalize_outputs", "action", 7)):  # fmt: skip
        held[f"{part}.buffer_{feature}.mean"] = torch.full((dim,), 0.25)
        held[f"{part}.buffer_{feature}.std"] = torch.full((dim,), 2.0)
    save_file(held, file)
    config = REGISTRY.load("smolvla")(path=tmp_path, num_action_chunks=5, denoising_steps=4)
    policy = config.build(SEVEN, value_dim=0, seed=0)
    assert policy._statistics.actions.required("std").tolist() == [2.0] * 7
    white = torch.full((1, 32, 64, 3), 255, dtype=torch.uint8)
    assert torch.equal(policy._pixels(white), square_pixels(white, 64, centred=False))


def test_tiny_is_small_and_its_chains_are_replayed(policy: SmolVLAPolicy) -> None:
    assert sum(each.numel() for each in policy.parameters()) < 3e6
    sample = policy.sample(seen(), drawn(policy))
    found = policy.evaluate_actions(seen() | sample.forward_inputs)
    assert sample.values is not None
    assert torch.equal(found.log_probs, sample.log_probs)
    assert torch.equal(found.values, sample.values)
    chain, step = sample.forward_inputs["chain"], sample.forward_inputs["step_index"]
    with torch.no_grad():
        prefix, states = policy._read(seen())
        mean, std = policy._move(prefix, states, chain[:, 0], step)
    expected = Normal(mean, std).log_prob(chain[:, 1])[:, :CHUNK, :3]
    torch.testing.assert_close(sample.log_probs, expected, atol=2e-5, rtol=1e-5)


def test_imitation_is_flow_matching_and_reaches_all_parts(policy: SmolVLAPolicy) -> None:
    noise = draw_noise(policy.imitation_noise, (ROWS,), torch.Generator().manual_seed(1))
    low, high = torch.tensor(SPEC.action_low), torch.tensor(SPEC.action_high)
    raw = low + 0.3 * torch.rand(ROWS, CHUNK, 3)
    errors = policy.imitation_errors(seen() | {"raw_actions": raw} | noise)
    actions = 2 * (raw - low) / (high - low) - 1
    time = 0.001 + 0.999 * noise["time"] ** (1 / 1.5)
    x = time[:, None, None] * noise["noise"] + (1 - time[:, None, None]) * actions
    with torch.no_grad():
        velocity = policy.network.denoise(policy._read(seen())[0], x, time)[0]
    torch.testing.assert_close(errors, (velocity - (noise["noise"] - actions)).square())
    policy.zero_grad()
    errors.mean().backward()
    names = {name for name, each in policy.named_parameters() if each.grad is not None}
    for part in ("vision.patch_embedding", "vision.projector", "language.embed_tokens",
                 "expert.layers.1.self_attn.k_proj", "state_proj"):  # fmt: skip
        assert any(name.startswith(f"network.{part}") for name in names), part


def test_by_default_what_reads_is_left_as_it_is() -> None:
    names = travelling(build())
    assert not any("language" in name or "vision" in name for name in names)
    assert {"network.state_proj.weight", "network.expert.layers.0.down_proj.weight"} <= names.keys()
