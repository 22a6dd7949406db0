"""The transformers model that the engine ``hf`` computes with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlinf.engines import ragged_attention
from rlinf.engines.config import HFEngineConfig, local_directory
from rlinf.engines.protocol import ModelSource
from rlinf.errors import ConfigError
from rlinf.models.buffers import saved_buffers
from rlinf.scheduler.process import own_device


def serving_model(config: HFEngineConfig, source: ModelSource) -> tuple[Any, bool]:
    """The layers to compute with, and whether their parameters are those of ``source.module``.

    Raises:
        ConfigError: There is no model, or it has layers that the engine cannot compute.
    """
    if source.module is None:
        if source.path is None or source.lora is not None:
            wanted = "a module with its adapter" if source.lora else "a module or a directory"
            raise ConfigError(f"the engine `hf` needs {wanted}")
        model, shared = _load(config, source).to(own_device()), False
    else:
        module = source.module
        wanted = module.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        shared = source.shared and wanted == module.dtype
        model = module if wanted == module.dtype else _converted(module, wanted)
        if shared:
            model = _second_layers(module)
        elif not source.shared:
            model = model.to(own_device())
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        other = ", ".join(sorted(kinds - {"full_attention"}))
        raise ConfigError(
            f"the model has layers with {other}, the engine `hf` computes full_attention only; "
            "use the engine `vllm`",
            key="type",
        )
    ragged_attention.register()
    model.set_attn_implementation(ragged_attention.NAME)
    return model.eval(), shared


def _second_layers(module: nn.Module) -> Any:
    """A copy of the module tree around the same parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def _converted(module: nn.Module, dtype: torch.dtype) -> Any:
    """A copy with weights of another type.

    What is no weight keeps its type, as when the model is loaded so: rounded rotary frequencies
    would turn distant tokens by other angles.
    """
    converted = copy.deepcopy(module).to(dtype)
    saved = dict(saved_buffers(module))
    for name, buffer in module.named_buffers():
        if name not in saved:
            owner, _, own_name = name.rpartition(".")
            converted.get_submodule(owner).register_buffer(own_name, buffer.clone(), False)
    return converted


def _load(config: HFEngineConfig, source: ModelSource) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    assert source.path is not None
    path = local_directory(source.path)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=config.dtype, local_files_only=True, use_safetensors=True
    )


def tokenizer_of(path: Path | None) -> Any:
    """The tokenizer in a model directory, for stop texts."""
    if path is None:
        raise ConfigError("stop texts need a tokenizer, and none was given", key="stop")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(local_directory(path), local_files_only=True)


def end_tokens(model: Any) -> tuple[int, ...]:
    """What the model ends with, by its generation settings or else by its configuration."""
    generation = getattr(model, "generation_config", None)
    tokens = getattr(generation, "eos_token_id", None)
    if tokens is None:
        tokens = model.config.get_text_config().eos_token_id
    if tokens is None:
        return ()
    return tuple(tokens) if isinstance(tokens, list) else (int(tokens),)
