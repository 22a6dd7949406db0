import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.errors import UserError
from rlinf.scheduler import accelerators, cpu_slots
from rlinf.scheduler.accelerators import (
    VENDORS,
    CollectiveGroupOptions,
    detect_accelerators,
    process_device,
)
from rlinf.scheduler.cluster_sections import FrankaConfig
from rlinf.scheduler.cpu_slots import available_cores, divide_cores, thread_environment
from rlinf.scheduler.errors import SchedulerUsageError
from rlinf.scheduler.hardware import (
    Accelerator,
    AcceleratorType,
    AcceleratorUtil,
    FrankaHWInfo,
    enumerate_hardware,
)
from rlinf.scheduler.process import Process, own_device, set_current_worker
from rlinf.scheduler.runtime.robots import robots_of_node
from rlinf.scheduler.transport.endpoint import Endpoint
from rlinf.scheduler.worker import WorkerTimers


@given(st.integers(1, 64), st.data())
def test_slots_cover_the_cores_in_contiguous_equal_shares(count, data):
    cores = tuple(range(3, 3 + count))
    slots = divide_cores(cores, data.draw(st.integers(1, count)))
    assert tuple(core for slot in slots for core in slot) == cores
    sizes = {len(slot) for slot in slots}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("count", "message"), [(0, "1 or more"), (3, "largest legal value is 2")])
def test_slots_that_do_not_fit(count, message, monkeypatch):
    monkeypatch.delenv(cpu_slots.OVERSUBSCRIBE_VARIABLE, raising=False)
    with pytest.raises(UserError, match=message):
        divide_cores((0, 1), count)


def test_slots_may_share_cores_when_told_to(monkeypatch):
    monkeypatch.setenv(cpu_slots.OVERSUBSCRIBE_VARIABLE, "1")
    assert divide_cores((4, 7), 3) == ((4,), (7,), (4,))


def test_only_cores_that_the_process_may_use_count():
    if hasattr(os, "sched_getaffinity"):
        assert available_cores() == tuple(sorted(os.sched_getaffinity(0)))
    assert thread_environment((2, 3))["OMP_NUM_THREADS"] == "2"


def test_slots_are_found_as_devices():
    resource = Accelerator.enumerate(cpu_devices=1)
    assert resource.count == 1
    assert Accelerator.type_of(resource.infos[0].model) is AcceleratorType.CPU_SLOT
    assert Accelerator.type_of("something else") is AcceleratorType.NO_ACCEL


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_an_accelerator():
    assert detect_accelerators() == (AcceleratorType.NO_ACCEL, 0)
    assert AcceleratorUtil.get_accelerator_type() is AcceleratorType.NO_ACCEL
    assert enumerate_hardware() == []


def test_a_device_that_torch_has_not_is_refused(monkeypatch):
    monkeypatch.setenv("RLINF_DEVICE", "bogus")
    told = "RLINF_DEVICE is 'bogus', on which torch cannot compute here: .*; nearest: cpu"
    with pytest.raises(SchedulerUsageError, match=told):
        process_device()
    monkeypatch.setenv("RLINF_DEVICE", "cpu")
    assert process_device() == "cpu"


def test_threads_of_one_process_compute_on_their_own_devices(monkeypatch):
    monkeypatch.delenv("RLINF_DEVICE", raising=False)
    process = Process(
        runtime="local",
        endpoint=Endpoint(),
        codec=None,
        driver="local",
        node_rank=0,
        deadline_seconds=1,
    )
    monkeypatch.setattr("rlinf.scheduler.process._process", process)
    found = []
    for kind, number in ((AcceleratorType.NV_GPU, 0), (AcceleratorType.NPU, 3)):
        info = SimpleNamespace(accelerator_rank=number)
        worker = SimpleNamespace(has_accelerator=True, hardware_type=kind, worker_info=info)
        set_current_worker(worker, whole_process=False)
        found.append(own_device())
        process.runtime = "ray"  # ... which shows a process its own devices alone
        found.append(own_device())
        process.runtime = "local"
    set_current_worker(None, whole_process=False)
    assert found == ["cuda:0", "cuda", "npu:3", "npu"]


