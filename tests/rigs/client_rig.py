"""A client with one registered cache at a fake server, and the odd sizes that the client's tests share."""

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvclient import (
    Blocks,
    Cache,
    CacheSpec,
    Client,
    HostBuffer,
    Lease,
    RegionRun,
    RetrieveResult,
    StoreResult,
    Timeouts,
    full_group,
)
from kvclient.transport.session import Session
from kvserver._native import create_memfd
from kvserver.wire import messages as wire
from tests.rigs.fake_server import WAIT_S, FakeServer, until

NAMESPACE = bytes(range(32))
BLOCK_TOKENS = 4
BLOCKS_PER_CHUNK = 3
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
BLOCKS = 31
REGIONS = 2
PAGE_BYTES = 24
BLOCK_BYTES = REGIONS * PAGE_BYTES
POOL_BYTES = BLOCKS * BLOCK_BYTES

QUICK = {"backoff_first_s": 0.001, "backoff_max_s": 0.004, "lookup_s": WAIT_S, "probe_s": WAIT_S}
"""Short pauses between attempts, and deadlines that a slow machine does not reach by accident."""


def keys_of(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(32, "little") for number in numbers)


def spec(descriptor: int, name: str = "kv") -> CacheSpec:
    pages = RegionRun(0, 0, REGIONS, BLOCKS * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)
    return CacheSpec(
        name=name,
        namespace=NAMESPACE,
        chunk_tokens=CHUNK_TOKENS,
        buffers=[HostBuffer(descriptor, POOL_BYTES)],
        groups=[full_group(block_tokens=BLOCK_TOKENS, blocks=BLOCKS, regions=[pages])],
    )


def chunks(first: int, count: int) -> list[Blocks]:
    """The blocks of whole chunks of the one group."""
    begin = first * BLOCKS_PER_CHUNK
    return [Blocks(0, begin, list(range(count * BLOCKS_PER_CHUNK)))]


@dataclass
class Rig:
    fake: FakeServer
    client: Client
    cache: Cache
    pool: int

    @property
    def session(self) -> Session:
        session = self.client._connection.session
        assert session is not None
        return session

    def restart(self) -> None:
        """Restarts the server; returns when the client has noticed, connected and registered again."""
        connects = self.client.counters.connects
        self.fake.restart()
        self.connected_again(connects + 1)

    def connected_again(self, connects: int) -> None:
        until(
            f"connect {connects} and the registration",
            lambda: self.client.counters.connects == connects and self.client.connected and self.cache.registered,
        )

    def lease(self, count: int = 2) -> Lease:
        """A lease on keys 1 to count, which the fake server is made to hold."""
        self.fake.stored.setdefault(NAMESPACE, set()).update(keys_of(n)[:32] for n in range(1, count + 1))
        lease = self.client.lookup(NAMESPACE, keys_of(*range(1, count + 1))).lease
        assert lease is not None
        return lease


@contextmanager
def rig(tmp_path: Path, *, bugs: int = 0, **timeouts: float) -> Iterator[Rig]:
    """bugs: how many unexpected exceptions the test provokes in the client's thread."""
    pool = create_memfd("pool", POOL_BYTES)
    with FakeServer(tmp_path / "s") as fake, Client(fake.path, timeouts=Timeouts(**{**QUICK, **timeouts})) as client:
        cache = client.register_cache(spec(pool))
        assert cache.wait_registered(WAIT_S)
        assert client.wait_connected(WAIT_S)
        yield Rig(fake, client, cache, pool)
        fake.kill_mover()
    os.close(pool)
    assert client.counters.bugs == bugs


def start_store(at: Rig, timeout_s: float = WAIT_S) -> "Future[StoreResult]":
    return at.client.store(at.cache, 0, b"", keys_of(1, 2), chunks(0, 2), timeout_s=timeout_s)


def start_retrieve(at: Rig, timeout_s: float = WAIT_S) -> "Future[RetrieveResult]":
    """Begins a retrieve of five blocks, from the middle of a chunk to the middle of another."""
    return at.client.retrieve(at.cache, at.lease(2), [Blocks(0, 1, [9, 8, 7, 6, 5])], timeout_s=timeout_s)


def held_store(at: Rig) -> "tuple[Future[StoreResult], wire.Store]":
    """A store that the server has read and does not answer."""
    at.fake.hold.add(wire.Store)
    return start_store(at), at.fake.wait_for(wire.Store)


def held_retrieve(at: Rig) -> "tuple[Future[RetrieveResult], wire.Retrieve]":
    """A retrieve that the server has read and does not answer."""
    at.fake.hold.add(wire.Retrieve)
    return start_retrieve(at), at.fake.wait_for(wire.Retrieve)


def pass_deadline(at: Rig, request: wire.Store | wire.Retrieve) -> None:
    """Ends a held job as its deadline would, at a time that the test chooses."""
    loop, waiter = at.client._loop, at.session.local._asks[request.id]

    def is_over() -> None:
        waiter.due_s = loop._wake_at_s = 0.0

    assert loop.post(is_over)


def turns(at: Rig) -> None:
    """Lets the client's thread go through its loop a few times."""
    for _ in range(5):
        at.client.lookup_async(bytes(32), keys_of(1)).result(WAIT_S)
