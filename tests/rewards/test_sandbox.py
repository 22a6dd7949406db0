"""Attacks on the sandbox: each fails, and an honest program passes in the same sandbox after it."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import venv
from pathlib import Path

import psutil
import pytest

from rlinf.errors import ConfigError
from rlinf.rewards.sandbox import host
from rlinf.rewards.sandbox.host import Sandbox, find_interpreter
from rlinf.rewards.sandbox.running import Limits, SandboxError
from rlinf.rewards.sandbox.seccomp import build_filter
from tests.rewards.attacks import FAMILIES, Attack

LIMITS = Limits(
    cpu_seconds=1, wall_seconds=4, memory_bytes=256 * 2**20, processes=16, output_bytes=2**16
)
HONEST = (
    "values = list(map(int, input().split()))\nopen('note', 'w').write('x')\nprint(sum(values))"
)
QUICK = {
    "password file", "file of a user", "symbolic link", "environment of others",
    "open descriptors", "system directories", "socket of the internet", "local server",
    "unix socket", "pair that sends elsewhere", "name service", "kill the parents", "ptrace",
    "kill a process", "become root", "mount", "new namespaces", "processor", "errors", "memory",
    "large file", "many files", "processes", "sleep that heeds no signal",
}  # fmt: skip
"""One of each kind runs always, all of them among the slow tests."""
ATTACKS = [
    pytest.param(
        attack,
        id=f"{family}-{name}".replace(" ", "-"),
        marks=[] if name in QUICK else [pytest.mark.slow],
    )
    for family, attacks in FAMILIES.items()
    for name, attack in attacks.items()
]


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(LIMITS)


SLEEPER = """
import signal, time
signal.signal(signal.SIGUSR1, lambda *_: None)
print("ready", flush=True)
while True:
    time.sleep(99)
"""


@pytest.fixture
def facts(tmp_path, monkeypatch):
    """What stands outside and must stay as it is."""
    secret, victim = tmp_path / "secret-of-a-user", tmp_path / "victim"
    secret.write_text("secret")
    victim.write_text("unchanged")
    for path in (tmp_path, secret, victim):
        path.chmod(0o777)
    monkeypatch.setenv("RLINF_TEST_SECRET", "s3cr3t-of-the-host")
    sleeper = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
    assert sleeper.stdout.readline() == b"ready\n"
    servers = [socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    servers[0].bind(("127.0.0.1", 0))
    servers[1].bind(str(tmp_path / "socket"))
    servers[2].bind(f"\0rlinf-{os.getpid()}")
    datagrams.bind(f"\0rlinf-datagrams-{os.getpid()}")
    for server in servers:
        server.listen()
    yield {
        "secret_file": str(secret),
        "victim_file": str(victim),
        "secret_text": "s3cr3t-of-the-host",
        "victim_pid": sleeper.pid,
        "port": servers[0].getsockname()[1],
        "unix_socket": str(tmp_path / "socket"),
        "abstract_socket": f"rlinf-{os.getpid()}",
        "abstract_datagrams": f"rlinf-datagrams-{os.getpid()}",
    }
    for server in (*servers, datagrams):
        server.close()
    ended = sleeper.poll() is not None
    sleeper.kill()
    sleeper.communicate()
    assert not ended, "an attack has ended a process of the host"


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_an_honest_program_passes(sandbox):
    result = sandbox.run(HONEST, stdin=b"1 2 3\n")
    assert (result.ending, result.code, result.output) == ("exited", 0, b"6\n")


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_fails(sandbox, facts, attack: Attack):
    before = {process.pid for process in descendants()}
    program = f"HOST = {facts!r}\n{attack.source}"
    if attack.ending == "cpu_time":  # which a busy machine takes longer to give
        sandbox = Sandbox(dataclasses.replace(LIMITS, wall_seconds=60))
    result = sandbox.run(program)
    assert b"ESCAPED" not in result.output
    assert result.ending == attack.ending, (result.code, result.errors[-500:])
    assert b"SyntaxError" not in result.errors
    assert b"NameError" not in result.errors
    assert Path(facts["victim_file"]).read_text() == "unchanged"
    assert {process.pid for process in descendants()} == before
    assert sandbox.run(HONEST, stdin=b"4 5").output == b"9\n"


@pytest.mark.parametrize("attack", [param for param in ATTACKS if param.values[0].control])
def test_the_same_attack_succeeds_outside(facts, tmp_path, attack: Attack):
    """Otherwise the tests above would show nothing."""
    outside = subprocess.run(
        [sys.executable, "-c", f"HOST = {facts!r}\n{attack.source}"],
        check=False,
        capture_output=True,
        timeout=20,
        cwd=tmp_path,
    )
    assert b"ESCAPED" in outside.stdout, outside.stderr.decode()


def test_processes_in_the_background_end_with_the_program(sandbox):
    mark = f"left-behind-{os.getpid()}-{time.monotonic_ns()}"
    program = f"""
