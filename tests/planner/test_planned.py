"""A plan reaches the recipe that is to run under it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.errors import ConfigError
from rlinf.flow import placed_config
from rlinf.flow.placed_config import PlacedConfig
from rlinf.flow.plan import Plan
from rlinf.planner import cluster_shape, planned
from rlinf.planner.cluster_shape import (
    ClusterShape,
    NodeGroup,
    cluster_of,
    cluster_overrides,
    kind_of_model,
    parse_cluster_shape,
)
from rlinf.planner.kept_profiles import new_recorder
from rlinf.planner.planned import (
    changed,
    command_overrides,
    find_accepted_plan,
    find_plan,
    legal_trials,
    placed_by,
)
from rlinf.planner.profile import ComponentProfile, Measurement, Profile
from rlinf.planner.search import ComponentConstraint
from rlinf.planner.search import plan as solve
from rlinf.runners.embodied import Embodied
from rlinf.runners.reasoning import Reasoning
from rlinf.runners.reasoning_config import ReasoningConfig
from tests.runners import reasoning_support, support

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
    flow = Reasoning.flow(config)
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


def seconds_of(**components: dict[int, float]) -> Profile:
    """Components of an embodied run that take so long on so many devices, whatever the items."""
    return Profile(
        hardware="h",
        model="m",
        config="c",
        components={
            name: ComponentProfile(
                measurements=tuple(
                    Measurement(items=8, devices=n, seconds=t, origin="a test")
                    for n, t in times.items()
                )
            )
            for name, times in components.items()
        },
    )


@pytest.mark.parametrize(
    ("recipe", "times", "component", "rule", "processes", "says"),
    [
        pytest.param(
            ["cluster.cpu_devices_per_node=4"],
            {"env": {1: 1.0, 2: 3.0}, "rollout": {1: 4.0, 2: 2.0}, "actor": {1: 0.1}},
            "rollout",
            "serves",
            {"env": 1, "rollout": 2},  # in two sub-batches
            "places 2 rollout workers, but there are only 1 sub-batches",
            id="rollout workers have sub-batches",
        ),
        pytest.param(
            ["cluster.cpu_devices_per_node=2", "evaluation.num_envs=5"],
            {"env": {1: 4.0, 2: 2.0}, "rollout": {1: 1.0, 2: 1.0}, "actor": {1: 1.0}},
            "env",
            "also_divide",
            {"env": 1},
            "does not divide into 2 env workers",
            id="env workers share the evaluation",
        ),
        pytest.param(
            ["cluster.cpu_devices_per_node=2", "actor.micro_batch_size=64"],
            {"env": {1: 1.0}, "rollout": {1: 1.0}, "actor": {1: 4.0, 2: 2.0}},
            "actor",
            "processes",
            {"actor": 1},
            "does not divide the 32 samples of a rank",
            id="ranks have whole micro batches",
        ),
    ],
)
def test_a_plan_keeps_to_the_rules_of_an_embodied_recipe(
    tmp_path: Path,
    recipe: list[str],
    times: dict[str, dict[int, float]],
    component: str,
    rule: str,
    processes: dict[str, int],
    says: str,
) -> None:
    config = support.small_config(tmp_path, *recipe)
    flow, costs = Embodied.flow(config), seconds_of(**times)
    found = find_plan(config, flow, costs)
    assert placed_by(config, found.plan).plan.same_places(found.plan)
    assert {name: found.plan.components[name].processes for name in processes} == processes
    # Without the constraint the fastest plan would break the rule.
    limits = config.planning.constraints
    free = ComponentConstraint.model_fields[rule].default
    loose = limits.of(component).model_copy(update={rule: free})
    others = limits.model_copy(update={"components": {**limits.components, component: loose}})
    broken = solve(flow, costs, cluster_of(config), others)
    assert broken.seconds < found.seconds
    with pytest.raises(ConfigError, match=says):
        placed_by(config, broken.plan)


def test_the_fastest_plan_that_the_recipe_accepts_is_found(tmp_path: Path) -> None:
    """Devices are handed over only where rollout and trainer have the same, two or more."""
    pytest.importorskip("ray")
    words = (
        ACCELERATORS,
        "cluster.runtime=ray",
        "cluster.auto_scheduler=true",
        "cluster.component_placement={'rollout,actor': '0-1', reward: '0'}",
        "actor.order=length",
        "actor.shuffle=false",
    )
    config = reasoning_support.small_config(tmp_path, *words)
    # Half of the sequences can be trained on while the others are generated.
    parts = {
        name: ComponentProfile(
            measurements=tuple(
                Measurement(items=n, devices=d, seconds=seconds * n / d**0.1, origin="a test")
                for n in (8, 16)
                for d in (1, 2)
            )
        )
        for name, seconds in {"rollout": 1.0, "reward": 0.01, "actor": 1.0}.items()
    }
    flow, costs = (
        Reasoning.flow(config),
        Profile(hardware="h", model="m", config="c", components=parts),
    )
    fastest = find_plan(config, flow, costs)
    with pytest.raises(ConfigError, match="place rollout and actor on the same devices"):
        placed_by(config, fastest.plan)
    solved = find_accepted_plan(config, flow, costs)
    assert solved.found.plan.components["rollout"].devices == (0, 1)
    assert solved.found.plan.components["actor"].devices == (0, 1)
    assert solved.config.plan.same_places(solved.found.plan)
    assert "place rollout and actor on the same devices" in solved.passed_over
    assert "\n" not in solved.passed_over
    for other in solved.found.alternatives:
        placed_by(config, other.plan)


def on_devices(recipe: ReasoningConfig, counts: tuple[int, ...]) -> Profile:
    """Everything is measured on so many devices, and gains by them."""
    return Profile(
        hardware="h",
        model="m",
        config="c",
        components={
            name: ComponentProfile(
                measurements=tuple(
                    Measurement(items=n, devices=d, seconds=n / d, origin="a test")
                    for n in (2, 4, 8, 16)
                    for d in counts
                )
            )
            for name in recipe.components
        },
    )


@pytest.mark.parametrize("devices", [2, 4])
def test_ranks_that_share_layers_are_processes(tmp_path: Path, devices: int) -> None:
    config = reasoning_support.small_config(
        tmp_path,
        f"cluster.accelerators_per_node={devices}",
        "cluster.runtime=ray",
        "cluster.component_placement={'rollout,reward': '0', actor: '0-1'}",
        "actor.tensor_parallel_size=2",
    )
    costs = on_devices(config, (1, 2, 4))
    solved = find_accepted_plan(config, Reasoning.flow(config), costs)
    actor = solved.found.plan.components["actor"]
    assert (len(actor.devices), actor.processes) == (devices, devices)
    assert not solved.passed_over
    assert solved.config.world_size("actor") == devices
    assert solved.config.data_parallel_size == devices // 2


def test_actor_critic_and_engine_have_parallel_sizes_of_their_own(tmp_path: Path) -> None:
    config = reasoning_support.small_config(
        tmp_path,
        "cluster.accelerators_per_node=4",
        "cluster.runtime=ray",
        "cluster.component_placement={rollout: '0-3:0', reward: '0', actor: '0-1', critic: '0'}",
        "~rollout.engine.deterministic",
        "~rollout.engine.block_size",
        "rollout.engine={type: vllm, tensor_parallel_size: 2, pipeline_parallel_size: 2}",
        "algorithm={type: ppo}",
        "actor.tensor_parallel_size=2",
        "critic={}",
    )
    costs = on_devices(config, (1, 2, 3, 4))
    flow, limits = Reasoning.flow(config), config.planning.constraints
    solved = find_accepted_plan(config, flow, costs)
    parts = solved.found.plan.components
    assert {name: len(part.devices) // part.processes for name, part in parts.items()} == {
        "rollout": 4, "reward": 1, "actor": 1, "critic": 1,
    }  # fmt: skip
    assert solved.config.plan.same_places(solved.found.plan)
    # A critic that shares nothing can have any number of ranks that divides its batch.
    assert limits.of("critic").processes == (1, 2, 4, 8, 16)
    assert limits.of("actor").processes == (2, 4, 8, 16)
    of_engine = {placed.plan.components["rollout"].processes for _, placed in legal_trials(config)}
    assert of_engine == {1}


def test_a_recipe_that_refuses_all_plans_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = support.small_config(tmp_path, SLOTS)
    times = {1: 1.0, 2: 1.0}
    costs = seconds_of(env=times, rollout=times, actor=times)

    def refuse(config: PlacedConfig, plan: Plan, cluster: ClusterShape | None) -> PlacedConfig:
        raise ConfigError("a trial: 1 problem\n  actor: not like this")

    monkeypatch.setattr(planned, "placed_by", refuse)
    with pytest.raises(ConfigError, match=r"refuses all plans .* actor: not like this$"):
        find_accepted_plan(config, Embodied.flow(config), costs)
    moving = config.cluster.model_copy(update={"auto_scheduler": True})
    config = config.model_copy(update={"cluster": moving})
    with pytest.raises(ConfigError, match=r"plan it with cluster\.auto_scheduler=false$"):
        find_accepted_plan(config, Embodied.flow(config), costs)


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


GROUPS = "cluster.node_groups=[{{label: front, node_ranks: '{}', device_kind: h100}}]"


def test_nodes_of_another_kind_are_a_group_of_the_cluster(tmp_path: Path) -> None:
    two = ("cluster.num_nodes=2", "cluster.runtime=ray", "cluster.cpu_devices_per_node=2")
    config = support.small_config(tmp_path, *two, GROUPS.format("0"))
    first, second = cluster_of(config).groups
    assert (first.kind, first.devices, first.memory_bytes) == ("H100", 2, 80 * GB)
    assert (second.kind, second.devices) == ("cpu", 2)
    assert second.memory_bytes is not None
    [alike] = cluster_of(support.small_config(tmp_path, *two)).groups
    assert (alike.kind, alike.nodes) == ("cpu", 2)
    # Each kind is measured by itself.
    homes = {
        device
        for _, trial in legal_trials(config)
        for part in trial.plan.components.values()
        for device in part.devices
    }
    assert homes == {0, 1, 2, 3}
    recorder = new_recorder(
        changed(config, ["cluster.component_placement={'env,rollout': '2-3', actor: '1-2'}"]),
        Embodied.flow(config),
        "a test",
    )
    assert recorder.device_kinds == {"env": "cpu", "rollout": "cpu", "actor": "H100+cpu"}


def test_a_plan_for_several_kinds_reaches_the_recipe(tmp_path: Path) -> None:
    words = ("cluster.num_nodes=2", "cluster.runtime=ray", "cluster.cpu_devices_per_node=2")
    config = support.small_config(tmp_path, *words, GROUPS.format("1"))
    times = {1: 2.0, 2: 1.0}
    costs = seconds_of(env=times, rollout=times, actor=times)
    kinds = {"env": "cpu", "rollout": "cpu", "actor": "H100"}
    named = {
        name: part.model_copy(
            update={
                "measurements": tuple(
                    m.model_copy(update={"device_kind": kinds[name]}) for m in part.measurements
                )
            }
        )
        for name, part in costs.components.items()
    }
    kept = costs.model_copy(update={"components": named})
    solved = find_accepted_plan(config, Embodied.flow(config), kept)
    placed = solved.config.plan.components
    assert {name: set(part.devices) <= {2, 3} for name, part in placed.items()} == {
        "env": False, "rollout": False, "actor": True,
    }  # fmt: skip
    # The same for a cluster that the recipe does not describe yet.
    bare = support.small_config(tmp_path)
    shape = parse_cluster_shape("1x2:cpu,1x2:H100")
    again = find_accepted_plan(bare, Embodied.flow(bare), kept, cluster=shape)
    assert [group.kind for group in cluster_of(again.config).groups] == ["cpu", "H100"]
    with pytest.raises(ConfigError, match="nodes of equally many devices"):
        cluster_overrides(bare, parse_cluster_shape("1x2:cpu,1x4:H100"))


def test_times_of_a_processor_do_not_plan_accelerators_that_are_not_here(tmp_path: Path) -> None:
    if placed_config.accelerators_here():
        pytest.skip("this machine has accelerators")
    config = support.small_config(tmp_path, ACCELERATORS)
    here = seconds_of(env={1: 1.0}, rollout={1: 1.0}, actor={1: 1.0})
    flow = Embodied.flow(config)
    assert find_plan(config, flow, here).seconds == pytest.approx(3.0)
    text = here.model_dump_json().replace('"device_kind":""', '"device_kind":"cpu"')
    with pytest.raises(ConfigError, match=r"measured on cpu, and the cluster .* has acc"):
        find_accepted_plan(config, flow, Profile.model_validate_json(text))


def test_nodes_of_one_kind_follow_each_other(tmp_path: Path) -> None:
    three = ("cluster.num_nodes=3", "cluster.runtime=ray", "cluster.cpu_devices_per_node=1")
    config = support.small_config(tmp_path, *three, GROUPS.format("1"))
    with pytest.raises(ConfigError, match="nodes with cpu do not follow each other"):
        cluster_of(config)


def test_a_node_has_devices_of_one_kind(tmp_path: Path) -> None:
    one, other = (
        f"{{label: {kind}, node_ranks: 0, device_kind: {kind}}}" for kind in ("H100", "T4")
    )
    with pytest.raises(ConfigError, match="node 0 has devices of kind 'H100' by one node group"):
        support.small_config(tmp_path, f"cluster.node_groups=[{one}, {other}]")


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
    monkeypatch.setattr(placed_config, "accelerators_here", lambda: 2)
    monkeypatch.setattr(cluster_shape, "accelerators_here", lambda: 2)
    monkeypatch.setattr(cluster_shape, "_accelerator_model", lambda: model)
    [group] = cluster_of(reasoning_support.small_config(tmp_path)).groups
    assert group.devices_per_node == 2
    assert group.memory_bytes == (None if gigabytes is None else gigabytes * GB)
    assert group.kind == kind_of_model(model) != ""


def test_accelerators_that_are_not_here_have_no_known_memory(tmp_path: Path) -> None:
    if placed_config.accelerators_here():
        pytest.skip("this machine has accelerators")
    [group] = cluster_of(reasoning_support.small_config(tmp_path, ACCELERATORS)).groups
    assert (group.kind, group.memory_bytes) == ("", None)
