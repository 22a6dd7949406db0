"""The suite that every policy for actions passes, and policies that do not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import dropout

from rlinf.models.adapters import in_precision
from rlinf.models.config import REGISTRY, MLPConfig
from rlinf.models.gaussian import MLPPolicy
from rlinf.trainers.policy_conformance import check_policy
from tests.models.test_policies import CONFIGS, env_spec


class Broken(MLPPolicy):
    """Whose sample or evaluation is changed."""

    fault = ""
    unseen = 1.0  # no buffer

    def sample(self, observations, noise):
        found = super().sample(observations, noise)
        if self.fault == "log-probs":
            return replace(found, log_probs=found.log_probs + 1e-3)
        if self.fault == "statistics":
            return replace(found, actions=found.actions * self.unseen)
        if self.fault == "box":
            return replace(found, actions=found.actions + 5.0)
        if self.fault == "random":
            return replace(found, actions=torch.rand_like(found.actions))
        if self.fault == "batch":
            return replace(found, actions=found.actions * min(1.0, len(found.actions) / 4))
        return found

    def update_normalizer(self, forward_inputs):
        super().update_normalizer(forward_inputs)
        self.unseen = 0.5

    def evaluate_actions(self, forward_inputs):
        found = super().evaluate_actions(forward_inputs)
        if self.fault == "dropout" and self.training:
            return replace(found, log_probs=dropout(found.log_probs, 0.5))
        if self.fault == "raise":
            raise KeyError("features")
        return replace(found, log_probs=found.log_probs.detach()) if self.fault == "cut" else found


class BrokenConfig(MLPConfig):
    implementation = "tests.trainers.test_policy_conformance:Broken"


class HalfPolicy(MLPPolicy):
    """As weights that are published in bfloat16."""

    def __init__(self, config, env_spec, *, value_dim=1, seed=0):
        super().__init__(config, env_spec, value_dim=value_dim, seed=seed)
        in_precision(self, torch.bfloat16)


class HalfConfig(MLPConfig):
    implementation = "tests.trainers.test_policy_conformance:HalfPolicy"


def test_a_policy_in_bfloat16_is_held_to_the_bounds_in_float32():
    results = check_policy(HalfConfig(), env_spec(), ranks=False)
    assert [each for each in results if not each.passed] == []


@pytest.mark.parametrize("name", ["mlp chunks", "mlp state-dependent", "cnn"])
def test_policies_pass(name):
    results = check_policy(CONFIGS[name], env_spec(), ranks=False)
    assert [each for each in results if not each.passed] == []
    assert len(results) == 8


PICTURES = env_spec(
    observation_shapes={"states": (3,), "main_images": (64, 64, 3)},
    observation_dtypes={"states": "float32", "main_images": "uint8"},
    task_descriptions=("push the button",),
)


@pytest.mark.parametrize(
    "name",
    [
        name if name in {"openvla_oft", "pi05"} else pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "openvla", "openvla_oft", "pi0", "pi05", "smolvla", "gr00t", "wall_oss", "act",
            "diffusion", "qwen_vl",
        )
    ],
)  # fmt: skip
def test_vision_language_action_models_pass(name):
    config = REGISTRY.load(name)(
        preset="tiny", num_action_chunks=2, value_head=(8,),
        **({} if name in {"openvla", "openvla_oft", "act", "qwen_vl"} else {"denoising_steps": 2}),
    )  # fmt: skip
    results = check_policy(config, PICTURES, ranks=False)
    assert [each for each in results if not each.passed] == []
    assert {"padding", "imitation", "bfloat16"} <= {each.name for each in results}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("openvla_oft", {"head": "regression"}),
        pytest.param("pi0", {"method": "ode"}, marks=pytest.mark.slow),
    ],
)
def test_what_has_no_log_probs_is_held_by_its_actions_and_its_own_loss(name, given, monkeypatch):
    config = REGISTRY.load(name)(preset="tiny", num_action_chunks=2, **given)
    results = {each.name: each for each in check_policy(config, PICTURES, ranks=False)}
    assert [each for each in results.values() if not each.passed] == []
    assert {"replays", "gradients", "bfloat16"}.isdisjoint(results)
    assert "|Δ action|" in results["padding"].detail
    made = type(config.build(PICTURES))
    real = made.sample

    def of_batch(self, observations, noise):
        found = real(self, observations, noise)
        return replace(found, actions=found.actions * min(1.0, len(found.actions) / 4))

    monkeypatch.setattr(made, "sample", of_batch)
    results = {each.name: each for each in check_policy(config, PICTURES, ranks=False)}
    assert not results["batch_size"].passed


@pytest.mark.parametrize(
    "ranks", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "ranks"]
)
def test_a_steered_policy_passes_without_values(ranks):
    base = {"type": "pi05", "preset": "tiny", "method": "ode", "denoising_steps": 2}
    results = check_policy(REGISTRY.load("steered")(base=base, channels=(4,) * 4), PICTURES,
                           ranks=ranks)  # fmt: skip
    assert [each for each in results if not each.passed] == []
    assert len(results) == 7 + ranks


@pytest.mark.parametrize(
    ("fault", "checks"),
    [
        ("log-probs", {"replays"}),
        ("box", {"acts"}),
        ("random", {"acts", "mode", "batch_size"}),
        ("batch", {"batch_size"}),
        ("dropout", {"replays"}),
        ("statistics", {"save_and_load"}),
        ("raise", {"replays"}),
    ],
)
def test_a_fault_fails_its_check(monkeypatch, fault, checks):
    monkeypatch.setattr(Broken, "fault", fault)
    results = check_policy(BrokenConfig(policy_gain=1.0), env_spec(), ranks=False)
    failed = {each.name: each.detail for each in results if not each.passed}
    assert checks <= failed.keys()
    if fault == "raise":
        assert re.fullmatch(rf"KeyError: 'features' \({__file__} line \d+\)", failed["replays"])


def test_what_no_gradient_reaches_is_named(monkeypatch):
    monkeypatch.setattr(Broken, "fault", "cut")
    results = check_policy(BrokenConfig(), env_spec(), ranks=False)
    (gradients,) = (each.detail for each in results if each.name == "gradients")
    assert re.search(
        r"; none has log_std, actor\.layers\.0\.weight, actor\.layers\.0\.bias and \d+ more",
        gradients,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "openvla_oft", "pi05", "act", "diffusion"])
def test_two_ranks(name):
    config = CONFIGS["mlp chunks"] if name == "mlp" else REGISTRY.load(name)(preset="tiny")
    spec = env_spec() if name == "mlp" else PICTURES
    results = {each.name: each for each in check_policy(config, spec)}
    assert results["two_ranks"].passed, results["two_ranks"]
