from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.errors import UserError
from rlinf.scheduler.accelerators import AcceleratorType
from rlinf.scheduler.address import WorkerAddress, WorkerInfo
from rlinf.scheduler.placement import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
)
from rlinf.scheduler.runtime.launch import worker_environment
from tests.scheduler.nodes import cluster, node, table


def visible(placements):
    return [placement.visible_accelerators for placement in placements]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, 3), [["0"], ["1"], ["2"], ["3"]]),
        ((0, 3, 2), [["0", "1"], ["2", "3"]]),
        ((0, 7, 2, 2), [["0", "2"], ["1", "3"], ["4", "6"], ["5", "7"]]),
        ((0, 5, 2, 3), [["0", "3"], ["1", "4"], ["2", "5"]]),
        ((5, 6), [["5"], ["6"]]),
    ],
)
def test_packed_shares_a_range(arguments, expected):
    placements = PackedPlacementStrategy(*arguments).get_placement(cluster([8]))
    assert visible(placements) == expected
    assert [p.rank for p in placements] == list(range(len(expected)))
    assert [p.local_rank for p in placements] == list(range(len(expected)))
    assert {p.local_world_size for p in placements} == {len(expected)}
    assert [str(p.local_accelerator_rank) for p in placements] == [v[0] for v in expected]
    assert {p.accelerator_type for p in placements} == {AcceleratorType.NV_GPU}


def test_packed_fills_node_after_node():
    placements = PackedPlacementStrategy(1, 5).get_placement(cluster([3, 4]))
    assert [p.cluster_node_rank for p in placements] == [0, 0, 1, 1, 1]
    assert [p.placement_node_rank for p in placements] == [0, 0, 1, 1, 1]
    assert [p.local_rank for p in placements] == [0, 1, 0, 1, 2]
    assert [p.local_world_size for p in placements] == [2, 2, 3, 3, 3]
    assert visible(placements) == [["1"], ["2"], ["0"], ["1"], ["2"]]


@given(
    devices=st.integers(1, 3),
    stride=st.integers(1, 3),
    blocks=st.integers(1, 3),
    start=st.integers(0, 2),
)
def test_packed_uses_every_device_once(devices, stride, blocks, start):
    size = devices * stride * blocks
    strategy = PackedPlacementStrategy(start, start + size - 1, devices, stride)
    placements = strategy.get_placement(cluster([start + size]))
    used = [rank for p in placements for rank in p.local_hardware_ranks]
    assert sorted(used) == list(range(start, start + size))
    for placement in placements:
        ranks = placement.local_hardware_ranks
        assert {b - a for a, b in pairwise(ranks)} <= {stride}


def test_flexible_sorts_within_and_across_processes():
    strategy = FlexiblePlacementStrategy([[6], [3, 1, 2], [0]])
    placements = strategy.get_placement(cluster([4, 4]))
    assert visible(placements) == [["0"], ["1", "2", "3"], ["2"]]
    assert [p.cluster_node_rank for p in placements] == [0, 0, 1]
    assert [p.local_world_size for p in placements] == [2, 2, 1]


def test_processes_may_share_a_device():
    placements = FlexiblePlacementStrategy([[0], [0]]).get_placement(cluster([1]))
    assert visible(placements) == [["0"], ["0"]]
    assert [p.local_rank for p in placements] == [0, 1]


def test_without_isolation_a_process_sees_all_and_knows_its_own():
    placements = PackedPlacementStrategy(0, 3).get_placement(cluster([4]), False)
    assert visible(placements) == [["0", "1", "2", "3"]] * 4
    assert [p.local_accelerator_rank for p in placements] == [0, 1, 2, 3]
    assert not any(p.isolate_accelerator for p in placements)


