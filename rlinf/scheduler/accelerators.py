"""Accelerators by vendor: one table row each, and the questions that the rest asks of a row.

Rows marked "not run" are written from the vendor's documentation, for lack of the hardware."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlinf.scheduler.errors import HardwareError, SchedulerUsageError
from rlinf.scheduler.profiler import close_window, open_window, profiled_range


class AcceleratorType(StrEnum):
    """Kind of the devices of a node."""

    NV_GPU = "NV_GPU"
    AMD_GPU = "AMD_GPU"
    INTEL_GPU = "INTEL_GPU"
    NPU = "NPU"
    MUSA_GPU = "MUSA_GPU"
    KUNLUN_XPU = "KUNLUN_XPU"
    CPU_SLOT = "CPU_SLOT"
    NO_ACCEL = "NO_ACCEL"


@dataclass(frozen=True)
class Vendor:
    """What differs between accelerators."""

    device: str | None  # device string of torch, such as `cuda`; None without devices
    package: str | None = None  # adds the platform to torch when it is imported
    torch_version: str | None = None  # attribute of `torch.version` in builds for this vendor
    visibility_variables: tuple[str, ...] = ()  # restrict a process to devices, comma separated
    ray_overwrites: str | None = None  # variable that Ray sets, if not the first of these
    ccl_backend: str | None = None  # collective library as a backend of `torch.distributed`
    ccl_socket_ifname: str = "GLOO_SOCKET_IFNAME"  # names that library's network interface
    driver_files: str | None = None
    """Pattern of the driver's files, one per device: they are counted in an instant, while torch
    takes seconds to import."""
    inter_worker_ccl: bool = False
    """Whether worker groups talk over the collective library; otherwise through host memory."""

    def torch_platform(self) -> Any | None:
        """The module with the functions of ``torch.cuda``, None without one."""
        if self.device in (None, "cpu"):
            return None
        if self.package is not None:
            importlib.import_module(self.package)
        return importlib.import_module(f"torch.{self.device}")

    def device_count(self) -> int:
        """Number of devices that this process sees."""
        missing = self.package is not None and find_spec(self.package) is None
        if self.device in (None, "cpu") or missing:
            return 0
        import torch

        if self.torch_version and getattr(torch.version, self.torch_version, None) is None:
            return 0
        platform = self.torch_platform()
        return int(platform.device_count()) if platform is not None else 0


# Looked through in this order. Kunlun comes first: its package answers under `torch.cuda`.
VENDORS: Mapping[AcceleratorType, Vendor] = MappingProxyType(
    {
        AcceleratorType.KUNLUN_XPU: Vendor(  # not run
            device="cuda",
            package="torch_xmlir",
            visibility_variables=("CUDA_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES"),
            ccl_backend="bkcl",
            ccl_socket_ifname="BKCL_SOCKET_IFNAME",
        ),
        AcceleratorType.NV_GPU: Vendor(
            device="cuda",
            torch_version="cuda",
            visibility_variables=("CUDA_VISIBLE_DEVICES",),
            ccl_backend="nccl",
            ccl_socket_ifname="NCCL_SOCKET_IFNAME",
            driver_files="/proc/driver/nvidia/gpus/*",
            inter_worker_ccl=True,
        ),
        AcceleratorType.AMD_GPU: Vendor(  # not run; RCCL answers under the name nccl
            device="cuda",
            torch_version="hip",
            visibility_variables=("HIP_VISIBLE_DEVICES",),
            ccl_backend="nccl",
            ccl_socket_ifname="NCCL_SOCKET_IFNAME",
            inter_worker_ccl=True,
        ),
        AcceleratorType.NPU: Vendor(  # Huawei Ascend, not run
            device="npu",
            package="torch_npu",
            visibility_variables=("ASCEND_RT_VISIBLE_DEVICES",),
            ccl_backend="hccl",
            ccl_socket_ifname="HCCL_SOCKET_IFNAME",
        ),
        AcceleratorType.MUSA_GPU: Vendor(  # Moore Threads, not run
            device="musa",
            package="torch_musa",
            visibility_variables=("MUSA_VISIBLE_DEVICES",),
            ccl_backend="mccl",
            ccl_socket_ifname="MCCL_SOCKET_IFNAME",
            inter_worker_ccl=True,
        ),
        AcceleratorType.INTEL_GPU: Vendor(  # not run
            device="xpu",
            torch_version="xpu",
            visibility_variables=("ZE_AFFINITY_MASK",),
            ray_overwrites="ONEAPI_DEVICE_SELECTOR",
            ccl_backend="ccl",
            ccl_socket_ifname="CCL_MNIC_NAME",
        ),
        AcceleratorType.CPU_SLOT: Vendor(device="cpu"),
        AcceleratorType.NO_ACCEL: Vendor(device=None),
    }
)


@cache
def detect_accelerators() -> tuple[AcceleratorType, int]:
    """Kind and number of the accelerators that this process sees, found once."""
    for accelerator_type, vendor in VENDORS.items():
        count = vendor.device_count()
        if count > 0:
            return accelerator_type, count
    return AcceleratorType.NO_ACCEL, 0


DEVICE_VARIABLE = "RLINF_DEVICE"
"""Environment variable with the torch device of a process, for devices that the table lacks."""


def process_device(
    accelerator_type: AcceleratorType | None = None, number: int | None = None
) -> str:
    """Device string of torch on which this process computes.

    ``accelerator_type`` is the kind of devices that it was given, or else of those that it sees;
    ``number`` is which of those that it sees, or else the current one.

    Raises:
        SchedulerUsageError: ``RLINF_DEVICE`` names none on which torch can compute here.
    """
    kind = detect_accelerators()[0] if accelerator_type is None else accelerator_type
    named = os.environ.get(DEVICE_VARIABLE)
    device = _known(named) if named else VENDORS[kind].device or "cpu"
    return device if number is None or ":" in device or device == "cpu" else f"{device}:{number}"


@cache
def _known(device: str) -> str:
    """A device that is named, once torch has made a tensor there."""
    import torch

    try:
        torch.empty(0, device=device)
    except Exception as error:  # one that torch was not built for is an AssertionError
        raise SchedulerUsageError(
            f"{DEVICE_VARIABLE} is '{device}', on which torch cannot compute here: "
            f"{str(error).splitlines()[0]}; nearest: cpu, or leave it out"
        ) from error
    return device


def installed_accelerators() -> tuple[AcceleratorType, int]:
    """Kind and number of this machine's devices, as far as a driver lists them without torch."""
    for kind, vendor in VENDORS.items():
        if vendor.driver_files is not None:
            root, _, pattern = vendor.driver_files.rpartition("/")
            count = len(list(Path(root).glob(pattern)))
            if count:
                return kind, count
    return AcceleratorType.NO_ACCEL, 0


