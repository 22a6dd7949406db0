"""Evaluation in simulators as a contract: episodes with their seeds, what success is, outcomes.

See :mod:`rlinf.data.specifications`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from rlinf.data.estimates import wilson_interval
from rlinf.data.specifications import HashedSpec, SpecifiedResult, in_order
from rlinf.errors import ConfigError

SuccessDefinition = Literal["success_once", "success_at_end"]


@dataclass(frozen=True)
class EvaluationSpec(HashedSpec):
    """What is played in an evaluation, to the last seed; ConfigError where that makes no sense."""

    format = "rlinf-evaluation-spec/1"

    task: Mapping[str, Any]
    """Simulator, task and options, as JSON values."""
    episodes: tuple[tuple[int, int], ...]
    """Every episode: its id and the seed of its reset."""
    horizon: int
    """Primitive steps after which an episode ends."""
    chunk: int = 1
    """Primitive actions that are executed per query of the policy."""
    success: SuccessDefinition = "success_once"
    """Whether an episode succeeds by any of its steps, or by its last one."""

    def __post_init__(self) -> None:
        if not self.episodes:
            raise ConfigError("an evaluation needs at least one episode")
        numbers = [("horizon", self.horizon), ("chunk", self.chunk),
                   *(("episodes", each) for pair in self.episodes for each in pair)]  # fmt: skip
        for name, number in numbers:
            if type(number) is not int:
                raise ConfigError(f"{name} of an evaluation holds {number!r}, no whole number")
            if name == "episodes" and not 0 <= number < 1 << 31:
                raise ConfigError(
                    f"episodes of an evaluation holds {number}; ids and seeds lie between 0 and "
                    f"{(1 << 31) - 1}"
                )
        if len({episode for episode, _ in self.episodes}) < len(self.episodes):
            raise ConfigError("an evaluation lists every episode id once")
        if self.horizon < 1 or self.chunk < 1:
            raise ConfigError(
                f"horizon and chunk of an evaluation are at least 1, not {self.horizon} and "
                f"{self.chunk}"
            )
        if self.success not in get_args(SuccessDefinition):
            raise ConfigError(
                f"success = {self.success!r} is unknown; one of {get_args(SuccessDefinition)}"
            )


@dataclass(frozen=True)
class EpisodeOutcome:
    """How one episode of an evaluation ended."""

    episode_id: int
    seed: int
    success_once: bool
    success_at_end: bool
    episode_return: float
    episode_len: int
    valid: bool = True
    """False when the simulator failed; such an episode counts as no success."""
    task: int = 0
    """Which of the result's tasks it was."""
    seed_shift: int = 0
    """By how much the simulator moved on from the seed, where it could not start that one."""


def manner_of(*, deterministic: bool) -> str:
    """How a policy acted, in words."""
    return "by the mode" if deterministic else "by drawn actions"


_RETURN = "mean return"


