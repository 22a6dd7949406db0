"""GR00T N1.5 against its original (see make_gr00t_parity.py) and transformers, and as a policy."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tokenizers.decoders import ByteLevel
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM, SiglipVisionConfig, SiglipVisionModel

from rlinf.errors import ConfigError
from rlinf.models.config import REGISTRY, type_of_directory
from rlinf.models.policy import draw_noise
from rlinf.models.policy_weights import travelling
from rlinf.models.vla.config import FlowConfig
from rlinf.models.vla.gr00t.layouts import LAYOUTS
from rlinf.models.vla.gr00t.network import GR00TNetwork, GR00TSize
from rlinf.models.vla.gr00t.policy import GR00TPolicy, _published_size
from rlinf.models.vla.gr00t.prompts import PICTURE, eagle_encode, eagle_tokenizer
from rlinf.models.vla.loading import Weights, translate
from rlinf.models.vla.networks import Published
from rlinf.models.vla.preprocessing import cropped_pixels
from rlinf.models.vla.publishing import publish
from rlinf.models.vla.statistics import ModelStatistics, Statistics
from rlinf.models.vla.transformer import Prefix
from tests.models.test_policies import env_spec
from tests.models.vla.support import (
    built,
    imitated,
    reaches,
    refuses_a_long_instruction_first,
)
from tests.models.vla.test_loading import PARITY
from tests.models.vla.test_pi0_policy import CHUNK, ROWS, STEPS, seen

READ, HORIZON, ACTIONS, STATES = 16, 4, 5, 6
FIVE = env_spec(
    observation_shapes={"states": (STATES,), "main_images": (48, 64, 3)},
    task_descriptions=("close the drawer", "open it"),
    action_dim=ACTIONS,
    action_low=(-1.0,) * ACTIONS,
    action_high=(1.0,) * ACTIONS,
)
DIFFUSION = {
    "num_attention_heads": 2, "interleave_self_attention": True, "norm_type": "ada_norm",
    "positional_embeddings": None,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "model_type": "gr00t_n1_5", "action_horizon": HORIZON,
    "action_head_cfg": {"vl_self_attention_cfg": {"num_attention_heads": 2},
                        "diffusion_model_cfg": DIFFUSION},
    "backbone_cfg": {"select_layer": 2, "project_to_dim": None, "vision_heads": 2,
                     "image_token_index": 263},
}  # fmt: skip
OWN = {"embodiment": "libero_franka", "embodiment_id": 2}
# What processors make of the waves of a time bucket: the exponential behind a frequency differs by
# its last bit, a thousandfold in the angle of bucket 1000, and that is up to 6e-5 in a loss of 5.7.
WAVES = 1e-4
ADDED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", PICTURE, "<img>", "</img>")


def tokenizer_files(path: Path) -> None:
    """A small tokenizer in the files of Qwen's: bytes, four pairs, and special tokens."""
    from tokenizers import pre_tokenizers

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġthe", "er"]
    (path / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (path / "merges.txt").write_text("#version: 0.2\nt h\nth e\nĠ the\ne r\n")
    added = {name: len(words) + n for n, name in enumerate(ADDED)}
    (path / "added_tokens.json").write_text(json.dumps(added))


def backbone() -> tuple[SiglipVisionModel, torch.nn.Linear, Qwen3ForCausalLM]:
    """Eagle's parts of random weights."""
    torch.manual_seed(1)
    common = {"hidden_size": READ, "intermediate_size": 24, "num_hidden_layers": 2,
              "num_attention_heads": 2}  # fmt: skip
    vision = SiglipVisionModel(
        SiglipVisionConfig(**common, image_size=28, patch_size=14, vision_use_head=False)
    )
    language = Qwen3ForCausalLM(
        Qwen3Config(**common, num_key_value_heads=1, head_dim=8, vocab_size=270,
                    rope_theta=1_000_000, tie_word_embeddings=True)
    )  # fmt: skip
    parts = vision.eval(), torch.nn.Linear(READ, READ), language.eval()
    for part in parts:
        for parameter in part.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return parts


def weights(level: str = "vision_model.") -> dict[str, Tensor]:
    """All weights under their published names; transformers 5 has a level of the vision less."""
    vision, projector, language = backbone()
    own = {
        f"vision_model.{level}{name.removeprefix('vision_model.')}": each
        for name, each in vision.state_dict().items()
    }
    own |= {f"mlp1.0.{name}": each for name, each in projector.state_dict().items()}
    own |= {f"language_model.{name}": each for name, each in language.state_dict().items()}
    own.pop("language_model.lm_head.weight")
    head = load_file(PARITY / "gr00t" / "head.safetensors")
    named = {f"backbone.eagle_model.{name}": each.contiguous() for name, each in own.items()}
    return named | {name: each.float() for name, each in head.items()}


def published(path: Path, **settings: Any) -> Path:
    """A directory as Isaac-GR00T writes it, with the tokenizer beside."""
    save_file(weights(), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(SETTINGS | settings))
    tokenizer_files(path)

    def part(low: float, count: int) -> dict[str, list[float]]:
        return {"min": [low] * count, "max": [low + 2] * count, "q01": [low] * count,
                "q99": [low + 1] * count, "mean": [low] * count, "std": [0.5] * count}  # fmt: skip

    state = {"gripper": part(0, 2), "arm": part(-1, 4)}
    action = {"gripper": part(-1, 1), "arm": part(-0.5, 4)}
    other = {"statistics": {"action": {"arm": part(-1, 3)}}}
    metadata = {"libero_franka": {"statistics": {"state": state, "action": action}}, "gr1": other}
    (path / "experiment_cfg").mkdir(exist_ok=True)
    (path / "experiment_cfg" / "metadata.json").write_text(json.dumps(metadata))
    return path


def of_directory(path: Path, **options: Any) -> GR00TPolicy:
    policy = built("gr00t", FIVE, path=path, **({"num_action_chunks": 3} | OWN | options))
    assert isinstance(policy, GR00TPolicy)
    return policy


def build(**options: Any) -> GR00TPolicy:
    policy = built("gr00t", **options)
    assert isinstance(policy, GR00TPolicy)
    return policy


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("gr00t"))


