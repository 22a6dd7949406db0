import sys

import pytest
from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError

from rlinf.config.dump import to_data
from rlinf.errors import ConfigError, UserError
from rlinf.scheduler.accelerators import AcceleratorType
from rlinf.scheduler.cluster import deadline_seconds
from rlinf.scheduler.cluster_config import ClusterConfig, NodeGroupEnvConfig, read_config
from rlinf.scheduler.cluster_sections import FrankaConfig
from rlinf.scheduler.cpu_slots import OVERSUBSCRIBE_VARIABLE
from rlinf.scheduler.hardware import FrankaHWInfo
from rlinf.scheduler.node import NodeGroupInfo, build_node_table, slot_cores
from rlinf.scheduler.runtime.node_probe import probe_node
from tests.scheduler.nodes import cluster, node

ARM = {"node_rank": 2, "robot_ip": "10.10.10.1", "camera_serials": ["322"]}
GROUPS = [
    {
        "label": "a800",
        "node_ranks": "0-1",
        "env_configs": [
            {
                "node_ranks": "all",
                "python_interpreter_path": "/opt/a800/bin/python3",
                "env_vars": [{"GLOO_SOCKET_IFNAME": "eth0"}, {"COUNT": 3}],
            }
        ],
    },
    {"label": "arms", "node_ranks": "2,3", "hardware": {"type": "Franka", "configs": [ARM]}},
    {"label": 4090, "node_ranks": 3, "ignore_hardware": True},
]


def read(**fields):
    data = {"num_nodes": 4, "component_placement": {"actor": "0-3"}, **fields}
    return ClusterConfig.from_dict_cfg(DictConfig(data))


def group(**fields):
    return read(node_groups=[{"label": "g", "node_ranks": "0-1", **fields}])


def arms(*configs):
    return group(hardware={"type": "Franka", "configs": list(configs)})


def test_node_groups_are_read():
    config = read(node_groups=GROUPS)
    first, second, third = config.node_groups
    assert (first.label, first.node_ranks, first.hardware) == ("a800", [0, 1], None)
    assert first.env_configs[0].node_ranks == [0, 1]
    assert first.env_configs[0].env_vars == [{"GLOO_SOCKET_IFNAME": "eth0"}, {"COUNT": "3"}]
    assert (second.node_ranks, second.hardware_type) == ([2, 3], "Franka")
    assert (third.label, third.node_ranks, third.ignore_hardware) == ("4090", [3], True)


def test_a_cluster_takes_the_section_of_a_configuration_as_it_is():
    section = {
        "num_nodes": 1,
        "component_placement": {"actor": "0"},
        "node_groups": [{"label": "a", "node_ranks": "0"}],
        "tracer": {"enable": False},
    }
    whole = OmegaConf.create({"cluster": section})
    assert read_config(None, whole.cluster) == ClusterConfig.from_dict_cfg(section)


def test_what_is_configured_for_a_node():
    config = read(node_groups=GROUPS)
    labels = [config.get_node_labels_by_rank(rank) for rank in (0, 1, 2, 3, 99)]
    assert labels == [["a800"], ["a800"], ["arms"], ["arms", "4090"], []]
    assert config.get_node_python_interpreter_path_by_rank(1) == ["/opt/a800/bin/python3"]
    assert config.get_node_python_interpreter_path_by_rank(2) == []
    assert config.get_node_hw_configs_by_rank(0) == []
    (arm,) = config.get_node_hw_configs_by_rank(2)
    assert isinstance(arm, FrankaConfig)
    assert (arm.robot_ip, arm.camera_serials) == ("10.10.10.1", ["322"])


def test_defaults_and_who_builds_it():
    assert read().runtime == "ray"
    assert read(runtime="local").runtime == "local"
    default = ClusterConfig()
    assert (default.runtime, default.num_nodes, default.component_placement) == ("local", 1, {})
    assert default.timeout_minutes is None
    assert default.cpu_devices_per_node is None


def test_the_deadline_is_the_configs_then_the_variables_then_three_hours(monkeypatch):
    monkeypatch.delenv("RLINF_TIMEOUT", raising=False)
    assert deadline_seconds(ClusterConfig()) == 180 * 60
    monkeypatch.setenv("RLINF_TIMEOUT", "2.5")
    assert deadline_seconds(ClusterConfig()) == 150
    assert deadline_seconds(ClusterConfig.model_validate(to_data(ClusterConfig()))) == 150
    assert deadline_seconds(ClusterConfig(timeout_minutes=30.0)) == 30 * 60
    for text in ("long", "nan", "0"):
        monkeypatch.setenv("RLINF_TIMEOUT", text)
        with pytest.raises(UserError, match=f"got '{text}'"):
            deadline_seconds(ClusterConfig())


