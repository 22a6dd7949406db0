import psutil
import pytest

from rlinf.errors import ConfigError
from rlinf.planner import cluster_shape
from rlinf.planner.cluster_shape import (
    free_memory,
    kind_of_model,
    parse_cluster_shape,
    total_memory,
)


def test_a_shape_is_read_with_kind_and_memory():
    shape = parse_cluster_shape("512x8:H100")
    (group,) = shape.groups
    assert (group.nodes, group.devices_per_node, group.kind) == (512, 8, "H100")
    assert group.memory_bytes == 80 * 10**9
    assert shape.devices == 4096
    assert str(shape) == "512x8:H100"


def test_several_groups_are_numbered_one_after_the_other():
    shape = parse_cluster_shape("4x8:h100, 2x4:RTX4090/24GB")
    assert [group.kind for group in shape.groups] == ["H100", "RTX4090"]
    assert (shape.offset(0), shape.offset(1), shape.devices) == (0, 32, 40)
    assert shape.groups[1].memory_bytes == 24 * 10**9


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4090 D", "RTX4090D"),
        ("NVIDIA T1000", "T1000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000AdaGeneration"),
        ("", ""),
    ],
)
def test_a_kind_of_a_model_can_be_written_in_a_shape(model, kind):
    assert kind_of_model(model) == kind
    if kind:
        assert parse_cluster_shape(f"1x8:{kind}/80GB").groups[0].kind == kind


def test_without_a_kind_memory_is_not_limited():
    (group,) = parse_cluster_shape("1x4").groups
    assert (group.kind, group.memory_bytes) == ("", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("512", "'512' is not NODESxDEVICES"),
        ("8:H100", "for 512 nodes of 8 H100 write 512x8:H100"),
        ("0x8:H100", "has no device; nearest: 1x8"),
        ("4x0", "has no device; nearest: 4x1"),
        ("4x8:H100,", "'' in '4x8:H100,' is not"),
        ("4x8:H100,2x8:h100", "two groups of H100"),
        ("4x8:H1000", "did you mean H100"),
        ("4x8:h100/0GB", "gives a device no memory; nearest: 4x8:h100/80GB"),
        ("4x8:mine/0.0000000001GB", "no memory; nearest: 4x8:mine/80GB"),
    ],
)
def test_a_shape_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_cluster_shape(text)


def test_memory_is_that_of_the_control_group_where_that_has_less(monkeypatch):
    monkeypatch.setattr(cluster_shape, "_control_groups", lambda: iter([(10**9, 4 * 10**8)]))
    assert (free_memory(), total_memory()) == (6 * 10**8, 10**9)
    monkeypatch.setattr(cluster_shape, "_control_groups", lambda: iter([(10**9, 2 * 10**9)]))
    assert free_memory() == 0
    monkeypatch.setattr(cluster_shape, "_control_groups", lambda: iter([]))
    assert total_memory() == psutil.virtual_memory().total
