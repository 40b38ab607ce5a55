"""The scheduler half of the vLLM connector, with a fake server and a fake block pool."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from kvclient.offload.job_ends import Report
from kvclient.offload.values import Group, Options, RetrieveOrder, StoreOrder
from kvclient.transport.inquiries import Answered
from kvclient.values import Found, Lease, PledgeResult, StoreResult
from kvclient.vllm.answers import Answers
from kvclient.vllm.events import RouterEvents
from kvclient.vllm.keys import Keyer
from kvclient.vllm.scheduler import Scheduled, Scheduler
from kvclient.vllm.transfer_params import TransferParams
from kvserver.errors import RequestError
from kvserver.wire.messages import KEY_BYTES

BLOCK, CHUNK = 4, 12
NAMESPACE = b"n" * 32


class Server:
    """Stands in for Client and its Inquiries. Answers when the scheduler polls, or when it waits."""

    def __init__(self) -> None:
        self.connected = True
        self.held: set[bytes] = set()
        self.asked = 0
        self.waited = 0
        self.leased = 0
        self.chunks_on_disk = 0
        """Number of chunks on disk at the end of each prefix that a lookup finds."""
        self.coming = 0
        """Chunks after those that a remote store may bring."""
        self.awaited = 0
        """Chunks after those that another engine computes."""
        self.may_wait = False
        """Whether the last lookup could wait."""
        self.pledges: dict[int, bytes] = {}
        """Pledges that were not taken back -> their keys."""
        self.released: list[int] = []
        self.closed = False
        self.refusal: RequestError | None = None
        self.is_slow = False
        """Answers only a scheduler that waits."""
        self.is_late = False
        """Does not answer a scheduler that waits, either."""
        self._questions: list[tuple[int, bytes, int]] = []

    def inquiries(self) -> "Server":
        return self

    def __len__(self) -> int:
        return len(self._questions)

    @property
    def ready(self) -> bool:
        return bool(self._questions) and not self.is_slow

    def ask(
        self, number: int, namespace: bytes, keys: bytes, *, chunks_wanted_min: int, may_wait: bool = False
    ) -> None:
        assert namespace == NAMESPACE
        self.asked += 1
        self.may_wait = may_wait
        self._questions.append((number, keys, chunks_wanted_min))

    def take(self) -> list[Answered]:
        if self.is_slow:
            return []
        asked, self._questions = self._questions, []
        return [Answered(number, self._found(keys, wanted), self.refusal) for number, keys, wanted in asked]

    def wait(self, due_s: float) -> None:
        self.waited += 1
        self.is_slow = self.is_late
        while self.is_late and time.monotonic() < due_s:
            pass

    def _found(self, keys: bytes, chunks_wanted_min: int) -> Found:
        if self.refusal is not None:
            return Found(0, None, self.refusal.code)
        if not self.connected:
            return Found(0, None, "not-connected")
        chunks = 0
        while keys[chunks * KEY_BYTES : (chunks + 1) * KEY_BYTES] in self.held:
            chunks += 1
        awaited = self.awaited if self.may_wait else 0
        if chunks + awaited < max(1, chunks_wanted_min):
            return Found(chunks, None, coming=self.coming)
        self.leased += 1
        lease = Lease(self.leased, chunks, 1, float("inf"), min(chunks, self.chunks_on_disk), awaited)
        return Found(chunks, lease, coming=self.coming, awaited=awaited)

    def pledge(self, namespace: bytes, keys: bytes) -> PledgeResult:
        assert namespace == NAMESPACE
        self.leased += 1
        self.pledges[self.leased] = keys
        return PledgeResult(self.leased, 0, len(keys) // KEY_BYTES, 1)

    def unpledge(self, pledge: PledgeResult) -> None:
        del self.pledges[pledge.number]

    def release(self, lease: Lease) -> None:
        self.released.append(lease.number)

    def close(self) -> None:
        self.closed = True


class Pool:
    """vLLM's BlockPool, as far as pins and events go."""

    hash_block_size = BLOCK

    def __init__(self) -> None:
        self.cached_block_hash_to_block = object()
        self.blocks = [SimpleNamespace(block_id=block) for block in range(100)]
        self.pins: Counter[int] = Counter()
        self.cached: set[bytes] = set()

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[Any] | None:
        assert groups == [0]
        return [self.blocks[0]] if block_hash in self.cached else None

    def touch(self, blocks: Sequence[Any]) -> None:
        self.pins.update(block.block_id for block in blocks)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        self.pins.subtract(block.block_id for block in ordered_blocks)
        assert min(self.pins.values()) >= 0


