"""What is special about each algorithm, on small numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import Scores
from tests.algorithms.batches import EVERY_ALGORITHM, build, random_batch

COMPARING = ("grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo", "decoupled_ppo")


def keys_of(name: str) -> dict[str, Any]:
    return {"loss_agg_length": 10} if name == "dr_grpo" else {}


def of_sequences(batch: Batch) -> list[float]:
    """Advantage of the first token of each sequence."""
    assert batch.advantages is not None
    return batch.advantages[:, 0].tolist()


def test_group_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 2, 3, 6, 5, 5, 5, 5])
    grpo, metrics = build("grpo").prepare(random_batch(rewards=rewards))
    std = math.sqrt(((3 - 1) ** 2 + (3 - 2) ** 2 + 0 + (6 - 3) ** 2) / 3)
    wanted = [d / (std + 1e-6) for d in (-2, -1, 0, 3)] + [0.0] * 4
    assert of_sequences(grpo) == pytest.approx(wanted, abs=1e-6)
    assert metrics["rollout/equal_groups"] == 0.5
    assert metrics["rollout/rewards"] == pytest.approx(4.0)
    dr_grpo, _ = build("dr_grpo", loss_agg_length=6).prepare(random_batch(rewards=rewards))
    assert of_sequences(dr_grpo) == pytest.approx([-2, -1, 0, 3, 0, 0, 0, 0], abs=1e-6)


@pytest.mark.parametrize("name", COMPARING)
def test_an_invalid_answer_changes_nothing_for_the_others(name: str) -> None:
    """Advantages with it are those of the batch without it, whatever its reward is."""
    algorithm = build(name, **keys_of(name))
    batch = random_batch(seed=7)
    rewards, valid = batch.rewards.clone(), batch.valid.clone()
    rewards[2], valid[2] = torch.nan, False
    prepared, metrics = algorithm.prepare(replace(batch, rewards=rewards, valid=valid))
    others = torch.tensor([0, 1, 3, 4, 5, 6, 7])
    alone, wanted = algorithm.prepare(batch.select(others))
    assert of_sequences(prepared.select(others)) == pytest.approx(of_sequences(alone))
    for metric in ("rewards", *(f"advantages_{kind}" for kind in ("mean", "min", "max"))):
        name = f"rollout/{metric}"
        assert metrics[name] == pytest.approx(wanted[name], abs=1e-6)
    assert prepared.mask[2].sum() == 0
    assert prepared.mask.sum() == alone.mask.sum()
    assert metrics["rollout/trained_sequences"] == 7
    assert metrics["rollout/valid"] == 7 / 8


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
def test_an_invalid_answer_does_not_enter_the_whitening(name: str) -> None:
    algorithm = build(name)
    batch = random_batch(seed=8)
    rewards, valid = batch.rewards.clone(), batch.valid.clone()
    rewards[2], valid[2] = torch.nan, False
    prepared, _ = algorithm.prepare(replace(batch, rewards=rewards, valid=valid))
    others = torch.tensor([0, 1, 3, 4, 5, 6, 7])
    alone, _ = algorithm.prepare(batch.select(others))
    assert prepared.advantages is not None
    assert alone.advantages is not None
    torch.testing.assert_close(prepared.advantages[others], alone.advantages)
    assert bool(prepared.advantages.isfinite().all())
    assert prepared.mask[2].sum() == 0


@pytest.mark.parametrize("name", COMPARING)
def test_the_only_valid_answer_of_a_group_is_not_trained_on(name: str) -> None:
    valid = torch.tensor([True, False, False, False, True, True, True, True])
    prepared, _ = build(name, **keys_of(name)).prepare(random_batch(valid=valid))
    assert prepared.mask.any(dim=1).tolist() == [False] * 4 + [True] * 4


@pytest.mark.parametrize("name", EVERY_ALGORITHM)
def test_groups_need_not_lie_together(name: str) -> None:
    kind, keys = EVERY_ALGORITHM[name]
    algorithm = build(kind, **keys)
    batch = random_batch(seed=9)
    order = torch.tensor([6, 0, 4, 1, 7, 3, 5, 2])
    shuffled, _ = algorithm.prepare(batch.select(order))
    plain, _ = algorithm.prepare(batch)
    assert plain.advantages is not None
    assert shuffled.advantages is not None
    torch.testing.assert_close(shuffled.advantages, plain.advantages[order])


def test_truncated_answers_are_compared_but_not_trained_on() -> None:
    truncated = torch.tensor([False, True, False, False, False, False, False, False])
    batch = random_batch(truncated=truncated, seed=10)
    kept, _ = build("dapo", overlong_filter=False).prepare(batch)
    filtered, metrics = build("dapo").prepare(batch)
    assert filtered.mask[1].sum() == 0
    assert kept.mask[1].sum() > 0
    others = torch.tensor([0, 2, 3, 4, 5, 6, 7])
    assert of_sequences(filtered.select(others)) == of_sequences(kept.select(others))
    assert torch.equal(filtered.mask[others], batch.mask[others])
    assert metrics["rollout/truncated"] == 1 / 8


def test_the_length_penalty_enters_the_comparison() -> None:
    lengths = torch.tensor([2, 4, 6, 6])
    mask = (torch.arange(6) < lengths.unsqueeze(1)).float()
    batch = random_batch(sequences=4, mask=mask, rewards=torch.tensor([1.0, 1, 1, -1]))
    dapo = build("dapo", safe_length=2, max_length=6, len_reward_penalty=0.5)
    prepared, metrics = dapo.prepare(batch)
    scores = np.array([1, 1 - 0.25, 1 - 0.5, -1 - 0.5])
    wanted = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
    assert of_sequences(prepared) == pytest.approx(wanted.tolist(), rel=1e-5)
    assert metrics["rollout/length_penalty"] == pytest.approx(-(0.5 + 1 + 1) / 4)


def test_dynamic_sampling_keeps_groups_with_different_rewards() -> None:
    dapo, grpo = build("dapo"), build("grpo")
    equal, mixed = np.array([5.0, 5, 5], np.float32), np.array([5.0, 5, -5], np.float32)
    assert not dapo.keep_group(equal)
    assert dapo.keep_group(mixed)
    assert not dapo.keep_group(mixed, valid=np.array([True, True, False]))
    assert not dapo.keep_group(mixed, valid=np.array([False, False, True]))
    assert not dapo.keep_group(mixed, valid=np.zeros(3, bool))
    assert grpo.keep_group(equal)
    assert build("grpo", dynamic_sampling=True).keep_group(mixed)
    assert not build("rloo", dynamic_sampling=True).keep_group(equal)


def test_returns_of_reinforce_pp_with_kl_and_baseline() -> None:
    """Term by term, with the reward on each sequence's own last token."""
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]])
    rewards = torch.tensor([1.0, -1, 0.5, 2])
    batch = random_batch(sequences=4, length=4, group_size=2, mask=mask, rewards=rewards)
    algorithm = build(
        "reinforce_pp",
        kl_reward_beta=0.3,
        group_baseline=True,
        gamma=0.9,
        normalize_advantages=False,
    )
    prepared, _ = algorithm.prepare(replace(batch, proximal_log_probs=None))
    assert prepared.advantages is not None
    assert batch.reference_log_probs is not None
    baselines = [0.0, 0.0, 1.25, 1.25]
    for i in range(4):
        last = int(mask[i].sum()) - 1
        for t in range(4):
            wanted = 0.0
            for k in range(t, last + 1):
                kl = float(batch.log_probs[i, k] - batch.reference_log_probs[i, k])
                reward = float(rewards[i]) - baselines[i] if k == last else 0.0
                wanted += 0.9 ** (k - t) * (reward - 0.3 * kl)
            assert prepared.advantages[i, t].item() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp", "grpo", "rloo"])
