"""Joining a Ray that runs, or starting one, and how it ends with the program."""

from __future__ import annotations

import atexit
import logging
import os
import resource
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants, services, worker
from ray._private.node import Node
from ray._private.state import GlobalState
from ray._private.utils import get_ray_address_file
from ray.job_config import JobConfig

from rlinf.scheduler.cluster_config import ClusterConfig
from rlinf.scheduler.errors import SchedulerUsageError
from rlinf.scheduler.runtime.launch import program_paths
from rlinf.scheduler.transport.cluster_files import (
    LONGEST_SOCKET,
    SHARED_MEMORY,
    shared_memory_directory,
    socket_root,
)

NAMESPACE = "RLinf"
ADDRESS_VARIABLE = "RLINF_RAY_ADDRESS"
START_VARIABLE = "RAY_raylet_start_wait_time_s"
"""Of Ray: seconds that its raylet may take to start."""
_left_behind = threading.Event()
control_lost = threading.Event()
"""Set where the program is asked, by SIGTERM, to end because Ray's control process did."""
_ANSWER_SECONDS = 2.0
_SPEAK_SECONDS = 10.0  # of a Ray on a busy machine
_HTTP2_HEAD, _HTTP2_SETTINGS = 9, 4  # bytes before a frame, of which the fourth is its kind
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _HTTP2_SETTINGS, *bytes(5)))
_KEPT_SESSIONS, _KEPT_SECONDS = 10, 3 * 86_400
_OBJECT_STORE_BYTES = 128 << 20  # our payloads do not go through it
_START_ONE = "start one there with `ray start --head`, or one of its own with cluster.address=local"
_STARTS = 3
_SOCKET = "ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest path of Ray's in the directory that it gets, by its length; it refuses to start where
that is too long for a socket."""
log = logging.getLogger(__name__)


class _Job(JobConfig):  # type: ignore[misc]
    """A program whose workers import from where it does, in the same order.

    Ray puts one path after the other before all others, and adds two that it chooses itself.
    """

    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self._paths = paths

    def _serialize(self) -> Any:
        self._py_driver_sys_path = self._paths[::-1]
        return super()._serialize()


def connect(config: ClusterConfig) -> None:
    """Join the Ray cluster that was named, else start one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    _check_open_files()
    address = config.address or os.environ.get("RAY_ADDRESS")
    by = " (RAY_ADDRESS)" if address and not config.address else ""
    if not address and (address := _started_by_command()):
        print(
            f"joining the Ray at {address}, which was started on this machine; for one of its own: "
            "cluster.address=local",
            flush=True,
        )
    # What the driver can import its workers can import, too.
    paths = [path for part in program_paths() for path in part]
    common: dict[str, Any] = {"namespace": NAMESPACE, "logging_level": "WARNING"}
    if modules := _shipped_code():
        # Where the driver has the package itself is looked behind what is sent.
        behind = [path for path in paths if Path(path, "rlinf").is_dir()]
        paths = [path for path in paths if path not in behind]
        variables = {"PYTHONPATH": os.pathsep.join(behind)} if behind else {}
        common["runtime_env"] = {"py_modules": [modules], "env_vars": variables}
    common["job_config"] = _Job(paths)
    if address and address != "local":
        what = f"no Ray cluster could be joined at {address}{by}"
        _require_answer(address, what)
        _show_token(address)
        with (
            _explained(what, _START_ONE),
            _keeping_signals(),
        ):
            ray.init(address=address, **common)
        return
    if config.num_nodes > 1:
        raise SchedulerUsageError(
            f"cluster.num_nodes is {config.num_nodes}, but no Ray was started on this machine, and "
            "cluster.address names none. Run `ray start` on every machine, this one included, or "
            "set cluster.address (or RAY_ADDRESS). On one machine: num_nodes=1."
        )
    _start_own(common)


