"""Directories as OpenVLA and OpenVLA-OFT are published in."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf.checkpoint.weights import check_finite
from rlinf.data.json_files import read_settings
from rlinf.errors import ConfigError, in_section
from rlinf.models.policy_weights import merged
from rlinf.models.vla.loading import NameLayout, in_one_format, load_published
from rlinf.models.vla.openvla.network import TOWERS, Architecture, Extras, OpenVLANetwork
from rlinf.models.vla.openvla.vision_transformer import DINOV2, SIGLIP, VisionSize, unread_names

_LLAMA_2_7B = {
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as attention heads
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What a published text_config leaves out."""
_TOWERS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": DINOV2,
    "vit_so400m_patch14_siglip_224": SIGLIP,
}
"""Names that config.json has for the vision transformers."""
_EXTRA = ("action_head.", "proprio_projector.", *(f"vision_backbone.{t}.film." for t in TOWERS))
_SETTINGS = {
    "action_head": "head: regression",
    "proprio_projector": "proprioception: true",
    "vision_backbone": "film: true",
}
"""What files of their own begin with, and what a section says where they are used."""
_MEANS = ((0.485, 0.456, 0.406), (0.5, 0.5, 0.5))
_DEVIATIONS = ((0.229, 0.224, 0.225), (0.5, 0.5, 0.5))


@dataclass(frozen=True)
class PixelValues:
    """How pictures become input of the towers: resized to a square, (x − mean) / deviation.

    Args:
        size: Pixels of its side.
        means: For each tower, of red, green and blue in [0, 1].
        deviations: Likewise.
    """

    size: int
    means: tuple[tuple[float, ...], ...]
    deviations: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class OpenVLAFiles:
    """What the files of a directory beside the weights say."""

    path: Path
    architecture: Architecture
    pixel_values: PixelValues


def read_published(path: Path) -> OpenVLAFiles:
    """Read config.json and what lies beside it.

    ConfigError where a file is missing or says something that this network is not.
    """
    path = path.expanduser()
    config = read_settings(path / "config.json", key="model.path")
    if config.get("model_type") != "openvla":
        raise ConfigError(
            f"{path / 'config.json'} is of a model {config.get('model_type')!r}, not of an openvla",
            key="model.path",
        )
    sizes = set(config.get("image_sizes", [224, 224]))
    if len(sizes) != 1:
        raise ConfigError(f"{path}: towers of picture sizes {sorted(sizes)}", key="model.path")
    return OpenVLAFiles(
        path,
        Architecture(
            towers=_towers(config),
            image_size=int(sizes.pop()),
            text=_text(config.get("text_config") or {}),
            unused_rows=int(config.get("pad_to_multiple_of", 64)),
            action_bins=int(config.get("n_action_bins", 256)),
        ),
        _pixel_values(path, config),
    )


def load_network(
    published: OpenVLAFiles,
    extras: Extras,
    *,
    dtype: torch.dtype | None = None,
    fresh: bool = False,
    seed: int = 0,
) -> OpenVLANetwork:
    """The network of a directory with all its weights, on the host.

    Args:
        published: The directory.
        extras: Parts that lie in files of their own, ``NAME--STEP_checkpoint.pt``.
        dtype: Of all weights; None: as they are stored, float32 where formats are mixed.
        fresh: Let parts that the directory lacks begin afresh, as where a plain OpenVLA is
            fine-tuned with them.
        seed: Of these.
    """
    with torch.device("meta"):
        network = OpenVLANetwork(published.architecture, extras)
    files = {name: _extra_file(published.path, name, needed=not fresh) for name in _parts(extras)}
    layout = openvla_layout(published.architecture)
    with in_section("model"):
        load_published(network, published.path, [layout], dtype=dtype, fresh=is_extra)
    in_one_format(network)
    dtype = dtype or network.language_model.lm_head.weight.dtype
    for name, file in files.items():
        if file is not None:
            _load_extra(network, name, file, dtype)
    materialize(network, seed=seed, dtype=dtype)
    return network


def refuse_unused(path: Path, extras: Extras) -> None:
    """Refuse, by a ConfigError of ``model.path``, a directory with files of parts that the network
    is to be without: the tokens of a model that was trained with a head of its own mean nothing."""
    left = [name for name in _SETTINGS if name not in _parts(extras)]
    files = {name: sorted(path.glob(f"{name}--*checkpoint.pt")) for name in left}
    if not any(files.values()):
        return
    names = ", ".join(each.name for found in files.values() for each in found)
    wanted = ", ".join(_SETTINGS[name] for name, found in files.items() if found)
    raise ConfigError(
        f"{path} holds {names}, which the model was trained with and the section leaves out; "
        f"nearest: type: openvla_oft with {wanted}, or a copy of the directory without them, to be "
        "trained anew",
        key="model.path",
    )


