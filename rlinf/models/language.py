"""Language models of transformers: created, loaded with every weight accounted for, written.

With LoRA they are those of peft around them. Some read pictures, too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from logging import LogRecord
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlinf.checkpoint.weights import check_finite
from rlinf.data import tokenizer as tokenizers
from rlinf.data.pictures import PictureReader, reads_pictures
from rlinf.errors import ConfigError
from rlinf.models.adapters import (
    load_adapter,
    peft_settings,
    plain_name,
)
from rlinf.models.language_config import ArchitectureConfig, LanguageModelConfig, LoraConfig
from rlinf.models.policy_weights import merged
from rlinf.models.vision_language import created, vision_of

_SHOWN = 6  # names listed per kind of difference

BUILDING = threading.RLock()
"""One thread of this process builds a model at a time. transformers and the random state of torch
are global: workers that are threads of one process would otherwise lose tied weights, or draw each
other's random numbers."""


def build_language_model(config: LanguageModelConfig, *, seed: int) -> tuple[Any, Any]:
    """The model of a config section and its tokenizer; see :func:`build_network`."""
    tokenizer = load_tokenizer(config)
    return build_network(config, tokenizer=tokenizer, seed=seed), tokenizer


def load_tokenizer(config: LanguageModelConfig) -> Any:
    """The tokenizer in the directory of a model; ConfigError where none can be read."""
    config.check()
    try:
        with BUILDING:
            return tokenizers.load_tokenizer(_directory(config))
    except ConfigError as error:
        raise ConfigError(error.reason, key="path") from error


def picture_reader(config: LanguageModelConfig, tokenizer: Any) -> PictureReader:
    """What makes pixel values of pictures, by the files of the model; ConfigError where it reads
    none, or they do not say how."""
    return PictureReader(_directory(config), tokenizer)


def build_network(config: LanguageModelConfig, *, tokenizer: Any = None, seed: int = 0) -> Any:
    """The model of a config section, on the CPU, in training mode.

    Weights that are created, all of them or those of the adapters, depend on ``seed`` alone; the
    random state of the caller is left as it was. The tokenizer, which may be that of another model,
    is loaded from the section's directory where it is None.

    Raises:
        ConfigError: A weight is missing, left over or of another shape, a file is missing, or the
            tokenizer does not fit.
        MissingPackageError: transformers or peft is not installed.
    """
    tokenizer = load_tokenizer(config) if tokenizer is None else tokenizer
    with BUILDING:
        if config.architecture is None:
            model = _loaded(config)
        else:
            model = _created(config.architecture, tokenizer, seed).to(getattr(torch, config.dtype))
        check_tokenizer(model, tokenizer)
        if config.freeze_vision:
            _freeze_vision(model)
        return _with_adapters(model, config.lora, seed).train()


def _freeze_vision(model: Any) -> None:
    vision = vision_of(model)
    if vision is None:
        raise ConfigError("the model reads text only; nearest: false", key="freeze_vision")
    vision.requires_grad_(False)


def architecture_class(path: Path) -> Any:
    """The class of transformers that loads the model in a directory: one that reads pictures is
    not among those of causal language models."""
    return model_class(reads_pictures(path))


def model_class(pictures: bool) -> Any:
    """The same of a model of which it is known whether it reads pictures."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if pictures else AutoModelForCausalLM


def _loaded(config: LanguageModelConfig) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    without_bars()
    try:
        model, report = architecture_class(_directory(config)).from_pretrained(
            _directory(config),
            dtype=getattr(torch, config.dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with the others
        )
    except (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        why = " ".join(str(error).split())[:300]
        what = "the model"
        if isinstance(error, SafetensorError):
            what = f"{_damaged_file(_directory(config))}, which is cut or damaged,"
        raise ConfigError(f"{what} cannot be read: {why}", key="path") from error
    _check_weights(_directory(config), report)
    _check_tied(_directory(config), model)
    check_finite(model.named_parameters(), source=f"the model in {config.path}", key="path")
    return model


def _damaged_file(directory: Path) -> str:
    """The first file of weights that does not open."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(directory.glob("*.safetensors")):
        try:
            safe_open(file, "pt")
        except SafetensorError:
            return file.name
    return "a file of weights"


def _created(config: ArchitectureConfig, tokenizer: Any, seed: int) -> Any:
    """A model in float32 whose vocabulary and end token are those of the tokenizer."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no end token: completions would not end", key="path")
    from transformers import Qwen2Config, Qwen3Config

    values = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.intermediate_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    architecture: Any
    if config.vision is not None:
        architecture = created(config, values, tokenizer.get_vocab())
    elif config.type == "qwen2":
        architecture = Qwen2Config(**values)
    else:
        architecture = Qwen3Config(**values, head_dim=config.hidden_size // config.heads)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config.vision is not None).from_config(architecture, dtype=torch.float32)


def save_language_model(model: Any, directory: Path, *, tokenizer: Any = None) -> None:
    """Write a model that other programs can load, and a tokenizer beside it.

    Adapters are merged into the weights that are written; the model stays as it is.
    """
    weights = dict(full_weights(model))
    without_bars()
    _without_peft(model).save_pretrained(directory, state_dict=weights, safe_serialization=True)
    mode = (directory / "config.json").stat().st_mode
    for file in directory.glob("*.safetensors"):
        file.chmod(mode)  # safetensors makes its files for the user alone
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def without_bars() -> None:
    """Let transformers show no progress bars, which would break the display of a run, and tell of
    no weights that do not fit, or are not tied, which an error names."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.get_logger("transformers.modeling_utils").addFilter(_is_not_refused)


