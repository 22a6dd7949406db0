"""A plan reaches the recipe that is to run under it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.flow.cluster_shape import ClusterShape, NodeGroup
from rlinf.flow.plan import Plan
from rlinf.flow.profile import ComponentProfile, Measurement, Profile
from rlinf.runners import device_memory, placed_config, planned
from rlinf.runners.planned import cluster_of, command_overrides, find_plan, placed_by
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.reasoning_system import training_flow

from . import reasoning_support, support

ACCELERATORS = "cluster.accelerators_per_node=2"
SLOTS = "cluster.cpu_devices_per_node=2"
GB = 10**9


@pytest.fixture(autouse=True)
def _two_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")


def profile(switch_seconds: float) -> Profile:
    """Everything is as fast on one device as on two, and the models together need 90 GB."""

    def measured(seconds: float, peak: int, kept: int) -> ComponentProfile:
        return ComponentProfile(
            measurements=tuple(
                Measurement(
                    items=16, devices=n, seconds=seconds, peak_bytes=peak * GB, origin="a test"
                )
                for n in (1, 2)
            ),
            onload_seconds=switch_seconds,
            offload_seconds=switch_seconds,
            resident_bytes=kept * GB,
        )

    parts = {
        "rollout": measured(2.0, 50, 40),
        "reward": measured(0.1, 1, 1),
        "actor": measured(1.0, 60, 30),
    }
    return Profile(hardware="h", model="m", config="c", components=parts)


def residencies(plan: Plan) -> dict[str, str]:
    return {name: part.residency for name, part in plan.components.items()}


def solved(config: ReasoningConfig, memory: int, switch_seconds: float = 0.1) -> Plan:
    shape = ClusterShape(
        groups=(NodeGroup(nodes=1, devices_per_node=config.devices, memory_bytes=memory * GB),)
    )
    flow = training_flow(config)
    return find_plan(config, flow, profile(switch_seconds), cluster=shape).plan


@pytest.mark.parametrize("own", [(), ("cluster.residency={'rollout,actor': offload}",)])
@pytest.mark.parametrize("cluster", [ACCELERATORS, SLOTS])
def test_what_stays_by_the_plan_stays_in_the_run(
    tmp_path: Path, cluster: str, own: tuple[str, ...]
) -> None:
    config = reasoning_support.small_config(tmp_path, cluster, *own)
    found = solved(config, memory=200)
    assert set(residencies(found).values()) == {"resident"}
    placed = placed_by(config, found).plan
    assert placed.same_places(found), residencies(placed)


def test_what_memory_makes_leave_leaves_in_the_run(tmp_path: Path) -> None:
    config = reasoning_support.small_config(
        tmp_path, "cluster.accelerators_per_node=1", "cluster.residency={actor: resident}"
    )
    found = solved(config, memory=80)
    assert residencies(found)["reward"] == "resident"
    assert "offload" in residencies(found).values()
    placed = placed_by(config, found).plan
    assert placed.same_places(found), residencies(placed)


def test_a_rollout_that_runs_ahead_is_never_planned_to_leave(tmp_path: Path) -> None:
    config = reasoning_support.small_config(tmp_path, ACCELERATORS, "rollout.max_staleness=1",
        "cluster.component_placement={'rollout,reward': '0', actor: '1'}")  # fmt: skip
    found = solved(config, memory=80)
    assert residencies(found)["rollout"] == "resident"
    assert placed_by(config, found).plan.same_places(found)


def test_nothing_of_an_embodied_run_is_planned_to_leave(tmp_path: Path) -> None:
    limits = support.small_config(tmp_path, SLOTS).planning.constraints
    assert {limits.of(name).residency for name in ("env", "rollout", "actor")} == {"resident"}


def test_the_command_drops_what_the_recipe_says_of_places(tmp_path: Path) -> None:
    words = (
        ACCELERATORS,
        "cluster.component_placement={'rollout,reward': '0-1', actor: '0'}",
        "cluster.residency={'rollout,actor': offload}",
    )
    config = reasoning_support.small_config(tmp_path, *words)
    found = solved(config, memory=200)
    overrides = [*words, *command_overrides(config, found)]
    recipe = load_recipe(str(reasoning_support.write_recipe(tmp_path)), overrides)
    assert validate(ReasoningConfig, recipe.data, recipe).plan.same_places(found)
    bare = reasoning_support.small_config(tmp_path, ACCELERATORS)
    again = reasoning_support.small_config(tmp_path, ACCELERATORS, *command_overrides(bare, found))
    assert again.plan.same_places(found)


def test_a_slot_has_its_share_of_the_host(tmp_path: Path) -> None:
    [whole] = cluster_of(support.small_config(tmp_path)).groups
    [half] = cluster_of(support.small_config(tmp_path, SLOTS)).groups
    assert whole.memory_bytes is not None
    assert half.memory_bytes == whole.memory_bytes // 2


@pytest.mark.parametrize(
    ("model", "gigabytes"),
    [
        ("NVIDIA H100 80GB HBM3", 80),
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA H200", 141),
        ("NVIDIA GeForce RTX 4090 D", 24),
        ("NVIDIA T1000", None),
    ],
)
def test_an_accelerator_has_the_memory_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, gigabytes: int | None
) -> None:
    monkeypatch.setattr(placed_config, "nvidia_devices", lambda: 2)
    monkeypatch.setattr(device_memory, "nvidia_devices", lambda: 2)
    monkeypatch.setattr(device_memory, "_accelerator_model", lambda: model)
    [group] = cluster_of(reasoning_support.small_config(tmp_path)).groups
    assert group.devices_per_node == 2
    assert group.memory_bytes == (None if gigabytes is None else gigabytes * GB)


def test_accelerators_that_are_not_here_have_no_known_memory(tmp_path: Path) -> None:
    if placed_config.nvidia_devices():
        pytest.skip("this machine has accelerators")
    [group] = planned.cluster_of(reasoning_support.small_config(tmp_path, ACCELERATORS)).groups
    assert group.memory_bytes is None
