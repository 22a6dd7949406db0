"""One objective, one config and one registry for actions and tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from rlinf.algorithms.base_config import REGISTRY, ActionAlgorithm, AlgorithmConfig, TokenAlgorithm
from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import DecoupledPPOConfig, GRPOConfig, PPOConfig
from rlinf.algorithms.credit import reverse_scan
from rlinf.algorithms.protocol import Algorithm, Scores
from tests.algorithms.batches import random_batch
from tests.algorithms.rollouts import flags, random_trajectory


def built(name: str, family: Any, **keys: Any) -> Algorithm:
    config: AlgorithmConfig = REGISTRY.load(name).model_validate({"type": name} | keys)
    return config.build(family=family, group_size=4)


@dataclass
class ChunkEvaluation:
    """As a policy for chunks gives it: [N, C, A]."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor | None = None


SHARED: dict[str, Any] = {"kl_beta": 0.1, "entropy_bonus": 0.05, "clip_ratio_high": 0.25}
ALGORITHMS = [
    ("ppo", {}),
    ("ppo", {"clip_ratio_c": 1.5, "loss_agg_func": "seq-mean-token-mean"}),
    ("grpo", {"loss_agg_func": "seq-mean-token-sum"}),
    ("grpo", {"loss_agg_func": "seq-mean-token-sum-norm", "loss_agg_length": 9}),
    ("cispo", {}),
    ("reinforce_pp", {}),
    ("ppo", {"proximal": "recomputed", "importance_sampling": "token"}),
    ("grpo", {"proximal": "interpolated", "importance_sampling": "sequence"}),
    (
        "cispo",
        {
            "proximal": "recomputed",
            "importance_sampling": "token",
            "importance_sampling_clip": 1.05,
            "importance_sampling_mode": "mask",
        },
    ),
    ("decoupled_ppo", {"proximal": "recomputed"}),
    ("decoupled_ppo", {"proximal": "interpolated"}),
]


@pytest.mark.parametrize(("name", "keys"), ALGORITHMS)
def test_answers_and_chunks_with_the_same_terms_have_the_same_loss(
    name: str, keys: dict[str, Any]
) -> None:
    """Eight rows of six terms: tokens of an answer, or 3 actions of 2 dimensions."""
    batch = random_batch(seed=4)
    generator = torch.Generator().manual_seed(1)
    batch = replace(
        batch,
        mask=torch.ones_like(batch.mask),
        advantages=torch.randn(8, 6, generator=generator),
        returns=torch.randn(8, 6, generator=generator),
    )
    log_probs = batch.log_probs + 0.4 * torch.randn(8, 6, generator=generator)
    entropy, values = (torch.rand(8, 6, generator=generator) for _ in range(2))
    found = []
    for family in ("tokens", "actions"):
        own: dict[str, Any] = {}
        if family == "actions":
            own = {"logprob_type": "token_level", "entropy_type": "token_level"}
        elif name == "decoupled_ppo":
            own = {"importance_sampling_clip": 2.0, "importance_sampling_mode": "mask"}
            own["advantage"] = "gae"
        algorithm = built(name, family, **SHARED, **keys, **own)
        given = log_probs.clone().requires_grad_()
        normalizer = algorithm.normalizer(batch)
        if family == "tokens":
            loss, metrics = algorithm.loss(Scores(given, entropy), batch, normalizer=normalizer)
            if algorithm.needs_values:
                value_loss, more = algorithm.value_loss(values, batch, normalizer=normalizer)
                loss, metrics = loss + value_loss, metrics | more
                metrics["actor/loss"] = loss.detach()
        else:
            chunks = ChunkEvaluation(given.view(8, 3, 2), entropy.view(8, 3, 2))
            chunks.values = values if algorithm.needs_values else None
            loss, metrics = algorithm.loss(chunks, batch, normalizer=normalizer)
        (gradient,) = torch.autograd.grad(loss, given)
        found.append((loss, gradient, metrics))
    (loss, gradient, metrics), (other, other_gradient, other_metrics) = found
    assert torch.equal(loss, other)
    assert torch.equal(gradient, other_gradient)
    assert metrics == other_metrics


