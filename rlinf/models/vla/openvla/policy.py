"""OpenVLA and OpenVLA-OFT as policies: actions are tokens, drawn one after another or at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from rlinf.errors import ConfigError
from rlinf.models.policy import RAW_ACTIONS, ActionEvaluation, ActionSample, NoiseSpec
from rlinf.models.vla.action_tokens import ActionTokens, chosen, drawn_tokens, token_log_probs
from rlinf.models.vla.instructions import (
    Encode,
    InstructionTable,
    encoding,
    hashed_words,
    read_tokenizer,
    refuse_unknown,
)
from rlinf.models.vla.openvla.config import OpenVLAConfig, OpenVLAOFTConfig
from rlinf.models.vla.openvla.files import (
    TINY,
    TINY_PIXELS,
    PixelValues,
    is_extra,
    load_network,
    proprioception_of,
    read_published,
    refuse_unused,
    tiny_network,
)
from rlinf.models.vla.openvla.network import Extras, OpenVLANetwork
from rlinf.models.vla.preprocessing import Standardised, colour_planes, side_by_side
from rlinf.models.vla.statistics import Units
from rlinf.models.vla.token_policy import OneByOne, TokenPolicy, units_of

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

_BOS, _EOS, _EMPTY = 1, 2, "▁"
_CROP = 0.9**0.5  # side of the middle that is looked at; its area is nine tenths


class _OpenVLA(TokenPolicy):
    """What both share."""

    network: OpenVLANetwork
    _config: OpenVLAConfig

    def __init__(
        self, config: OpenVLAConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
    ) -> None:
        super().__init__(config, env_spec, value_dim=value_dim, seed=seed)
        extras = self._extras(config)
        published = None if config.path is None else read_published(config.path)
        architecture = TINY if published is None else published.architecture
        self.tokens = ActionTokens(architecture.vocabulary, architecture.action_bins)
        pixels = TINY_PIXELS if published is None else published.pixel_values
        self.pixels = _Pixels(pixels, crop=config.center_crop)
        # What is small, and may be refused, goes before the weights.
        self.instructions = InstructionTable(
            encode=_encode(config, self.tokens.first_id),
            **self.prompts_of(_prompt),
            limit=config.max_prompt_tokens,
            side="left",
        )
        refuse_unknown(self.instructions, architecture.vocabulary)
        if published is not None:
            refuse_unused(published.path, extras)
        self.network = (
            tiny_network(extras, seed=seed)
            if published is None
            else load_network(published, extras, fresh=self._new_parts, seed=seed)
        )
        if config.freeze_vision:
            self.vision.requires_grad_(False)
        self.add_values(config, self.network.width, seed=seed)

    def _extras(self, config: OpenVLAConfig) -> Extras:
        return Extras()

    _new_parts = False

    @property
    def vision(self) -> torch.nn.Module:
        """See :attr:`TokenPolicy.vision`."""
        return self.network.vision_backbone

    def repeated_layers(self) -> list[torch.nn.Module]:
        """Layers of the language model and blocks of the vision transformers."""
        backbone: Any = self.network.vision_backbone
        blocks = [block for name in backbone.names for block in getattr(backbone, name).blocks]
        return [*self.network.language_model.model.layers, *blocks]

    def _embedded(
        self, inputs: Mapping[str, Tensor], *, behind: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Embeddings and mask of the prompt of each row."""
        pixels = side_by_side([self.pixels(each) for each in self.pictures_of(inputs)])
        ids, mask = self.instructions(inputs)
        return self.network.prompt(pixels, ids, mask, states=self._states(inputs), behind=behind)

    def _states(self, inputs: Mapping[str, Tensor]) -> Tensor | None:
        return None


class OpenVLAPolicy(OneByOne, _OpenVLA):
    """One token after another, each seeing those before it."""


