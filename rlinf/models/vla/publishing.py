"""A trained policy as a directory in the format of the one that it began from.

Names, number formats and shards are those of the base; what training did not touch, and what no
computation here reads, is copied from it, as are its settings, its tokenizer and its statistics.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlinf.checkpoint.files import new_directory
from rlinf.checkpoint.weights import save_tensors
from rlinf.data.json_files import read_settings
from rlinf.errors import ConfigError
from rlinf.models.policy_weights import merged_adapters
from rlinf.models.vla.loading import NameLayout, Weights, open_weights
from rlinf.models.vla.policy import VLAPolicy
from rlinf.models.vla.statistics import ModelStatistics

_NETWORK = "network."
_WEIGHT_FILES = (".safetensors", ".bin", ".pth", ".ckpt")
_NORMALISER = "normalizer_processor.safetensors"
_PROCESSORS = (
    _NORMALISER,
    "groot_pack_inputs_v3.safetensors",
    "groot_action_unpack_unnormalize_v1.safetensors",
)
"""Endings of lerobot's files of statistics: `unnormalizer_processor` has that of the first."""
_TABLE = "norm_stats.json"
_FEATURES = {"actions": "action", "states": "observation.state"}


@dataclass(frozen=True)
class Publication:
    """What was written.

    Args:
        trained: How many tensors come from the policy, which has other values than its base.
        copied: How many from its base.
        left_out: Tensors of the policy for which the format has no place.
    """

    trained: int
    copied: int
    left_out: tuple[str, ...]


def publish(
    policy: VLAPolicy, base: Path, out: Path, statistics: ModelStatistics | None
) -> Publication:
    """Write the model of a policy to a directory, whole or not at all.

    Args:
        policy: With its adapters, if it has some; they go into the matrices.
        base: The directory that ``model.path`` named.
        out: Must not exist yet.
        statistics: Those that hold, where they are not those in ``base``; put into the files in
            which lerobot, or openpi, has them.

    Raises:
        ConfigError: The model has no published format, or the directory no place for a part of the
            network, or for other statistics.
    """
    layout: NameLayout | None = getattr(policy.network, "published_layout", None)
    if layout is None:
        raise ConfigError(
            "a model of this type is not written back; policy.safetensors holds its weights",
            key="model.type",
        )
    base, weights = base.expanduser(), open_weights(base)
    state = policy.state_dict()
    own = merged_adapters(state, state)
    network = {
        name.removeprefix(_NETWORK): tensor
        for name, tensor in own.items()
        if name.startswith(_NETWORK)
    }
    others = tuple(sorted(name for name in own if not name.startswith(_NETWORK)))
    with new_directory(out) as part:
        _copy_beside(base, part, weights)
        if statistics is not None:
            _put_statistics(part, statistics)
        trained, copied = _write(part, base, weights, layout, network)
    return Publication(trained, copied, others)


def _write(
    out: Path, base: Path, weights: Weights, layout: NameLayout, network: Mapping[str, Tensor]
) -> tuple[int, int]:
    """Write each file of weights with the tensors that the base has in it."""
    first_of = {second: first for first, second in layout.tied}
    counts = [0, 0]
    missing = set(network)
    for file in sorted(set(weights.files.values())):
        held: dict[str, Tensor] = {}
        for name in (each for each, where in weights.files.items() if where == file):
            stored = weights[name]
            ours = layout.ours(name)
            if ours is not None and ours not in network:
                ours = first_of.get(ours, ours)
            parts = () if ours is None or not layout.reads(ours) else layout.parts(ours)
            touched = False
            if parts and all(each in network for each in parts):
                whole = torch.cat([network[each].cpu() for each in parts]) if len(parts) > 1 else (
                    network[parts[0]].cpu()
                )  # fmt: skip
                whole = whole.reshape(stored.shape)
                touched = not torch.equal(whole, stored.to(whole.dtype))
                stored = whole.to(stored.dtype) if touched else stored
                missing -= {*parts}
            counts[not touched] += 1
            held[name] = stored.contiguous()
        # Tied tensors are one in memory, which the format refuses.
        seen: set[int] = set()
        for name, tensor in held.items():
            held[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
            seen.add(held[name].data_ptr())
        save_tensors(held, out / file.relative_to(base))
    if missing:
        raise ConfigError(
            f"the weight files of {base} have no place for {len(missing)} tensors of the network, "
            f"such as {min(missing)}; nearest: policy.safetensors of the run, which has them",
            key="model.path",
        )
    return counts[0], counts[1]


def _copy_beside(base: Path, out: Path, weights: Weights) -> None:
    """Copy what else is in the base: settings, tokenizer, processors, statistics."""
    held = {file.resolve() for file in weights.files.values()}
    for file in sorted(each for each in base.rglob("*") if each.is_file()):
        place = file.relative_to(base)
        hidden = any(part.startswith(".") for part in place.parts)
        other_weights = file.suffix in _WEIGHT_FILES and not file.name.endswith(
            ("processor.safetensors", *_PROCESSORS)
        )
        if file.resolve() in held or hidden or other_weights:
            continue
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, out / place)


def _put_statistics(out: Path, statistics: ModelStatistics) -> None:
    """Put statistics in place of those in the files of lerobot's processors, or of openpi;
    ConfigError where there are none."""
    files = sorted(file for each in _PROCESSORS for file in out.glob(f"*{each}"))
    tables = sorted(out.rglob(_TABLE))
    if not files and not tables:
        raise ConfigError(
            f"the run has statistics of its own, and the directory no file *_{_NORMALISER} or "
            f"{_TABLE} to put them in; nearest: policy.safetensors of the run, which has them",
            key="model.statistics",
        )
    for file in tables:
        content = read_settings(file)
        vectors = {**content.get("norm_stats", content), **statistics.to_data()}
        file.write_text(json.dumps({"norm_stats": vectors}, indent=1) + "\n")
    for file in files:
        held: dict[str, Any] = load_file(file)
        for kind, feature in _FEATURES.items():
            own = getattr(statistics, kind)
            for name, value in {} if own is None else own.given().items():
                if name != "mask" and any(each.startswith(f"{feature}.") for each in held):
                    held[f"{feature}.{name}"] = value.clone()
        save_tensors(held, file)
