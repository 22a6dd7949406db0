"""The worker groups of a run on a cluster: started together, fed step by step, ended together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any, Self

from rlinf.checkpoint.manifest import FileRecord
from rlinf.checkpoint.records import from_tree, to_tree
from rlinf.config.nearest import did_you_mean
from rlinf.errors import CheckpointError, ConfigError, RunFailure
from rlinf.flow.executor import (
    Arguments,
    Executor,
    Hooks,
    Reports,
    RunningStep,
    SavedStep,
    StepReport,
)
from rlinf.flow.graph import Flow
from rlinf.flow.stage_worker import StageCost, StageReport, StageWorker, WorkerPlace
from rlinf.flow.stream import Item
from rlinf.runners.task import Task, worker_class
from rlinf.scheduler import Cluster, ComponentPlacement
from rlinf.scheduler.cluster_config import ClusterConfig
from rlinf.scheduler.errors import WaitTimeout
from rlinf.scheduler.services.shared_directory import destination
from rlinf.scheduler.worker_group import WorkerGroup, WorkerGroupFuncResult

log = logging.getLogger(__name__)

_HANDOVER_SECONDS = 30.0
"""For receivers to take weights, after which it is told that they do not."""
_PATIENCE_SECONDS = 5.0
"""For workers to close after a failure."""
_INTERRUPT_SECONDS = 1.0
"""The same after Ctrl-C, for which someone waits: what is at work goes on until it is ended."""


class Groups:
    """A context manager that starts the groups of a task and ends them.

    Without ``trains`` there is no trainer, and the groups that evaluate are started. ``launched``
    is called when the workers are launched, before they are waited for. ``traces`` is where
    ``cluster.tracer`` writes; None: nothing is traced.
    """

    def __init__(
        self,
        task: Task[Any],
        *,
        trains: bool = True,
        launched: Callable[[], object] = lambda: None,
        traces: Path | None = None,
    ) -> None:
        self._task, self._config, self._trains = task, task.config, trains
        self._launched, self._traces = launched, traces
        self._plan = task.config.plan
        self._groups: dict[str, WorkerGroup] = {}
        self._executors: list[Executor] = []
        self._evaluations: dict[int, Executor] = {}
        self._cluster: Cluster
        self._training: Executor
        self._weights: WeightHandover | None = None
        chosen = None if trains else task.evaluates
        self._workers: dict[str, type[StageWorker]] = {
            name: worker_class(reference)
            for name, reference in task.groups.items()
            if name in task.config.components and (chosen is None or name in chosen)
        }
        self.started: dict[str, list[Any]] = {}
        """What the ``start`` of each component returned, by rank."""

    def __enter__(self) -> Self:
        try:
            self._launch()
            self._launched()
            self._start()
        except BaseException as error:
            self.close(because=error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *trace: object
    ) -> None:
        self.close(because=error)

    def __getitem__(self, component: str) -> WorkerGroup:
        """The group of a component."""
        return self._groups[component]

    # -- beginning and end ----------------------------------------------------------------------

    def _launch(self) -> None:
        """Join the cluster and launch a group for each component."""
        config = self._config
        self._cluster = Cluster(cluster_cfg=self._traced(config.cluster))
        config.check_nodes([len(ranks) for ranks in self._cluster.accelerator_ranks])
        if everything := self._cluster.get_node_group():
            # Recipes place by ranks of the whole cluster, never through a group that says these.
            everything.env_configs = [each for _, each in config.cluster.environments]
        placement = ComponentPlacement(
            {"cluster": {"component_placement": config.placement()}}, self._cluster
        )
        context = self._task.context(trains=self._trains)
        for name, worker in self._workers.items():
            self._groups[name] = worker.create_group(config, context).launch(
                self._cluster, placement_strategy=placement.get_strategy(name), name=name
            )

    def _traced(self, cluster: ClusterConfig) -> ClusterConfig:
        """A cluster with its trace, where there is to be one, in a new file: workers start again in
        a run that is resumed or goes on under another plan."""
        tracer = cluster.tracer
        if tracer is None or not tracer.enable:
            return cluster
        if self._traces is None:
            return cluster.model_copy(update={"tracer": None})
        first = Path(tracer.output_file or self._traces / "trace_events.jsonl")
        later = (first.with_stem(f"{first.stem}_{number}") for number in count(2))
        free = next(path for path in chain([first], later) if not path.exists())
        named = tracer.model_copy(update={"output_file": str(free)})
        return cluster.model_copy(update={"tracer": named})

    def _start(self) -> None:
        """Let the workers build what their stages need, all at the same time where they may."""
        task, starting = self._task, dict[str, WorkerGroupFuncResult]()

        def result(name: str) -> Any:
            begin(name)
            if name in starting:
                self.started[name] = starting.pop(name).wait()
            return self.started[name][0]

        def begin(name: str) -> None:
            if name in starting or name in self.started:
                return
            group = self._groups[name]
            arguments = [result(first) for first in task.starts_with.get(name, ())]
            if self._config.world_size(name) > 1 and hasattr(self._workers[name], "meeting"):
                arguments += group.execute_on(0).meeting().wait()
            starting[name] = group.start(*arguments)
            if self._plan.components[name].residency == "offload":
                # What shares its devices begins with their memory.
                self.started[name] = starting.pop(name).wait()
                group.offload().wait()

        for name in self._groups:
            begin(name)
        self.started |= {name: handle.wait() for name, handle in starting.items()}
        if not self._trains or not task.trains:
            return
        flow, depth = task.flow(self._config), task.ahead + 1
        self._training = self._executor(flow, task.sources, depth, task.handing_over)
        if task.weights is not None:
            sender, receiver = (self._groups[name] for name in task.weights)
            self._weights = WeightHandover(sender.send_weights, receiver.receive_weights)
        task.launched(self)

    def _executor(
        self, flow: Flow, sources: int, depth: int = 1, handing_over: Collection[str] = ()
    ) -> Executor:
        executor = Executor(
            flow,
            self._plan,
            self._groups,
            self._cluster,
            sources=sources,
            depth=depth,
            timeline=self._config.runner.timeline,
            handing_over=handing_over,
        )
        self._executors.append(executor)
        return executor

    def close(self, *, because: BaseException | None = None) -> None:
        """End what workers hold, the worker groups and the cluster.

        After a failure, ``because`` of which it ends, workers may be dead, or wait for one that is:
        they get a few seconds, and what goes wrong is not told, as the first failure is.
        """
        for executor in self._executors:
            executor.close()
        if not Cluster.has_initialized():
            return
        try:
            handles = [self._groups[n].close() for n in self._with("close") if n in self._groups]
            interrupted = isinstance(because, KeyboardInterrupt)
            patience = _INTERRUPT_SECONDS if interrupted else _PATIENCE_SECONDS
            failed, deadline = because is not None, time.monotonic() + patience
            while failed and time.monotonic() < deadline and not all(h.done() for h in handles):
                time.sleep(0.02)
            for handle in handles if not failed else ():
                handle.wait()
        finally:
            self._cluster.shutdown()

    def _with(self, method: str) -> list[str]:
        """Components whose workers have a method."""
        return [name for name, worker in self._workers.items() if hasattr(worker, method)]

    # -- training steps -------------------------------------------------------------------------

    def start_step(
        self,
        step: int,
        *,
        synchronise: bool,
        draw: Callable[[], Arguments] = dict,
        ended: Callable[[Reports], None] = lambda reports: None,
    ) -> RunningStep:
        """Let the rollout of a training step begin; the rest begins when the step is waited for.

        Args:
            step: Its number.
            synchronise: Whether who receives weights gets the newest ones first.
            draw: Called when the rollout of the step before has ended; further arguments.
            ended: Called with the reports of the rollout when it has ended.
        """
        receive = self._weights.begin() if synchronise and self._weights is not None else None

        def begin() -> Arguments:
            if receive is not None:
                receive()
            return self._told(draw())

        try:
            told = self._told(self._task.arguments(step))
            return self._training.start(step, told, Hooks(begin, ended))
        except BaseException:
            if receive is not None:
                with suppress(Exception):  # what made the start fail is what is to be told
                    receive()
            raise

    def _told(self, arguments: Any) -> Arguments:
        """What a task tells its stages, which may be of a component that this recipe lacks."""
        if not isinstance(arguments, Mapping):
            kind = type(arguments).__name__
            why = f"it has {kind} for arguments of its stages, and no dict by component"
            raise ConfigError(f"task `{self._config.task}` is broken: {why}")
        for name, given in arguments.items():
            if not isinstance(given, Mapping):
                why = (
                    f"it has {type(given).__name__} for arguments of `{name}`, and no dict by name"
                )
                raise ConfigError(f"task `{self._config.task}` is broken: {why}")
        for name in arguments.keys() - self._labels:
            why = f"it has arguments for `{name}`; {did_you_mean(name, self._labels)}"
            raise ConfigError(f"task `{self._config.task}` is broken: {why}")
        return dict(arguments)

    @cached_property
    def _labels(self) -> frozenset[str]:
        stages = self._task.flow(self._config).stages()
        return frozenset(self._task.groups) | {stage.label for _, stage in stages}

    @property
    def keeps_weights(self) -> bool:
        """Whether those who receive weights have the same until they get others."""
        weights = self._task.weights
        return weights is None or self._plan.components[weights[1]].residency == "resident"

    def sync_weights(self) -> None:
        """Bring the newest weights to all who receive them, once all workers are at rest."""
        for executor in self._executors:
            executor.settle()
        if self._weights is not None:
            self._weights.begin()()

    def save_steps(self, steps: Iterable[RunningStep]) -> list[Any]:
        """What steps under way have generated ahead, for a checkpoint; waits for the rollouts."""
        return [to_tree(self._training.save(step)) for step in steps]

    def restore_steps(self, saved: Sequence[Any]) -> list[RunningStep]:
        """Steps under way as :meth:`save_steps` gave them."""
        handed_on = {each for worker in self._workers.values() for each in worker.records}
        records = (SavedStep, StageReport, StageCost, Item, *handed_on)
        steps: list[SavedStep] = [from_tree(tree, records) for tree in saved]
        return [self._training.restore(step, self._task.arguments(step.step)) for step in steps]

    def watch_memory(self, on: bool) -> None:
        """Let the reports of training steps that start from now on say what memory stages held."""
        self._training.watch_memory(on)

    def places(self) -> list[WorkerPlace]:
        """Where every worker is."""
        handles = [group.place() for group in self._groups.values()]
        return [place for handle in handles for place in handle.wait()]

    def evaluate(self, arguments: Arguments, sources: int | None = None) -> StepReport:
        """Do what the task's evaluation says; its items are numbered by so many sources."""
        count = self._task.sources if sources is None else sources
        if count not in self._evaluations:
            flow = Flow("evaluate")
            self._task.evaluation(flow, self._config)
            self._evaluations[count] = self._executor(flow, count)
        return self._evaluations[count].run(0, arguments)

    def save_model(self, directory: Path) -> None:
        """Let the actor write its language model to a directory of this machine."""
        with destination(directory) as wanted:
            for written in self["actor"].save_model(wanted).wait():
                if written is not None:
                    written.bring(directory)

    # -- checkpoints ----------------------------------------------------------------------------

    def state(self, *, whole: bool = False) -> dict[str, Any]:
        """State of the workers, by component: that of rank 0, or a list where all differ; without
        what they are to write into a checkpoint themselves, unless ``whole``."""
        parts = () if whole else self._parts
        handles = {
            name: self._groups[name].state(**({"whole": False} if name in parts else {}))
            for name in self._with("state")
        }
        found = {name: handle.wait() for name, handle in handles.items()}
        return {n: s if self._workers[n].divides_state else s[0] for n, s in found.items()}

    def load_state(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        """Continue from :meth:`state`; workers may have written parts into the checkpoint.

        Raises:
            CheckpointError: It holds nothing of a component.
        """
        absent = [name for name in self._with("state") if name not in state]
        if lacking := [name for name in absent if not self._workers[name].state_is_optional]:
            raise CheckpointError(
                f"{checkpoint} holds nothing of {', '.join(lacking)}: it is of another version of "
                "the code, or of another recipe"
            )
        written = self._with("save_parts")
        handles = [
            self._groups[name].load_state(
                state.get(name, {}), *([checkpoint] if name in written else [])
            )
            for name in self._with("state")
        ]
        for handle in handles:
            handle.wait()

    @property
    def _parts(self) -> list[str]:
        """Components each of whose ranks writes its part of a checkpoint."""
        sharded = self._config.checkpoint.layout == "sharded"
        found = self._with("save_parts") if sharded else []
        return [name for name in found if self._config.world_size(name) > 1]

    @property
    def writes_parts(self) -> bool:
        """Whether workers write some of their state into a checkpoint themselves."""
        return bool(self._parts)

    def save_parts(self, checkpoint: Path) -> dict[str, FileRecord]:
        """Let workers write what :meth:`state` leaves to them into a checkpoint.

        Returns:
            The files that they wrote, by their names in it.
        """
        handles = [self._groups[name].save_parts(checkpoint) for name in self._parts]
        return {
            name: record
            for handle in handles
            for files in handle.wait()
            for name, record in files.items()
        }


class WeightHandover:
    """Both sides of a synchronisation, begun at different times.

    The sender begins before its next training phase, the receivers when their rollout has ended. A
    version is sent only after the one before was taken, so that which weights a rollout has does
    not depend on who is faster.
    """

    def __init__(
        self,
        send: Callable[[], WorkerGroupFuncResult],
        receive: Callable[[], WorkerGroupFuncResult],
    ) -> None:
        self._send = send
        self._receive = receive
        self._taken: threading.Event | None = None

    def begin(self) -> Callable[[], int]:
        """Let the sender begin.

        Returns:
            What lets the receivers take the weights, and returns their version; to be called once,
            whatever happens, or the sender waits in vain.
        """
        if self._taken is not None:
            self._taken.wait()
        sent = self._send()
        taken = self._taken = threading.Event()

        def receive() -> int:
            try:
                received = self._receive()
                given = sent.wait()[0]
                return _arrived(given, self._versions(received))
            finally:
                taken.set()

        return receive

    @staticmethod
    def _versions(received: WorkerGroupFuncResult) -> list[Any]:
        """What the receivers return; says so where that takes longer than it should."""
        try:
            return received.wait(timeout=_HANDOVER_SECONDS)
        except WaitTimeout as late:
            log.warning(
                "The weights were sent %.0f s ago, and not all who receive them are done: %s",
                _HANDOVER_SECONDS,
                late,
            )
            return received.wait()


def _arrived(sent: Any, versions: Sequence[Any]) -> int:
    """The version that all receivers have; a RunFailure where it is not the one that was sent."""
    sent = getattr(sent, "version", sent)
    if not hasattr(sent, "__index__"):  # it does not say
        sent = versions[0]
    for rank, version in enumerate(versions):
        if rank and version is None:  # of a rank that receives nothing itself
            continue
        if not hasattr(version, "__index__"):
            kind = type(version).__name__
            raise RunFailure(f"receive_weights() returns {kind}, and no version, an int")
        if int(version) != int(sent):
            raise RunFailure(
                f"send_weights() returns version {sent}, and receive_weights() of rank {rank} "
                f"{version}: it has to take one message for each that is sent, and return the "
                "version in it"
            )
    return int(versions[0])
