"""A key that has no effect beside the others is refused, and by which it would have one is said."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest
from pydantic import ValidationError

from rlinf.cli.tasks import read_config
from rlinf.config.base import StrictModel
from rlinf.errors import ConfigError


class Steps(StrictModel):
    only_with: ClassVar = {"noise": "method: sde | cps", "low": "clip"}
    method: Literal["ode", "sde", "cps"] = "ode"
    noise: float = 0.5
    clip: float = 0.0
    low: float | None = None


class OwnSteps(Steps):
    only_with: ClassVar = {"low": "method: sde"}


@pytest.mark.parametrize("given", [{}, {"noise": 0.5}, {"method": "cps", "noise": 0.1},
                                   {"clip": 0.1, "low": 0.2}])  # fmt: skip
def test_a_key_beside_what_it_needs_is_accepted(given: dict[str, Any]) -> None:
    Steps(**given)


@pytest.mark.parametrize(
    ("section", "given", "said"),
    [
        (Steps, {"noise": 0.1}, "without method: sde or cps; write .*, or leave it at 0.5"),
        (Steps, {"low": 0.1}, "without clip; write clip, or leave it at null"),
        (OwnSteps, {"noise": 0.1}, "without method: sde or cps"),
        (OwnSteps, {"clip": 0.1, "low": 0.2}, "without method: sde"),
    ],
)
def test_a_key_without_it_is_refused(section: type[Steps], given: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=f"has no effect {said}"):
        section(**given)


IDLE = [
    ("vla/drawer_close_pi05_nft", "model.value_head=[32]"),
    ("vla/drawer_close_pi05_nft", "model.detach_values=true"),
    ("vla/drawer_close_pi05_nft", "actor.optim.value_lr=1e-3"),
    ("vla/drawer_close_pi05_dsrl", "model.base.value_head=[32]"),
    ("vla/drawer_close_pi05_dsrl", "actor.optim.value_lr=1e-3"),
    ("vla/drawer_close_pi05_sft", "model.noise_level=0.3"),
    ("vla/drawer_close_pi05_sft", "model.random_steps=all"),
    ("vla/drawer_close_diffusion_sft", "model.min_std=0.3"),
    ("sft/window_open_pictures", "model.shared_encoder=false"),
    ("sft/window_open_pictures", "model.critic_reads=states"),
    ("embodied/drawer_close_sac", "actor.optim.value_lr=1e-3"),
    ("quickstart", "actor.offload.optimizer=false"),
    ("quickstart", "cluster.residency.actor=resident actor.offload.optimizer=false"),
    ("quickstart", "actor.precision.reduce=bfloat16"),
    ("quickstart", "actor.reshard=after_update"),
    ("quickstart", "actor.lr_sched.type=constant actor.lr_sched.final_fraction=0.1"),
    ("quickstart", "weight_sync.type=auto weight_sync.retry_after=3"),
    ("quickstart", "cluster.address=auto"),
    ("quickstart", "cluster.tracer.enable=false cluster.tracer.output_file=mine.jsonl"),
    ("quickstart", "env.train.options.image_size=64"),
    ("quickstart", "logger.backends=[jsonl] logger.project=mine"),
    ("sft/window_open_pictures", "weight_sync.type=reference"),
    ("quickstart", "model.normalize_observations=false model.observation_clip=5.0"),
    ("sft/window_open_pictures", "env.train.reward_scale=0.1"),
    ("sft/window_open_pictures", "env.train.step_penalty=1.0"),
    ("sft/window_open_pictures", "validation.min_improvement=0.1"),
    ("vla/drawer_close_pi05_sft", "model.statistics_key=mine"),
    ("vla/drawer_close_pi05_sft", "model.tokenizer=mine"),
    ("reasoning/arithmetic_grpo", "validation.sampling.greedy=true validation.sampling.top_p=0.9"),
    ("reasoning/arithmetic_grpo", "rollout.engine.block_size=8"),
    ("reasoning/arithmetic_grpo", "actor.offload.optimizer=false"),
    ("sft/arithmetic", "actor.offload.weights=false"),
    ("reasoning/arithmetic_grpo", "data.shuffle=false data.seed=3"),
    ("reasoning/math_1.5b_grpo", "validation.val_check_interval=4"),
    ("evaluation/aime24", "benchmark.seed=3"),
]
"""Ready recipes, and overrides of which the last means nothing there."""


@pytest.mark.parametrize(("recipe", "overrides"), IDLE)
def test_a_key_that_means_nothing_in_a_recipe_is_refused(recipe: str, overrides: str) -> None:
    *beside, own = overrides.split()
    read_config(recipe, beside)
    with pytest.raises(ConfigError, match=rf"{own.partition('=')[0]} = .*has no effect"):
        read_config(recipe, [*beside, own])
