"""Embodied training beside the simulator's ceiling and Stable-Baselines3, in one run.

    python benchmarks/embodied.py throughput      # env steps per second, a ratio each
    python benchmarks/embodied.py learning        # seconds and env steps to success 0.9

``throughput`` measures (a) the ceiling: the same environments stepped by the same processes with
random actions and no policy; (b) this project's rollout and its whole training step; (c) the whole
training of Stable-Baselines3 PPO with the same network, batch, epochs and number of environments,
in the better of its two vector environments, on this project's MetaWorld adapter (faster than
MetaWorld's own class) and on MetaWorld's own class. ``learning`` trains both to a success rate of
0.9 on the same held-out episodes, over several seeds, with Stable-Baselines3 on either class.

Needs ``pip install stable-baselines3``. One thread per process (``OMP_NUM_THREADS=1``) is set
unless given: it is the fastest setting for both sides on small networks.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from rlinf.checkpoint.store import CheckpointStore
from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.envs.config import EnvConfig
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.flow.executor import StepReport
from rlinf.runners.embodied import Embodied
from rlinf.runners.embodied_config import EmbodiedConfig
from rlinf.runners.embodied_evaluation import EpisodeEvaluator, play_episodes
from rlinf.runners.groups import Groups

SUCCESS = 0.9
STANDSTILL = 1e-12
"""Learning rate of the throughput: a policy that learns comes to touch things, and contacts make a
step of the simulator more expensive than under the random actions of the ceiling."""


def configuration(recipe: str, overrides: list[str]) -> EmbodiedConfig:
    """The recipe to be measured."""
    loaded = load_recipe(recipe, overrides)
    return validate(EmbodiedConfig, loaded.data, loaded)


def training_env(config: EmbodiedConfig) -> EnvConfig:
    """The one kind of env that the recipe trains in."""
    train = config.env.train
    if isinstance(train, tuple):
        raise SystemExit(f"the recipe trains in {len(train)} kinds of envs; of one it can be told")
    return train


def simulator_ceiling(config: EmbodiedConfig, seconds: float) -> float:
    """Env steps per second of the simulators alone, under random actions."""
    env = SupervisedVectorEnv(training_env(config), num_envs=config.env.num_envs, seed=0)
    try:
        spec = env.env_spec
        shape = (50, config.env.num_envs, 1, spec.action_dim)
        actions = np.random.default_rng(0).uniform(spec.action_low, spec.action_high, shape)
        actions = actions.astype(np.float32)
        env.reset()
        for warm_up in range(20):
            env.chunk_step(actions[warm_up])
        begin, steps = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            env.chunk_step(actions[steps % len(actions)])
            steps += 1
        return steps * config.env.num_envs / (time.perf_counter() - begin)
    finally:
        env.close()


def ours(config: EmbodiedConfig, seconds: float) -> dict[str, float]:
    """Env steps per second of rollout and of whole training steps, and the start-up time."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as place, Groups(Embodied(config, Path(place))) as groups:
        groups.start_step(0, synchronise=True).wait()
        start = time.perf_counter() - begin
        rollout, hidden, whole, overhead = [], [], [], []
        step, begin = 1, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            step_begin = time.perf_counter()
            report = groups.start_step(step, synchronise=True).wait()
            whole.append(time.perf_counter() - step_begin)
            rollout.append(max(r.seconds for r in report.stages["env"]))
            hidden.append(rollout[-1] - policy_seconds(report))
            overhead.append(exchange_overhead(report))
            step += 1
        blocking = checkpoint_blocking(groups, config)
        memory = proportional_memory()
    per_rollout = config.env_steps_per_rollout
    return {
        "rollout": per_rollout * len(rollout) / sum(rollout),
        "rollout_without_policy": per_rollout * len(rollout) / sum(hidden),
        "training": per_rollout * len(whole) / sum(whole),
        "first_step_seconds": start,
        "exchange_overhead_ms": 1e3 * statistics.median(overhead),
        "checkpoint_blocking": blocking / (sum(whole) / len(whole)),
        "memory_gb": memory,
    }


