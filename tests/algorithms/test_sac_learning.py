"""SAC from a replay on an environment whose values are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import SACConfig
from rlinf.algorithms.sac import SAC
from rlinf.data.exchange import ObservationBatch, PolicyBatch, RolloutValues, TrajectoryBuilder
from rlinf.data.replay import ReplayStore, draws
from rlinf.data.trajectory import Trajectory
from rlinf.envs.results import VectorStep
from rlinf.models.config import SquashedMLPConfig
from rlinf.trainers.trainer import Trainer
from rlinf.workers.config.off_policy import LearnerConfig, OffPolicyOptimizerConfig
from tests.models.test_policies import env_spec

GAMMA, LIMIT, ENVS = 0.8, 2, 16


def levels(steps: int, *, ends: bool) -> Trajectory:
    """Episodes of two steps; an env stays on the level 0 or 1 that it began on, which is also its
    reward, and begins the next episode on the other one.

    Args:
        steps: Rows.
        ends: Whether the end of an episode is a termination, or else a time limit.
    """
    ids = np.arange(ENVS)
    builder = TrajectoryBuilder(ids, steps, keep_next_observations=True)
    level, generator = (ids % 2).astype(np.float32), torch.Generator().manual_seed(0)
    for time in range(steps):
        seen = {"states": level[:, None].copy()}
        ended = np.full(ENVS, time % LIMIT == LIMIT - 1)
        shown = 1 - level if ended.all() else level
        step = VectorStep(
            observations={"states": shown[:, None].copy()},
            rewards=level[:, None].copy(),
            terminations=(ended & ends)[:, None],
            truncations=(ended & (not ends))[:, None],
            final_observations={"states": level[:, None].copy()} if ended.all() else None,
            final_mask=ended,
            valid=np.ones(ENVS, bool),
            active=np.ones(ENVS, bool),
            episode_ids=ids + ENVS * (time // LIMIT),
            reset_seeds=np.zeros(ENVS, np.int64),
            faults=(),
            episodes=(),
        )
        actions = (torch.rand(ENVS, 1, 1, generator=generator) * 2 - 1).numpy()
        acted = PolicyBatch(actions, np.zeros_like(actions), {"raw_actions": actions}, 0)
        builder.add(ObservationBatch(seen, ids, time, None, np.zeros(ENVS, bool)), acted, step)
        level = shown
    nothing = np.zeros((steps, ENVS, 0), np.float32)
    return Trajectory.from_arrays(builder.build(RolloutValues(nothing, nothing, nothing[0])))


@pytest.mark.parametrize("ends", [False, True], ids=["time limit", "termination"])
def test_values_go_on_at_a_time_limit_and_not_after_an_end(ends: bool) -> None:
    spec = env_spec(
        observation_shapes={"states": (1,)},
        action_dim=1,
        action_low=(-1.0,),
        action_high=(1.0,),
        max_episode_steps=LIMIT,
    )
    algorithm = SAC(
        SACConfig(gamma=GAMMA, tau=0.2, learn_temperature=False, initial_temperature=1e-6)
    )
    model = SquashedMLPConfig(hidden_sizes=(8,), q_hidden_sizes=(32,), activation="tanh")
    modules = algorithm.modules(model, spec, seed=3)
    optim = OffPolicyOptimizerConfig(lr=1e-2, eps=1e-5)
    config = LearnerConfig(global_batch_size=64, optim=optim)
    trainer = Trainer(modules, algorithm, config, total_steps=1, seed=0)
    store = ReplayStore(1000)
    rows, _ = algorithm.prepare(levels(16, ends=ends))
    store.append(rows.tensors())
    generator = draws(0, 0)
    batches = [Batch.from_tensors(store.sample(64, generator)) for _ in range(400)]
    trainer.train((algorithm.with_noise(each, generator) for each in batches), 0)
    states = torch.tensor([[0.0], [1.0]])
    with torch.no_grad():
        low, high = modules["critic"]({"states": states}, torch.zeros(2, 1, 1)).mean(0).tolist()
    # Of the first and the second step of an episode, which cannot be told apart, with an end.
    expected = 1 / (1 - GAMMA / 2) if ends else 1 / (1 - GAMMA)
    assert low == pytest.approx(0.0, abs=0.15)
    assert high == pytest.approx(expected, abs=0.25)


def test_all_networks_normalise_by_the_same_statistics() -> None:
    algorithm = SAC(SACConfig())
    spec = env_spec(
        observation_shapes={"states": (1,)},
        action_dim=1,
        action_low=(-1.0,),
        action_high=(1.0,),
    )
    model = SquashedMLPConfig(hidden_sizes=(4,), q_hidden_sizes=(4,))
    trainer = Trainer(
        algorithm.modules(model, spec, seed=0), algorithm, LearnerConfig(), total_steps=1, seed=0
    )
    states = torch.randn(500, 1, generator=torch.Generator().manual_seed(1)) * 3 + 2
    for part in states.split(250):
        trainer.observe({"states": part})
    for name in ("policy", "critic", "target_critic"):
        normalizer = trainer.modules.modules[name].normalizer
        torch.testing.assert_close(normalizer.mean, states.mean(0))
        torch.testing.assert_close(normalizer.scale, 1 / states.std(0, correction=0))
