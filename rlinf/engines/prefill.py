"""Prompts of the engine ``hf``: equal ones are computed once, and kept for who waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.data.pictures import PictureReader, Pictures, places_of, positions_of
from rlinf.engines.config import HFEngineConfig
from rlinf.engines.protocol import GenerationRequest, KeptCache
from rlinf.errors import ConfigError
from rlinf.models.vision_language import Seen, hidden_states

Begun = tuple[GenerationRequest, int]
"""A request, and how many tokens of its partial completion are read like a prompt, or carried."""

_PASS = {"cpu": 64}
"""Tokens of padding that take as long as one more forward pass, by device, where measured."""


@dataclass(frozen=True)
class Text:
    """[P] int64 tokens, and the pictures among them."""

    tokens: np.ndarray
    pictures: Pictures = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def key(self) -> bytes:
        """Equal for equal texts alone."""
        return b"".join([self.tokens.tobytes(), *(each.digest for each in self.pictures)])


class PromptCapture:
    """Takes the place of a transformers cache, and keeps keys and values of whole prompts.

    They are [N, K, P, D] per layer, of one forward pass.
    """

    def __init__(self, layers: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        self.layers = list(layers)

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep them; attention is over what was given."""
        self.layers.append((keys, values))
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """Tokens before the prompts: none."""
        return 0


@dataclass(frozen=True)
class Prefilled:
    """Keys and values of one text, and what the model says after it."""

    capture: PromptCapture
    row: int  # in the capture
    logits: Tensor | None  # [V] after its last token, where they were asked for


class Prompts:
    """Computed prompts of the requests that wait; ``reader`` makes pixel values of pictures."""

    def __init__(self, model: Any, config: HFEngineConfig) -> None:
        self._model, self._config = model, config
        self.reader: PictureReader | None = None
        self._known: dict[bytes, Prefilled] = {}
        self._wanted: Counter[bytes] = Counter()

    def expect(self, request: GenerationRequest) -> None:
        """A request waits: its prompt is kept once it was computed."""
        self._wanted[_prompt_of(request).key] += 1

    def forget(self, request: GenerationRequest) -> None:
        """A request waits no longer; its prompt is kept only while another one waits for it."""
        key = _prompt_of(request).key
        self._wanted[key] -= 1
        if not self._wanted[key]:
            del self._wanted[key]
            self._known.pop(key, None)

    def drop(self) -> None:
        """Forget what was computed, not who waits."""
        self._known.clear()

    def compute(self, begun: Sequence[Begun]) -> list[Prefilled]:
        """One result per request, with logits for those that have no token yet.

        Those that have a cache are not computed.
        """
        texts: dict[bytes, Text] = {}
        keys: list[tuple[bytes, bool]] = []
        for request, drawn in begun:
            if request.cache is not None:
                continue
            text = _prompt_of(request)
            if drawn:
                assert request.partial is not None
                parts = [text.tokens, request.partial.tokens[: drawn - 1]]
                text = replace(text, tokens=np.concatenate(parts))
            key = text.key
            keys.append((key, not drawn))
            texts[key] = text
        wants_logits = dict.fromkeys(key for key, wanted in keys if wanted)
        known = {key: self._known[key] for key in texts if key in self._known}
        new = [key for key in texts if key not in known]
        computed = self.read([texts[key] for key in new], [key in wants_logits for key in new])
        known.update(zip(new, computed, strict=True))
        self._known.update((key, known[key]) for key in wants_logits)
        results = iter(
            known[key] if wanted else replace(known[key], logits=None) for key, wanted in keys
        )
        return [
            next(results) if request.cache is None else self._carried(request.cache)
            for request, _ in begun
        ]

    def _carried(self, cache: KeptCache) -> Prefilled:
        parts = [part[None].to(self._model.device) for part in cache.parts()]
        return Prefilled(PromptCapture(zip(parts[::2], parts[1::2], strict=True)), 0, None)

    def read(self, texts: Sequence[Text], wants_logits: Sequence[bool]) -> list[Prefilled]:
        """Run texts through the model; see :func:`prefill`."""
        # One text per forward pass: its result then depends on nothing else.
        most = 1 if self._config.deterministic else self._config.max_prefill_tokens
        return prefill(self._model, texts, wants_logits, max_tokens=most, reader=self.reader)


def _prompt_of(request: GenerationRequest) -> Text:
    return Text(request.prompt_tokens, request.pictures)


