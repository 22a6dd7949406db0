"""What the published class ``Cluster`` offers beside a cluster: settings, ports, commands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from rlinf.scheduler.cluster_launch import free_port
from rlinf.scheduler.profiler import profiled_command
from rlinf.scheduler.runtime.launch import merge_path_variables

if TYPE_CHECKING:
    from rlinf.scheduler.cluster_sections import ProfilingConfig


class ClusterEnvVar(StrEnum):
    """Settings that come from the environment, as ``RLINF_<NAME>``."""

    CATCH_FAILURE = "CATCH_FAILURE"
    LOG_LEVEL = "LOG_LEVEL"
    TIMEOUT = "TIMEOUT"
    NODE_RANK = "NODE_RANK"
    COMM_NET_DEVICES = "COMM_NET_DEVICES"
    EXT_MODULE = "EXT_MODULE"
    NET_EMULATION = "NET_EMULATION"
    PATH_ENV_MERGE_MODE = "PATH_ENV_MERGE_MODE"
    CODE_WORKING_DIR = "CODE_WORKING_DIR"


class ClusterMembers:
    """Constants and static methods of ``Cluster``."""

    NAMESPACE: ClassVar[str] = "RLinf"
    SYS_NAME: ClassVar[str] = "RLinf"
    LOGGING_LEVEL: ClassVar[str] = os.environ.get("RLINF_LOG_LEVEL", "INFO").upper()
    TIMEOUT_WARN_TIME: ClassVar[int] = 60_000
    DEFAULT_SYS_ENV_VAR: ClassVar[dict[ClusterEnvVar, str]] = {
        ClusterEnvVar.CATCH_FAILURE: "0",
        ClusterEnvVar.LOG_LEVEL: "INFO",
        ClusterEnvVar.TIMEOUT: "180",
        ClusterEnvVar.NET_EMULATION: "0",
        ClusterEnvVar.PATH_ENV_MERGE_MODE: "append",
        ClusterEnvVar.CODE_WORKING_DIR: "0",
    }

    @staticmethod
    def get_full_env_var_name(var: ClusterEnvVar) -> str:
        """Name of a setting's environment variable."""
        return f"RLINF_{ClusterEnvVar(var).value}"

    @classmethod
    def get_sys_env_var(cls, env_var: ClusterEnvVar, default: str | None = None) -> str | None:
        """Value of a setting: from the environment, else ``default``, else the built-in one."""
        fallback = default if default is not None else cls.DEFAULT_SYS_ENV_VAR.get(env_var)
        return os.environ.get(cls.get_full_env_var_name(env_var), fallback)

    @staticmethod
    def find_free_port(max_port_num: int | None = None) -> int:
        """A port of this machine that nothing listens on, see `free_port`."""
        return free_port(max_port_num)

    @staticmethod
    def modify_profile_context(
        python_interpreter_path: str, worker_name: str, profiling_cfg: ProfilingConfig | None
    ) -> str:
        """Interpreter command of a worker, behind a profiler where its group is to be profiled."""
        return profiled_command(python_interpreter_path, worker_name, profiling_cfg)

    @staticmethod
    def get_profiling_env_vars_for_worker(
        worker_name: str, profiling_cfg: ProfilingConfig | None
    ) -> dict[str, str]:
        """Variables that a profiled worker needs; the supported profilers need none."""
        return {}

    @staticmethod
    def merge_worker_env_vars(
        base_env_vars: Mapping[str, str],
        incoming_env_vars: Mapping[str, str],
        mode: str | None = None,
    ) -> dict[str, str]:
        """Environment of a worker: incoming variables over the base; paths are joined, the incoming
        first, unless ``mode`` is ``override``."""
        return {
            **base_env_vars,
            **merge_path_variables(incoming_env_vars, base_env_vars, mode),
        }
