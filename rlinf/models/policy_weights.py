"""Weights of policies beside a run: what travels and is saved, what files hold, adapters merged."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from rlinf.checkpoint.weights import check_compatible, check_finite
from rlinf.checkpoint.weights_file import ENVIRONMENT, STATISTICS, read_header
from rlinf.envs.spec import EnvSpec, refuse_other_numbers, refuse_other_order, written_spec
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models.policy import Policy

if TYPE_CHECKING:
    from rlinf.models.config import ModelConfig

BASE = "base"
"""Name of :attr:`Policy.base` in what is written."""


def travelling(policy: Policy) -> dict[str, Tensor]:
    """What is sent to those who act and written into checkpoints, by name: all parameters, or those
    that are trained where the others have a :attr:`~Policy.base`; and saved buffers."""
    named = dict(policy.named_parameters())
    buffers = {name: each for name, each in policy.state_dict().items() if name not in named}
    own = {n: p for n, p in named.items() if policy.base is None or p.requires_grad}
    return own | buffers


def load_travelling(
    policy: Policy, weights: Mapping[str, Tensor], *, base: str | None = None
) -> None:
    """Take what :func:`travelling` of an equal policy gave.

    Raises:
        CheckpointError: It is that of another one; nothing changed.
        ConfigError: It is only a part, of a policy with another ``base``, where one is given.
    """
    own = travelling(policy)
    policy.refuse_unknown_tensors(weights.keys() - own.keys())
    check_compatible(own, weights)
    if any(name not in own for name, _ in policy.named_parameters()):
        check_base(policy, base, source="the checkpoint")
    policy.load_state_dict(weights, strict=False)


def check_base(policy: Policy, base: str | None, *, source: str, key: str = "model.path") -> None:
    """Refuse, by a ConfigError of ``key``, weights of another base than the policy has."""
    if base is not None and not policy.began_from(base):
        nearest = "nearest: the model that it was trained from"
        if ", then " in base:
            nearest = (
                "a base that itself began with model.weights cannot be named again: nearest: "
                "`rlinf resume` of that run, or its whole policy, as `rlinf convert run --whole` "
                "writes it"
            )
        raise ConfigError(
            f"{source} was trained from other weights ({base}) than the model has now "
            f"({policy.base}); {nearest}",
            key=key,
        )


def merged(weight: Tensor, first: Tensor, second: Tensor, scale: float | Tensor) -> Tensor:
    """W + s · B A, computed in float32.

    Args:
        weight: [out, in].
        first: A, [rank, in].
        second: B, [out, rank].
        scale: s.
    """
    return (weight.float() + scale * (second.float() @ first.float())).to(weight.dtype)


def merged_adapters(tensors: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in which adapters ``X.lora_A`` stand for matrices ``X.weight`` of a base, with these
    matrices in place of the adapters."""
    found = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
    for name in tensors:
        layer, is_part, kind = name.rpartition(".lora_")
        if is_part and kind == "A":
            parts = (tensors[f"{layer}.lora_{each}"] for each in ("A", "B", "scale"))
            found[f"{layer}.weight"] = merged(base[f"{layer}.weight"], *parts)
    return found


def read_weights(path: Path, *, key: str = "model.path") -> dict[str, Tensor]:
    """What a run left behind in a file; a ConfigError where it holds no weights."""
    try:
        return safetensors.torch.load_file(path.expanduser())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} holds no weights: {error}", key=key) from error


def load_initial_weights(policy: Policy, path: Path) -> None:
    """Let a policy begin with the weights of a file.

    The critic begins afresh where the file holds none, as that of a policy which has imitated;
    what the file leaves out of a policy with a :attr:`~Policy.base` is as the base has it, and the
    file becomes part of the base. ConfigError, and nothing changed, where it holds other tensors
    than the policy has, or only a part of what was trained from another base.
    """
    key = "model.path" if policy.base is None else "model.weights"
    found = read_weights(path, key=key)
    with safetensors.safe_open(path.expanduser(), "pt") as file:
        base = (file.metadata() or {}).get(BASE)
    _widen(policy, found)
    own, critic = policy.state_dict(), policy.critic_state()
    if policy.base is not None and own.keys() - critic - found.keys():
        check_base(policy, base, source=str(path), key=key)
        found = merged_adapters(found, own)
        own = {name: tensor for name, tensor in own.items() if name in found} if base else own
    _require_fit(own, critic, found, path, key=key)
    check_finite(found.items(), source=str(path), key=key)
    policy.load_state_dict(found, strict=False)
    if policy.base is not None:
        with path.expanduser().open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        policy.base = f"{policy.base}, then sha256:{digest}"


def _widen(policy: Policy, found: Mapping[str, Tensor]) -> None:
    """Hold the parameters in the widest format of the tensors: a base in half precision would round
    what was trained in float32."""
    formats = {tensor.dtype for tensor in found.values() if tensor.is_floating_point()}
    for parameter in policy.parameters():
        widest = functools.reduce(torch.promote_types, formats, parameter.dtype)
        parameter.data = parameter.data.to(widest)


def refuse_other_environment(
    policy: Policy, spec: EnvSpec, path: Path, *, any_limits: bool = False
) -> None:
    """Refuse, by a ConfigError, to begin with weights that were trained where numbers mean
    something else, as their file says, or the run that left it, beside it. Of actions, statistics
    in the file say what is meant."""
    said, key = read_header(path), "model.path" if policy.base is None else "model.weights"
    trained = written_spec(path.expanduser().parent)
    if ENVIRONMENT in said:
        trained = EnvSpec.from_json(json.loads(said[ENVIRONMENT]))
    if trained is None:
        return
    if any_limits or STATISTICS in said:
        refuse_other_order(trained, spec, key=key, policy=str(path))
        return
    hint = "model.any_action_limits: true where both are in the same units"
    refuse_other_numbers(trained, spec, key=key, policy=str(path), hint=hint)


def _require_fit(
    own: Mapping[str, Tensor],
    critic: set[str],
    found: Mapping[str, Tensor],
    path: Path,
    *,
    key: str,
) -> None:
    """Refuse other tensors than a policy's; those of the ``critic`` may be missing, all of them."""
    if not critic & found.keys():
        own = {name: tensor for name, tensor in own.items() if name not in critic}
    try:
        check_compatible(own, found, source=str(path))
    except CheckpointError as error:
        raise ConfigError(str(error), key=key) from error


def require_same_model(config: ModelConfig, path: Path, *, value_dim: int, seed: int) -> None:
    """Refuse a file of weights of another model before an environment starts.

    Shapes depend on the environment as well. So it is judged where the run that left the file still
    says beside it in what it was trained, and the present environment may show no states although
    that did: what fits neither way was trained of another model.

    Raises:
        ConfigError: As that one raises it.
    """
    spec = written_spec(path.expanduser().parent)
    if spec is None:
        return
    key = next(key for key in ("weights", "path") if getattr(config, key, None) is not None)
    fresh, refused = config.model_copy(update={key: None}), list[ConfigError]()
    for shown in (spec, spec.showing(spec.observation_shapes.keys() - {"states"})):
        try:
            policy = fresh.build(shown, value_dim=value_dim, seed=seed)
        except ConfigError:
            break  # it is made for other observations
        try:
            load_initial_weights(policy, path)
        except ConfigError as error:
            refused.append(error)
        else:
            return
    if refused:
        raise refused[0]