def is_extra(name: str) -> bool:
    """Whether a weight is of a part that plain OpenVLA lacks."""
    return name.startswith(_EXTRA)


def materialize(network: OpenVLANetwork, *, seed: int, dtype: torch.dtype) -> None:
    """Give memory to what is still on the meta device: weights that begin afresh, as a function of
    the seed alone, and constants.

    Matrices are uniform, with bounds of one over the square root of the inputs; norms and scales
    are 1, biases and FiLM 0.
    """
    network.add_constants()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(network.named_parameters()):
        if not parameter.is_meta:
            continue
        value = torch.zeros(parameter.shape)
        if parameter.dim() > 1 and ".film." not in name:
            bound = (parameter.numel() / len(parameter)) ** -0.5
            value.uniform_(-bound, bound, generator=generator)
        elif parameter.dim() == 1 and not name.endswith(".bias"):
            value.fill_(1.0)
        part, _, last = name.rpartition(".")
        setattr(network.get_submodule(part), last, torch.nn.Parameter(value.to(dtype)))


def openvla_layout(architecture: Architecture) -> NameLayout:
    """Names of published files: LayerScale is called otherwise, and the ends of the towers, which
    no computation reads, are there."""
    rules, unused = [], []
    for tower, size in zip(TOWERS, architecture.towers, strict=False):
        block = f"vision_backbone.{tower}.blocks.{{}}"
        rules += [(f"{block}.{ls}.scale_factor", f"{block}.{ls}.gamma") for ls in ("ls1", "ls2")]
        unused += [f"vision_backbone.{tower}.{name}" for name in unread_names(size)]
    return NameLayout("OpenVLA", (*rules, ("", "")), unused=tuple(unused))


def _towers(config: Mapping[str, Any]) -> tuple[VisionSize, ...]:
    """Sizes by the names of timm; ``vision_sizes`` beside them replaces some, in small models."""
    names = config.get("timm_model_ids") or list(_TOWERS)
    unknown = sorted(set(names) - _TOWERS.keys())
    if unknown or not 1 <= len(names) <= 2:
        raise ConfigError(
            f"its vision towers are {', '.join(names)}; legal: one or both of {', '.join(_TOWERS)}",
            key="model.path",
        )
    other = config.get("vision_sizes") or [{}] * len(names)
    return tuple(replace(_TOWERS[name], **given) for name, given in zip(names, other, strict=True))


