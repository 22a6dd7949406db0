"""Writes models and adapters in the formats of transformers and peft."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlinf.models.file_format import file_weights

_FILE_BYTES = 4 << 30


def save_model(
    directory: Path, model: Any, weights: Iterable[tuple[str, Tensor]], *, write: bool
) -> None:
    """Write configuration and weights, in files of up to 4 GiB.

    Args:
        directory: Made where it does not exist.
        model: A transformers model.
        weights: Its whole tensors, a tied one once; read to the end on every rank.
        write: False on ranks that only take part.
    """
    pieces: list[dict[str, Tensor]] = [{}]
    size = 0
    names: list[Path] = []
    for name, tensor in weights:
        if not write:
            continue
        if pieces[-1] and size + tensor.nbytes > _FILE_BYTES:
            names.append(_write_piece(directory, len(names), file_weights(model, pieces.pop())))
            pieces.append({})
            size = 0
        pieces[-1][name] = tensor.detach().to("cpu")
        size += tensor.nbytes
    if not write:
        return
    dtypes = {tensor.dtype for tensor in pieces[-1].values() if tensor.is_floating_point()}
    names.append(_write_piece(directory, len(names), file_weights(model, pieces.pop())))
    _name_pieces(directory, names)
    _write_config(directory, model, dtypes.pop() if len(dtypes) == 1 else None)


def _write_piece(directory: Path, number: int, tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"piece-{number}.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def _name_pieces(directory: Path, pieces: list[Path]) -> None:
    """Give the files the names that transformers looks for, with an index where there are more."""
    if len(pieces) == 1:
        pieces[0].replace(directory / "model.safetensors")
        return
    from safetensors import safe_open

    places: dict[str, str] = {}
    total = 0
    for number, piece in enumerate(pieces, start=1):
        name = f"model-{number:05d}-of-{len(pieces):05d}.safetensors"
        with safe_open(piece, "pt") as file:
            places |= dict.fromkeys(file.keys(), name)
        total += piece.stat().st_size
        piece.replace(directory / name)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_config(directory: Path, model: Any, dtype: torch.dtype | None) -> None:
    """The model's configuration without what the trainer changed in it."""
    import copy

    config = copy.deepcopy(model.config)
    # FSDP gives a divided module a class of its own.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config._attn_implementation = None
    config.use_cache = True
    if dtype is not None:
        config.dtype = dtype
    config.save_pretrained(directory)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)


def save_adapter(
    directory: Path, peft_config: Any, weights: Iterable[tuple[str, Tensor]], *, write: bool
) -> None:
    """Write an adapter as peft loads it.

    Args:
        directory: Made where it does not exist.
        peft_config: Configuration of peft.
        weights: The adapter's whole tensors by the names of its file.
        write: False on ranks that only take part.
    """
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights}
    if not write:
        return
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    peft_config.save_pretrained(str(directory))
