"""Trained weights for those who act, and in the formats of transformers and peft."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rlinf.checkpoint.weights import save_tensors
from rlinf.models.adapters import (
    adapted_layers,
    adapter_file_name,
    is_adapter,
    plain_name,
    without_adapters,
)
from rlinf.models.language import file_weights, saved_buffers
from rlinf.models.policy import Policy
from rlinf.models.policy_weights import merged, travelling
from rlinf.trainers.scoring import ScoringModel
from rlinf.trainers.trained import TrainedModule

Content = Literal["merged", "adapter"]
"""Weights in which an adapter is contained, or the adapter alone."""

_FILE_BYTES = 4 << 30


def weights_of(held: TrainedModule, content: Content) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of a module; see :meth:`~rlinf.trainers.trainer.Trainer.weights`."""
    held.keep_gathered()
    module = held.module
    if not isinstance(module, ScoringModel):
        buffers = dict(saved_buffers(module))  # first, as FSDP forgets then what was gathered
        named = dict(module.named_parameters())
        if isinstance(module, Policy):
            named = {name: each for name, each in named.items() if name in travelling(module)}
        whole = {name: _whole(held, parameter) for name, parameter in named.items()}
        yield from without_adapters(whole | buffers).items()
        return
    model = module.model
    adapted = any(map(is_adapter, held.named))
    named = model.named_parameters()
    if content == "merged":
        plain = ((name, _whole(held, parameter)) for name, parameter in named)
        yield from chain(_merged(held, model) if adapted else plain, saved_buffers(model))
    elif not adapted:
        raise ValueError("there is no adapter; write a section lora")
    else:
        for name, parameter in named:
            if is_adapter(name):
                yield adapter_file_name(name), _whole(held, parameter)


def _whole(held: TrainedModule, parameter: Tensor) -> Tensor:
    return held.whole(parameter, None if parameter.dtype == held.dtype else held.dtype)


def _merged(held: TrainedModule, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    layers = adapted_layers(model)
    for name, parameter in model.named_parameters():
        plain = plain_name(name)
        if plain is None:
            continue
        whole = _whole(held, parameter)
        layer = name.removesuffix(".base_layer.weight")
        if layer in layers and layer != name:
            first, second = (
                _whole(held, next(iter(getattr(layers[layer], key).parameters())))
                for key in ("lora_A", "lora_B")
            )
            whole = merged(whole, first, second, layers[layer].scaling["default"])
        yield plain, whole


def save_model(
    directory: Path, model: Any, weights: Iterable[tuple[str, Tensor]], *, write: bool
) -> None:
    """Write configuration and weights of a transformers model, in files of up to 4 GiB.

    Args:
        directory: Made where it does not exist.
        model: The model.
        weights: Its whole tensors, a tied one once; read to the end on every rank.
        write: False on ranks that only take part.
    """
    piece: dict[str, Tensor] = {}
    pieces: list[Path] = []

    def write_piece() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        pieces.append(directory / f"piece-{len(pieces)}.safetensors")
        tensors = {name: tensor.contiguous() for name, tensor in file_weights(model, piece).items()}
        save_tensors(tensors, pieces[-1])

    size = 0
    for name, tensor in weights:
        if not write:
            continue
        if piece and size + tensor.nbytes > _FILE_BYTES:
            write_piece()
            piece.clear()
            size = 0
        piece[name] = tensor.detach().to("cpu")
        size += tensor.nbytes
    if not write:
        return
    dtypes = {tensor.dtype for tensor in piece.values() if tensor.is_floating_point()}
    write_piece()
    _name_pieces(directory, pieces)
    _write_config(directory, model, dtypes.pop() if len(dtypes) == 1 else None)


def _name_pieces(directory: Path, pieces: list[Path]) -> None:
    """Give the files the names that transformers looks for, with an index where there are more."""
    index_file, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    index_file.unlink(missing_ok=True)  # of an earlier model, some of whose files are replaced
    if len(pieces) == 1:
        pieces[0].replace(single)
        return
    single.unlink(missing_ok=True)
    places: dict[str, str] = {}
    total = 0
    for number, piece in enumerate(pieces, start=1):
        name = f"model-{number:05d}-of-{len(pieces):05d}.safetensors"
        with safe_open(piece, "pt") as file:
            places |= dict.fromkeys(file.keys(), name)
        total += piece.stat().st_size
        piece.replace(directory / name)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    index_file.write_text(json.dumps(index, indent=2) + "\n")


def _write_config(directory: Path, model: Any, dtype: torch.dtype | None) -> None:
    """The model's configuration without what the trainer changed in it."""
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
    """Write an adapter as peft loads it, from its whole tensors by the names of its file; with
    arguments as :func:`save_model`."""
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights}
    if not write:
        return
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, directory / "adapter_model.safetensors")
    peft_config.save_pretrained(str(directory))
