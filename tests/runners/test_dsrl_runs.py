"""Whole runs in which a frozen policy is steered by its noise."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.checkpoint.contents import load_checkpoint
from rlinf.cli.main import main
from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.off_policy import OffPolicy
from rlinf.runners.run import Run
from rlinf.workers.config.off_policy import OffPolicyConfig

from .supervised_support import metrics, run_recipe, weights
from .support import assert_equal_runs
from .test_equality import needs_two_cores
from .vla_support import ENV, LEFT_BEHIND

STEERED = f"""
task: off_policy
seed: 7
runner: {{total_env_steps: 96}}
{ENV}  num_envs: 4
rollout: {{steps: 8, block_size: 2}}
model:
  type: steered
  channels: [4]
  kernel_sizes: [3]
  strides: [4]
  image_size: 16
  hidden_sizes: [16]
  q_hidden_sizes: [16]
  q_functions: 3
  base: {{type: pi05, preset: tiny, num_action_chunks: 4, denoising_steps: 2, method: ode}}
algorithm: {{type: dsrl, gamma: 0.9, update_to_data: 0.25}}
replay: {{capacity: 20, start_steps: 32}}
actor: {{global_batch_size: 8, micro_batch_size: 4, optim: {{lr: 1.0e-2}}}}
evaluation: {{interval: 0, episodes: 2, num_envs: 2, video_episodes: 0}}
{LEFT_BEHIND}"""


def write_recipe(directory: Path) -> Path:
    path = directory / "steered.yaml"
    path.write_text(STEERED)
    return path


def train(directory: Path, *overrides: str) -> Path:
    directory.mkdir(exist_ok=True)
    run_recipe(write_recipe(directory), directory / "run", *overrides)
    return directory / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rollout of random noise, and two steps of training."""
    return train(tmp_path_factory.mktemp("dsrl"))


@pytest.mark.slow
def test_noise_is_remembered_and_what_chooses_it_left_behind(run: Path) -> None:
    lines = [line for line in metrics(run) if "replay/transitions" in line]
    assert [line["replay/transitions"] for line in lines] == [8.0, 16.0, 20.0]
    assert [line.get("actor/optimizer_steps", 0.0) for line in lines] == [0.0, 2.0, 2.0]
    assert all(name.startswith("steering.") for name in weights(run))
    tree = load_checkpoint(run / "checkpoints" / "latest").tree["workers"]
    # 24 transitions in a ring of 20: the newest are behind its begin.
    kept = [tree["replay"][part]["inputs.raw_actions"] for part in ("rows", "newer")]
    remembered = torch.cat(kept)
    assert remembered.shape == (20, 1, 2)
    assert float(remembered.abs().max()) <= 1.0
    master = tree["actor"]["trainer"]["modules"]["policy"]["master"]
    assert master
    assert all(name.startswith("steering.") for name in master)


@pytest.mark.slow
def test_an_interrupted_run_equals_one_that_was_not(run: Path, tmp_path: Path) -> None:
    assert_goes_on(run, tmp_path)


@pytest.mark.slow
def test_a_diffusion_policy_is_steered_by_what_ddim_begins_with(tmp_path: Path) -> None:
    base = "{type: diffusion, preset: tiny, num_action_chunks: 4, denoising_steps: 2, method: ddim}"
    run = train(tmp_path / "whole", f"model.base={base}")
    assert metrics(run)[-1]["actor/optimizer_steps"] == 2
    assert all(name.startswith("steering.") for name in weights(run))
    assert_goes_on(run, tmp_path, f"model.base={base}")


def assert_goes_on(run: Path, tmp_path: Path, *overrides: str) -> None:
    """The run without its last step ends as it did with it."""
    loaded = load_recipe(str(write_recipe(tmp_path)), list(overrides))
    config = validate(OffPolicyConfig, loaded.data, loaded)
    killed = tmp_path / "killed"
    shutil.copytree(run, killed)
    shutil.rmtree(killed / "checkpoints" / "step_00000003")
    (killed / "policy.safetensors").unlink()
    with RunDirectory.open(killed) as directory:
        Run(OffPolicy, config, directory, threading.Event()).run(resume=True)
    assert_equal_runs(run, killed)
    for name, value in weights(run).items():
        assert np.array_equal(value, weights(killed)[name]), name


@needs_two_cores
@pytest.mark.slow
def test_placements_are_equal_and_it_is_evaluated(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = train(
        tmp_path / "other",
        "cluster.cpu_devices_per_node=2",
        "cluster.component_placement={env: '0', 'rollout,replay': '1', actor: '0-1'}",
    )
    assert_equal_runs(run, other)
    assert main(["eval", str(run), "--episodes", "2"]) == 0
    assert "success rate" in capsys.readouterr().out


@pytest.mark.parametrize(("given", "message"), [
    (["model.base.method=flow_sde"], "nearest: ode"),
    (["model.base.cameras=[wrist_images]"], "model.cameras"),
    (["actor.lora.rank=2"], "what steers it is small"),
    (["model.image_keys=[]", "model.use_states=false"], "noise would be chosen by nothing"),
    (["algorithm.type=sac", "model={type: pi05, preset: tiny, num_action_chunks: 4}"],
     "nearest: steered"),
    (["model={type: squashed_mlp, num_action_chunks: 4}"],
     "learns the noise of a frozen policy, squashed_mlp has none"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path)
    if given[-1].startswith("model={"):
        text = recipe.read_text()
        model = text[text.index("model:") : text.index("algorithm:")]
        recipe.write_text(text.replace(model, given[-1].replace("model=", "model: ") + "\n"))
        given = given[:-1]
    starts = bool(given) and "cameras" in given[0]  # what is seen is known of the environment alone
    dry = [] if starts else ["--dry-run"]
    output = f"runner.output_dir={tmp_path}"
    assert main(["train", str(recipe), output, *given, *dry]) == 2
    assert message in capsys.readouterr().err
