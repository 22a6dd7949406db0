"""Published programs call these by keyword: names and defaults of what is theirs to call."""

from __future__ import annotations

import inspect
import shlex
from typing import Any

import pytest

from rlinf import scheduler
from rlinf.errors import UserError
from rlinf.scheduler import Cluster, Worker, WorkerGroupFuncResult
from rlinf.scheduler.cluster_sections import ProfilingConfig
from rlinf.scheduler.process import AsyncWork
from tests.scheduler.workers import Basic

CALLS = {
    "Channel.create": "name maxsize=0 distributed=False node_rank=0 local=False "
    "disable_distributed_log=True",
    "Channel.connect": "name current_worker",
    "Channel.put": "item weight=0 key='default_queue' async_op=False",
    "Channel.put_nowait": "item weight=0 key='default_queue'",
    "Channel.get": "key='default_queue' async_op=False",
    "Channel.get_nowait": "key='default_queue'",
    "Channel.get_batch": "target_weight=0 key='default_queue' async_op=False",
    "Channel.qsize": "key='default_queue'",
    "Channel.empty": "key='default_queue'",
    "Channel.full": "key='default_queue'",
    "Cluster.find_free_port": "max_port_num=None",
    "Cluster.get_full_env_var_name": "var",
    "Cluster.get_sys_env_var": "env_var default=None",
    "Cluster.get_node_group": "label",
    "Cluster.get_node_info": "node_rank",
    "Cluster.get_node_ip": "node_rank",
    "Cluster.modify_profile_context": "python_interpreter_path worker_name profiling_cfg",
    "Cluster.get_profiling_env_vars_for_worker": "worker_name profiling_cfg",
    "Cluster.merge_worker_env_vars": "base_env_vars incoming_env_vars mode",
    "ClusterConfig.from_dict_cfg": "cfg_dict",
    "AcceleratorUtil.start_profiling": "accelerator_type step_idx=None",
    "AcceleratorUtil.stop_profiling": "accelerator_type",
    "AcceleratorUtil.profiling_range": "accelerator_type label color=None domain=None",
    "CollectiveGroupOptions": "accel_cluster_size=None accel_max_ctas=None accel_min_ctas=None "
    "is_high_priority_stream=False use_ring_broadcast=False",
    "CommMapper.get_dst_ranks": "batch_size src_world_size dst_world_size src_rank",
    "CommMapper.get_src_ranks": "batch_size src_world_size dst_world_size dst_rank",
    "ComponentPlacement": "config cluster",
    "ComponentPlacement.get_strategy": "component_name",
    "ComponentPlacement.get_world_size": "component_name",
    "ComponentPlacement.get_hardware_ranks": "component_name",
    "FlexiblePlacementStrategy": "hardware_ranks_list node_group_label=None",
    "NodePlacementStrategy": "node_ranks node_group_label=None",
    "PackedPlacementStrategy": "start_hardware_rank end_hardware_rank num_hardware_per_process=1 "
    "stride=1 node_group=None",
    "PlacementStrategy.get_placement": "cluster isolate_accelerator=True",
    "Tracer.trace_begin": "name cat args=None",
    "Tracer.trace_end": "name cat",
    "Tracer.trace_span": "name cat args=None",
    "Tracer.trace_func": "func_or_cat cat",
    "Worker.send": "object dst_group_name dst_rank async_op=False options=None "
    "piggyback_payload=None",
    "Worker.recv": "src_group_name src_rank async_op=False options=None",
    "Worker.send_tensor": "tensor dst_group_name dst_rank async_op=False options=None",
    "Worker.recv_tensor": "tensor src_group_name src_rank async_op=False options=None",
    "Worker.broadcast": "object=None groups=None src=None async_op=False options=None",
    "Worker.create_channel": "channel_name maxsize=0 distributed=False node_rank=0 local=False",
    "Worker.connect_channel": "channel_name",
    "Worker.send_to": "group_name channel data route_key=None mode=None tag=None async_op=False "
    "batch_size=None split_fn=None enable_p2p=False options=None decoupled_mode=False "
    "send_queue_size=0",
    "Worker.recv_from": "group_name channel route_key=None tag=None async_op=False "
    "batch_size=None merge_fn=None infer_batch_size_fn=None enable_p2p=False options=None "
    "decoupled_mode=False recv_queue_size=0",
    "Worker.acquire_free_port": "max_port_num=None",
    "Worker.pop_execution_time": "tag",
    "Worker.worker_timer": "tag=None trace=True",
    "Worker.timer": "tag=None trace=True",
    "Worker.start_profile": "step_idx",
    "Worker.check_worker_alive": "worker_name",
    **{
        f"Worker.log_{name}": "msg"
        for name in ("debug", "info", "warning", "error", "on_first_rank", "on_last_rank")
    },
    "WorkerAddress.get_child_address": "rank",
    "WorkerAddress.from_name": "worker_name",
    "WorkerAddress.from_parent_name_rank": "parent_name rank",
    "WorkerGroup.launch": "cluster placement_strategy=None name=None max_concurrency=None "
    "isolate_gpu=True catch_system_failure=None disable_distributed_log=False",
    "WorkerGroup.from_group_name": "worker_cls group_name",
    "WorkerGroupFuncResult.consume_duration": "reduction_type='max'",
    "WorkerGroupFuncResult.consume_durations": "reduction_type='max' return_per_rank=False",
    "build_send_plan": "src_group_name dst_group_name src_rank src_world_size dst_world_size tag "
    "route_key=None batch_size",
    "build_recv_plan": "src_group_name dst_group_name dst_rank src_world_size dst_world_size tag "
    "route_key=None batch_size",
    "build_route_channel_key": "src_group_name dst_group_name src_rank dst_rank tag route_key=None",
    "build_send_key": "src_group_name dst_group_name src_rank dst_rank tag route_key=None",
    "decoupled_build_recv_plan": "src_group_name dst_group_name recv_rank src_world_size "
    "dst_world_size tag route_key=None batch_size recv_queue_size=0",
    "get_batch_size": "data infer_batch_size_fn=None",
    "get_group_world_size": "manager_proxy group_name",
    "infer_batch_size": "data",
    "merge_batches": "batches",
    "split_batch": "data split_sizes",
    "split_channel_message": "channel_message",
}
"""Parameters in their order, with the defaults that programs may leave out."""


