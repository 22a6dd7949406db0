"""Low-rank adapters: those of peft in language models, and the same in policies for actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.errors import ConfigError, in_section
from rlinf.models.language_config import AdapterConfig, LoraConfig
from rlinf.models.policy import Policy, tied_to_embedding
from rlinf.models.policy_weights import merged
from rlinf.models.vision_language import last_part, vision_of

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec
    from rlinf.models.config import ModelConfig

_PREFIX = "base_model.model."
_SHOWN = 3  # names in a message
_ALL = slice(None)
_TIED = "has the weights of the input embedding, which an adapter of it alone cannot be merged into"
_BEGUN = "_rlinf_begun"  # attribute of layers whose adapter is from a file


def is_adapter(name: str) -> bool:
    """Whether a tensor belongs to a LoRA adapter."""
    return "lora_" in name


def adapter_file_name(name: str) -> str:
    """The name that a parameter of an adapter has in the adapter's file.

    ``model.layers.0.q_proj.lora_A.default.weight`` becomes
    ``base_model.model.model.layers.0.q_proj.lora_A.weight``.
    """
    plain = name.replace(".default.", ".").removesuffix(".default")
    return plain if plain.startswith(_PREFIX) else _PREFIX + plain


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
        ConfigError: The model has no such layer, or the adapter to continue from is another one.
    """
    from peft import inject_adapter_in_model

    settings = peft_settings(model, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, adapter_name="default")
    if config.path is not None:
        load_adapter(model, config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return settings


def peft_settings(model: Any, config: LoraConfig) -> Any:
    """The section as peft has it.

    Raises:
        ConfigError: The model has no such layer, or it can have no adapter.
    """
    import peft

    vision = None if config.vision else vision_of(model)
    seeing = set() if vision is None else set(map(id, vision.modules()))
    layers = {
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and id(part) not in seeing
    }
    beside = _beside_experts(model)
    tied = {last_part(name) for name in tied_to_embedding(model)}
    names = {last_part(name) for name in layers} - beside - tied
    for name in config.target_modules or ():
        if name in names:
            continue
        reason = f"the model has no linear layer {name}"
        if name in beside:
            reason = (
                f"layers {name} of a mixture of experts take no adapter, as its experts are one "
                "tensor"
            )
        elif name in tied:
            reason = f"{name} {_TIED}"
        raise ConfigError(
            f"{reason}; legal: {', '.join(sorted(names))}", key="actor.lora.target_modules"
        )
    chosen: str | list[str] = "all-linear"
    if config.target_modules or beside:
        head = model.get_output_embeddings()
        output = {last_part(name) for name in layers if model.get_submodule(name) is head}
        chosen = list(config.target_modules or sorted(names - output))
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha or config.rank,
        lora_dropout=0.0,
        target_modules=chosen,
        exclude_modules=r"(.*\.)?visual\..*" if seeing else None,
        init_lora_weights="gaussian",
        task_type="CAUSAL_LM",
        base_model_name_or_path=getattr(model, "name_or_path", None) or None,
    )


def _beside_experts(model: nn.Module) -> set[str]:
    """Last names of layers in blocks with experts that no adapter may have; empty without experts.

    The experts of a block are one tensor, and peft takes these names, wherever they occur, for
    those of the experts' matrices in former versions of transformers.
    """
    fused = any(
        last_part(name) == "experts" and any(True for _ in part.parameters(recurse=False))
        for name, part in model.named_modules()
    )
    return {"gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"} if fused else set()


