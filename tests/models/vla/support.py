"""What tests of several vision-language-action models share."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError
from rlinf.models.config import REGISTRY
from rlinf.models.policy import draw_noise
from tests.models.vla.test_pi0_policy import CHUNK, ROWS, SPEC, STEPS, seen


def built(kind: str, spec: EnvSpec = SPEC, **options: Any) -> Any:
    """A policy with a value, from a directory (``path``) or else of random weights."""
    small = {"preset": "tiny", "num_action_chunks": CHUNK, "denoising_steps": STEPS}
    config = REGISTRY.load(kind)(**(options if "path" in options else small | options))
    config.check()
    return config.build(spec, value_dim=1, seed=0)


def refuses_a_long_instruction_first(
    kind: str, spec: EnvSpec, directory: Path, copy: Path, **options: Any
) -> None:
    """One of whose weights one is missing is told of its instruction."""
    shutil.copytree(directory, copy)
    weights = load_file(copy / "model.safetensors")
    del weights[max(weights)]
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(ConfigError, match="the model is given at most 2; legal with it") as caught:
        built(kind, spec, path=copy, max_prompt_tokens=2, **options)
    assert caught.value.key == "model.max_prompt_tokens"
    with pytest.raises(ConfigError) as caught:
        built(kind, spec, path=copy, **options)
    assert caught.value.key == "model.path"


def imitated(policy: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Errors of recorded actions, these in the units of the model, and the noise they had."""
    noise = draw_noise(policy.imitation_noise, (ROWS,), torch.Generator().manual_seed(1))
    low, high = torch.tensor(SPEC.action_low), torch.tensor(SPEC.action_high)
    raw = low + 0.3 * torch.rand(ROWS, CHUNK, 3)
    errors = policy.imitation_errors(seen() | {"raw_actions": raw} | noise)
    return errors, 2 * (raw - low) / (high - low) - 1, noise


def reaches(policy: Any, errors: Tensor, parts: Iterable[str]) -> None:
    """The gradient of errors comes to some weight of each part of the network."""
    policy.zero_grad()
    errors.mean().backward()
    reached = {name for name, each in policy.named_parameters() if each.grad is not None}
    for part in parts:
        assert any(name.startswith(f"network.{part}") for name in reached), part