def test_all_documented_sections_are_read():
    config = read(
        profiling={"backend": "nsight", "worker_groups": "all", "steps": [1, 2]},
        tracer={"enable": True, "output_file": "trace.jsonl"},
        net_emulation={
            "enabled": True,
            "crossdc_pairs": [{"src": "actor:0", "dst": "rollout:0", "delay_ms": 5}],
            "bandwidth_groups": [{"members": ["actor:0"], "bandwidth_mbps": 100}],
        },
        auto_scheduler=True,
        use_pre_process_policy=True,
        use_wait_before_last_iter_policy=False,
    )
    assert config.profiling.steps == [1, 2]
    assert config.tracer.enable
    assert config.net_emulation.crossdc_pairs[0].delay_ms == 5.0


def test_interpolations_are_resolved():
    whole = OmegaConf.create(
        {"nodes": 2, "cluster": {"num_nodes": "${nodes}", "component_placement": {"a": "all"}}}
    )
    assert ClusterConfig.from_dict_cfg(whole.cluster).num_nodes == 2


def test_environment_entries_may_be_containers_of_omegaconf():
    config = NodeGroupEnvConfig(node_ranks=[0], env_vars=OmegaConf.create([{"A": 1}]))
    assert config.env_vars == [{"A": "1"}]