@pytest.mark.parametrize("proximal", [False, True])
def test_the_kl_in_the_reward_is_told_unweighted(name: str, proximal: bool) -> None:
    """A mean over the tokens of valid answers, whatever is in the padding."""
    batch = random_batch(seed=5)
    assert batch.reference_log_probs is not None
    acted = batch.proximal_log_probs if proximal else batch.log_probs
    assert acted is not None
    kept = [row for row in range(8) if row != 2]
    per_token = [
        0.5 * float((acted - batch.reference_log_probs)[row, token]) ** 2
        for row in kept
        for token in range(int(batch.mask[row].sum()))
    ]
    reference = torch.where(batch.mask > 0, batch.reference_log_probs, torch.nan)
    given = replace(
        batch,
        reference_log_probs=reference,
        valid=torch.tensor([row in kept for row in range(8)]),
        proximal_log_probs=batch.proximal_log_probs if proximal else None,
    )
    for beta in (0.1, 0.4):
        _, metrics = build(name, kl_reward_beta=beta, kl_reward_type="k2").prepare(given)
        wanted = sum(per_token) / len(per_token)
        assert metrics["rollout/reference_kl"] == pytest.approx(wanted, rel=1e-5)
    _, metrics = build(name, kl_beta=0.1).prepare(given)
    assert "rollout/reference_kl" not in metrics


