"""Configuration of causal language models; imports neither torch nor transformers."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.data.json_files import read_settings
from rlinf.errors import ConfigError, MissingPackageError, sought


class AdapterConfig(StrictModel):
    """Low-rank updates of linear layers (Hu et al. 2022), whose own matrices stay as they are."""

    rank: int = Field(default=32, ge=1)
    """Rank of the update of each adapted layer."""
    alpha: float | None = Field(default=None, gt=0)
    """The update is scaled by alpha / rank; null: alpha = rank."""
    target_modules: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        default=None, min_length=1
    )
    """Parts of the names of the layers to be adapted; null: every linear layer but those of the
    values."""

    @property
    def scale(self) -> float:
        """Factor of the update."""
        return (self.alpha or self.rank) / self.rank


class LoraConfig(AdapterConfig):
    """Low-rank adapters of a language model: only they are trained."""

    target_modules: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        default=None, min_length=1
    )
    """Last parts of the names of the layers to be adapted; null: every linear layer but the output
    layer, in a mixture of experts those of attention."""
    vision: bool = False
    """Adapt the layers that read pictures, too, in a model that has some."""
    path: Path | None = None
    """Directory of an adapter to continue from, as peft saves it; null: a fresh one."""

    def check(self) -> None:
        """Refuse where peft is not installed, or the adapter is not there or another one."""
        if find_spec("peft") is None:
            raise MissingPackageError("peft", "language", "section lora")
        if self.path is None:
            return
        directory = self.path.expanduser()
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            if not (directory / name).is_file():
                raise ConfigError(f"{self.path} holds no {name}", key="path")
        self._check_settings(directory / "adapter_config.json")

    def _check_settings(self, file: Path) -> None:
        """Compare with what peft wrote of the adapter: another scale would change its updates."""
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            rank, alpha = int(found["r"]), float(found["lora_alpha"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} are no settings of a LoRA adapter", key="path") from error
        for name in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern"):
            if found.get(name):
                raise ConfigError(f"{file} has {name}, which a section lora has not", key="path")
        if (rank, alpha) != (self.rank, self.alpha or self.rank):
            raise ConfigError(
                f"the adapter in {self.path} has rank {rank} and alpha {alpha:g}, the section rank "
                f"{self.rank} and alpha {self.alpha or self.rank:g}; legal with it: rank {rank}, "
                f"alpha {alpha:g}",
                key="path",
            )


class VisionConfig(StrictModel):
    """The part of a created model that reads pictures: a token is a square of 2 × 2 patches."""

    hidden_size: int = Field(default=64, ge=8)
    """Width of its residual stream."""
    layers: int = Field(default=2, ge=1)
    """Number of its blocks."""
    heads: int = Field(default=2, ge=1)
    """Attention heads of each."""
    intermediate_size: int = Field(default=128, ge=1)
    """Width of its feed-forward layer."""
    patch_size: int = Field(default=14, ge=1)
    """Pixels of the side of a patch."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.hidden_size % (4 * self.heads):
            step = 4 * self.heads
            nearest = max(step, round(self.hidden_size / step) * step)
            raise illegal(
                "hidden_size",
                f"{self.hidden_size} is no multiple of 4 for each of the {self.heads} heads",
                hint=f"nearest: {nearest}",
            )
        return self


class ArchitectureConfig(StrictModel):
    """A transformer to be created with random weights. Its vocabulary is that of the tokenizer."""

    type: Literal["qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl"] = "qwen2"
    """Family of the architecture; the last two also read pictures."""
    vision: VisionConfig | None = None
    """The part that reads pictures, of a family that has one."""
    hidden_size: int = Field(default=192, ge=1)
    """Width of the residual stream."""
    layers: int = Field(default=4, ge=1)
    """Number of blocks."""
    heads: int = Field(default=4, ge=1)
    """Attention heads per block."""
    kv_heads: int = Field(default=2, ge=1)
    """Heads of keys and values, each shared by heads / kv_heads queries."""
    intermediate_size: int = Field(default=512, ge=1)
    """Width of the feed-forward layer."""
    tie_word_embeddings: bool = True
    """Let the output layer be the embedding."""
    max_position_embeddings: int = Field(default=1024, ge=1)
    """Longest prompt plus completion."""

    @model_validator(mode="after")
    def _check_vision(self) -> Self:
        if self.type.endswith("_vl") and self.vision is None:
            raise illegal("vision", f"a model of the family {self.type} has one", hint="write {}")
        if self.vision is not None and not self.type.endswith("_vl"):
            why = f"a model of the family {self.type} reads text only"
            raise illegal("vision", why, hint="nearest: type: qwen2_5_vl")
        if self.vision is not None and self.hidden_size // self.heads < 8:
            why = "positions of pictures have three parts, for which each head needs 8 numbers"
            raise illegal("hidden_size", why, hint=f"nearest: {8 * self.heads}")
        return self

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.hidden_size % (2 * self.heads):
            step = 2 * self.heads
            nearest = max(step, round(self.hidden_size / step) * step)
            raise illegal(
                "hidden_size",
                f"{self.hidden_size} is no even multiple of the {self.heads} heads",
                hint=f"nearest: {nearest}",
            )
        if self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            nearest = min(divisors, key=lambda n: abs(n - self.kv_heads))
            raise illegal(
                "kv_heads",
                f"{self.kv_heads} does not divide the {self.heads} heads",
                hint=f"nearest: {nearest}",
            )
        return self


