"""Supervised learning: the loss on what is to be learnt, tokens or actions."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import Algorithm, Loss, Modules, Share

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
            errors = -batch.fold(policy(batch).log_probs)
        elif self._objective == "model":
            errors = policy(batch, imitate=True).flatten(1)
        else:
            distance: Tensor = policy.mode(batch.inputs) - batch.inputs["raw_actions"]
            errors = distance.square().flatten(1)
        return errors * (batch.mask > 0)