import os, subprocess, sys
for _ in range(3):
    subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1000)  # {mark}"], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time
        time.sleep(1000)
    os._exit(0)
print("started")
"""
    before = {process.pid for process in descendants()}
    result = sandbox.run(program)
    assert result.output == b"started\n", result.errors
    assert {process.pid for process in descendants()} == before
    assert not [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if mark in " ".join(process.info["cmdline"] or ())
    ]


def test_the_sandbox_ends_with_its_host():
    """Killed without warning, the host leaves nothing behind."""
    mark = f"orphan-{os.getpid()}-{time.monotonic_ns()}"
    script = f"""
from rlinf.rewards.sandbox.host import Sandbox
from rlinf.rewards.sandbox.running import Limits
Sandbox(Limits(wall_seconds=60)).run('''
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)  # {mark}"])
time.sleep(1000)''')
"""

    def marked() -> list[int]:
        return [
            process.pid
            for process in psutil.process_iter(["cmdline", "ppid"])
            if f"# {mark}" in (process.info["cmdline"] or [""])[-1]
            and "Sandbox" not in (process.info["cmdline"] or [""])[-1]
        ]

    victim = subprocess.Popen([sys.executable, "-c", script])
    assert eventually(marked)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert eventually(lambda: not marked())


def eventually(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_what_a_program_may_do(sandbox):
    program = """
import json, math, random, re, subprocess, sys, tempfile, threading, asyncio
with tempfile.NamedTemporaryFile("w") as file:
    file.write("x")
thread = threading.Thread(target=print, args=("thread",))
thread.start(); thread.join()
print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True).stdout)
async def main():
    await asyncio.sleep(0)
    return "loop"