@pytest.fixture(scope="module")
def original(directory: Path) -> GR00TPolicy:
    assert type_of_directory(directory) == "gr00t"
    return of_directory(directory)


@pytest.fixture(scope="module")
def policy() -> GR00TPolicy:
    return build(train_expert_only=False)


@pytest.fixture(scope="module")
def io() -> dict[str, Tensor]:
    return load_file(PARITY / "gr00t" / "io.safetensors")


def looked_over(network: GR00TNetwork, io: dict[str, Tensor]) -> Prefix:
    there = torch.ones(io["read"].shape[:2], dtype=torch.bool)
    return Prefix([], there, network.look(network.look_norm(io["read"]), there))


@pytest.mark.parametrize("embodiment", [0, 2])
@torch.no_grad()
def test_loss_and_actions_are_those_of_the_original(
    original: GR00TPolicy, io: dict[str, Tensor], embodiment: int
) -> None:
    network = original.network
    prefix, time = looked_over(network, io), io["time"][:, None, None]
    x = (1 - time) * io["noise"] + time * io["actions"]
    velocity, _ = network.denoise(prefix, io["state"], x, io["time"], embodiment)
    loss = functional.mse_loss(velocity, io["actions"] - io["noise"])
    torch.testing.assert_close(loss, io[f"loss_{embodiment}"], atol=WAVES, rtol=0)

    x = io["noise"]
    for step in range(4):
        at = torch.full((len(x),), step / 4)
        x = x + network.denoise(prefix, io["state"], x, at, embodiment)[0] / 4
    torch.testing.assert_close(x, io[f"sampled_{embodiment}"], atol=WAVES, rtol=0)
    assert (io["sampled_0"] - io["sampled_2"]).abs().mean() > 0.3


