"""Trained policies as directories in the format of those that they began from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from rlinf.algorithms.supervised import Supervised
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models.adapters import AdapterConfig, adapt_policy, in_precision
from rlinf.models.config import REGISTRY
from rlinf.models.policy import draw_noise
from rlinf.models.policy_weights import BASE, check_base
from rlinf.models.vla.policy import fingerprint, former_fingerprint
from rlinf.models.vla.publishing import publish
from rlinf.models.vla.statistics import ModelStatistics, Statistics
from rlinf.models.vla.statistics_files import read_statistics
from rlinf.trainers.config import RowTrainerConfig
from rlinf.trainers.modules import POLICY
from rlinf.trainers.trainer import Trainer
from tests.models.visuomotor import support as visuomotor
from tests.models.vla import (
    test_gr00t,
    test_openvla,
    test_pi0_policy,
    test_smolvla,
    test_wall_oss,
)


def of_act(path: Path) -> Any:
    return visuomotor.published("act", path, num_action_chunks=8)


def whole(kind: str, path: Path) -> Path:
    """The fixture with weights in float32, and without what is no part of a model."""
    shutil.copytree(visuomotor.PARITY / kind, path, dirs_exist_ok=True)
    (path / "io.safetensors").unlink()
    file = path / "model.safetensors"
    save_file({name: each.float() for name, each in load_file(file).items()}, file)
    return path


def of_diffusion(path: Path) -> Any:
    return visuomotor.published("diffusion", path, num_action_chunks=4, repeat_observation=True)


def of_smolvla(path: Path) -> Any:
    config = REGISTRY.load("smolvla")(
        path=path, num_action_chunks=5, denoising_steps=4, train_expert_only=False
    )
    return config.build(test_smolvla.SEVEN, value_dim=1, seed=0)


def of_pi(kind: str) -> Callable[[Path], Any]:
    def build(path: Path) -> Any:
        config = REGISTRY.load(kind)(path=path, num_action_chunks=5, denoising_steps=4)
        return config.build(test_pi0_policy.SEVEN, value_dim=1, seed=0)

    return build


def of_openvla(path: Path) -> Any:
    return test_openvla._published(path, kind="openvla", num_action_chunks=1)


def openvla(path: Path) -> Path:
    """Without the heads of OFT in files of their own, and in float32."""
    test_openvla.write_directory(path)
    for head in [*path.glob("*.pt"), path / "io.safetensors"]:
        head.unlink(missing_ok=True)
    file = path / "model.safetensors"
    save_file({name: each.float() for name, each in load_file(file).items()}, file)
    return path


def made(tmp_path: Path, write: Callable[[Path], Path]) -> Path:
    (tmp_path / "base").mkdir()
    return write(tmp_path / "base")


BASES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any]]] = {
    "act": (lambda path: whole("act", path), of_act),
    "diffusion": (lambda path: whole("diffusion", path), of_diffusion),
    "pi0": (lambda path: test_pi0_policy.write_published(path, "pi0"), of_pi("pi0")),
    "pi05": (lambda path: test_pi0_policy.write_published(path, "pi05"), of_pi("pi05")),
    "openvla": (openvla, of_openvla),
    "smolvla": (test_smolvla.published, of_smolvla),
    "gr00t": (test_gr00t.published, test_gr00t.of_directory),
    "wall_oss": (test_wall_oss.published, test_wall_oss.of_directory),
}


def moved(policy: Any) -> Any:
    """With other weights in the network, by adapters as well."""
    adapt_policy(policy, AdapterConfig(rank=2), seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for each in policy.network.parameters():
            each.add_(0.02 * torch.randn(each.shape, generator=generator).to(each.dtype))
    return policy.eval()


def acted(policy: Any) -> torch.Tensor:
    """Most likely actions on random observations."""
    generator = torch.Generator().manual_seed(2)
    rows = {"states": torch.randn(2, policy.state_dim, generator=generator)}
    for key, _ in policy.views:
        rows[key] = torch.randint(0, 256, (2, *SIZES[key]), generator=generator).byte()
    noise = draw_noise(policy.noise, (2,), generator)
    with torch.no_grad():
        return policy.sample(rows, noise).actions


SIZES = {"main_images": (32, 48, 3), "wrist_images": (32, 48, 3)}


@pytest.mark.parametrize("kind", BASES)
def test_what_is_written_is_read_as_the_trained_policy(kind: str, tmp_path: Path) -> None:
    write, build = BASES[kind]
    base, out = made(tmp_path, write), tmp_path / "out"
    before, policy = build(base).eval(), moved(build(base))
    found = publish(policy, base, out, None)
    again = build(out).eval()
    assert found.trained > 20
    torch.testing.assert_close(acted(again), acted(policy), atol=2e-4, rtol=1e-3)
    assert not torch.allclose(acted(again), acted(before), atol=2e-3)
    names = {str(file.relative_to(base)) for file in base.rglob("*") if file.is_file()}
    assert {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()} == names
    assert len({file.stat().st_mode for file in out.iterdir() if file.is_file()}) == 1
    first, second = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name: (each.shape, each.dtype) for name, each in first.items()} == {
        name: (each.shape, each.dtype) for name, each in second.items()
    }


def test_what_a_policy_only_rounds_is_as_in_its_base(tmp_path: Path) -> None:
    base, out = made(tmp_path, BASES["smolvla"][0]), tmp_path / "out"
    file, name = base / "model.safetensors", "model.action_out_proj.weight"
    stored = load_file(file)
    odd = {name: each * (1 + 2**-13) for name, each in stored.items()}
    save_file({name: each.float() for name, each in odd.items()}, file)
    policy = in_precision(of_smolvla(base), torch.bfloat16)
    with torch.no_grad():
        policy.network.action_out_proj.weight.add_(1.0)
    found = publish(policy, base, out, None)
    assert (found.trained, found.copied) == (1, len(stored) - 1)
    first, second = load_file(file), load_file(out / "model.safetensors")
    assert [each for each in first if not torch.equal(first[each], second[each])] == [name]


def test_the_base_is_what_weights_are_read_from(tmp_path: Path) -> None:
    base = made(tmp_path, BASES["pi0"][0])
    file = base / "model.safetensors"
    alone = fingerprint(base)
    assert alone == former_fingerprint(base)
    (base / "optimizer.pt").write_bytes(b"moments")
    save_file({"reward.mean": torch.zeros(1)}, base / "policy_normalizer_processor.safetensors")
    former = former_fingerprint(base)
    assert fingerprint(base) == alone != former
    policy = of_pi("pi0")(base)
    trainer = Trainer(
        {POLICY: policy},
        Supervised("likelihood"),
        RowTrainerConfig(global_batch_size=4, micro_batch_size=2),
        total_steps=1,
        seed=0,
    )
    for written in (alone, former):
        trainer.load_numbers({**trainer.numbers(), BASE: written})
        check_base(policy, written, source="the file")
    policy.base = f"{alone}, then sha256:1"
    check_base(policy, f"{former}, then sha256:1", source="the file")
    for written in (former, f"{former}, then sha256:2"):
        with pytest.raises(ConfigError, match="the file was trained from other weights"):
            check_base(policy, written, source="the file")
    with pytest.raises(CheckpointError, match="was trained from other weights"):
        trainer.load_numbers({**trainer.numbers(), BASE: "sha256:1"})
    (base / "action_head--1_checkpoint.pt").write_bytes(b"a part")
    with_part = fingerprint(base)
    save_file(load_file(file), base / "first.safetensors")
    where = dict.fromkeys(load_file(file), "first.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert len({alone, with_part, fingerprint(base)}) == 3


MADE = """
import sys
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import make_pre_post_processors

