"""Recipes of vision-language-action models, looked at where models and simulators are not."""

from __future__ import annotations

import importlib.util
import re
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from rlinf.algorithms.config import GRPOConfig, PPOConfig
from rlinf.algorithms.denoising.config import DSRLConfig, NFTConfig
from rlinf.cli.tasks import read_config
from rlinf.envs.calvin import CalvinEnv
from rlinf.envs.household.behavior import BehaviorEnv
from rlinf.envs.household.robocasa import RobocasaEnv
from rlinf.envs.libero import LiberoEnv
from rlinf.errors import ConfigError
from rlinf.models.steering_config import SteeredConfig
from rlinf.models.vla.config import FlowConfig, PublishedConfig
from rlinf.runners.embodied_config import EmbodiedConfig
from rlinf.workers.config.acting import EvaluatedConfig
from rlinf.workers.config.off_policy import OffPolicyConfig
from rlinf.workers.config.supervised import BehaviourCloningConfig

from .conftest import rlinf

# Model, method, denoising steps, env type; environments, steps of a rollout and of an episode,
# actions of a chunk; global and micro batch, passes; rates of policy and values, the optimizer's β₂
# and clipping.
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "libero_spatial_ppo_pi0": (
        "pi0", "flow_sde", 4, "libero", 64, 1920, 240, 5, 2048, 128, 4, 5e-6, 1e-4, 0.95, 1.0,
    ),
    "libero_spatial_ppo_pi05": (
        "pi05", "flow_sde", 3, "libero", 64, 1920, 240, 5, 2048, 128, 1, 5e-6, 1e-4, 0.95, 1.0,
    ),
    "libero_spatial_grpo_pi0": (
        "pi0", "flow_sde", 4, "libero", 64, 1920, 240, 5, 2048, 128, 2, 5e-6, None, 0.95, 1.0,
    ),
    "libero_spatial_grpo_pi05": (
        "pi05", "flow_sde", 3, "libero", 64, 1920, 240, 5, 2048, 128, 1, 5e-6, None, 0.95, 1.0,
    ),
    "metaworld_mt50_ppo_pi0": (
        "pi0", "flow_noise", 5, "metaworld", 64, 800, 100, 5, 2048, 128, 4, 1e-5, 1e-4, 0.95, 1.0,
    ),
    "libero_spatial_gr00t_ppo": (
        "gr00t", "flow_sde", 4, "libero", 64, 1920, 240, 5, 1024, 128, 4, 5e-6, 1e-4, 0.95, 1.0,
    ),
    "calvin_ppo_pi05": (
        "pi05", "flow_sde", 5, "calvin", 64, 3840, 480, 5, 2048, 128, 4, 5e-6, 1e-4, 0.95, 1.0,
    ),
    # Its batches are ours: 2048, and 128 of each, would not divide a rollout.
    "robocasa_close_drawer_grpo_pi0": (
        "pi0", "flow_sde", 5, "robocasa", 64, 2400, 300, 10, 1920, 120, 4, 5e-6, None, 0.95, 2.0,
    ),
    "behavior_ppo_pi0": (
        "pi0", "flow_sde", 4, "behavior", 8, 32000, 4000, 10, 16, 2, 1, 1e-4, 3e-3, 0.999, 10.0,
    ),
}  # fmt: skip

TARGET = (
    r"success .*0\.\d{3}|\d % to \d|to \d\d\.\d % of success|success it reached is not known here"
)
"""What was published of a run, in the words of its recipe."""