BAD = [
    (
        lambda: ClusterConfig.from_dict_cfg({"num_nodes": 1}),
        r"Missing fields '\['component_placement'\]' detected",
    ),
    (lambda: ClusterConfig.from_dict_cfg({}), r"Missing fields '\['num_nodes', 'component_pl"),
    (lambda: read(node_grops=[]), r"Unknown fields '\{'node_grops'\}' detected.*'node_groups'\?"),
    (lambda: read(num_nodes=0), r"'num_nodes' must be a positive integer, got 0"),
    (lambda: read(num_nodes="2"), r"'num_nodes' must be a positive integer, got '2'"),
    (lambda: read(num_nodes=True), r"'num_nodes' must be a positive integer"),
    (lambda: read(runtime="dask"), r"runtime = 'dask'.*'local' or 'ray'"),
    (lambda: read(cpu_devices_per_node=0), r"cpu_devices_per_node = 0.*greater than"),
    (lambda: read(timeout_minutes=0), r"timeout_minutes = 0.*greater than 0"),
    (lambda: read(component_placement={"a": "0-3,2"}), r"Resource ranks must be unique"),
    (lambda: read(component_placement="0-3"), r"component_placement = '0-3'"),
    (lambda: read(node_groups=["a"]), r"Each node yaml config must be a dictionary, got str"),
    (lambda: read(node_groups=[{"label": "a"}]), r"Missing fields '\['node_ranks'\]' detected"),
    (lambda: read(node_groups=[{"label": "node", "node_ranks": 0}]), r"'node' is reserved"),
    (lambda: read(node_groups=[{"label": "cluster", "node_ranks": 0}]), r"reserved"),
    (lambda: read(node_groups=[{"label": "a,b", "node_ranks": 0}]), r"'a,b' cannot be named"),
    (lambda: read(node_groups=[{"label": " ", "node_ranks": 0}]), r"' ' cannot be named"),
    (lambda: read(node_groups=[{"label": "a", "node_ranks": 0}] * 2), r"'a' is used twice"),
    (lambda: group(size=1), r"Unknown fields '\{'size'\}' detected.*node_groups\.0"),
    (lambda: group(node_ranks="0-9"), r"Error parsing node_ranks '0-9' in node group 'g'.*'0-3'"),
    (lambda: group(node_ranks="0-x"), r"Error parsing node_ranks.*Invalid rank format"),
    (lambda: group(node_ranks=1.5), r"Error parsing node_ranks.*Invalid rank format"),
    (lambda: group(env_configs={"node_ranks": 0}), r"env_configs must be a list"),
    (lambda: group(env_configs=["0"]), r"env_configs yaml config must be a dictionary"),
    (lambda: group(env_configs=[{}]), r"Missing fields '\['node_ranks'\]' detected"),
    (lambda: group(env_configs=[{"node_ranks": 3}]), r"Error parsing node_ranks 3 in env_config"),
    (lambda: group(env_configs=[{"node_ranks": 0, "python": "p"}]), r"Unknown fields '\{'python'"),
    (lambda: group(env_configs=[{"node_ranks": 0}, {"node_ranks": "0-1"}]), r"\[0\].*duplicated"),
    (
        lambda: group(env_configs=[{"node_ranks": 0, "env_vars": {"A": "1"}}]),
        r"env_vars must be a list",
    ),
    (
        lambda: group(env_configs=[{"node_ranks": 0, "env_vars": ["A"]}]),
        r"Each node env_var must be a dict",
    ),
    (
        lambda: group(env_configs=[{"node_ranks": 0, "env_vars": [{"A": "1", "B": "2"}]}]),
        r"exactly one key-value pair",
    ),
    (
        lambda: group(env_configs=[{"node_ranks": 0, "env_vars": [{"A": None}]}]),
        r"'A' must be text or a number, got None\. .* such as ''\.",
    ),
    (
        lambda: group(env_configs=[{"node_ranks": 0, "env_vars": [{"A": True}]}]),
        r"'A' must be text or a number, got True\. .* such as 'true'\.",
    ),
    (
        lambda: group(env_configs=[{"node_ranks": 0, "env_vars": [{"A": ["b"]}]}]),
        r"'A' must be text or a number, got \['b'\]",
    ),
    (
        lambda: group(env_configs=[{"node_ranks": 0, "env_vars": [{"A": "1"}, {"A": "2"}]}]),
        r"'A' in env_config is duplicated",
    ),
    (lambda: group(hardware=["Franka"]), r"Each hardware yaml config must be a dictionary"),
    (lambda: group(hardware={"type": "Franka"}), r"Missing fields '\['configs'\]' detected"),
    (lambda: group(hardware={"type": "Frank", "configs": []}), r"Unsupported hardware type: 'Fr"),
    (
        lambda: group(ignore_hardware=True, hardware={"type": "Franka", "configs": []}),
        r"Cannot specify hardware when ignore_hardware",
    ),
    (lambda: arms("x"), r"Each hardware config must be a dictionary"),
    (lambda: arms({"robot_ip": "10.0.0.1"}), r"Missing fields '\['node_rank'\]' detected"),
    (lambda: arms({"node_rank": 0, "ip": "x"}), r"Unknown fields '\{'ip'\}' detected"),
    (lambda: arms({"node_rank": 0, "camera_type": "x"}), r"camera_type = 'x'.*'realsense'"),
    (lambda: arms({"node_rank": 0, "robot_ip": "10.0"}), r"must be a valid IP address"),
    (lambda: arms({"node_rank": 3}), r"must be within node_ranks"),
    (lambda: arms({"node_rank": 0}, {"node_rank": 0}), r"Duplicate hardware configs"),
    (
        lambda: read(
            node_groups=[
                {
                    "label": label,
                    "node_ranks": 0,
                    "hardware": {"type": "Franka", "configs": [{"node_rank": 0, "robot_ip": ip}]},
                }
                for label, ip in (("a", "10.0.0.1"), ("b", "10.0.0.2"))
            ]
        ),
        r"Cannot have multiple hardware configs",
    ),
    (lambda: read(profiling={"enabled": True}), r"backend must be specified"),
    (lambda: read(profiling={"backend": "perf"}), r"Unknown profiling backend 'perf'"),
    (lambda: read(profiling={"backend": "nsight", "steps": [-1]}), r"non-negative"),
    (lambda: read(net_emulation={"crossdc_pairs": [{"src": "a:0"}]}), r"Missing fields '\['dst', "),
]


@pytest.mark.parametrize(("build", "message"), BAD)
def test_a_bad_configuration_is_refused(build, message):
    with pytest.raises(AssertionError, match=message) as caught:
        build()
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize(
    "build",
    [
        lambda: group(node_ranks="0-x"),
        lambda: group(hardware={"type": "Frank", "configs": []}),
        lambda: read(profiling={"backend": "perf"}),
        lambda: arms({"node_rank": 0, "robot_ip": "10.0"}),
    ],
)
def test_unknown_values_are_value_errors_too(build):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the type is what is promised
        build()
    assert isinstance(caught.value, ConfigError)