@pytest.mark.parametrize("level", ["token_level", "action_level", "chunk_level"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_an_entropy_of_another_level_counts_as_much(level: str, mode: str) -> None:
    """Mean over rows of the mean or sum of the entropies at their own level."""
    trajectory = random_trajectory(chunk=3, action_dim=2)
    keys: dict[str, Any] = {"logprob_type": "action_level", "entropy_type": level}
    algorithm = built("ppo", "actions", loss_agg_func=mode, **keys)
    batch, _ = algorithm.prepare(trajectory)
    entropy = torch.rand(24, 3, 2, generator=torch.Generator().manual_seed(0))
    chunks = ChunkEvaluation(trajectory.log_probs.flatten(0, 1), entropy)
    _, metrics = algorithm.loss(chunks, batch, normalizer=algorithm.normalizer(batch))
    parts = {"token_level": 6, "action_level": 3, "chunk_level": 1}[level]
    total = entropy.sum((1, 2)).mean()
    expected = total if mode == "seq-mean-token-sum" else total / parts
    assert metrics["actor/entropy_loss"].item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("config", "actions", "tokens"),
    [
        (
            PPOConfig,
            {"gamma": 0.99, "gae_lambda": 0.95, "normalize_advantages": True},
            {"gamma": 1.0, "gae_lambda": 1.0, "normalize_advantages": True},
        ),
        (
            DecoupledPPOConfig,
            {"normalize_advantages": True, "behave_weight_threshold": 2.0},
            {"normalize_advantages": False, "importance_sampling_clip": 5.0, "advantage": "group"},
        ),
        (
            GRPOConfig,
            {"normalize_advantages": False, "early_stop_imp_ratio": None},
            {"normalize_advantages": False, "early_stop_imp_ratio": 5.0, "proximal": "rollout"},
        ),
    ],
)
def test_each_family_has_its_defaults(
    config: type[AlgorithmConfig], actions: dict[str, Any], tokens: dict[str, Any]
) -> None:
    name = config.model_fields["type"].default
    for section, expected in ((ActionAlgorithm, actions), (TokenAlgorithm, tokens)):
        adapter: TypeAdapter[Any] = TypeAdapter(section)
        found = adapter.validate_python({"type": name})
        assert {key: getattr(found, key) for key in expected} == expected
        # What a run wrote down is read again as the same.
        assert adapter.validate_python(adapter.dump_python(found)) == found
        assert adapter.validate_python(config()) == found


@pytest.mark.parametrize(
    ("name", "family", "keys", "message"),
    [
        ("ppo", "tokens", {"logprob_type": "chunk_level"}, "has no meaning for tokens"),
        ("ppo", "tokens", {"normalize_rewards": False}, "has no meaning for tokens"),
        ("ppo", "actions", {"kl_reward_beta": 0.1}, "has no meaning for actions"),
        ("grpo", "actions", {"dynamic_sampling": True}, "has no meaning for actions"),
        ("decoupled_ppo", "actions", {"importance_sampling_clip": 2.0}, "for actions"),
        ("decoupled_ppo", "actions", {"importance_sampling_mode": "mask"}, "for actions"),
        ("decoupled_ppo", "actions", {"proximal": "rollout"}, "type: ppo"),
        ("grpo", "actions", {"importance_sampling": "token"}, "write proximal: recomputed"),
        (
            "ppo",
            "actions",
            {"proximal": "recomputed", "importance_sampling": "sequence"},
            "nearest: token, or logprob_type: action_level",
        ),
        ("ppo", "actions", {"importance_sampling_clip": 3.0}, "no effect without importance_samp"),
        ("gspo", "actions", {}, "gspo trains tokens, this run trains actions"),
        ("ppo", "tokens", {"gamma": 1.5}, "less than or equal to 1"),
    ],
)
def test_what_a_family_does_not_understand_is_refused(
    name: str, family: Any, keys: dict[str, Any], message: str
) -> None:
    section = ActionAlgorithm if family == "actions" else TokenAlgorithm
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(section).validate_python({"type": name} | keys)
    with pytest.raises(ValidationError, match=message):
        built(name, family, **keys)


def test_a_null_of_a_key_with_a_meaning_of_its_own_is_kept() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(TokenAlgorithm)
    section = adapter.validate_python({"type": "grpo", "early_stop_imp_ratio": None})
    assert section.early_stop_imp_ratio is None
    assert adapter.validate_python({"type": "ppo", "gamma": None}).gamma == 1.0


def test_an_algorithm_of_no_family_is_not_built() -> None:
    with pytest.raises(ValueError, match="whether ppo is to train actions or tokens"):
        PPOConfig().build()


def test_answers_leave_nothing_to_be_kept() -> None:
    for name in ("grpo", "ppo", "decoupled_ppo"):
        assert built(name, "tokens").state_dict() == {}
    assert set(built("grpo", "actions").state_dict()) == {"env_ids", "episode_ids"}


class Policy(torch.nn.Module):
    """Log-probs and values of its own, whatever the batch."""

    def __init__(self, scores: Any) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, batch: Batch) -> Any:
        del batch
        return self.scores


