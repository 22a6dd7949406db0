"""The nodes of a Ray cluster: waited for, looked at and put in order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlinf.scheduler.cluster_config import ClusterConfig
from rlinf.scheduler.errors import SchedulerError, SchedulerUsageError
from rlinf.scheduler.node import NodeInfo
from rlinf.scheduler.runtime.node_probe import probe_node


def find_nodes(config: ClusterConfig, deadline_seconds: float, all_nodes: bool) -> list[NodeInfo]:
    """Wait for the nodes, look at them, and put them in order."""
    wanted = 1 if all_nodes else config.num_nodes
    limit = time.monotonic() + deadline_seconds
    told = 0
    while len(alive := [node for node in ray.nodes() if node["Alive"]]) < wanted:
        if time.monotonic() > limit:
            raise SchedulerError(
                f"waited {deadline_seconds / 60:g} minutes for {wanted} nodes, but only "
                f"{len(alive)} joined: {[node['NodeManagerAddress'] for node in alive]}. Run "
                "`ray start --address=…` on the missing machines, or lower cluster.num_nodes."
            )
        if len(alive) != told:
            told = len(alive)
            print(f"waiting for {wanted} nodes, {told} joined so far", flush=True)
        time.sleep(0.5)
    chosen = _in_order(alive)
    if not all_nodes:
        _require_own(chosen, wanted)
        chosen = chosen[:wanted]
    own_id = ray.get_runtime_context().get_node_id()
    infos = []
    for rank, node in enumerate(chosen):
        key = node["NodeID"]
        place = {"ray_id": key, "node_ip": node["NodeManagerAddress"]}
        if key == own_id:
            infos.append(probe_node(config, rank, **place))
        else:
            infos.append(ray.get(_on_node(key, probe_node).remote(config, rank, **place)))
    return infos


def _in_order(alive: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The nodes by their ranks; of those without one this machine is the first."""
    own_id = ray.get_runtime_context().get_node_id()
    others = (node["NodeID"] for node in alive if node["NodeID"] != own_id)
    asked = {key: _on_node(key, _given_rank).remote() for key in others}
    given = {own_id: _given_rank(), **{key: ray.get(answer) for key, answer in asked.items()}}
    # In this order those without a rank get the ranks that are left.
    nodes = sorted(alive, key=lambda each: (each["NodeID"] != own_id, each["NodeManagerAddress"]))
    ranks = ranks_of([(given[each["NodeID"]], each["NodeManagerAddress"]) for each in nodes])
    return [node for _, node in sorted(zip(ranks, nodes, strict=True), key=itemgetter(0))]


def _require_own(nodes: Sequence[Mapping[str, Any]], wanted: int) -> None:
    """Refuse a cluster of the first nodes that the program's own is none of."""
    own = [node["NodeID"] for node in nodes].index(ray.get_runtime_context().get_node_id())
    if own >= wanted:
        raise SchedulerUsageError(
            f"this machine has rank {own} of {len(nodes)} that joined, and cluster.num_nodes is "
            f"{wanted}; start the program on one of the first, set cluster.num_nodes={own + 1}, or "
            "give this machine a lower RLINF_NODE_RANK"
        )


def _on_node(node_id: str, function: Callable[..., Any]) -> Any:
    """A function as a task that runs on a node."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=strategy)


def _given_rank() -> str | None:
    return os.environ.get("RLINF_NODE_RANK")


def ranks_of(given: Sequence[tuple[str | None, str]]) -> list[int]:
    """Rank of each machine, from its ``RLINF_NODE_RANK`` and its address.

    Those without one get the ranks that are left, in their order. A machine that is alone is the
    first: that of a larger cluster may run a program by itself.

    Raises:
        SchedulerUsageError: What one has is no rank, the rank of another, or none of so few.
    """
    found = [rank_of(text, address) for text, address in given]
    if len(found) == 1:
        return [0]
    holders: dict[int, str] = {}
    for rank, (_, address) in zip(found, given, strict=True):
        if rank is None:
            continue
        if rank in holders:
            raise SchedulerUsageError(
                f"RLINF_NODE_RANK is {rank} on {holders[rank]} and on {address}; give each machine "
                "a rank of its own, set before `ray start`"
            )
        if rank >= len(found):
            raise SchedulerUsageError(
                f"RLINF_NODE_RANK is {rank} on {address}, but {len(found)} machines have joined, "
                f"so ranks are 0 to {len(found) - 1}; set another there before `ray start`, or "
                "raise cluster.num_nodes to wait for more machines"
            )
        holders[rank] = address
    left = iter(rank for rank in range(len(found)) if rank not in holders)
    return [next(left) if rank is None else rank for rank in found]


def rank_of(text: str | None, address: str) -> int | None:
    """What a machine was given as ``RLINF_NODE_RANK``."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise SchedulerUsageError(
            f"RLINF_NODE_RANK is {text!r} on {address}, not the rank of a machine; for example "
            "RLINF_NODE_RANK=0, set before `ray start`"
        )
    return int(text)
