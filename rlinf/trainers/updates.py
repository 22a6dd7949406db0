"""What became of optimizer steps, and when a run ends over them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.errors import RunFailure
from rlinf.trainers.config import FirstUpdateBounds

log = logging.getLogger(__name__)

_RATIO = "actor/ratio"
"""Metric of an update: the mean of the ratios of its loss."""
UpdateOutcome = Literal["applied", "skipped", "refused", "empty"]

_COUNTED: dict[UpdateOutcome, str] = {
    "applied": "optimizer_steps",
    "skipped": "skipped_updates",
    "refused": "refused_updates",
    "empty": "empty_updates",
}


@dataclass(frozen=True)
class Update:
    """What became of one global batch: ``skipped`` where its gradient was not finite, ``refused``
    where the algorithm does not want it, ``empty`` where there is nothing to train on; its metrics
    are summed over micro batches and ranks."""

    outcome: UpdateOutcome
    metrics: dict[str, float]


def phase_metrics(updates: Sequence[Update], *, prefix: str) -> dict[str, float]:
    """Mean over the optimizer steps of a phase, over all that had something to train on where none
    was applied; counts, of which that of tokens is over all updates."""
    applied = [each for each in updates if each.outcome == "applied"] or updates
    full = [update.metrics for update in applied if update.metrics]
    names = full[0] if full else {}
    metrics = {name: sum(each[name] for each in full) / len(full) for name in names}
    tokens = f"{prefix}/tokens"
    if tokens in metrics:
        metrics[tokens] = sum(update.metrics.get(tokens, 0.0) for update in updates)
    for outcome, name in _COUNTED.items():
        metrics[f"{prefix}/{name}"] = float(sum(update.outcome == outcome for update in updates))
    return metrics


_UNTRAINED: dict[UpdateOutcome, str] = {
    "empty": (
        "no row of a batch counts. Filters that leave out rows or groups may leave out all of "
        "them; see the metrics of the rollout"
    ),
    "refused": "the algorithm refused updates; see algorithm.early_stop_imp_ratio",
    "skipped": "losses or gradients were not finite",
}


class UntrainedPhases:
    """Warns of the first update that the algorithm refuses, and where phase after phase no update
    is applied: the run would go on to its end."""

    BOUND = 5

    def __init__(self, section: str) -> None:
        self._section, self._in_a_row = section, 0
        self._seen: set[UpdateOutcome] = set()
        self._tells = True

    def note(self, updates: Sequence[Update], *, step: int) -> None:
        """Count a phase with its updates."""
        refused = [update for update in updates if update.outcome == "refused"]
        if refused and self._tells:
            self._tells = False  # the first one; the metric counts the others
            self._warn_of_refused(refused[0], step)
        outcomes = {update.outcome for update in updates}
        if not outcomes or "applied" in outcomes:
            self._in_a_row = 0
            self._seen.clear()
            return
        self._in_a_row += 1
        self._seen |= outcomes
        if self._in_a_row == self.BOUND:
            log.warning(
                "%s: nothing was trained in %d training phases in a row, as %s.",
                self._section,
                self.BOUND,
                "; and ".join(why for outcome, why in _UNTRAINED.items() if outcome in self._seen),
            )

    def _warn_of_refused(self, update: Update, step: int) -> None:
        log.warning(
            "%s: an update of training phase %d was refused by the algorithm and not applied, with "
            "a mean ratio of %.6g; see algorithm.early_stop_imp_ratio. The metric "
            "%s/refused_updates counts them.",
            self._section,
            step,
            update.metrics.get(_RATIO, float("nan")),
            self._section,
        )


class SkippedUpdates:
    """Counts updates without a finite loss and gradient, and stops the run where more than the
    bound are skipped in a phase, or in a row, as spoilt weights do with few updates in each;
    ``optim`` is the key of the optimizer's settings. One that ``tells`` warns of the first.

    Attributes:
        in_a_row: Skipped since the last one that was applied; part of a checkpoint.
    """

    def __init__(
        self,
        *,
        bound: int,
        section: str,
        optim: str,
        directory: Path | None = None,
        tells: bool = True,
    ) -> None:
        self._bound, self._section, self._directory = bound, section, directory
        self._optim = optim
        self.in_a_row = 0
        self._tells = tells

    def note(self, updates: Sequence[Update], batch: Batch, *, step: int) -> None:
        """Count the last of the updates of a phase, on a global batch; a RunFailure where too many
        were skipped."""
        last = updates[-1]
        if last.outcome == "applied":
            self.in_a_row = 0
        if last.outcome != "skipped":
            return
        self.in_a_row += 1
        if self._tells:
            self._tells = False  # the first one; the metric counts the others
            log.warning(
                "%s: an update of training phase %d was skipped, as its loss or gradient is not "
                "finite; the run goes on while no more than %d in a row are. The metric "
                "%s/skipped_updates counts them.",
                self._section,
                step,
                self._bound,
                self._section,
            )
        in_phase = sum(update.outcome == "skipped" for update in updates)
        if max(in_phase, self.in_a_row) <= self._bound:
            return
        which = f"{in_phase} updates of training phase {step}"
        if self.in_a_row > in_phase:
            which = f"{self.in_a_row} updates in a row, up to training phase {step},"
        where = ""
        if self._directory is not None:
            path = self._directory / f"{self._section}_batch_of_step_{step}"
            where = f"; the batch is in {keep_batch(path, batch, step, last.metrics)}"
        advice = f"lower {self._optim}.lr or {self._optim}.max_grad_norm"
        if batch.advantages is not None and not bool(batch.advantages.isfinite().all()):
            advice = "so were advantages before it: look at what computes them, rewards and values"
        raise RunFailure(f"{which} had a loss or gradient that is not finite; {advice}{where}")


def keep_batch(path: Path, batch: Batch, step: int, metrics: Mapping[str, float]) -> Path:
    """Write the tensors of a batch as ``path``.safetensors, which is returned, and what is known
    about it as ``path``.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: column.cpu().contiguous() for name, column in batch.tensors().items()}
    file = path.with_name(path.name + ".safetensors")
    save_file(tensors, file)
    about = {
        "step": step,
        "metrics": {name: repr(value) for name, value in metrics.items()},
        "rows": len(batch),
        "version": batch.version,
    }
    path.with_name(path.name + ".json").write_text(json.dumps(about, indent=2) + "\n")
    return file


