"""What a worker is told when it is launched, and the environment that follows from it."""

from __future__ import annotations

import importlib
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf.errors import UserError
from rlinf.scheduler.accelerators import AcceleratorType, AcceleratorUtil
from rlinf.scheduler.address import WorkerInfo
from rlinf.scheduler.cpu_slots import thread_environment
from rlinf.scheduler.errors import SchedulerUsageError
from rlinf.scheduler.placement import Placement
from rlinf.scheduler.transport.rendezvous import loopback_interface, require_interfaces

PATH_VARIABLES = (
    "PYTHONPATH", "LD_LIBRARY_PATH", "PATH", "LIBRARY_PATH", "CMAKE_PREFIX_PATH",
    "PKG_CONFIG_PATH", "CPATH",
)  # fmt: skip
EXTENSION_VARIABLE = "RLINF_EXT_MODULE"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_lock = threading.RLock()
_registered: set[str] = set()


@dataclass(frozen=True)
class Membership:
    """What a process needs to know to enter a cluster."""

    token: str  # name and secret of the cluster
    driver: str | None  # its endpoint; None in the driver itself
    node_rank: int
    network_ip: str | None  # where other nodes reach it; None in a cluster of one node
    deadline_seconds: float  # of a wait for anything


@dataclass(frozen=True)
class Launch:
    """Everything that a new worker needs to know."""

    incarnation: str  # tells its group from an earlier one of the same name
    placement: Placement
    info: WorkerInfo
    membership: Membership
    cores: tuple[int, ...] = ()  # that it is pinned to; empty for no pinning
    environment: dict[str, str] = field(default_factory=dict)
    configured: tuple[str, ...] = ()  # those of them that the configuration of its nodes names
    log_directory: str | None = None  # of per-worker log files; None writes none
    interpreter: str | None = None  # None for the driver's
    traced: bool = False
    slow_links: bool = False  # whether a network with such links is imagined
    import_paths: tuple[str, ...] = ()  # the driver's
    late_paths: tuple[str, ...] = ()  # those of them that stand behind its interpreter's folders
    imports_torch: bool = False  # before it is built, where it is a process

    @property
    def name(self) -> str:
        """Name of the worker, ``group:rank``."""
        return self.info.address.get_name()


