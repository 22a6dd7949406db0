"""A run on one machine listens nowhere but on loopback and in private directories."""

from __future__ import annotations

import ipaddress
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.runners import reasoning_support
from tests.warm import ONE_THREAD, Warm

TWO_TRAINERS = (
    "cluster.runtime=ray",
    "cluster.cpu_devices_per_node=2",
    "cluster.component_placement={'rollout,reward': '0', actor: '0-1'}",
)
RESCALED = (
    "cluster.runtime=ray",
    "cluster.cpu_devices_per_node=2",
    "cluster.auto_scheduler=true",
    "cluster.component_placement={'rollout,actor': '0-1', reward: '1'}",
    "actor={type: fsdp, n_minibatches: 4, shuffle: false, order: length, optim: {lr: 1.0e-3}}",
    "rollout.prompts=8",
)


def sockets_of(pid: int) -> tuple[set[tuple[str, str]], set[Path]]:
    """Where a process and its descendants listen: (address, program) of TCP, paths of Unix."""
    owners: dict[str, str] = {}
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:  # it ended meanwhile
        return set(), set()
    for process in processes:
        try:
            program = " ".join(process.cmdline()[:2]) or process.name()
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                try:
                    target = os.readlink(descriptor)
                except OSError:
                    continue
                if target.startswith("socket:["):
                    owners[target[8:-1]] = program
        except (OSError, psutil.Error):
            continue  # it ended meanwhile
    network = {
        (address, owners[inode])
        for table in ("tcp", "tcp6")
        for address, inode in _listening(Path("/proc/net", table))
        if inode in owners
    }
    paths = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        listens = int(words[3], 16) & 0x10000
        if listens and len(words) > 7 and words[6] in owners and words[7].startswith("/"):
            paths.add(Path(words[7]))
    return network, paths


def _listening(table: Path) -> Iterator[tuple[str, str]]:
    for line in table.read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A":
            raw = bytes.fromhex(words[1].partition(":")[0])
            ordered = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
            yield str(ipaddress.ip_address(ordered)), words[9]


def is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def is_private(path: Path) -> bool:
    """Whether another user is kept out by a directory above a socket."""
    return any(parent.exists() and not parent.stat().st_mode & 0o011 for parent in path.parents)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="local"),
        pytest.param(TWO_TRAINERS, id="ray, two trainers", marks=pytest.mark.slow),
        pytest.param(RESCALED, id="ray, devices that move", marks=pytest.mark.slow),
    ],
)
def test_nothing_outside_of_the_machine_can_connect(tmp_path, overrides):
    if overrides:
        pytest.importorskip("ray")
    recipe = reasoning_support.write_recipe(tmp_path)
    words = ["train", str(recipe), "runner.total_steps=2", *overrides]
    environment = {**ONE_THREAD, "RLINF_OVERSUBSCRIBE_CPU_SLOTS": "1"}
    program = str(Path(sys.executable).with_name("rlinf"))
    words = [program, *words, "--run-dir", str(tmp_path / "run")]
    run = Warm(words, environment=environment, merged=True)
    network: set[tuple[str, str]] = set()
    exposed: set[Path] = set()
    while run.poll() is None:
        found, paths = sockets_of(run.pid)
        network |= found
        exposed |= {path for path in paths if path.exists() and not is_private(path)}
        time.sleep(0.2)
    assert run.returncode == 0, run.communicate()[0].decode()
    assert bool(network) == bool(overrides)
    assert not {entry for entry in network if not is_loopback(entry[0])}
    assert not exposed
