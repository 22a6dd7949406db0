"""What every engine does: requests in, one step at a time, completions out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from rlinf.data.pictures import Pictures
from rlinf.data.sequences import Completion
from rlinf.engines.config import SamplingConfig

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The LoRA adapter that an engine serves on top of its model."""

    rank: int
    alpha: float  # its output is multiplied by alpha / rank


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where an engine gets its model from.

    Where somebody else goes on using ``module`` (``shared``), ``hf`` shares its parameters by
    reference where they lie, so that a trainer in the same process has nothing to send. Otherwise
    the module is the engine's own, which moves it to its device.
    """

    path: Path | None = None  # transformers directory: config.json, safetensors, tokenizer
    module: Any = None  # the transformers model itself
    shared: bool = True
    tokenizer: Any = None  # for stop strings; None: loaded from `path`
    lora: Lora | None = None  # that it serves; None: none, part of `module`, or arrives merged
    dtype: Literal["float32", "bfloat16"] | None = None  # what `auto` of an engine stands for


@dataclass(frozen=True, kw_only=True)
class KeptCache:
    """What an engine computed of an interrupted sequence, to go on with elsewhere.

    These are the keys (K, T, D) and values (K, T, V) of each layer in turn: K heads, T tokens of
    prompt and completion that were computed, mostly all but the last.
    """

    version: int  # of the weights in use when it was interrupted; of no use under others
    shapes: tuple[tuple[int, ...], ...]
    numbers: Tensor  # all, one after the other, on the host: one tensor travels faster than many

    @property
    def tokens(self) -> int:
        """T."""
        return self.shapes[0][1]

    def parts(self) -> list[Tensor]:
        """Keys and values of each layer in turn, without a copy."""
        pieces = torch.split(self.numbers, [math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(pieces, self.shapes, strict=True)]


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One completion to be generated.

    With ``partial``, its beginning, from an abort, it is continued, and that length counts for
    ``max_new_tokens``; ``cache``, which came along, is passed over by who has no use for it.
    """

    request_id: int  # chosen by the caller; no two unfinished requests have the same
    prompt_tokens: np.ndarray  # [P] int64, unpadded, P >= 1
    seed: int  # not negative; requests of a group share all but this
    sampling: SamplingConfig
    partial: Completion | None = None
    pictures: Pictures = ()  # of the prompt
    cache: KeptCache | None = None
    turn_ends: tuple[int, ...] = ()  # tokens that end it besides those of `sampling`
    keep_cache: bool = False  # whether its caches are wanted where a stop token or text ended it
    scored: bool = True  # whether its log-probs are used: others may be anything


@dataclass(frozen=True, kw_only=True)
class FinishedCompletion:
    """A completion that ended, or was aborted."""

    request_id: int
    completion: Completion  # from its first token on, those of ``partial`` included
    cache: KeptCache | None = None  # given by `Engine.interrupt`, or where the request asked for it


class Engine(ABC):
    """A model that answers many requests at once.

    Everything happens within the calls, in the caller's thread: between two steps nothing is
    generated, unless ``generates_between_steps`` says so. Weights are replaced between two steps
    in any case. Also a context manager, which closes it.
    """

    continues_exactly: bool = False
    """Whether an aborted sequence, continued under the same weights, is what it would have been."""

    carries_caches: bool = False
    """Whether it gives caches along that save computing the tokens of a completion again."""

    keeps_stale_caches: bool = False
    """Whether running sequences go on with caches of old weights after an update."""

    generates_between_steps: bool = False
    """Whether sequences also grow, and end, while no call is being made."""

    version: int
    """Version of the weights in use; 0 at the start."""

    restarts: int = 0
    """Times that the process behind the engine was replaced."""

    @abstractmethod
    def submit(self, request: GenerationRequest) -> None:
        """Take a request; it is started by a later step.

        Raises:
            ConfigError: This engine or model cannot serve it.
            ValueError: Its number is in use, or its prompt is empty.
        """

    @abstractmethod
    def step(self) -> list[FinishedCompletion]:
        """Generate about one token for every running sequence; returns what ended by it.

        An engine that generates between the steps waits until a sequence has a token more than at
        the last step, and returns what ended since. Without unfinished requests a step does
        nothing.
        """

    @property
    @abstractmethod
    def unfinished(self) -> int:
        """Requests that were submitted and neither returned nor aborted."""

    @abstractmethod
    def progress(self) -> Mapping[int, int]:
        """Tokens so far of all unfinished requests, by number; given ones are among them.

        Raises:
            ConfigError: This engine cannot tell; ``tells_progress`` of its config says so.
        """

    @abstractmethod
    def abort(self, request_ids: Sequence[int] | None = None) -> list[FinishedCompletion]:
        """End requests now and return what they have, with the stop reason ``abort``.

        One that ended between the steps, of an engine that generates there, has the reason of its
        own end: there is nothing to be continued.

        Args:
            request_ids: Which; None: all. A number that is not unfinished is passed over.
        """

    def interrupt(self) -> list[FinishedCompletion]:
        """End all requests as :meth:`abort` does, to go on in another engine of the same weights.

        An engine that can gives their caches along (:attr:`carries_caches`).
        """
        return self.abort()

    @abstractmethod
    def update_weights(self, weights: Weights, version: int) -> None:
        """Replace the weights; running sequences go on under the new ones.

        Caches of the old weights are not used afterwards: cached prefixes are dropped, those of
        running sequences computed again (unless configured otherwise). Tokens from here on carry
        the new version.

        Args:
            weights: Names and values as the model's ``state_dict`` has them, complete (a tied
                output layer may be left out), on any device; for a model with a LoRA adapter all
                tensors of the adapter by the names of its file; or nothing, where the weights are
                shared by reference.
            version: Number of the new weights.

        Raises:
            ValueError: A name is unknown or missing, or a shape differs.
        """

    def adopt_weights(self, weights: Weights, version: int) -> None:
        """Replace the weights as :meth:`update_weights` does, by tensors that may be kept.

        An engine that can compute with them where they lie takes them in place of its own, and
        never writes to them. The caller may write new values into them between two steps, and then
        calls this again.
        """
        self.update_weights(weights, version)

    @abstractmethod
    def release_memory(self) -> None:
        """Give memory back until :meth:`restore_memory`; only without unfinished requests.

        Raises:
            RuntimeError: There are unfinished requests.
        """

    @abstractmethod
    def restore_memory(self) -> None:
        """Take the memory again; released weights come by :meth:`update_weights` after it."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; unfinished requests are lost."""

    def generate(self, requests: Iterable[GenerationRequest]) -> list[FinishedCompletion]:
        """Submit requests and step until all have ended; in the order of the requests.

        Raises:
            RuntimeError: Other requests are unfinished; their completions would be lost.
        """
        if self.unfinished:
            raise RuntimeError(f"{self.unfinished} other requests are unfinished")
        order = []
        for request in requests:
            self.submit(request)
            order.append(request.request_id)
        finished: dict[int, FinishedCompletion] = {}
        while len(finished) < len(order):
            finished.update((item.request_id, item) for item in self.step())
        return [finished[number] for number in order]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
