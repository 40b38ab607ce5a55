"""`kvserver serve`: holds the arena's and the ledger's descriptors, and starts and restarts brain and movers.

It decides nothing about the cache and never looks at its bytes, so that it has little reason to crash. A crash of any
child loses no sealed chunk. Four rules:

Rule 1: a new brain starts only when every mover of the old one has been reaped. No slot is used again before that. A
disk mover counts as reaped when its devices have ended its requests, which may outlive it (disk_io_barrier.py).
Rule 2: no child outlives it (PDEATHSIG).
Rule 3: it never blocks. The loop waits for killed children that sleep in the kernel or are held by a debugger; a stop
leaves them behind after REAP_S.
Rule 4: a call that the kernel refuses (no process, memory or descriptor now) ends at most the child it was for.
Necessary actions are tried again, less and less often, so the arena outlives every shortage.
"""

import fcntl
import grp
import logging
import os
import resource
import selectors
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from kvserver import logs
from kvserver.config import admin_tokens
from kvserver.config.config import Config
from kvserver.config.descriptor_limit import raise_limit, share
from kvserver.config.paths import check_cache_directory
from kvserver.errors import ConfigError
from kvserver.ipc.fd_sockets import Receiver, pair, send
from kvserver.ipc.inheritance import CANNOT_START, Inheritance
from kvserver.private_files import OTHERS_WRITE, file_problem
from kvserver.supervisor import disk_paths, numa
from kvserver.supervisor.kept_memory import Held, hold
from kvserver.supervisor.mapped_arena import keeper_at, settled
from kvserver.supervisor.systemd import Manager
from kvserver.transfer.native import ArenaGrower
from kvserver.wire.orders import (
    ORDER_BYTES_MAX,
    Alive,
    Grown,
    KillMover,
    MoverReaped,
    MoverStarted,
    StartMover,
    decode_wish,
    encode,
)

MOVERS = {"disk": "kvserver.movers.disk_mover", "remote": "kvserver.movers.remote_mover"}
"""Programs of movers; all others are movers of the host or of a GPU."""
STOP_S = 5.0
"""How long the brain may take to end after SIGTERM."""
REAP_S = 5.0
"""How long killed children may take to end. Then they are logged, and a stop does not wait for them."""
BACKOFF_S = (0.0, 0.1, 0.3, 1.0, 3.0)
"""Waits before a crashed brain starts again; the last one is repeated."""
EARLIER = 0
"""Stands for all movers of earlier servers, in place of a mover's number."""
QUIET = "kvserver.movers.disk_io_barrier"
STEADY_S = 30.0
"""A brain that lived this long starts again without a wait."""
UNWATCHED_S, QUIET_AGAIN_S = 0.05, 1.0
"""Interval of polling for the end of a child without a pidfd; wait before the I/O barrier is tried again."""
BUG_S = 0.1
"""Pause after an unexpected error, so that one at every turn does not take a whole core."""
REFUSED = (OSError, subprocess.SubprocessError)
"""Exceptions that the start of a process may raise."""