def test_devices_are_counted_by_the_files_of_their_driver(monkeypatch, tmp_path):
    nvidia = replace(VENDORS[AcceleratorType.NV_GPU], driver_files=f"{tmp_path}/*")
    monkeypatch.setattr(accelerators, "VENDORS", {**VENDORS, AcceleratorType.NV_GPU: nvidia})
    assert accelerators.installed_accelerators() == (AcceleratorType.NO_ACCEL, 0)
    for number in range(2):
        (tmp_path / f"0000:{number}").mkdir()
        (tmp_path / f"0000:{number}" / "information").write_text("Model: \t NVIDIA H100\n")
    assert accelerators.installed_accelerators() == (AcceleratorType.NV_GPU, 2)
    assert accelerators.accelerator_model(AcceleratorType.NV_GPU) == "NVIDIA H100"


def test_declared_arms_are_hardware():
    config = FrankaConfig(node_rank=0, robot_ip="10.0.0.1")
    arms = enumerate_hardware([config], cpu_devices=1)[1]
    assert (arms.type, arms.infos) == ("Franka", [FrankaHWInfo("Franka", "Franka", config)])


ENVIRONMENT = {
    "ROBOT_IP": "10.0.0.1, 10.0.0.2",
    "CAMERA_SERIALS": "a,b,c,d",
    "GRIPPER_TYPE": "robotiq",
    "DISABLE_VALIDATE": "true",
    "NODE_RANK": "7",
    "CONTROLLER_NODE_RANK": "7",
}


def test_what_robots_leave_out_comes_from_the_environment():
    first, second = robots_of_node((), ENVIRONMENT, 3)
    same = {"node_rank": 3, "gripper_type": "robotiq", "disable_validate": True}
    assert first == FrankaConfig(robot_ip="10.0.0.1", camera_serials=["a", "b"], **same)
    assert second == FrankaConfig(robot_ip="10.0.0.2", camera_serials=["c", "d"], **same)
    said = FrankaConfig(node_rank=3, robot_ip="10.0.0.9", gripper_type="franka")
    (robot,) = robots_of_node([said], {**ENVIRONMENT, "ROBOT_IP": ""})
    assert (robot.robot_ip, robot.gripper_type) == ("10.0.0.9", "franka")
    assert (robot.camera_serials, robot.controller_node_rank) == (["a", "b", "c", "d"], None)
    assert robots_of_node([said], {}) == [said]
    assert robots_of_node((), ENVIRONMENT) == robots_of_node((), {}, 3) == []


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"ROBOT_IP": "10.0.0.1"}, r"ROBOT_IP has 1 values, .* the node has 2 robots"),
        ({"CAMERA_SERIALS": "a,b,c"}, r"CAMERA_SERIALS has 3 values"),
        ({"ROBOT_IP": "here,there"}, r"'robot_ip' .* valid IP address, got 'here'"),
        ({"CAMERA_TYPE": "film"}, r"camera_type = 'film' in the environment of node 0"),
    ],
)
def test_variables_that_do_not_fit_the_robots_are_told(variables, told):
    robots = [FrankaConfig(node_rank=0, gripper_type=kind) for kind in ("franka", "robotiq")]
    with pytest.raises(UserError, match=told):
        robots_of_node(robots, variables)


def test_every_type_has_a_row_that_answers():
    assert set(VENDORS) == set(AcceleratorType)
    assert AcceleratorUtil.CCL_SUPPORT_LIST == (
        AcceleratorType.NV_GPU,
        AcceleratorType.AMD_GPU,
        AcceleratorType.MUSA_GPU,
    )
    for kind in AcceleratorType:
        assert AcceleratorUtil.get_ccl_socket_ifname_env_var(kind)
        assert (AcceleratorUtil.get_device_type(kind) is None) == (kind == "NO_ACCEL")
    assert AcceleratorUtil.get_torch_platform(AcceleratorType.NO_ACCEL) is None
    assert AcceleratorUtil.get_torch_platform(AcceleratorType.CPU_SLOT) is None
    assert AcceleratorUtil.get_torch_platform(AcceleratorType.NV_GPU) is torch.cuda
    assert AcceleratorUtil.get_ccl_backend(AcceleratorType.NV_GPU) == "nccl"
    assert AcceleratorUtil.get_ccl_backend(AcceleratorType.NO_ACCEL) is None
    with pytest.raises(ValueError, match="Unsupported accelerator type: TPU"):
        AcceleratorUtil.get_ccl_backend("TPU")


