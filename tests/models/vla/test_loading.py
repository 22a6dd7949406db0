from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf.cli.main import main
from rlinf.errors import ConfigError
from rlinf.models.config import REGISTRY, type_of_directory
from rlinf.models.vla.conversion import convert
from rlinf.models.vla.loading import NameLayout, load_published, open_weights, translate
from rlinf.models.vla.pi0.layouts import EMBEDDING, EXPERT_HEAD, HEAD, LAYOUTS, PI0_ALONE
from rlinf.models.vla.pi0.network import PI0Network, PI0Size
from rlinf.models.vla.smolvla.policy import LAYOUTS as SMOLVLA_LAYOUTS
from rlinf.models.vla.transformer import TransformerSize
from tests.models.test_policies import env_spec

PARITY = Path(__file__).parent / "parity"
PUBLISHED = [layout.name for layout in LAYOUTS if layout.name != "rlinf"]
KEYS = {"pi0": 777, "pi05": 812}


def network(kind: str, vocabulary: int | None = None) -> PI0Network:
    size = PI0Size(
        adaptive=kind == "pi05",
        vision=TransformerSize(32, 2, 64),
        language=TransformerSize(64, 2, 128),
        expert=TransformerSize(32, 2, 64),
        vision_heads=4,
        head_dim=16,
        vocabulary=vocabulary or {"pi0": 300, "pi05": 64}[kind],
        image=56,
        horizon=8,
        action_dim=7,
        state_dim=8,
    )
    with torch.device("meta"):
        return PI0Network(size)


