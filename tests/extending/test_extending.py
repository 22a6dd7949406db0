"""A package outside adds an env, a model, an algorithm and a logger, and all of them are used."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.cli.main import main
from rlinf.cli.tasks import read_config
from rlinf.data.exchange import ObservationBatch, PolicyBatch, RolloutValues, TrajectoryBuilder
from rlinf.data.trajectory import Trajectory
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import ConfigError
from rlinf.monitor.loggers.base import LoggerConfig
from rlinf.monitor.metrics_log import MetricsLog
from rlinf.trainers.trainer import Trainer

from .conftest import PACKAGE

pytestmark = pytest.mark.usefixtures("installed")

RECIPE = str(PACKAGE / "recipe.yaml")


def config(*overrides: str):
    return read_config(RECIPE, overrides)[2]


@pytest.mark.parametrize(
    ("kind", "name", "what_it_is"),
    [
        ("envs", "reach-point", "A point in [-1, 1]^n is pushed to a goal"),
        ("models", "fourier", "Gaussian policy on random Fourier features"),
        ("algorithms", "reinforce", "Policy gradient of the discounted return"),
        ("loggers", "csv", "Appends to `metrics.csv`"),
    ],
)
def test_listed_with_its_docstring(capsys, kind, name, what_it_is):
    assert main(["list", kind]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(name))
    assert what_it_is in line


def test_options_are_explained(capsys):
    assert main(["explain", "model.bandwidth"]) == 0
    out = capsys.readouterr().out
    assert "Standard deviation of the frequencies." in out
    assert "> 0" in out


def test_recipe_is_accepted(capsys, tmp_path):
    assert main(["train", RECIPE, "--dry-run", f"runner.output_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    for name in ("reach-point", "fourier", "reinforce", "csv"):
        assert name in out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("env.train.options.dimension=3", "did you mean `dimensions`?"),
        ("env.train.options.dimensions=two", "must be a whole number"),
        ("env.train.options.dimensions=0", "nearest: 1"),
        ("env.train.type=reach-pint", "did you mean `reach-point`?"),
        ("model.frequency=3", "did you mean `frequencies`?"),
        ("model.frequencies=0", "nearest: 1"),
        ("algorithm.baselin=true", "did you mean `baseline`?"),
        ("algorithm.type=reinforc", "did you mean `reinforce`?"),
        ("logger.backends=[cvs]", "did you mean `csv`?"),
    ],
)
def test_wrong_option_is_refused(override, message):
    with pytest.raises(ConfigError) as error:
        config(override).check()
    assert message in str(error.value)


def test_env_conforms(capsys):
    assert main(["check", "env", "reach-point", "options.dimensions=3"]) == 0
    assert "13 of 13 checks passed" in capsys.readouterr().out


def collect(env, policy, steps: int, generator: torch.Generator, *, version: int):
    """One rollout of ``steps`` chunk steps under a policy without a critic."""
    ids = np.arange(env.num_envs, dtype=np.int64)
    builder = TrajectoryBuilder(ids, steps)
    observations = env.reset()
    shape = (env.num_envs, policy.chunk, policy.action_dim)
    for time in range(steps):
        inputs = {key: torch.from_numpy(value) for key, value in observations.items()}
        sample = policy.sample(inputs, {"actions": torch.randn(shape, generator=generator)})
        step = env.chunk_step(sample.actions.numpy())
        seen = ObservationBatch(observations, ids, time, None, np.zeros(len(ids), bool))
        answer = PolicyBatch(
            actions=sample.actions.numpy(),
            log_probs=sample.log_probs.numpy(),
            forward_inputs={key: each.numpy() for key, each in sample.forward_inputs.items()},
            version=version,
        )
        builder.add(seen, answer, step)
        observations = step.observations
    no_values = np.zeros((steps, env.num_envs, 0), np.float32)
    arrays = builder.build(RolloutValues(no_values, no_values, no_values[0]))
    return Trajectory.from_arrays(arrays)


def test_model_and_algorithm_learn_in_the_env():
    settings = config("env.train.processes=1", "model.hidden_sizes=[32]")
    algorithm = settings.algorithm.build()
    generator = torch.Generator().manual_seed(1)
    with SupervisedVectorEnv(settings.env.train, num_envs=8, seed=3) as env:
        policy = settings.model.build(env.env_spec, value_dim=algorithm.value_dim(1))
        trainer = Trainer(
            {"policy": policy},
            algorithm,
            settings.actor,
            rows=settings.samples,
            total_steps=30,
            seed=0,
        )
        rewards = []
        for step in range(30):
            trajectory = collect(env, policy, settings.chunk_steps, generator, version=step)
            metrics = trainer.learn(trajectory, step)
            assert abs(metrics["actor/first_update_kl"]) < 1e-6
            assert metrics["actor/optimizer_steps"] == 1
            rewards.append(metrics["rollout/rewards"])
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1


def test_recipe_trains_with_all_of_them(tmp_path: Path, capsys):
    run = tmp_path / "run"
    small = ("runner.total_env_steps=1200", "env.train.processes=1", "env.num_envs=4",
             "actor.global_batch_size=100", "evaluation.episodes=4", "evaluation.num_envs=2",
             "evaluation.video_episodes=0")  # fmt: skip
    assert main(["train", RECIPE, "--run-dir", str(run), *small]) == 0
    assert "held-out episodes: success rate" in capsys.readouterr().out
    with (run / "metrics.csv").open() as file:
        rows = list(csv.reader(file))
    assert {row[0] for row in rows} == {"1", "2", "3", "4", "5", "6"}
    assert {"env/return", "actor/policy_loss", "actor/first_update_kl"} <= {row[1] for row in rows}


def test_logger_takes_metrics_and_forgets_what_a_resume_repeats(tmp_path: Path):
    with MetricsLog(tmp_path, LoggerConfig(backends=("csv",))) as log:
        assert log.active == ["csv"]
        log.log(1, {"eval/success": 0.5})
        cursor = log.cursor()
        log.log(2, {"eval/success": 0.75})
        log.truncate(cursor)
        log.log(2, {"eval/success": 1.0})
    with (tmp_path / "metrics.csv").open() as file:
        assert list(csv.reader(file)) == [
            ["1", "eval/success", "0.5"],
            ["2", "eval/success", "1.0"],
        ]