_KL, _MEAN, _FAR, _COUNT, _OLD = (f"first/{n}" for n in ("kl", "mean", "far", "count", "old"))
_CLAIMED = 1000.0
"""KL that a loss may tell of equal weights, in bounds: it may sum over the terms of a row."""


class FirstUpdate:
    """Compares the policy that trains with the one that acted, while their weights are equal;
    ``kl`` is the mean that was found last, None before."""

    def __init__(self, bounds: FirstUpdateBounds) -> None:
        self._bounds = bounds
        self._warned = False
        self.kl: float | None = None

    @torch.no_grad()
    def disagreement(self, log_probs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Sums over the terms of a micro batch that the present weights sampled, whose log-probs
        [n, K] are those of the weights that train; KL by Schulman's k3."""
        counted = fresh = batch.mask > 0
        if batch.version is not None:
            fresh = counted & (batch.versions == batch.version)
        log_ratio = torch.where(fresh, log_probs - batch.log_probs, 0.0)
        ratio = log_ratio.exp()
        distance = (ratio - 1).abs()
        bound = self._bounds.any_ratio
        # What is no number is far, too.
        far = ~(distance <= (torch.inf if bound is None else bound))
        return {
            _KL: (ratio - 1 - log_ratio).sum(),
            _MEAN: distance.sum(),
            _FAR: far.sum().to(ratio.dtype),
            _COUNT: fresh.sum().to(ratio.dtype),
            _OLD: (counted & ~fresh).sum().to(ratio.dtype),
        }

    def check(self, metrics: dict[str, float], *, finite: bool) -> None:
        """Take the sums out of the metrics of an update, and judge them: a RunFailure where both
        disagree, unless the update is not ``finite`` and skipped anyway."""
        kl, mean, far, count, old = (metrics.pop(n) for n in (_KL, _MEAN, _FAR, _COUNT, _OLD))
        if not count:
            return
        self.kl = kl = kl / count
        mean, bounds = mean / count, self._bounds
        wide = bounds.mean_ratio is not None and not mean <= bounds.mean_ratio
        if not finite or (kl <= bounds.kl and not far and not wide):
            claimed = 0.0 if old or not finite else metrics.get("actor/approx_kl", 0.0)
            if claimed > _CLAIMED * bounds.kl and not self._warned:
                self._warned = True
                log.warning(
                    "The loss tells a KL of %.3g between policies that are equal (%.1e): does it "
                    "compare log-probs of other shapes, [N, C, A] of a policy with [N, K] of a "
                    "batch? `batch.fold` sums them over the terms.",
                    claimed,
                    kl,
                )
            return
        ratios = f"ratios are {mean:.2e} away from 1 on average"
        if bounds.mean_ratio is not None:
            ratios += f" (bound {bounds.mean_ratio:.0e})"
        if bounds.any_ratio is not None:
            ratios += f", {far:.0f} of them further than {bounds.any_ratio:.0e}"
        raise RunFailure(
            "rollout and trainer do not compute the same log-probs: over the "
            f"{count:.0f} terms that the present weights sampled the KL between them is "
            f"{kl:.2e} (bound {bounds.kl:.0e}) and {ratios}"
        )