def program_paths() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Where this program imports from beside its interpreter's own folders: before these, and after
    them, such as packages that are installed by a link."""
    library = Path(sysconfig.get_path("stdlib"))
    places = (*site.getsitepackages(), site.getusersitepackages())
    own = [library, *map(Path, places), library.with_name(f"{library.name.replace('.', '')}.zip")]
    # The working directory too, last: programs whose modules lie there rely on it with Ray.
    paths = list(dict.fromkeys(os.path.abspath(path) for path in (*sys.path, os.curdir)))
    place = paths.index(str(library)) if str(library) in paths else len(paths)
    before, after = (
        tuple(path for path in part if not any(Path(path).is_relative_to(each) for each in own))
        for part in (paths[:place], paths[place:])
    )
    return before, after


def order_paths(launch: Launch) -> None:
    """Look for modules in the driver's order from now on.

    Ray has put all folders of the driver's program first, so that the worker's class could be
    imported; some of them belong behind the interpreter's own, which they could hide.
    """
    sys.path[:] = [path for path in sys.path if path not in launch.late_paths]
    wanted = dict.fromkeys((*launch.import_paths, *launch.late_paths))
    sys.path.extend(path for path in wanted if path not in sys.path)


def program_has_torch(worker_class: type) -> bool:
    """Whether a worker is of the main program, and that has imported torch.

    A class of any other module brings what that imports to its process; one of the main program
    travels by value, and would import torch with its first tensor, while somebody waits for that.
    """
    return worker_class.__module__ == "__main__" and "torch" in sys.modules


def worker_environment(
    placement: Placement,
    info: WorkerInfo,
    *,
    master: tuple[str, int],
    namespace: str,
    one_machine: bool,
    node_environment: Mapping[str, str],
    catch_failure: bool | None = None,
) -> dict[str, str]:
    """Variables that tell a worker's process, and the libraries in it, its place in the group.

    ``node_environment`` is that of the worker's node before any worker, by which its devices are
    numbered; ``catch_failure`` is for programs that ask; None: as ``RLINF_CATCH_FAILURE`` says.
    """
    isolated = placement.isolate_accelerator
    if catch_failure is None:
        catch_failure = os.environ.get("RLINF_CATCH_FAILURE", "0") == "1"
    environment = {
        "GROUP_NAME": info.address.root_group_name,
        "WORKER_NAME": info.address.get_name(),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(info.group_world_size),
        "NODE_RANK": str(placement.placement_node_rank),
        "CLUSTER_NODE_RANK": str(placement.cluster_node_rank),
        "LOCAL_RANK": "0" if isolated else str(placement.local_rank),
        "LOCAL_WORLD_SIZE": "1" if isolated else str(placement.local_world_size),
        "NODE_LOCAL_RANK": str(placement.local_rank),
        "NODE_LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "LOCAL_ACCELERATOR_RANK": str(placement.local_accelerator_rank),
        "ACCELERATOR_TYPE": str(placement.accelerator_type),
        "ACCELERATOR_MODEL": info.accelerator_model,
        "VISIBLE_DEVICES": ",".join(placement.visible_accelerators),
        "ISOLATE_ACCELERATOR": "1" if isolated else "0",
        "LOCAL_HARDWARE_RANKS": ",".join(map(str, placement.local_hardware_ranks)),
        "NODE_GROUP_LABEL": placement.node_group_label,
        "CLUSTER_NAMESPACE": namespace,
        "CATCH_SYSTEM_FAILURE": "1" if catch_failure else "0",
    }
    if extension := os.environ.get(EXTENSION_VARIABLE):
        environment[EXTENSION_VARIABLE] = extension
    interfaces = os.environ.get("RLINF_COMM_NET_DEVICES")
    if interfaces and one_machine:
        require_interfaces(interfaces)
    elif one_machine:  # what exchanges tensors listens on loopback alone
        interfaces = loopback_interface()
    if interfaces:
        library = AcceleratorUtil.get_ccl_socket_ifname_env_var(placement.accelerator_type)
        environment.update({"GLOO_SOCKET_IFNAME": interfaces, library: interfaces})
    if placement.accelerator_type not in (AcceleratorType.NO_ACCEL, AcceleratorType.CPU_SLOT):
        environment.update(
            AcceleratorUtil.get_accelerator_env_var(
                placement.accelerator_type, placement.visible_accelerators, node_environment
            )
        )
    return environment


def apply_environment(environment: Mapping[str, str], cores: tuple[int, ...]) -> None:
    """Give this process its environment, cores and thread counts."""
    os.environ.update(environment)
    if cores:
        os.environ.update(thread_environment(cores))
        pin_thread(cores)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(len(cores))


def pin_thread(cores: tuple[int, ...]) -> None:
    """Let the calling thread, and threads it starts later, run on these cores only."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def merge_path_variables(
    environment: Mapping[str, str],
    base: Mapping[str, str] | None = None,
    mode: str | None = None,
) -> dict[str, str]:
    """Configured variables as a process gets them: path-like ones before those of the base (None:
    what this process has already), without repetition, unless the mode is ``override`` (None: as
    ``RLINF_PATH_ENV_MERGE_MODE`` says).
    """
    mode = mode or os.environ.get("RLINF_PATH_ENV_MERGE_MODE") or "append"
    if mode not in ("append", "override"):
        raise SchedulerUsageError(
            f"RLINF_PATH_ENV_MERGE_MODE is {mode!r}, which is no mode; known: append, override"
        )
    if mode == "override":
        return dict(environment)
    merged, base = dict(environment), os.environ if base is None else base
    for name in PATH_VARIABLES:
        if name in environment and base.get(name):
            parts = [*environment[name].split(os.pathsep), *base[name].split(os.pathsep)]
            merged[name] = os.pathsep.join(dict.fromkeys(part for part in parts if part))
    return merged


def register_extensions(*, again: bool = True) -> None:
    """Import the module that ``RLINF_EXT_MODULE`` names, if any, and call its ``register()``.

    Not ``again`` where this process has: on ``local`` it has many workers.
    """
    name = os.environ.get(EXTENSION_VARIABLE)
    with _lock:
        if not name or (name in _registered and not again):
            return
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise SchedulerUsageError(
                f"{EXTENSION_VARIABLE} names '{name}', but no module '{error.name}' can be "
                "imported. Install it, or put its folder on PYTHONPATH, on every node."
            ) from error
        if not hasattr(module, "register"):
            raise SchedulerUsageError(
                f"{EXTENSION_VARIABLE} names '{name}', which has no function 'register()'. Add "
                "one that registers what your workers need; simulators, which have processes of "
                "their own, are added by entry points."
            )
        try:
            module.register()
        except UserError:
            raise
        except Exception as error:
            raise SchedulerUsageError(
                f"register() of '{name}', which {EXTENSION_VARIABLE} names, raised "
                f"{type(error).__name__}: {error}"
            ) from error
        _registered.add(name)
