from __future__ import annotations

from typing import Any, NoReturn

import pytest

from rlinf.envs import env_conformance
from rlinf.envs.config import EnvConfig
from rlinf.envs.env_conformance import CHECKS, check_env, examine_env
from rlinf.errors import ConfigError, RunFailure


def failures(config: EnvConfig) -> dict[str, str]:
    results = check_env(config)
    assert len(results) == len(CHECKS)
    return {result.name: result.detail for result in results if not result.passed}


def test_an_env_of_another_package_conforms(point):
    assert failures(point()) == {}


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_gymnasium_envs_conform(name):
    assert failures(EnvConfig(type="gymnasium", options={"id": name}, max_episode_steps=100)) == {}


@pytest.mark.slow
def test_metaworld_conforms():
    config = EnvConfig(type="metaworld", options={"task": "door-close-v3"}, max_episode_steps=100)
    assert failures(config) == {}


def test_a_bad_env_is_told_what_it_does_wrong(point):
    assert "'states' holds a NaN" in failures(point("nan"))["steps"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # What an episode leaves shows in the next one.
        ("        self._steps = 0\n        self.task_id", "        self.task_id"),
        # An action of which nobody looks at what follows is carried out in another way.
        (
            "    def step(self, action",
            """    skips_observations = True

    def observe(self):
        return self._observation()

    def step_blind(self, action):
        return self.step(2 * action)[1:]

    def step(self, action""",
        ),
    ],
)
def test_a_chunk_that_differs_from_its_actions_one_by_one_is_told(tmp_path, point, before, after):
    source = tmp_path / "outside_point.py"
    text = source.read_text()
    slower = "np.float32(0.1 / (1 + self._steps)) * action"
    text = text.replace("np.float32(0.1) * action", slower)
    assert before in text
    source.write_text(text.replace(before, after, 1))
    assert "lead elsewhere than one by one" in failures(point())["chunks"]


def test_an_env_that_cannot_be_built_is_refused(point):
    with pytest.raises(ConfigError, match="did you mean"):
        check_env(EnvConfig(type="metaworld", options={"task": "reech-v3"}, max_episode_steps=9))


def test_what_an_adapter_declares_is_checked(tmp_path, point):
    """One whose actions must not be repeated gives its episodes up, and says so."""
    source = tmp_path / "outside_point.py"
    text = source.read_text()
    source.write_text(
        text.replace("    Options = Point", "    replayable = False\n    Options = Point").replace(
            "        self.replayable = options.replays", "        pass"
        )
    )
    import importlib
    import sys

    sys.modules.pop("outside_point", None)
    importlib.invalidate_caches()
    results = {result.name: result for result in check_env(point())}
    sys.modules.pop("outside_point", None)
    assert all(result.passed for result in results.values())
    assert "declared as not replayable" in results["save and resume"].detail
    assert "declared as not replayable" in results["recovery"].detail


def test_an_env_that_cannot_repeat_itself_conforms_once_that_is_said(tmp_path):
    moves = {"kwargs": {"moves": str(tmp_path / "moves")}}
    options = {"id": "tests.runners.odd_envs:Arm-v0", **moves}
    config = EnvConfig(type="gymnasium", options=options, max_episode_steps=50)
    assert failures(config) == {}
    options["deterministic"] = True
    told = failures(EnvConfig(type="gymnasium", options=options, max_episode_steps=50))
    for name in ("same seed, same episodes", "chunks", "save and resume", "recovery"):
        assert "nearest: options.deterministic: false" in told[name]


@pytest.mark.parametrize(
    ("kwargs", "failed"),
    [
        ({"levels": 1}, set()),
        ({"levels": 9}, {"groups", "fixed reset states"}),
        ({"moves": True}, {"groups", "fixed reset states"}),
    ],
)
def test_pictures_of_a_seed_may_be_rounded_otherwise_and_show_the_same(kwargs, failed):
    options = {"id": "tests.runners.odd_envs:Drawn-v0", "kwargs": kwargs}
    config = EnvConfig(type="gymnasium", options=options, max_episode_steps=50)
    assert set(failures(config)) == failed


def test_an_env_beside_which_none_may_be_open_conforms(tmp_path):
    port = {"kwargs": {"port": str(tmp_path / "port")}}
    options = {"id": "tests.runners.odd_envs:Alone-v0", **port}
    alone = {"type": "gymnasium", "options": options, "max_episode_steps": 50}
    assert failures(EnvConfig(**alone, one_at_a_time=True)) == {}
    with pytest.raises(ConfigError, match="one_at_a_time: lets one env be open at once, not 3"):
        check_env(EnvConfig(**alone, one_at_a_time=True), 3)


def test_an_env_is_checked_with_as_many_as_are_wanted(point):
    for count in (1, 3):
        results = check_env(point(), count)
        assert all(result.passed for result in results), results
        envs = "1 env " if count == 1 else "3 envs "
        assert f"in {envs}without a fault" in results[1].detail


def test_a_simulator_that_cannot_start_is_started_once_and_each_check_is_told_at_once(
    point, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def never_ready(*_: Any, **__: Any) -> NoReturn:
        events.append("start")
        raise RunFailure("an env process was not ready after 300 s")

    monkeypatch.setattr(env_conformance, "SupervisedVectorEnv", never_ready)
    found = examine_env(point(), show=lambda result: events.append(result.name))
    assert events == ["start", *CHECKS]
    assert {result.detail for result in found.results} == {
        "an env process was not ready after 300 s"
    }