def request(name: str = "r", tokens: int = 41, *, first: int = 0, **more: object) -> Any:
    ids = list(range(first, first + tokens))
    fields: dict[str, object] = {
        "request_id": name,
        "all_token_ids": ids,
        "num_tokens": tokens,
        "num_prompt_tokens": tokens,
        "num_computed_tokens": 0,
        "prompt_token_ids": list(ids),
        "block_hashes": [block.to_bytes(32, "big") for block in range(tokens // BLOCK)],
        "lora_request": None,
        "cache_salt": None,
    }
    return SimpleNamespace(**{**fields, **more})


class Bench:
    def __init__(
        self,
        *,
        ranks: int = 1,
        ahead_max: int = 32,
        steps_ahead: int = 0,
        recovers: bool = True,
        step_wait_s: float = 0.0,
        hashes: bool = False,
        retrieves: bool = True,
        coming_wait_s: float = 0.0,
        await_others: bool = False,
        await_wait_s: float = 0.0,
        await_producer_s: float = 0.0,
        await_tokens_max: int = 0,
        stores: bool = True,
        events: RouterEvents | None = None,
        answers: Answers | None = None,
        transfer_params: TransferParams | None = None,
    ) -> None:
        self.server, self.pool = Server(), Pool()
        options = Options(
            chunk_tokens=CHUNK,
            groups=(Group(BLOCK),),
            ranks=ranks,
            engine_steps_back=True,
            null_block=0,
            ahead_max=ahead_max,
            stores=stores,
            retrieves=retrieves,
            coming_wait_s=coming_wait_s,
            await_others=await_others,
            await_wait_s=await_wait_s,
            await_producer_s=await_producer_s,
            await_tokens_max=await_tokens_max,
        )
        keyer = Keyer(chunk_tokens=CHUNK, hash_block_tokens=BLOCK if hashes else 0)
        server: Any = self.server
        self.over: list[tuple[int, int]] = []
        """(job, rank) of stores that have ended and were not reported."""
        self.half = Scheduler(
            server,
            options,
            keyer,
            store_output=True,
            steps_ahead=steps_ahead,
            recovers=recovers,
            step_wait_s=step_wait_s,
            stores_over=lambda: self.over,
            events=events,
            answers=answers,
            transfer_params=transfer_params,
        )
        self.half.use_pool(self.pool)
        self.half.use_namespace({NAMESPACE})
        self.keyer = keyer
        self.table = list(range(10, 30))

    def hold(self, asked: Any, chunks: int) -> None:
        keys = self.keyer.keys(asked, extra=self.keyer.extra(asked), parent=b"", first_chunk=0)
        self.server.held = {keys[place * KEY_BYTES : (place + 1) * KEY_BYTES] for place in range(chunks)}

    def keys_of(self, asked: Any) -> set[bytes]:
        keys = self.keyer.keys(asked, extra=b"", parent=b"", first_chunk=0)
        return {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}

    def admit(self, asked: Any, hbm_tokens: int = 0) -> int:
        """Calls match(), then what vLLM's scheduler calls after it."""
        tokens, between_steps = self.half.match(asked, hbm_tokens)
        assert tokens is not None
        assert between_steps == (tokens > 0)
        self.half.allocated(asked, [self.table], tokens)
        return tokens

    def step(self, **computed: int) -> tuple[tuple[RetrieveOrder, ...], tuple[StoreOrder, ...]]:
        return self.half.step(
            [Scheduled(name, 0, tokens) for name, tokens in computed.items()], lambda name: [self.table]
        )


def stored(order: StoreOrder, chunks: int, rank: int = 0) -> Report:
    return Report(order.job, rank, StoreResult(chunks, chunks, 1, "" if chunks else "full"), 0.0)
