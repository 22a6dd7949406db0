"""Programs that try to get out of the sandbox; each prints ESCAPED if it does.

`{host}` is replaced by facts of the host that an attacker would have to guess.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    """A program, and whether the same program succeeds outside (run there as a control)."""

    source: str
    control: bool = True
    """Run it outside too, where it must print ESCAPED: the test would notice a toothless attack."""
    ending: str = "exited"
    """How the sandbox sees it end."""


def _attack(source: str, **settings) -> Attack:
    return Attack(textwrap.dedent(source), **settings)


READING = {
    "password file": _attack("""
        print("ESCAPED", open("/etc/passwd").read())
        """),
    "file of a user": _attack("""
        print("ESCAPED", open(HOST["secret_file"]).read())
        """),
    "walk for the file": _attack("""
        import os
        for start in ("/home", os.path.dirname(HOST["secret_file"])):
            for folder, _, names in os.walk(start):
                if os.path.basename(HOST["secret_file"]) in names:
                    print("ESCAPED", folder)
                    raise SystemExit
        """),
    "symbolic link": _attack("""
        import os
        os.symlink(HOST["secret_file"], "link")
        try:
            print("ESCAPED", open("link").read())
        finally:
            os.unlink("link")
        """),
    "dots": _attack("""
        import os
        print("ESCAPED", open("../" * 20 + HOST["secret_file"].lstrip("/")).read())
        """),
    "old root": _attack(
        """
        import os
        for path in ("/.old", "/old_root", "/proc/1/root", "/proc/self/root", "/tmp/.old"):
            if os.path.exists(path + HOST["secret_file"]):
                print("ESCAPED", path)
        """,
        control=False,
    ),
    "environment of others": _attack("""
        import glob
        for path in glob.glob("/proc/[0-9]*/environ"):
            try:
                content = open(path).read()
            except OSError:
                continue
            if HOST["secret_text"] in content:
                print("ESCAPED", path)
        """),
    "own environment": _attack("""
        import os
        if HOST["secret_text"] in str(dict(os.environ)):
            print("ESCAPED")
        """),
    "open descriptors": _attack(
        """
        import os
        for number in range(3, 4096):
            try:
                os.fstat(number)
            except OSError:
                continue
            print("ESCAPED", number)
        """,
        control=False,
    ),
}

WRITING = {
    "file of a user": _attack("""
        open(HOST["victim_file"], "w").write("changed")
        print("ESCAPED")
        """),
    "system directories": _attack(
        """
        import os, sys
        places = ["/", "/usr", "/usr/bin", "/etc", "/dev", sys.prefix, os.path.dirname(os.__file__)]
        for place in places:
            try:
                open(os.path.join(place, "intruder"), "w").write("x")
                print("ESCAPED", place)
            except OSError:
                pass
        """,
        control=False,
    ),
    "the interpreter": _attack(
        """
        import os, sys
        for path in (sys.executable, os.__file__):
            try:
                os.chmod(path, 0o777)
                print("ESCAPED")
            except OSError:
                pass
            try:
                open(path, "r+b")
                print("ESCAPED")
            except OSError:
                pass
        """,
        control=False,
    ),
    "device": _attack(
        """
        import os, stat
        try:
            os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(8, 0))
            print("ESCAPED")
        except OSError:
            pass
        """,
        control=False,
    ),
}

NETWORK = {
    "socket of the internet": _attack("""
        import socket
        socket.socket()
        print("ESCAPED")
        """),
    "local server": _attack("""
        import socket
        connection = socket.create_connection(("127.0.0.1", HOST["port"]), timeout=3)
        connection.sendall(b"intruder")
        print("ESCAPED")
        """),
    "unix socket": _attack("""
        import socket
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(HOST["unix_socket"])
        print("ESCAPED")
        """),
    "abstract unix socket": _attack("""
        import socket
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\\0" + HOST["abstract_socket"])
        print("ESCAPED")
        """),
    "pair that connects elsewhere": _attack("""
        import socket
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        one.connect("\\0" + HOST["abstract_datagrams"])
        one.send(b"intruder")
        print("ESCAPED")
        """),
    "pair that sends elsewhere": _attack("""
        import socket
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        one.sendto(b"intruder", "\\0" + HOST["abstract_datagrams"])
        print("ESCAPED")
        """),
    "name service": _attack(
        """
        import socket
        print("ESCAPED", socket.getaddrinfo("example.com", 80))
        """,
        control=False,
    ),
    "raw call": _attack("""
        import ctypes, os
        number = {"x86_64": 41, "aarch64": 198}[os.uname().machine]
        if ctypes.CDLL(None).syscall(number, 2, 1, 0) >= 0:
            print("ESCAPED")
        """),
}

PROCESSES = {
    "kill a process": _attack("""
        import os, signal
        os.kill(HOST["victim_pid"], signal.SIGUSR1)
        print("ESCAPED")
        """),
    "kill the parents": _attack(
        """
        import os, signal
        for pid in (1, os.getppid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        import time
        time.sleep(0.3)
        """,
        control=False,
    ),
    "see other processes": _attack("""
        import os
        try:
            os.kill(HOST["victim_pid"], 0)
            print("ESCAPED")
        except ProcessLookupError:
            pass
        """),
    "ptrace": _attack("""
        import ctypes, os, signal, time
        libc = ctypes.CDLL(None, use_errno=True)
        child = os.fork()
        if child == 0:
            time.sleep(5)
            os._exit(0)
        if libc.ptrace(16, child, None, None) == 0:
            print("ESCAPED")
        os.kill(child, signal.SIGKILL)
        """),
    "ptrace init": _attack(
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(16, 1, None, None) == 0:
            print("ESCAPED")
        """,
        control=False,
    ),
    "memory of another": _attack("""
        import ctypes, os, signal, time
        class Range(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
        libc = ctypes.CDLL(None, use_errno=True)
        secret = ctypes.create_string_buffer(b"secret")
        child = os.fork()
        if child == 0:
            time.sleep(5)
            os._exit(0)
        copy = ctypes.create_string_buffer(6)
        ours, theirs = Range(ctypes.addressof(copy), 6), Range(ctypes.addressof(secret), 6)
        if libc.process_vm_readv(child, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) == 6:
            print("ESCAPED")
        os.kill(child, signal.SIGKILL)
        """),
}

