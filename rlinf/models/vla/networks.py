"""Networks of policies that denoise: of random weights, or from a published directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from rlinf.errors import ConfigError, in_section
from rlinf.models.vla.config import MOST_ACTIONS, FlowConfig
from rlinf.models.vla.flow_matching import fill_fresh
from rlinf.models.vla.loading import (
    NameLayout,
    Translated,
    in_one_format,
    load_published,
    open_weights,
    translate,
)
from rlinf.models.vla.transformer import TransformerSize

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True)
class Published:
    """What a published directory says of the sizes of a model.

    Args:
        config: The section that names it.
        found: Its weights under our names.
        settings: Its config.json; empty where it has none and needs none.
    """

    config: FlowConfig
    found: Translated
    settings: Mapping[str, Any]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one of our tensors; ConfigError where there is none, as of another model."""
        if name not in self.found.names:
            raise ConfigError(
                f"{self.config.path} holds no {self.config.type}: no {name}", key="path"
            )
        return self.found.shape(name)

    def transformer(self, part: str, inner: str) -> TransformerSize:
        """Size of a part, whose layers have the perceptron ``inner``."""
        mlp, width = self.shape(f"{part}.layers.0.{inner}.weight")
        return TransformerSize(width, self.found.count(f"{part}.layers"), mlp)

    def vision_heads(self, vision: TransformerSize) -> int:
        """Heads of the vision tower, which weights do not tell: those of SigLIP of its width."""
        return 16 if vision.width == 1152 else vision.width // 64

    def actions_at_once(self, *, said: str = "chunk_size", always: int | None = None) -> int:
        """The section's horizon, or what config.json says of it, or else what all such models have;
        ConfigError where that is none, or neither says it of models that differ."""
        given = self.settings.get(said)
        if known := self.config.horizon or (always if given is None else None):
            return known
        if given is None:
            raise ConfigError(
                f"is null, and {self.config.path} does not say in a config.json ({said}) how many "
                "actions are denoised together; nearest: the number that it was trained with, as "
                "50, which π₀ has where its training does not name another",
                key="horizon",
            )
        if type(given) is not int or not 1 <= given <= MOST_ACTIONS:
            raise ConfigError(
                f"{self.config.path} has {said}: {given!r} in its config.json, expected a whole "
                f"number from 1 to {MOST_ACTIONS}; nearest: model.horizon in its place",
                key="path",
            )
        return given

    def refuse_others(self, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Refuse a directory that wants something computed which is not, rather than compute else.

        Args:
            known: What is computed, by name.
            given: What config.json says of these; what it leaves out is as it is computed.
        """
        for name, value in known.items():
            if given.get(name, value) != value:
                raise ConfigError(
                    f"{self.config.path} has {name}: {given[name]} in its config.json, which is "
                    f"not computed here; nearest: a model with {value}",
                    key="path",
                )


def tiny_ends(config: FlowConfig, env_spec: EnvSpec) -> dict[str, Any]:
    """What a small network for pictures of about 64 × 64 reads and writes: names of sizes."""
    (state_dim,) = env_spec.observation_shapes.get("states") or (0,)
    return {
        "image": 64,
        "horizon": config.horizon or config.num_action_chunks,
        "action_dim": config.conventions.model_dim(env_spec.action_dim),
        "state_dim": max(state_dim, 1),
    }


def fresh_network(make: Callable[[], Network], *, seed: int) -> Network:
    """A network of random weights that depend on the seed alone."""
    with torch.device("meta"):
        network = make()
    network.to_empty(device="cpu")
    fill_fresh(network, torch.Generator().manual_seed(seed))
    return network


def published_network(
    config: FlowConfig, layouts: Sequence[NameLayout], make: Callable[[Published], Network]
) -> Network:
    """The network in the directory that the section names; ConfigError where it is none."""
    assert config.path is not None
    path = config.path.expanduser()
    with in_section("model"):
        found = translate(open_weights(path), layouts)
        published = Published(config, found, config.settings())
        with torch.device("meta"):
            network = make(published)
        load_published(network, path, layouts)
    in_one_format(network)
    return network
