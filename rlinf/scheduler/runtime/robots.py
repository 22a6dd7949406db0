"""The robots of a node: what their configuration leaves out is read from its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from rlinf.scheduler.cluster_sections import FrankaConfig, cluster_config_error
from rlinf.scheduler.errors import ClusterConfigValueError

_IDENTIFIER = "robot_ip"  # tells robots of a node apart
_NEVER_FROM_ENVIRONMENT = {"node_rank", "controller_node_rank"}


def robots_of_node(
    declared: Sequence[FrankaConfig], environment: Mapping[str, str], node_rank: int | None = None
) -> list[FrankaConfig]:
    """Robots of a node: what ``declared`` leaves out is filled from the node's environment.

    A field is read from the variable of its name in upper case, such as ``ROBOT_IP``, in which a
    comma separates what belongs to several robots. Cameras are shared out evenly. Where nothing is
    declared and ``node_rank`` is given, there are as many robots as ``ROBOT_IP`` has addresses.

    Raises:
        ClusterConfigError: A variable has the wrong number of values, or a wrong one.
    """
    found = {}
    for name in FrankaConfig.model_fields.keys() - _NEVER_FROM_ENVIRONMENT:
        items = [item.strip() for item in environment.get(name.upper(), "").split(",")]
        if any(items):
            found[name] = items
    robots = list(declared)
    if not robots and node_rank is not None:
        robots = [FrankaConfig(node_rank=node_rank)] * len(found.get(_IDENTIFIER, []))
    return [_filled(robot, rank, len(robots), found) for rank, robot in enumerate(robots)]


def _filled(
    robot: FrankaConfig, rank: int, count: int, found: Mapping[str, list[str]]
) -> FrankaConfig:
    """One of ``count`` robots of a node, with what its configuration does not say."""
    said = robot.model_dump(exclude_unset=True)
    read = {
        name: _share(name, items, rank, count) for name, items in found.items() if name not in said
    }
    try:
        return FrankaConfig.model_validate({**read, **said}, strict=False)  # a variable is text
    except ValidationError as error:
        where = f"in the environment of node {robot.node_rank}, in upper case"
        raise cluster_config_error(error, FrankaConfig, where) from None


def _share(name: str, items: list[str], rank: int, count: int) -> str | list[str]:
    """What of a variable is for one of ``count`` robots."""
    if name == "camera_serials":
        each, left = divmod(len(items), count)
        if not left:
            return items[rank * each : (rank + 1) * each]
    elif len(items) == count:
        return items[rank]
    elif len(items) == 1 and name != _IDENTIFIER:
        return items[0]
    raise ClusterConfigValueError(
        f"{name.upper()} has {len(items)} values, separated by commas, but the node has {count} "
        f"robots, in the order of their configuration. Nearest legal: {count} values."
    )
