"""Two hosts that share neither memory nor files: messages arrive whole, trainings run on them."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.hosts import Host, two_hosts, why_not
from tests.runners import reasoning_support
from tests.runners import support as embodied_support

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


# Each is short, and equal to the bit on one host and on two: the same granularity, the same slots.
QUICKSTART = (
    "quickstart",
    "runner.total_env_steps=4096",
    "env.num_envs=4",
    "env.train.max_episode_steps=50",
    "rollout.steps=32",
    "actor.global_batch_size=64",
    "evaluation={interval: 100, episodes: 2, num_envs: 2, video_episodes: 0}",
)
ARITHMETIC = (
    "reasoning/arithmetic_grpo",
    "runner.total_steps=3",
    "warm_start.steps=20",
    "warm_start.batch_size=16",
    "warm_start.lr_sched.warmup_steps=5",
    "rollout.prompts=4",
    "rollout.group_size=4",
    "rollout.engine={type: hf, deterministic: true, block_size: 4}",
    "validation={prompts: 8, val_check_interval: 2}",
)
OVER_TWO = (
    "cluster.runtime=ray",
    "cluster.num_nodes=2",
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Path]]:
    """The head of two hosts, and a directory that both and this machine see."""
    pytest.importorskip("ray")
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as directory,
        two_hosts(Path(directory)) as (head, _),
    ):
        yield head, Path(directory)


@pytest.mark.slow
def test_a_block_never_leaves_its_host(hosts):
    head, _ = hosts
    done = head.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], timeout=200)
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    found = json.loads(line)
    assert len(found) == 4
    assert all(found.values()), found


def train(words: Sequence[str], run: Path) -> list[str]:
    rlinf = str(Path(sys.executable).with_name("rlinf"))
    common = ("logger.backends=[]", "cluster.cpu_devices_per_node=2")
    return [rlinf, "train", *words, *common, "--run-dir", str(run)]


def trained(recipe: Sequence[str], placement: str, hosts: tuple[Host, Path]) -> tuple[Path, Path]:
    """Run directories of a recipe on this machine alone and over two hosts.

    A host has a /tmp of its own, so nothing of the run is seen by the other one.
    """
    head, common = hosts
    name = recipe[0].replace("/", "-")
    alone, both = common / f"{name}-alone", common / f"{name}-both"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = train(recipe, alone)
    subprocess.run(words, env=environment, check=True, capture_output=True, timeout=300)
    placed = f"cluster.component_placement={placement}"
    head.run(train([*recipe, *OVER_TWO, placed], Path(f"/tmp/{name}")), timeout=600)
    head.run(["cp", "-r", f"/tmp/{name}", str(both)], timeout=60)
    return alone, both


@pytest.mark.slow
def test_the_robot_quickstart_over_two_hosts(hosts):
    alone, both = trained(QUICKSTART, "{'env,rollout': '0', actor: '2'}", hosts)
    embodied_support.assert_equal_runs(alone, both)


@pytest.mark.slow
def test_the_language_quickstart_over_two_hosts(hosts):
    alone, both = trained(ARITHMETIC, "{'rollout,reward': '0', actor: '2'}", hosts)
    reasoning_support.assert_equal_runs(alone, both)
    assert load_tokenizer_files(both / "model") == load_tokenizer_files(alone / "model")


def load_tokenizer_files(model: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in model.glob("tokenizer*")}
