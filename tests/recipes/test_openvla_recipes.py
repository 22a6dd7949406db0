"""Recipes of OpenVLA and OpenVLA-OFT: those of published runs are accepted without simulators."""

from __future__ import annotations

import importlib.util
import json
import re
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf.algorithms.base_config import ClippedConfig
from rlinf.algorithms.config import CriticConfig
from rlinf.cli.tasks import read_config
from rlinf.envs.household import robotwin
from rlinf.envs.requirements import SOURCE_VARIABLE
from rlinf.runners.embodied_config import EmbodiedConfig

from .conftest import rlinf

MODEL = Path("tests/models/vla/parity/openvla")

# Environments, group, steps of a rollout and of an episode; actions of a chunk; rates of policy and
# critic; global and micro batch; rank of adapters; training steps.
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "maniskill_put_on_plate_openvla_ppo": (
        128, 1, 160, 80, 1, 1e-4, 3e-3, 640, 80, 32, 1000,
    ),
    "maniskill_put_on_plate_openvla_async_ppo": (
        64, 1, 80, 80, 1, 1e-4, 3e-3, 320, 40, 32, 1000,
    ),
    "maniskill_put_on_plate_openvla_oft_ppo": (
        128, 1, 160, 80, 8, 1e-4, 3e-3, 640, 40, 32, 1000,
    ),
    "maniskill_put_on_plate_openvla_oft_grpo": (
        256, 8, 80, 80, 8, 1e-4, None, 640, 40, 32, 1000,
    ),
    "libero_10_openvla_oft_grpo": (
        64, 8, 16 * 512, 512, 8, 2e-5, None, 16384, 32, None, 1000,
    ),
    "robotwin_place_empty_cup_openvla_oft_grpo": (
        128, 8, 8 * 200, 200, 25, 1e-4, None, 1024, 32, 32, 1000,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def simulators_are_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For checks that start nothing: they look only whether packages and a GPU are there."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return real(name, package) or real("json")

    (tmp_path / "gpus" / "0").mkdir(parents=True)
    monkeypatch.setenv("RLINF_ENVS", str(tmp_path / "envs"))
    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    monkeypatch.setattr("rlinf.envs.installation.GPUS", str(tmp_path / "gpus"))
    monkeypatch.setattr("rlinf.envs.libero._suites", lambda: ["libero_10"])
    monkeypatch.setattr("rlinf.envs.libero._suite", lambda name: SimpleNamespace(n_tasks=10))
    monkeypatch.setattr(robotwin, "step_limits", lambda folder: {"place_empty_cup": 200})
    for folder in robotwin.ASSETS:
        (tmp_path / "assets" / folder).mkdir(parents=True)
    monkeypatch.setenv(robotwin.ASSETS_VARIABLE, str(tmp_path))
    monkeypatch.setenv(SOURCE_VARIABLE, "tests/envs/recorded/put_on_plate")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a model that knows the sets of all recipes, and has no weights yet."""
    (tmp_path / "model.safetensors.index.json").touch()
    numbers = {"action": {"q01": [-1.0], "q99": [1.0], "min": [-1.0], "max": [1.0]}}
    keys = ("bridge_orig", "libero_10_no_noops", "place_empty_cup_1k")
    (tmp_path / "config.json").write_text(json.dumps({"norm_stats": dict.fromkeys(keys, numbers)}))
    return tmp_path


@pytest.mark.parametrize("name", PUBLISHED)
def test_values_are_those_of_the_publication(name: str) -> None:
    _, _, config = read_config(f"vla/{name}", [f"model.path={MODEL}"])
    assert isinstance(config, EmbodiedConfig)
    actor, train, model = config.actor, config.env.train, config.model
    found = (
        config.env.num_envs,
        train.group_size,
        config.rollout.steps,
        train.max_episode_steps,
        model.num_action_chunks,
        actor.optim.lr,
        actor.optim.value_lr,
        actor.global_batch_size,
        actor.micro_batch_size,
        None if actor.lora is None else actor.lora.rank,
        config.training_steps,
    )
    assert found == PUBLISHED[name]
    clips = {"openvla_ppo": 0.2, "openvla_async_ppo": 0.3}
    clip = next((bound for end, bound in clips.items() if name.endswith(end)), 0.28)
    algorithm = config.algorithm
    assert algorithm.clip_ratio_high == clip
    assert isinstance(algorithm, ClippedConfig)
    assert algorithm.clip_ratio_c == 3.0
    if isinstance(algorithm, CriticConfig):
        ended = "standard" if "async" in name else "always"
        assert (algorithm.bootstrap_type, algorithm.value_clip) == (ended, 0.2)
    # A group of the one rollout without a second episode is whole where nothing follows its ends.
    assert train.auto_reset == (not name.endswith("put_on_plate_openvla_oft_grpo"))
    temperature = 1.0 if name.startswith("maniskill") else 1.6
    assert getattr(model, "temperature") == temperature  # noqa: B009 - not of every model
    level = "action_level" if name.endswith(tuple(clips)) else "token_level"
    assert getattr(config.algorithm, "logprob_type") == level  # noqa: B009 - not of every algorithm
    told = Path("recipes/vla", f"{name}.yaml").read_text()
    assert "Not run at this size" in told
    assert "target: success 0." in told or "success it reached is not known here" in told


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_dry_run_starts_nothing(
    name: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", f"vla/{name}", "--dry-run", f"model.path={directory}")
    code, shown, error = rlinf(capsys, *words)
    assert code == 0, error
    assert "nothing was started" in shown
    code, _, error = rlinf(capsys, *words, "model.statistics_key=bridge")
    assert code == 2
    told = r"model\.statistics_key = 'bridge' .* no statistics of `bridge`; did you mean `bridge_o"
    assert re.search(told, error)


def test_reinforcement_goes_on_from_what_the_supervised_recipe_makes() -> None:
    _, _, first = read_config("vla/drawer_close_openvla_oft_sft", [])
    _, _, second = read_config("vla/drawer_close_openvla_oft_grpo", [])
    assert first.model == second.model
    assert first.env.train.adapter_options == second.env.train.adapter_options
