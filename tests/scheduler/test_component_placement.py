import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from rlinf.errors import UserError
from rlinf.scheduler import component_grammar
from rlinf.scheduler.cluster_config import ClusterConfig
from rlinf.scheduler.component_grammar import parse_component_placement, parse_spec
from rlinf.scheduler.component_placement import ComponentPlacement
from rlinf.scheduler.placement import FlexiblePlacementStrategy, NodePlacementStrategy
from rlinf.scheduler.rank_text import parse_ranks
from rlinf.utils.placement import (
    HybridComponentPlacement,
    ModelParallelComponentPlacement,
    PlacementMode,
    RolloutSyncMode,
)
from tests.scheduler.nodes import cluster, node, table


def assignment(spec, count=None):
    return [list(ranks) for ranks in parse_spec(spec, count)]


@pytest.mark.parametrize(
    ("spec", "count", "expected"),
    [
        ("0", None, [[0]]),
        ("2", 3, [[2]]),
        ("0-3", None, [[0], [1], [2], [3]]),
        ("all", 3, [[0], [1], [2]]),
        ("ALL:0", 3, [[0, 1, 2]]),
        ("all:0-5", 3, [[0], [0], [1], [1], [2], [2]]),
        ("0-3:0-1", None, [[0, 1], [2, 3]]),
        ("0-3:0-7", None, [[0], [0], [1], [1], [2], [2], [3], [3]]),
        (" 0 - 1 : 0 , 4 ", None, [[0, 1], [4]]),
        ("0:0-2", None, [[0], [0], [0]]),
        (
            "0-1:0-3,3-5,7-10:7-14",
            None,
            [[0], [0], [1], [1], [3], [4], [5], [7], [7], [8], [8], [9], [9], [10], [10]],
        ),
    ],
)
def test_the_grammar(spec, count, expected):
    assert assignment(spec, count) == expected


def test_all_of_an_unknown_number_is_left_open():
    assert parse_spec("all:0-3") == []


@pytest.mark.parametrize(
    ("spec", "count", "message"),
    [
        ("", None, r"position 0 \(''\) is empty.*'all'"),
        ("0-3,", None, r"position 4 \(''\) is empty.*'0-3'"),
        ("0,,1", None, r"position 2.*'0,1'"),
        ("0:0:0", None, r"more than one ':'.*'0:0'"),
        ("a", None, r"position 0 \('a'\): Invalid rank format 'a'.*'0-3'"),
        ("0-", None, r"Invalid rank format '0-'.*legal: '0'"),
        ("-1", None, r"Invalid rank format '-1'.*legal: '0'"),
        ("0-1-2", None, r"Invalid rank format.*legal: '0-2'"),
        ("0.5", None, r"Invalid rank format"),
        ("3-0", None, r"must be less than or equal.*'0-3'"),
        ("0;1", None, r"legal: '0-1'"),
        ("0-99999999999", None, r"99999999999.*larger than.*1000000"),
        ("0-3,2-5", None, r"position 4 \('2-5'\).*Resource ranks must be unique, 2-3.*'4-5'"),
        ("2-3,0-1", None, r"Resource ranks must be in ascending order"),
        ("0-8", 8, r"out of range: there are 8 resources: 0-7.*'0-7'"),
        ("9", 8, r"out of range.*legal: '7'"),
        ("all", 0, r"out of range: there are 0 resources: none\.$"),
        ("all,0", 4, r"cannot stand beside.*'all'"),
        ("0,all", 4, r"cannot stand beside"),
        ("0-3:all", None, r"cannot be 'all'.*'0-3'"),
        ("0-3:", None, r"process ranks"),
        ("0-3:x", None, r"Invalid rank format 'x' for process"),
        ("0-3:1-4", None, r"ascending order and continuous from 0.*'0-3:0-3'"),
        ("0-1:0-1,2-3:3-4", None, r"position 8.*Process ranks must be in ascending order.*:2-3'"),
        ("0-1:0-1,2-3:0-1", None, r"Process ranks must be in ascending order.*'2-3:2-3'"),
        ("0-2:0-1", None, r"2 processes on 3 resources.*must be divisible.*'0-2:0(-2)?'"),
        ("0-2:0-4", None, r"must be divisible.*'0-2:0-5'"),
    ],
)
def test_a_malformed_placement_tells_position_reason_and_nearest(spec, count, message):
    with pytest.raises(AssertionError, match=message) as caught:
        parse_spec(spec, count, "actor")
    assert isinstance(caught.value, UserError)
    assert isinstance(caught.value, ValueError)
    assert f"component_placement['actor'] = '{spec}'" in str(caught.value)


