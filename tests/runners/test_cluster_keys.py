"""Keys of the cluster that a run would silently take for something else are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.errors import ConfigError
from rlinf.flow import placed_config
from rlinf.runners.evaluation import evaluate
from rlinf.runners.off_policy import OffPolicy

from . import off_policy_support, reasoning_support, support
from .killing import finish
from .support import metrics

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


@pytest.mark.parametrize(
    ("devices", "rollout", "found", "near"),
    [
        ("accelerators_per_node=2", "1-2:0", "1-2", "1"),
        ("cpu_devices_per_node=3", "0-1:0,2-4:1", "2-4", "2"),
        ("address=auto", "0-1:0", "0-1", "0"),  # where nodes are what is counted
    ],
)
def test_a_process_on_two_nodes_is_refused_before_the_cluster_is_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: str,
    rollout: str,
    found: str,
    near: str,
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(placed_config, "accelerators_here", lambda: 0)
    two = (ON_RAY, "cluster.num_nodes=2", f"cluster.{devices}")
    told = f"placement.* a process of rollout the devices {found}, .*on one; nearest: .*as {near}$"
    with pytest.raises(ConfigError, match=told):
        support.small_config(tmp_path, *two, place(rollout, "0"))
    assert support.small_config(tmp_path, *two, place(near, "1")).world_size("rollout") == 1


@pytest.mark.parametrize(
    ("here", "found", "told"),
    [
        (0, [8, 8], "counts the 0 of this machine, but node 0 has 8; write 8$"),
        (0, [0, 8], "counts the 0 .* node 1 has 8; nearest: nodes that have equally many"),
        (8, [8, 0], "counts the 8 .* node 1 has 0; nearest: nodes that have equally many"),
        (1, [0, 0], "counts the 1 .* node 0 has 0; nearest: nodes .*cpu_devices_per_node"),
    ],
)
def test_nodes_unlike_the_machine_that_read_the_recipe_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: int, found: list[int], told: str
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(placed_config, "accelerators_here", lambda: here)
    two = (ON_RAY, "cluster.num_nodes=2")
    config = support.small_config(tmp_path, *two)
    config.check_nodes([here, here])
    with pytest.raises(ConfigError, match=f"cluster.accelerators_per_node: .*{told}"):
        config.check_nodes(found)
    support.small_config(tmp_path, *two, "cluster.cpu_devices_per_node=1").check_nodes([1, 1])
    # A single node is this machine, of which a process may be shown a part.
    support.small_config(tmp_path, ON_RAY).check_nodes([2])


def test_nccl_between_workers_that_share_a_device_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    given = (ON_RAY, "cluster.accelerators_per_node=2", "weight_sync.type=bucket",
             "weight_sync.transport=nccl")  # fmt: skip
    config = support.small_config(tmp_path, *given, place("0", "1"))
    assert config.weight_sync.of_accelerators == "transport"
    with pytest.raises(ConfigError, match=r"transport.*2 of these are on device 1; nearest: sche"):
        support.small_config(tmp_path, *given, place("1", "1"))


def place(rollout: str, actor: str) -> str:
    return f"cluster.component_placement={{env: '0', rollout: '{rollout}', actor: '{actor}'}}"


@pytest.mark.parametrize("key", ["use_pre_process_policy", "use_wait_before_last_iter_policy"])
def test_policies_that_nothing_reads_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster.{key}.*measured times"):
        reasoning_support.small_config(tmp_path, f"cluster.{key}=true")
    assert reasoning_support.small_config(tmp_path, f"cluster.{key}=false").task == "reasoning"


def node_group(label: str, **environment: object) -> str:
    pairs = ", ".join(f"{name}: {value}" for name, value in environment.items())
    return f"{{label: {label}, node_ranks: 0, env_configs: [{{node_ranks: 0, {pairs}}}]}}"


ON_RAY = "cluster.runtime=ray"


# Ray and three workers that import torch take long to begin.
@pytest.mark.slow
def test_workers_have_the_environment_that_a_node_group_sets(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    group = node_group("told", env_vars="[{RLINF_TEST_TOLD: 7}]")
    words = ("runner.total_env_steps=128", "evaluation.interval=0", "evaluation.episodes=1",
             "env.train.options={id: 'tests.runners.odd_envs:Told-v0'}")  # fmt: skip
    run = tmp_path / "run"
    recipe = str(support.write_recipe(tmp_path))
    finish("train", recipe, "--run-dir", str(run), ON_RAY, f"cluster.node_groups=[{group}]", *words)
    (line,) = metrics(run)
    assert line["env/reward"] == 7.0


@pytest.mark.parametrize(
    "environment", [{"env_vars": "[{A: 1}]"}, {"python_interpreter_path": "/opt/python"}]
)
def test_an_environment_that_no_thread_can_have_is_refused(
    tmp_path: Path, environment: dict[str, object]
) -> None:
    groups = f"cluster.node_groups=[{node_group('mine', **environment)}]"
    with pytest.raises(ConfigError, match=r"in node group 'mine', but .* threads .*runtime: ray"):
        reasoning_support.small_config(tmp_path, groups)


def test_a_node_has_one_environment(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    first = node_group("first", env_vars="[{A: 1}, {B: 2}]")
    alike = f"cluster.node_groups=[{first}, {node_group('second', env_vars='[{B: 2}]')}]"
    assert reasoning_support.small_config(tmp_path, ON_RAY, alike).task == "reasoning"
    other = f"cluster.node_groups=[{first}, {node_group('second', env_vars='[{B: 3}]')}]"
    with pytest.raises(ConfigError, match=r"node 0 B = '2' in node group 'first' and '3' in 'se"):
        reasoning_support.small_config(tmp_path, ON_RAY, other)


@pytest.mark.parametrize("said", ["hardware: {type: Franka, configs: []}", "ignore_hardware: true"])
def test_resources_that_no_component_is_placed_on_are_refused(tmp_path: Path, said: str) -> None:
    groups = f"cluster.node_groups=[{{label: arms, node_ranks: 0, {said}}}]"
    match = f"sets {said.partition(':')[0]} in node group 'arms', which has no effect on a task"
    with pytest.raises(ConfigError, match=match):
        support.small_config(tmp_path, groups)


@pytest.mark.parametrize("given", [None, "mine.jsonl"])
def test_a_trace_lies_in_the_run_directory_and_none_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    traced = ["cluster.tracer.enable=true", f"cluster.tracer.output_file={given or 'null'}"]
    run = off_policy_support.train(tmp_path / "off", "runner.total_env_steps=256", *traced)
    first = Path(given) if given else run / "trace" / "trace_events.jsonl"
    before = first.read_bytes()
    assert b"replay:0" in before
    off_policy_support.resume(tmp_path / "off", "runner.total_env_steps=384", *traced)
    assert first.read_bytes() == before
    assert first.with_stem(f"{first.stem}_2").exists()
    evaluate(OffPolicy, run, overrides=traced, items=2)
    assert first.with_stem(f"{first.stem}_3").exists()
    assert not Path("trace").exists()