def run(config: Config) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. Raises ConfigError when it cannot start."""
    logs.start(level=config.log_level, form=config.log_format, process="supervisor")
    manager = Manager(os.environ)
    lock = _claim_socket(config)
    admin_tokens.load(config.admin_token_file, os.environ)
    check_cache_directory(config.cache_dir)
    _check_stores(config)
    disk_paths.refuse(config)
    for directory, why in disk_paths.warnings(config):
        logs.event(logging.WARNING, "disk is memory", ("directory", directory), ("why", why))
    for directory, file_system in disk_paths.make_missing(config):
        logs.event(logging.INFO, "disk directory made", ("path", directory), ("file_system", file_system))
    raise_limit()
    share(config, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if config.digests == "off":
        logs.event(logging.WARNING, "digests off", ("why", "digests=off in the configuration"))
    files = keeper_at(config)
    config = settled(config, files)
    held = hold(config, manager, files)
    grower, placement = _grow(config, held.arena)
    logs.event(
        logging.INFO,
        "arena begun",
        ("bytes", config.arena_bytes),
        ("slab_bytes", config.slab_bytes),
        ("memory", placement),
    )
    supervisor = Supervisor(config, held, grower, manager, str(placement))
    try:
        supervisor.run()
    finally:
        grower.close()
        _remove_sockets(config)
        for descriptor in (held.arena, held.ledger, lock):
            os.close(descriptor)
        if files is not None:
            files.close()
    return supervisor.status


@dataclass(slots=True, eq=False)
class _Child:
    """A child process: brain, mover, or I/O barrier of a disk mover."""

    process: subprocess.Popen[bytes]
    pidfd: int
    name: str
    mover: int = 0
    """Number of the mover; 0 for others."""
    disks: bool = False
    """Whether it is a disk mover."""
    ended: str = ""
    """In an I/O barrier (disk_io_barrier.py): how its disk mover ended. Else empty.

    A barrier is never killed: it ends by itself, and the I/O that it waits for would not end with it."""

    def kill(self) -> None:
        if self.process.returncode is None and not self.ended:
            self.process.kill()

    def reap(self) -> str:
        """Reaps a process whose pidfd is readable, so it has ended. Says how it ended."""
        status = self.process.poll()
        if self.pidfd >= 0:
            os.close(self.pidfd)
        if status is None:  # a debugger keeps the zombie; the next start of a process tries to reap it again
            return "while it was traced"
        return f"signal {-status}" if status < 0 else f"exit {status}"


class Supervisor:
    """One loop over the brain's socket, the children's pidfds, the arena's growth and signals."""

    def __init__(self, config: Config, held: Held, grower: ArenaGrower, manager: Manager, placement: str) -> None:
        """placement: where the arena's memory is, in words."""
        self._config = config
        self._arena, self._ledger = held.arena, held.ledger
        self._found = held.found
        self._grower = grower
        self._manager = manager
        self._placement = placement
        self._selector = selectors.DefaultSelector()
        self._receiver = Receiver(ORDER_BYTES_MAX)
        self._movers: dict[int, _Child] = {}
        """Movers and I/O barriers that may still run, of this brain or of the one before."""
        self._unwatched: list[_Child] = []
        """Children without a pidfd, which were killed right after their start."""
        self._unquiet: dict[int, tuple[str, float]] = {}
        """Ended disk movers whose I/O barrier could not be started: how they ended, and when to try again."""
        self._brain: _Child | None = None
        self._control: socket.socket | None = None
        self._incarnation = time.time_ns()
        self._crashes = 0
        self._started = 0.0
        self._stopping = False
        self._start_at: float | None = 0.0
        """Time at which the next brain starts; None while one runs."""
        self._kill_at: float | None = None
        """Time at which all children are killed, unless the brain has ended by then."""
        self._reap_at: float | None = None
        """Time by which all killed children must have ended."""
        self.status = 0
        """Exit status of the server."""
        self._signals, self._wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        """Serves until a stop was asked for and every child has been reaped, or left behind (rule 3)."""
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signal)
        self._selector.register(self._grower.eventfd, selectors.EVENT_READ, self._on_grown)
        if self._found and self._config.disk_directories:
            self._await_quiet(EARLIER, "with an earlier server")
        while not self._is_over():
            try:
                if not self._turn():
                    break
            except Exception as bug:  # the arena is worth more than this brain and what it knows
                logging.getLogger("kvserver").critical("supervisor goes on after a bug", exc_info=bug)
                if self._brain is not None:
                    self._brain.kill()
                time.sleep(BUG_S)
        for number in (signal.SIGTERM, signal.SIGINT):  # Python resets other handlers to the default before it ends
            signal.signal(number, signal.SIG_IGN)
        logs.event(logging.INFO, "server stopped")

    def _turn(self) -> bool:
        """One turn of the loop. False when a stop leaves behind children that do not end."""
        self._reap_unwatched()
        self._try_quiet_again()
        self._start_brain_when_due()
        for key, _ in self._selector.select(self._patience()):
            key.data()
        if _is_past(self._kill_at):
            self._kill_all()
        if _is_past(self._reap_at):
            self._reap_at = None
            self._tell_of_undead()
            return not self._stopping
        return True

    def _patience(self) -> float | None:
        dues = [due for due in (self._kill_at, self._reap_at) if due is not None]
        dues += [again for _, again in self._unquiet.values()]
        if self._start_at is not None and not self._is_arena_used():
            dues.append(self._start_at)
        if self._unwatched:
            dues.append(time.monotonic() + UNWATCHED_S)
        return max(0.0, min(dues) - time.monotonic()) if dues else None

    def _is_arena_used(self) -> bool:
        """Whether a process may still use the arena, so that no new brain may start (rule 1)."""
        return bool(self._movers or self._unwatched or self._unquiet)

    def _kill_all(self) -> None:
        """Kills all children, also a brain that still runs. The loop reaps them as they end."""
        self._kill_at = None
        for child in self._children():
            child.kill()
        self._reap_at = time.monotonic() + REAP_S if self._children() or self._unquiet else None

    def _children(self) -> list[_Child]:
        brain = [self._brain] if self._brain is not None else []
        return [*self._movers.values(), *self._unwatched, *brain]

    def _reap_unwatched(self) -> None:
        self._unwatched = [child for child in self._unwatched if child.process.poll() is None]

    def _tell_of_undead(self) -> None:
        for child in self._children():
            logs.event(logging.ERROR, "killed and does not end", ("name", child.name), ("pid", child.process.pid))

    def _begin_stop(self) -> None:
        self._stopping = True

    def _is_over(self) -> bool:
        return self._stopping and not self._children() and not self._unquiet

    # ---------------------------------------------------------------- brain

    def _start_brain_when_due(self) -> None:
        if self._stopping or self._is_arena_used() or not _is_past(self._start_at):
            return
        self._started = time.monotonic()
        self._incarnation += 1
        try:
            self._start_brain()
        except REFUSED as problem:
            self._start_again_later("brain not started", ("why", problem))
            return
        self._start_at = None
        self._on_grown()

    def _start_brain(self) -> None:
        ours, theirs = pair()
        inheritance = Inheritance(
            parent=os.getpid(),
            control=theirs.fileno(),
            ledger=self._ledger,
            incarnation=self._incarnation,
            config=self._config,
        )
        descriptors = (theirs.fileno(), self._ledger)
        with theirs:
            ours.setblocking(False)
            try:
                self._selector.register(ours, selectors.EVENT_READ, self._on_wish)
                self._brain = self._spawn(
                    "kvserver.brain.process", inheritance, descriptors, "brain", self._on_brain_end
                )
            except REFUSED:
                with suppress(KeyError):
                    self._selector.unregister(ours)
                ours.close()
                raise
        self._control = ours

    def _on_brain_end(self, brain: _Child) -> None:
        assert self._control is not None
        self._selector.unregister(brain.pidfd)
        with suppress(KeyError):  # it was read to its end
            self._selector.unregister(self._control)
        self._control.close()
        how = brain.reap()
        self._brain, self._control = None, None
        self._kill_all()
        if brain.process.returncode == CANNOT_START:
            self._begin_stop()
            self.status = CANNOT_START
        if not self._stopping:
            self._start_again_later("brain ended", ("how", how))

    def _start_again_later(self, event: str, why: tuple[str, object]) -> None:
        lived = time.monotonic() - self._started
        self._crashes = 0 if lived >= STEADY_S else self._crashes + 1
        wait = BACKOFF_S[min(max(self._crashes - 1, 0), len(BACKOFF_S) - 1)]
        self._start_at = time.monotonic() + wait
        logs.event(logging.ERROR, event, why, ("lived_s", f"{lived:.1f}"), ("restart_in_s", wait))

    # ---------------------------------------------------------------- movers

    def _on_wish(self) -> None:
        if self._control is None:
            return  # the brain ended in the same turn
        try:
            frame, _, _ = self._receiver.receive(self._control)
            wish = decode_wish(frame) if frame else None
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError) as problem:
            self._kill_brain(f"its wishes cannot be read: {problem}")
            return
        match wish:
            case None:  # the brain is ending; its pidfd tells the rest, and this socket would tell it all the time
                self._selector.unregister(self._control)
            case StartMover():
                self._start_mover(wish)
            case KillMover(mover):
                if mover in self._movers:
                    self._movers[mover].kill()
            case Alive():
                self._manager.alive()

    def _start_mover(self, wish: StartMover) -> None:
        try:
            brains, movers = pair()
        except OSError as problem:
            self._tell(MoverReaped(wish.mover, f"cannot be started: {problem}"))
            return
        inheritance = Inheritance(
            parent=os.getpid(),
            control=movers.fileno(),
            arena=self._arena,
            ledger=self._ledger,
            mover=wish.mover,
            device=wish.device,
            device_id=wish.device_id,
            config=self._config,
        )
        module = MOVERS.get(wish.device, "kvserver.movers.mover")
        with brains, movers:
            try:
                descriptors = (movers.fileno(), self._arena, self._ledger)
                child = self._spawn(module, inheritance, descriptors, f"mover {wish.mover}", self._on_mover_end)
            except REFUSED as problem:  # reported to the brain like a mover that ended
                self._tell(MoverReaped(wish.mover, f"cannot be started: {problem}"))
                return
            child.mover, child.disks = wish.mover, wish.device == "disk"
            self._movers[wish.mover] = child
            try:
                self._send(MoverStarted(wish.mover, child.process.pid), brains.fileno(), child.pidfd)
            except OSError as problem:  # too many descriptors are in flight; the brain is told of the mover's end
                logs.event(logging.ERROR, "mover killed", ("mover", wish.mover), ("why", f"not handed over: {problem}"))
                child.kill()

    def _on_mover_end(self, child: _Child) -> None:
        del self._movers[child.mover]
        self._selector.unregister(child.pidfd)
        how = child.reap()
        if child.disks:
            self._await_quiet(child.mover, how)
        else:
            self._reaped(child.mover, how)

    def _reaped(self, mover: int, how: str) -> None:
        if not self._children() and not self._unquiet:
            self._reap_at = None
        logs.event(logging.INFO, "mover reaped", ("mover", mover), ("how", how))
        self._tell(MoverReaped(mover, how))

    def _await_quiet(self, mover: int, how: str) -> None:
        """Starts the I/O barrier in place of a disk mover. how: the mover's end.

        The barrier inherits the arena, which tells the next server that a device may still write to it."""
        config = self._config
        command = [sys.executable, "-m", QUIET, config.log_level, config.log_format, *config.disk_directories]
        try:
            child = self._watch(command, (self._arena,), f"end of mover {mover}", self._on_quiet)
        except REFUSED as problem:
            logs.event(logging.ERROR, "disks not waited for yet", ("mover", mover), ("why", problem))
            self._unquiet[mover] = how, time.monotonic() + QUIET_AGAIN_S
            return
        child.mover, child.ended = mover, how
        self._movers[mover] = child

    def _try_quiet_again(self) -> None:
        for mover, (how, again) in list(self._unquiet.items()):
            if _is_past(again):
                del self._unquiet[mover]
                self._await_quiet(mover, how)

    def _on_quiet(self, child: _Child) -> None:
        del self._movers[child.mover]
        self._selector.unregister(child.pidfd)
        child.reap()
        status = child.process.returncode
        if status is not None and status < 0:  # somebody killed it before the I/O was over
            self._await_quiet(child.mover, child.ended)
        else:
            self._reaped(child.mover, child.ended)

    # ---------------------------------------------------------------- processes

    def _spawn(
        self,
        module: str,
        inheritance: Inheritance,
        descriptors: tuple[int, ...],
        name: str,
        on_end: Callable[[_Child], None],
    ) -> _Child:
        command = [sys.executable, "-m", module, msgspec.json.encode(inheritance).decode()]
        environment = dict(os.environ)
        if inheritance.arena >= 0:  # a mover needs no token, and loads drivers of others
            environment.pop(admin_tokens.ENVIRONMENT, None)
        child = self._watch(command, descriptors, name, on_end, environment)
        logs.event(logging.INFO, "process started", ("name", name), ("pid", child.process.pid))
        return child

    def _watch(
        self,
        command: list[str],
        descriptors: tuple[int, ...],
        name: str,
        on_end: Callable[[_Child], None],
        environment: dict[str, str] | None = None,
    ) -> _Child:
        """Starts a process and watches for its end in the loop. Raises REFUSED; then no such process keeps running."""
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors, env=environment)
        child = _Child(process, -1, name)
        try:
            child.pidfd = os.pidfd_open(process.pid)
            self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: on_end(child))
        except OSError:
            if child.pidfd >= 0:
                os.close(child.pidfd)
            child.kill()
            self._unwatched.append(child)
            raise
        return child

    # ---------------------------------------------------------------- news and signals

    def _tell(self, news: MoverReaped | Grown) -> None:
        try:
            self._send(news)
        except OSError as problem:
            self._kill_brain(f"it cannot be told news: {problem}")

    def _send(self, news: MoverStarted | MoverReaped | Grown, *descriptors: int) -> None:
        """Sends news to the brain, if there is one. Raises OSError if a living brain does not get them."""
        if self._control is None:
            return
        with suppress(BrokenPipeError, ConnectionResetError):  # the brain is ending; its pidfd tells the rest
            send(self._control, encode(news), descriptors)

    def _kill_brain(self, why: str) -> None:
        """Kills a brain that has missed a message: it is out of step for good, and the loop must not wait for it."""
        assert self._brain is not None
        logs.event(logging.ERROR, "brain killed", ("why", why))
        self._brain.kill()

    def _on_grown(self) -> None:
        with suppress(BlockingIOError):  # nothing to read when called for a new brain, not for a change
            os.eventfd_read(self._grower.eventfd)
        self._tell(Grown(self._grower.slabs_ready, self._grower.problem, self._placement))

    def _on_signal(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._signals, 64)
        if self._stopping:
            self._kill_all()
            return
        self._begin_stop()
        self._manager.stopping()
        if self._brain is not None:
            self._brain.process.terminate()
            self._kill_at = time.monotonic() + STOP_S
        else:
            self._kill_all()


