"""A Ray that was started by its command may ask for a token, or not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = """
    from rlinf.scheduler import Cluster
    print("nodes:", Cluster(num_nodes=1).num_nodes)
"""
TOKEN = "0" * 64


class Machine:
    """A home directory, and the Ray that its user starts."""

    def __init__(self, directory: Path) -> None:
        self.token = directory / ".ray" / "auth_token"
        self.token.parent.mkdir(parents=True)
        self._directory = directory
        self._variables = {"HOME": str(directory), "RAY_TMPDIR": str(directory / "r")}
        (directory / "r").mkdir()

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        given = {n: v for n, v in os.environ.items() if n not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
        return subprocess.run(
            [sys.executable, *words], env={**given, **self._variables, **variables}, timeout=100,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def ray(self, *words: str, **variables: str) -> None:
        code = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
        done = self.run("-c", code, *words, **variables)
        assert done.returncode == 0, done.stderr

    def start(self, **variables: str) -> None:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        self.ray(
            "start", "--head", f"--port={port}", "--include-dashboard=false", "--num-cpus=1",
            **variables,
        )  # fmt: skip

    def join(self) -> str:
        """What a program says that joins it."""
        done = self.run("-c", textwrap.dedent(PROGRAM))
        return done.stdout + done.stderr


@pytest.fixture
def machine() -> Iterator[Machine]:
    pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(prefix="r") as place:  # short: sockets lie below it
        found = Machine(Path(place))
        try:
            yield found
        finally:
            subprocess.run(["pkill", "-9", "-f", place], check=False)


@pytest.mark.slow
def test_the_token_is_shown_to_who_asks_for_it(machine: Machine) -> None:
    machine.token.write_text(TOKEN)
    machine.start()
    told = machine.join()
    assert "joining the Ray at" in told
    assert "nodes: 1" in told, told
    machine.token.unlink()
    told = machine.join()
    assert "asks for a token, and there is none here; copy ~/.ray/auth_token" in told


@pytest.mark.slow
def test_no_token_is_shown_to_who_does_not_ask(machine: Machine) -> None:
    machine.start(RAY_AUTH_MODE="disabled")
    machine.token.write_text(TOKEN)
    assert "nodes: 1" in machine.join()