@pytest.fixture
def simulators_are_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For checks that start nothing: these look for what is installed, and into it."""
    real, modules = importlib.util.find_spec, set()
    for simulator in (LiberoEnv, CalvinEnv, RobocasaEnv, BehaviorEnv):
        modules.add(simulator.requirements.module)
        monkeypatch.setattr(simulator, "check", classmethod(lambda *_: None))

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return real("json") if name in modules else real(name, package)

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    (tmp_path / "gpus" / "0").mkdir(parents=True)
    monkeypatch.setattr("rlinf.envs.installation.GPUS", str(tmp_path / "gpus"))


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.usefixtures("simulators_are_here")
def test_published_runs_are_accepted_with_their_values(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").touch()
    given = [f"model.path={tmp_path}"]
    given += [f"model.tokenizer={tmp_path}"] if "gr00t" in name else []
    _, _, config = read_config(f"vla/{name}", given)
    assert isinstance(config, EmbodiedConfig)
    model, actor, env = config.model, config.actor, config.env
    optim, algorithm = actor.optim, config.algorithm
    assert isinstance(model, FlowConfig)
    assert isinstance(algorithm, PPOConfig | GRPOConfig)
    found = (
        model.type, model.method, model.denoising_steps, env.train.type, env.num_envs,
        config.rollout.steps, env.train.max_episode_steps, model.num_action_chunks,
        actor.global_batch_size, actor.micro_batch_size, actor.update_epoch,
        optim.lr, optim.value_lr, optim.beta2, optim.max_grad_norm,
    )  # fmt: skip
    assert found == PUBLISHED[name]
    assert config.training_steps == 1000
    assert (optim.beta1, optim.eps, optim.weight_decay) == (0.9, 1e-8, 0.01)
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_c) == (0.2, 3.0)
    assert algorithm.clip_ratio_high == (0.28 if "behavior" in name else 0.2)
    if isinstance(algorithm, PPOConfig):
        credit = algorithm.gamma, algorithm.gae_lambda, algorithm.value_clip, algorithm.huber_delta
        assert credit == (0.99, 0.95, 0.2, 10.0)
        assert (algorithm.normalize_advantages, algorithm.bootstrap_type) == (True, "standard")
    else:
        bounds = (0.1, 0.9) if "libero" in name else (None, None)
        assert (algorithm.rewards_lower_bound, algorithm.rewards_upper_bound) == bounds
        assert config.group_size == 8
    text = Path(f"recipes/vla/{name}.yaml").read_text()
    told = " ".join(text.partition("\ntask:")[0].replace("#", " ").split())
    assert "Not run at this size" in told
    assert re.search(TARGET, told)
    code, shown, error = rlinf(capsys, "train", f"vla/{name}", "--dry-run", *given)
    assert code == 0, error
    assert "nothing was started" in shown


SIX = (0, 1, 2, 3, 4, 5)
CONVENTIONS: dict[str, tuple[int, tuple[int, ...], bool | None]] = {
    "libero_spatial_ppo_pi0": (50, SIX, None),
    "libero_spatial_grpo_pi0": (50, SIX, None),
    "libero_object_nft_pi0": (50, SIX, None),
    "libero_spatial_dsrl_pi0": (50, SIX, None),
    "behavior_ppo_pi0": (50, SIX, None),
    "metaworld_mt50_ppo_pi0": (5, (), None),
    "robocasa_close_drawer_grpo_pi0": (10, (), None),
    "libero_spatial_ppo_pi05": (10, (), False),
    "libero_spatial_grpo_pi05": (10, (), False),
    "calvin_ppo_pi05": (5, (), False),
}
"""Of RLinf's published π: `action_horizon`, the dimensions of `extra_delta_transform`, and
`discrete_state_input`."""


@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.usefixtures("simulators_are_here")
def test_published_models_are_read_as_they_were_trained(name: str) -> None:
    section = "model.base" if "dsrl" in name else "model"
    _, _, config = read_config(f"vla/{name}", [f"{section}.path=."])
    assert isinstance(config, EmbodiedConfig | OffPolicyConfig)
    model = getattr(config.model, "base", config.model)
    assert isinstance(model, FlowConfig)
    found = model.conventions.delta_dimensions, getattr(model, "state_in_prompt", None)
    assert (model.horizon, *found) == CONVENTIONS[name]


SUITES = [
    *Path("recipes/vla").glob("libero_[s1]*.yaml"),
    *Path("recipes/vla").glob("calvin_*.yaml"),
]
ONE_TASK = ("libero_spatial_dsrl_pi0",)


@pytest.mark.parametrize("name", sorted({path.stem for path in SUITES} - {*ONE_TASK}))
@pytest.mark.usefixtures("simulators_are_here")
def test_a_suite_is_walked_through_as_its_published_evaluation_does(name: str) -> None:
    """Every task of LIBERO from each of its 50 states, every chain of CALVIN: each once."""
    _, _, config = read_config(f"vla/{name}", ["model.path=.", "model.tokenizer=."])
    assert isinstance(config, EvaluatedConfig)
    (section,) = config.evaluated.values()
    evaluation, whole = config.evaluation, {"libero": 500, "calvin": 1000}[section.type]
    assert (evaluation.walk, evaluation.episodes) == (True, whole)


@pytest.mark.usefixtures("simulators_are_here")
def test_the_published_run_of_nft_is_accepted_with_its_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").touch()
    name, given = "vla/libero_object_nft_pi0", f"model.path={tmp_path}"
    _, _, config = read_config(name, [given])
    assert isinstance(config, EmbodiedConfig)
    algorithm = config.algorithm
    assert isinstance(algorithm, NFTConfig)
    assert (config.actor.global_batch_size, config.actor.update_epoch) == (512, 2)
    assert (config.samples, config.env.num_envs, config.group_size) == (64 * 48, 64, 8)
    assert (algorithm.share(20), algorithm.share(60), algorithm.share(100)) == (1.0, 0.505, 0.01)
    assert algorithm.weight_scale == (1.0, 0.2)
    code, shown, error = rlinf(capsys, "train", name, "--dry-run", given)
    assert code == 0, error
    assert "nothing was started" in shown


@pytest.mark.usefixtures("simulators_are_here")
def test_the_published_run_of_dsrl_is_accepted_with_its_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").touch()
    name, given = "vla/libero_spatial_dsrl_pi0", f"model.base.path={tmp_path}"
    _, _, config = read_config(name, [given])
    assert isinstance(config, OffPolicyConfig)
    assert (config.env.num_envs, config.samples, config.updates(0)) == (16, 16 * 48, 199)
    assert config.updates(1) + config.updates(2) == 2 * 200
    assert (config.actor.global_batch_size, config.actor.optim.beta2) == (512, 0.96)
    model, algorithm = config.model, config.algorithm
    assert isinstance(model, SteeredConfig)
    assert isinstance(model.base, FlowConfig)
    assert isinstance(algorithm, DSRLConfig)
    assert (model.image_keys, model.q_functions) == (("main_images",), 10)
    assert (model.base.denoising_steps, model.base.num_action_chunks) == (4, 5)
    assert (algorithm.gamma, algorithm.tau, algorithm.target_entropy) == (0.999, 0.005, -16.0)
    assert (algorithm.agg_q, algorithm.backup_entropy) == ("mean", False)
    assert config.training_steps == 20_000
    code, shown, error = rlinf(capsys, "train", name, "--dry-run", given)
    assert code == 0, error
    assert "nothing was started" in shown


@pytest.mark.parametrize(
    ("model", "chunk", "last"), [("smolvla", 50, 2.5e-6), ("wall_oss", 32, 1e-6)]
)
@pytest.mark.usefixtures("simulators_are_here")
def test_a_published_set_is_imitated(
    model: str, chunk: int, last: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    from rlinf.data.lerobot.writer import write_lerobot
    from tests.data.lerobot.sets import recorded

    write_lerobot(recorded(), tmp_path / "set", fps=20, pictures="image")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").touch()
    given = [f"data.path={tmp_path}/set", f"model.statistics={tmp_path}/set/meta/stats.json",
             f"model.path={tmp_path}", f"model.tokenizer={tmp_path}",
             "data.held_out=1",
             # As this set calls them, which is another than the one that the recipe is for.
             "data.observations.main_images=observation.images.main",
             "data.observations.wrist_images=observation.images.wrist_0"]  # fmt: skip
    name = f"vla/libero_spatial_{model}_sft"
    _, _, config = read_config(name, given)
    assert isinstance(config, BehaviourCloningConfig)
    optimizer, rate = config.actor.optim, config.actor.lr_sched
    assert (config.model.type, config.model.num_action_chunks) == (model, chunk)
    assert optimizer.lr * rate.factor(config.runner.total_steps, config.runner.total_steps) == (
        pytest.approx(last)
    )
    code, shown, error = rlinf(capsys, "train", name, "--dry-run", *given)
    assert code == 0, error
    assert "nothing was started" in shown


@pytest.mark.parametrize("name", ["act", "diffusion"])
def test_small_policies_imitate_what_the_other_models_are_taught(name: str) -> None:
    _, _, config = read_config(f"vla/drawer_close_{name}_sft", [])
    _, _, other = read_config("vla/drawer_close_pi05_sft", [])
    assert isinstance(config, BehaviourCloningConfig)
    assert (config.model.type, config.objective, config.model.use_states) == (name, "model", False)
    assert config.env.train.adapter_options == other.env.train.adapter_options
    assert config.evaluation.episodes == 100


@pytest.mark.parametrize("name", ["gr00t", "qwen_vl", "smolvla", "wall_oss"])
def test_small_models_imitate_the_same_episodes(name: str) -> None:
    _, _, config = read_config(f"vla/drawer_close_{name}_sft", [])
    _, _, other = read_config("vla/drawer_close_pi05_sft", [])
    assert isinstance(config, BehaviourCloningConfig)
    model = config.model
    assert isinstance(model, PublishedConfig)
    assert (model.type, model.preset, model.num_action_chunks) == (name, "tiny", 8)
    assert config.env.train.adapter_options == other.env.train.adapter_options
    assert (config.data.path, config.data.limit) == (other.data.path, 6)
    assert not getattr(model, "train_expert_only", False)


@pytest.mark.parametrize("objective", ["likelihood", "squared_error"])
@pytest.mark.parametrize(
    "name",
    ["act", "diffusion", "gr00t", "openvla_oft", "pi05", "qwen_vl", "smolvla", "wall_oss"],
)
def test_published_models_imitate_by_a_loss_of_their_own(name: str, objective: str) -> None:
    with pytest.raises(ConfigError, match=rf"objective = .*{name} gives .*; nearest: model$"):
        read_config(f"vla/drawer_close_{name}_sft", [f"objective={objective}"])


def test_so_they_do_beside_another_loss() -> None:
    shown = ["demonstrations={path: set}"]
    with pytest.raises(ConfigError, match=r"demonstrations\.objective .*; nearest: model$"):
        read_config("vla/drawer_close_pi05_ppo", shown)
    read_config("vla/drawer_close_pi05_ppo", [*shown, "demonstrations.objective=model"])


@pytest.mark.parametrize(
    ("name", "given", "nearest"),
    [
        ("drawer_close_pi05_ppo", ["model.method=ode", "~model.noise_level"], "flow_sde"),
        ("drawer_close_openvla_oft_grpo", ["model.head=regression", "~model.temperature"],
         "tokens"),
        ("drawer_close_pi05_ppo", ["model.type=diffusion", "model.method=ddim",
                                   "~model.state_in_prompt", "~model.noise_level"], "ddpm"),
    ],
)  # fmt: skip
def test_models_without_log_probs_are_refused_before_a_rollout(
    name: str, given: list[str], nearest: str
) -> None:
    with pytest.raises(ConfigError, match=rf"gives no log-probs, by which .*; nearest: {nearest}"):
        read_config(f"vla/{name}", given)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ([], "0, or model.method: flow_noise"),
        (["model.method=flow_cps"], "0, or model.method: flow_noise"),
        (["model.type=diffusion", "model.method=ddpm", "~model.state_in_prompt",
          "~model.noise_level"], "0"),
    ],
)  # fmt: skip
def test_an_entropy_that_is_not_learned_has_no_bonus(given: list[str], nearest: str) -> None:
    bonus = "algorithm.entropy_bonus=0.01"
    with pytest.raises(ConfigError, match=rf"would not raise the entropy .*; nearest: {nearest}$"):
        read_config("vla/drawer_close_pi05_ppo", [*given, bonus])
    read_config("vla/drawer_close_pi05_flow_noise_ppo", [bonus])


def test_nft_learns_without_log_probs() -> None:
    read_config("vla/drawer_close_pi05_nft", ["model.method=ode"])