def _is_past(due: float | None) -> bool:
    return due is not None and time.monotonic() >= due


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Does nothing: the wake-up descriptor has told the loop."""


# ---------------------------------------------------------------- before the start


def _claim_socket(config: Config) -> int:
    """Makes the socket's directory and locks the socket against other servers. Returns the lock's descriptor."""
    path = Path(config.socket)
    shared = bool(config.socket_group)
    try:
        path.parent.mkdir(mode=0o750 if shared else 0o700, parents=True, exist_ok=True)
        _check_directory(path.parent)
        lock = _open_lock(f"{path}.lock")
        if shared:
            os.chown(path.parent, -1, grp.getgrnam(config.socket_group).gr_gid)
    except KeyError:
        raise ConfigError("socket-group", f"there is no group named {config.socket_group!r}") from None
    except OSError as problem:
        raise ConfigError("socket", f"{path}: {problem.strerror}") from problem
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        raise ConfigError("socket-in-use", f"{path} belongs to a server that lives (process {owner})") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _open_lock(path: str) -> int:
    """Opens the lock file. Raises ConfigError if it is not ours alone, and OSError for a link.

    In a sticky directory another user may have made the file, or a link to a file that we would overwrite."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if problem := file_problem(path, os.fstat(lock), forbidden=OTHERS_WRITE):
        os.close(lock)
        raise ConfigError("socket", problem)
    return lock


