"""The nodes of a Ray cluster: waited for, looked at and put in order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
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
    own_id = ray.get_runtime_context().get_node_id()
    asked = {
        node["NodeID"]: _on_node(node["NodeID"], _given_rank).remote()
        for node in alive
        if node["NodeID"] != own_id
    }
    given = {own_id: _given_rank(), **{key: ray.get(answer) for key, answer in asked.items()}}
    places = {node["NodeID"]: node["NodeManagerAddress"] for node in alive}
    ranks = ranks_of([(given[key], place) for key, place in places.items()])
    rank_by_id = dict(zip(places, ranks, strict=True))

    def order(node: dict[str, Any]) -> tuple[int, bool, str]:
        key = node["NodeID"]
        rank = rank_by_id[key]
        return len(alive) if rank is None else rank, key != own_id, places[key]

    chosen = sorted(alive, key=order)
    infos = []
    for rank, node in enumerate(chosen if all_nodes else chosen[:wanted]):
        key = node["NodeID"]
        place = {"ray_id": key, "node_ip": node["NodeManagerAddress"]}
        if key == own_id:
            infos.append(probe_node(config, rank, **place))
        else:
            infos.append(ray.get(_on_node(key, probe_node).remote(config, rank, **place)))
    return infos


def _on_node(node_id: str, function: Callable[..., Any]) -> Any:
    """A function as a task that runs on a node."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=strategy)


def _given_rank() -> str | None:
    return os.environ.get("RLINF_NODE_RANK")


def ranks_of(given: Sequence[tuple[str | None, str]]) -> list[int | None]:
    """What each machine was given as ``RLINF_NODE_RANK``, from texts and addresses."""
    found = [rank_of(text, address) for text, address in given]
    holders: dict[int, str] = {}
    for rank, (_, address) in zip(found, given, strict=True):
        if rank is not None and rank in holders:
            raise SchedulerUsageError(
                f"RLINF_NODE_RANK is {rank} on {holders[rank]} and on {address}; give each machine "
                "a rank of its own, set before `ray start`"
            )
        if rank is not None:
            holders[rank] = address
    return found


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