@pytest.mark.parametrize(
    ("ranks", "label", "nodes", "local_ranks", "sizes"),
    [
        ([0, 0, 0], None, [0, 0, 0], [0, 1, 2], [3, 3, 3]),
        ([1, 0, 1, 2], "node", [0, 1, 1, 2], [0, 0, 1, 0], [1, 2, 2, 1]),
        ([0, 1], ["b", "a"], [2, 0], [0, 0], [1, 1]),
    ],
)
def test_node_placement(ranks, label, nodes, local_ranks, sizes):
    view = cluster([1, 1, 1], {"a": [0, 1], "b": [2]})
    placements = NodePlacementStrategy(ranks, label).get_placement(view)
    assert [p.cluster_node_rank for p in placements] == nodes
    assert [p.local_rank for p in placements] == local_ranks
    assert [p.local_world_size for p in placements] == sizes
    assert all(p.local_hardware_ranks == [] for p in placements)


def test_node_placement_without_devices():
    placement = NodePlacementStrategy([0]).get_placement(cluster([0]))[0]
    assert placement.local_accelerator_rank == -1
    assert placement.visible_accelerators == []
    assert placement.accelerator_type is AcceleratorType.NO_ACCEL


def test_a_process_without_a_device_of_its_own_has_the_rank_of_none():
    groups = {"arm": [0], "plain": [0]}
    view = table([node(0, 2, arms=1)], groups, hardware_types={"arm": "Franka"})
    view.node_groups["plain"].hardware_type = None
    for strategy in (
        NodePlacementStrategy([0]),
        FlexiblePlacementStrategy([[0]], "arm"),
        FlexiblePlacementStrategy([[0]], "plain"),
    ):
        (placement,) = strategy.get_placement(view)
        assert placement.local_accelerator_rank == -1
        assert placement.visible_accelerators == ["0", "1"]  # for who looks for one itself


def test_groups_of_different_hardware_are_numbered_in_their_order():
    view = table([node(0, 2, arms=1)], {"gpu": [0], "arm": [0]}, hardware_types={"arm": "Franka"})
    placements = FlexiblePlacementStrategy([[1], [2]], ["gpu", "arm"]).get_placement(view)
    assert [p.node_group_label for p in placements] == ["gpu", "arm"]
    assert [p.local_hardware_ranks for p in placements] == [[1], [0]]
    assert visible(placements) == [["1"], ["0", "1"]]


def test_cpu_slots_are_placed_like_devices():
    view = table([node(0, 2, model="CPU_SLOT:4 cores")])
    placements = PackedPlacementStrategy(0, 1).get_placement(view)
    assert [p.local_accelerator_rank for p in placements] == [0, 1]
    assert {p.accelerator_type for p in placements} == {AcceleratorType.CPU_SLOT}


def test_programs_divide_a_packed_placement():
    whole = PackedPlacementStrategy(2, 9, num_hardware_per_process=2, stride=2)
    middle = (whole._start_hw_rank + whole._end_hw_rank) // 2
    half = PackedPlacementStrategy(
        whole._start_hw_rank, middle, whole._num_hardware_per_process, whole._stride
    )
    assert visible(half.get_placement(cluster([10]))) == [["2", "4"], ["3", "5"]]


