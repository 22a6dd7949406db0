from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from rlinf.algorithms.base_config import REGISTRY
from rlinf.algorithms.protocol import Algorithm
from rlinf.errors import ConfigError
from tests.algorithms.batches import EVERY_ALGORITHM, build


@pytest.mark.parametrize("name", EVERY_ALGORITHM)
def test_a_section_survives_being_written_and_read(name: str) -> None:
    kind, keys = EVERY_ALGORITHM[name]
    algorithm = build(kind, **keys)
    assert isinstance(algorithm, Algorithm)
    section = algorithm.config.model_dump()
    assert REGISTRY.load(kind).model_validate(section).of_family("tokens") == algorithm.config
    assert next(iter(section)) == "type"


def test_every_registered_algorithm_is_tested() -> None:
    for_tokens = {name for name in REGISTRY.names() if "tokens" in REGISTRY.load(name).families}
    assert {kind for kind, _ in EVERY_ALGORITHM.values()} == for_tokens


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown algorithm `drgrpo`.*`dr_grpo`"):
        REGISTRY.load("drgrpo")


def test_what_each_needs() -> None:
    def needs(name: str, **keys: Any) -> tuple[bool, bool, bool, bool]:
        config = build(name, **keys).config
        return (
            config.needs_values,
            config.needs_groups,
            config.needs_reference,
            config.needs_proximal,
        )

    assert needs("grpo") == (False, True, False, False)
    assert needs("grpo", kl_beta=0.1) == (False, True, True, False)
    assert needs("grpo", proximal="recomputed") == (False, True, False, True)
    assert needs("ppo", kl_reward_beta=0.1) == (True, False, True, False)
    assert needs("reinforce_pp") == (False, False, False, False)
    assert needs("reinforce_pp", group_baseline=True) == (False, True, False, False)
    assert needs("decoupled_ppo") == (False, True, False, True)
    assert needs("decoupled_ppo", advantage="gae") == (True, False, False, True)
    assert needs("decoupled_ppo", proximal="interpolated") == (False, True, False, False)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("dr_grpo", {}, "loss_agg_length|divides by a constant length"),
        ("grpo", {"loss_agg_length": 8}, "has no effect without loss_agg_func: seq-mean"),
        ("grpo", {"importance_sampling": "token"}, "write proximal: recomputed"),
        ("grpo", {"importance_sampling_clip": 1.0}, "has no effect without importance_sampling"),
        (
            "decoupled_ppo",
            {"importance_sampling_min": 6.0},
            "lies above importance_sampling_clip; nearest: 5.0",
        ),
        ("decoupled_ppo", {"importance_sampling": None}, "or type: ppo"),
        ("decoupled_ppo", {"gamma": 0.9}, "has no effect without advantage: gae"),
        ("dapo", {"safe_length": 10}, "needs both lengths"),
        ("dapo", {"safe_length": 10, "max_length": 10}, "nearest: 9"),
        ("dapo", {"len_reward_penalty": 0.1}, "has no effect without safe_length"),
        ("grpo", {"clip_ratio_c": 1.1}, "nearest: 1.2"),
        ("cispo", {"clip_ratio_c": 3.0}, "clip_ratio_c"),
        ("rloo", {"loss_agg_func": "token-mean"}, "seq-mean-token-sum"),
        ("ppo", {"clip_ratio": 0.2}, "clip_ratio"),
        ("grpo", {"max_resample": -1}, "max_resample"),
    ],
)
def test_illegal_combinations_are_refused(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build(name, **keys)


@pytest.mark.parametrize(
    ("name", "keys", "key", "message"),
    [
        ("grpo", {"dynamic_sampling": True, "max_resample": 0}, "max_resample", "nearest: 1, or"),
        ("grpo", {"clip_log_ratio_max": 0.05}, "clip_log_ratio_max", "nearest: 0.1824, or null"),
        ("dapo", {"clip_log_ratio_max": 0.2}, "clip_log_ratio_max", "nearest: 0.2469, or null"),
        ("ppo", {"clip_log_ratio_min": -0.1}, "clip_log_ratio_min", "nearest: -0.2232, or null"),
        ("ppo", {"critic_warmup_steps": 2}, "critic_warmup_steps", "none of the 2 .*nearest: 1"),
    ],
)
def test_what_stands_against_a_training_alone(
    name: str, keys: dict[str, Any], key: str, message: str
) -> None:
    (problem,) = build(name, **keys).config.problems_of_training(steps=2)
    assert (problem.context or {})["key"] == f"algorithm.{key}"
    assert re.search(message, problem.message())
    assert not list(build(name).config.problems_of_training(steps=2))


def test_configs_import_no_torch() -> None:
    code = (
        "import sys; from rlinf.algorithms.base_config import REGISTRY; "
        "[REGISTRY.load(name) for name in REGISTRY.names()]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
