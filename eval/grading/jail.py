"""A child process of `sandbox.py`: locks itself in, then runs a program that nobody has read.

Run as a script, never imported, as `python -I -S -B jail.py`, in an empty folder, with an empty
environment. It reads one JSON object from its input: `program`, `memory_bytes`, `cpu_seconds`,
`folders` (that may be read), `paths` (put on `sys.path`), `token` (written to its output, before
what the program assigned to `result`, once the program has ended by itself). It writes "locked"
first; whatever the program itself prints goes nowhere.

From then on the kernel refuses the process and its threads: any file but for reading those below
`folders` (Landlock), sockets, other processes, signals, and a list of calls that reach beyond it
(seccomp). What is refused fails with EPERM. This lock cannot be taken off.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

# Calls that are refused, with their numbers on x86-64 and on arm64 (None: there is none).
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # the network, and ways around these rules
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200),
    "sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # other processes
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "setsid": (112, 157), "setpgid": (109, 154), "unshare": (272, 97), "setns": (308, 268),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "kcmp": (312, 272),
    "prlimit64": (302, 261), "setrlimit": (160, 164), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    # files: what Landlock leaves
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "utimensat": (280, 88), "futimesat": (261, None),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "truncate": (76, 45),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "mount": (165, 40),
    "umount2": (166, 39), "chroot": (161, 51), "pivot_root": (155, 41), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442),
    # memory that outlives the process, keys, the kernel
    "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "reboot": (169, 142), "syslog": (103, 116), "acct": (163, 89),
    "quotactl": (179, 60), "swapon": (167, 224), "swapoff": (168, 225), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "personality": (135, 92),
    "capset": (126, 91), "setuid": (105, 146), "setgid": (106, 144), "setresuid": (117, 147),
    "setresgid": (119, 149), "setgroups": (116, 159),
}  # fmt: skip
CLONE, CLONE3, PRCTL, CAPSET = (56, 220), (435, 435), (157, 167), (126, 91)
LANDLOCK = (444, 445, 446)  # create_ruleset, add_rule, restrict_self: the same everywhere
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
CLONE_THREAD = 0x10000
ENOSYS, EPERM = 38, 1


def locked(folders: list[str], memory_bytes: int, cpu_seconds: int) -> None:
    """Locks this process in.

    Raises:
        OSError: the kernel refuses one of the locks; naming it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    machine = platform.machine()
    if sys.platform != "linux" or machine not in AUDIT:
        raise OSError(f"{sys.platform} on {machine}: there is no lock for it")
    _limit(memory_bytes, cpu_seconds)
    _call(libc.prctl(1, 9, 0, 0, 0), "PR_SET_PDEATHSIG")  # dies with its parent
    _call(libc.prctl(4, 0, 0, 0, 0), "PR_SET_DUMPABLE")
    column = list(AUDIT).index(machine)
    _drop_capabilities(libc, CAPSET[column])
    _call(libc.prctl(38, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    _landlock(libc, folders)
    _seccomp(libc, machine, column)


def _call(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _limit(memory_bytes: int, cpu_seconds: int) -> None:
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(kind, (most, most))


def _drop_capabilities(libc: ctypes.CDLL, number: int) -> None:
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    _call(libc.syscall(number, header, ctypes.create_string_buffer(24)), "capset")


def _landlock(libc: ctypes.CDLL, folders: list[str]) -> None:
    """Every access to files is refused, but for reading below the folders."""
    create, add, restrict = LANDLOCK
    version = libc.syscall(create, None, 0, 1)
    _call(version, "Landlock")
    rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)  # bits of file rights that it knows
    handled = (1 << rights) - 1
    attributes = struct.pack("=Q", handled)
    if version >= 4:  # TCP too, which seccomp refuses anyway
        attributes += struct.pack("=Q", 3)
    if version >= 6:  # signals and abstract sockets to others
        attributes += struct.pack("=Q", 3)
    ruleset = libc.syscall(
        create, ctypes.create_string_buffer(attributes, len(attributes)), len(attributes), 0
    )
    _call(ruleset, "landlock_create_ruleset")
    for folder in folders:
        if not os.path.isdir(folder):
            continue
        place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        reading = (1 << 2) | (1 << 3)  # READ_FILE, READ_DIR
        rule = ctypes.create_string_buffer(struct.pack("=Qi", reading, place), 12)
        _call(libc.syscall(add, ruleset, 1, rule, 0), "landlock_add_rule")
        os.close(place)
    _call(libc.syscall(restrict, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _seccomp(libc: ctypes.CDLL, machine: str, column: int) -> None:
    """Refuses the calls of REFUSED, and clone but for threads."""
    load, equal, at_least, has, done = 0x20, 0x15, 0x35, 0x45, 0x06
    rules: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, AUDIT[machine]),
        (done, 0, 0, KILL),
        (load, 0, 0, 0),  # the call's number
        (at_least, 0, 1, 0x40000000),  # x32
        (done, 0, 0, KILL),
        (equal, 0, 1, CLONE3[column]),  # its flags cannot be read: the C library takes clone
        (done, 0, 0, REFUSE | ENOSYS),
        (equal, 0, 4, CLONE[column]),
        (load, 0, 0, 16),  # its flags
        (has, 1, 0, CLONE_THREAD),
        (done, 0, 0, REFUSE | EPERM),
        (done, 0, 0, ALLOW),
    ]
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            rules += [(equal, 0, 1, number), (done, 0, 0, REFUSE | EPERM)]
    rules.append((done, 0, 0, ALLOW))
    code = b"".join(struct.pack("=HBBI", *rule) for rule in rules)
    filters = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(rules), ctypes.addressof(filters))
    _call(libc.prctl(22, 2, ctypes.create_string_buffer(program, len(program)), 0, 0), "seccomp")


def main() -> None:
    """Locks itself in, says so, runs the program, and hands over its result."""
    asked = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    try:
        locked(asked["folders"], asked["memory_bytes"], asked["cpu_seconds"])
    except OSError as error:
        os.write(out, f"no lock: {error}\n".encode())
        return
    os.write(out, b"locked\n")
    sys.path.extend(asked["paths"])
    scope: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    scope |= asked.get("given", {})
    try:
        exec(compile(asked["program"], "<answer>", "exec"), scope)
        said = json.dumps(scope.get("result"))
    except MemoryError:
        os.write(out, b"memory\n")
    except BaseException as error:  # noqa: BLE001 - SystemExit too: the tests were not reached
        os.write(out, f"error {type(error).__name__}\n".encode())
    else:
        os.write(out, f"{asked['token']} {said}\n".encode())
    os._exit(0)  # threads that it left behind end here


if __name__ == "__main__":
    main()
