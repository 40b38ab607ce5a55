"""A test bench for kvclient.offload: small odd shapes, a clock, one-line answers, tables of distinct block ids."""

from kvclient.offload.decide import Offload
from kvclient.offload.values import (
    Group,
    LookupOrder,
    Options,
    RetrieveEnd,
    RetrieveOrder,
    Side,
    StoreEnd,
    StoreOrder,
)
from kvclient.values import RECOVERING, Found, Lease, RetrieveResult, StoreResult
from kvserver.wire.messages import KEY_BYTES

CHUNK = 12
BLOCK = 4
PER_CHUNK = CHUNK // BLOCK
NULL = 0
FULL = Group(BLOCK)


def keys_of(chunks: int, stream: int = 1) -> bytes:
    return b"".join(bytes([stream, index % 256, index // 256]).ljust(KEY_BYTES, b"k") for index in range(chunks))


def table(blocks: int, first_id: int = 100) -> list[int]:
    return list(range(first_id, first_id + blocks))


class Desk:
    """Offload, with a clock that only the test moves."""

    def __init__(self, *, groups: tuple[Group, ...] = (FULL,), chunk_tokens: int = CHUNK, **options: object) -> None:
        self.options = Options(chunk_tokens=chunk_tokens, groups=groups, null_block=NULL, **options)  # type: ignore[arg-type]
        self.offload = Offload(self.options)
        self.now_s = 1000.0
        self.leases = 0

    def begin(
        self,
        request: str = "r",
        *,
        tokens: int,
        chunks: int | None = None,
        reads: bool = True,
        side: Side = "",
        handed_tokens: int | None = None,
    ) -> None:
        chunks = tokens // self.options.chunk_tokens if chunks is None else chunks
        keys = keys_of(chunks)
        self.offload.begin(request, tokens=tokens, keys=keys, reads=reads, side=side, handed_tokens=handed_tokens)

    def match(self, request: str = "r", *, tokens: int, hbm: int = 0) -> int | None:
        return self.offload.match(request, tokens=tokens, hbm_tokens=hbm, now_s=self.now_s)

    def lookup(self) -> LookupOrder:
        (order,) = self.offload.take_lookups()
        return order

    def answer(
        self,
        chunks: int,
        *,
        order: LookupOrder | None = None,
        why: str = "",
        ttl_s: float = 30.0,
        on_disk: int = 0,
        coming: int = 0,
        awaited: int = 0,
    ) -> Lease | None:
        """Answers as the server would: a lease, if as many chunks are there, or awaited, as were wanted at least."""
        order = order if order is not None else self.lookup()
        lease = None
        if chunks + awaited >= max(1, order.chunks_wanted_min) and why in {"", RECOVERING}:
            self.leases += 1
            lease = Lease(self.leases, chunks, 7, self.now_s + ttl_s, on_disk, awaited)
        producer = "other" if awaited else ""
        self.offload.found(order.number, Found(chunks, lease, why, coming, awaited, producer))
        return lease

    def admit(self, request: str = "r", *, tokens: int, hbm: int = 0, found: int = 0) -> None:
        """Takes a request up to its admission; it computes all but its hbm tokens, whatever the server found."""
        self.begin(request, tokens=tokens)
        self.match(request, tokens=tokens, hbm=hbm)
        for order in self.offload.take_lookups():
            self.answer(found, order=order)
        self.offload.admitted(request, hbm_tokens=hbm)

    def retrieving(
        self,
        request: str = "r",
        *,
        tokens: int,
        hbm: int = 0,
        found: int,
        tables: list[list[int]] | None = None,
        on_disk: int = 0,
    ) -> RetrieveOrder:
        """Takes a request up to waiting for its retrieve."""
        self.begin(request, tokens=tokens)
        assert self.match(request, tokens=tokens, hbm=hbm) is None
        self.answer(found, on_disk=on_disk)
        assert self.match(request, tokens=tokens, hbm=hbm)
        order = self.offload.allocated(
            request, hbm_tokens=hbm, tables=tables or [table(-(-tokens // BLOCK))] * len(self.options.groups)
        )
        assert order is not None
        return order

    def stored(self, request: str = "r", *, tokens: int, blocks: int = 500) -> StoreOrder | None:
        """The order for storing, after a step that computes up to `tokens`."""
        if not self.offload.computed(request, tokens, self.now_s):
            return None
        return self.offload.store(request, [table(blocks)] * len(self.options.groups))

    def retrieve_ends(
        self, order: RetrieveOrder, why: str = "", rank: int = 0, seconds: float = 0.0
    ) -> RetrieveEnd | None:
        result = RetrieveResult(not why, 0 if why else 640, why)
        return self.offload.retrieve_ended(order.job, rank, result, seconds=seconds)

    def store_ends(
        self, order: StoreOrder, chunks: int | None = None, why: str = "", rank: int = 0, seconds: float = 0.0
    ) -> StoreEnd | None:
        chunks = order.chunks if chunks is None else chunks
        result = StoreResult(chunks, chunks, 64 * chunks, why)
        return self.offload.store_ended(order.job, rank, result, seconds=seconds)


def span(order: StoreOrder | None) -> tuple[int, int] | None:
    """The chunks of a store, as [first, end)."""
    return None if order is None else (order.first_chunk, order.first_chunk + order.chunks)
