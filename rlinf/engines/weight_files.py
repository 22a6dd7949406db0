"""Names, files and values of weights: what the engines share about them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rlinf.engines.protocol import Lora, Weights
from rlinf.models.adapters import adapter_file_name, is_adapter


def assign_weights(model: nn.Module, weights: Weights, *, may_be_empty: bool) -> None:
    """Copy values into the parameters and persistent buffers of a model.

    Args:
        model: A transformers model, perhaps with LoRA layers.
        weights: Everything (a tied tensor once or under each of its names); for a model with an
            adapter every tensor of the adapter by the names of its file; or nothing.
        may_be_empty: Whether nothing is legal, as the values are already there.

    Raises:
        ValueError: A name is unknown or missing, or a shape differs; then nothing was changed.
    """
    given = dict(weights)
    if not given:
        if not may_be_empty:
            raise ValueError("no weights were given, and the engine shares none with a trainer")
        return
    targets = _targets(model)
    _check(given, targets)
    with torch.no_grad():
        for name, value in given.items():
            if targets[name].data_ptr() != value.data_ptr():
                targets[name].copy_(value)


def adopt_weights(model: nn.Module, weights: Weights) -> bool:
    """Put tensors in the place of a model's own, or copy those of another type or device.

    Takes and refuses what :func:`assign_weights` does; returns whether all were put in place.
    """
    given, targets = dict(weights), _targets(model)
    _check(given, targets)
    in_place = True
    with torch.no_grad():
        for name, value in given.items():
            target = targets[name]
            if (target.dtype, target.device) == (value.dtype, value.device):
                target.data = value
            else:
                in_place = False
                target.copy_(value)
    return in_place


def _targets(model: nn.Module) -> dict[str, Tensor]:
    """What weights are written to: everything, or the tensors of the adapter if there is one.

    Whole weights for a model with an adapter would be taken for merged ones, to which the adapter
    is added once more.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if any(map(is_adapter, state)):
        return {adapter_file_name(name): v for name, v in state.items() if is_adapter(name)}
    return state


def _check(given: dict[str, Tensor], targets: dict[str, Tensor]) -> None:
    unknown = sorted(given.keys() - targets.keys())
    if unknown:
        raise ValueError(f"{len(unknown)} weights are unknown to the model, such as {unknown[0]}")
    written = {targets[name].data_ptr() for name in given}
    missing = sorted(name for name, value in targets.items() if value.data_ptr() not in written)
    if missing:
        raise ValueError(f"{len(missing)} weights of the model are missing, such as {missing[0]}")
    for name, value in given.items():
        if value.shape != targets[name].shape:
            raise ValueError(f"{name} is {list(value.shape)}, not {list(targets[name].shape)}")


def given_names(path: Path) -> set[str] | None:
    """Names of the weights in a model directory; None if it holds none."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if not (path / "model.safetensors").is_file():
        return None
    with safe_open(path / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def end_tokens_of(path: Path) -> tuple[int, ...]:
    """Tokens that a model directory names as the end, those of its generation settings first."""
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            content: dict[str, Any] = json.loads((path / name).read_text(encoding="utf-8"))
            found = content.get("eos_token_id", content.get("text_config", {}).get("eos_token_id"))
            if found is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


def _text_config(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return {**content, **content.get("text_config", {})}


def head_size_of(path: Path) -> int:
    """Numbers of one attention head of the model in a directory."""
    text = _text_config(path)
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


def has_latent_attention(path: Path) -> bool:
    """Whether keys and values are made from a common smaller vector (DeepSeek-V2, 2024)."""
    return _text_config(path).get("kv_lora_rank") is not None


def sizes_of(path: Path) -> tuple[int, int | None]:
    """Vocabulary and context of the model in a directory."""
    text = _text_config(path)
    context = text.get("max_position_embeddings")
    return int(text["vocab_size"]), None if context is None else int(context)


class AdapterFile:
    """An adapter as the files that servers load, in a folder that ends with this object."""

    def __init__(self, lora: Lora) -> None:
        self.lora = lora
        self._folder = tempfile.TemporaryDirectory(prefix="rlinf-adapter-")

    def write(self, tensors: Mapping[str, Tensor]) -> Path:
        """Write the tensors, at least one and all of an adapter; returns the folder."""
        strange = [name for name in tensors if not is_adapter(name)]
        if strange or not tensors:
            raise ValueError(
                f"{strange[0]} belongs to no adapter" if strange else "the adapter has no tensors"
            )
        folder = Path(self._folder.name)
        values = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        save_file(values, folder / "adapter_model.safetensors", {"format": "pt"})
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({name.split(".lora_")[0].split(".")[-1] for name in tensors}),
        }
        (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return folder