def test_the_policy_samples_as_the_original(original: GR00TPolicy, io: dict[str, Tensor]) -> None:
    """The same chain in the house's time, which runs from 1 to 0."""
    x, states = io["noise"], io["state"]
    with torch.no_grad():
        prefix = looked_over(original.network, io)
        for step in range(4):
            x = original._plain_step(original._predicted(prefix, states, x, step), x, step)
    torch.testing.assert_close(x, io["sampled_2"], atol=WAVES, rtol=0)


@torch.no_grad()
def test_what_is_read_is_what_transformers_reads(original: GR00TPolicy) -> None:
    vision, projector, language = backbone()
    pixels = torch.rand(2, 1, 3, 28, 28) * 2 - 1
    tokens = torch.tensor([[1, 263, 263, 263, 263, 7, 8, 9], [1, 263, 263, 263, 263, 7, 0, 0]])
    there = torch.tensor([[True] * 8, [True] * 6 + [False] * 2])
    embedded = language.get_input_embeddings()(tokens)
    embedded[:, 1:5] = projector(vision(pixels[:, 0]).last_hidden_state)
    expected = language.model(inputs_embeds=embedded, attention_mask=there.long())
    network = original.network
    seen_pictures = network.vision(pixels[:, 0])
    torch.testing.assert_close(seen_pictures, embedded[:, 1:5], atol=1e-5, rtol=0)
    found = network.language(embedded, there)
    wanted = expected.last_hidden_state
    torch.testing.assert_close(found[there], wanted[there], atol=1e-5, rtol=0)

    read = network.prefix(pixels, tokens, there).hidden
    torch.testing.assert_close(
        read[:1], network.look(network.look_norm(wanted[:1]), there[:1]), atol=1e-5, rtol=0
    )
    padded = torch.where(there, tokens, 5)
    assert torch.equal(network.prefix(pixels, padded, there).hidden[there], read[there])
    moved = network.prefix(-pixels, tokens, there).hidden
    assert (moved - read)[there].abs().min(dim=-1).values.max() > 1e-3