def _text(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("model_type", "llama") != "llama":
        raise ConfigError(
            f"its language model is a {given['model_type']}; legal: llama", key="model.path"
        )
    if given.get("rope_scaling"):
        raise ConfigError("its rope_scaling is none that OpenVLA has", key="model.path")
    values = {key: given.get(key, default) for key, default in _LLAMA_2_7B.items()}
    theta = float(given.get("rope_theta", 10000.0))
    return {**values, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _pixel_values(path: Path, config: Mapping[str, Any]) -> PixelValues:
    file = path / "preprocessor_config.json"
    found = read_settings(file, key="model.path") if file.is_file() else {}
    strategy = found.get("image_resize_strategy", config.get("image_resize_strategy"))
    if strategy not in (None, "resize-naive"):
        raise ConfigError(f"{path} resizes by {strategy!r}; legal: resize-naive", key="model.path")
    towers = len(_towers(config))
    means, deviations = found.get("means", _MEANS[:towers]), found.get("stds", _DEVIATIONS[:towers])
    if len(means) != towers or len(deviations) != towers:
        raise ConfigError(f"{file} is not of {towers} vision towers", key="model.path")
    return PixelValues(
        int(config.get("image_sizes", [224])[0]), tuple(map(tuple, means)),
        tuple(map(tuple, deviations)),
    )  # fmt: skip


def _parts(extras: Extras) -> list[str]:
    wanted = {
        "action_head": extras.action_head is not None,
        "proprio_projector": extras.proprioception > 0,
        "vision_backbone": extras.film,
    }
    return [name for name, used in wanted.items() if used]


def _extra_file(path: Path, name: str, *, needed: bool) -> Path | None:
    found = sorted(path.glob(f"{name}--*checkpoint.pt"))
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise ConfigError(f"{path} holds several {name}: {names}; keep one", key="model.path")
    if not found and needed:
        raise ConfigError(
            f"{path} holds no {name}--STEP_checkpoint.pt; model.new_parts: true lets it begin "
            "afresh, to be trained",
            key="model.path",
        )
    return found[0] if found else None


def proprioception_of(path: Path) -> int | None:
    """Values of a state that the projector in a directory reads; None where there is none."""
    file = _extra_file(path.expanduser(), "proprio_projector", needed=False)
    if file is None:
        return None
    weight = _tensors(file).get("fc1.weight")
    if weight is None or weight.dim() != 2:
        raise ConfigError(f"{file} is no projector: it has no matrix fc1.weight", key="model.path")
    return int(weight.shape[1])


def _tensors(file: Path) -> dict[str, Tensor]:
    """Tensors of a file that torch wrote, and nothing else: no code of it is executed."""
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
        tensors = {str(name).removeprefix("module."): each for name, each in found.items()}
    except (OSError, RuntimeError, AttributeError, ValueError, EOFError) as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"{file} holds no tensors: {why}", key="model.path") from error
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{file} holds more than tensors", key="model.path") from error
    return tensors


def _load_extra(network: OpenVLANetwork, name: str, file: Path, dtype: torch.dtype) -> None:
    part = network.get_submodule(name)
    tensors = _tensors(file)
    if name == "vision_backbone":
        tensors = _of_graph(_without_adapters(tensors), part)
    own = {key: tuple(each.shape) for key, each in part.state_dict().items()}
    given = {key: tuple(each.shape) for key, each in tensors.items()}
    if own != given:
        different = sorted(own.items() ^ given.items())
        raise ConfigError(
            f"{file} does not fit: {len(different)} names or shapes differ, such as "
            f"{different[0][0]} {list(different[0][1])}",
            key="model.path",
        )
    check_finite(tensors.items(), source=str(file), key="model.path")
    part.load_state_dict({key: each.to(dtype) for key, each in tensors.items()}, assign=True)


def _without_adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices with the LoRA updates that OpenVLA-OFT saves beside them where FiLM is used."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".lora_" in name:
            continue
        layer, adapted, kind = name.partition(".base_layer.")
        if adapted and kind == "weight" and f"{layer}.lora_A.default.weight" in tensors:
            first, second = (tensors[f"{layer}.lora_{x}.default.weight"] for x in "AB")
            rank = first.shape[0]
            update = merged(
                tensor.flatten(1), first.flatten(1), second.flatten(1), min(rank, 16) / rank
            )
            found[f"{layer}.weight"] = update.view_as(tensor)
        else:
            found[f"{layer}.{kind}" if adapted else name] = tensor
    return found


def _of_graph(tensors: Mapping[str, Tensor], part: torch.nn.Module) -> dict[str, Tensor]:
    """Tensors of a backbone whose blocks are wrapped by FiLM, by the names of the graph; without
    what lies behind its features."""
    found = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("vision_backbone.").replace(".scale_factor", ".gamma")
        plain = re.sub(r"\.blocks\.(\d+)\.(scale|shift)\.", r".film.\1.\2.", plain)
        plain = re.sub(r"\.blocks\.(\d+)\.block\.", r".blocks.\1.", plain)
        tower, place, number, *_ = [*plain.split("."), ""]
        depth = len(part.get_submodule(f"{tower}.blocks")) if tower in TOWERS else 0  # type: ignore[arg-type]
        behind = place in ("norm", "attn_pool") or number == str(depth)
        if not (tower in TOWERS and behind):
            found[plain] = tensor
    return found


TINY = Architecture(
    towers=(
        VisionSize(64, 3, 4, 128, patch=16, registers=4, layer_scale=True),
        VisionSize(64, 3, 4, 128, patch=16, pooling=True),
    ),
    image_size=64,
    text={
        **_LLAMA_2_7B, "vocab_size": 2048 + 256 + 64, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 3, "num_attention_heads": 4,
    },
)  # fmt: skip
"""1.4 million weights; its words are hashed."""
TINY_PIXELS = PixelValues(TINY.image_size, _MEANS, _DEVIATIONS)


def tiny_network(extras: Extras, *, seed: int) -> OpenVLANetwork:
    """A small network with fresh weights."""
    with torch.device("meta"):
        network = OpenVLANetwork(TINY, extras)
    materialize(network, seed=seed, dtype=torch.float32)
    return network
