"""Recipes that train in simulators, looked at where those simulators are not installed."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from rlinf.algorithms.config import PPOConfig, SACConfig
from rlinf.cli.tasks import read_config
from rlinf.config.load import load_recipe, recipe_names
from rlinf.envs.installation import requirements_of
from rlinf.envs.metaworld.adapter import tasks_of
from rlinf.errors import ConfigError
from rlinf.models.config import MLPConfig, SquashedMLPConfig
from rlinf.runners.embodied_config import EmbodiedConfig
from rlinf.workers.config.acting import ActingConfig
from rlinf.workers.config.off_policy import OffPolicyConfig

from .conftest import rlinf

NAMES = [name for name in recipe_names() if name.startswith("embodied/")]


def env_type(name: str) -> str:
    section = load_recipe(name).data["env"]["train"]
    return str((section[0] if isinstance(section, list) else section)["type"])


def to_install(name: str) -> str | None:
    """What must be installed beside this package; None for what `pip install` can bring along."""
    needs = requirements_of(env_type(name))
    return None if needs is None or needs.extra else env_type(name)


# Published runs: environments, steps of a rollout and of an episode; discount; rates of policy and
# critic, ε of the optimizer, its weight decay and clipping; global and micro batch; passes, or
# updates after a rollout; training steps.
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "genesis_pick_cube_ppo": (
        128, 200, 200, 0.99, 3e-4, 3e-4, 1e-8, 0.01, 0.5, 256, 128, 8, 200,
    ),
    "maniskill_pick_cube_ppo": (
        1024, 50, 50, 0.8, 3e-4, 3e-4, 1e-8, 0.01, 0.5, 6400, 6400, 8, 1000,
    ),
    "maniskill_pick_cube_sac": (
        32, 2, 50, 0.8, 3e-4, 3e-4, 1e-8, 0.0, 10.0, 1024, 1024, 32, 8000,
    ),
}  # fmt: skip
# How each moves its arm, where there is a choice.
CONTROL_MODES = {
    "maniskill_pick_cube_ppo": "pd_joint_delta_pos",
    "maniskill_pick_cube_sac": "pd_ee_delta_pos",
}
APART = [name for name in NAMES if to_install(name)]


@pytest.fixture(autouse=True)
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLINF_ENVS", str(tmp_path / "envs"))


@pytest.fixture
def simulators_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For checks that start nothing: they look only whether the package is there."""
    real = importlib.util.find_spec
    modules = {needs.module for n in APART if (needs := requirements_of(env_type(n)))}

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return real("json") if name in modules else real(name, package)

    monkeypatch.setattr("importlib.util.find_spec", find_spec)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_first_what_it_is_and_needs(name: str) -> None:
    lines = Path("recipes", f"{name}.yaml").read_text().splitlines()
    comment = [line for line in lines[:5] if line.startswith("#")]
    assert 2 <= len(comment) <= 4
    needed = to_install(name)
    if needed is not None:
        assert f"rlinf env install {needed}" in " ".join(comment)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("simulators_are_here")
def test_its_values_are_accepted_and_it_is_evaluated_at_its_end(name: str) -> None:
    _, _, config = read_config(name, [])
    assert isinstance(config, ActingConfig)
    assert config.evaluation.episodes >= 100
    steps, interval = config.training_steps, config.evaluation.interval
    assert steps >= interval > 0


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.usefixtures("simulators_are_here")
def test_values_are_those_of_the_publication(name: str) -> None:
    _, _, config = read_config(f"embodied/{name}", [])
    assert isinstance(config, EmbodiedConfig | OffPolicyConfig)
    actor, algorithm, model = config.actor, config.algorithm, config.model
    assert isinstance(algorithm, PPOConfig | SACConfig)
    assert isinstance(model, MLPConfig | SquashedMLPConfig)
    on_policy = isinstance(config, EmbodiedConfig)
    found = (
        config.env.num_envs,
        config.rollout.steps,
        config.env.train.max_episode_steps,
        algorithm.gamma,
        actor.optim.lr,
        actor.optim.value_lr if on_policy else actor.optim.lr,
        actor.optim.eps,
        actor.optim.weight_decay,
        actor.optim.max_grad_norm,
        actor.global_batch_size,
        actor.micro_batch_size or actor.global_batch_size,
        actor.update_epoch if on_policy else config.updates(1),
        config.training_steps,
    )
    assert found == PUBLISHED[name]
    options = config.env.train.adapter_options
    assert getattr(options, "control_mode", None) == CONTROL_MODES.get(name)
    assert config.env.train.auto_reset
    assert config.env.train.ignore_terminations != on_policy
    assert (model.hidden_sizes, model.activation) == ((256, 256, 256), "tanh")
    assert not model.normalize_observations
    assert (actor.optim.beta1, actor.optim.beta2) == (0.9, 0.999)
    if isinstance(algorithm, PPOConfig):
        assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high) == (0.2, 0.2)
        genesis = name.startswith("genesis")
        assert (algorithm.gae_lambda, algorithm.value_clip) == (0.95 if genesis else 0.9, 1.0)
        assert (algorithm.reward_type, algorithm.logprob_type) == ("action_level", "action_level")
        assert algorithm.normalize_advantages
        assert algorithm.clip_ratio_c == 3.0
        assert algorithm.bootstrap_type == ("standard" if genesis else "always")
    else:
        assert (algorithm.tau, algorithm.initial_temperature) == (0.01, 0.01)
        assert algorithm.target_entropy == -4.0
        assert isinstance(model, SquashedMLPConfig)
        assert (model.q_hidden_sizes, model.q_functions) == ((256, 256, 256), 2)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.usefixtures("simulators_are_here")
def test_a_dry_run_of_a_published_run_starts_nothing(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown, error = rlinf(capsys, "train", f"embodied/{name}", "--dry-run")
    assert code == 0, error
    assert "nothing was started" in shown


def test_every_task_of_a_set_is_evaluated_equally_often() -> None:
    _, _, config = read_config("embodied/metaworld_mt10_ppo", [])
    assert isinstance(config, ActingConfig)
    tasks = len(tasks_of(config.env.train.adapter_options.task))
    evaluation = config.evaluation
    assert (tasks, evaluation.walk) == (10, True)
    assert evaluation.episodes % tasks == evaluation.periodic_episodes % tasks == 0


@pytest.mark.parametrize("name", APART)
def test_without_its_simulator_one_line_says_what_to_install(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = rlinf(capsys, "train", name, "--dry-run")
    assert code == 2
    (line,) = (line for line in error.splitlines() if "missing" in line)
    assert f"run `rlinf env install {to_install(name)}`" in line


def test_a_squashed_policy_has_no_bonus_for_its_entropy() -> None:
    given = ["model.type=squashed_mlp", "algorithm.entropy_bonus=0.01"]
    with pytest.raises(ConfigError, match=r"would not raise .*; nearest: 0, or model\.type: mlp$"):
        read_config("quickstart", given)
    read_config("quickstart", [*given, "model.type=mlp"])