def _require_answer(address: str, what: str) -> None:
    """Refuse an address where nothing listens, or something else than Ray: Ray tries one for
    minutes, in a call that no signal ends, and writes of each attempt."""
    host, _, port = address.rpartition(":")
    if "://" in host or not port.isdecimal():  # a word, as `auto`, or another protocol
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS) as connection:
            speaks = "RAY_USE_TLS" in os.environ or _speaks_http2(connection)
    except (OSError, ValueError, OverflowError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise SchedulerUsageError(f"{what}: {said}; {_START_ONE}") from error
    if not speaks:
        raise SchedulerUsageError(f"{what}: what listens there is no Ray; {_START_ONE}")


def _speaks_http2(connection: socket.socket) -> bool:
    """Whether a server answers as Ray's control process does, by gRPC: settings, which are the
    first frame of HTTP/2 (RFC 9113, §3.4), come at once."""
    connection.settimeout(_SPEAK_SECONDS)
    head = b""
    with suppress(OSError):
        connection.sendall(_HTTP2_PREFACE)
        while len(head) < _HTTP2_HEAD and (more := connection.recv(_HTTP2_HEAD - len(head))):
            head += more
    return len(head) == _HTTP2_HEAD and head[3] == _HTTP2_SETTINGS


def _quiet_about_tokens() -> None:
    """Ray warns that a cluster is protected by a token; that is as it should be."""
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)


def _show_token(address: str) -> None:
    """Show a Ray that asks for a token the one of this user, as each asks that is started once
    there is one: Ray does so itself only where it has looked for the cluster. One that does not ask
    would take nothing from who shows it."""
    if "RAY_AUTH_MODE" in os.environ or not _asks_for_token(address):
        return
    from ray._private.authentication import authentication_token_setup as setup

    _quiet_about_tokens()
    if not setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
        raise SchedulerUsageError(
            f"the Ray at {address} asks for a token, and there is none here; copy "
            "~/.ray/auth_token of the machine that it was started on to the same place"
        )


def _asks_for_token(address: str) -> bool:
    """Whether a Ray refuses who shows no token; False, too, of one that does not answer."""
    try:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.exceptions import AuthenticationError
    except ImportError:  # a version without tokens
        return False
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError):
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
        try:
            with _without_stderr():  # of the refusal it writes a line
                GcsClient(address=address)
        except AuthenticationError:
            return True
        except Exception:  # noqa: BLE001 - joining says what is wrong
            return False
    return False


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Let what is not Python write nothing."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _start_own(common: dict[str, Any]) -> None:
    """Start a Ray of this program's own."""
    _quiet_about_tokens()
    place = _private_directory() / "ray"
    remove_old_sessions(place)
    # Seconds until its first process listens.
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")
    # Its control process would keep kilobytes of every call, for a dashboard that is not there.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    busy = (
        "where the machine is busy or slow, let it finish other work first; a run on one machine "
        "does without Ray: cluster.runtime=local. Ray's own logs are in "
        f"{place / 'session_latest' / 'logs'}"
    )
    # Ray looks only whether /dev/shm has room, and not whether it can be written.
    shared = shared_memory_directory()
    start = partial(
        ray.init,
        address="local",
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _plasma_directory=None if shared == SHARED_MEMORY else str(shared),
        _temp_dir=str(place),
        **common,
    )
    with on_loopback(), _explained("Ray did not start", busy), _keeping_signals():
        _on_lasting_thread(partial(_start_patiently, start, place))
    # For processes that this one starts, which a later `Cluster()` of theirs attaches to.
    os.environ[ADDRESS_VARIABLE] = ray.get_runtime_context().gcs_address


class _EndedAtOnceError(Exception):
    """A process of Ray has ended before this node was known to it."""


def _start_patiently(start: Callable[[], object], place: Path) -> None:
    """Start Ray, and again where its raylet ends at once: on a busy machine it gives up what it
    waits for after a time that cannot be set."""
    before = {child.pid for child in psutil.Process().children()}
    for number in range(1, _STARTS + 1):
        try:
            with _watching_raylet(), _in_own_sessions(), _what_is_asked_for():
                start()
            return
        except Exception as error:
            for child in _processes(place, before):
                with suppress(psutil.Error):
                    child.kill()
            if number == _STARTS or not isinstance(error, _EndedAtOnceError):
                raise
            log.warning("Ray is started again: %s", error)


