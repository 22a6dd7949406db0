from __future__ import annotations

import numpy as np
import torch

from rlinf.algorithms.ppo import RewardNormalizer

GAMMA = 0.9


def rollout(seed: int, envs: list[int], steps: int = 20) -> dict[str, torch.Tensor]:
    """Rewards and ends that depend on the environment's number alone."""
    rewards, dones = [], []
    for env in envs:
        rng = np.random.default_rng((seed, env))
        rewards.append(3 * rng.normal(size=steps) + env)
        dones.append(rng.random(steps) < 0.2)
    return {
        "rewards": torch.tensor(np.stack(rewards, 1), dtype=torch.float32),
        "dones": torch.tensor(np.stack(dones, 1)),
        "valid": torch.ones(steps, len(envs), dtype=torch.bool),
        "env_ids": torch.tensor(envs),
    }


def test_scale_is_the_deviation_of_all_discounted_returns_so_far() -> None:
    normalizer = RewardNormalizer(gamma=GAMMA, clip=1000.0)
    seen: list[float] = []
    carried = np.zeros(3)
    for number in range(3):
        data = rollout(number, [0, 1, 2])
        rewards, dones = data["rewards"].double().numpy(), data["dones"].numpy()
        for reward, done in zip(rewards, dones, strict=True):
            carried = GAMMA * carried + reward
            seen += carried.tolist()
            carried = np.where(done, 0.0, carried)
        scaled = normalizer(**data)
        np.testing.assert_allclose(
            scaled.numpy(), rewards / np.sqrt(np.var(seen) + 1e-8), rtol=1e-5
        )


def test_rewards_are_clipped() -> None:
    data = rollout(0, [0])
    data["rewards"][7] = 1e4
    scaled = RewardNormalizer(gamma=GAMMA, clip=0.5)(**data)
    assert scaled.abs().max() == 0.5


def test_steps_that_are_not_valid_do_not_count() -> None:
    data = rollout(0, [0, 1])
    spoilt = {name: tensor.clone() for name, tensor in data.items()}
    spoilt["dones"][-1] = True
    spoilt["rewards"][-1] = 1e6
    spoilt["valid"][-1] = False
    normalizer = RewardNormalizer(gamma=GAMMA)
    normalizer(**spoilt)
    expected = RewardNormalizer(gamma=GAMMA)
    expected(**{name: t[:-1] if name != "env_ids" else t for name, t in data.items()})
    assert torch.equal(normalizer.state_dict()["moments"], expected.state_dict()["moments"])


def test_saved_and_loaded_it_continues_to_the_bit() -> None:
    normalizer, restored = RewardNormalizer(gamma=GAMMA), RewardNormalizer(gamma=GAMMA)
    normalizer(**rollout(0, [0, 1]))
    restored.load_state_dict(normalizer.state_dict())
    following = rollout(1, [0, 1])
    assert torch.equal(normalizer(**following), restored(**following))
    assert torch.equal(normalizer.state_dict()["moments"], restored.state_dict()["moments"])


def test_each_task_has_a_scale_of_its_own() -> None:
    data = rollout(0, [0, 1])
    data["rewards"][:, 1] *= 1000
    tasks = torch.tensor([3, 7]).expand(20, 2).clone()
    normalizer, restored = RewardNormalizer(gamma=GAMMA), RewardNormalizer(gamma=GAMMA)
    scaled = normalizer(**data, tasks=tasks)
    for env in (0, 1):
        alone = {name: each[..., [env]] for name, each in data.items()}
        assert torch.equal(scaled[:, [env]], RewardNormalizer(gamma=GAMMA)(**alone))
    restored.load_state_dict(normalizer.state_dict())
    following = {**rollout(1, [0, 1]), "tasks": tasks.flip(1)}
    assert torch.equal(normalizer(**following), restored(**following))


def test_a_return_is_carried_within_its_episode_alone() -> None:
    data = {**rollout(0, [0, 1]), "dones": torch.zeros(20, 2, dtype=torch.bool)}
    normalizer = RewardNormalizer(gamma=GAMMA)
    began, goes_on = torch.tensor([3, 4]), torch.tensor([3, 5])
    normalizer(**data, episodes=(began, began))
    restored = RewardNormalizer(gamma=GAMMA)
    restored.load_state_dict(normalizer.state_dict())
    for each in (normalizer, restored):
        before = each.state_dict()["carried"]
        nothing = {name: part[:1] if name != "env_ids" else part for name, part in data.items()}
        nothing["rewards"] = torch.zeros(1, 2)
        each(**nothing, episodes=(goes_on, goes_on))
        after = each.state_dict()["carried"]
        torch.testing.assert_close(after, torch.stack([GAMMA * before[0], before[1] * 0]))


def test_rows_that_fill_up_a_rollout_end_nothing() -> None:
    data = {**rollout(0, [0]), "dones": torch.zeros(20, 1, dtype=torch.bool)}
    normalizer = RewardNormalizer(gamma=GAMMA)
    normalizer(**data)
    before = normalizer.state_dict()
    filled = {name: part[:2] if name != "env_ids" else part for name, part in data.items()}
    unplayed = torch.zeros(2, 1, dtype=torch.bool)
    filled["rewards"], filled["valid"] = torch.zeros(2, 1), unplayed
    normalizer(**filled, played=unplayed)
    after = normalizer.state_dict()
    assert all(torch.equal(after[name], part) for name, part in before.items())


def test_constant_zero_rewards_stay_zero() -> None:
    data = rollout(0, [0])
    data["rewards"].zero_()
    assert not bool(RewardNormalizer(gamma=GAMMA)(**data).any())
