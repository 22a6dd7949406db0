"""The system call filter of the sandbox, as classic BPF (seccomp(2), bpf(4)).

Namespaces and the missing privileges already refuse most of these calls; the filter also keeps an
unread program away from kernel code that it has no need of.
"""

from __future__ import annotations

import errno
import platform
import struct

from rlinf.errors import ConfigError

_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_JUMP_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000

# Offsets in struct seccomp_data.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16

_X32_CALLS = 0x40000000
_NEW_NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables below and AUDIT_ARCH of each machine."""

_CLONE = (56, 220)

# fmt: off
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Other processes: their memory, their descriptors, their state.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    # Namespaces and mounts.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # Sockets; socketpair stays, which event loops wake themselves with, of the size it has: what
    # lies in one is memory of the kernel, which belongs to no process.
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200),
    "setsockopt": (54, 208), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
    # Parts of the kernel with a history of holes.
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "personality": (135, 92), "modify_ldt": (154, None),
    "iopl": (172, None), "ioperm": (173, None),
    # The machine.
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "quotactl": (179, 60),
    "acct": (163, 89), "syslog": (103, 116), "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    # Memory that is counted neither as a process's nor as the scratch directory's.
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180),
}

_ABSENT: dict[str, tuple[int | None, int | None]] = {
    # Callers of these fall back to older calls when the kernel seems not to have them. The flags
    # of clone3 lie in memory, out of reach of a filter.
    "clone3": (435, 435), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "memfd_create": (319, 279), "memfd_secret": (447, 447),
}
# fmt: on


def build_filter(machine: str | None = None) -> bytes:
    """The filter for a machine (None: this one) as an array of ``struct sock_filter``."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise ConfigError(
            f"the sandbox has no system call filter for {machine}; "
            f"it runs on: {', '.join(_ARCHITECTURES)}"
        )
    column, architecture = _ARCHITECTURES[machine]
    program = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD_WORD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        program += [(_JUMP_AT_LEAST, 0, 1, _X32_CALLS), (_RETURN, 0, 0, _KILL)]
    for table, error in ((_REFUSED, errno.EPERM), (_ABSENT, errno.ENOSYS)):
        for numbers in table.values():
            number = numbers[column]
            if number is not None:
                program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error)]
    program += [
        (_JUMP_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD_WORD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_ANY_BIT, 0, 1, _NEW_NAMESPACE_FLAGS),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
