"""WALL-OSS against the original code (see make_wall_parity.py), and as a policy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from torch.nn import functional

from rlinf.errors import ConfigError
from rlinf.models.config import type_of_directory
from rlinf.models.policy import draw_noise
from rlinf.models.policy_weights import travelling
from rlinf.models.vla.preprocessing import resized_pixels
from rlinf.models.vla.wall_oss.network import WallNetwork, WallPrefix, WallSize, grid_positions
from rlinf.models.vla.wall_oss.policy import LAYOUTS, WallOSSPolicy
from rlinf.models.vla.wall_oss.vision import _DEVIATION, _MEAN
from tests.models.test_policies import env_spec
from tests.models.vla.support import (
    built,
    imitated,
    reaches,
    refuses_a_long_instruction_first,
)
from tests.models.vla.test_loading import PARITY
from tests.models.vla.test_pi0_policy import ROWS, STEPS, seen

PICTURE, STATE, ACTION, HORIZON, ACTIONS, STATES = 20, 22, 23, 3, 4, 5
SETTINGS: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLMoEForAction"], "model_type": "qwen2_5_vl", "chunk_size": HORIZON,
    "resolution": 32, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
    "vision_config": {"num_heads": 2, "window_size": 16, "fullatt_block_indexes": [1]},
}  # fmt: skip
FOUR = env_spec(
    observation_shapes={"states": (4,), "main_images": (16, 32, 3), "wrist_images": (32, 32, 3)},
    observation_dtypes={"states": "float32", "main_images": "uint8", "wrist_images": "uint8"},
    task_descriptions=("close the drawer", "open"),
    action_dim=3,
    action_low=(-1.0,) * 3,
    action_high=(1.0,) * 3,
)
VIEWS = {"cameras": ("main_images", "wrist_images")}


def published(path: Path, **settings: Any) -> Path:
    """A directory as wall-x writes it, with units of a set that it was trained on."""
    tensors = load_file(PARITY / "wall_oss" / "model.safetensors")
    units = {f"action_preprocessor.normalizer_{each}.min.a/set": torch.zeros(4)
             for each in ("action", "propri")}  # fmt: skip
    tensors = {name: each.float() for name, each in tensors.items()} | units
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(SETTINGS | settings))
    words = ["<unk>", "Observation", "Instruction", "close", "the", "drawer", "open", "user",
             "front", "left", "wrist", "view", ":", ".", "Proprioception", "robot"]  # fmt: skip
    vocabulary = {word: number for number, word in enumerate(words)}
    vocabulary |= {f"more{number}": number for number in range(len(words), PICTURE)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = ("<|image_pad|>", "<|vision_start|>", "<|propri|>", "<|action|>")
    tokenizer.add_special_tokens([AddedToken(name) for name in special])
    tokenizer.save(str(path / "tokenizer.json"))
    given = {"mean": [0.1] * 3, "std": [0.5] * 3}
    stats = {"action": given, "observation.state": {"mean": [0.2] * 4, "std": [2.0] * 4}}
    (path / "meta").mkdir(exist_ok=True)
    (path / "meta" / "stats.json").write_text(json.dumps(stats))
    return path


def of_directory(path: Path, **options: Any) -> WallOSSPolicy:
    given = {"num_action_chunks": 2, "denoising_steps": 4} | VIEWS | options
    policy = built("wall_oss", FOUR, path=path, **given)
    assert isinstance(policy, WallOSSPolicy)
    return policy


def build(**options: Any) -> WallOSSPolicy:
    policy = built("wall_oss", **options)
    assert isinstance(policy, WallOSSPolicy)
    return policy


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("wall_oss"))


@pytest.fixture(scope="module")
def original(directory: Path) -> WallOSSPolicy:
    assert type_of_directory(directory) == "wall_oss"
    return of_directory(directory)


@pytest.fixture(scope="module")
def policy() -> WallOSSPolicy:
    return build(**VIEWS)


@pytest.fixture(scope="module")
def io() -> dict[str, Tensor]:
    return load_file(PARITY / "wall_oss" / "io.safetensors")


def read(network: WallNetwork, io: dict[str, Tensor]) -> WallPrefix:
    """The prompts of the fixture without their actions, padded on the right."""
    rows = [
        [number for number, there in zip(tokens, present, strict=True) if there and number < ACTION]
        for tokens, present in zip(io["tokens"].tolist(), io["there"].tolist(), strict=True)
    ]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    there = torch.tensor([[place < len(row) for place in range(longest)] for row in rows])
    deviation, mean = (torch.tensor(each).view(3, 1, 1) for each in (_DEVIATION, _MEAN))
    pictures = [io[f"picture_{number}"] * deviation + mean for number in range(2)]
    return network.prefix(pictures, tokens, there, io["state"], io["known"])


@torch.no_grad()
def test_loss_and_actions_are_those_of_the_original(
    original: WallOSSPolicy, io: dict[str, Tensor]
) -> None:
    network, time = original.network, io["time"][:, None, None]
    prefix = read(network, io)
    x = (1 - time) * io["noise"] + time * io["actions"]
    velocity, _ = network.denoise(prefix, x, io["time"], io["moved"])
    errors = (velocity - (io["actions"] - io["noise"])).square() * io["moved"]
    torch.testing.assert_close(errors.mean(), io["loss"], atol=1e-5, rtol=0)
    x = io["noise"]
    for step in range(4):
        at = torch.full((2,), step / 4)
        x = x + network.denoise(prefix, x, at, io["moved"])[0] / 4
    torch.testing.assert_close(x, io["sampled"], atol=1e-5, rtol=0)
    assert (io["sampled"] - io["noise"]).abs().mean() > 0.2


@torch.no_grad()
def test_each_part_of_what_is_read_counts(original: WallOSSPolicy, io: dict[str, Tensor]) -> None:
    network, at = original.network, torch.zeros(2)
    before = network.denoise(read(network, io), io["noise"], at, io["moved"])[0]
    for name in ("picture_0", "picture_1", "state"):
        changed = read(network, io | {name: io[name] + 0.5})
        after = network.denoise(changed, io["noise"], at, io["moved"])[0]
        assert (after - before).abs().max() > 1e-3, name
    last = io["noise"].clone()
    last[:, -1] += 1.0
    after = network.denoise(read(network, io), last, at, io["moved"])[0]
    assert (after - before)[:, 0].abs().max() > 1e-3, "an action sees those behind it"


def test_positions_in_time_row_and_column() -> None:
    """Text, a picture of 2 × 3 tokens, text, one of 1 × 2, and text."""
    of_pictures = torch.tensor([[0, 0, *[1] * 6, 0, 1, 1, 0]]).bool()
    found = grid_positions(of_pictures, [(2, 3), (1, 2)])[:, 0]
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]


def test_every_published_tensor_has_its_place() -> None:
    """Shapes of Qwen2.5-VL-3B, with a second perceptron in each layer, and of the action head."""
    with torch.device("meta"):
        model = WallNetwork(WallSize())
    expected: dict[str, tuple[int, ...]] = {
        "visual.patch_embed.proj.weight": (1280, 3, 2, 14, 14),
        "visual.merger.ln_q.weight": (1280,),
        "model.embed_tokens.weight": (151936, 2048),
        "model.norm.weight": (2048,),
        "action_preprocessor.w1.weight": (2048, 40),
        "action_preprocessor.w2.weight": (2048, 4096),
        "action_preprocessor.w3.weight": (2048, 2048),
        "action_preprocessor.action_proj_back.weight": (20, 2048),
        "action_preprocessor.propri_proj.weight": (2048, 40),
    }
    biased = {"visual.merger.mlp.0": (5120, 5120), "visual.merger.mlp.2": (2048, 5120)}
    for place in range(32):
        layer = f"visual.blocks.{place}"
        expected |= {f"{layer}.norm{number}.weight": (1280,) for number in (1, 2)}
        biased |= {
            f"{layer}.attn.qkv": (3840, 1280), f"{layer}.attn.proj": (1280, 1280),
            f"{layer}.mlp.gate_proj": (3420, 1280), f"{layer}.mlp.up_proj": (3420, 1280),
            f"{layer}.mlp.down_proj": (1280, 3420),
        }  # fmt: skip
    for place in range(36):
        layer = f"model.layers.{place}"
        biased |= {
            f"{layer}.self_attn.q_proj": (2048, 2048), f"{layer}.self_attn.k_proj": (256, 2048),
            f"{layer}.self_attn.v_proj": (256, 2048),
        }  # fmt: skip
        expected |= {
            f"{layer}.self_attn.o_proj.weight": (2048, 2048),
            f"{layer}.input_layernorm.weight": (2048,),
            f"{layer}.post_attention_layernorm.weight": (2048,),
        }
        for expert in range(2):
            inner = f"{layer}.moe.experts.{expert}"
            expected |= {f"{inner}.{name}_proj.weight": (11008, 2048) for name in ("gate", "up")}
            expected[f"{inner}.down_proj.weight"] = (2048, 11008)
    for name, shape in biased.items():
        expected |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    own = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    assert {LAYOUTS[0].theirs(name): shape for name, shape in own.items()} == expected
    assert {LAYOUTS[0].ours(name) for name in expected} == own.keys()
    with torch.device("meta"):
        pictures = [torch.zeros(1, 3, 252, 252), torch.zeros(1, 3, 196, 252)]
        tokens = torch.zeros(1, 300, dtype=torch.int64)
        prefix = model.prefix(pictures, tokens, tokens == 0, torch.zeros(1, 20), torch.ones(20))
        noisy = torch.zeros(1, 32, 20)
        velocity, hidden = model.denoise(prefix, noisy, torch.zeros(1), torch.ones(20))
    assert (prefix.hidden.shape, velocity.shape) == ((1, 300, 2048), (1, 32, 20))
    assert hidden.shape == (1, 32, 2048)


def test_names_of_lerobot(directory: Path, original: WallOSSPolicy, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors")
    named = {f"model.{name}": each for name, each in stored.items()}
    save_file(named, tmp_path / "model.safetensors")
    found, wanted = of_directory(tmp_path).state_dict(), original.state_dict()
    assert all(torch.equal(found[name], each) for name, each in wanted.items())
    del named["model.action_preprocessor.w3.weight"]
    save_file(named | {"model.more": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 missing .*time_out\.weight; 1 unknown .*model\.more"):
        of_directory(tmp_path)


@pytest.mark.parametrize(
    ("settings", "options", "match"),
    [
        ({"attention_moe": True}, {}, "attention_moe: True .* with False"),
        ({"prediction_mode": "fast"}, {}, "prediction_mode: fast"),
        ({}, {"num_action_chunks": 4}, "nearest: 3"),
        ({}, {"view_names": ("top view",)}, "names 1 views, the model is shown 2"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, settings: dict[str, Any], options: dict[str, Any], match: str
) -> None:
    path = published(tmp_path, **settings)
    with pytest.raises(ConfigError, match=match):
        of_directory(path, **options)


def test_a_tokenizer_without_its_tokens_is_refused(tmp_path: Path) -> None:
    path = published(tmp_path)
    other = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    other.save(str(path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"has no <\|image_pad\|>, which that of the model has"):
        of_directory(path)


# -- what it is told and shown, and in which units ------------------------------------------------


def test_a_long_instruction_is_refused_before_the_weights(directory: Path, tmp_path: Path) -> None:
    options = VIEWS | {"num_action_chunks": 2}
    refuses_a_long_instruction_first("wall_oss", FOUR, directory, tmp_path / "copy", **options)


@torch.no_grad()
def test_a_published_directory_becomes_the_policy(original: WallOSSPolicy) -> None:
    assert (original.horizon, original.chunk) == (HORIZON, 2)
    assert original.moved.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert original.known.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]
    tokens, mask = original.prompts({"task_ids": torch.tensor([0, 1])})
    # Pictures of 2 × 4 and of 4 × 4 tokens, and one token of the state.
    assert (tokens == PICTURE).sum(1).tolist() == [24, 24]
    assert ((tokens == STATE) & mask).sum(1).tolist() == [1, 1]
    assert mask.sum(1).tolist()[0] == mask.sum(1).tolist()[1] + 2
    raw = torch.zeros(1, HORIZON, 3)
    given = original._to_model(raw, {})
    wanted = torch.tensor([-0.2, -0.2, -0.2, 0.0]).expand(1, HORIZON, -1)
    torch.testing.assert_close(given, wanted, atol=1e-5, rtol=0)
    observations = {
        "states": torch.rand(2, 4),
        "main_images": torch.randint(0, 256, (2, 16, 32, 3), dtype=torch.uint8),
        "wrist_images": torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8),
        "task_ids": torch.tensor([0, 1]),
    }
    noise = draw_noise(original.noise, (2,), torch.Generator().manual_seed(0))
    sample = original.sample(observations, noise)
    found = original.evaluate_actions(observations | sample.forward_inputs)
    assert torch.equal(found.log_probs, sample.log_probs)


def test_pictures_become_whole_numbers_of_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (1, 48, 64, 3), dtype=torch.uint8, generator=generator)
    found = resized_pixels(pictures, 32, multiple=28)
    assert found.shape == (1, 3, 28, 28)
    small = functional.interpolate(
        pictures.permute(0, 3, 1, 2).float(), size=(24, 32), mode="bicubic", antialias=True
    )
    small = small.round().clamp(0, 255)
    wanted = functional.interpolate(small, size=(28, 28), mode="bicubic", antialias=True)
    torch.testing.assert_close(found, wanted.round().clamp(0, 255) / 255)
    assert torch.equal(
        resized_pixels(pictures, 64, multiple=16), pictures.permute(0, 3, 1, 2) / 255
    )


# -- as a policy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["flow_sde", "flow_noise", "flow_cps"])
def test_chains_are_replayed(method: str) -> None:
    policy = build(method=method)
    noise = draw_noise(policy.noise, (ROWS,), torch.Generator().manual_seed(5))
    sample = policy.sample(seen(), noise)
    found = policy.evaluate_actions(seen() | sample.forward_inputs)
    assert torch.equal(found.log_probs, sample.log_probs)
    assert torch.equal(found.values, sample.values)
    with torch.no_grad():
        prefix, states = policy._read(seen())
        x = noise["start"]
        velocity, _ = policy.network.denoise(prefix, x, torch.zeros(ROWS), policy.moved)
        plain = policy._plain_step(policy._predicted(prefix, states, x, 0), x, 0)
    torch.testing.assert_close(plain, x + velocity / STEPS, atol=1e-6, rtol=1e-5)


def test_imitation_is_flow_matching_and_reaches_all_parts(policy: WallOSSPolicy) -> None:
    errors, actions, noise = imitated(policy)
    time = 0.999 * (1 - noise["time"] ** (1 / 1.5))  # 0 at the noise
    x = (1 - time[:, None, None]) * noise["noise"] + time[:, None, None] * actions
    with torch.no_grad():
        velocity = policy.network.denoise(policy._read(seen())[0], x, time, policy.moved)[0]
    wanted = (velocity - (actions - noise["noise"])).square()
    torch.testing.assert_close(errors, wanted, atol=1e-4, rtol=1e-4)
    parts = (
        "vision.patch_embedding",
        "vision.merge_out",
        "language.embed_tokens",
        "language.layers.0.experts.0",
        "language.layers.1.experts.1",
        "state_proj",
        "time_in",
        "action_out",
    )
    reaches(policy, errors, parts)


def test_what_reads_is_left_as_it_is_where_the_expert_alone_is_trained() -> None:
    policy = build(train_expert_only=True)
    assert sum(each.numel() for each in policy.parameters()) < 3e6
    names = travelling(policy)
    assert {"network.language.layers.1.experts.1.up_proj.weight", "network.state_proj.weight",
            "network.action_out.weight"} <= names.keys()  # fmt: skip
    assert not any("vision" in name or "experts.0" in name or "attn" in name for name in names)
