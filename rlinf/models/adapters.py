"""Low-rank adapters of peft, made from a config section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlinf.errors import ConfigError
from rlinf.models.language_config import LoraConfig


def inject_adapters(model: Any, config: LoraConfig, *, seed: int) -> Any:
    """Put adapters into the linear layers of a model; only they are to be trained from here on.

    The first factor is Gaussian and the second zero, so that nothing changes yet, unless there is
    an adapter to continue from.

    Args:
        model: A model of transformers, changed in place; its own class and names stay.
        config: The section.
        seed: Of the first factors; the random state of the caller is left as it was.

    Returns:
        The configuration of peft, to be saved with the adapter.

    Raises:
        ConfigError: The model has no such layer.
    """
    from peft import inject_adapter_in_model

    settings = peft_settings(model, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, adapter_name="default")
    if config.path is not None:
        load_adapter(model, config.path)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return settings


def peft_settings(model: Any, config: LoraConfig) -> Any:
    """The section as peft has it.

    Raises:
        ConfigError: The model has no such layer.
    """
    import peft

    layers = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    names = {name.rpartition(".")[2] for name in layers}
    unknown = [name for name in config.target_modules or () if name not in names]
    if unknown:
        raise ConfigError(
            f"the model has no linear layer {unknown[0]}; it has: {', '.join(sorted(names))}",
            key="lora.target_modules",
        )
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha or config.rank,
        lora_dropout=0.0,
        target_modules=list(config.target_modules) if config.target_modules else "all-linear",
        init_lora_weights="gaussian",
        task_type="CAUSAL_LM",
    )


def load_adapter(model: Any, path: Path) -> None:
    """Give the adapters of a model the values of a directory that peft wrote."""
    from peft import load_peft_weights, set_peft_model_state_dict

    set_peft_model_state_dict(model, load_peft_weights(str(path), device="cpu"))