def load_adapter(model: Any, config: LoraConfig) -> None:
    """Give the adapters of a model the values in the directory of the section.

    Args:
        model: With fresh adapters of this section.
        config: The section, with a path.

    Raises:
        ConfigError: A file is missing or damaged, or the adapter has another rank, scale or other
            layers; then nothing was changed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    assert config.path is not None
    with in_section("actor.lora"):
        config.check()
    try:
        given = load_file(config.path.expanduser() / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        reason = f"the adapter in {config.path} cannot be read: {error}"
        raise ConfigError(reason, key="actor.lora.path") from error
    own = {adapter_file_name(n): p for n, p in model.named_parameters() if is_adapter(n)}
    wrong = _differences(own, given)
    if wrong:
        raise ConfigError(
            f"the adapter in {config.path} does not fit the model and actor.lora.target_modules; "
            f"{wrong}",
            key="actor.lora.path",
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(given[name])
    for layer in adapted_layers(model).values():
        setattr(layer, _BEGUN, True)


def _differences(own: dict[str, nn.Parameter], given: dict[str, Tensor]) -> str:
    """What is missing, unknown or of another shape, in words; empty where nothing is."""
    shared = own.keys() & given.keys()
    kinds = {
        "missing in its file": own.keys() - given.keys(),
        "unknown here": given.keys() - own.keys(),
        "of another shape": {name for name in shared if own[name].shape != given[name].shape},
    }
    return "; ".join(
        f"{title}: {', '.join(sorted(names)[:_SHOWN])}"
        + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        for title, names in kinds.items()
        if names
    )


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Layers with an adapter, by name."""
    return {name: part for name, part in model.named_modules() if hasattr(part, "lora_A")}


def begins_with_adapter(model: nn.Module) -> bool:
    """Whether a model is its base alone no more when a run begins: its adapter is from a file."""
    return any(hasattr(layer, _BEGUN) for layer in adapted_layers(model).values())


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Compute with the frozen weights alone."""
    layers = list(adapted_layers(model).values())
    # Peft's own switch also changes which parameters are trained.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def plain_name(name: str) -> str | None:
    """The name of a frozen parameter in the model without adapters; None for an adapter's."""
    return None if is_adapter(name) else name.replace(".base_layer.", ".")