@contextmanager
def _in_own_sessions() -> Iterator[None]:
    """Keep from Ray's processes, and the workers that they start, what signals the whole group of
    the program, as a terminal that hangs up, `timeout` and batch systems do: the program could
    commit nothing any more. The kernel ends them with the program all the same."""
    started = services.ConsolePopen
    services.ConsolePopen = partial(started, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = started


@contextmanager
def _what_is_asked_for() -> Iterator[None]:
    """Start neither autoscaler nor dashboard server, for which Ray has no switch: nobody asks them
    anything here, they hold a hundred megabytes, and a start waits seconds for them."""
    monitor, server = Node.start_monitor, services.start_api_server
    Node.start_monitor = lambda node: None
    services.start_api_server = lambda *_, **__: (None, None)
    try:
        yield
    finally:
        Node.start_monitor, services.start_api_server = monitor, server


@contextmanager
def _watching_raylet() -> Iterator[None]:
    """Raise where a raylet ends that is waited for, or what it registers with: Ray waits for it as
    long as for one that is slow, in a call that nothing interrupts."""
    found = services.get_node

    def get_node(address: str, node: str) -> Any:
        seconds = float(os.environ.get(START_VARIABLE, "300"))
        state, end = GlobalState(), time.monotonic() + seconds
        state._initialize_global_state(services._get_gcs_client_options(address))
        while True:
            for name in ("gcs_server", "raylet"):
                if not _runs(name):
                    raise _EndedAtOnceError(f"its {name} ended while it started")
            if any(each["NodeID"] == node for each in state.node_table()):
                break
            if time.monotonic() > end:
                raise TimeoutError(f"its raylet did not start within {seconds:g} s")
            time.sleep(0.05)
        return found(address, node)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = found


def _runs(name: str) -> bool:
    """Whether a process of that name is there that this one has started."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.name() == name and child.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _processes(place: Path, before: set[int]) -> list[psutil.Process]:
    """Processes of a Ray with its files there, which this one has started since ``before``."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended
            if child.pid not in before and any(str(place) in word for word in child.cmdline()):
                found += [*child.children(recursive=True), child]
    return found


def _on_lasting_thread(start: Callable[[], object]) -> None:
    """Start processes from a thread that lives as long as this process: the kernel ends those of
    Ray with the thread that started them, not with its process."""
    if threading.current_thread() is threading.main_thread():
        start()
        return
    started: Future[object] = Future()

    def run() -> None:
        try:
            started.set_result(start())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            started.set_exception(error)
            return
        threading.Event().wait()

    threading.Thread(target=run, name="rlinf-ray", daemon=True).start()
    started.result()


def control_process() -> int | None:
    """Number of the process by which a Ray that this program started is held together; None where
    it joined one."""
    started = getattr(worker._global_node, "all_processes", {})
    found = started.get(ray_constants.PROCESS_TYPE_GCS_SERVER) or [None]
    return None if found[0] is None else int(found[0].process.pid)


def control_ended() -> bool:
    """Whether the control process of a Ray that this program started is gone."""
    started = getattr(worker._global_node, "all_processes", {})
    found = started.get(ray_constants.PROCESS_TYPE_GCS_SERVER, [])
    return any(each.process.poll() is not None for each in found)


def end_without_control() -> None:
    """End the processes of a Ray that this program started and whose control process is gone.

    Whatever else is asked of such a Ray waits for that process for a minute, and then has Ray end
    the whole program; and the library crashes when its own threads are ended at exit. So the
    program is to :func:`leave`, and does so at its exit at the latest.
    """
    _left_behind.set()
    atexit.unregister(worker.shutdown)
    atexit.register(leave)
    node = worker._global_node
    children: list[psutil.Process] = []
    for started in node.all_processes.values():
        for each in started:
            with suppress(psutil.Error):  # it has ended
                children += psutil.Process(each.process.pid).children(recursive=True)
    node.kill_all_processes(check_alive=False, allow_graceful=False)
    for child in children:
        with suppress(psutil.Error):
            child.kill()


def leave(code: int = 1) -> None:
    """End this process where its Ray can no longer be ended, or a signal came, after all other exit
    functions."""
    if not _left_behind.is_set():
        return
    atexit.unregister(leave)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def join_address() -> str | None:
    """Where the Ray cluster is that a process of this environment belongs to; None: nowhere."""
    named = os.environ.get("RAY_ADDRESS") or os.environ.get(ADDRESS_VARIABLE)
    return named or _started_by_command()


def _started_by_command() -> str | None:
    """Address of a Ray that this user, or root, has begun on this machine by ``ray start``, and
    that answers.

    Ray's own search goes through the processes of the machine instead, and finds those of other
    users, and those that programs have begun for themselves, which are not to be joined.
    """
    record = Path(get_ray_address_file(None))
    with suppress(OSError, ValueError):
        if record.stat().st_uid in {0, os.getuid()}:
            address = record.read_text(encoding="utf-8").strip()
            host, _, port = address.rpartition(":")
            # The record of a Ray that was killed stays.
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
            return address
    return None


def join(address: str) -> None:
    """Connect to a Ray cluster as another process of it."""
    alone = address.startswith("127.0.0.1:")
    _show_token(address)
    with on_loopback() if alone else nullcontext():
        ray.init(address=address, log_to_driver=False)


def _check_open_files() -> None:
    """Refuse a bound on open files with which Ray starts and soon fails."""
    least, (soft, _) = 256, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < least:
        raise SchedulerUsageError(
            f"a process may open {soft} files here, Ray needs {least} or more: ulimit -n 1024; a "
            "run on one machine does without Ray: cluster.runtime=local"
        )


@contextmanager
def _keeping_signals() -> Iterator[None]:
    """Leave SIGTERM to the program where it has a handler, else end it: Ray puts handlers in its
    place, from Python and from C++, and the latter aborts what has not ended after three seconds.
    A SIGTERM that Ray's handler took meanwhile is given to the program's, and what was to be
    started is given up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    asked = False
    try:
        yield
    except SystemExit as end:
        if end.code != signal.SIGTERM:
            raise
        asked = True
    finally:
        default = before is None or before == signal.SIG_DFL
        signal.signal(signal.SIGTERM, _exit_by_signal if default else before)
    if asked:
        signal.raise_signal(signal.SIGTERM)
        raise KeyboardInterrupt


@contextmanager
def holding_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait for the end of something short that has to be done whole."""
    if threading.current_thread() is not threading.main_thread():  # they interrupt that one alone
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in held:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
    for each in came:
        signal.raise_signal(each)


def _exit_by_signal(number: int, frame: object) -> None:
    """End the program, after its exit functions, with the status of what a signal ended: a wait in
    Ray makes another one of what is raised here."""
    _left_behind.set()
    atexit.register(leave, 128 + number)
    sys.exit(128 + number)


@contextmanager
def _explained(what: str, help_text: str) -> Iterator[None]:
    """Say what failed, and what helps, where Ray raises; it raises bare exceptions, too."""
    try:
        yield
    except BaseException as error:
        with suppress(Exception):  # what had started ends
            ray.shutdown()
        if not isinstance(error, Exception):
            raise
        said = " ".join(str(error).split()) or type(error).__name__
        raise SchedulerUsageError(f"{what}: {said.rstrip('.')}; {help_text}") from error


def _private_directory() -> Path:
    """For Ray's logs and sockets: it lets every user of the machine into its own directory."""
    name = f"rlinf-{os.getuid()}"
    place = socket_root(LONGEST_SOCKET - len(f"/{name}/{_SOCKET}")) / name
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    found = place.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return place
    return Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=place.parent))


