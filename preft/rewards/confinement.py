"""What a process gives up before it runs code that nobody has read: stdlib only, Linux only, no privilege needed.

Three layers, each of the kernel's own, none of which can be taken back:

- limits on processor time, memory, file size and open files;
- Landlock: files can be read below a few folders and written below one, and nowhere else;
- a system call filter: no process or thread is made, no program started, no signal sent, no socket opened, no other
  process looked at or slowed down, nothing mounted, no mode or owner changed.

A single process without children is left, so ending it ends everything. This file is also run as a program by
`preft.rewards.sandbox`, where `preft` itself cannot be imported.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterator, Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)

# Number of each system call, on x86-64 and on 64-bit ARM; None where there is none. All from 424 on are numbered alike.
_DENIED = {
    # Processes, threads, programs.
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "execve": (59, 221), "execveat": (322, 281),
    # Signals to others, and looking into them.
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272),
    # The share of the machine that others get.
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # Sockets, and memory that the limits do not count.
    "socket": (41, 198), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180), "memfd_create": (319, 279),
    # Modes, owners, attributes and times of files, which Landlock leaves open.
    "mknod": (133, None), "mknodat": (259, 33), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "truncate": (76, 45),
    # The system.
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "quotactl": (179, 60), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "sethostname": (170, 161),
    "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "syslog": (103, 116),
    "vhangup": (153, 58), "personality": (135, 92),
}  # fmt: skip
_CHANGES_FILES = {
    "creat": (85, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
}  # fmt: skip
_OPEN = {"open": (2, None, 1), "openat": (257, 56, 2)}
"""Numbers, and which argument holds the flags."""
_FCNTL, _IOCTL, _PRLIMIT = (72, 25), (16, 29), (302, 261)
_OWNER_COMMANDS = (8, 10, 15)
"""F_SETOWN, F_SETSIG and F_SETOWN_EX: with them a file sends signals."""
_OWNER_IOCTLS = (0x8901, 0x8902)
_FIRST_NEW, _NEW_ALLOWED = 424, (436, 439)
"""System calls from here on are unknown to the C library's callers, but for close_range and faccessat2."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT, _CAPSET = 444, 445, 446, {"x86_64": 126, "aarch64": 91}
_READ_ACCESS = 0b1100
"""Read files and list folders."""


class ConfinementError(RuntimeError):
    """The kernel does not offer what confinement needs."""


def limit(*, cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Sets resource limits.

    Args:
        cpu_s: Processor time in seconds, after which the process is killed.
        memory_bytes: Address space.
        file_bytes: Length of a file it writes.
    """
    for which, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)


def confine(readable: Sequence[str], writable: str | None) -> bool:
    """Gives up, for good, what the module's description lists; limits are `limit`'s.

    Args:
        readable: Folders to read below. Without Landlock, everything the user may read stays readable.
        writable: A folder to write below, or None. Without Landlock, nothing can be written.

    Returns:
        Whether Landlock is on.

    Raises:
        ConfinementError: The system call filter is not to be had on this machine.
    """
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in _ARCHITECTURES:
        raise ConfinementError(f"{platform.system()} on {machine}; Linux on x86-64 or 64-bit ARM is needed")
    if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise ConfinementError("the kernel refuses PR_SET_NO_NEW_PRIVS")
    _drop_capabilities(machine)
    has_landlock = _landlock(readable, writable)
    program = b"".join(struct.pack("HBBI", *step) for step in _filter(machine, may_write=has_landlock))
    _install(program)
    return has_landlock


def _drop_capabilities(machine: str) -> None:
    """A process of root's could raise its limits again."""
    header = struct.pack("II", 0x20080522, 0)
    if _LIBC.syscall(_CAPSET[machine], header, bytes(24)) != 0:
        raise ConfinementError(f"capabilities cannot be dropped: {os.strerror(ctypes.get_errno())}")


def _landlock(readable: Sequence[str], writable: str | None) -> bool:
    abi = _LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if abi < 1:
        return False
    handled = (1 << (13 + (abi >= 2) + (abi >= 3))) - 1 | (1 << 15 if abi >= 5 else 0)
    rules = struct.pack("QQQ", handled, 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = _LIBC.syscall(_LANDLOCK_CREATE, rules, size, 0)
    if ruleset < 0:
        return False
    # Everything but running programs, and making devices, sockets and pipes.
    writing = handled & ~(1 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 15)
    for folder, access in [*((folder, _READ_ACCESS) for folder in readable), *([(writable, writing)] * bool(writable))]:
        try:
            descriptor = os.open(folder or "/", os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        allowed = access if os.path.isdir(folder or "/") else access & 0b10110
        added = _LIBC.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
        if added != 0:
            raise ConfinementError(f"Landlock refuses {folder}: {os.strerror(ctypes.get_errno())}")
    if _LIBC.syscall(_LANDLOCK_RESTRICT, ruleset, 0) != 0:
        raise ConfinementError(f"Landlock cannot be turned on: {os.strerror(ctypes.get_errno())}")
    os.close(ruleset)
    return True


def _filter(machine: str, *, may_write: bool) -> list[tuple[int, int, int, int]]:
    """The filter's steps: operation, steps to skip if true, if false, and operand."""
    column, architecture = _ARCHITECTURES[machine]
    deny = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    # The x32 calls of x86-64.
    steps += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]
    denied = {**_DENIED, **({} if may_write else _CHANGES_FILES)}
    for numbers in denied.values():
        number = numbers[column]
        if number is not None:
            steps += [(_EQUAL, 0, 1, number), deny]
    for numbers, argument, commands in ((_FCNTL, 1, _OWNER_COMMANDS), (_IOCTL, 1, _OWNER_IOCTLS)):
        tests = [step for command in commands for step in ((_EQUAL, 0, 1, command), deny)]
        steps += _on(numbers[column], argument, tests)
    steps += _on(_PRLIMIT[column], 0, [(_EQUAL, 1, 0, 0), deny])
    if not may_write:
        for *both, argument in _OPEN.values():
            opener = both[column]
            steps += [] if opener is None else _on(opener, argument, [(_ANY_BIT, 0, 1, _WRITING), deny])
    steps += [step for number in _NEW_ALLOWED for step in ((_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW))]
    steps += [(_AT_LEAST, 0, 1, _FIRST_NEW), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    return [*steps, (_RETURN, 0, 0, _ALLOW)]


def _on(number: int, argument: int, tests: list[tuple[int, int, int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Steps that run `tests` on the low half of one argument of one system call."""
    yield (_EQUAL, 0, len(tests) + 2, number)
    yield (_LOAD, 0, 0, 16 + 8 * argument)
    yield from tests
    yield (_RETURN, 0, 0, _ALLOW)


def _install(program: bytes) -> None:
    code = ctypes.create_string_buffer(program)

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))

    handed = Program(len(program) // 8, ctypes.addressof(code))
    if _LIBC.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(handed), 0, 0) != 0:
        raise ConfinementError(f"the kernel takes no system call filter: {os.strerror(ctypes.get_errno())}")
