"""A cache that the engine has registered, and its registrations with one mover after another."""

import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from kvclient.base.loop import Loop, Waiter
from kvclient.memory.device_cache import DeviceCache, event_handle
from kvclient.memory.portable import Portable, has_query
from kvclient.transport.session import Session
from kvclient.values import CacheSpec, HostBuffer
from kvserver.errors import RequestError
from kvserver.wire.messages import CHUNKS_MAX


@dataclass(eq=False)
class Registration:
    """One mover's registration of a cache. Belongs to the loop's thread.

    `gone` is set when the mover's pidfd says that no copy of it can run any more. Jobs keep their registration until
    they have ended, whatever happens to the session meanwhile.
    """

    loop: Loop
    session: Session
    number: int
    pidfd: int
    gone: bool = False
    users: int = 0
    """Number of jobs that rely on the pidfd."""
    over: Waiter = field(default_factory=Waiter)
    """Settled when the mover is gone or the cache is unregistered. Fails when the session is lost."""
    _retired: bool = False

    def __post_init__(self) -> None:
        self.session.tie(self.over)
        self.loop.watch(self.pidfd, self._mover_ended)

    def retire(self) -> None:
        """End the registration for new jobs."""
        self._retired = True
        self._close_if_idle()

    def leave(self) -> None:
        """A job that used the registration has ended."""
        self.users -= 1
        self._close_if_idle()

    def _mover_ended(self) -> None:
        self.gone = True
        self._close()
        self.loop.settle(self.over)

    def _close_if_idle(self) -> None:
        if self._retired and self.users == 0:
            self._close()

    def _close(self) -> None:
        pidfd, self.pidfd = self.pidfd, -1  # first: a fork in the midst of this leaves no closed number to close again
        if pidfd >= 0:
            self.loop.unwatch(pidfd)
            os.close(pidfd)


class Cache:
    """The handle that register_cache() returns. Like a future of the registration, which may be lost and renewed."""

    def __init__(
        self,
        spec: CacheSpec,
        descriptors: list[int],
        device: DeviceCache | None = None,
        portable: Portable | None = None,
    ) -> None:
        self.spec = spec
        self.descriptors = descriptors
        """Duplicated descriptors, ours to close. Offered to every server that the client meets."""
        self.device = device
        """GPU caches only."""
        self.portable = portable
        """Portable caches only."""
        self.named = True
        """Whether the namespace is known. Until then no server hears of the cache."""
        self.wanted = True
        """True until unregister() or close()."""
        self.kept = False
        """True while a conversation of the connection takes care of it."""
        self.farewells: list[Future[bool]] = []
        self._registration: Registration | None = None
        self._problem: RequestError | None = None
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"Cache({self.spec.name!r}, registered={self.registered})"

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def told(self) -> CacheSpec:
        """The spec as registered with the server."""
        portable = self.portable
        if portable is None:
            return self.spec
        mode = self.spec.chosen_mode
        return replace(self.spec, device="host", mode=mode, buffers=[portable.buffer], groups=portable.groups)

    @property
    def part_chunks_max(self) -> int:
        """Most chunks in one request."""
        return self.portable.part_chunks_max if self.portable is not None else CHUNKS_MAX

    @property
    def quiet(self) -> bool:
        """Whether nothing in this process copies from or to its memory."""
        return (self.device is None or self.device.free) and (self.portable is None or self.portable.quiet)

    @property
    def registered(self) -> bool:
        """Whether stores and retrieves can work now."""
        return self._registration is not None

    @property
    def problem(self) -> RequestError | None:
        """The server's refusal of this cache. It is tried again only with another server."""
        return self._problem

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait until registered; False after the timeout. Raises the server's RequestError if it refused the cache."""
        with self._changed:
            self._changed.wait_for(lambda: self._registration is not None or self._problem is not None, timeout_s)
            if self._problem is not None:
                raise self._problem
            return self._registration is not None

    # ---------------------------------------------------------------- from the loop's thread

    @property
    def registration(self) -> Registration | None:
        return self._registration

    def settle(self, registration: Registration | None, problem: RequestError | None = None) -> None:
        with self._changed:
            self._registration, self._problem = registration, problem
            self._changed.notify_all()

    def forsake_after_fork(self) -> None:
        """Close a forked child's copies of the descriptors."""
        registration, self._registration = self._registration, None
        if registration is not None and registration.pidfd >= 0:
            os.close(registration.pidfd)
        for descriptor in self.descriptors:
            os.close(descriptor)
        if self.device is not None:
            self.device.forsake_after_fork()

    def close(self, *, let_go: bool) -> None:
        """Release what the cache holds. let_go: the server has nothing of it mapped any more."""
        self.settle(None)
        if self.device is not None:
            self.device.close(let_go=let_go)
        descriptors, self.descriptors = self.descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)


def prepare(spec: CacheSpec) -> Cache:
    """Take what the cache needs from this process, in the caller's thread. RequestError if something is not
    available."""
    if spec.device == "host":
        return Cache(spec, _duplicate(spec))
    if spec.device == "portable":
        portable = Portable(spec)
        return Cache(spec, [portable.descriptor], portable=portable)
    return Cache(spec, [], DeviceCache(spec))


def check_event(cache: Cache, after: object) -> None:
    """Check the event that a job is to wait for, in the caller's thread. None means no event. RequestError if it is
    wrong."""
    if after is None:
        return
    if cache.portable is not None:
        if not has_query(after):
            raise RequestError("after", f"{after!r} is no event; expected a torch.Event that was recorded")
        return
    if cache.device is None:
        raise RequestError("after", f"cache {cache.name!r} is on the host, where there are no events")
    event_handle(after)


def _duplicate(spec: CacheSpec) -> list[int]:
    """Duplicates of the buffers' descriptors. RequestError if one is not open."""
    descriptors: list[int] = []
    try:
        for index, buffer in enumerate(spec.buffers):
            if not isinstance(buffer, HostBuffer):
                raise RequestError(
                    "device", f"buffers[{index}] of cache {spec.name!r} on the host must be a HostBuffer"
                )
            descriptors.append(os.dup(buffer.descriptor))
    except OSError as problem:
        for descriptor in descriptors:
            os.close(descriptor)
        raise RequestError("descriptor", f"buffers of cache {spec.name!r}: {problem}") from problem
    return descriptors
