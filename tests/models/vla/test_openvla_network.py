"""The network of OpenVLA: what the original code computes, and its published files."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf.errors import ConfigError
from rlinf.models.vla.action_tokens import (
    ActionTokens,
    chosen,
    drawn_tokens,
    entropy,
    token_log_probs,
)
from rlinf.models.vla.openvla.files import (
    load_network,
    openvla_layout,
    proprioception_of,
    read_published,
)
from rlinf.models.vla.openvla.network import Architecture, Extras, OpenVLANetwork
from rlinf.models.vla.openvla.vision_transformer import DINOV2, SIGLIP

FIXTURE = Path(__file__).parent / "parity" / "openvla"
CHUNK, ACTIONS = 2, 7
WHOLE = Extras(action_head=ACTIONS, proprioception=5, film=True)


@pytest.fixture(scope="module")
def recorded():
    return load_file(FIXTURE / "io.safetensors")


def _network(extras=None, path=FIXTURE, **options):
    published = read_published(path)
    return load_network(published, extras or Extras(), dtype=torch.float32, **options).eval()


@pytest.fixture(scope="module")
def network():
    return _network()


def _differ(found, expected):
    return float((found - expected).abs().max())


@torch.no_grad()
def test_causal_logits_are_those_of_the_original(network, recorded):
    prompt = recorded["prompt"]
    embedded, mask = network.prompt(recorded["pixels"][:, :1], prompt, torch.ones_like(prompt))
    actions = network.embed(recorded["tokens"][:, :-1])
    whole = torch.cat([embedded, actions], dim=1)
    seen = torch.nn.functional.pad(mask, (0, ACTIONS - 1), value=True)
    hidden = network.causal(whole, seen)[:, -ACTIONS:]
    assert _differ(network.action_logits(hidden), recorded["causal"]) < 5e-6


@torch.no_grad()
def test_a_cache_and_padding_change_no_logits(network, recorded):
    from transformers import DynamicCache

    prompt = recorded["prompt"]
    ids = torch.cat([prompt[:, :1], torch.zeros(2, 3, dtype=torch.int64), prompt[:, 1:]], dim=1)
    embedded, mask = network.prompt(recorded["pixels"][:, :1], ids, (ids > 0))
    cache, found = DynamicCache(), []
    hidden = network.causal(embedded, mask, cache=cache)[:, -1:]
    for place in range(ACTIONS):
        found.append(network.action_logits(hidden))
        mask = torch.nn.functional.pad(mask, (0, 1), value=True)
        token = recorded["tokens"][:, place : place + 1]
        hidden = network.causal(network.embed(token), mask, cache=cache)
    assert _differ(torch.cat(found, dim=1), recorded["causal"]) < 5e-6


@torch.no_grad()
def test_logits_of_one_pass_are_those_of_the_original(network, recorded):
    prompt = recorded["prompt"]
    embedded, mask = network.prompt(recorded["pixels"], prompt, torch.ones_like(prompt))
    hidden = network.at_once(embedded, mask, CHUNK * ACTIONS, behind=(2,))
    assert _differ(network.action_logits(hidden), recorded["discrete"]) < 5e-6
    padded = torch.cat([prompt[:, :1], torch.zeros_like(prompt), prompt[:, 1:]], dim=1)
    embedded, mask = network.prompt(recorded["pixels"], padded, padded > 0)
    hidden = network.at_once(embedded, mask, CHUNK * ACTIONS, behind=(2,))
    assert _differ(network.action_logits(hidden), recorded["discrete"]) < 5e-6


@torch.no_grad()
def test_film_proprioception_and_regression_are_those_of_the_original(recorded):
    assert proprioception_of(FIXTURE) == 5
    network, prompt = _network(WHOLE), recorded["prompt"]
    embedded, mask = network.prompt(
        recorded["pixels"],
        prompt,
        torch.ones_like(prompt),
        states=recorded["states"],
        behind=(2,),
    )
    hidden = network.at_once(embedded, mask, CHUNK * ACTIONS, behind=(2,))
    assert _differ(network.action_head(hidden), recorded["regressed"]) < 5e-6


def test_the_published_sizes_have_the_published_names():
    text = {"vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32}  # fmt: skip
    architecture = Architecture((DINOV2, SIGLIP), 224, text)
    with torch.device("meta"):
        network = OpenVLANetwork(architecture)
    layout = openvla_layout(architecture)
    shapes = {layout.theirs(name): list(p.shape) for name, p in network.state_dict().items()}
    assert len(shapes) + len(layout.unused) == 982
    assert sum(math.prod(shape) for shape in shapes.values()) == 7_498_156_704
    for name, shape in {
        "vision_backbone.featurizer.blocks.22.ls1.scale_factor": [1024],
        "vision_backbone.featurizer.reg_token": [1, 4, 1024],
        "vision_backbone.featurizer.pos_embed": [1, 256, 1024],
        "vision_backbone.fused_featurizer.blocks.25.mlp.fc1.weight": [4304, 1152],
        "vision_backbone.fused_featurizer.patch_embed.proj.weight": [1152, 3, 14, 14],
        "projector.fc1.weight": [8704, 2176],
        "projector.fc3.bias": [4096],
        "language_model.model.layers.31.mlp.down_proj.weight": [4096, 11008],
        "language_model.lm_head.weight": [32064, 4096],
    }.items():
        assert shapes[name] == shape
    assert "vision_backbone.fused_featurizer.attn_pool.kv.weight" in layout.unused


@pytest.fixture
def directory(tmp_path):
    return Path(shutil.copytree(FIXTURE, tmp_path / "model"))


def _change(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_shards_are_read(directory, recorded, network):
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    (directory / "model.safetensors").unlink()
    where = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        where |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    found = _network(path=directory).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llava"}, "is of a model 'llava'"),
        ({"timm_model_ids": ["resnet18"]}, r"vision towers are resnet18; legal"),
        ({"image_resize_strategy": "letterbox"}, "resizes by 'letterbox'; legal: resize-naive"),
        ({"image_sizes": [56, 56]}, "of another shape: .*pos_embed"),
        ({"text_config": {"model_type": "mistral"}}, "is a mistral; legal: llama"),
        ({"text_config": {"hidden_size": "64"}}, "none of a Llama: .* expected int, got str"),
    ],
)
def test_other_models_are_refused(directory, change, message):
    _change(directory / "config.json", **change)
    with pytest.raises(ConfigError, match=message):
        _network(path=directory)


def test_a_missing_weight_is_named(directory):
    tensors = load_file(directory / "model.safetensors")
    del tensors["projector.fc2.bias"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=r"^model\.path: .* 1 missing .*: projector\.fc2\.bias"):
        _network(path=directory)


def test_parts_of_their_own_begin_afresh_where_that_is_wanted(directory):
    (directory / "action_head--1_checkpoint.pt").unlink()
    extras = Extras(action_head=ACTIONS)
    with pytest.raises(ConfigError, match="holds no action_head--STEP"):
        _network(extras, directory)
    first, second, third = (
        _network(extras, directory, fresh=True, seed=seed).action_head.state_dict()
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.fc1.weight"], third["model.fc1.weight"])


def test_parts_with_other_shapes_or_code_are_refused(directory):
    file = directory / "proprio_projector--1_checkpoint.pt"
    torch.save({"fc1.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(ConfigError, match="does not fit"):
        _network(Extras(proprioception=5), directory)
    torch.save({"fc1.weight": Path("x")}, file)
    with pytest.raises(ConfigError, match="holds more than tensors"):
        _network(Extras(proprioception=5), directory)
    file.rename(directory / "vision_backbone--2_checkpoint.pt")
    with pytest.raises(ConfigError, match="holds several vision_backbone"):
        _network(Extras(film=True), directory)


def test_parts_that_are_not_finite_are_refused(directory):
    file = directory / "proprio_projector--1_checkpoint.pt"
    tensors = torch.load(file, weights_only=True)
    first = next(iter(tensors))
    torch.save({**tensors, first: torch.full_like(tensors[first], torch.nan)}, file)
    with pytest.raises(ConfigError, match=rf"not finite, first in .*{first}"):
        _network(Extras(proprioception=5), directory)


def test_adapters_beside_film_are_merged(directory):
    file = directory / "vision_backbone--1_checkpoint.pt"
    tensors = torch.load(file, weights_only=True)
    layer = "vision_backbone.featurizer.blocks.0.block.attn.proj"
    weight, first, second = tensors.pop(f"{layer}.weight"), torch.randn(32, 16), torch.randn(16, 32)
    tensors[f"{layer}.base_layer.weight"] = weight
    tensors[f"{layer}.lora_A.default.weight"] = first
    tensors[f"{layer}.lora_B.default.weight"] = second
    torch.save(tensors, file)
    found = _network(Extras(film=True), directory).vision_backbone.featurizer.blocks[0].attn.proj
    assert torch.allclose(found.weight, weight + 0.5 * second @ first, atol=1e-5)


# -- action tokens ------------------------------------------------------------------------------


def test_tokens_mean_what_they_mean_in_openvla():
    tokens = ActionTokens(32000)
    assert tokens.first_id == 31744
    ids = torch.tensor([31999, 31998, 31872, 31745, 31744])
    edges = torch.linspace(-1, 1, 256, dtype=torch.float64)
    bins = (32000 - ids - 1).clamp(0, 254)
    centers = ((edges[:-1] + edges[1:]) / 2)[bins]
    assert torch.allclose(tokens.decode(ids - 31744).double(), centers, atol=1e-7)
    values = torch.linspace(-1.2, 1.2, 1001)
    found = tokens.encode(values)
    assert torch.equal(
        31744 + found, 32000 - torch.bucketize(values.clamp(-1, 1), edges.float(), right=True)
    )
    inside = values.clamp(-1, 1)
    assert (tokens.decode(found) - inside).abs().max() <= 1 / 255 + 1e-6
    again = tokens.encode(tokens.decode(torch.arange(1, 256)))
    assert torch.equal(again, torch.arange(1, 256))


def test_a_vocabulary_needs_room_for_actions():
    with pytest.raises(ConfigError, match="256 tokens has no room for 256 actions"):
        ActionTokens(256)


def test_draws_have_the_probabilities_of_their_tokens():
    logits = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(0)) * 2
    one = {"temperature": torch.tensor([0.7]), "top_k": torch.tensor([5])}
    found = token_log_probs(logits, **one)
    best = logits[0, 0].topk(5).indices
    expected = torch.full((16,), -torch.inf)
    expected[best] = torch.log_softmax(logits[0, 0, best] / 0.7, dim=-1)
    assert torch.allclose(found[0, 0], expected, atol=1e-6)
    uniform = (torch.arange(20000) + 0.5) / 20000
    drawn = drawn_tokens(found.expand(20000, 1, 16), uniform[:, None])[:, 0]
    shares = torch.bincount(drawn, minlength=16) / 20000
    assert (shares - expected.exp()).abs().max() < 2e-4
    assert drawn_tokens(found, torch.tensor([[1 - 2**-24]])).item() == best.max()
    assert drawn_tokens(found, None).item() == logits.argmax()
    p = expected[best].exp()
    assert entropy(found).item() == pytest.approx(float(-(p * p.log()).sum()), abs=1e-6)


def test_a_drawn_token_counts_when_it_is_no_longer_among_the_largest():
    logits = torch.tensor([[[3.0, 2.0, 1.0, 0.0]]])
    one = {"temperature": torch.ones(1), "top_k": torch.tensor([2])}
    found = token_log_probs(logits, kept=torch.tensor([[2]]), **one)
    assert chosen(found, torch.tensor([[2]])).isfinite().all()
    assert found[0, 0, 3] == -torch.inf