@pytest.fixture(params=["pi0", "pi05"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(kind: str, path: Path) -> PI0Network:
    model = network(kind)
    load_published(model, path, LAYOUTS)
    return model


@pytest.mark.parametrize("layout", PI0_ALONE)
def test_no_file_is_written_for_programs_that_cannot_read_it(layout: str) -> None:
    with pytest.raises(
        ConfigError, match=r"no π₀\.₅, .*; legal: openpi, lerobot-0\.4, lerobot-0\.6"
    ):
        convert(PARITY / "pi05", layout)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind in ("pi0", "pi05") for layout in PUBLISHED
     if kind == "pi0" or layout not in PI0_ALONE],
)  # fmt: skip
def test_every_layout_loads_whole_and_comes_back_bit_for_bit(
    tmp_path: Path, kind: str, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    original = load_file(PARITY / kind / "model.safetensors")
    path = tmp_path / "converted.safetensors"

    assert main(["convert", "policy", str(PARITY / kind), "--to", layout, "--out", str(path)]) == 0
    told = "lerobot 0.4 tells the state with zeros" in " ".join(capsys.readouterr().out.split())
    assert told == ((kind, layout) == ("pi05", "lerobot-0.4"))

    found = translate(open_weights(path), LAYOUTS)
    assert (found.layout.name, found.unknown, list(found.unused)) == (layout, (), [EXPERT_HEAD])
    equal(load(kind, path).state_dict(), load(kind, PARITY / kind).state_dict())
    equal(convert(path, "lerobot-0.4")[1], original)


def test_a_directory_says_which_model_it_holds(tmp_path: Path) -> None:
    for said, kind in (("dexbotic_pi0", "pi0"), ("pi05", "pi05")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": said}))
        assert type_of_directory(tmp_path) == kind
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match=r"no model that is known here \(gpt2\); nearest: "):
        type_of_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"action_horizon": 50}))
    with pytest.raises(ConfigError, match=r"say which: rlinf check model TYPE path="):
        type_of_directory(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: No such file"):
        type_of_directory(tmp_path)


@pytest.mark.parametrize("held", ["model.safetensors", "model.safetensors.index.json"])
def test_of_weights_without_a_description_the_type_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], held: str
) -> None:
    """As a directory of openpi."""
    (tmp_path / held).touch()
    assert main(["check", "model", str(tmp_path)]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "is of no model that is known here (it has no config.json)" in said
    assert "say which: rlinf check model TYPE path=" in said


def test_weights_of_a_run_become_a_published_file(tmp_path: Path, kind: str) -> None:
    original = load_file(PARITY / kind / "model.safetensors")
    own = load(kind, PARITY / kind).state_dict()
    run = tmp_path / "policy.safetensors"
    save_file({f"network.{n}": t for n, t in own.items()} | {"critic.x": torch.ones(1)}, run)

    found, tensors = convert(run, "openpi")

    assert found.layout.name == "rlinf"
    head = tensors.pop("paligemma_with_expert.gemma_expert.lm_head.weight")
    assert not head.any()
    assert (
        head.shape == original.pop("model.paligemma_with_expert.gemma_expert.lm_head.weight").shape
    )
    equal({f"model.{name}": tensor for name, tensor in tensors.items()}, original)


@pytest.mark.parametrize("target", ["lerobot", "rlinf"])
def test_smolvla_comes_back_bit_for_bit(tmp_path: Path, target: str) -> None:
    original = load_file(PARITY / "smolvla" / "model.safetensors")
    path = tmp_path / "converted.safetensors"
    given = ["convert", "policy", str(PARITY / "smolvla"), "--to", target, "--out", str(path)]

    assert main(given) == 0

    found, back = convert(path, "lerobot")
    assert (found.layout, found.unknown) == (smolvla_layout(target), ())
    head = "model.vlm_with_expert.vlm.lm_head.weight"
    if target == "rlinf":  # a run has none, as nothing reads it
        assert not back[head].any()
        assert back.pop(head).shape == original.pop(head).shape
    equal(back, original)


def smolvla_layout(name: str) -> NameLayout:
    return next(each for each in SMOLVLA_LAYOUTS if each.name == name)


def test_a_run_of_smolvla_that_trained_all_becomes_a_published_file(tmp_path: Path) -> None:
    config = REGISTRY.load("smolvla")(preset="tiny", train_expert_only=False)
    policy = config.build(env_spec(task_descriptions=("close the drawer",)), value_dim=1, seed=0)
    own = dict(policy.state_dict())
    path = tmp_path / "policy.safetensors"
    save_file(own, path)

    found, tensors = convert(path, "lerobot")

    assert found.layout is smolvla_layout("rlinf")
    assert not any(name.startswith("network") for name in found.unknown)
    save_file(tensors, tmp_path / "model.safetensors")
    back = translate(open_weights(tmp_path), SMOLVLA_LAYOUTS)
    network = {name: tensor for name, tensor in own.items() if name.startswith("network.")}
    equal({f"network.{name}": back[name] for name in back.names}, network)
    with pytest.raises(ConfigError, match=r"'openpi' is no layout of SmolVLA; legal: lerobot"):
        convert(path, "openpi")
    save_file({name: own[name] for name in own if name.startswith("network.expert")}, path)
    with pytest.raises(
        ConfigError,
        match=r"the file of a run has what was trained alone.*where it began with a preset",
    ):
        convert(path, "lerobot")
    # Its parts have the same names, of which this model has others besides.
    save_file(load_file(path), path, {"model": "gr00t"})
    with pytest.raises(ConfigError, match="is of a model of type gr00t; layouts are known of Smol"):
        convert(path, "lerobot")


@pytest.mark.parametrize(("kind", "billions"), [("pi0", 3.501), ("pi05", 3.617)])
def test_sizes_of_the_published_models(kind: str, billions: float) -> None:
    with torch.device("meta"):
        model = PI0Network(PI0Size(adaptive=kind == "pi05"))
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    own[EXPERT_HEAD] = (257152, 1024)

    for layout in LAYOUTS:
        if layout.name == "rlinf":
            continue
        names = {layout.theirs(name) for name in own}
        assert len(names - {None}) == KEYS[kind]
        assert {layout.ours(str(name)) for name in names} == own.keys()
    assert round(sum(torch.Size(s).numel() for s in own.values()) / 1e9, 3) == billions
    assert own["vision.layers.26.fc1.weight"] == (4304, 1152)
    assert own["language.layers.17.self_attn.k_proj.weight"] == (256, 2048)
    assert own["expert.layers.17.down_proj.weight"] == (1024, 4096)
    norm = "expert.layers.0.input_layernorm."
    adaptive = own.get(norm + "dense.weight"), own.get(norm + "weight")
    assert adaptive == (((3072, 1024), None) if kind == "pi05" else (None, (1024,)))


# SHA-256 of "name [shape]" of all tensors of the full-size models of lerobot 0.6.1, sorted, made by
# `make_parity.py names`: its own classes, on the meta device beside transformers 5.5.4.
ORIGINAL_NAMES = {
    "pi0": "76661e9f29b418b34dd522c3f8154fa6de4c92df5263e9f210477935297f7cbe",
    "pi05": "e6d8d690a56da18af8c88efb79886132306755bf83fc4c27996b4ee6e038146e",
}


def full_size(kind: str) -> dict[str, list[int]]:
    """Shapes of the graph, and of the heads that files store beside it."""
    with torch.device("meta"):
        model = PI0Network(PI0Size(adaptive=kind == "pi05"))
    own = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    return own | {HEAD: own[EMBEDDING], EXPERT_HEAD: [257152, 1024]}


def named(layout: str) -> NameLayout:
    return next(each for each in LAYOUTS if each.name == layout)


def test_names_and_shapes_are_those_of_the_original(kind: str) -> None:
    layout = named("lerobot-0.4")
    found = {layout.theirs(name): shape for name, shape in full_size(kind).items()}
    text = "\n".join(f"{name} {shape}" for name, shape in sorted(found.items(), key=str))
    assert hashlib.sha256(text.encode()).hexdigest() == ORIGINAL_NAMES[kind]


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("lerobot-0.6", "model.{}.model.vision_tower.encoder.layers.3.self_attn.out_proj.bias"),
        ("lerobot-0.4",
         "model.{}.model.vision_tower.vision_model.encoder.layers.3.self_attn.out_proj.bias"),
        ("openpi", "{}.model.vision_tower.vision_model.encoder.layers.3.self_attn.out_proj.bias"),
        ("transformers-4.51",
         "{}.vision_tower.vision_model.encoder.layers.3.self_attn.out_proj.bias"),
    ],
)  # fmt: skip
def test_names_of_published_files(layout: str, name: str) -> None:
    written = name.format("paligemma_with_expert.paligemma")
    assert named(layout).ours(written) == "vision.layers.3.self_attn.out_proj.bias"
    begin = written.partition("paligemma_with_expert")[0]
    assert named(layout).ours(f"{begin}time_mlp_in.weight") == "time_mlp_in.weight"
    old = layout == "transformers-4.51"
    middle = "language_model.model" if old else "model.language_model"
    language = f"{begin}paligemma_with_expert.paligemma.{middle}.layers.7.mlp.up_proj.weight"
    assert named(layout).ours(language) == "language.layers.7.up_proj.weight"
    expert = f"{begin}paligemma_with_expert.gemma_expert.model.layers.7.self_attn.q_proj.weight"
    assert named(layout).ours(expert) == "expert.layers.7.self_attn.q_proj.weight"