def collective_backend(device: str) -> str:
    """Backend of ``torch.distributed`` for tensors on a device, such as ``nccl`` for ``cuda``."""
    name = device.partition(":")[0]
    kind, _ = detect_accelerators()
    rows = [VENDORS[kind], *VENDORS.values()]  # the vendor of this process goes first
    found = (row.ccl_backend for row in rows if row.device == name)
    return next((backend for backend in found if backend), "gloo")


def set_current_device(device: str) -> None:
    """Let this process compute on a device where none is named; collective libraries ask for it."""
    import torch

    torch.get_device_module(device).set_device(device)


def accelerator_model(accelerator_type: AcceleratorType) -> str:
    """Model name of the node's first device."""
    files = VENDORS[accelerator_type].driver_files
    if files is not None:  # asking torch would occupy device memory
        for information in sorted(Path("/").glob(f"{files.lstrip('/')}/information")):
            for line in information.read_text(errors="replace").splitlines():
                key, _, value = line.partition(":")
                if key.strip() == "Model":
                    return value.strip()
    platform = VENDORS[accelerator_type].torch_platform()
    return "" if platform is None else str(platform.get_device_name(0))


class AcceleratorUtil:
    """The vendor table as functions of the accelerator type."""

    CCL_SUPPORT_LIST = tuple(kind for kind, vendor in VENDORS.items() if vendor.inter_worker_ccl)

    @staticmethod
    def get_accelerator_type() -> AcceleratorType:
        """Kind of the accelerators that this process sees."""
        return detect_accelerators()[0]

    @staticmethod
    def get_accelerator_env_var(
        accelerator_type: AcceleratorType,
        visible_accelerators: Sequence[str],
        node_environment: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Environment that shows a new process only the devices of these local ranks of its node.

        ``node_environment`` is that of the node before any worker. A node may itself be restricted;
        rank 0 is then the first device that the node sees.
        """
        row, environment = _row(accelerator_type), {}
        for variable in row.visibility_variables:
            seen = _split((node_environment or {}).get(variable))
            ranks = [seen[int(rank)] if seen else rank for rank in visible_accelerators]
            environment[variable] = ",".join(ranks)
        if row.visibility_variables:  # or Ray would set them
            variable = row.ray_overwrites or row.visibility_variables[0]
            environment[f"RAY_EXPERIMENTAL_NOSET_{variable}"] = "1"
        return environment

    @staticmethod
    def get_visible_devices(accelerator_type: AcceleratorType) -> list[int]:
        """Device numbers that this process is restricted to, empty if it is not."""
        variables = _row(accelerator_type).visibility_variables
        numbers = _split(os.environ.get(variables[0])) if variables else []
        return [int(number) for number in numbers if number.isdecimal()]

    @staticmethod
    def get_ccl_backend(accelerator_type: AcceleratorType) -> str | None:
        """Backend name of the collective library in ``torch.distributed``, None without one."""
        return _row(accelerator_type).ccl_backend

    @staticmethod
    def get_ccl_socket_ifname_env_var(accelerator_type: AcceleratorType) -> str:
        """Variable that names the network interface of the collective library."""
        return _row(accelerator_type).ccl_socket_ifname

    @staticmethod
    def get_torch_platform(accelerator_type: AcceleratorType) -> Any | None:
        """Module with the functions of ``torch.cuda``, None for CPU slots and no accelerator."""
        return _row(accelerator_type).torch_platform()

    @staticmethod
    def empty_cache(device: Any) -> None:
        """Let others have the device memory that torch of this process keeps and does not use."""
        import torch

        kind = torch.device(device).type
        if kind != "cpu":
            torch.get_device_module(kind).empty_cache()

    @staticmethod
    def get_device_type(accelerator_type: AcceleratorType) -> str | None:
        """Device string of torch, None without an accelerator."""
        return _row(accelerator_type).device

    @staticmethod
    def start_profiling(accelerator_type: AcceleratorType, step_idx: int | None = None) -> None:
        """Let an external profiler record this process, where the platform can tell it so."""
        open_window(_row(accelerator_type).torch_platform())

    @staticmethod
    def stop_profiling(accelerator_type: AcceleratorType) -> None:
        """Let it record no more."""
        close_window()

    @staticmethod
    def profiling_range(
        accelerator_type: AcceleratorType,
        label: str,
        color: str | None = None,
        domain: str | None = None,
    ) -> AbstractContextManager[None]:
        """Name a block in what an external profiler records; nothing while it does not."""
        return profiled_range(label)

    @staticmethod
    def get_accel_pg_options(
        accelerator_type: AcceleratorType, options: CollectiveGroupOptions | None
    ) -> Any | None:
        """Options of the collective library's process group; None where there is nothing to set."""
        library = _row(accelerator_type).ccl_backend
        if options is None or options.is_empty_options() or library != "nccl":
            return None
        from torch.distributed import ProcessGroupNCCL

        nccl = ProcessGroupNCCL.Options(is_high_priority_stream=options.is_high_priority_stream)
        if options.accel_cluster_size is not None:
            nccl.config.cga_cluster_size = options.accel_cluster_size
        if options.accel_max_ctas is not None:
            nccl.config.max_ctas = options.accel_max_ctas
        if options.accel_min_ctas is not None:
            nccl.config.min_ctas = options.accel_min_ctas
        return nccl


def _row(accelerator_type: AcceleratorType) -> Vendor:
    try:
        return VENDORS[AcceleratorType(accelerator_type)]
    except ValueError:
        known = ", ".join(kind.value for kind in AcceleratorType)
        raise HardwareError(
            f"Unsupported accelerator type: {accelerator_type}. Known types: {known}."
        ) from None


def _split(devices: str | None) -> list[str]:
    return [device.strip() for device in (devices or "").split(",") if device.strip()]


@dataclass
class CollectiveGroupOptions:
    """Settings of one communicator; the first communication of a pair or group decides them.

    The first four are handed to the accelerator's collective library (for NVIDIA the options of
    ``ProcessGroupNCCL``) and mean nothing for CPU tensors.
    """

    accel_cluster_size: int | None = None  # thread blocks per cluster; None: the library chooses
    accel_max_ctas: int | None = None
    """Most thread blocks a communication kernel may use: more is faster communication and less
    compute for everything else on the device."""
    accel_min_ctas: int | None = None
    is_high_priority_stream: bool = False
    use_ring_broadcast: bool = False
    """Without effect, for programs that say it: a broadcast goes through the host's memory, from
    where each receiver takes it."""

    def is_empty_options(self) -> bool:
        """Whether every setting has its default."""
        return self == CollectiveGroupOptions()