_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
          "num_hidden_layers", "intermediate_size")  # fmt: skip
"""In `config.json`; of each there is at least a row of the width `hidden_size`."""
_SMALL = 2**24
"""Numbers of a model that is built at once, whatever its weights are."""


class LanguageModelConfig(StrictModel):
    """A causal language model from a local directory, or from scratch."""

    path: Path | None = None
    """Directory in the format of transformers: tokenizer, config.json and safetensors; with
    `architecture` a tokenizer alone, and null trains one on the texts of a generated task. Nothing
    is ever downloaded."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights."""
    lora: LoraConfig | None = None
    """Train adapters only; null: all weights."""
    freeze_vision: bool = False
    """Leave the part that reads pictures as it is, in a model that has one."""
    architecture: ArchitectureConfig | None = None
    """Create the model with random weights; null: load it."""

    @property
    def kv_heads(self) -> int | None:
        """Heads of keys and values; None where the files do not say it by the usual name."""
        if self.architecture is not None:
            return self.architecture.kv_heads
        heads = self._settings().get("num_key_value_heads")
        return heads if type(heads) is int else None

    def check(self) -> None:
        """Look whether the packages and the files are there."""
        if find_spec("transformers") is None:
            raise MissingPackageError("transformers", "language", "a language model")
        super().check()
        self._check_files()
        if self.freeze_vision and not self._reads_pictures():
            raise ConfigError("the model reads text only; nearest: false", key="freeze_vision")

    def _reads_pictures(self) -> bool:
        if self.architecture is not None:
            return self.architecture.vision is not None
        assert self.path is not None
        return "vision_config" in read_settings(self.path.expanduser() / "config.json", key="path")

    def _check_files(self) -> None:
        if self.path is None:
            return
        if not self.path.expanduser().is_dir():
            raise ConfigError(
                f"there is no directory {sought(self.path)}{self._nearest()}", key="path"
            )
        self._check_file("tokenizer_config.json", "tokenizer.json", what="tokenizer")
        if self.architecture is None:
            self._check_file("config.json", what="model configuration")
            self._check_file(*_WEIGHTS, what="weights")
            self._check_sizes()
        elif any((self.path.expanduser() / name).is_file() for name in _WEIGHTS):
            raise ConfigError(
                f"{self.path} holds a model, and the section would create another one with random "
                "weights; nearest: architecture: null, which trains the one in the directory",
                key="architecture",
            )

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.path is None and self.architecture is None:
            raise illegal("path", "is missing", hint="write it, or an `architecture` to create")
        return self

    def _check_file(self, *names: str, what: str) -> None:
        if self.path is None:
            return
        if not any((self.path.expanduser() / name).is_file() for name in names):
            raise ConfigError(
                f"{self.path} holds no {what}: {' or '.join(names)} expected{self._nearest()}",
                key="path",
            )

    def _check_sizes(self) -> None:
        """Refuse sizes of `config.json` that no model has, or that its weights cannot have: they
        would be built for hours, or not fit in memory."""
        assert self.path is not None
        directory, found = self.path.expanduser(), self._settings()
        sizes = {name: found[name] for name in _SIZES if type(found.get(name)) is int}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(
                    f"config.json in {self.path} says {name} {size}, expected at least 1; nearest: "
                    "the config.json that came with its weights",
                    key="path",
                )
        held = sum(each.stat().st_size for each in directory.glob("*.safetensors"))
        for name, size in sizes.items():
            if size * sizes.get("hidden_size", 1) > max(2 * held, _SMALL):  # of half a byte each
                raise ConfigError(
                    f"config.json in {self.path} says {name} {size}, for which its weights are too "
                    f"small, {held} bytes; nearest: the config.json that came with them",
                    key="path",
                )

    def _settings(self) -> dict[str, Any]:
        """What `config.json` says of the part that reads text."""
        assert self.path is not None
        content = read_settings(self.path.expanduser() / "config.json", key="path")
        text = content.get("text_config")
        return text if isinstance(text, dict) else content

    def _nearest(self) -> str:
        """A directory of a model where one is near, as `model` of a run."""
        assert self.path is not None
        given = self.path.expanduser()
        near = (given / "model", given.parent, *(each / "model" for each in given.parents[:2]))
        return next((f"; nearest: {each}" for each in near if (each / "config.json").is_file()), "")