@dataclass(frozen=True)
class EvaluationResult(SpecifiedResult):
    """Outcomes of every episode of a specification, in its order; built by :meth:`of`."""

    format = "rlinf-evaluation-result/1"
    outcome = EpisodeOutcome
    items = "episodes"
    metric = "success rate"

    spec_sha256: str
    success: SuccessDefinition
    """The specification's definition of success."""
    checkpoint: str
    outcomes: tuple[EpisodeOutcome, ...]
    """One per episode."""
    tasks: tuple[str, ...] = ()
    """What the tasks are, in words; empty where the simulator says nothing, and where every episode
    is a chain of them."""
    chain_length: int = 0
    """Tasks that follow each other in an episode, of whose return each is 1; 0: it is of one."""
    deterministic: bool = True
    """Whether the mode of the policy acted; else its actions were drawn."""
    task_chains: tuple[int, ...] = ()
    """Where simulators with chains are beside others: of each of the tasks the length of the chain
    that its episodes are, 0 for none. Else empty."""

    @classmethod
    def of(
        cls,
        spec: EvaluationSpec,
        outcomes: Iterable[EpisodeOutcome],
        checkpoint: str,
        tasks: Iterable[str] = (),
        chain_length: int = 0,
        *,
        task_chains: tuple[int, ...] = (),
        deterministic: bool = True,
    ) -> EvaluationResult:
        """Put the outcomes in the order of the specification; ValueError for others than its."""
        ordered = in_order(
            spec.episodes,
            outcomes,
            lambda outcome: (outcome.episode_id, outcome.seed),
            item="episode",
            done="played",
            by=", by id and seed",
        )
        told = () if chain_length or (task_chains and all(task_chains)) else tuple(tasks)
        return cls(
            spec.sha256, spec.success, checkpoint, ordered, told, chain_length, deterministic,
            task_chains,
        )  # fmt: skip

    @property
    def manner(self) -> str:
        """Whose actions were executed."""
        return manner_of(deterministic=self.deterministic)

    def scores(self, metric: str = metric) -> np.ndarray:
        """[episodes] float64: 1 for success by the specification's definition; or the returns."""
        if metric == _RETURN:
            return np.array([outcome.episode_return for outcome in self.outcomes])
        return np.array([float(o.valid and getattr(o, self.success)) for o in self.outcomes])

    def compared_by(self, other: EvaluationResult) -> str:
        """The success rate; the return where neither ever succeeds, as where a task has no goal."""
        both = (self, other)
        by_return = not any(each.successes or each.n_invalid for each in both)
        return _RETURN if by_return else self.metric

    @property
    def n(self) -> int:
        """Number of episodes."""
        return len(self.outcomes)

    @property
    def n_invalid(self) -> int:
        """Episodes that the simulator did not finish; they count as no success."""
        return sum(not outcome.valid for outcome in self.outcomes)

    @property
    def successes(self) -> int:
        """Number of successful episodes."""
        return int(self.scores().sum())

    @property
    def success_rate(self) -> float:
        """Successful share of all episodes."""
        return self.successes / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the success rate."""
        return wilson_interval(self.successes, self.n)

    @property
    def by_task(self) -> dict[str, tuple[int, int]]:
        """Successes and episodes of every task; 0 of 0 where the simulator finished none. Those of
        chains are left out where there are others: such an episode is of none of its tasks."""
        chains = self.task_chains or (0,) * len(self.tasks)
        of_one = {n: task for n, task in enumerate(self.tasks) if not chains[n]}
        found = dict.fromkeys(of_one.values(), (0, 0))
        measured = {outcome.task for outcome in self.outcomes if outcome.valid}
        for outcome, score in zip(self.outcomes, self.scores(), strict=True):
            if self.tasks and (outcome.task not in measured or outcome.task not in of_one):
                continue
            task = of_one[outcome.task] if self.tasks else ""
            successes, episodes = found.get(task, (0, 0))
            found[task] = (successes + int(score), episodes + 1)
        return found

    @property
    def mean_over_tasks(self) -> float:
        """Mean of the tasks' success rates, NaN where a task was not played."""
        rates = [won / played if played else math.nan for won, played in self.by_task.values()]
        return math.fsum(rates) / len(rates)

    @property
    def chains(self) -> dict[int, list[int]]:
        """By the length of a chain of tasks: how many of them each of its episodes carried out, 0
        where the simulator did not finish it. Empty where there are no chains."""
        found: dict[int, list[int]] = {}
        for each in self.outcomes:
            whole = self.task_chains[each.task] if self.task_chains else self.chain_length
            if whole:
                found.setdefault(whole, []).append(round(each.episode_return) if each.valid else 0)
        return dict(sorted(found.items()))

    @property
    def reached(self) -> dict[int, int]:
        """Of chains of tasks: episodes by the length that they reached at least."""
        carried_out = [length for lengths in self.chains.values() for length in lengths]
        return {
            wanted: sum(length >= wanted for length in carried_out)
            for wanted in range(1, max(self.chains, default=0) + 1)
        }

    @property
    def reached_shares(self) -> dict[int, float]:
        """The same as shares of the episodes whose chains are so long."""
        chains = self.chains
        return {
            wanted: reached / sum(len(each) for whole, each in chains.items() if whole >= wanted)
            for wanted, reached in self.reached.items()
        }

    @property
    def mean_length(self) -> float:
        """Of chains of tasks: how many of them are carried out, on average over their episodes."""
        return sum(self.reached.values()) / sum(map(len, self.chains.values()))

    @property
    def mean_return(self) -> float:
        """Mean return of the valid episodes; NaN if there is none."""
        returns = self._returns
        return math.fsum(returns) / len(returns) if returns else math.nan

    @property
    def return_deviation(self) -> float:
        """Standard deviation of the same returns; NaN if there is none."""
        mean = self.mean_return
        squares = [(each - mean) ** 2 for each in self._returns]
        return math.sqrt(math.fsum(squares) / len(squares)) if squares else math.nan

    @property
    def _returns(self) -> list[float]:
        return [outcome.episode_return for outcome in self.outcomes if outcome.valid]

    @property
    def score(self) -> float:
        """By what results are ranked: the success rate, in (0, 1]; where no episode succeeds, as at
        a task that has no goal but its reward, a number in [-1, 0] that grows with the return."""
        if self.successes:
            return self.success_rate
        found = self.mean_return
        return -1.0 if math.isnan(found) else (found / (1.0 + abs(found)) - 1.0) / 2.0

    def __str__(self) -> str:
        low, high = self.interval
        whole = (
            f"success rate {self.success_rate:.3f} (95 % interval {low:.3f} to {high:.3f}, "
            f"n = {self.n}, spec {self.spec_sha256[:12]})"
            + ("" if self.deterministic else f", {self.manner}")
        )
        lines = [whole, *(self._lines_of_tasks() if len(self.tasks) > 1 else ())]
        lines += self._lines_of_chains()
        if self.n_invalid:
            lines.append(
                f"  the simulator did not finish {self.n_invalid} of {self.n} episodes, which "
                "count as no success"
            )
        bare = not (self.successes or self.chains)
        if bare and self.n_invalid < self.n:  # a task may have no goal but its reward
            lines.append(f"  mean return {self.mean_return:.5g} ± {self.return_deviation:.3g}")
        return "\n".join(lines)

    def _lines_of_chains(self) -> Iterator[str]:
        """The share that reached each length with its interval, then the mean length."""
        for whole, lengths in self.chains.items():
            n = len(lengths)
            among = f", n = {n}" if n < self.n else ""
            for wanted in range(1, whole + 1):
                reached = sum(length >= wanted for length in lengths)
                low, high = wilson_interval(reached, n)
                part = f"{reached / n:.3f} ({low:.3f} to {high:.3f}{among})"
                yield f"  {part}  reached {wanted} of {whole}"
            yield f"  {sum(lengths) / n:.3f}  mean length of {whole}"

    def _lines_of_tasks(self) -> Iterator[str]:
        """Every task's rate with its interval, then the mean of several; a task without one is
        named."""
        listed = Counter(self.tasks[outcome.task] for outcome in self.outcomes)
        for task, (won, played) in self.by_task.items():
            if played:
                low, high = wilson_interval(won, played)
                yield f"  {won / played:.3f} ({low:.3f} to {high:.3f}, n = {played})  {task}"
            elif listed[task]:
                yield f"  missing  {task}: the simulator finished none of {listed[task]} episodes"
            else:
                yield f"  not played  {task}"
        missing = sum(not played for _, played in self.by_task.values())
        count = len(self.by_task)
        if missing:
            yield f"  no mean over tasks: {missing} of {count} were not played"
        elif count > 1:
            yield f"  {self.mean_over_tasks:.3f}  mean over {count} tasks"

    def summary(self) -> dict[str, Any]:
        """Counts, the success rate with its interval, and the mean return."""
        mean_return = self.mean_return
        return {
            "n": self.n,
            "n_invalid": self.n_invalid,
            "successes": self.successes,
            "success_rate": self.success_rate,
            "wilson_interval_95": list(self.interval),
            "mean_return": None if math.isnan(mean_return) else mean_return,
            "tasks": {
                task: {
                    "n": played,
                    "successes": won,
                    "wilson_interval_95": list(wilson_interval(won, played)) if played else None,
                }
                for task, (won, played) in self.by_task.items()
            },
            "missing_tasks": [task for task, (_, played) in self.by_task.items() if not played],
            **({"reached": self.reached, "mean_length": self.mean_length} if self.chains else {}),
        }