def test_the_reward_kl_of_a_group_is_summed_over_each_answer() -> None:
    batch = random_batch(seed=11)
    prepared, _ = build("rloo", kl_reward_beta=0.2).prepare(batch)
    assert batch.proximal_log_probs is not None
    assert batch.reference_log_probs is not None
    scores = []
    for i in range(8):
        tokens = int(batch.mask[i].sum())
        kl = (batch.proximal_log_probs - batch.reference_log_probs)[i, :tokens].sum()
        scores.append(float(batch.rewards[i] - 0.2 * kl))
    wanted = []
    for i in range(8):
        others = [scores[j] for j in range(8) if j // 4 == i // 4 and j != i]
        wanted.append(scores[i] - sum(others) / 3)
    assert of_sequences(prepared) == pytest.approx(wanted, abs=1e-5)


def test_critic_loss_term_by_term() -> None:
    ppo = build("ppo", huber_delta=0.5, value_clip=0.3)
    batch = random_batch(seed=12)
    batch, metrics = ppo.prepare(batch)
    new = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    loss, _ = ppo.value_loss(new, batch, normalizer=ppo.normalizer(batch))

    def huber(error: float) -> float:
        return 0.5 * error**2 if abs(error) < 0.5 else 0.5 * (abs(error) - 0.25)

    assert batch.returns is not None
    assert batch.values is not None
    terms, errors, targets = [], [], []
    for i, t in batch.mask.nonzero().tolist():
        target, old, value = (float(x[i, t]) for x in (batch.returns, batch.values, new))
        clipped = min(max(value, old - 0.3), old + 0.3)
        terms.append(max(huber(target - value), huber(target - clipped)))
        errors.append(target - old)
        targets.append(target)
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)
    explained = 1 - np.var(errors) / np.var(targets)
    assert metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-4)


def test_the_value_loss_is_a_mean_over_sequences_where_the_policy_loss_is() -> None:
    batch = random_batch(seed=16)
    batch = replace(batch, returns=torch.zeros(8, 6), values=torch.ones(8, 6))
    keys = {"value_clip": None, "loss_agg_func": "seq-mean-token-sum-norm", "loss_agg_length": 9}
    ppo = build("ppo", **keys)
    new = torch.rand(8, 6, generator=torch.Generator().manual_seed(6))
    loss, metrics = ppo.value_loss(new, batch, normalizer=ppo.normalizer(batch))
    of_each = [(0.5 * row[mask > 0] ** 2).mean() for row, mask in zip(new, batch.mask, strict=True)]
    assert loss.item() == pytest.approx(float(sum(of_each)) / 8, rel=1e-5)
    assert "critic/value_clip_ratio" not in metrics


