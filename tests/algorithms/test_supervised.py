"""The supervised loss against closed forms, however it is split."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.supervised import (
    Supervised,
    check_objective,
    demonstrations_of,
    with_demonstrations,
)
from rlinf.data.demonstrations import Demonstration, Demonstrations
from rlinf.data.imitation import Recorded
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError
from rlinf.models.config import MLPConfig
from rlinf.models.policy import RAW_ACTIONS
from rlinf.workers.source import Chunks


def _loss(algorithm: Supervised, policy: Any, batch: Batch, parts: int = 1) -> torch.Tensor:
    (loss,) = algorithm.losses()
    assert loss.parameters == ("policy",)
    normalizer = algorithm.normalizer(batch)
    shares = [
        loss.of({"policy": policy}, part, normalizer)[0]
        for part in batch.split(math.ceil(len(batch) / parts))
    ]
    return torch.stack(shares).sum()


def test_of_tokens_it_is_their_mean_cross_entropy() -> None:
    logits = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 0, 0]])
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]])
    rows = torch.arange(3)
    batch = Batch.of(inputs={"rows": rows}, mask=mask)

    def policy(part: Batch) -> SimpleNamespace:
        of = part.inputs["rows"]
        picked = logits[of].log_softmax(-1).gather(-1, targets[of].unsqueeze(-1))
        return SimpleNamespace(log_probs=picked.squeeze(-1))

    expected = torch.nn.functional.cross_entropy(logits[mask > 0], targets[mask > 0])
    for parts in (1, 2, 3):
        torch.testing.assert_close(_loss(Supervised(), policy, batch, parts), expected)
    empty = Batch.of(inputs={"rows": rows}, mask=torch.zeros_like(mask))
    assert _loss(Supervised(), policy, empty) == 0


def test_recorded_chunks_begin_again_beside_the_rows_that_a_fault_added() -> None:
    batch = Batch.of(inputs={"states": torch.zeros(5, 1)}, mask=torch.ones(5, 1))
    recorded = Batch.of(inputs={"states": torch.arange(3.0).unsqueeze(1)}, mask=torch.ones(3, 2))
    beside = demonstrations_of(with_demonstrations(batch, recorded, weight=0.5, rows=4))
    assert beside is not None
    assert beside.inputs["states"].flatten().tolist() == [0, 1, 2, 0, 1]
    torch.testing.assert_close(beside.mask, torch.full((5, 2), 0.5 / 4 / 2))


def test_a_policy_whose_log_probs_need_more_than_the_action_is_refused() -> None:
    batch = Batch.of(inputs={RAW_ACTIONS: torch.zeros(2, 1)}, mask=torch.ones(2, 1))

    def policy(part: Batch) -> SimpleNamespace:
        return SimpleNamespace(log_probs=part.inputs["before_squashing"])

    with pytest.raises(ConfigError, match=r"likelihood: .* `before_squashing`.*squared_error"):
        Supervised().errors(policy, batch)


SPEC = EnvSpec(
    observation_shapes={"states": (3,)},
    observation_dtypes={"states": "float32"},
    action_kind="continuous",
    action_dim=2,
    action_low=(-1.0, -1.0),
    action_high=(1.0, 1.0),
    task_descriptions=(),
    max_episode_steps=10,
)


def _episode(length: int, seed: int) -> Demonstration:
    rng = np.random.default_rng(seed)
    return Demonstration(
        observations={"states": rng.normal(size=(length, 3)).astype(np.float32)},
        actions=rng.uniform(-1, 1, (length, 2)).astype(np.float32),
        rewards=np.zeros(length, np.float32),
        seed=seed,
        success=True,
    )


@pytest.mark.parametrize("objective", ["likelihood", "squared_error"])
def test_of_action_chunks_it_counts_what_was_done(objective: Any) -> None:
    """Chunks that reach beyond the end of an episode count with what lies before it."""
    recorded = [Recorded.of(Demonstrations.of([_episode(3, 0), _episode(2, 1)], {}))]
    batch = Chunks(recorded, size=2).batch(range(5))
    assert batch.mask.tolist() == [[1] * 4, [1] * 4, [1, 1, 0, 0], [1] * 4, [1, 1, 0, 0]]
    config = MLPConfig(num_action_chunks=2, policy_gain=1.0, initial_log_std=-0.5)
    policy = config.build(SPEC, value_dim=0, seed=1)
    means = policy.mode(batch.inputs)  # type: ignore[operator]
    distance = (batch.inputs[RAW_ACTIONS] - means).flatten(1)[batch.mask > 0]
    if objective == "squared_error":
        expected = distance.square().mean()
    else:
        normal = torch.distributions.Normal(0.0, math.exp(-0.5))
        expected = -normal.log_prob(distance).mean()
    for parts in (1, 3, 5):
        found = _loss(Supervised(objective), policy, batch, parts)
        torch.testing.assert_close(found, expected)
    sampled = policy.sample({"states": batch.inputs["states"]}, None).forward_inputs[RAW_ACTIONS]
    torch.testing.assert_close(means, sampled)


def test_the_mode_has_a_gradient_and_leaves_the_deviation_alone() -> None:
    recorded = [Recorded.of(Demonstrations.of([_episode(4, 0)], {}))]
    batch = Chunks(recorded, size=1).batch([3, 1])
    policy = MLPConfig(policy_gain=1.0).build(SPEC, value_dim=0)
    _loss(Supervised("squared_error"), policy, batch).backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in policy.named_parameters()}
    assert gradients["log_std"] is None
    assert all(g is not None for name, g in gradients.items() if name.startswith("actor"))


@pytest.mark.parametrize(("imitates", "nearest"), [(True, "model"), (False, "likelihood")])
def test_the_nearest_objective_is_one_that_the_policy_has(imitates: bool, nearest: str) -> None:
    policy: Any = SimpleNamespace(imitates=imitates)
    with pytest.raises(ConfigError, match=f"no mode in closed form; nearest: {nearest}"):
        check_objective(policy, "squared_error", model="own", key="objective")