def policy_seconds(report: StepReport) -> float:
    """Seconds that the first policy worker computed in the rollout."""
    policy = report.stages["rollout"][0]
    return float(policy.seconds - policy.seconds_waiting)


def exchange_overhead(report: StepReport) -> float:
    """Seconds per exchange beyond the simulators' and the policy's own time."""
    env = report.stages["env"][0]
    own = env.result.simulator_seconds + policy_seconds(report)
    return float((env.seconds - own) / env.items_in)


def checkpoint_blocking(groups: Groups, config: EmbodiedConfig) -> float:
    """Median seconds that a commit keeps the training waiting."""
    found = []
    with (
        tempfile.TemporaryDirectory() as directory,
        CheckpointStore(directory, config.checkpoint) as store,
    ):
        for step in range(1, 12):
            begin = time.perf_counter()
            store.save(step, groups.state())
            found.append(time.perf_counter() - begin)
            store.wait()  # between two real checkpoints the writer has many steps of time
    return statistics.median(found)


def proportional_memory() -> float:
    """GB of this process and all below it, shared pages counted once (PSS)."""
    this = psutil.Process()
    total = 0
    for process in [this, *this.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 1e9


def stock_environment(config: EmbodiedConfig, number: int) -> Callable[[], Any]:
    """A function that makes MetaWorld's own environment, as its documentation does."""
    train = training_env(config)

    def make() -> Any:
        import gymnasium
        import metaworld  # noqa: F401 - registers its environments

        return gymnasium.make(
            "Meta-World/MT1",
            env_name=train.options["task"],
            seed=number,
            max_episode_steps=train.max_episode_steps,
        )

    return make


def gym_environment(config: EmbodiedConfig, number: int) -> Callable[[], Any]:
    """A function that makes one environment of the recipe for Stable-Baselines3."""
    train = training_env(config)

    def make() -> Any:
        import gymnasium

        from rlinf.envs.base import REGISTRY

        class Flat(gymnasium.Wrapper[Any, Any, Any, Any]):
            """The adapter's states as a plain Box, with the recipe's step limit."""

            def __init__(self, env: Any) -> None:
                super().__init__(env)
                self.observation_space = env.observation_space["states"]
                self.episode, self.steps = 0, 0

            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
                if seed is None:
                    self.episode += 1
                    seed = (number * 1_000_003 + self.episode * 7919) % 2**31
                self.steps = 0
                observation, info = self.env.reset(seed=seed, options=options)
                return observation["states"].copy(), info

            def step(self, action: Any) -> Any:
                observation, reward, terminated, truncated, info = self.env.step(action)
                self.steps += 1
                if train.ignore_terminations:
                    terminated = False
                truncated = truncated or self.steps >= train.max_episode_steps
                return observation["states"].copy(), float(reward), terminated, truncated, info

        adapter: Any = REGISTRY.load(train.type)
        return Flat(adapter(train.adapter_options))

    return make


def sb3_model(
    config: EmbodiedConfig, kind: str, seed: int, *, default: bool, stock: bool = False
) -> Any:
    """Stable-Baselines3 PPO: its own hyper-parameters, or those of the recipe."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

    count = 8 if default else config.env.num_envs
    make = stock_environment if stock else gym_environment
    makers = [make(config, seed * 1000 + number) for number in range(count)]
    vector = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[kind](makers)
    algorithm: Any = config.algorithm
    normalized = VecNormalize(vector, gamma=algorithm.gamma)
    if default:
        return PPO("MlpPolicy", normalized, seed=seed, device="cpu")
    model: Any = config.model
    network = list(model.hidden_sizes)
    activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU, "elu": torch.nn.ELU}
    return PPO(
        "MlpPolicy",
        normalized,
        seed=seed,
        device="cpu",
        n_steps=config.chunk_steps,
        batch_size=config.actor.global_batch_size,
        n_epochs=config.actor.update_epoch,
        learning_rate=config.actor.optim.lr,
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
        clip_range=algorithm.clip_ratio_high,
        ent_coef=algorithm.entropy_bonus,
        vf_coef=algorithm.value_coefficient,
        max_grad_norm=config.actor.optim.max_grad_norm,
        policy_kwargs={
            "net_arch": {"pi": network, "vf": network},
            "activation_fn": activation[model.activation],
            "log_std_init": model.initial_log_std,
        },
    )


def sb3_throughput(config: EmbodiedConfig, kind: str, seconds: float, *, stock: bool) -> float:
    """Env steps per second of Stable-Baselines3's whole training."""
    model = sb3_model(config, kind, 0, default=False, stock=stock)
    try:
        model.learn(config.env_steps_per_rollout)
        begin, steps = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            model.learn(config.env_steps_per_rollout, reset_num_timesteps=False)
            steps += config.env_steps_per_rollout
        return steps / (time.perf_counter() - begin)
    finally:
        model.get_env().close()


def throughput(config: EmbodiedConfig, seconds: float, *, peer: bool) -> dict[str, float]:
    """Measure (a), (b) and, with ``peer``, (c), and print the ratios."""
    optimizer = config.actor.optim.model_copy(update={"lr": STANDSTILL})
    actor = config.actor.model_copy(update={"optim": optimizer})
    config = config.model_copy(update={"actor": actor})
    ceiling = simulator_ceiling(config, seconds)
    mine = ours(config, seconds)
    rows = {"ceiling": ceiling, **mine}
    print(f"simulator ceiling            {ceiling:10.0f} env steps/s")
    print(f"rollout                      {mine['rollout']:10.0f} env steps/s")
    print(f"  rollout / ceiling          {mine['rollout'] / ceiling:10.2f}")
    print(f"  the policy's time off      {mine['rollout_without_policy'] / ceiling:10.2f}")
    print(f"whole training               {mine['training']:10.0f} env steps/s")
    if peer:
        rows |= beside_sb3(config, seconds, mine["training"])
    print(f"start to end of first step   {mine['first_step_seconds']:10.1f} s")
    print(f"exchange overhead            {mine['exchange_overhead_ms']:10.2f} ms")
    print(f"commit blocks, of a step     {100 * mine['checkpoint_blocking']:10.1f} %")
    print(f"memory (PSS)                 {mine['memory_gb']:10.2f} GB")
    return rows


def beside_sb3(config: EmbodiedConfig, seconds: float, training: float) -> dict[str, float]:
    """Stable-Baselines3's whole training beside ours, on either MetaWorld class."""
    names = {"sb3": "Stable-Baselines3"}
    if training_env(config).type == "metaworld":
        names["sb3_stock"] = "the same, MetaWorld's class"
    rows = {}
    for key, name in names.items():
        speeds = {
            kind: sb3_throughput(config, kind, seconds, stock=key == "sb3_stock")
            for kind in ("dummy", "subproc")
        }
        best = max(speeds, key=lambda kind: speeds[kind])
        rows[key] = speeds[best]
        print(f"{name:28s} {speeds[best]:10.0f} env steps/s ({best})")
        print(f"  training / SB3             {training / speeds[best]:10.2f}", flush=True)
    return rows


def our_time_to_success(config: EmbodiedConfig, seed: int) -> tuple[float, int]:
    """Seconds of training and env steps until an evaluation reaches the success rate."""
    config = config.model_copy(update={"seed": seed})
    episodes = EpisodeEvaluator(config).spec("periodic").episodes
    seconds, interval = 0.0, max(1, config.evaluation.interval)
    with tempfile.TemporaryDirectory() as place, Groups(Embodied(config, Path(place))) as groups:
        for step in range(config.training_steps):
            begin = time.perf_counter()
            groups.start_step(step, synchronise=True).wait()
            seconds += time.perf_counter() - begin
            if (step + 1) % interval == 0:
                groups.sync_weights()
                records = play_episodes(groups, episodes).episodes
                if np.mean([r.success_once for r in records]) >= SUCCESS:
                    return seconds, (step + 1) * config.env_steps_per_rollout
    return float("inf"), config.runner.total_env_steps


def sb3_time_to_success(
    config: EmbodiedConfig,
    kind: str,
    seed: int,
    *,
    default: bool,
    stock: bool,
    patience: float = float("inf"),
) -> tuple[float, int]:
    """The same for Stable-Baselines3, on the same episodes and by the same rule.

    After ``patience`` seconds of training it is given up: its time is infinite.
    """
    model = sb3_model(config, kind, seed, default=default, stock=stock)
    episodes = EpisodeEvaluator(config).spec("periodic").episodes
    interval = max(1, config.evaluation.interval) * config.env_steps_per_rollout
    judge = gym_environment(config, 0)()
    normalized = model.get_vec_normalize_env()
    seconds = 0.0
    try:
        while model.num_timesteps < config.runner.total_env_steps and seconds < patience:
            begin = time.perf_counter()
            model.learn(interval, reset_num_timesteps=False)
            seconds += time.perf_counter() - begin
            if _sb3_success(model, judge, normalized, episodes) >= SUCCESS:
                return seconds, model.num_timesteps
    finally:
        model.get_env().close()
    return float("inf"), model.num_timesteps


def _sb3_success(model: Any, env: Any, normalized: Any, episodes: Any) -> float:
    successes = 0
    for _, seed in episodes:
        observation, _ = env.reset(seed=seed)
        ended = False
        while not ended:
            action, _ = model.predict(normalized.normalize_obs(observation), deterministic=True)
            observation, _, terminated, truncated, info = env.step(action)
            if info.get("success"):
                successes += 1
                break
            ended = terminated or truncated
    return successes / len(episodes)


def learning(config: EmbodiedConfig, seeds: int, kind: str, *, stock: bool) -> dict[str, Any]:
    """Time to success over several seeds, both sides, and the ratio of the medians."""
    peer = functools.partial(sb3_time_to_success, config, kind, stock=stock)
    results: dict[str, list[tuple[float, int]]] = {"ours": [], "sb3 same": [], "sb3 default": []}
    for seed in range(seeds):
        results["ours"].append(our_time_to_success(config, seed))
        results["sb3 same"].append(peer(seed, default=False))
        # What takes half as long again as the other setting is not the better of the two.
        patience = 1.5 * results["sb3 same"][-1][0]
        results["sb3 default"].append(peer(seed, default=True, patience=patience))
        for name, found in results.items():
            print(
                f"seed {seed}  {name:12s} {found[-1][0]:8.1f} s  {found[-1][1]:8d} env steps",
                flush=True,
            )
    medians = {name: statistics.median(t for t, _ in found) for name, found in results.items()}
    for name, median in medians.items():
        print(f"median of {seeds} seeds  {name:12s} {median:8.1f} s to success {SUCCESS}")
    best = min(medians["sb3 same"], medians["sb3 default"])
    print(f"ours / best of Stable-Baselines3: {medians['ours'] / best:.2f}")
    return {"runs": results, "medians": medians, "ratio": medians["ours"] / best}


def main() -> None:
    """Measure and print; the figures are also written as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=["throughput", "learning"])
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--seconds", type=float, default=20.0, help="per measurement")
    parser.add_argument("--no-peer", action="store_true", help="throughput: ours alone")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sb3-vector", choices=["dummy", "subproc"], default="subproc")
    parser.add_argument(
        "--sb3-environment",
        choices=["adapter", "metaworld"],
        default="adapter",
        help="learning: this project's adapter, or the class that MetaWorld's users have",
    )
    parser.add_argument("--json", type=Path, default=Path(tempfile.gettempdir()) / "embodied.json")
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    config = configuration(arguments.recipe, arguments.overrides)
    if arguments.what == "throughput":
        found: Any = throughput(config, arguments.seconds, peer=not arguments.no_peer)
    else:
        stock = arguments.sb3_environment == "metaworld"
        found = learning(config, arguments.seeds, arguments.sb3_vector, stock=stock)
    arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
