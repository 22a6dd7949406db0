"""The policy behind a server: what it answers to requests, under which weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.models.policy import ActionSample, Policy, draw_noise, drawn_in_evaluation
from rlinf.models.policy_weights import load_travelling
from rlinf.models.vla.instructions import InstructionTable
from rlinf.serving.requests import PROMPT, ActionRequest, RefusedRequestError


@runtime_checkable
class ContinuesChunks(Protocol):
    """A policy whose next chunk agrees with actions that are committed already: a flow model that
    is guided while it denoises (Black, Galliker and Levine 2025)."""

    def sample_continuing(
        self, observations: Mapping[str, Tensor], prefix: Tensor, weights: Tensor
    ) -> ActionSample:
        """Act as :meth:`Policy.sample` does without noise, outside of the inference mode; see
        :func:`rlinf.models.guidance.guided_velocity`.

        Args:
            observations: Each [B, ...].
            prefix: [B, C, A] float32, as :meth:`Policy.sample` gives them, what the chunk begins
                with.
            weights: [B, C] float32 in [0, 1], how firmly.
        """


class ActingPolicy:
    """A policy and the version of its weights; one thread at a time may call it.

    Args:
        policy: On its device, in evaluation mode.
        version: Of its weights.
        block_size: Rows of every forward pass of single observations, the last one repeated where
            there are fewer: what a row is answered by the mode depends, to the last bit, on nobody
            else. None: as many as there are, equal up to rounding.
        deterministic: Whether it acts by its mode; else its actions are drawn, as those of an
            evaluation are, anew for every pass.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        version: int,
        block_size: int | None = None,
        deterministic: bool = True,
    ) -> None:
        self.policy, self.version, self.block_size = policy, version, block_size
        self.deterministic, self._generator = deterministic, torch.Generator()
        self._generator.seed()
        self._noise = {} if deterministic else drawn_in_evaluation(policy)
        places = [*policy.parameters(), *policy.buffers()]
        self._device = places[0].device if places else torch.device("cpu")
        self._prompts = [each for each in policy.modules() if isinstance(each, InstructionTable)]

    @property
    def continues(self) -> bool:
        """Whether it takes a prefix; what continues a chunk is guided from the mode's start."""
        return self.deterministic and isinstance(self.policy, ContinuesChunks)

    def check_instruction(self, text: str) -> None:
        """Look whether the policy can be told this; from whichever thread.

        Raises:
            RefusedRequestError: It is too long, or has a token that stands for a picture, or one
                that the model lacks.
        """
        for prompts in self._prompts:
            try:
                needed, most = prompts.tokens_of(text)
            except ConfigError as error:
                raise RefusedRequestError(f"`{PROMPT}`: {error.reason}") from error
            if needed > most:
                raise RefusedRequestError(
                    f"`{PROMPT}` makes {needed} tokens, with what the model is told beside it; "
                    f"legal: {most} or fewer, that is a shorter text"
                )

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take other weights.

        Raises:
            CheckpointError: They are of another model, and nothing changed.
        """
        load_travelling(self.policy, weights)
        self.version = version

    def act(self, requests: Sequence[ActionRequest]) -> list[np.ndarray]:
        """[B, C, A] float32 for each request.

        Single observations share forward passes. Several rows that a client sent together are a
        forward pass of their own, as they are: it is the client that chose their number.
        """
        answers: dict[int, np.ndarray] = {}
        for continues in (False, True):
            shared = [number for number, request in enumerate(requests)
                      if request.single and (request.prefix is not None) == continues]  # fmt: skip
            size = self.block_size or len(shared) or 1
            for first in range(0, len(shared), size):
                block = shared[first : first + size]
                filled = [requests[number] for number in block]
                filled += filled[-1:] * (size - len(block) if self.block_size else 0)
                actions = self._pass(filled)
                answers |= {number: actions[row : row + 1] for row, number in enumerate(block)}
        for number, request in enumerate(requests):
            if not request.single:
                answers[number] = self._pass([request])
        return [answers[number] for number in range(len(requests))]

    def _pass(self, requests: Sequence[ActionRequest]) -> np.ndarray:
        """Actions of all rows of the requests, one behind the other."""
        prefixes = [request.prefix for request in requests if request.prefix is not None]
        # Guidance differentiates, which tensors of the inference mode refuse.
        with torch.inference_mode(not prefixes), torch.no_grad():
            keys = requests[0].observations
            inputs = {key: self._tensor([r.observations[key] for r in requests]) for key in keys}
            if prefixes and isinstance(self.policy, ContinuesChunks):
                sample = self.policy.sample_continuing(
                    inputs,
                    self._tensor([prefix.actions[None] for prefix in prefixes]),
                    self._tensor([prefix.weights[None] for prefix in prefixes]),
                )
            else:
                sample = self.policy.sample(inputs, self._drawn(inputs))
        actions: np.ndarray = sample.actions.float().cpu().numpy()
        return actions

    def _drawn(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        rows = (len(next(iter(inputs.values()))),)
        drawn = draw_noise(self._noise, rows, self._generator)
        return {name: each.to(self._device) for name, each in drawn.items()} or None

    def _tensor(self, parts: Sequence[np.ndarray]) -> Tensor:
        # What comes off the wire is read-only, which torch does not know.
        return torch.from_numpy(np.concatenate(parts)).to(self._device)
