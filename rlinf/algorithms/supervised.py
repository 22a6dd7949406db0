"""Supervised learning: the loss on what is to be learnt, tokens or actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import Algorithm, Loss, Modules, Share
from rlinf.errors import ConfigError
from rlinf.models.policy import NoiseSpec, Policy, draw_noise

_SHOWN, _SHARE = "demonstrations.", "demonstrations.share"

Objective = Literal["likelihood", "squared_error", "model"]


class Supervised(Algorithm):
    """Mean error of the terms where ``mask`` is not 0, over the whole global batch.

    With ``likelihood`` the error of a term is −log π: of target tokens their mean cross entropy, of
    recorded actions behaviour cloning (Pomerleau 1991). With ``squared_error`` it is the squared
    distance between a dimension of a recorded action and the mode of the policy there, with
    ``model`` what the policy itself says, as flow matching.
    """

    def __init__(self, objective: Objective = "likelihood") -> None:
        self._objective = objective

    def prepare(self, rollout: Any) -> tuple[Batch, dict[str, float]]:
        """What is to be learnt is given."""
        return rollout, {}

    def normalizer(self, batch: Batch) -> float:
        """Terms to be learnt; 1 if there are none."""
        return float((batch.mask > 0).sum()) or 1.0

    def losses(self) -> tuple[Loss, ...]:
        """One, of the policy; see the class."""

        def of(modules: Modules, batch: Batch, normalizer: float) -> Share:
            return self.errors(modules["policy"], batch).sum() / normalizer, {}

        return (Loss("policy", ("policy",), of),)

    def errors(self, policy: Any, batch: Batch) -> Tensor:
        """[N, K] error of each term, 0 where it is not to be learnt."""
        errors: Tensor
        if self._objective == "likelihood":
            errors = -batch.fold(self._log_probs(policy, batch))
        elif self._objective == "model":
            errors = policy(batch, imitate=True).flatten(1)
        else:
            distance: Tensor = policy(batch, mode=True) - batch.inputs["raw_actions"]
            errors = distance.square().flatten(1)
        return errors * (batch.mask > 0)

    @staticmethod
    def _log_probs(policy: Any, batch: Batch) -> Tensor:
        try:
            found: Tensor = policy(batch).log_probs
        except KeyError as error:
            name = error.args[0] if error.args else ""
            if name in batch.inputs:
                raise
            raise ConfigError(
                f"objective likelihood: to say how likely an action is the policy needs `{name}`, "
                "which its own actions have and recorded ones have not; nearest: model where the "
                "policy has a loss of its own, otherwise squared_error"
            ) from error
        return found


def check_objective(policy: Policy, objective: Objective, *, model: str, key: str) -> None:
    """Refuse, by a ConfigError, an objective that a policy of this type has not."""
    lacks = {
        "squared_error": None if hasattr(policy, "mode") else "mode in closed form",
        "model": None if policy.imitates else "supervised loss of its own",
    }.get(objective)
    if lacks is not None:
        nearest = "model" if policy.imitates else "likelihood"
        raise ConfigError(f"a policy of type {model} has no {lacks}; nearest: {nearest}", key=key)


def imitated(policy: Policy, objective: Objective) -> tuple[int, int]:
    """Recorded actions before the present step and from it on that an objective is given."""
    return policy.imitated if objective == "model" else (0, policy.chunk)


def with_noise(batch: Batch, specs: Mapping[str, NoiseSpec], words: tuple[int, ...]) -> Batch:
    """A whole batch with the noise that the loss of a model needs: it depends on these numbers
    alone, not on the ranks that divide the batch.

    Zeros behind the last word do not count, so that each use ends with a number of its own: (seed,
    step) are the numbers by which the first part of a rollout acts.
    """
    if not specs:
        return batch
    seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))
    drawn = draw_noise(specs, (len(batch),), torch.Generator().manual_seed(seed))
    placed = {name: each.to(batch.mask.device) for name, each in drawn.items()}
    return replace(batch, inputs={**batch.inputs, **placed})


# -- beside another loss ------------------------------------------------------------------------


def with_demonstrations(batch: Batch, shown: Batch, *, weight: float, rows: int) -> Batch:
    """Rows each of which has a recorded chunk beside it: ``shown`` in its order, from the beginning
    again where it has fewer, as beside the rows that a fault added to a rollout.

    Over a global batch of ``rows`` rows the errors of the chunks count as ``weight`` times the mean
    over rows of the mean over their terms.
    """
    beside = shown.select(torch.arange(len(batch)) % len(shown)).to(batch.mask.device)
    counted = (beside.mask > 0).to(beside.mask)
    share = counted * (weight / rows) / counted.sum(dim=1, keepdim=True).clamp(min=1)
    columns = {_SHOWN + name: column for name, column in beside.inputs.items()}
    return replace(batch, inputs={**batch.inputs, **columns, _SHARE: share})


def demonstrations_of(batch: Batch) -> Batch | None:
    """The recorded chunks beside the rows, whose ``mask`` is the share of each term; or None."""
    if _SHARE not in batch.inputs:
        return None
    inputs = {
        name.removeprefix(_SHOWN): column
        for name, column in batch.inputs.items()
        if name.startswith(_SHOWN) and name != _SHARE
    }
    return Batch.of(inputs=inputs, mask=batch.inputs[_SHARE])
