"""What a task is: the training step of one kind of run, and where all of them are found.

The modules of tasks import no torch: worker classes are named, and imported when launched.
"""

from __future__ import annotations

import inspect
import shlex
from abc import ABC
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import TypeAdapter

from rlinf.config.nearest import did_you_mean
from rlinf.config.reference import check_reference
from rlinf.config.registry import Registry, load_attribute, require_call
from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig

if TYPE_CHECKING:
    from rlinf.checkpoint.contents import Checkpoint
    from rlinf.flow.executor import Arguments, Reports, StepReport
    from rlinf.flow.stage_worker import StageWorker
    from rlinf.monitor.run_directory import RunDirectory
    from rlinf.runners.evaluation import Evaluator
    from rlinf.runners.groups import Groups
    from rlinf.runners.run import Run
    from rlinf.workers.context import WorkerContext

ConfigT = TypeVar("ConfigT", bound=PlacedConfig)
Purpose = Literal["periodic", "held_out"]
_HANDING_OVER = ("send_weights", "receive_weights")
_FORMS: Mapping[str, tuple[Any, str]] = {
    "config_class": (type[PlacedConfig], "a subclass of PlacedConfig"),
    "groups": (dict[str, str | type], "a dict of worker classes, or where they are, by component"),
    "starts_with": (dict[str, tuple[str, ...]], "tuples of components by component"),
    "weights": (tuple[str, str] | None, "who sends and who receives, or None"),
    "evaluates": (tuple[str, ...] | None, "a tuple of components, or None"),
    "changeable": (tuple[str, ...], "a tuple of keys"),
    "changeable_evaluation": (tuple[str, ...], "a tuple of keys"),
    "figures": (
        tuple[tuple[str, str, str], ...],
        'triples of label, metric and format, such as (("loss", "actor/loss", ".3f"),)',
    ),
}
"""What attributes of a task are, and in words."""


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation showed: what is logged, by what the best is kept (higher), in words."""

    metrics: Mapping[str, float]
    score: float
    text: str = ""

    def __str__(self) -> str:
        return self.text


class Task(ABC, Generic[ConfigT]):
    """What happens in a training step, and what belongs to it; :class:`Run` does all the rest.

    A subclass gives `config_class`, `groups`, `step`, `steps` and `metrics`; everything else has a
    default. An object belongs to one run: it holds what the run draws from and counts.
    """

    config_class: ClassVar[type[PlacedConfig]]
    """Of the recipes of the task."""
    groups: ClassVar[Mapping[str, str | type[StageWorker]]]
    """Worker class of each component, or where it is: ``module:Class``. Each is made with the
    run's config and the task's context, and started in this order, but after those that it starts
    with."""
    starts_with: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Components whose ``start`` is given what those of other components' rank 0 returned."""
    weights: ClassVar[tuple[str, str] | None] = ("actor", "rollout")
    """Who sends new weights (``send_weights``) and who receives them (``receive_weights``); None:
    nobody does. Both return their version, which has to be the same; the sender may return None,
    and so may ranks > 0 that receive nothing themselves."""
    evaluates: ClassVar[tuple[str, ...] | None] = None
    """Components that ``rlinf eval`` starts; None: all."""
    trains: ClassVar[bool] = True
    """Whether there is something to train; otherwise `evaluate_alone` is all that the task does."""
    leaves_best: ClassVar[bool] = False
    """Whether what a run leaves behind, and ``rlinf eval`` takes, are the best weights, where any
    were evaluated, and not the newest ones."""
    evaluates_end: ClassVar[bool] = False
    """Whether the last step is evaluated, too, whatever the interval."""
    changeable: ClassVar[tuple[str, ...]] = ("runner", "checkpoint", "logger")
    """Keys, or sections, that may change when a run is resumed: those that do not decide what was
    trained so far."""
    changeable_evaluation: ClassVar[tuple[str, ...]] = ()
    """The same of an evaluation of a run: those that do not decide what was trained."""
    figures: ClassVar[tuple[tuple[str, str, str], ...]] = ()
    """What the progress display shows, besides step, times and ETA: label, metric, format."""

    def __init__(self, config: ConfigT, directory: Path) -> None:
        self.config = config
        self.directory = directory
        self.counts: Any = None  # a dataclass of what the task counts, or none
        self.evaluator: Evaluator[Any, Any] | None = None

    @classmethod
    def for_evaluation(cls, config: ConfigT) -> ConfigT:
        """The config without what only training reads: those files may be gone where a run is
        evaluated."""
        return config

    def read_training_data(self) -> None:
        """Read what the driver draws from; called before anything of a training is started."""

    # -- the step -------------------------------------------------------------------------------

    @classmethod
    def step(cls, flow: Flow, config: ConfigT) -> None:
        """Add to a flow what happens in a training step."""
        raise ConfigError(f"a recipe of task '{config.task}' trains nothing")

    @classmethod
    def evaluation(cls, flow: Flow, config: ConfigT) -> None:
        """Add to a flow what happens in an evaluation."""
        raise ConfigError(f"runs of task '{config.task}' are not evaluated")

    @classmethod
    def flow(cls, config: Any) -> Flow:
        """What happens in a training step of a config."""
        flow = Flow("train")
        cls.step(flow, config)
        return flow

    @property
    def steps(self) -> int:
        """Training steps of the run."""
        raise ConfigError(f"a recipe of task '{self.config.task}' trains nothing")

    @property
    def ahead(self) -> int:
        """How many steps a rollout may run ahead of the training: the largest staleness."""
        return 0

    @property
    def sources(self) -> int:
        """By how many sources the items of a step are numbered."""
        return 1

    @property
    def handing_over(self) -> tuple[str, ...]:
        """Components whose workers lease their devices themselves."""
        return ()

    def arguments(self, step: int) -> Arguments:
        """Arguments of the stages of a step that its number says, by component or stage key."""
        del step
        return {}

    def draw(self, *, worst: bool = False) -> Arguments:
        """Further arguments, drawn when the rollout of the step before has ended; with ``worst``
        those with which a step needs as much memory as any can."""
        del worst
        return {}

    def rolled_out(self, reports: Reports) -> None:
        """Take note of what the rollout of a step reported when it ended."""

    def metrics(self, report: StepReport, *, step: int, seconds: float) -> dict[str, float]:
        """Metrics of a step that took so many seconds, from what the workers returned."""
        del step, seconds
        found = {f"time/{name}": report.seconds(name) for name in report.stages}
        for name in report.stages:
            result = report.results(name)[0]
            found.update(result if isinstance(result, Mapping) else {})
        return found

    # -- workers --------------------------------------------------------------------------------

    def context(self, *, trains: bool) -> WorkerContext:
        """What workers are told beside the config."""
        from rlinf.workers.context import WorkerContext

        return WorkerContext(self.directory, trains=trains)

    def launched(self, groups: Groups) -> None:
        """Called when all workers of a run have started."""

    # -- evaluation -----------------------------------------------------------------------------

    @property
    def evaluation_interval(self) -> int:
        """Training steps between two evaluations; 0: none."""
        return 0

    @property
    def evaluation_start(self) -> int:
        """Training steps before the first of these."""
        return 0

    def evaluate(self, run: Run, purpose: Purpose) -> Evaluated | None:
        """Evaluate the newest weights, which the workers have; None: there is nothing to."""
        if self.evaluator is None:
            return None
        step = run.state.step if run.weights_step is None else run.weights_step
        name, directory = f"{self.directory.name} step {step}", run.directory.evaluations
        return self.evaluator.of_run(run.groups, purpose, name, step, directory=directory)

    @property
    def instead_of_evaluation(self) -> str:
        """What tells how good a run is that has no evaluator."""
        return f"nearest: rlinf view {shlex.quote(str(self.directory))}"

    def load_weights(self, groups: Groups, checkpoint: Checkpoint) -> None:
        """Give the workers of an evaluation what a checkpoint holds."""
        groups.load_state(checkpoint.tree["workers"], checkpoint.path)
        groups.sync_weights()

    def evaluate_alone(self, directory: RunDirectory) -> None:
        """All that a recipe does which trains nothing."""
        raise ConfigError(f"a recipe of task '{self.config.task}' is to train")

    # -- from the beginning to the end ------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether training may end before all its steps."""
        return False

    def begin(self, run: Run) -> None:
        """What comes before the first step of a run that is not resumed."""

    def conclude(self, run: Run) -> None:
        """What comes after the last step is committed: an evaluation on held-out episodes, and
        what is left behind."""

    def progress(self) -> dict[str, Any]:
        """What the manifest of a checkpoint says beside its step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What was counted and drawn, for a checkpoint; asked for before the first step, too."""
        return {} if self.counts is None else asdict(self.counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.counts = None if self.counts is None else type(self.counts)(**state)


def require_task(task: type[Task[Any]], name: str) -> None:
    """Refuse a task whose class lacks what every one gives, or defines what the run asks for in
    another form than :class:`Task`: a method for a property, or with other arguments.

    Raises:
        ConfigError: Names what it is, and how it is written.
    """
    where = f"task `{name}` is broken: {task.__qualname__}"
    for attribute in ("config_class", "groups"):
        if not hasattr(task, attribute):
            raise ConfigError(f"{where} has no `{attribute}`; every task says its own")
    _require_forms(task, where)
    for attribute, base in vars(Task).items():
        own = inspect.getattr_static(task, attribute)
        is_method = bool(inspect.isroutine(own))
        if own is base or attribute == "__module__" or not is_method:
            continue
        if isinstance(base, property):
            raise ConfigError(f"{where}.{attribute} is a method; nearest: @property before it")
        if isinstance(base, classmethod) and not isinstance(own, classmethod):
            raise ConfigError(f"{where}.{attribute} lacks @classmethod before it")
        require_call(f"{where}.{attribute}", own, getattr(base, "__func__", base))


def _require_forms(task: type[Task[Any]], where: str) -> None:
    """Refuse attributes of another form than they are read in."""
    for attribute, (form, words) in _FORMS.items():
        value = getattr(task, attribute)
        try:
            TypeAdapter(form).validate_python(value)
            for _, _, style in task.figures if attribute == "figures" else ():
                format(0 if style.endswith("d") else 0.0, style)
        except ValueError as error:
            raise ConfigError(f"{where}.{attribute} is {value!r}, expected {words}") from error


def _made(worker: Any, config: Any, context: Any) -> None:
    """How a worker is made."""


def require_workers(task: type[Task[Any]], config: PlacedConfig) -> None:
    """Refuse a task, before anything starts, whose step asks for what its groups have not.

    Methods are looked for where `groups` has the class itself; one that is named is looked for in
    its file, which is not run.

    Raises:
        ConfigError: Names the component, the method, or what is wrong with the flow.
    """
    for component, worker in task.groups.items():
        try:
            if isinstance(worker, str):
                check_reference(worker)
        except ConfigError as error:
            raise ConfigError(f"task `{config.task}` is broken: {component}: {error}") from error
    flow = task.flow(config)
    flow.order()
    if not flow.nodes:
        raise ConfigError(f"task `{config.task}` is broken: its step has no stage")
    for worker in task.groups.values():
        if isinstance(worker, type):
            where = f"task `{config.task}` is broken: {worker.__qualname__}.__init__"
            require_call(where, worker.__init__, _made)
    called = [(stage.label, stage.component, stage.method) for _, stage in flow.stages()]
    for component, method in zip(task.weights or (), _HANDING_OVER, strict=False):
        called.append(("weights", component, method))
    for what, component, method in called:
        where = f"task `{config.task}` is broken: {what}:"
        if component not in task.groups:
            known = did_you_mean(component, task.groups)
            raise ConfigError(f"{where} groups has no component `{component}`; {known}")
        if component not in config.components:
            lacking = f"components of {type(config).__qualname__} lacks `{component}`"
            raise ConfigError(f"{where} {lacking}; known: {', '.join(config.components)}")
        worker = task.groups[component]
        if isinstance(worker, type) and not hasattr(worker, method):
            known = did_you_mean(method, [each for each in vars(worker) if each[0] != "_"])
            raise ConfigError(f"{where} {worker.__qualname__} has no method `{method}`; {known}")


@dataclass
class Counts:
    """What a task counts over a run; a part of its state."""

    faults: dict[str, int] = field(default_factory=dict)
    """How often what went wrong."""

    def add_faults(self, faults: Mapping[str, int], prefix: str) -> dict[str, float]:
        """Count the faults of a step; returns them as metrics."""
        for reason, count in faults.items():
            self.faults[reason] = self.faults.get(reason, 0) + count
        return {f"{prefix}/faults/{reason}": float(count) for reason, count in faults.items()}


REGISTRY: Registry[Task[Any]] = Registry(
    kind="task",
    group="rlinf.tasks",
    table={
        "embodied": "rlinf.runners.embodied:Embodied",
        "off_policy": "rlinf.runners.off_policy:OffPolicy",
        "reasoning": "rlinf.runners.reasoning:Reasoning",
        "sft": "rlinf.runners.sft:FineTuning",
        "behaviour_cloning": "rlinf.runners.behaviour_cloning:BehaviourCloning",
        "benchmark": "rlinf.runners.benchmark:Benchmark",
    },
    base=Task,
)


def worker_class(reference: str | type[StageWorker]) -> type[StageWorker]:
    """The worker class that a task names."""
    found: type[StageWorker] = (
        load_attribute(reference) if isinstance(reference, str) else reference
    )
    return found
