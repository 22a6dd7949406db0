import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.errors import UserError
from rlinf.scheduler import errors
from rlinf.scheduler.address import WorkerAddress, WorkerInfo
from rlinf.scheduler.hardware import AcceleratorType


def test_parts_of_an_address():
    address = WorkerAddress("G", [5, 2])
    assert (address.root_group_name, address.rank_path, address.rank) == ("G", [5, 2], 2)
    assert address.get_name() == "G:5:2"
    assert address.get_parent_rank() == 5
    assert address.get_parent_address() == WorkerAddress("G", 5)
    assert address.get_child_address(1).get_name() == "G:5:2:1"
    assert WorkerAddress.from_parent_name_rank("G:5", 2) == address


def test_the_group_itself():
    root = WorkerAddress("G")
    assert (root.rank, root.rank_path, root.get_name()) == (0, [], "G")
    assert root.get_parent_address() is None
    assert root.get_parent_rank() == 0
    assert WorkerAddress("G", 3).get_parent_address() == root


def test_equality_order_and_hash():
    assert WorkerAddress("G", 1) == WorkerAddress("G", [1])
    assert WorkerAddress("G", np.int64(1)) == WorkerAddress("G", (np.int32(1),))
    assert WorkerAddress("G", 1) != WorkerAddress("G", 2)
    assert WorkerAddress("G", 1) != "G:1"
    assert WorkerAddress("G", 1) != None  # noqa: E711 - what published code writes
    assert len({WorkerAddress("G", 1), WorkerAddress("G", [1])}) == 1
    unordered = [WorkerAddress("b", 0), WorkerAddress("a", 10), WorkerAddress("a", 9)]
    assert [a.get_name() for a in sorted(unordered)] == ["a:9", "a:10", "b:0"]


@given(st.text(st.characters(exclude_characters=":")), st.lists(st.integers(0, 10**6)))
def test_a_name_leads_back_to_its_address(group, ranks):
    address = WorkerAddress(group, ranks)
    assert WorkerAddress.from_name(address.get_name()) == address
    assert pickle.loads(pickle.dumps(address)) == address


@pytest.mark.parametrize(
    "build",
    [
        lambda: WorkerAddress("a:b"),
        lambda: WorkerAddress("a", -1),
        lambda: WorkerAddress(5, 0),
        lambda: WorkerAddress("a", "1"),
        lambda: WorkerAddress("a", 1.0),
        lambda: WorkerAddress("a", None),
        lambda: WorkerAddress.from_name("a:x"),
        lambda: WorkerAddress.from_name("a:"),
        lambda: WorkerAddress("a", [0]).get_child_address(-2),
    ],
)
def test_what_cannot_be_an_address(build):
    with pytest.raises(AssertionError) as caught:
        build()
    assert isinstance(caught.value, UserError)


def test_worker_info_hashes_by_address():
    info = WorkerInfo(
        address=WorkerAddress("G", 1),
        rank=1,
        group_world_size=2,
        cluster_node_rank=0,
        accelerator_type=AcceleratorType.NO_ACCEL,
        accelerator_model="",
        accelerator_rank=-1,
        node_ip="127.0.0.1",
        node_port=0,
        available_accelerators=[],
        hardware_infos=[],
    )
    assert hash(info) == hash(WorkerAddress("G", 1))
    assert pickle.loads(pickle.dumps(info)) == info


def test_every_error_survives_pickling():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, Exception):
            assert str(pickle.loads(pickle.dumps(kind("what, why")))) == "what, why"


def test_a_failed_call_shows_the_remote_traceback():
    error = errors.WorkerCallError("G:0.step failed: ValueError: x", "G:0", "step", "Traceback ...")
    again = pickle.loads(pickle.dumps(error))
    assert (again.worker_name, again.method) == ("G:0", "step")
    assert "Traceback inside G:0:\nTraceback ..." in str(again)
