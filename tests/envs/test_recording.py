"""Recorded episodes: what is kept of each, on disk and as chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlinf.config.validate import validate
from rlinf.data.demonstrations import Demonstration, Demonstrations
from rlinf.data.imitation import DemonstrationsConfig, Recorded
from rlinf.envs.config import EnvConfig
from rlinf.envs.recording import Act, Actor, BrokenRecording, expert_of, record_episodes
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError, RunFailure


def _env(**options: object) -> EnvConfig:
    return EnvConfig.model_validate(
        {
            "type": "metaworld",
            "options": {"task": "drawer-close-v3", **options},
            "max_episode_steps": 20,
        }
    )


def _act(actor: Actor) -> Act:
    """An expert asks for no spec."""
    spec: EnvSpec = None  # type: ignore[assignment]
    return actor(spec)


def _episode(length: int, seed: int) -> Demonstration:
    steps = np.arange(length, dtype=np.float32)
    return Demonstration(
        observations={"states": steps[:, None] + np.zeros(3, np.float32)},
        actions=steps[:, None] + 10 * seed,
        rewards=np.ones(length, np.float32),
        seed=seed,
        success=seed % 2 == 0,
    )


def test_an_expert_plays_the_given_episodes_and_every_step_is_kept() -> None:
    config = _env()
    seen: list[int] = []
    actor = expert_of(config)
    expert = _act(actor)

    def act(observations: dict[str, np.ndarray]) -> np.ndarray:
        seen.append(len(observations["states"]))
        return expert(observations)

    spec, episodes = record_episodes(
        config, lambda spec: act, [(7, 70), (3, 30), (5, 50)], num_envs=2
    )
    assert (spec.action_dim, spec.observation_shapes) == (4, {"states": (39,)})
    assert [episode.seed for episode in episodes] == [70, 30, 50]
    assert all(len(episode) == 20 for episode in episodes)
    assert all(episode.observations["states"].shape == (20, 39) for episode in episodes)
    _, (alone,) = record_episodes(config, actor, [(3, 30)], num_envs=1)
    np.testing.assert_array_equal(alone.actions, episodes[1].actions)
    np.testing.assert_array_equal(alone.observations["states"], episodes[1].observations["states"])
    # What is kept is what the expert does where it is, not what follows it.
    again = expert({"states": alone.observations["states"]})[:, 0]
    np.testing.assert_array_equal(again, alone.actions)


def test_noise_is_executed_and_not_recorded() -> None:
    config = _env()
    actor = expert_of(config)
    plain, noisy = (
        record_episodes(config, actor, [(0, 1)], num_envs=1, noise=noise)[1][0]
        for noise in (0.0, 0.3)
    )
    assert np.abs(plain.observations["states"] - noisy.observations["states"]).max() > 1e-3
    np.testing.assert_array_equal(
        _act(actor)({"states": noisy.observations["states"]})[:, 0], noisy.actions
    )


def test_without_an_expert_the_message_says_what_to_record_instead() -> None:
    with pytest.raises(ConfigError, match="rlinf record RUN"):
        expert_of(_env(partially_observable=True))


def test_a_set_is_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    whole = Demonstrations.of([_episode(4, 1), _episode(2, 2)], {"who": "test"})
    whole.save(tmp_path / "set")
    found = Demonstrations.load(tmp_path / "set")
    assert found.episodes == whole.episodes
    assert found.source == {"who": "test"}
    np.testing.assert_array_equal(found.actions, whole.actions)
    np.testing.assert_array_equal(found.observations["states"], whole.observations["states"])
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    with pytest.raises(FileExistsError):
        whole.save(tmp_path / "set")


def test_what_is_no_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rlinf record"):
        Demonstrations.load(tmp_path)
    Demonstrations.of([_episode(4, 1)], {}).save(tmp_path / "set")
    info = tmp_path / "set" / "info.json"
    info.write_text(info.read_text().replace('"length": 4', '"length": 3'))
    with pytest.raises(ConfigError, match="not as long"):
        Demonstrations.load(tmp_path / "set")
    frames = tmp_path / "set" / "frames.safetensors"
    frames.write_bytes(frames.read_bytes()[:-1] + b"!")
    with pytest.raises(ConfigError, match="SHA-256"):
        Demonstrations.load(tmp_path / "set")


def test_a_section_says_which_episodes_are_learnt(tmp_path: Path) -> None:
    spec = EnvSpec(
        observation_shapes={"states": (3,)},
        observation_dtypes={"states": "float32"},
        action_kind="continuous",
        action_dim=1,
        action_low=(0.0,),
        action_high=(100.0,),
        task_descriptions=(),
        max_episode_steps=9,
    )
    episodes = [_episode(2, seed) for seed in range(6)]
    Demonstrations.of(episodes, {"spec": spec.to_json()}).save(tmp_path / "set")

    def seeds(**section: object) -> list[list[int]]:
        config = validate(DemonstrationsConfig, {"path": str(tmp_path / "set"), **section}, "test")
        config.check()
        parts = [part for parts in config.build(spec) for part in parts]
        return [[int(p.actions[first, 0]) // 10 for first, _ in p.episodes] for p in parts]

    assert seeds() == [[0, 2, 4]]
    assert seeds(held_out=1) == [[0, 2], [4]]
    assert seeds(only_successful=False, limit=4, held_out=2) == [[0, 1], [2, 3]]
    with pytest.raises(ConfigError, match=r"^held_out: 3 of 3"):
        seeds(held_out=3)
    with pytest.raises(ConfigError, match=r"^path: .*nearest: \S*/set; or record .*rlinf record"):
        validate(DemonstrationsConfig, {"path": str(tmp_path / "sett")}, "test").check()
    Demonstrations.of([_episode(2, 1)], {}).save(tmp_path / "failed")
    with pytest.raises(ConfigError, match=r"^only_successful: none of the 1 episodes"):
        validate(DemonstrationsConfig, {"path": str(tmp_path / "failed")}, "test").check()


def test_chunks_end_with_their_episode() -> None:
    whole = Recorded.of(Demonstrations.of([_episode(3, 0), _episode(2, 1)], {}))
    steps, acted = whole.chunks(2)
    assert whole.actions[steps, 0].tolist() == [[0, 1], [1, 2], [2, 2], [10, 11], [11, 11]]
    assert acted.tolist() == [[1, 1], [1, 1], [1, 0], [1, 1], [1, 0]]


def test_held_out_episodes_are_the_last() -> None:
    episodes = [_episode(3, 0), _episode(2, 1), _episode(1, 2)]
    whole = Recorded.of(Demonstrations.of(episodes, {}))
    kept, held_out = whole.split(1)
    assert kept.episodes == ((0, 3), (3, 2))
    assert held_out.episodes == ((5, 1),)
    assert held_out.rows().tolist() == [5]
    with pytest.raises(ConfigError, match="nearest: 2"):
        whole.split(3)


def test_a_chunk_is_executed_whatever_ends_beside_it(point: Callable[..., EnvConfig]) -> None:
    starts = {seed: np.random.default_rng(seed).uniform(-1, 1, 2) for seed in range(1, 2000)}
    there = next(seed for seed, start in starts.items() if np.linalg.norm(start) < 0.09)
    chunk = np.repeat(np.float32([[0.01], [0.02], [0.03], [0.04]]), 2, axis=1)

    def act(observations: dict[str, np.ndarray]) -> np.ndarray:
        return np.tile(chunk, (len(observations["states"]), 1, 1))

    config = point(processes=1, max_episode_steps=9)
    _, (alone,) = record_episodes(config, lambda spec: act, [(0, 5)], num_envs=1)
    _, beside = record_episodes(config, lambda spec: act, [(0, there), (1, 5)], num_envs=2)
    assert len(beside[0].actions) == 1
    assert np.array_equal(alone.actions, np.tile(chunk, (3, 1))[:9])
    assert np.array_equal(alone.actions, beside[1].actions)


def test_a_fault_says_whether_its_episode_is_lost_and_too_many_keep_what_was_recorded(
    point: Callable[..., EnvConfig], caplog: pytest.LogCaptureFixture
) -> None:
    def act(observations: dict[str, np.ndarray]) -> np.ndarray:
        return np.zeros((len(observations["states"]), 1, 2), np.float32)

    def recorded(rate: float) -> list[Demonstration]:
        config = point("raise", one_in=3, processes=1, max_episode_steps=5, max_fault_rate=rate,
                       fault_window=4)  # fmt: skip
        listed = list(enumerate([1, 2, 3, 4, 6]))
        return record_episodes(config, lambda spec: act, listed, num_envs=1)[1]

    assert [episode.seed for episode in recorded(1.0)] == [1, 2, 4]
    told = [message.partition(" (")[0] for message in caplog.messages]
    assert told == ["an episode is played again", "an episode is left out"] * 2
    with pytest.raises(BrokenRecording, match="faulty, more than") as broken:
        recorded(0.6)
    assert [episode.seed for episode in broken.value.episodes] == [1, 2, 4]
    assert isinstance(broken.value.__cause__, RunFailure)


def test_tasks_with_equal_words_are_told_apart() -> None:
    spec = _spec_with("open the drawer", "close it", "open the drawer")
    assert spec.task_names == ("open the drawer (task 0)", "close it", "open the drawer (task 2)")
    assert _spec_with("open the drawer", "close it").task_names == ("open the drawer", "close it")


def _spec_with(*tasks: str) -> EnvSpec:
    return EnvSpec(
        observation_shapes={"states": (2,)},
        observation_dtypes={"states": "float32"},
        action_kind="continuous",
        action_dim=1,
        action_low=(-1.0,),
        action_high=(1.0,),
        task_descriptions=tasks,
        max_episode_steps=8,
    )
