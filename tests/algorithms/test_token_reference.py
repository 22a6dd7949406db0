"""Estimators and losses against outputs of two other libraries, kept in ``reference.json``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.losses import importance_weights, kl_estimate
from rlinf.algorithms.protocol import Scores
from tests.algorithms.batches import build, random_batch

REFERENCE = json.loads((Path(__file__).parent / "reference.json").read_text(encoding="utf-8"))
INPUTS = {name: torch.tensor(v, dtype=torch.float64) for name, v in REFERENCE["inputs"].items()}
MASK = INPUTS["mask"]


def expected(library: str, name: str, part: int = 0) -> Tensor:
    return torch.tensor(REFERENCE[library][name][part], dtype=torch.float64)


def reference_batch(**replaced: Any) -> Batch:
    names = {"rollout_log_probs": "log_probs", "old_log_probs": "proximal_log_probs"}
    same = ("mask", "reference_log_probs", "values", "rewards")
    given = {ours: INPUTS[name] for name, ours in (names | {s: s for s in same}).items()}
    given |= {"groups": INPUTS["groups"].long()}
    return random_batch(dtype=torch.float64, **(given | replaced))


@pytest.mark.parametrize(
    ("algorithm", "keys", "name"),
    [
        ("grpo", {}, "grpo_advantages"),
        ("dr_grpo", {"loss_agg_length": 10}, "dr_grpo_advantages"),
        ("rloo", {}, "rloo_advantages"),
        ("ppo", {"gamma": 0.97, "gae_lambda": 0.9}, "gae_whitened"),
        ("ppo", {"gae_lambda": 0.95, "kl_reward_beta": 0.1}, "gae_kl"),
        ("reinforce_pp", {"gamma": 0.95}, "reinforce_pp"),
        ("reinforce_pp", {"kl_reward_beta": 0.1}, "reinforce_pp_kl"),
        ("reinforce_pp", {"group_baseline": True}, "reinforce_pp_baseline"),
    ],
)
def test_advantages(algorithm: str, keys: dict[str, Any], name: str) -> None:
    prepared, _ = build(algorithm, **keys).prepare(reference_batch())
    assert prepared.advantages is not None
    advantages, wanted = prepared.advantages.double(), expected("verl", name) * MASK
    if algorithm in ("ppo", "reinforce_pp"):
        # There the variance has ddof 1 and an epsilon of 1e-8 under the root; here ddof is 0.
        tokens = MASK.sum()
        wanted = wanted * (tokens / (tokens - 1)).sqrt()
    torch.testing.assert_close(advantages, wanted, rtol=1e-5, atol=1e-6)


def test_returns_of_the_critic() -> None:
    prepared, _ = build("ppo", gamma=0.97, gae_lambda=0.9).prepare(reference_batch())
    assert prepared.returns is not None
    wanted = expected("verl", "gae_whitened", 1) * MASK
    torch.testing.assert_close(prepared.returns.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kl_type", ["k1", "abs", "k2", "k3"])
def test_kl_estimators(kl_type: Any) -> None:
    got = kl_estimate(
        log_probs=INPUTS["log_probs"],
        reference_log_probs=INPUTS["reference_log_probs"],
        kl_type=kl_type,
    )
    torch.testing.assert_close(got * MASK, expected("verl", f"kl_{kl_type}"), rtol=1e-7, atol=1e-8)


RECOMPUTED = {"proximal": "recomputed"}
NARROW = RECOMPUTED | {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}
DUAL = RECOMPUTED | {"clip_ratio_high": 0.28, "clip_ratio_c": 1.3}
HIGHER = RECOMPUTED | {"clip_ratio_high": 0.28}
WEIGHTED = RECOMPUTED | {"importance_sampling_clip": 1.5}
PER_SEQUENCE = {"loss_agg_func": "seq-mean-token-mean"}


@pytest.mark.parametrize(
    ("library", "name", "algorithm", "keys"),
    [
        ("verl", "clipped_token-mean", "grpo", DUAL),
        (
            "verl",
            "clipped_seq-mean-token-sum",
            "grpo",
            DUAL | {"loss_agg_func": "seq-mean-token-sum"},
        ),
        ("verl", "clipped_seq-mean-token-mean", "grpo", DUAL | PER_SEQUENCE),
        ("verl", "gspo_token", "gspo", NARROW | {"per_token": True}),
        (
            "verl",
            "cispo",
            "cispo",
            RECOMPUTED | {"clip_ratio_low": 0.3, "clip_ratio_high": 0.2},
        ),
        ("verl", "clipped_tis_token", "grpo", WEIGHTED | {"importance_sampling": "token"}),
        ("verl", "clipped_tis_sequence", "grpo", WEIGHTED | {"importance_sampling": "sequence"}),
        ("trl", "grpo", "grpo", HIGHER | PER_SEQUENCE),
        ("trl", "grpo_kl", "grpo", HIGHER | PER_SEQUENCE | {"kl_beta": 0.1}),
        ("trl", "dapo", "dapo", RECOMPUTED),
        (
            "trl",
            "dapo_token_mask",
            "dapo",
            WEIGHTED | {"importance_sampling": "token", "importance_sampling_mode": "mask"},
        ),
        ("trl", "dr_grpo", "dr_grpo", HIGHER | {"loss_agg_length": 10}),
        ("trl", "gspo", "gspo", NARROW),
        ("trl", "cispo", "cispo", RECOMPUTED | {"clip_ratio_high": 0.3}),
        ("trl", "rloo", "rloo", RECOMPUTED),
    ],
)
def test_losses_and_gradients(
    library: str, name: str, algorithm: str, keys: dict[str, Any]
) -> None:
    built = build(algorithm, **keys)
    batch = replace(reference_batch(), advantages=INPUTS["advantages"])
    log_probs = INPUTS["log_probs"].clone().requires_grad_()
    loss, _ = built.loss(Scores(log_probs, None), batch, normalizer=built.normalizer(batch))
    loss.backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(loss.detach(), expected(library, name), rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(log_probs.grad, expected(library, name, 1), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_weights(level: Any, mode: Any) -> None:
    weights, _ = importance_weights(
        log_ratio=INPUTS["old_log_probs"] - INPUTS["rollout_log_probs"],
        mask=MASK,
        level=level,
        low=0.5 if mode == "mask" else 0.0,
        high=1.5,
        mode=mode,
    )
    name = f"weights_{'masked_' if mode == 'mask' else ''}{level}"
    torch.testing.assert_close(weights * MASK, expected("verl", name), rtol=1e-7, atol=1e-8)


def test_value_loss() -> None:
    ppo = build("ppo", huber_delta=1e6)
    batch = replace(reference_batch(), returns=INPUTS["returns"])
    loss, metrics = ppo.value_loss(INPUTS["new_values"], batch, normalizer=ppo.normalizer(batch))
    torch.testing.assert_close(loss, expected("verl", "value_loss"), rtol=1e-7, atol=1e-8)
    fraction = metrics["critic/value_clip_ratio"].double()
    torch.testing.assert_close(fraction, expected("verl", "value_loss", 1), rtol=1e-6, atol=1e-8)
