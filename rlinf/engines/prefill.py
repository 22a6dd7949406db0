"""Forward passes over whole prompts for the engine ``hf``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.engines.kv_cache import PromptCapture

_PASS = {"cpu": 64}
"""Tokens of padding that take as long as one more forward pass, by device, where measured."""


@dataclass(frozen=True)
class Prefilled:
    """Keys and values of one text, and what the model says after it.

    Args:
        capture: Forward pass that it was part of.
        row: Its row there.
        logits: [V] after its last token; None where they were not asked for.
    """

    capture: PromptCapture
    row: int
    logits: Tensor | None


def prefill(
    model: Any,
    texts: Sequence[np.ndarray],
    wants_logits: Sequence[bool],
    *,
    max_tokens: int,
    alone: bool,
) -> list[Prefilled]:
    """Run texts through the model, several per forward pass, padded on the right.

    Padding comes after every token of a text, so that causality alone hides it.

    Args:
        model: A causal language model of transformers.
        texts: Tokens [P] of each.
        wants_logits: Whose logits are needed.
        max_tokens: Bound of the tokens of a forward pass, padding included.
        alone: One text per forward pass: its result then depends on nothing else.

    Returns:
        One result per text, in their order.
    """
    results: list[Prefilled | None] = [None] * len(texts)
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    most_padding = _PASS.get(model.device.type, max_tokens)
    for chunk in _chunks(order, texts, 1 if alone else max_tokens, most_padding):
        capture = PromptCapture()
        lengths = np.array([len(texts[number]) for number in chunk])
        padded = np.zeros((len(chunk), lengths[-1]), np.int64)
        for row, number in enumerate(chunk):
            padded[row, : lengths[row]] = texts[number]
        ends = np.unique(lengths[[wants_logits[number] for number in chunk]])
        logits = _forward(model, padded, ends, capture)
        for row, number in enumerate(chunk):
            end = int(np.searchsorted(ends, lengths[row]))
            wanted = logits[row, end] if wants_logits[number] else None
            results[number] = Prefilled(capture, row, wanted)
    return [result for result in results if result is not None]


def _forward(model: Any, tokens: np.ndarray, ends: np.ndarray, capture: PromptCapture) -> Tensor:
    """Logits [N, U, V] after the first ``ends`` [U] tokens; any one place if there are none."""
    device = model.device
    keep = torch.from_numpy(ends - 1).to(device) if len(ends) else 1
    inputs = torch.from_numpy(tokens).to(device)
    positions = torch.arange(tokens.shape[1], device=device)[None].expand(len(tokens), -1)
    logits: Tensor = model(
        inputs,
        position_ids=positions,
        past_key_values=capture,
        use_cache=True,
        logits_to_keep=keep,
    ).logits
    return logits


def _chunks(
    order: list[int], texts: Sequence[np.ndarray], max_tokens: int, most_padding: int
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