def _is_not_refused(record: LogRecord) -> bool:
    told = record.getMessage()
    return "LOAD REPORT" not in told and "specifies to tie" not in told


def full_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """All weights by the names of the model without adapters, which are merged in.

    What an engine takes that knows nothing of adapters. Merged values are new tensors, computed in
    float32; the others are the model's own. A tied tensor comes once.
    """
    base = _without_peft(model)
    seen: set[int] = set()
    for name, value in base.state_dict().items():
        plain = plain_name(name)
        if plain is None or value.data_ptr() in seen:
            continue
        seen.add(value.data_ptr())
        layer_name, adapted, _ = name.partition(".base_layer.weight")
        yield plain, _merged(base.get_submodule(layer_name), value) if adapted else value


@torch.no_grad()
def _merged(layer: Any, weight: Tensor) -> Tensor:
    first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return merged(weight, first, second, layer.scaling["default"])


def _without_peft(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def file_weights(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names of a ``state_dict`` as they are in files.

    transformers keeps some otherwise: the experts of a layer, each with matrices of its own in the
    files, are one tensor while it computes. Programs that read files, and engines that are given
    weights as if from files, want the latter. Only class and configuration of the model are looked
    at, and weights that are the same there share memory.
    """
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return converted


def without_weights(path: Path) -> Any:
    """The model in a directory, its weights without memory."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        return architecture_class(path).from_config(config, trust_remote_code=False)


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong to the model's files, by name; a tied one once.

    Such as the corrections by which routers of DeepSeek-V3 balance their experts; rotary
    frequencies are no part of the files.
    """
    saved = model.state_dict(keep_vars=True).keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def padding_token(tokenizer: Any) -> int:
    """The token that fills up rows of prompts; attention and loss never look at it.

    A tokenizer without one of its own, as many are published, has its end token here, or 0.
    """
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token) for token in tokens if token is not None)


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Refuse, by a ConfigError, a tokenizer that gives tokens which the model does not have."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens and the model's embedding {rows}: they are "
            "not of the same model",
            key="path",
        )
    found: dict[str, Any] = {
        "the tokenizer": tokenizer.eos_token_id,
        "config.json": model.config.get_text_config().eos_token_id,
        "generation_config.json": getattr(model.generation_config, "eos_token_id", None),
    }
    for source, given in found.items():
        tokens: Sequence[int] = given if isinstance(given, list) else [given]
        for token in tokens:
            if token is not None and not 0 <= token < rows:
                raise ConfigError(
                    f"the end token {token} of {source} is not among the {rows} of the model",
                    key="path",
                )


def _with_adapters(model: Any, lora: LoraConfig | None, seed: int) -> Any:
    if lora is None:
        return model
    import peft

    settings = peft_settings(model, lora)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(model, settings)
    if lora.path is not None:
        load_adapter(adapted, lora)
    return adapted


def _check_weights(path: Path, report: Any) -> None:
    """Refuse what transformers only warns of."""
    lines = []
    titles = {
        "missing_keys": "missing in the files, so that they would be random",
        "unexpected_keys": "unknown to the model",
        "mismatched_keys": "of another shape than in config.json",
    }
    for kind, title in titles.items():
        keys = sorted(str(key if isinstance(key, str) else key[0]) for key in report[kind])
        if keys:
            more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
            lines.append(f"{title}: {', '.join(keys[:_SHOWN])}{more}")
    if lines:
        raise ConfigError(f"the weights in {path} do not fit; {'; '.join(lines)}", key="path")


def _check_tied(path: Path, model: Any) -> None:
    """Refuse two tensors where config.json says that input and output are one."""
    if not getattr(model.config, "tie_word_embeddings", False) or not model._tied_weights_keys:
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        return
    names = {id(value): name for name, value in model.named_parameters()}
    first, second = (names[id(each.weight)] for each in (embedding, head))
    raise ConfigError(
        f"config.json in {path} says tie_word_embeddings: true, that {second} is {first}, and the "
        "files hold two different ones; nearest: tie_word_embeddings: false in config.json, or "
        f"files without {second}",
        key="path",
    )


def _directory(config: LanguageModelConfig) -> Path:
    """Absolute, so that nothing takes it for a name on a hub."""
    if config.path is None:
        raise ConfigError("a directory with a tokenizer is needed", key="path")
    return config.path.expanduser().resolve()
