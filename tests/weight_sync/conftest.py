"""One cluster per runtime, with a pair of groups that the tests share."""

from collections.abc import Iterator

import pytest

from rlinf.scheduler import Cluster, NodePlacementStrategy
from tests.weight_sync.workers import Peer

RECEIVERS = 2


@pytest.fixture(scope="package", params=["local", "ray"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param == "ray":
        pytest.importorskip("ray")
    environment = pytest.MonkeyPatch()
    environment.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    environment.delenv("RLINF_TIMEOUT", raising=False)
    started = Cluster(
        cluster_cfg={
            "num_nodes": 1,
            "runtime": request.param,
            "cpu_devices_per_node": 2,
            "timeout_minutes": 2.0,
        }
    )
    yield started
    started.shutdown()
    environment.undo()


@pytest.fixture(scope="package")
def runtime(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    from rlinf.scheduler.process import require_process

    return require_process().runtime


@pytest.fixture(scope="package")
def launch(cluster: Cluster) -> Iterator:
    groups = []

    def start(count: int, name: str):
        group = Peer.create_group().launch(
            cluster, placement_strategy=NodePlacementStrategy([0] * count), name=name
        )
        groups.append(group)
        return group

    yield start
    for group in groups:
        group._close()


@pytest.fixture(scope="package")
def pair(launch, runtime):
    """A sending group and a receiving group of two; a process takes seconds to start."""
    return launch(2 if runtime == "local" else 1, "trainer"), launch(RECEIVERS, "generator")