def test_ranks_of_thousands_of_processes_are_read_one_by_one(monkeypatch):
    """What was named before is gathered for a message only."""
    asked = []

    def counted(ranks):
        asked.append(ranks)
        return set(ranks)

    monkeypatch.setattr(component_grammar, "set", counted, raising=False)
    spec = ",".join(map(str, range(1000)))
    assert parse_spec(spec, 1000) == [(rank,) for rank in range(1000)]
    assert not asked
    available = Available(range(1000))
    assert parse_ranks("0-999", "node", available) == list(range(1000))
    assert available.reads == 1


class Available(list):
    """Ranks that count how often they are gone through."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"actor,": "0"}, r"empty component name.*'actor'"),
        ({"actor": "0", "env,actor": "1"}, r"'actor' is in 'actor' and in 'env,actor'"),
        ({"actor": {"placement": "0", "group": "a"}}, r"unknown fields \['group'\]"),
        ({"actor": {"node_group": "a"}}, r"placement must be specified"),
        ({"actor": {"node_group": [], "placement": 0}}, r"must name one or several"),
        ({"actor": {"node_group": "a,a", "placement": 0}}, r"different node groups"),
        ({"rollout": None, "actor": 0}, r"stand in quotes: 'rollout,NAME': 0"),
        ({"actor": 0.5}, r"must be text such as"),
        ({"actor": True}, r"must be text such as"),
        ({"actor": ["0"]}, r"must be text such as"),
    ],
)
def test_a_malformed_entry(placement, message):
    with pytest.raises(AssertionError, match=message):
        parse_component_placement(placement)
    with pytest.raises(AssertionError, match=message):
        ClusterConfig.from_dict_cfg({"num_nodes": 1, "component_placement": placement})


@st.composite
def legal_specs(draw):
    """Segments that follow the rules, with the assignment computed in another way."""
    parts, expected, resource, process = [], [], 0, 0
    for _ in range(draw(st.integers(1, 4))):
        resource += draw(st.integers(0, 2))
        groups, factor = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        share = draw(st.booleans())
        resources, processes = (groups, groups * factor) if share else (groups * factor, groups)
        parts.append(f"{resource}-{resource + resources - 1}:{process}-{process + processes - 1}")
        for index in range(processes):
            if share:
                expected.append([resource + index // factor])
            else:
                first = resource + index * factor
                expected.append(list(range(first, first + factor)))
        resource, process = resource + resources, process + processes
    return ",".join(parts), expected


@given(legal_specs())
def test_legal_specs_are_read_as_written(case):
    spec, expected = case
    assert assignment(spec) == expected


@given(st.text("0123,:-al ", max_size=12))
def test_any_text_is_read_or_refused_with_a_reason(text):
    try:
        found = parse_spec(text, 4)
    except UserError as error:
        assert str(error).startswith(f"placement '{text}', position ")  # noqa: PT017 - both are legal
    else:
        assert all(found)
        assert all(0 <= rank < 4 for ranks in found for rank in ranks)


def placed(component_placement, view, kind=ComponentPlacement, **sections):
    config = {"cluster": {"component_placement": component_placement}, **sections}
    return kind(OmegaConf.create(config), view)


def test_components_of_one_key_share_a_strategy():
    placement = placed({"actor,rollout": "0-3", "env": 0}, cluster([4]))
    assert placement.components == ["actor", "rollout", "env"]
    assert placement.get_strategy("actor") is placement.get_strategy("rollout")
    assert placement.get_strategy("env") is not placement.get_strategy("actor")
    assert placement.get_world_size("actor") == 4
    assert placement.get_hardware_ranks("actor") == [0, 1, 2, 3]
    assert placement.get_hardware_ranks("env") == [0]
    assert placement.placement_mode is None


def test_several_processes_on_one_device():
    placement = placed({"env": "0-1:0-7"}, cluster([2]))
    assert placement.get_world_size("env") == 8
    assert placement.get_hardware_ranks("env") == [0, 1]
    view = cluster([2])
    ranks = [p.local_accelerator_rank for p in placement.get_strategy("env").get_placement(view)]
    assert ranks == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("groups", ["train,infer", ["train", "infer"], "train, infer"])
def test_ranks_count_on_over_node_groups(groups):
    view = cluster([2, 4, 8], {"train": [2], "infer": [0]})
    placement = placed({"actor": {"node_group": groups, "placement": "7-8"}}, view)
    placements = placement.get_strategy("actor").get_placement(view)
    assert [(p.cluster_node_rank, p.local_accelerator_rank) for p in placements] == [(2, 7), (0, 0)]
    assert [p.node_group_label for p in placements] == ["train", "infer"]


def test_without_hardware_the_nodes_are_the_resources():
    view = cluster([0, 0])
    placement = placed({"agent": "0:0-1,1:2"}, view)
    assert isinstance(placement.get_strategy("agent"), NodePlacementStrategy)
    placements = placement.get_strategy("agent").get_placement(view)
    assert [p.cluster_node_rank for p in placements] == [0, 0, 1]


def test_the_reserved_group_node_counts_nodes():
    view = cluster([4, 4])
    placement = placed({"env": {"node_group": "node", "placement": "all"}, "a": "all"}, view)
    assert isinstance(placement.get_strategy("env"), NodePlacementStrategy)
    assert placement.get_world_size("env") == 2
    assert isinstance(placement.get_strategy("a"), FlexiblePlacementStrategy)
    assert placement.get_world_size("a") == 8


def test_a_group_with_declared_hardware_counts_that():
    view = table([node(0, 4, arms=2)], {"arm": [0]}, hardware_types={"arm": "Franka"})
    placement = placed({"env": {"node_group": "arm", "placement": "all:0-3"}}, view)
    placements = placement.get_strategy("env").get_placement(view)
    assert [p.local_hardware_ranks for p in placements] == [[0], [0], [1], [1]]


@pytest.mark.parametrize(
    ("component_placement", "devices", "message"),
    [
        ({"actor": "0-8"}, [8], "out of range"),
        ({"actor": {"node_group": "x", "placement": "0"}}, [8], "Node group not found"),
        ({"actor": "0-1:0"}, [0, 0], "a process runs on one node.*'0-1'"),
        ({"actor": "0-3,2-5"}, [8], "Resource ranks must be unique"),
        ({"actor": "0:0,1:2"}, [8], "Process ranks must be in ascending order"),
    ],
)
def test_what_the_cluster_does_not_have(component_placement, devices, message):
    with pytest.raises(AssertionError, match=message):
        placed(component_placement, cluster(devices))


def test_unknown_components_and_missing_sections():
    placement = placed({"rollout": "0"}, cluster([1]))
    for call in (placement.get_strategy, placement.get_world_size, placement.get_hardware_ranks):
        with pytest.raises(AssertionError, match=r"Unknown component name: 'rolout'.*'rollout'\?"):
            call("rolout")
    for config in ({}, {"cluster": {}}, {"cluster": {"component_placement": "0"}}):
        with pytest.raises(AssertionError, match="component_placement must be provided"):
            ComponentPlacement(DictConfig(config), cluster([1]))


def test_a_validated_config_object_is_read_too():
    class Recipe:
        cluster = ClusterConfig.model_validate({"component_placement": {"actor": "0-1"}})

    assert ComponentPlacement(Recipe(), cluster([2])).get_world_size("actor") == 2


def test_hybrid_mode():
    placement = placed({"actor": "0-1", "rollout": "1-2"}, cluster([3]), HybridComponentPlacement)
    assert placement.placement_mode is PlacementMode.HYBRID


def model_parallel(component_placement, devices, *, actor=1, rollout=1, **sections):
    sections = {
        "actor": {"model": {"tensor_model_parallel_size": actor}},
        "rollout": {"tensor_parallel_size": rollout},
        **sections,
    }
    view = cluster([devices])
    return placed(component_placement, view, ModelParallelComponentPlacement, **sections), view


def test_collocated_engines_hold_matching_shards():
    placement, view = model_parallel({"actor,rollout,reward": "all"}, 8, actor=4, rollout=2)
    assert placement.is_collocated
    assert placement.rollout_sync_mode is RolloutSyncMode.COLLOCATED
    assert not placement.has_dedicated_inference
    assert (placement.actor_dp_size, placement.rollout_dp_size) == (2, 4)
    engines = placement.get_strategy("rollout").get_placement(view)
    assert [p.visible_accelerators for p in engines] == [
        ["0", "2"],
        ["1", "3"],
        ["4", "6"],
        ["5", "7"],
    ]
    assert len(placement.get_strategy("actor").get_placement(view)) == 8


def test_an_engine_may_have_more_shards_than_a_collocated_actor():
    """An actor that FSDP divides has tensor-parallel size 1, whatever its engines have."""
    placement, view = model_parallel({"actor,rollout,reward": "all"}, 8, actor=1, rollout=4)
    assert placement.is_collocated
    assert (placement.actor_dp_size, placement.rollout_dp_size) == (8, 2)
    engines = placement.get_strategy("rollout").get_placement(view)
    assert [p.visible_accelerators for p in engines] == [list("0123"), list("4567")]


def test_disaggregated():
    placement, view = model_parallel(
        {"actor": "0-3", "rollout": "4-7", "inference": "8-9", "reward": "0"},
        10,
        actor=2,
        rollout=2,
        inference={"model": {"tensor_model_parallel_size": 2}},
    )
    assert placement.is_disaggregated
    assert placement.is_pipeline
    assert placement.rollout_sync_mode is RolloutSyncMode.DISAGGREGATED
    assert placement.has_dedicated_inference_for_role("actor")
    assert not placement.has_dedicated_inference_for_role("critic")
    assert placement.inference_dp_size == 1
    sizes = (placement.actor_world_size, placement.rollout_world_size, placement.reward_world_size)
    assert sizes == (4, 4, 1)
    engines = placement.get_strategy("rollout").get_placement(view)
    assert [p.visible_accelerators for p in engines] == [["4", "5"], ["6", "7"]]


def test_auto_starts_the_actor_on_every_device():
    parts = {"actor": "0-3", "rollout": "4-7", "inference": "8-9", "reward": "4-7"}
    config = {"component_placement": parts, "auto_scheduler": True}
    sections = {"rollout": {"tensor_parallel_size": 2}}
    view = cluster([10])
    placement = ModelParallelComponentPlacement({"cluster": config, **sections}, view)
    assert placement.is_auto
    assert len(placement.get_strategy("actor").get_placement(view)) == 10
    assert len(placement.get_strategy("rollout").get_placement(view)) == 2
    config["use_pre_process_policy"] = True
    placement = ModelParallelComponentPlacement({"cluster": config, **sections}, view)
    assert len(placement.get_strategy("rollout").get_placement(view)) == 4


def test_auto_needs_order_and_cover():
    parts = {"actor": "4-7", "rollout": "0-3", "reward": "0"}
    config = {"cluster": {"component_placement": parts, "auto_scheduler": True}}
    with pytest.raises(AssertionError, match="actor -> rollout -> inference"):
        ModelParallelComponentPlacement(config, cluster([8]))


@pytest.mark.parametrize(
    ("component_placement", "sections", "message"),
    [
        ({"rollout,reward": "all"}, {}, "Actor GPUs must be specified"),
        ({"actor,reward": "all"}, {}, "Rollout GPUs must be specified"),
        ({"actor,rollout": "all"}, {}, "Reward GPUs must be specified"),
        (
            {"actor": "0,2", "rollout,reward": "4-7"},
            {},
            r"Actor GPUs 0,2 must be continuous.*'0-2'",
        ),
        ({"actor": "0-4", "rollout,reward": "4-7"}, {}, "neither collocated.*actor and rollout"),
        (
            {"actor": "0-1", "rollout,reward": "2-3", "inference,critic": "4-5"},
            {},
            "neither collocated.*inference and critic share",
        ),
        ({"actor,rollout,reward,inference": "all"}, {}, "Inference GPUs must not be specified"),
        ({"actor,rollout,reward": "0-3"}, {"actor": 8}, "Actor TP size 8 must be less.*legal: 4"),
        ({"actor,rollout,reward": "0-3"}, {"rollout": 8}, "Rollout TP size 8 must be less"),
        (
            {"actor,rollout,reward": "0-7"},
            {"actor": 4, "rollout": 3},
            r"\(4\) must be divisible by Rollout TP size \(3\).*legal: [24]",
        ),
        (
            {"actor": "0-3", "rollout,reward": "4-6", "inference": "7"},
            {"inference": {"model": {"tensor_model_parallel_size": 2}}},
            "Inference TP size 2",
        ),
        (
            {"actor": "0-3", "rollout,reward": "4-6", "inference": "7"},
            {"algorithm": {"recompute_logprobs": False}},
            "recompute_logprobs",
        ),
        (
            {"actor": "0-2", "rollout": "3-5", "reward": "0"},
            {"rollout": 2},
            "Rollout world size 3 must be divisible by the 2 devices.*legal: 2 devices",
        ),
        (
            {"actor": "0-4", "rollout": "5-6", "reward": "0"},
            {"actor": 2},
            "Actor world size 5 must be divisible by the 2 devices.*legal: 4 devices",
        ),
        ({"actor,rollout,reward": "all"}, {"rollout": 0}, r"rollout.tensor_parallel_size.*got 0"),
        ({"actor,rollout,reward": "all"}, {"actor": "two"}, "a number of 1 or more, got 'two'"),
    ],
)
def test_model_parallel_mistakes(component_placement, sections, message):
    with pytest.raises(AssertionError, match=message):
        model_parallel(component_placement, 8, **sections)
