"""Transport of accelerator tensors: the choices run anywhere, the transfers on a GPU."""

import dataclasses
import queue
import threading

import pytest
import torch

from rlinf.scheduler import AcceleratorType, Worker, WorkerAddress, WorkerInfo
from rlinf.scheduler.transport.accelerator import PairTransfer, _to_device, transfer_mode


def worker(name: str, devices: list[int], **changes) -> WorkerInfo:
    info = WorkerInfo(
        address=WorkerAddress(name, 0),
        rank=0,
        group_world_size=1,
        cluster_node_rank=0,
        accelerator_type=AcceleratorType.NV_GPU,
        accelerator_model="NV_GPU:H200",
        accelerator_rank=devices[0] if devices else -1,
        node_ip="127.0.0.1",
        node_port=0,
        available_accelerators=devices,
        hardware_infos=[],
    )
    return dataclasses.replace(info, **changes)


def test_transport_is_chosen_per_pair():
    one, same, other = worker("a", [0]), worker("b", [0]), worker("c", [1])
    assert transfer_mode(one, same) == "shared"
    assert transfer_mode(one, other) == "library"
    assert transfer_mode(one, worker("d", [])) == "host"
    assert transfer_mode(worker("e", [0, 1]), worker("f", [1, 2])) == "host"
    assert transfer_mode(one, worker("g", [1], accelerator_model="NV_GPU:A100")) == "host"
    ascend = {"accelerator_type": AcceleratorType.NPU, "accelerator_model": "NPU:x"}
    assert transfer_mode(worker("h", [0], **ascend), worker("i", [1], **ascend)) == "host"


def test_tensors_that_are_not_contiguous_are_refused():
    pair = PairTransfer(worker("a", [0]), worker("b", [0]), None)
    with pytest.raises(ValueError, match="must be contiguous when using P2P communication"):
        pair.reduce(torch.ones(3, 2).T)


class Meeting:
    """Process groups of two that stand in for the library's, in one process: a send takes until
    the other side receives."""

    def __init__(self) -> None:
        self._places: dict[str, queue.Queue] = {}
        self._lock = threading.Lock()

    def join(self, place: str, rank: int, kind: object, options: object) -> "Meeting.Group":
        with self._lock:
            return self.Group(self._places.setdefault(place, queue.Queue()))

    class Group:
        def __init__(self, tensors: queue.Queue) -> None:
            self._tensors = tensors

        def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> "Meeting.Group":
            taken = threading.Event()
            self._tensors.put((tensors[0], taken))
            assert taken.wait(60)
            return self

        def recv(self, tensors: list[torch.Tensor], of: int, tag: int) -> "Meeting.Group":
            sent, taken = self._tensors.get(timeout=60)
            assert sent.dtype == tensors[0].dtype == torch.uint8
            tensors[0].copy_(sent)
            taken.set()
            return self

        def wait(self) -> None: ...


class Sender(Worker):
    def exchange(self, group: str, rank: int, numel: int) -> float:
        tensor = torch.full((numel,), 3.0, device="cuda")
        if self._rank == 0:
            self.send({"weights": tensor, "step": 1}, group, rank)
            return 0.0
        got = self.recv(group, rank)
        assert got["weights"].is_cuda
        return float(got["weights"].sum())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_workers_on_one_device_share_its_memory(launch, runtime):
    if runtime == "local":
        pytest.skip("references are passed in one process")
    from rlinf.scheduler import FlexiblePlacementStrategy

    group = launch(Sender, 2, "cuda", placement_strategy=FlexiblePlacementStrategy([[0], [0]]))
    sending = group.execute_on(0).exchange("cuda", 1, 1 << 20)
    assert group.execute_on(1).exchange("cuda", 0, 1 << 20).wait() == [3.0 * (1 << 20)]
    sending.wait()


def test_where_there_is_no_such_device_a_tensor_stays_on_the_host(monkeypatch):
    """As a result that the driver of a machine without one asks for."""
    tensor = torch.arange(3.0)
    for own, kind, expected in (("cpu", "cuda", "cpu"), ("meta", "meta", "meta")):
        monkeypatch.setenv("RLINF_DEVICE", own)
        assert _to_device(tensor, kind, False).device.type == expected
    monkeypatch.delenv("RLINF_DEVICE")
    monkeypatch.setenv("ACCELERATOR_TYPE", "NO_ACCEL")
    assert _to_device(tensor, "cuda", False).device.type == "cpu"
