"""What all policies of published models share: views, instructions, box, values, freezing."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from rlinf.config.nearest import did_you_mean
from rlinf.envs.base import INSTRUCTION_KEY
from rlinf.envs.observation_names import present
from rlinf.envs.results import TASK_IDS
from rlinf.errors import ConfigError
from rlinf.models.policy import Policy
from rlinf.models.vla.config import PublishedConfig
from rlinf.models.vla.instructions import Write
from rlinf.models.vla.loading import open_weights

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

_READ = 1 << 24  # bytes


class VLAPolicy(Policy):
    """Pictures, proprioception and, of most, an instruction to a chunk of actions.

    A subclass builds its network and, last of all, calls :meth:`add_values`. What it computes
    with takes the device and the number format of its weights; log-probs and values are float32.

    Args:
        config: The section.
        env_spec: What the environment shows and takes.
        value_dim: V.
        seed: Of weights that are made.
    """

    values_in_parts = True
    imitates = True
    action_low: Tensor
    action_high: Tensor

    def __init__(
        self, config: PublishedConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
    ) -> None:
        super().__init__()
        if env_spec.action_kind != "continuous":
            raise ConfigError(
                f"model.type: {config.type} gives continuous actions, the environment takes "
                f"{env_spec.action_kind} ones; use an environment with a Box action space"
            )
        if value_dim not in (0, 1, config.num_action_chunks):
            raise ConfigError(
                f"a policy with num_action_chunks {config.num_action_chunks} cannot give "
                f"{value_dim} values per chunk; legal: 0, 1, {config.num_action_chunks}"
            )
        self.chunk, self.action_dim = config.num_action_chunks, env_spec.action_dim
        self.value_dim = value_dim
        self.texts: tuple[str, ...] = tuple(env_spec.task_descriptions)
        """Instructions, by task id."""
        self.words_anew = INSTRUCTION_KEY in env_spec.observation_shapes
        """Whether observations hold instructions, which go before those by task id."""
        self.views = _views(config, env_spec)
        """Views that the model is shown, in their order: observation key and, of several pictures,
        which one. One that is left out takes no part, which is the same as one that is masked."""
        self.state_dim = (env_spec.observation_shapes.get("states") or (0,))[0]
        """D; 0 where the environment gives none."""
        self.value_head: ValueHead | None = None
        self._detaches = config.detach_values
        for name in ("action_low", "action_high"):
            bound = torch.as_tensor(getattr(env_spec, name), dtype=torch.float32)
            self.register_buffer(name, bound.expand(self.action_dim).clone(), persistent=False)

    def prompts_of(self, write: Write) -> dict[str, Any]:
        """What an :class:`~rlinf.models.vla.instructions.InstructionTable` must know of the texts;
        ``write`` makes a prompt of one."""
        if self.words_anew:
            return {"prompts": (), "free": write}
        return {"prompts": [write(text) for text in self.texts]}

    def add_values(self, config: PublishedConfig, features: int, *, seed: int) -> None:
        """Make the value head on features of this width, none where V = 0; and name the base, once
        nothing can be refused any more, as all weights are read for it."""
        self._directory = None if config.path is None else config.path.expanduser()
        self.base = f"{config.type} {config.preset}, seed {seed}"
        if self._directory is not None:
            self.base = fingerprint(self._directory)
        if self.value_dim:
            generator = torch.Generator().manual_seed(seed)
            widths = (features, *config.value_head, self.value_dim)
            self.value_head = ValueHead(widths, generator=generator)

    def began_from(self, base: str | None) -> bool:
        """See :meth:`Policy.began_from`; runs of before named a directory otherwise."""
        if super().began_from(base):
            return True
        if self._directory is None or base is None or self.base is None:
            return False
        _, then, weights = self.base.partition(", then ")
        return base == former_fingerprint(self._directory) + then + weights

    def values_of(self, features: Tensor) -> Tensor:
        """[B, V] float32 values from features [B, width]."""
        if self.value_head is None:
            return features.new_zeros(len(features), 0, dtype=torch.float32)
        read = features.detach() if self._detaches else features
        found: Tensor = self.value_head(read)
        return found.float()

    @property
    def _acts_on_states(self) -> bool:
        """Whether acting needs states."""
        return self.state_dim > 0

    def acts_on(self, observations: Collection[str]) -> tuple[str, ...]:
        """Pictures of its views, what is to be done, and states where the model reads them."""
        read = {TASK_IDS, INSTRUCTION_KEY, *(key for key, _ in self.views)}
        read.update(("states",) if self._acts_on_states else ())
        return tuple(name for name in observations if present(name) in read)

    def pictures_of(self, observations: Mapping[str, Tensor]) -> list[Tensor]:
        """uint8 [B, H, W, 3] of each view."""
        return [
            observations[key] if number is None else observations[key][:, number]
            for key, number in self.views
        ]

    def in_box(self, actions: Tensor) -> Tensor:
        """Actions [B, C, A] clipped to the box of the environment, float32."""
        return actions.float().clamp(self.action_low, self.action_high)

    def model_box(self, config: PublishedConfig) -> tuple[Tensor, Tensor]:
        """The bounds of the environment's actions, in the dimensions that a model has for them; ±1
        in those that the environment lacks."""
        low, high, used = self.action_low, self.action_high, config.conventions.dimensions
        if used is None:
            return low.clone(), high.clone()
        ones = torch.ones(config.conventions.model_dim(self.action_dim))
        places = torch.tensor(used)
        return (-ones).index_copy(0, places, low), ones.index_copy(0, places, high)

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the value head."""
        return iter(()) if self.value_head is None else self.value_head.parameters()

    def update_normalizer(self, forward_inputs: Mapping[str, Tensor]) -> None:
        """Statistics are those of the data that the model was trained on, and stay."""