def test_losses_name_the_modules_that_they_train() -> None:
    batch = replace(random_batch(), advantages=torch.ones(8, 6), returns=torch.zeros(8, 6))
    values = torch.rand(8, 6)
    modules = {"policy": Policy(Scores(batch.log_probs + 0.1)), "critic": Policy(values)}
    ppo = built("ppo", "tokens")
    policy, critic = ppo.losses()
    assert (policy.name, policy.parameters) == ("policy", ("policy",))
    assert (critic.name, critic.parameters) == ("critic", ("critic",))
    normalizer = ppo.normalizer(batch)
    expected, _ = ppo.value_loss(values, batch, normalizer=normalizer)
    assert torch.equal(critic.of(modules, batch, normalizer)[0], expected)
    expected, _ = ppo.loss(modules["policy"](batch), batch, normalizer=normalizer)
    assert torch.equal(policy.of(modules, batch, normalizer)[0], expected)
    for algorithm in (built("grpo", "tokens"), built("ppo", "actions"), built("grpo", "actions")):
        assert [loss.parameters for loss in algorithm.losses()] == [("policy",)]


def test_returns_of_reinforce_pp_over_time_end_with_the_episode() -> None:
    trajectory = random_trajectory(steps=5, envs=2, value_dim=0, terminations=flags(5, 2, [(2, 0)]))
    algorithm = built("reinforce_pp", "actions", gamma=0.9, normalize_advantages=False)
    batch, _ = algorithm.prepare(trajectory)
    rewards = trajectory.rewards[..., 0]
    expected = torch.zeros(5, 2)
    for env, ends in ((0, [2, 4]), (1, [4])):
        for step in range(5):
            last = next(end for end in ends if end >= step)
            steps = range(step, last + 1)
            expected[step, env] = sum(0.9 ** (k - step) * rewards[k, env] for k in steps)
    assert batch.advantages is not None
    torch.testing.assert_close(batch.advantages.view(5, 2), expected)
    assert batch.values is None
    assert algorithm.value_dim(3) == 0


def test_cispo_compares_episodes_as_grpo_does() -> None:
    trajectory = random_trajectory(
        envs=8, value_dim=0, reset_seeds=(torch.arange(8) // 4).expand(6, 8)
    )
    of_both = [built(name, "actions").prepare(trajectory)[0] for name in ("cispo", "grpo")]
    assert torch.equal(of_both[0].advantages, of_both[1].advantages)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_a_reverse_scan_is_the_sum_of_discounted_terms(steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    terms, decay = (torch.rand(steps, 3, generator=generator).double() for _ in range(2))
    found = reverse_scan(terms, decay)
    assert found.shape == (steps, 3)
    for t in range(steps):
        expected = sum(terms[k] * decay[t:k].prod(dim=0) for k in range(t, steps))
        torch.testing.assert_close(found[t], expected)


def test_columns_that_were_not_sampled_hold_nothing() -> None:
    batch = Batch.of(inputs={"states": torch.zeros(3, 2)}, mask=torch.ones(3, 4))
    assert batch.log_probs.shape == batch.versions.shape == (3, 4)
    assert bool(batch.valid.all())
    assert not bool(batch.truncated.any())
    assert batch.staleness() is None
    assert set(batch.tensors()) == {
        "inputs.states", "mask", "log_probs", "rewards", "versions", "groups", "truncated", "valid",
    }  # fmt: skip


def test_folded_log_probs_are_those_of_the_terms() -> None:
    per_dimension = torch.randn(4, 3, 2)
    wanted = {6: per_dimension.flatten(1), 3: per_dimension.sum(-1), 1: per_dimension.sum((1, 2))}
    for terms, expected in wanted.items():
        batch = Batch.of(inputs={}, mask=torch.ones(4, terms))
        torch.testing.assert_close(batch.fold(per_dimension), expected.view(4, terms))
    with pytest.raises(ValueError, match="2 terms per row"):
        Batch.of(inputs={}, mask=torch.ones(4, 2)).fold(per_dimension)


@pytest.mark.parametrize("key", ["clip_ratio_low", "clip_ratio_high"])
def test_distillation_clips_nothing(key: str) -> None:
    given = {"type": "distillation", "teacher": "policy.safetensors"}
    assert built("distillation", "actions", **given)
    with pytest.raises(ValidationError, match="has no effect without type: ppo"):
        built("distillation", "actions", **given, **{key: 0.1})
