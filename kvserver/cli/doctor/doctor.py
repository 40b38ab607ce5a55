"""`kvserver doctor`: checks what a server needs from this machine, one by one. Changes nothing,
but for a chunk that it writes to a remote store and removes.

Each check is a function of the configuration. Its verdict is ok; warn: the server would start, but something is worse
than it could be; or fail: it would not start or not serve. An error of the system is a finding, never a traceback.
"""

import ast
import ctypes
import errno
import fcntl
import grp
import importlib
import mmap
import os
import platform
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import kvserver
from kvserver.cli.doctor import device
from kvserver.config.config import Config
from kvserver.config.paths import check_cache_directory, outside_memory
from kvserver.config.remotes import Remote
from kvserver.errors import ConfigError, DeviceError
from kvserver.private_files import directory_problem
from kvserver.supervisor import disk_paths, numa
from kvserver.supervisor.machine_memory import RESERVE_BYTES, read_memory
from kvserver.units import show_bytes
from kvserver.wire.kv_events import replay_endpoint

ZEROMQ_MS = 2000
MADV_POPULATE_WRITE = 23
SO_PEERPIDFD = 77
IO_URING_SETUP = 425
"""The system call has this number on every architecture."""
DESCRIPTORS_PER_SESSION = 4
"""Descriptors of a session: the attached connection, a lane, the board, a pidfd."""
SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

Verdict = Literal["ok", "warn", "fail"]
Answer = tuple[Verdict, str]
Check = Callable[[Config], Answer]


class Finding(NamedTuple):
    verdict: Verdict
    check: str
    text: str


def examine(config: Config) -> list[Finding]:
    """The findings of all checks in order. A check that raises OSError or ValueError has failed."""
    findings = []
    for name, check in CHECKS:
        try:
            verdict, text = check(config)
        except (OSError, ValueError) as error:
            verdict, text = "fail", f"cannot be checked: {getattr(error, 'strerror', None) or error}"
        findings.append(Finding(verdict, name, text))
    return findings


def interpreter(_: Config) -> Answer:
    python = f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    said = f"kvserver {kvserver.__version__} on {python}"
    if not __debug__:
        return "fail", f"{said} runs with -O, which removes the assertions that the server relies on"
    return "ok", said


def native_module(_: Config) -> Answer:
    """Checks that the native module loads and has every name in _native.pyi; an older build would lack some."""
    try:
        native = importlib.import_module("kvserver._native")
    except ImportError as error:
        return "fail", f"kvserver._native cannot be loaded: {error}; install kvserver again on this machine"
    where = getattr(native, "__file__", None) or "?"
    declared = ast.parse(Path(kvserver.__file__).with_name("_native.pyi").read_text()).body
    names = {node.name for node in declared if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    missing = sorted(name for name in {*names, "BUILD"} if not hasattr(native, name))
    if missing:
        return "fail", f"{where} is of another release: it lacks {', '.join(missing)}; install kvserver again"
    return "ok", f"{native.BUILD}, {where}"


def digests(config: Config) -> Answer:
    """Checks that a bit that is flipped in memory is noticed when the chunk is loaded (docs/digest.md)."""
    try:
        importlib.import_module("kvserver.transfer.self_test").self_test()
    except ImportError as error:
        return "fail", f"cannot be checked: {error}"
    except DeviceError as error:
        return "fail", error.message
    noticed = "a chunk was stored and loaded, and a flipped bit was noticed"
    if config.digests == "off":
        return "warn", f"{noticed}; but the server compares nothing: digests=off"
    return "ok", noticed


def zeromq(_: Config) -> Answer:
    """Checks that a message crosses an ipc:// socket and comes back."""
    try:
        zmq = importlib.import_module("zmq")
    except ImportError as error:
        return "fail", f"pyzmq cannot be loaded: {error}"
    if not zmq.has("ipc"):
        return "fail", f"libzmq {zmq.zmq_version()} was built without ipc://"
    with (
        tempfile.TemporaryDirectory(prefix="kvserver-doctor-") as directory,
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as server,
        context.socket(zmq.DEALER) as client,
    ):
        for end in (server, client):
            end.setsockopt(zmq.LINGER, 0)
            end.setsockopt(zmq.RCVTIMEO, ZEROMQ_MS)
        server.bind(f"ipc://{directory}/s")
        client.connect(f"ipc://{directory}/s")
        client.send(b"to and")
        try:
            server.send_multipart([*server.recv_multipart(), b"fro"])
            back = client.recv_multipart()
        except zmq.Again:
            return "fail", f"no message crossed an ipc:// socket within {ZEROMQ_MS} ms"
    if back != [b"to and", b"fro"]:
        return "fail", f"an ipc:// socket returned {back!r}"
    return "ok", f"libzmq {zmq.zmq_version()}, pyzmq {zmq.__version__}"


def socket_directory(config: Config) -> Answer:
    """Checks that this user can make the socket, and that others cannot replace it."""
    directory = Path(config.socket).parent
    if not directory.exists():
        above = next(parent for parent in directory.parents if parent.exists())
        if not os.access(above, os.W_OK | os.X_OK):
            return "fail", f"{directory} does not exist and cannot be made in {above}"
        return "ok", f"{directory} will be made"
    if not os.access(directory, os.W_OK | os.X_OK):
        return "fail", f"{directory} cannot be written to by this user"
    found = directory.stat()
    said = f"{directory} mode {found.st_mode & 0o7777:04o}, owner {found.st_uid}"
    if found.st_uid not in (0, os.geteuid()):
        return "warn", f"{said}: it belongs to another user, who can replace the socket"
    if found.st_mode & 0o022:
        return "warn", f"{said}: others can replace the socket; expected 0700, or 0750 with socket_group"
    return "ok", said


def socket_owner(config: Config) -> Answer:
    """Checks that no server uses this socket yet."""
    if not os.path.exists(_lock_of(config)):
        return "ok", f"{config.socket} is free"
    owner = _owner(config)
    if owner:
        return "warn", f"a server lives at {config.socket} (process {owner})"
    return "ok", f"{config.socket} is free (left by a server that is gone)"


def socket_group(config: Config) -> Answer:
    if not config.socket_group:
        return "ok", "none: only this user may connect"
    try:
        group = grp.getgrnam(config.socket_group)
    except KeyError:
        return "fail", f"there is no group named {config.socket_group!r}"
    if os.geteuid() != 0 and group.gr_gid not in (os.getegid(), *os.getgroups()):
        return "fail", f"this user is not in {config.socket_group!r} and cannot give the socket to it"
    return "ok", f"{config.socket_group} ({group.gr_gid})"


def http_port(config: Config) -> Answer:
    if not config.http_port:
        return "ok", "off"
    with socket.socket() if ":" not in config.http_host else socket.socket(socket.AF_INET6) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.http_host, config.http_port))
        except OSError as error:
            return _unless_it_runs(config), f"{config.http_host}:{config.http_port}: {error.strerror}"
    return "ok", f"{config.http_host}:{config.http_port} is free"


