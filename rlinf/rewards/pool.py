"""Scores completions in supervised processes: one that hangs or dies costs one sample."""

from __future__ import annotations

import json
import os
import selectors
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
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
        self.job = -1
        self.deadline = time.monotonic() + config.start_deadline
        self._progress = os.memfd_create("progress")
        self._process = SupervisedProcess(
            "rlinf.rewards.process",
            {"config": config.model_dump(mode="json")},
            descriptors=[self._progress],
        )
        self.connection = self._process.connection

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def give(self, job: int, sample: RewardInput) -> None:
        """Send a sample; ProcessLostError where the process has ended."""
        os.pwrite(self._progress, b"\0", 0)
        self._process.send("score", sample=vars(sample))
        self.state, self.job = "busy", job
        self.deadline = time.monotonic() + self._config.deadline

    def take(self) -> dict[str, Any] | None:
        """Read a message: the output of the sample that it has, or None when it is ready.

        ProcessLostError where it has ended, UserError where the functions cannot be built.
        """
        message = self._process.receive(0.0)
        self.state = "idle"
        output: dict[str, Any] | None = message.get("output")
        return output

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
            batch = _Batch([])
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
        """Score samples; the outputs are in their order.

        A sample whose function raises, returns no finite number, exceeds the deadline or ends its
        process is not valid; the others are not affected. RunFailure where the pool is closed, or
        its processes no longer start.
        """
        with self._lock:
            if not self._processes:
                raise RunFailure("the reward pool is closed")
            batch = _Batch(samples)
            try:
                while not batch.done:
                    self._hand_out(batch)
                    if not batch.done:
                        self._advance(batch)
            except BaseException:
                # The processes hold samples of a batch that nobody waits for any more.
                self._end()
                raise
            outputs = [batch.outputs[job] for job in range(len(samples))]
            self._faults.update(output.fault for output in outputs if output.fault is not None)
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
                job = batch.waiting[0]
                try:
                    process.give(job, batch.samples[job])
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
            output = process.take()
        except ProcessLostError as lost:
            self._lose(position, batch, "died", lost.detail)
            return
        self._failed_starts = 0
        if output is not None:
            batch.outputs[process.job] = RewardOutput(**output)

    def _lose(self, position: int, batch: _Batch, kind: FaultKind, detail: str) -> None:
        process = self._processes[position]
        if process.state == "busy":
            name = process.function_at_work()
            batch.outputs[process.job] = RewardOutput.invalid(name, kind, detail)
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


class _Batch:
    """The samples of one call, which of them wait, and what has become of the others."""

    def __init__(self, samples: Sequence[RewardInput]) -> None:
        self.samples = samples
        self.waiting: deque[int] = deque()
        self.outputs: dict[int, RewardOutput] = {}
        for job, sample in enumerate(samples):
            try:
                json.dumps([sample.answer, dict(sample.columns)])
            except (TypeError, ValueError, RecursionError) as error:
                why = f"the answer of the prompt, or a column, is no JSON: {error}"
                self.outputs[job] = RewardOutput.invalid("", "exception", why)
            else:
                self.waiting.append(job)

    @property
    def done(self) -> bool:
        return len(self.outputs) == len(self.samples)
