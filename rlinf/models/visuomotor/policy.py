"""What ACT and the diffusion policy share: directories, pictures, units, fresh weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from rlinf.errors import ConfigError, in_section
from rlinf.models.visuomotor.config import VisuomotorConfig
from rlinf.models.visuomotor.published import VisuomotorFiles, read_directory
from rlinf.models.visuomotor.resnet import FrozenBatchNorm
from rlinf.models.vla.chunk_policy import ChunkPolicy
from rlinf.models.vla.loading import NameLayout, Translated, load_published, open_weights, translate
from rlinf.models.vla.networks import fresh_network
from rlinf.models.vla.statistics import Method, Statistics
from rlinf.models.vla.statistics_files import read_statistics

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

_EPSILON = 1e-8  # of lerobot's normalisation
_IMAGENET = Statistics(mean=torch.tensor([0.485, 0.456, 0.406]),
                       std=torch.tensor([0.229, 0.224, 0.225]))  # fmt: skip


class VisuomotorPolicy(ChunkPolicy):
    """A policy of a few convolutions and layers that is trained whole, without an instruction.

    A subclass gives ``layouts``, ``_published_network`` and ``_tiny_network``; networks are built
    on the meta device.
    """

    layouts: ClassVar[tuple[NameLayout, ...]]
    picture_mean: Tensor
    picture_deviation: Tensor

    def __init__(
        self, config: VisuomotorConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
    ) -> None:
        super().__init__(config, env_spec, value_dim=value_dim, seed=seed)
        colours = self._colours()
        for name in ("mean", "deviation"):
            numbers = torch.stack([each[name] for each in colours]).view(len(colours), 3, 1, 1)
            self.register_buffer(f"picture_{name}", numbers, persistent=False)

    @abstractmethod
    def _published_network(self, found: Translated, published: VisuomotorFiles) -> nn.Module:
        """The network that has these weights."""

    @abstractmethod
    def _tiny_network(self, action_dim: int, state_dim: int) -> nn.Module:
        """A small one of the published architecture, for pictures of about 64 × 64."""

    def _begin(self, config: VisuomotorConfig, env_spec: EnvSpec) -> None:
        self._published: VisuomotorFiles | None = None
        if config.path is not None:
            with in_section("model"):
                self._published = read_directory(config.path)
                self._check_sight(self._published, env_spec)

    def _network(self, config: VisuomotorConfig, env_spec: EnvSpec, *, seed: int) -> Any:
        published = self._published
        if published is None:
            dim = config.conventions.model_dim(env_spec.action_dim)
            states = self.state_dim if config.use_states else 0
            network = fresh_network(lambda: self._tiny_network(dim, states), seed=seed)
            for part in network.modules():
                if isinstance(part, FrozenBatchNorm):
                    part.reset()
            return network
        with in_section("model"):
            found = translate(open_weights(published.path), self.layouts)
            with torch.device("meta"):
                network = self._published_network(found, published)
            load_published(network, published.path, self.layouts, dtype=torch.float32)
        return network

    def _check_sight(self, published: VisuomotorFiles, env_spec: EnvSpec) -> None:
        """Refuse a model that was trained on other pictures, or on states or without them."""
        reads = bool(published.state_dim)
        if reads != (self._config.use_states and self.state_dim > 0):
            raise ConfigError(
                f"{published.path} reads {'' if reads else 'no '}states, use_states is "
                f"{self._config.use_states} and the environment's have {self.state_dim} dimensions",
                key="use_states",
            )
        if len(published.pictures) != len(self.views):
            raise ConfigError(
                f"{published.path} sees {len(published.pictures)} pictures "
                f"({', '.join(published.pictures)}), the recipe gives {len(self.views)}",
                key="cameras",
            )
        for (key, _), (feature, size) in zip(self.views, published.pictures.items(), strict=True):
            shown = tuple(env_spec.observation_shapes[key][-3:-1])
            if shown != tuple(size):
                raise ConfigError(
                    f"{published.path} was trained on {feature} of {size[0]} × {size[1]}, but "
                    f"{key} are of {shown[0]} × {shown[1]}; nearest: let the environment render "
                    "as large",
                    key="cameras",
                )

    @property
    def _reads_states(self) -> bool:
        return bool(self._config.use_states and self.state_dim)

    # -- units --------------------------------------------------------------------------------

    def _epsilon(self, method: Method) -> float:
        """As lerobot does, which adds another small number to deviations than openpi."""
        return _EPSILON if method == "mean_std" else super()._epsilon(method)

    def _states(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, D] normalised and padded; [B, 0] where none are read."""
        states = super()._states(observations)
        return self._padded_states(states) if self._reads_states else states

    def _colours(self) -> Sequence[Mapping[str, Tensor]]:
        """Mean and deviation [3] of the colours of each view, those of ImageNet where nothing is
        known of them: from the directory alone, as the network was trained with these."""
        features = [] if self._published is None else list(self._published.pictures)
        method = "mean_std" if self._published is None else self._published.colours
        known: Mapping[str, Statistics] = {}
        if self._published is not None and method is not None:
            with suppress(ConfigError):  # it may have none: the recipe names those of actions
                known = read_statistics(self._published.path, self._config.statistics_key).pictures
        found = []
        for number in range(len(self.views)):
            name = features[number].replace(".", "_") if features else ""
            found.append(_colours_of(known.get(name, _IMAGENET), method))
        return found

    def _pixels(self, pictures: Sequence[Tensor]) -> list[Tensor]:
        """Pictures [B, H, W, 3] of each view from 0 to 255 as [B, 3, H, W], normalised."""
        colours = zip(pictures, self.picture_mean, self.picture_deviation, strict=True)
        return [
            torch.addcmul(-mean / scale, view.permute(0, 3, 1, 2).float(), 1 / (255 * scale))
            for view, mean, scale in colours
        ]


def _colours_of(statistics: Statistics, method: Method | None) -> Mapping[str, Tensor]:
    if method is None:
        return {"mean": torch.zeros(3), "deviation": torch.ones(3)}
    ends = (statistics.q01, statistics.q99) if method == "quantiles" else (
        statistics.min, statistics.max
    )  # fmt: skip
    first, second = (statistics.mean, statistics.std) if method == "mean_std" else ends
    if first is None or second is None:
        raise ConfigError(
            f"the statistics of pictures lack what {method} needs; nearest: those that lerobot "
            "saves with a model",
            key="model.path",
        )
    if method == "mean_std":
        return {"mean": first, "deviation": second + _EPSILON}
    return {"mean": (first + second) / 2, "deviation": (second - first) / 2}