def events_endpoint(config: Config) -> Answer:
    """Checks that both endpoints can be bound. A path is not bound, as that would take it from a running server."""
    if not config.events_endpoint:
        return "ok", "none: nothing is published"
    endpoints = config.events_endpoint, replay_endpoint(config.events_endpoint)
    if config.events_endpoint.startswith("ipc://"):
        directory = os.path.dirname(config.events_endpoint.removeprefix("ipc://"))
        if not os.access(directory, os.W_OK | os.X_OK):
            return "fail", f"{directory} of events_endpoint is not there, or cannot be written to"
        return "ok", " and ".join(endpoints)
    zmq = importlib.import_module("zmq")
    with zmq.Context() as context, context.socket(zmq.PUB) as probe:
        for endpoint in endpoints:
            try:
                probe.bind(endpoint)
            except zmq.ZMQError as error:
                return _unless_it_runs(config), f"events_endpoint: {endpoint}: {zmq.strerror(error.errno)}"
    return "ok", f"{' and '.join(endpoints)} are free"


def cache_directory(config: Config) -> Answer:
    """Checks the cache directory. Its files save time at each start.

    A GPU runs kernels from it, so nobody else may write there."""
    directory = Path(config.cache_dir)
    try:
        check_cache_directory(config.cache_dir)
    except ConfigError as error:
        return "fail", error.message
    there = next(parent for parent in (directory, *directory.parents) if parent.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return "warn", f"{there} cannot be written to: kernels are compiled, and devices measured, at each start"
    if there == directory and (problem := directory_problem(str(directory), directory.stat())):
        return "warn", problem
    return "ok", str(directory)


def memory(config: Config) -> Answer:
    """Checks that the arena fits in free memory. Huge pages have their own check."""
    if config.huge_page_bytes:
        return "ok", "the arena is backed by huge pages"
    if where := outside_memory(config.arena_path):
        return "ok", f"the arena is {where}, where a start looks for {show_bytes(config.arena_bytes)}"
    machine = read_memory()
    said = f"arena {show_bytes(config.arena_bytes)}, {show_bytes(RESERVE_BYTES)} beside it, "
    said += f"{_rounded(machine.available_bytes)} available of {_rounded(machine.total_bytes)}"
    if machine.limit_bytes is not None:
        said += f", control group limit {_rounded(machine.limit_bytes)}"
    if not machine.can_ever_fit(config.arena_bytes):
        return "fail", f"{said}: it can never fit"
    if not machine.fits(config.arena_bytes):
        return _unless_it_runs(config), f"{said}: it does not fit now"
    return "ok", said


def huge_pages(config: Config) -> Answer:
    page_bytes = config.huge_page_bytes
    if not page_bytes:
        return "ok", _unreserved_huge_pages(config)
    directory = Path(f"/sys/kernel/mm/hugepages/hugepages-{page_bytes // 1024}kB")
    if not directory.exists():
        return "fail", f"this machine has no huge pages of {show_bytes(page_bytes)}"
    free, needed = int((directory / "free_hugepages").read_text()), config.arena_bytes // page_bytes
    said = f"{free} of {show_bytes(page_bytes)} free, {needed} needed"
    return ("ok" if free >= needed else "fail"), said


def _unreserved_huge_pages(config: Config) -> str:
    """The text about transparent huge pages for the arena. For a file, the mount options of its tmpfs decide."""
    if config.arena_path or not SHMEM_HUGE_PAGES.exists():
        return "none reserved"
    chosen = SHMEM_HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    said = f"none reserved, shmem_enabled is {chosen}"
    if chosen not in ("never", "deny"):
        return f"{said}: Linux gives what it has"
    return f"{said}: Linux gives none; a virtual disk may read at half its rate" if config.disk_directories else said


def memory_nodes(config: Config) -> Answer:
    """Checks the NUMA nodes for the arena's memory. A configured node has to exist."""
    if config.numa_node >= 0 and not Path(f"/sys/devices/system/node/node{config.numa_node}").exists():
        return "fail", f"this machine has no NUMA node {config.numa_node}"
    placement = numa.place(config)
    if not placement.nodes:
        return "ok", str(placement)
    if refused := _refused_nodes(placement.nodes):
        said = f"{placement}: {refused}; in a container it takes the capability SYS_NICE"
        return ("fail" if placement.asked_for else "warn"), said
    far = [f"GPU {gpu.address} on {gpu.node}" for gpu in numa.gpus() if gpu.node >= 0]
    if placement.asked_for and any(not each.endswith(f" {config.numa_node}") for each in far):
        return "warn", f"{placement}, with {', '.join(far)}: copies of the others cross the link between the sockets"
    return "ok", f"{placement}{'; each GPU has a part of every chunk near' if len(placement.nodes) > 1 else ''}"


def _refused_nodes(nodes: Sequence[int]) -> str:
    """Why memory cannot be placed on these nodes; empty if it can. Tried with an arena of one page."""
    native = importlib.import_module("kvserver._native")
    descriptor = os.memfd_create("kvserver-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, native.SLOT_ALIGN)
        native.ArenaGrower(descriptor, native.SLOT_ALIGN, native.SLOT_ALIGN, 1, nodes).close()
    except OSError as problem:
        return problem.strerror or str(problem)
    finally:
        os.close(descriptor)
    return ""


def locked_memory(config: Config) -> Answer:
    """Reports the memlock limit. The host device locks nothing; GPUs have their own checks."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else show_bytes(soft)
    return "ok", f"memlock limit {limit}; the host device needs none"


def open_files(config: Config) -> Answer:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = config.sessions_max * DESCRIPTORS_PER_SESSION
    if hard != resource.RLIM_INFINITY and hard < needed:
        return "warn", f"at most {hard} descriptors; sessions_max={config.sessions_max} may need {needed}"
    return "ok", f"at most {'any number of' if hard == resource.RLIM_INFINITY else hard} descriptors"


def memfd_seals(_: Config) -> Answer:
    """Checks that memfds can be sealed against shrinking, so that no client can remove memory during a copy."""
    descriptor = os.memfd_create("kvserver-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        try:
            os.ftruncate(descriptor, 0)
        except PermissionError:
            return "ok", "memfd_create and seals work"
        return "fail", "a sealed memfd could be shrunk"
    finally:
        os.close(descriptor)


def populate(_: Config) -> Answer:
    """Checks MADV_POPULATE_WRITE, which reports missing memory as an error instead of SIGBUS."""
    with mmap.mmap(-1, 4 * mmap.PAGESIZE) as memory_map:
        try:
            memory_map.madvise(MADV_POPULATE_WRITE)
        except OSError as error:
            return "fail", f"MADV_POPULATE_WRITE: {error.strerror}; needs Linux 5.14, this is {platform.release()}"
    return "ok", f"MADV_POPULATE_WRITE works, Linux {platform.release()}"


def pidfds(_: Config) -> Answer:
    """Checks pidfd_open, to wait for the end of a process, and SO_PEERPIDFD, to find a connection's process."""
    os.close(os.pidfd_open(os.getpid()))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            peer = ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        except OSError:
            return "warn", "pidfd_open works; no SO_PEERPIDFD before Linux 6.5, clients are found by process number"
        os.close(peer)
    return "ok", "pidfd_open and SO_PEERPIDFD work"


def disks(config: Config) -> Answer:
    """Checks that each directory can be used. Whether O_DIRECT works there is in the server's log."""
    wrong = "; ".join(problem.message for problem in disk_paths.problems(config))
    if wrong:
        return "fail", wrong
    if not config.disk_directories:
        return "ok", "no disk tier"
    memory_backed = "; ".join(f"{directory}: {why}" for directory, why in disk_paths.warnings(config))
    if memory_backed:
        return "warn", memory_backed
    devices = f"{len(config.disk_directories)} devices of {show_bytes(config.disk_bytes)}"
    missing = ", ".join(directory for directory in config.disk_directories if not os.path.exists(directory))
    return "ok", f"{devices}; the server will make {missing}" if missing else devices


def disk_engine(config: Config) -> Answer:
    if not config.disk_directories:
        return "ok", "no disk tier"
    if config.disk_engine == "threads":
        return "ok", "threads, as disk_engine says"
    refused = io_uring_refused()
    if not refused:
        return "ok", "io_uring is allowed"
    advice = "allow io_uring_setup in the container's seccomp profile, see kernel.io_uring_disabled"
    if config.disk_engine == "uring":
        return "fail", f"disk_engine=uring, and io_uring: {refused}; {advice}"
    return "warn", f"io_uring: {refused}; threads will do it, with more of the CPU; {advice}"


def remote_store(config: Config) -> Answer:
    """Writes a chunk to each remote store, reads it, and removes it. No server ever finds it."""
    found = [try_store(remote) for remote in config.remote_stores]
    if not found:
        return "ok", "none"
    worst = max((verdict for verdict, _ in found), key=get_args(Verdict).index)
    return worst, "; ".join(text for _, text in found)


def try_store(remote: Remote) -> Answer:
    """The same for one store."""
    name = f"{remote.name} at {remote.url}"
    try:
        importlib.import_module("kvserver.movers.remote_store").check(remote)
        attempt = importlib.import_module("kvserver.movers.remote_trial").attempt  # brings the client library
        trial = attempt(remote)
    except (ConfigError, DeviceError) as problem:
        return "fail", f"{name}: {problem.code}: {problem.message}"
    said = (
        f"{name}: {trial.facts.kind} {trial.facts.version}; a probe takes {trial.probe_ms:.2f} ms; "
        f"{trial.write_gbps:.2f} GB/s out, {trial.read_gbps:.2f} in, one chunk of 4MiB at a time"
    )
    return ("warn" if trial.facts.warnings else "ok"), "; ".join([said, *trial.facts.warnings])


def io_uring_refused() -> str:
    """Why io_uring cannot be used; empty if it can. Called without arguments it fails with EFAULT if it is allowed."""
    ctypes.CDLL(None, use_errno=True).syscall(IO_URING_SETUP, 1, None)
    code = ctypes.get_errno()
    return "" if code == errno.EFAULT else os.strerror(code)


CHECKS: tuple[tuple[str, Check], ...] = (
    ("python", interpreter),
    ("native module", native_module),
    ("digests", digests),
    ("zeromq", zeromq),
    ("socket directory", socket_directory),
    ("socket", socket_owner),
    ("socket group", socket_group),
    ("http port", http_port),
    ("events endpoint", events_endpoint),
    ("cache directory", cache_directory),
    ("memory", memory),
    ("huge pages", huge_pages),
    ("disk", disks),
    ("disk engine", disk_engine),
    ("remote store", remote_store),
    ("numa", memory_nodes),
    ("locked memory", locked_memory),
    ("open files", open_files),
    ("memfd", memfd_seals),
    ("populate", populate),
    ("pidfd", pidfds),
    *device.CHECKS,
)


def _lock_of(config: Config) -> str:
    return f"{config.socket}.lock"


def _owner(config: Config) -> str:
    """The process number of the server at this socket; empty when there is none."""
    if not os.path.exists(_lock_of(config)):
        return ""
    descriptor = os.open(_lock_of(config), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "?"
    finally:
        os.close(descriptor)
    return ""


def _unless_it_runs(config: Config) -> Verdict:
    """The verdict about a resource in use: warn if the server at this socket runs and may have it, else fail."""
    return "warn" if _owner(config) else "fail"


def _rounded(count: int) -> str:
    return f"{count / (1 << 30):.1f}GiB"