def test_every_published_tensor_has_its_place() -> None:
    """Shapes of the model of 2.4 billion parameters, as the configurations of its parts say."""
    with torch.device("meta"):
        model = GR00TNetwork(GR00TSize())
    eagle, head = "backbone.eagle_model", "action_head"
    vision, text = f"{eagle}.vision_model.vision_model", f"{eagle}.language_model.model"
    expected: dict[str, tuple[int, ...]] = {
        f"{vision}.embeddings.patch_embedding.weight": (1152, 3, 14, 14),
        f"{vision}.embeddings.patch_embedding.bias": (1152,),
        f"{vision}.embeddings.position_embedding.weight": (256, 1152),
        f"{text}.embed_tokens.weight": (151680, 2048),
        f"{text}.norm.weight": (2048,),
        f"{head}.position_embedding.weight": (1024, 1536),
        f"{head}.future_tokens.weight": (32, 1536),
    }
    norms = {f"{vision}.post_layernorm": 1152, f"{head}.vlln": 2048}
    linear = {f"{eagle}.mlp1.0": (2048, 1152)}
    for place in range(27):
        layer = f"{vision}.encoder.layers.{place}"
        norms |= {f"{layer}.layer_norm{number}": 1152 for number in (1, 2)}
        linear |= {f"{layer}.self_attn.{n}_proj": (1152, 1152) for n in ("q", "k", "v", "out")}
        linear |= {f"{layer}.mlp.fc1": (4304, 1152), f"{layer}.mlp.fc2": (1152, 4304)}
    for place in range(12):
        layer = f"{text}.layers.{place}"
        own = {
            "self_attn.q_proj": (2048, 2048), "self_attn.k_proj": (1024, 2048),
            "self_attn.v_proj": (1024, 2048), "self_attn.o_proj": (2048, 2048),
            "self_attn.q_norm": (128,), "self_attn.k_norm": (128,), "input_layernorm": (2048,),
            "post_attention_layernorm": (2048,), "mlp.gate_proj": (6144, 2048),
            "mlp.up_proj": (6144, 2048), "mlp.down_proj": (2048, 6144),
        }  # fmt: skip
        expected |= {f"{layer}.{name}.weight": shape for name, shape in own.items()}
    for part, width, read, count in (
        ("vl_self_attention", 2048, 2048, 4),
        ("model", 1536, 2048, 16),
    ):
        for place in range(count):
            layer = f"{head}.{part}.transformer_blocks.{place}"
            keys = width if place % 2 else read
            linear |= {f"{layer}.attn1.to_{n}": (width, keys) for n in ("k", "v")}
            linear |= {f"{layer}.attn1.{n}": (width, width) for n in ("to_q", "to_out.0")}
            linear |= {f"{layer}.ff.net.0.proj": (4 * width, width)}
            linear |= {f"{layer}.ff.net.2": (width, 4 * width)}
            if part == "model":
                linear[f"{layer}.norm1.linear"] = (2 * width, width)
            else:
                norms |= {f"{layer}.norm{n}": width for n in (1, 3)}
    time = f"{head}.model.timestep_encoder.timestep_embedder"
    linear |= {
        f"{time}.linear_1": (1536, 256), f"{time}.linear_2": (1536, 1536),
        f"{head}.model.proj_out_1": (3072, 1536), f"{head}.model.proj_out_2": (1024, 1536),
    }  # fmt: skip
    kinds = {
        "state_encoder.layer1": (64, 1024), "state_encoder.layer2": (1024, 1536),
        "action_encoder.W1": (32, 1536), "action_encoder.W2": (3072, 1536),
        "action_encoder.W3": (1536, 1536), "action_decoder.layer1": (1024, 1024),
        "action_decoder.layer2": (1024, 32),
    }  # fmt: skip
    for name, (inputs, outputs) in kinds.items():
        expected |= {f"{head}.{name}.W": (32, inputs, outputs), f"{head}.{name}.b": (32, outputs)}
    for name, width in norms.items():
        expected |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    for name, shape in linear.items():
        expected |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}

    own_names = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    assert {LAYOUTS[0].theirs(name): shape for name, shape in own_names.items()} == expected
    assert {LAYOUTS[0].ours(name) for name in expected} == own_names.keys()
    assert round(sum(torch.Size(each).numel() for each in expected.values()) / 1e6) == 2398
    with torch.device("meta"):
        tokens = torch.zeros(1, 560, dtype=torch.int64)
        prefix = model.prefix(torch.zeros(1, 2, 3, 224, 224), tokens, tokens == 0)
        noisy = torch.zeros(1, 16, 32)
        velocity, hidden = model.denoise(prefix, torch.zeros(1, 64), noisy, torch.zeros(1), 31)
    assert (prefix.hidden.shape, velocity.shape) == ((1, 560, 2048), (1, 16, 32))
    assert hidden.shape == (1, 16, 1024)


@pytest.mark.parametrize(
    "kind", ["transformers 5", "lerobot", "pooling and output head", "output head alone"]
)
def test_other_names_of_the_same_weights(tmp_path: Path, directory: Path, kind: str) -> None:
    path = published(tmp_path)
    stored = weights("" if kind == "transformers 5" else "vision_model.")
    if kind == "lerobot":
        stored = {f"_groot_model.{name}": each for name, each in stored.items()}
    eagle = "backbone.eagle_model"
    embedding, output = (
        f"{eagle}.language_model.{n}.weight" for n in ("model.embed_tokens", "lm_head")
    )
    if kind == "pooling and output head":
        stored[output] = stored[embedding] + 1.0
        stored[f"{eagle}.vision_model.vision_model.head.probe"] = torch.zeros(1, 1, READ)
    elif kind == "output head alone":
        stored[output] = stored.pop(embedding)
    save_file(stored, path / "model.safetensors")
    wanted = of_directory(directory).network.state_dict()
    found = of_directory(path).network.state_dict()
    assert all(torch.equal(found[name], each) for name, each in wanted.items())