PRIVILEGES = {
    "become root": _attack(
        """
        import os
        for call in (os.setuid, os.setgid, os.seteuid, os.setegid):
            try:
                call(0)
                print("ESCAPED", call)
            except OSError:
                pass
        """,
        control=False,
    ),
    "programs that make one root": _attack(
        """
        import glob, os, stat, subprocess
        for path in glob.glob("/usr/bin/*") + glob.glob("/usr/sbin/*"):
            if os.stat(path).st_mode & (stat.S_ISUID | stat.S_ISGID):
                if os.path.basename(path) in ("su", "mount", "newgrp", "sudo", "chsh", "gpasswd"):
                    command = [path, "-c", "id -u"] if path.endswith(("su", "newgrp")) else [path]
                    said = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
                    if said.stdout.strip() == b"0":
                        print("ESCAPED", path)
        """,
        control=False,
    ),
    "mount": _attack(
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"proc", b"/box", b"proc", 0, None) == 0:
            print("ESCAPED")
        if libc.mount(None, b"/", None, 0x20 | 0x1000, None) == 0:
            print("ESCAPED")
        """,
        control=False,
    ),
    "new namespaces": _attack("""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x10000000) == 0 or libc.unshare(0x20000) == 0:
            print("ESCAPED")
        """),
    "clone into a namespace": _attack("""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
        child = libc.syscall(ctypes.c_long(number), ctypes.c_ulong(0x10000000 | 17), 0, 0, 0, 0)
        if child == 0:
            os._exit(0)
        if child > 0:
            print("ESCAPED")
        """),
    "clone3 into a namespace": _attack("""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, 17, 0, 0, 0)
        child = libc.syscall(ctypes.c_long(435), ctypes.byref(arguments), ctypes.c_size_t(64))
        if child == 0:
            os._exit(0)
        if child > 0:
            print("ESCAPED")
        """),
    "capabilities": _attack(
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        held = (ctypes.c_uint32 * 6)()
        libc.capget(header, held)
        if any(held):
            print("ESCAPED", list(held))
        """,
        control=False,
    ),
    "kernel interfaces": _attack(
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        numbers = {
            "x86_64": (321, 298, 323, 425, 319, 250),
            "aarch64": (280, 241, 282, 425, 279, 219),
        }
        for number in numbers[os.uname().machine]:
            block = ctypes.create_string_buffer(256)
            if libc.syscall(ctypes.c_long(number), block, 0, 0, 0, 0) >= 0:
                print("ESCAPED", number)
        """,
        control=False,
    ),
}

RESOURCES = {
    "processor": _attack("while True: pass", control=False, ending="cpu_time"),
    "sleep": _attack("import time; time.sleep(1000)", control=False, ending="wall_time"),
    "sleep that heeds no signal": _attack(
        """
        import signal, time
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        time.sleep(1000)
        """,
        control=False,
        ending="wall_time",
    ),
    "output": _attack("while True: print('x' * 10000)", control=False, ending="output"),
    "errors": _attack(
        "import sys\nwhile True: print('x' * 10000, file=sys.stderr)",
        control=False,
        ending="output",
    ),
    "memory": _attack(
        """
        try:
            held = bytearray(2**32)
            print("ESCAPED")
        except MemoryError:
            pass
        """,
        control=False,
    ),
    "memory of many": _attack(
        """
        import os, time
        for _ in range(6):
            if os.fork() == 0:
                held = bytearray(b"x") * (60 * 2**20)
                time.sleep(1000)
        time.sleep(1000)
        """,
        control=False,
        ending="memory",
    ),
    "memory without a process": _attack(
        """
        import os
        try:
            os.memfd_create("hidden")
            print("ESCAPED")
        except OSError:
            pass
        """,
        control=False,
    ),
    "large file": _attack(
        """
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        written = 0
        try:
            with open("large", "wb", buffering=0) as file:
                for _ in range(1000):
                    written += file.write(b"x" * 2**20)
        except OSError:
            pass
        if written > 64 * 2**20:
            print("ESCAPED", written)
        """,
        control=False,
    ),
    "many files": _attack(
        """
        written = 0
        try:
            for number in range(100):
                with open(f"part{number}", "wb", buffering=0) as file:
                    written += file.write(b"x" * 2**20)
        except OSError:
            pass
        if written > 64 * 2**20:
            print("ESCAPED", written)
        """,
        control=False,
    ),
    "many names": _attack(
        """
        try:
            for number in range(100_000):
                open(f"name{number}", "w").close()
            print("ESCAPED")
        except OSError:
            pass
        """,
        control=False,
    ),
    "processes": _attack(
        """
        import os, time
        started = 0
        for _ in range(200):
            try:
                if os.fork() == 0:
                    time.sleep(1000)
            except OSError:
                break
            started += 1
        if started > 16:
            print("ESCAPED", started)
        """,
        control=False,
    ),
    "fork bomb": _attack(
        """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        control=False,
        ending="wall_time",
    ),
    "threads": _attack(
        """
        import threading, time
        started = 0
        try:
            for _ in range(200):
                threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
                started += 1
        except RuntimeError:
            pass
        if started > 16:
            print("ESCAPED", started)
        """,
        control=False,
    ),
}

FAMILIES = {
    "reading": READING,
    "writing": WRITING,
    "network": NETWORK,
    "processes": PROCESSES,
    "privileges": PRIVILEGES,
    "resources": RESOURCES,
}