class AdaptedLinear(nn.Module):
    """A linear layer whose matrix is W + s · B A, as it is sent to those who act: so trainer and
    rollout compute the same numbers, bit for bit. Its bias is trained whole.

    Args:
        layer: The layer; of its matrix only the values are kept.
        config: Rank and scale.
        generator: Of A, which is Gaussian; B is zero, so that nothing changes yet.
    """

    lora_base: Tensor
    lora_scale: Tensor
    _disable_adapters = False  # named as in layers of peft; see `without_adapter`

    def __init__(
        self, layer: nn.Linear, config: AdapterConfig, *, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.bias = layer.bias
        self.register_buffer("lora_base", layer.weight.detach())
        self.register_buffer("lora_scale", torch.tensor(config.scale))
        rows, columns = layer.weight.shape
        first = torch.empty(config.rank, columns).normal_(0, 1 / config.rank, generator=generator)
        self.lora_A = nn.Parameter(first)
        self.lora_B = nn.Parameter(torch.zeros(rows, config.rank))

    @property
    def weight(self) -> Tensor:
        """[out, in] the matrix with its update."""
        if self._disable_adapters:
            return self.lora_base
        return merged(self.lora_base, self.lora_A, self.lora_B, self.lora_scale)

    def forward(self, features: Tensor) -> Tensor:
        """[B, in] to [B, out]."""
        return functional.linear(features, self.weight, self.bias)


class LowRankLinear(nn.Module):
    """A linear layer W x + s · B A x whose own matrix and bias stay as they are.

    For a policy with a base: those who act have the same layers, and are sent A and B alone.

    Args:
        layer: The layer; its parameters are kept.
        config: Rank and scale.
        generator: Of A, which is Gaussian; B is zero, so that nothing changes yet.
    """

    lora_scale: Tensor
    _disable_adapters = False  # named as in layers of peft; see `without_adapter`

    def __init__(
        self, layer: nn.Linear, config: AdapterConfig, *, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("lora_scale", torch.tensor(config.scale))
        rows, columns = layer.weight.shape
        first = torch.empty(config.rank, columns).normal_(0, 1 / config.rank, generator=generator)
        place = layer.weight
        self.lora_A = nn.Parameter(first.to(place))
        self.lora_B = nn.Parameter(torch.zeros(rows, config.rank).to(place))

    def forward(self, features: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return functional.linear(features, self.weight, self.bias) + self.update(features)

    def update(self, features: Tensor, rows: slice = _ALL) -> Tensor:
        """[..., in] to some ``rows`` of [..., out], s · B A x alone, in the number format of the
        features; a scalar 0 within :func:`without_adapter`."""
        if self._disable_adapters:
            return features.new_zeros(())
        low = functional.linear(features, self.lora_A.to(features.dtype))
        second = self.lora_B[rows].to(low.dtype)
        return functional.linear(low, second) * self.lora_scale.to(low.dtype)


def adapt_policy(policy: Policy, config: AdapterConfig, *, seed: int) -> None:
    """Put adapters into the linear layers of a policy that it names.

    Of a policy with a base nothing is trained beside them but what the policy says.

    Raises:
        ConfigError: It names none of ``config.target_modules``.
    """
    names = list(policy.adapted_layers())
    chosen = set(names)
    if config.target_modules is not None:
        found = {t: _layers_of(t, names) for t in config.target_modules}
        unknown = [target for target, layers in found.items() if not layers]
        if unknown:
            tied = _layers_of(unknown[0], tied_to_embedding(policy))
            none = f"the policy has no linear layer {unknown[0]}"
            reason = f"{min(tied)} {_TIED}" if tied else none
            raise ConfigError(
                f"{reason}; legal: {', '.join(names)}", key="actor.lora.target_modules"
            )
        chosen = set().union(*found.values())
    generator = torch.Generator().manual_seed(seed)
    if policy.base is not None:
        whole = {id(parameter) for parameter in policy.trained_beside_adapters()}
        for parameter in policy.parameters():
            parameter.requires_grad_(id(parameter) in whole)
    make = AdaptedLinear if policy.base is None else LowRankLinear
    for name in (name for name in names if name in chosen):
        layer = policy.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        owner, _, last = name.rpartition(".")
        adapted = make(layer, config, generator=generator)
        setattr(policy.get_submodule(owner), last, adapted)


def _layers_of(target: str, names: Iterable[str]) -> set[str]:
    """Those of the layers whose names have the parts that a target says."""
    return {name for name in names if f".{target}." in f".{name}."}


def acting_policy(
    model: ModelConfig,
    env_spec: EnvSpec,
    *,
    value_dim: int,
    seed: int,
    lora: AdapterConfig | None,
    dtype: torch.dtype,
) -> Policy:
    """The policy as those who act with a trainer's weights have it: with the same adapters, where
    these travel alone, and in the trainer's number format."""
    policy = model.build(env_spec, value_dim=value_dim, seed=seed)
    if policy.base is not None and lora is not None:
        adapt_policy(policy, lora, seed=seed)
    return in_precision(policy, dtype)


def in_precision(policy: Policy, dtype: torch.dtype) -> Policy:
    """The policy with its parameters in a number format; buffers stay as they are."""
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)
    return policy


def without_adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a policy by the names that it has without adapters, with the updates in them.

    Args:
        tensors: Parameters and saved buffers of a policy, adapted or not.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, is_part, kind = name.rpartition(".lora_")
        if not is_part or f"{layer}.lora_base" not in tensors:
            found[name] = tensor  # an adapter of a base travels as it is
        elif kind == "base":
            first, second, scale = (tensors[f"{layer}.lora_{kind}"] for kind in ("A", "B", "scale"))
            found[f"{layer}.weight"] = merged(tensor, first, second, scale)
    return found


def with_adapters(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of :func:`without_adapters`: adapters that change nothing, over the matrices.

    Args:
        tensors: Of a policy without adapters, by name.
        own: Parameters and saved buffers of the policy whose names are wanted, adapted or not; of
            the parameters only the shapes are read.
    """
    found = dict(tensors)
    for name in own:
        layer, is_part, kind = name.rpartition(".lora_")
        if is_part and kind == "base" and f"{layer}.weight" in found:
            found[name] = found.pop(f"{layer}.weight")
            found[f"{layer}.lora_scale"] = own[f"{layer}.lora_scale"]
            for factor in ("A", "B"):
                factor_name = f"{layer}.lora_{factor}"
                found[factor_name] = torch.zeros(own[factor_name].shape)
    return found
