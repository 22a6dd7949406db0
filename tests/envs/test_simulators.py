"""Every simulator whose environment is installed keeps the protocol (`rlinf env install NAME`)."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf.envs.base import ADAPTERS, REGISTRY
from rlinf.envs.config import EnvConfig
from rlinf.envs.env_conformance import check_env
from rlinf.envs.installation import State, requirements_of, status
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import ConfigError


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_simulator_keeps_the_protocol(name: str) -> None:
    found = status(name)
    if found.state is not State.READY:
        pytest.skip(f"{found.state}: {found.detail}")
    # Kernels are compiled, and chains are drawn, at the first start.
    deadlines = {"start_deadline": 900.0, "step_deadline": 200.0}
    config = EnvConfig(
        type=name, options=REGISTRY.load(name).example, max_episode_steps=20, **deadlines
    )
    needs = requirements_of(name)
    if needs is not None and needs.assets:
        try:
            config.check()
        except ConfigError as error:
            pytest.skip(str(error))
    assert [result for result in check_env(config) if not result.passed] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_maniskill_scene_that_is_kept_begins_episodes_as_one_that_is_built_anew() -> None:
    found = status("maniskill")
    if found.state is not State.READY:
        pytest.skip(f"{found.state}: {found.detail}")
    starts = []
    for own in (True, False):
        options = {"task": "PushCube-v1", "own_scenes": own}
        config = EnvConfig(type="maniskill", options=options, max_episode_steps=2, processes=1)
        with SupervisedVectorEnv(config, num_envs=1, seed=3) as envs:
            seen = [envs.reset()["states"]]
            for _ in range(4):  # two more episodes
                envs.send(np.full((1, 1, 4), 0.5, np.float32))
                seen.append(envs.receive().observations["states"])
        starts.append(np.array(seen)[[0, 2, 4]])
    assert np.abs(starts[0][0] - starts[0][1]).max() > 0.01
    np.testing.assert_allclose(starts[0], starts[1], atol=1e-5)