def test_the_critic_warms_up_before_the_policy_is_trained() -> None:
    ppo = build("ppo", critic_warmup_steps=2)
    assert [ppo.trains_policy(step) for step in range(4)] == [False, False, True, True]
    assert build("grpo").trains_policy(0)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    batch = random_batch(sequences=2, length=1, mask=torch.ones(2, 1))
    batch = replace(batch, advantages=torch.tensor([[2.0], [2.0]]))
    log_probs = (batch.log_probs + torch.tensor([[1.0], [0.0]])).requires_grad_()
    grpo, cispo = build("grpo"), build("cispo", clip_ratio_high=0.5)
    for algorithm, wanted in ((grpo, [0.0, -1.0]), (cispo, [-1.5, -1.0])):
        loss, _ = algorithm.loss(Scores(log_probs, None), batch, normalizer=2.0)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        assert gradient.flatten().tolist() == pytest.approx(wanted)


def test_gspo_clips_whole_sequences() -> None:
    """Token ratios far from 1 that cancel out in their mean are not clipped."""
    batch = random_batch(sequences=2, length=2, mask=torch.ones(2, 2))
    batch = replace(batch, advantages=torch.ones(2, 2))
    shift = torch.tensor([[0.5, -0.5], [0.5, 0.1]])
    log_probs = (batch.log_probs + shift).requires_grad_()
    gspo = build("gspo", clip_ratio_low=0.1, clip_ratio_high=0.1)
    loss, metrics = gspo.loss(Scores(log_probs, None), batch, normalizer=2.0)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient.tolist() == [pytest.approx([-0.25, -0.25]), [0.0, 0.0]]
    assert loss.item() == pytest.approx(-(1.0 + 1.1) / 2, rel=1e-6)
    assert metrics["actor/ratio"].item() == pytest.approx((1 + math.exp(0.3)) / 2)
    assert metrics["actor/clip_fraction"].item() == 0.5


def test_the_decoupled_objective_term_by_term() -> None:
    """w · max(−Aρ, −A clip(ρ)), the proximal policy recomputed or interpolated."""
    batch = random_batch(seed=13, sequences=4)
    batch = replace(batch, advantages=torch.randn(4, 6))
    noise = torch.randn(4, 6, generator=torch.Generator().manual_seed(4))
    log_probs = batch.log_probs + 0.6 * noise
    assert batch.proximal_log_probs is not None
    assert batch.advantages is not None
    assert batch.version is not None
    for proximal in ("recomputed", "interpolated"):
        algorithm = build("decoupled_ppo", proximal=proximal, importance_sampling_clip=1.2)
        loss, _ = algorithm.loss(
            Scores(log_probs, None), batch, normalizer=algorithm.normalizer(batch)
        )
        terms = []
        for i, t in batch.mask.nonzero().tolist():
            behaviour, present = float(batch.log_probs[i, t]), float(log_probs[i, t])
            stale = batch.version - int(batch.versions[i, t])
            prox = float(batch.proximal_log_probs[i, t])
            if proximal == "interpolated":
                prox = (behaviour + stale * present) / (stale + 1)
            ratio, a = math.exp(present - prox), float(batch.advantages[i, t])
            weight = min(math.exp(prox - behaviour), 1.2)
            terms.append(weight * max(-a * ratio, -a * min(max(ratio, 0.8), 1.2)))
        assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5, abs=1e-7)


def test_fresh_tokens_have_weight_1_and_their_own_ratio_when_interpolated() -> None:
    batch = random_batch(versions=torch.full((8, 6), 5), seed=14)
    algorithm = build("decoupled_ppo", proximal="interpolated")
    batch, metrics = algorithm.prepare(batch)
    assert metrics["rollout/staleness"] == 0
    log_probs = batch.log_probs + 0.3
    _, metrics = algorithm.loss(
        Scores(log_probs, None), batch, normalizer=algorithm.normalizer(batch)
    )
    assert metrics["actor/importance_weight"].item() == pytest.approx(1.0)
    assert metrics["actor/ratio"].item() == pytest.approx(math.exp(0.3), rel=1e-5)


