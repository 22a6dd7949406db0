"""What the recipes of all tasks share: components that are placed on the devices of a cluster."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from rlinf.checkpoint.config import CheckpointConfig
from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.effects import unused
from rlinf.config.nearest import did_you_mean, join_choices
from rlinf.config.ranges import device_ranges
from rlinf.config.validate import EVALUATED
from rlinf.errors import ConfigError, MissingPackageError
from rlinf.flow.plan import (
    AutoPlan,
    AutoPlanConfig,
    ComponentPlan,
    Plan,
    PlanChoice,
    Residency,
    read_plan_choice,
)
from rlinf.monitor.loggers.base import LoggerConfig
from rlinf.scheduler.accelerators import installed_accelerators
from rlinf.scheduler.cluster_config import ClusterConfig
from rlinf.scheduler.component_grammar import parse_component_placement
from rlinf.scheduler.cpu_slots import available_cores, divide_cores
from rlinf.scheduler.errors import PlacementError

if TYPE_CHECKING:
    from rlinf.flow.planning_traits import PlanningTraits

_PLACEMENT = "cluster.component_placement"
_NETWORK = "cluster.net_emulation"
NOT_PLANNED = "slows links, of which nothing is known where plans are compared"
"""Why no plan is looked for over an imagined network."""
_ALIKE = (
    "nearest: nodes that have equally many, the one that runs the program among them, or "
    "cluster.cpu_devices_per_node, which divides the cores of each"
)
_LINES = 4
"""Lines shown of what is wrong in a file that should be a plan."""


class RunnerConfig(StrictModel):
    """Where a run is written."""

    not_read = frozenset({"output_dir"})

    output_dir: Path = Path("runs")
    """Directory that holds the run directories."""
    timeline: bool = False
    """Write a Chrome/Perfetto timeline of stages, leases and transfers to the run directory."""

    @model_validator(mode="before")
    @classmethod
    def _plan_is_of_the_cluster(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "plan" not in data:
            return data
        if data["plan"] not in (None, "manual"):
            raise illegal("plan", "is now cluster.plan", hint="cluster.plan: auto, or {auto: {…}}")
        return {key: value for key, value in data.items() if key != "plan"}


class PlannedClusterConfig(ClusterConfig):
    """Machines, and where components run on them: by a placement, or by a plan."""

    plan: PlanChoice | None = None
    """A file that `rlinf plan --save` wrote, or what such a file says: its components run as it is
    written there. `auto`, or `{auto: {…}}`: measure while training and change the placement where
    another is faster. null: `component_placement` and `residency` say it."""

    @field_validator("plan", mode="before")
    @classmethod
    def _read_plan(cls, value: Any) -> Any:
        try:
            return read_plan_choice(value)
        except ConfigError as error:
            lines = str(error).split("\n  ")
            shown = "; ".join([*lines[:_LINES], *(["…"] if len(lines) > _LINES else [])])
            raise illegal("", shown, hint="a file, or auto") from error


class PlacedConfig(StrictModel):
    """A run of some components on a cluster."""

    task: str
    """Which runner executes the recipe."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of everything that is drawn in the run."""
    runner: RunnerConfig
    cluster: PlannedClusterConfig = PlannedClusterConfig(runtime="local")
    checkpoint: CheckpointConfig = CheckpointConfig()
    logger: LoggerConfig = LoggerConfig()

    pipeline_key: ClassVar[str] = ""
    """Key that says how many sub-batches of a loop are in flight; empty: the task has no loop."""

    @model_validator(mode="before")
    @classmethod
    def _loops_as_planned(cls, data: Any) -> Any:
        """Let the pipeline stages of a plan be those of the recipe, which says no other ones."""
        found = _stages_in(data) if cls.pipeline_key else None
        if found is None:
            return data
        plan, stages = found
        section, _, key = cls.pipeline_key.rpartition(".")
        given = {} if data.get(section) is None else data[section]
        if not isinstance(given, dict):
            return data  # which is said where the section is read
        if given.get(key, stages) != stages:
            why = f"is {given[key]}, and cluster.plan has {stages} pipeline stages"
            raise illegal(cls.pipeline_key, why, hint=f"drop one: ~{cls.pipeline_key}")
        cluster = {**data["cluster"], "plan": plan}
        return {**data, "cluster": cluster, section: {**given, key: stages}}

    @property
    @abstractmethod
    def components(self) -> tuple[str, ...]:
        """Worker groups of the run."""

    @property
    def auto_plan(self) -> AutoPlanConfig | None:
        """When the run looks for a better plan by itself; None: it keeps the one that it has."""
        choice = self.cluster.plan
        return choice.auto if isinstance(choice, AutoPlan) else None

    @property
    def can_rescale(self) -> bool:
        """Whether components of the task can hand devices to each other inside a step."""
        return False

    @property
    def offloading(self) -> tuple[str, ...]:
        """Components that can give their device memory back between phases."""
        return ()

    @property
    def placed_by_default(self) -> tuple[str, ...]:
        """Components that are at the first device where nothing else is said of them."""
        return ()

    def placement(self) -> dict[str, Any]:
        """Placement of each component; without one, every component is one process on node 0."""
        if isinstance(self.cluster.plan, Plan):
            parts = self.cluster.plan.components.items()
            given = {name: part.placement for name, part in parts}
        else:
            given = self.cluster.component_placement or {",".join(self.components): "0"}
        rest = [name for name in self.placed_by_default if name not in _names_in(given)]
        return {**given, ",".join(rest): "0"} if rest else {**given}

    def pipeline_stages(self, component: str) -> int:
        """Sub-batches of a component that are in flight at once."""
        del component
        return 1

    @cached_property
    def plan(self) -> Plan:
        """What `cluster.plan` says, or the hand-written placement as a plan."""
        if isinstance(self.cluster.plan, Plan):
            given = self.cluster.plan
            # A planner places who has a stage in a training step, and none of these may.
            more = {
                name: ComponentPlan(
                    devices=(0,),
                    processes=1,
                    pipeline_stages=self.pipeline_stages(name),
                    reason="the first device, by default",
                )
                for name in self.placed_by_default
                if name not in given.components
            }
            both = {"components": {**given.components, **more}}
            return given.model_copy(update=both) if more else given
        components: dict[str, ComponentPlan] = {}
        for entry in parse_component_placement(self.placement()):
            processes = entry.processes(self.devices)
            for name in entry.components:
                components[name] = ComponentPlan.of_processes(
                    processes, pipeline_stages=self.pipeline_stages(name)
                )
        return Plan(components=components).with_residency(
            self.residency(), sharing=self.offloading if self.on_accelerators else ()
        )

    def residency(self) -> dict[str, Residency]:
        """What `cluster.residency` says, by component."""
        return {
            name.strip(): value
            for key, value in self.cluster.residency.items()
            for name in key.split(",")
        }

    @property
    def devices(self) -> int:
        """Devices that a placement can name: CPU slots, accelerators, or else the nodes."""
        cluster = self.cluster
        found = cluster.cpu_devices_per_node or cluster.accelerators_per_node or accelerators_here()
        return (found or 1) * cluster.num_nodes

    def check_nodes(self, accelerators: Sequence[int]) -> None:
        """Refuse a cluster of other nodes than the recipe was read for, by the devices of each.

        Raises:
            ConfigError: A node has more or fewer than `cluster.accelerators_per_node`; without it,
                one of several nodes has more or fewer than this machine.
        """
        cluster = self.cluster
        wanted = cluster.accelerators_per_node
        if wanted is None and (cluster.cpu_devices_per_node or cluster.num_nodes == 1):
            return  # slots are what is asked for, and a single node is this machine
        counted = accelerators_here() if wanted is None else wanted
        other = [node for node, count in enumerate(accelerators) if count != counted]
        if not other:
            return
        found = f"node {other[0]} has {accelerators[other[0]]}"
        if wanted is not None:
            why = f"is {wanted}, but {found}"
            hint = "nearest: write what every node has, and place components on that"
        else:
            why = f"is not given, so the recipe counts the {counted} of this machine, but {found}"
            least, most = min(accelerators), max(accelerators)
            hint = f"write {most}" if least == most > 0 else _ALIKE
        raise ConfigError(f"{why}; {hint}", key="cluster.accelerators_per_node")

    @property
    def on_accelerators(self) -> bool:
        """Whether devices have memory of their own."""
        cluster = self.cluster
        found = cluster.accelerators_per_node or accelerators_here()
        return cluster.cpu_devices_per_node is None and found > 0

    @property
    def can_be_planned(self) -> bool:
        """Whether the task says what planning must know."""
        return type(self).planning is not PlacedConfig.planning

    @property
    def planning(self) -> PlanningTraits:
        """What planning and profiling must know of the recipe.

        Raises:
            ConfigError: Nothing is trained, so there is nothing to plan.
        """
        raise ConfigError(f"a recipe of task '{self.task}' trains nothing: there is no plan")

    def world_size(self, component: str) -> int:
        """Processes of a component."""
        return self.plan.components[component].processes

    def batch_table(self) -> list[tuple[str, str]]:
        """Rows that show how items become batches and updates: what is counted, and how many."""
        return []

    def placement_table(self) -> list[tuple[str, ...]]:
        """Column names, then a row of the plan per component."""
        return self.plan.table()

    def check(self) -> None:
        """Refuse, before anything starts, what cannot run on this machine.

        Raises:
            ConfigError: A section cannot be met here, or the machine has fewer cores than CPU
                slots are asked for.
            MissingPackageError: A package of a section or of the runtime is missing.
        """
        super().check()
        slots = self.cluster.cpu_devices_per_node
        if slots is not None and self.cluster.num_nodes == 1:
            divide_cores(available_cores(), slots)
        if self.cluster.runtime == "ray" and find_spec("ray") is None:
            raise MissingPackageError("ray", "ray", "cluster.runtime: ray")

    # -- rules between sections -----------------------------------------------------------------

    @model_validator(mode="after")
    def _rules(self, info: ValidationInfo) -> Self:
        self._check_parts()
        self._check_cluster()
        self._check_network()
        evaluated = (info.context or {}).get(EVALUATED, False)
        for problem in chain(self.problems(), () if evaluated else self.problems_of_training()):
            raise self._as_placed(problem)
        # Last: what the task itself says against a placement names the keys that cause it.
        self._check_processes()
        return self

    def _as_placed(self, problem: PydanticCustomError) -> PydanticCustomError:
        """A problem of a placement under the key that places: a plan, where there is one."""
        told = problem.context or {}
        if told.get("key") != _PLACEMENT or not isinstance(self.cluster.plan, Plan):
            return problem
        return illegal("cluster.plan", told["text"])

    def problems_of_training(self) -> Iterator[PydanticCustomError]:
        """What else stands against a training, and not against an evaluation of what it left."""
        yield from ()

    def problems(self) -> Iterator[PydanticCustomError]:
        """What stands against the values of several sections together; the first is told."""
        for name in self.components:
            offload = getattr(getattr(self, name, None), "offload", None)
            stays = self.plan.components[name].residency == "resident" and self.auto_plan is None
            if isinstance(offload, StrictModel) and (stays or name not in self.offloading):
                without = f"cluster.residency: {{{name}: offload}}"
                if name not in self.offloading:
                    without = "a task that offloads it"
                keys, at = type(offload).model_fields, f"{name}.offload."
                yield from unused(offload, keys, without=without, at=at)
        syncer: Any = getattr(self, "weight_sync", None)
        if self.cluster.runtime == "local" and getattr(syncer, "type", "") == "auto":
            keys = type(syncer).model_fields
            yield from unused(syncer, keys, without="cluster.runtime: ray", at="weight_sync.")
        elif syncer is not None:
            for key, why, hint in syncer.problems(self.cluster.runtime, self._away_from_actor()):
                yield illegal(f"weight_sync.{key}", why, hint=hint)
            if syncer.of_accelerators and not self.on_accelerators:
                yield illegal(
                    f"weight_sync.{syncer.of_accelerators}",
                    "moves the memory of accelerators, and this run has none",
                    hint="leave it out; of a cluster elsewhere say cluster.accelerators_per_node",
                )
            elif syncer.of_accelerators:
                sender, receivers = self._devices_of_sync()
                device, count = Counter([sender, *receivers]).most_common(1)[0]
                if count > 1:
                    yield illegal(
                        f"weight_sync.{syncer.of_accelerators}",
                        "needs an own device for the first actor process and each of the rollout, "
                        f"and {count} of these are on device {device}",
                        hint="nearest: scheduler, or a placement on devices of their own",
                    )

    def _devices_of_sync(self) -> tuple[int, list[int]]:
        """First devices of the actor process that sends weights, and of those that receive them."""
        sender, receivers = (self.plan.components[name] for name in ("actor", "rollout"))
        places = [receivers.of_process(rank)[0] for rank in range(receivers.processes)]
        return sender.of_process(0)[0], places

    def _away_from_actor(self) -> int:
        """Rollout processes on other nodes than the first of the actor, which sends weights."""
        each = self.devices // self.cluster.num_nodes
        sender, receivers = self._devices_of_sync()
        return sum(device // each != sender // each for device in receivers)

    def _check_parts(self) -> None:
        """Refuse a class that does not say which parts its runs have."""
        found: Any = self.components
        named = isinstance(found, Sequence) and not isinstance(found, str) and bool(found)
        if not (named and all(isinstance(each, str) for each in found)):
            raise illegal(
                "task",
                f"is broken: components of {type(self).__qualname__} is {found!r}, expected a "
                'tuple of names, such as ("rollout", "actor")',
            )

    def _check_cluster(self) -> None:
        """Refuse keys of the cluster that have no effect on a task, and impossible placements."""
        cluster = self.cluster
        if cluster.runtime == "local" and cluster.num_nodes > 1:
            raise illegal(
                "cluster.num_nodes",
                "the local runtime is one process on one node",
                hint="nearest: 1, or cluster.runtime: ray",
            )
        for key in ("auto_scheduler", "profiling"):
            if getattr(cluster, key) and not (key == "auto_scheduler" and self.can_rescale):
                raise illegal(f"cluster.{key}", "has no effect on this task", hint="leave it out")
        for key in ("use_pre_process_policy", "use_wait_before_last_iter_policy"):
            if getattr(cluster, key):
                why = "is not asked here: each such choice is made from measured times"
                raise illegal(f"cluster.{key}", why, hint="leave it out, or false")
        self._check_hardware()
        self._check_environments()
        if isinstance(cluster.plan, Plan):
            self._check_plan(cluster.plan)
            return
        placed = _names_in(self.placement())
        known = set(self.components)
        missing, unknown = known - placed, placed - known
        if missing or unknown:
            found = ", ".join(sorted(unknown or missing))
            raise illegal(
                _PLACEMENT,
                f"{'does not know' if unknown else 'does not place'} {found}",
                hint=f"the components of this task are {', '.join(self.components)}",
            )
        for entry in parse_component_placement(self.placement()):
            labels = [label for label in entry.node_groups or () if label != "cluster"]
            if labels:
                # A plan numbers the devices of the whole cluster; those of a group count anew.
                raise illegal(
                    _PLACEMENT,
                    f"places {', '.join(entry.components)} by ranks inside of node group "
                    f"{', '.join(labels)}, but leases and residency need those of the cluster",
                    hint="write the global ranks instead; groups may still set environments",
                )
        self._check_residency()
        try:
            components = self.plan.components
        except PlacementError as error:
            raise illegal(_PLACEMENT, str(error)) from error
        each = self.devices // cluster.num_nodes
        for name, part in components.items():
            if own := part.on_several_nodes(each):
                first = [device for device in own if device // each == own[0] // each]
                raise illegal(
                    _PLACEMENT,
                    f"gives a process of {name} the devices {device_ranges(own)}, which are on "
                    f"several nodes of {each} each, but a process runs on one",
                    hint=f"nearest: those of one node, such as {device_ranges(first)}",
                )

    def _check_hardware(self) -> None:
        """Refuse what node groups say of resources that no component can be placed on."""
        for group in self.cluster.node_groups or []:
            for key in ("hardware", "ignore_hardware"):
                if getattr(group, key):
                    raise illegal(
                        "cluster.node_groups",
                        f"sets {key} in node group '{group.label}', which has no effect on a task: "
                        "components are placed by the devices of the whole cluster",
                        hint="leave it out; a program on the scheduler places workers on arms",
                    )

    def _check_environments(self) -> None:
        """Refuse environments of nodes that no worker gets, or that contradict each other there."""
        environments = self.cluster.environments
        if environments and self.cluster.runtime == "local":
            raise illegal(
                "cluster.node_groups",
                f"sets an environment in node group '{environments[0][0]}', but the workers of the "
                "local runtime are threads of this process and have its environment",
                hint="cluster.runtime: ray, or leave env_configs out and set the variables before",
            )
        said: dict[tuple[int, str], tuple[str, str]] = {}
        for label, each in environments:
            values = {name: value for entry in each.env_vars or [] for name, value in entry.items()}
            if each.python_interpreter_path is not None:
                values["python_interpreter_path"] = each.python_interpreter_path
            for node, (name, value) in product(each.node_ranks, values.items()):
                other, first = said.setdefault((node, name), (label, value))
                if first != value:
                    raise illegal(
                        "cluster.node_groups",
                        f"gives node {node} {name} = {first!r} in node group '{other}' and "
                        f"{value!r} in '{label}', and all workers there have one environment",
                        hint="keep one of the two",
                    )

    def _check_network(self) -> None:
        """Refuse an imagined network between workers that the run does not have."""
        emulated = self.cluster.net_emulation
        if emulated is None or not emulated.enabled:
            return
        if self.auto_plan is not None:
            raise illegal(_NETWORK, NOT_PLANNED, hint="leave it out, or cluster.plan: auto")
        for worker in sorted(emulated.workers()):
            name, _, rank = worker.partition(":")
            if name not in self.components:
                why, hint = f"names {worker}", did_you_mean(name, self.components)
                raise illegal(_NETWORK, f"{why}, which is no component of this task", hint=hint)
            most = self.world_size(name)
            if int(rank) >= most:
                why = f"names {worker}, and {name} has {most} process{'es' * (most > 1)}"
                raise illegal(_NETWORK, why, hint=f"nearest: {name}:{most - 1}")

    def _check_plan(self, plan: Plan) -> None:
        """Refuse a plan beside a placement, and one that cannot be executed."""
        for key in ("component_placement", "residency"):
            if getattr(self.cluster, key):
                why = f"places components, as cluster.{key} does"
                hint = f"drop one: ~cluster.{key}, or ~cluster.plan"
                raise illegal("cluster.plan", why, hint=hint)
        nodes = self.cluster.num_nodes
        each = self.devices // nodes
        for key, why, hint in self.plan.problems(self.components, self.offloading, nodes, each):
            raise illegal(f"cluster.plan.{key}", why, hint=hint)
        for name, part in plan.components.items():
            stages = self.pipeline_stages(name)
            if part.pipeline_stages != stages:
                key = f"cluster.plan.components.{name}.pipeline_stages"
                why = f"{name} has {stages} sub-batches in flight in its loop"
                why = why if stages > 1 else f"{name} is in no loop that has several"
                raise illegal(key, why, hint=f"nearest: {stages}")

    def _check_processes(self) -> None:
        """Refuse numbers of processes that the task cannot run with, by what planning knows."""
        if not self.can_be_planned:
            return
        planning: Any = self.planning
        if not hasattr(planning, "constraints"):
            kind = type(planning).__name__
            why = f"is broken: planning of {type(self).__qualname__} is of type {kind}"
            raise illegal("task", f"{why}, expected PlanningTraits")
        constraints = planning.constraints
        for name, part in self.plan.components.items():
            near = constraints.of(name).nearest_processes(part.processes)
            if part.processes not in near:
                planned = isinstance(self.cluster.plan, Plan)
                key = f"plan.components.{name}.processes" if planned else "component_placement"
                why = f"places {part.processes} processes of {name}, which this task cannot run"
                hint = f"nearest: {join_choices(near) or 'none'}"
                raise illegal(f"cluster.{key}", why, hint=hint)

    def _check_residency(self) -> None:
        names = [name.strip() for key in self.cluster.residency for name in key.split(",")]
        for name, count in Counter(names).items():
            if count > 1:
                why = f"names {name} {count} times"
                raise illegal("cluster.residency", why, hint="remove it from all but one")
        for name, value in self.residency().items():
            if name not in self.components:
                hint = f"the components of this task are {', '.join(self.components)}"
                raise illegal("cluster.residency", f"does not know {name}", hint=hint)
            if value == "offload" and name not in self.offloading:
                hint = f"components that have: {join_choices(self.offloading) or 'none'}"
                raise illegal("cluster.residency", f"{name} has nothing to offload", hint=hint)


def _names_in(placement: Mapping[str, Any]) -> set[str]:
    """Components that a placement names."""
    return {name.strip() for key in placement for name in str(key).split(",")}


def _stages_in(data: Any) -> tuple[Plan, int] | None:
    """The plan that a recipe names, read, and its most pipeline stages; None: there is none."""
    cluster = data.get("cluster") if isinstance(data, dict) else None
    value = cluster.get("plan") if isinstance(cluster, dict) else None
    try:
        choice = read_plan_choice(value)
        plan = Plan.model_validate(choice) if isinstance(choice, dict) else choice
    except (ConfigError, ValidationError):  # told by the section itself, with its keys
        return None
    if not isinstance(plan, Plan) or not plan.components:
        return None
    return plan, max(part.pipeline_stages for part in plan.components.values())


def accelerators_here() -> int:
    """Accelerators of this machine by their driver's files; asking torch would take seconds."""
    return installed_accelerators()[1]