def test_as_a_section_of_a_recipe_its_rules_are_pydantic_errors():
    with pytest.raises(ValidationError, match="Resource ranks must be unique"):
        ClusterConfig.model_validate({"component_placement": {"a": "0,0"}})


def test_a_cluster_knows_groups_slots_and_arms(monkeypatch):
    monkeypatch.setenv(OVERSUBSCRIBE_VARIABLE, "1")
    config = read(node_groups=GROUPS, cpu_devices_per_node=3)
    view = build_node_table([probe_node(config, rank) for rank in range(4)], config)
    assert (view.num_nodes, view.num_accelerators) == (4, 12)
    assert view.accelerator_ranks == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert view.get_node_info(0).accelerator_type is AcceleratorType.CPU_SLOT
    assert view.get_node_info(0).accelerator_model.startswith("CPU_SLOT:")
    assert view.get_node_info(0).python_interpreter_path == "/opt/a800/bin/python3"
    assert view.get_node_group("missing") is None
    assert view.get_node_group("node").hardware_type is None
    assert view.get_node_group("4090").hardware_resource_count == 1
    arms_group = view.get_node_group("arms")
    assert (arms_group.hardware_type, arms_group.hardware_resource_count) == ("Franka", 1)
    assert isinstance(arms_group.get_hardware_infos(2)[0], FrankaHWInfo)
    group = view.get_node_group("a800")
    assert group.get_node_env_vars(0) == {"GLOO_SOCKET_IFNAME": "eth0", "COUNT": "3"}
    assert group.get_node_python_interpreter_path(1) == "/opt/a800/bin/python3"
    assert len(slot_cores(view.get_node_info(0), [1])) == 1
    with pytest.raises(ValueError, match="out of range"):
        view.get_node_info(4)


def test_a_node_tells_which_programs_it_lacks(tmp_path):
    def lacks(python=sys.executable, **variables):
        variables = [{name: value} for name, value in variables.items()]
        environment = {"node_ranks": 0, "python_interpreter_path": python, "env_vars": variables}
        groups = [{"label": "a", "node_ranks": 0, "env_configs": [environment]}]
        profiling = {"backend": "rocprof_sys"}
        return probe_node(read(node_groups=groups, profiling=profiling)).missing_programs

    profiler = tmp_path / "rocprof-sys-python"
    profiler.touch(0o755)
    assert lacks() == ("rocprof-sys-python",)
    assert lacks(PATH=str(tmp_path)) == ()
    assert lacks(f"{sys.executable} -u", PATH=str(tmp_path)) == ()
    assert lacks("/no/python -u", PATH=str(tmp_path)) == ("/no/python",)


def test_robots_are_counted_by_the_environment_of_their_node(monkeypatch):
    monkeypatch.setenv("ROBOT_IP", "10.0.0.1,10.0.0.2")
    config = arms()  # on nodes 0 and 1, none described
    view = build_node_table([probe_node(config, rank) for rank in range(4)], config)
    group = view.get_node_group("g")
    assert group.hardware_resource_count == 4
    found = [info.config for info in group.get_hardware_infos(1)]
    assert [(each.node_rank, each.robot_ip) for each in found] == [(1, "10.0.0.1"), (1, "10.0.0.2")]
    assert not view.get_node_info(2).get_hw_resource_count("Franka")


def test_ranks_of_a_node_group():
    group = NodeGroupInfo("g", [node(3, 2), node(5, 1)])
    assert group.local_hardware_ranks == [[0, 1], [2]]
    assert [group.get_local_hardware_rank(rank) for rank in range(4)] == [0, 1, 0, None]
    assert [group.get_node_by_hardware_rank(rank).node_rank for rank in range(3)] == [3, 3, 5]
    assert group.group_ranks_to_global_ranks([1, 0]) == [5, 3]
    with pytest.raises(IndexError, match="out of range"):
        group.group_ranks_to_global_ranks([2])
    nodes_only = cluster([0, 0]).get_node_group()
    assert nodes_only.local_hardware_ranks == [[0], [1]]
    assert nodes_only.get_node_by_hardware_rank(1).node_rank == 1


def test_conflicting_interpreters_are_refused():
    paths = [NodeGroupEnvConfig(node_ranks=[0], python_interpreter_path=p) for p in ("a", "b")]
    group = NodeGroupInfo("g", [node(0, 0)], env_configs=paths)
    with pytest.raises(ValueError, match="Conflicting Python interpreter"):
        group.get_node_python_interpreter_path(0)