def test_ranges_are_marked_while_a_profiler_records(monkeypatch):
    seen = []
    for name in ("profiler.start", "profiler.stop", "nvtx.range_push", "nvtx.range_pop"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *given, it=name: seen.append((it, *given)))
    kind, timers = AcceleratorType.NV_GPU, WorkerTimers("group")
    for step in (None, 3):  # before, and while it records
        if step is not None:
            AcceleratorUtil.start_profiling(kind, step)
            AcceleratorUtil.start_profiling(kind, step)
        with AcceleratorUtil.profiling_range(kind, "outer"), timers.worker_timer("{inner}"):
            pass
    AcceleratorUtil.stop_profiling(kind)
    AcceleratorUtil.stop_profiling(kind)
    pushed, popped = "nvtx.range_push", ("nvtx.range_pop",)
    assert seen == [
        ("profiler.start",), (pushed, "outer"), (pushed, "{inner}"), popped, popped,
        ("profiler.stop",),
    ]  # fmt: skip
    AcceleratorUtil.start_profiling(AcceleratorType.CPU_SLOT)
    with AcceleratorUtil.profiling_range(AcceleratorType.CPU_SLOT, "nothing"):
        assert len(seen) == 6


def test_visibility():
    kind = AcceleratorType.NV_GPU
    environment = AcceleratorUtil.get_accelerator_env_var(kind, ["0", "2"])
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    restricted = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    environment = AcceleratorUtil.get_accelerator_env_var(kind, ["0", "2"], restricted)
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert AcceleratorUtil.get_accelerator_env_var(AcceleratorType.CPU_SLOT, ["0"]) == {}


def test_visible_devices_of_this_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 3")
    assert AcceleratorUtil.get_visible_devices(AcceleratorType.NV_GPU) == [1, 3]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert AcceleratorUtil.get_visible_devices(AcceleratorType.NV_GPU) == []
    assert AcceleratorUtil.get_visible_devices(AcceleratorType.NO_ACCEL) == []


def test_a_vendor_package_brings_its_platform(monkeypatch):
    """The table's way of finding a device, with a package that stands for the vendor's."""
    platform = SimpleNamespace(device_count=lambda: 2)
    package = SimpleNamespace(__spec__=SimpleNamespace(name="torch_npu"))
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    monkeypatch.setitem(sys.modules, "torch.npu", platform)
    assert VENDORS[AcceleratorType.NPU].device_count() == 2
    monkeypatch.delitem(sys.modules, "torch_npu")
    assert VENDORS[AcceleratorType.NPU].device_count() == 0


def test_collective_options():
    assert CollectiveGroupOptions().is_empty_options()
    options = CollectiveGroupOptions(accel_max_ctas=4)
    assert not options.is_empty_options()
    assert AcceleratorUtil.get_accel_pg_options(AcceleratorType.NO_ACCEL, options) is None
    assert AcceleratorUtil.get_accel_pg_options(AcceleratorType.NV_GPU, None) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_machine():
    resource = Accelerator.enumerate()
    assert resource.count == torch.cuda.device_count()
    model = resource.infos[0].model
    assert model == f"NV_GPU:{torch.cuda.get_device_name(0)}"
    options = CollectiveGroupOptions(accel_max_ctas=4, is_high_priority_stream=True)
    nccl = AcceleratorUtil.get_accel_pg_options(AcceleratorType.NV_GPU, options)
    assert nccl.config.max_ctas == 4
    assert nccl.is_high_priority_stream
