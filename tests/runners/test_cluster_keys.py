"""Keys of the cluster that a run would silently take for something else are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.errors import ConfigError

from . import reasoning_support, support

PLACED = "{'env,rollout,actor': {node_group: LABEL, placement: '0'}}"
GROUPS = (
    "cluster.runtime=ray",
    "cluster.num_nodes=2",
    "cluster.accelerators_per_node=2",
    "cluster.node_groups=[{label: big, node_ranks: '1'}]",
)


def test_ranks_inside_of_a_node_group_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    place = f"cluster.component_placement={PLACED.replace('LABEL', 'big')}"
    with pytest.raises(ConfigError, match=r"node group big.*write the global ranks instead"):
        support.small_config(tmp_path, *GROUPS, place)


@pytest.mark.parametrize(
    "placement", [PLACED.replace("LABEL", "cluster"), "{'env,rollout,actor': '2'}"]
)
def test_global_ranks_are_accepted_beside_node_groups(tmp_path: Path, placement: str) -> None:
    place = f"cluster.component_placement={placement}"
    config = support.small_config(tmp_path, *GROUPS, place)
    assert len(config.plan.components["actor"].devices) == 1


@pytest.mark.parametrize("key", ["use_pre_process_policy", "use_wait_before_last_iter_policy"])
def test_policies_that_nothing_reads_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster.{key}.*measured times"):
        reasoning_support.small_config(tmp_path, f"cluster.{key}=true")
    assert reasoning_support.small_config(tmp_path, f"cluster.{key}=false").task == "reasoning"