print(asyncio.run(main()))
print(len(open("data.txt").read()), file=sys.stderr)
"""
    with sandbox.start(["main.py"], files={"main.py": program, "data.txt": "ä" * 5}) as process:
        host.supervise([process], until=process)
        result = process.result()
    assert result.succeeded, result.errors
    assert result.output.splitlines() == [b"thread", b"b'child\\n'", b"loop"]
    assert result.errors == b"5\n"


def test_a_large_input_arrives_whole(sandbox):
    result = sandbox.run("import sys; print(len(sys.stdin.read()))", stdin=b"x" * 5_000_000)
    assert result.output == b"5000000\n"


@pytest.mark.parametrize(
    ("program", "ending", "code"),
    [
        ("raise SystemExit(3)", "exited", 3),
        ("import os; os._exit(0)", "exited", 0),
        ("import os; os.kill(os.getpid(), 11)", "signalled", -11),
        ("import os; os.abort()", "signalled", -6),
        ("import os; os.kill(os.getpid(), 9)", "signalled", -9),
    ],
)
def test_how_a_program_ends(sandbox, program, ending, code):
    result = sandbox.run(program)
    assert (result.ending, result.code) == (ending, code)


def test_sandboxes_side_by_side(sandbox):
    results = {}

    def run(number: int) -> None:
        results[number] = sandbox.run(f"import time; time.sleep(0.1); print({number})").output

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: f"{number}\n".encode() for number in range(6)}


def test_check_refuses_where_a_wall_cannot_be_built():
    """The filter forbids namespaces inside a sandbox, as a container does."""
    blocked = subprocess.run(
        [sys.executable, "-c", BLOCKED], check=False, capture_output=True, text=True, timeout=60
    )
    assert blocked.stdout.startswith("ConfigError: the sandbox cannot be built: new namespaces")
    assert "unprivileged user namespaces" in blocked.stdout


BLOCKED = """
import ctypes
from rlinf.rewards.sandbox.seccomp import build_filter
from rlinf.rewards.sandbox.host import Sandbox
from rlinf.errors import ConfigError
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
libc, code, sandbox = ctypes.CDLL(None), build_filter(), Sandbox()
# The host itself needs memfd_create, which the filter of programs refuses: let it pass.
import struct
units = [struct.unpack("=HBBI", code[at:at + 8]) for at in range(0, len(code), 8)]
wanted = {319, 279}
units = [(0x15, 0, 1, 0xFFFF) if unit[0] == 0x15 and unit[3] in wanted else unit for unit in units]
code = b"".join(struct.pack("=HBBI", *unit) for unit in units)
program = Program(len(code) // 8, code)
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
try:
    sandbox.check()
    print("accepted")
except ConfigError as error:
    print("ConfigError:", error)
"""


def test_check_passes_here(sandbox):
    sandbox.check()


def test_a_sandbox_that_does_not_hold_is_noticed(monkeypatch, sandbox):
    monkeypatch.setattr(host, "_PROBE", "print('seen: /etc/passwd')")
    with pytest.raises(ConfigError, match="does not hold"):
        sandbox.check()


def test_a_broken_wall_is_an_error_and_the_program_is_not_run(sandbox, tmp_path):
    class Broken(Sandbox):
        def __init__(self):
            super().__init__(LIMITS)
            self._interpreter = type(self._interpreter)(
                self._interpreter.executable, (*self._interpreter.readable, "/no/such/place")
            )

    with pytest.raises(SandboxError, match="/no/such/place"):
        Broken().run("print('ran')")


def test_an_unknown_machine_is_refused():
    with pytest.raises(ConfigError, match="riscv64"):
        build_filter("riscv64")
    assert len(build_filter("aarch64")) % 8 == 0


def test_an_interpreter_of_its_own_may_lie_under_tmp():
    # TMPDIR may name another directory.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        prefix = f"{folder}/own"
        venv.create(prefix, symlinks=True)
        own = Sandbox(LIMITS, python=f"{prefix}/bin/python")
        own.check()
        result = own.run("import sys, tempfile; print(sys.prefix, tempfile.gettempdir())")
    assert result.output.decode().split() == [prefix, "/box"]


def test_an_interpreter_that_shows_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\necho \'["{tmp_path}", "{tmp_path}"]\'\n')
    interpreter.chmod(0o755)
    with pytest.raises(ConfigError, match="would be shown"):
        find_interpreter(str(interpreter))
    with pytest.raises(ConfigError, match="cannot run"):
        find_interpreter(str(tmp_path / "none"))


def test_a_program_that_is_no_interpreter_is_refused():
    with pytest.raises(ConfigError, match="/bin/true is no interpreter of Python"):
        find_interpreter("/bin/true")


@pytest.mark.slow
def test_the_attacks_fail_for_an_ordinary_user_as_well(tmp_path):
    """Root needs no user namespace; everybody else does, which is another way through the code."""
    if os.geteuid() != 0:
        pytest.skip("the tests above run as an ordinary user already")
    python = "/usr/bin/python3"
    if not os.access(python, os.X_OK):
        pytest.skip(f"the tests' own interpreter may be root's alone, and there is no {python}")
    root = Path(host.__file__).parents[3]
    script = tmp_path / "ordinary.py"
    script.write_text(ORDINARY)
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:  # how many are private depends on who runs the tests
        if parent.stat().st_mode & 0o011 != 0o011:
            parent.chmod(parent.stat().st_mode | 0o011)
    done = subprocess.run(
        [python, str(script), str(root)],
        check=False,
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=250,
        cwd="/",
        env={"HOME": "/nonexistent"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.split() == ["all", "fail"]


ORDINARY = """
import os, sys
sys.path.insert(0, sys.argv[1])
from rlinf.rewards.sandbox.host import Sandbox
from rlinf.rewards.sandbox.running import Limits
from tests.rewards.attacks import FAMILIES
sandbox = Sandbox(Limits(cpu_seconds=1, wall_seconds=4.0, memory_bytes=256 * 2**20, processes=16,
                         output_bytes=2**16))
sandbox.check()
facts = dict(secret_file="/etc/hostname", victim_file="/var/tmp/intruder", secret_text="s3cr3t",
             victim_pid=os.getpid(), port=9, unix_socket="/none", abstract_socket="none",
             abstract_datagrams="none")
os.environ["SECRET"] = "s3cr3t"
for family, attacks in FAMILIES.items():
    for name, attack in attacks.items():
        result = sandbox.run(f"HOST = {facts!r}\\n{attack.source}")
        assert b"ESCAPED" not in result.output, (family, name, result)
        assert result.ending == attack.ending, (family, name, result)
        assert sandbox.run("print(input())", stdin=b"honest").output == b"honest\\n"
print("all fail")
"""
