"""The ``cluster`` section of a configuration: nodes, their hardware, and where components run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from omegaconf import DictConfig, ListConfig, OmegaConf
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from rlinf.config.base import StrictModel
from rlinf.scheduler.address import SlowLinks
from rlinf.scheduler.cluster_sections import (
    FrankaConfig,
    NetEmulationConfig,
    NodeHardwareConfig,
    ProfilingConfig,
    TracerConfig,
    cluster_config_error,
    must_be,
)
from rlinf.scheduler.component_grammar import parse_component_placement
from rlinf.scheduler.errors import ClusterConfigError, ClusterConfigValueError, PlacementError
from rlinf.scheduler.node import NodeGroupInfo
from rlinf.scheduler.rank_text import format_ranks, parse_ranks


class NodeGroupEnvConfig(StrictModel):
    """Software environment of some nodes of a node group."""

    node_ranks: list[int]
    """Nodes that it applies to, such as ``0-1`` or ``all``."""
    env_vars: list[dict[str, str]] | None = None
    """Environment variables, one ``name: value`` per list entry."""
    python_interpreter_path: str | None = None
    """Interpreter that runs the workers; None uses that of the driver."""

    @field_validator("env_vars", mode="before")
    @classmethod
    def _one_variable_per_entry(cls, value: Any) -> Any:
        value = plain(value)
        if value is None:
            return None
        must_be(list, value, "env_vars must be a list of dicts", "Is a '-' missing before each?")
        for entry in value:
            hint = "Expected for example '- NAME: value'."
            must_be(dict, entry, "Each node env_var must be a dict", hint)
            if len(entry) != 1:
                raise ClusterConfigError(
                    f"Each node env_var dict must contain exactly one key-value pair, got {entry}. "
                    "Start a new '-' entry for every variable."
                )
            for name, item in entry.items():
                # None and true would arrive as Python writes them, and a list as no program reads.
                if type(item) not in (str, int, float):
                    text = "" if item is None else str(item).lower()
                    raise ClusterConfigError(
                        f"Environment variable '{name}' must be text or a number, got {item!r}. "
                        f"Write in quotes what programs are to read, such as '{text}'."
                    )
        return [{str(key): str(item) for key, item in entry.items()} for entry in value]


class NodeGroupConfig(StrictModel):
    """Nodes that share a label."""

    label: str
    """Name of the group in placements; case-sensitive; ``cluster`` and ``node`` are taken."""
    node_ranks: list[int]
    """Nodes in the group, such as ``0-1`` or ``all``."""
    env_configs: list[NodeGroupEnvConfig] | None = None
    """Environments of its nodes; a node has at most one."""
    hardware: NodeHardwareConfig | None = None
    """Declared hardware, such as robots; None counts what is found on the nodes."""
    ignore_hardware: bool = False
    """Whether each node counts as one resource, whatever is found on it."""
    device_kind: str | None = Field(default=None, pattern=r"^[A-Za-z][\w-]*$")
    """Kind of the devices of its nodes, such as ``H100``, where nodes differ: measurements are
    noted, and placements are planned, by kind. None: as those of the machine that reads this."""

    @property
    def hardware_type(self) -> str | None:
        """Kind of the declared hardware."""
        return None if self.hardware is None else self.hardware.type

    @field_validator("label", mode="before")
    @classmethod
    def _is_free(cls, value: Any) -> Any:
        label = str(value) if type(value) is int else value
        if label in NodeGroupInfo.RESERVED_LABELS:
            raise ClusterConfigError(
                f"Node group label '{label}' is reserved by the scheduler: 'cluster' is every node "
                f"and 'node' counts nodes. Choose another label, such as '{label}s'."
            )
        if isinstance(label, str) and (not label.strip() or "," in label):
            raise ClusterConfigError(
                f"Node group label {label!r} cannot be named in a placement: a comma separates "
                "labels there, and a blank is none. Choose another label, such as 'group_1'."
            )
        return label

    @field_validator("env_configs", "hardware", mode="before")
    @classmethod
    def _is_of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name == "hardware":
            what, hint = "Each hardware yaml config must be a dictionary", "Expected {type: ...}."
            must_be(Mapping | NodeHardwareConfig | None, value, what, hint)
        else:
            hint = "Is a '-' missing before node_ranks?"
            must_be(list | None, value, "env_configs must be a list of dicts", hint)
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.ignore_hardware and self.hardware is not None:
            raise ClusterConfigError(
                f"Cannot specify hardware when ignore_hardware is set to True, in node group "
                f"'{self.label}'. Remove one of the two."
            )
        for config in self.hardware.configs if self.hardware else []:
            if config.node_rank not in self.node_ranks:
                raise ClusterConfigError(
                    f"node_rank {config.node_rank} in hardware config must be within node_ranks "
                    f"{self.node_ranks} in node group '{self.label}'."
                )
        return self

    @model_validator(mode="after")
    def _environments_are_distinct(self) -> Self:
        environments = self.env_configs or []
        nodes = [node for config in environments for node in set(config.node_ranks)]
        twice = sorted({node for node in nodes if nodes.count(node) > 1})
        if twice:
            raise ClusterConfigError(
                f"Node ranks {twice} in env_config are duplicated in node group '{self.label}'. "
                "A node has one environment; merge the entries."
            )
        names = [name for c in environments for variable in c.env_vars or [] for name in variable]
        for name in names:
            if names.count(name) > 1:
                raise ClusterConfigError(
                    f"Environment variable '{name}' in env_config is duplicated in node group "
                    f"'{self.label}'. Keep one value."
                )
        return self


class ClusterConfig(StrictModel):
    """Machines, and where components run on them."""

    only_with: ClassVar = {"address": "runtime: ray"}

    num_nodes: int = 1
    """Number of machines, 1 or more."""
    runtime: Literal["local", "ray"] = "local"
    """``local`` runs each worker as a thread of this process; ``ray`` as processes on all nodes."""
    address: str | None = None
    """Ray cluster to join, such as ``auto`` or ``10.0.0.1:6379``.

    None: that of ``ray start`` on this machine, or else an own one, as ``local`` is."""
    cpu_devices_per_node: int | None = Field(default=None, ge=1)
    """Number of devices (CPU slots) that the cores of a node are divided into; at most the cores
    that the process may use. None counts accelerators, or a node without any as one resource."""
    accelerators_per_node: int | None = Field(default=None, ge=1)
    """Number of accelerators that each node has, by which placements are checked without the
    cluster; one with other nodes is refused. None takes those of the machine that reads this."""
    timeout_minutes: float | None = Field(default=None, gt=0, le=1e7)
    """How long a receive, a channel get or a collective may wait before it is an error. None: what
    the environment variable ``RLINF_TIMEOUT`` says where it runs, or else 180."""
    component_placement: dict[str, Any] = Field(default_factory=dict)
    """Devices of each component: ``actor,rollout: 0-3`` or ``{node_group, placement}``."""
    residency: dict[str, Literal["resident", "offload"]] = Field(default_factory=dict)
    """What becomes of a component's device memory while others use the device: `actor: offload`
    gives it back between its phases, `actor,rollout: resident` keeps it. A component that is left
    out offloads where it shares an accelerator with another that can, and stays on a CPU."""
    node_groups: list[NodeGroupConfig] | None = None
    """Labelled groups of nodes."""
    profiling: ProfilingConfig | None = None
    """Profiler that wraps worker processes."""
    tracer: TracerConfig | None = None
    """Recorder of worker timelines."""
    net_emulation: NetEmulationConfig | None = None
    """Delays and bandwidths to imitate between workers."""
    auto_scheduler: bool = False
    """Whether devices move between components during a step (dynamic scheduling)."""
    use_pre_process_policy: bool = False
    """Dynamic scheduling: whether the rollout starts on the actor's devices too."""
    use_wait_before_last_iter_policy: bool = False
    """Dynamic scheduling: whether the actor waits for the rollout before its last iteration."""

    @staticmethod
    def from_dict_cfg(cfg_dict: DictConfig | Mapping[str, Any]) -> ClusterConfig:
        """Read the published form, in which ``num_nodes`` and ``component_placement`` are required.

        A program that builds its own cluster runs on Ray unless it says ``runtime: local``.

        Raises:
            ClusterConfigError: A field is missing, unknown or of the wrong type (also an
                ``AssertionError``).
        """
        data = plain(cfg_dict)
        missing = [key for key in ("num_nodes", "component_placement") if key not in data]
        if missing:
            raise ClusterConfigError(
                f"Missing fields '{missing}' detected in cluster yaml config. Got {list(data)}."
            )
        try:
            return ClusterConfig.model_validate({"runtime": "ray", **data})
        except ValidationError as error:
            where = "in cluster yaml config"
            raise cluster_config_error(error, ClusterConfig, where) from None

    def slow_links(self) -> SlowLinks | None:
        """What of the network is slow, None where none is imagined."""
        emulated = self.net_emulation
        return emulated.slow_links() if emulated is not None and emulated.enabled else None

    @field_validator("num_nodes", mode="before")
    @classmethod
    def _is_positive(cls, value: Any) -> Any:
        if type(value) is not int or value < 1:
            raise ClusterConfigError(
                f"'num_nodes' must be a positive integer, got {value!r}. Nearest legal: 1."
            )
        return value

    @field_validator("component_placement")
    @classmethod
    def _follows_the_grammar(cls, value: dict[str, Any]) -> dict[str, Any]:
        parse_component_placement(value)
        return value

    @model_validator(mode="before")
    @classmethod
    def _read_node_ranks(cls, data: Any) -> Any:
        data = plain(data)
        match data:
            case {"node_groups": list(groups)} if type(nodes := data.get("num_nodes", 1)) is int:
                ranks = list(range(nodes))
                return {**data, "node_groups": [_with_ranks(group, ranks) for group in groups]}
        return data

    @model_validator(mode="after")
    def _devices_are_of_one_kind(self) -> Self:
        if self.accelerators_per_node is not None and self.cpu_devices_per_node is not None:
            raise ClusterConfigError(
                "accelerators_per_node and cpu_devices_per_node exclude each other: the devices "
                "of a node are its accelerators or shares of its cores. Leave one of them out."
            )
        return self

    @model_validator(mode="after")
    def _groups_are_distinct(self) -> Self:
        labels: set[str] = set()
        owners: dict[int, str] = {}
        kinds: dict[int, str] = {}
        for group in self.node_groups or []:
            if group.label in labels:
                raise ClusterConfigError(
                    f"Node group label '{group.label}' is used twice. Labels must be unique."
                )
            labels.add(group.label)
            for node in group.node_ranks if group.device_kind else []:
                kind = kinds.setdefault(node, group.device_kind or "")
                if kind != group.device_kind:
                    raise ClusterConfigError(
                        f"Node {node} has devices of kind '{kind}' by one node group and of kind "
                        f"'{group.device_kind}' by '{group.label}'. A node has one kind; leave one "
                        "of the two out."
                    )
            for config in group.hardware.configs if group.hardware else []:
                owner = owners.setdefault(config.node_rank, group.label)
                if owner != group.label:
                    raise ClusterConfigError(
                        f"Cannot have multiple hardware configs of the same type '{config.HW_TYPE}'"
                        f" for the same node_rank {config.node_rank} in different node groups "
                        f"'{owner}' and '{group.label}'."
                    )
        return self

    def get_node_labels_by_rank(self, node_rank: int) -> list[str]:
        """Labels of the groups that a node is in."""
        return [group.label for group in self._groups_of(node_rank)]

    def get_node_hw_configs_by_rank(self, node_rank: int) -> list[FrankaConfig]:
        """Hardware that is declared for a node."""
        return [
            config
            for group in self._groups_of(node_rank)
            for config in (group.hardware.configs if group.hardware else [])
            if config.node_rank == node_rank
        ]

    def counts_robots_of_node(self, node_rank: int) -> bool:
        """Whether a node has as many robots as its environment names: of an empty declaration."""
        declared = [group.hardware for group in self._groups_of(node_rank)]
        return any(hardware is not None and not hardware.configs for hardware in declared)

    def get_node_python_interpreter_path_by_rank(self, node_rank: int) -> list[str]:
        """Interpreters that are configured for a node, in the order of the groups."""
        return [
            config.python_interpreter_path
            for config in self.get_node_environments_by_rank(node_rank)
            if config.python_interpreter_path is not None
        ]

    @property
    def environments(self) -> list[tuple[str, NodeGroupEnvConfig]]:
        """Environments that are configured, each with the label of its group, in their order."""
        groups = self.node_groups or []
        return [(group.label, each) for group in groups for each in group.env_configs or []]

    def get_node_environments_by_rank(self, node_rank: int) -> list[NodeGroupEnvConfig]:
        """Environments that are configured for a node, in the order of the groups."""
        return [
            config
            for group in self._groups_of(node_rank)
            for config in group.env_configs or []
            if node_rank in config.node_ranks
        ]

    def _groups_of(self, node_rank: int) -> list[NodeGroupConfig]:
        return [group for group in self.node_groups or [] if node_rank in group.node_ranks]