torch.manual_seed(0)
shown = {f"observation.images.{name}": (FeatureType.VISUAL, (3, 32, 48))
         for name in ("front", "wrist")}
shown["observation.state"] = (FeatureType.STATE, (5,))
done = {"action": (FeatureType.ACTION, (3,))}
inputs, outputs = ({name: PolicyFeature(type=kind, shape=shape)
                    for name, (kind, shape) in each.items()} for each in (shown, done))
config = ACTConfig(
    input_features=inputs, output_features=outputs, device="cpu", push_to_hub=False, chunk_size=8,
    n_action_steps=8, dim_model=16, n_heads=2, dim_feedforward=24, n_encoder_layers=1,
    pretrained_backbone_weights=None,
)
units = {name: {"mean": torch.full((shape[0],) + (1, 1) * (kind is FeatureType.VISUAL), 0.25),
                "std": torch.full((shape[0],) + (1, 1) * (kind is FeatureType.VISUAL), 0.5)}
         for name, (kind, shape) in (shown | done).items()}
for part in (ACTPolicy(config), *make_pre_post_processors(config, dataset_stats=units)):
    part.save_pretrained(sys.argv[1])
"""
ACTED = """
import sys
import numpy as np
import torch
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import make_pre_post_processors

policy = ACTPolicy.from_pretrained(sys.argv[1]).eval()
before, behind = make_pre_post_processors(policy.config, pretrained_path=sys.argv[1])
seen = np.load(sys.argv[2])
row = {
    f"observation.images.{name}": torch.from_numpy(seen[name]).permute(0, 3, 1, 2) / 255
    for name in ("front", "wrist")
}
with torch.no_grad():
    done = policy.predict_action_chunk(
        before({**row, "observation.state": torch.from_numpy(seen["states"])})
    )