def test_kl_and_entropy_terms() -> None:
    batch = random_batch(seed=15)
    batch = replace(batch, advantages=torch.zeros(8, 6))
    log_probs = batch.log_probs.clone()
    entropy = torch.rand(8, 6, generator=torch.Generator().manual_seed(5))
    algorithm = build("grpo", kl_beta=0.4, kl_penalty_type="k2", entropy_bonus=0.2)
    normalizer = algorithm.normalizer(batch)
    loss, metrics = algorithm.loss(Scores(log_probs, entropy), batch, normalizer=normalizer)
    assert batch.reference_log_probs is not None
    counted = batch.mask > 0
    kl = (0.5 * (log_probs - batch.reference_log_probs)[counted] ** 2).mean().item()
    assert metrics["actor/kl_loss"].item() == pytest.approx(kl, rel=1e-5)
    assert metrics["actor/entropy"].item() == pytest.approx(entropy[counted].mean().item())
    wanted = 0.4 * kl - 0.2 * entropy[counted].mean().item()
    assert loss.item() == pytest.approx(wanted, rel=1e-5)
    assert metrics["actor/loss"].item() == loss.item()


def test_an_update_with_a_large_mean_ratio_is_refused() -> None:
    algorithm = build("grpo")
    assert algorithm.accepts({"actor/ratio": 1.2})
    assert not algorithm.accepts({"actor/ratio": 5.1})
    assert not build("grpo", early_stop_imp_ratio=1.1).accepts({"actor/ratio": 1.2})
    assert build("grpo", early_stop_imp_ratio=None).accepts({"actor/ratio": 1e9})
    # The ratio of a whole answer has no usual size.
    assert build("rloo").accepts({"actor/ratio": 1e9})
    assert not build("rloo", early_stop_imp_ratio=1e3).accepts({"actor/ratio": 1e9})


def test_log_ratios_are_bounded() -> None:
    batch = replace(random_batch(), advantages=-torch.ones(8, 6))
    algorithm = build("grpo", clip_log_ratio_min=-0.5, clip_log_ratio_max=0.5)
    log_probs = batch.log_probs + 3.0
    loss, _ = algorithm.loss(Scores(log_probs, None), batch, normalizer=algorithm.normalizer(batch))
    assert loss.item() == pytest.approx(math.exp(0.5), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "keys", "lacks", "stage"),
    [
        ("ppo", {}, "values", "prepare"),
        ("reinforce_pp", {"kl_reward_beta": 0.1}, "reference_log_probs", "prepare"),
        ("grpo", {"kl_beta": 0.1}, "reference_log_probs", "loss"),
        ("grpo", {"proximal": "recomputed"}, "proximal_log_probs", "loss"),
        ("grpo", {"proximal": "interpolated"}, "version", "loss"),
        ("grpo", {"entropy_bonus": 0.1}, "entropy", "loss"),
        ("grpo", {}, "advantages", "loss"),
    ],
)
def test_what_the_batch_lacks_is_named(
    name: str, keys: dict[str, Any], lacks: str, stage: str
) -> None:
    algorithm = build(name, **keys)
    batch = random_batch()
    if stage == "loss":
        batch = replace(batch, advantages=torch.ones(8, 6))
    if lacks != "entropy":
        batch = replace(batch, **{lacks: None})

    def ask() -> None:
        if stage == "prepare":
            algorithm.prepare(batch)
        else:
            algorithm.loss(Scores(batch.log_probs, None), batch, normalizer=1.0)

    with pytest.raises(ValueError, match=lacks):
        ask()


def test_a_batch_moves_to_a_device_as_a_whole() -> None:
    moved = random_batch().to("meta")
    assert moved.mask.is_meta
    assert moved.versions.is_meta
    assert moved.version == 5
    assert moved.returns is None


def test_select_keeps_what_is_not_per_sequence() -> None:
    batch = replace(random_batch(), values=None)
    part = batch.select(torch.tensor([5, 1]))
    assert len(part) == 2
    assert part.version == batch.version
    assert part.values is None
    assert torch.equal(part.inputs["input_ids"], batch.inputs["input_ids"][[5, 1]])
    assert [len(piece) for piece in batch.split(3)] == [3, 3, 2]