class OpenVLAOFTPolicy(_OpenVLA):
    """A chunk in one pass, in which every position sees every other one."""

    _config: OpenVLAOFTConfig
    state_units: Units | None
    """Of the states that are read; None: as they are."""

    def _extras(self, config: OpenVLAConfig) -> Extras:
        assert isinstance(config, OpenVLAOFTConfig)
        self._new_parts = config.new_parts
        self._behind = (_EOS,) if config.stop_token else ()
        # Not of the class, which would hide the module of this name.
        self.state_units = None
        self.state_scaling = config.state_scaling
        dim = 0
        if config.proprioception:
            found = None if config.path is None else proprioception_of(config.path)
            dim = self.state_dim if found is None else found
            self._check_states(dim)
        head = self.action_dim if config.head == "regression" else None
        return Extras(head, dim, config.film)

    def _check_states(self, dim: int) -> None:
        if not dim or dim != self.state_dim:
            raise ConfigError(
                f"the model reads states of {dim} dimensions, the environment gives "
                f"{self.state_dim}; nearest: proprioception: false",
                key="model.proprioception",
            )
        known = self.statistics.states
        if known is not None:
            method = self._config.normalised_by
            known.require(method, of="states", key="model.proprioception")
            self.state_units = units_of(known, self._config)
        elif self._config.path is not None:
            raise ConfigError("the statistics have none of states", key="model.proprioception")

    @property
    def regresses(self) -> bool:
        """Whether actions are regressed, so that there are no log-probs."""
        return self.network.action_head is not None

    @property
    def evaluation_noise(self) -> Mapping[str, NoiseSpec]:
        """See the class above; nothing is drawn where actions are regressed."""
        return {} if self.regresses else self.noise

    @torch.no_grad()
    def sample(
        self, observations: Mapping[str, Tensor], noise: Mapping[str, Tensor] | None
    ) -> ActionSample:
        """See the class above; regressed actions have no noise and log-probs of 0."""
        if not self.regresses:
            return super().sample(observations, noise)
        self._refuse_regression(noise is None)
        hidden = self._read(*self._embedded(observations), None)
        actions = self._to_env(self._regressed(hidden), observations)
        return ActionSample(
            actions, torch.zeros_like(actions), {RAW_ACTIONS: actions}, self.values_of(hidden[:, 0])
        )

    def evaluate_actions(self, forward_inputs: Mapping[str, Tensor]) -> ActionEvaluation:
        """See the class above."""
        self._refuse_regression(not self.regresses)
        return super().evaluate_actions(forward_inputs)

    def imitation_errors(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """See the class above; |error| in normalised units where actions are regressed."""
        if not self.regresses:
            return super().imitation_errors(inputs)
        values = self._to_model(inputs[RAW_ACTIONS], inputs)
        found = self._regressed(self._read(*self._embedded(inputs), None))
        return self._in_env((found - values).abs())

    def trained_beside_adapters(self) -> Iterator[torch.nn.Parameter]:
        """The values, and parts that begin afresh."""
        yield from self.value_parameters()
        if self._new_parts:
            yield from (p for name, p in self.network.named_parameters() if is_extra(name))

    def adapted_layers(self) -> Iterator[str]:
        """All linear layers but those that are trained whole."""
        for name in super().adapted_layers():
            if not (self._new_parts and is_extra(name.removeprefix("network."))):
                yield name

    def _refuse_regression(self, unless: bool) -> None:
        if not unless:
            raise ConfigError(
                "regression gives no log-probs to explore and learn by; it imitates and is "
                "evaluated; legal for reinforcement learning: tokens",
                key="model.head",
            )

    def _regressed(self, hidden: Tensor) -> Tensor:
        head = self.network.action_head
        assert head is not None
        found: Tensor = head(hidden)
        return found.float()

    def _draw(
        self,
        embedded: Tensor,
        mask: Tensor,
        uniform: Tensor | None,
        temperature: Tensor | None,
        top_k: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self._read(embedded, mask, None)
        found = token_log_probs(
            self.network.action_logits(hidden), temperature=temperature, top_k=top_k
        )
        tokens = drawn_tokens(found, uniform)
        return hidden[:, 0], tokens, chosen(found, tokens)

    def _read(self, embedded: Tensor, mask: Tensor, tokens: Tensor | None) -> Tensor:
        count = self.chunk * self.action_dim
        return self.network.at_once(embedded, mask, count, self._behind)

    def _first(self, embedded: Tensor, mask: Tensor) -> Tensor:
        return self._read(embedded, mask, None)[:, 0]

    def _embedded(
        self, inputs: Mapping[str, Tensor], *, behind: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        return super()._embedded(inputs, behind=self._behind)

    @property
    def _acts_on_states(self) -> bool:
        return super()._acts_on_states or self._config.told_states

    def _states(self, inputs: Mapping[str, Tensor]) -> Tensor | None:
        if self.network.proprio_projector is None:
            return None
        states = inputs["states"].float()
        return (
            states
            if self.state_units is None
            else self.state_units.normalize(states).clamp(-1.0, 1.0)
        )


class _Pixels(torch.nn.Module):
    """Pictures [B, H, W, 3] uint8 as the towers read them, [B, 3 · towers, size, size]."""

    def __init__(self, values: PixelValues, *, crop: bool) -> None:
        super().__init__()
        self._size, self._crop = values.size, crop
        self._standardised = Standardised(values.means, values.deviations)

    def forward(self, pictures: Tensor) -> Tensor:
        size = (self._size, self._size)
        x = colour_planes(pictures)
        if x.shape[-2:] != size:
            x = functional.interpolate(x, size=size, mode="bicubic", antialias=True)
            x = x.clamp(0, 255)
        if self._crop:
            scale = torch.tensor([[_CROP, 0.0, 0.0], [0.0, _CROP, 0.0]], device=x.device)
            places = functional.affine_grid(
                scale.expand(len(x), 2, 3), list(x.shape), align_corners=True
            )
            x = functional.grid_sample(x, places, align_corners=True)
        found: Tensor = self._standardised(x.unsqueeze(1)).flatten(1, 2)
        return found


def _prompt(text: str) -> str:
    return f"In: What action should the robot take to {text.lower()}?\nOut:"


def _encode(config: OpenVLAConfig, first_id: int) -> Encode:
    """From a prompt to its tokens: BOS in front, and at the end the empty token that stands between
    prompt and actions in what the models were trained on."""
    if config.path is None and config.tokenizer is None:
        empty = 3
        return lambda text: [_BOS, *hashed_words(text, first=4, words=first_id - 4), empty]
    place = config.tokenizer or config.path
    assert place is not None
    tokenizer = read_tokenizer(place)
    found, size = tokenizer.token_to_id(_EMPTY), tokenizer.get_vocab_size()
    if found is None or size <= first_id:
        raise ConfigError(
            f"the tokenizer in {place} is not OpenVLA's: it has {size} tokens, "
            f"{'not' if found is None else 'also'} the empty one; actions begin at {first_id}",
            key="model.tokenizer",
        )

    plain = encoding(tokenizer, special=True)

    def encode(text: str) -> list[int]:
        ids = plain(text)
        ids = ids if ids[:1] == [_BOS] else [_BOS, *ids]
        return ids if ids[-1] == found else [*ids, found]

    return encode
