"""One cluster per runtime for all scheduler tests: starting Ray costs seconds."""

from collections.abc import Iterator

import pytest

from rlinf.scheduler import Cluster, NodePlacementStrategy, Worker
from rlinf.scheduler.process import require_process
from rlinf.scheduler.worker_group import WorkerGroup
from tests.clusters import two_slots

DEADLINE_SECONDS = 240.0  # that a busy machine keeps, and that passes before the limit of a test


@pytest.fixture(scope="package", params=["local", "ray"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with two_slots(request.param, deadline_seconds=DEADLINE_SECONDS) as started:
        yield started


@pytest.fixture
def runtime(cluster: Cluster) -> str:
    return require_process().runtime


@pytest.fixture
def launch(cluster: Cluster) -> Iterator:
    """Launch groups of n workers on node 0 that are closed after the test."""
    groups: list[WorkerGroup] = []

    def start(worker_class: type[Worker], count: int, name: str, *args, **options) -> WorkerGroup:
        placement = options.pop("placement_strategy", NodePlacementStrategy([0] * count))
        group = worker_class.create_group(*args)
        groups.append(group)
        return group.launch(cluster, placement_strategy=placement, name=name, **options)

    yield start
    for group in groups:
        group._close()


@pytest.fixture(scope="package")
def shared(cluster: Cluster) -> Iterator:
    """Groups of three workers that tests share, because a process takes seconds to start."""
    groups: dict[type[Worker], WorkerGroup] = {}

    def get(worker_class: type[Worker]) -> WorkerGroup:
        if worker_class not in groups:
            groups[worker_class] = worker_class.create_group().launch(
                cluster, NodePlacementStrategy([0] * 3), name=f"shared{worker_class.__name__}"
            )
        return groups[worker_class]

    yield get
    for group in groups.values():
        group._close()


@pytest.fixture
def short_deadline(cluster: Cluster) -> Iterator:
    """Let the driver and some worker groups wait only briefly."""
    shortened: list[WorkerGroup] = []

    def shorten(*groups: WorkerGroup) -> None:
        for group in groups:
            group.set_deadline(1.0).wait()
            shortened.append(group)
        require_process().deadline_seconds = 1.0

    yield shorten
    require_process().deadline_seconds = DEADLINE_SECONDS
    for group in shortened:
        if group.worker_info_list:
            group.set_deadline(DEADLINE_SECONDS).wait()
