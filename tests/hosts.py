"""Hosts made of Linux namespaces: own network, processes, /tmp and /dev/shm each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_NETWORK = "10.203.77"
_COVERED = Path("/tmp")
_INIT = (
    "hostname $0; mount --make-rprivate /; mount -t tmpfs tmpfs /dev/shm; "
    "mount -t tmpfs tmpfs /tmp; echo ready; exec sleep infinity"
)


class Host:
    """One host; commands run on it with the repository and this interpreter in place."""

    def __init__(self, name: str, number: int, directory: Path) -> None:
        self.name = name
        self.ip = f"{_NETWORK}.{number}"
        self._variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(directory / "token"),
            "RAY_ADDRESS": f"{_NETWORK}.1:6379",
            "RAY_USAGE_STATS_ENABLED": "0",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        words = ["ip", "netns", "exec", name, "unshare", "--mount", "--pid", "--uts", "--ipc"]
        words += ["--fork", "--mount-proc", "--kill-child", "bash", "-c", _INIT, name]
        self._namespaces = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._namespaces.stdout is not None
        assert self._namespaces.stdout.readline() == "ready\n"
        children = Path(f"/proc/{self._namespaces.pid}/task/{self._namespaces.pid}/children")
        self._init = children.read_text().split()[0]

    def run(
        self, words: Sequence[str], *, timeout: float, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host."""
        enter = ["nsenter", "-t", self._init, "-m", "-p", "-u", "-i", "-n", *words]
        environment = {**os.environ, **self._variables}
        done = subprocess.run(
            enter, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done

    def ray(self, *words: str) -> bool:
        """Start Ray on the host; whether it came up."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words]
        command += [f"--node-ip-address={self.ip}", "--num-cpus=1"]
        command += ["--object-store-memory=100000000", "--disable-usage-stats"]
        return self.run(command, timeout=100, check=False).returncode == 0

    def close(self) -> None:
        """Take the power from the host."""
        self._namespaces.kill()
        self._namespaces.wait()


def why_not() -> str | None:
    """Why this machine cannot make hosts; None where it can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if _COVERED in Path(sys.executable).parents or _COVERED in Path(__file__).parents:
        return f"a checkout below {_COVERED} cannot be seen from a host, which has its own"
    try:
        made = subprocess.run(
            ["ip", "netns", "add", "rlinf-probe"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "the command ip is missing (Debian: apt-get install iproute2)"
    subprocess.run(["ip", "netns", "delete", "rlinf-probe"], capture_output=True, check=False)
    return None if made.returncode == 0 else f"no network namespaces: {made.stderr.strip()}"


@contextmanager
def two_hosts(directory: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts with one Ray cluster over both; the first is its head.

    Args:
        directory: For the cluster's token; not below /tmp, which every host has for itself.
    """
    names = [f"rlinf-{os.getpid()}-{number}" for number in (1, 2)]
    token = directory / "token"
    token.write_text("7" * 64)
    token.chmod(0o600)
    hosts: list[Host] = []
    try:
        for name in names:
            _ip("netns", "add", name)
        ends = [word for name in names for word in ("name", "eth0", "netns", name)]
        _ip("link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
        for number, name in enumerate(names, 1):
            _ip("-n", name, "address", "add", f"{_NETWORK}.{number}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", name, "link", "set", device, "up")
            hosts.append(Host(name, number, directory))
        head, other = hosts
        assert head.ray("--head", "--port=6379", "--include-dashboard=false")
        limit = time.monotonic() + 60
        while not other.ray(f"--address={head.ip}:6379"):
            assert time.monotonic() < limit, "the second host could not join"
        yield head, other
    finally:
        for host in hosts:
            host.close()
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
