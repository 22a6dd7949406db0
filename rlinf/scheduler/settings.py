"""What a cluster reads from its arguments and from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rlinf.scheduler.cluster_config import ClusterConfig
from rlinf.scheduler.errors import ClusterConfigValueError, SchedulerUsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig


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


def read_config(
    num_nodes: int | None, given: DictConfig | Mapping[str, Any] | ClusterConfig | None
) -> ClusterConfig:
    """The configuration that the arguments of a cluster mean.

    Raises:
        ClusterConfigValueError: They contradict each other.
    """
    if given is None:
        return ClusterConfig(num_nodes=max(num_nodes or 1, 1), runtime="ray")
    if isinstance(given, ClusterConfig):
        config = given
    else:
        required: dict[str, Any] = {"num_nodes": num_nodes or 1, "component_placement": {}}
        config = ClusterConfig.from_dict_cfg({**required, **dict(given)})
    if num_nodes is not None and num_nodes != config.num_nodes:
        raise ClusterConfigValueError(
            f"num_nodes is {num_nodes} but cluster_cfg.num_nodes is {config.num_nodes}: give one "
            "of them, or the same number."
        )
    return config


def deadline_seconds(config: ClusterConfig) -> float:
    """How long a wait may take: by the config, or else by ``RLINF_TIMEOUT``, or else its default.

    Raises:
        SchedulerUsageError: The variable holds no number of minutes.
    """
    text = os.environ.get("RLINF_TIMEOUT")
    if text is None or "timeout_minutes" in config.model_fields_set:
        return config.timeout_minutes * 60
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if minutes <= 0:
        raise SchedulerUsageError(
            f"RLINF_TIMEOUT is the number of minutes that a wait may take, got {text!r}; for "
            "example RLINF_TIMEOUT=30"
        )
    return minutes * 60
