"""One cluster per runtime, with a pair of groups that the tests share."""

from collections.abc import Iterator

import pytest

from rlinf.scheduler import Cluster, NodePlacementStrategy
from tests.clusters import two_slots
from tests.weight_sync.workers import Peer

RECEIVERS = 2


@pytest.fixture(scope="package", params=["local", "ray"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with two_slots(request.param, deadline_seconds=120.0) as started:
        yield started


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
