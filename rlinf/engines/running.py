"""The sequences that the engine ``hf`` is generating: number i has row i of the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlinf.data.pictures import shift_of
from rlinf.data.sequences import Completion, StopReason
from rlinf.engines.prefill import Text
from rlinf.engines.protocol import GenerationRequest
from rlinf.engines.requests import extended_mask
from rlinf.engines.sampling import Draw, Filters, uniforms

_NUMBERS = np.dtype(
    [
        ("cached", np.int64),  # tokens in the cache, prompt included
        ("shift", np.int64),  # what a position has more than the tokens before it
        ("last", np.int64),  # input of the next forward pass
        ("count", np.int64),  # tokens of the completion so far
        ("known", np.int64),  # of these, how many were given and are not drawn
        ("limit", np.int64),
        ("minimum", np.int64),
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("penalty", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("greedy", np.bool_),
        ("filtered", np.bool_),
    ],
    align=True,
)
_TOKEN = np.dtype([("token", np.int64), ("log_prob", np.float32), ("version", np.int64)])


class Running:
    """Numbers, tokens and requests of at most ``rows`` running sequences; V ``vocabulary``."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self.requests: list[GenerationRequest] = []
        self.numbers = np.zeros(rows, _NUMBERS)
        self._stops = np.full((rows, 1), -1, np.int64)
        self._text = np.zeros((rows, 0), _TOKEN)
        self._vocabulary, self._device = vocabulary, device

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def active(self) -> np.ndarray:
        """[n] numbers of the running sequences, a view."""
        return self.numbers[: len(self.requests)]

    def add(
        self, request: GenerationRequest, stops: Sequence[int], *, cached: int, drawn: int
    ) -> None:
        """Take a request into the next row.

        Args:
            request: The request.
            stops: Tokens that end it.
            cached: Tokens of prompt and partial completion that its row of the cache holds.
            drawn: Tokens of the partial completion that need not be computed again.
        """
        sampling, row = request.sampling, len(self.requests)
        self._stops = _widened(self._stops, len(stops), -1)
        self._text = _widened(self._text, sampling.max_new_tokens, 0)
        known = 0
        if request.partial is not None:
            known = len(request.partial)
            self._text["token"][row, :known] = request.partial.tokens
            self._text["log_prob"][row, :known] = request.partial.log_probs
            self._text["version"][row, :known] = request.partial.versions
        last = self._text["token"][row, drawn - 1] if drawn else 0
        self.numbers[row] = (
            cached, shift_of(request.pictures), last, drawn, known,
            sampling.max_new_tokens, sampling.min_new_tokens, request.seed % 2**64,
            sampling.temperature, sampling.repetition_penalty,
            sampling.top_k or self._vocabulary, sampling.top_p, sampling.greedy, sampling.filtered,
        )  # fmt: skip
        self._stops[row] = -1
        self._stops[row, : len(stops)] = stops
        self.requests.append(request)

    def cached_text(self, row: int) -> Text:
        """What of prompt and completion is in the cache."""
        request, cached = self.requests[row], self.numbers["cached"][row]
        said = self._text["token"][row, : cached - len(request.prompt_tokens)]
        return Text(np.concatenate([request.prompt_tokens, said]), request.pictures)

    def lengths(self) -> np.ndarray:
        """[n] tokens of each completion; given ones that were not yet computed again count."""
        found: np.ndarray = np.maximum(self.active["count"], self.active["known"])
        return found

    def completion(self, row: int, reason: StopReason) -> Completion:
        """What a sequence has."""
        length, given = int(self.lengths()[row]), self.requests[row].partial
        return Completion(
            tokens=self._text["token"][row, :length].copy(),
            log_probs=self._text["log_prob"][row, :length].copy(),
            versions=self._text["version"][row, :length].copy(),
            stop_reason=reason,
            seed=self.requests[row].seed,
            sampled=None if given is None else extended_mask(given, length),
        )

    def tail(self, row: int, length: int) -> np.ndarray:
        """The last ``length`` tokens of a completion, as far as they are of its last turn."""
        count, given = int(self.numbers["count"][row]), self.requests[row].partial
        begin = 0 if given is None else given.turn_start
        return self._text["token"][row, max(begin, count - length) : count]

    def how_to_draw(self, rows: np.ndarray) -> Draw:
        """How the next token of each of ``rows`` is drawn."""
        numbers = self.numbers[rows]
        temperature, greedy = numbers["temperature"], numbers["greedy"]
        changed = np.flatnonzero(numbers["filtered"] | (numbers["count"] < numbers["minimum"]))
        return Draw(
            uniforms=self._tensor(uniforms(numbers["seed"], numbers["count"])),
            temperature=None if (temperature == 1).all() else self._tensor(temperature[:, None]),
            greedy=self._tensor(greedy) if greedy.any() else None,
            filters=self._filters(rows, changed) if len(changed) else None,
        )

    def _filters(self, rows: np.ndarray, changed: np.ndarray) -> Filters:
        numbers = self.numbers[rows[changed]][:, None]
        penalty, top_k, top_p = numbers["penalty"], numbers["top_k"], numbers["top_p"]
        truncated = (top_k < self._vocabulary).any() or (top_p < 1).any()
        return Filters(
            rows=self._tensor(changed),
            seen=self._seen(rows[changed]) if (penalty != 1).any() else None,
            penalty=self._tensor(penalty),
            banned=self._banned(rows[changed]),
            top_k=self._tensor(top_k) if truncated else None,
            top_p=self._tensor(top_p),
        )

    def _seen(self, rows: np.ndarray) -> torch.Tensor:
        """[m, S] tokens of prompt and completion, filled up with the first token of the prompt."""
        prompts, counts = (self.requests[row].prompt_tokens for row in rows), self.numbers["count"]
        parts = zip(rows, prompts, strict=True)
        texts = [np.concatenate([p, self._text["token"][r, : counts[r]]]) for r, p in parts]
        seen = np.empty((len(rows), max(map(len, texts))), np.int64)
        for number, text in enumerate(texts):
            seen[number, : len(text)] = text
            seen[number, len(text) :] = text[0]
        return self._tensor(seen)

    def _banned(self, rows: np.ndarray) -> torch.Tensor | None:
        """[m, V] stop tokens of the sequences that are too short to end."""
        short = np.flatnonzero(self.numbers["count"][rows] < self.numbers["minimum"][rows])
        if not len(short):
            return None
        # One column more takes the -1 that fill up lists, and tokens that the model does not have.
        banned = np.zeros((len(rows), self._vocabulary + 1), np.bool_)
        banned[short[:, None], np.minimum(self._stops[rows[short]], self._vocabulary)] = True
        return self._tensor(banned[:, :-1])

    def append(self, tokens: np.ndarray, log_probs: np.ndarray, version: int) -> np.ndarray:
        """Take one drawn token [n] per sequence; returns [n] bool, where it was a stop token.

        A token that was given in advance takes the place of the one drawn.
        """
        active = self.active
        rows, count = np.arange(len(active)), active["count"]
        given = count < active["known"]
        if given.any():
            tokens = np.where(given, self._text["token"][rows, count], tokens)
            rows, count = rows[~given], count[~given]
        self._text["token"][rows, count] = tokens[rows]
        self._text["log_prob"][rows, count] = log_probs[rows]
        self._text["version"][rows, count] = version
        active["last"] = tokens
        active["count"] += 1
        stopped: np.ndarray = (self._stops[: len(active)] == tokens[:, None]).any(1) & ~given
        return stopped

    def remove(self, gone: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop rows; the last sequences move into the holes. Returns which [m], and where [m]."""
        total, left = len(self.requests), len(self.requests) - len(gone)
        keep = np.ones(total, np.bool_)
        keep[gone] = False
        source = left + np.flatnonzero(keep[left:])
        target = np.flatnonzero(~keep[:left])
        for array in (self.numbers, self._stops, self._text):
            array[target] = array[source]
        for old, new in zip(source, target, strict=True):
            self.requests[new] = self.requests[old]
        del self.requests[left:]
        return source, target

    def reorder(self, order: np.ndarray) -> None:
        """Put the sequence of row ``order[i]`` into row i."""
        for array in (self.numbers, self._stops, self._text):
            array[: len(order)] = array[order]
        self.requests = [self.requests[old] for old in order]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _widened(array: np.ndarray, columns: int, fill: int) -> np.ndarray:
    if columns <= array.shape[1]:
        return array
    wide = np.full((len(array), columns), fill, array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
