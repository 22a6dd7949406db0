"""Started as a script for every sandboxed program: builds the walls, then starts the program.

Three processes: the *launcher*, which the host started and may end; *init*, the first process of
the new process namespace, with whose end the kernel ends all others in it; and the *program*.
Imports the standard library alone. The host describes the work in JSON (see ``host.py``) and reads
what became of it from the status descriptor, which the program does not inherit.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import sys
from typing import Any

NOBODY = 65534
FIRST_FREE_USER = 0x70000000

_CLONE_NEWNS, _CLONE_NEWCGROUP, _CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
_CLONE_NEWIPC, _CLONE_NEWUSER = 0x8000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_NAMESPACES = (
    _CLONE_NEWNS | _CLONE_NEWCGROUP | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
)

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2

_OLD_ROOT = "/.old"
_LOOK_SECONDS = 0.02
_HIGH = 100
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


class StepError(Exception):
    """A wall could not be built; the text says which and why."""


def _check(result: int, step: str) -> None:
    if result < 0:
        raise StepError(f"{step}: {os.strerror(ctypes.get_errno())}")


def _prctl(option: int, argument: Any, *, step: str, more: Any = 0) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(argument), more, 0, 0), step)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), data.encode() or None)
    _check(result, f"mount {target}")


def _make_read_only(path: str) -> None:
    """Make the mount at a path read-only, with all mounts below it."""

    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]

    attributes = Attributes(_MS_RDONLY | _MS_NOSUID | _MS_NODEV, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        path.encode(),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _check(result, f"make {path} read-only (mount_setattr, Linux 5.12 or newer)")


def _enter_namespaces() -> int:
    """Leave the namespaces of the host; return the user id that the program gets.

    Root needs no user namespace and takes an id that owns nothing and that no other sandbox has.
    Anybody else becomes the only user of a new user namespace, which gives the right to the rest.
    """
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        _check(_libc.unshare(_NAMESPACES), "new namespaces (unshare, as root)")
        return FIRST_FREE_USER + os.getpid()
    _check(_libc.unshare(_NAMESPACES | _CLONE_NEWUSER), "new namespaces (unshare)")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError as error:
            raise StepError(f"user namespace ({name}): {error.strerror}") from error
    return NOBODY


def _build_root(spec: dict[str, Any], user: int) -> int:
    """Make a root directory with the interpreter, a few devices and an empty scratch directory.

    Returns:
        Descriptor of the list of processes, which the program must not get.
    """
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,nr_inodes=1k,mode=755")
    os.mkdir("/tmp" + _OLD_ROOT)
    pivot_root = _PIVOT_ROOT[os.uname().machine]
    result = _libc.syscall(ctypes.c_long(pivot_root), b"/tmp", b"/tmp" + _OLD_ROOT.encode())
    _check(result, "pivot_root")
    os.chdir("/")
    for path in spec["readable"]:
        _show(path)
    os.mkdir("/dev")
    for path in _DEVICES:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        _mount(_OLD_ROOT + path, path, None, _MS_BIND)
    scratch = spec["scratch"]
    os.mkdir(scratch)
    options = f"size={spec['scratch_bytes']},nr_inodes=4k,mode=700,uid={user},gid={user}"
    _mount("tmpfs", scratch, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options)
    if not os.path.lexists("/tmp"):  # where an interpreter is that is shown
        os.symlink(scratch, "/tmp")
    processes = _open_process_list()
    _check(_libc.umount2(_OLD_ROOT.encode(), _MNT_DETACH), "leave the root of the host")
    os.rmdir(_OLD_ROOT)
    flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV
    _mount(None, "/", None, flags)
    os.chdir(scratch)
    return processes


def _open_process_list() -> int:
    """Return a descriptor of the process list of this namespace, which stands at no path."""
    os.mkdir("/proc")
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    descriptor = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    _check(_libc.umount2(b"/proc", _MNT_DETACH), "hide /proc")
    os.rmdir("/proc")
    return descriptor


def _show(path: str) -> None:
    """Show a path of the host at the same place, read-only."""
    source = _OLD_ROOT + path
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    _mount(source, path, None, _MS_BIND | _MS_REC)
    _make_read_only(path)


def _drop_privileges(user: int) -> None:
    """Become a user without any right, for good."""
    last = int(_read("/proc/sys/kernel/cap_last_cap")) if os.path.exists("/proc/sys") else 63
    for capability in range(last + 1):
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # past the last one that this kernel has
    if os.geteuid() == 0:
        os.setgroups([])
        try:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError:  # a container that knows fewer users
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, nothing), "drop capabilities")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, step="no new privileges")
    if os.geteuid() == 0:
        raise StepError("drop privileges: still root")


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # The second second of processor time kills what ignores the signal of the first.
        slack = 1 if name == "RLIMIT_CPU" and bound != hard else 0
        resource.setrlimit(kind, (bound, bound + slack))


def _install_filter(code: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    program = Program(len(code) // 8, code)
    pointer = ctypes.byref(program)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, step="system call filter", more=pointer)


def _start_program(spec: dict[str, Any], user: int) -> None:
    """Turn this process into the program; returns only by an exception."""
    os.setsid()
    # Out of the way of the numbers that the program is to find them at.
    spec["status"] = fcntl.fcntl(spec["status"], fcntl.F_DUPFD_CLOEXEC, _HIGH)
    sources = [fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, _HIGH) for source in spec["descriptors"]]
    for target, source in enumerate(sources):
        os.dup2(source, target, inheritable=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _set_limits(spec["limits"])
    _drop_privileges(user)
    _install_filter(bytes.fromhex(spec["filter"]))
    os.execve(spec["command"][0], spec["command"], spec["environment"])


def _be_init(spec: dict[str, Any], user: int, lifeline: int) -> None:
    """Build the walls, start the program, report how it ended; everything else ends with us."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, step="follow the launcher")
    if select.select([lifeline], [], [], 0)[0]:
        os._exit(1)  # the launcher was gone before we could follow it
    _check(_libc.sethostname(b"sandbox", 7), "host name")
    processes = _build_root(spec, user)
    os.umask(0o022)
    for name, text in spec["files"].items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    program = os.fork()
    if program == 0:
        _guarded(spec, lambda: _start_program(spec, user))
    for descriptor in set(spec["descriptors"]):
        os.close(descriptor)
    _drop_privileges(user)
    _prctl(_PR_SET_DUMPABLE, 0, step="hide memory")
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, step="follow the launcher")  # a new user forgets it
    while True:
        pid, code, usage = os.wait4(-1, os.WNOHANG)
        if pid == program:
            report = {"code": os.waitstatus_to_exitcode(code)}
            _report(spec, {**report, "cpu": usage.ru_utime + usage.ru_stime})
        if pid == 0:
            if _resident_bytes(processes) > spec["memory_bytes"]:
                _report(spec, {"over": "memory"})
            signal.sigtimedwait([signal.SIGCHLD], _LOOK_SECONDS)