def read_config(
    num_nodes: int | None, given: DictConfig | Mapping[str, Any] | ClusterConfig | None
) -> ClusterConfig:
    """The configuration that the arguments of a cluster mean."""
    if num_nodes is not None and (not isinstance(num_nodes, int) or num_nodes < 0):
        raise ClusterConfigValueError(
            f"num_nodes is a number of machines, or 0 for all that are connected, got "
            f"{num_nodes!r}. Nearest legal: 1."
        )
    if given is None:
        return ClusterConfig(num_nodes=max(num_nodes or 1, 1), runtime="ray")
    if isinstance(given, ClusterConfig):
        config = given
    elif not isinstance(given, Mapping):
        raise ClusterConfigError(
            "cluster_cfg is the cluster section of a configuration, such as {'num_nodes': 1}, got "
            f"{type(given).__name__}: {given!r}."
        )
    else:
        required: dict[str, Any] = {"num_nodes": num_nodes or 1, "component_placement": {}}
        config = ClusterConfig.from_dict_cfg({**required, **plain(given)})
    if num_nodes is not None and num_nodes != config.num_nodes:
        raise ClusterConfigValueError(
            f"num_nodes is {num_nodes} but cluster_cfg.num_nodes is {config.num_nodes}: give one "
            "of them, or the same number."
        )
    return config


