"""The worker half of a simulated engine: a small KV pool in host memory, and the connector's own worker."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future

from kvclient.client import Client
from kvclient.offload.job_ends import Report
from kvclient.offload.values import RetrieveOrder, StoreOrder
from kvclient.offload.worker import Worker
from kvclient.values import CacheSpec, HostBuffer, full_group
from kvserver._native import create_memfd
from kvserver.wire.messages import RegionRun

log = logging.getLogger("benchmarks")

PAGE_BYTES = 64
"""Bytes of a block; tiny, because only hits matter here."""
JOBS_S = 60.0
POLL_S = 0.0002


class PlayedWorker:
    """Carries out the orders of a scheduler half."""

    def __init__(self, client: Client, namespace: bytes, *, chunk_tokens: int, block_tokens: int, blocks: int) -> None:
        pool_bytes = blocks * PAGE_BYTES
        spec = CacheSpec(
            name="bench-connector",
            namespace=b"",
            chunk_tokens=chunk_tokens,
            buffers=[HostBuffer(create_memfd("bench-pool", pool_bytes), pool_bytes)],
            groups=[
                full_group(
                    block_tokens=block_tokens,
                    blocks=blocks,
                    regions=[RegionRun(0, 0, 1, pool_bytes, PAGE_BYTES, PAGE_BYTES)],
                )
            ],
        )
        self._worker = Worker(client, rank=0, event=lambda: None, log=log)
        named: Future[bytes] = Future()
        named.set_result(namespace)
        self._worker.register(spec, named)

    def carry_out(self, orders: Sequence[RetrieveOrder | StoreOrder]) -> list[Report]:
        """Carries out orders, and waits until all have succeeded."""
        retrieves = [order for order in orders if isinstance(order, RetrieveOrder)]
        stores = [order for order in orders if isinstance(order, StoreOrder)]
        self._worker.begin(retrieves, stores)
        self._worker.computed()
        due_s, reports = time.monotonic() + JOBS_S, list[Report]()
        while len(reports) < len(orders):
            time.sleep(POLL_S)
            assert time.monotonic() < due_s, orders
            reports += self._worker.take_ended().reports
        short = [report for report in reports if report.result.why]
        assert not short, short
        return reports