@pytest.mark.slow
def test_names_and_shapes_are_those_of_transformers() -> None:
    from transformers import PI0Config, PI0ForConditionalGeneration

    with torch.device("meta"):
        theirs = PI0ForConditionalGeneration(PI0Config()).state_dict()
    layout, own = named("transformers"), full_size("pi0")
    del own[HEAD]
    assert {layout.theirs(name): shape for name, shape in own.items()} == {
        name: list(tensor.shape) for name, tensor in theirs.items()
    }


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    tensors = load_file(PARITY / "pi0" / "model.safetensors")
    names = sorted(tensors)
    for number, part in enumerate((names[:40], names[40:])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"part-{number}.safetensors")
    where = {name: f"part-{int(place >= 40)}.safetensors" for place, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return tmp_path


def test_shards_are_one_model(shards: Path) -> None:
    equal(load("pi0", shards).state_dict(), load("pi0", PARITY / "pi0").state_dict())


def test_half_a_checkpoint_is_refused(shards: Path) -> None:
    (shards / "part-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"1 of its 2 files missing: part-1\.safetensors"):
        load("pi0", shards)


def test_a_shard_without_its_tensors_is_refused(shards: Path) -> None:
    (shards / "part-1.safetensors").write_bytes((shards / "part-0.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"its files lack \d+ tensors that its index names"):
        load("pi0", shards)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    whole = (PARITY / "pi0" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="holds no weights"):
        load("pi0", tmp_path)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        load("pi0", tmp_path)


def test_missing_left_over_and_misshapen_are_one_error(tmp_path: Path) -> None:
    tensors = load_file(PARITY / "pi0" / "model.safetensors")
    del tensors["model.state_proj.bias"]
    tensors["model.state_proj.weight"] = torch.zeros(3, 3)
    tensors["model.paligemma_with_expert.more"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors")
    model = network("pi0")

    with pytest.raises(ConfigError) as caught:
        load_published(model, tmp_path, LAYOUTS)

    for part in (
        "1 missing in the file: state_proj.bias",
        "paligemma_with_expert.more",
        "1 of another shape: state_proj.weight ([3, 3], in the model [32, 8])",
    ):
        assert part in str(caught.value)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_another_model_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    save_file({"layers.0.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"of another model.*layers\.0\.weight"):
        load("pi0", tmp_path)
    with pytest.raises(ConfigError, match=r"missing in the file: .*dense"):
        load("pi05", PARITY / "pi0")


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    tensors = load_file(PARITY / "pi0" / "model.safetensors")
    head = "model.paligemma_with_expert.paligemma.lm_head.weight"
    embedding = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    path = tmp_path / "model.safetensors"
    save_file(tensors | {embedding: tensors[head].clone()}, path)
    assert torch.equal(load("pi0", path).state_dict()[EMBEDDING], tensors[head])

    save_file(tensors | {embedding: tensors[head] + 1}, path)
    with pytest.raises(ConfigError, match="differ, which are one tensor"):
        load("pi0", path)


def test_weights_are_converted_to_a_type(tmp_path: Path) -> None:
    model = network("pi0")
    load_published(model, PARITY / "pi0", LAYOUTS, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("target", ["lerobot", "openpi"])
def test_convert_says_what_it_cannot_do(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.safetensors"
    if target == "openpi":
        path.touch()
    given = ["convert", "policy", str(PARITY / "pi0"), "--to", target, "--out", str(path)]
    assert main(given) == 2
    text = capsys.readouterr().err
    assert ("lerobot-0.6" if target == "lerobot" else "exists") in text.replace("\n", " ")


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name