def plain(value: Any) -> Any:
    """Return configuration containers as plain lists and dictionaries."""
    if isinstance(value, DictConfig | ListConfig):
        return OmegaConf.to_container(value, resolve=True)
    return dict(value) if isinstance(value, Mapping) else value


def _with_ranks(
    section: Any, available: list[int], what: str = "yaml config", inside: str = ""
) -> Any:
    """Return a node group or environment whose text such as ``0-1`` is a list of node ranks."""
    if isinstance(section, NodeGroupConfig | NodeGroupEnvConfig):
        return section
    hint = "Expected {node_ranks: ..., ...}."
    must_be(Mapping, section, f"Each node {what} must be a dictionary", hint)
    if "node_ranks" not in section:
        return section
    given, where = section["node_ranks"], inside or f"node group '{section.get('label')}'"
    try:
        ranks = parse_ranks(given, "node", available)
    except PlacementError as error:
        raise ClusterConfigValueError(
            f"Error parsing node_ranks {given!r} in {where}. {error} Nearest legal: "
            f"'{format_ranks(available)}'."
        ) from None
    read, environments = {**section, "node_ranks": ranks}, section.get("env_configs")
    if isinstance(environments, list):
        kind, outside = "env_configs yaml config", f"env_config of {where}"
        read["env_configs"] = [_with_ranks(each, ranks, kind, outside) for each in environments]
    return read
