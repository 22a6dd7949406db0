"""Two Ray nodes on this machine: messages, channels, attaching, deaths."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap

import pytest

PROGRAM = """
    import json, os, signal, subprocess, sys

    import torch
    from ray.cluster_utils import Cluster as RayCluster

    from rlinf.scheduler import Channel, Cluster, NodePlacementStrategy
    from rlinf.scheduler.errors import WorkerDiedError
    from tests.scheduler.workers import Basic, Queuer, Talker

    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    machines = RayCluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    os.environ["CPATH"] = "/of/the/node"  # which a machine has before it joins
    machines.add_node(**node)
    os.environ["CPATH"] = "/of/the/driver"
    found = {}
    code = "from rlinf.scheduler import Cluster; print(Cluster().num_nodes)"
    environment = {**os.environ, "RAY_ADDRESS": machines.address}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True,
                          text=True, check=True, timeout=100)
    found["all nodes of a Ray without a cluster"] = done.stdout.split()[-1]
    far = {"label": "far", "node_ranks": 1,
           "env_configs": [{"node_ranks": 1, "python_interpreter_path": "/nowhere/python"}]}
    told = {"label": "told", "node_ranks": 1,
            "env_configs": [{"node_ranks": 1, "env_vars": [{"CPATH": "/configured"}]}]}
    cluster = Cluster(
        cluster_cfg={"num_nodes": 2, "address": machines.address, "node_groups": [far, told]}
    )
    try:
        Basic.create_group().launch(cluster, NodePlacementStrategy([0], "far"), "nowhere")
    except ValueError as error:
        found["interpreter"] = str(error)
    both = NodePlacementStrategy([0, 1])
    found["nodes"] = cluster.num_nodes

    talkers = Talker.create_group().launch(cluster, both, "talkers")
    values = [torch.ones(100_000), {"a": torch.zeros(3)}]
    echo = talkers.execute_on(1).echo("talkers", 0, 2)
    (got,) = talkers.execute_on(0).round_trip(values, "talkers", 1).wait()
    echo.wait()
    found["round trip"] = torch.equal(got[0], values[0])
    spread = talkers.spread(values[0], [("talkers", [0, 1])]).wait()
    found["broadcast"] = torch.equal(spread[1], values[0])
    several = Talker.create_group().launch(cluster, NodePlacementStrategy([0, 1, 1]), "several")
    for _ in range(3):
        spread = several.spread(values[0], [("several", [0, 1, 2])]).wait()
        found["broadcast"] &= all(torch.equal(each, values[0]) for each in spread)
        del spread  # a result is in memory of the worker that gave it
    found["busy blocks"] = several.execute_on(0).busy_blocks().wait()

    queuers = Queuer.create_group().launch(cluster, both, "queuers")
    options = {"near": {}, "far": {"node_rank": 1}, "spread": {"distributed": True}}
    for name, option in options.items():
        channel = Channel.create(name, maxsize=2, **option)
        putting = queuers.execute_on(0).stream(channel, 5, 100_000)
        found[name] = queuers.execute_on(1).drain(channel, 5).wait()[0]
        putting.wait()

    attached = '''
    from rlinf.scheduler import Channel, Cluster
    from rlinf.scheduler.worker import WorkerGroup
    from tests.scheduler.workers import Queuer
    Cluster()
    assert len(WorkerGroup.from_group_name(Queuer, "queuers").worker_info_list) == 2
    Channel.connect("near").put("from another process")
    '''
    code = "\\n".join(line.strip() for line in attached.splitlines())
    environment = {**os.environ, "RAY_ADDRESS": machines.address}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=100)
    found["attached"] = Channel.connect("near").get()

    mortal = Basic.create_group().launch(cluster, NodePlacementStrategy([0], "told"), "mortal")
    found["paths"] = mortal.environment("CPATH").wait()[0]["CPATH"]
    (pid,) = mortal.process_id().wait()
    waiting = talkers.execute_on(0).receive_from("mortal", 0)
    os.kill(pid, signal.SIGKILL)
    try:
        waiting.wait()
    except WorkerDiedError as error:
        found["death"] = "mortal:0" in str(error)
    print(json.dumps(found))
    cluster.shutdown()
    machines.shutdown()
"""


@pytest.mark.slow
def test_two_nodes():
    pytest.importorskip("ray")
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    with tempfile.TemporaryDirectory() as place:  # else what starts meanwhile joins these machines
        environment = {**os.environ, "RAY_TMPDIR": place}
        done = subprocess.run(program, env=environment, capture_output=True, text=True,
                              timeout=250, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    streamed = [0.0, 1.0, 2.0, 3.0, 4.0]
    found = json.loads(line)
    assert "'/nowhere/python' of cluster.node_groups" in found.pop("interpreter")
    assert found == {
        "all nodes of a Ray without a cluster": "2",
        "nodes": 2,
        "round trip": True,
        "broadcast": True,
        "busy blocks": [0],
        "near": streamed,
        "far": streamed,
        "spread": streamed,
        "attached": "from another process",
        "paths": "/configured:/of/the/node",
        "death": True,
    }
