from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlinf.data.trajectory import Trajectory, concatenate
from tests.algorithms.rollouts import flags, random_trajectory


def split(trajectory: Trajectory, columns: list[int]) -> Trajectory:
    """Some environments of a rollout."""
    index = torch.tensor(columns)
    picked = {
        name: tensor[index] if name in ("env_ids", "bootstrap_values") else tensor[:, index]
        for name, tensor in trajectory.to_tensors().items()
    }
    return Trajectory.from_tensors(picked)


def assert_equal(a: Trajectory, b: Trajectory) -> None:
    left, right = a.to_tensors(), b.to_tensors()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def test_flat_dictionary_and_back() -> None:
    trajectory = random_trajectory(chunk=2, value_dim=2)
    tensors = trajectory.to_tensors()
    assert {"forward_inputs.states", "rewards", "env_ids"} <= tensors.keys()
    assert_equal(Trajectory.from_tensors(tensors), trajectory)


def test_a_missing_or_unknown_tensor_is_named() -> None:
    tensors = random_trajectory().to_tensors()
    del tensors["rewards"]
    tensors["bonus"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"missing \['rewards'\], unknown \['bonus'\]"):
        Trajectory.from_tensors(tensors)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("rewards", torch.zeros(6, 4), r"rewards has shape \(6, 4\), expected \(6, 4, 1\)"),
        ("valid", torch.zeros(6, 4), "valid has dtype torch.float32, expected torch.bool"),
        ("env_ids", torch.arange(3), "env_ids has shape"),
        ("bootstrap_values", torch.zeros(4), "bootstrap_values has shape"),
        ("values", torch.zeros(6, 4, 3), "values has 3 values per row"),
        ("log_probs", torch.zeros(6, 4, 2), "log_probs has shape"),
        ("versions", torch.zeros(6, 4), "versions has dtype"),
        ("forward_inputs", {"states": torch.zeros(4, 6, 3)}, r"forward_inputs\['states'\]"),
    ],
)
def test_a_wrong_shape_is_named(name: str, tensor: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        random_trajectory(**{name: tensor})


def test_environments_are_joined_in_the_order_of_their_numbers() -> None:
    whole = random_trajectory(envs=5)
    parts = [split(whole, [3, 1]), split(whole, [4]), split(whole, [0, 2])]
    assert_equal(concatenate(parts), whole)
    assert concatenate([whole]) is whole


def test_a_shorter_rollout_gets_invalid_rows_in_front() -> None:
    long = random_trajectory(steps=5, envs=1, env_ids=torch.tensor([1]))
    short = random_trajectory(steps=3, envs=1, env_ids=torch.tensor([0]))
    joined = concatenate([long, short])
    assert joined.valid[:, 0].tolist() == [False, False, True, True, True]
    assert bool(joined.valid[:, 1].all())
    assert torch.equal(joined.rewards[2:, 0], short.rewards[:, 0])
    assert torch.equal(joined.bootstrap_values[0], short.bootstrap_values[0])
    assert joined.played[:, 0].tolist() == [False, False, True, True, True]
    assert joined.of_first_row(joined.rewards[..., 0])[0] == short.rewards[0, 0, 0]


def test_rows_that_fill_up_a_rollout_do_not_make_it_older() -> None:
    parts = [
        random_trajectory(
            steps=steps, envs=1, env_ids=torch.tensor([env]), versions=torch.full((steps, 1), 7)
        )
        for env, steps in ((0, 3), (1, 5))
    ]
    assert concatenate(parts).versions.unique().tolist() == [7]


def test_another_critic_gives_no_end_a_value_that_had_none() -> None:
    ends = flags(4, 2, [(1, 0), (3, 0), (3, 1)])
    final = torch.zeros(4, 2, 1)
    final[1, 0] = 2.0
    trajectory = random_trajectory(steps=4, envs=2, truncations=ends, final_values=final)
    shifted = trajectory.with_values(trajectory.values + 5.0)
    torch.testing.assert_close(shifted.final_values, torch.where(final != 0, final + 5.0, 0.0))
    torch.testing.assert_close(shifted.bootstrap_values, trajectory.bootstrap_values + 5.0)


def test_a_value_of_nothing_is_a_value() -> None:
    """That of a critic which has learnt nothing yet, whose last layer is 0."""
    ends = flags(4, 2, [(1, 0), (3, 1)])
    mask = torch.zeros(4, 2, dtype=torch.bool)
    mask[1, 0] = mask[3, 1] = True
    zeros = torch.zeros(4, 2, 1)
    trajectory = random_trajectory(
        steps=4, envs=2, truncations=ends, values=zeros, final_values=zeros, final_mask=mask
    )
    again = type(trajectory).from_tensors(trajectory.to_tensors())
    shifted = again.with_values(zeros + 5.0)
    torch.testing.assert_close(shifted.final_values, 5.0 * mask.unsqueeze(-1))


def test_rollouts_that_do_not_fit_are_refused() -> None:
    trajectory = random_trajectory()
    with pytest.raises(ValueError, match="no rollouts"):
        concatenate([])
    with pytest.raises(ValueError, match="occurs in two rollouts"):
        concatenate([trajectory, trajectory])
    with pytest.raises(ValueError, match="log_probs of one rollout has rows of shape"):
        concatenate([trajectory, random_trajectory(chunk=2)])
    other = replace(trajectory, forward_inputs={"states": trajectory.forward_inputs["states"]})
    with pytest.raises(ValueError, match="forward_inputs differ"):
        concatenate([trajectory, other])


def test_a_fault_spoils_its_episode_and_no_other() -> None:
    valid = torch.ones(6, 3, dtype=torch.bool)
    valid[3, 0] = False
    valid[5, 1] = False
    trajectory = random_trajectory(
        envs=3, valid=valid, truncations=flags(6, 3, [(1, 0), (4, 1), (2, 2)])
    )
    intact = trajectory.uninterrupted()
    # Environment 0: rows 2 and 3 are the spoilt episode, row 4 starts the next one.
    assert intact[:, 0].tolist() == [True, True, False, False, True, True]
    assert intact[:, 1].tolist() == [True, True, True, True, True, False]
    assert bool(intact[:, 2].all())
