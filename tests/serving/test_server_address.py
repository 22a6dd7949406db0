"""Addresses that cannot be served or reached are refused before anything heavy is imported."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from rlinf.errors import ConfigError
from rlinf.serving.server_address import require_listening, require_server


def test_what_is_free_and_what_listens_is_taken() -> None:
    require_listening("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        require_server(f"ws://127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1, port {port}: .*another --port"):
            require_listening("127.0.0.1", port)
    require_listening("127.0.0.1", port)
    with pytest.raises(ConfigError, match=f"no action server at ws://127.0.0.1:{port}: "):
        require_server(f"ws://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "host",
    ["192.0.2.1", "no-host.invalid", ".."],  # of RFC 5737 and RFC 2606; no name at all
)
def test_a_host_that_is_not_this_machine_needs_no_other_port(host: str) -> None:
    with pytest.raises(ConfigError, match=r"nearest: --host 127\.0\.0\.1, or 0\.0\.0\.0"):
        require_listening(host, 0)


@pytest.mark.parametrize("url", ["nonsense", "ws://", "http://127.0.0.1:8000", "ws://robot:99999"])
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="write ws://HOST:PORT"):
        require_server(url)


def test_a_server_that_no_machine_can_be_called_is_told() -> None:
    with pytest.raises(ConfigError, match=r"no action server at ws://\.\.:80: .*where it listens"):
        require_server("ws://..:80")


def test_looking_at_an_address_imports_no_torch() -> None:
    program = "import sys, rlinf.serving.server_address; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
