"""The replay's connections to a real server: kvclient as engine.Link. Only this file talks to the server."""

import os
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from time import monotonic_ns

import msgspec

from benchmarks.replay.options import ReplayOptions
from benchmarks.replay.pages import Pages
from kvclient.client import Client
from kvclient.values import Blocks, CacheSpec, HostBuffer, Lease, RetrieveResult, StoreResult, Timeouts, full_group
from kvserver.errors import ResourceError
from kvserver.sizing.engine import Ended, Hit
from kvserver.wire.messages import RegionRun
from kvserver.wire.status import Status

LOOKUP_S = 2.0
"""Long lookup timeout: a replay shares its cores with the server, and a slow lookup should be seen, not missed."""
Call = Callable[[], None]


class ServerLink:
    """One worker's engine.Link. `post` runs `done` on the worker's thread."""

    def __init__(
        self,
        *,
        worker: int,
        options: ReplayOptions,
        socket: Path,
        namespace: bytes,
        pages: Pages,
        post: Callable[[Call], None],
    ) -> None:
        self._namespace = namespace
        self._post = post
        self._blocks_per_chunk = options.blocks_per_chunk
        timeouts = Timeouts(lookup_s=LOOKUP_S, store_s=options.job_s_max, retrieve_s=options.job_s_max)
        self._client = Client(socket, engine=f"replay-{os.getppid()}-{worker}", epoch=os.getpid(), timeouts=timeouts)
        if not self._client.wait_connected(options.start_s_max):
            raise ResourceError("worker-connect", f"{socket} did not answer for {options.start_s_max:g} s")
        run = RegionRun(
            buffer=0,
            offset=0,
            regions=options.regions,
            region_stride=pages.region_stride,
            block_stride=pages.page_bytes,
            page_bytes=pages.page_bytes,
        )
        self._cache = self._client.register_cache(
            CacheSpec(
                name="kv",
                namespace=namespace,
                chunk_tokens=options.chunk_tokens,
                buffers=[HostBuffer(pages.fd, pages.bytes)],
                groups=[full_group(block_tokens=options.block_tokens, blocks=options.pool_blocks, regions=[run])],
            )
        )
        if not self._cache.wait_registered(options.start_s_max):
            raise ResourceError("worker-register", f"the pool was not registered within {options.start_s_max:g} s")

    def lookup(self, keys: Sequence[bytes], chunks_wanted_min: int) -> Hit:
        found = self._client.lookup(self._namespace, b"".join(keys), chunks_wanted_min=chunks_wanted_min)
        on_disk = found.lease.chunks_on_disk if found.lease is not None else 0
        return Hit(found.chunks, found.lease, found.why, on_disk)

    def release(self, lease: object) -> None:
        assert isinstance(lease, Lease)
        self._client.release(lease)

    def retrieve(self, lease: object, first_block: int, blocks: Sequence[int], done: Callable[[Ended], None]) -> None:
        assert isinstance(lease, Lease)
        future = self._client.retrieve(self._cache, lease, [_full(first_block, blocks)])
        future.add_done_callback(lambda ended: self._post_end(done, _retrieve_end(ended)))

    def store(
        self,
        first_chunk: int,
        parent: bytes,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        done: Callable[[Ended], None],
    ) -> None:
        first_block = first_chunk * self._blocks_per_chunk
        future = self._client.store(self._cache, first_chunk, parent, b"".join(keys), [_full(first_block, blocks)])
        future.add_done_callback(lambda ended: self._post_end(done, _store_end(ended)))

    def close(self) -> None:
        self._client.close()

    def _post_end(self, done: Callable[[Ended], None], end: Ended) -> None:
        self._post(partial(done, end))


class Control:
    """The replay's own connection: sees when the server is ready, and reads its counters."""

    def __init__(self, socket: Path) -> None:
        self._client = Client(socket, engine=f"replay-{os.getpid()}-control", epoch=os.getpid(), rank=-1)

    def close(self) -> None:
        self._client.close()

    def connected(self, wait_s: float) -> bool:
        return self._client.wait_connected(wait_s)

    def status(self) -> Status | None:
        """The server's status; None if it does not answer."""
        try:
            return msgspec.convert(self._client.status(), Status)
        except ResourceError:
            return None


def _full(first_block: int, blocks: Sequence[int]) -> Blocks:
    return Blocks(group=0, first_block=first_block, block_ids=array("i", blocks))


def _retrieve_end(ended: "Future[RetrieveResult]") -> Ended:
    """Runs where the future completes, so that the time is the reply's."""
    result = ended.result()
    return Ended("" if result.ok else result.why or "failed", monotonic_ns(), bytes=result.bytes)


def _store_end(ended: "Future[StoreResult]") -> Ended:
    result = ended.result()
    return Ended(result.why, monotonic_ns(), chunks_held=result.chunks, bytes=result.bytes)
