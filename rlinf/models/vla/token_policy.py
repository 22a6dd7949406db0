"""Policies whose actions are tokens of a language model, drawn with a temperature."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from rlinf.errors import CheckpointError, ConfigError, in_section
from rlinf.models.policy import ACTIONS, RAW_ACTIONS, ActionEvaluation, ActionSample, NoiseSpec
from rlinf.models.vla.action_tokens import (
    ActionTokens,
    chosen,
    drawn_tokens,
    entropy,
    scaled_logits,
    token_log_probs,
)
from rlinf.models.vla.config import TokenConfig
from rlinf.models.vla.policy import VLAPolicy
from rlinf.models.vla.statistics import ModelStatistics, Statistics, Units

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

TOKENS, TEMPERATURE, TOP_K = "action_tokens", "temperature", "top_k"
_EPSILON = 1e-8  # of OpenVLA's statistics


class TokenPolicy(VLAPolicy):
    """Each row of the inputs keeps the temperature and the number of tokens that it was drawn with:
    training computes with these, whatever the section says by then.

    A subclass makes :attr:`network` and :attr:`tokens`.
    """

    network: Any
    """Has ``width``, ``embed``, ``action_logits``, ``causal`` and ``new_cache`` as
    :class:`~rlinf.models.vla.openvla.network.OpenVLANetwork` has."""
    tokens: ActionTokens

    @property
    def vision(self) -> torch.nn.Module:
        """What reads pictures."""
        raise NotImplementedError(f"{type(self).__name__} does not say what reads pictures")

    def __init__(
        self, config: TokenConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
    ) -> None:
        super().__init__(config, env_spec, value_dim=value_dim, seed=seed)
        self._config = config
        used = config.conventions.dimensions
        self._places = slice(None) if used is None else list(used)
        with in_section("model.conventions"):
            self._check_dimensions(config)
        self.statistics = self._read_statistics(config)
        self.action_units = units_of(self.statistics.actions, config)

    @property
    def _acts_on_states(self) -> bool:
        """Where actions are said as what is to be added to them."""
        return bool(self._config.conventions.delta_dimensions)

    def _check_dimensions(self, config: TokenConfig) -> None:
        dim, used = self.action_dim, config.conventions.dimensions
        if used is not None and len(used) == dim and {*used} != {*range(dim)}:
            raise ConfigError(
                f"names {', '.join(map(str, used))}, and the model draws a token for each of the "
                f"environment's {dim} dimensions and for no other; nearest: an order of 0 to "
                f"{dim - 1}",
                key="dimensions",
            )
        config.conventions.check_dimensions(dim, dim, self.state_dim)

    def _read_statistics(self, config: TokenConfig) -> ModelStatistics:
        with in_section("model"):
            found, told = config.read_statistics(), config.conventions
        if found is not None:
            own = self.action_dim in {found.actions.dim, found.actions.used}
            found.check(
                self.action_low.tolist(),
                self.action_high.tolist(),
                # An order of those that are drawn; what has more is refused by their number.
                dimensions=told.dimensions if own else None,
                otherwise=told.other_units,
                state_dim=self.state_dim if config.told_states else 0,
                key="model.statistics",
            )
            found.require({"actions": config.normalised_by}, key="model.normalization")
            return found
        low, high = self.model_box(config)
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise ConfigError(
                "the environment's actions have no bounds to divide into tokens; nearest: "
                "statistics of recorded ones, with: rlinf data stats",
                key="model.statistics",
            )
        return ModelStatistics(Statistics(q01=low, q99=high, min=low, max=high))

    @property
    def noise(self) -> Mapping[str, NoiseSpec]:
        """A uniform number for each token."""
        return {ACTIONS: NoiseSpec((self.chunk, self.action_dim), "uniform")}

    def adapted_layers(self) -> Iterator[str]:
        """See :meth:`Policy.adapted_layers`; none of what is left as it is."""
        left = {id(p) for p in self.vision.parameters()} if self._config.freeze_vision else set()
        for name in super().adapted_layers():
            if id(self.get_submodule(name).weight) not in left:
                yield name

    def refuse_unknown_tensors(self, names: Iterable[str]) -> None:
        """See :meth:`Policy.refuse_unknown_tensors`: adapters in vision that is left as it is."""
        unknown = {name.removesuffix(".lora_A") for name in names if name.endswith(".lora_A")}
        if not unknown or not self._config.freeze_vision:
            return
        seeing = {id(part) for part in self.vision.modules()}
        if any(id(part) in seeing for name, part in self.named_modules() if name in unknown):
            raise CheckpointError(
                "the checkpoint has adapters in the vision, which a former version trained in "
                "spite of model.freeze_vision: true; nearest: model.freeze_vision=false, with "
                "which they are read, and trained as then"
            )

    @torch.no_grad()
    def sample(
        self, observations: Mapping[str, Tensor], noise: Mapping[str, Tensor] | None
    ) -> ActionSample:
        """Tokens where the cumulated probabilities pass the noise; without it the most probable."""
        embedded, mask = self._embedded(observations)
        uniform = None if noise is None else noise[ACTIONS].flatten(1)
        rows = (len(embedded),)
        settings = {
            TEMPERATURE: embedded.new_full(rows, self._config.temperature, dtype=torch.float32),
            TOP_K: torch.full(rows, self._config.top_k, device=embedded.device),
        }
        temperature = settings[TEMPERATURE] if self._config.temperature != 1.0 else None
        top_k = settings[TOP_K] if self._config.top_k else None
        first, tokens, log_probs = self._draw(embedded, mask, uniform, temperature, top_k)
        tokens = tokens.view(-1, self.chunk, self.action_dim)
        return ActionSample(
            self._to_env(self.tokens.decode(tokens), observations),
            self._in_env(log_probs.view_as(tokens)),
            {TOKENS: tokens, **settings},
            self.values_of(first),
        )

    def evaluate_actions(self, forward_inputs: Mapping[str, Tensor]) -> ActionEvaluation:
        """Of the stored tokens, under the temperature and top-k that they were drawn with."""
        tokens = forward_inputs[TOKENS].long()
        flat = tokens.flatten(1)
        embedded, mask = self._embedded(forward_inputs)
        hidden = self._read(embedded, mask, flat)
        log_probs = token_log_probs(
            self.network.action_logits(hidden),
            temperature=forward_inputs[TEMPERATURE],
            top_k=forward_inputs[TOP_K],
            kept=flat,
        )
        return ActionEvaluation(
            self._in_env(chosen(log_probs, flat).view(tokens.shape)),
            self.values_of(hidden[:, 0]),
            self._in_env(entropy(log_probs).view(tokens.shape)),
        )

    @torch.no_grad()
    def value(self, observations: Mapping[str, Tensor]) -> Tensor:
        """From the hidden state from which the first token is read."""
        return self.values_of(self._first(*self._embedded(observations)))

    def imitation_errors(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Cross entropy of the token of each recorded action dimension, among those of actions."""
        values = self._to_model(inputs[RAW_ACTIONS], inputs)
        tokens = self.tokens.encode(values).flatten(1)
        hidden = self._read(*self._embedded(inputs), tokens)
        log_probs = torch.log_softmax(self.network.action_logits(hidden).float(), dim=-1)
        return self._in_env(-chosen(log_probs, tokens).view(values.shape))

    # -- what they differ in --------------------------------------------------------------------

    @abstractmethod
    def _draw(
        self,
        embedded: Tensor,
        mask: Tensor,
        uniform: Tensor | None,
        temperature: Tensor | None,
        top_k: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden state [B, width] of the first token, tokens [B, C · A] and their log-probs."""

    @abstractmethod
    def _read(self, embedded: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """Hidden states [B, C · A, width] that tokens [B, C · A] are read from."""

    @abstractmethod
    def _first(self, embedded: Tensor, mask: Tensor) -> Tensor:
        """Hidden state [B, width] that the first token is read from."""

    @abstractmethod
    def _embedded(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Embeddings and mask of the prompt of each row."""

    def _in_env(self, x: Tensor) -> Tensor:
        """[..., A] by dimension of the model, in the order of the environment."""
        return x[..., self._places]

    def _to_env(self, values: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """[B, C, A] from normalised units, into the box of the environment."""
        actions, conventions = self.action_units.unnormalize(values), self._config.conventions
        return self.in_box(conventions.to_env(actions, self.action_dim, inputs.get("states")))

    def _to_model(self, actions: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """[B, C, A] recorded actions in normalised units, in [-1, 1]."""
        conventions = self._config.conventions
        given = conventions.to_model(actions.float(), self.action_dim, inputs.get("states"))
        return self.action_units.normalize(given).clamp(-1.0, 1.0)


class OneByOne(TokenPolicy):
    """One token after another, each seeing those before it."""

    def _draw(
        self,
        embedded: Tensor,
        mask: Tensor,
        uniform: Tensor | None,
        temperature: Tensor | None,
        top_k: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        network, cache = self.network, self.network.new_cache()
        count = self.chunk * self.action_dim
        first = hidden = network.causal(embedded, mask, cache=cache)[:, -1:]
        seen, whole = mask.shape[1], functional.pad(mask, (0, count - 1), value=True)
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        numbers = [None] * count if uniform is None else torch.split(uniform, 1, dim=1)
        for place in range(count):
            if place:
                embedded = self._as_input(tokens[-1])
                hidden = network.causal(embedded, whole[:, : seen + place], cache=cache)
            now = network.action_logits(hidden)
            logits.append(scaled_logits(now, temperature=temperature, top_k=top_k))
            tokens.append(drawn_tokens(logits[-1], numbers[place]))
        drawn = torch.cat(tokens, dim=1)
        log_probs = torch.log_softmax(torch.cat(logits, dim=1), dim=-1)
        return first[:, 0], drawn, chosen(log_probs, drawn)

    def _as_input(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.network.embed(tokens + self.tokens.first_id)
        return found

    def _read(self, embedded: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        count = tokens.shape[1]
        whole = torch.cat([embedded, self._as_input(tokens[:, :-1])], dim=1)
        mask = functional.pad(mask, (0, count - 1), value=True)
        hidden: Tensor = self.network.causal(whole, mask)[:, -count:]
        return hidden

    def _first(self, embedded: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.network.causal(embedded, mask)[:, -1]
        return hidden


def units_of(statistics: Statistics, config: TokenConfig) -> Units:
    """The units of the model, by the section's kind of normalisation."""
    return Units(statistics, config.normalised_by, epsilon=_EPSILON)
