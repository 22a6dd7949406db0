"""Whole runs of NFT: those who act follow the trained weights, also after an interruption."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.checkpoint.contents import load_checkpoint
from rlinf.cli.main import main
from rlinf.cli.tasks import task_of_run
from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.models.vla.denoising_policy import DenoisingPolicy
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.embodied import Embodied
from rlinf.runners.embodied_config import EmbodiedConfig
from rlinf.runners.embodied_evaluation import TrainedPolicy
from rlinf.runners.run import Run
from rlinf.workers.rollout import _Memory

from .supervised_support import metrics, weights
from .support import assert_equal_runs
from .test_equality import needs_two_cores
from .vla_support import NFT, train, write_recipe

GIVEN = (*NFT, "algorithm.tau=0.5", "rollout.block_size=2", "runner.total_env_steps=64")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps."""
    return train(tmp_path_factory.mktemp("nft"), *GIVEN)


def test_what_is_left_behind_is_what_acts(run: Path) -> None:
    policy = TrainedPolicy(task_of_run(run), run)
    left = weights(run)
    acting = policy.build(policy.env_spec()).state_dict()
    state = load_checkpoint(run / "checkpoints" / "latest").tree["workers"]["actor"]["trainer"]
    trained = state["modules"]["policy"]["master"]
    apart = 0
    for name, value in left.items():
        assert torch.equal(acting[name], torch.from_numpy(value)), name
        apart += int(not np.array_equal(value, trained[name].numpy()))
    assert apart > 20
    steps = [line for line in metrics(run) if "actor/drift" in line]
    assert [line["actor/acting_share"] for line in steps] == [0.5] * 2
    assert all(line["actor/optimizer_steps"] == 1 for line in steps)
    # Groups of two equal starts differ by the noise of their actions alone.
    assert all(0 < line["rollout/good"] < 1 for line in steps)


def test_without_a_critic_nothing_is_kept_or_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_again(*_: object) -> None:
        raise AssertionError("values are of width 0")

    monkeypatch.setattr(DenoisingPolicy, "value", read_again)
    monkeypatch.setattr(_Memory, "add", read_again)
    train(tmp_path, *NFT, "algorithm.tau=0.5")


@pytest.mark.slow
def test_an_interrupted_run_equals_one_that_was_not(run: Path, tmp_path: Path) -> None:
    loaded = load_recipe(str(write_recipe(tmp_path, *GIVEN)), list(GIVEN))
    config = validate(EmbodiedConfig, loaded.data, loaded)
    killed = tmp_path / "killed"
    shutil.copytree(run, killed)
    shutil.rmtree(killed / "checkpoints" / "step_00000002")
    (killed / "policy.safetensors").unlink()
    with RunDirectory.open(killed) as directory:
        Run(Embodied, config, directory, threading.Event()).run(resume=True)
    assert_equal_runs(run, killed)
    for name, value in weights(run).items():
        assert np.array_equal(value, weights(killed)[name]), name


@needs_two_cores
@pytest.mark.slow
def test_placements_are_equal(run: Path, tmp_path: Path) -> None:
    other = train(
        tmp_path / "other", *GIVEN,
        "cluster.cpu_devices_per_node=2",
        "cluster.component_placement={env: '0', rollout: '1', actor: '0-1'}",
        "actor.micro_batch_size=4",
    )  # fmt: skip
    assert_equal_runs(run, other)


@pytest.mark.parametrize(("given", "message"), [
    (["model={type: mlp, num_action_chunks: 4}"], "nearest: pi05, or algorithm.type: grpo"),
    (["actor.target_kl=0.1"], "computes no log-probs"),
    (["env.train.group_size=1"], "at least 2"),
    (["demonstrations={path: demonstrations}"], "a loss of probabilities, and nft has none"),
    (["algorithm.advantage=raw", "env.train.group_size=1", "env.train.max_episode_steps=32"],
     "nearest: 32"),
    (["model.method=flow_noise"], "deviation of flow_noise"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_before_the_start(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, *NFT)
    if given[0].startswith("model={"):
        text = recipe.read_text()
        begin = text.index("model: {")
        recipe.write_text(text.replace(text[begin : text.index("}", begin) + 1],
                                       given.pop().replace("model=", "model: ")))  # fmt: skip
        own = NFT[:2]
    else:
        own = NFT
    assert main(["train", str(recipe), *own, *given, "--dry-run"]) == 2
    assert message in capsys.readouterr().err