def remove_old_sessions(place: Path) -> None:
    """Remove logs that nobody will read: Ray keeps those of every run, under its driver's number.

    The newest ten stay, and what is younger than three days, or of a driver that runs.
    """
    sessions = []
    for each in place.glob("session_*_*"):
        with suppress(OSError):
            if each.is_dir() and not each.is_symlink():
                sessions.append((each.stat().st_mtime, each))
    for changed, session in sorted(sessions, reverse=True)[_KEPT_SESSIONS:]:
        driver = session.name.rpartition("_")[2]
        runs = driver.isdecimal() and Path("/proc", driver).exists()
        if not runs and time.time() - changed > _KEPT_SECONDS:
            shutil.rmtree(session, ignore_errors=True)


@contextmanager
def on_loopback() -> Iterator[None]:
    """Let a Ray that starts now, and is of this machine alone, listen on loopback.

    Its switch for that is named after the systems where it is the default. Ray reads the variable
    when it is imported, so this process, which may have, is told as well.
    """
    switch = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before = os.environ.get(switch), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[switch], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        os.environ.pop(switch)
        if before[0] is not None:
            os.environ[switch] = before[0]
        ray_constants.ENABLE_RAY_CLUSTER = before[1]


def _shipped_code() -> str | None:
    """Directory of the package to send to other machines, by ``RLINF_CODE_WORKING_DIR``."""
    setting = os.environ.get("RLINF_CODE_WORKING_DIR", "0")
    if setting in ("", "0"):
        return None
    if setting == "auto":
        return str(Path(__file__).resolve().parents[2])
    package = Path(setting).resolve() / "rlinf"
    if not package.is_dir():
        raise SchedulerUsageError(
            f"RLINF_CODE_WORKING_DIR is {setting!r}, but {package} is no directory; write auto for "
            "this package, a directory that holds rlinf, or 0"
        )
    return str(package)