@pytest.mark.parametrize("name", CALLS)
def test_parameters_are_called_as_published(name: str) -> None:
    owner, _, method = name.partition(".")
    found: Any = getattr(scheduler, owner)
    found = getattr(found, method) if method else found
    own = {key: each for key, each in inspect.signature(found).parameters.items() if key != "self"}
    wanted = dict(each.partition("=")[::2] for each in CALLS[name].split())
    assert [key for key in own if key in wanted] == list(wanted)
    for key, default in wanted.items():
        assert not default or repr(own[key].default) == default, key
    # What is ours besides can be left out.
    assert all(own[key].default is not inspect.Parameter.empty for key in own.keys() - wanted)


def test_handles_have_their_methods() -> None:
    for name in ("wait", "async_wait", "done"):
        assert callable(getattr(AsyncWork, name))
        assert callable(getattr(WorkerGroupFuncResult, name))
    assert callable(AsyncWork.then)
    assert Worker.current_worker is None


def test_a_call_on_no_rank_runs_nowhere(shared: Any) -> None:
    group = shared(Basic)
    nowhere = group.execute_on().add(1)
    assert nowhere.wait() == []
    with pytest.raises(ValueError, match="no rank"):
        nowhere.consume_duration()
    assert group.add(1).wait() == [(0, 1), (1, 1), (2, 1)]


def test_durations_are_reduced_by_either_name(shared: Any) -> None:
    call = shared(Basic).add(1)
    slowest, fastest = (call.consume_duration(reduction_type=how) for how in ("max", "min"))
    assert slowest >= fastest >= 0
    assert call.consume_duration(reduction="min") == fastest
    timed = shared(Basic).timed()
    table, ranks = timed.consume_durations(reduction_type="min", return_per_rank=True)
    assert table["timed"] == min(rank["timed"] for rank in ranks)


def command(**profiling: Any) -> list[str]:
    config = ProfilingConfig(output_dir="/reports", **profiling)
    return shlex.split(Cluster.modify_profile_context("/a b/python", "Actor:1", config))


def test_a_profiler_is_called_as_its_manual_says() -> None:
    options = {"t": "cuda,nvtx", "sample": "none", "cudabacktrace": True}
    nsight = command(backend="nsight", options=options, flags=["python-backtrace", "w"])
    assert nsight == [
        "nsys", "profile", "--force-overwrite=true", "--output=/reports/Actor_1",
        "-t", "cuda,nvtx", "--sample=none", "--cudabacktrace=true", "--python-backtrace", "-w",
        "/a b/python",
    ]  # fmt: skip
    steps = command(backend="nsight", steps=[1], options={"o": "mine", "capture-range-end": "none"})
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=none", "mine"} <= set(steps)
    assert not any(word.startswith("--output") for word in steps)
    rocm = command(backend="rocprof_sys", options={"T": "hip"})
    assert rocm[:3] == [
        "env", "ROCPROFSYS_OUTPUT_PATH=/reports", "ROCPROFSYS_OUTPUT_PREFIX=Actor_1",
    ]  # fmt: skip
    assert rocm[4:] == ["rocprof-sys-python", "-T", "hip", "--", "/a b/python"]
    plain = ProfilingConfig(backend="nsight", worker_groups=["rollout"])
    assert Cluster.modify_profile_context("python", "Actor:1", plain) == "python"


@pytest.mark.parametrize("given", [{"num_nodes": -1}, {"num_nodes": "2"}, {"cluster_cfg": [1]}])
def test_what_makes_no_cluster(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "_instance", None)
    with pytest.raises(UserError, match="num_nodes"):
        Cluster(**given)


def test_environments_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLINF_PATH_ENV_MERGE_MODE", raising=False)
    merge = Cluster.merge_worker_env_vars
    base, incoming = {"PATH": "/b:/c", "A": "1"}, {"PATH": "/a:/b", "B": "2"}
    assert merge(base, incoming) == {"PATH": "/a:/b:/c", "A": "1", "B": "2"}
    assert merge(base, incoming, "override")["PATH"] == "/a:/b"
    monkeypatch.setenv("RLINF_PATH_ENV_MERGE_MODE", "prepend")
    with pytest.raises(UserError, match=r"'prepend', which is no mode; known: append, override"):
        merge(base, incoming)
