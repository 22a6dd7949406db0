"""Two hosts that share no memory: what a worker gets and gives arrives whole."""

import json
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from tests.hosts import two_hosts, why_not

PROGRAM = """
    import json
    from pathlib import Path

    import torch

    from rlinf.scheduler import Channel, Cluster, NodePlacementStrategy
    from tests.scheduler.workers import Queuer, Talker

    cluster = Cluster(cluster_cfg={"num_nodes": 2})
    both = NodePlacementStrategy([0, 1])
    value = torch.arange(100_000.0)
    found = {}
    talkers = Talker.create_group().launch(cluster, both, "talkers")
    for rank in (0, 1):
        echo = talkers.execute_on(1 - rank).echo("talkers", rank)
        (returned,) = talkers.execute_on(rank).round_trip([value], "talkers", 1 - rank).wait()
        echo.wait()
        found[f"arguments and results of rank {rank}"] = torch.equal(returned[0], value)
    queuers = Queuer.create_group().launch(cluster, both, "queuers")
    for place in (0, 1):
        channel = Channel.create(f"on {place}", node_rank=place)
        queuers.execute_on(0).put(channel, [value]).wait()
        ((got,),) = queuers.execute_on(1).get(channel, 1).wait()
        channel.put(value)
        found[f"channel on {place}"] = torch.equal(got, value) and torch.equal(channel.get(), value)
    print(json.dumps(found))
    cluster.shutdown()
"""


@pytest.mark.slow
def test_a_block_never_leaves_its_host():
    pytest.importorskip("ray")
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as directory,
        two_hosts(Path(directory)) as (head, _),
    ):
        done = head.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], timeout=200)
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    found = json.loads(line)
    assert len(found) == 4
    assert all(found.values()), found