def prefill(
    model: Any,
    texts: Sequence[Text],
    wants_logits: Sequence[bool],
    *,
    max_tokens: int,
    reader: PictureReader | None = None,
) -> list[Prefilled]:
    """Run texts through the model, several per forward pass, padded on the right.

    Padding comes after every token of a text, so that causality alone hides it.

    Args:
        model: A causal language model of transformers.
        texts: Each of P tokens.
        wants_logits: Whose logits are needed.
        max_tokens: Bound of the tokens of a forward pass, padding included; a longer text has its
            own.
        reader: Makes pixel values, where a text has pictures.
    """
    results: dict[int, Prefilled] = {}
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    most_padding = _PASS.get(model.device.type, max_tokens)
    for chunk in _chunks(order, texts, max_tokens, most_padding):
        capture = PromptCapture()
        lengths = np.array([len(texts[number]) for number in chunk])
        padded = np.zeros((len(chunk), lengths[-1]), np.int64)
        for row, number in enumerate(chunk):
            padded[row, : lengths[row]] = texts[number].tokens
        ends = np.unique(lengths[[wants_logits[number] for number in chunk]])
        pictures = [texts[number].pictures for number in chunk]
        if reader is not None and any(pictures):
            logits = _forward_with(pictures, model, padded, ends, capture, reader=reader)
        else:
            logits = _forward(model, padded, ends, capture)
        for row, number in enumerate(chunk):
            end = int(np.searchsorted(ends, lengths[row]))
            wanted = logits[row, end] if wants_logits[number] else None
            results[number] = Prefilled(capture, row, wanted)
    return [results[number] for number in range(len(texts))]


def require_served(model: Any) -> None:
    """Refuse, by a ConfigError, a model that this engine cannot compute with, which a forward pass
    of two tokens shows: every layer has to attend, with what it is told, by the function that was
    registered for it, and to keep its keys and values where it is told."""
    capture = PromptCapture()
    attended: list[Any] = []
    try:
        with torch.inference_mode():
            _forward(model, np.zeros((1, 2), np.int64), np.array([2]), capture, attended=attended)
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - of any architecture, in its own code
        said, *_ = str(error).splitlines() or [""]
        why = f"{type(error).__name__} in a first forward pass, {said}"
    else:
        if len(attended) >= len(capture.layers) > 0:  # some layers attend twice
            return
        why = "its layers attend by code of their own"
    kind = model.config.get_text_config().model_type
    raise ConfigError(
        f"the engine `hf` cannot serve models of type {kind}: {why}; use the engine `vllm`",
        key="type",
    )


def _forward(
    model: Any, tokens: np.ndarray, ends: np.ndarray, capture: PromptCapture, **told: Any
) -> Tensor:
    """Logits [N, U, V] after the first ``ends`` [U] tokens; any one place if there are none. What
    is ``told`` besides reaches the attention."""
    device = model.device
    positions = torch.arange(tokens.shape[1], device=device)[None].expand(len(tokens), -1)
    logits: Tensor = model(
        torch.from_numpy(tokens).to(device),
        position_ids=positions,
        past_key_values=capture,
        use_cache=True,
        logits_to_keep=torch.from_numpy(ends - 1).to(device) if len(ends) else 1,
        **told,
    ).logits
    return logits


def _forward_with(
    pictures: Sequence[Pictures],
    model: Any,
    tokens: np.ndarray,
    ends: np.ndarray,
    capture: PromptCapture,
    *,
    reader: PictureReader,
) -> Tensor:
    """The same of tokens with ``pictures`` of each row among them."""
    device, width = model.device, tokens.shape[1]
    positions = np.stack([positions_of(width, found) for found in pictures], axis=1)
    places = (row * width + places_of(found) for row, found in enumerate(pictures))
    seen = Seen.of(reader, list(zip(pictures, places, strict=True)), blank=False)
    assert seen is not None, "only called with pictures"
    hidden = hidden_states(
        model.base_model,
        torch.from_numpy(tokens).to(device),
        seen.to(device),
        position_ids=torch.from_numpy(positions).to(device),
        past_key_values=capture,
        use_cache=True,
    )
    last = torch.from_numpy(ends - 1).to(device) if len(ends) else slice(-1, None)
    logits: Tensor = model.get_output_embeddings()(hidden[:, last])
    return logits


def _chunks(
    order: list[int], texts: Sequence[Text], max_tokens: int, most_padding: int
) -> Iterator[list[int]]:
    """Texts by increasing length, as many as fit into ``max_tokens``, at least one.

    A text that would pad those before it by more than ``most_padding`` begins the next chunk.
    """
    chunk: list[int] = []
    for number in order:
        if chunk:
            length = len(texts[number])
            padding = len(chunk) * (length - len(texts[chunk[-1]]))
            if (len(chunk) + 1) * length > max_tokens or padding > most_padding:
                yield chunk
                chunk = []
        chunk.append(number)
    if chunk:
        yield chunk