def test_a_directory_of_lerobot_is_read(tmp_path: Path, directory: Path) -> None:
    """As lerobot 0.5 writes it: nothing of the network, which in this small one is other."""
    path = published(tmp_path)
    (path / "model.safetensors").unlink()
    shutil.rmtree(path / "experiment_cfg")
    save_file(
        {f"_groot_model.{name}": each for name, each in weights().items()},
        path / "model.safetensors",
    )
    said = {"type": "groot", "chunk_size": 50, "n_action_steps": 50, "embodiment_tag": "so100",
            "normalization_mapping": {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
            "input_features": {"observation.images.front": {"type": "VISUAL"}}}  # fmt: skip
    small = {name: SETTINGS[name] for name in ("action_head_cfg", "backbone_cfg")}
    (path / "config.json").write_text(json.dumps(said | small))
    moved = {"action.min": torch.full((ACTIONS,), -0.5), "action.max": torch.full((ACTIONS,), 0.5),
             "observation.state.min": torch.zeros(STATES),
             "observation.state.max": torch.ones(STATES)}  # fmt: skip
    for name in ("pre", "post"):
        step = {"pre": "2_groot_pack_inputs_v3", "post": "0_groot_action_unpack_unnormalize_v1"}
        save_file(moved, path / f"policy_{name}processor_step_{step[name]}.safetensors")
    config = REGISTRY.load("gr00t")(path=path, num_action_chunks=3, horizon=HORIZON)
    config.check()
    policy = config.build(FIVE)
    assert isinstance(policy, GR00TPolicy)
    assert config.matrices == 2
    wanted = of_directory(directory).network.state_dict()
    found = policy.network.state_dict()
    assert all(torch.equal(found[name], each) for name, each in wanted.items())
    half = policy._to_env(torch.full((1, HORIZON, ACTIONS), 0.5), {})
    torch.testing.assert_close(half, torch.full((1, 3, ACTIONS), 0.25))
    with pytest.raises(ConfigError, match="trained on 1 pictures"):
        REGISTRY.load("gr00t")(path=path, horizon=8, cameras=["main_images"] * 2).build(FIVE)

    other = Statistics(min=torch.full((ACTIONS,), -0.25), max=torch.full((ACTIONS,), 0.25))
    publish(policy, path, tmp_path / "out", ModelStatistics(other, None))
    for file in (tmp_path / "out").glob("policy_*processor_step_*.safetensors"):
        assert load_file(file)["action.max"].tolist() == [0.25] * ACTIONS
    assert len([*(tmp_path / "out").glob("policy_*processor_step_*")]) == 2

    (path / "config.json").write_text(json.dumps(said | small | {"embodiment_tag": "mine"}))
    with pytest.raises(ConfigError, match=r"has embodiment_tag: mine .*; nearest: agibot_genie1"):
        config.check()


def test_what_nothing_says_is_as_published(tmp_path: Path) -> None:
    """Of the model of 2.4 billion parameters, by the shapes of its weights alone."""
    with torch.device("meta"):
        model = GR00TNetwork(GR00TSize())
    shapes = {LAYOUTS[2].theirs(name): tuple(t.shape) for name, t in model.state_dict().items()}
    named = {name: shape for name, shape in shapes.items() if name is not None}
    found = translate(Weights(tmp_path, named, dict.fromkeys(named, tmp_path)), LAYOUTS)
    config = REGISTRY.load("gr00t")(path=tmp_path)
    assert isinstance(config, FlowConfig)
    assert _published_size(Published(config, found, {"type": "groot"})) == GR00TSize()


def test_missing_and_left_over_weights_are_one_error(tmp_path: Path) -> None:
    path = published(tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["action_head.vlln.bias"]
    save_file(tensors | {"action_head.more": torch.zeros(1)}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 missing .*look_norm\.bias; 1 unknown .*head\.more"):
        of_directory(path)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"backbone_cfg": {"select_layer": 12}}, "select_layer: 12 .* a model with 2"),
        ({"backbone_cfg": {"project_to_dim": 1536}}, "project_to_dim: 1536"),
        ({"action_head_cfg": {"use_vlln": False}}, "use_vlln: False .* with True"),
        (
            {"action_head_cfg": {"diffusion_model_cfg": DIFFUSION | {"norm_type": "layer_norm"}}},
            "norm_type: layer_norm",
        ),
        ({"action_horizon": 2}, "nearest: 2"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    path = published(tmp_path, **settings)
    with pytest.raises(ConfigError, match=match):
        of_directory(path)


# -- what it is told and shown ------------------------------------------------------------------


def test_the_tokenizer_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    tokenizer_files(tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    merges = [tuple(line.split()) for line in (tmp_path / "merges.txt").read_text().split("\n")[1:]
              if line]  # fmt: skip
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=merges, unk_token=None)
    theirs.add_special_tokens({"additional_special_tokens": list(ADDED)})
    text = f"Pick the red_cube (2 of 14)\n  then the other's,  é {PICTURE}<|im_end|>\n"
    encode = eagle_encode(tmp_path)
    assert encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert encode("the") == [vocabulary["the"]]
    added = json.loads((tmp_path / "added_tokens.json").read_text())
    (tmp_path / "added_tokens.json").write_text(json.dumps(added | {PICTURE: 999}))
    with pytest.raises(ConfigError, match="do not belong together"):
        eagle_tokenizer(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        eagle_tokenizer(tmp_path)


def test_a_long_instruction_is_refused_before_the_weights(directory: Path, tmp_path: Path) -> None:
    options = OWN | {"num_action_chunks": 3}
    refuses_a_long_instruction_first("gr00t", FIVE, directory, tmp_path / "copy", **options)


def test_pictures_stand_before_the_instruction(original: GR00TPolicy) -> None:
    observations = {"task_ids": torch.tensor([1, 0])}
    tokens, mask = original.prompts(observations)
    assert (tokens == 263).sum(1).tolist() == [4, 4]
    assert mask.sum(1).tolist()[0] < mask.sum(1).tolist()[1] == tokens.shape[1]
    assert not bool(mask[0, -1])


def test_the_chat_is_that_of_the_published_template(directory: Path, original: GR00TPolicy) -> None:
    tokens, _ = original.prompts({"task_ids": torch.tensor([0])})
    tokenizer = eagle_tokenizer(directory)
    tokenizer.decoder = ByteLevel()
    told = tokenizer.decode(tokens[0].tolist(), skip_special_tokens=False)
    assert told == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"<image 1><img>{PICTURE * 4}</img>close the drawer<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_middle_of_a_picture_is_stretched() -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (1, 40, 80, 3), dtype=torch.uint8, generator=generator)
    found = cropped_pixels(pictures, 20, share=0.95)
    middle = pictures[:, 1:39, 2:78].permute(0, 3, 1, 2).float()
    wanted = functional.interpolate(middle, size=(20, 20), mode="bilinear", antialias=True)
    assert ((found + 1) * 127.5 - wanted).abs().max() <= 1.0
    whole = torch.full((1, 20, 20, 3), 255, dtype=torch.uint8)
    whole[:, :10] = 51
    same = cropped_pixels(whole, 20, share=1.0)
    torch.testing.assert_close(same[0, 0, :, 0].unique(), torch.tensor([-0.6, 1.0]))


# -- units ----------------------------------------------------------------------------------------


def test_units_are_those_of_the_embodiment(directory: Path, original: GR00TPolicy) -> None:
    assert (original.horizon, original.chunk) == (HORIZON, 3)
    raw = torch.zeros(1, HORIZON, ACTIONS)
    given = original._to_model(raw, {})
    # The parts in the order of the file: a gripper in [−1, 1], an arm in [−0.5, 1.5].
    wanted = torch.tensor([0.0, -0.5, -0.5, -0.5, -0.5]).expand(1, HORIZON, -1)
    torch.testing.assert_close(given, wanted)
    torch.testing.assert_close(original._to_env(given, {}), raw[:, :3])
    states = {"states": torch.full((1, STATES), 1.5)}
    bounds = torch.tensor([[0.5, 0.5, 1.5, 1.5, 1.5, 1.5]])
    torch.testing.assert_close(original._states(states), bounds)

    turned = of_directory(
        directory, action_parts=("arm", "gripper"), state_parts=("arm", "gripper")
    )
    torch.testing.assert_close(turned._to_model(raw, {}), wanted.flip(-1))
    torch.testing.assert_close(turned._states(states), bounds.roll(-2, dims=-1))

    clamped = of_directory(directory, normalization="quantiles")
    torch.testing.assert_close(clamped._states(states), torch.ones(1, STATES))
    with pytest.raises(ConfigError, match="no part `leg` of the action"):
        of_directory(directory, action_parts=("leg",))
    with pytest.raises(ConfigError, match="no statistics of `oxe_droid`"):
        of_directory(directory, embodiment="oxe_droid", embodiment_id=1)
    with pytest.raises(ConfigError, match="3 action dimensions"):
        of_directory(directory, embodiment="gr1", embodiment_id=1)


def test_embodiments_have_numbers() -> None:
    config = REGISTRY.load("gr00t")
    assert config(preset="tiny").matrices == 31
    assert config(preset="tiny", embodiment="gr1").matrices == 24
    with pytest.raises(ValidationError, match=r"did you mean `oxe_droid`"):
        config(preset="tiny", embodiment="oxe_driod")
    with pytest.raises(ConfigError, match="32 embodiments, 32 is none of them; nearest: 31"):
        build(embodiment="mine", embodiment_id=32)


# -- as a policy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["flow_sde", "flow_noise", "flow_cps"])
def test_random_steps_are_those_of_its_own_time(method: str) -> None:
    """Mean and deviation as they are written for noise at 0 and actions at 1."""
    policy = build(method=method)
    noise = draw_noise(policy.noise, (ROWS,), torch.Generator().manual_seed(5))
    sample = policy.sample(seen(), noise)
    found = policy.evaluate_actions(seen() | sample.forward_inputs)
    assert torch.equal(found.log_probs, sample.log_probs)
    assert torch.equal(found.values, sample.values)
    delta, level = 1 / STEPS, policy._config.noise_level
    with torch.no_grad():
        prefix, states = policy._read(seen())
        for step in range(STEPS - (method == "flow_cps")):
            x, t = noise["start"], torch.full((ROWS,), step * delta)
            velocity, _ = policy.network.denoise(prefix, states, x, t, 31)
            of_noise, of_data = x - step * delta * velocity, x + (1 - step * delta) * velocity
            weight = 1 - (step + 1) * delta
            wanted_std = None
            if method == "flow_sde":
                sigma = level * math.sqrt((1 - step * delta) / max(step * delta, delta))
                weight -= sigma**2 * delta / (2 * (1 - step * delta))
                wanted_std = sigma * math.sqrt(delta)
            elif method == "flow_cps":
                wanted_std = weight * math.sin(math.pi * level / 2)
                weight *= math.cos(math.pi * level / 2)
            mean, std = policy._move(prefix, states, x, step)
            wanted = weight * of_noise + (step + 1) * delta * of_data
            torch.testing.assert_close(mean, wanted, atol=1e-5, rtol=1e-5)
            if wanted_std is not None:
                torch.testing.assert_close(std, torch.full_like(std, wanted_std))
            else:
                assert bool(((std > 0.08) & (std < 0.16)).all())


def test_times_fall_into_the_buckets_of_the_original() -> None:
    for steps in (4, 5, 7, 10, 16):
        policy = build(denoising_steps=steps)
        blank = torch.zeros(1, CHUNK, 3)
        found = [float((1 - policy._time(k, blank)) * 1000 + 1e-3) // 1 for k in range(steps)]
        assert found == [int(k / steps * 1000) for k in range(steps)]


def test_values_are_of_what_was_read_and_the_state(policy: GR00TPolicy) -> None:
    size = policy.network.size
    assert policy.value_head is not None
    first = next(policy.value_head.parameters())
    assert first.shape == (1024, size.language.width + size.expert.width)
    prefix, states = policy._read(seen())
    read = prefix.hidden[0][prefix.mask[0]].mean(0)
    token = policy.network.state_token(states, 31)[0, 0]
    found = policy._features(prefix, states)[0]
    torch.testing.assert_close(found, torch.cat([read, token]), atol=1e-5, rtol=1e-5)


def test_imitation_is_flow_matching_of_its_own_matrices(policy: GR00TPolicy) -> None:
    errors, actions, noise = imitated(policy)
    time = (0.999 - noise["time"] ** (1 / 1.5)) / 0.999  # 0 at the noise
    x = (1 - time[:, None, None]) * noise["noise"] + time[:, None, None] * actions
    with torch.no_grad():
        prefix, states = policy._read(seen())
        velocity = policy.network.denoise(prefix, states, x, time, 31)[0]
    wanted = (velocity - (actions - noise["noise"])).square()
    torch.testing.assert_close(errors, wanted, atol=1e-4, rtol=1e-4)
    parts = (
        "vision.patch_embedding",
        "vision.projector",
        "language.embed_tokens",
        "look_norm",
        "look.layers",
        "future_tokens",
        "expert.time_in",
    )
    reaches(policy, errors, parts)
    matrices = policy.network.action_encoder.W2.W.grad
    assert matrices is not None
    assert matrices.flatten(1).abs().sum(1).nonzero().flatten().tolist() == [31]


def test_by_default_vision_and_language_are_left_as_they_are() -> None:
    policy = build()
    assert sum(each.numel() for each in policy.parameters()) < 3e6
    names = travelling(policy)
    assert not any("language" in name or "vision" in name for name in names)
    assert {"network.look.layers.0.ff_in.weight", "network.action_decoder.layer1.W"} <= names.keys()


def test_as_many_views_are_read_as_the_model_was_trained_on(
    directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "experiment_cfg" / "metadata.json"
    told = json.loads(file.read_text())
    told["libero_franka"]["modalities"] = {"video": {"image": {}, "wrist_image": {}}}
    file.write_text(json.dumps(told))
    for given in (["main_images"], ["main_images"] * 3):
        with pytest.raises(ConfigError, match=rf"on 2 pictures \(image, wrist_image\), .* gives "
                           rf"{len(given)}; nearest: name 2, null for one") as refused:  # fmt: skip
            of_directory(tmp_path, cameras=given)
        assert refused.value.key == "model.cameras"
    of_directory(tmp_path, cameras=["main_images"] * 2)
    of_directory(tmp_path, cameras=["main_images", None])
    # Another set with statistics of its own may have other cameras.
    action, state = (told["libero_franka"]["statistics"][kind] for kind in ("action", "state"))
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"action": action, "state": state}))
    of_directory(tmp_path, statistics=own)
