"""The replay's connections to a real server: kvclient behind engine.Link. The only file here that talks to it."""

import os
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from time import monotonic_ns
from types import TracebackType
from typing import Any

from kvclient.client import Client
from kvclient.values import Blocks, CacheSpec, Found, HostBuffer, Lease, RetrieveResult, StoreResult, Timeouts, full_group
from kvserver.errors import ResourceError
from kvserver.replay.engine import Ended, Hit
from kvserver.replay.options import ReplayOptions
from kvserver.replay.pages import Pages
from kvserver.wire.messages import RegionRun

TIMEOUTS = Timeouts(lookup_s=2.0)
"""A replay shares its cores with the server that it measures: a slow lookup is to be seen, not to become a miss."""
Call = Callable[[], None]


class ServerLink:
    """One worker's engine.Link. Calls of `done` go through `post`, which runs them on the worker's thread."""

    def __init__(
        self,
        worker: int,
        options: ReplayOptions,
        socket: Path,
        namespace: bytes,
        pages: Pages,
        post: Callable[[Call], None],
    ) -> None:
        self._namespace = namespace
        self._post = post
        self._client = Client(socket, engine=f"replay-{os.getppid()}-{worker}", epoch=os.getpid(), timeouts=TIMEOUTS)
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