np.save(sys.argv[3], behind(done).numpy())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "RLINF_LEROBOT_PYTHON" not in os.environ,
    reason="RLINF_LEROBOT_PYTHON names no Python with lerobot",
)
def test_lerobot_acts_as_the_policy_that_was_trained_here(tmp_path: Path) -> None:
    python, base, out = os.environ["RLINF_LEROBOT_PYTHON"], tmp_path / "base", tmp_path / "out"
    subprocess.run([python, "-c", MADE, str(base)], check=True)
    policy = moved(of_act(base))
    publish(policy, base, out, None)
    rng = np.random.default_rng(0)
    seen = {name: rng.integers(0, 256, (2, 32, 48, 3), np.uint8) for name in ("front", "wrist")}
    seen["states"] = rng.normal(size=(2, 5)).astype(np.float32)
    np.savez(tmp_path / "seen.npz", **seen)
    words = [str(out), str(tmp_path / "seen.npz"), str(tmp_path / "done.npy")]
    subprocess.run([python, "-c", ACTED, *words], check=True)
    names = {"front": "main_images", "wrist": "wrist_images", "states": "states"}
    with torch.no_grad():
        own = policy.sample({names[k]: torch.from_numpy(v) for k, v in seen.items()}, None)
    np.testing.assert_allclose(own.actions.numpy(), np.load(tmp_path / "done.npy"), atol=1e-4)


def test_statistics_of_the_run_are_put_into_the_processors(tmp_path: Path) -> None:
    base, out = made(tmp_path, BASES["act"][0]), tmp_path / "out"
    policy = moved(of_act(base))
    other = Statistics(mean=torch.full((3,), 0.25), std=torch.full((3,), 2.0))
    publish(policy, base, out, ModelStatistics(other, None))
    for file in out.glob("*processor.safetensors"):
        held = load_file(file)
        assert held["action.mean"].tolist() == [0.25] * 3
        assert held["action.std"].tolist() == [2.0] * 3
    for file in out.glob("*processor.safetensors"):
        (base / file.name).unlink()
    with pytest.raises(ConfigError, match=r"no file .*norm_stats\.json to put them in"):
        publish(policy, base, tmp_path / "third", ModelStatistics(other, None))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]


def test_statistics_of_the_run_are_put_where_openpi_has_them(tmp_path: Path) -> None:
    base, out = made(tmp_path, BASES["pi05"][0]), tmp_path / "out"
    other = Statistics(q01=torch.full((7,), -0.25), q99=torch.full((7,), 2.0))
    publish(moved(of_pi("pi05")(base)), base, out, ModelStatistics(other, None))
    before, found = read_statistics(base), read_statistics(out)
    assert found.actions.given().keys() == {"q01", "q99"}  # no mean of what holds no longer
    assert found.actions.required("q99").tolist() == [2.0] * 7
    assert before.states is not None
    assert found.states is not None
    assert torch.equal(found.states.required("q01"), before.states.required("q01"))


def test_statistics_that_weights_repeat_are_those_of_the_directory(tmp_path: Path) -> None:
    base, weights = made(tmp_path, openvla), tmp_path / "policy.safetensors"
    began = REGISTRY.load("openvla")(path=base, statistics_key="one")
    assert began.own_statistics() is None
    went_on = REGISTRY.load("openvla")(path=base, statistics_key="one", weights=weights)
    save_file({"x": torch.zeros(1)}, weights, began.header())
    assert went_on.own_statistics() is None
    other = {"statistics": json.dumps({"actions": {"q01": [-1.0] * 7, "q99": [1.0] * 7}})}
    save_file({"x": torch.zeros(1)}, weights, other)
    assert went_on.own_statistics().actions.required("q99").tolist() == [1.0] * 7


def test_shards_stay_shards_and_other_weights_behind(tmp_path: Path) -> None:
    base, out = made(tmp_path, BASES["act"][0]), tmp_path / "out"
    whole = load_file(base / "model.safetensors")
    names = sorted(whole)
    where = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: whole[name] for name in part}, base / file)
        where |= dict.fromkeys(part, file)
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (base / "model.safetensors").unlink()
    (base / "pytorch_model.bin").write_bytes(b"former weights")
    policy = moved(of_act(base))
    publish(policy, base, out, None)
    assert {file.name for file in base.iterdir()} - {file.name for file in out.iterdir()} == {
        "pytorch_model.bin"
    }
    torch.testing.assert_close(acted(of_act(out)), acted(policy), atol=2e-4, rtol=1e-3)
    shutil.rmtree(out)
    policy.network.register_buffer("more", torch.zeros(1))
    with pytest.raises(ConfigError, match="no place for 1 tensors of the network, such as more"):
        publish(policy, base, out, None)
    assert not out.exists()
