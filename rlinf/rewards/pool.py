"""Scores completions in supervised processes: one that hangs or dies costs one sample."""

from __future__ import annotations

import json
import os
import selectors
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from rlinf.errors import RunFailure
from rlinf.processes.child import ProcessLostError, SupervisedProcess
from rlinf.rewards.config import RewardConfig
from rlinf.rewards.protocol import FaultKind, RewardInput, RewardOutput

MAX_FAILED_STARTS = 3
"""Starts in a row without one process that became ready, after which the run ends."""


class RewardProcess:
    """One process that scores; starts at once, and says itself when it is ready."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._names = list(config.functions)
        self.state: Literal["starting", "idle", "busy"] = "starting"
        self.job: _Job | None = None
        self.deadline = time.monotonic() + config.start_deadline
        self._progress = os.memfd_create("progress")
        self._process = SupervisedProcess(
            "rlinf.rewards.process",
            {"config": config.model_dump(mode="json")},
            descriptors=[self._progress],
            imported=sorted({name for each in config.functions.values() for name in each.imported}),
        )
        self.connection = self._process.connection

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def give(self, job: _Job) -> None:
        """Send samples; ProcessLostError where the process has ended."""
        os.pwrite(self._progress, b"\0", 0)
        samples = [vars(sample) for sample in job.samples.values()]
        self._process.send("score", samples=samples, whole=job.whole)
        self.state, self.job = "busy", job
        self.deadline = time.monotonic() + self._config.deadline

    def take(self) -> list[RewardOutput] | None:
        """Read a message: the outputs of the samples that it has, or None when it is ready.

        ProcessLostError where it has ended, UserError where the functions cannot be built.
        """
        message = self._process.receive(0.0)
        self.state = "idle"
        outputs: list[dict[str, Any]] | None = message.get("outputs")
        return None if outputs is None else [RewardOutput(**output) for output in outputs]

    def function_at_work(self) -> str:
        """Name of the function that the process has begun last."""
        return self._names[os.pread(self._progress, 1, 0)[0]]

    def output_tail(self) -> str:
        """The end of what it printed."""
        return self._process.output_tail()

    def kill(self) -> None:
        """End it and whatever it started, now; may be called again."""
        self._process.kill()
        if self._progress >= 0:
            os.close(self._progress)
            self._progress = -1


class RewardPool:
    """Processes that score, replaced when they hang or die.

    May be used from any thread; calls of several threads take turns. ``processes`` takes the place
    of the config's.

    Raises:
        UserError: A function cannot be built.
        RunFailure: The processes do not start.
    """

    def __init__(self, config: RewardConfig, *, processes: int | None = None) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._faults: Counter[str] = Counter()
        self._failed_starts = 0
        self._processes: list[RewardProcess] = []
        try:
            for _ in range(processes or config.processes):
                self._processes.append(RewardProcess(config))
            batch = _Batch([], self._config)
            while any(process.state == "starting" for process in self._processes):
                self._advance(batch)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Ids of the processes."""
        return [process.pid for process in self._processes]

    def take_faults(self) -> dict[str, int]:
        """Return how often what went wrong since the last call, by :attr:`RewardOutput.fault`."""
        with self._lock:
            faults, self._faults = dict(self._faults), Counter()
        return faults

    def score(self, samples: Sequence[RewardInput]) -> list[RewardOutput]:
        """Score the samples of one group; see :meth:`score_groups`."""
        return self.score_groups([samples])[0]

    def score_groups(self, groups: Sequence[Sequence[RewardInput]]) -> list[list[RewardOutput]]:
        """Score samples, by groups of one prompt; the outputs are in their order.

        A sample whose function raises, returns no finite number, exceeds the deadline or ends its
        process is not valid; the others are not affected. Where a function of groups does so, none
        of the group is. RunFailure where the pool is closed, or its processes no longer start.
        """
        with self._lock:
            if not self._processes:
                raise RunFailure("the reward pool is closed")
            batch = _Batch(groups, self._config)
            try:
                while not batch.done:
                    self._hand_out(batch)
                    if not batch.done:
                        self._advance(batch)
            except BaseException:
                # The processes hold samples of a batch that nobody waits for any more.
                self._end()
                raise
            outputs = batch.outputs()
            self._faults.update(each.fault for group in outputs for each in group if each.fault)
        return outputs

    def close(self) -> None:
        """End every process."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        self._processes = []

    def _hand_out(self, batch: _Batch) -> None:
        for position, process in enumerate(self._processes):
            if process.state == "idle" and batch.waiting:
                try:
                    process.give(batch.waiting[0])
                except ProcessLostError:  # it ended between two samples, which is no sample's fault
                    self._replace(position)
                else:
                    batch.waiting.popleft()

    def _advance(self, batch: _Batch) -> None:
        """Wait for the next message or deadline, and deal with what has happened."""
        working = [process for process in self._processes if process.state != "idle"]
        if not working:
            return
        with selectors.PollSelector() as selector:
            for process in working:
                selector.register(process.connection, selectors.EVENT_READ, process)
            wait = min(process.deadline for process in working) - time.monotonic()
            ready = {key.data for key, _ in selector.select(max(wait, 0))}
        now = time.monotonic()
        for position, process in enumerate(self._processes):
            if process in ready:
                self._receive(position, batch)
            elif process.state != "idle" and now >= process.deadline:
                limit = "start_deadline" if process.state == "starting" else "deadline"
                seconds = getattr(self._config, limit)
                self._lose(position, batch, "timeout", f"no result after {seconds:g} s ({limit})")

    def _receive(self, position: int, batch: _Batch) -> None:
        process = self._processes[position]
        try:
            outputs = process.take()
        except ProcessLostError as lost:
            self._lose(position, batch, "died", lost.detail)
            return
        self._failed_starts = 0
        if outputs is not None and process.job is not None:
            batch.take(process.job, outputs)

    def _lose(self, position: int, batch: _Batch, kind: FaultKind, detail: str) -> None:
        process = self._processes[position]
        if process.state == "busy" and process.job is not None:
            name, samples = process.function_at_work(), process.job.samples.values()
            outputs = [RewardOutput.invalid(name, kind, detail, each.values) for each in samples]
            batch.take(process.job, outputs)
        else:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise RunFailure(
                    f"a process of the reward pool failed to start {self._failed_starts} times in "
                    f"a row: {detail}\n{process.output_tail()}"
                )
        self._replace(position)

    def _replace(self, position: int) -> None:
        self._processes[position].kill()
        self._processes[position] = RewardProcess(self._config)


@dataclass(frozen=True)
class _Job:
    """What a process scores at once: one sample, or the ``whole`` of a group, by their places in
    the group."""

    group: int
    samples: dict[int, RewardInput]
    whole: bool


class _Batch:
    """The groups of one call, which jobs of them wait, and what has become of the others."""

    def __init__(self, groups: Sequence[Sequence[RewardInput]], config: RewardConfig) -> None:
        kinds = {section.of_groups for section in config.functions.values()}
        self._compares = True in kinds
        self._groups = groups
        self._outputs: list[dict[int, RewardOutput]] = [{} for _ in groups]
        self._unfinished = set(range(len(groups)))
        self.waiting: deque[_Job] = deque()
        for number, samples in enumerate(groups):
            for place, sample in enumerate(samples):
                if problem := _problem_with(sample):
                    output = RewardOutput.invalid("", "exception", problem)
                    self._outputs[number][place] = output
                elif False in kinds:
                    self.waiting.append(_Job(number, {place: sample}, whole=False))
                else:
                    self._outputs[number][place] = RewardOutput(reward=0.0)
            self._go_on_with(number)

    @property
    def done(self) -> bool:
        return not self._unfinished

    def outputs(self) -> list[list[RewardOutput]]:
        return [[scored[place] for place in sorted(scored)] for scored in self._outputs]

    def take(self, job: _Job, outputs: Iterable[RewardOutput]) -> None:
        self._outputs[job.group].update(zip(job.samples, outputs, strict=True))
        if job.whole:
            self._unfinished.remove(job.group)
        else:
            self._go_on_with(job.group)

    def _go_on_with(self, number: int) -> None:
        """Compare the samples of a group when each of them is scored by itself."""
        scored, samples = self._outputs[number], self._groups[number]
        if len(scored) < len(samples):
            return
        valid = {
            place: replace(sample, values=scored[place].parts)
            for place, sample in enumerate(samples)
            if scored[place].valid
        }
        if self._compares and valid:
            self.waiting.append(_Job(number, valid, whole=True))
        else:
            self._unfinished.remove(number)


def _problem_with(sample: RewardInput) -> str | None:
    try:
        json.dumps([sample.answer, dict(sample.columns)])
    except (TypeError, ValueError, RecursionError) as error:
        return f"the answer of the prompt, or a column, is no JSON: {error}"
    return None