def _resident_bytes(processes: int) -> int:
    """Return the memory of all processes of the namespace, pages that they share counted twice."""
    pages = 0
    for name in os.listdir(processes):
        if name.isdigit() and name != "1":
            try:
                descriptor = os.open(f"{name}/statm", os.O_RDONLY, dir_fd=processes)
            except FileNotFoundError:
                continue  # ended meanwhile
            try:
                pages += int(os.read(descriptor, 200).split()[1])
            except ProcessLookupError:
                pass
            finally:
                os.close(descriptor)
    return pages * resource.getpagesize()


def _report(spec: dict[str, Any], report: dict[str, Any]) -> None:
    os.write(spec["status"], json.dumps(report).encode() + b"\n")
    os._exit(0)


def _guarded(spec: dict[str, Any], work: Any) -> None:
    """Do the work; a failure goes to the host, and the process ends."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - the host tells it
        text = str(error) if isinstance(error, StepError) else f"{type(error).__name__}: {error}"
        _report(spec, {"error": text})


def main() -> None:
    """Read the work from the descriptor that the command line names, and do it."""
    with open(int(sys.argv[1])) as file:
        spec = json.load(file)
    for descriptor in {*spec["descriptors"], spec["status"]}:
        os.set_inheritable(descriptor, False)
    _guarded(spec, lambda: _launch(spec))


def _launch(spec: dict[str, Any]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, step="follow the host")
    if os.getppid() != spec["host"]:
        os._exit(1)
    # If memory runs out all the same, the kernel should take it from here.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    user = _enter_namespaces()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, step="follow the host")
    lifeline, held = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(held)
        _guarded(spec, lambda: _be_init(spec, user, lifeline))
    for descriptor in {*spec["descriptors"], spec["status"], lifeline}:
        os.close(descriptor)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(init, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    # Returns when every process of the namespace is gone. Init keeps its number until we have
    # ended, so that the signal cannot hit another process.
    os.waitid(os.P_PID, init, os.WEXITED | os.WNOWAIT)
    os._exit(0)


if __name__ == "__main__":
    main()