def _check_directory(directory: Path) -> None:
    """Raises ConfigError if another user may rename files in it, and so put another server in our place."""
    status = directory.stat()
    writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in (0, os.geteuid()) or writable_by_others:
        raise ConfigError(
            "socket-directory",
            f"{directory} belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}; expected "
            f"user {os.geteuid()} or root, and nobody else to write to it (0700, or 0750 with a socket group)",
        )


def _remove_sockets(config: Config) -> None:
    """Removes our sockets; the lock makes sure that they are ours. Anything else at the path stays."""
    for path in (config.socket, f"{config.socket}.local"):
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)


def _check_stores(config: Config) -> None:
    """Raises ConfigError if the library of a remote store is missing, or its secrets cannot be read."""
    if not config.remotes:
        return
    from kvserver.movers import remote_store  # noqa: PLC0415 - dozens of modules, for servers with a store

    for remote in config.remote_stores:
        remote_store.check(remote)


def _grow(config: Config, arena: int) -> tuple[ArenaGrower, numa.Placement]:
    """Starts to touch the arena on its NUMA nodes. Raises ConfigError.

    If the kernel refuses nodes that are not configured, as in many containers, it places the memory itself."""
    placement = numa.place(config)
    sizes = config.arena_bytes, config.slab_bytes, config.touch_threads
    try:
        return ArenaGrower(arena, *sizes, placement.nodes), placement
    except (OSError, RuntimeError) as problem:  # RuntimeError: no thread could be started
        refused = problem.strerror if isinstance(problem, OSError) else str(problem)
        if placement.asked_for or not placement.nodes or isinstance(problem, RuntimeError):
            raise ConfigError("arena-memory", f"numa_node={config.numa_node}: {refused}") from problem
    without = numa.Placement((), f"not on the nodes of the GPUs, as the kernel refused it ({refused}); {placement.why}")
    logs.event(logging.WARNING, "arena not near GPUs", ("wanted", placement), ("why", refused))
    return ArenaGrower(arena, *sizes), without