class ValueHead(nn.Module):
    """Linear layers with ReLU between them; the last one begins at 0."""

    def __init__(self, widths: Sequence[int], *, generator: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for number, (rows, columns) in enumerate(pairwise(widths)):
            layer = nn.Linear(rows, columns, device="meta").to_empty(device="cpu")
            with torch.no_grad():
                nn.init.zeros_(layer.bias)
                if number == len(widths) - 2:
                    nn.init.zeros_(layer.weight)
                else:
                    layer.weight.normal_(0.0, (2.0 / rows) ** 0.5, generator=generator)
            self.layers.append(layer)

    def forward(self, features: Tensor) -> Tensor:
        """[B, width] to [B, V]."""
        first, *others = cast(Iterable[nn.Linear], self.layers)
        features = first(features.to(first.weight.dtype))
        for layer in others:
            features = layer(torch.relu(features))
        return features


def _views(config: PublishedConfig, env_spec: EnvSpec) -> list[tuple[str, int | None]]:
    pictures = {
        key: shape
        for key, shape in env_spec.observation_shapes.items()
        if env_spec.observation_dtypes[key] == "uint8" and len(shape) in (3, 4)
    }
    found: list[tuple[str, int | None]] = []
    for key in (each for each in config.cameras if each is not None):
        if key not in pictures:
            shown = ", ".join(sorted(pictures)) or "no pictures"
            hint = did_you_mean(key, list(pictures)) if pictures else "let it render"
            raise ConfigError(
                f"model.cameras: the environment does not show {key!r}, but {shown}; {hint}"
            )
        elif pictures[key][-1] != 3:
            raise ConfigError(
                f"model.cameras: pictures {key} are of shape {list(pictures[key])}; legal: height, "
                "width and 3 colours, in this order"
            )
        elif len(pictures[key]) == 4:
            found.extend((key, number) for number in range(pictures[key][0]))
        else:
            found.append((key, None))
    if not found:
        raise ConfigError("all views are left out; name one", key="model.cameras")
    return found


def fingerprint(directory: Path) -> str:
    """SHA-256 of the names and contents of the files that the weights of a directory are read from:
    those of the model, and of OpenVLA-OFT its parts in files of their own."""
    files = {*open_weights(directory).files.values(), *directory.glob("*--*checkpoint.pt")}
    whole = directory / "model.safetensors"  # which some read where an index names shards, too
    return _digest(files | ({whole} if whole.is_file() else set()))


def former_fingerprint(directory: Path) -> str:
    """What stood for it in runs of before: states of optimizers and processors beside the weights
    were in it."""
    return _digest(p for kind in ("*.safetensors", "*.pt") for p in directory.glob(kind))


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while block := file.read(_READ):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"
