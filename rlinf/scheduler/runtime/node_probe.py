"""What a machine offers as a node of a cluster."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping

from rlinf.scheduler.cluster_config import ClusterConfig
from rlinf.scheduler.cpu_slots import available_cores, divide_cores
from rlinf.scheduler.hardware import enumerate_hardware
from rlinf.scheduler.node import NodeInfo
from rlinf.scheduler.profiler import PROFILERS
from rlinf.scheduler.runtime.robots import robots_of_node


def probe_node(
    config: ClusterConfig,
    node_rank: int = 0,
    *,
    ray_id: str = "",
    node_ip: str = "127.0.0.1",
    environment: Mapping[str, str] | None = None,
) -> NodeInfo:
    """Describe the machine that this process runs on as node ``node_rank`` of a cluster.

    ``environment`` is that of the node before any worker; None takes that of this process.
    """
    slots = config.cpu_devices_per_node
    cores = available_cores()
    interpreters = config.get_node_python_interpreter_path_by_rank(node_rank)
    variables = dict(os.environ if environment is None else environment)
    counted = node_rank if config.counts_robots_of_node(node_rank) else None
    declared = config.get_node_hw_configs_by_rank(node_rank)
    robots = robots_of_node(declared, variables, counted)
    return NodeInfo(
        node_labels=config.get_node_labels_by_rank(node_rank),
        node_rank=node_rank,
        ray_id=ray_id,
        node_ip=node_ip,
        num_cpus=len(cores),
        python_interpreter_path=interpreters[0] if interpreters else sys.executable,
        default_env_vars=variables,
        hardware_resources=enumerate_hardware(robots, slots),
        cpu_slots=() if slots is None else divide_cores(cores, slots),
        missing_programs=_missing_programs(config, node_rank),
    )


def _missing_programs(config: ClusterConfig, node_rank: int) -> tuple[str, ...]:
    """Of the programs that start workers on a node, those that this machine does not have."""
    commands = config.get_node_python_interpreter_path_by_rank(node_rank)
    programs = [word for command in commands for word in shlex.split(command)[:1]]
    if config.profiling is not None and config.profiling.enabled:
        programs.append(PROFILERS[config.profiling.backend])
    environments = config.get_node_environments_by_rank(node_rank)
    variables = [variable for each in environments for variable in each.env_vars or []]
    folders = [variable["PATH"] for variable in variables if "PATH" in variable]
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])
    # Ray has a shell start them, which expands what is to be expanded.
    expanded = {word: os.path.expandvars(os.path.expanduser(word)) for word in programs}
    return tuple(word for word, real in expanded.items() if shutil.which(real, path=path) is None)