MISTAKES = [
    (lambda: NodePlacementStrategy(0), AssertionError, r"such as \[0, 0\], got 0"),
    (lambda: NodePlacementStrategy("01"), AssertionError, "one node per process.*got '01'"),
    (lambda: FlexiblePlacementStrategy([0, 1]), AssertionError, "list of resources per process"),
    (lambda: FlexiblePlacementStrategy(None), AssertionError, "list of resources per process"),
    (lambda: PackedPlacementStrategy(0, None), AssertionError, "whole numbers.*None"),
    (lambda: PackedPlacementStrategy("0", "3"), AssertionError, "whole numbers.*'3'"),
    (lambda: NodePlacementStrategy([]), AssertionError, "must not be empty"),
    (
        lambda: NodePlacementStrategy([3]).get_placement(cluster([0])),
        IndexError,
        r"Node rank 3 is out of range for selected node groups None \(total nodes 1\)\.",
    ),
    (lambda: NodePlacementStrategy([-1]).get_placement(cluster([0])), IndexError, "legal: 0"),
    (
        lambda: NodePlacementStrategy([0], "x").get_placement(cluster([0])),
        AssertionError,
        "'x' not found",
    ),
    (
        lambda: NodePlacementStrategy([0], ["a", "cluster"]).get_placement(
            cluster([0], {"a": [0]})
        ),
        AssertionError,
        "overlapping",
    ),
    (lambda: FlexiblePlacementStrategy([]), AssertionError, "must not be empty"),
    (lambda: FlexiblePlacementStrategy([[0], []]), AssertionError, "must not be empty"),
    (lambda: FlexiblePlacementStrategy([[-1]]), AssertionError, "non-negative"),
    (
        lambda: FlexiblePlacementStrategy([[0, 4]]).get_placement(cluster([4, 4])),
        AssertionError,
        "same node",
    ),
    (
        lambda: FlexiblePlacementStrategy([[8]]).get_placement(cluster([4, 4])),
        AssertionError,
        "out of range.*between 0 and 7",
    ),
    (
        lambda: FlexiblePlacementStrategy([[0, 0]]).get_placement(cluster([4])),
        AssertionError,
        "must be unique",
    ),
    (
        lambda: FlexiblePlacementStrategy([[0, 1]], ["gpu", "arm"]).get_placement(
            table([node(0, 1, arms=1)], {"gpu": [0], "arm": [0]}, {"arm": "Franka"})
        ),
        AssertionError,
        "same hardware type",
    ),
    (lambda: PackedPlacementStrategy(0, 3, stride=5), AssertionError, "divisible.*legal.*4"),
    (
        lambda: PackedPlacementStrategy(0, 2, num_hardware_per_process=2),
        AssertionError,
        "end_hardware_rank 1",
    ),
    (lambda: PackedPlacementStrategy(3, 1), AssertionError, "greater than or equal"),
    (lambda: PackedPlacementStrategy(-1, 1), AssertionError, "non-negative"),
    (lambda: PackedPlacementStrategy(0, 1, 0), AssertionError, "1 or more"),
    (
        lambda: PackedPlacementStrategy(4, 7).get_placement(cluster([4])),
        AssertionError,
        "out of range",
    ),
    (
        lambda: PackedPlacementStrategy(0, 3, 4).get_placement(cluster([2, 2])),
        AssertionError,
        "same node",
    ),
    (
        lambda: PackedPlacementStrategy(0, 0).get_placement(cluster([0])),
        AssertionError,
        "requires hardware",
    ),
]


@pytest.mark.parametrize(("call", "builtin", "message"), MISTAKES)
def test_a_mistake_is_a_user_error_and_the_promised_builtin(call, builtin, message):
    with pytest.raises(builtin, match=message) as caught:
        call()
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize(("devices", "first"), [("", "0"), ("6,7", "6")])
def test_interfaces_and_devices_are_those_of_the_node(monkeypatch, devices, first):
    monkeypatch.setenv("RLINF_COMM_NET_DEVICES", "ib0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")  # of whoever launches
    (placement,) = PackedPlacementStrategy(0, 0).get_placement(cluster([1, 1]))
    info = WorkerInfo(
        address=WorkerAddress("actor", [0]),
        rank=0,
        group_world_size=1,
        cluster_node_rank=0,
        accelerator_type=placement.accelerator_type,
        accelerator_model="",
        accelerator_rank=0,
        node_ip="10.0.0.1",
        node_port=0,
        available_accelerators=[0],
        hardware_infos=[],
    )
    found = worker_environment(
        placement,
        info,
        master=("10.0.0.1", 1),
        namespace="test",
        one_machine=False,
        node_environment={"CUDA_VISIBLE_DEVICES": devices},
    )
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "ib0"
    assert found["CUDA_VISIBLE_DEVICES"] == first
